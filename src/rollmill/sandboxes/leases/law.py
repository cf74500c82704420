"""The rules of leases: who may act on a rollout's sandbox, and what a sweep does. Pure.

    creating --made--> running <--resumed-- suspended
        |                 |  --suspended-->     |      by its owner, or when its lease ends
        '--not there--> (gone)                  |
                          '------ending <-------'      released, expired or superseded
                                    '--killed--> (gone)

A row is written before its sandbox is asked for, and goes when nothing is left of it. Each rollout has at most one row
that is not ending. Its generation rises with every new owner, and what an older one asks is refused.

A rollout is suspended as it is, or as a snapshot of its files whose name is in the row before it is made. As long as
that snapshot is there, what happens to the sandbox loses nothing: the rollout is suspended then. Where a provider ends
sandboxes at an age and cannot be asked for more, a sweep suspends those that come near it as their files.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Iterable

import msgspec

from rollmill.errors import SandboxLeaseLost
from rollmill.sandboxes.records import Capabilities, DeathReason, Record, SandboxState, SandboxStatus, SnapshotRef

KEEPER_LABEL, ROLLOUT_LABEL, GENERATION_LABEL = "keeper", "rollout", "generation"
RELEASED = "released"
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 300.0
_ENDED = (SandboxState.DEAD, SandboxState.LOST)


class Phase(enum.Enum):
    """Where a row is."""

    CREATING = "creating"
    RUNNING = "running"
    SUSPENDED = "suspended"
    ENDING = "ending"


class Row(Record, frozen=True, kw_only=True):
    """One sandbox of a rollout.

    Attributes:
        sandbox_id: chosen before it was asked for.
        rollout_id: what it is for.
        generation: of its owner.
        provider: which provider has it.
        owner: who holds it; empty if its owner is gone and nobody took it over.
        phase: where it is.
        snapshots: names of those that may be there, the newest last; gone once a sandbox was made from them.
        refs: those of them that outlive the process that took them, by which any process restores them.
        expires_s: end of the lease, since the epoch.
        policy_version: weights at the rollout's start.
        asked_s: when it was asked for, since the epoch.
        attempts: kills that failed.
        retry_s: when the next kill is due, since the epoch.
        note: why it ends, or why the last kill failed.
    """

    sandbox_id: str
    rollout_id: str
    generation: int
    provider: str
    owner: str
    phase: Phase
    snapshots: tuple[str, ...] = ()
    refs: tuple[SnapshotRef, ...] = ()
    expires_s: float = 0.0
    policy_version: int = 0
    asked_s: float = 0.0
    attempts: int = 0
    retry_s: float = 0.0
    note: str = ""


class Claim(Record, frozen=True, kw_only=True):
    """What an owner shows when it acts.

    Attributes:
        rollout_id: for which rollout.
        generation: as it was given.
        sandbox_id: on which sandbox.
        owner: who it is.
    """

    rollout_id: str
    generation: int
    sandbox_id: str
    owner: str


def sandbox_id_of(rollout_id: str, *, generation: int, salt: str) -> str:
    """Return the id of a rollout's sandbox; any rollout's name gives one.

    Example:
        >>> sandbox_id_of("g0/0.0", generation=2, salt="5eed")
        'r06db4e14c99a3b4a-2-5eed'
    """
    return f"r{hashlib.sha256(rollout_id.encode()).hexdigest()[:16]}-{generation}-{salt}"


def snapshot_id_of(sandbox_id: str) -> str:
    """Return the name of the snapshot that a sandbox ends as; it tells of which table it is.

    Example:
        >>> snapshot_id_of("r7-2-5eed")
        'r7-2-5eed-s'
    """
    return f"{sandbox_id}-s"


def is_snapshot_of(snapshot_id: str, *, salt: str) -> bool:
    """Return whether a snapshot is of a sandbox of the table with this salt."""
    return snapshot_id.endswith(f"-{salt}-s")


def claim_of(row: Row) -> Claim:
    """Return what the owner of a row shows."""
    return Claim(rollout_id=row.rollout_id, generation=row.generation, sandbox_id=row.sandbox_id, owner=row.owner)


def check_claim(claim: Claim, row: Row | None, *, now_s: float) -> Row:
    """Return the row of a claim that holds.

    Args:
        row: what the rollout has now.

    Raises:
        SandboxLeaseLost: if there is nothing, another owner came after, or the lease ended.
    """
    what = f"rollout {claim.rollout_id!r}: {claim.owner!r} holds generation {claim.generation}"
    if row is None:
        raise SandboxLeaseLost(f"{what}, and the rollout has no sandbox any more; start it again", generation=0)
    if claim != claim_of(row):
        raise SandboxLeaseLost(
            f"{what}, and {row.owner or 'nobody'!r} has generation {row.generation} now; stop using the sandbox",
            generation=row.generation,
        )
    if row.expires_s <= now_s:
        raise SandboxLeaseLost(
            f"{what}, whose lease ended {now_s - row.expires_s:.1f} s ago; renew earlier, or give it longer",
            generation=row.generation,
        )
    return row


def check_there(row: Row) -> Row:
    """Return a row whose sandbox may be used.

    Raises:
        SandboxLeaseLost: if it was suspended as its files.
    """
    if is_stored(row):
        raise SandboxLeaseLost(
            f"rollout {row.rollout_id!r} is suspended as a snapshot of its files, and its sandbox has ended, or will; "
            "resume it, and another one goes on with them",
            generation=row.generation,
        )
    return row


def check_resume(rollout_id: str, row: Row | None, *, owner: str, now_s: float, take_over: bool) -> Row:
    """Return the row that an owner may take on.

    Raises:
        SandboxLeaseLost: if there is nothing to resume, or somebody else holds it.
    """
    what = f"rollout {rollout_id!r} cannot be resumed by {owner!r}"
    if row is None:
        raise SandboxLeaseLost(f"{what}: it has no sandbox; start it again", generation=0)
    if row.expires_s <= now_s:
        text = f"{what}: its lease ended {now_s - row.expires_s:.1f} s ago; start it again"
        raise SandboxLeaseLost(text, generation=row.generation)
    if row.phase is Phase.CREATING:
        text = f"{what}: {row.owner!r} is creating it; wait until that is done or swept"
        raise SandboxLeaseLost(text, generation=row.generation)
    if row.phase is Phase.RUNNING and row.owner not in ("", owner) and not take_over:
        text = f"{what}: {row.owner!r} runs it; let it suspend, or take it over"
        raise SandboxLeaseLost(text, generation=row.generation)
    return row


def to_move(rows: Iterable[Row], *, count: int, busy: frozenset[str] = frozenset()) -> tuple[Row, ...]:
    """Return the rollouts whose memory goes when a node is short: of those that have any, the longest suspended.

    Args:
        rows: of one provider.
        count: how many are wanted.
        busy: sandboxes that some call of this process works on.
    """
    found = (row for row in rows if row.phase is Phase.SUSPENDED and row.sandbox_id not in busy and not row.snapshots)
    return tuple(sorted(found, key=lambda row: (row.expires_s, row.sandbox_id))[: max(0, count)])


# -- what an owner does to a row --------------------------------------------------------------------------------------


def taken(row: Row, *, generation: int, owner: str, until_s: float) -> Row:
    """Return the row of a rollout that somebody is about to take on: until it runs, none of its time is given up."""
    return msgspec.structs.replace(row, generation=generation, owner=owner, expires_s=max(row.expires_s, until_s))


def moved(row: Row, *, generation: int, sandbox_id: str, now_s: float) -> Row:
    """Return the row of a rollout that is about to go on in another sandbox."""
    return msgspec.structs.replace(
        row, generation=generation, sandbox_id=sandbox_id, phase=Phase.CREATING, asked_s=now_s
    )


def running(row: Row, *, until_s: float) -> Row:
    """Return the row of a sandbox that runs now; its provider was told of no more time than the row had."""
    return msgspec.structs.replace(row, phase=Phase.RUNNING, expires_s=min(row.expires_s, until_s))


def renewed(row: Row, *, until_s: float) -> Row:
    """Return a row with more time; a renewal that crosses a suspension takes none of its time."""
    return msgspec.structs.replace(row, expires_s=max(row.expires_s, until_s))


def suspended(row: Row, *, until_s: float) -> Row:
    """Return the row of a rollout that is suspended."""
    return msgspec.structs.replace(row, phase=Phase.SUSPENDED, expires_s=until_s)


def given_back(row: Row) -> Row:
    """Return the row of a rollout whose restoring left nothing: it is suspended as before."""
    return msgspec.structs.replace(row, phase=Phase.SUSPENDED) if row.phase is Phase.CREATING else row


# -- snapshots --------------------------------------------------------------------------------------------------------


def is_stored(row: Row) -> bool:
    """Return whether a rollout is suspended as the files of its sandbox, as far as the row says."""
    return row.phase is Phase.SUSPENDED and snapshot_id_of(row.sandbox_id) in row.snapshots


def named(row: Row, name: str) -> Row:
    """Return a row with the name of a snapshot that is about to be made."""
    return row if name in row.snapshots else msgspec.structs.replace(row, snapshots=(*row.snapshots, name))


def unnamed(row: Row, name: str) -> Row:
    """Return a row without the name of a snapshot that was not made."""
    return msgspec.structs.replace(row, snapshots=tuple(one for one in row.snapshots if one != name))


def stored(row: Row, ref: SnapshotRef) -> Row:
    """Return a row whose sandbox has ended as a snapshot; it is noted itself if it outlives this process."""
    others = tuple(one for one in row.refs if one.snapshot_id != ref.snapshot_id)
    return msgspec.structs.replace(named(row, ref.snapshot_id), refs=(*others, ref) if ref.durable else others)


def older_snapshots(row: Row) -> tuple[str, ...]:
    """Return the snapshots of earlier sandboxes: once this one runs, they are no more what the rollout goes on from."""
    return tuple(one for one in row.snapshots if one != snapshot_id_of(row.sandbox_id))


def doubted(row: Row, names: tuple[str, ...]) -> Row:
    """Return a row that is not believed to have these any more; whoever is killed then leaves none that is gone."""
    return msgspec.structs.replace(row, refs=tuple(ref for ref in row.refs if ref.snapshot_id not in names))


def without(row: Row, names: tuple[str, ...]) -> Row:
    """Return a row without snapshots that were deleted."""
    kept = tuple(one for one in row.snapshots if one not in names)
    return msgspec.structs.replace(doubted(row, names), snapshots=kept)


# -- leases that end --------------------------------------------------------------------------------------------------


class OnExpiry(enum.Enum):
    """What becomes of a sandbox that runs when its lease ends."""

    END = "end"
    """It ends."""
    FILES = "files"
    """Its files are kept, and it ends with its programs; a rollout that is resumed begins with them."""
    MEMORY = "memory"
    """It is paused with its programs, and keeps its memory."""


def can_suspend(on_expiry: OnExpiry, capabilities: Capabilities) -> bool:
    """Return whether a provider can do what is wanted when a lease ends; else the sandbox ends.

    Example:
        >>> can_suspend(OnExpiry.FILES, Capabilities(files_snapshot=True)), can_suspend(OnExpiry.END, Capabilities())
        (True, False)
    """
    able = {OnExpiry.FILES: capabilities.files_snapshot, OnExpiry.MEMORY: capabilities.pause}
    return able.get(on_expiry, False)


def unowned(row: Row, *, until_s: float) -> Row:
    """Return the row of a rollout that is suspended and nobody's, until somebody resumes it."""
    return msgspec.structs.replace(suspended(row, until_s=until_s), owner="")


