"""The first cause of a failure, written where a person looks for it.

Each process writes its own record when it fails; the supervisor picks the first. Decides nothing else.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollmill.errors import RollmillError, UserError


class FailureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Why a process ended.

    Attributes:
        process: `controller`, `trainer`, `generator-0`, ...
        code: stable code of the error class; `unexpected` for others, `killed` for a signal.
        user_error: the user can fix it.
        at_wall_s: Unix time.
        traceback: empty for user errors, whose message says all.
    """

    process: str
    code: str
    message: str
    user_error: bool
    at_wall_s: float
    exit_status: int | None = None
    traceback: str = ""


def record_of_error(process: str, error: BaseException, *, at_wall_s: float) -> FailureRecord:
    """Return the record of an exception; the innermost cause of an exception group or chain counts."""
    cause = first_cause(error)
    user_error = isinstance(cause, UserError)
    return FailureRecord(
        process=process,
        code=cause.code if isinstance(cause, RollmillError) else "unexpected",
        message=str(cause) if isinstance(cause, RollmillError) else f"{type(cause).__name__}: {cause}",
        user_error=user_error,
        at_wall_s=at_wall_s,
        traceback="" if user_error else "".join(traceback.format_exception(error)),
    )


def first_cause(error: BaseException) -> BaseException:
    """Return the first leaf of exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def record_of_exit(process: str, exit_status: int | None, *, at_wall_s: float) -> FailureRecord:
    """Return the record of a process that ended without leaving one of its own; `None` is an unknown status."""
    if exit_status is not None and exit_status < 0:
        name = signal.Signals(-exit_status).name
        hint = " The kernel kills with SIGKILL when memory runs out: see `dmesg`." if name == "SIGKILL" else ""
        message = f"process {process} was killed by {name}.{hint} Its log says what it did last."
        return FailureRecord(
            process=process,
            code="killed",
            message=message,
            user_error=False,
            at_wall_s=at_wall_s,
            exit_status=exit_status,
        )
    known = "a status that only who started it knows" if exit_status is None else f"status {exit_status}"
    message = f"process {process} ended with {known} and left no reason; its log says what it did last."
    return FailureRecord(
        process=process,
        code="process_died",
        message=message,
        user_error=False,
        at_wall_s=at_wall_s,
        exit_status=exit_status,
    )


def write_record(path: Path, record: FailureRecord) -> None:
    """Write the record unless one is there already: the first cause stays."""
    if path.exists():
        return
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2))
    os.replace(partial, path)


def read_record(path: Path) -> FailureRecord | None:
    """Return the record, or `None` if there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=FailureRecord)
    except FileNotFoundError:
        return None


def earliest(records: Sequence[FailureRecord]) -> FailureRecord:
    """Return the record that came first."""
    return min(records, key=lambda record: record.at_wall_s)
