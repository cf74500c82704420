"""The OpenAPI document of the HTTP face, made from the very records that are decoded and encoded. Pure."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import msgspec

import rollmill
from rollmill.exposition import CONTENT_TYPE
from rollmill.generator.http import bodies, problems, replies
from rollmill.generator.http.bodies import AbortBody, ChatRequest, CompletionRequest, ScoreBody, TokenRequest
from rollmill.generator.http.problems import ErrorReply
from rollmill.generator.http.replies import (
    AbortReply,
    ChatChunk,
    ChatReply,
    CompletionReply,
    Health,
    ModelCard,
    ModelList,
    ScoreReply,
    TokenReply,
    Version,
)
from rollmill.generator.statuses import STATUSES

_FIELD = re.compile(r" {4}(?P<names>\w[\w, ]*): (?P<text>.*)")
_REF = "#/components/schemas/{name}"
_ERRORS_OF_HTTP = {
    404: "a path that nobody answers",
    405: "another method than the path answers",
    408: "the body did not come in time",
    413: "the body is larger than `generator.limits.max_body_bytes`",
}


class _Operation(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    reply: type[msgspec.Struct] | None = None
    chunk: type[msgspec.Struct] | None = None
    content: str = "application/json"
    samples: bool = False
    open: bool = False


_OPERATIONS = (
    _Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Sample replies to a conversation; the model's own chat template renders it",
        body=ChatRequest,
        reply=ChatReply,
        chunk=ChatChunk,
        samples=True,
    ),
    _Operation(
        method="post",
        path="/v1/completions",
        summary="Sample continuations of text or token ids",
        body=CompletionRequest,
        reply=CompletionReply,
        chunk=CompletionReply,
        samples=True,
    ),
    _Operation(
        method="post",
        path="/inference/v1/generate",
        summary="Sample continuations of token ids, as ids with a log-probability and a policy version for each",
        body=TokenRequest,
        reply=TokenReply,
        chunk=TokenReply,
        samples=True,
    ),
    _Operation(
        method="post",
        path="/inference/v1/score",
        summary="Score given token ids: log-probabilities, or the reward of a reward head",
        body=ScoreBody,
        reply=ScoreReply,
        samples=True,
    ),
    _Operation(
        method="post",
        path="/inference/v1/abort_requests",
        summary="Abort exactly the named requests, with all their samples",
        body=AbortBody,
        reply=AbortReply,
    ),
    _Operation(method="get", path="/v1/models", summary="The names under which the model is served", reply=ModelList),
    _Operation(method="get", path="/v1/models/{model}", summary="One of them", reply=ModelCard),
    _Operation(
        method="get",
        path="/health",
        summary="Whether the replica takes requests (200) or not (503, with the reason); needs no token",
        reply=Health,
        open=True,
    ),
    _Operation(method="get", path="/version", summary="Version of Rollmill", reply=Version),
    _Operation(
        method="get",
        path="/metrics",
        summary="Metrics in Prometheus' text form",
        content=CONTENT_TYPE,
    ),
    _Operation(method="get", path="/openapi.json", summary="This document"),
)


@functools.cache
def openapi() -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the HTTP face.

    Example:
        >>> sorted(openapi()["paths"])[0]
        '/health'
    """
    records = [kind for op in _OPERATIONS for kind in (op.body, op.reply, op.chunk) if kind is not None]
    _, schemas = msgspec.json.schema_components([*records, ErrorReply], ref_template=_REF)
    paths: dict[str, Any] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Rollmill generator",
            "version": rollmill.__version__,
            "description": "Policy inference over HTTP: OpenAI's chat and text completions, and tokens in and out. "
            "Unknown fields are refused by name.",
        },
        "paths": paths,
        "components": {
            "schemas": {name: _explained(name, schema) for name, schema in schemas.items()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe(operation: _Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.content: {"schema": _ref(operation.reply)} if operation.reply else {}}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": _ref(operation.chunk)}
    described: dict[str, Any] = {
        "operationId": f"{operation.method} {operation.path}",
        "summary": operation.summary,
        "security": [] if operation.open else [{"token": []}],
        "responses": {"200": {"description": "Success", "content": content}, **_failures(operation)},
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(operation.body)}}}
    if "{model}" in operation.path:
        described["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return described


def _failures(operation: _Operation) -> dict[str, Any]:
    """Return the answers that are no success: all that sampling can meet, or refusals alone."""
    whens: dict[int, list[str]] = {}
    for status in STATUSES:
        whens.setdefault(status.http, []).append(status.when)
    for code, when in _ERRORS_OF_HTTP.items():
        whens.setdefault(code, []).append(when)
    codes = sorted(whens) if operation.samples else [503] if operation.open else [401, 404, 405]
    return {
        str(code): {
            "description": "; ".join(whens[code]),
            "content": {
                "application/json": {"schema": _ref(operation.reply if operation.open else ErrorReply) if code else {}}
            },
        }
        for code in codes
    }


def _ref(kind: type[msgspec.Struct] | None) -> dict[str, str]:
    return {} if kind is None else {"$ref": _REF.format(name=kind.__name__)}


def _explained(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose fields say what the docstrings of their record, and of those it extends, say of them."""
    kind = vars(bodies).get(name) or vars(replies).get(name) or vars(problems)[name]
    parts = [_parts_of(inspect.cleandoc(one.__doc__ or "")) for one in reversed(kind.__mro__)]
    sent = name in vars(bodies)
    said = {field: f"only {bodies.neutral_values(field)}" for field in bodies.NEUTRAL} if sent else {}
    said |= {field: text for _, fields in parts for field, text in fields.items()}
    explained = {**schema, "description": parts[-1][0]}
    if "properties" in schema:
        explained["properties"] = {
            field: {**described, "description": said[field]} if field in said else described
            for field, described in schema["properties"].items()
        }
    return explained


def _parts_of(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring in front of its attributes, and what it says of each.

    Example:
        >>> _parts_of("A point.\\n\\nAttributes:\\n    x, y: where it\\n        is.")
        ('A point.', {'x': 'where it is.', 'y': 'where it is.'})
    """
    summary, _, rest = docstring.partition("\nAttributes:\n")
    fields: dict[str, str] = {}
    names: list[str] = []
    for line in rest.splitlines():
        named = _FIELD.match(line)
        if named is not None:
            names = [name.strip() for name in named["names"].split(",")]
            fields |= dict.fromkeys(names, named["text"])
        else:
            fields |= {name: f"{fields[name]} {line.strip()}" for name in names}
    return summary.strip(), fields
