"""Held-out evaluation through the same generator that trains.

Decides nothing about when: it is told. Sampling is explicit and stored with the score; the score carries the version
that produced it. A held-out task without a verdict is counted apart, never as wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from rollmill.clock import Clock
from rollmill.controller.translate import why_not_counted
from rollmill.environments.protocol import Environment
from rollmill.environments.rendering import MessageRenderer
from rollmill.errors import DeadlineExceeded, Fault
from rollmill.types import GenerateRequest, SamplingParams, StopReason, Task, Turn, derive_seed, raw_reward_of

Generate = Callable[[GenerateRequest], Awaitable[Turn]]


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy on the held-out tasks.

    Attributes:
        correct: tasks with a raw reward of 1.
        n: tasks with a verdict.
        unscored: tasks without one.
        unscored_reasons: why, each reason once.
        policy_versions: distinct versions that sampled the answers; one, if loads were held back.
        temperature, max_new_tokens: sampling used.
        wall_s: time it took.
    """

    correct: int
    n: int
    unscored: int
    unscored_reasons: tuple[str, ...]
    mean_reward: float
    mean_tokens: float
    policy_versions: tuple[int, ...]
    temperature: float
    max_new_tokens: int
    wall_s: float


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one held-out task; without a reward there is a reason."""

    reward: float | None = None
    turn: Turn | None = None
    reason: str = ""


async def evaluate(
    tasks: Sequence[Task],
    *,
    environment: Environment,
    renderer: MessageRenderer,
    generate: Generate,
    clock: Clock,
    temperature: float,
    max_new_tokens: int,
    deadline_s: float,
    concurrency: int,
    label: str,
) -> EvaluationResult:
    """Answer every task once and score it.

    Args:
        deadline_s: time for the whole evaluation.
        concurrency: requests in flight.
        label: makes request ids unique, for example `eval-0`.

    Raises:
        DeadlineExceeded: if not all tasks were answered in time, with how many were.

    Cancellation:
        aborts the requests in flight.
    """
    started_s = clock.now_s()
    gate = asyncio.Semaphore(concurrency)
    answers: list[Answer] = []

    async def one(index: int, task: Task) -> None:
        async with gate:
            left_s = max(0.1, deadline_s - (clock.now_s() - started_s))
            sampling = SamplingParams(
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                seed=derive_seed("evaluation", task.task_id),
                stop_token_ids=renderer.stop_token_ids,
            )
            answers.append(
                await _answer(
                    task,
                    request_id=f"{label}/{index}",
                    environment=environment,
                    renderer=renderer,
                    generate=generate,
                    sampling=sampling,
                    deadline_s=left_s,
                )
            )

    try:
        async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as group:
            for index, task in enumerate(tasks):
                group.create_task(one(index, task), name=f"{label}/{index}")
    except TimeoutError:
        raise DeadlineExceeded(
            f"evaluation {label} answered {len(answers)} of {len(tasks)} held-out tasks in {deadline_s:.0f} s. "
            "Raise evaluation.deadline_s, or lower environment.heldout_size."
        ) from None
    return _result(answers, temperature=temperature, max_new_tokens=max_new_tokens, wall_s=clock.now_s() - started_s)


async def _answer(
    task: Task,
    *,
    request_id: str,
    environment: Environment,
    renderer: MessageRenderer,
    generate: Generate,
    sampling: SamplingParams,
    deadline_s: float,
) -> Answer:
    observation = environment.reset(task)
    request = GenerateRequest(
        request_id=request_id,
        prompt_ids=renderer.render(observation.messages),
        sampling=sampling,
        deadline_s=deadline_s,
    )
    try:
        turn = await generate(request)
    except Fault as fault:
        return Answer(reason=f"{type(fault).__name__}: {fault}")
    if turn.stop_reason in (StopReason.ABORT, StopReason.ERROR):
        # Cut by a deadline or a lost engine: the policy was not heard out, so this is no wrong answer.
        return Answer(reason=f"generation ended with {turn.stop_reason.value}")
    outcome = await environment.score(task, reply=renderer.decode(turn.output_ids))
    return Answer(reward=raw_reward_of(outcome), turn=turn, reason=why_not_counted(outcome))


def _result(answers: Sequence[Answer], *, temperature: float, max_new_tokens: int, wall_s: float) -> EvaluationResult:
    rewards = [answer.reward for answer in answers if answer.reward is not None]
    turns = [answer.turn for answer in answers if answer.turn is not None]
    versions = {span.policy_version for turn in turns for span in turn.version_spans}
    return EvaluationResult(
        correct=sum(reward >= 1.0 for reward in rewards),
        n=len(rewards),
        unscored=len(answers) - len(rewards),
        unscored_reasons=tuple(sorted({answer.reason for answer in answers if answer.reward is None})),
        mean_reward=sum(rewards) / len(rewards) if rewards else 0.0,
        mean_tokens=sum(len(turn.output_ids) for turn in turns) / len(turns) if turns else 0.0,
        policy_versions=tuple(sorted(versions)),
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        wall_s=wall_s,
    )
