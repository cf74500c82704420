"""What one exchange needs beside Starlette: bodies within limits, who calls for which sandbox, streams of messages.

| wait | ends after |
|---|---|
| for the next piece of a body | `body_s` |
| for the next message of a stream | its caller's deadline; keepalives go out meanwhile |
| for the caller to take a message | `stream_stall_s` |
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollmill.errors import RollmillError
from rollmill.sandboxes.service.accounts import Account
from rollmill.sandboxes.service.answers import rpc_answer
from rollmill.sandboxes.service.connect import (
    Codec,
    Envelopes,
    RpcProblem,
    codec_of,
    end_of_stream,
    envelope,
    timeout_of,
)
from rollmill.sandboxes.service.law import HttpProblem, host_parts, same
from rollmill.sandboxes.service.node import Node
from rollmill.sandboxes.service.problems import gone, rpc_problem_of
from rollmill.sandboxes.service.served import Served
from rollmill.sandboxes.service.settings import ServiceSettings
from rollmill.sandboxes.service.wire import Message

T = TypeVar("T")
M = TypeVar("M", bound=Message)

INSIDE_PORT = "49983"
"""The port at which callers expect the services of a sandbox."""
_ID, _PORT, _TOKEN = "e2b-sandbox-id", "e2b-sandbox-port", "x-access-token"
_PING = "keepalive-ping-interval"
_LINGER_S = 5.0
_log = logging.getLogger(__name__)


# -- bodies -----------------------------------------------------------------------------------------------------------


async def pieces_of(request: Request, *, max_bytes: int, wait_s: float) -> AsyncGenerator[bytes, None]:
    """Yield a body as it comes.

    Raises:
        HttpProblem: if it is too large (413) or stalls (408).
        ClientDisconnect: if the caller left before its end.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(int(announced), max_bytes)
    total = 0
    async with contextlib.aclosing(request.stream()) as pieces:
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    piece = await anext(pieces, None)
            except TimeoutError:
                text = f"the body stalled for {wait_s:g} s after {total} bytes; send it again, faster"
                raise HttpProblem(408, text) from None
            if piece is None:
                request.state.body_is_whole = True
                return
            total += len(piece)
            if total > max_bytes:
                raise _too_large(total, max_bytes)
            if piece:
                yield piece


def _too_large(size: int, most: int) -> HttpProblem:
    return HttpProblem(413, f"the body has {size} bytes or more, {most} at most; send less at once")


async def body_of(request: Request, *, max_bytes: int, wait_s: float) -> bytes:
    """Return a whole body; see `pieces_of` for what it raises."""
    async with contextlib.aclosing(pieces_of(request, max_bytes=max_bytes, wait_s=wait_s)) as pieces:
        return b"".join([piece async for piece in pieces])


async def linger(request: Request) -> None:
    """Take what is left of a body for a moment: who sends too much reads no answer before it has sent it."""
    if getattr(request.state, "body_is_whole", False):
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while (await request.receive()).get("more_body", False):
                pass


# -- who calls --------------------------------------------------------------------------------------------------------


def sandbox_id_of(request: Request) -> str:
    """Return which sandbox a request is for, by its headers or by the name of the host; empty if neither says."""
    port, by_host = host_parts(request.headers.get("host", ""))
    sandbox_id = request.headers.get(_ID, by_host)
    asked = request.headers.get(_PORT, port)
    if sandbox_id and asked not in ("", INSIDE_PORT):
        text = f"The sandbox {sandbox_id} is running but port is not open: {asked}; sandboxes here have no network"
        raise HttpProblem(502, text)
    return sandbox_id


async def caller_of(request: Request, node: Node) -> Served:
    """Return the sandbox of a call that shows its token.

    Raises:
        HttpProblem: 401 without it, 502 if there is no such sandbox, 400 if the call does not say which.
    """
    sandbox_id = sandbox_id_of(request)
    if not sandbox_id:
        raise HttpProblem(400, "the call does not say for which sandbox it is: send the header E2b-Sandbox-Id")
    served = node.get(sandbox_id)
    if served is None:
        raise gone(sandbox_id, "it was never made here, or has ended")
    if not same(request.headers.get(_TOKEN), served.token):
        raise HttpProblem(401, "the header X-Access-Token is missing, or is not the token of this sandbox")
    return await node.for_traffic(sandbox_id)


async def account_of(request: Request, served: Served, node: Node) -> Account:
    """Return the user of a call, which comes as the name of basic authentication.

    Raises:
        RpcProblem: `unauthenticated` if there is no such user.
    """
    scheme, _, text = request.headers.get("authorization", "").partition(" ")
    name = ""
    if scheme.lower() == "basic":
        try:
            name = base64.b64decode(text, validate=True).decode().partition(":")[0]
        except (binascii.Error, UnicodeDecodeError) as error:
            raise RpcProblem("unauthenticated", f"the user of the call cannot be read: {error}") from error
    return await served.accounts.find(name or node.default_user)


