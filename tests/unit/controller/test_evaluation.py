from __future__ import annotations

import asyncio

import msgspec
import pytest

from rollmill.controller.evaluation import EvaluationResult, evaluate
from rollmill.errors import DeadlineExceeded, EngineDead
from rollmill.testing import ScriptedEnvironment, ToyTokenizer, VirtualClock, reply_with, run_virtual
from rollmill.types import GenerateRequest, StopReason, Turn, Unscored


def run(environment: ScriptedEnvironment, generate=None, *, deadline_s: float = 60.0) -> EvaluationResult:
    clock, toy = VirtualClock(), ToyTokenizer()
    return run_virtual(
        evaluate(
            environment.heldout(),
            environment=environment,
            renderer=toy,
            generate=generate or reply_with("1", tokenizer=toy),
            clock=clock,
            temperature=0.0,
            max_new_tokens=4,
            deadline_s=deadline_s,
            concurrency=2,
            label="eval",
        ),
        clock=clock,
    )


def test_every_held_out_task_is_asked_once_and_scored() -> None:
    result = run(ScriptedEnvironment(heldout_size=4, script=lambda task, reply: 1.0))
    assert (result.correct, result.n, result.unscored, result.unscored_reasons) == (4, 4, 0, ())


@pytest.mark.parametrize("stop", [StopReason.ABORT, StopReason.ERROR])
def test_an_answer_that_was_cut_off_by_us_is_no_wrong_answer(stop: StopReason) -> None:
    toy = ToyTokenizer()
    whole = reply_with("1", tokenizer=toy)

    async def cut_second(request: GenerateRequest) -> Turn:
        turn = await whole(request)
        return msgspec.structs.replace(turn, stop_reason=stop) if request.request_id.endswith("/1") else turn

    result = run(ScriptedEnvironment(heldout_size=4, script=lambda task, reply: 1.0), cut_second)
    assert (result.correct, result.n, result.unscored) == (3, 3, 1)
    assert result.unscored_reasons == (f"generation ended with {stop.value}",)


def test_a_lost_engine_and_a_broken_scorer_are_counted_apart_with_their_reasons() -> None:
    toy = ToyTokenizer()
    whole = reply_with("1", tokenizer=toy)

    async def die_once(request: GenerateRequest) -> Turn:
        if request.request_id.endswith("/0"):
            raise EngineDead("the worker ended")
        return await whole(request)

    environment = ScriptedEnvironment(heldout_size=3, script=lambda task, reply: Unscored(reason="reward_failed(died)"))
    result = run(environment, die_once)
    assert (result.n, result.unscored) == (0, 3)
    assert result.unscored_reasons == ("EngineDead: the worker ended", "unscored: reward_failed(died)")


def test_an_evaluation_past_its_deadline_says_how_far_it_came() -> None:
    async def slow(request: GenerateRequest) -> Turn:
        await asyncio.sleep(1000.0)
        raise AssertionError("not reached")

    with pytest.raises(DeadlineExceeded, match="0 of 4"):
        run(ScriptedEnvironment(heldout_size=4), slow, deadline_s=5.0)
