"""The command line of a machine under QEMU. Pure: what is asked for goes in, words come out.

Everything that QEMU opens is a descriptor that it inherits: memory, disks, sockets, console. So no machine has a name
in any file system, and nothing of one stays there when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

# No more system calls than it needs, once it runs: none that start programs or change who it is.
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_MACHINE = "q35,memory-backend=ram,sata=off,smbus=off,usb=off,graphics=off,vmport=off,hpet=off"
_KERNEL_WORDS = "console=ttyS0 quiet nokaslr panic=-1 random.trust_cpu=on"
_ACCELERATORS = {"kvm": "kvm", "tcg": "tcg,tb-size=32"}
# Five levels of page tables cost an emulated machine time and give it nothing.
_EMULATED = "max,la57=off"
_FIRST_SLOT = 4


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a machine.

    Attributes:
        size_bytes: how much.
        descriptor: of the file that holds it, -1 for memory of the machine's own.
        shared: whether what the machine writes goes to the file; else only the machine sees it.
    """

    size_bytes: int
    descriptor: int = -1
    shared: bool = False


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine starts with; only a machine that is booted looks at it."""

    kernel: int
    initrd: int


class Handles(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptors that a machine inherits; a console of -1 goes nowhere."""

    control: int
    agent: int
    disks: tuple[int, ...]
    console: int = -1

    def all(self, memory: Memory, boot: Boot | None) -> tuple[int, ...]:
        """Return all that must stay open."""
        boots = () if boot is None else (boot.kernel, boot.initrd)
        found = (self.control, self.agent, *self.disks, self.console, memory.descriptor, *boots)
        return tuple(one for one in found if one >= 0)


def kernel_words(*, images: int, line: str = "serial") -> str:
    """Return the command line of the kernel inside."""
    return f"{_KERNEL_WORDS} rollmill.line={line} rollmill.images={images}"


def machine(
    program: str, *, accelerator: str, memory: Memory, handles: Handles, boot: Boot | None, name: str
) -> list[str]:
    """Return how QEMU is started: from a kernel, or, without one, waiting for what was kept of another machine."""
    words = [program, "-name", f"rollmill-{name}", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
    words += ["-sandbox", _SANDBOX, "-M", _MACHINE, "-accel", _ACCELERATORS[accelerator], "-smp", "1"]
    words += ["-cpu", "host" if accelerator == "kvm" else _EMULATED]
    words += ["-object", _memory(memory), "-m", f"{memory.size_bytes // 1024}k"]
    words += ["-chardev", f"socket,id=control,fd={handles.control}", "-mon", "chardev=control,mode=control"]
    words += ["-chardev", f"socket,id=agent,fd={handles.agent}", "-serial", _console(handles.console)]
    words += ["-device", "virtio-serial-pci,addr=0x2", "-device", "virtserialport,chardev=agent,name=rollmill"]
    for number, disk in enumerate(handles.disks):
        words += _disk(number, disk)
    if boot is None:
        return [*words, "-S", "-incoming", "defer"]
    words += ["-kernel", _opened(boot.kernel), "-initrd", _opened(boot.initrd)]
    return [*words, "-append", kernel_words(images=len(handles.disks) - 1)]


def _memory(memory: Memory) -> str:
    if memory.descriptor < 0:
        return f"memory-backend-ram,id=ram,size={memory.size_bytes}"
    share = "on" if memory.shared else "off"
    return f"memory-backend-file,id=ram,size={memory.size_bytes},mem-path={_opened(memory.descriptor)},share={share}"


def _console(descriptor: int) -> str:
    return "null" if descriptor < 0 else f"file:{_opened(descriptor)}"


def _disk(number: int, descriptor: int) -> Sequence[str]:
    node = f"disk{number}"
    opened = f"driver=file,filename={_opened(descriptor)},read-only=on,locking=off"
    return ("-blockdev", f"{opened},node-name={node}",
            "-device", f"virtio-blk-pci,drive={node},addr={_FIRST_SLOT + number:#x}")  # fmt: skip


def _opened(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"
