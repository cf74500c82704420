"""The loop on a virtual clock, a store in memory and a repository in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from executor_builders import ByHand, Inline, Later
from trainer_builders import config, random_groups, tiny_model

from rollmill.buffer.memory import MemoryStore
from rollmill.buffer.protocol import Assignment, CommitPoint, StepRecord, Transition
from rollmill.clock import VirtualClock
from rollmill.errors import DeadlineExceeded, NumericalFault, StalenessViolation, StoreError, WeightError
from rollmill.testing import fake_manifest
from rollmill.trainer.decisions import EndReason
from rollmill.trainer.loop import OWNER, LoopResult, TrainerLoop
from rollmill.trainer.step import Trainer, TrainerState
from rollmill.types import Adapter, Canary, Group, WeightManifest

MOMENT = "exp_avg.model.embed_tokens.weight"


class Copied:
    """A publication of `Repository` that is not visible yet."""

    def __init__(self, repository: Repository, manifest: WeightManifest, tensors: dict[str, torch.Tensor]) -> None:
        self._repository = repository
        self._manifest = manifest
        self._tensors = tensors
        self.abandoned = False

    @property
    def policy_version(self) -> int:
        return self._manifest.policy_version

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._tensors

    def commit(self, *, canary: Canary | None) -> WeightManifest:
        return self._repository.take(msgspec.structs.replace(self._manifest, canary=canary), self._tensors)

    def abandon(self) -> None:
        self.abandoned = True


class Repository:
    """Manifests in memory; the copy of a publication takes `publish_s` of the virtual clock."""

    def __init__(self, clock: VirtualClock, log: list[str], *, publish_s: float = 0.5) -> None:
        self.published: list[WeightManifest] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.copied: list[Copied] = []
        self.refuse: Exception | None = None
        self._clock = clock
        self._log = log
        self._publish_s = publish_s

    def put_base(self, tensors: Mapping[str, torch.Tensor]) -> str:
        self._log.append("base")
        return "base-digest"

    def prepare(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        optimizer_step: int,
        parent: int | None,
        history_id: str,
        training_dtype: str,
        at_s: float,
        adapter: Adapter | None = None,
    ) -> Copied:
        self._clock.advance(self._publish_s)
        manifest = fake_manifest(
            len(self.published) + 1,
            optimizer_step=optimizer_step,
            parent=parent,
            history_id=history_id,
            training_dtype=training_dtype,
            serving_dtype=training_dtype,
            published_at_s=at_s,
            adapter=adapter,
        )
        self.copied.append(Copied(self, manifest, {name: t.clone() for name, t in tensors.items()}))
        return self.copied[-1]

    def take(self, manifest: WeightManifest, tensors: dict[str, torch.Tensor]) -> WeightManifest:
        if self.refuse is not None:
            raise self.refuse
        self.published.append(manifest)
        self.weights[manifest.policy_version] = tensors
        self._log.append(f"publish {manifest.optimizer_step}")
        return manifest

    def manifests(self, *, after: int = 0) -> Sequence[WeightManifest]:
        return self.published[after:]

    def manifest(self, policy_version: int) -> WeightManifest:
        return self.published[policy_version - 1]

    def latest(self) -> WeightManifest | None:
        return self.published[-1] if self.published else None

    def load(self, policy_version: int) -> dict[str, torch.Tensor]:
        return self.weights[policy_version]

    def hold(self, policy_version: int, *, owner: str) -> None:
        raise AssertionError("the trainer holds nothing")

    release = hold

    def retire(self) -> Sequence[int]:
        return ()

    def reserve(self) -> bool:
        return False


class Checkpoints:
    """Keeps what was written; writing takes 2 s of the virtual clock."""

    def __init__(self, clock: VirtualClock, log: list[str]) -> None:
        self.written: list[tuple[CommitPoint, TrainerState]] = []
        self.refuse: Exception | None = None
        self._clock = clock
        self._log = log

    def write(self, state: TrainerState, *, commit: CommitPoint) -> None:
        if self.refuse is not None:
            raise self.refuse
        self._clock.advance(2.0)
        copied = TrainerState(
            model={name: t.clone() for name, t in state.model.items()},
            optimizer={name: t.clone() for name, t in state.optimizer.items()},
            state=dict(state.state),
        )
        self.written.append((commit, copied))
        self._log.append(f"checkpoint {commit.optimizer_step}")


class Store(MemoryStore):
    """A store that logs its step records."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def record_step(self, record: StepRecord, *, owner: str | None = None) -> None:
        super().record_step(record, owner=owner)
        self._log.append(f"record {record.optimizer_step}")


