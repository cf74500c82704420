"""Shape checks shared by losses, corrections and KL: the first line of each."""

from __future__ import annotations

import torch

from rollmill.errors import InvariantViolation


def check_flat(**tensors: torch.Tensor) -> None:
    """Check that all tensors are flat and of one length.

    Raises:
        InvariantViolation: if not; a silent broadcast would train on the wrong tokens.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise InvariantViolation(
            f"per-token tensors must be flat and of one length, got {listed}. This is a bug in packing."
        )
