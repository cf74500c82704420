"""An environment whose verdicts are scripted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from rollmill.environments.order import EpochOrder
from rollmill.environments.protocol import Observation
from rollmill.testing.faults import FaultInjector
from rollmill.types import Message, Outcome, Scored, Task

Verdict = float | Outcome
Script = Sequence[Verdict] | Callable[[Task, str], Verdict]


def solved(task: Task, reply: str) -> float:
    """Return 1.0 if the reply is the reference answer, blanks aside."""
    return float(reply.strip() == task.reference["answer"])


class ScriptedEnvironment:
    """Small sums with scripted verdicts; implements `rollmill.environments.Environment`.

    Args:
        size: training tasks; task number i asks for `i + 1`.
        heldout_size: held-out tasks, numbered on from there.
        script: a function of task and reply; or a sequence: the n-th score of a task takes entry n, from the start
            again past the end. A plain number is a raw and shaped reward.
        run_seed: orders the training tasks.
        follow_ups: what the environment says after each reply but the last; empty is single-turn.
        faults: reached with `reset`, `step` and `score`.

    Example:
        >>> environment = ScriptedEnvironment(size=2, script=[0.0, 1.0])
        >>> task = environment.task_at(0)
        >>> import asyncio
        >>> [asyncio.run(environment.score(task, reply="?")).raw_reward for _ in range(3)]
        [0.0, 1.0, 0.0]
    """

    def __init__(
        self,
        *,
        size: int = 8,
        heldout_size: int = 4,
        script: Script = solved,
        run_seed: int = 0,
        follow_ups: Sequence[str] = (),
        faults: FaultInjector | None = None,
    ) -> None:
        self._training = tuple(_sum_task(i) for i in range(size))
        self._heldout = tuple(_sum_task(size + i) for i in range(heldout_size))
        self._script = script
        self._order = EpochOrder(size=size, run_seed=run_seed)
        self._follow_ups = tuple(follow_ups)
        self._faults = faults or FaultInjector({})
        self._scores: dict[str, int] = {}
        self.started = False
        self.closed = False

    def training_size(self) -> int:
        """Number of training tasks."""
        return len(self._training)

    def task_at(self, index: int) -> Task:
        """Return draw number `index` of the training stream."""
        return self._training[self._order.position(index)]

    def heldout(self) -> tuple[Task, ...]:
        """Return the held-out tasks."""
        return self._heldout

    def reset(self, task: Task) -> Observation:
        """Return the question."""
        self._faults.strike("reset")
        return Observation(messages=task.messages, done=False)

    def step(self, task: Task, *, reply: str, turn: int) -> Observation:
        """Return the next follow-up, or the end."""
        self._faults.strike("step")
        if turn >= len(self._follow_ups):
            return Observation(messages=(), done=True)
        return Observation(messages=(Message(role="user", content=self._follow_ups[turn]),), done=False)

    async def start(self) -> None:
        """Note that it was started."""
        self.started = True

    async def score(self, task: Task, *, reply: str) -> Outcome:
        """Return the scripted verdict.

        Raises:
            Exception: what the fault plan says.
        """
        await self._faults.reach("score")
        count = self._scores.get(task.task_id, 0)
        self._scores[task.task_id] = count + 1
        verdict = self._script(task, reply) if callable(self._script) else self._script[count % len(self._script)]
        return Scored(raw_reward=verdict, shaped_reward=verdict) if isinstance(verdict, int | float) else verdict

    def alarm(self) -> str:
        """Return nothing: a script is allowed to say the same for ever."""
        return ""

    def identity(self) -> str:
        """Return a digest of the tasks."""
        ids = [task.task_id for task in (*self._training, *self._heldout)]
        return hashlib.sha256("\n".join([str(len(self._training)), *ids]).encode()).hexdigest()

    async def close(self) -> None:
        """Note that it was closed."""
        self.closed = True


def _sum_task(number: int) -> Task:
    return Task(
        task_id=f"sum-{number}",
        environment="scripted",
        messages=(Message(role="user", content=f"{number} + 1 ="),),
        reference={"answer": str(number + 1)},
    )
