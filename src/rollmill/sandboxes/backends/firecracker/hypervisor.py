"""Machines under Firecracker, on the guest and the templates that all backends of machines share.

Each machine has a directory with its sockets, and with links under which it finds descriptors that it inherits. What is
written down of a machine lies there only until it is open. The directory is removed with the machine, by a sweep if its
owner was killed.

This was written after Firecracker's published interface and is tested against a server that imitates it. It has not
been run with Firecracker itself.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rollmill.errors import SandboxError
from rollmill.sandboxes.backends.firecracker import requests
from rollmill.sandboxes.backends.firecracker.api import Api
from rollmill.sandboxes.backends.firecracker.requests import Request
from rollmill.sandboxes.backends.firecracker.settings import FirecrackerSettings
from rollmill.sandboxes.backends.microvm import accelerators
from rollmill.sandboxes.backends.microvm.hypervisor import Kept, OnEnded, OnStarted, Shape
from rollmill.sandboxes.backends.microvm.inside import VSOCK_PORT
from rollmill.sandboxes.backends.microvm.kit import Kit
from rollmill.sandboxes.backends.microvm.launch import identity_of, launcher
from rollmill.sandboxes.backends.microvm.process import MachineProcess
from rollmill.sandboxes.disk_records import MACHINE_SUFFIX
from rollmill.sandboxes.isolation import Protection

_LOOK_S = 0.02
_MOST_GREETING_BYTES = 64
_ELF = b"\x7fELF"


class FirecrackerKept:
    """A machine at one moment.

    Args:
        shape: what it was made of; its disks are opened once more, and stay so.
        state: descriptor of its devices.
        memory: descriptor of its memory.
    """

    def __init__(self, shape: Shape, *, state: int, memory: int) -> None:
        self.shape = _own(shape)
        self.state = state
        self.memory = memory

    @property
    def layers(self) -> int:
        """Return how many layers its image has."""
        return len(self.shape.disks) - 1

    @property
    def size_bytes(self) -> int:
        """Return what it takes of the host's memory."""
        return sum(os.fstat(one).st_blocks * 512 for one in (self.state, self.memory))

    def close(self) -> None:
        """Let it go."""
        for one in (self.state, self.memory, *self.shape.disks):
            os.close(one)


class FirecrackerMachine:
    """One machine that runs.

    Args:
        shape: what it is made of.
        directory: its own.
        api: to control it.
        files: names in its directory, and descriptors that they lead to.
    """

    keeps_line = False

    def __init__(self, shape: Shape, *, directory: Path, api: Api, files: Mapping[str, int]) -> None:
        self.shape = shape
        self.directory = directory
        self.api = api
        self._files = dict(files)
        self.process: MachineProcess | None = None

    async def ask(self, request: Request) -> None:
        """Send one request."""
        await self.api(request.method, request.target, request.body)

    async def connect(self) -> socket.socket:
        """Return a connection to its agent, once that listens."""
        while True:
            connection = socket.socket(socket.AF_UNIX)
            connection.setblocking(False)
            try:
                if await _reach(connection, self.directory / requests.VSOCK):
                    return connection
            except OSError:
                connection.close()
            except BaseException:
                connection.close()
                raise
            else:
                connection.close()
            await asyncio.sleep(_LOOK_S)

    async def pause(self) -> None:
        """Stop its processors."""
        await self.ask(requests.pause())

    async def resume(self) -> None:
        """Let them go on."""
        await self.ask(requests.resume())

    async def keep(self, *, end: bool) -> FirecrackerKept:
        """Keep it as it is now; its memory is written down in any case."""
        paths = [self.directory / name for name in (requests.STATE, requests.MEMORY)]
        for path in paths:
            path.unlink(missing_ok=True)  # a link to what this one was started from
        try:
            await self.ask(requests.keep())
            state, memory = (_take(path) for path in paths)
        except OSError as error:
            raise SandboxError(f"what was kept of a machine is not in {self.directory}: {error}") from error
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
        return FirecrackerKept(self.shape, state=state, memory=memory)

    def kill(self) -> None:
        """End it, without waiting."""
        if self.process is not None:
            self.process.kill()

    def complaint(self) -> str:
        """Return what it last said on its console: nobody listens there."""
        return ""

    def release(self) -> None:
        """Remove what belongs to a machine that has ended."""
        for one in self._files.values():
            os.close(one)
        self._files.clear()
        shutil.rmtree(self.directory, ignore_errors=True)  # a sweep takes what would not go


