"""The seam between whoever needs sandboxes and what runs them: one provider and one sandbox protocol for all backends.

The id is chosen by the caller and known before the call, so that no sandbox can exist that nobody has heard of. Policy
kills and provider losses are told apart in every `Death`; see `Culprit`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from typing import Protocol

from rollmill.errors import SandboxError
from rollmill.sandboxes.isolation import IsolationLevel
from rollmill.sandboxes.records import (
    Address,
    Capabilities,
    Death,
    DeathReason,
    ExecResult,
    FileInfo,
    Image,
    Lease,
    SandboxSpec,
    SandboxState,
    SandboxStatus,
    SnapshotRef,
    Usage,
)

DEFAULT_OUTPUT_CAP_BYTES = 1024 * 1024
DEFAULT_READ_BYTES = 64 * 1024 * 1024
MOST_LINE_BYTES = 256 * 1024
_MOST_16_BITS = 65_535


def check_call(
    argv: Sequence[str], *, env: Mapping[str, str] | None, timeout_s: float | None, output_cap_bytes: int
) -> None:
    """Refuse a call that no backend can carry out, before anything is sent.

    Raises:
        SandboxError: with what is wrong.
    """
    if isinstance(argv, str) or not argv:
        raise SandboxError(f"argv must be a list with the program first, got {argv!r}; for a shell: ['sh', '-c', line]")
    if any("\0" in one for one in argv) or not argv[0]:
        raise SandboxError(
            f"the program's name is empty or an argument holds a NUL, which no program can be given: {argv!r}"
        )
    for name, value in (env or {}).items():
        if not name or "=" in name or "\0" in name + value:
            raise SandboxError(f"{name!r} cannot be set in an environment: an empty name, a '=' in it, or a NUL")
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise SandboxError(f"timeout_s is {timeout_s}; it must be above 0 and finite, or None for the limit's")
    if output_cap_bytes < 0:
        raise SandboxError(f"output_cap_bytes is {output_cap_bytes}; it must not be below 0")


def check_line(line: str, *, timeout_s: float | None, output_cap_bytes: int) -> None:
    """Refuse a session's line that no backend can run.

    Raises:
        SandboxError: with what is wrong.
    """
    check_call(["sh"], env=None, timeout_s=timeout_s, output_cap_bytes=output_cap_bytes)
    size = len(line.encode("utf-8", "surrogateescape"))
    if "\0" in line or size > MOST_LINE_BYTES:
        raise SandboxError(
            f"a line of {size} bytes cannot be run: a session takes {MOST_LINE_BYTES} at most, and no NUL. Write a "
            "file first and run that."
        )


def check_kept(*, full: bool, stop_processes: bool) -> None:
    """Refuse a snapshot that is to keep what it stops.

    Raises:
        SandboxError: if both are wanted.
    """
    if full and stop_processes:
        raise SandboxError("a full snapshot keeps what runs, and stop_processes ends it; leave one of the two out")


def check_port(port: int) -> None:
    """Refuse a port that cannot be.

    Raises:
        SandboxError: with what is wrong.
    """
    if not 0 < port <= _MOST_16_BITS:
        raise SandboxError(f"port {port} cannot be; ports are from 1 to {_MOST_16_BITS}")


def check_terminal(size: tuple[int, int] | None) -> None:
    """Refuse a terminal's size that none can have.

    Raises:
        SandboxError: with what is wrong.
    """
    if size is not None and not (len(size) == 2 and all(0 < one <= _MOST_16_BITS for one in size)):
        raise SandboxError(f"a terminal of (rows, columns) {size} cannot be; both are from 1 to {_MOST_16_BITS}")


class Process(Protocol):
    """A program that runs in the background of a sandbox."""

    @property
    def pid(self) -> int:
        """Return its process id inside."""
        ...

    def output(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield (`stdout` or `stderr`, bytes) as it writes, until its end; what is not read counts to the cap."""
        ...

    async def write_stdin(self, data: bytes) -> None:
        """Give it input."""
        ...

    async def close_stdin(self) -> None:
        """End its input."""
        ...

    async def signal(self, number: int) -> None:
        """Send a signal to its process group; SIGKILL reaches its descendants too."""
        ...

    async def resize(self, rows: int, columns: int) -> None:
        """Change the size of its terminal; nothing happens if it has none."""
        ...

    async def wait(self) -> ExecResult:
        """Wait for its end; bounded by its timeout.

        Raises:
            SandboxDead: if the sandbox ended with it.
        """
        ...


