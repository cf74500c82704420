"""The sweep: removes what owners left behind that were killed. One call, from any process, at any time.

A sandbox dies with its zygote, and the zygote with its owner; so a sweep mostly finds empty groups and records. It does
not rely on that: it kills the first process and the groups itself, and keeps the record of what would not go.
"""

from __future__ import annotations

import os
import shutil
import signal
import time

from rollmill.sandboxes.disk_records import MACHINE_SUFFIX, DiskRecord, DiskRecords, ProcessMark, is_alive, orphans
from rollmill.sandboxes.guest.cgroups import Groups
from rollmill.sandboxes.records import Record

_LOOK_S = 0.01


class SweepReport(Record, frozen=True, kw_only=True):
    """What a sweep did.

    Attributes:
        removed: ids of which nothing is left.
        left: ids that did not go in time; their records stay for the next sweep.
    """

    removed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def sweep(records: DiskRecords, *, limit_s: float = 10.0) -> SweepReport:
    """Remove the sandboxes whose owners have ended. Blocks: call it in a thread.

    Args:
        records: where to look.
        limit_s: how long to wait for processes to end, in all.
    """
    found = orphans(records.read_all())
    for record in found:
        kill_outright(record)
    deadline = time.monotonic() + limit_s
    waiting, removed = list(found), []
    while waiting:
        gone = [record for record in waiting if _nothing_left(record)]
        for record in gone:
            records.remove(record.sandbox_id)
            removed.append(record.sandbox_id)
        waiting = [record for record in waiting if record not in gone]
        if not waiting or time.monotonic() >= deadline:
            break
        time.sleep(_LOOK_S)
    _forget_scratch(records)
    return SweepReport(removed=tuple(removed), left=tuple(record.sandbox_id for record in waiting))


def kill_outright(record: DiskRecord) -> None:
    """Kill a sandbox without its owner: an orphaned zygote, the first process, and whatever is in the groups."""
    if record.helper is not None and not is_alive(record.owner):
        _kill(record.helper)
    if record.first_process is not None:
        _kill(record.first_process)
    Groups(record.groups).kill()


def _kill(mark: ProcessMark) -> None:
    try:
        descriptor = os.pidfd_open(mark.pid)
    except ProcessLookupError:
        return
    try:
        # Looked at after the descriptor was opened: it cannot turn into another process any more.
        if is_alive(mark):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)


def _nothing_left(record: DiskRecord) -> bool:
    marks = (record.first_process, record.helper)
    if any(mark is not None and is_alive(mark) for mark in marks):
        return False
    return Groups(record.groups).destroy()


def _forget_scratch(records: DiskRecords) -> None:
    """Remove half-written records of processes that are gone, and notes and directories of sandboxes that are."""
    for path in records.directory.glob("*.tmp*"):
        writer = path.suffix.removeprefix(".tmp")
        if writer.isdigit() and not os.path.exists(f"/proc/{writer}"):
            path.unlink(missing_ok=True)
    for path in records.directory.glob(f"*{MACHINE_SUFFIX}"):
        if not path.with_suffix(".json").exists():
            shutil.rmtree(path, ignore_errors=True)  # what stays is tried again by the next sweep
    for path in records.directory.glob("*.kill"):
        if not path.with_suffix(".json").exists():
            path.unlink(missing_ok=True)
