"""The frames between a sandbox's owner and its agent: a JSON head, and bytes that need no encoding.

    head length (4 bytes) | payload length (4 bytes) | head | payload

Both sides refuse a frame beyond their bound before they read it: the owner does not trust what comes out of a sandbox.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

_LENGTHS = struct.Struct("<II")
CHUNK_BYTES = 256 * 1024
MOST_HEAD_BYTES = 4 * 1024 * 1024
MOST_PAYLOAD_BYTES = 16 * 1024 * 1024


class BadFrame(ValueError):
    """The other side sent what no honest peer sends."""


def encode(head: dict[str, Any], payload: bytes | memoryview = b"") -> bytes:
    """Return one frame."""
    text = json.dumps(head, separators=(",", ":")).encode()
    return b"".join((_LENGTHS.pack(len(text), len(payload)), text, payload))


class Parser:
    """Cuts a stream of bytes into frames.

    Example:
        >>> parser = Parser()
        >>> list(parser.feed(encode({"n": 1}, b"abc")))
        [({'n': 1}, b'abc')]
    """

    def __init__(self, *, most_head_bytes: int = MOST_HEAD_BYTES, most_payload_bytes: int = MOST_PAYLOAD_BYTES) -> None:
        self._buffer = bytearray()
        self._most_head_bytes = most_head_bytes
        self._most_payload_bytes = most_payload_bytes

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Take bytes in and yield the frames that are complete.

        Raises:
            BadFrame: if a length is beyond its bound, or a head is not a JSON object.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTHS.size:
            head_bytes, payload_bytes = _LENGTHS.unpack_from(self._buffer)
            if head_bytes > self._most_head_bytes or payload_bytes > self._most_payload_bytes:
                raise BadFrame(f"a frame announces {head_bytes} + {payload_bytes} bytes")
            end = _LENGTHS.size + head_bytes + payload_bytes
            if len(self._buffer) < end:
                return
            head_end = _LENGTHS.size + head_bytes
            text, payload = bytes(self._buffer[_LENGTHS.size : head_end]), bytes(self._buffer[head_end:end])
            del self._buffer[:end]
            yield _head(text), payload


def _head(text: bytes) -> dict[str, Any]:
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"a frame's head is no JSON: {error}") from error
    if not isinstance(head, dict):
        raise BadFrame(f"a frame's head is a JSON {type(head).__name__}, not an object")
    return head
