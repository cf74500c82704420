"""The Connect protocol with JSON, as far as a client of envd needs it: unary calls, and streams of a server.

A message of a stream is one byte of flags, four of length, then JSON; the flag 2 marks the last one, which carries an
error if there was one. Reference: https://connectrpc.com/docs/protocol.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from rollmill.errors import SandboxError

_HEAD = struct.Struct(">BI")
_COMPRESSED, _LAST = 1, 2
_MOST_BYTES = 64 * 1024 * 1024


class ConnectError(SandboxError):
    """A call was refused by the Connect protocol.

    Attributes:
        kind: such as `not_found`.
        words: what it said.
    """

    code = "sandbox_connect"

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(f"{kind}: {words}")
        self.kind = kind
        self.words = words


def envelope(message: Any) -> bytes:
    """Return a message as a stream carries it.

    Example:
        >>> envelope({})
        b'\\x00\\x00\\x00\\x00\\x02{}'
    """
    data = json.dumps(message, separators=(",", ":")).encode()
    return _HEAD.pack(0, len(data)) + data


class Envelopes:
    """Puts the messages of a stream together from pieces.

    Example:
        >>> pieces = Envelopes()
        >>> pieces.feed(b"\\x00\\x00\\x00\\x00\\x02{"), pieces.feed(b"}\\x02\\x00\\x00\\x00\\x02{}"), pieces.ended
        ([], [{}], True)
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self.ended = False

    def feed(self, piece: bytes) -> list[Any]:
        """Return the messages that are whole now.

        Raises:
            ConnectError: if the stream ended with one.
            SandboxError: if it is no such stream.
        """
        self._rest += piece
        found = []
        while len(self._rest) >= _HEAD.size and not self.ended:
            flags, length = _HEAD.unpack_from(self._rest)
            if flags & _COMPRESSED or length > _MOST_BYTES:
                raise SandboxError(f"a stream that is not understood: flags {flags}, a message of {length} bytes")
            if len(self._rest) < _HEAD.size + length:
                break
            data = bytes(self._rest[_HEAD.size : _HEAD.size + length])
            del self._rest[: _HEAD.size + length]
            message = parse_json(data)
            if flags & _LAST:
                self.ended = True
                raise_error(message)
            else:
                found.append(message)
        return found


def parse_json(data: bytes) -> Any:
    """Return the JSON of a message; none is an empty one."""
    try:
        return json.loads(data or b"{}")
    except ValueError as error:
        raise SandboxError(f"a message of a stream is no JSON: {data[:100]!r}") from error


def raise_error(message: Any) -> None:
    """Raise the error that a last message, or the body of a refused unary call, carries; nothing if there is none."""
    error = message.get("error", message if "code" in message else None) if isinstance(message, dict) else None
    if isinstance(error, dict):
        raise ConnectError(str(error.get("code", "unknown")), str(error.get("message", "")))
