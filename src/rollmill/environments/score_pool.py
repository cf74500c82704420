"""A pool of scoring processes.

Each caller takes one of a fixed number of slots, asks the slot's process, and gives the slot back; a process that hung,
died or was left in the middle of a job is killed and replaced first, so the size is constant. It never scores on the
event loop, sets no signal, and never turns a failure into a reward.

    Wait            Woken by                 Gives up after
    for a slot      the slot's last caller   the jobs ahead, each of which has its deadline; callers bound the queue
    for a start     the process' first word  start_deadline_s
    for a score     the process' answer      deadline_s, counted from the job's own start
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import Any

import msgspec

from rollmill.environments.score_process import Judge, ScoreProcess, ScorerRefused
from rollmill.environments.scoring import ScorerSpec, verdict
from rollmill.errors import ConfigError, ScoringFault
from rollmill.types import Outcome, Scored, Unscored

START_DEADLINE_S = 60.0
ALARM_WINDOW = 64
_LONGEST_REASON = 120


class ScoreStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """State of a pool.

    Attributes:
        live: scoring processes that run.
        waiting: callers without a slot.
        outcomes: `scored`, `timeout`, `raised`, `died`, `bad_value` -> jobs.
        replaced: processes killed and started again.
        last_fault: the whole text of the newest failure.
        alarm: a sentence if the newest scores are all equal or all failed, else empty.
    """

    size: int
    live: int
    busy: int
    waiting: int
    outcomes: dict[str, int]
    replaced: int
    last_fault: str
    alarm: str


class ScoreBook:
    """Counts outcomes and notices when the newest ones say nothing: all failed, or all equal. Pure."""

    def __init__(self, *, window: int = ALARM_WINDOW) -> None:
        self.outcomes: dict[str, int] = dict.fromkeys(("scored", "timeout", "raised", "died", "bad_value"), 0)
        self.last_fault = ""
        self._newest: collections.deque[float | None] = collections.deque(maxlen=window)

    def note(self, outcome: Outcome, *, kind: str, fault: str = "") -> None:
        """Count one job; `kind` is `scored` or a fault's kind."""
        self.outcomes[kind] += 1
        self.last_fault = fault or self.last_fault
        self._newest.append(outcome.raw_reward if isinstance(outcome, Scored) else None)

    def alarm(self) -> str:
        """Return the sentence to show, empty while all is well or too little is known."""
        newest = self._newest
        if len(newest) < (newest.maxlen or 0):
            return ""
        scores = {score for score in newest if score is not None}
        if not scores:
            return (
                f"the last {len(newest)} scores all failed, so nothing is learned; the newest failure: "
                f"{self.last_fault}. Test the scorer on one reply; if it times out, raise "
                "environment.scoring_deadline_s."
            )
        if len(scores) == 1 and None not in newest:
            value = next(iter(scores))
            return (
                f"the last {len(newest)} scores are all {value:g}, so nothing is learned: the task is too "
                f"{'hard' if value == 0 else 'easy'} for this policy, or the scorer does not read its replies."
            )
        return ""


class _Slot:
    def __init__(self) -> None:
        self.judge: Judge | None = None


