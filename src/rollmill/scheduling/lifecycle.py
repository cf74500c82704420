"""The life of a group: open, close, become ready, or be dropped.

Decides when a group closes, which siblings it closes with, and the reason when it cannot.
"""

from __future__ import annotations

from collections import Counter

from rollmill.scheduling.events import GroupClosed, RolloutFinished
from rollmill.scheduling.groups import PENDING, GroupRecord, GroupState, Member, MemberState
from rollmill.scheduling.instructions import AbortRollout, CloseGroup, DropGroup, DropReason, StartRollout
from rollmill.scheduling.state import State
from rollmill.types import Wave

_REASON_ORDER = tuple(DropReason)


def open_group(
    state: State, *, task_index: int, floor_step: int, wave: int = 0, wave_start: int = 0, wave_size: int = 0
) -> None:
    """Admit a group and dispatch all its members."""
    settings = state.settings
    seq, state.next_seq = state.next_seq, state.next_seq + 1
    group_id = f"g{seq:06d}"
    group = GroupRecord(
        seq=seq,
        group_id=group_id,
        task_index=task_index,
        dispatched_s=state.now_s,
        deadline_s=state.now_s + settings.group_deadline_s,
        floor_step=floor_step,
        members=[
            Member(sibling=i, member_id=f"{group_id}/{i}")
            for i in range(settings.group_size + settings.member_oversampling)
        ],
        wave=wave,
        wave_start=wave_start,
        wave_size=wave_size,
    )
    state.book.add(group)
    state.add_deadline(group.deadline_s, kind="group", key=group_id)
    state.tell(group_id, f"dispatched: task {task_index}, weights of step {floor_step}, {len(group.members)} rollouts")
    group.pending = len(group.members)
    for member in group.members:
        state.ledger.admit(member.member_id)
        start(state, group, member)


def start(state: State, group: GroupRecord, member: Member) -> None:
    """Dispatch the present attempt of a member."""
    member.state = MemberState.RUNNING
    member.started_s = state.now_s
    member.start_order, state.start_order = state.start_order, state.start_order + 1
    member.deadline_s = min(state.now_s + state.settings.rollout_deadline_s, group.deadline_s)
    rollout_id = member.rollout_id
    state.attempts[rollout_id] = (group, member)
    state.add_deadline(member.deadline_s, kind="rollout", key=rollout_id)
    state.out.append(
        StartRollout(
            rollout_id=rollout_id,
            group_id=group.group_id,
            task_index=group.task_index,
            sibling=member.sibling,
            attempt=member.attempt,
            deadline_s=member.deadline_s,
            wave=_place_in_wave(group, member),
        )
    )


def _place_in_wave(group: GroupRecord, member: Member) -> Wave | None:
    if not group.wave:
        return None
    return Wave(wave_id=f"w{group.wave:06d}", size=group.wave_size, index=group.wave_start + member.sibling)


def on_rollout_finished(state: State, event: RolloutFinished) -> None:
    """Take the result of a current attempt; a late one is counted and ignored."""
    found = state.attempts.pop(event.rollout_id, None)
    if found is None:
        _count_late(state, event.rollout_id)
        return
    group, member = found
    state.infra_in_a_row = 0
    group.pending -= 1
    if group.state is not GroupState.OPEN:
        _join_late(state, group, member, event)
        return
    member.state = MemberState.FINISHED
    member.counts = event.counts
    if event.counts:
        group.counting += 1
        if event.oldest_optimizer_step < group.floor_step:
            state.book.set_floor(group, event.oldest_optimizer_step)
    else:
        member.reason = _reason_not_counted(event.reason)
        state.tell(group.group_id, f"rollout {event.rollout_id} does not count: {event.reason}")
    consider_closing(state, group)


def _join_late(state: State, group: GroupRecord, member: Member, event: RolloutFinished) -> None:
    """Let a sibling that comes after the close join its unassigned group while it is fresh (reopen_groups)."""
    if not event.counts or event.oldest_optimizer_step + state.settings.max_staleness < state.next_step:
        settle_member(state, member, DropReason.LATE if event.counts else _reason_not_counted(event.reason))
        return
    member.state = MemberState.FINISHED
    member.counts = True
    group.counting += 1
    state.tell(group.group_id, f"late sibling {event.rollout_id} joins")
    if group.state is GroupState.CLOSING:
        group.rejoin = True
    else:
        # Its siblings stay buffered in the ledger while the larger group closes again.
        state.book.reopen(group)
        _close(state, group)
    if event.oldest_optimizer_step < group.floor_step:
        state.book.set_floor(group, event.oldest_optimizer_step)


def consider_closing(state: State, group: GroupRecord) -> None:
    """Close an open group if enough members count, or if no more can come."""
    needed = state.settings.group_size
    if group.counting >= needed:
        if not state.settings.reopen_groups:
            abort_pending(state, group, DropReason.SURPLUS)
        _close(state, group)
    elif group.pending == 0:
        if group.counting >= min(2, needed):
            state.tell(group.group_id, f"closes with {group.counting} of {needed} rollouts: no more can come")
            _close(state, group)
        else:
            drop_group(state, group, _dominant_reason(group))


def _close(state: State, group: GroupRecord) -> None:
    group.state = GroupState.CLOSING
    group.rejoin = False
    group.closing_since_s = state.now_s
    rollout_ids = tuple(member.rollout_id for member in group.members if member.state is MemberState.FINISHED)
    state.tell(group.group_id, f"closing with {len(rollout_ids)} rollouts, {group.counting} count")
    state.out.append(CloseGroup(group_id=group.group_id, rollout_ids=rollout_ids))