class FirecrackerHypervisor:
    """Starts machines.

    Args:
        settings: how.
    """

    backend = "firecracker"

    def __init__(self, settings: FirecrackerSettings) -> None:
        self._settings = settings
        self._number = 0

    @property
    def protection(self) -> str:
        """Return which protection its machines give."""
        return Protection.VIRTUAL_MACHINE.value

    def missing(self) -> Sequence[str]:
        """Return, in words, what is not here that it needs."""
        told = [
            f"{name} is not installed" for name in (self._settings.program, "setpriv") if shutil.which(name) is None
        ]
        if self._settings.kvm_device and (reason := accelerators.why_no_kvm(device=self._settings.kvm_device)):
            told.append(f"Firecracker needs KVM: {reason}")
        kernel = self._settings.kernel
        if kernel is None or not kernel.is_file():
            told.append("Firecracker boots an uncompressed kernel (vmlinux), which must be named (settings: kernel)")
        elif not _is_elf(kernel):
            told.append(f"{kernel} is compressed; Firecracker boots an uncompressed kernel (vmlinux)")
        return told

    def boot_limit_s(self, boot_s: float) -> float:
        """Return how long the next boot may take."""
        return boot_s

    def booted(self) -> None:
        """Note that a machine has booted."""

    def another_way(self) -> bool:
        """Return whether there is another way: none without KVM."""
        return False

    async def boot(
        self, kit: Kit, shape: Shape, *, name: str, on_started: OnStarted, on_ended: OnEnded
    ) -> FirecrackerMachine:
        """Start a machine from nothing."""
        whole = Shape(memory_bytes=shape.memory_bytes, disks=(kit.agent_disk, *shape.disks))
        files = {requests.KERNEL: kit.kernel, requests.INITRD: kit.initrd}
        machine = await self._launch(whole, files, name=name, on_started=on_started, on_ended=on_ended)
        return await self._asked(machine, *requests.boot(memory_bytes=shape.memory_bytes, disks=len(whole.disks)))

    async def start(self, kept: Kept, *, name: str, on_started: OnStarted, on_ended: OnEnded) -> FirecrackerMachine:
        """Start a machine from what was kept, paused."""
        assert isinstance(kept, FirecrackerKept)  # nobody else's comes back to this one
        files = {requests.STATE: kept.state, requests.MEMORY: kept.memory}
        machine = await self._launch(kept.shape, files, name=name, on_started=on_started, on_ended=on_ended)
        return await self._asked(machine, requests.load())

    async def close(self) -> None:
        """Release what it holds: nothing, since every machine holds its own."""

    async def _asked(self, machine: FirecrackerMachine, *wanted: Request) -> FirecrackerMachine:
        try:
            await machine.api.wait()
            for one in wanted:
                await machine.ask(one)
        except BaseException:
            machine.kill()
            raise
        return machine

    async def _launch(
        self, shape: Shape, files: Mapping[str, int], *, name: str, on_started: OnStarted, on_ended: OnEnded
    ) -> FirecrackerMachine:
        directory = self._settings.records_directory() / f"{name}{MACHINE_SUFFIX}"
        self._number += 1
        identity = None
        if self._settings.separate_users:
            identity = identity_of(self._number, device=self._settings.kvm_device)
        held = {**files, **{requests.disk(number): one for number, one in enumerate(shape.disks)}}
        held = {key: os.dup(one) for key, one in held.items()}
        own = Shape(memory_bytes=shape.memory_bytes,
                    disks=tuple(held[requests.disk(number)] for number in range(len(shape.disks))))  # fmt: skip
        api = Api(directory / requests.API, answer_s=self._settings.answer_s)
        machine = FirecrackerMachine(own, directory=directory, api=api, files=held)
        words = [
            *launcher(identity),
            shutil.which(self._settings.program) or self._settings.program,
            "--api-sock",
            requests.API,
            "--id",
            name,
        ]
        try:
            directory.mkdir(mode=0o700)
            for key, descriptor in held.items():
                (directory / key).symlink_to(f"/proc/self/fd/{descriptor}")
            if identity is not None:
                os.chown(directory, identity.uid, identity.uid)
            machine.process = MachineProcess(
                words, inherited=tuple(held.values()), directory=directory, on_started=on_started,
                on_ended=_ending(machine, on_ended),
            )  # fmt: skip
        except BaseException as error:
            if machine.process is None:
                machine.release()
            if isinstance(error, OSError):
                raise SandboxError(f"machine {name} cannot be started in {directory}: {error}") from error
            raise
        return machine


async def _reach(connection: socket.socket, path: Path) -> bool:
    """Connect through Firecracker to the port of the agent; `False` if nobody listens there."""
    loop = asyncio.get_running_loop()
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Names of sockets are short, and this one may be far down.
        await loop.sock_connect(connection, f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)
    await loop.sock_sendall(connection, f"CONNECT {VSOCK_PORT}\n".encode())
    greeting = b""
    while not greeting.endswith(b"\n"):
        if len(greeting) > _MOST_GREETING_BYTES or not (data := await loop.sock_recv(connection, 1)):
            return False
        greeting += data
    return greeting.startswith(b"OK ")


def _is_elf(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(_ELF)) == _ELF


def _take(path: Path) -> int:
    """Open a file that a machine wrote, for machines that run as somebody else."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    os.fchmod(opened, 0o444)
    return opened


def _own(shape: Shape) -> Shape:
    return Shape(memory_bytes=shape.memory_bytes, disks=tuple(os.dup(one) for one in shape.disks))


def _ending(machine: FirecrackerMachine, on_ended: OnEnded) -> Callable[[int], None]:
    def ended(code: int) -> None:
        machine.release()
        on_ended(f"Firecracker ended with {code}")

    return ended
