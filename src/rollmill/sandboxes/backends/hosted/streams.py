"""A guest over a vendor's call that starts a program and streams its output: scripts are programs as others."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from rollmill.errors import RollmillError, SandboxExhausted
from rollmill.sandboxes.backends.hosted.driver import Command, Exit, Lost, Output, Ran, Running
from rollmill.sandboxes.backends.hosted.shell import argv_of

_SCRIPT_FILES = 256
_MOST_WORDS = 4096
_log = logging.getLogger(__name__)


class Starts(Protocol):
    """Starts a program."""

    async def start(self, command: Command) -> Running:
        """Start it."""
        ...


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
