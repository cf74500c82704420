"""What stands before every call of the gRPC face: is it a message at all, and may its caller call?

Refused here, a call never reaches the service. A health check is for everybody, because probes have no secrets; to
watch the health takes the token, because a watch holds its call for ever.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health

from rollmill.errors import DataError, RollmillError, Unauthenticated
from rollmill.generator.security import admits
from rollmill.generator.statuses import error_to_status

OPEN_TO_ALL = f"/{health.SERVICE_NAME}/Check"
Context = grpc.aio.ServicerContext
Handler = grpc.RpcMethodHandler
Continue = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


def interceptors(*, token: str | None) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """Return what stands before every call.

    Args:
        token: that callers must give; `None` asks for none.
    """
    return (FormatInterceptor(),) if token is None else (TokenInterceptor(token), FormatInterceptor())


async def abort_with(error: RollmillError, *, context: Context) -> None:
    """End a call with the status of an error."""
    name, details, metadata = error_to_status(error)
    await context.abort(grpc.StatusCode[name], details, tuple(metadata.items()))


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets only calls through that carry the token, and single health checks.

    Args:
        token: that callers must give as `authorization: Bearer TOKEN`.
    """

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self, continuation: Continue, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Pass the call on, or answer it with UNAUTHENTICATED before its message is read."""
        handler = await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata or ()).get("authorization")
        open_to_all = handler_call_details.method == OPEN_TO_ALL
        if handler is None or open_to_all or admits(given, token=self._token):
            return handler
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_: object, context: Context) -> None:
    error = Unauthenticated(
        "the call has no token, or not the one that this service was started with. Send it as metadata "
        "`authorization: Bearer TOKEN` (GeneratorClient: token=...)"
    )
    await abort_with(error, context=context)


class FormatInterceptor(grpc.aio.ServerInterceptor):
    """Answers bytes that are no message with INVALID_ARGUMENT; gRPC itself would say UNKNOWN and log a traceback."""

    def __init__(self) -> None:
        self._checking: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self, continuation: Continue, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """Return the handler behind a check of its message; made once for each method."""
        handler, method = await continuation(handler_call_details), str(handler_call_details.method)
        if handler is None:
            return handler
        known = self._checking.get(method)
        if known is None or known[0] is not handler:
            known = self._checking[method] = (handler, _checking(handler))
        return known[1]


class _NoMessage:
    """Stands for bytes that could not be read."""

    def __init__(self, why: str) -> None:
        self.why = why

    def error(self) -> DataError:
        return DataError(f"these bytes are no message of this method: {self.why}. Use the published .proto")


def _checking(handler: Handler) -> Handler:
    read = handler.request_deserializer
    if read is None:
        return handler

    def parse(data: bytes) -> object:
        try:
            return read(data)
        except DecodeError as error:
            return _NoMessage(str(error))

    check = _check_stream if handler.request_streaming else _check_one
    found = check(handler, parse)
    return handler if found is None else found


def _check_one(handler: Handler, parse: Callable[[bytes], object]) -> Handler | None:
    behavior: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary
    if not inspect.iscoroutinefunction(behavior):
        return None

    async def checked(request: object, context: Context) -> object:
        if isinstance(request, _NoMessage):
            await abort_with(request.error(), context=context)
        return await behavior(request, context)

    make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    return make(checked, request_deserializer=parse, response_serializer=handler.response_serializer)


def _check_stream(handler: Handler, parse: Callable[[bytes], object]) -> Handler | None:
    behavior: Any = handler.stream_stream
    if not inspect.iscoroutinefunction(behavior):
        return None

    async def checked(requests: AsyncIterator[object], context: Context) -> object:
        return await behavior(_messages(requests), context)

    return grpc.stream_stream_rpc_method_handler(
        checked, request_deserializer=parse, response_serializer=handler.response_serializer
    )


async def _messages(requests: AsyncIterator[object]) -> AsyncIterator[object]:
    """Pass messages on; whoever reads them gets the error of the first that is none."""
    async for request in requests:
        if isinstance(request, _NoMessage):
            raise request.error()
        yield request
