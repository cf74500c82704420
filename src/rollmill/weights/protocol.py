"""The model repository: the one publish path of weights.

Decides nothing about when to publish or load. A publication is visible only when its manifest has been
renamed into place; a load is verified by digest. Versions only rise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from rollmill.types import Canary, WeightManifest

if TYPE_CHECKING:
    import torch


class ModelRepository(Protocol):
    """Published weights with manifests. All methods block."""

    def publish(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        optimizer_step: int,
        parent: int | None,
        history_id: str,
        training_dtype: str,
        canary: Canary | None,
        at_s: float,
    ) -> WeightManifest:
        """Write tensors, then commit the manifest under max + 1.

        Raises:
            WeightError: if the space is full or nothing was given; no version appears then.
        """
        ...

    def manifests(self) -> Sequence[WeightManifest]:
        """Return all manifests, ascending; those whose tensors are gone too."""
        ...

    def manifest(self, policy_version: int) -> WeightManifest:
        """Return the manifest of one version."""
        ...

    def latest(self) -> WeightManifest | None:
        """Return the newest manifest, or `None` before the first publication."""
        ...

    def load(self, policy_version: int) -> dict[str, torch.Tensor]:
        """Return the tensors (memory-mapped where possible), each checked against its digest.

        Raises:
            WeightMismatch: if a digest differs, with both digests.
            WeightError: if the version is unknown or was retired.
        """
        ...

    def hold(self, policy_version: int, *, owner: str) -> None:
        """Keep a version's tensors from being retired until `release`."""
        ...

    def release(self, policy_version: int, *, owner: str) -> None:
        """End a hold."""
        ...

    def retire(self) -> Sequence[int]:
        """Delete tensors of versions that are neither among the newest kept nor held; return them."""
        ...
