"""What a vendor's adapter gives, and nothing more: make a sandbox, find it, end it, and run programs in it.

Leases, deadlines of programs, caps of output, ids and the reasons of ends are the same for all vendors and stand in
`provider`, `sandbox` and `process`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Protocol

from rollmill.errors import SandboxError
from rollmill.sandboxes.backends.http import Refused
from rollmill.sandboxes.isolation import Protection
from rollmill.sandboxes.records import (
    Capabilities,
    Death,
    FileInfo,
    Image,
    Record,
    SandboxSpec,
    SandboxState,
    Usage,
)

_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


class Gone(SandboxError):
    """The vendor knows nothing of this sandbox any more."""

    code = "sandbox_gone"


class Lost(SandboxError):
    """The connection to a program was lost; whether it runs is unknown."""

    code = "sandbox_lost"


@contextlib.contextmanager
def gone_if_unknown(ref: str, *, product: str) -> Iterator[None]:
    """Tell a service's 404 to a call about a sandbox as what it means.

    Raises:
        Gone: where the service does not know the sandbox.
    """
    try:
        yield
    except Refused as error:
        if error.status == 404:
            raise Gone(f"{product} does not know sandbox {ref} any more: {error.words}") from error
        raise


def ref_of(value: object) -> str:
    """Return a vendor's name for a sandbox, which becomes a part of addresses.

    Example:
        >>> ref_of("i-1.x_Y")
        'i-1.x_Y'

    Raises:
        SandboxError: if it is none.
    """
    if not isinstance(value, str) or not _REF.fullmatch(value):
        raise SandboxError(f"{value!r} cannot be a vendor's name for a sandbox")
    return value


class Found(Record, frozen=True, kw_only=True):
    """A sandbox as its vendor shows it.

    Attributes:
        ref: the vendor's name for it.
        marks: what was written on it when it was made.
        state: `ready`, `starting`, `paused` or `dead`.
        access: what else is needed to reach it: addresses, a token. Never logged.
    """

    ref: str
    marks: Mapping[str, str]
    state: SandboxState = SandboxState.READY
    access: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return f"Found(ref={self.ref!r}, state={self.state.value})"


class Command(Record, frozen=True, kw_only=True):
    """A program to run.

    Attributes:
        argv: program and arguments.
        cwd: directory, the home if empty.
        env: added to the sandbox's own.
        user: whose rights, root's if empty.
        stdin: its whole input, `None` if it comes later.
        pty: rows and columns of a terminal for it.
        timeout_s: when it will be killed from here; a vendor that can hold to it too may do so later than this.
        keep_bytes: of each stream, after which output is only counted.
        most_bytes: of output, after which it will be killed from here.
        open_files: bound on descriptors.
        cpu_s: bound on processor seconds, 0 for none.
    """

    argv: tuple[str, ...]
    cwd: str = ""
    env: Mapping[str, str] = {}
    user: str = ""
    stdin: bytes | None = None
    pty: tuple[int, int] | None = None
    timeout_s: float | None = None
    keep_bytes: int = 2**62
    most_bytes: int
    open_files: int
    cpu_s: int = 0


class Output(Record, frozen=True, kw_only=True):
    """A piece of output.

    Attributes:
        stream: `stdout` or `stderr`.
        data: bytes.
        skipped: how many more there were that were not sent here.
    """

    stream: str
    data: bytes
    skipped: int = 0


class Exit(Record, frozen=True, kw_only=True):
    """How a program ended, as the vendor reports it.

    Attributes:
        code: exit code; negative for a signal where the vendor tells.
        flooded: whether the vendor's side ended it because of too much output.
    """

    code: int
    flooded: bool = False


class Ran(Record, frozen=True, kw_only=True):
    """How a script ended."""

    code: int
    out: bytes = b""
    err: bytes = b""


class Running(Protocol):
    """A program that was started."""

    @property
    def pid(self) -> int:
        """Return its process id inside, which is that of its group."""
        ...

    @property
    def fed(self) -> bool:
        """Return whether it was given its input when it was started."""
        ...

    def events(self) -> AsyncIterator[Output | Exit]:
        """Yield output as it comes, and the exit at last.

        Raises:
            Lost: if the connection was lost.
            Gone: if the sandbox is gone.
        """
        ...

    async def send(self, data: bytes) -> None:
        """Give it input."""
        ...

    async def end_input(self) -> None:
        """End its input."""
        ...

    async def signal(self, number: int) -> None:
        """Signal its group; nothing happens if it has ended."""
        ...

    async def resize(self, rows: int, columns: int) -> None:
        """Change the size of its terminal."""
        ...

    async def close(self) -> None:
        """Let go of the connection."""
        ...


class Guest(Protocol):
    """A sandbox's inside."""

    async def start(self, command: Command) -> Running:
        """Start a program.

        Raises:
            SandboxUnsupported: if there is no such user.
            SandboxExhausted: if it cannot be started.
        """
        ...

    async def run_script(self, script: str, *arguments: str, stdin: bytes = b"") -> Ran:
        """Run a script as root to its end."""
        ...

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return a file's content; raises `SandboxFileError`."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int, user: str) -> None:
        """Write a file and the directories above it; raises `SandboxFileError`, `SandboxExhausted`."""
        ...

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        """Return a directory's entries; raises `SandboxFileError`."""
        ...

    async def usage(self) -> Usage:
        """Return what it uses."""
        ...


class Driver(Protocol):
    """One vendor. Errors of the connection are those of `backends.http`, or typed ones of the tree."""

    @property
    def product(self) -> str:
        """Return the vendor's name, for messages."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """Return what it can do."""
        ...

    @property
    def protections(self) -> frozenset[Protection] | None:
        """Return what keeps its sandboxes from the host, `None` if only `protections_of` one that is made tells."""
        ...

    def check(self, image: Image) -> None:
        """Refuse an image that the vendor cannot have; raises `ImageError`."""
        ...

    async def prepare(self, image: Image) -> None:
        """Have the image there ahead of its use; raises `ImageError`."""
        ...

    async def create(self, spec: SandboxSpec, *, id: str, marks: Mapping[str, str], ttl_s: float) -> Found:
        """Make a sandbox.

        Args:
            spec: what of.
            id: for an idempotency key, or a name, where the vendor has one.
            marks: to be written on it.
            ttl_s: when the vendor shall end it by itself, if it can.

        Raises:
            SandboxRetryable: if there is no room; nothing was made.
            ImageError: if it is the image.
            CutOff: if it may have been made.
        """
        ...

    async def enter(self, found: Found, spec: SandboxSpec) -> Guest:
        """Wait until it answers, and return its inside; raises `Gone`."""
        ...

    async def protections_of(self, found: Found) -> frozenset[Protection]:
        """Return what keeps one that answers from its host."""
        ...

    async def find(self, marks: Mapping[str, str]) -> list[Found]:
        """Return those that have all of these marks and have not ended."""
        ...

    async def explain(self, found: Found) -> Death | None:
        """Return how a sandbox ended, `None` if it lives; one that is not known was lost."""
        ...

    async def kill(self, found: Found) -> None:
        """End it, and wait until it is gone; one that is not known is."""
        ...

    async def set_ttl(self, found: Found, ttl_s: float) -> None:
        """Have the vendor end it by itself later than it was told; nothing where there is no such thing."""
        ...

    async def pause(self, found: Found) -> None:
        """Stop its processes; raises `SandboxUnsupported`."""
        ...

    async def resume(self, found: Found, *, ttl_s: float) -> Guest | None:
        """Let them go on; returns the inside if it is another one now."""
        ...

    async def close(self) -> None:
        """Let go of all connections."""
        ...
