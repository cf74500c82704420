"""T20: scorers that hang, raise, or run off the main thread.

Reported elsewhere: a signal-based timeout fails off the main thread and every math reward is 0 (verl 3407, 5635);
without it one expression hangs the run (verl 5839); a timed-out grader keeps its pool slot for ever (AReaL 1426); the
alarm fires inside the event loop and wedges it (cookbook 438).
"""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollmill.clock import VirtualClock
from rollmill.environments.score_pool import ScorePool
from rollmill.environments.scoring import ScorerSpec
from rollmill.testing import run_virtual
from rollmill.types import Outcome, Scored, Unscored

TIMEOUT = Unscored(reason="reward_failed(timeout)")
SCORERS = '''
import re, signal, threading, time

def hang(text, reference):
    time.sleep(60)
    return 1.0

def backtrack(text, reference):
    """Never lets another thread of its process run, as a regular expression or a symbolic solver does."""
    return float(bool(re.match(r"(a+)+$", "a" * 60 + "b")))

def by_text(text, reference):
    if text == "raise":
        raise ZeroDivisionError("division by zero")
    if text == "hang":
        time.sleep(60)
    return 1.0

def alarmed(text, reference):
    """Sets its own alarm signal, as math graders do; that works on the main thread only."""
    assert threading.current_thread() is threading.main_thread()
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(1)
    signal.alarm(0)
    return 1.0
'''


class SleepingJudge:
    def __init__(self, spec: ScorerSpec) -> None:
        self._alive = True

    async def ready(self) -> None: ...

    async def ask(self, text: str, *, reference: dict[str, Any]) -> float | None:
        await asyncio.sleep(60.0)
        return 0.0

    async def kill(self) -> None:
        self._alive = False

    def alive(self) -> bool:
        return self._alive


@pytest.fixture
def scorers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "t20_scorers.py").write_text(SCORERS)
    monkeypatch.syspath_prepend(tmp_path)
    return "t20_scorers"


async def score_all(pool: ScorePool, *texts: str) -> list[Outcome]:
    return list(await asyncio.gather(*(pool.score(text, reference={}) for text in texts)))


def test_six_jobs_that_sleep_60_s_end_two_by_two_at_their_deadline_of_2_s_and_the_pool_keeps_its_size() -> None:
    clock = VirtualClock()
    pool = ScorePool(ScorerSpec(name="last_integer"), size=2, deadline_s=2.0, spawn=SleepingJudge)
    ended: list[float] = []

    async def one() -> Outcome:
        outcome = await pool.score("?", reference={})
        ended.append(clock.now_s())
        return outcome

    async def main() -> list[Outcome]:
        return list(await asyncio.gather(*(one() for _ in range(6))))

    assert run_virtual(main(), clock=clock) == [TIMEOUT] * 6
    assert ended == [2.0, 2.0, 4.0, 4.0, 6.0, 6.0]  # each 2 s after a process took it
    assert pool.statistics().live == 2
    assert pool.statistics().outcomes == {"scored": 0, "timeout": 6, "raised": 0, "died": 0, "bad_value": 0}


@pytest.mark.integration
@pytest.mark.parametrize("scorer", ["hang", "backtrack"])
async def test_hung_processes_are_killed_replaced_and_gone_after_close(scorers: str, scorer: str) -> None:
    pool = ScorePool(ScorerSpec(name=f"{scorers}:{scorer}"), size=2, deadline_s=0.2)
    before = set(psutil.Process().children(recursive=True))
    try:
        await pool.start()
        first = set(psutil.Process().children(recursive=True)) - before
        assert await score_all(pool, *"abcdef") == [TIMEOUT] * 6
        now = set(psutil.Process().children(recursive=True)) - before
        assert pool.statistics().live == 2
        assert not first & now
        assert len(now) == 2
    finally:
        await pool.close()
    assert set(psutil.Process().children(recursive=True)) == before


@pytest.mark.integration
async def test_a_hung_or_raising_job_does_not_touch_its_neighbours_and_is_never_a_reward(scorers: str) -> None:
    pool = ScorePool(ScorerSpec(name=f"{scorers}:by_text"), size=2, deadline_s=0.5)
    try:
        await pool.start()
        outcomes = await score_all(pool, "fine", "hang", "raise", "fine")
    finally:
        await pool.close()
    right = Scored(raw_reward=1.0, shaped_reward=1.0)
    assert (outcomes[0], outcomes[1], outcomes[3]) == (right, TIMEOUT, right)
    assert isinstance(outcomes[2], Unscored)
    assert outcomes[2].reason.startswith("reward_failed(raised: ZeroDivisionError: division by zero")


@pytest.mark.integration
def test_scoring_works_from_a_thread_and_with_a_scorer_that_sets_its_own_alarm(scorers: str) -> None:
    outcomes: list[Outcome] = []
    alarm_before = signal.getsignal(signal.SIGALRM)

    async def main() -> None:
        pool = ScorePool(ScorerSpec(name=f"{scorers}:alarmed"), size=1, deadline_s=30.0)
        try:
            outcomes.append(await pool.score("?", reference={}))
        finally:
            await pool.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert outcomes == [Scored(raw_reward=1.0, shaped_reward=1.0)]
    assert signal.getsignal(signal.SIGALRM) is alarm_before


@pytest.mark.integration
async def test_a_hung_scorer_never_holds_the_event_loop(scorers: str) -> None:
    pool = ScorePool(ScorerSpec(name=f"{scorers}:backtrack"), size=1, deadline_s=1.5)
    loop = asyncio.get_running_loop()
    longest = 0.0

    async def heartbeat() -> None:
        nonlocal longest
        while True:
            since = loop.time()
            await asyncio.sleep(0.01)
            longest = max(longest, loop.time() - since)

    try:
        await pool.start()
        beat = asyncio.ensure_future(heartbeat())
        assert await pool.score("?", reference={}) == TIMEOUT
        beat.cancel()
    finally:
        await pool.close()
    assert longest < 1.0  # the scorer held its own process for 1.5 s; the loop went on
