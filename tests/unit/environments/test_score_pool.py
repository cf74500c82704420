"""The pool's rules over scripted judges on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rollmill.clock import VirtualClock
from rollmill.environments.score_pool import ScorePool
from rollmill.environments.score_process import ScorerRefused
from rollmill.environments.scoring import ScorerSpec
from rollmill.errors import ConfigError, ScoringFault
from rollmill.testing import run_virtual
from rollmill.types import Outcome, Scored, Unscored

RIGHT = Scored(raw_reward=1.0, shaped_reward=1.0)


class FakeJudge:
    """Scores by what the text says: `sleep 60`, `raise`, `die`, or a number."""

    def __init__(self, *, start_s: float = 0.0, refuses: bool = False) -> None:
        self.killed = False
        self._start_s = start_s
        self._refuses = refuses

    async def ready(self) -> None:
        await asyncio.sleep(self._start_s)
        if self._refuses:
            raise ScorerRefused("no such module", kind="died")

    async def ask(self, text: str, *, reference: dict[str, Any]) -> float | None:
        assert not self.killed
        word, _, rest = text.partition(" ")
        if word == "sleep":
            await asyncio.sleep(float(rest))
            return 1.0
        if word == "raise":
            raise ScoringFault(rest, kind="raised")
        if word == "die":
            raise ScoringFault("the scoring process ended", kind="died")
        return float(text)

    async def kill(self) -> None:
        await asyncio.sleep(0.01)
        self.killed = True

    def alive(self) -> bool:
        return not self.killed


class Workshop:
    """Makes judges and remembers them."""

    def __init__(self, make: Callable[[], FakeJudge] = FakeJudge) -> None:
        self.made: list[FakeJudge] = []
        self._make = make

    def __call__(self, spec: ScorerSpec) -> FakeJudge:
        self.made.append(self._make())
        return self.made[-1]

    @property
    def live(self) -> int:
        return sum(judge.alive() for judge in self.made)


def make_pool(workshop: Workshop, *, size: int = 2, deadline_s: float = 2.0, window: int = 4) -> ScorePool:
    return ScorePool(
        ScorerSpec(name="last_integer"), size=size, deadline_s=deadline_s, spawn=workshop, alarm_window=window
    )


async def score_all(pool: ScorePool, *texts: str) -> list[Outcome]:
    return list(await asyncio.gather(*(pool.score(text, reference={}) for text in texts)))


def test_a_hung_scorer_ends_at_its_deadline_and_its_process_is_replaced() -> None:
    workshop, clock = Workshop(), VirtualClock()
    pool = make_pool(workshop)
    outcomes = run_virtual(score_all(pool, "sleep 60"), clock=clock)
    assert outcomes == [Unscored(reason="reward_failed(timeout)")]
    assert clock.now_s() == pytest.approx(2.01)  # the deadline and the kill
    assert (len(workshop.made), workshop.live, pool.statistics().replaced) == (2, 1, 1)


def test_a_scorer_that_raises_keeps_its_process() -> None:
    workshop = Workshop()
    pool = make_pool(workshop, size=1)
    outcomes = run_virtual(score_all(pool, "raise ValueError: bad", "1"))
    assert outcomes == [Unscored(reason="reward_failed(raised: ValueError: bad)"), RIGHT]
    assert len(workshop.made) == 1


def test_a_long_exception_is_short_in_the_reason_and_whole_in_the_statistics() -> None:
    pool = make_pool(Workshop())
    (outcome,) = run_virtual(score_all(pool, "raise " + "x" * 500))
    assert isinstance(outcome, Unscored)
    assert len(outcome.reason) < 150
    assert pool.statistics().last_fault == "x" * 500


def test_a_dead_process_is_replaced_and_the_next_job_is_scored() -> None:
    workshop = Workshop()
    pool = make_pool(workshop, size=1)
    outcomes = run_virtual(score_all(pool, "die", "1"))
    assert outcomes == [Unscored(reason="reward_failed(died)"), RIGHT]
    assert workshop.live == 1


@pytest.mark.parametrize("text", ["nan", "inf", "1.5", "-1"])
def test_a_bad_value_is_unscored(text: str) -> None:
    pool = make_pool(Workshop())
    assert run_virtual(score_all(pool, text)) == [Unscored(reason="bad_value")]
    assert pool.statistics().outcomes["bad_value"] == 1


def test_a_cancelled_score_gives_its_slot_back_with_a_fresh_process() -> None:
    workshop = Workshop()
    pool = make_pool(workshop, size=1)

    async def main() -> Outcome:
        task = asyncio.ensure_future(pool.score("sleep 60", reference={}))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await pool.score("1", reference={})

    assert run_virtual(main()) == RIGHT
    assert [judge.killed for judge in workshop.made] == [True, False]
    assert pool.statistics().busy == 0


def test_a_caller_cancelled_while_it_waits_for_a_slot_costs_nothing() -> None:
    workshop = Workshop()
    pool = make_pool(workshop, size=1, deadline_s=10.0)

    async def main() -> list[Outcome]:
        first = asyncio.ensure_future(pool.score("sleep 5", reference={}))
        second = asyncio.ensure_future(pool.score("1", reference={}))
        await asyncio.sleep(1)
        assert pool.statistics().waiting == 1
        second.cancel()
        return [await first, await pool.score("1", reference={})]

    assert run_virtual(main()) == [RIGHT, RIGHT]
    assert (len(workshop.made), pool.statistics().waiting) == (1, 0)


def test_waiting_for_a_slot_does_not_eat_a_jobs_deadline() -> None:
    pool = make_pool(Workshop(), size=1, deadline_s=2.0)
    assert run_virtual(score_all(pool, "sleep 1.5", "sleep 1.5", "sleep 1.5")) == [RIGHT] * 3


def test_a_slow_start_does_not_eat_a_jobs_deadline() -> None:
    pool = make_pool(Workshop(lambda: FakeJudge(start_s=5.0)), size=1, deadline_s=2.0)
    assert run_virtual(score_all(pool, "1")) == [RIGHT]


def test_a_process_that_never_gets_ready_ends_its_job_at_the_start_deadline() -> None:
    workshop = Workshop(lambda: FakeJudge(start_s=1e9))
    pool = make_pool(workshop, size=1)
    clock = VirtualClock()
    assert run_virtual(score_all(pool, "1"), clock=clock) == [Unscored(reason="reward_failed(died)")]
    assert clock.now_s() == pytest.approx(60.01)
    assert "not ready within 60 s" in pool.statistics().last_fault


def test_start_raises_what_keeps_the_scorer_from_being_built_as_the_users_to_fix() -> None:
    pool = make_pool(Workshop(lambda: FakeJudge(refuses=True)))
    with pytest.raises(ConfigError, match=r"environment\.scorer: no such module"):
        run_virtual(pool.start())


def test_start_brings_up_every_process() -> None:
    workshop = Workshop(lambda: FakeJudge(start_s=1.0))
    pool = make_pool(workshop, size=3)
    clock = VirtualClock()
    run_virtual(pool.start(), clock=clock)
    assert (pool.statistics().live, clock.now_s()) == (3, 1.0)  # at once, not one after another


def test_a_closed_pool_has_no_process_and_scores_nothing() -> None:
    workshop = Workshop()
    pool = make_pool(workshop)

    async def main() -> None:
        await score_all(pool, "1", "1")
        await pool.close()
        await pool.close()
        with pytest.raises(ScoringFault, match="closed"):
            await pool.score("1", reference={})

    run_virtual(main())
    assert workshop.live == 0


def test_the_alarm_speaks_when_the_newest_scores_all_failed() -> None:
    pool = make_pool(Workshop(), window=3)
    run_virtual(score_all(pool, "1", "raise boom", "raise boom"))
    assert pool.statistics().alarm == ""
    run_virtual(score_all(pool, "raise boom"))
    assert "the last 3 scores all failed" in pool.statistics().alarm
    assert "boom" in pool.statistics().alarm


def test_the_alarm_speaks_when_the_newest_scores_are_all_equal_and_stops_when_they_are_not() -> None:
    pool = make_pool(Workshop(), window=3)
    run_virtual(score_all(pool, "0", "0", "0"))
    assert "the last 3 scores are all 0, so nothing is learned: the task is too hard" in pool.statistics().alarm
    run_virtual(score_all(pool, "1"))
    assert pool.statistics().alarm == ""