def adopted(row: Row) -> Row:
    """Return the row of a sandbox that runs and whose owner is gone."""
    return msgspec.structs.replace(row, phase=Phase.RUNNING, owner="")


# -- ends -------------------------------------------------------------------------------------------------------------


def ending(row: Row, *, now_s: float, note: str) -> Row:
    """Return a row whose sandbox is to end; what was to end already stays as it is."""
    if row.phase is Phase.ENDING:
        return row
    return msgspec.structs.replace(row, phase=Phase.ENDING, attempts=0, retry_s=now_s, note=note)


def kill_failed(row: Row, *, now_s: float, note: str) -> Row:
    """Return a row whose sandbox would not end: the next try comes later each time.

    Example:
        >>> row = Row(sandbox_id="s", rollout_id="r", generation=1, provider="p", owner="o", phase=Phase.ENDING)
        >>> [kill_failed(msgspec.structs.replace(row, attempts=n), now_s=0.0, note="").retry_s for n in (0, 1, 2, 20)]
        [1.0, 2.0, 4.0, 300.0]
    """
    wait_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** min(row.attempts, 20))
    return msgspec.structs.replace(row, attempts=row.attempts + 1, retry_s=now_s + wait_s, note=note)


# -- the sweep --------------------------------------------------------------------------------------------------------


