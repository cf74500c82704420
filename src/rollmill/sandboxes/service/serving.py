"""Serves a node over HTTP on one address until it is told to stop.

| wait | ends after |
|---|---|
| for the head of a request | `head_s` |
| for exchanges that run when it is told to stop | `close_s`; then their connections are cut |
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from rollmill.errors import ConfigError, MissingExtraError
from rollmill.sandboxes.records import Record
from rollmill.sandboxes.service.node import Node
from rollmill.sandboxes.service.room import Room
from rollmill.sandboxes.service.settings import ServiceSettings

if TYPE_CHECKING:
    import uvicorn

_BACKLOG = 2048
_LEAST_TOKEN_CHARS = 16


class Listen(Record, frozen=True, kw_only=True):
    """Where a node is served, and what opens it.

    Attributes:
        host: interface; others than loopback must be named, and are then reached by whoever has the token.
        port: 0 lets the system choose.
        token: of the control API.
        domain: what callers are told to reach sandboxes by, as `PORT-ID.DOMAIN`; `None` where they name the address.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str
    domain: str | None = None

    def __post_init__(self) -> None:
        if len(self.token) < _LEAST_TOKEN_CHARS or not self.token.isascii() or not self.token.isprintable():
            raise ConfigError(
                f"the token of the sandbox service has {len(self.token)} characters; it needs at least "
                f"{_LEAST_TOKEN_CHARS}, printable ASCII, for example of `openssl rand -hex 16`: whoever has it runs "
                "programs on this machine"
            )
        if " " in self.token:
            raise ConfigError("the token of the sandbox service has a space in it, which headers do not carry whole")

    def warnings(self) -> tuple[str, ...]:
        """Return what a user should know about this address."""
        if _is_loopback(self.host):
            return ()
        return (
            f"{self.host} is reached by other machines, without TLS: the token and all files cross the network in "
            "clear. Put a proxy with TLS in front unless the network is trusted",
        )


def parse_listen(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, `[::1]:PORT`, `:PORT` or `PORT`; without a host, loopback.

    Raises:
        ConfigError: if it is none of these.

    Example:
        >>> parse_listen("127.0.0.1:3000"), parse_listen("3000"), parse_listen("[::1]:0")
        (('127.0.0.1', 3000), ('127.0.0.1', 3000), ('::1', 0))
    """
    host, colon, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535 or (":" in host.strip("[]") and not host.startswith("[")):
        raise ConfigError(f"{text!r} is no address to listen at; give HOST:PORT, for example 127.0.0.1:3000")
    return (host.strip("[]") or "127.0.0.1") if colon else "127.0.0.1", int(port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_serving() -> None:
    """Say at once, before anything is started, that HTTP cannot be served.

    Raises:
        MissingExtraError: if uvicorn, h11 or Starlette is not installed.
    """
    for package in ("uvicorn", "h11", "starlette"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package=package, extra="serve", purpose="the sandbox service")


async def serve_node(
    node: Node,
    *,
    listen: Listen,
    stop: asyncio.Event,
    on_bound: Callable[[str], None] | None = None,
    metrics: Callable[[], Awaitable[bytes]] | None = None,
    room: Callable[[], Room] | None = None,
) -> None:
    """Serve a node until `stop` is set; its sandboxes are the node's to end.

    Args:
        node: its sandboxes.
        listen: where.
        stop: ends it.
        on_bound: gets the URL once calls are answered.
        metrics: makes the page `/metrics`; without it there is none.
        room: tells what there is room for, for routers.

    Raises:
        ConfigError: if the address cannot be bound.
        MissingExtraError: if a package is missing.

    Cancellation:
        cuts all connections at once.
    """
    check_serving()
    from rollmill.sandboxes.service.app import ServiceApp

    app = ServiceApp(node, token=listen.token, domain=listen.domain, metrics=metrics, room=room)
    await serve_app(app, host=listen.host, port=listen.port, settings=node.settings, stop=stop, on_bound=on_bound)


async def serve_app(
    app: Any,
    *,
    host: str,
    port: int,
    settings: ServiceSettings,
    stop: asyncio.Event,
    on_bound: Callable[[str], None] | None = None,
) -> None:
    """Serve an application of this package until `stop` is set; see `serve_node`."""
    with contextlib.closing(_bound(host, port)) as listener:
        server = _server(app, settings)
        await server.startup(sockets=[listener])
        try:
            if on_bound is not None:
                shown = f"[{host}]" if ":" in host else host
                on_bound(f"http://{shown}:{listener.getsockname()[1]}")
            await stop.wait()
        except asyncio.CancelledError:
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            raise
        finally:
            exchanges = list(server.server_state.tasks)
            await server.shutdown(sockets=[listener])
            for task in exchanges:
                task.cancel()
            await asyncio.gather(*exchanges, return_exceptions=True)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"{host}:{port} cannot be bound for the sandbox service: {error.strerror or error}. Is the port taken by "
            "another process, and the host an address of this machine? Port 0 lets the system choose"
        ) from error
    return listener


def _server(app: Any, settings: ServiceSettings) -> uvicorn.Server:
    """Return a server whose start and end are ours: no signal handlers, no loop that looks ten times a second."""
    import uvicorn

    config = uvicorn.Config(
        app,
        http=_connection_class(settings.head_s),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=settings.connections,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=round(settings.close_s),
        backlog=_BACKLOG,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    return server


def _connection_class(head_s: float) -> Any:
    """Return the class of connections: uvicorn's, which may not say nothing before their first request."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        """A connection with a deadline for its first bytes of a request."""

        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore
            super().connection_made(transport)
            self._timer = self.loop.call_later(head_s, self._too_late)

        def _too_late(self) -> None:
            if self.cycle is None:  # no request came whole
                self.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

    return Connection
