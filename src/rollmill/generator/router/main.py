"""Serves a router until told to stop. Signals, tokenizer and the other faces are the caller's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from rollmill.generator.router.server import new_router_server
from rollmill.generator.router.service import RouterService
from rollmill.generator.security import Access, address_of
from rollmill.generator.server import bind

_CLOSE_S = 1.0

Face = Callable[[RouterService, asyncio.Event, Callable[[str], None]], Awaitable[None]]
"""Another way to call the router: serves until the event is set, and says its address once it is bound."""


class RouterAddresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where a router answers.

    Attributes:
        grpc: `host:port`.
        faces: addresses of the other faces, in their order.
    """

    grpc: str
    faces: tuple[str, ...] = ()


async def serve_router(
    service: RouterService,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    access: Access | None = None,
    faces: Sequence[Face] = (),
    stop: asyncio.Event,
    drain_s: float = 30.0,
    on_serving: Callable[[RouterAddresses], None] | None = None,
) -> None:
    """Route until `stop` is set, then drain; replicas go on.

    Calls are answered at once; while no replica serves they wait in the queue.

    Args:
        service: what is served.
        host: interface to bind; who may bind what is `security.check_binding`'s to say.
        port: of gRPC; 0 lets the system choose.
        access: what callers must show.
        faces: what serves beside gRPC.
        stop: ends the router.
        drain_s: time for running requests to finish after `stop`.
        on_serving: called once all faces are bound.

    Raises:
        ConfigError: if an address cannot be bound.

    Cancellation:
        ends all requests at once.
    """
    closing = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as tasks:
            server, servicer = new_router_server(service, tasks=tasks, access=access)
            bound = bind(server, address_of(host, port), access=access)
            await server.start()
            loops = [
                tasks.create_task(service.run(), name="fleet"),
                tasks.create_task(servicer.publish_health(), name="health"),
            ]
            try:
                addresses = [await _started(face, service, tasks=tasks, stop=closing) for face in faces]
                if on_serving is not None:
                    on_serving(RouterAddresses(grpc=address_of(host, bound), faces=tuple(addresses)))
                await stop.wait()
                await service.drain(drain_s, reason="the router was told to stop")
            finally:
                closing.set()
                servicer.exchanges.end()
                await server.stop(grace=_CLOSE_S)
                for loop in loops:
                    loop.cancel()
    except BaseExceptionGroup as group:  # one error as a rule, and the first is the cause of the others
        raise group.exceptions[0] from group


async def _started(face: Face, service: RouterService, *, tasks: asyncio.TaskGroup, stop: asyncio.Event) -> str:
    """Start a face and return its address once it is bound; its own error ends the task group."""
    bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = tasks.create_task(_run(face, service, stop=stop, on_bound=bound.set_result), name="face")
    await asyncio.wait({bound, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not bound.done():
        bound.cancel()
        await serving
    return bound.result()


async def _run(face: Face, service: RouterService, *, stop: asyncio.Event, on_bound: Callable[[str], None]) -> None:
    await face(service, stop, on_bound)
