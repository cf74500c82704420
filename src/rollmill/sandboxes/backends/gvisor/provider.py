"""The provider of gVisor sandboxes: the namespace provider with `runsc` between its zygote and its agents.

what it waits for beside that              who wakes it, and until when
the runtime to pause or to resume          the sandbox's first process, `verb_s`
the runtime to write memory to an image    the same, `checkpoint_s`
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.errors import DeadlineExceeded, SandboxError, SandboxRetryable
from rollmill.sandboxes.backends.gvisor.sandbox import GvisorSandbox
from rollmill.sandboxes.backends.gvisor.settings import GvisorSettings
from rollmill.sandboxes.backends.gvisor.toolbox import Toolbox, probe
from rollmill.sandboxes.backends.namespaces.provider import NamespaceProvider
from rollmill.sandboxes.backends.namespaces.sandbox import NamespaceSandbox
from rollmill.sandboxes.backends.namespaces.snapshot_book import Kept, Layer
from rollmill.sandboxes.backends.namespaces.zygote_link import ZygoteLink
from rollmill.sandboxes.capable import unsupported
from rollmill.sandboxes.disk_records import ProcessMark
from rollmill.sandboxes.records import Capabilities, DeathReason, Lease, SandboxSpec, SnapshotRef
from rollmill.sandboxes.tally import Observer

_SIGKILL = -9
_HOST_THREADS_PER_PROCESS = 4
_RETRY_AFTER_S = 5.0


class _Memory:
    """An image of a sandbox's memory, held by the zygote: who needs it, how large it is, and what it had asked."""

    def __init__(self, name: str, *, size_bytes: int, number: int) -> None:
        self.name, self.size_bytes, self.number = name, size_bytes, number
        self.holders: set[str] = set()


