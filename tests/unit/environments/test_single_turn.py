from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from rollmill.clock import VirtualClock
from rollmill.config.schema import ScheduleSettings
from rollmill.environments import run_rollout
from rollmill.environments.single_turn import turn_request
from rollmill.errors import EngineError, RequestAborted
from rollmill.scheduling.instructions import StartRollout
from rollmill.testing import Delay, FaultInjector, Raise, ScriptedEnvironment, ToyTokenizer, reply_with, run_virtual
from rollmill.types import (
    Cut,
    GenerateRequest,
    Rollout,
    SamplingParams,
    Scored,
    StopReason,
    Turn,
    Unscored,
    VersionSpan,
    Wave,
    derive_seed,
)

TOY = ToyTokenizer()
SAMPLING = SamplingParams(max_new_tokens=10, seed=99)


def start(*, task_index: int = 0, deadline_s: float = 100.0) -> StartRollout:
    return StartRollout(
        rollout_id="g0/1.2", group_id="g0", task_index=task_index, sibling=1, attempt=2, deadline_s=deadline_s
    )


def rollout(
    replies: Any,
    *,
    environment: ScriptedEnvironment | None = None,
    schedule: ScheduleSettings | None = None,
    generate: Any = None,
    clock: VirtualClock | None = None,
    **arguments: Any,
) -> Rollout:
    clock = clock or VirtualClock()
    return run_virtual(
        run_rollout(
            arguments.pop("instruction", start()),
            environment=environment or ScriptedEnvironment(size=1),
            renderer=TOY,
            generate=generate or reply_with(replies, tokenizer=TOY),
            sampling=SAMPLING,
            schedule=schedule or ScheduleSettings(),
            clock=clock,
            **arguments,
        ),
        clock=clock,
    )


def test_a_single_turn_rollout_carries_what_identifies_it_and_the_scored_reply() -> None:
    done = rollout(" 1 ")
    assert (done.rollout_id, done.group_id, done.sibling, done.attempt) == ("g0/1.2", "g0", 1, 2)
    assert done.outcome == Scored(raw_reward=1.0, shaped_reward=1.0)
    assert TOY.decode(done.turns[0].output_ids) == " 1 "
    assert TOY.decode(done.turns[0].prompt_ids) == "0 + 1 ="
    assert done.policy_versions == (1,)


def test_the_request_has_its_own_seed_the_models_stops_and_shares_the_groups_prompt() -> None:
    seen: list[GenerateRequest] = []
    inner = reply_with("1", tokenizer=TOY)

    async def generate(request: GenerateRequest) -> Turn:
        seen.append(request)
        return await inner(request)

    rollout("", generate=generate, min_policy_version=4, request_deadline_s=30.0)
    (request,) = seen
    assert request.request_id == "g0/1.2/turn0"
    assert request.group_key == "g0"
    assert request.sampling.seed == derive_seed(99, "turn", 0)
    assert request.sampling.stop_token_ids == TOY.stop_token_ids
    assert (request.min_policy_version, request.deadline_s) == (4, 30.0)


def test_only_the_first_turn_takes_part_in_the_groups_prompt_and_wave() -> None:
    wave = Wave(wave_id="w0", size=4, index=1)
    calls = [
        turn_request(
            msgspec.structs.replace(start(), wave=wave),
            turn=turn,
            prompt_ids=np.arange(3),
            sampling=SAMPLING,
            deadline_s=-1.0,
            min_policy_version=7,
        )
        for turn in (0, 1)
    ]
    assert [(call.group_key, call.wave) for call in calls] == [("g0", wave), ("", None)]
    assert [call.request_id for call in calls] == ["g0/1.2/turn0", "g0/1.2/turn1"]
    assert [(call.deadline_s, call.min_policy_version) for call in calls] == [(0.0, 7)] * 2


@pytest.mark.parametrize(("rollout_deadline_s", "request_deadline_s"), [(25.0, 15.0), (5.0, 0.0)])
def test_a_request_never_outlives_its_rollout(rollout_deadline_s: float, request_deadline_s: float) -> None:
    seen: list[float] = []
    inner = reply_with("1", tokenizer=TOY)

    async def generate(request: GenerateRequest) -> Turn:
        seen.append(request.deadline_s)
        return await inner(request)

    clock = VirtualClock(start_s=10.0)
    rollout("", generate=generate, clock=clock, instruction=start(deadline_s=rollout_deadline_s))
    assert seen == [request_deadline_s]  # 25 - 10; and 0 where the deadline has passed


def test_phases_and_stamps_are_the_clocks() -> None:
    faults = FaultInjector({("generate", 1): Delay(3.0), ("score", 1): Delay(0.5)})
    done = rollout(
        "",
        environment=ScriptedEnvironment(size=1, faults=faults),
        generate=reply_with("1", tokenizer=TOY, faults=faults),
        clock=VirtualClock(start_s=7.0),
    )
    assert (done.started_at_s, done.finished_at_s) == (7.0, 10.5)
    assert done.seconds == {"generate": 3.0, "score": 0.5}


