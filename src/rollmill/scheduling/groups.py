"""Groups, members and batches, and the indexes that find them without a scan.

Keeps records and indexes consistent; decides nothing.
"""

from __future__ import annotations

import bisect
import enum
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from rollmill.scheduling.instructions import DropReason


class GroupState(enum.Enum):
    """Where a group is in its life."""

    OPEN = "open"
    CLOSING = "closing"
    READY = "ready"
    BLANK = "blank"
    """Closed without signal and dropped, yet it takes a place of a batch (setting shrink)."""
    ASSIGNED = "assigned"
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"


class MemberState(enum.Enum):
    """Where a member of a group is."""

    RUNNING = "running"
    PARKED = "parked"
    """To be dispatched again as soon as a replica serves."""
    FINISHED = "finished"
    FAILED = "failed"
    """No attempt is left; it never counts."""
    GONE = "gone"
    """Already dropped in the ledger, ahead of its group."""


UNFINISHED = (GroupState.OPEN, GroupState.CLOSING)
UNASSIGNED = (GroupState.OPEN, GroupState.CLOSING, GroupState.READY, GroupState.BLANK)
PENDING = (MemberState.RUNNING, MemberState.PARKED)


@dataclass(slots=True)
class Member:
    """One sibling of a group, over all its attempts."""

    sibling: int
    member_id: str
    state: MemberState = MemberState.RUNNING
    attempt: int = 1
    counts: bool = False
    reason: DropReason | None = None
    started_s: float = 0.0
    start_order: int = 0
    deadline_s: float = 0.0
    infra_failures: int = 0
    data_failures: int = 0

    @property
    def rollout_id(self) -> str:
        """Id of the present attempt."""
        return f"{self.member_id}.{self.attempt}"


@dataclass(slots=True)
class GroupRecord:
    """What the core knows of a group.

    Attributes:
        floor_step: no token of the group is older than this; the loaded step at dispatch until the group closes.
        pending: members that run or wait to be dispatched again.
        counting: finished members that enter baseline and loss.
        rejoin: a sibling came after `CloseGroup` was sent; close again over the larger set.
        buffered: ledger ids of the members that will be trained.
        wave: number of the wave it was opened with (deterministic mode), else 0.
        wave_start: place of its first member in that wave.
        wave_size: rollouts of that wave.
    """

    seq: int
    group_id: str
    task_index: int
    dispatched_s: float
    deadline_s: float
    floor_step: int
    members: list[Member]
    state: GroupState = GroupState.OPEN
    pending: int = 0
    counting: int = 0
    rejoin: bool = False
    closing_since_s: float = 0.0
    expires_step: int = 0
    buffered: tuple[str, ...] = ()
    wave: int = 0
    wave_start: int = 0
    wave_size: int = 0


@dataclass(slots=True)
class Batch:
    """An assigned batch, until it is trained."""

    batch_id: int
    optimizer_step: int
    groups: tuple[GroupRecord, ...]
    assigned_s: float
    leased_s: float | None = None


@dataclass(slots=True)
class Replica:
    """A serving replica."""

    replica_id: str
    slots: int
    policy_version: int
    loading: int | None = None
    loading_since_s: float = 0.0


