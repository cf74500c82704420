"""One replica as the router talks to it: bytes in, bytes out, and what an error says about the replica."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from rollmill.config.serving import LimitSettings
from rollmill.errors import (
    DataError,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    ModelError,
    NotServing,
    Overloaded,
    RequestIdInUse,
    RollmillError,
    SlowReader,
    Unauthenticated,
)
from rollmill.generator.exchange.asking import SERVICE, AskingExchange, CallFailed
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.router.records import Ended
from rollmill.generator.security import TlsFiles, bearer
from rollmill.generator.statuses import error_from_status, wire_status

M = TypeVar("M", bound=Message)

_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    # A replica that was restarted is found again at once, not after a minute of back-off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class UpstreamError(Exception):
    """A call to a replica failed.

    Attributes:
        error: as its caller shall get it.
        ended: what it says about the replica.
        replica: its name, where it is known.
    """

    def __init__(self, error: RollmillError, ended: Ended, *, replica: str = "") -> None:
        super().__init__(str(error))
        self.error = error
        self.ended = ended
        self.replica = replica


class Upstream(Protocol):
    """A replica. Every call has a deadline and raises `UpstreamError`; its cancellation cancels the replica's work."""

    async def generate(self, data: bytes, *, timeout_s: float) -> bytes:
        """Return a serialized reply in one piece."""
        ...

    def stream(self, data: bytes, *, timeout_s: float) -> AsyncGenerator[bytes, None]:
        """Return the serialized events of a request."""
        ...

    async def abort(self, request_id: str, *, timeout_s: float) -> bool:
        """Abort a request; return whether it was there."""
        ...

    async def score(self, data: bytes, *, timeout_s: float) -> bytes:
        """Return a serialized reply with log-probs."""
        ...

    async def status(self, *, timeout_s: float) -> pb.StatusReply:
        """Return standing, weights and load."""
        ...

    async def load_weights(self, policy_version: int, *, timeout_s: float, adapter: str = "") -> pb.LoadWeightsReply:
        """Have it serve another version, of its weights or of an adapter."""
        ...

    async def close(self) -> None:
        """End the connection, and all calls with it."""
        ...