@dataclass
class World:
    """Everything around a loop. Each sleep passes its time and then runs the next scripted happening."""

    changed: dict[str, Any] = field(default_factory=dict)
    clock: VirtualClock = field(default_factory=VirtualClock)
    log: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    happenings: list[Callable[[], None]] = field(default_factory=list)
    stop: bool = False
    history_id: str = "h001"

    def __post_init__(self) -> None:
        self.store = Store(self.log)
        self.repository = Repository(self.clock, self.log)
        self.checkpoints = Checkpoints(self.clock, self.log)
        self.config = config(**self.changed)
        self.trainer = Trainer(tiny_model(), config=self.config)
        self.batches = 0

    def wait(self, seconds: float) -> bool:
        self.clock.advance(seconds)
        if self.happenings:
            self.happenings.pop(0)()
        return bool(self.happenings)

    def assign(self, groups: Sequence[Group] | None = None, *, step: int | None = None) -> None:
        """Put the groups and assign them as the next batch."""
        self.batches += 1
        number = self.batches
        groups = groups if groups is not None else self.groups(number)
        step = number - 1 if step is None else step
        self.store.apply(
            Transition(
                journal=(b"e",),
                puts=tuple(groups),
                assignments=(
                    Assignment(batch_id=number, optimizer_step=step, group_ids=tuple(g.group_id for g in groups)),
                ),
            )
        )

    def groups(self, number: int) -> list[Group]:
        return [
            msgspec.structs.replace(group, group_id=f"b{number}-{group.group_id}")
            for group in random_groups(seed=number)
        ]

    def phase(self, name: str) -> Callable[[], None]:
        return lambda: self.store.set_note("phase", name)

    def loop(self, **changed: Any) -> TrainerLoop:
        return TrainerLoop(
            config=self.config,
            trainer=self.trainer,
            store=self.store,
            repository=self.repository,
            clock=self.clock,
            wait=self.wait,
            ring=lambda: self.log.append("ring"),
            checkpoints=self.checkpoints,
            history_id=self.history_id,
            should_stop=lambda: self.stop,
            say=self.said.append,
            **{
                "executor": Inline(),
                "checkpoint_executor": Inline(),
                "canary_token_ids": np.arange(5, dtype=np.int32),
                **changed,
            },
        )

    def run(self, **changed: Any) -> LoopResult:
        return self.loop(**changed).run()


def diverge_at_step_2(world: World) -> None:
    """Let the first step succeed and the second one fail."""
    train_step = world.trainer.train_step

    def diverged(*args: Any, **kwargs: Any) -> Any:
        if world.trainer.optimizer_step == 1:
            raise NumericalFault("NaN", rollout_ids=("x",))
        return train_step(*args, **kwargs)

    world.trainer.train_step = diverged  # type: ignore[method-assign]


def test_it_trains_assigned_batches_and_ends_when_the_controller_is_finishing() -> None:
    world = World()
    world.assign()
    world.assign()
    world.store.set_note("phase", "finishing")
    result = world.run()
    assert (result.reason, result.optimizer_step, result.steps_trained) == (EndReason.FINISHED, 2, 2)
    assert world.store.statistics().trained_groups == 4
    assert [m.optimizer_step for m in world.repository.published] == [0, 1, 2]
    assert [m.parent for m in world.repository.published] == [None, 1, 2]


def test_weights_go_out_before_the_record_and_the_checkpoint_comes_last() -> None:
    world = World(changed={"trainer": {"checkpoint_every_steps": 1}})
    world.assign()
    world.store.set_note("phase", "finishing")
    world.run()
    assert world.log == ["publish 0", "ring", "ring", "publish 1", "record 1", "ring", "checkpoint 1"]


def test_a_batch_that_comes_later_is_waited_for() -> None:
    world = World()
    world.happenings = [lambda: None, world.assign, world.phase("finishing")]
    assert world.run().optimizer_step == 1
    (record,) = [record for _, record in world.store.steps()]
    assert record.seconds["wait_data"] == 2.0


def test_a_batch_assigned_just_before_finishing_is_not_lost() -> None:
    world = World()

    def both() -> None:
        world.assign()
        world.store.set_note("phase", "finishing")

    world.happenings = [both]
    assert world.run().optimizer_step == 1


