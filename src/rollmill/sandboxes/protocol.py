"""The seam between whoever needs sandboxes and what runs them: one provider and one sandbox protocol for all backends.

The id is chosen by the caller and known before the call, so that no sandbox can exist that nobody has heard of. Policy
kills and provider losses are told apart in every `Death`; see `Culprit`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from rollmill.errors import SandboxError
from rollmill.sandboxes.isolation import IsolationLevel
from rollmill.sandboxes.records import (
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
    Usage,
)

DEFAULT_OUTPUT_CAP_BYTES = 1024 * 1024
DEFAULT_READ_BYTES = 64 * 1024 * 1024


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

    async def wait(self) -> ExecResult:
        """Wait for its end; bounded by its timeout.

        Raises:
            SandboxDead: if the sandbox ended with it.
        """
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
    ) -> Process:
        """Start a program and let it run; with no timeout it may run as long as the sandbox lives."""
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

    async def renew(self, lease: Lease) -> None:
        """Renew the lease: its `ttl_s` counts from now."""
        ...

    async def usage(self) -> Usage:
        """Return what it uses now."""
        ...

    async def pause(self) -> None:
        """Stop every process at once; until `resume` its programs and files answer nothing.

        Raises:
            SandboxUnsupported: if this backend or machine cannot.
        """
        ...

    async def resume(self) -> None:
        """Let every process go on."""
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
