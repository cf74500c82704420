"""The turn loop: one rollout from task to outcome.

Decides nothing about when or which: it asks the renderer for ids, the policy for a turn, the environment for the next
observation, and at the end for the score. A single-turn environment is the case that is done after the first reply.
Failures of generation and of the environment are raised, for the controller to classify; only the scorer's become an
outcome here.

    Wait               Owner         Gives up after
    for a generation   the engine    the request's deadline, never past the rollout's; raises `RequestAborted`
    for a score        the pool      the scoring deadline; the outcome is `Unscored`
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import numpy as np

from rollmill.algorithms.advantages import overlong_penalty
from rollmill.clock import Clock
from rollmill.config.schema import ScheduleSettings
from rollmill.environments.protocol import Environment
from rollmill.environments.rendering import MessageRenderer
from rollmill.errors import EngineError, RequestAborted
from rollmill.scheduling.instructions import StartRollout
from rollmill.types import (
    Cut,
    GenerateRequest,
    Message,
    Outcome,
    Rollout,
    SamplingParams,
    Scored,
    StopReason,
    Turn,
    derive_seed,
)

Generate = Callable[[GenerateRequest], Awaitable[Turn]]


async def run_rollout(
    start: StartRollout,
    *,
    environment: Environment,
    renderer: MessageRenderer,
    generate: Generate,
    sampling: SamplingParams,
    schedule: ScheduleSettings,
    clock: Clock,
    request_deadline_s: float = 120.0,
    min_policy_version: int = 0,
    max_turns: int = 1,
) -> Rollout:
    """Run one rollout to its outcome.

    Args:
        start: which rollout of which task, and its deadline on `clock`.
        environment: poses the task and judges the reply.
        renderer: of the policy's model.
        generate: one generation call.
        sampling: with the rollout's seed (from run, task number and sibling; neither the attempt nor the group's id,
            so that a rollout dispatched again, or sampled again after a resume, draws from the same stream). Each turn
            derives its own. Empty stop tokens mean the renderer's.
        schedule: what becomes of a reply that the token cap cut.
        clock: stamps start, end and phases.
        request_deadline_s: deadline of each generation call; less where the rollout's own comes first.
        min_policy_version: oldest weights that may serve it.
        max_turns: a rollout that is not done by then is `Cut("turn_limit")`.

    Raises:
        RequestAborted: if a turn came back aborted.
        EngineError: if generation failed.

    Cancellation:
        the generation call or the score is cancelled with it; nothing is left behind.
    """
    task = environment.task_at(start.task_index)
    started_at_s = clock.now_s()
    conversation: list[Message] = []
    turns: list[Turn] = []
    reply = ""
    observation = environment.reset(task)
    while not observation.done and len(turns) < max_turns:
        conversation.extend(observation.messages)
        request = turn_request(
            start,
            turn=len(turns),
            prompt_ids=renderer.render(conversation),
            sampling=turn_sampling(sampling, renderer=renderer, turn=len(turns)),
            deadline_s=min(request_deadline_s, start.deadline_s - clock.now_s()),
            min_policy_version=min_policy_version,
        )
        turns.append(_finished(await generate(request), deadline_s=request.deadline_s))
        reply = renderer.decode(turns[-1].output_ids)
        conversation.append(Message(role="assistant", content=reply))
        observation = environment.step(task, reply=reply, turn=len(turns) - 1)
    generated_at_s = clock.now_s()
    outcome = _cut(turns, done=observation.done, schedule=schedule)
    if outcome is None:
        scored = await environment.score(task, reply=reply)
        outcome = shape(scored, turns=turns, sampling=sampling, schedule=schedule)
    finished_at_s = clock.now_s()
    return Rollout(
        rollout_id=start.rollout_id,
        group_id=start.group_id,
        sibling=start.sibling,
        attempt=start.attempt,
        task=task,
        turns=tuple(turns),
        outcome=outcome,
        sampling=sampling,
        started_at_s=started_at_s,
        finished_at_s=finished_at_s,
        seconds={"generate": generated_at_s - started_at_s, "score": finished_at_s - generated_at_s},
    )


def turn_request(
    start: StartRollout,
    *,
    turn: int,
    prompt_ids: np.ndarray,
    sampling: SamplingParams,
    deadline_s: float,
    min_policy_version: int,
) -> GenerateRequest:
    """Return the generation call of one turn. Only the first has its group's prompt, and takes part in its wave."""
    first = turn == 0
    return GenerateRequest(
        request_id=f"{start.rollout_id}/turn{turn}",
        prompt_ids=prompt_ids,
        sampling=sampling,
        group_key=start.group_id if first else "",
        deadline_s=max(0.0, deadline_s),
        min_policy_version=min_policy_version,
        wave=start.wave if first else None,
    )


def turn_sampling(sampling: SamplingParams, *, renderer: MessageRenderer, turn: int) -> SamplingParams:
    """Return the sampling parameters of one turn: a stream of its own, and the model's stop tokens unless given."""
    return msgspec.structs.replace(
        sampling,
        seed=derive_seed(sampling.seed, "turn", turn),
        stop_token_ids=sampling.stop_token_ids or renderer.stop_token_ids,
    )


def shape(outcome: Outcome, *, turns: list[Turn], sampling: SamplingParams, schedule: ScheduleSettings) -> Outcome:
    """Return the outcome with the soft penalty on the last reply's length, where that is the policy for long ones.

    The raw reward stays: it decides whether the group has signal.
    """
    if schedule.overlong != "soft_penalty" or not isinstance(outcome, Scored) or not turns:
        return outcome
    penalty = overlong_penalty(
        len(turns[-1].output_ids),
        max_new_tokens=sampling.max_new_tokens,
        buffer_tokens=schedule.overlong_buffer_tokens,
        penalty=schedule.overlong_penalty,
    )
    return msgspec.structs.replace(outcome, shaped_reward=outcome.shaped_reward + penalty)


def _cut(turns: list[Turn], *, done: bool, schedule: ScheduleSettings) -> Cut | None:
    """Return why the rollout ended before its natural end, `None` if it did not (or counts all the same)."""
    cut_by_cap = bool(turns) and turns[-1].stop_reason is StopReason.LENGTH
    if cut_by_cap and schedule.overlong == "mask":
        return Cut(reason="overlong")
    return None if done else Cut(reason="turn_limit")


def _finished(turn: Turn, *, deadline_s: float) -> Turn:
    if turn.stop_reason is StopReason.ABORT:
        raise RequestAborted(
            f"request {turn.request_id} was aborted after {len(turn.output_ids)} tokens (its deadline was "
            f"{deadline_s:g} s): the replica drained, or decodes too slowly for it. It can be dispatched again."
        )
    if turn.stop_reason is StopReason.ERROR:
        raise EngineError(f"request {turn.request_id} ended in an engine error after {len(turn.output_ids)} tokens.")
    return turn