def on_group_closed(state: State, event: GroupClosed) -> None:
    """Buffer a group that has signal; drop or blank one that has none."""
    group = state.book.live.get(event.group_id)
    if group is None or group.state is not GroupState.CLOSING:
        # It was dropped while the shell computed: its samples must not stay in the store.
        _count_late(state, event.group_id)
        if group is None and event.group_id not in state.book.trained:
            state.out.append(DropGroup(group_id=event.group_id, reason=DropReason.LATE))
        return
    if group.rejoin:
        _close(state, group)
        return
    state.data_drops_in_a_row = 0
    if not group.buffered:
        state.rates.group_s.observe(state.now_s - group.dispatched_s, 1.0)
        state.rates.signal.observe(float(event.has_signal), 1.0)
    if not event.has_signal:
        reason = _reason_no_signal(event.reason)
        if state.settings.replace_zero_advantage or reason is not DropReason.ZERO_ADVANTAGE:
            drop_group(state, group, reason)
        else:
            _blank(state, group, reason)
        return
    _buffer(state, group, event)


def _buffer(state: State, group: GroupRecord, event: GroupClosed) -> None:
    # While a sibling may still join, the age known at dispatch stands: joining must not make the group older.
    floor_step = event.oldest_optimizer_step
    if group.pending:
        floor_step = min(floor_step, group.floor_step)
    if floor_step != group.floor_step:
        state.book.set_floor(group, floor_step)
    already = frozenset(group.buffered)
    buffered: list[str] = list(group.buffered)
    for member in group.members:
        if member.state is MemberState.FINISHED and member.counts and member.member_id not in already:
            state.ledger.buffer(member.member_id)
            buffered.append(member.member_id)
        elif member.state in (MemberState.FINISHED, MemberState.FAILED) and not member.counts:
            settle_member(state, member, member.reason or DropReason.UNSCORED)
    group.buffered = tuple(buffered)
    state.book.mark_ready(group)
    state.tell(
        group.group_id,
        f"ready: {len(buffered)} rollouts, oldest step {event.oldest_optimizer_step}, "
        f"to be trained by step {group.expires_step}",
    )


def _blank(state: State, group: GroupRecord, reason: DropReason) -> None:
    """Drop the rollouts of a group without signal, but let it take its place in a batch."""
    _drop_members(state, group, reason)
    state.book.mark_ready(group, blank=True)
    state.tell(group.group_id, f"dropped: {reason.value}; takes a place of a batch")
    state.end_story(group.group_id)
    state.out.append(DropGroup(group_id=group.group_id, reason=reason))


def drop_group(state: State, group: GroupRecord, reason: DropReason) -> None:
    """Give up an unassigned group: abort what runs, book every member, tell the shell."""
    _drop_members(state, group, reason)
    state.book.take(group, GroupState.DROPPED)
    state.tell(group.group_id, f"dropped: {reason.value} after {state.now_s - group.dispatched_s:.3f}s")
    state.end_story(group.group_id)
    state.out.append(DropGroup(group_id=group.group_id, reason=reason))


def _drop_members(state: State, group: GroupRecord, reason: DropReason) -> None:
    abort_pending(state, group, reason)
    for member in group.members:
        if member.state is not MemberState.GONE:
            settle_member(state, member, member.reason or reason)
    if not group.members:
        # Trained once, and put back by a resume: only its ledger ids are left.
        for member_id in group.buffered:
            state.ledger.drop(member_id, reason=reason.value)


def abort_pending(state: State, group: GroupRecord, reason: DropReason) -> None:
    """Abort the members that still run and book them as dropped."""
    if not group.pending:
        return
    for member in group.members:
        if member.state in PENDING:
            withdraw(state, member, why=reason.value)
            settle_member(state, member, reason)
    group.pending = 0


def withdraw(state: State, member: Member, *, why: str) -> None:
    """Take a member's present attempt out of flight."""
    if member.state is MemberState.RUNNING:
        del state.attempts[member.rollout_id]
        state.out.append(AbortRollout(rollout_id=member.rollout_id, reason=why))
    else:
        del state.parked[member.member_id]


def settle_member(state: State, member: Member, reason: DropReason) -> None:
    """Book a member as dropped, ahead of its group or with it."""
    state.ledger.drop(member.member_id, reason=reason.value)
    member.state = MemberState.GONE


def _count_late(state: State, what: str) -> None:
    state.ledger.late_result()
    group_id = what.partition("/")[0]
    if group_id in state.stories:
        state.tell(group_id, f"late result of {what} ignored")


def _dominant_reason(group: GroupRecord) -> DropReason:
    reasons = Counter(member.reason for member in group.members if member.reason is not None)
    if not reasons:
        return DropReason.UNSCORED
    return max(_REASON_ORDER, key=lambda reason: reasons.get(reason, 0))


def _reason_not_counted(reason: str) -> DropReason:
    if reason.startswith("overlong"):
        return DropReason.OVERLONG
    if reason.startswith("no_trainable_tokens"):
        return DropReason.NO_TRAINABLE_TOKENS
    return DropReason.UNSCORED


def _reason_no_signal(reason: str) -> DropReason:
    return DropReason.NO_TRAINABLE_TOKENS if reason == "no_trainable_tokens" else DropReason.ZERO_ADVANTAGE
