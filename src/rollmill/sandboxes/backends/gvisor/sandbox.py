"""One sandbox with gVisor's kernel, as its owner holds it: one that can also be written to an image, and wake."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from rollmill.errors import SandboxError
from rollmill.sandboxes.backends.namespaces.channel import AgentChannel
from rollmill.sandboxes.backends.namespaces.sandbox import NamespaceSandbox
from rollmill.sandboxes.protocol import check_kept
from rollmill.sandboxes.records import Lease, SandboxState, SnapshotRef


class GvisorChannel(AgentChannel):
    """A connection to an agent that may have to be woken.

    Attributes:
        wakes: whether the agent was written to an image and says nothing before it is told to go on.
    """

    wakes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        super().connection_made(transport)
        if self.wakes:
            self._send({"op": "go"})

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end, unless this connection was given up for another one."""
        if self._transport is not None:
            super().connection_lost(exc)

    def restart(self) -> None:
        """Be ready for another connection to the same agent, with all that runs in it."""
        self.close()
        self._transport = None
        loop = asyncio.get_running_loop()
        self.ready, self.closed = loop.create_future(), loop.create_future()
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())

    def wake(self) -> None:
        """Tell an agent that is silent to go on in the sandbox that it is in."""
        self._send({"op": "go"})

    def follow_number(self, number: int) -> None:
        """Use no number up to this one."""
        self._next = max(self._next, number)

    @property
    def number(self) -> int:
        """Return the last number that was used."""
        return self._next


class GvisorHome(Protocol):
    """What the provider does for a sandbox."""

    async def verb(self, sandbox: GvisorSandbox, verb: str) -> None:
        """Have the runtime do something."""
        ...

    def check_room(self, sandbox: GvisorSandbox, *, disk_bytes: int, inodes: int) -> None:
        """Refuse files for which there is no room."""
        ...

    async def full_snapshot_of(self, sandbox: GvisorSandbox, *, id: str, end: bool) -> SnapshotRef:
        """Take a snapshot with processes."""
        ...

    async def full_fork_of(
        self, sandbox: GvisorSandbox, ids: Sequence[str], *, lease: Lease, labels: Mapping[str, str] | None
    ) -> tuple[NamespaceSandbox, ...]:
        """Fork with processes."""
        ...


class GvisorSandbox(NamespaceSandbox):
    """One sandbox.

    Attributes:
        memory: image of its memory that it starts from next; empty: it starts anew.
        number: of requests, below which its agent may have programs of another owner.
        freezes_for: the snapshot with its processes that is being taken; empty: none, or one of files alone.
    """

    _groups_count_processes = False
    memory = ""
    number = 0
    freezes_for = ""

    @property
    def runtime(self) -> GvisorHome:
        """Return who talks to the runtime."""
        return self._home  # type: ignore[return-value]

    def _new_channel(self) -> GvisorChannel:
        return GvisorChannel(on_nonsense=self.distrust)

    @property
    def connection(self) -> GvisorChannel:
        """Return the connection to its agent."""
        assert isinstance(self.channel, GvisorChannel)  # `_new_channel` makes no other
        return self.channel

    def prepare_start(self) -> None:
        """Be ready for a first process that is new, or wakes."""
        self.connection.wakes = bool(self.memory)
        self.connection.follow_number(self.number)

    def check_running(self) -> None:
        """Refuse a call while it cannot be answered."""
        super().check_running()
        if self._state is SandboxState.PAUSING:
            raise SandboxError(f"sandbox {self.id} is being paused or resumed and answers nothing until that is done")

    async def pause(self, *, keep_memory: bool = True) -> None:
        """Stop every process at once, or keep the files alone. Carried through when the caller is cancelled."""
        if not keep_memory:
            await super().pause(keep_memory=False)
            return
        await self.awake_or_paused()
        if self._state is SandboxState.READY:
            self._state = SandboxState.PAUSING
            await self._carry("pause", failed=SandboxState.READY, done=SandboxState.PAUSED)

    async def resume(self) -> None:
        """Let every process go on. Carried through when the caller is cancelled."""
        self._check_alive()
        if self.sleeps:
            await super().resume()
        elif self._state is SandboxState.PAUSED:
            self._state = SandboxState.PAUSING
            await self._carry("resume", failed=SandboxState.PAUSED, done=SandboxState.READY)

    async def _carry(self, verb: str, *, failed: SandboxState, done: SandboxState) -> None:
        async def carry() -> None:
            try:
                await self.runtime.verb(self, verb)
            except BaseException:
                self._leave(SandboxState.PAUSING, failed)
                raise
            self._leave(SandboxState.PAUSING, done)

        work = asyncio.ensure_future(carry())
        work.add_done_callback(lambda future: future.cancelled() or future.exception())
        await asyncio.shield(work)

    def _leave(self, before: SandboxState, after: SandboxState) -> None:
        if self._state is before:  # it may have ended meanwhile
            self._state = after

    async def snapshot(
        self, *, id: str, stop_processes: bool = False, end: bool = False, full: bool = False
    ) -> SnapshotRef:
        """Keep its files as they are now; with `full` also its processes, which then go on in whoever is restored.

        Raises:
            SandboxUnsupported: if `full` is asked for where the runtime cannot restore: without root.
        """
        check_kept(full=full, stop_processes=stop_processes)
        if not full:
            return await super().snapshot(id=id, stop_processes=stop_processes, end=end)
        return await self.runtime.full_snapshot_of(self, id=id, end=end)

    async def fork(
        self,
        ids: Sequence[str],
        *,
        lease: Lease,
        labels: Mapping[str, str] | None = None,
        stop_processes: bool = False,
        full: bool = False,
    ) -> tuple[NamespaceSandbox, ...]:
        """Make sandboxes with its files, with `full` also with its processes: all of them, or none."""
        check_kept(full=full, stop_processes=stop_processes)
        if not full:
            return await super().fork(ids, lease=lease, labels=labels, stop_processes=stop_processes)
        return await self.runtime.full_fork_of(self, ids, lease=lease, labels=labels)

    def _replace_channel(self) -> None:
        if self.freezes_for and isinstance(self.channel, GvisorChannel):
            self.channel.restart()
        else:
            super()._replace_channel()

    async def hand_layer_out(self, *, force: bool) -> tuple[int, int]:
        """Have the agent bring what was written to the host, and the runtime the memory if that is wanted too."""
        if not self.freezes_for:
            return await super().hand_layer_out(force=force)
        message, _ = await self.answered(self.channel.ask({"op": "hold"}))
        try:
            self.runtime.check_room(self, disk_bytes=message.disk_bytes, inodes=message.inodes)
            await self.runtime.verb(self, "checkpoint")
        except BaseException:
            self.connection.wake()
            raise
        return message.disk_bytes, message.inodes
