"""What every provider of this machine does alike: its books of those that live and of recent ends, starts and records.

what it waits for                                    who wakes it, and until when
a start of the provider's, or by another call        the agent's first word, `start_s`
the end of a start that failed                       see `NamespaceSandbox.kill`, `end_s`
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from rollmill.errors import DeadlineExceeded, SandboxDead, SandboxError, SandboxIdInUse, SandboxRetryable
from rollmill.sandboxes.backends.namespaces.channel import SetupFailed
from rollmill.sandboxes.backends.namespaces.checks import explain_failure
from rollmill.sandboxes.backends.namespaces.sandbox import NamespaceSandbox
from rollmill.sandboxes.disk_records import DiskRecord, DiskRecords, own_mark
from rollmill.sandboxes.isolation import IsolationLevel, known, require
from rollmill.sandboxes.lifecycle import dead_error, death
from rollmill.sandboxes.records import Death, DeathReason, SandboxSpec, SandboxState, SandboxStatus
from rollmill.sandboxes.sweep import sweep
from rollmill.sandboxes.tally import Observer

S = TypeVar("S", bound=NamespaceSandbox)

_REMEMBERED_ENDS = 1000
_RETRY_AFTER_S = 1.0


class OwnSettings(Protocol):
    """The settings that are looked at here."""

    @property
    def minimum_isolation(self) -> IsolationLevel: ...  # noqa: D102

    @property
    def start_s(self) -> float: ...  # noqa: D102

    def records_directory(self) -> Path: ...  # noqa: D102


class OwnSandboxes(Generic[S]):
    """The part of a provider that concerns sandboxes which it has, had, or starts.

    Args:
        settings: deadlines, the least isolation, and where the records are.
        observer: told of starts, ends and sweeps.
    """

    def __init__(self, settings: OwnSettings, *, observer: Observer | None) -> None:
        self._start_s, self._minimum_isolation = settings.start_s, settings.minimum_isolation
        self._observer = observer
        self.records = DiskRecords(settings.records_directory())
        self._owner = own_mark()
        self._alive: dict[str, S] = {}
        self._ends: OrderedDict[str, SandboxStatus] = OrderedDict()
        self._closed = False

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    async def close(self) -> None:
        """End every sandbox, and all that the provider has."""
        raise NotImplementedError

    # -- the protocol ------------------------------------------------------------------------------------------------

    async def attach(self, id: str) -> S:
        """Return a sandbox that lives and is this provider's."""
        if (sandbox := self._alive.get(id)) is not None:
            return sandbox
        if (ended := self._ends.get(id)) is not None and ended.death is not None:
            raise dead_error(id, ended.death)
        raise SandboxDead(
            f"sandbox {id} is not known to this provider: another process's, or never made",
            reason=DeathReason.PROVIDER_LOST.value,
            fault="infrastructure",
        )

    async def list(
        self, *, labels: Mapping[str, str] | None = None, state: SandboxState | None = None
    ) -> tuple[SandboxStatus, ...]:
        """Return those that live, and recent ends."""
        wanted = dict(labels or {}).items()
        found = (*self._ends.values(), *(one.status() for one in self._alive.values()))
        return tuple(
            one for one in found if wanted <= dict(one.labels).items() and (state is None or one.state is state)
        )

    async def status(self, ids: Sequence[str]) -> dict[str, SandboxStatus]:
        """Return what is known; ids that are not known are left out."""
        found: dict[str, SandboxStatus] = {}
        for one in ids:
            if one in self._alive:
                found[one] = self._alive[one].status()
            elif one in self._ends:
                found[one] = self._ends[one]
        return found

    async def kill(self, ids: Sequence[str], *, reason: DeathReason = DeathReason.RELEASED) -> None:
        """End these; one that is not known counts as ended.

        Raises:
            DeadlineExceeded: if one of them did not end in time; the others were waited for.
        """
        doomed = [self._alive[one] for one in ids if one in self._alive]
        for one in doomed:
            one.order_end(reason)
        ends = await asyncio.gather(*(one.kill(reason) for one in doomed), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    # -- starts ------------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Remove what killed owners left."""
        report = await asyncio.to_thread(sweep, self.records)
        if self._observer is not None:
            self._observer.swept(removed=len(report.removed), left=len(report.left))

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("this provider is closed; open another one")

    async def _same(self, sandbox: S, spec: SandboxSpec, *, origin: str) -> S:
        """Return one that lives, once it answers, to a call that would have made it."""
        if sandbox.spec != spec or sandbox.origin != origin:
            raise SandboxIdInUse(
                f"sandbox {sandbox.id} lives and has another spec, or comes from another snapshot; choose another id, "
                "or end it first"
            )
        try:
            async with asyncio.timeout(self._start_s):
                await asyncio.shield(sandbox.channel.ready)
        except TimeoutError:
            what = f"sandbox {sandbox.id} is being started by another call, for more than {self._start_s:g} s"
            raise SandboxRetryable(what, after_s=_RETRY_AFTER_S) from None
        except SetupFailed as error:
            raise explain_failure(error, sandbox_id=sandbox.id) from error
        return sandbox

    @contextlib.asynccontextmanager
    async def _bounded_start(self, sandbox: S) -> AsyncIterator[None]:
        """Bound a start; of one that fails nothing is left, and its error says why."""
        try:
            async with asyncio.timeout(self._start_s):
                yield
        except TimeoutError:
            await self._put_down(sandbox)
            raise SandboxRetryable(
                f"sandbox {sandbox.id} did not answer within {self._start_s:g} s and was removed. The machine is "
                "overloaded: start fewer at a time.",
                after_s=_RETRY_AFTER_S,
            ) from None
        except SetupFailed as error:
            await self._put_down(sandbox)
            raise explain_failure(error, sandbox_id=sandbox.id) from error
        except asyncio.CancelledError:
            sandbox.order_end(DeathReason.START_FAILED)  # whoever cancels has no time; the order needs nobody who waits
            raise
        except Exception as error:
            ordered = sandbox.ordered
            await self._put_down(sandbox)
            if ordered is not None and sandbox.death is not None:
                raise dead_error(sandbox.id, sandbox.death) from error  # ended while it started, and that is why
            raise

    async def _put_down(self, sandbox: S) -> None:
        """Remove what is left of a start that failed."""
        try:
            await asyncio.shield(asyncio.ensure_future(sandbox.kill(DeathReason.START_FAILED)))
        except DeadlineExceeded:
            return  # ordered; its record stays until its process is seen to end

    def _answers(self, sandbox: S, protections: tuple[str, ...]) -> None:
        """Note that a sandbox answers, unless it is kept from its host less than it has to be."""
        sandbox.became_ready(protections)
        require(self._minimum_isolation, known(sandbox.protections))
        if self._observer is not None:
            create_s, ready_s = sandbox.start_phases()
            self._observer.started(create_s=create_s, ready_s=ready_s)

    # -- records -----------------------------------------------------------------------------------------------------

    def _write_first(self, record: DiskRecord) -> None:
        """Write the record of a sandbox before there is anything of it."""
        if self.records.path(record.sandbox_id).exists():
            raise SandboxIdInUse(
                f"a record of sandbox {record.sandbox_id} exists: another process's, or one to be swept"
            )
        self._write(record)

    def _write(self, record: DiskRecord) -> None:
        try:
            self.records.write(record)
        except OSError as error:
            raise SandboxError(
                f"the record of sandbox {record.sandbox_id} cannot be written ({error}), and nothing is started that "
                f"could not be cleaned up. Make room in {self.records.directory}, or name another directory."
            ) from error

    # -- ends --------------------------------------------------------------------------------------------------------

    def _forget(self, sandbox: S, *, reason: DeathReason, detail: str) -> None:
        """Close the books of a sandbox of which nothing is left."""
        if sandbox.death is not None:
            return
        self._alive.pop(sandbox.id, None)
        self._close(sandbox, death(reason, detail=detail))
        self.records.remove(sandbox.id)  # if this fails the loop reports it, and a later sweep tries again

    def _close(self, sandbox: S, end: Death) -> None:
        """Say that a sandbox has ended."""
        sandbox.ended(end)
        if self._observer is not None:
            self._observer.ended(end)
        self._ends[sandbox.id] = sandbox.status()
        while len(self._ends) > _REMEMBERED_ENDS:
            self._ends.popitem(last=False)


def ended_id(sandbox_id: str) -> SandboxIdInUse:
    """Return the error of a creation with the id of a sandbox that has ended."""
    return SandboxIdInUse(f"sandbox {sandbox_id} has ended; an id names one sandbox for good, so choose another")