def test_the_seconds_of_each_record_sum_to_the_time_between_records() -> None:
    world = World(changed={"trainer": {"checkpoint_every_steps": 1}})
    world.clock.advance(3.0)
    world.happenings = [world.assign, world.assign, world.phase("finishing")]
    result = world.run(start_s=0.0)
    one, two = [record for _, record in world.store.steps()]
    # 3 s of start, publication of step 0 (0.5), a sleep (1), publication of step 1 (0.5)
    assert one.seconds == {"startup": 3.0, "publish": 1.0, "wait_data": 1.0}
    # the checkpoint of step 1 (2) stands in the next record
    assert two.seconds == {"checkpoint": 2.0, "wait_data": 1.0, "publish": 0.5}
    assert sum(one.seconds.values()) == one.finished_at_s
    assert sum(two.seconds.values()) == two.finished_at_s - one.finished_at_s
    assert sum(result.seconds.values()) == pytest.approx(result.wall_s)
    assert result.wall_s == world.clock.now_s()


def test_a_stop_finishes_the_step_in_hand_and_writes_a_checkpoint() -> None:
    world = World()
    world.assign()
    world.assign()
    train_step = world.trainer.train_step

    def stopped_meanwhile(*args: Any, **kwargs: Any) -> Any:
        world.stop = True
        return train_step(*args, **kwargs)

    world.trainer.train_step = stopped_meanwhile  # type: ignore[method-assign]
    result = world.run()
    assert (result.reason, result.optimizer_step) == (EndReason.STOPPED, 1)
    ((commit, state),) = world.checkpoints.written
    assert commit.optimizer_step == state.state["optimizer_step"] == 1
    assert commit.trained_group_ids == ("b1-g0", "b1-g1")
    assert commit.policy_version == 2
    assert world.store.statistics().assigned_groups == 2


def test_a_clean_stop_leaves_batches_that_were_assigned_ahead_for_the_resume() -> None:
    world = World()
    world.assign()
    world.store.set_note("phase", "stopping")
    assert world.run().reason is EndReason.STOPPED
    assert world.store.statistics().assigned_groups == 2
    assert world.store.statistics().trained_groups == 0


def test_a_stop_while_waiting_ends_the_wait() -> None:
    world = World()
    world.happenings = [lambda: setattr(world, "stop", True)]
    assert world.run().reason is EndReason.STOPPED
    assert [commit.optimizer_step for commit, _ in world.checkpoints.written] == [0]


def test_checkpoints_list_the_groups_since_the_one_before() -> None:
    world = World(changed={"trainer": {"checkpoint_every_steps": 2}})
    for _ in range(3):
        world.assign()
    world.store.set_note("phase", "finishing")
    world.run()
    listed = [(commit.optimizer_step, commit.trained_group_ids) for commit, _ in world.checkpoints.written]
    assert listed == [(2, ("b1-g0", "b1-g1", "b2-g0", "b2-g1")), (3, ("b3-g0", "b3-g1"))]
    assert [commit.journal_offset for commit, _ in world.checkpoints.written] == [3, 3]


def test_a_wait_past_the_deadline_says_what_is_missing() -> None:
    world = World(changed={"trainer": {"batch_deadline_s": 5.0}})
    world.store.apply(Transition(puts=tuple(world.groups(1))))
    with pytest.raises(DeadlineExceeded, match=r"step 0 since 5 s: 2 groups buffered, 0 assigned, 4 needed"):
        world.run()
    assert world.clock.now_s() == 5.5


def test_a_long_wait_is_explained_again_and_again() -> None:
    world = World(changed={"trainer": {"batch_deadline_s": 10.0}, "run": {"stall_report_s": 3.0}})
    with pytest.raises(DeadlineExceeded):
        world.run()
    assert len(world.said) == 3  # after 3, 6 and 9 s
    assert world.said[0].startswith("the trainer waits for the batch of optimizer step 0 since 3 s")


def test_a_batch_over_the_staleness_budget_is_not_trained_and_goes_back() -> None:
    world = World(changed={"schedule": {"max_staleness": 1}})
    world.assign()
    world.assign()
    world.assign()  # sampled by version 1 like the others: staleness 2 at step 2
    with pytest.raises(StalenessViolation, match="staleness 2 at optimizer step 2"):
        world.run()
    assert world.trainer.optimizer_step == 2
    assert world.store.leased_batches() == []
    assert world.store.statistics().assigned_groups == 2
    assert world.checkpoints.written == []


