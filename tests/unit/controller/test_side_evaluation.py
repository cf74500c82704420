"""Which versions are evaluated beside the training, and what becomes of each."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.controller.evaluation import EvaluationResult
from rollmill.controller.side_evaluation import (
    DueVersion,
    EvaluatorLost,
    SideEvaluations,
    due_labels,
    due_versions,
    labels_due,
)
from rollmill.errors import DeadlineExceeded, WeightError
from rollmill.testing import fake_manifest, run_virtual
from rollmill.types import WeightManifest

HISTORY = "h001"


def manifest(version: int, *, step: int | None = None, history: str = HISTORY) -> WeightManifest:
    return fake_manifest(version, optimizer_step=version - 1 if step is None else step, history_id=history)


def result(version: int) -> EvaluationResult:
    return EvaluationResult(
        correct=1,
        n=1,
        unscored=0,
        unscored_reasons=(),
        mean_reward=1.0,
        mean_tokens=1.0,
        policy_versions=(version,),
        temperature=0.0,
        max_new_tokens=4,
        wall_s=1.0,
    )


class Bench:
    """Side evaluations with everything around them kept for a look; `script` is what each attempt meets, in order."""

    def __init__(self, labels: dict[int, str], *, script: Any = (), takes_s: float = 10.0) -> None:
        self.script = list(script)
        self.takes_s = takes_s
        self.gone: set[int] = set()
        self.held: list[int] = []
        self.asked: list[tuple[str, int]] = []
        self.kept: dict[str, tuple[int, ...]] = {}
        self.events: list[tuple[str, dict[str, object]]] = []
        self.side = SideEvaluations(
            labels=labels, history_id=HISTORY, holder=self, ask=self.ask, keep=self.keep, reports=self
        )

    def hold(self, policy_version: int, *, owner: str) -> None:
        if policy_version in self.gone:
            raise WeightError(f"version {policy_version} has no tensors any more")
        self.held.append(policy_version)

    def release(self, policy_version: int, *, owner: str) -> None:
        self.held.remove(policy_version)

    async def ask(self, due: DueVersion, attempt: int) -> EvaluationResult:
        assert due.policy_version in self.held
        self.asked.append((due.label, attempt))
        await asyncio.sleep(self.takes_s)
        error = self.script.pop(0) if self.script else None
        if error is not None:
            raise error
        return result(due.policy_version)

    def keep(self, due: DueVersion, found: EvaluationResult) -> None:
        self.kept[due.label] = found.policy_versions

    def event(self, kind: str, **fields: object) -> None:
        self.events.append((kind, fields))

    def run(self, *looks: tuple[float, list[WeightManifest]]) -> None:
        """Look at these publications at these seconds, then close."""

        async def main() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.side.run())
                for after_s, manifests in looks:
                    await asyncio.sleep(after_s)
                    self.side.look(manifests)
                self.side.close()

        run_virtual(main())


@pytest.mark.parametrize(
    ("began_at", "done", "expected"),
    [
        (0, (), {0: "before", 3: "step-3", 6: "step-6"}),
        (0, ("before",), {3: "step-3", 6: "step-6"}),
        # a run that went on at step 4 has trained: its start cannot be evaluated any more
        (4, (), {6: "step-6"}),
        (3, (), {6: "step-6"}),
        (0, ("before", "step-3", "step-6"), {}),
    ],
)
def test_the_start_and_every_so_many_steps_are_due_and_the_end_is_not(began_at, done, expected) -> None:
    assert labels_due(at_start=True, every_steps=3, steps=9, began_at=began_at, done=done) == expected


def test_nothing_is_due_that_was_not_asked_for() -> None:
    assert labels_due(at_start=False, every_steps=0, steps=9, began_at=0, done=()) == {}


def test_a_version_is_due_by_its_step_and_history_and_the_first_of_a_step_counts() -> None:
    manifests = [
        manifest(1, step=0, history="h000"),
        manifest(2, step=0),
        manifest(3, step=0),
        manifest(4, step=1),
        manifest(5, step=2),
    ]
    due = due_versions(manifests, history_id=HISTORY, labels={0: "before", 2: "step-2", 4: "step-4"})
    assert [(step, version.label, version.policy_version, version.digest) for step, version in due] == [
        (0, "before", 2, "fake-2"),
        (2, "step-2", 5, "fake-5"),
    ]


def test_each_due_version_is_evaluated_once_and_let_go() -> None:
    bench = Bench({0: "before", 2: "step-2"})
    first = [manifest(1)]
    bench.run((0, first), (1, first), (20, [*first, manifest(2), manifest(3)]))
    assert bench.asked == [("before", 1), ("step-2", 1)]
    assert bench.kept == {"before": (1,), "step-2": (3,)}
    assert (bench.held, bench.events) == ([], [])


def test_a_version_is_held_from_the_moment_it_is_due_until_it_was_evaluated() -> None:
    bench = Bench({0: "before", 1: "step-1"})

    async def main() -> list[list[int]]:
        seen = []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(bench.side.run())
            bench.side.look([manifest(1)])
            await asyncio.sleep(1)
            bench.side.look([manifest(1), manifest(2)])
            seen.append(list(bench.held))  # the first is evaluated, the second waits
            await asyncio.sleep(10)
            seen.append(list(bench.held))
            await asyncio.sleep(10)
            seen.append(list(bench.held))
        return seen

    assert run_virtual(main()) == [[1, 2], [2], []]


def test_a_version_that_finds_another_waiting_is_skipped_with_the_reason() -> None:
    bench = Bench({0: "before", 1: "step-1", 2: "step-2"})
    published = [manifest(1), manifest(2), manifest(3)]
    bench.run((0, published[:1]), (1, published[:2]), (1, published))
    assert bench.kept == {"before": (1,), "step-1": (2,)}
    ((kind, fields),) = bench.events
    assert (kind, fields["label"], fields["policy_version"]) == ("evaluation_skipped", "step-2", 3)
    assert "'before' still runs" in str(fields["reason"])


def test_a_version_that_is_gone_is_skipped_with_the_reason() -> None:
    bench = Bench({0: "before"})
    bench.gone.add(1)
    bench.run((0, [manifest(1)]))
    assert (bench.kept, bench.asked) == ({}, [])
    ((kind, fields),) = bench.events
    assert (kind, fields["reason"]) == ("evaluation_skipped", "version 1 has no tensors any more")


def test_an_evaluation_whose_replica_was_lost_is_tried_once_more() -> None:
    bench = Bench({0: "before"}, script=[EvaluatorLost("it was killed")])
    bench.run((0, [manifest(1)]))
    assert bench.asked == [("before", 1), ("before", 2)]
    assert bench.kept == {"before": (1,)}
    assert [kind for kind, _ in bench.events] == ["evaluator_lost"]


def test_a_replica_that_is_lost_twice_is_a_failed_evaluation_in_words_and_the_next_one_goes_on() -> None:
    bench = Bench({0: "before", 1: "step-1"}, script=[EvaluatorLost("killed"), EvaluatorLost("killed again")])
    bench.run((0, [manifest(1)]), (1, [manifest(1), manifest(2)]))
    assert bench.kept == {"step-1": (2,)}
    assert bench.held == []
    kind, fields = bench.events[-1]
    assert (kind, fields["label"], fields["reasons"]) == ("evaluation_failed", "before", ["killed", "killed again"])


def test_an_evaluation_past_its_deadline_fails_in_words_and_is_not_repeated() -> None:
    bench = Bench({0: "before"}, script=[DeadlineExceeded("answered 3 of 16")])
    bench.run((0, [manifest(1)]))
    assert bench.asked == [("before", 1)]
    assert [(kind, fields["reasons"]) for kind, fields in bench.events] == [("evaluation_failed", ["answered 3 of 16"])]


def test_after_the_close_what_waits_is_evaluated_and_nothing_new_is_taken() -> None:
    bench = Bench({0: "before", 1: "step-1", 2: "step-2"})
    bench.run((0, [manifest(1)]), (0, [manifest(1), manifest(2)]))
    bench.side.look([manifest(3)])
    assert bench.kept == {"before": (1,), "step-1": (2,)}
    assert bench.held == []


def test_a_cancelled_evaluation_lets_go_of_every_version() -> None:
    bench = Bench({0: "before", 1: "step-1"})

    async def main() -> None:
        run = asyncio.create_task(bench.side.run())  # noqa: RUF100
        bench.side.look([manifest(1)])
        await asyncio.sleep(1)
        bench.side.look([manifest(1), manifest(2)])
        assert bench.held == [1, 2]
        run.cancel()
        await asyncio.wait([run])
        assert run.cancelled()

    run_virtual(main())
    assert (bench.held, bench.kept) == ([], {})


@given(
    every=st.integers(1, 3),
    takes_s=st.sampled_from([0.5, 3.0, 9.0]),
    gaps=st.lists(st.sampled_from([0.0, 0.5, 1.0, 4.0]), min_size=1, max_size=7),
    losses=st.lists(st.booleans(), max_size=6),
)
def test_every_due_version_is_evaluated_skipped_or_failed_and_none_stays_held(every, takes_s, gaps, losses) -> None:
    script = [EvaluatorLost("lost") if lost else None for lost in losses]
    labels = labels_due(at_start=True, every_steps=every, steps=len(gaps), began_at=0, done=())
    bench = Bench(labels, script=script, takes_s=takes_s)
    bench.run(*((gap, [manifest(v + 1) for v in range(number + 1)]) for number, gap in enumerate(gaps)))
    told = [
        str(fields["label"]) for kind, fields in bench.events if kind in ("evaluation_skipped", "evaluation_failed")
    ]
    assert sorted([*bench.kept, *told]) == sorted(labels.values())
    assert bench.held == []
    assert all(
        version == (labels_version,)
        for version, labels_version in zip(
            bench.kept.values(), [step + 1 for step, label in labels.items() if label in bench.kept], strict=True
        )
    )


@pytest.mark.parametrize(
    ("loaded_step", "expected"),
    [
        (-1, ((), None)),
        (0, ((), "before")),
        (3, ((), "before")),
        (4, (("before",), "step-4")),
        (99, (("before", "step-4"), "step-8")),
    ],
)
def test_the_newest_evaluation_that_is_loaded_is_due_and_those_before_it_are_overtaken(loaded_step, expected):
    labels = {8: "step-8", 0: "before", 4: "step-4"}
    assert due_labels(labels, loaded_step=loaded_step) == expected
