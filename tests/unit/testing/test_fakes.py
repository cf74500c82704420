"""The public fakes keep the promises of the parts that they stand for."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.clock import VirtualClock
from rollmill.errors import DataError, DeadlineExceeded, EngineDead
from rollmill.testing import Delay, FaultInjector, Hang, Raise, ScriptedEnvironment, ToyTokenizer, run_virtual
from rollmill.types import Cut, Message, Scored, Unscored

MODULES = [
    "rollmill.testing",
    "rollmill.testing.environment",
    "rollmill.testing.faults",
    "rollmill.testing.scorers",
    "rollmill.testing.tokenizer",
    "rollmill.testing.training",
    "rollmill.testing.virtual_loop",
    "rollmill.environments.gym_pool",
    "rollmill.environments.order",
    "rollmill.environments.rendering",
    "rollmill.environments.scoring",
    "rollmill.environments.split",
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_the_docstrings_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


@given(text=st.text(alphabet=string.digits + string.ascii_letters + string.punctuation + " \n"))
def test_the_toy_tokenizer_decodes_what_it_encoded(text: str) -> None:
    toy = ToyTokenizer()
    ids = toy.encode(text)
    assert toy.decode(ids) == text
    assert all(0 <= i < toy.vocabulary_size and i not in toy.stop_token_ids for i in ids)


def test_a_later_toy_prompt_extends_what_was_sampled() -> None:
    toy = ToyTokenizer()
    first = [Message(role="user", content="1 + 1 =")]
    reply = [*toy.encode("2"), toy.end_of_turn_id]
    later = toy.render([*first, Message(role="assistant", content="2"), Message(role="user", content="sure?")])
    sampled = toy.render(first).tolist() + reply
    assert later.tolist()[: len(sampled)] == sampled


def test_the_toy_tokenizer_refuses_what_it_cannot_spell() -> None:
    with pytest.raises(DataError, match="printable ASCII"):
        ToyTokenizer().encode("caf\N{LATIN SMALL LETTER E WITH ACUTE}")


def test_a_scripted_environment_gives_each_task_its_own_run_through_the_script() -> None:
    failed, cut = Unscored(reason="reward_failed(died)"), Cut(reason="overlong")
    environment = ScriptedEnvironment(size=2, script=[1.0, failed, cut])

    async def main() -> None:
        one, two = environment.task_at(0), environment.task_at(1)
        assert await environment.score(one, reply="") == Scored(raw_reward=1.0, shaped_reward=1.0)
        assert await environment.score(one, reply="") == failed
        assert await environment.score(two, reply="") == Scored(raw_reward=1.0, shaped_reward=1.0)
        assert await environment.score(one, reply="") == cut

    run_virtual(main())


def test_scripted_tasks_are_disjoint_and_the_identity_names_the_split() -> None:
    environment = ScriptedEnvironment(size=5, heldout_size=3, run_seed=1)
    training = {environment.task_at(index).task_id for index in range(5)}
    assert len(training) == 5
    assert training.isdisjoint(task.task_id for task in environment.heldout())
    assert environment.identity() == ScriptedEnvironment(size=5, heldout_size=3, run_seed=2).identity()
    assert environment.identity() != ScriptedEnvironment(size=4, heldout_size=4).identity()


def test_a_fault_strikes_at_its_call_and_at_no_other() -> None:
    faults = FaultInjector({("load", 2): Raise(lambda: EngineDead("gone")), ("load", 3): Delay(5.0)})
    clock = VirtualClock()

    async def main() -> None:
        await faults.reach("load")
        with pytest.raises(EngineDead):
            await faults.reach("load")
        assert clock.now_s() == 0.0
        await faults.reach("load")
        assert clock.now_s() == 5.0
        await faults.reach("other")

    run_virtual(main(), clock=clock)
    assert faults.fired == (("load", 2), ("load", 3))
    assert (faults.calls("load"), faults.calls("other"), faults.calls("never")) == (3, 1, 0)


def test_a_hang_ends_by_cancellation_only() -> None:
    faults = FaultInjector({("load", 1): Hang()})

    async def main() -> None:
        async with asyncio.timeout(1e6):
            await faults.reach("load")

    with pytest.raises(TimeoutError):
        run_virtual(main())


def test_a_plain_function_cannot_wait() -> None:
    with pytest.raises(ValueError, match="'reset' is a plain function and cannot delay"):
        FaultInjector({("reset", 1): Delay(1.0)}).strike("reset")


def test_a_seeded_plan_depends_on_seed_operation_and_call_and_keeps_its_rate() -> None:
    def fired(seed: int, *, order: str) -> set[tuple[str, int]]:
        faults = FaultInjector.seeded(seed, rates={"a": 0.3}, action=Delay(0.0))

        async def main() -> None:
            for operation in order:
                await faults.reach(operation)

        run_virtual(main())
        return set(faults.fired)

    plan = fired(1, order="a" * 400)
    assert plan == fired(1, order="ab" * 400)  # calls of others do not move it, and others never fail
    assert plan != fired(2, order="a" * 400)
    assert 80 < len(plan) < 160  # 120 expected, standard deviation 9


def test_the_virtual_loop_jumps_to_the_next_timer_in_order() -> None:
    clock, seen = VirtualClock(), []

    async def one(seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((seconds, clock.now_s()))

    async def main() -> None:
        await asyncio.gather(one(300.0), one(0.5), one(3600.0))

    run_virtual(main(), clock=clock)
    assert seen == [(0.5, 0.5), (300.0, 300.0), (3600.0, 3600.0)]


def test_the_virtual_loop_reports_a_wait_that_nothing_can_end() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded, match="every task waits and no timer is set"):
        run_virtual(main())
