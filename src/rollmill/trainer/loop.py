"""The trainer's loop: lease a batch, train, publish, record, again.

    waits for                      woken by      looks again after   gives up after
    the batch of its own step      doorbell      RECHECK_S           trainer.batch_deadline_s

Effects only: what to do is in `rollmill.trainer.decisions`, the update in `rollmill.trainer.step`. Never talks to the
generator: the store and the repository stand between them. The order after an update is publish, record, ring,
checkpoint: the generator gets the weights first, the books say "trained" only of published weights, and the checkpoint,
which makes it final, keeps nobody waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from rollmill.buffer.protocol import CommitPoint, LeasedBatch, SampleStore, StepRecord
from rollmill.clock import Clock
from rollmill.config.schema import RollmillConfig
from rollmill.errors import DeadlineExceeded, Fault, StoreError
from rollmill.ledger.seconds import SecondsLedger, TrainerCause
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
from rollmill.trainer.step import Trainer, TrainerState
from rollmill.types import WeightManifest
from rollmill.weights.protocol import ModelRepository

OWNER = "trainer"
RECHECK_S = 1.0
"""Longest sleep in a wait: a ring may be lost, and a signal does not ring."""


class CheckpointWriter(Protocol):
    """Makes a state durable; the rename of a checkpoint is the commit point of the run."""

    def write(self, state: TrainerState, *, commit: CommitPoint) -> None:
        """Return when the checkpoint is durable and visible.

        Raises:
            Fault: if it could not be written; the checkpoint before it stays.
        """
        ...


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
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._store = store
        self._repository = repository
        self._clock = clock
        self._wait = wait
        self._ring = ring
        self._checkpoints = checkpoints
        self._history_id = history_id
        self._canary_token_ids = canary_token_ids
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

    def run(self) -> LoopResult:
        """Train until the controller says that nothing more comes, or until asked to stop.

        The last checkpoint is written on both ways out. A fault gives the batch back untrained and writes none: the
        checkpoint before it is the one to resume from.

        Raises:
            DeadlineExceeded: if no batch came within `trainer.batch_deadline_s`.
            StalenessViolation: if a batch broke the bound.
            NumericalFault: if a loss or gradient is not finite.
        """
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
                self._checkpoint()
        if self._committed_step != self._trainer.optimizer_step:
            self._checkpoint()
        return self._close(batch)

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
                heartbeat=lambda: self._renew(batch),
            )
        except Fault as fault:
            self._give_back(batch, fault)
            raise
        self._steps_trained += 1
        self._switch(TrainerCause.PUBLISH)
        manifest = self._publish()
        self._record(batch, metrics, manifest)
        self._ring()

    def _give_back(self, batch: LeasedBatch, fault: Fault) -> None:
        """Release an untrained batch; the fault stays the first cause, whatever the store says."""
        try:
            self._store.release_batch(batch_id=batch.batch_id, owner=OWNER)
        except StoreError as error:
            fault.add_note(f"batch {batch.batch_id} could not be given back either: {error}")

    def _renew(self, batch: LeasedBatch) -> None:
        """Renew the lease once half of it is used; a long step must not lose its batch."""
        now_s, lease_s = self._clock.now_s(), self._config.trainer.batch_deadline_s
        if self._lease_expires_s - now_s < lease_s / 2:
            self._lease_expires_s = now_s + lease_s
            self._store.renew_lease(batch_id=batch.batch_id, owner=OWNER, now_s=now_s, lease_s=lease_s)

    def _optimizer_step_of(self, policy_version: int) -> int:
        if policy_version not in self._steps_of:
            self._steps_of[policy_version] = self._repository.manifest(policy_version).optimizer_step
        return self._steps_of[policy_version]

    def _record(self, batch: LeasedBatch, metrics: StepMetrics, manifest: WeightManifest) -> None:
        finished_at_s = self._clock.now_s()
        self._seconds.switch(TrainerCause.PUBLISH, at_s=finished_at_s)
        self._store.record_step(
            StepRecord(
                batch_id=batch.batch_id,
                history_id=self._history_id,
                optimizer_step=self._trainer.optimizer_step,
                policy_version=manifest.policy_version,
                group_ids=tuple(group.group_id for group in batch.groups),
                finished_at_s=finished_at_s,
                seconds=self._seconds_since_record(),
                metrics=metrics.scalars(),
            ),
            owner=OWNER,
        )
        self._uncommitted += [group.group_id for group in batch.groups]

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
        latest = self._repository.latest()
        if latest is None or publication_due(
            latest, history_id=self._history_id, optimizer_step=self._trainer.optimizer_step
        ):
            latest = self._publish()
            self._ring()
        self._published_version = latest.policy_version

    def _publish(self) -> WeightManifest:
        manifest = self._repository.publish(
            self._trainer.named_tensors(),
            optimizer_step=self._trainer.optimizer_step,
            parent=self._published_version,
            history_id=self._history_id,
            training_dtype=self._trainer.training_dtype,
            canary=self._trainer.canary(self._canary_token_ids),
            at_s=self._clock.now_s(),
        )
        self._published_version = manifest.policy_version
        self._steps_of[manifest.policy_version] = manifest.optimizer_step
        self._repository.retire()
        return manifest

    def _checkpoint(self) -> None:
        self._switch(TrainerCause.CHECKPOINT)
        commit = CommitPoint(
            history_id=self._history_id,
            optimizer_step=self._trainer.optimizer_step,
            policy_version=self._published_version or 0,
            trained_group_ids=tuple(self._uncommitted),
            journal_offset=self._store.statistics().journal_entries,
        )
        self._checkpoints.write(self._trainer.state(), commit=commit)
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
