"""Layers as one read-only file each, mounted at first use: no unpacked tree on the disk, one inode for each layer.

Whether it works here is found out by doing it: `mkfs.erofs` is there, and the kernel mounts a file that it made.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from rollmill.sandboxes.guest import kernel
from rollmill.sandboxes.images.refusals import Refusal, refused
from rollmill.sandboxes.images.tree_files import remove_tree
from rollmill.sandboxes.images.work import Work

FILE = "layer.erofs"
_PROGRAM = "mkfs.erofs"
_MS_RDONLY = 1
_LONGEST_S = 3600.0
_PROBE_S = 20.0
_FLAGS = _MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV


def wanted(form: str, scratch: Path) -> bool:
    """Return whether to make layers in this form.

    Raises:
        ImageError: if it was asked for and does not work here.
    """
    if form == "tree":
        return False
    why_not = missing(scratch)
    if why_not and form == "erofs":
        raise refused(Refusal.MACHINE, f"layers cannot be kept as erofs here: {why_not}. Use the form `tree`.")
    return not why_not


def missing(scratch: Path) -> str:
    """Return why erofs does not work here, empty if it does; `scratch` takes the files of the trial."""
    if os.geteuid() != 0:
        return "only root mounts it"
    program = shutil.which(_PROGRAM)
    if program is None:
        return f"{_PROGRAM} is not installed (package erofs-utils)"
    return _trial(program, scratch / "trial")


def _trial(program: str, base: Path) -> str:
    """Make and mount one."""
    (base / "in").mkdir(parents=True)
    (base / "at").mkdir()
    try:
        (base / "in" / "file").write_bytes(b"x")
        _run([program, "--quiet", os.fspath(base / FILE), os.fspath(base / "in")], limit_s=_PROBE_S)
        kernel.mount(os.fspath(base / FILE), os.fspath(base / "at"), kind="erofs", flags=_FLAGS)
        kernel.detach(os.fspath(base / "at"))
    except (OSError, subprocess.SubprocessError) as error:
        return f"a trial failed: {error}"
    finally:
        remove_tree(base)
    return ""


def _run(command: list[str], *, limit_s: float) -> None:
    done = subprocess.run(command, capture_output=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        told = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-400:]
        raise OSError(0, f"{command[0]} ended with {done.returncode}: {told}")


def pack(made: Path, *, work: Work) -> int:
    """Turn the tree `root` of an unpacked layer into one file; return its size."""
    program = shutil.which(_PROGRAM) or _PROGRAM
    work.enter("pack the layer as erofs")
    try:
        _run(
            [program, "--quiet", os.fspath(made / FILE), os.fspath(made / "root")], limit_s=work.left_s(most=_LONGEST_S)
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise refused(Refusal.MACHINE, f"a layer cannot be packed as erofs: {error}. Use the form `tree`.") from error
    remove_tree(made / "root")
    return (made / FILE).stat().st_size


def mount_once(file: Path, target: Path) -> None:
    """Mount a layer, unless it is."""
    target.mkdir(mode=0o700, exist_ok=True)
    if not is_mounted(target):
        kernel.mount(os.fspath(file), os.fspath(target), kind="erofs", flags=_FLAGS)


def is_mounted(target: Path) -> bool:
    """Return whether something is mounted there."""
    try:
        return target.stat().st_dev != target.parent.stat().st_dev
    except FileNotFoundError:
        return False


def unmount(target: Path) -> None:
    """Unmount a layer; sandboxes that use it have a mount of their own."""
    while is_mounted(target):
        kernel.detach(os.fspath(target))
    target.rmdir()
