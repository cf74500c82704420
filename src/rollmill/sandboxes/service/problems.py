"""Errors as the two kinds of callers hear them: a status with a message, or a code of the Connect protocol. Pure.

The public SDK makes its own exceptions of these, so what is chosen here decides what a user catches:

| here | control API, files | programs, file system | the SDK's exception |
|---|---|---|---|
| sandbox not here | 404; 502 "was not found" | `unavailable` "was not found" | SandboxNotFound, -NotRunning |
| no token, or another one | 401 | `unauthenticated` | Authentication |
| no such user inside | 401 | `unauthenticated` | Authentication |
| too many sandboxes | 429 | `resource_exhausted` | RateLimit |
| no room now | 503 | `unavailable` | ServiceBusy |
| no space or inode left | 507 | `resource_exhausted` | NotEnoughSpace |
| path missing | 404 | `not_found` | FileNotFound |
| what this backend cannot | 501 | `unimplemented` | Sandbox |
"""

from __future__ import annotations

from rollmill.errors import (
    ConfigError,
    DeadlineExceeded,
    ImageError,
    IsolationError,
    RollmillError,
    SandboxBusy,
    SandboxDead,
    SandboxExhausted,
    SandboxFileError,
    SandboxIdInUse,
    SandboxRetryable,
    SandboxUnsupported,
)
from rollmill.sandboxes.service.connect import RpcProblem
from rollmill.sandboxes.service.law import HttpProblem

_RPC_OF_STATUS = {
    400: "invalid_argument",
    401: "unauthenticated",
    403: "permission_denied",
    404: "not_found",
    409: "already_exists",
    413: "resource_exhausted",
    429: "resource_exhausted",
    501: "unimplemented",
    502: "unavailable",
    503: "unavailable",
    504: "deadline_exceeded",
    507: "resource_exhausted",
}


def gone(sandbox_id: str, why: str) -> HttpProblem:
    """Return the answer of whoever asks a sandbox that is not there; the SDK looks for "was not found" in it."""
    return HttpProblem(502, f"The sandbox {sandbox_id} was not found: {why}")


def http_problem_of(error: RollmillError) -> HttpProblem:
    """Return an error as a status with a message."""
    text = str(error)
    match error:
        case HttpProblem():
            return error
        case RpcProblem():
            return HttpProblem(error.status, text)
        case SandboxDead():
            return HttpProblem(502, f"The sandbox was not found: {text}")
        case SandboxRetryable():
            return HttpProblem(503, text, word="sandbox_capacity_unavailable", after_s=error.after_s)
        case SandboxUnsupported():
            return HttpProblem(401 if error.capability == "users" else 501, text)
        case SandboxExhausted():
            return HttpProblem(507, text)
        case SandboxFileError() | ConfigError() | ImageError():
            return HttpProblem(400, text)
        case SandboxIdInUse() | SandboxBusy():
            return HttpProblem(409, text)
        case DeadlineExceeded():
            return HttpProblem(504, text)
        case IsolationError():
            return HttpProblem(500, text, word="sandbox_create_refused")
        case _:
            return HttpProblem(500, text)


def rpc_problem_of(error: RollmillError) -> RpcProblem:
    """Return an error as a code of the Connect protocol."""
    if isinstance(error, RpcProblem):
        return error
    problem = http_problem_of(error)
    return RpcProblem(_RPC_OF_STATUS.get(problem.status, "internal"), str(problem))