@dataclass(slots=True)
class GroupBook:
    """All groups by state; the unassigned ones in order of their id.

    Attributes:
        unassigned: seq -> group, oldest first: open, closing, ready and blank ones.
        trained: kept, because a resume may have to put them back.
        expiring: last step at which it may be consumed -> unassigned groups.
        changed: whether a batch that could not be formed is worth another look.
    """

    max_staleness: int
    live: dict[str, GroupRecord] = field(default_factory=lambda: dict[str, GroupRecord]())
    unassigned: dict[int, GroupRecord] = field(default_factory=lambda: dict[int, GroupRecord]())
    trained: dict[str, GroupRecord] = field(default_factory=lambda: dict[str, GroupRecord]())
    expiring: dict[int, int] = field(default_factory=lambda: dict[int, int]())
    ready: dict[int, list[int]] = field(default_factory=lambda: dict[int, list[int]]())
    ready_count: int = 0
    blank_count: int = 0
    unfinished_count: int = 0
    changed: bool = True

    def add(self, group: GroupRecord) -> None:
        """Take in a newly opened group; ids only rise."""
        group.expires_step = group.floor_step + self.max_staleness
        self.live[group.group_id] = group
        self.unassigned[group.seq] = group
        self._count_expiry(group.expires_step, 1)
        self.unfinished_count += 1

    def put_back(self, groups: list[GroupRecord]) -> None:
        """Make assigned or trained groups ready again, in order of their ids (resume only)."""
        for group in groups:
            group.state = GroupState.READY
            self.live[group.group_id] = group
            self.unassigned[group.seq] = group
            self._count_expiry(group.expires_step, 1)
            self._index_ready(group)
        self.unassigned = dict(sorted(self.unassigned.items()))

    def reindex(self, *, max_staleness: int) -> None:
        """Apply a budget, perhaps a changed one, to the unassigned groups; all must be ready (start and resume)."""
        self.max_staleness = max_staleness
        self.expiring.clear()
        self.ready.clear()
        self.ready_count = 0
        for group in self.unassigned.values():
            group.expires_step = group.floor_step + max_staleness
            self._count_expiry(group.expires_step, 1)
            self._index_ready(group)

    def set_floor(self, group: GroupRecord, floor_step: int) -> None:
        """Change what is known of the age of an unfinished group."""
        group.floor_step = floor_step
        self._count_expiry(group.expires_step, -1)
        group.expires_step = floor_step + self.max_staleness
        self._count_expiry(group.expires_step, 1)

    def mark_ready(self, group: GroupRecord, *, blank: bool = False) -> None:
        """Closing -> ready (or blank)."""
        group.state = GroupState.BLANK if blank else GroupState.READY
        self.unfinished_count -= 1
        self._index_ready(group)
        if blank:
            self.blank_count += 1
            del self.live[group.group_id]

    def reopen(self, group: GroupRecord) -> None:
        """Ready -> open, because a late sibling joins."""
        self._unindex_ready(group)
        group.state = GroupState.OPEN
        self.unfinished_count += 1

    def take(self, group: GroupRecord, state: GroupState) -> None:
        """Move an unassigned group to `state` (assigned or dropped) and out of the indexes."""
        if group.state in UNFINISHED:
            self.unfinished_count -= 1
        else:
            self._unindex_ready(group)
        if group.state is GroupState.BLANK:
            self.blank_count -= 1
        del self.unassigned[group.seq]
        self._count_expiry(group.expires_step, -1)
        group.state = state
        if state is GroupState.DROPPED:
            self.live.pop(group.group_id, None)

    def retire(self, group: GroupRecord) -> None:
        """Leased -> trained. The members' records are not needed any more."""
        group.state = GroupState.TRAINED
        group.members = []
        del self.live[group.group_id]
        self.trained[group.group_id] = group

    def oldest(self, n: int) -> Iterator[GroupRecord]:
        """Yield the `n` oldest unassigned groups, oldest first."""
        return islice(self.unassigned.values(), n)

    def ready_until(self, expires_step: int) -> Iterator[GroupRecord]:
        """Yield ready groups that expire at this step or before, oldest first."""
        buckets = [seqs for step, seqs in self.ready.items() if step <= expires_step]
        return (self.unassigned[seq] for seq in heapq.merge(*buckets))

    def expired(self, step: int) -> list[GroupRecord]:
        """Return the unassigned groups that a batch for `step` may not contain any more, oldest first."""
        if not self.expiring or min(self.expiring) >= step:
            return []
        return [group for group in self.unassigned.values() if group.expires_step < step]

    def _index_ready(self, group: GroupRecord) -> None:
        bisect.insort(self.ready.setdefault(group.expires_step, []), group.seq)
        self.ready_count += 1
        self.changed = True

    def _unindex_ready(self, group: GroupRecord) -> None:
        seqs = self.ready[group.expires_step]
        del seqs[bisect.bisect_left(seqs, group.seq)]
        if not seqs:
            del self.ready[group.expires_step]
        self.ready_count -= 1

    def _count_expiry(self, step: int, change: int) -> None:
        self.changed = True
        left = self.expiring.get(step, 0) + change
        if left:
            self.expiring[step] = left
        else:
            del self.expiring[step]
