"""What a hypervisor does for the provider: start a machine, stop it, keep it, and start others from what was kept.

Nothing here knows of sandboxes. The implementations are QEMU's and Firecracker's.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from rollmill.sandboxes.backends.microvm.kit import Kit
from rollmill.sandboxes.disk_records import ProcessMark

OnStarted = Callable[[ProcessMark], None]
OnEnded = Callable[[str], None]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine is made of.

    Attributes:
        memory_bytes: of the machine.
        disks: descriptors of the layers of its image, the uppermost first.
    """

    memory_bytes: int
    disks: tuple[int, ...]


class Kept(Protocol):
    """A machine at one moment: others are started from it, as long as it is not closed."""

    @property
    def layers(self) -> int:
        """Return how many layers its image has."""
        ...

    @property
    def size_bytes(self) -> int:
        """Return what it takes."""
        ...

    def close(self) -> None:
        """Let it go. Machines that were started from it go on."""
        ...


class Machine(Protocol):
    """One machine that runs.

    Attributes:
        keeps_line: whether the connection to its agent outlives `keep`; else there must be a new one.
    """

    keeps_line: bool

    async def connect(self) -> socket.socket:
        """Return the connection to its agent, not blocking; wait until there is one, and the caller bounds the wait."""
        ...

    async def pause(self) -> None:
        """Stop its processors."""
        ...

    async def resume(self) -> None:
        """Let them go on."""
        ...

    async def keep(self, *, end: bool) -> Kept:
        """Keep it as it is now. It must be paused, and stays so.

        Args:
            end: whether it will not go on, so that its memory need not be copied.
        """
        ...

    def kill(self) -> None:
        """End it, without waiting."""
        ...

    def complaint(self) -> str:
        """Return what it last said on its console."""
        ...


class Hypervisor(Protocol):
    """A way to run machines."""

    backend: str

    @property
    def protection(self) -> str:
        """Return which protection its machines give, as `Protection` spells it."""
        ...

    def missing(self) -> Sequence[str]:
        """Return, in words, what is not here that it needs."""
        ...

    def boot_limit_s(self, boot_s: float) -> float:
        """Return how long the next boot may take."""
        ...

    def booted(self) -> None:
        """Note that a machine has booted."""
        ...

    def another_way(self) -> bool:
        """Return, after a boot that failed, whether there is another way, which the next boot then takes."""
        ...

    async def boot(self, kit: Kit, shape: Shape, *, name: str, on_started: OnStarted, on_ended: OnEnded) -> Machine:
        """Start a machine from nothing.

        Args:
            kit: what it boots.
            shape: what it is made of.
            name: of this machine, good for a file's name.
            on_started: called with its process before that does anything; what it raises keeps it from it.
            on_ended: called once when nothing is left of it.
        """
        ...

    async def start(self, kept: Kept, *, name: str, on_started: OnStarted, on_ended: OnEnded) -> Machine:
        """Start a machine from what was kept, paused."""
        ...

    async def close(self) -> None:
        """Release what it holds."""
        ...
