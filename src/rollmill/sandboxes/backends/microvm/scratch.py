"""Directories for files on their way to a disk, which whoever comes next removes if their maker was killed."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollmill.sandboxes.disk_records import mark_of

_PREFIX = "rollmill-machine"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-.+")


@contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """Make a directory, named after this process, and remove it at the end.

    Args:
        parent: where; `None`: the system's directory for temporary files.
    """
    mark = mark_of(os.getpid())
    ticks = 0 if mark is None else mark.started_ticks
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}-{os.getpid()}-{ticks}-", dir=parent) as made:
        yield Path(made)


def tidy(parent: Path | None = None) -> tuple[str, ...]:
    """Remove those whose makers have ended; return their names. Blocks: call it in a thread."""
    removed: list[str] = []
    for path in Path(parent or tempfile.gettempdir()).glob(f"{_PREFIX}-*"):
        named = _NAME.fullmatch(path.name)
        if named is None or not _is_ours(path):
            continue
        mark = mark_of(int(named[1]))
        if mark is None or mark.started_ticks != int(named[2]):
            shutil.rmtree(path, ignore_errors=True)  # what stays is tried again by the next one
            removed.append(path.name)
    return tuple(removed)


def _is_ours(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
