"""The rules of the service: ends, pages, signatures, and how a program's end is said. Pure."""

from __future__ import annotations

import base64
import enum
import hashlib
import hmac
import re
import signal
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar
from urllib.parse import parse_qsl, unquote

from rollmill.errors import RollmillError
from rollmill.sandboxes.records import ExecResult, Record
from rollmill.sandboxes.service.connect import RpcProblem
from rollmill.sandboxes.service.wire import EndEvent

T = TypeVar("T")

MOST_PER_PAGE = 100
READ, WRITE = "read", "write"
_MOST_DIGITS = 15
_SIGNATURE_VERSION = "v1_"


class Standing(enum.Enum):
    """Where a sandbox of the service is, as its callers see it."""

    RUNNING = "running"
    PAUSED = "paused"
    ENDED = "ended"


class Plan(Record, frozen=True, kw_only=True):
    """What its creator wants of a sandbox at its timeout.

    Attributes:
        pause: pause it instead of ending it.
        keep_memory: its programs are stopped; else they are ended, and its files alone are kept.
        auto_resume: a call to a paused one resumes it.
    """

    pause: bool = False
    keep_memory: bool = True
    auto_resume: bool = False


class Fate(enum.Enum):
    """What is to be done with a sandbox now."""

    WAIT = "wait"
    PAUSE = "pause"
    KILL = "kill"


def fate(standing: Standing, *, plan: Plan, now_s: float, end_s: float) -> Fate:
    """Return what is to be done at a time; a paused one that was kept long enough ends.

    Example:
        >>> [fate(Standing.RUNNING, plan=Plan(pause=True), now_s=now, end_s=10.0).value for now in (9.9, 10.0)]
        ['wait', 'pause']
    """
    if standing is Standing.ENDED or now_s < end_s:
        return Fate.WAIT
    return Fate.PAUSE if standing is Standing.RUNNING and plan.pause else Fate.KILL


def end_after_connect(*, now_s: float, end_s: float, timeout_s: float, resumed: bool) -> float:
    """Return when a sandbox ends after a caller connected: a running one is only ever given more time.

    Example:
        >>> end_after_connect(now_s=100.0, end_s=500.0, timeout_s=60.0, resumed=False)
        500.0
        >>> end_after_connect(now_s=100.0, end_s=500.0, timeout_s=60.0, resumed=True)
        160.0
    """
    asked_s = now_s + timeout_s
    return asked_s if resumed else max(end_s, asked_s)


class PausedInMemory(Record, frozen=True, kw_only=True):
    """A paused sandbox that still takes memory and processes.

    Attributes:
        sandbox_id: its id.
        paused_s: when it was paused, on any clock.
        programs: of its callers, which end when it is moved to disk.
    """

    sandbox_id: str
    paused_s: float
    programs: int


def to_move(paused: Iterable[PausedInMemory], *, count: int) -> tuple[str, ...]:
    """Return which go to disk when a node is short: those that lose nothing by it, then those paused for longest.

    Example:
        >>> paused = [("a", 1.0, 1), ("b", 2.0, 0), ("c", 3.0, 1), ("d", 4.0, 0)]
        >>> found = [PausedInMemory(sandbox_id=name, paused_s=at_s, programs=number) for name, at_s, number in paused]
        >>> to_move(found, count=3)
        ('b', 'd', 'a')
    """
    order = sorted(paused, key=lambda one: (one.programs > 0, one.paused_s, one.sandbox_id))
    return tuple(one.sandbox_id for one in order[: max(0, count)])


_OWN_SNAPSHOT = re.compile(r"sbx[0-9a-f]{18}-files-[0-9]+|(snp|frk)[0-9a-f]{18}")


def left_behind(snapshot_ids: Iterable[str]) -> tuple[str, ...]:
    """Return the snapshots of a service that ended without order: tokens and names were in its memory alone.

    Example:
        >>> left_behind(["sbx0123456789abcdef01-files-1", "snp0123456789abcdef01", "mine", "snp01"])
        ('sbx0123456789abcdef01-files-1', 'snp0123456789abcdef01')
    """
    return tuple(one for one in snapshot_ids if _OWN_SNAPSHOT.fullmatch(one))