def test_a_numerical_fault_gives_the_batch_back_and_writes_no_checkpoint() -> None:
    world = World(changed={"trainer": {"checkpoint_every_steps": 1}})
    world.assign()
    world.assign()
    diverge_at_step_2(world)
    with pytest.raises(NumericalFault):
        world.run()
    assert [commit.optimizer_step for commit, _ in world.checkpoints.written] == [1]
    assert world.store.statistics().assigned_groups == 2
    assert [m.optimizer_step for m in world.repository.published] == [0, 1]


def test_a_release_that_fails_does_not_hide_the_first_cause() -> None:
    world = World()
    world.assign()

    def diverged(*_: Any, **__: Any) -> Any:
        world.store.release_batch(batch_id=1, owner=OWNER)
        raise NumericalFault("NaN", rollout_ids=("x",))

    world.trainer.train_step = diverged  # type: ignore[method-assign]
    with pytest.raises(NumericalFault, match="NaN") as caught:
        world.run()
    assert "could not be given back" in caught.value.__notes__[0]


def test_a_long_step_renews_its_lease() -> None:
    world = World(changed={"trainer": {"batch_deadline_s": 10.0}})
    world.assign()
    world.store.set_note("phase", "finishing")
    renewed: list[float] = []
    renew, train_step = world.store.renew_lease, world.trainer.train_step

    def slow(groups: Any, *, optimizer_step_of: Any, heartbeat: Callable[[], None]) -> Any:
        for _ in range(3):
            world.clock.advance(3.0)
            heartbeat()
        return train_step(groups, optimizer_step_of=optimizer_step_of)

    def noted(*, batch_id: int, owner: str, now_s: float, lease_s: float) -> None:
        renewed.append(now_s)
        renew(batch_id=batch_id, owner=owner, now_s=now_s, lease_s=lease_s)

    world.trainer.train_step = slow  # type: ignore[method-assign]
    world.store.renew_lease = noted  # type: ignore[method-assign]
    assert world.run().optimizer_step == 1
    # leased at 0.5 for 10 s: 3 s later 7 are left, another 3 s later 4, which is less than half; then 10 again
    assert renewed == [6.5]


def test_resume_publishes_the_checkpoint_under_the_new_history_and_goes_on_bit_for_bit() -> None:
    straight = World(changed={"trainer": {"checkpoint_every_steps": 1}})
    for _ in range(3):
        straight.assign()
    straight.store.set_note("phase", "finishing")
    straight.run()
    commit, saved = straight.checkpoints.written[1]

    resumed = World(history_id="h002")
    resumed.trainer.load_state(model=saved.model, optimizer=saved.optimizer, state=saved.state)
    resumed.repository = straight.repository
    resumed.batches = 2
    resumed.assign()
    resumed.store.set_note("phase", "finishing")
    result = resumed.run(committed_step=commit.optimizer_step, parent_version=commit.policy_version)
    assert result.optimizer_step == 3
    versions = straight.repository.published
    assert [(m.history_id, m.optimizer_step, m.parent) for m in versions[4:]] == [("h002", 2, 3), ("h002", 3, 5)]
    one, two = straight.repository.weights[4], straight.repository.weights[6]
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_resumed_run_without_a_new_step_writes_no_second_checkpoint() -> None:
    world = World()
    world.store.set_note("phase", "finishing")
    world.run(committed_step=0)
    assert world.checkpoints.written == []


def test_a_restart_within_one_history_does_not_publish_again() -> None:
    world = World()
    world.store.set_note("phase", "finishing")
    world.run()
    assert world.run().policy_version == 1
    assert len(world.repository.published) == 1


def test_every_publication_carries_the_canary_of_its_own_weights() -> None:
    world = World(changed={"trainer": {"learning_rate": 1e-2}})
    world.assign()
    world.store.set_note("phase", "finishing")
    world.run()
    first, second = [m.canary for m in world.repository.published]
    assert first is not None
    assert second is not None
    assert np.abs(first.logprobs - second.logprobs).max() > 1e-3
    np.testing.assert_array_equal(second.logprobs, world.trainer.canary(np.arange(5)).logprobs)


def test_a_record_that_the_store_refuses_is_raised() -> None:
    world = World()
    world.assign()
    train_step = world.trainer.train_step

    def lost(*args: Any, **kwargs: Any) -> Any:
        world.store.release_batch(batch_id=1, owner=OWNER)
        return train_step(*args, **kwargs)

    world.trainer.train_step = lost  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="not leased"):
        world.run()