class Session(Protocol):
    """A shell that stays: what a line does to directory, variables and functions is there for the next one."""

    @property
    def alive(self) -> bool:
        """Return whether its shell goes on, as far as the last line told."""
        ...

    async def run(
        self, line: str, *, timeout_s: float | None = None, output_cap_bytes: int = DEFAULT_OUTPUT_CAP_BYTES
    ) -> ExecResult:
        """Run a line, or several; their input is empty.

        A line that runs out of time, or floods its output, has what it started killed; the session survives if the
        shell then goes on within a second (`alive`), as it does unless the line is a loop of its own. Output of what a
        line leaves in the background comes with a later line.

        Args:
            line: what a shell understands.
            timeout_s: the spec's `exec_s` if `None`.
            output_cap_bytes: as with `exec`.

        Raises:
            SandboxBusy: if another line runs.
            SandboxError: if the session has ended.

        Cancellation: as if the time were over.
        """
        ...

    async def interrupt(self) -> None:
        """Send SIGINT to what the running line has started."""
        ...

    async def close(self) -> None:
        """End the shell and what its lines have started."""
        ...


class Sandbox(Protocol):
    """One sandbox. Every call raises `SandboxDead` once it has ended."""

    @property
    def id(self) -> str:
        """Return the id that its creator chose."""
        ...

    @property
    def state(self) -> SandboxState:
        """Return where it is in its life."""
        ...

    @property
    def death(self) -> Death | None:
        """Return how it ended, `None` while it lives."""
        ...

    @property
    def isolation(self) -> IsolationLevel:
        """Return how far it is kept from its host."""
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdin: bytes = b"",
        output_cap_bytes: int = DEFAULT_OUTPUT_CAP_BYTES,
    ) -> ExecResult:
        """Run a program to its end.

        Args:
            argv: program and arguments; no shell.
            cwd: directory, the user's home if `None`.
            env: added to a small environment that holds nothing of the host's.
            user: by name or id, root if `None`.
            timeout_s: after it the program and its descendants are killed; the spec's `exec_s` if `None`.
            stdin: its whole input.
            output_cap_bytes: kept of stdout, and of stderr; the rest is counted and dropped.

        Raises:
            SandboxExhausted: if no process, memory or descriptor is left to start it.
            SandboxUnsupported: if there is no such user.

        Cancellation: the program is killed.
        """
        ...

    async def start_process(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        output_cap_bytes: int = DEFAULT_OUTPUT_CAP_BYTES,
        pty: tuple[int, int] | None = None,
    ) -> Process:
        """Start a program and let it run; with no timeout it may run as long as the sandbox lives.

        Args:
            pty: rows and columns of a terminal for it; all that it writes is then `stdout`, and the end of its input is
                an end-of-file character.

        Raises:
            SandboxUnsupported: if this backend has no terminals.
        """
        ...

    async def open_session(
        self,
        *,
        shell: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Session:
        """Start a shell that stays.

        Args:
            shell: which; the image's bash if `None`, else its sh.
            cwd: as with `exec`.
            env: as with `exec`.
            user: as with `exec`.

        Raises:
            SandboxUnsupported: if the image has no such shell, or this backend no sessions.
        """
        ...

    async def run_python(
        self,
        code: str,
        *,
        args: Sequence[str] = (),
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdin: bytes = b"",
        output_cap_bytes: int = DEFAULT_OUTPUT_CAP_BYTES,
    ) -> ExecResult:
        """Run a piece of Python in a fork of a warm interpreter inside, each time a fresh one.

        Raises:
            SandboxUnsupported: if the image has no Python.
        """
        ...

    async def read(self, path: str, *, max_bytes: int = DEFAULT_READ_BYTES) -> bytes:
        """Return a file's content.

        Raises:
            SandboxFileError: if it is missing, no regular file, or larger than `max_bytes`.
        """
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644, user: str | None = None) -> None:
        """Write a file, and make the directories above it.

        Raises:
            SandboxFileError: if the path is refused.
            SandboxExhausted: if there is no space or inode left.
        """
        ...

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        """Return a directory's entries by name, 10,000 at most.

        Raises:
            SandboxFileError: if it is missing or no directory.
        """
        ...

    def read_stream(self, path: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yield a file's content in pieces, from an offset to its end; it may be of any size.

        Raises:
            SandboxFileError: if it is missing or no regular file.
        """
        ...

    async def write_stream(
        self, path: str, pieces: AsyncIterable[bytes], *, mode: int = 0o644, user: str | None = None
    ) -> int:
        """Write a file from pieces as they come, and make the directories above it; return its size.

        Raises:
            SandboxFileError: if the path is refused.
            SandboxExhausted: if there is no space or inode left; what was written so far stays.
        """
        ...

    async def stat(self, path: str) -> FileInfo:
        """Return what is at a path; a link is told of itself.

        Raises:
            SandboxFileError: if nothing is there.
        """
        ...

    async def make_dir(self, path: str, *, mode: int = 0o755, user: str | None = None) -> bool:
        """Make a directory and those above it; `False` if it is there already.

        Raises:
            SandboxFileError: if something else has its name.
        """
        ...

    async def set_attributes(self, path: str, group: str, words: Mapping[str, str], *, user: str | None = None) -> None:
        """Put words on a file, in place of all that it has of their group; `stat` tells them as `GROUP.NAME`.

        Raises:
            SandboxFileError: if it is missing or no regular file, or a word or the group is refused.
            SandboxExhausted: if they are too many or too long for the file system.
            SandboxUnsupported: if files carry none here.
        """
        ...

    async def rename(self, path: str, target: str, *, user: str | None = None) -> None:
        """Give something another name, in place of a file that has it, and make the directories above.

        Raises:
            SandboxFileError: if nothing is there, the target is a directory that is not empty, or both lie on different
                file systems, as with a directory of the image.
        """
        ...

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link itself, or a directory; with what is in it if `recursive`.

        Raises:
            SandboxFileError: if nothing is there, or a directory is not empty.
        """
        ...

    async def snapshot(
        self, *, id: str, stop_processes: bool = False, end: bool = False, full: bool = False
    ) -> SnapshotRef:
        """Keep its files as they are now; it goes on with them, in a fresh first process.

        Files have one moment only while nothing writes to them. So nothing may run, sessions neither; what was in
        shared memory is gone, as after a restart. This returns when the files are safe; later calls wait until the
        sandbox answers again. With `full` everything is stopped for that moment, and goes on as if nothing had been.

        Args:
            id: chosen by the caller, good for one snapshot.
            stop_processes: kill what runs instead of refusing.
            end: end the sandbox instead of letting it go on, which is faster.
            full: keep what runs too; it goes on in whatever is restored.

        Raises:
            SandboxBusy: if something runs; the message says what.
            SandboxRetryable: if the backend has no room for another snapshot.
            SandboxIdInUse: if there is a snapshot with this id.
            SandboxUnsupported: if this backend keeps none, or with `full` no processes.
            SandboxError: if what runs is to be both stopped and kept.

        Cancellation: it is carried through.
        """
        ...

    async def fork(
        self,
        ids: Sequence[str],
        *,
        lease: Lease,
        labels: Mapping[str, str] | None = None,
        stop_processes: bool = False,
        full: bool = False,
    ) -> tuple[Sandbox, ...]:
        """Make sandboxes with its files, with `full` also with what runs in it: all of them, or none and an error.

        Raises:
            SandboxBusy: as with `snapshot`.
            SandboxUnsupported: as with `snapshot`.
        """
        ...

    async def renew(self, lease: Lease) -> None:
        """Renew the lease: its `ttl_s` counts from now."""
        ...

    async def usage(self) -> Usage:
        """Return what it uses now."""
        ...

    async def pause(self, *, keep_memory: bool = True) -> None:
        """Stop every process at once; until `resume` its programs and files answer nothing.

        Args:
            keep_memory: they stand still and go on later; else they are ended, their memory is given back, and the
                files alone stay, as in a snapshot. A sandbox that is paused with its memory must be resumed before.

        Raises:
            SandboxUnsupported: if this backend or machine cannot.
            SandboxRetryable: without memory, if there is no room for the files; it goes on.
        """
        ...

    async def resume(self) -> None:
        """Let every process go on; without them, start anew with the files."""
        ...

    async def expose(self, port: int) -> Address:
        """Return where a TCP port inside is reached; the same for the same port, until the sandbox ends.

        Whoever can connect to that address reaches what listens there.

        Raises:
            SandboxUnsupported: if nothing inside can be reached from outside.
            SandboxError: if there is no such port.
        """
        ...

    async def kill(self, reason: DeathReason = DeathReason.RELEASED) -> Death:
        """End it, and wait until nothing of it is left; the first reason stands if it is called twice."""
        ...


class Provider(Protocol):
    """Something that runs sandboxes."""

    async def capabilities(self) -> Capabilities:
        """Return what this backend can do on this machine."""
        ...

    async def create(
        self, spec: SandboxSpec, *, id: str, labels: Mapping[str, str] | None = None, lease: Lease
    ) -> Sandbox:
        """Start a sandbox and wait until it answers.

        With the id and spec of one that lives this returns that one.

        Raises:
            SandboxRetryable: if there is no room now, or it did not answer in time; nothing is left behind.
            CreateUnknown: if the answer was cut off and the sandbox may exist.
            ImageError: if the image cannot be used.
            IsolationError: if it would be isolated less than the minimum.
            SandboxIdInUse: if the id was given to another spec, or to one that has ended.
        """
        ...

    async def restore(
        self, ref: SnapshotRef, *, id: str, labels: Mapping[str, str] | None = None, lease: Lease
    ) -> Sandbox:
        """Start a sandbox with the files of a snapshot, and wait until it answers.

        What the snapshot holds counts to the limits of the sandbox, as it did for the one that wrote it.

        Raises:
            ImageError: if there is no such snapshot (any more).
            SandboxUnsupported: if this backend keeps none.
            SandboxError: as `create`.
        """
        ...

    async def snapshots(self) -> tuple[SnapshotRef, ...]:
        """Return those that are held, the oldest first."""
        ...

    async def delete_snapshots(self, ids: Sequence[str]) -> None:
        """Let go of these; one that is not known counts as deleted. Sandboxes that were made of them live on."""
        ...

    async def attach(self, id: str) -> Sandbox:
        """Return a sandbox that lives.

        Raises:
            SandboxDead: if it has ended, or is not known.
        """
        ...

    async def list(
        self, *, labels: Mapping[str, str] | None = None, state: SandboxState | None = None
    ) -> tuple[SandboxStatus, ...]:
        """Return those that live, and recent ends, with all of these labels and in this state."""
        ...

    async def status(self, ids: Sequence[str]) -> dict[str, SandboxStatus]:
        """Return what is known; ids that are not known are left out."""
        ...

    async def kill(self, ids: Sequence[str], *, reason: DeathReason = DeathReason.RELEASED) -> None:
        """End these; one that is not known counts as ended."""
        ...

    async def prepare(self, image: Image) -> None:
        """Make an image ready ahead of its first use.

        Raises:
            ImageError: if it cannot be used.
        """
        ...

    async def close(self) -> None:
        """End every sandbox of this provider and release what it holds."""
        ...
