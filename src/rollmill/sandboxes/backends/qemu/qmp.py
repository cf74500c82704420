"""QEMU's control protocol (QMP) over a connected socket: one command at a time, each with a deadline."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any

import msgspec

from rollmill.errors import SandboxError

_MOST_LINE_BYTES = 1024 * 1024
_READ_BYTES = 64 * 1024


class QmpError(SandboxError):
    """QEMU refused a command, or is gone."""


class Qmp:
    """One connection.

    Args:
        connection: to the control socket of a machine.
        answer_s: how long an answer may take.
    """

    def __init__(self, connection: socket.socket, *, answer_s: float) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._answer_s = answer_s
        self._buffer = bytearray()
        self._turn = asyncio.Lock()
        self._greeted = False
        self._closed = False

    async def __call__(self, command: str, *, descriptor: int = -1, **arguments: Any) -> Any:
        """Run a command and return what it gives.

        Args:
            command: its name.
            descriptor: given along, for commands that take one.
            arguments: as QEMU names them, with `_` for `-`.

        Raises:
            QmpError: if it is refused, not answered in time, or the machine has ended.
        """
        try:
            async with asyncio.timeout(self._answer_s), self._turn:
                if self._closed:
                    raise ConnectionError("its machine has ended")
                if not self._greeted:
                    await self._receive()
                    await self._run("qmp_capabilities", {}, -1)
                    self._greeted = True
                named = {name.replace("_", "-"): value for name, value in arguments.items()}
                return await self._run(command, named, descriptor)
        except TimeoutError:
            raise QmpError(f"QEMU did not answer {command!r} within {self._answer_s:g} s") from None
        except OSError as error:
            raise QmpError(f"QEMU has ended while it was asked to {command!r}: {error}") from error
        finally:
            if self._closed and not self._turn.locked():
                self._connection.close()

    async def _run(self, command: str, arguments: dict[str, Any], descriptor: int) -> Any:
        text = json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n"
        if descriptor >= 0:
            # A descriptor goes with the first byte; the command is short and the line empty, so that all of it fits.
            sent = socket.send_fds(self._connection, [text], [descriptor])
            text = text[sent:]
        if text:
            await asyncio.get_running_loop().sock_sendall(self._connection, text)
        while True:
            answer = await self._receive()
            if "error" in answer:
                raise QmpError(f"QEMU refused {command!r}: {answer['error'].get('desc', answer['error'])}")
            if "return" in answer:
                return answer["return"]

    async def _receive(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        while (end := self._buffer.find(b"\n")) < 0:
            data = await loop.sock_recv(self._connection, _READ_BYTES)
            if not data:
                raise ConnectionError("it closed its control socket")
            self._buffer += data
            if len(self._buffer) > _MOST_LINE_BYTES:
                raise ConnectionError(f"it said more than {_MOST_LINE_BYTES} bytes in one line")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            return msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise QmpError(f"QEMU talks no QMP: {error}") from error

    def close(self) -> None:
        """Close the connection; who waits for an answer hears that none will come."""
        self._closed = True
        with suppress(OSError):  # the other side may be gone already
            self._connection.shutdown(socket.SHUT_RDWR)
        if not self._turn.locked():
            self._connection.close()
