"""Which groups form the next batch: oldest first inside a window, and never so that a later one expires.

The core alone assigns. A batch is held for an unfinished old group if letting it pass would make it, or another one
after it, too old; the group's deadline bounds the hold.
"""

from __future__ import annotations

from rollmill.scheduling.groups import Batch, GroupBook, GroupRecord, GroupState
from rollmill.scheduling.instructions import AssignBatch, DropReason
from rollmill.scheduling.lifecycle import abort_pending, drop_group
from rollmill.scheduling.state import State

_READY = (GroupState.READY, GroupState.BLANK)


def choose_batch(book: GroupBook, *, step: int, places: int, window: int) -> list[GroupRecord] | None:
    """Return the groups of the batch for `step`, oldest first, or `None` while it cannot be formed.

    For every step `d` that some group must be consumed by, the batch takes at least as many of the groups that
    expire by `d` as do not fit into the later batches up to `d` (see `admission` for the proof that this suffices).
    """
    dues = _dues(book, step=step, places=places)
    if any(due > ready for _, due, ready in dues):
        return None
    chosen: dict[int, GroupRecord] = {}
    for expires_step, due, _ in dues:
        if due <= len(chosen):
            continue
        for group in book.ready_until(expires_step):
            chosen[group.seq] = group
            if len(chosen) >= due:
                break
    for group in book.oldest(max(window, places)):
        if len(chosen) >= places:
            break
        if group.state in _READY:
            chosen[group.seq] = group
    if len(chosen) < places:
        return None
    return [chosen[seq] for seq in sorted(chosen)]


def _dues(book: GroupBook, *, step: int, places: int) -> list[tuple[int, int, int]]:
    """Return (d, groups expiring by `d` that this batch must take, those of them that are ready) for every `d`."""
    dues: list[tuple[int, int, int]] = []
    expiring = ready = 0
    for expires_step in sorted(book.expiring):
        expiring += book.expiring[expires_step]
        ready += len(book.ready.get(expires_step, ()))
        dues.append((expires_step, min(expiring - places * (expires_step - step), places), ready))
    return dues


def assign(state: State) -> None:
    """Assign every batch that can be formed, a few ahead of the trainer; drop what has become too old."""
    drop_stale(state)
    settings = state.settings
    while not state.stopping and not state.halted and state.next_step < settings.total_steps:
        if state.underway > settings.max_staleness:
            break
        chosen = _full_batch(state) or _last_batch(state)
        if not chosen:
            break
        _assign(state, chosen)
        drop_stale(state)


def _full_batch(state: State) -> list[GroupRecord] | None:
    book = state.book
    while book.changed and book.ready_count >= state.settings.batch_groups:
        chosen = choose_batch(
            book,
            step=state.next_step,
            places=state.settings.batch_groups,
            window=state.settings.window_groups,
        )
        if chosen is None:
            book.changed = False
            return None
        if any(group.state is GroupState.READY for group in chosen):
            return chosen
        # Nothing but groups without signal: no empty batch, sampling goes on.
        _discard_blanks(state, chosen)
    return None


def _last_batch(state: State) -> list[GroupRecord] | None:
    """Return what is left when the data has ended and no full batch can come any more."""
    book = state.book
    if state.draws_left or book.unfinished_count or book.ready_count >= state.settings.batch_groups:
        return None
    return list(book.unassigned.values()) if book.ready_count > book.blank_count else None


def _discard_blanks(state: State, groups: list[GroupRecord]) -> None:
    for group in groups:
        state.book.take(group, GroupState.DROPPED)


def _assign(state: State, chosen: list[GroupRecord]) -> None:
    groups = [group for group in chosen if group.state is GroupState.READY]
    _discard_blanks(state, [group for group in chosen if group.state is GroupState.BLANK])
    batch_id, state.next_batch_id = state.next_batch_id, state.next_batch_id + 1
    step, state.next_step = state.next_step, state.next_step + 1
    for group in groups:
        abort_pending(state, group, DropReason.SURPLUS)
        state.book.take(group, GroupState.ASSIGNED)
        state.tell(group.group_id, f"assigned to batch {batch_id} of step {step}")
    state.batches[batch_id] = Batch(
        batch_id=batch_id, optimizer_step=step, groups=tuple(groups), assigned_s=state.now_s
    )
    state.out.append(
        AssignBatch(batch_id=batch_id, group_ids=tuple(group.group_id for group in groups), optimizer_step=step)
    )


def drop_stale(state: State) -> None:
    """Drop the groups that no batch may contain any more; abort those that still run."""
    for group in state.book.expired(state.next_step):
        if group.state is GroupState.BLANK:
            state.book.take(group, GroupState.DROPPED)
        else:
            drop_group(state, group, DropReason.STALE)


def account_hold(state: State) -> None:
    """Time how long the trainer waits for an old group although enough groups are ready."""
    trainer_idle = not state.underway and not state.halted and not state.stopping
    held = trainer_idle and state.book.ready_count >= state.settings.batch_groups
    if held and state.held_since_s is None:
        state.held_since_s = state.now_s
        state.waits_for_old += 1
    elif not held and state.held_since_s is not None:
        state.waits_for_old_s += state.now_s - state.held_since_s
        state.held_since_s = None
    if trainer_idle and state.trainer_idle_since_s is None:
        state.trainer_idle_since_s = state.now_s
    elif not trainer_idle:
        state.trainer_idle_since_s = None


def abort_in_flight(state: State, *, reason: DropReason) -> None:
    """Drop every open group, and let its task be drawn again if the run goes on later."""
    tasks: list[int] = []
    for group in list(state.book.unassigned.values()):
        if group.state is GroupState.OPEN:
            tasks.append(group.task_index)
            drop_group(state, group, reason)
        else:
            abort_pending(state, group, DropReason.SURPLUS)
    state.requeued = type(state.requeued)(sorted([*state.requeued, *tasks]))