class Act(enum.Enum):
    """What a sweep does with a row, a sandbox or a snapshot."""

    ADOPT = "adopt"
    SUSPEND = "suspend"
    EXPIRE = "expire"
    DROP = "drop"
    END = "end"
    KILL = "kill"
    KEEP = "keep"
    KILL_ORPHAN = "kill_orphan"
    DELETE_ORPHAN = "delete_orphan"


class Step(Record, frozen=True, kw_only=True):
    """One thing that a sweep does.

    Attributes:
        act: what.
        sandbox_id: of which sandbox; of an orphaned snapshot, its name.
        why: in words.
    """

    act: Act
    sandbox_id: str
    why: str


class Seen(Record, frozen=True, kw_only=True):
    """What a provider has of one table.

    Attributes:
        alive: sandboxes that have not ended.
        snapshots: that are held.
    """

    alive: frozenset[str] = frozenset()
    snapshots: frozenset[str] = frozenset()


def seen_of(statuses: Iterable[SandboxStatus], snapshots: Iterable[str], *, salt: str) -> Seen:
    """Return what counts of what a provider shows; ends, and others' snapshots, do not."""
    return Seen(
        alive=frozenset(one.sandbox_id for one in statuses if one.state not in _ENDED),
        snapshots=frozenset(one for one in snapshots if is_snapshot_of(one, salt=salt)),
    )


