"""The inside of an E2B sandbox: envd's calls for processes (Connect with JSON) and files (HTTP)."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import re
import stat as modes
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from rollmill.errors import (
    RollmillError,
    SandboxError,
    SandboxExhausted,
    SandboxFileError,
    SandboxUnsupported,
)
from rollmill.sandboxes.backends.e2b.connect import ConnectError, Envelopes, envelope
from rollmill.sandboxes.backends.e2b.settings import ENVD_PORT
from rollmill.sandboxes.backends.hosted.driver import Command, Exit, Gone, Lost, Output, Ran
from rollmill.sandboxes.backends.hosted.shell import SIGNAL, ShellFiles, launched, signal_name
from rollmill.sandboxes.backends.hosted.streams import run_script
from rollmill.sandboxes.backends.http import CutOff, Refused, VendorHttp
from rollmill.sandboxes.records import FileInfo, Usage

_INPUT_CHUNK_BYTES = 256 * 1024
_KEEPALIVE_S = 30
_SILENCE_S = 4.0 * _KEEPALIVE_S
"""A server that promised a sign of life every 30 s and gave none for this long is gone."""

_SERVER_GRACE_S = 30.0
_START_S = 30.0
# As Go words the signal in a process's state; the exit code beside it is -1.
_GO_SIGNALS = {
    "hangup": 1, "interrupt": 2, "quit": 3, "illegal instruction": 4, "trace/breakpoint trap": 5, "aborted": 6,
    "bus error": 7, "floating point exception": 8, "killed": 9, "user defined signal 1": 10,
    "segmentation fault": 11, "user defined signal 2": 12, "broken pipe": 13, "alarm clock": 14, "terminated": 15,
}  # fmt: skip
_STREAMS = {"stdout": "stdout", "stderr": "stderr", "pty": "stdout"}
_END_OF_FILE = b"\x04"
_SIGNAL_WORDS = re.compile(r"^signal: ([a-z0-9/ ]+?)(?: \(core dumped\))?$")
_KINDS = {"FILE_TYPE_FILE": "file", "FILE_TYPE_DIRECTORY": "directory", "FILE_TYPE_SYMLINK": "link"}
_OWN_SIGNALS = {9: "SIGNAL_SIGKILL", 15: "SIGNAL_SIGTERM"}
_NO_USER = re.compile(r"user", re.I)


def exit_code_of(end: Mapping[str, Any]) -> int:
    """Return the exit code in an end event, negative for a signal.

    Example:
        >>> exit_code_of({"exitCode": 3}), exit_code_of({"exitCode": -1, "status": "signal: killed"}), exit_code_of({})
        (3, -9, 0)
    """
    words = _SIGNAL_WORDS.match(str(end.get("status", "")))
    if words and words[1] in _GO_SIGNALS:
        return -_GO_SIGNALS[words[1]]
    return int(end.get("exitCode", 0))


class EnvdProcess:
    """A program that envd runs, with the stream of its output."""

    def __init__(
        self,
        envd: Envd,
        *,
        stack: contextlib.AsyncExitStack,
        events: AsyncGenerator[Any, None],
        fed: bool,
        terminal: bool,
    ) -> None:
        self._envd = envd
        self._stack = stack
        self._events = events
        self.pid = 0
        self.fed = fed
        self.terminal = terminal

    async def began(self) -> None:
        """Wait for its process id."""
        async for event in self._events:
            if "start" in event:
                self.pid = int(event["start"]["pid"])
                return
        raise SandboxError("a program's stream ended before it was started")

    async def events(self) -> AsyncIterator[Output | Exit]:
        """Yield its output, and its exit."""
        try:
            async for event in self._events:
                if "end" in event:
                    yield Exit(code=exit_code_of(event["end"]))
                    return
                for name, stream in _STREAMS.items():
                    if piece := event.get("data", {}).get(name):
                        yield Output(stream=stream, data=base64.b64decode(piece))
        except (ConnectError, CutOff) as error:
            raise self._envd.lost(error) from error
        raise Lost("the stream of a program ended without its exit code")

    async def send(self, data: bytes) -> None:
        """Give it input."""
        kind = "pty" if self.terminal else "stdin"
        for start in range(0, len(data), _INPUT_CHUNK_BYTES):
            piece = base64.b64encode(data[start : start + _INPUT_CHUNK_BYTES]).decode()
            await self._envd.ask("process.Process/SendInput", {**self._who(), "input": {kind: piece}})

    async def end_input(self) -> None:
        """End its input; a terminal's ends by a character."""
        if self.terminal:
            await self.send(_END_OF_FILE)
        else:
            await self._envd.ask("process.Process/CloseStdin", self._who())

    async def resize(self, rows: int, columns: int) -> None:
        """Change the size of its terminal."""
        await self._envd.ask("process.Process/Update", {**self._who(), "pty": _size(rows, columns)})

    async def signal(self, number: int) -> None:
        """Signal its group by a script, since envd itself reaches only the process; that is what is left in need."""
        try:
            await run_script(self._envd, SIGNAL, signal_name(number), str(self.pid))
        except (Gone, Lost):
            raise
        except RollmillError:
            name = _OWN_SIGNALS.get(number)
            if name is None:
                raise
            with contextlib.suppress(Refused):  # not found: it has ended
                await self._envd.ask("process.Process/SendSignal", {**self._who(), "signal": name})

    def _who(self) -> dict[str, Any]:
        return {"process": {"pid": self.pid}}

    async def close(self) -> None:
        """Let go of the stream; the program goes on."""
        await self._events.aclose()
        await self._stack.aclose()


