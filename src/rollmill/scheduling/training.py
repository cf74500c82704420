"""What the trainer does to batches: take and train. Asserts the staleness bound a last time; decides nothing."""

from __future__ import annotations

from rollmill.errors import InvariantViolation, StalenessViolation
from rollmill.scheduling.events import BatchTaken, BatchTrained
from rollmill.scheduling.groups import Batch, GroupRecord, GroupState
from rollmill.scheduling.state import State


def on_batch_taken(state: State, event: BatchTaken) -> None:
    """Lease a batch.

    Raises:
        InvariantViolation: if the batch was never assigned or is trained already.
        StalenessViolation: if a group in it is older than the budget.
    """
    batch = _batch(state, event.batch_id)
    if batch.leased_s is not None:
        # Released and leased again, by the same trainer after a restart.
        return
    for group in batch.groups:
        if staleness_of(group, batch) > state.settings.max_staleness:
            raise StalenessViolation(
                f"group {group.group_id} has tokens of step {group.floor_step} and would be consumed at step "
                f"{batch.optimizer_step}: staleness {staleness_of(group, batch)}, budget "
                f"{state.settings.max_staleness}. Pacing failed; this is a bug of the scheduling core."
            )
        group.state = GroupState.LEASED
    batch.leased_s = state.now_s
    state.had_batch = True


def on_batch_trained(state: State, event: BatchTrained) -> None:
    """Book a trained batch and advance the trainer's step.

    Raises:
        InvariantViolation: if batches are trained out of order.
    """
    batch = _batch(state, event.batch_id)
    if batch.optimizer_step != state.optimizer_step or event.optimizer_step != batch.optimizer_step + 1:
        raise InvariantViolation(
            f"batch {event.batch_id} of step {batch.optimizer_step} was reported as the update to step "
            f"{event.optimizer_step} while the trainer is at {state.optimizer_step}. Batches are trained in order, one "
            "step each; the trainer took a batch that was not its next."
        )
    if batch.leased_s is None:
        on_batch_taken(state, BatchTaken(at_s=event.at_s, batch_id=event.batch_id))
    rollouts = 0
    for group in batch.groups:
        rollouts += len(group.buffered)
        state.staleness.observe(staleness_of(group, batch), rollouts=len(group.buffered))
        mark_trained(state, group)
    del state.batches[event.batch_id]
    state.optimizer_step = event.optimizer_step
    state.degraded_steps += bool(state.missing)
    served = state.loaded_step is not None and state.loaded_step >= state.optimizer_step
    state.trained_at_s = None if served else state.now_s
    state.rates.consumption.observe(float(rollouts), event.step_s)


def mark_trained(state: State, group: GroupRecord) -> None:
    """Book the members of a group as trained."""
    for member_id in group.buffered:
        state.ledger.train(member_id)
    state.book.retire(group)
    state.tell(group.group_id, "trained")
    state.end_story(group.group_id)


def staleness_of(group: GroupRecord, batch: Batch) -> int:
    """Return the staleness with which a batch consumes a group, in optimizer steps."""
    return max(0, batch.optimizer_step - group.floor_step)


def _batch(state: State, batch_id: int) -> Batch:
    batch = state.batches.get(batch_id)
    if batch is None:
        raise InvariantViolation(
            f"batch {batch_id} is not under way (assigned and not yet trained: {sorted(state.batches)}). "
            "The shell reported a batch of another history, or reported it twice."
        )
    return batch
