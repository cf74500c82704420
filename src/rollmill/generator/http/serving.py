"""Runs the HTTP face in the replica's own event loop, beside gRPC: uvicorn without its signals, with deadlines of ours.

| wait | ends after |
|---|---|
| for the head of a request | `HttpLimits.header_s`: connections that say nothing hold nothing |
| for a peer that went silent | the limits' `keepalive_s` and `keepalive_timeout_s`: the connection is closed |
| for exchanges that run when it is told to stop | `_CLOSE_S`; the service drains before |
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING

from rollmill.config.serving import LimitSettings
from rollmill.errors import ConfigError, MissingExtraError
from rollmill.generator.http.protocol import HttpLimits, Inference, Metrics
from rollmill.generator.security import TlsFiles, address_of

if TYPE_CHECKING:
    import uvicorn

    from rollmill.generator.http.app import HttpApp

_CLOSE_S = 1
_BACKLOG = 2048


async def serve_http(
    service: Inference,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    metrics: Metrics | None = None,
    limits: LimitSettings | None = None,
    bounds: HttpLimits | None = None,
    tls: TlsFiles | None = None,
    stop: asyncio.Event,
    on_bound: Callable[[int], None] | None = None,
) -> None:
    """Serve a replica over HTTP until `stop` is set.

    Args:
        service: what is served.
        host: interface to bind; who may bind what is `security.check_binding`'s to say.
        port: 0 lets the system choose.
        token: that callers must give as `Authorization: Bearer TOKEN`; `None` asks for none.
        metrics: what `/metrics` shows; without it there is no such page.
        limits: of bodies, streams and silent connections; the service's if `None`.
        bounds: that only HTTP needs.
        tls: certificate and key; with `ca`, clients must show a certificate (mTLS).
        stop: ends the face; exchanges that run then have a second.
        on_bound: gets the port once connections are taken.

    Raises:
        ConfigError: if the address cannot be bound, or a TLS file cannot be used.
        MissingExtraError: if uvicorn or Starlette is not installed.

    Cancellation:
        closes all connections at once.
    """
    for package in ("uvicorn", "starlette"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package=package, extra="serve", purpose="serving over HTTP")
    from rollmill.generator.http.app import HttpApp

    limits = service.limits if limits is None else limits
    bounds = HttpLimits() if bounds is None else bounds
    app = HttpApp(service, token=token, metrics=metrics, limits=limits, bounds=bounds)
    with contextlib.closing(_listener(host, port)) as listener:
        server = _server(app, bounds=bounds, limits=limits, context=None if tls is None else _context(tls))
        await server.startup(sockets=[listener])
        try:
            if on_bound is not None:
                on_bound(listener.getsockname()[1])
            await stop.wait()
        except asyncio.CancelledError:
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            raise
        finally:
            exchanges = list(server.server_state.tasks)
            await server.shutdown(sockets=[listener])
            await asyncio.gather(*exchanges, return_exceptions=True)


def _server(
    app: HttpApp, *, bounds: HttpLimits, limits: LimitSettings, context: ssl.SSLContext | None
) -> uvicorn.Server:
    """Return a server whose start and end are ours: no signal handlers, no loop that looks ten times a second."""
    import uvicorn

    from rollmill.generator.http.connection import connection_class

    config = uvicorn.Config(
        app,
        http=connection_class(bounds, keepalive_s=limits.keepalive_s, silent_s=limits.keepalive_timeout_s),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=bounds.connections,
        timeout_keep_alive=round(bounds.keep_alive_s),
        timeout_graceful_shutdown=_CLOSE_S,
        backlog=_BACKLOG,
    )
    config.load()
    config.ssl = context
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    return server


def _listener(host: str, port: int) -> socket.socket:
    """Return a bound socket.

    Raises:
        ConfigError: if it cannot be bound.
    """
    bare = host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0]
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
            f"{address_of(host, port)} cannot be bound for HTTP: {error.strerror or error}. Is the port taken by "
            "another process, and the host an address of this machine? Port 0 lets the system choose"
        ) from error
    return listener


def _context(tls: TlsFiles) -> ssl.SSLContext:
    """Return the TLS of a server.

    Raises:
        ConfigError: if a file is no certificate, key or authority, or the key is another certificate's.
    """
    if tls.cert is None or tls.key is None:
        raise ConfigError("TLS on a server needs a certificate and its key; give both files")
    tls.read()  # says which file cannot be read
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.cert, tls.key)
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as error:
        raise ConfigError(
            f"the TLS files {tls.cert} and {tls.key} cannot be used: {error}. Is the key that of the certificate?"
        ) from error
    return context