class GvisorProvider(NamespaceProvider):
    """Runs sandboxes of this machine with gVisor's kernel. An asynchronous context manager, as the other.

    Args:
        settings: how.
        observer: told of starts, ends and sweeps.

    Raises:
        ConfigError: if there is no runtime.
    """

    backend = "gvisor"
    _program = "runsc"
    _sandbox_type = GvisorSandbox

    def __init__(self, settings: GvisorSettings | None = None, *, observer: Observer | None = None) -> None:
        self._gvisor = GvisorSettings() if settings is None else settings
        self._runsc = self._gvisor.find_runsc()
        super().__init__(self._gvisor, observer=observer)
        self._toolbox: Toolbox | None = None
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._verbs = itertools.count(1)
        self._memories: dict[str, _Memory] = {}
        self._of_snapshot: dict[str, str] = {}
        self._full: set[str] = set()

    # -- the protocol --------------------------------------------------------------------------------------------------

    async def capabilities(self) -> Capabilities:
        """Return what this backend can do on this machine."""
        restores = self._settings.maps_ranges()
        return Capabilities(
            files_snapshot=True,
            fork=True,
            full_snapshot=restores,
            live_fork=restores,
            sessions=True,
            terminals=True,
            pause=True,
            pause_files=True,
            expose=True,
            extend_ttl=True,
            labels=True,
            idempotent_create=True,
            batch_status=True,
            fast_python=True,
            users=restores,
        )

    async def create(
        self, spec: SandboxSpec, *, id: str, labels: Mapping[str, str] | None = None, lease: Lease
    ) -> GvisorSandbox:
        """Start a sandbox and wait until it answers."""
        return _own(await super().create(spec, id=id, labels=labels, lease=lease))

    async def restore(
        self, ref: SnapshotRef, *, id: str, labels: Mapping[str, str] | None = None, lease: Lease
    ) -> GvisorSandbox:
        """Start a sandbox with the files of a snapshot, and with its processes if it has them."""
        return _own(await super().restore(ref, id=id, labels=labels, lease=lease))

    async def attach(self, id: str) -> GvisorSandbox:
        """Return a sandbox that lives and is this provider's."""
        return _own(await super().attach(id))

    async def delete_snapshots(self, ids: Sequence[str]) -> None:
        """Let go of these; one that is not known counts as deleted."""
        for one in ids:
            self._let_go(self._of_snapshot.pop(one, ""), f"snapshot {one}")
        await super().delete_snapshots(ids)

    # -- starts --------------------------------------------------------------------------------------------------------

    async def _start_zygote(self) -> ZygoteLink:
        if self._toolbox is None:
            loop = asyncio.get_running_loop()
            self._toolbox = await loop.run_in_executor(None, probe, self._settings.python)
        self._memories.clear()  # they ended with the zygote that held them
        self._of_snapshot.clear()
        return await super()._start_zygote()

    def _register(
        self,
        spec: SandboxSpec,
        *,
        sandbox_id: str,
        labels: Mapping[str, str],
        lease: Lease,
        helper: ProcessMark | None,
        kept: Kept | None,
    ) -> NamespaceSandbox:
        sandbox = super()._register(spec, sandbox_id=sandbox_id, labels=labels, lease=lease, helper=helper, kept=kept)
        if kept is not None:
            self._wake_from(_own(sandbox), self._of_snapshot.get(kept.ref.snapshot_id, ""))
        return sandbox

    def _wake_from(self, sandbox: GvisorSandbox, name: str) -> None:
        if (memory := self._memories.get(name)) is not None:
            memory.holders.add(sandbox.id)
            sandbox.memory, sandbox.number = name, memory.number

    async def _start(self, sandbox: NamespaceSandbox, zygote: ZygoteLink) -> NamespaceSandbox:
        sandbox = _own(sandbox)
        sandbox.prepare_start()
        try:
            return await super()._start(sandbox, zygote)
        finally:
            self._let_go(sandbox.memory, sandbox.id)
            sandbox.memory = ""

    def _order(self, sandbox: NamespaceSandbox) -> dict[str, Any]:
        assert self._toolbox is not None  # a zygote was started
        order = super()._order(sandbox)
        limits = sandbox.spec.limits
        order["caps"]["memory_bytes"] = limits.memory_bytes + self._gvisor.runtime_bytes
        order["caps"]["pids"] = _HOST_THREADS_PER_PROCESS * limits.pids + self._gvisor.runtime_threads
        order["plan"]["expose"] += self._toolbox.shown
        order["plan"].update(
            runsc=os.fspath(self._runsc),
            platform=self._gvisor.platform,
            loader=self._toolbox.loader,
            hidden=self._toolbox.hidden,
            memory=_own(sandbox).memory,
            runtime_memory_bytes=order["caps"]["memory_bytes"],
        )
        return order

    # -- ends ----------------------------------------------------------------------------------------------------------

    def _on_gone(self, sandbox: NamespaceSandbox, report: dict[str, Any]) -> None:
        # What ran out of memory is the runtime, whose end its first process reports.
        if report["usage"].get("oom_kills", 0) > 0:
            report = {**report, "exit": _SIGKILL}
        super()._on_gone(sandbox, report)

    def _forget(self, sandbox: NamespaceSandbox, *, reason: DeathReason, detail: str) -> None:
        for name in list(self._memories):
            self._let_go(name, sandbox.id)
        super()._forget(sandbox, reason=reason, detail=detail)

    def _on_lost(self, cause: str) -> None:
        for future in self._asked.values():
            if not future.done():
                future.set_result({"status": 1, "message": cause})
        super()._on_lost(cause)

    def _let_go(self, name: str, holder: str) -> None:
        """Take a holder from an image; one that nobody holds is forgotten."""
        if (memory := self._memories.get(name)) is None:
            return
        memory.holders.discard(holder)
        if not memory.holders:
            del self._memories[name]
            self._order_layers({"op": "forget", "memory": name})

    # -- the runtime ---------------------------------------------------------------------------------------------------

    def _on_report(self, report: dict[str, Any]) -> None:
        if report["op"] != "runsc":
            super()._on_report(report)
        elif (future := self._asked.pop(report["n"], None)) is not None and not future.done():
            future.set_result(report)
        elif "size" in report:  # nobody waits for that image any more
            self._order_layers({"op": "forget", "memory": report["memory"]})

    async def verb(self, sandbox: GvisorSandbox, verb: str) -> None:
        """Have the runtime do something with a sandbox.

        Raises:
            SandboxError: if it refuses.
            DeadlineExceeded: if it takes too long; a sandbox that may have stopped is ended.
        """
        number = next(self._verbs)
        name = f"memory-{os.urandom(8).hex()}"
        limit_s = self._gvisor.checkpoint_s if verb == "checkpoint" else self._gvisor.verb_s
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            if not self._order_layers({"op": "runsc", "id": sandbox.id, "n": number, "verb": verb, "memory": name}):
                raise SandboxError(f"sandbox {sandbox.id} cannot {verb}: its zygote ended, and it with that")
            async with asyncio.timeout(limit_s):
                answer = await asyncio.shield(future)
        except TimeoutError:
            sandbox.distrust(f"the runtime did not {verb} it within {limit_s:g} s", DeathReason.PROVIDER_LOST)
            raise DeadlineExceeded(
                f"gVisor did not {verb} sandbox {sandbox.id} within {limit_s:g} s, and the sandbox is ended. Its "
                "memory may be large, or the machine is overloaded (settings: verb_s, checkpoint_s)."
            ) from None
        finally:
            self._asked.pop(number, None)
        if answer["status"]:
            raise SandboxError(f"gVisor could not {verb} sandbox {sandbox.id}: {answer['message']}")
        if verb == "checkpoint":
            memory = _Memory(name, size_bytes=answer["size"], number=sandbox.connection.number)
            memory.holders.add(f"snapshot {sandbox.freezes_for}")
            self._memories[name] = memory
            self._of_snapshot[sandbox.freezes_for] = name
            self._wake_from(sandbox, name)

    # -- snapshots with processes --------------------------------------------------------------------------------------

    async def full_snapshot_of(self, sandbox: GvisorSandbox, *, id: str, end: bool) -> SnapshotRef:
        """Take a snapshot of files and processes at one moment. It ends with this provider."""
        self._check_full(sandbox)
        self._full.add(id)
        try:
            return await self._snapshot(sandbox, id=id, force=True, end=end, to_keep=False)
        finally:
            if id not in self._taking:
                self._full.discard(id)

    async def full_fork_of(
        self, sandbox: GvisorSandbox, ids: Sequence[str], *, lease: Lease, labels: Mapping[str, str] | None
    ) -> tuple[NamespaceSandbox, ...]:
        """Take such a snapshot, restore it for each id, and let go of it."""
        self._check_full(sandbox)
        name = f"fork-{os.urandom(8).hex()}"
        self._full.add(name)
        try:
            return await self.fork_of(sandbox, ids, lease=lease, labels=labels, stop_processes=True, snapshot_id=name)
        finally:
            self._full.discard(name)

    def _is_full(self, snapshot_id: str) -> bool:
        """Return whether a snapshot that is being taken has processes."""
        return snapshot_id in self._of_snapshot

    async def _take(self, sandbox: NamespaceSandbox, *, id: str, force: bool, end: bool, to_keep: bool) -> SnapshotRef:
        if id not in self._full:
            return await super()._take(sandbox, id=id, force=force, end=end, to_keep=to_keep)
        sandbox = _own(sandbox)
        sandbox.freezes_for = id
        try:
            return await super()._take(sandbox, id=id, force=force, end=end, to_keep=to_keep)
        except BaseException:
            self._let_go(self._of_snapshot.pop(id, ""), f"snapshot {id}")
            raise
        finally:
            sandbox.freezes_for = ""
            self._full.discard(id)

    async def _hold(self, sandbox: NamespaceSandbox, *, force: bool) -> Layer:
        try:
            return await super()._hold(sandbox, force=force)
        except BaseException as error:
            if _own(sandbox).memory:  # written, so that its runtime has ended; without its files it cannot wake
                sandbox.distrust(f"its files could not be held beside its memory: {error}", DeathReason.PROVIDER_LOST)
            raise

    def check_room(self, sandbox: GvisorSandbox, *, disk_bytes: int, inodes: int) -> None:
        """Refuse files for which there is no room, before anything is stopped for them."""
        self._snapshots.book.reserve(sandbox.id, disk_bytes=disk_bytes, inodes=inodes)

    def _check_full(self, sandbox: GvisorSandbox) -> None:
        if not self._settings.maps_ranges():
            raise unsupported(
                "gVisor restores processes as root only, so that an image of them would be of no use here; take a "
                "snapshot of the files",
                capability="full_snapshot",
            )
        held = self._snapshots.book.counts()[0] + sum(one.size_bytes for one in self._memories.values())
        more = sandbox.groups.usage().get("memory_bytes", 0)  # the image is smaller: it is compressed
        if held + more > self._settings.snapshot_bytes:
            raise SandboxRetryable(
                f"an image of up to {more} bytes of memory has no room: {held} of {self._settings.snapshot_bytes} are "
                "held. Delete snapshots that nobody needs, or raise snapshot_bytes of the settings.",
                after_s=_RETRY_AFTER_S,
            )


def _own(sandbox: NamespaceSandbox) -> GvisorSandbox:
    assert isinstance(sandbox, GvisorSandbox)  # `_sandbox_type`: this provider makes no other
    return sandbox
