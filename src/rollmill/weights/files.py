"""Files that appear whole or not at all, and JSON files that notice damage.

Decides nothing; used by the model repository and by checkpoints. No torch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollmill.errors import WeightError
from rollmill.file_lock import take_lock

PARTIAL_SUFFIX = ".partial"
LOCK_LIMIT_S = 30.0
"""For a few file operations of another process; the longest makes the file of a whole version."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def writing(what: str, *, into: Path, kept: str) -> Iterator[None]:
    """Raise what the operating system says of a write in words, with the free bytes.

    Args:
        what: is written.
        into: folder on the disk in question.
        kept: what is still whole, as a sentence.

    Raises:
        WeightError: for any `OSError` of the block.
    """
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(next(place for place in (into, *into.parents) if place.exists())).free
        why = "the disk is full" if error.errno in _FULL else "the disk refuses"
        raise WeightError(
            f"{what} cannot be written to {into}: {why} ({error.strerror or error}; {free} bytes free). {kept} "
            "Free some space or check the disk, then resume."
        ) from error


def fsync_directory(directory: Path) -> None:
    """Make renames inside a folder durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_file(path: Path) -> None:
    """Make the content of a file durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one, never a part.

    Raises:
        WeightError: if the disk is full or refuses.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with writing(path.name, into=path.parent, kept="What was there before is whole."):
        try:
            with partial.open("wb") as handle:
                handle.write(data)
                handle.flush()
                os.fsync(handle.fileno())
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        fsync_directory(path.parent)


def write_sealed_json(path: Path, content: dict[str, Any]) -> None:
    """Write readable JSON with the sha256 of its content, whole or not at all."""
    content = json.loads(json.dumps(content, allow_nan=False))  # digest what a reader will see: keys are strings
    sealed = {"sha256": _digest(content), "content": content}
    write_whole(path, json.dumps(sealed, indent=2, allow_nan=False).encode() + b"\n")


def read_sealed_json(path: Path) -> dict[str, Any]:
    """Return the content of a file that `write_sealed_json` wrote.

    Raises:
        WeightError: if it is missing, cut short, or was changed since.
    """
    try:
        sealed = json.loads(path.read_bytes())
        content, said = sealed["content"], sealed["sha256"]
    except FileNotFoundError as error:
        raise WeightError(f"{path} does not exist.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise WeightError(
            f"{path} is damaged: {error}. It was cut short or edited. Restore it from a copy, or delete what it "
            "describes."
        ) from error
    found = _digest(content)
    if found != said:
        raise WeightError(
            f"{path} is damaged: its content has sha256 {found[:16]}..., written was {str(said)[:16]}... It was edited "
            "or the disk changed it. Restore it from a copy, or delete what it describes."
        )
    return content


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Return the sha256 of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def check_space(directory: Path, *, needed_bytes: int, what: str, action: str) -> None:
    """Refuse to begin a write that cannot end.

    Raises:
        WeightError: with both numbers.
    """
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise WeightError(
            f"{what} needs {needed_bytes} bytes in {directory}, which has {free} bytes free. {action} "
            "Nothing was written."
        )


@contextlib.contextmanager
def locked(path: Path, *, limit_s: float = LOCK_LIMIT_S) -> Iterator[None]:
    """Take turns with other processes for a few file operations; the kernel frees the lock if its holder dies.

    Raises:
        WeightError: naming the holder, if it did not let go in time: it is stopped, or its disk hangs.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not take_lock(handle, limit_s=limit_s):
            holder = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
            raise WeightError(
                f"process {holder} has held {path} for {limit_s:g} s, which it needs for a few file operations. Is it "
                "stopped, or does its disk hang? Nothing was changed."
            )
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)
