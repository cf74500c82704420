"""Folders of this process alone, outside any run directory: for sockets, whose paths must be short, and shared memory.

Whoever is killed leaves its folder. The next one of the same kind removes the folders whose process is gone. Decides
nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from rollmill.weights.holds import started_at_s

_OWNER = ".owner.json"


def own_folder(kind: str, *, parent: Path | None = None) -> Path:
    """Make a folder that only this user can enter; remove those of this kind that dead processes of this user left.

    Args:
        kind: of the folder, for example `vllm`.
        parent: where; the folder for temporary files if `None`.
    """
    place = Path(tempfile.gettempdir()) if parent is None else parent
    prefix = f"rollmill-{kind.lower()}-"
    for folder in place.glob(f"{prefix}*"):
        if _is_left_behind(folder):
            shutil.rmtree(folder, ignore_errors=True)
    own = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    (own / _OWNER).write_text(json.dumps({"pid": os.getpid(), "started_at_s": started_at_s(os.getpid())}))
    return own


def _is_left_behind(folder: Path) -> bool:
    """Return whether its owner is known and gone; a folder without a word of its owner may just be made."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        owner = json.loads((folder / _OWNER).read_text())
        return started_at_s(owner["pid"]) != owner["started_at_s"]
    return False