class ScorePool:
    """A constant number of scoring processes behind one awaitable.

    Args:
        spec: the scorer.
        size: processes.
        deadline_s: time for one score, from the moment a process takes it.
        start_deadline_s: time for a process to build its scorer.
        spawn: makes a judge; a seam for tests.
        alarm_window: newest scores that the alarm looks at.
    """

    def __init__(
        self,
        spec: ScorerSpec,
        *,
        size: int,
        deadline_s: float,
        start_deadline_s: float = START_DEADLINE_S,
        spawn: Callable[[ScorerSpec], Judge] = ScoreProcess,
        alarm_window: int = ALARM_WINDOW,
    ) -> None:
        self._spec = spec
        self._deadline_s = deadline_s
        self._start_deadline_s = start_deadline_s
        self._spawn = spawn
        self._slots = [_Slot() for _ in range(size)]
        self._idle: asyncio.Queue[_Slot] = asyncio.Queue()
        for slot in self._slots:
            self._idle.put_nowait(slot)
        self._book = ScoreBook(window=alarm_window)
        self._waiting = 0
        self._replaced = 0
        self._closed = False

    async def start(self) -> None:
        """Start all processes and wait until each has built its scorer. Optional: `score` starts what is missing.

        Raises:
            ConfigError: if the scorer cannot be built.
            ScoringFault: kind `died`, if a process ended or did not get ready.
        """
        for slot in self._slots:
            self._fill(slot)
        try:
            async with asyncio.TaskGroup() as group:
                for slot in self._slots:
                    group.create_task(self._ready(slot))
        except* ScoringFault as faults:
            first = faults.exceptions[0]
            if isinstance(first, ScorerRefused):
                raise ConfigError(f"environment.scorer: {first}") from None
            raise first from None

    async def score(self, text: str, *, reference: dict[str, Any]) -> Outcome:
        """Return the verdict on a reply: `Scored`, or `Unscored` with `reward_failed(...)` or `bad_value`.

        Raises:
            ScoringFault: if the pool is closed.

        Cancellation:
            the process that worked on it is replaced and the slot is free again.
        """
        self._waiting += 1
        try:
            slot = await self._idle.get()
        finally:
            self._waiting -= 1
        try:
            self._check_open()
            return await self._judge(slot, text=text, reference=reference)
        finally:
            self._idle.put_nowait(slot)

    def statistics(self) -> ScoreStatistics:
        """Return counts, live processes and the alarm."""
        return ScoreStatistics(
            size=len(self._slots),
            live=sum(slot.judge is not None and slot.judge.alive() for slot in self._slots),
            busy=len(self._slots) - self._idle.qsize(),
            waiting=self._waiting,
            outcomes=dict(self._book.outcomes),
            replaced=self._replaced,
            last_fault=self._book.last_fault,
            alarm=self._book.alarm(),
        )

    async def close(self) -> None:
        """Kill all processes; idempotent. Callers that still wait get a `ScoringFault` or `Unscored`."""
        self._closed = True
        for slot in self._slots:
            judge, slot.judge = slot.judge, None
            if judge is not None:
                await judge.kill()

    async def _judge(self, slot: _Slot, *, text: str, reference: dict[str, Any]) -> Outcome:
        try:
            judge = await self._ready(slot)
            async with asyncio.timeout(self._deadline_s):
                outcome = verdict(await judge.ask(text, reference=reference))
        except TimeoutError:
            await self._replace(slot)
            return self._failed("timeout", fault=f"no score within {self._deadline_s:g} s", reason="timeout")
        except ScoringFault as fault:
            if fault.kind == "died":
                await self._replace(slot)
                return self._failed("died", fault=str(fault), reason="died")
            return self._failed(fault.kind, fault=str(fault), reason=f"raised: {str(fault)[:_LONGEST_REASON]}")
        except asyncio.CancelledError:
            await self._replace(slot)
            raise
        if isinstance(outcome, Unscored):
            self._book.note(outcome, kind="bad_value", fault="the scorer returned no number between 0 and 1")
        else:
            self._book.note(outcome, kind="scored")
        return outcome

    def _failed(self, kind: str, *, fault: str, reason: str) -> Unscored:
        outcome = Unscored(reason=f"reward_failed({reason})")
        self._book.note(outcome, kind=kind, fault=fault)
        return outcome

    async def _ready(self, slot: _Slot) -> Judge:
        judge = self._fill(slot)
        try:
            async with asyncio.timeout(self._start_deadline_s):
                await judge.ready()
        except TimeoutError as error:
            message = f"a scoring process was not ready within {self._start_deadline_s:g} s"
            raise ScoringFault(message, kind="died") from error
        return judge

    def _fill(self, slot: _Slot) -> Judge:
        self._check_open()
        if slot.judge is None:
            try:
                slot.judge = self._spawn(self._spec)
            except OSError as error:
                raise ScoringFault(f"a scoring process could not be started: {error}", kind="died") from error
        return slot.judge

    async def _replace(self, slot: _Slot) -> None:
        """Kill the slot's process and start the next one; where that fails, the next job tries again."""
        judge, slot.judge = slot.judge, None
        if judge is None or self._closed:
            return
        self._replaced += 1
        try:
            await judge.kill()
        finally:
            if not self._closed:
                try:
                    self._fill(slot)
                except ScoringFault as fault:
                    self._book.last_fault = str(fault)

    def _check_open(self) -> None:
        if self._closed:
            raise ScoringFault("the scoring pool is closed", kind="died")
