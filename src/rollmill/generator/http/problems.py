"""Errors as HTTP has them: status, headers, and OpenAI's shape of body. Pure.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Statuses are those of `rollmill.generator.statuses`, but for what only HTTP has (413, 405, an unknown path). `code` is
OpenAI's word where it has one, and our own error code otherwise; the header `rollmill-code` has ours always.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from rollmill.errors import (
    DataError,
    EngineDead,
    ModelError,
    NotServing,
    Overloaded,
    RollmillError,
    Unauthenticated,
)
from rollmill.generator.statuses import CODE_KEY, RETRY_AFTER_KEY, http_status

_OPENAI_CODES: tuple[tuple[type[RollmillError], str], ...] = (
    (Unauthenticated, "invalid_api_key"),
    (ModelError, "model_not_found"),
    (Overloaded, "rate_limit_exceeded"),
)


class RequestProblem(DataError):
    """A request that HTTP alone refuses.

    Attributes:
        param: the field that is wrong, where it is one.
        problem_code: OpenAI's word for what is wrong.
        status: HTTP status.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.problem_code = code
        self.status = status
        self.headers = headers or {}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong.

    Attributes:
        message: what happened with the numbers, the likely cause, the next action.
        type: `invalid_request_error`, `authentication_error`, `rate_limit_error` or `server_error`.
        param: the field of the request that is wrong, where it is one.
        code: a word for programs.
    """

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct, frozen=True):
    """Body of every answer that is no success, and event of a stream that fails half way."""

    error: ErrorDetail


def status_of(error: RollmillError) -> int:
    """Return the HTTP status of an error."""
    return error.status if isinstance(error, RequestProblem) else http_status(error)


def reply_of(error: RollmillError) -> ErrorReply:
    """Return the body of an error.

    Example:
        >>> reply_of(Unauthenticated("no token")).error.code
        'invalid_api_key'
    """
    status = status_of(error)
    problem = error if isinstance(error, RequestProblem) else None
    code = next((word for kind, word in _OPENAI_CODES if isinstance(error, kind)), error.code)
    return ErrorReply(
        ErrorDetail(
            message=str(error),
            type=_type_of(status),
            param=None if problem is None else problem.param,
            code=code if problem is None else problem.problem_code,
        )
    )


def headers_of(error: RollmillError) -> dict[str, str]:
    """Return the headers of an error.

    The OpenAI client tries again after 408, 409, 429 and 5xx unless `x-should-retry` forbids it; it is told to where
    the same request may find a place later, and not to where it would meet the same end.
    """
    status = status_of(error)
    headers = {CODE_KEY: error.code}
    if isinstance(error, RequestProblem):
        headers |= error.headers
    if isinstance(error, Overloaded):
        # Whole seconds: that is what the header has for every client.
        headers[RETRY_AFTER_KEY] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status in (408, 409, 429) or status >= 500:
        again = isinstance(error, Overloaded | NotServing | EngineDead)
        headers["x-should-retry"] = "true" if again else "false"
    return headers


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def not_found(path: str, *, known: Any) -> RequestProblem:
    """Return the refusal of a path that nobody answers."""
    paths = ", ".join(sorted(known))
    return RequestProblem(f"there is no {path} here; there are {paths}", code="unknown_url", status=404)


def wrong_method(path: str, *, method: str, allowed: Any) -> RequestProblem:
    """Return the refusal of a method that a path does not answer."""
    methods = ", ".join(sorted(set(allowed) - {"HEAD"}))
    return RequestProblem(
        f"{path} answers {methods}, not {method}", code="method_not_allowed", status=405, headers={"allow": methods}
    )
