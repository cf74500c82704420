"""The reaper: deletes large trees later, in the background, at a bounded rate, and never what lies outside of them.

`discard` moves a tree into a trash directory of the same file system, which takes a moment at any size; a thread
deletes what lies there. Whatever a killed process left in the trash is taken up by the next reaper of that directory.

How a tree is deleted: of one directory everything that is no directory is unlinked, and each directory in it is moved
up into the trash, to wait for its own turn. So nothing is followed and nothing is descended into by a path: names are
only ever used within a directory that is open. Depth costs no descriptors, and a mount point inside a tree cannot be
moved (EBUSY): it is left, with what holds it, and told.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import platform
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import msgspec

from rollmill.errors import ConfigError, SandboxError
from rollmill.sandboxes.records import Record

_NUMBERS = itertools.count()
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_WHO_PROCESS, _CLASS_IDLE = 1, 3 << 13
_MOST_FAILED = 100


class ReaperSettings(Record, frozen=True, kw_only=True):
    """How fast trees are deleted.

    Attributes:
        entries_per_s: files and directories deleted a second. Raising it frees space sooner and takes more of the disk.
        burst: deleted between two looks at the clock.
        look_s: between two looks into an empty trash, for what other processes put there.
        retry_s: until something that could not be deleted is tried again.
        close_s: how long closing waits for the thread; what is left stays for the next reaper.
    """

    entries_per_s: float = 5000.0
    burst: int = 100
    look_s: float = 60.0
    retry_s: float = 60.0
    close_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("entries_per_s", "burst", "look_s", "retry_s", "close_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} of the reaper is {getattr(self, name)}; it must be above 0 and finite")


class ReaperStatistics(Record, frozen=True, kw_only=True):
    """What a reaper did so far.

    Attributes:
        waiting: entries of the trash, trees and directories of trees; what could not be deleted among them.
        discarded: trees moved into the trash by this reaper.
        entries: files and directories deleted.
        failures: times that something could not be deleted.
        stubborn: entries of the trash that wait for another try.
        last_failure: the last reason, in words.
    """

    waiting: int = 0
    discarded: int = 0
    entries: int = 0
    failures: int = 0
    stubborn: int = 0
    last_failure: str = ""


def total(statistics: Iterable[ReaperStatistics]) -> ReaperStatistics:
    """Return what several reapers did together.

    Example:
        >>> total([ReaperStatistics(waiting=2, entries=5), ReaperStatistics(waiting=1, last_failure="busy")])
        ReaperStatistics(waiting=3, discarded=0, entries=5, failures=0, stubborn=0, last_failure='busy')
    """
    found = list(statistics)
    counts = {
        name: sum(getattr(one, name) for one in found)
        for name in ReaperStatistics.__struct_fields__
        if name != "last_failure"
    }
    return ReaperStatistics(**counts, last_failure=next((one.last_failure for one in found if one.last_failure), ""))


def pause_s(entries: int, *, began_s: float, now_s: float, entries_per_s: float) -> float:
    """Return how long to rest after so many entries, to keep to the rate.

    Example:
        >>> pause_s(100, began_s=10.0, now_s=10.005, entries_per_s=5000.0)
        0.015
        >>> pause_s(100, began_s=10.0, now_s=11.0, entries_per_s=5000.0)  # the disk was slower than that
        0.0
    """
    return round(max(0.0, entries / entries_per_s - (now_s - began_s)), 9)


class Reaper:
    """Deletes what is moved into one trash directory. Use it as a context manager, or call `start` and `close`.

    Any number of reapers, of any processes, may share a trash.

    Args:
        trash: made if missing, for this user alone; on the file system of what is to be discarded.
        settings: how fast.
        clock: seconds that never go back.
    """

    def __init__(
        self, trash: Path, *, settings: ReaperSettings | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.trash = trash
        self._settings = ReaperSettings() if settings is None else settings
        self._clock = clock
        self._open_trash = _own_directory(trash)
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._idle = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._retry_at_s: dict[str, float] = {}
        self._working = False
        self._in_burst, self._burst_began_s = 0, clock()
        self._statistics = ReaperStatistics()

    def __enter__(self) -> Reaper:
        """Start."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def start(self) -> None:
        """Begin to delete, first of all what others left."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sandbox-reaper", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop; what is left in the trash waits for the next reaper."""
        self._closing.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join(self._settings.close_s)
        if self._thread is None or not self._thread.is_alive():
            self._thread = None
            if self._open_trash >= 0:
                os.close(self._open_trash)
                self._open_trash = -1

    def discard(self, path: Path) -> bool:
        """Move a tree, file or link into the trash; `False` if there is nothing. A link itself goes, never its target.

        Raises:
            SandboxError: if it cannot be moved: another file system, a mount point, or not this user's; or if this is
                closed.
        """
        if self._open_trash < 0:
            raise SandboxError(f"the reaper of {self.trash} is closed; open another one")
        name = _new_name()
        try:
            _move(path.name, os.open(path.parent, _PATH_ONLY), name, self._open_trash)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise SandboxError(
                f"{path} cannot be moved into the trash {self.trash}: {error}. The trash must be on the same file "
                "system, and the tree this user's and no mount point."
            ) from error
        self._count(discarded=1)
        self._news.set()
        return True

    def statistics(self) -> ReaperStatistics:
        """Return what was done so far."""
        waiting = len(self._names())
        with self._lock:
            return msgspec.structs.replace(self._statistics, waiting=waiting, stubborn=len(self._retry_at_s))

    def drain(self, *, limit_s: float) -> bool:
        """Wait until nothing is left that can be deleted now; `False` if the limit comes first. Blocks."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._working and not self._due(), limit_s)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        _be_idle()
        while not self._closing.is_set():
            self._news.clear()
            self._set_working(True)
            while (due := self._due()) and not self._closing.is_set():  # directories of directories come up meanwhile
                for name in due:
                    if self._closing.is_set():
                        break
                    self._delete(name)
            names = set(self._names())
            self._retry_at_s = {name: at_s for name, at_s in self._retry_at_s.items() if name in names}
            self._set_working(False)
            self._news.wait(self._rest_s())

    def _set_working(self, working: bool) -> None:
        with self._idle:
            self._working = working
            self._idle.notify_all()

    def _rest_s(self) -> float:
        soonest_s = min(self._retry_at_s.values(), default=math.inf) - self._clock()
        return max(0.0, min(self._settings.look_s, soonest_s))

    def _names(self) -> list[str]:
        if self._open_trash < 0:
            return []
        # Threads that read one open directory share their place in it, and miss what the others read.
        directory = os.open(".", _DIRECTORY, dir_fd=self._open_trash)
        try:
            return sorted(os.listdir(directory))
        finally:
            os.close(directory)

    def _due(self) -> list[str]:
        """Return what lies in the trash and is not to be left alone for now."""
        now_s, retry_at_s = self._clock(), self._retry_at_s
        return [name for name in self._names() if retry_at_s.get(name, -math.inf) <= now_s]

    def _delete(self, name: str) -> None:
        try:
            if not self._is_directory(name):
                os.unlink(name, dir_fd=self._open_trash)
            elif self._empty(name):
                os.rmdir(name, dir_fd=self._open_trash)
            else:
                return  # closing: the rest waits for the next reaper
        except OSError as error:
            if name in self._names():
                self._fail(name, error)
            return  # or another reaper was quicker
        self._retry_at_s = {one: at_s for one, at_s in self._retry_at_s.items() if one != name}
        self._deleted()

    def _is_directory(self, name: str) -> bool:
        return stat.S_ISDIR(os.stat(name, dir_fd=self._open_trash, follow_symlinks=False).st_mode)

    def _empty(self, name: str) -> bool:
        """Unlink what is in a directory of the trash, and move its directories up into the trash; `False` if closing.

        It is read in rounds: a directory that changes while it is read may not show everything in one.

        Raises:
            OSError: if some of it could not be removed; the rest is.
        """
        with _opened(name, self._open_trash) as directory:
            failed: dict[str, OSError] = {}
            gone = 1
            while gone and len(failed) < _MOST_FAILED:
                gone = 0
                with os.scandir(directory) as entries:
                    for entry in entries:
                        if self._closing.is_set():
                            return False
                        if entry.name in failed:
                            continue
                        if (error := self._remove(entry, directory)) is None:
                            gone += 1
                        else:
                            failed[entry.name] = error
            if failed:
                raise next(iter(failed.values()))
        return True

    def _remove(self, entry: os.DirEntry[str], directory: int) -> OSError | None:
        try:
            if entry.is_dir(follow_symlinks=False):
                _move(entry.name, os.dup(directory), _new_name(), self._open_trash)
            else:
                os.unlink(entry.name, dir_fd=directory)
                self._deleted()
        except FileNotFoundError:
            return None  # another reaper was quicker
        except OSError as error:
            return error
        return None

    def _deleted(self) -> None:
        """Count one, and rest after each burst as the rate asks for."""
        self._count(entries=1)
        self._in_burst += 1
        if self._in_burst >= self._settings.burst:
            rate = self._settings.entries_per_s
            rest_s = pause_s(self._in_burst, began_s=self._burst_began_s, now_s=self._clock(), entries_per_s=rate)
            self._closing.wait(rest_s)
            self._in_burst, self._burst_began_s = 0, self._clock()

    def _fail(self, name: str, error: OSError) -> None:
        self._retry_at_s = {**self._retry_at_s, name: self._clock() + self._settings.retry_s}
        with self._lock:
            self._statistics = msgspec.structs.replace(
                self._statistics, failures=self._statistics.failures + 1, last_failure=f"{self.trash / name}: {error}"
            )

    def _count(self, *, discarded: int = 0, entries: int = 0) -> None:
        with self._lock:
            before = self._statistics
            self._statistics = msgspec.structs.replace(
                before, discarded=before.discarded + discarded, entries=before.entries + entries
            )


_PATH_ONLY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


def _own_directory(path: Path) -> int:
    """Open the trash, made if missing.

    Raises:
        ConfigError: if it is a link, no directory, or another user's.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, _DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{path} cannot be a trash directory: {error}. Name another one.") from error
    owner = os.fstat(descriptor).st_uid
    if owner != os.geteuid():
        os.close(descriptor)
        raise ConfigError(f"{path} belongs to user {owner}, not to {os.geteuid()}; name another trash directory.")
    return descriptor


