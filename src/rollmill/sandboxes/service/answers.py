"""Errors as answers of the two kinds of routes; `problems` says which error is which."""

from __future__ import annotations

import json
import math

from starlette.responses import Response

from rollmill.errors import RollmillError
from rollmill.sandboxes.service.problems import http_problem_of, rpc_problem_of


def http_answer(error: RollmillError) -> Response:
    """Return an error as an answer of the control API or of files."""
    problem = http_problem_of(error)
    document: dict[str, object] = {"code": problem.status, "message": str(problem)}
    if problem.word:
        document["error_code"] = problem.word
    headers = {}
    if problem.after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(problem.after_s)))
    if problem.status in (408, 413):  # what is left of the body is not read
        headers["connection"] = "close"
    return Response(json.dumps(document), status_code=problem.status, headers=headers, media_type="application/json")


def rpc_answer(error: RollmillError) -> Response:
    """Return an error as the answer of a unary call."""
    problem = rpc_problem_of(error)
    return Response(json.dumps(problem.document()), status_code=problem.status, media_type="application/json")