def training_noted(world: World, during: Callable[[], None] = lambda: None) -> None:
    """Log when a step begins and ends; `during` happens in between."""
    train_step = world.trainer.train_step

    def noted(*args: Any, **kwargs: Any) -> Any:
        world.log.append(f"begin {world.trainer.optimizer_step + 1}")
        metrics = train_step(*args, **kwargs)
        during()
        world.log.append(f"end {world.trainer.optimizer_step}")
        return metrics

    world.trainer.train_step = noted  # type: ignore[method-assign]


def test_the_next_step_is_trained_while_a_publication_waits_to_be_committed() -> None:
    world = World()
    world.assign()
    world.assign()
    world.store.set_note("phase", "finishing")
    training_noted(world)
    world.run(executor=Later())
    assert world.log == [
        *("ring", "begin 1", "end 1", "publish 0", "ring"),  # the copy of step 1 waits for the commit of step 0
        *("ring", "begin 2", "end 2", "publish 1", "record 1", "ring"),
        *("publish 2", "record 2", "ring", "checkpoint 2"),  # the checkpoint waits for commit and record
    ]


def test_what_is_committed_later_are_the_weights_and_the_canary_of_the_copy() -> None:
    world = World(changed={"trainer": {"learning_rate": 1e-2}})
    world.assign()
    world.assign()
    world.store.set_note("phase", "finishing")
    before = {name: t.clone() for name, t in world.trainer.named_tensors().items()}
    world.run(executor=Later())
    first, _, last = (m.canary for m in world.repository.published)
    assert first is not None
    assert last is not None
    assert all(torch.equal(world.repository.weights[1][name], tensor) for name, tensor in before.items())
    np.testing.assert_array_equal(last.logprobs, world.trainer.canary(np.arange(5)).logprobs)
    assert np.abs(first.logprobs - last.logprobs).max() > 1e-3


@pytest.mark.parametrize("when", ["heartbeat", "wait", "checkpoint"])
def test_a_publication_that_fails_in_the_background_ends_the_run_where_the_trainer_next_looks(when: str) -> None:
    world, later = World(changed={"trainer": {"batch_deadline_s": 50.0}}), Later()
    world.assign()
    failed: list[float] = []

    def fail() -> None:
        world.repository.refuse = WeightError("the disk is full")
        later.run()
        failed.append(world.clock.now_s())

    if when == "heartbeat":
        training_noted(world)
        train_step = world.trainer.train_step

        def beating(groups: Any, *, optimizer_step_of: Any, heartbeat: Callable[[], None]) -> Any:
            fail()
            heartbeat()
            return train_step(groups, optimizer_step_of=optimizer_step_of, heartbeat=heartbeat)

        world.trainer.train_step = beating  # type: ignore[method-assign]
    elif when == "wait":
        world.happenings = [fail]
    else:
        world.store.set_note("phase", "finishing")
        training_noted(world, during=lambda: setattr(world.repository, "refuse", WeightError("the disk is full")))
        later = Inline()  # type: ignore[assignment]
    with pytest.raises(WeightError, match="the disk is full"):
        world.run(executor=later)
    trained = {"heartbeat": 0, "wait": 1, "checkpoint": 1}[when]
    assert world.trainer.optimizer_step == trained
    # nothing is booked as trained that was not published, and nothing made final
    assert world.store.statistics().trained_groups == 0
    assert world.checkpoints.written == []
    assert all(world.clock.now_s() - at_s < 1.5 for at_s in failed)


def test_a_fault_in_a_step_still_commits_and_records_the_step_before() -> None:
    world = World()
    world.assign()
    world.assign()
    diverge_at_step_2(world)
    with pytest.raises(NumericalFault):
        world.run(executor=Later())
    assert world.log[-3:] == ["publish 1", "record 1", "ring"]
    assert world.store.statistics().assigned_groups == 2


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()])
def test_a_bug_or_an_interrupt_still_ends_what_is_under_way(error: BaseException) -> None:
    world = World(changed={"trainer": {"checkpoint_every_steps": 1}})
    world.assign()
    publishing, writing = Later(), Later()

    def broken() -> None:
        raise error

    world.happenings = [broken]
    with pytest.raises(type(error)):
        world.run(executor=publishing, checkpoint_executor=writing)
    assert world.log[-5:] == ["ring", "publish 1", "record 1", "ring", "checkpoint 1"]
    assert (publishing.closed, writing.closed) == (True, True)


