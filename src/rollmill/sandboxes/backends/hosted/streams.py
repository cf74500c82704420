"""A guest over a vendor's call that starts a program and streams its output: scripts are programs as others."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol, TypeVar

from rollmill.errors import RollmillError, SandboxExhausted
from rollmill.sandboxes.backends.hosted.driver import Command, Exit, Lost, Output, Ran, Running
from rollmill.sandboxes.backends.hosted.shell import SIGNAL, ShellFiles, argv_of, signal_name
from rollmill.sandboxes.records import FileInfo, Usage

_SCRIPT_FILES = 256
_MOST_WORDS = 4096
_log = logging.getLogger(__name__)


class Starts(Protocol):
    """Starts a program."""

    async def start(self, command: Command) -> Running:
        """Start it."""
        ...


class Begins(Protocol):
    """A program that is about to begin."""

    async def began(self) -> None:
        """Wait until it has."""
        ...

    async def close(self) -> None:
        """Let go of the connection."""
        ...


B = TypeVar("B", bound=Begins)


async def begun(process: B) -> B:
    """Return a program once it has begun; of one that does not no connection is left."""
    try:
        await process.began()
    except BaseException:
        await process.close()
        raise
    return process


class ShellProcess:
    """What programs have in common whose vendor has no call for signals, and none for terminals.

    Args:
        guest: starts scripts beside it.
    """

    fed = False

    def __init__(self, guest: Starts) -> None:
        self._guest = guest
        self.pid = 0

    async def signal(self, number: int) -> None:
        """Signal its group, by a script."""
        await run_script(self._guest, SIGNAL, signal_name(number), str(self.pid))

    async def resize(self, rows: int, columns: int) -> None:
        """Never called: there are no terminals."""


class ShellGuest:
    """What the insides of sandboxes have in common whose vendor starts programs alone: files by scripts."""

    def __init__(self) -> None:
        self._files = ShellFiles(self.run_script)

    async def start(self, command: Command) -> Running:
        """Start a program, and wait until it has begun."""
        raise NotImplementedError

    async def run_script(self, script: str, *arguments: str, stdin: bytes = b"") -> Ran:
        """Run a script as root to its end."""
        return await run_script(self, script, *arguments, stdin=stdin)

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return a file's content."""
        return await self._files.read(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes, *, mode: int, user: str) -> None:
        """Write a file."""
        await self._files.write(path, data, mode=mode, user=user)

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        """Return a directory's entries."""
        return await self._files.list_dir(path)

    async def usage(self) -> Usage:
        """Return what it uses."""
        return await self._files.usage()


async def feed(running: Running, data: bytes) -> None:
    """Give a program its whole input, unless it has it already.

    One that ends before it has read all of it refuses the rest. That is no error: its exit code says how it went.
    """
    if running.fed:
        return
    try:
        if data:
            await running.send(data)
        await running.end_input()
    except RollmillError as error:
        _log.debug("a program took no more input: %s", error)


async def run_script(
    starter: Starts, script: str, *arguments: str, stdin: bytes = b"", most_bytes: int = 256 * 1024 * 1024
) -> Ran:
    """Run a script as root to its end.

    Raises:
        Lost: if its end was not seen.
        SandboxExhausted: if it wrote more than `most_bytes`.
    """
    command = Command(
        argv=argv_of(script, *arguments), cwd="/", stdin=stdin, most_bytes=most_bytes, open_files=_SCRIPT_FILES
    )
    running = await starter.start(command)
    try:
        return await _collect(running, command)
    finally:
        await running.close()


async def _collect(running: Running, command: Command) -> Ran:
    out, err = bytearray(), bytearray()
    # Fed beside the reading: a script that writes before it has read all would wait for us otherwise, and we for it.
    feeding = asyncio.get_running_loop().create_task(feed(running, command.stdin or b""))
    try:
        async for event in running.events():
            if isinstance(event, Exit):
                return Ran(code=event.code, out=bytes(out), err=bytes(err))
            _add(event, out, err, command.most_bytes)
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
    raise Lost("a script's output ended without its exit code")


def _add(event: Output, out: bytearray, err: bytearray, most_bytes: int) -> None:
    if event.stream == "stderr":
        err += event.data[: max(0, _MOST_WORDS - len(err))]
        return
    out += event.data
    if len(out) > most_bytes:
        raise SandboxExhausted(f"a script inside wrote more than {most_bytes} bytes")
