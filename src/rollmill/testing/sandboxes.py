"""A sandbox provider without processes: files in a dictionary, a few programs, time from the loop, failures by script.

It keeps the rules of `rollmill.sandboxes.protocol` (the contract suite runs against it). Its sandboxes isolate nothing:
they run nothing but functions that a test gave.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence

from rollmill.errors import (
    CreateUnknown,
    ImageError,
    SandboxDead,
    SandboxError,
    SandboxIdInUse,
)
from rollmill.sandboxes.disk_records import check_id
from rollmill.sandboxes.isolation import IsolationLevel, Protection, require
from rollmill.sandboxes.lifecycle import dead_error
from rollmill.sandboxes.records import (
    Capabilities,
    DeathReason,
    DirectoryImage,
    Image,
    Lease,
    SandboxSpec,
    SandboxState,
    SandboxStatus,
    SnapshotRef,
)
from rollmill.testing.fake_sandbox import FakeSandbox
from rollmill.testing.faults import FaultInjector
from rollmill.testing.sandbox_files import FakeFiles
from rollmill.testing.sandbox_programs import PROGRAMS, FakeCall, FakeProcess, FakeProgram
from rollmill.testing.sandbox_sessions import FakeSession

__all__ = ["PROGRAMS", "FakeCall", "FakeProcess", "FakeProgram", "FakeSandbox", "FakeSandboxProvider", "FakeSession"]

_DEFAULT_PROTECTIONS = frozenset(Protection) - {Protection.OWN_KERNEL, Protection.VIRTUAL_MACHINE}


class FakeSandboxProvider:
    """A provider for tests.

    Args:
        programs: added to a few that a sandbox has: true, false, echo, cat, sleep, env, pwd, yes, stty.
        start_s: of the loop's time, from `create` until a sandbox answers.
        protections: what its sandboxes claim to have.
        minimum_isolation: below it `create` refuses.
        faults: strikes `create`, `exec`, `read`, `write`, `snapshot`, `restore` and `kill`. A `create` that is struck
            by `CreateUnknown` has made its sandbox, as it happens to real ones.

    Example:
        >>> from rollmill.testing import run_virtual
        >>> async def hello() -> bytes:
        ...     provider = FakeSandboxProvider(start_s=600.0)
        ...     sandbox = await provider.create(SandboxSpec(), id="a", lease=Lease(owner="me", ttl_s=7200.0))
        ...     return (await sandbox.exec(["echo", "hello"])).stdout
        >>> run_virtual(hello())
        b'hello\\n'
    """

    def __init__(
        self,
        *,
        programs: Mapping[str, FakeProgram] | None = None,
        start_s: float = 0.0,
        protections: frozenset[Protection] = _DEFAULT_PROTECTIONS,
        minimum_isolation: IsolationLevel = IsolationLevel.NONE,
        faults: FaultInjector | None = None,
    ) -> None:
        self.programs = {**PROGRAMS, **(programs or {})}
        self.protections = protections
        self.faults = FaultInjector({}) if faults is None else faults
        self._start_s = start_s
        self._minimum = minimum_isolation
        self._alive: dict[str, FakeSandbox] = {}
        self._ends: dict[str, SandboxStatus] = {}
        self._closed = False
        self._snapshots: dict[str, tuple[SnapshotRef, FakeFiles]] = {}
        self._forks = itertools.count(1)
        self._forking: set[str] = set()

    def ended(self, sandbox: FakeSandbox) -> None:
        """Note an end."""
        self._alive.pop(sandbox.id, None)
        self._ends[sandbox.id] = sandbox.status()

    async def capabilities(self) -> Capabilities:
        """Return what fakes can do."""
        return Capabilities(
            pause=True,
            pause_files=True,
            extend_ttl=True,
            labels=True,
            idempotent_create=True,
            batch_status=True,
            fast_python="python" in self.programs,
            files_snapshot=True,
            fork=True,
            sessions=True,
            terminals=True,
            attributes=True,
        )

    async def prepare(self, image: Image) -> None:
        """Check an image: directories are taken for made up unless their paths are absolute."""
        if isinstance(image, DirectoryImage) and not (
            image.layers and all(one.startswith("/") for one in image.layers)
        ):
            raise ImageError(f"the layers {list(image.layers)} are no absolute paths of directories")

    async def create(
        self, spec: SandboxSpec, *, id: str, labels: Mapping[str, str] | None = None, lease: Lease
    ) -> FakeSandbox:
        """Start a sandbox."""
        return await self._make(spec, id=id, labels=labels, lease=lease, call="create")

    async def restore(
        self, ref: SnapshotRef, *, id: str, labels: Mapping[str, str] | None = None, lease: Lease
    ) -> FakeSandbox:
        """Start a sandbox with the files of a snapshot."""
        if ref.snapshot_id not in self._snapshots:
            raise ImageError(f"there is no snapshot {ref.snapshot_id!r} here: it was deleted, or never taken")
        kept, files = self._snapshots[ref.snapshot_id]
        return await self._make(
            kept.spec, id=id, labels=labels, lease=lease, call="restore", files=files, origin=kept.snapshot_id
        )

    def fork_id(self) -> str:
        """Return an id for the snapshot of a fork."""
        name = f"fork-{next(self._forks)}"
        self._forking.add(name)
        return name

    def keep(self, sandbox: FakeSandbox, *, id: str) -> SnapshotRef:
        """Keep a sandbox's files."""
        if id in self._snapshots:
            raise SandboxIdInUse(f"a snapshot {id!r} is held; an id names one snapshot")
        files = FakeFiles(sandbox.spec.limits, like=sandbox.tree)
        ref = SnapshotRef(
            snapshot_id=id, backend="fake", spec=sandbox.spec, disk_bytes=files.disk_bytes, inodes=files.inodes
        )
        self._snapshots[id] = ref, files
        return ref

    async def snapshots(self) -> tuple[SnapshotRef, ...]:
        """Return those that are held, the oldest first; those of forks under way are nobody's."""
        return tuple(ref for ref, _ in self._snapshots.values() if ref.snapshot_id not in self._forking)

    async def delete_snapshots(self, ids: Sequence[str]) -> None:
        """Let go of these."""
        for one in ids:
            self._snapshots.pop(one, None)

    async def _make(
        self,
        spec: SandboxSpec,
        *,
        id: str,
        labels: Mapping[str, str] | None,
        lease: Lease,
        call: str,
        files: FakeFiles | None = None,
        origin: str = "",
    ) -> FakeSandbox:
        check_id(id)
        if self._closed:
            raise SandboxError("this provider is closed; open another one")
        if (known := self._alive.get(id)) is not None:
            if known.spec != spec or known.origin != origin:
                raise SandboxIdInUse(f"sandbox {id} lives and has another spec, or comes from another snapshot")
            return known
        if id in self._ends:
            raise SandboxIdInUse(f"sandbox {id} has ended; an id names one sandbox for good")
        await self.prepare(spec.image)
        require(self._minimum, self.protections)
        sandbox = FakeSandbox(self, id, spec, labels or {}, files=files, origin=origin)
        self._alive[id] = sandbox
        await sandbox.renew(lease)
        try:
            await self.faults.reach(call)
            await asyncio.sleep(self._start_s)
        except CreateUnknown:
            sandbox.ready()
            raise
        except BaseException:
            sandbox.end(DeathReason.START_FAILED)
            raise
        if sandbox.death is not None:
            raise dead_error(id, sandbox.death)
        sandbox.ready()
        return sandbox

    async def attach(self, id: str) -> FakeSandbox:
        """Return a sandbox that lives."""
        if (sandbox := self._alive.get(id)) is not None:
            return sandbox
        end = self._ends[id].death if id in self._ends else None
        if end is not None:
            raise dead_error(id, end)
        reason = DeathReason.PROVIDER_LOST.value
        raise SandboxDead(f"sandbox {id} is not known to this provider", reason=reason, fault="infrastructure")

    async def list(
        self, *, labels: Mapping[str, str] | None = None, state: SandboxState | None = None
    ) -> tuple[SandboxStatus, ...]:
        """Return those that live, and ends."""
        wanted = dict(labels or {}).items()
        found = (*self._ends.values(), *(one.status() for one in self._alive.values()))
        return tuple(one for one in found if wanted <= dict(one.labels).items() and state in (None, one.state))

    async def status(self, ids: Sequence[str]) -> dict[str, SandboxStatus]:
        """Return what is known."""
        found = {one.sandbox_id: one for one in await self.list()}
        return {one: found[one] for one in ids if one in found}

    async def kill(self, ids: Sequence[str], *, reason: DeathReason = DeathReason.RELEASED) -> None:
        """End these."""
        for one in ids:
            if one in self._alive:
                await self._alive[one].kill(reason)

    def lose(self, *, detail: str = "the provider is gone") -> None:
        """Lose every sandbox at once, as when a node fails."""
        for sandbox in list(self._alive.values()):
            sandbox.end(DeathReason.PROVIDER_LOST, detail=detail)

    async def close(self) -> None:
        """End every sandbox."""
        self._closed = True
        await self.kill(list(self._alive))
