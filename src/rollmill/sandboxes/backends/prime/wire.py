"""Protocol-buffer messages of Prime's command sessions, written and read by hand: six messages, no generated code.

Field numbers as in the SDK's `command_session.proto`. Reference: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

from rollmill.errors import SandboxError

_VARINT, _LENGTH = 0, 2
_HEAD = struct.Struct(">BI")
_MOST_BYTES = 64 * 1024 * 1024


def varint(value: int) -> bytes:
    """Return a number in groups of seven bits.

    Example:
        >>> varint(1), varint(300)
        (b'\\x01', b'\\xac\\x02')
    """
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def field(number: int, data: bytes) -> bytes:
    """Return a field of bytes, text or a message."""
    return varint(number << 3 | _LENGTH) + varint(len(data)) + data


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message: number, and a number or bytes.

    Example:
        >>> list(fields(field(1, b"a") + b"\\x10\\x05"))
        [(1, b'a'), (2, 5)]
    """
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield key >> 3, value
        elif kind == _LENGTH:
            length, at = _read_varint(message, at)
            if at + length > len(message):
                raise SandboxError("a message of a command session ends before its time")
            yield key >> 3, message[at : at + length]
            at += length
        else:
            raise SandboxError(f"a message of a command session has a field of kind {kind}, which none has")


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise SandboxError("a number in a message of a command session is cut off")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def start_request(argv: Sequence[str], *, environment: Mapping[str, str], user: str) -> bytes:
    """Return the request that starts a program, without input, in a stream's envelope."""
    command = field(1, argv[0].encode())
    command += b"".join(field(2, one.encode()) for one in argv[1:])
    for name, value in environment.items():
        command += field(3, field(1, name.encode()) + field(2, value.encode()))
    command += field(4, b"/")
    if user:
        command += field(5, user.encode())
    message = field(1, command)
    return _HEAD.pack(0, len(message)) + message


class Events:
    """What a program did, from the pieces of its stream."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.exit_code: int | None = None
        self.last: bytes | None = None

    def feed(self, piece: bytes) -> None:
        """Take a piece; `last` is the body of the last message once it has come."""
        self._rest += piece
        while len(self._rest) >= _HEAD.size and self.last is None:
            flags, length = _HEAD.unpack_from(self._rest)
            if flags & 1 or length > _MOST_BYTES:
                raise SandboxError(f"a stream that is not understood: flags {flags}, a message of {length} bytes")
            if len(self._rest) < _HEAD.size + length:
                return
            data = bytes(self._rest[_HEAD.size : _HEAD.size + length])
            del self._rest[: _HEAD.size + length]
            if flags & 2:
                self.last = data
            else:
                self._take(data)

    def _take(self, response: bytes) -> None:
        for event in _messages(response, 1):
            for data in _messages(event, 2):
                self.stdout += b"".join(_messages(data, 1))
                self.stderr += b"".join(_messages(data, 2))
            for end in _messages(event, 3):
                code = next((value for number, value in fields(end) if number == 1 and isinstance(value, int)), 0)
                self.exit_code = (code >> 1) ^ -(code & 1)


def _messages(message: bytes, wanted: int) -> list[bytes]:
    return [value for number, value in fields(message) if number == wanted and isinstance(value, bytes)]
