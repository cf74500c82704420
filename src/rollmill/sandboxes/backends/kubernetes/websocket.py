"""A WebSocket client for one thing: programs in pods, by the API server's `exec`, subprotocol `v5.channel.k8s.io`.

Each binary message is one byte of channel and data: 0 input, 1 and 2 output, 3 the status at the end, 255 the end of
another channel (version 5 alone, which is why no other is taken). Reference: RFC 6455, and Kubernetes' KEP-4006.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import ssl
import struct
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit

from rollmill.sandboxes.backends.http import CutOff, Refused, Unreachable, words_of

PROTOCOL = "v5.channel.k8s.io"
INPUT, OUTPUT, ERRORS, STATUS, END = 0, 1, 2, 3, 255

_ACCEPT = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_MOST_BYTES = 64 * 1024 * 1024
_LIMIT_BYTES = 512 * 1024


def accept_of(key: str) -> str:
    """Return what a server answers to a key.

    Example:
        >>> accept_of("dGhlIHNhbXBsZSBub25jZQ==")
        's3pPLMBiTxaQ9kYGzzhZRbK+xOo='
    """
    return base64.b64encode(hashlib.sha1((key + _ACCEPT).encode(), usedforsecurity=False).digest()).decode()


def frame(kind: int, data: bytes, *, mask: bytes) -> bytes:
    """Return a whole message as a client sends it.

    Example:
        >>> frame(1, b"Hello", mask=bytes([0x37, 0xfa, 0x21, 0x3d])).hex()
        '818537fa213d7f9f4d5158'
    """
    length = len(data)
    if length < 126:
        head = struct.pack(">BB", 0x80 | kind, 0x80 | length)
    elif length < 65536:
        head = struct.pack(">BBH", 0x80 | kind, 0x80 | 126, length)
    else:
        head = struct.pack(">BBQ", 0x80 | kind, 0x80 | 127, length)
    number = int.from_bytes(data, "big") ^ int.from_bytes((mask * (length // 4 + 1))[:length], "big")
    return head + mask + number.to_bytes(length, "big")


class Channels:
    """A connection with channels.

    Args:
        reader: of the connection.
        writer: of it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(
        cls, url: str, *, headers: Mapping[str, str], trust: ssl.SSLContext | None, product: str, limit_s: float
    ) -> Channels:
        """Open a connection.

        Raises:
            Unreachable: if there is none.
            Refused: if the server refuses.
            CutOff: if it is lost on the way, or the server is too slow.
        """
        parts = urlsplit(url)
        try:
            async with asyncio.timeout(limit_s):
                secure = parts.scheme == "https"
                reader, writer = await asyncio.open_connection(
                    parts.hostname,
                    parts.port or (443 if secure else 80),
                    ssl=trust if secure else None,
                    limit=_LIMIT_BYTES,
                )
        except (OSError, TimeoutError) as error:
            raise Unreachable(f"{product} cannot be reached at {parts.netloc}: {error!r}") from error
        try:
            async with asyncio.timeout(limit_s):
                await _shake_hands(reader, writer, parts=parts, headers=headers, product=product)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            writer.close()
            raise CutOff(f"the connection to {product} was cut off: {error!r}") from error
        except BaseException:
            writer.close()
            raise
        return cls(reader, writer)

    async def send(self, channel: int, data: bytes) -> None:
        """Send a message.

        Raises:
            CutOff: if the connection is lost.
        """
        await self._send(_BINARY, bytes([channel]) + data)

    async def _send(self, kind: int, data: bytes) -> None:
        try:
            self._writer.write(frame(kind, data, mask=os.urandom(4)))
            await self._writer.drain()
        except OSError as error:
            raise CutOff(f"a program takes no more input: {error!r}") from error

    async def receive(self) -> tuple[int, bytes] | None:
        """Return the next message's channel and data, `None` at the end.

        Raises:
            CutOff: if the connection is lost.
        """
        whole = bytearray()
        try:
            while True:
                last, kind, data = await self._frame()
                if kind == _CLOSE:
                    return None
                if kind == _PING:
                    await self._send(_PONG, data)
                elif kind in (_CONTINUATION, _TEXT, _BINARY):
                    whole += data
                    if len(whole) > _MOST_BYTES:
                        raise CutOff(f"a message of more than {_MOST_BYTES} bytes")
                    if last and whole:
                        return whole[0], bytes(whole[1:])
        except (OSError, asyncio.IncompleteReadError) as error:
            raise CutOff(f"the connection to a program was lost: {error!r}") from error

    async def _frame(self) -> tuple[bool, int, bytes]:
        first, second = await self._reader.readexactly(2)
        length = second & 0x7F
        if length == 126:
            (length,) = struct.unpack(">H", await self._reader.readexactly(2))
        elif length == 127:
            (length,) = struct.unpack(">Q", await self._reader.readexactly(8))
        if length > _MOST_BYTES or second & 0x80:
            raise CutOff(f"a frame that no server sends: {length} bytes, masked: {bool(second & 0x80)}")
        return bool(first & 0x80), first & 0x0F, await self._reader.readexactly(length)

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        with contextlib.suppress(OSError):  # it was lost before
            await self._writer.wait_closed()


async def _shake_hands(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    parts: SplitResult,
    headers: Mapping[str, str],
    product: str,
) -> None:
    key = base64.b64encode(os.urandom(16)).decode()
    sent = {
        **headers,
        "Host": parts.netloc,
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": key,
        "Sec-WebSocket-Protocol": PROTOCOL,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    writer.write(f"GET {parts.path}?{parts.query} HTTP/1.1\r\n{lines}\r\n".encode())
    await writer.drain()
    first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    words = first.split(" ")
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
    if status != 101:
        length = found.get("content-length", "0")
        content = await reader.readexactly(int(length)) if length.isdigit() and int(length) < _LIMIT_BYTES else b""
        said = words_of(content)
        raise Refused(f"{product} answered {status} to the start of a program: {said}", status=status, words=said)
    if found.get("sec-websocket-accept") != accept_of(key) or found.get("sec-websocket-protocol") != PROTOCOL:
        other = found.get("sec-websocket-protocol")
        raise Refused(
            f"{product} speaks {other!r} and not {PROTOCOL}; Kubernetes 1.30 or later does",
            status=status,
            words="",
        )