def test_a_publication_that_fails_after_a_fault_does_not_hide_it() -> None:
    world = World()
    world.assign()

    def diverged(*_: Any, **__: Any) -> Any:
        world.repository.refuse = WeightError("the disk is full")
        raise NumericalFault("NaN", rollout_ids=("x",))

    world.trainer.train_step = diverged  # type: ignore[method-assign]
    with pytest.raises(NumericalFault, match="NaN") as caught:
        world.run(executor=Later())
    assert "the disk is full" in caught.value.__notes__[0]


def test_a_publication_that_is_never_committed_ends_the_wait_at_its_deadline() -> None:
    world = World(changed={"weights": {"publish_deadline_s": 0.01}})
    world.store.set_note("phase", "finishing")
    with pytest.raises(DeadlineExceeded, match=r"not committed after 0\.01 s \(weights\.publish_deadline_s\)"):
        world.run(executor=ByHand())


def test_a_canary_that_cannot_be_scored_abandons_the_copy() -> None:
    world = World()
    world.store.set_note("phase", "finishing")
    loop = world.loop(canary_token_ids=np.array([1, 2, 10_000]))
    with pytest.raises(RuntimeError, match="out of bounds"):
        loop.run()
    assert [copied.abandoned for copied in world.repository.copied] == [True]


def test_the_next_step_is_trained_while_a_checkpoint_is_written_of_the_state_before() -> None:
    world = World(changed={"trainer": {"checkpoint_every_steps": 1, "learning_rate": 1e-2}})
    world.assign()
    world.assign()
    world.store.set_note("phase", "finishing")
    training_noted(world)
    world.run(checkpoint_executor=Later())
    steps = [line for line in world.log if not line.startswith(("ring", "publish", "record"))]
    assert steps == ["begin 1", "end 1", "begin 2", "end 2", "checkpoint 1", "checkpoint 2"]
    for commit, state in world.checkpoints.written:
        published = world.repository.weights[commit.policy_version]
        assert state.state["optimizer_step"] == commit.optimizer_step
        assert all(torch.equal(state.model[name], tensor) for name, tensor in published.items())
    listed = [commit.trained_group_ids for commit, _ in world.checkpoints.written]
    assert listed == [("b1-g0", "b1-g1"), ("b2-g0", "b2-g1")]
    assert not torch.equal(*(state.optimizer[MOMENT] for _, state in world.checkpoints.written))


def test_only_the_wait_for_a_checkpoint_under_way_is_the_trainers_time() -> None:
    world = World(changed={"trainer": {"checkpoint_every_steps": 1}})
    world.assign()
    world.happenings = [world.phase("finishing")]
    result = world.run(checkpoint_executor=Later())
    assert [commit.optimizer_step for commit, _ in world.checkpoints.written] == [1]
    # the copy takes no virtual time; the 2 s of writing are waited for at the end
    assert result.seconds["checkpoint"] == 2.0
    assert sum(result.seconds.values()) == pytest.approx(result.wall_s)


def test_a_stop_waits_for_the_checkpoint_under_way_and_writes_no_second_one() -> None:
    world = World(changed={"trainer": {"checkpoint_every_steps": 1}})
    world.assign()
    training_noted(world, during=lambda: setattr(world, "stop", True))
    assert world.run(checkpoint_executor=Later()).reason is EndReason.STOPPED
    assert [commit.optimizer_step for commit, _ in world.checkpoints.written] == [1]


def test_a_checkpoint_that_fails_in_the_background_ends_the_run_before_another_batch_is_taken() -> None:
    world, later = World(changed={"trainer": {"checkpoint_every_steps": 1}}), Later()
    world.assign()

    def fail() -> None:
        world.checkpoints.refuse = WeightError("the disk is full")
        later.run()
        world.assign()

    world.happenings = [fail]
    with pytest.raises(WeightError, match="the disk is full") as caught:
        world.run(checkpoint_executor=later)
    assert "checkpoint of optimizer step 1" in caught.value.__notes__[0]
    assert world.trainer.optimizer_step == 1
    assert world.store.leased_batches() == []
    assert world.checkpoints.written == []


def test_a_fault_in_a_step_still_finishes_the_checkpoint_under_way() -> None:
    world = World(changed={"trainer": {"checkpoint_every_steps": 1}})
    world.assign()
    world.assign()
    diverge_at_step_2(world)
    with pytest.raises(NumericalFault):
        world.run(checkpoint_executor=Later())
    assert [commit.optimizer_step for commit, _ in world.checkpoints.written] == [1]
