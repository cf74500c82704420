"""Where the tensors of published weights lie: shared memory, or files beside the manifests.

Decides which of the two has room. No torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Literal

from rollmill.errors import WeightError

Transport = Literal["shm", "file"]

SHARED_MEMORY = Path("/dev/shm")
_SLACK_BYTES = 64 << 20
_OWNER_FILE = "repository.txt"


def resolve_transport(
    requested: Literal["auto", "shm", "file"],
    *,
    bytes_needed: int,
    versions: int = 3,
    shared_memory: Path = SHARED_MEMORY,
) -> Transport:
    """Return where to put the tensors: as asked, or shared memory where it has room for all kept versions.

    Args:
        bytes_needed: size of one version.
        versions: versions that exist at once.

    Raises:
        WeightError: if shared memory was asked for and there is none.
    """
    if requested == "file":
        return "file"
    usable = shared_memory.is_dir() and os.access(shared_memory, os.W_OK)
    if requested == "shm":
        if not usable:
            raise WeightError(
                f"weights.transport is 'shm', but {shared_memory} is not a writable folder here. "
                "Use weights.transport = 'file', or mount a memory file system there."
            )
        return "shm"
    if usable and shutil.disk_usage(shared_memory).free >= versions * bytes_needed + _SLACK_BYTES:
        return "shm"
    return "file"


def shared_folder(root: Path, *, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Return the folder in shared memory that belongs to a repository."""
    digest = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
    return shared_memory / f"rollmill-{digest}"


def make_shared_folder(root: Path, *, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Make a repository's folder in shared memory, readable for this user alone, and note whose it is."""
    folder = shared_folder(root, shared_memory=shared_memory)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise WeightError(
            f"{folder} belongs to another user. Use weights.transport = 'file', or have its owner remove it."
        )
    owner = folder / _OWNER_FILE
    if not owner.exists():
        owner.write_text(f"{root.resolve()}\n")
    return folder


def sweep_shared_memory(*, shared_memory: Path = SHARED_MEMORY) -> tuple[Path, ...]:
    """Remove folders in shared memory whose repository is gone (a run that was killed, then deleted); return them."""
    removed: list[Path] = []
    for owner in sorted(shared_memory.glob(f"rollmill-*/{_OWNER_FILE}")):
        if owner.stat().st_uid == os.getuid() and not Path(owner.read_text().strip()).exists():
            shutil.rmtree(owner.parent)
            removed.append(owner.parent)
    return tuple(removed)
