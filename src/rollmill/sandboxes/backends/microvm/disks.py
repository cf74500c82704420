"""Disks of machines: a directory becomes one read-only ext4 file, which lives as long as somebody holds it open.

ext4, because every Debian has its tools and every kernel its driver, and because owners of its files can be mapped for
a sandbox. The file has no name once it is made: nothing is left of it when its holder ends, in whatever way.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from rollmill.errors import ImageError, SandboxError
from rollmill.sandboxes.backends.microvm.scratch import scratch as directory_for

PROGRAM = "mke2fs"
_BLOCK = 4096
_INODE_BYTES = 256
_SPARE_BYTES, _SPARE_SHARE = 4 * 1024**2, 16
_SPARE_INODES = 64
_LONGEST_S = 1800.0
_PLACES = ("/usr/sbin", "/sbin")


def find_program() -> str | None:
    """Return where mke2fs is: often in a directory that is not on a user's PATH."""
    return shutil.which(PROGRAM) or shutil.which(PROGRAM, path=os.pathsep.join(_PLACES))


def pack(directory: Path, *, scratch: Path | None = None) -> int:
    """Return a descriptor of a file with the content of a directory. Blocks: call it in a thread.

    Args:
        directory: owners, modes, links and attributes are kept.
        scratch: where the file takes its room; `None`: the system's directory for temporary files.

    Raises:
        ImageError: if the directory cannot be read or there is no room.
        SandboxError: if the program is missing.
    """
    program = find_program()
    if program is None:
        raise SandboxError("disks of machines are made by mke2fs, which is not installed: apt-get install e2fsprogs")
    directory = directory.resolve()
    size_bytes, inodes = measure(directory)
    with directory_for(scratch) as place:
        path = place / "disk"
        command = [program, "-q", "-t", "ext4", "-b", str(_BLOCK), "-I", str(_INODE_BYTES), "-m", "0",
                   "-O", "^has_journal,^resize_inode", "-N", str(inodes + _SPARE_INODES),
                   "-d", os.fspath(directory), os.fspath(path), f"{room(size_bytes, inodes) // 1024}k"]  # fmt: skip
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_LONGEST_S, stdin=subprocess.DEVNULL,
                           env={"LANG": "C.UTF-8", "PATH": os.pathsep.join(_PLACES)})  # fmt: skip
            path.chmod(0o444)
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode("utf-8", "replace").strip()[-400:]
            raise ImageError(f"{directory} cannot be made a disk: {said}. Is there room in {path.parent}?") from error
        except (OSError, subprocess.SubprocessError) as error:
            raise ImageError(f"{directory} cannot be made a disk: {error}") from error


def measure(directory: Path) -> tuple[int, int]:
    """Return bytes, in whole blocks, and inodes of what is below a directory.

    Raises:
        ImageError: if a part of it cannot be read.
    """
    size_bytes, inodes = _BLOCK, 1
    front = [os.fspath(directory)]
    try:
        while front:
            with os.scandir(front.pop()) as found:
                for entry in found:
                    length = entry.stat(follow_symlinks=False).st_size
                    size_bytes += -(-max(1, length) // _BLOCK) * _BLOCK
                    inodes += 1
                    if entry.is_dir(follow_symlinks=False):
                        front.append(entry.path)
    except OSError as error:
        raise ImageError(f"the layer {directory} cannot be read: {error}") from error
    return size_bytes, inodes


def room(size_bytes: int, inodes: int) -> int:
    """Return how large a file system must be to hold this.

    Example:
        >>> room(0, 0) == 4 * 1024**2
        True
    """
    return size_bytes + size_bytes // _SPARE_SHARE + inodes * _INODE_BYTES * 2 + _SPARE_BYTES