class Envd:
    """The daemon of one sandbox.

    Args:
        http: connections to where sandboxes are; holds no token of the control API.
        address: of this one.
        ref: the vendor's name for it.
        token: its own token, empty if it takes none.
        user: whose rights programs have that name no user.
    """

    def __init__(self, http: VendorHttp, *, address: str, ref: str, token: str, user: str) -> None:
        self._http = http
        self._address = address
        self._user = user
        self._headers = {"E2b-Sandbox-Id": ref, "E2b-Sandbox-Port": str(ENVD_PORT)}
        if token:
            self._headers["X-Access-Token"] = token
        self._files = ShellFiles(self.run_script)

    async def healthy(self) -> bool:
        """Return whether it answers."""
        try:
            await self._http.call("GET", f"{self._address}/health", what="envd's health", headers=self._headers)
        except Refused as error:
            if error.status == 502:
                return False
            raise
        return True

    def lost(self, error: ConnectError | CutOff) -> SandboxError:
        """Return what the failure of a stream means."""
        if isinstance(error, ConnectError):
            if error.kind == "unavailable" and "not found" in error.words:
                return Gone(f"the sandbox is gone: {error.words}")
            return Lost(f"a program's stream failed: {error}")
        return Lost(f"the connection to a program was lost, and it may still run: {error}")

    async def ask(self, method: str, message: Any, *, user: str = "") -> Any:
        """Return the answer to a unary call.

        Raises:
            Refused: if it is refused.
            Gone: if there is no such sandbox.
        """
        headers = {**self._headers, **self._as(user), "Connect-Protocol-Version": "1"}
        try:
            reply = await self._http.call(
                "POST", f"{self._address}/{method}", what=method, body=message, headers=headers
            )
        except Refused as error:
            raise self._explain(error) from error
        return reply.json()

    def _as(self, user: str) -> dict[str, str]:
        name = user or self._user
        return {"Authorization": "Basic " + base64.b64encode(f"{name}:".encode()).decode()}

    def _explain(self, error: Refused) -> RollmillError:
        if error.status == 502 and "not found" in error.words:
            return Gone(f"the sandbox is gone: {error.words}")
        if error.status == 502:
            return Lost(f"the sandbox cannot be reached: {error.words}")
        return error

    # -- programs ----------------------------------------------------------------------------------------------------

    async def start(self, command: Command) -> EnvdProcess:
        """Start a program, and wait until it has begun."""
        argv = launched(command, announce=False)
        message: dict[str, Any] = {
            "process": {"cmd": argv[0], "args": argv[1:], "envs": dict(command.env)},
            "stdin": command.stdin != b"",
        }
        if command.pty is not None:
            message["pty"] = _size(*command.pty)
        stack = contextlib.AsyncExitStack()
        process = EnvdProcess(
            self,
            stack=stack,
            events=self._events(message, command, stack),
            fed=command.stdin == b"",
            terminal=command.pty is not None,
        )
        try:
            async with asyncio.timeout(_START_S):
                await process.began()
        except ConnectError as error:
            await process.close()
            raise _start_error(error, command) from error
        except Refused as error:
            await process.close()
            raise self._explain(error) from error
        except BaseException:
            await process.close()
            raise
        return process

    async def _events(
        self, message: Any, command: Command, stack: contextlib.AsyncExitStack
    ) -> AsyncGenerator[dict[str, Any], None]:
        headers = {
            **self._headers,
            **self._as(command.user),
            "Connect-Protocol-Version": "1",
            "Content-Type": "application/connect+json",
            "Keepalive-Ping-Interval": str(_KEEPALIVE_S),
        }
        if command.timeout_s is not None:
            # Should this process end before its time, the server kills the program for it.
            headers["Connect-Timeout-Ms"] = str(int((command.timeout_s + _SERVER_GRACE_S) * 1000))
        answer = await stack.enter_async_context(
            self._http.stream(
                "POST",
                f"{self._address}/process.Process/Start",
                what=f"the start of {command.argv[0]}",
                headers=headers,
                content=envelope(message),
                deadline_s=float("inf"),
            )
        )
        what = f"the output of {command.argv[0]}"
        whole = Envelopes()
        async for piece in self._http.pieces(answer, what=what, silence_s=_SILENCE_S):
            for one in whole.feed(piece):
                yield one.get("event", {})
            if whole.ended:
                return

    # -- files -------------------------------------------------------------------------------------------------------

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return a file's content, and one byte more if there is more than `max_bytes`."""
        with self._file_errors(path):
            reply = await self._http.call(
                "GET",
                f"{self._address}/files?path={quote(path, safe='')}&username={quote(self._user)}",
                what=f"reading {path}",
                headers=self._headers,
                most_bytes=max_bytes,
            )
        return reply.content

    async def write(self, path: str, data: bytes, *, mode: int, user: str) -> None:
        """Write a file; its mode is set by a script where it is not the usual one."""
        with self._file_errors(path):
            await self._http.call(
                "POST",
                f"{self._address}/files?path={quote(path, safe='')}&username={quote(user or self._user)}",
                what=f"writing {path}",
                headers=self._headers,
                files={"file": (path, data)},
            )
        if mode != 0o644:
            ran = await self.run_script('chmod "$2" "$1"', path, f"{mode:o}")
            if ran.code:
                raise SandboxFileError(f"the mode of {path} could not be set: {ran.err!r}")

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        """Return a directory's entries by name."""
        with self._file_errors(path):
            reply = await self.ask("filesystem.Filesystem/ListDir", {"path": path, "depth": 1})
        found = [_info(one) for one in (reply or {}).get("entries", [])]
        return tuple(sorted(found, key=lambda one: one.name))

    async def usage(self) -> Usage:
        """Return what it uses."""
        return await self._files.usage()

    async def run_script(self, script: str, *arguments: str, stdin: bytes = b"") -> Ran:
        """Run a script as root to its end."""
        return await run_script(self, script, *arguments, stdin=stdin)

    @contextlib.contextmanager
    def _file_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except Refused as error:
            if error.status == 507:
                raise SandboxExhausted(f"no room for {path} in the sandbox: {error.words}") from error
            if error.status in (400, 404, 409, 500):
                raise SandboxFileError(f"{path} was refused: {error.words}") from error
            raise self._explain(error) from error


