"""Machines under QEMU: booted from a kernel with memory in a file, kept by writing their devices down, and copied.

A template's memory lies in a file of the host's memory, which every machine that is copied from it maps for itself
alone. So a copy takes what it changes, and starts without reading anything. A machine that has been copied has its
memory nowhere else; when it is kept, all of it is written down.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Sequence

from rollmill.errors import SandboxError
from rollmill.sandboxes.backends.microvm import accelerators
from rollmill.sandboxes.backends.microvm.hypervisor import Kept, OnEnded, OnStarted, Shape
from rollmill.sandboxes.backends.microvm.kit import Kit
from rollmill.sandboxes.backends.microvm.launch import identity_of, launcher
from rollmill.sandboxes.backends.microvm.process import MachineProcess
from rollmill.sandboxes.backends.qemu import command
from rollmill.sandboxes.backends.qemu.command import Boot, Handles, Memory
from rollmill.sandboxes.backends.qemu.qmp import Qmp, QmpError
from rollmill.sandboxes.backends.qemu.settings import QemuSettings
from rollmill.sandboxes.isolation import Protection

_LOOK_S = 0.004
_MOST_COMPLAINT_BYTES = 3000
# Memory of the template is not written down but stays in its file.
_SHARED_STAYS = [{"capability": "x-ignore-shared", "state": True}]
_BANDWIDTH = 2**40
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class QemuKept:
    """A machine at one moment.

    Args:
        shape: what it was made of; its disks are opened once more, and stay so.
        devices: descriptor of what was written down.
        memory: descriptor of its memory, -1 if that was written down too.
    """

    def __init__(self, shape: Shape, *, devices: int, memory: int = -1) -> None:
        self.shape = _own(shape)
        self.devices = devices
        self.memory = memory

    @property
    def layers(self) -> int:
        """Return how many layers its image has."""
        return len(self.shape.disks) - 1

    @property
    def size_bytes(self) -> int:
        """Return what it takes of the host's memory."""
        held = (os.fstat(one).st_blocks * 512 for one in (self.devices, self.memory) if one >= 0)
        return sum(held)  # the disks are on a disk

    def close(self) -> None:
        """Let it go."""
        for one in (self.devices, self.memory, *self.shape.disks):
            if one >= 0:
                os.close(one)
        self.devices = self.memory = -1
        self.shape = Shape(memory_bytes=self.shape.memory_bytes, disks=())


class QemuMachine:
    """One machine that runs.

    Args:
        shape: what it is made of.
        qmp: to control it.
        agent: connection to its agent.
        console: descriptor of what it said, -1 if nobody listens.
        memory: where its memory is; closed with it.
    """

    keeps_line = True

    def __init__(self, shape: Shape, *, qmp: Qmp, agent: socket.socket, console: int, memory: Memory) -> None:
        self._shape = _own(shape)
        self.qmp = qmp
        self._agent = agent
        self._connected = False
        self._console = console
        self._memory = memory
        self.process: MachineProcess | None = None

    async def connect(self) -> socket.socket:
        """Return the connection to its agent, which is the caller's from now on."""
        self._connected = True
        return self._agent

    async def pause(self) -> None:
        """Stop its processors."""
        await self.qmp("stop")

    async def resume(self) -> None:
        """Let them go on."""
        await self.qmp("cont")

    async def keep(self, *, end: bool) -> QemuKept:
        """Keep it as it is now."""
        if self._memory.shared and not end:
            raise SandboxError("a machine whose memory is the template's own cannot go on once it was kept")
        devices = os.memfd_create("machine", os.MFD_CLOEXEC)
        try:
            await self.qmp("migrate-set-capabilities", capabilities=_SHARED_STAYS)
            await self.qmp("migrate-set-parameters", max_bandwidth=_BANDWIDTH)
            await self.qmp("getfd", descriptor=devices, fdname="kept")
            await self.qmp("migrate", uri="fd:kept")
            await self._written()
        except BaseException:
            os.close(devices)
            raise
        memory = os.dup(self._memory.descriptor) if self._memory.shared else -1
        return QemuKept(self._shape, devices=devices, memory=memory)

    async def _written(self) -> None:
        while True:
            told = await self.qmp("query-migrate")
            status = told.get("status")
            if status == "completed":
                return
            if status in ("failed", "cancelled"):
                raise SandboxError(f"QEMU could not write a machine down: {told.get('error-desc', status)}")
            await asyncio.sleep(_LOOK_S)

    async def load(self, devices: int) -> None:
        """Take on what was written down of another machine; then it stands as that one stood."""
        await self.qmp("migrate-set-capabilities", capabilities=_SHARED_STAYS)
        await self.qmp("migrate-incoming", uri=f"fd:{devices}")
        while (await self.qmp("query-status"))["status"] == "inmigrate":  # noqa: ASYNC110 - each look has a deadline
            await asyncio.sleep(_LOOK_S)

    def kill(self) -> None:
        """End it, without waiting."""
        if self.process is not None:
            self.process.kill()

    def complaint(self) -> str:
        """Return what it last said on its console."""
        if self._console < 0:
            return ""
        size = os.fstat(self._console).st_size
        data = os.pread(self._console, _MOST_COMPLAINT_BYTES, max(0, size - _MOST_COMPLAINT_BYTES))
        return data.decode("utf-8", "replace").strip()

    def release(self) -> None:
        """Close what belongs to a machine that has ended."""
        self.qmp.close()
        if not self._connected:  # its start was given up before
            self._agent.close()
        for one in (self._console, self._memory.descriptor, *self._shape.disks):
            if one >= 0:
                os.close(one)


