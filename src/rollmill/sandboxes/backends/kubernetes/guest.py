"""The inside of a pod: programs by the API server's `exec`, files by scripts."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlencode

from rollmill.errors import SandboxError, SandboxExhausted, SandboxUnsupported
from rollmill.sandboxes.backends.hosted.driver import Command, Exit, Gone, Lost, Output
from rollmill.sandboxes.backends.hosted.shell import announced, launched
from rollmill.sandboxes.backends.hosted.streams import ShellGuest, ShellProcess, begun
from rollmill.sandboxes.backends.http import CutOff, Refused
from rollmill.sandboxes.backends.kubernetes.websocket import END, ERRORS, INPUT, OUTPUT, STATUS, Channels
from rollmill.sandboxes.records import Usage

_STREAMS = {OUTPUT: "stdout", ERRORS: "stderr"}
_INPUT_CHUNK_BYTES = 128 * 1024


def exit_code_of(status: bytes) -> int:
    """Return the exit code in the status at the end.

    Example:
        >>> exit_code_of(b'{"status": "Success"}')
        0
        >>> exit_code_of(b'{"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "3"}]}}')
        3
    """
    try:
        shown = json.loads(status)
        if shown.get("status") == "Success":
            return 0
        for cause in (shown.get("details") or {}).get("causes") or []:
            if cause.get("reason") == "ExitCode":
                return int(cause["message"])
        words = str(shown.get("message", ""))
    except (ValueError, AttributeError, KeyError) as error:
        raise SandboxError(f"the end of a program is told in no way that is known: {status[:200]!r}") from error
    if "not found" in words and "container" in words:
        raise Gone(f"the pod's container is gone: {words}")
    if "cannot allocate" in words or "temporarily unavailable" in words:
        raise SandboxExhausted(f"no room for another process: {words}")
    raise SandboxError(f"a program was not started, or its end is unknown: {words}")


class PodProcess(ShellProcess):
    """A program in a pod."""

    def __init__(self, guest: PodGuest, channels: Channels) -> None:
        super().__init__(guest)
        self._channels = channels
        self._early: list[Output] = []

    async def began(self) -> None:
        """Wait for the first line, which holds its process id."""
        line = b""
        while b"\n" not in line:
            message = await self._channels.receive()
            if message is None:
                raise SandboxError("a program's connection ended before it was started")
            channel, data = message
            if channel == STATUS:
                code = exit_code_of(data)
                said = b"".join(one.data for one in self._early)[:300]
                raise SandboxError(f"a program was not started (exit code {code}): {said!r}. Has the image /bin/sh?")
            if channel == OUTPUT:
                line += data
            elif channel == ERRORS:
                self._early.append(Output(stream="stderr", data=data))
        self.pid, rest = announced(line)
        self._early.insert(0, Output(stream="stdout", data=rest))

    async def events(self) -> AsyncIterator[Output | Exit]:
        """Yield output, and the exit."""
        for event in self._early:
            yield event
        try:
            while (message := await self._channels.receive()) is not None:
                channel, data = message
                if channel == STATUS:
                    yield Exit(code=exit_code_of(data))
                    return
                if channel in _STREAMS and data:
                    yield Output(stream=_STREAMS[channel], data=data)
        except CutOff as error:
            raise Lost(f"the connection to a program was lost, and it may still run: {error}") from error
        raise Lost("a program's connection ended without its exit code")

    async def send(self, data: bytes) -> None:
        """Give it input."""
        for start in range(0, len(data), _INPUT_CHUNK_BYTES):
            await self._channels.send(INPUT, data[start : start + _INPUT_CHUNK_BYTES])

    async def end_input(self) -> None:
        """End its input."""
        await self._channels.send(END, bytes([INPUT]))

    async def close(self) -> None:
        """Close its connection; the program goes on."""
        await self._channels.close()


class PodGuest(ShellGuest):
    """A pod's inside.

    Args:
        address: of the pod's `exec` at the API server.
        headers: with the token.
        trust: which certificates are trusted.
        container: its name in the pod.
        limit_s: until a connection stands.
    """

    def __init__(
        self, *, address: str, headers: Mapping[str, str], trust: ssl.SSLContext | None, container: str, limit_s: float
    ) -> None:
        super().__init__()
        self._address = address
        self._headers = dict(headers)
        self._trust = trust
        self._container = container
        self._limit_s = limit_s

    async def start(self, command: Command) -> PodProcess:
        """Start a program, and wait until it has begun."""
        if command.user not in ("", "root", "0"):
            raise SandboxUnsupported(
                f"a pod runs every program as its container's user, not as {command.user!r}", capability="users"
            )
        assigned = [f"{name}={value}" for name, value in command.env.items()]
        argv = ["env", *assigned, *launched(command, announce=True)]
        query: list[tuple[str, Any]] = [("container", self._container), ("stdin", "true"), ("stdout", "true")]
        query += [("stderr", "true"), ("tty", "false"), *(("command", one) for one in argv)]
        try:
            channels = await Channels.open(
                f"{self._address}?{urlencode(query)}",
                headers=self._headers,
                trust=self._trust,
                product="the API server",
                limit_s=self._limit_s,
            )
        except Refused as error:
            if error.status == 404 or "not found" in error.words or "is not running" in error.words:
                raise Gone(f"the pod is gone: {error.words}") from error
            raise
        return await begun(PodProcess(self, channels))

    async def usage(self) -> Usage:
        """Return what it uses, without the disk: a pod's root shows that of its node."""
        seen = await super().usage()
        return Usage(processes=seen.processes, memory_bytes=seen.memory_bytes)
