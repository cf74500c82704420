"""What the core shows: a snapshot for the live view and the summary, who waits for whom, and what bounds the run.

Pure reading; nothing here changes the state.
"""

from __future__ import annotations

import enum
from itertools import islice

import msgspec

from rollmill.ledger import RolloutState
from rollmill.scheduling.admission import capacity_rollouts, ceiling_groups, promised_groups, stock_target
from rollmill.scheduling.groups import UNFINISHED, GroupRecord, GroupState, MemberState
from rollmill.scheduling.state import State

_LISTED = 16


class Bound(enum.StrEnum):
    """What holds the run back at a moment."""

    START = "start"
    """No batch has been taken yet."""
    TRAINER = "trainer"
    """The trainer has work: faster training is the only way to go faster."""
    GENERATOR = "generator"
    """The trainer waits for rollouts that run."""
    ADMISSION = "admission"
    """The trainer waits, slots are free, and the staleness budget allows no more rollouts."""
    WEIGHTS = "weights"
    """The trainer waits, and no rollout may start before newer weights are loaded."""
    DATA = "data"
    """The data has ended, or the run is stopping."""


class SchedulerView(msgspec.Struct, frozen=True, kw_only=True):
    """The core's state in numbers, as of the last event.

    Attributes:
        optimizer_step: committed updates of the trainer.
        batches_ahead: batches assigned and not yet trained, the one in training included.
        admitted: rollouts ever admitted = in_flight + suspended + buffered + trained + the sum of `dropped`.
        dropped: reason -> rollouts.
        redispatched: what ended an attempt -> further attempts.
        late_results: results that nobody waited for any more.
        stock: rollouts promised to the trainer and not yet trained.
        stock_target: the base stock aimed at, rollouts.
        ceiling: most rollouts that the staleness bound lets be promised.
        capacity: rollouts that may still be admitted under the ceiling.
        running: attempts that run now; slots: how many can run at once.
        ready_groups, unfinished_groups: unassigned groups with and without their result.
        staleness_mean, staleness_max: over trained rollouts, optimizer steps.
        consumption_rollouts_per_s: smoothed, while the trainer trains.
        signal_share: smoothed share of closed groups with signal.
        group_s: smoothed time from dispatch to close of a group.
        bound_by: what bounds the run now; seconds_bound: for how long each did.
        waits_for_old, waits_for_old_s: how often and how long the trainer waited for an old group while enough
            others were ready.
        publish_lag_steps: optimizer steps that the oldest serving replica is behind the newest weights.
        degraded_steps: optimizer steps trained while a lost replica was missing (run.on_generator_loss = degrade).
        awaited: lost replicas that come back.
        loaded_step: optimizer step that every replica serves or has passed; 0 before one serves.
    """

    at_s: float
    history_id: str
    optimizer_step: int
    total_steps: int
    batches_ahead: int
    admitted: int
    in_flight: int
    suspended: int
    buffered: int
    trained: int
    dropped: dict[str, int]
    redispatched: dict[str, int]
    late_results: int
    stock: int
    stock_target: float
    ceiling: int
    capacity: int
    running: int
    slots: int
    replicas: int
    ready_groups: int
    unfinished_groups: int
    staleness_mean: float
    staleness_max: int
    staleness_budget: int
    consumption_rollouts_per_s: float
    signal_share: float
    group_s: float
    bound_by: str
    seconds_bound: dict[str, float]
    waits_for_old: int
    waits_for_old_s: float
    publish_lag_steps: int
    degraded_steps: int
    awaited: tuple[str, ...]
    loaded_step: int = 0

    @property
    def bound_most(self) -> str:
        """What bounded the run for the longest time since its first batch; before that, what bounds it now."""
        bounds = [name for name in self.seconds_bound if name != Bound.START]
        return max(bounds, key=lambda name: self.seconds_bound[name], default=self.bound_by)

    def rollouts(self) -> dict[str, int | dict[str, int]]:
        """Return the book of rollouts as `summary.json` shows it: `admitted`, the states, and `dropped` by reason."""
        return {
            "admitted": self.admitted,
            "in_flight": self.in_flight,
            "suspended": self.suspended,
            "buffered": self.buffered,
            "trained": self.trained,
            "dropped": dict(self.dropped),
        }


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody waits for something.

    Attributes:
        who: the party that waits, for example `trainer` or `group g000005`.
        waits_for: what it needs, in words.
        since_s: controller clock; age_s: how long that is ago.
        pending: ids that it waits for (at most 16; the text names the full number).
        deadline_s: controller clock at which the core gives up, or `None`.
    """

    who: str
    waits_for: str
    since_s: float
    age_s: float
    pending: tuple[str, ...] = ()
    deadline_s: float | None = None

    @property
    def sentence(self) -> str:
        """One line for the stall report."""
        text = f"{self.who} waits for {self.waits_for}, for {self.age_s:.1f} s now"
        if self.pending:
            text += f" ({', '.join(self.pending)})"
        if self.deadline_s is not None:
            left_s = self.deadline_s - self.since_s - self.age_s
            text += f"; given up in {left_s:.1f} s" if left_s > 0 else "; its deadline has passed"
        return text + "."


def bound_by(state: State) -> Bound:
    """Return what holds the run back now."""
    if state.stopping or state.halted:
        return Bound.DATA
    if not state.had_batch:
        return Bound.START
    if state.underway:
        return Bound.TRAINER
    if not state.draws_left and not state.book.unfinished_count:
        return Bound.DATA
    if state.slots and len(state.attempts) >= state.slots:
        return Bound.GENERATOR
    if state.loaded_step is not None and promised_groups(state) >= ceiling_groups(state):
        return Bound.WEIGHTS if state.loaded_step < state.optimizer_step else Bound.ADMISSION
    return Bound.GENERATOR


def view(state: State) -> SchedulerView:
    """Return the snapshot."""
    ledger, book, rates = state.ledger, state.book, state.rates
    size = state.settings.group_size
    newest_step = state.step_of_version.get(state.newest_version, state.optimizer_step)
    return SchedulerView(
        at_s=state.now_s,
        history_id=state.history_id,
        optimizer_step=state.optimizer_step,
        total_steps=state.settings.total_steps,
        batches_ahead=state.underway,
        admitted=ledger.admitted,
        in_flight=ledger.count(RolloutState.IN_FLIGHT),
        suspended=ledger.count(RolloutState.SUSPENDED),
        buffered=ledger.count(RolloutState.BUFFERED),
        trained=ledger.count(RolloutState.TRAINED),
        dropped=dict(ledger.dropped_by_reason),
        redispatched=dict(ledger.redispatched_by_reason),
        late_results=ledger.late_results,
        stock=promised_groups(state) * size,
        stock_target=stock_target(state),
        ceiling=ceiling_groups(state) * size,
        capacity=capacity_rollouts(state),
        running=len(state.attempts),
        slots=state.slots,
        replicas=len(state.replicas),
        ready_groups=book.ready_count,
        unfinished_groups=book.unfinished_count,
        staleness_mean=state.staleness.mean,
        staleness_max=state.staleness.largest,
        staleness_budget=state.settings.max_staleness,
        consumption_rollouts_per_s=rates.consumption.value,
        signal_share=rates.signal.value,
        group_s=rates.group_s.value,
        bound_by=bound_by(state).value,
        seconds_bound=dict(state.seconds_bound),
        waits_for_old=state.waits_for_old,
        waits_for_old_s=state.waits_for_old_s,
        publish_lag_steps=0 if state.loaded_step is None else max(0, newest_step - state.loaded_step),
        degraded_steps=state.degraded_steps,
        awaited=tuple(sorted(state.awaited)),
        loaded_step=state.loaded_step or 0,
    )


def waits(state: State, *, at_s: float) -> tuple[Wait, ...]:
    """Return who waits for whom at `at_s`, the trainer first, then batches, replicas, and groups by age."""
    found = [*_trainer_waits(state, at_s), *_batch_waits(state, at_s), *_replica_waits(state, at_s)]
    unfinished = (group for group in state.book.unassigned.values() if group.state in UNFINISHED)
    found += [_group_wait(group, at_s) for group in islice(unfinished, _LISTED)]
    return tuple(found)


def _trainer_waits(state: State, at_s: float) -> list[Wait]:
    since_s = state.trainer_idle_since_s
    if since_s is None:
        return []
    book, settings = state.book, state.settings
    if state.held_since_s is not None:
        what = f"old groups, although {book.ready_count} groups are ready for step {state.next_step}"
    else:
        what = (
            f"the batch of step {state.next_step}: {book.ready_count} of {settings.batch_groups} groups ready, "
            f"{book.unfinished_count} unfinished"
        )
    if not book.unfinished_count:
        what += f"; {_why_nothing_is_admitted(state)}"
    window = max(settings.window_groups, settings.batch_groups)
    pending = [group.group_id for group in book.oldest(window) if group.state in UNFINISHED]
    return [
        Wait(who="trainer", waits_for=what, since_s=since_s, age_s=at_s - since_s, pending=tuple(pending[:_LISTED]))
    ]


def _why_nothing_is_admitted(state: State) -> str:
    if state.loaded_step is None:
        coming = f"; awaited: {', '.join(sorted(state.awaited))}" if state.awaited else ""
        return f"nothing is admitted because no replica serves{coming}"
    if not state.draws_left:
        return "nothing is admitted because the data has ended"
    if capacity_rollouts(state) < state.settings.group_size:
        lag = max(0, state.optimizer_step - state.loaded_step)
        return (
            f"nothing is admitted because the staleness budget {state.settings.max_staleness} is used up "
            f"(serving weights are {lag} steps behind the trainer)"
        )
    if state.settings.deterministic:
        return f"the next wave is opened when every replica serves policy version {state.newest_version}, the newest"
    return "nothing is admitted because the stock is at its target"


def _batch_waits(state: State, at_s: float) -> list[Wait]:
    found: list[Wait] = []
    for batch in state.batches.values():
        leased = batch.leased_s is not None
        since_s = batch.leased_s if batch.leased_s is not None else batch.assigned_s
        found.append(
            Wait(
                who=f"batch {batch.batch_id}",
                waits_for=f"the trainer to {'finish' if leased else 'take'} step {batch.optimizer_step}",
                since_s=since_s,
                age_s=at_s - since_s,
                pending=tuple(group.group_id for group in batch.groups[:_LISTED]),
            )
        )
    return found


def _replica_waits(state: State, at_s: float) -> list[Wait]:
    lost = [
        Wait(
            who=f"the run (replica {replica_id} was lost)",
            waits_for="it to serve again",
            since_s=since_s,
            age_s=at_s - since_s,
        )
        for replica_id, since_s in sorted(state.awaited.items())
    ]
    return lost + [
        Wait(
            who=f"replica {replica.replica_id}",
            waits_for=f"policy version {replica.loading} to load (serves {replica.policy_version})",
            since_s=replica.loading_since_s,
            age_s=at_s - replica.loading_since_s,
        )
        for replica in state.replicas.values()
        if replica.loading is not None
    ]


def _group_wait(group: GroupRecord, at_s: float) -> Wait:
    if group.state is GroupState.CLOSING:
        since_s, what, pending = group.closing_since_s, "the controller to compute advantages and store it", ()
    else:
        running = [member for member in group.members if member.state is MemberState.RUNNING]
        parked = [member for member in group.members if member.state is MemberState.PARKED]
        since_s = group.dispatched_s
        what = f"{len(running)} of {len(group.members)} rollouts of task {group.task_index} to finish"
        if parked:
            what += f", {len(parked)} of them wait for a replica"
        pending = tuple(member.rollout_id for member in (*running, *parked)[:_LISTED])
    return Wait(
        who=f"group {group.group_id}",
        waits_for=what,
        since_s=since_s,
        age_s=at_s - since_s,
        pending=pending,
        deadline_s=group.deadline_s,
    )