class QemuHypervisor:
    """Starts machines.

    Args:
        settings: how.
    """

    backend = "qemu"

    def __init__(self, settings: QemuSettings) -> None:
        self._settings = settings
        self._number = 0
        self._undecided = settings.accelerator == "auto" and not accelerators.why_no_kvm()
        self.accelerator = accelerators.choose(settings.accelerator)

    @property
    def protection(self) -> str:
        """Return which protection its machines give: emulation is nobody's promise of a boundary."""
        kvm = self.accelerator == "kvm"
        return (Protection.VIRTUAL_MACHINE if kvm else Protection.OWN_KERNEL).value

    def missing(self) -> Sequence[str]:
        """Return, in words, what is not here that it needs."""
        told = []
        if shutil.which(self._settings.program) is None:
            told.append(f"{self._settings.program} is not installed: apt-get install qemu-system-x86")
        if shutil.which("setpriv") is None:
            told.append("setpriv is not installed: apt-get install util-linux")
        if os.uname().machine != "x86_64":
            told.append(f"this backend runs x86_64 machines on x86_64 hosts, and this one is {os.uname().machine}")
        return told

    def boot_limit_s(self, boot_s: float) -> float:
        """Return how long the next boot may take: a try with KVM, of which nobody knows if it works, takes less."""
        return min(boot_s, self._settings.kvm_trial_s) if self._undecided else boot_s

    def booted(self) -> None:
        """Note that a machine has booted, and so that this way works."""
        self._undecided = False

    def another_way(self) -> bool:
        """Return, after a boot that failed, whether another is worth a try, which is then another way."""
        if not self._undecided:
            return False
        self._undecided, self.accelerator = False, "tcg"
        return True

    async def boot(self, kit: Kit, shape: Shape, *, name: str, on_started: OnStarted, on_ended: OnEnded) -> QemuMachine:
        """Start a machine from nothing."""
        ram = os.memfd_create("machine-memory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(ram, shape.memory_bytes)
        memory = Memory(size_bytes=shape.memory_bytes, descriptor=ram, shared=True)
        console = os.memfd_create("machine-console", os.MFD_CLOEXEC)
        disks = (kit.agent_disk, *shape.disks)
        whole = Shape(memory_bytes=shape.memory_bytes, disks=disks)
        boot = Boot(kernel=kit.kernel, initrd=kit.initrd)
        return self._launch(whole, memory, boot, console, name=name, on_started=on_started, on_ended=on_ended)

    async def start(self, kept: Kept, *, name: str, on_started: OnStarted, on_ended: OnEnded) -> QemuMachine:
        """Start a machine from what was kept, paused."""
        assert isinstance(kept, QemuKept)  # nobody else's comes back to this one
        ram = os.dup(kept.memory) if kept.memory >= 0 else -1
        if ram >= 0:
            _seal(ram)
        memory = Memory(size_bytes=kept.shape.memory_bytes, descriptor=ram)
        # Opened anew: whoever reads it moves on in it, and others read it at the same time.
        devices = os.open(f"/proc/self/fd/{kept.devices}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            machine = self._launch(
                kept.shape, memory, None, -1, name=name, on_started=on_started, on_ended=on_ended, devices=devices
            )
            try:
                await machine.load(devices)
            except BaseException:
                machine.kill()
                raise
        except QmpError as error:
            raise SandboxError(f"machine {name} could not take on what was kept: {error}") from error
        finally:
            os.close(devices)
        return machine

    async def close(self) -> None:
        """Release what it holds: nothing, since every machine holds its own."""

    def _launch(
        self,
        shape: Shape,
        memory: Memory,
        boot: Boot | None,
        console: int,
        *,
        name: str,
        on_started: OnStarted,
        on_ended: OnEnded,
        devices: int = -1,
    ) -> QemuMachine:
        control, their_control = socket.socketpair()
        agent, their_agent = socket.socketpair()
        agent.setblocking(False)
        handles = Handles(
            control=their_control.fileno(), agent=their_agent.fileno(), disks=shape.disks, console=console
        )
        machine = QemuMachine(
            shape, qmp=Qmp(control, answer_s=self._settings.answer_s), agent=agent, console=console, memory=memory
        )
        self._number += 1
        identity = None
        if self._settings.separate_users:
            identity = identity_of(self._number, device="/dev/kvm" if self.accelerator == "kvm" else "")
        words = launcher(identity) + command.machine(
            shutil.which(self._settings.program) or self._settings.program,
            accelerator=self.accelerator,
            memory=memory,
            handles=handles,
            boot=boot,
            name=name,
        )
        inherited = (*handles.all(memory, boot), *([devices] if devices >= 0 else []))
        try:
            machine.process = MachineProcess(
                words, inherited=inherited, on_started=on_started, on_ended=_ending(machine, on_ended)
            )
        finally:
            their_control.close()
            their_agent.close()
        return machine


def _own(shape: Shape) -> Shape:
    return Shape(memory_bytes=shape.memory_bytes, disks=tuple(os.dup(one) for one in shape.disks))


def _ending(machine: QemuMachine, on_ended: OnEnded) -> Callable[[int], None]:
    def ended(code: int) -> None:
        said = machine.complaint()
        machine.release()
        on_ended(f"QEMU ended with {code}" + (f"; its console: {said}" if said else ""))

    return ended


def _seal(memory: int) -> None:
    """Let nobody change a template's memory any more, a machine that broke out of QEMU's own bounds included."""
    try:
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except PermissionError:
        return  # sealed before