def read(kind: type[M], data: bytes, *, replica: str) -> M:
    """Return a message of a replica.

    Raises:
        UpstreamError: if the bytes are none: whatever answers there is no replica, or another version of one.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        broken = EngineError(
            f"the replica {replica} answered with {len(data)} bytes that are no {kind.__name__}: {error}. Does it run "
            "the same version of Rollmill as the router?"
        )
        raise UpstreamError(broken, Ended.FAILED, replica=replica) from error


def judge(error: RollmillError, *, status: str) -> Ended:
    """Return what an error says about the replica that it came from.

    Args:
        status: name of the gRPC status.

    Example:
        >>> judge(NotServing("draining"), status="UNAVAILABLE")
        <Ended.REFUSED: 'refused'>
    """
    match error:
        # Who reads slowly reads slowly from any replica.
        case DataError() | ModelError() | RequestIdInUse() | DeadlineExceeded() | SlowReader():
            return Ended.INVALID
        case NotServing():
            return Ended.REFUSED
        case EngineDead():
            return Ended.LOST
        case Overloaded():
            return Ended.DECLINED
        case _ if status in ("FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"):
            return Ended.DECLINED
        case _ if status == "CANCELLED":
            return Ended.LOST
        case _:
            return Ended.FAILED


class GrpcUpstream:
    """A replica over gRPC: one exchange for all requests, where it has that.

    Args:
        address: `host:port`.
        token: that the replica asks for.
        tls: files of this side, where the replica has TLS.
        stream_events: of a request that wait for whoever reads them, as `LimitSettings.stream_events` if `None`; at one
            more it ends with `SlowReader`.
    """

    def __init__(
        self, address: str, *, token: str | None = None, tls: TlsFiles | None = None, stream_events: int | None = None
    ) -> None:
        self.address = address
        self._metadata = None if token is None else (("authorization", bearer(token)),)
        self._channel = channel_to(address, tls=tls)
        self._closed = False
        self._calls: dict[str, Any] = {
            name: self._channel.unary_unary(f"/{SERVICE}/{name}")
            for name in ("Abort", "Score", "Status", "LoadWeights")
        }
        self._exchange = AskingExchange(self._channel, metadata=self._metadata)
        self._stream_events = LimitSettings().stream_events if stream_events is None else stream_events

    async def generate(self, data: bytes, *, timeout_s: float) -> bytes:
        """Return a serialized reply in one piece."""
        with self._errors("Generate"):
            return await self._exchange.reply(data, timeout_s=timeout_s)

    async def stream(self, data: bytes, *, timeout_s: float) -> AsyncGenerator[bytes, None]:
        """Yield the serialized events of a request; closing the iterator cancels the request."""
        events = _Events(most=self._stream_events)
        asking = asyncio.get_running_loop().create_task(
            self._exchange.events(data, hear=events.put, timeout_s=timeout_s)
        )
        asking.add_done_callback(events.end)
        try:
            with self._errors("GenerateStream"):
                async for event in events:
                    yield event
                await asking
        finally:
            asking.cancel()

    async def abort(self, request_id: str, *, timeout_s: float) -> bool:
        """Abort a request; return whether it was there."""
        data = pb.AbortRequest(request_id=request_id).SerializeToString()
        return read(pb.AbortReply, await self._call("Abort", data, timeout_s=timeout_s), replica=self.address).found

    async def score(self, data: bytes, *, timeout_s: float) -> bytes:
        """Return a serialized reply with log-probs."""
        return await self._call("Score", data, timeout_s=timeout_s)

    async def status(self, *, timeout_s: float) -> pb.StatusReply:
        """Return standing, weights and load."""
        return read(pb.StatusReply, await self._call("Status", b"", timeout_s=timeout_s), replica=self.address)

    async def load_weights(self, policy_version: int, *, timeout_s: float, adapter: str = "") -> pb.LoadWeightsReply:
        """Have it serve another version, of its weights or of an adapter."""
        data = pb.LoadWeightsRequest(policy_version=policy_version, adapter=adapter).SerializeToString()
        reply = await self._call("LoadWeights", data, timeout_s=timeout_s)
        return read(pb.LoadWeightsReply, reply, replica=self.address)

    async def close(self) -> None:
        """End the connection, and all calls with it."""
        self._closed = True
        await self._exchange.close()
        await self._channel.close()

    async def _call(self, name: str, data: bytes, *, timeout_s: float) -> bytes:
        with self._errors(name):
            return await self._calls[name](data, timeout=timeout_s, metadata=self._metadata)

    @contextlib.contextmanager
    def _errors(self, asked: str) -> Iterator[None]:
        if self._closed:
            raise self._gone(asked)
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._failed(CallFailed.of(error), asked=asked) from error
        except CallFailed as error:
            if self._closed:
                raise self._gone(asked) from error
            raise self._failed(error, asked=asked) from error
        except SlowReader as error:
            raise UpstreamError(error, judge(error, status=wire_status(error).grpc)) from error
        except asyncio.CancelledError:
            # A channel that is closed cancels its calls, not those who wait for them.
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise self._gone(asked) from None

    def _gone(self, asked: str) -> UpstreamError:
        gone = EngineDead(f"{asked} to the replica at {self.address} ended: it left the router's list meanwhile")
        return UpstreamError(gone, Ended.LOST)

    def _failed(self, error: CallFailed, *, asked: str) -> UpstreamError:
        where = f"{asked} to the replica at {self.address}"
        found = error_from_status(error.status, error.details, metadata=error.metadata, where=where)
        ended = judge(found, status=error.status)
        if isinstance(found, Unauthenticated):
            # The router's own credentials; its caller's were right.
            found = EngineError(f"the replica at {self.address} refuses the router: {found}")
        return UpstreamError(found, ended)


class _Events:
    """Events between who hears them and who takes them, in order.

    Args:
        most: that may wait.
    """

    def __init__(self, *, most: int) -> None:
        self._waiting: deque[bytes] = deque()
        self._more = asyncio.Event()
        self._most, self._ended = most, False

    def put(self, event: bytes) -> None:
        """Hear an event.

        Raises:
            SlowReader: if too many wait.
        """
        if len(self._waiting) >= self._most:
            raise SlowReader(
                f"the reader of a stream is {len(self._waiting)} events behind: the request was aborted, so that "
                "memory stays bounded. Read faster, or call Generate, which sends everything at once"
            )
        self._waiting.append(event)
        self._more.set()

    def end(self, asking: asyncio.Task[None]) -> None:
        """Hear that no more come."""
        if not asking.cancelled():
            asking.exception()  # also where nobody is left to whom it matters
        self._ended = True
        self._more.set()

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self._ended:
                return
            self._more.clear()
            await self._more.wait()


def channel_to(address: str, *, tls: TlsFiles | None) -> grpc.aio.Channel:
    """Return a channel to a replica."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    files = tls.read()
    credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
    options = (*_OPTIONS, ("grpc.ssl_target_name_override", tls.server_name)) if tls.server_name else _OPTIONS
    return grpc.aio.secure_channel(address, credentials, options=options)


Connect = Callable[[str], Upstream]
"""Opens a connection to a replica at `host:port`."""
