"""A connection to the Engine API that became a program's input and output, and the frames in it.

A frame is one byte of stream number, three of nothing, four of length, then bytes. Reference: the Engine API's
`POST /containers/{id}/attach`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket as sockets
import struct

from rollmill.sandboxes.backends.http import CutOff, Refused, Unreachable, words_of

_HEAD = struct.Struct(">BxxxI")
_STREAMS = {1: "stdout", 2: "stderr"}
_READ_BYTES = 256 * 1024
_MOST_FRAME = 64 * 1024 * 1024
_CONNECT_S = 10.0
_AGAIN_S = 0.01


class Frames:
    """Takes the frames of a stream apart.

    Example:
        >>> frames = Frames()
        >>> frames.feed(b"\\x01\\0\\0\\0\\0\\0\\0\\x02o"), frames.feed(b"k\\x02\\0\\0\\0\\0\\0\\0\\x01e")
        ([], [('stdout', b'ok'), ('stderr', b'e')])
    """

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> list[tuple[str, bytes]]:
        """Return the pieces of output that are whole now.

        Raises:
            CutOff: if it is no such stream.
        """
        self._rest += piece
        found = []
        while len(self._rest) >= _HEAD.size:
            number, length = _HEAD.unpack_from(self._rest)
            if number not in _STREAMS or length > _MOST_FRAME:
                raise CutOff(f"the daemon sent a frame of stream {number} with {length} bytes, which is none")
            if len(self._rest) < _HEAD.size + length:
                break
            found.append((_STREAMS[number], bytes(self._rest[_HEAD.size : _HEAD.size + length])))
            del self._rest[: _HEAD.size + length]
        return found


class Hijacked:
    """A connection of its own for one program."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = Frames()

    @classmethod
    async def open(cls, socket: str, path: str, body: object, *, product: str) -> Hijacked:
        """Send a request whose answer is a stream in both directions.

        Raises:
            Unreachable: if nobody listens.
            Refused: if the daemon refuses.
        """
        try:
            connected = await _connect(socket)
            reader, writer = await asyncio.open_unix_connection(sock=connected, limit=2 * _READ_BYTES)
        except (OSError, TimeoutError) as error:
            raise Unreachable(f"{product} does not listen on {socket}, or takes nobody in: {error!r}") from error
        try:
            data = json.dumps(body).encode()
            head = (
                f"POST {path} HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(data)}\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
            )
            writer.write(head.encode() + data)
            await writer.drain()
            await _check(reader, product)
        except OSError as error:
            writer.close()
            raise CutOff(f"the connection to {product} was lost: {error!r}") from error
        except BaseException:
            writer.close()
            raise
        return cls(reader, writer)

    async def read(self) -> list[tuple[str, bytes]] | None:
        """Return the next pieces of output, `None` at the end.

        Raises:
            CutOff: if the connection is lost.
        """
        try:
            piece = await self._reader.read(_READ_BYTES)
        except OSError as error:
            raise CutOff(f"the connection to a program was lost: {error!r}") from error
        return self._frames.feed(piece) if piece else None

    async def write(self, data: bytes) -> None:
        """Send input.

        Raises:
            CutOff: if the program or the connection has ended.
        """
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise CutOff(f"a program takes no more input: {error!r}") from error

    def end_input(self) -> None:
        """End the input."""
        if not self._writer.is_closing():
            self._writer.write_eof()

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        with contextlib.suppress(OSError):  # it was lost before
            await self._writer.wait_closed()


async def _connect(path: str) -> sockets.socket:
    """Return a connected socket.

    A Unix socket whose queue is full refuses at once and says nothing when there is room; asyncio would take that for a
    connection on its way, and lose the first words.
    """
    connected = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    connected.setblocking(False)
    try:
        async with asyncio.timeout(_CONNECT_S):
            while True:
                try:
                    connected.connect(path)
                    return connected
                except BlockingIOError:
                    await asyncio.sleep(_AGAIN_S)
    except BaseException:
        connected.close()
        raise


async def _check(reader: asyncio.StreamReader, product: str) -> None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise CutOff(f"{product} closed the connection before it answered") from error
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    if status in (101, 200):
        return
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = headers.get("content-length", "0")
    content = await reader.readexactly(int(length)) if length.isdigit() and int(length) < _READ_BYTES else b""
    said = words_of(content)
    raise Refused(f"{product} answered {status} to the start of a program: {said}", status=status, words=said)
