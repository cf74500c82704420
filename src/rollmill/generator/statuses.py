"""Which status an error has on the wire (gRPC and HTTP), and which error a status stands for. Pure; knows neither.

The class travels beside the status as our own code, which is finer: a client that is ours gets the very class back.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rollmill.errors import (
    DataError,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    LengthMismatch,
    ModelError,
    NotServing,
    Overloaded,
    RequestAborted,
    RequestIdInUse,
    RollmillError,
    SlowReader,
    Unauthenticated,
    WeightError,
    WeightMismatch,
)

CODE_KEY = "rollmill-code"
"""Trailing metadata: the `code` of our error class, finer than the status."""
PUBLISHED_KEY, SERVED_KEY = "rollmill-published", "rollmill-served"
RETRY_AFTER_KEY = "retry-after"
"""Trailing metadata and HTTP header: seconds until another try is worth it."""


class WireStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What an error is called on the wire.

    Attributes:
        kind: the error and its subclasses that have no row of their own.
        grpc: name of the gRPC status.
        http: HTTP status.
        when: what brings it about, for the reference.
    """

    kind: type[RollmillError]
    grpc: str
    http: int
    when: str


STATUSES: tuple[WireStatus, ...] = (  # the first row that fits
    WireStatus(
        kind=Unauthenticated, grpc="UNAUTHENTICATED", http=401, when="no token, or another one than the replica's"
    ),
    WireStatus(kind=ModelError, grpc="NOT_FOUND", http=404, when="a model or an adapter that is not served here"),
    WireStatus(
        kind=DataError,
        grpc="INVALID_ARGUMENT",
        http=400,
        when="empty prompt; token ids outside the vocabulary, also those that fit no int32; a prompt that leaves no "
        "room in the context; a temperature that is negative, infinite or not a number; `top_p`, `top_k`, "
        "`max_new_tokens`, the number of siblings or the deadline out of range, a deadline in the past included; a "
        "request id that is empty or too long",
    ),
    WireStatus(
        kind=RequestIdInUse, grpc="ALREADY_EXISTS", http=409, when="another request with this id lives; it goes on"
    ),
    WireStatus(
        kind=Overloaded,
        grpc="RESOURCE_EXHAUSTED",
        http=429,
        when="more requests than `generator.limits.max_requests` at once; `retry-after` says when to ask again",
    ),
    WireStatus(
        kind=SlowReader,
        grpc="RESOURCE_EXHAUSTED",
        http=408,
        when="the caller of a stream fell behind by `generator.limits.stream_events`, or took none for "
        "`generator.limits.stream_stall_s`",
    ),
    WireStatus(
        kind=NotServing, grpc="UNAVAILABLE", http=503, when="the replica is starting, dirty or draining: ask another"
    ),
    WireStatus(
        kind=EngineDead,
        grpc="UNAVAILABLE",
        http=503,
        when="the engine died, or the replica is out of reach; a connection that was cut within a stream, or went "
        "silent",
    ),
    WireStatus(
        kind=RequestAborted,
        grpc="CANCELLED",
        http=499,
        when="the request was cancelled before its end: by its caller, or because the caller's connection was cut or "
        "went silent",
    ),
    WireStatus(
        kind=EngineError,
        grpc="FAILED_PRECONDITION",
        http=409,
        when="the served weights are older than the request asks for; a capability that the engine lacks",
    ),
    WireStatus(
        kind=DeadlineExceeded, grpc="DEADLINE_EXCEEDED", http=504, when="no answer within the caller's deadline"
    ),
    WireStatus(
        kind=WeightMismatch, grpc="DATA_LOSS", http=500, when="digest or canary of a load disagree; see the message"
    ),
    WireStatus(
        kind=WeightError,
        grpc="ABORTED",
        http=409,
        when="weights of an unknown or retired version, or of another shape or dtype; a full disk; the old ones serve "
        "on",
    ),
    WireStatus(kind=LengthMismatch, grpc="INTERNAL", http=500, when="parallel arrays of a record disagree"),
    WireStatus(kind=RollmillError, grpc="UNKNOWN", http=500, when="anything else"),
)

_ROUND_TRIP: dict[str, type[RollmillError]] = {
    kind.code: kind
    for kind in (
        DataError,
        DeadlineExceeded,
        EngineDead,
        EngineError,
        ModelError,
        NotServing,
        RequestAborted,
        RequestIdInUse,
        SlowReader,
        Unauthenticated,
        WeightError,
    )
}
_CLASS_OF_STATUS: dict[str, type[RollmillError]] = {
    "UNAVAILABLE": EngineDead,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "INVALID_ARGUMENT": DataError,
    "CANCELLED": RequestAborted,
    "UNAUTHENTICATED": Unauthenticated,
}
_TOO_LARGE = "larger than max"
"""In the words of gRPC itself, which refuses a message before we see it."""
_ADVICE: dict[type[RollmillError], str] = {
    DataError: "Send less at once, or raise generator.limits.max_body_bytes",
    EngineDead: "The generator is not reachable: look at its log for the first error, and restart it",
    DeadlineExceeded: "The generator was too slow or is stuck: raise the deadline or look at its status",
    Unauthenticated: "Give the token that the generator was started with",
    EngineError: "Look at the generator's log for the first error",
}


def wire_status(error: RollmillError | type[RollmillError]) -> WireStatus:
    """Return the row of an error.

    Example:
        >>> wire_status(NotServing).grpc, wire_status(NotServing).http
        ('UNAVAILABLE', 503)
    """
    kind = error if isinstance(error, type) else type(error)
    return next(status for status in STATUSES if issubclass(kind, status.kind))


def http_status(error: RollmillError) -> int:
    """Return the HTTP status of an error."""
    return wire_status(error).http


def error_to_status(error: RollmillError) -> tuple[str, str, dict[str, str]]:
    """Return (gRPC status name, details, trailing metadata) of an error."""
    metadata = {CODE_KEY: error.code}
    if isinstance(error, WeightMismatch):
        metadata |= {PUBLISHED_KEY: error.published, SERVED_KEY: error.served}
    if isinstance(error, Overloaded):
        metadata[RETRY_AFTER_KEY] = f"{error.retry_after_s:.3f}"
    return wire_status(error).grpc, str(error), metadata


def error_from_status(name: str, details: str, *, metadata: Mapping[str, str], where: str) -> RollmillError:
    """Return the error that a status stands for; the class by our own code, else by the status.

    Args:
        name: status name, for example `UNAVAILABLE`.
        details: message of the other side.
        metadata: trailing metadata.
        where: what was asked of whom, for errors that the transport raised itself.
    """
    code = metadata.get(CODE_KEY)
    if code == WeightMismatch.code:
        return WeightMismatch(details, published=metadata.get(PUBLISHED_KEY, ""), served=metadata.get(SERVED_KEY, ""))
    if code == Overloaded.code:
        return Overloaded(details, retry_after_s=_seconds(metadata.get(RETRY_AFTER_KEY)))
    if code in _ROUND_TRIP:
        return _ROUND_TRIP[code](details)
    kind = DataError if _TOO_LARGE in details else _CLASS_OF_STATUS.get(name, EngineError)
    return kind(f"{where} ended with {name}: {details or 'no details'}. {_ADVICE.get(kind, _ADVICE[EngineError])}")


def _seconds(text: str | None) -> float:
    try:
        return float(text or "")
    except ValueError:  # the status of another server's making
        return 1.0
