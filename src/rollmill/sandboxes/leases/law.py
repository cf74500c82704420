"""The rules of leases: who may act on a rollout's sandbox, and what a sweep does. Pure.

    creating --made--> running <--resumed-- suspended
        |                 |  --suspended-->     |
        '--not there--> (gone)                  |
                          '------ending <-------'      released, expired or superseded
                                    '--killed--> (gone)

A row is written before its sandbox is asked for, and goes when nothing is left of it. Each rollout has at most one row
that is not ending. Its generation rises with every new owner, and what an older one asks is refused.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping

import msgspec

from rollmill.errors import SandboxLeaseLost
from rollmill.sandboxes.records import Record, SandboxState, SandboxStatus

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
        snapshots: its chain, the newest last.
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


class Step(Record, frozen=True, kw_only=True):
    """One thing that a sweep does.

    Attributes:
        do: what: `adopt`, `drop`, `end`, `kill` or `kill_orphan`.
        sandbox_id: of which.
        why: in words.
    """

    do: str
    sandbox_id: str
    why: str


def sweep(
    rows: Iterable[Row],
    seen: Mapping[str, SandboxStatus],
    *,
    now_s: float,
    busy: frozenset[str] = frozenset(),
    grace_s: float,
) -> tuple[Step, ...]:
    """Return what is to be done so that table and provider agree.

    `seen` must have been asked for before the rows were read: a row is written before its sandbox is made, so what was
    seen and has no row has none for good.

    Args:
        rows: of one provider.
        seen: what that provider has of this keeper, by id; ends may be among it.
        now_s: since the epoch.
        busy: sandboxes that some call of this process works on.
        grace_s: a creation may take so long before it counts as given up.
    """
    known = {row.sandbox_id: row for row in rows}
    alive = {one for one, status in seen.items() if status.state not in _ENDED}
    steps = [
        _step(row, row.sandbox_id in alive, now_s, grace_s) for row in known.values() if row.sandbox_id not in busy
    ]
    orphans = sorted(alive - set(known) - busy)
    return (
        *(step for step in steps if step is not None),
        *(Step(do="kill_orphan", sandbox_id=one, why="no row speaks of it") for one in orphans),
    )


def _step(row: Row, lives: bool, now_s: float, grace_s: float) -> Step | None:
    def step(do: str, why: str) -> Step:
        return Step(do=do, sandbox_id=row.sandbox_id, why=why)

    if row.phase is Phase.ENDING:
        if not lives and not row.snapshots:
            return step("drop", row.note or "it has ended")
        return step("kill", row.note or "it is to end") if row.retry_s <= now_s else None
    if row.phase is Phase.CREATING:
        if now_s < row.asked_s + grace_s:
            return None
        if not lives:
            return step("drop", f"it was asked for {now_s - row.asked_s:.0f} s ago and is not there")
        return step("adopt", "it was made, and whoever asked for it is gone") if row.expires_s > now_s else _late(row)
    if not lives and not (row.phase is Phase.SUSPENDED and row.snapshots):
        return step("drop", "the provider has lost it")
    return _late(row) if row.expires_s <= now_s else None


def _late(row: Row) -> Step:
    return Step(do="end", sandbox_id=row.sandbox_id, why=f"its lease, of {row.owner or 'nobody'!r}, ended")