def keep_after_s(capabilities: Capabilities, *, before_s: float) -> float:
    """Return the age at which a sandbox's files are to be kept, infinite if its provider goes on when it is asked.

    Args:
        capabilities: of the provider.
        before_s: how long before the provider's own end.

    Example:
        >>> keep_after_s(Capabilities(files_snapshot=True, max_lifetime_s=86_400.0), before_s=600.0)
        85800.0
    """
    most_s = capabilities.max_lifetime_s
    if most_s is None or capabilities.extend_ttl or not capabilities.files_snapshot:
        return math.inf
    return max(0.0, most_s - before_s)


def sweep(
    rows: Iterable[Row],
    seen: Seen,
    *,
    now_s: float,
    busy: frozenset[str] = frozenset(),
    grace_s: float,
    keep_after_s: float = math.inf,
    suspends: bool = False,
) -> tuple[Step, ...]:
    """Return what is to be done so that table and provider agree.

    `seen` must have been asked for before the rows were read: a row is written before its sandbox or snapshot is made,
    so what was seen and has no row has none for good. What was not seen is gone only if its row was as it is before
    `seen` was asked for; the others are `unsettled`, and count as busy.

    Args:
        rows: of one provider.
        seen: what that provider has.
        now_s: since the epoch.
        busy: sandboxes that some call of this process works on, or whose rows are unsettled.
        grace_s: a creation may take so long before it counts as given up.
        keep_after_s: age, from when it was asked for, at which a sandbox is suspended as its files.
        suspends: what ran when its lease ended is suspended first, and ends when that lease has ended too.
    """
    known = {row.sandbox_id: row for row in rows}
    names = {name for row in known.values() for name in row.snapshots} | {snapshot_id_of(one) for one in busy}
    free = [row for row in known.values() if row.sandbox_id not in busy]
    steps = [_step(row, seen, now_s, grace_s, keep_after_s, suspends) for row in free]
    orphans = [(Act.KILL_ORPHAN, one) for one in sorted(seen.alive - set(known) - busy)]
    orphans += [(Act.DELETE_ORPHAN, one) for one in sorted(seen.snapshots - names)]
    return (
        *(step for step in steps if step is not None),
        *(Step(act=act, sandbox_id=one, why="no row speaks of it") for act, one in orphans),
    )


