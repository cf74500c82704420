"""What one exchange needs beside Starlette: its body within limits, its client leaving, its id and its token.

| wait | ends after |
|---|---|
| for the whole body | `HttpLimits.body_s` |
| for the client to leave | never by itself: it runs beside the work and ends with it |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollmill.errors import RollmillError, Unauthenticated
from rollmill.generator.http.plan import ID_HEADER
from rollmill.generator.http.problems import RequestProblem, headers_of, reply_of, status_of
from rollmill.generator.security import admits

T = TypeVar("T")
_log = logging.getLogger(__name__)
_NO_TOKEN = (
    "the request has no token, or not the one that this replica was started with. Send it as "
    "'Authorization: Bearer TOKEN' (openai client: api_key=...)"
)


class Json(JSONResponse):
    """A record as an answer."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return msgspec.json.encode(content)


def failure(error: RollmillError) -> Json:
    """Return an error as an answer."""
    return Json(reply_of(error), status_code=status_of(error), headers=headers_of(error))


async def body_of(request: Request, *, max_bytes: int, deadline_s: float) -> bytes:
    """Return the whole body.

    Starlette's own limit answers in plain text; clients of OpenAI's API read an error of its shape.

    Raises:
        RequestProblem: if it is too large (413) or too slow (408).
        ClientDisconnect: if the client left before its end.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(int(announced), max_bytes=max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(deadline_s), contextlib.aclosing(request.stream()) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > max_bytes:
                    raise _too_large(len(body), max_bytes=max_bytes)
    except TimeoutError:
        raise RequestProblem(
            f"{len(body)} bytes of the body came within {deadline_s:g} s and it is not complete; send it faster",
            code="request_timeout",
            status=408,
            headers={"connection": "close"},
        ) from None
    return bytes(body)


def _too_large(size: int, *, max_bytes: int) -> RequestProblem:
    return RequestProblem(
        f"the body has {size} bytes or more, and generator.limits.max_body_bytes is {max_bytes}; send less at "
        "once, or raise it",
        code="request_too_large",
        status=413,
        headers={"connection": "close"},
    )


async def gone(receive: Receive) -> None:
    """Return when the client has left; call it once the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what the work gives; cancel it if the client leaves.

    Raises:
        ClientDisconnect: if it left.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)  # what they raise now is nobody's any more


class Gate:
    """Middleware: callers without the token stay out, an answer carries the id of its call, and who left gets none.

    The id is the caller's header, or what `request.state.request_id` was set to.

    Args:
        app: what answers.
        token: that callers must give for all but /health; `None` asks for none.
    """

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one exchange pass, or refuse it."""
        headers, state = Headers(scope=scope), scope.setdefault("state", {})
        state["request_id"] = headers.get(ID_HEADER, "")

        async def send_named(message: Message) -> None:
            name = state["request_id"].strip()
            if message["type"] == "http.response.start" and name and name.isprintable():
                # What callers named may hold anything; a header holds one line of ASCII.
                MutableHeaders(scope=message)[ID_HEADER] = name.encode("ascii", "replace").decode()
            await send(message)

        app: ASGIApp = self._app if self._admits(scope, headers) else failure(Unauthenticated(_NO_TOKEN))
        try:
            await app(scope, receive, send_named)
        except ClientDisconnect:
            _log.debug("the client of %s left", scope["path"])

    def _admits(self, scope: Scope, headers: Headers) -> bool:
        if self._token is None or scope["path"] == "/health":
            return True
        return admits(headers.get("authorization"), token=self._token)
