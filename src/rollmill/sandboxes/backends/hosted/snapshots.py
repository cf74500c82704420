"""Snapshots of hosted sandboxes, where the vendor keeps files: names, books, restores and forks.

The vendor names a snapshot; ours is the id that the caller chose, and the vendor's name for it is derived from that, so
that another process finds it. Nothing here waits without a bound: the vendor's part by `start_s`, ends by `end_s`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rollmill.errors import DeadlineExceeded, ImageError, SandboxError, SandboxIdInUse, SandboxUnsupported
from rollmill.sandboxes.backends.hosted.driver import Found
from rollmill.sandboxes.backends.hosted.settings import HostedSettings
from rollmill.sandboxes.disk_records import check_id
from rollmill.sandboxes.lifecycle import dead_error
from rollmill.sandboxes.records import DeathReason, Lease, NamedImage, SandboxState, SnapshotRef

if TYPE_CHECKING:
    from rollmill.sandboxes.backends.hosted.sandbox import HostedSandbox

_NAME_LETTERS = 20


@runtime_checkable
class KeepsFiles(Protocol):
    """A driver whose vendor keeps the files of a sandbox as an image for others."""

    def keep(self, found: Found, *, name: str) -> Coroutine[Any, Any, str]:
        """Keep its files under a name, and return what a sandbox of them is made of.

        Raises:
            SandboxBusy: if something runs, and the vendor cares.
        """
        ...

    async def kept(self, name: str) -> str | None:
        """Return what a sandbox of the files with this name is made of, `None` if there are none."""
        ...

    async def forget(self, image: str) -> None:
        """Let go of kept files; those that are not known are gone."""
        ...


def name_of(snapshot_id: str) -> str:
    """Return the name of a snapshot at its vendor: lower case, short, and the same in every process.

    Example:
        >>> name_of("Step_1")
        'rollmill-52a21790e70008d96cac'
    """
    return f"rollmill-{hashlib.sha256(snapshot_id.encode()).hexdigest()[:_NAME_LETTERS]}"


Begin = Callable[..., Awaitable["HostedSandbox"]]
"""Makes a sandbox of an image in the name of a snapshot."""


class HostedSnapshots:
    """The snapshots of one provider.

    Args:
        driver: the vendor's adapter.
        settings: deadlines.
        begin: makes sandboxes.
        taken: whether an id was given to a sandbox.
    """

    def __init__(self, driver: Any, settings: HostedSettings, *, begin: Begin, taken: Callable[[str], bool]) -> None:
        self._driver = driver
        self._settings = settings
        self._begin = begin
        self._taken = taken
        self._kept: dict[str, tuple[SnapshotRef, str]] = {}
        self._passing: dict[str, tuple[SnapshotRef, str]] = {}
        self._being_taken: set[str] = set()

    def refs(self) -> tuple[SnapshotRef, ...]:
        """Return those that this provider took, the oldest first."""
        return tuple(ref for ref, _ in self._kept.values())

    def _keeper(self, capability: str = "files_snapshot") -> KeepsFiles:
        if not self._driver.capabilities.files_snapshot or not isinstance(self._driver, KeepsFiles):
            raise SandboxUnsupported(
                f"{self._driver.product} keeps no files here; read those that matter before the end",
                capability=capability,
            )
        return self._driver

    async def take(
        self, sandbox: HostedSandbox, *, id: str, stop_processes: bool, end: bool, passing: bool = False
    ) -> SnapshotRef:
        """Keep the files of a sandbox; carried through if it is cancelled."""
        keeper = self._keeper()
        check_id(id)
        if id in self._kept or id in self._being_taken:
            raise SandboxIdInUse(f"there is a snapshot {id} already; an id names one for good")
        self._being_taken.add(id)
        work = sandbox.spawn(self._take(keeper, sandbox, id=id, stop=stop_processes, end=end, passing=passing))
        work.add_done_callback(lambda _: self._being_taken.discard(id))
        return await asyncio.shield(work)

    async def _take(
        self, keeper: KeepsFiles, sandbox: HostedSandbox, *, id: str, stop: bool, end: bool, passing: bool
    ) -> SnapshotRef:
        async with sandbox.still(stop_processes=stop) as found:
            try:
                async with asyncio.timeout(self._settings.start_s):
                    image = await _unless_it_ends(sandbox, sandbox.spawn(keeper.keep(found, name=name_of(id))))
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"{self._driver.product} did not keep the files of {sandbox.id} within "
                    f"{self._settings.start_s:g} s; they may be kept. Raise start_s for large ones."
                ) from error
        ref = SnapshotRef(
            snapshot_id=id,
            backend=self._driver.product,
            spec=sandbox.spec,
            durable=True,
            created_wall_s=time.time(),
        )
        (self._passing if passing else self._kept)[id] = (ref, image)
        if end:
            await sandbox.kill(DeathReason.RELEASED)
        return ref

    async def restore(
        self, ref: SnapshotRef, *, id: str, labels: Mapping[str, str] | None, lease: Lease
    ) -> HostedSandbox:
        """Make a sandbox with the files of a snapshot, also one that another process took."""
        keeper = self._keeper()
        known = self._kept.get(ref.snapshot_id) or self._passing.get(ref.snapshot_id)
        image = known[1] if known is not None else await keeper.kept(name_of(ref.snapshot_id))
        if image is None:
            raise ImageError(f"{self._driver.product} has no snapshot {ref.snapshot_id} (any more); take another one")
        return await self._begin(
            ref.spec, id=id, labels=labels, lease=lease, image=NamedImage(name=image), source=ref.snapshot_id
        )

    async def delete(self, ids: Sequence[str]) -> None:
        """Let go of these, also of those that another process took."""
        if not self._driver.capabilities.files_snapshot:
            return
        keeper = self._keeper()
        for id in dict.fromkeys(ids):
            known = self._kept.get(id) or self._passing.get(id)
            image = known[1] if known is not None else await keeper.kept(name_of(id))
            if image is not None:
                await keeper.forget(image)
            self._kept.pop(id, None)
            self._passing.pop(id, None)

    async def fork(
        self,
        sandbox: HostedSandbox,
        ids: Sequence[str],
        *,
        lease: Lease,
        labels: Mapping[str, str] | None,
        stop_processes: bool,
    ) -> tuple[HostedSandbox, ...]:
        """Make sandboxes with the files of one: all, or none. One that is cancelled goes on, and then undoes itself."""
        self._keeper("fork")
        for id in ids:
            check_id(id)
            if self._taken(id) or list(ids).count(id) > 1:
                raise SandboxIdInUse(f"sandbox {id} cannot be a fork: the id is another sandbox's")
        work = sandbox.spawn(self._fork(sandbox, ids, lease=lease, labels=labels, stop=stop_processes))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(lambda done: sandbox.spawn(_undo(done)))
            raise

    async def _fork(
        self,
        sandbox: HostedSandbox,
        ids: Sequence[str],
        *,
        lease: Lease,
        labels: Mapping[str, str] | None,
        stop: bool,
    ) -> tuple[HostedSandbox, ...]:
        passing = f"fork-{uuid.uuid4().hex[:12]}"
        ref = await self.take(sandbox, id=passing, stop_processes=stop, end=False, passing=True)
        try:
            outcomes = await asyncio.gather(
                *(self.restore(ref, id=id, labels=labels, lease=lease) for id in ids), return_exceptions=True
            )
        finally:
            await self.delete([passing])
        failures = [one for one in outcomes if isinstance(one, BaseException)]
        made = [one for one in outcomes if not isinstance(one, BaseException)]
        if failures:
            await asyncio.gather(*(one.kill() for one in made), return_exceptions=True)
            raise failures[0]
        return tuple(made)


async def _unless_it_ends(sandbox: HostedSandbox, keeping: asyncio.Task[str]) -> str:
    """Return what keeping returns; the sandbox's end is not waited through."""
    try:
        await asyncio.wait([keeping, sandbox.decided], return_when=asyncio.FIRST_COMPLETED)
        if not keeping.done():
            raise dead_error(sandbox.id, sandbox.decided.result())
        return await sandbox.ask(keeping)
    finally:
        keeping.cancel()


async def _undo(done: asyncio.Task[tuple[HostedSandbox, ...]]) -> None:
    if not done.cancelled() and done.exception() is None:
        await asyncio.gather(*(one.kill() for one in done.result()), return_exceptions=True)


def check_still(*, state: SandboxState, sandbox_id: str) -> None:
    """Refuse a snapshot of a sandbox that is not running.

    Raises:
        SandboxError: if it is paused.
    """
    if state in (SandboxState.PAUSED, SandboxState.PAUSING):
        raise SandboxError(f"sandbox {sandbox_id} is paused and keeps no snapshot; resume it first")
