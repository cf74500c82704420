"""Ports inside a sandbox that has no network, reached over its agent: each connection is a program that passes it on.

| wait | ends after |
|---|---|
| for the program inside to run | the backend's own deadline |
| for its connection to the port | `_CONNECT_S`; then the caller's connection is cut |
| for a caller that reads nothing | the sandbox's limit on the output of one program; then the connection is cut |

What goes out in one connection counts to `limits.output_bytes`, as any program's output does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import struct
from typing import TYPE_CHECKING

from rollmill.errors import RollmillError
from rollmill.sandboxes.capable import unsupported
from rollmill.sandboxes.protocol import check_port
from rollmill.sandboxes.records import Address, SandboxSpec

if TYPE_CHECKING:
    from rollmill.sandboxes.protocol import Process, Sandbox

_CONNECT_S = 10
_PIECE_BYTES = 64 * 1024
_LOOPBACK = "127.0.0.1"
_log = logging.getLogger(__name__)
# What it cannot connect to ends it at once. Both ways end on their own, as a connection's two directions do.
_RELAY = f"""
import os, select, socket, sys
try:
    way = socket.create_connection(("127.0.0.1", int(sys.argv[1])), {_CONNECT_S})
except OSError:
    sys.exit(111)
way.settimeout(None)
ends = [0, way]
while way in ends:
    for one in select.select(ends, [], [])[0]:
        if one == 0:
            piece = os.read(0, {_PIECE_BYTES})
            if piece:
                way.sendall(piece)
            else:
                ends.remove(0)
                way.shutdown(socket.SHUT_WR)
        else:
            piece = way.recv({_PIECE_BYTES})
            if not piece:
                ends.remove(way)
                break
            while piece:
                piece = piece[os.write(1, piece):]
"""


class Ports:
    """The exposed ports of one sandbox.

    Args:
        sandbox: whose.
        spec: what it was made of.
    """

    def __init__(self, sandbox: Sandbox, *, spec: SandboxSpec) -> None:
        self._sandbox, self._spec = sandbox, spec
        self._servers: dict[int, asyncio.Server] = {}
        self._turn = asyncio.Lock()
        self._connections: set[asyncio.Task[None]] = set()

    async def expose(self, port: int) -> Address:
        """Listen on loopback for a port inside, and return where."""
        check_port(port)
        async with self._turn:
            server = self._servers.get(port)
            if server is None:
                await self._check_python()
                server = await asyncio.start_server(lambda *ends: self._connected(port, *ends), _LOOPBACK, 0)
                self._servers[port] = server
        return Address(host=_LOOPBACK, port=server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Listen no more, and cut what is connected."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        for one in self._connections:
            one.cancel()

    async def _check_python(self) -> None:
        found = await self._sandbox.exec(["python3", "-I", "-S", "-c", ""])
        if found.exit_code != 0:
            raise unsupported(
                f"a port is passed on by python3 inside, and the image has none that runs (exit code "
                f"{found.exit_code}); use an image with python3 on its PATH",
                capability="expose",
            )

    def _connected(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._pass_on(port, reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _pass_on(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whole = False
        try:
            process = await self._sandbox.start_process(
                ["python3", "-I", "-S", "-c", _RELAY, str(port)], output_cap_bytes=self._spec.limits.output_bytes
            )
            whole = await _both_ways(process, reader, writer)
        except (RollmillError, OSError) as error:
            _log.info("a connection to port %d of sandbox %s was cut: %s", port, self._sandbox.id, error)
        finally:
            if whole:
                writer.close()
            else:
                _reset(writer)
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Cut a connection so that its other end sees an error, and takes no part for the whole."""
    at_once = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    writer.transport.abort()


async def _both_ways(process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Pass bytes on until the inside has ended; return whether all of them came."""

    async def inwards() -> None:
        while piece := await reader.read(_PIECE_BYTES):
            await process.write_stdin(piece)
        await process.close_stdin()

    sending = asyncio.ensure_future(inwards())
    try:
        async for stream, data in process.output():
            if stream == "stdout":
                writer.write(data)
                await writer.drain()
        result = await process.wait()
        return result.exit_code == 0 and not result.truncated
    except BaseException:
        with contextlib.suppress(RollmillError):
            await process.signal(signal.SIGKILL)
        raise
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