# -- pages ------------------------------------------------------------------------------------------------------------


class Listed(Record, frozen=True, kw_only=True):
    """What a list is filtered and sorted by."""

    sandbox_id: str
    started_s: float
    standing: Standing
    template: str
    metadata: Mapping[str, str]


class Filter(Record, frozen=True, kw_only=True):
    """What a caller wants to see.

    Attributes:
        metadata: all of these.
        standings: one of these.
        template: of this one, any if empty.
        started_after_s: not before this.
        newest_first: order.
    """

    metadata: Mapping[str, str] = {}
    standings: tuple[Standing, ...] = (Standing.RUNNING, Standing.PAUSED)
    template: str = ""
    started_after_s: float = 0.0
    newest_first: bool = True


def page(items: Iterable[Listed], *, wanted: Filter, limit: int, cursor: str) -> tuple[tuple[str, ...], str]:
    """Return the ids of one page, and the cursor of the next, empty at the end.

    A cursor names the last item of its page, so that what comes and goes in between shifts nothing.

    Raises:
        ValueError: if the cursor is none of ours.
    """
    chosen = sorted((one for one in items if _is_wanted(one, wanted)), key=_place, reverse=wanted.newest_first)
    if cursor:
        after = _read_cursor(cursor)
        chosen = [one for one in chosen if (_place(one) < after if wanted.newest_first else _place(one) > after)]
    shown = chosen[:limit]
    more = len(chosen) > limit
    return tuple(one.sandbox_id for one in shown), cursor_of(*_place(shown[-1])) if more else ""


def _is_wanted(one: Listed, wanted: Filter) -> bool:
    return (
        one.standing in wanted.standings
        and wanted.metadata.items() <= dict(one.metadata).items()
        and wanted.template in ("", one.template)
        and _microseconds(one.started_s) >= _microseconds(wanted.started_after_s)
    )


def _microseconds(time_s: float) -> int:
    """Return a time as callers read it: they ask with what they were told."""
    return round(time_s * 1e6)


def _place(one: Listed) -> tuple[float, str]:
    return one.started_s, one.sandbox_id


def cursor_of(started_s: float, sandbox_id: str) -> str:
    """Return the cursor of what follows an item."""
    return base64.urlsafe_b64encode(f"{started_s!r} {sandbox_id}".encode()).decode().rstrip("=")


def _read_cursor(text: str) -> tuple[float, str]:
    started, _, sandbox_id = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode().partition(" ")
    return float(started), sandbox_id


def limit_of(text: str) -> int:
    """Return how many items a page has.

    Raises:
        HttpProblem: 400 if it is no number.
    """
    if not text:
        return MOST_PER_PAGE
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise HttpProblem(400, f"limit is {text!r}, which is no number")
    return max(1, min(int(text), MOST_PER_PAGE))


def metadata_of(query: str) -> dict[str, str]:
    """Return the metadata in a list's filter: a query string whose names and values are quoted once more.

    Example:
        >>> metadata_of("run=a%2520b&x=1")
        {'run': 'a b', 'x': '1'}
    """
    return {unquote(name): unquote(value) for name, value in parse_qsl(query, keep_blank_values=True)}


# -- who may ----------------------------------------------------------------------------------------------------------


def same(given: str | None, expected: str) -> bool:
    """Return whether a secret is the expected one, in constant time."""
    return given is not None and hmac.compare_digest(given.encode(), expected.encode())


