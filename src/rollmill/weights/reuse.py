"""Tensor files in shared memory that are written again instead of made anew.

The first touch of a new page costs more than the copy into it: a publication into a retired file takes a third of the
time. Such a file may be overwritten only when nobody has it mapped any more. Readers hold a shared lock of the kernel
on the open file for as long as their mapping lives; a writer takes the file only if it gets the lock for itself. A
process that dies lets go of its locks. Decides nothing about versions. No torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
from pathlib import Path

SPARE_NAME = "spare.safetensors"


def open_to_read(path: Path) -> io.FileIO:
    """Open a published file with the shared lock; whoever maps it keeps the lock until the mapping is gone.

    Raises:
        FileNotFoundError: if it is not there, or was retired while it was opened.
    """
    handle = path.open("rb", buffering=0)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # Retired in between, the file has another name by now; its content may be another version's already.
        if os.fstat(handle.fileno()).st_ino != path.stat().st_ino:
            raise FileNotFoundError(f"{path} was retired while it was opened")
    except BlockingIOError as error:
        handle.close()
        raise FileNotFoundError(f"{path} was retired and is being written again") from error
    except BaseException:
        handle.close()
        raise
    return handle


def retire_file(path: Path) -> None:
    """Remove a tensor file from its name; the memory of one such file is kept for the next publication."""
    spare = path.with_name(SPARE_NAME)
    if path.stat().st_nlink > 1 or spare.exists():  # another version has the same file, or there is a spare already
        path.unlink()
    else:
        path.rename(spare)


def take_spare(partial: Path) -> io.FileIO | None:
    """Return the spare file of a folder under the name `partial`, locked for writing, or `None` if there is none."""
    spare = partial.with_name(SPARE_NAME)
    try:
        handle = spare.open("r+b", buffering=0)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        spare.rename(partial)
    except BlockingIOError:  # a reader is not done with it: its memory is its own from now on
        handle.close()
        spare.unlink()
        return None
    except BaseException:
        handle.close()
        raise
    return handle


def reserve_spare(folder: Path, *, nbytes: int) -> bool:
    """Make a spare file of this size ahead of time if there is none and the space is there; return whether there is."""
    spare = folder / SPARE_NAME
    if spare.exists():
        return True
    if shutil.disk_usage(folder).free < 2 * nbytes:
        return False
    with spare.open("xb", buffering=0) as handle:
        try:
            os.posix_fallocate(handle.fileno(), 0, nbytes)
        except OSError:  # somebody else took the space: the publication will say so if it needs it
            with contextlib.suppress(FileNotFoundError):
                spare.unlink()
            return False
    return True
