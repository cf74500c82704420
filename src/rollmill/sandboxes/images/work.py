"""Bounds of one preparation: what an image may take, how long it may take, and who is told how far it is.

A preparation runs in a thread. It asks here before it takes anything; here it learns that it is too much, too late, or
not wanted any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rollmill.clock import Clock, SystemClock
from rollmill.errors import ConfigError, DeadlineExceeded, SandboxError
from rollmill.sandboxes.images.refusals import Refusal, refused, shown
from rollmill.sandboxes.records import Record

_GIB = 1024**3
_REPORT_BYTES = 16 * 1024**2
_REPORT_INODES = 1000


class ImageLimits(Record, frozen=True, kw_only=True):
    """What one image may take. Raising a limit lets bigger images in, and lets a hostile one take more.

    Attributes:
        total_bytes: content of all its files, unpacked.
        file_bytes: content of one file.
        inodes: entries of all its layers; each costs an inode of the store's disk.
        layers: overlays take one page of options, about 150 layers; each layer costs every start some 0.25 ms.
        ratio: unpacked bytes for each packed one, beyond the first 64 MiB; ordinary layers have 2 to 10.
        document_bytes: one JSON document of an image.
        setuid: `clear` the bits of setuid and setgid programs (they have no effect in a sandbox, and would have one on
            the host), or `refuse` the image.
        devices: `drop` device nodes below /dev, where a sandbox has its own, or `refuse` them there as well;
            elsewhere they are always refused.
    """

    total_bytes: int = 32 * _GIB
    file_bytes: int = 8 * _GIB
    inodes: int = 2_000_000
    layers: int = 120
    ratio: int = 250
    document_bytes: int = 8 * 1024**2
    setuid: str = "clear"
    devices: str = "drop"

    def __post_init__(self) -> None:
        for name in ("total_bytes", "file_bytes", "inodes", "layers", "ratio", "document_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of an image's limits is {getattr(self, name)}; it must be at least 1")
        for name, allowed in (("setuid", ("clear", "refuse")), ("devices", ("drop", "refuse"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} of an image's limits is {getattr(self, name)!r}; it is one of {allowed}")


class ImageProgress(Record, frozen=True, kw_only=True):
    """How far a preparation is.

    Attributes:
        phase: what it does, in words.
        done_bytes: content unpacked so far.
        done_inodes: entries made so far.
    """

    phase: str
    done_bytes: int = 0
    done_inodes: int = 0


class Work:
    """The books of one preparation.

    Args:
        limits: what it may take.
        deadline_s: until when, on `clock`; `None` for no deadline of its own.
        report: told of each phase, and of progress within; what it raises ends the preparation.
        clock: the time.
    """

    def __init__(
        self,
        limits: ImageLimits,
        *,
        deadline_s: float | None = None,
        report: Callable[[ImageProgress], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.limits = limits
        self.clock = SystemClock() if clock is None else clock
        self._deadline_s = deadline_s
        self._report = report
        self._cancelled = threading.Event()
        self._phase = "start"
        self.done_bytes = self.done_inodes = 0
        self._told_bytes = self._told_inodes = 0

    def cancel(self) -> None:
        """Have the preparation end at its next step; from any thread."""
        self._cancelled.set()

    def left_s(self, *, most: float) -> float:
        """Return the seconds that are left, `most` at most.

        Raises:
            DeadlineExceeded: if none is.
        """
        self.check()
        if self._deadline_s is None:
            return most
        return min(most, self._deadline_s - self.clock.now_s())

    def check(self) -> None:
        """Go on if there is time and somebody still wants it.

        Raises:
            DeadlineExceeded: past the deadline.
            SandboxError: if it was cancelled.
        """
        if self._cancelled.is_set():
            raise SandboxError("the preparation of this image was cancelled; nothing of it is in the store")
        if self._deadline_s is not None and self.clock.now_s() >= self._deadline_s:
            raise DeadlineExceeded(
                f"the image was not ready at its deadline: {self._phase}, {self.done_bytes} bytes and "
                f"{self.done_inodes} entries done. Finished layers are kept; prepare it again with more time."
            )

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self._phase = phase
        self.check()
        self._tell()

    def take_inode(self) -> None:
        """Count an entry.

        Raises:
            ImageError: if it is one too many.
        """
        self.done_inodes += 1
        if self.done_inodes > self.limits.inodes:
            what = f"the image has more than {self.limits.inodes} entries (limits.inodes)"
            raise refused(Refusal.TOO_MANY, f"{what}; raise the limit if it is honest")
        if self.done_inodes - self._told_inodes >= _REPORT_INODES:
            self.check()
            self._tell()

    def announce_file(self, size: int, *, name: bytes) -> None:
        """Hear how large a file will be, before anything of it is written.

        Raises:
            ImageError: if that is too much.
        """
        if size > self.limits.file_bytes:
            what = f"{shown(name)} has {size} bytes, most for one file is {self.limits.file_bytes} (limits.file_bytes)"
            raise refused(Refusal.TOO_LARGE, what)
        if self.done_bytes + size > self.limits.total_bytes:
            what = f"with {shown(name)} ({size} bytes) the image has {self.done_bytes + size} bytes"
            raise refused(Refusal.TOO_LARGE, f"{what}, most is {self.limits.total_bytes} (limits.total_bytes)")

    def take_bytes(self, count: int) -> None:
        """Count content that was written."""
        self.done_bytes += count
        if self.done_bytes - self._told_bytes >= _REPORT_BYTES:
            self.check()
            self._tell()

    def _tell(self) -> None:
        self._told_bytes, self._told_inodes = self.done_bytes, self.done_inodes
        if self._report is not None:
            progress = ImageProgress(phase=self._phase, done_bytes=self.done_bytes, done_inodes=self.done_inodes)
            self._report(progress)
