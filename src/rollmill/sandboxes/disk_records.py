"""Records on disk of the sandboxes of one machine: written before one is made, removed when nothing is left of it.

They are how an owner that was killed can be cleaned up after, and how the command line sees sandboxes of other
processes.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rollmill.errors import ConfigError, SandboxError
from rollmill.sandboxes.records import Record

MACHINE_SUFFIX = ".machine"
"""Ends the names of directories here that a running sandbox needs; one without a record is nobody's."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def check_id(sandbox_id: str) -> str:
    """Return the id if it can be a file's name.

    Raises:
        ConfigError: if it cannot.
    """
    if not _ID.fullmatch(sandbox_id):
        raise ConfigError(
            f"{sandbox_id!r} cannot be a sandbox's id: 1 to 64 letters, digits, '_', '.' and '-', beginning with a "
            "letter or digit."
        )
    return sandbox_id


class ProcessMark(Record, frozen=True, kw_only=True):
    """A process for good: its id alone is used again by later ones.

    Attributes:
        pid: its id.
        started_ticks: clock ticks from boot to its start.
        boot_id: which boot.
    """

    pid: int
    started_ticks: int
    boot_id: str


@functools.cache
def boot_id() -> str:
    """Return the id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def mark_of(pid: int) -> ProcessMark | None:
    """Return the mark of a process that lives, `None` if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in brackets may hold anything, so count from its end: state is the first word there, start the 20th.
    words = stat.rpartition(b")")[2].split()
    if words[0] in (b"Z", b"X"):
        return None  # ended, and only waits for its parent to look
    return ProcessMark(pid=pid, started_ticks=int(words[19]), boot_id=boot_id())


def own_mark() -> ProcessMark:
    """Return the mark of this process.

    Raises:
        SandboxError: if /proc does not show it.
    """
    mark = mark_of(os.getpid())
    if mark is None:
        raise SandboxError("/proc does not show this process, by which its sandboxes and images know it: mount /proc")
    return mark


def is_alive(mark: ProcessMark) -> bool:
    """Return whether exactly this process lives."""
    return mark_of(mark.pid) == mark


class DiskRecord(Record, frozen=True, kw_only=True):
    """What must be known of a sandbox to remove it without its owner.

    Attributes:
        sandbox_id: its id.
        backend: which backend made it.
        owner: process that made it.
        helper: zygote of that process.
        first_process: its first process, once it runs.
        groups: (version, directory) of its cgroups.
        labels: as given.
        created_wall_s: when.
    """

    sandbox_id: str
    backend: str
    owner: ProcessMark
    helper: ProcessMark | None = None
    first_process: ProcessMark | None = None
    groups: tuple[tuple[int, str], ...] = ()
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    created_wall_s: float = 0.0


def default_directory() -> Path:
    """Return where this user's records are: a place that does not outlive the boot, if there is one."""
    if os.geteuid() == 0:
        return Path("/run/rollmill/sandboxes")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "rollmill" / "sandboxes"
    return Path(f"/tmp/rollmill-{os.geteuid()}/sandboxes")


def check_private(directory: Path) -> None:
    """Refuse a directory that somebody else could fill or exchange: what is in it is believed.

    Raises:
        ConfigError: if it, or the one above it, belongs to another user.
        OSError: if it cannot be looked at.
    """
    owner, above = directory.stat().st_uid, directory.parent.stat().st_uid
    if owner != os.geteuid():
        raise ConfigError(f"{directory} belongs to user {owner}, not to {os.geteuid()}; name another directory.")
    if above not in (0, os.geteuid()):
        # Who owns the directory above could put records of their own in its place, and a sweep kills by them.
        raise ConfigError(f"{directory.parent} belongs to user {above}, who could exchange what is in it.")


class DiskRecords:
    """The records of one directory.

    Args:
        directory: made if missing, for this user alone.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_private(directory)
        except OSError as error:
            raise ConfigError(
                f"records of sandboxes cannot be kept in {directory}: {error}. Name another one."
            ) from error

    def path(self, sandbox_id: str) -> Path:
        """Return where a record is."""
        return self.directory / f"{check_id(sandbox_id)}.json"

    def write(self, record: DiskRecord) -> None:
        """Write a record whole or not at all.

        Raises:
            OSError: if the directory is full, gone or closed.
        """
        path = self.path(record.sandbox_id)
        scratch = path.with_suffix(f".tmp{os.getpid()}")
        try:
            scratch.write_bytes(msgspec.json.encode(record))
            scratch.replace(path)
        except BaseException:
            scratch.unlink(missing_ok=True)  # on a full disk it would take the last of it
            raise

    def read(self, sandbox_id: str) -> DiskRecord | None:
        """Return a record, `None` if there is none.

        Raises:
            SandboxError: if it is damaged.
        """
        path = self.path(sandbox_id)
        try:
            return msgspec.json.decode(path.read_bytes(), type=DiskRecord)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise SandboxError(
                f"the record {path} is damaged: {error}. Look for its sandbox by hand, then delete the file."
            ) from error

    def read_all(self) -> tuple[DiskRecord, ...]:
        """Return all records, by id."""
        found = (self.read(path.stem) for path in sorted(self.directory.glob("*.json")))
        return tuple(one for one in found if one is not None)

    def remove(self, sandbox_id: str) -> None:
        """Remove a record, and a kill note with it."""
        self.path(sandbox_id).unlink(missing_ok=True)
        self._note(sandbox_id).unlink(missing_ok=True)

    def _note(self, sandbox_id: str) -> Path:
        return self.path(sandbox_id).with_suffix(".kill")

    def note_kill(self, sandbox_id: str) -> None:
        """Leave word for the owner that this end is on purpose."""
        self._note(sandbox_id).touch(mode=0o600)

    def kill_noted(self, sandbox_id: str) -> bool:
        """Return whether such word was left."""
        return self._note(sandbox_id).exists()


def orphans(records: Iterable[DiskRecord]) -> tuple[DiskRecord, ...]:
    """Return those whose owner has ended: what no lease can own any more."""
    return tuple(record for record in records if not is_alive(record.owner))