def _size(rows: int, columns: int) -> dict[str, Any]:
    return {"size": {"rows": rows, "cols": columns}}


def _start_error(error: ConnectError, command: Command) -> SandboxError:
    what = f"{command.argv[0]} could not be started: {error.words}"
    if error.kind in ("invalid_argument", "unauthenticated", "not_found") and _NO_USER.search(error.words):
        return SandboxUnsupported(f"{what}. Is there a user {command.user!r}?", capability="users")
    if error.kind == "unavailable" and "not found" in error.words:
        return Gone(f"the sandbox is gone: {error.words}")
    if error.kind == "resource_exhausted" or "cannot allocate" in error.words or "temporarily" in error.words:
        return SandboxExhausted(what)
    return SandboxError(what)


def _info(entry: Mapping[str, Any]) -> FileInfo:
    kind = "link" if entry.get("symlinkTarget") else _KINDS.get(str(entry.get("type", "")), "other")
    modified = entry.get("modifiedTime")
    return FileInfo(
        name=str(entry.get("name", "")),
        kind=kind,
        size_bytes=int(entry.get("size", 0)),
        mode=modes.S_IMODE(int(entry.get("mode", 0))),
        modified_s=_seconds(str(modified)) if modified else 0.0,
    )


def _seconds(words: str) -> float:
    """Return an RFC 3339 time, which may have nine digits of a second, in seconds."""
    found = re.match(r"^(.*?)(\.\d+)?(Z|[+-]\d\d:\d\d)$", words)
    if not found:
        return 0.0
    zone = "+00:00" if found[3] == "Z" else found[3]
    try:
        return datetime.datetime.fromisoformat(found[1] + zone).timestamp() + float(found[2] or 0)
    except ValueError:
        return 0.0
