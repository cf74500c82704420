"""One sandbox in a machine of its own, as its owner holds it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from rollmill.errors import DeadlineExceeded, SandboxError, SandboxUnsupported
from rollmill.sandboxes.backends.microvm.channel import MachineChannel, fresh_word
from rollmill.sandboxes.backends.microvm.hypervisor import Kept, Machine
from rollmill.sandboxes.backends.namespaces.sandbox import NamespaceSandbox, SnapshotHome
from rollmill.sandboxes.capable import unsupported
from rollmill.sandboxes.disk_records import DiskRecord
from rollmill.sandboxes.guest.cgroups import Groups
from rollmill.sandboxes.protocol import check_kept
from rollmill.sandboxes.records import DeathReason, Lease, SandboxSpec, SandboxState, SnapshotRef

T = TypeVar("T")

_ALL_GROUPS_ARE_INSIDE = Groups(())


class Durations(Protocol):
    """The settings that a sandbox looks at."""

    @property
    def start_s(self) -> float: ...  # noqa: D102

    @property
    def answer_s(self) -> float: ...  # noqa: D102

    @property
    def end_s(self) -> float: ...  # noqa: D102


class MicroVmSandbox(NamespaceSandbox):
    """One sandbox. Programs, files and sessions are those of a namespace sandbox; its life is a machine's.

    Args:
        sandbox_id: its id.
        spec: what it was made of.
        labels: as given.
        lease: the first one.
        record: what is on disk.
        home: takes snapshots.
        settings: how long things may take.
        order_kill: ends its machine.
        on_gone: called when what runs inside has ended though the machine has not.
        origin: the snapshot that it was restored from, empty if none.
        first_number: see `MachineChannel`.
    """

    def __init__(
        self,
        sandbox_id: str,
        *,
        spec: SandboxSpec,
        labels: Mapping[str, str],
        lease: Lease,
        record: DiskRecord,
        home: SnapshotHome,
        settings: Durations,
        order_kill: Callable[[str], None],
        on_gone: Callable[[MicroVmSandbox, int, int], None],
        origin: str = "",
        first_number: int = 1,
    ) -> None:
        super().__init__(
            sandbox_id,
            spec=spec,
            labels=labels,
            lease=lease,
            groups=_ALL_GROUPS_ARE_INSIDE,
            start_s=settings.start_s,
            answer_s=settings.answer_s,
            end_s=settings.end_s,
            order_kill=order_kill,
            record=record,
            home=home,
            origin=origin,
        )
        self.machine: Machine | None = None
        self.inside_ended: tuple[int, int] | None = None
        self.line = MachineChannel(
            on_nonsense=self.distrust, on_gone=lambda *end: on_gone(self, *end), first_number=first_number
        )
        self.channel = self.line

    async def pause(self, *, keep_memory: bool = True) -> None:
        """Stop its machine's processors; memory stays taken."""
        if not keep_memory:
            raise unsupported(
                "a machine's files are kept with its memory, also as a snapshot; pause it with its memory",
                capability="pause_files",
            )
        await self.awake_or_paused()
        if self._state is SandboxState.READY and self.machine is not None:
            self._state = SandboxState.PAUSED
            try:
                await self._bounded(self.machine.pause(), "stop")
            except SandboxError:
                self._back_from(SandboxState.PAUSED)
                raise

    async def resume(self) -> None:
        """Let them go on."""
        self._check_alive()
        if self._state is SandboxState.PAUSED and self.machine is not None:
            await self._bounded(self.machine.resume(), "go on")
            self._back_from(SandboxState.PAUSED)

    async def keep(self, *, end: bool) -> Kept:
        """Keep the machine as it is now, and let it go on unless it is to end.

        What is on its way to or from the agent arrives first, so that a copy begins between two frames.
        """
        assert self.machine is not None  # a sandbox that is ready has one
        goes_on = True
        self.line.hold()
        try:
            await self._bounded(self.line.say({"vm": "hush"}, until="hushed"), "be still")
            await self._bounded(self.machine.pause(), "stop")
            kept = await self._bounded(self.machine.keep(end=end), "be kept")
            goes_on = not end
            return kept
        finally:
            if goes_on and self._death is None and self.ordered is None:
                await self._go_on(self.machine)
            self.line.let_go()

    async def _go_on(self, machine: Machine) -> None:
        """Let it go on after it was kept, or after that failed; if it does not, it is given up."""
        try:
            await self._bounded(machine.resume(), "go on")
            if not machine.keeps_line:
                await self._bounded(self.connect(), "answer")
            await self._bounded(self.line.say(fresh_word("go"), until="awake"), "go on")
        except SandboxError as error:
            self.distrust(f"it did not go on after it was kept: {error}", DeathReason.PROVIDER_LOST)
            raise

    async def connect(self) -> None:
        """Connect to the agent in its machine."""
        assert self.machine is not None  # there is one before this is called
        await self.line.attach(await self.machine.connect())

    async def snapshot(
        self, *, id: str, stop_processes: bool = False, end: bool = False, full: bool = False
    ) -> SnapshotRef:
        """Keep its files and what runs in it; what is stopped before is not in it."""
        check_kept(full=full, stop_processes=stop_processes)
        return await super().snapshot(id=id, stop_processes=stop_processes, end=end)

    async def fork(
        self,
        ids: Sequence[str],
        *,
        lease: Lease,
        labels: Mapping[str, str] | None = None,
        stop_processes: bool = False,
        full: bool = False,
    ) -> tuple[NamespaceSandbox, ...]:
        """Make sandboxes that go on where it is: all of them, or none."""
        check_kept(full=full, stop_processes=stop_processes)
        return await super().fork(ids, lease=lease, labels=labels, stop_processes=stop_processes)

    async def stop_processes(self) -> None:
        """Kill what runs; sessions too."""
        result = await self.exec(["sh", "-c", "kill -KILL -1"], timeout_s=self._answer_s)
        if result.exit_code in (126, 127):
            raise SandboxUnsupported(
                "what runs is stopped by the image's sh, and it has none; snapshots here keep processes anyway",
                capability="stop_processes",
            )

    def _back_from(self, state: SandboxState) -> None:
        if self._state is state:
            self._state = SandboxState.READY

    async def _bounded(self, what: Awaitable[T], name: str) -> T:
        try:
            async with asyncio.timeout(self._answer_s):
                return await what
        except TimeoutError:
            self.distrust(f"its machine did not {name} within {self._answer_s:g} s", DeathReason.PROVIDER_LOST)
            raise DeadlineExceeded(
                f"the machine of sandbox {self._id} did not {name} within {self._answer_s:g} s, and is ended; the host "
                "is overloaded, or its hypervisor hangs"
            ) from None
