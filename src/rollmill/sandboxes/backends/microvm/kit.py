"""What a machine boots: a kernel, a small first file system, and a disk with the agent. Made once, for all templates.

Kernel, modules and busybox come from the distribution's packages. Nothing is downloaded, and nothing of the host's is
shown to a machine but what is put on its disks here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollmill.errors import SandboxError
from rollmill.sandboxes.backends.microvm import disks, interpreter, modules
from rollmill.sandboxes.backends.microvm.cpio import Archive
from rollmill.sandboxes.backends.microvm.scratch import scratch

PACKAGES = "linux-image-cloud-amd64 busybox-static"
MODULES = ("virtio_pci", "virtio_mmio", "virtio_blk", "virtio_console", "vmw_vsock_virtio_transport", "overlay")
_AGENT_DIRECTORIES = ("proc", "sys", "dev", "tmp", "image", "run", "etc", "mnt")
# What else a root has is made for each sandbox, in its own layer.
_STANDIN_DIRECTORIES = ("bin", "sbin", "usr/bin", "usr/sbin", "etc")
_NUMBERS = re.compile(r"\d+")
_INIT = """#!/bin/busybox sh
export PATH=/bin
busybox mount -t proc proc /proc
busybox mount -t devtmpfs dev /dev
for one in {modules}; do busybox insmod /modules/$one || busybox echo "rollmill: $one was not loaded"; done
i=0
while [ ! -b /dev/vda ] && [ $i -lt 100 ]; do busybox usleep 50000; i=$((i+1)); done
busybox mount -t ext4 -o ro /dev/vda /base || busybox echo "rollmill: there is no disk with the agent"
busybox umount /dev
busybox umount /proc
exec busybox switch_root /base /{python}/bin/python3 -I -S /{boot}
"""
# What these do is the machine's or the network's affair, and never works in a sandbox.
_LEFT_OUT = frozenset({"init", "linuxrc", "halt", "poweroff", "reboot", "busybox"})


class Kit(msgspec.Struct, frozen=True, kw_only=True):
    """What every machine is booted with.

    Attributes:
        release: name of the kernel.
        kernel: descriptor of the kernel's image; a copy, because who runs machines may not read the original.
        initrd: descriptor of the first file system, an archive.
        agent_disk: descriptor of the disk with the agent and its interpreter.
        standin_disk: descriptor of the image that stands in for the host's own.
    """

    release: str
    kernel: int
    initrd: int
    agent_disk: int
    standin_disk: int

    def close(self) -> None:
        """Let the files go."""
        for one in (self.kernel, self.initrd, self.agent_disk, self.standin_disk):
            os.close(one)


def find_kernel(boot: Path = Path("/boot")) -> Path | None:
    """Return the newest kernel whose modules are there, those for clouds before others, `None` if there is none."""
    found = [one for one in boot.glob("vmlinuz-*") if modules_of(one).is_dir()]
    return max(found, key=_preference, default=None)


def _preference(path: Path) -> tuple[bool, list[int], str]:
    return "cloud" in path.name, [int(one) for one in _NUMBERS.findall(path.name)], path.name


def modules_of(kernel: Path) -> Path:
    """Return where the modules of a kernel are."""
    return Path("/lib/modules") / kernel.name.removeprefix("vmlinuz-").removeprefix("vmlinux-")


def missing(kernel: Path | None) -> tuple[str, ...]:
    """Return, in words, what is not here that a machine is made of."""
    told = []
    chosen = find_kernel() if kernel is None else kernel
    if chosen is None:
        told.append("no kernel in /boot with its modules in /lib/modules: apt-get install linux-image-cloud-amd64")
    elif not os.access(chosen, os.R_OK):
        told.append(f"the kernel {chosen} cannot be read by this user")
    elif not (modules_of(chosen) / "modules.dep").is_file():
        told.append(f"the kernel {chosen} has no modules in {modules_of(chosen)}")
    if _busybox() is None:
        told.append("busybox is not installed: apt-get install busybox-static")
    if disks.find_program() is None:
        told.append("mke2fs is not installed: apt-get install e2fsprogs")
    return tuple(told)


def make(*, kernel: Path | None, python: str) -> Kit:
    """Make what a machine boots. Blocks: call it in a thread.

    Raises:
        SandboxError: if something is not here; the message says what and how to get it.
    """
    if problems := missing(kernel):
        raise SandboxError("no machine can be made here: " + "; ".join(problems))
    chosen = find_kernel() if kernel is None else kernel
    busybox = _busybox()
    assert chosen is not None  # just looked for
    assert busybox is not None
    opened: list[int] = []
    try:
        opened.append(_in_memory("kernel", chosen.read_bytes()))
        opened.append(_in_memory("initrd", _initrd(chosen, busybox)))
        with scratch() as place:
            opened.append(disks.pack(_agent_tree(python, place / "agent")))
            opened.append(disks.pack(_standin_tree(busybox, place / "standin")))
    except BaseException:
        for one in opened:
            os.close(one)
        raise
    image, initrd, agent_disk, standin_disk = opened
    return Kit(release=chosen.name, kernel=image, initrd=initrd, agent_disk=agent_disk, standin_disk=standin_disk)


def _busybox() -> str | None:
    found = shutil.which("busybox", path="/bin:/usr/bin")
    if found is None:
        return None
    return None if interpreter.loader_of(Path(found).read_bytes()) else found


def _in_memory(name: str, data: bytes) -> int:
    made = os.memfd_create(name, os.MFD_CLOEXEC)
    with os.fdopen(os.dup(made), "wb") as stream:
        stream.write(data)
    return made


def _initrd(kernel: Path, busybox: str) -> bytes:
    base = modules_of(kernel)
    known = modules.parse((base / "modules.dep").read_text())
    built_in = (base / "modules.builtin").read_text()
    paths = modules.order(MODULES, modules=known, built_in=built_in)
    archive = Archive()
    for name in ("bin", "dev", "proc", "base", "modules"):
        archive.directory(name)
    archive.device("dev/console", major=5, minor=1)
    archive.file("bin/busybox", Path(busybox).read_bytes(), mode=0o755)
    for path in paths:
        archive.file(f"modules/{os.path.basename(path)}", _module(base / path))
    names = " ".join(os.path.basename(path) for path in paths)
    init = _INIT.format(modules=names, python=interpreter.HOME, boot=interpreter.BOOT)
    archive.file("init", init.encode(), mode=0o755)
    return archive.close()


def _module(path: Path) -> bytes:
    if path.suffix != ".ko":
        raise SandboxError(f"the kernel's module {path} is compressed, which is not read here; use Debian 12's kernel")
    return path.read_bytes()


def _agent_tree(python: str, root: Path) -> Path:
    _directories(root, _AGENT_DIRECTORIES)
    interpreter.install(python, root)
    return root


def _standin_tree(busybox: str, root: Path) -> Path:
    """Make an image of busybox alone."""
    _directories(root, _STANDIN_DIRECTORIES)
    shutil.copy(busybox, root / "bin" / "busybox")
    (root / "bin" / "busybox").chmod(0o755)
    for name in _applets(busybox):
        (root / "bin" / name).symlink_to("busybox")
    return root


def _applets(busybox: str) -> Sequence[str]:
    told = subprocess.run([busybox, "--list"], capture_output=True, check=True, timeout=10, stdin=subprocess.DEVNULL)
    return [one for one in told.stdout.decode("ascii").split() if one not in _LEFT_OUT]


def _directories(root: Path, names: Sequence[str]) -> None:
    root.mkdir()
    root.chmod(0o755)
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(0o1777 if name.endswith("tmp") else 0o755)