def unsettled(before: Iterable[Row], after: Iterable[Row]) -> frozenset[str]:
    """Return the sandboxes whose rows came, went or changed between two looks; a renewal is no such change.

    Example:
        >>> row = Row(sandbox_id="s", rollout_id="r", generation=1, provider="p", owner="o", phase=Phase.CREATING)
        >>> [sorted(unsettled([row], after)) for after in ([row], [], [running(row, until_s=1.0)])]
        [[], ['s'], ['s']]
    """
    old, new = (
        {row.sandbox_id: msgspec.structs.replace(row, expires_s=0.0) for row in rows} for rows in (before, after)
    )
    return frozenset(one for one in old.keys() | new.keys() if old.get(one) != new.get(one))


def is_on(step: Step, busy: frozenset[str]) -> bool:
    """Return whether a step is on one of these sandboxes, or on a snapshot of one."""
    if step.act is Act.DELETE_ORPHAN:
        return any(snapshot_id_of(one) == step.sandbox_id for one in busy)
    return step.sandbox_id in busy


def failed(step: Step, error: BaseException) -> Step:
    """Return a step that was not done, with the error."""
    return msgspec.structs.replace(step, why=f"{step.why}; not done: {error or type(error).__name__}")


def reason_of(row: Row) -> DeathReason:
    """Return why a sandbox ends whose row is ending."""
    return DeathReason.RELEASED if row.note == RELEASED else DeathReason.LEASE_EXPIRED


def durable_of(row: Row) -> tuple[SnapshotRef, ...]:
    """Return the snapshots of a row that are there, whether or not their provider's process lists them."""
    return tuple(ref for ref in row.refs if ref.durable and ref.snapshot_id in row.snapshots)


def _step(row: Row, seen: Seen, now_s: float, grace_s: float, keep_after_s: float, suspends: bool) -> Step | None:
    lives = row.sandbox_id in seen.alive
    kept = bool(seen.snapshots & set(row.snapshots)) or bool(durable_of(row))

    def step(act: Act, why: str) -> Step:
        return Step(act=act, sandbox_id=row.sandbox_id, why=why)

    if row.phase is Phase.ENDING:
        if not lives and not row.snapshots:
            return step(Act.DROP, row.note or "it has ended")
        return step(Act.KILL, row.note or "it is to end") if row.retry_s <= now_s else None
    if row.phase is Phase.CREATING and now_s < row.asked_s + grace_s:
        return None
    if not lives and not kept:
        # A snapshot that nobody lists may be there nevertheless: the row goes when it was deleted.
        act = Act.END if row.snapshots else Act.DROP
        asked = f"it was asked for {now_s - row.asked_s:.0f} s ago and is not there"
        return step(act, asked if row.phase is Phase.CREATING else "the provider has lost it")
    if row.expires_s <= now_s:
        # A creation that nobody has seen the end of holds no work, unless it was made from a snapshot.
        holds_work = row.phase is Phase.RUNNING or (row.phase is Phase.CREATING and kept)
        act = Act.EXPIRE if suspends and holds_work else Act.END
        return step(act, f"its lease, of {row.owner or 'nobody'!r}, ended")
    if not lives and row.phase is not Phase.SUSPENDED:
        return step(Act.SUSPEND, "it has ended, and its snapshot is there")
    if row.phase is Phase.CREATING:
        return step(Act.ADOPT, "it was made, and whoever asked for it is gone")
    if lives and not kept and now_s >= row.asked_s + keep_after_s:
        return step(Act.KEEP, f"it was asked for {now_s - row.asked_s:.0f} s ago, and its provider will end it soon")
    return None
