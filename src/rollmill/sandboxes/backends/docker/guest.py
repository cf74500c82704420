"""The inside of a container: programs by the Engine API's `exec`, files by scripts.

The API's own calls for files see no file system that is mounted in memory, so they are not used.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rollmill.errors import SandboxError, SandboxExhausted, SandboxUnsupported
from rollmill.sandboxes.backends.docker.hijack import Hijacked
from rollmill.sandboxes.backends.hosted.driver import Command, Exit, Gone, Lost, Output
from rollmill.sandboxes.backends.hosted.shell import announced, launched
from rollmill.sandboxes.backends.hosted.streams import ShellGuest, ShellProcess, begun
from rollmill.sandboxes.backends.http import CutOff, Refused, VendorHttp
from rollmill.sandboxes.records import Usage

_LOOK_S = 1.0
_LAST_WORDS_S = 0.3
_END_LOOKS = 200
_END_LOOK_S = 0.02
_NOT_RUNNING = ("is not running", "is paused", "no such container", "container state improper")
_DISKS = """
s=
for d; do
  n=$(stat -c %d "$d") || exit 1
  case " $s " in *" $n "*) continue ;; esac
  s="$s $n"
  stat -f -c "%S %b %f %c %d" "$d" || exit 1
done
"""


class ExecProcess(ShellProcess):
    """A program in a container."""

    def __init__(self, guest: ContainerGuest, exec_id: str, connection: Hijacked) -> None:
        super().__init__(guest)
        self._http = guest.http
        self._exec_id = exec_id
        self._connection = connection
        self._early: list[tuple[str, bytes]] = []

    async def began(self) -> None:
        """Wait for the first line, which holds its process id.

        Raises:
            SandboxError: if it ended without: there is no shell in the image, or no room for a process.
        """
        line, other = bytearray(), bytearray()
        while b"\n" not in line:
            pieces = await self._connection.read()
            if pieces is None:
                said = bytes(line + other)[:500].decode(errors="replace").strip()
                raise _not_started(said, code=(await self.end_of()) or 0)
            for stream, data in pieces:
                if stream == "stdout":
                    line += data
                else:
                    other += data
                    self._early.append((stream, data))
        self.pid, rest = announced(bytes(line))
        if rest:
            self._early.insert(0, ("stdout", rest))

    async def events(self) -> AsyncIterator[Output | Exit]:
        """Yield output and the exit. A daemon that keeps the output open keeps nobody waiting."""
        for stream, data in self._early:
            yield Output(stream=stream, data=data)
        try:
            reading = asyncio.ensure_future(self._connection.read())
            try:
                over = False
                while True:
                    await asyncio.wait([reading], timeout=_LAST_WORDS_S if over else _LOOK_S)
                    if not reading.done():
                        if over:
                            break
                        over = await self.end_of() is not None
                        continue
                    try:
                        pieces = reading.result()
                    except CutOff:
                        # A socket that is closed with input unread is reset, after all that was sent there has come.
                        if await self.end_of() is None:
                            raise
                        break
                    if pieces is None:
                        break
                    for stream, data in pieces:
                        yield Output(stream=stream, data=data)
                    reading = asyncio.ensure_future(self._connection.read())
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            yield Exit(code=await self._exit_code())
        except CutOff as error:
            raise Lost(f"the connection to a program was lost, and it may still run: {error}") from error

    async def end_of(self) -> int | None:
        """Return its exit code, `None` while it runs."""
        try:
            reply = await self._http.call("GET", f"/exec/{self._exec_id}/json", what="how a program goes on")
        except Refused as error:
            if error.status == 404:
                raise Gone(f"the daemon knows this program no more, its container is gone: {error.words}") from error
            raise
        shown = reply.json()
        return None if shown.get("Running") else int(shown.get("ExitCode") or 0)

    async def _exit_code(self) -> int:
        # The output ends a moment before the daemon has noted the end, or long before, if the program closed it.
        looks = 0
        while (code := await self.end_of()) is None:
            await asyncio.sleep(_END_LOOK_S if looks < _END_LOOKS else _LOOK_S)
            looks += 1
        return code

    async def send(self, data: bytes) -> None:
        """Give it input."""
        await self._connection.write(data)

    async def end_input(self) -> None:
        """End its input."""
        self._connection.end_input()

    async def close(self) -> None:
        """Close its connection; the program goes on."""
        await self._connection.close()


class ContainerGuest(ShellGuest):
    """A container's inside.

    Args:
        http: the Engine API.
        socket: its path, for connections that become streams.
        container: its id.
        disks: file systems of its own, whose use is counted.
    """

    def __init__(self, http: VendorHttp, *, socket: str, container: str, disks: tuple[str, ...]) -> None:
        super().__init__()
        self.http = http
        self._socket = socket
        self._container = container
        self._disks = disks

    async def start(self, command: Command) -> ExecProcess:
        """Start a program, and wait until it has begun."""
        body = {
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Tty": False,
            "Cmd": list(launched(command, announce=True)),
            "Env": [f"{name}={value}" for name, value in command.env.items()],
            "User": command.user or "0",
            "WorkingDir": "/",
        }
        try:
            reply = await self.http.call(
                "POST", f"/containers/{self._container}/exec", what=f"the start of {command.argv[0]}", body=body
            )
            exec_id = str(reply.json()["Id"])
            connection = await Hijacked.open(
                self._socket, f"/exec/{exec_id}/start", {"Detach": False, "Tty": False}, product=self.http.product
            )
        except Refused as error:
            raise explain_refusal(error, command) from error
        return await begun(ExecProcess(self, exec_id, connection))

    async def usage(self) -> Usage:
        """Return what the daemon counts, and what its own file systems hold."""
        path = f"/containers/{self._container}/stats"
        reply = await self.http.call(
            "GET", path, what="what a container uses", parameters={"stream": "false", "one-shot": "true"}
        )
        used, made = await self._disk()
        return usage_of(reply.json() or {}, disk_bytes=used, inodes=made)

    async def _disk(self) -> tuple[int | None, int | None]:
        if not self._disks:
            return None, None
        ran = await self.run_script(_DISKS, *self._disks)
        if ran.code:
            raise SandboxError(f"file systems of the container cannot be read: {ran.err[:300]!r}")
        rows = [[int(one) for one in line.split()] for line in ran.out.splitlines()]
        return sum(row[0] * (row[1] - row[2]) for row in rows), sum(row[3] - row[4] for row in rows)


def usage_of(stats: Mapping[str, Any], *, disk_bytes: int | None, inodes: int | None) -> Usage:
    """Return the daemon's counts as a record.

    Example:
        >>> usage_of({"pids_stats": {"current": 3}, "memory_stats": {"usage": 4096}}, disk_bytes=None, inodes=None)
        ... # doctest: +ELLIPSIS
        Usage(disk_bytes=None, inodes=None, processes=3, memory_bytes=4096, ...)
    """
    memory = stats.get("memory_stats") or {}
    processor = (stats.get("cpu_stats") or {}).get("cpu_usage") or {}
    nanoseconds = processor.get("total_usage")
    return Usage(
        disk_bytes=disk_bytes,
        inodes=inodes,
        processes=(stats.get("pids_stats") or {}).get("current"),
        memory_bytes=memory.get("usage"),
        peak_memory_bytes=memory.get("max_usage"),
        cpu_s=None if nanoseconds is None else nanoseconds / 1e9,
    )


def explain_refusal(error: Refused, command: Command) -> SandboxError:
    """Return what it means that a program was not started."""
    words = error.words.lower()
    if error.status == 404 or (error.status in (409, 500) and any(one in words for one in _NOT_RUNNING)):
        return Gone(f"its container does not run: {error.words}")
    if "unable to find user" in words or "no matching entries in passwd" in words:
        return SandboxUnsupported(f"there is no user {command.user!r} in the image", capability="users")
    return _not_started(error.words, code=0)


def _not_started(said: str, *, code: int) -> SandboxError:
    words = said.lower()
    if "unable to find user" in words or "no matching entries in passwd" in words:
        return SandboxUnsupported(f"a program was not started: {said}", capability="users")
    if "temporarily unavailable" in words or "cannot fork" in words or "cannot allocate" in words:
        return SandboxExhausted(f"no room for another process: {said}")
    return SandboxError(f"a program was not started (exit code {code}): {said or 'no words'}. Has the image /bin/sh?")
