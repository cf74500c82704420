"""The Connect protocol over HTTP/1.1: which encoding a call has, its envelopes, its errors. Pure.

Unary calls carry one bare message; streams carry envelopes of one byte of flags and four of length, the last of which
holds JSON with the error, if there is one. A stream's status is always 200.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from rollmill.errors import RollmillError
from rollmill.sandboxes.service import protobuf
from rollmill.sandboxes.service.wire import Message

M = TypeVar("M", bound=Message)

MOST_MESSAGE_BYTES = 16 * 1024**2
_END, _COMPRESSED = 2, 1
_HEAD_BYTES = 5
# Ten digits at most, says the protocol; so many milliseconds are 115 days.
_MOST_TIMEOUT_DIGITS = 10

STATUSES = {
    "canceled": 499,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "unauthenticated": 401,
}
"""HTTP status of each code that is used here, for unary calls."""


class RpcProblem(RollmillError):
    """A call that is answered with an error of the protocol.

    Attributes:
        rpc_code: the protocol's word.
    """

    code = "rpc"

    def __init__(self, rpc_code: str, message: str) -> None:
        super().__init__(message)
        self.rpc_code = rpc_code

    @property
    def status(self) -> int:
        """HTTP status of a unary answer."""
        return STATUSES[self.rpc_code]

    def document(self) -> dict[str, str]:
        """Return the protocol's error."""
        return {"code": self.rpc_code, "message": str(self)}


class Codec(msgspec.Struct, frozen=True):
    """One of the two encodings of a call.

    Attributes:
        name: `json` or `proto`.
        stream: whether messages come in envelopes.
    """

    name: str
    stream: bool

    @property
    def content_type(self) -> str:
        """Return the type of the answer."""
        return f"application/connect+{self.name}" if self.stream else f"application/{self.name}"

    def encode(self, message: Message) -> bytes:
        """Return a message's bytes."""
        return msgspec.json.encode(message) if self.name == "json" else protobuf.encode(message)

    def decode(self, data: bytes, kind: type[M]) -> M:
        """Return the message in some bytes.

        Raises:
            RpcProblem: `invalid_argument` if it is none.
        """
        try:
            if self.name == "json":
                # Numbers may come as text: in JSON those of 64 bits do.
                return msgspec.json.decode(data or b"{}", type=kind, strict=False)
            return protobuf.decode(data, kind)
        except (msgspec.MsgspecError, protobuf.BadProtobuf) as error:
            raise RpcProblem("invalid_argument", f"the body is no {kind.__name__}: {error}") from error


def codec_of(headers: Mapping[str, str], *, stream: bool) -> Codec | None:
    """Return how a call is encoded; `None` if in no way that is known, which is answered with 415.

    Raises:
        RpcProblem: `unimplemented` for compressed bodies.

    Example:
        >>> codec_of({"content-type": "application/connect+json; charset=utf-8"}, stream=True)
        Codec(name='json', stream=True)
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    prefix = "application/connect+" if stream else "application/"
    name = kind.removeprefix(prefix)
    if name == kind or name not in ("json", "proto"):
        return None
    compression = headers.get("connect-content-encoding" if stream else "content-encoding", "identity")
    if compression not in ("", "identity"):
        raise RpcProblem("unimplemented", f"bodies compressed by {compression!r} are not read; send them as they are")
    return Codec(name, stream)


def timeout_of(headers: Mapping[str, str]) -> float | None:
    """Return the caller's deadline in seconds, `None` for none.

    Raises:
        RpcProblem: `invalid_argument` if it is no number of milliseconds.

    Example:
        >>> timeout_of({"connect-timeout-ms": "1500"})
        1.5
    """
    text = headers.get("connect-timeout-ms", "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > _MOST_TIMEOUT_DIGITS:
        raise RpcProblem("invalid_argument", f"connect-timeout-ms is {text!r}; it is a number of milliseconds")
    return max(1, int(text)) / 1000


def envelope(data: bytes, *, flags: int = 0) -> bytes:
    """Return a message in its envelope.

    Example:
        >>> envelope(b"{}").hex()
        '00000000027b7d'
    """
    return flags.to_bytes(1, "big") + len(data).to_bytes(4, "big") + data


def end_of_stream(problem: RpcProblem | None = None) -> bytes:
    """Return the last envelope of a stream."""
    document: dict[str, Any] = {} if problem is None else {"error": problem.document()}
    return envelope(json.dumps(document).encode(), flags=_END)


class Envelopes:
    """Takes a stream of envelopes apart."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that are whole now.

        Raises:
            RpcProblem: if one is compressed, or larger than 16 MiB.
        """
        self._buffer += data
        while len(self._buffer) >= _HEAD_BYTES:
            flags, length = self._buffer[0], int.from_bytes(self._buffer[1:_HEAD_BYTES], "big")
            if flags & _COMPRESSED:
                raise RpcProblem("unimplemented", "a message is compressed; send it as it is")
            if length > MOST_MESSAGE_BYTES:
                raise RpcProblem("resource_exhausted", f"a message has {length} bytes, {MOST_MESSAGE_BYTES} at most")
            if len(self._buffer) < _HEAD_BYTES + length:
                return
            message = bytes(self._buffer[_HEAD_BYTES : _HEAD_BYTES + length])
            del self._buffer[: _HEAD_BYTES + length]
            if not flags & _END:
                yield message

    def check_empty(self) -> None:
        """Refuse a stream that ended within a message.

        Raises:
            RpcProblem: if it did.
        """
        if self._buffer:
            raise RpcProblem("invalid_argument", f"the stream ended within a message, after {len(self._buffer)} bytes")
