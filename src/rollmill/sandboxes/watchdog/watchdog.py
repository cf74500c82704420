"""The watchdog: once a second it looks at every sandbox, and ends those that are bombs. Decides nothing itself.

    what it waits for            until when             and then
    a look at all sandboxes      `survey_s`             goes on with those that were seen; the others are counted
    freeze                       `freeze_s`             the next step, whatever became of it
    a look for evidence          `describe_s`           the same
    the evidence's file          `record_s`             the same; the death's detail says that it is missing
    the end                      `kill_s`, a few times  counts it as failed, and lets go of it when it is gone

Ends run beside the sweeps, each on its own: one sandbox that does not die holds up nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from rollmill.sandboxes.records import Death, DeathReason
from rollmill.sandboxes.watchdog.background import Background
from rollmill.sandboxes.watchdog.evidence import DiskEvidence
from rollmill.sandboxes.watchdog.law import judge, next_tick, trim
from rollmill.sandboxes.watchdog.overseen import EvidenceKeeper, Overseen
from rollmill.sandboxes.watchdog.records import (
    Evidence,
    KillReport,
    Pressure,
    Sample,
    Severity,
    Step,
    Survey,
    Verdict,
    WatchdogStatistics,
    Watched,
    newborn,
)
from rollmill.sandboxes.watchdog.settings import WatchdogSettings

T = TypeVar("T")

_REMEMBERED_KILLS = 1000
_LAST_S = 5.0
_JUDGED_AT_ONCE = 50
_GRACE_S = 0.1  # a survey keeps its limit by itself; this is for one that does not


class Watchdog:
    """Watches the sandboxes of one provider. Use it as an asynchronous context manager, or call `run` in your own task.

    Args:
        overseen: how they are seen and ended.
        settings: the bounds.
        evidence: where evidence is kept; `None`: on disk, as the settings say.
        pressure: of the node, as last read; must not block.
        on_kill: told how each end went.

    Example:
        >>> from rollmill.sandboxes.watchdog import NoEvidence, ProviderOverseen
        >>> from rollmill.testing import FakeSandboxProvider, run_virtual
        >>> async def three_seconds() -> int:
        ...     watchdog = Watchdog(ProviderOverseen(FakeSandboxProvider()), evidence=NoEvidence())
        ...     async with watchdog:
        ...         await asyncio.sleep(2.5)
        ...     return watchdog.statistics().ticks
        >>> run_virtual(three_seconds())
        3
    """

    def __init__(
        self,
        overseen: Overseen,
        *,
        evidence: EvidenceKeeper | None = None,
        settings: WatchdogSettings | None = None,
        pressure: Callable[[], Pressure | None] = lambda: None,
        on_kill: Callable[[KillReport], None] = lambda _: None,
    ) -> None:
        self._overseen = overseen
        self._settings = WatchdogSettings() if settings is None else settings
        self._evidence = _disk_evidence(self._settings) if evidence is None else evidence
        self._pressure = pressure
        self._on_kill = on_kill
        self._windows: dict[str, list[Sample]] = {}
        self._heard_of_s: dict[str, float | None] = {}
        self._condemned: set[str] = set()
        self._stuck: set[str] = set()
        self._last_sweep_s: float | None = None
        self._kills: Counter[DeathReason] = Counter()
        self._failed_steps: Counter[str] = Counter()
        self._statistics = WatchdogStatistics()
        self._background = Background("the watchdog over sandboxes")
        self.reports: deque[KillReport] = deque(maxlen=_REMEMBERED_KILLS)
        """How the last ends went."""

    async def __aenter__(self) -> Watchdog:
        """Begin to watch."""
        self._background.start(self.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; ends that are under way are given their order first."""
        await self._background.stop()

    def statistics(self) -> WatchdogStatistics:
        """Return what was done so far."""
        return _changed(
            self._statistics,
            condemned=len(self._condemned),
            kills=dict(self._kills),
            failed_steps=dict(self._failed_steps),
        )

    async def run(self) -> None:
        """Sweep until cancelled; whoever calls owns the task.

        Cancellation: ends that are under way are cut off; the order to end stands once it was given.
        """
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                late_s = max(0.0, loop.time() - due_s)
                self._count(late_s=late_s, worst_late_s=max(late_s, self._statistics.worst_late_s))
                await self.sweep(group)
                due_s, missed = next_tick(due_s, now_s=loop.time(), interval_s=self._settings.interval_s)
                self._count(missed_ticks=self._statistics.missed_ticks + missed)

    async def sweep(self, group: asyncio.TaskGroup) -> None:
        """Look once at all sandboxes; ends that follow run in `group`."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self._count(ticks=self._statistics.ticks + 1)
        survey = await self._survey()
        if survey is not None:
            self._take_note(survey)
            warned = 0
            pressure = self._pressure() or Pressure()
            for number, (sandbox_id, watched) in enumerate(survey.found.items()):
                if number % _JUDGED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # thousands of sandboxes must not hold up those who use them
                if sandbox_id in self._condemned or sandbox_id in self._stuck:
                    continue
                verdict = self._judge(sandbox_id, watched, pressure)
                warned += verdict.severity is Severity.WARN
                if verdict.severity is Severity.KILL:
                    self._condemned.add(sandbox_id)
                    group.create_task(self._carry_out(sandbox_id, watched, verdict, pressure))
            late = self._statistics.late_samples + len(survey.late)
            self._count(watched=len(survey.found), warned=warned, late_samples=late)
            self._last_sweep_s = began_s
        sweep_s = loop.time() - began_s
        self._count(sweep_s=sweep_s, worst_sweep_s=max(sweep_s, self._statistics.worst_sweep_s))

    async def _survey(self) -> Survey | None:
        limit_s = self._settings.survey_s
        try:
            async with asyncio.timeout(limit_s + _GRACE_S):
                return await self._overseen.survey(limit_s=limit_s)
        except Exception:  # a provider that fails must not end the watch over it: counted, and tried again
            self._count(failed_surveys=self._statistics.failed_surveys + 1)
            return None

    def _take_note(self, survey: Survey) -> None:
        """Note who is new, and drop what is known of sandboxes that are gone."""
        alive = {*survey.found, *survey.late}
        # A new one was born since the last sweep; at the first sweep nobody knows how old any of them is.
        self._heard_of_s = {one: self._heard_of_s.get(one, self._last_sweep_s) for one in alive}
        self._windows = {one: window for one, window in self._windows.items() if one in alive}
        self._stuck &= alive

    def _judge(self, sandbox_id: str, watched: Watched, pressure: Pressure) -> Verdict:
        window = self._windows.get(sandbox_id)
        if window is None:
            born_s = self._heard_of_s[sandbox_id]
            window = [] if born_s is None else [newborn(min(born_s, watched.sample.at_s))]
        window = trim([*window, watched.sample], window_s=self._settings.window_s)
        self._windows[sandbox_id] = window
        return judge(window, limits=watched.limits, settings=self._settings, pressure=pressure)

    # -- an end ------------------------------------------------------------------------------------------------------

    async def _carry_out(self, sandbox_id: str, watched: Watched, verdict: Verdict, pressure: Pressure) -> None:
        """Freeze, look for evidence, write it, end it, and forget it; each step is bounded, and none stops the next."""
        assert verdict.reason is not None
        reason, steps = verdict.reason, list[Step]()
        path, end, detail = "", None, verdict.text
        try:
            await self._step(steps, "freeze", self._overseen.freeze(sandbox_id), self._settings.freeze_s)
            details = await self._step(
                steps, "describe", self._overseen.describe(sandbox_id), self._settings.describe_s
            )
            evidence = self._put_together(sandbox_id, watched, verdict, pressure, details or {}, steps)
            path = await self._step(steps, "record", self._evidence.keep(evidence), self._settings.record_s) or ""
            detail = f"{verdict.text}. Evidence: {path or steps[-1].error or 'none is kept'}"
            end = await self._end(steps, sandbox_id, reason=reason, detail=detail)
        except asyncio.CancelledError:
            # Frozen for good would be worse than either: the order is given, and its end waited for a little.
            kill = self._overseen.kill(sandbox_id, reason=reason, detail=detail)
            await self._step(steps, "kill", kill, min(_LAST_S, self._settings.kill_s))
            raise
        self._close(
            KillReport(
                sandbox_id=sandbox_id, reason=reason, detail=detail, evidence=path, steps=tuple(steps), death=end
            )
        )

    def _close(self, report: KillReport) -> None:
        """Count an end, and forget the sandbox."""
        self._windows.pop(report.sandbox_id, None)
        self._condemned.discard(report.sandbox_id)
        self._failed_steps.update(one.name for one in report.steps if one.error)
        if report.death is None:
            # No further sweep begins all over; its provider still has the order.
            self._stuck.add(report.sandbox_id)
            self._count(failed_kills=self._statistics.failed_kills + 1)
        else:
            self._kills[report.death.reason] += 1
        self.reports.append(report)
        self._on_kill(report)

    async def _end(self, steps: list[Step], sandbox_id: str, *, reason: DeathReason, detail: str) -> Death | None:
        for _ in range(self._settings.kill_attempts):
            began_s = asyncio.get_running_loop().time()
            kill = self._overseen.kill(sandbox_id, reason=reason, detail=detail)
            if (end := await self._step(steps, "kill", kill, self._settings.kill_s)) is not None:
                return end
            # What failed at once is not tried again at once.
            await asyncio.sleep(max(0.0, began_s + self._settings.interval_s - asyncio.get_running_loop().time()))
        return None

    async def _step(self, steps: list[Step], name: str, work: Awaitable[T], limit_s: float) -> T | None:
        loop = asyncio.get_running_loop()
        began_s, error, result = loop.time(), "", None
        try:
            async with asyncio.timeout(limit_s):
                result = await work
        except TimeoutError:
            error = f"took more than {limit_s:g} s"
        except Exception as failure:  # whatever it was, the sandbox must still be ended; the report says what
            error = f"{type(failure).__name__}: {failure}"
        steps.append(Step(name=name, wall_s=loop.time() - began_s, error=error))
        return result

    def _put_together(
        self,
        sandbox_id: str,
        watched: Watched,
        verdict: Verdict,
        pressure: Pressure,
        details: Mapping[str, Any],
        steps: list[Step],
    ) -> Evidence:
        assert verdict.reason is not None
        return Evidence(
            sandbox_id=sandbox_id,
            reason=verdict.reason,
            wall_s=time.time(),
            limits=watched.limits,
            findings=verdict.findings,
            samples=tuple(self._windows.get(sandbox_id, ())),
            pressure=pressure,
            details=details,
            steps=tuple(steps),
        )

    def _count(self, **changes: Any) -> None:
        self._statistics = _changed(self._statistics, **changes)


def _disk_evidence(settings: WatchdogSettings) -> DiskEvidence:
    return DiskEvidence(settings.directory, most_files=settings.evidence_files, most_bytes=settings.evidence_bytes)


def _changed(statistics: WatchdogStatistics, **changes: Any) -> WatchdogStatistics:
    return msgspec.structs.replace(statistics, **changes)
