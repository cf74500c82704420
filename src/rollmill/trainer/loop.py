"""The trainer's loop: lease a batch, train, publish, record, again.

    waits for                      woken by      looks again after   gives up after
    the batch of its own step      doorbell      RECHECK_S           trainer.batch_deadline_s
    the publication before         its thread    -                   weights.publish_deadline_s
    the checkpoint before          its thread    -                   trainer.checkpoint_deadline_s

Effects only: what to do is in `rollmill.trainer.decisions`, the update in `rollmill.trainer.step`. Never talks to the
generator: the store and the repository stand between them. After an update the weights are copied; the next step may
begin while the copy is committed, its step recorded and the bell rung, in this order, so that the books say "trained"
only of published weights (`rollmill.trainer.publication`). A checkpoint waits for that: it makes the step final.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

import msgspec
import numpy as np

from rollmill.buffer.protocol import CommitPoint, LeasedBatch, SampleStore, StepRecord
from rollmill.clock import Clock
from rollmill.config.schema import RollmillConfig
from rollmill.errors import DeadlineExceeded, Fault, StoreError
from rollmill.ledger.seconds import SecondsLedger, TrainerCause
from rollmill.trainer.checkpointing import Checkpointer, CheckpointWriter
from rollmill.trainer.decisions import (
    STOPPING_PHASE,
    EndReason,
    GiveUp,
    check_staleness,
    checkpoint_due,
    decide_wait,
    publication_due,
)
from rollmill.trainer.metrics import StepMetrics
from rollmill.trainer.publication import Publisher
from rollmill.trainer.step import Trainer
from rollmill.types import Adapter
from rollmill.weights.protocol import ModelRepository, Publication

OWNER = "trainer"
RECHECK_S = 1.0
"""Longest sleep in a wait: a ring may be lost, and a signal does not ring."""


class LoopResult(msgspec.Struct, frozen=True, kw_only=True):
    """How the loop ended.

    Attributes:
        seconds: cause -> seconds since the process started; they sum to `wall_s`.
    """

    reason: EndReason
    optimizer_step: int
    policy_version: int
    steps_trained: int
    wall_s: float
    seconds: dict[str, float]


class TrainerLoop:
    """Drives a `Trainer` from the store and the repository until there is nothing more to train.

    Args:
        trainer: with the state of the checkpoint already loaded, where the run resumes.
        wait: blocks until the doorbell rings or that many seconds have passed.
        ring: wakes the controller (and whoever else waits for weights).
        checkpoints: where commit points are written.
        history_id: of this incarnation; changes with every resume.
        canary_token_ids: int [n]: a fixed prompt, scored with every publication.
        should_stop: True after SIGTERM; the step in hand is finished, a checkpoint written.
        say: takes a sentence for people, for example why nothing happens.
        start_s: clock when the process started; the seconds before `run` are `startup`.
        committed_step: optimizer step of the checkpoint that this run resumed from; `None` for a new run.
        parent_version: policy version that the checkpoint names; parent of the first publication after a resume.
        executor: runs the commits of publications, one at a time; a thread of its own if `None`.
        checkpoint_executor: runs the writes of checkpoints in the background, likewise.
        before_micro_batch: called on the thread that computes, before each micro-batch.
    """

    def __init__(
        self,
        *,
        config: RollmillConfig,
        trainer: Trainer,
        store: SampleStore,
        repository: ModelRepository,
        clock: Clock,
        wait: Callable[[float], bool],
        ring: Callable[[], None],
        checkpoints: CheckpointWriter,
        history_id: str,
        canary_token_ids: np.ndarray,
        should_stop: Callable[[], bool],
        say: Callable[[str], None] = lambda _: None,
        start_s: float | None = None,
        committed_step: int | None = None,
        parent_version: int | None = None,
        executor: Executor | None = None,
        checkpoint_executor: Executor | None = None,
        before_micro_batch: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._before_micro_batch = before_micro_batch
        self._trainer = trainer
        self._store = store
        self._repository = repository
        self._clock = clock
        self._wait = wait
        self._ring = ring
        self._checkpointer = Checkpointer(
            checkpoints,
            background=config.trainer.checkpoint_in_background,
            deadline_s=config.trainer.checkpoint_deadline_s,
            say=say,
            executor=checkpoint_executor,
        )
        self._history_id = history_id
        self._publisher = Publisher(
            repository,
            history_id=history_id,
            training_dtype=trainer.training_dtype,
            score=trainer.canary_scorer(canary_token_ids).score,
            deadline_s=config.weights.publish_deadline_s,
            executor=executor,
        )
        self._should_stop = should_stop
        self._say = say
        self._seconds = SecondsLedger(OWNER, start_s=clock.now_s() if start_s is None else start_s)
        self._recorded: dict[str, float] = {}
        self._committed_step = committed_step
        self._uncommitted: list[str] = []
        self._published_version = parent_version
        self._steps_of: dict[int, int] = {}
        self._steps_trained = 0
        self._lease_expires_s = 0.0
        self._adapter: Adapter | None = None

    def run(self) -> LoopResult:
        """Train until the controller says that nothing more comes, or until asked to stop.

        The last checkpoint is written on both ways out. A fault gives the batch back untrained and writes none: the
        checkpoint before it is the one to resume from.

        Raises:
            DeadlineExceeded: if no batch came within `trainer.batch_deadline_s`.
            StalenessViolation: if a batch broke the bound.
            NumericalFault: if a loss or gradient is not finite.
            WeightError: if a publication or a checkpoint failed.
        """
        try:
            reason = self._run()
            self._publisher.close()
            self._checkpointer.close()
        except BaseException as error:
            # A bug or an interrupt too: what was copied is published and written before the process ends.
            self._publisher.close(cause=error)
            self._checkpointer.close(cause=error)
            raise
        return self._close(reason)

    def _run(self) -> EndReason:
        self._announce()
        while True:
            batch = self._next_batch()
            if isinstance(batch, EndReason):
                break
            self._train(batch)
            if checkpoint_due(
                optimizer_step=self._trainer.optimizer_step,
                every_steps=self._config.trainer.checkpoint_every_steps,
                written_at=self._committed_step,
            ):
                self._checkpoint(self._checkpointer.begin)
        if self._committed_step != self._trainer.optimizer_step:
            self._checkpoint(self._checkpointer.write)
        self._switch(TrainerCause.CHECKPOINT)
        self._checkpointer.settle()
        return batch

    # waiting

    def _next_batch(self) -> LeasedBatch | EndReason:
        """Return the leased batch of the present optimizer step, waiting for it; or why there is none."""
        self._switch(TrainerCause.WAIT_DATA)
        settings = self._config.trainer
        began_s = self._clock.now_s()
        report_due_s = report_every_s = self._config.run.stall_report_s
        while True:
            # the phase before the lease: it turns to "finishing" after the last assignment, so this order loses none
            phase = str(self._store.note("phase", "running"))
            self._publisher.check()
            self._checkpointer.check()
            stop = self._should_stop()
            if stop or phase == STOPPING_PHASE:
                # batches may be assigned ahead; a clean stop waits for the step in hand, not for those
                return EndReason.STOPPED
            batch = self._lease()
            if batch is not None:
                self._lease_expires_s = batch.expires_s
                self._ring()
                return batch
            decision = decide_wait(
                phase=phase,
                stop=stop,
                waited_s=self._clock.now_s() - began_s,
                deadline_s=settings.batch_deadline_s,
                report_due_s=report_due_s,
                recheck_s=RECHECK_S,
            )
            if isinstance(decision, EndReason):
                return decision
            if isinstance(decision, GiveUp):
                raise DeadlineExceeded(self._waiting_sentence(decision.waited_s) + _GIVE_UP)
            if decision.report:
                waited_s = self._clock.now_s() - began_s
                report_due_s = waited_s + report_every_s
                self._say(self._waiting_sentence(waited_s))
            self._wait(decision.seconds)

    def _lease(self) -> LeasedBatch | None:
        return self._store.lease_batch(
            optimizer_step=self._trainer.optimizer_step,
            owner=OWNER,
            now_s=self._clock.now_s(),
            lease_s=self._config.trainer.batch_deadline_s,
        )

    def _waiting_sentence(self, waited_s: float) -> str:
        depth = self._store.statistics()
        return (
            f"the trainer waits for the batch of optimizer step {self._trainer.optimizer_step} since {waited_s:.0f} s: "
            f"{depth.buffered_groups} groups buffered, {depth.assigned_groups} assigned, "
            f"{self._config.schedule.batch_groups} needed."
        )

    # a step

    def _train(self, batch: LeasedBatch) -> None:
        self._switch(TrainerCause.TRAIN)
        try:
            check_staleness(
                batch.groups,
                optimizer_step=self._trainer.optimizer_step,
                budget=self._config.schedule.max_staleness,
                optimizer_step_of=self._optimizer_step_of,
            )
            metrics = self._trainer.train_step(
                batch.groups,
                optimizer_step_of=self._optimizer_step_of,
                heartbeat=lambda: self._beat(batch),
            )
        except Fault as fault:
            self._give_back(batch, fault)
            raise
        self._steps_trained += 1
        self._switch(TrainerCause.PUBLISH)
        self._publish_step(batch, metrics)

    def _beat(self, batch: LeasedBatch) -> None:
        self._renew(batch)
        self._before_micro_batch()

    def _give_back(self, batch: LeasedBatch, fault: Fault) -> None:
        """Release an untrained batch; the fault stays the first cause, whatever the store says."""
        try:
            self._store.release_batch(batch_id=batch.batch_id, owner=OWNER)
        except StoreError as error:
            fault.add_note(f"batch {batch.batch_id} could not be given back either: {error}")

    def _renew(self, batch: LeasedBatch) -> None:
        """Renew the lease once half of it is used; a long step must not lose its batch."""
        self._publisher.check()
        now_s, lease_s = self._clock.now_s(), self._config.trainer.batch_deadline_s
        if self._lease_expires_s - now_s < lease_s / 2:
            self._lease_expires_s = now_s + lease_s
            self._store.renew_lease(batch_id=batch.batch_id, owner=OWNER, now_s=now_s, lease_s=lease_s)

    def _optimizer_step_of(self, policy_version: int) -> int:
        if policy_version not in self._steps_of:
            self._steps_of[policy_version] = self._repository.manifest(policy_version).optimizer_step
        return self._steps_of[policy_version]

    def _publish_step(self, batch: LeasedBatch, metrics: StepMetrics) -> None:
        """Copy the weights; their commit, then the record of the step, then the ring come in the background."""
        publication = self._begin_publication()
        finished_at_s = self._clock.now_s()
        self._seconds.switch(TrainerCause.PUBLISH, at_s=finished_at_s)
        record = StepRecord(
            batch_id=batch.batch_id,
            history_id=self._history_id,
            optimizer_step=self._trainer.optimizer_step,
            policy_version=publication.policy_version,
            group_ids=tuple(group.group_id for group in batch.groups),
            finished_at_s=finished_at_s,
            seconds=self._seconds_since_record(),
            metrics=metrics.scalars(),
        )

        def record_and_ring() -> None:
            self._store.record_step(record, owner=OWNER)
            self._ring()

        self._publisher.finish(publication, then=record_and_ring)
        self._uncommitted += record.group_ids

    def _seconds_since_record(self) -> dict[str, float]:
        """Return cause -> seconds since the record before; the writing of a record belongs to the next one."""
        total = self._seconds.seconds
        since = {cause: seconds - self._recorded.get(cause, 0.0) for cause, seconds in total.items()}
        self._recorded = total
        return {cause: seconds for cause, seconds in since.items() if seconds > 0}

    # publication and checkpoints

    def _announce(self) -> None:
        """Publish the weights that the run starts from, unless that is done."""
        self._switch(TrainerCause.PUBLISH)
        base = self._trainer.base_tensors()
        if base is not None:
            self._adapter = self._trainer.adapter_on(self._repository.put_base(base))
        latest = self._repository.latest()
        if latest is None or publication_due(
            latest, history_id=self._history_id, optimizer_step=self._trainer.optimizer_step
        ):
            self._publisher.finish(self._begin_publication(), then=self._ring)
        else:
            self._published_version = latest.policy_version

    def _begin_publication(self) -> Publication:
        step = self._trainer.optimizer_step
        publication = self._publisher.begin(
            self._trainer.named_tensors(),
            optimizer_step=step,
            parent=self._published_version,
            at_s=self._clock.now_s(),
            adapter=self._adapter,
        )
        self._published_version = publication.policy_version
        self._steps_of[publication.policy_version] = step
        return publication

    def _checkpoint(self, save: Callable[..., None]) -> None:
        """Hand the state to `save`: to be written in the background, or durable when it returns."""
        self._switch(TrainerCause.PUBLISH)
        self._publisher.settle()
        self._switch(TrainerCause.CHECKPOINT)
        commit = CommitPoint(
            history_id=self._history_id,
            optimizer_step=self._trainer.optimizer_step,
            policy_version=self._published_version or 0,
            trained_group_ids=tuple(self._uncommitted),
            journal_offset=self._store.statistics().journal_entries,
        )
        save(self._trainer.state(), commit=commit)
        self._committed_step = self._trainer.optimizer_step
        self._uncommitted.clear()

    # seconds

    def _switch(self, cause: TrainerCause) -> None:
        self._seconds.switch(cause, at_s=self._clock.now_s())

    def _close(self, reason: EndReason) -> LoopResult:
        self._seconds.close(at_s=self._clock.now_s())
        self._seconds.validate()
        return LoopResult(
            reason=reason,
            optimizer_step=self._trainer.optimizer_step,
            policy_version=self._published_version or 0,
            steps_trained=self._steps_trained,
            wall_s=self._seconds.wall_s,
            seconds=self._seconds.seconds,
        )


_GIVE_UP = (
    " That is trainer.batch_deadline_s: generation has stopped or is far slower than expected. Look at the stall "
    "report and the generator's log, or raise trainer.batch_deadline_s."
)
