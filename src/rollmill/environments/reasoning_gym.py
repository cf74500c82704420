"""Tasks of the PyPI package reasoning-gym, single-turn, as mixtures with weights.

Decides which problems are training and which are held out (by content, see `split`) and which one a draw gets (see
`order`). Weights decide the composition of the pool. Within an epoch a problem comes as often as it was drawn, so that
weights hold; with `draws = "distinct"` it comes once, and a family with few distinct problems ends up with a smaller
share than its weight, as `composition()` says. It does not generate (`gym_pool`, kept by `cache`) and does not score
(`score_pool`) by itself.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Sequence

import msgspec

from rollmill.config.schema import EnvironmentSettings
from rollmill.environments.cache import TaskCache, cached_pool
from rollmill.environments.gym_pool import Mix, plan_mixes
from rollmill.environments.order import EpochOrder
from rollmill.environments.protocol import Observation
from rollmill.environments.score_pool import ScorePool, ScoreStatistics
from rollmill.environments.scoring import ScorerSpec, check_scorer_name
from rollmill.environments.split import Problem, generated_draws, split_problems
from rollmill.errors import DataError
from rollmill.types import Message, Outcome, Task

_WHOLE_INTEGER = re.compile(r"-?\d+")


class FamilyShare(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one entry of `environment.tasks`."""

    name: str
    draws: int
    training: int
    heldout: int


class ReasoningGymEnvironment:
    """A mixture of reasoning-gym families.

    Args:
        problems: all draws of the pool, duplicates included.
        mixes: the entries that drew them.
        settings: sizes of the split, the scorer and its deadline.
        run_seed: orders the training tasks; touches nothing else.
        system_prompt: put before each question; `None` leaves the chat template's own default.

    Raises:
        ConfigError: if the scorer's name means nothing.
        DataError: if the split is impossible, or the scorer could never reward some problems.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        mixes: Sequence[Mix],
        settings: EnvironmentSettings,
        run_seed: int,
        system_prompt: str | None = None,
    ) -> None:
        check_scorer_name(settings.scorer)
        if settings.scorer == "last_integer":
            _check_integer_answers(problems)
        self._mixes = tuple(mixes)
        self._settings = settings
        self._system_prompt = system_prompt
        split = split_problems(problems, heldout_size=settings.heldout_size, heldout_fraction=settings.heldout_fraction)
        self._training, self._heldout = split.training, split.heldout
        self._stream = (
            self._training if settings.draws == "distinct" else generated_draws(problems, training=self._training)
        )
        self._order = EpochOrder(size=len(self._stream), run_seed=run_seed)
        self._pool = ScorePool(
            ScorerSpec(name=settings.scorer, mixes=self._mixes if settings.scorer == "dataset" else ()),
            size=settings.scoring_workers,
            deadline_s=settings.scoring_deadline_s,
        )

    def training_size(self) -> int:
        """Number of draws in an epoch."""
        return len(self._stream)

    def task_at(self, index: int) -> Task:
        """Return draw number `index` of the training stream; a pure function of run seed and index."""
        return self._task(self._stream[self._order.position(index)])

    def heldout(self) -> tuple[Task, ...]:
        """Return the held-out tasks: the same for every run over this pool."""
        return tuple(self._task(problem) for problem in self._heldout)

    def composition(self) -> tuple[FamilyShare, ...]:
        """Return how many distinct problems each entry of the mixture contributes to each side."""
        return tuple(
            FamilyShare(
                name=mix.name,
                draws=mix.draws,
                training=sum(problem.mix == index for problem in self._training),
                heldout=sum(problem.mix == index for problem in self._heldout),
            )
            for index, mix in enumerate(self._mixes)
        )

    def reset(self, task: Task) -> Observation:
        """Return the question."""
        return Observation(messages=task.messages, done=False)

    def step(self, task: Task, *, reply: str, turn: int) -> Observation:
        """Return the end: one reply is the whole rollout."""
        return Observation(messages=(), done=True)

    async def start(self) -> None:
        """Start the scoring processes.

        Raises:
            ConfigError: if the scorer cannot be built.
        """
        await self._pool.start()

    async def score(self, task: Task, *, reply: str) -> Outcome:
        """Return the verdict on the reply, within the scoring deadline of its turn in the pool.

        Cancellation:
            the scoring slot is recovered.
        """
        return await self._pool.score(reply, reference=task.reference)

    def statistics(self) -> ScoreStatistics:
        """Return the state of the scoring pool."""
        return self._pool.statistics()

    def alarm(self) -> str:
        """Return a sentence if the scores say nothing, else empty."""
        return self._pool.statistics().alarm

    async def close(self) -> None:
        """End the scoring processes."""
        await self._pool.close()

    def identity(self) -> str:
        """Return a digest of both sides, the options and the split; the run's seed is not part of it."""
        return self._identity

    @functools.cached_property
    def _identity(self) -> str:
        content = {
            "kind": "reasoning_gym",
            "mixes": [[mix.name, mix.options, mix.draws] for mix in self._mixes],
            "draws": [self._settings.draws, len(self._stream)],
            "split": [self._settings.heldout_size, self._settings.heldout_fraction],
            "training": sorted(problem.task_id for problem in self._training),
            "heldout": sorted(problem.task_id for problem in self._heldout),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()

    def _task(self, problem: Problem) -> Task:
        question = Message(role="user", content=problem.question)
        system = () if self._system_prompt is None else (Message(role="system", content=self._system_prompt),)
        return Task(
            task_id=problem.task_id,
            environment=f"reasoning_gym/{problem.family}",
            messages=(*system, question),
            reference={"answer": problem.answer, "mix": problem.mix, "draw": problem.draw},
        )


def load_reasoning_gym(
    settings: EnvironmentSettings,
    *,
    run_seed: int,
    system_prompt: str | None = None,
    cache: TaskCache | None = None,
) -> ReasoningGymEnvironment:
    """Return the environment that the settings describe; takes seconds the first time, when the pool is generated.

    Args:
        cache: where the pool is kept; the user's own if `None`.

    Raises:
        ConfigError: if a family, an option or the scorer does not exist.
        DataError: if the pool cannot be generated or split.
        MissingExtraError: if reasoning-gym is not installed.
    """
    check_scorer_name(settings.scorer)
    mixes = plan_mixes(settings.tasks, pool_size=settings.pool_size)
    problems = cached_pool(mixes, cache=cache or TaskCache())
    return ReasoningGymEnvironment(
        problems, mixes=mixes, settings=settings, run_seed=run_seed, system_prompt=system_prompt
    )


def _check_integer_answers(problems: Sequence[Problem]) -> None:
    bad = [problem for problem in problems if not _WHOLE_INTEGER.fullmatch(problem.answer or "")]
    if bad:
        families = ", ".join(sorted({problem.family for problem in bad}))
        raise DataError(
            f"environment.scorer = 'last_integer' can never reward {len(bad)} of {len(problems)} problems (of "
            f"{families}): their answers are not integers, for example {bad[0].answer!r}. Set environment.scorer "
            "= 'dataset', or choose other families or options."
        )