def _new_name() -> str:
    # The oldest sorts first; the rest keeps apart what is moved in the same moment, and by another process.
    return f"{time.time_ns():020d}-{os.getpid()}-{next(_NUMBERS)}"


def _move(name: str, source: int, new_name: str, target: int) -> None:
    """Rename an entry of one open directory into another; closes `source`."""
    try:
        try:
            os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)
        except PermissionError:
            # To move a directory is to write to it, and to take it out of another is to write there.
            with suppress(OSError):
                _unlock(source)
            with _path_opened(name, source) as moved:
                _unlock(moved)
            os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)
    finally:
        os.close(source)


@contextmanager
def _path_opened(name: str, directory: int) -> Iterator[int]:
    descriptor = os.open(name, _PATH_ONLY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _unlock(directory: int) -> None:
    """Let the owner read and change a directory that is open, whatever its mode; by the descriptor, not by a name."""
    os.chmod(f"/proc/self/fd/{directory}", 0o700)


@contextmanager
def _opened(name: str, directory: int) -> Iterator[int]:
    """Open a directory of a directory, never through a link, so that it can be read and emptied."""
    with _path_opened(name, directory) as found:
        status = os.fstat(found)
        if status.st_uid == os.geteuid() and status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            _unlock(found)
    descriptor = os.open(name, _DIRECTORY, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _be_idle() -> None:
    """Let this thread's reads and writes wait for everybody else's.

    Not its processor time: a thread that the scheduler passes over while it holds the interpreter's lock would hold up
    the whole process.
    """
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        # A scheduler that knows no classes refuses, and then the rate alone bounds it.
        libc.syscall(ctypes.c_long(number), ctypes.c_int(_WHO_PROCESS), ctypes.c_int(0), ctypes.c_int(_CLASS_IDLE))