class Call:
    """One call on a sandbox.

    Args:
        request: as it came.
        node: where it came.
        served: the sandbox.
    """

    def __init__(self, request: Request, *, node: Node, served: Served) -> None:
        self.request, self.node, self.served = request, node, served

    async def account(self) -> Account:
        """Return the user that it is made for."""
        return await account_of(self.request, self.served, self.node)

    @property
    def timeout_s(self) -> float | None:
        """Return its caller's deadline."""
        return timeout_of(self.request.headers)

    def keepalive_s(self) -> float:
        """Return how often an idle stream says so."""
        text = self.request.headers.get(_PING, "")
        return float(text) if text.isdecimal() and int(text) > 0 else self.node.settings.keepalive_s


# -- calls ------------------------------------------------------------------------------------------------------------


def unary(path: str, kind: type[M], answer: Callable[[Call, M], Awaitable[Message]], *, node: Node) -> Route:
    """Return the route of a call with one message and one answer."""

    async def endpoint(request: Request) -> Response:
        try:
            codec = _codec(request, stream=False)
            call = Call(request, node=node, served=await caller_of(request, node))
            message = codec.decode(await _message(request, node.settings), kind)
            async with _in_time(call.timeout_s):
                reply = await answer(call, message)
            return Response(codec.encode(reply), media_type=codec.content_type)
        except RollmillError as error:
            return rpc_answer(error)

    return Route(path, endpoint, methods=["POST"])


def streaming(
    path: str, kind: type[M], answer: Callable[[Call, M], AsyncGenerator[Message, None]], *, node: Node
) -> Route:
    """Return the route of a call with one message and a stream of answers."""

    async def endpoint(request: Request) -> Response:
        try:
            codec = _codec(request, stream=True)
            call = Call(request, node=node, served=await caller_of(request, node))
            body = await _message(request, node.settings)
            message = codec.decode(_only_message(body), kind)
        except RollmillError as error:
            return rpc_answer(error)
        return Stream(codec, answer(call, message), stall_s=node.settings.stream_stall_s)

    return Route(path, endpoint, methods=["POST"])


def _codec(request: Request, *, stream: bool) -> Codec:
    codec = codec_of(request.headers, stream=stream)
    if codec is None:
        kinds = "application/connect+json or +proto" if stream else "application/json or application/proto"
        given = request.headers.get("content-type", "")
        raise RpcProblem("unimplemented", f"the content type is {given!r}; this call takes {kinds}")
    return codec


async def _message(request: Request, settings: ServiceSettings) -> bytes:
    return await body_of(request, max_bytes=settings.max_message_bytes, wait_s=settings.body_s)


def _only_message(body: bytes) -> bytes:
    envelopes = Envelopes()
    messages = list(envelopes.feed(body))
    envelopes.check_empty()
    if len(messages) != 1:
        raise RpcProblem("invalid_argument", f"the call has {len(messages)} messages; it takes one")
    return messages[0]


@contextlib.asynccontextmanager
async def _in_time(timeout_s: float | None) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise RpcProblem("deadline_exceeded", f"the call did not end within its {timeout_s:g} s") from None


class Stream(Response):
    """An answer of messages while they are produced; an error becomes its last envelope.

    Args:
        codec: how messages are encoded.
        messages: what is sent; closed when the caller leaves.
        stall_s: a caller that takes nothing for so long has left.
    """

    def __init__(self, codec: Codec, messages: AsyncGenerator[Message, None], *, stall_s: float) -> None:
        super().__init__(media_type=codec.content_type)
        del self.headers["content-length"]
        self._codec, self._messages, self._stall_s = codec, messages, stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer until the last message, or until the caller has left."""
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            ended = await asyncio.gather(sending, leaving, return_exceptions=True)
        if isinstance(ended[0], Exception) and not isinstance(ended[0], (ClientDisconnect, TimeoutError, OSError)):
            raise ended[0]

    async def _send_all(self, send: Send) -> None:
        async def put(body: bytes, *, more: bool = True) -> None:
            async with asyncio.timeout(self._stall_s):
                await send({"type": "http.response.body", "body": body, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        problem: RpcProblem | None = None
        try:
            async with contextlib.aclosing(self._messages):
                async for message in self._messages:
                    await put(envelope(self._codec.encode(message)))
        except RollmillError as error:
            problem = rpc_problem_of(error)
        await put(end_of_stream(problem), more=False)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def with_keepalive(
    next_one: Callable[[], Awaitable[T]], *, keepalive: T, every_s: float, deadline_s: float | None
) -> AsyncGenerator[T, None]:
    """Yield what comes, and a keepalive whenever nothing came for a while.

    Raises:
        RpcProblem: `deadline_exceeded` after `deadline_s` on the loop's clock.
    """
    now_s = asyncio.get_running_loop().time
    waiting: asyncio.Future[Any] | None = None
    try:
        while True:
            waiting = asyncio.ensure_future(next_one()) if waiting is None else waiting
            left_s = None if deadline_s is None else deadline_s - now_s()
            await asyncio.wait({waiting}, timeout=every_s if left_s is None else max(0.0, min(every_s, left_s)))
            if waiting.done():
                one, waiting = waiting.result(), None
                yield one
            elif left_s is not None and left_s <= every_s:
                raise RpcProblem("deadline_exceeded", "the stream did not end within its caller's deadline")
            else:
                yield keepalive
    finally:
        if waiting is not None:
            waiting.cancel()