def test_a_reply_cut_by_the_cap_is_scored_penalised_or_masked_by_policy() -> None:
    long = "1" + " " * 20  # cut at 10 tokens; the rest still solves the task
    assert rollout(long).turns[0].stop_reason is StopReason.LENGTH
    assert rollout(long, schedule=ScheduleSettings(overlong="score")).outcome == Scored(
        raw_reward=1.0, shaped_reward=1.0
    )
    assert rollout(long, schedule=ScheduleSettings(overlong="mask")).outcome == Cut(reason="overlong")
    # at the cap the full penalty of 0.5 applies; the raw reward stays
    soft = ScheduleSettings(overlong="soft_penalty", overlong_buffer_tokens=4, overlong_penalty=0.5)
    assert rollout(long, schedule=soft).outcome == Scored(raw_reward=1.0, shaped_reward=0.5)


def test_the_soft_penalty_grows_inside_the_buffer_zone_also_without_a_cut() -> None:
    # cap 10, zone of 4 tokens from 6 on: 8 tokens ("1", 6 blanks, end of turn) are halfway, so half of 0.5
    soft = ScheduleSettings(overlong="soft_penalty", overlong_buffer_tokens=4, overlong_penalty=0.5)
    done = rollout("1" + " " * 6, schedule=soft)
    assert done.output_tokens == 8
    assert done.outcome == Scored(raw_reward=1.0, shaped_reward=0.75)
    assert rollout("1", schedule=soft).outcome == Scored(raw_reward=1.0, shaped_reward=1.0)


def test_a_masked_reply_costs_no_scoring() -> None:
    faults = FaultInjector({})
    environment = ScriptedEnvironment(size=1, faults=faults)
    rollout("1" * 20, environment=environment, schedule=ScheduleSettings(overlong="mask"))
    assert faults.calls("score") == 0


def test_an_unscored_outcome_passes_through_and_gets_no_penalty() -> None:
    failed = Unscored(reason="reward_failed(timeout)")
    soft = ScheduleSettings(overlong="soft_penalty")
    assert rollout("1" * 20, environment=ScriptedEnvironment(size=1, script=[failed]), schedule=soft).outcome == failed


def test_further_turns_continue_the_conversation_with_seeds_of_their_own() -> None:
    seen: list[GenerateRequest] = []
    inner = reply_with(["5", "1"], tokenizer=TOY)

    async def generate(request: GenerateRequest) -> Turn:
        seen.append(request)
        return await inner(request)

    environment = ScriptedEnvironment(size=1, follow_ups=["wrong, again"])
    done = rollout("", environment=environment, generate=generate, max_turns=3)
    assert [TOY.decode(turn.output_ids) for turn in done.turns] == ["5", "1"]
    assert done.outcome == Scored(raw_reward=1.0, shaped_reward=1.0)  # the last reply counts
    first, second = seen
    sampled = np.concatenate([first.prompt_ids, done.turns[0].output_ids])
    assert TOY.extends(sampled, second.prompt_ids)
    assert first.sampling.seed != second.sampling.seed
    assert (second.request_id, second.group_key) == ("g0/1.2/turn1", "")


def test_a_rollout_that_is_not_done_at_the_turn_limit_is_cut() -> None:
    environment = ScriptedEnvironment(size=1, follow_ups=["again"] * 5)
    assert rollout("5", environment=environment, max_turns=2).outcome == Cut(reason="turn_limit")


@pytest.mark.parametrize(("stop", "error"), [(StopReason.ABORT, RequestAborted), (StopReason.ERROR, EngineError)])
def test_a_turn_that_did_not_finish_is_raised_and_never_scored(stop: StopReason, error: type[Exception]) -> None:
    async def generate(request: GenerateRequest) -> Turn:
        return Turn(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            output_ids=np.array([9, 9], dtype=np.int32),
            behavior_logprobs=np.zeros(2, dtype=np.float32),
            version_spans=(VersionSpan(0, 2, 1),),
            stop_reason=stop,
        )

    faults = FaultInjector({})
    with pytest.raises(error, match=r"g0/1\.2/turn0.*after 2 tokens"):
        rollout("", environment=ScriptedEnvironment(size=1, faults=faults), generate=generate)
    assert faults.calls("score") == 0


@pytest.mark.parametrize("operation", ["reset", "step"])
def test_an_error_of_the_environment_is_raised_for_the_controller_to_classify(operation: str) -> None:
    faults = FaultInjector({(operation, 1): Raise(lambda: RuntimeError("boom"))})
    with pytest.raises(RuntimeError, match="boom"):
        rollout("1", environment=ScriptedEnvironment(size=1, faults=faults))
