"""What a restarted service does with what it finds in its ledger. Pure.

What was paused as files goes on as it was, as long as they are there. What ran is ended: its callers' streams are cut,
and nobody knows what its programs do. Snapshots of this service that no row names are orphans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from rollmill.sandboxes.records import Record, SnapshotRef
from rollmill.sandboxes.service.law import Standing
from rollmill.sandboxes.service.ledger import SandboxRow
from rollmill.sandboxes.service.shelf import Kept


class Ending(Record, frozen=True, kw_only=True):
    """A sandbox that is not taken on.

    Attributes:
        sandbox_id: as its callers knew it.
        backend_id: what may be left of it at the provider.
        why: in words.
    """

    sandbox_id: str
    backend_id: str
    why: str


class Adoption(Record, frozen=True, kw_only=True):
    """What follows from a ledger.

    Attributes:
        adopted: rows of sandboxes that are paused as files.
        ended: sandboxes that are not taken on.
        templates: snapshots that are templates still.
        lost_templates: ids of those that are gone.
        orphans: ids of this service's snapshots that nobody has.
    """

    adopted: tuple[SandboxRow, ...] = ()
    ended: tuple[Ending, ...] = ()
    templates: tuple[Kept, ...] = ()
    lost_templates: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()


def adoption(
    rows: Iterable[SandboxRow],
    templates: Iterable[Kept],
    *,
    held: Mapping[str, SnapshotRef],
    salt: str,
    now_wall_s: float,
    paused_ttl_s: float,
) -> Adoption:
    """Return what follows.

    Args:
        rows: of sandboxes.
        templates: rows of templates.
        held: snapshots that the provider has, by id.
        salt: of the ledger.
        now_wall_s: since the epoch.
        paused_ttl_s: life of a paused sandbox whose timeout was that of a running one when the service ended.
    """
    templates = tuple(templates)
    adopted, ended = [], []
    for row in rows:
        files = held.get(row.snapshot) if row.snapshot else None
        if files is not None and row.standing is Standing.RUNNING:  # killed between the snapshot and the row
            row = msgspec.structs.replace(row, standing=Standing.PAUSED, end_wall_s=now_wall_s + paused_ttl_s)
        why = _why_not(row, files, now_wall_s=now_wall_s)
        if why:
            ended.append(Ending(sandbox_id=row.sandbox_id, backend_id=row.backend_id, why=why))
        else:
            adopted.append(msgspec.structs.replace(row, files=files))
    kept = [one for one in templates if one.id in held]
    named = {row.snapshot for row in adopted} | {one.id for one in kept}
    return Adoption(
        adopted=tuple(adopted),
        ended=tuple(ended),
        templates=tuple(kept),
        lost_templates=tuple(one.id for one in templates if one.id not in held),
        orphans=tuple(sorted(name for name in held if name.endswith(f"-{salt}") and name not in named)),
    )


def _why_not(row: SandboxRow, files: SnapshotRef | None, *, now_wall_s: float) -> str:
    if row.snapshot and files is None and row.standing is Standing.PAUSED:
        return f"the snapshot {row.snapshot} of its files is not there any more"
    if files is None:
        return f"it was {row.standing.value} in the service that ended, with what ran in it"
    if row.end_wall_s <= now_wall_s:
        return f"its time as a paused one ended {now_wall_s - row.end_wall_s:.0f} s ago"
    return ""
