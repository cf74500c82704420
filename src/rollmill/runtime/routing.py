"""A router on its own: from a list of replicas to a served address.

| who | waits for | gives up after |
|---|---|---|
| start | tokenizer, ports | an error, in words; replicas may come later |
| routing | SIGTERM or SIGINT | never: it is a service |
| drain | requests that run | `drain_s`; at once on a second signal |

Decides nothing about requests; that is the router's law.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rollmill.clock import SystemClock
from rollmill.config.router import RouterSettings
from rollmill.config.serving import LimitSettings
from rollmill.generator.router.main import Face, RouterAddresses, serve_router
from rollmill.generator.router.membership import Source
from rollmill.generator.router.service import RouterService
from rollmill.generator.router.upstream import GrpcUpstream
from rollmill.generator.security import Access, TlsFiles, address_of, check_binding
from rollmill.runtime.stopping import stop_on_signals

if TYPE_CHECKING:
    from rollmill.generator.service import TextCodec


class RouterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `rollmill router` is asked to do.

    Attributes:
        source: the list of replicas.
        model: whose tokenizer makes text token ids here; `None` leaves that to the replicas.
        host: interface to bind, of all faces.
        grpc_port, http_port: 0 lets the system choose; `http_port` `None` serves no HTTP.
        access: what callers must show.
        replica_token, replica_tls: what this router shows to replicas.
        drain_s: time for running requests to finish after a signal.
    """

    settings: RouterSettings
    source: Source
    model: str | None = None
    host: str = "127.0.0.1"
    grpc_port: int = 0
    http_port: int | None = None
    access: Access = Access()
    replica_token: str | None = None
    replica_tls: TlsFiles | None = None
    drain_s: float = 30.0


class Routed(msgspec.Struct, frozen=True, kw_only=True):
    """Where a router answers."""

    grpc: str
    http: str | None
    pid: int
    warnings: tuple[str, ...] = ()


def route(options: RouterOptions, *, on_serving: Callable[[Routed], None]) -> None:
    """Route until SIGTERM or SIGINT, then drain; a second signal ends at once.

    Args:
        on_serving: called once calls are answered.

    Raises:
        ConfigError: if an address cannot be bound.
        MissingExtraError: if HTTP is asked for and its packages are missing.
        ModelError: if the model of the tokenizer cannot be had.
        KeyboardInterrupt: on a second signal.
    """
    warning = check_binding(options.host, access=options.access)
    codec, names = _tokenizer(options.model)
    collect_rarely()
    try:
        asyncio.run(_route(options, codec=codec, names=names, warning=warning, on_serving=on_serving))
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error


def collect_rarely() -> None:
    """Let Python look for cycles less often: thousands of living calls are no garbage, and none of ours makes a cycle.

    Saves about a tenth of the CPU of a request at 4,000 concurrent ones.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


async def _route(
    options: RouterOptions,
    *,
    codec: TextCodec | None,
    names: tuple[str, ...],
    warning: str | None,
    on_serving: Callable[[Routed], None],
) -> None:
    service = RouterService(
        options.settings,
        source=options.source,
        connect=lambda address: GrpcUpstream(address, token=options.replica_token, tls=options.replica_tls),
        clock=SystemClock(),
        codec=codec,
        # What waits is the law's to bound; the transport only needs room for it, and for what runs.
        limits=LimitSettings(
            max_requests=max(options.settings.max_queue, 1) + 8192, max_siblings=options.settings.max_siblings
        ),
        models=names,
    )

    def announce(addresses: RouterAddresses) -> None:
        http = addresses.faces[0] if addresses.faces else None
        warnings = () if warning is None else (warning,)
        on_serving(Routed(grpc=addresses.grpc, http=http, pid=os.getpid(), warnings=warnings))

    with stop_on_signals() as stop:
        await serve_router(
            service,
            host=options.host,
            port=options.grpc_port,
            access=options.access,
            faces=() if options.http_port is None else (_http_face(options),),
            stop=stop,
            drain_s=options.drain_s,
            on_serving=announce,
        )


def _http_face(options: RouterOptions) -> Face:
    """Return the OpenAI-compatible face; imported when it is served."""
    from rollmill.generator.http import serve_http
    from rollmill.generator.router.metrics import RouterMetrics

    scheme = "http" if options.access.tls is None else "https"

    async def serve(service: RouterService, stop: asyncio.Event, on_bound: Callable[[str], None]) -> None:
        await serve_http(
            service,
            host=options.host,
            port=options.http_port or 0,
            token=options.access.token,
            tls=options.access.tls,
            metrics=RouterMetrics(service, clock=SystemClock()),
            stop=stop,
            on_bound=lambda port: on_bound(f"{scheme}://{address_of(options.host, port)}"),
        )

    return serve


def _tokenizer(model: str | None) -> tuple[TextCodec | None, tuple[str, ...]]:
    """Return the tokenizer of a model, and the names under which requests may ask for it."""
    if model is None:
        return None, ()
    from rollmill.environments.rendering import Renderer
    from rollmill.weights.prepare import prepare

    path: Path = prepare(model, serving=True).path
    return Renderer(path), tuple(dict.fromkeys((model, path.name, str(path))))