def signature(*, path: str, operation: str, user: str, token: str, expiration: str = "") -> str:
    """Return the signature of a link to a file: whoever has it needs no token.

    Args:
        path: as in the link, empty if the upload names its files.
        operation: `read` or `write`.
        user: as in the link.
        token: the sandbox's.
        expiration: seconds since the epoch, as in the link; empty for a link that does not expire by itself.
    """
    parts = [path, operation, user, token, *([expiration] if expiration else [])]
    digest = hashlib.sha256(":".join(parts).encode()).digest()
    return _SIGNATURE_VERSION + base64.b64encode(digest).rstrip(b"=").decode()


def why_expired(expiration: str, *, now_s: float) -> str:
    """Return why a signed link is good no more, empty if it is, as one without an expiration always is.

    Example:
        >>> why_expired("99", now_s=100.0), why_expired("100", now_s=100.0), why_expired("", now_s=1e9)
        ('signature is already expired', '', '')
    """
    if not expiration:
        return ""
    if not re.fullmatch(r"-?[0-9]{1,15}", expiration):
        return f"the expiration {expiration!r} is no number of seconds"
    return "signature is already expired" if int(expiration) < now_s else ""


def holder_of(given: str, tokens: Sequence[tuple[T, str]]) -> T | None:
    """Return whose expected signature a link carries, where nothing else in it says which sandbox it is for."""
    found = [holder for holder, expected in tokens if hmac.compare_digest(given.encode(), expected.encode())]
    return found[0] if found else None


# -- words ------------------------------------------------------------------------------------------------------------


def end_event(result: ExecResult) -> EndEvent:
    """Return the end of a program in the words of its callers.

    Raises:
        RpcProblem: `deadline_exceeded` if its timeout ended it.

    Example:
        >>> end_event(ExecResult(exit_code=3))
        EndEvent(exit_code=3, exited=True, status='exit status 3', error='exit status 3')
        >>> end_event(ExecResult(exit_code=-9)).status
        'signal: killed'
    """
    if result.timed_out:
        raise RpcProblem("deadline_exceeded", f"the program was ended by its timeout after {result.wall_s:.1f} s")
    if result.killed_by == "output":
        written = result.stdout_bytes + result.stderr_bytes
        error = f"killed after {written} bytes of output, more than a sandbox's command may write"
        return EndEvent(exit_code=-1, exited=False, status="signal: killed", error=error)
    if result.exit_code < 0:
        status = f"signal: {_signal_word(-result.exit_code)}"
        return EndEvent(exit_code=-1, exited=False, status=status, error=status)
    status = f"exit status {result.exit_code}"
    return EndEvent(exit_code=result.exit_code, exited=True, status=status, error=status if result.exit_code else None)


def _signal_word(number: int) -> str:
    try:
        return (signal.strsignal(number) or f"signal {number}").lower()
    except ValueError:
        return f"signal {number}"


def permissions(mode: int) -> str:
    """Return a mode as callers read it: `ls`'s, but for a capital L for links.

    Example:
        >>> permissions(0o100644), permissions(0o40755), permissions(0o120777)
        ('-rw-r--r--', 'drwxr-xr-x', 'Lrwxrwxrwx')
    """
    text = stat.filemode(mode)
    return "L" + text[1:] if text[0] == "l" else text


def host_parts(host: str) -> tuple[str, str]:
    """Return (port, sandbox id) of a host name `PORT-ID.DOMAIN`, empty if it is none.

    Example:
        >>> host_parts("49983-sbx1.sandboxes.example:8080"), host_parts("127.0.0.1:8080"), host_parts("a-b.c")
        (('49983', 'sbx1'), ('', ''), ('', ''))
    """
    label = host.partition(":")[0].partition(".")[0]
    port, dash, sandbox_id = label.partition("-")
    return (port, sandbox_id) if dash and port.isdecimal() and sandbox_id else ("", "")


class HttpProblem(RollmillError):
    """A request that is answered with a status and a message.

    Attributes:
        status: HTTP status.
        word: what is wrong, for programs; empty where the status says it.
        after_s: when another try makes sense, `None` where it does not.
    """

    code = "http"

    def __init__(self, status: int, message: str, *, word: str = "", after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.word = word
        self.after_s = after_s
