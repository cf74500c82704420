"""A provider over a vendor's adapter: ids, leases and ends, and what to do when a creation was cut off.

Waits, and who wakes them: `create` waits for the vendor, bounded by `start_s`; a second `create` with the same id waits
for the first; ends run in tasks of their sandboxes, which `close` waits for, bounded by `end_s`. No lock is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import msgspec

from rollmill.errors import (
    ConfigError,
    CreateUnknown,
    ImageError,
    IsolationError,
    RollmillError,
    SandboxDead,
    SandboxError,
    SandboxIdInUse,
    SandboxRetryable,
)
from rollmill.sandboxes.backends.hosted import marks
from rollmill.sandboxes.backends.hosted.driver import Driver, Found, Gone
from rollmill.sandboxes.backends.hosted.sandbox import TTL_GRACE_S, HostedSandbox
from rollmill.sandboxes.backends.hosted.settings import HostedSettings
from rollmill.sandboxes.backends.hosted.snapshots import HostedSnapshots
from rollmill.sandboxes.backends.http import CutOff, Refused, Unreachable, as_retryable
from rollmill.sandboxes.disk_records import check_id
from rollmill.sandboxes.isolation import WORDS, IsolationLevel, Protection, level_of, missing_for
from rollmill.sandboxes.lifecycle import dead_error, death
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

D = TypeVar("D", bound=Driver)

_REMEMBERED_ENDS = 10_000
_KILLS_AT_ONCE = 16
_RETRY_AFTER_S = 1.0
_LAST_WORK_S = 1.0
"""For connections that are being closed when the provider is."""

_STOPPED = death(DeathReason.EXITED, detail="it has stopped, and its vendor keeps what is left of it")
_log = logging.getLogger(__name__)


class HostedProvider(Generic[D]):
    """Sandboxes of one vendor.

    Args:
        driver: the vendor's adapter.
        settings: deadlines and the least isolation.
    """

    def __init__(self, driver: D, settings: HostedSettings) -> None:
        self.driver = driver
        self._settings = settings
        self._alive: dict[str, HostedSandbox] = {}
        self._starting: dict[str, asyncio.Future[HostedSandbox]] = {}
        self._ends: OrderedDict[str, SandboxStatus] = OrderedDict()
        self._undone: set[asyncio.Task[None]] = set()
        self._held: set[asyncio.Task[Any]] = set()
        self._snapshots = HostedSnapshots(driver, settings, begin=self._begin, taken=self._is_taken)
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def capabilities(self) -> Capabilities:
        """Return what the vendor can do."""
        return self.driver.capabilities

    async def prepare(self, image: Image) -> None:
        """Have an image there ahead of its use."""
        self._check_image(image)
        try:
            async with asyncio.timeout(self._settings.start_s):
                await self.driver.prepare(image)
        except TimeoutError as error:
            raise ImageError(
                f"{self.driver.product} did not have {image} ready within {self._settings.start_s:g} s; raise start_s"
            ) from error
        except Refused as error:
            raise as_retryable(error, product=self.driver.product, what="an image") from error

    def _check_image(self, image: Image) -> None:
        if isinstance(image, DirectoryImage):
            raise ImageError(
                f"{self.driver.product} cannot take directories of this machine ({list(image.layers)}); give a "
                "NamedImage, or leave the one of the settings"
            )
        self.driver.check(image)

    # -- beginnings --------------------------------------------------------------------------------------------------

    async def create(
        self, spec: SandboxSpec, *, id: str, labels: Mapping[str, str] | None = None, lease: Lease
    ) -> HostedSandbox:
        """Start a sandbox and wait until it answers.

        Cancellation: what may have been made is looked for and ended in the background.
        """
        return await self._begin(spec, id=id, labels=labels, lease=lease)

    async def _begin(
        self,
        spec: SandboxSpec,
        *,
        id: str,
        labels: Mapping[str, str] | None,
        lease: Lease,
        image: Image | None = None,
        source: str = "",
    ) -> HostedSandbox:
        """Start a sandbox of a spec; of another image in the name of a snapshot, if it is made of one."""
        check_id(id)
        if self._closed:
            raise SandboxError("this provider is closed; open another one")
        if (known := await self._known(id, spec, source)) is not None:
            return known
        if image is None:
            self._check_image(spec.image)
        if spec.expose:
            raise ConfigError(
                f"{self.driver.product} cannot show {list(spec.expose)} of this machine; write the files instead"
            )
        if self.driver.protections is not None:
            self._require(level_of(self.driver.protections), self.driver.protections)
        now = time.time()
        stamp = marks.encode(spec, id=id, labels=labels or {}, lease=lease, now_wall_s=now, source=source)
        return await self._once(
            id, self._create(spec, id=id, labels=labels or {}, lease=lease, stamp=stamp, image=image)
        )

    async def _once(self, id: str, work: Coroutine[Any, Any, HostedSandbox]) -> HostedSandbox:
        """Do it while whoever asks for the same id waits for the outcome."""
        outcome: asyncio.Future[HostedSandbox] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(lambda future: None if future.cancelled() else future.exception())
        self._starting[id] = outcome
        try:
            sandbox = await work
        except BaseException as error:
            outcome.set_exception(
                error if isinstance(error, RollmillError) else SandboxError(f"the start of {id} was given up")
            )
            raise
        finally:
            del self._starting[id]
        outcome.set_result(sandbox)
        return sandbox

    def _is_taken(self, id: str) -> bool:
        return id in self._alive or id in self._starting or id in self._ends

    async def _known(self, id: str, spec: SandboxSpec, source: str) -> HostedSandbox | None:
        sandbox = self._alive.get(id)
        if sandbox is None and id in self._starting:
            sandbox = await asyncio.shield(self._starting[id])
        if sandbox is not None and sandbox.death is None:
            if sandbox.digest != marks.digest_of(spec, source=source):
                raise SandboxIdInUse(f"sandbox {id} lives and has another spec, or was made of another snapshot")
            return sandbox
        if sandbox is not None or id in self._ends:
            raise SandboxIdInUse(f"sandbox {id} has ended; an id names one sandbox for good")
        return None

    async def _create(
        self,
        spec: SandboxSpec,
        *,
        id: str,
        labels: Mapping[str, str],
        lease: Lease,
        stamp: Mapping[str, str],
        image: Image | None,
    ) -> HostedSandbox:
        life_s = min(lease.ttl_s, spec.limits.wall_s) if self.driver.capabilities.extend_ttl else spec.limits.wall_s
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._settings.start_s
        try:
            async with asyncio.timeout_at(deadline_s):
                made_of = spec if image is None else msgspec.structs.replace(spec, image=image)
                found = await self.driver.create(made_of, id=id, marks=stamp, ttl_s=life_s + TTL_GRACE_S)
        except Unreachable as error:
            raise SandboxRetryable(str(error), after_s=_RETRY_AFTER_S) from error
        except (CutOff, TimeoutError) as error:
            raise CreateUnknown(
                f"the creation of sandbox {id} by {self.driver.product} was cut off ({error or 'no answer'}, limit "
                f"{self._settings.start_s:g} s). It may exist: attach to it by its id, or kill it by its id.",
                sandbox_id=id,
            ) from error
        except Refused as error:
            raise self._refusal(error, id) from error
        except asyncio.CancelledError:
            self._later(self._end_by_mark(id))
            raise
        wall_s, digest = spec.limits.wall_s, stamp[marks.SPEC]
        sandbox = self._admit(found, id=id, spec=spec, labels=labels, lease=lease, wall_left_s=wall_s, digest=digest)
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._enter(sandbox, found)
            self._require(sandbox.isolation, sandbox.protections)
        except TimeoutError as error:
            await self._put_down(sandbox)
            raise SandboxRetryable(
                f"sandbox {id} of {self.driver.product} did not answer within {self._settings.start_s:g} s and was "
                "ended; try again, or raise start_s if the service is slow",
                after_s=_RETRY_AFTER_S,
            ) from error
        except BaseException as error:
            await self._put_down(sandbox)
            if isinstance(error, Gone | CutOff | Unreachable):
                raise SandboxRetryable(
                    f"sandbox {id} of {self.driver.product} ended before it answered ({error}); try again",
                    after_s=_RETRY_AFTER_S,
                ) from error
            raise
        if sandbox.death is not None:
            raise dead_error(id, sandbox.death)
        return sandbox

    async def _enter(self, sandbox: HostedSandbox, found: Found) -> None:
        guest = await self.driver.enter(found, sandbox.spec)
        if self.driver.protections is None:
            sandbox.protections = await self.driver.protections_of(found)
        sandbox.entered(found, guest)

    def _refusal(self, error: Refused, id: str) -> RollmillError:
        what = f"sandbox {id}"
        if error.status in (500, 502, 504):
            return CreateUnknown(
                f"{error}. It may exist: attach to {what} by its id, or kill it by its id.", sandbox_id=id
            )
        return as_retryable(error, product=self.driver.product, what=what)

    def _admit(
        self,
        found: Found,
        *,
        id: str,
        spec: SandboxSpec,
        labels: Mapping[str, str],
        lease: Lease,
        wall_left_s: float,
        digest: str,
    ) -> HostedSandbox:
        sandbox = HostedSandbox(
            id,
            driver=self.driver,
            settings=self._settings,
            spec=spec,
            labels=labels,
            lease=lease,
            wall_left_s=max(0.0, wall_left_s),
            on_end=self._on_end,
            held=self._held,
            snapshots=self._snapshots,
        )
        sandbox.found = found
        sandbox.digest = digest
        sandbox.protections = self.driver.protections or frozenset()
        self._alive[id] = sandbox
        return sandbox

    def _require(self, reached: IsolationLevel, protections: frozenset[Protection]) -> None:
        minimum = self._settings.minimum_isolation
        if reached >= minimum:
            return
        missing = "; ".join(f"{one.value} ({WORDS[one][0]})" for one in missing_for(minimum, protections))
        raise IsolationError(
            f"a sandbox of {self.driver.product} is isolated at level {reached.name.lower()}, as far as it shows, and "
            f"at least {minimum.name.lower()} is asked for. Missing: {missing}. Change the service's configuration "
            "(docs/how-to/sandboxes.md says how), or accept less by lowering minimum_isolation."
        )

    async def _put_down(self, sandbox: HostedSandbox) -> None:
        """End a sandbox whose start failed; what does not go in time is tried again in the background."""
        with contextlib.suppress(RollmillError):
            await asyncio.shield(asyncio.ensure_future(sandbox.kill(DeathReason.START_FAILED)))

    async def attach(self, id: str) -> HostedSandbox:
        """Return a sandbox that lives, also one that another process made, or whose creation was cut off."""
        if id in self._starting:
            return await asyncio.shield(self._starting[id])
        sandbox = self._alive.get(id)
        if sandbox is not None and sandbox.death is None:
            return sandbox
        end = self._ends[id].death if sandbox is None and id in self._ends else sandbox and sandbox.death
        if end is not None:
            raise dead_error(id, end)
        return await self._once(id, self._look_up(id))

    async def _look_up(self, id: str) -> HostedSandbox:
        for found in await self._find({marks.ID: id}):
            stamp = marks.decode(found.marks)
            if stamp is not None and found.state is not SandboxState.DEAD:
                return await self._adopt(found, stamp)
        raise SandboxDead(
            f"sandbox {id} is not known to {self.driver.product}",
            reason=DeathReason.PROVIDER_LOST.value,
            fault="infrastructure",
        )

    async def _adopt(self, found: Found, stamp: marks.Stamp) -> HostedSandbox:
        spec = SandboxSpec(limits=stamp.limits)
        left_s = min(stamp.ends_wall_s - time.time(), stamp.limits.wall_s)
        sandbox = self._admit(
            found,
            id=stamp.sandbox_id,
            spec=spec,
            labels=stamp.labels,
            lease=stamp.lease,
            wall_left_s=left_s,
            digest=stamp.digest,
        )
        try:
            async with asyncio.timeout(self._settings.start_s):
                await self._enter(sandbox, found)
        except TimeoutError as error:
            await self._put_down(sandbox)
            raise SandboxRetryable(
                f"sandbox {stamp.sandbox_id} of {self.driver.product} did not answer within "
                f"{self._settings.start_s:g} s",
                after_s=_RETRY_AFTER_S,
            ) from error
        except RollmillError as error:
            raise await sandbox.explain(error) from error
        return sandbox

    async def _find(self, wanted: Mapping[str, str]) -> list[Found]:
        try:
            async with asyncio.timeout(self._settings.call_s):
                found = await self.driver.find(wanted)
        except TimeoutError as error:
            raise SandboxRetryable(
                f"{self.driver.product} did not list its sandboxes within {self._settings.call_s:g} s",
                after_s=_RETRY_AFTER_S,
            ) from error
        except Refused as error:
            raise as_retryable(error, product=self.driver.product, what="a list") from error
        return [one for one in found if marks.carries(one.marks, wanted)]

    # -- snapshots ---------------------------------------------------------------------------------------------------

    async def restore(
        self, ref: SnapshotRef, *, id: str, labels: Mapping[str, str] | None = None, lease: Lease
    ) -> HostedSandbox:
        """Start a sandbox with the files of a snapshot, and wait until it answers."""
        return await self._snapshots.restore(ref, id=id, labels=labels, lease=lease)

    async def snapshots(self) -> tuple[SnapshotRef, ...]:
        """Return those that this provider took, the oldest first."""
        return self._snapshots.refs()

    async def delete_snapshots(self, ids: Sequence[str]) -> None:
        """Let go of these; one that is not known counts as deleted."""
        await self._snapshots.delete(ids)

    # -- lists and ends ----------------------------------------------------------------------------------------------

    async def list(
        self, *, labels: Mapping[str, str] | None = None, state: SandboxState | None = None
    ) -> tuple[SandboxStatus, ...]:
        """Return those that live, of whichever owner, and recent ends of this provider."""
        wanted = dict(labels or {})
        seen = {id: status for id, status in self._ends.items() if marks.carries(status.labels, wanted)}
        for id, sandbox in self._alive.items():
            if marks.carries(sandbox.labels, wanted):
                seen[id] = sandbox.status()
        for found in await self._find(wanted):
            stamp = marks.decode(found.marks)
            if stamp is not None and stamp.sandbox_id not in seen:
                seen[stamp.sandbox_id] = self._status_of(found, stamp)
        return tuple(one for one in seen.values() if state in (None, one.state))

    def _status_of(self, found: Found, stamp: marks.Stamp) -> SandboxStatus:
        protections = self.driver.protections or frozenset()
        left_s = min(stamp.ends_wall_s - time.time(), stamp.limits.wall_s)
        return SandboxStatus(
            sandbox_id=stamp.sandbox_id,
            state=found.state,
            labels=stamp.labels,
            lease=stamp.lease,
            lease_left_s=max(0.0, min(stamp.lease.ttl_s, left_s)),
            protections=tuple(sorted(one.value for one in protections)),
            isolation=level_of(protections).name.lower(),
            death=_STOPPED if found.state is SandboxState.DEAD else None,
            age_s=max(0.0, stamp.limits.wall_s - left_s),
        )

    async def status(self, ids: Sequence[str]) -> dict[str, SandboxStatus]:
        """Return what is known; ids that are not known are left out."""
        known = {id: sandbox.status() for id, sandbox in self._alive.items() if id in ids}
        known |= {id: self._ends[id] for id in ids if id in self._ends}
        missing = [id for id in ids if id not in known]
        if missing:
            listed = {one.sandbox_id: one for one in await self.list()}
            known |= {id: listed[id] for id in missing if id in listed}
        return {id: known[id] for id in ids if id in known}

    async def kill(self, ids: Sequence[str], *, reason: DeathReason = DeathReason.RELEASED) -> None:
        """End these, also those of other owners; one that is not known counts as ended.

        Raises:
            RollmillError: the first failure, after all were tried.
        """
        places = asyncio.Semaphore(_KILLS_AT_ONCE)

        async def end(id: str) -> None:
            async with places:
                if id in self._starting:
                    with contextlib.suppress(RollmillError):
                        await asyncio.shield(self._starting[id])
                if (sandbox := self._alive.get(id)) is not None:
                    await sandbox.kill(reason)
                elif id not in self._ends:
                    await self._end_by_mark(id, reason)

        outcomes = await asyncio.gather(*(end(id) for id in dict.fromkeys(ids)), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _end_by_mark(self, id: str, reason: DeathReason = DeathReason.RELEASED) -> None:
        """End whatever carries this id."""
        for found in await self._find({marks.ID: id}):
            async with asyncio.timeout(self._settings.end_s):
                await self.driver.kill(found)
            stamp = marks.decode(found.marks)
            if stamp is not None:
                ended = self._status_of(found, stamp)
                self._remember(_with_death(ended, reason))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._logged(work))
        self._undone.add(task)
        task.add_done_callback(self._undone.discard)

    async def _logged(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (RollmillError, TimeoutError) as error:
            _log.warning("a sandbox of a creation that was given up may be left: %s", error)

    def _on_end(self, sandbox: HostedSandbox) -> None:
        self._alive.pop(sandbox.id, None)
        self._remember(sandbox.status())

    def _remember(self, status: SandboxStatus) -> None:
        self._ends[status.sandbox_id] = status
        while len(self._ends) > _REMEMBERED_ENDS:
            self._ends.popitem(last=False)

    async def close(self) -> None:
        """End every sandbox of this provider and let go of all connections."""
        self._closed = True
        try:
            if self._undone:
                await asyncio.wait(self._undone, timeout=self._settings.end_s)
            await self.kill(list(self._alive))
        finally:
            for task in self._undone:
                task.cancel()
            for sandbox in list(self._alive.values()):
                await sandbox.let_go()
            self._alive.clear()
            if self._held:
                await asyncio.wait(self._held, timeout=_LAST_WORK_S)
            for task in list(self._held):
                task.cancel()
            await asyncio.gather(*self._held, return_exceptions=True)
            await self.driver.close()


def _with_death(status: SandboxStatus, reason: DeathReason) -> SandboxStatus:
    return msgspec.structs.replace(status, state=SandboxState.DEAD, death=death(reason))
