"""Memory for weights and KV, which every step reads from end to end: in huge pages, where the kernel has them.

A small batch is bound by how fast weights come from memory. Each page of 4 KiB is looked up on its own, in a virtual
machine through two tables; with pages of 2 MiB products of 8 rows took a third less time, those of 64 a twentieth.
Which pages they are is a wish: without huge ones the same memory works.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from pathlib import Path

import torch

CHUNK_BYTES = 64 << 20
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ALIGNMENT = 64


class HugePages:
    """Room for tensors, cut from large mappings; a mapping goes when the last tensor in it does.

    Args:
        chunk_bytes: of a mapping, unless one tensor needs more.
    """

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def empty(self, numbers: int, *, dtype: torch.dtype) -> torch.Tensor:
        """Return room for so many numbers, at an address that is a multiple of 64; zeros, which nobody should rely on.

        Raises:
            OSError: if there is no memory for it.
        """
        size = numbers * dtype.itemsize
        if size == 0:
            return torch.empty(0, dtype=dtype)
        if self._chunk is None or self._used + size > len(self._chunk):
            self._chunk, self._used = _mapping(max(size, self._chunk_bytes)), 0
        tensor = torch.frombuffer(self._chunk, dtype=dtype, count=numbers, offset=self._used)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return tensor


def zeros(shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in a mapping of their own, whose pages are committed when they are first used.

    Raises:
        OSError: if there is no memory for it.
    """
    numbers = math.prod(shape)
    mapping = _mapping(max(1, numbers * dtype.itemsize))
    return (
        torch.frombuffer(mapping, dtype=dtype, count=numbers).view(shape)
        if numbers
        else torch.zeros(shape, dtype=dtype)
    )


def missing(switch: Path = SWITCH) -> str | None:
    """Return why this machine gives no huge pages and what to do, `None` if it gives them or does not say."""
    try:
        choice = switch.read_text(encoding="ascii")
    except OSError:
        return None
    if "[never]" not in choice:
        return None
    return (
        f"this machine gives no huge pages ({switch} says {choice.strip()}): decoding of 8 to 16 sequences takes a "
        f"fifth to a third longer. As root: echo madvise > {switch}"
    )


def _mapping(size: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
