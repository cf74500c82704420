"""Doorbells: how processes of one machine tell each other that something changed, so that nobody polls.

A ring carries no content and may be lost or doubled: the truth stays in the store and the repository, and every
waiter checks its own predicate again. Decides nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import stat
import tempfile
from pathlib import Path
from types import TracebackType

from rollmill.errors import RunDirectoryError

_LONGEST_ADDRESS_BYTES = 107  # sun_path of Linux is 108 with its terminator
_NOBODY_LISTENS = (FileNotFoundError, ConnectionRefusedError)


class Doorbell:
    """A Unix datagram socket that can be waited on and rung from any process of the machine.

    Example:
        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> with Doorbell.bind(directory, "trainer") as bell:
        ...     ring(directory, "trainer")
        ...     bell.wait(1.0), bell.wait(0.0)
        (True, False)
    """

    def __init__(self, sock: socket.socket, *, address: Path) -> None:
        self._socket = sock
        self._address = address

    @classmethod
    def bind(cls, directory: str | Path, name: str) -> Doorbell:
        """Make the doorbell `name` of a run directory; a file left by a dead process is replaced.

        Raises:
            RunDirectoryError: if a living process has this doorbell, or the socket folder is not ours.
        """
        address = address_of(directory, name)
        _make_folder(address.parent)
        if _somebody_listens(address):
            raise RunDirectoryError(
                f"the doorbell {name!r} of {directory} belongs to a living process. Two runs share one run directory: "
                "stop the other, or choose another run.name."
            )
        address.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            sock.setblocking(False)
            sock.bind(str(address))
        except OSError as error:
            sock.close()
            raise RunDirectoryError(
                f"the doorbell {name!r} of {directory} cannot be made at {address}: {error.strerror}. Set TMPDIR to a "
                "writable local folder."
            ) from error
        return cls(sock, address=address)

    def wait(self, deadline_s: float) -> bool:
        """Block until somebody rings or `deadline_s` seconds have passed; return whether somebody rang.

        All rings so far are taken: the next wait blocks until a new one.
        """
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        if not poller.poll(max(0.0, deadline_s) * 1000):
            return False
        return self.drain() > 0

    def fileno(self) -> int:
        """Return the descriptor that becomes readable at a ring, for an event loop's `add_reader`."""
        return self._socket.fileno()

    def drain(self) -> int:
        """Take all rings without blocking; return how many there were."""
        rings = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(1)
                rings += 1
        return rings

    def close(self) -> None:
        """Close the socket and remove its file; the folder goes with its last doorbell. Idempotent."""
        if self._socket.fileno() < 0:
            return
        self._socket.close()
        self._address.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._address.parent.rmdir()

    def __enter__(self) -> Doorbell:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def ring(directory: str | Path, name: str) -> None:
    """Ring a doorbell. Never blocks; does nothing if nobody listens or a ring is waiting already."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        with contextlib.suppress(*_NOBODY_LISTENS, BlockingIOError):
            sock.sendto(b"!", str(address_of(directory, name)))


def address_of(directory: str | Path, name: str) -> Path:
    """Return where the socket of a doorbell lies: short, and the same in every process of this user.

    Raises:
        RunDirectoryError: if the address would not fit a Unix socket.
    """
    digest = hashlib.sha256(os.fsencode(Path(directory).resolve())).hexdigest()[:16]
    address = Path(tempfile.gettempdir()) / f"rollmill-{os.getuid()}-{digest}" / f"{name}.sock"
    length = len(os.fsencode(address))
    if length > _LONGEST_ADDRESS_BYTES:
        raise RunDirectoryError(
            f"the socket address {address} has {length} bytes, Unix allows {_LONGEST_ADDRESS_BYTES}. "
            "Set TMPDIR to a shorter path, for example /tmp."
        )
    return address


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"the socket folder {folder} cannot be made: {error.strerror}. Set TMPDIR to a writable local folder."
        ) from error
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RunDirectoryError(
            f"the socket folder {folder} is not a private folder of this user (mode {found.st_mode:o}, uid "
            f"{found.st_uid}). Somebody else made it: remove it, or set TMPDIR to another folder."
        )


def _somebody_listens(address: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(address))
        except _NOBODY_LISTENS:
            return False
        return True
