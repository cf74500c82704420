"""`rollmill sandbox serve` and `route`: sandboxes over HTTP, of one node and of many."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollmill.cli.output import json_option, show, show_warnings
from rollmill.cli.sandbox_backends import provider_of, settings_of
from rollmill.cli.sandbox_options import backend_option, directory_option, isolation_option, store_option
from rollmill.errors import ConfigError
from rollmill.sandboxes.backends.namespaces import NamespaceProvider
from rollmill.sandboxes.images import ImageStoreSettings
from rollmill.sandboxes.isolation import parse_level

if TYPE_CHECKING:
    from rollmill.sandboxes.admission import PressureSettings, SandboxPool
    from rollmill.sandboxes.admission.watching import Sample
    from rollmill.sandboxes.protocol import Provider
    from rollmill.sandboxes.service import Listen, ServiceSettings, Template
    from rollmill.sandboxes.service.router import FleetSettings
    from rollmill.sandboxes.tally import SandboxTally
    from rollmill.sandboxes.watchdog import Watchdog


@click.command("serve")
@click.option(
    "--listen",
    default="127.0.0.1:3000",
    show_default=True,
    metavar="HOST:PORT",
    help="Address; port 0 lets the system choose. Others than loopback are reached by whoever has the token.",
)
@click.option(
    "--token-env",
    required=True,
    metavar="NAME",
    help="Environment variable that holds the token of the control API, 16 characters or more.",
)
@click.option(
    "--templates",
    "templates_path",
    type=click.Path(path_type=Path),
    default=None,
    help="TOML file that names images and their limits; without it `base` is the host's own directories.",
)
@click.option("--max-sandboxes", type=click.IntRange(min=1), default=1000, show_default=True, help="At a time.")
@click.option(
    "--max-starting",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="At a time; it settles below that by itself. Others wait in the queue.",
)
@click.option(
    "--max-timeout-s",
    type=click.FloatRange(min=1),
    default=86_400.0,
    show_default=True,
    help="Longest to be asked for.",
)
@click.option(
    "--domain",
    default=None,
    help="What callers are told to reach sandboxes by, as PORT-ID.DOMAIN, behind a proxy with TLS.",
)
@isolation_option
@click.option(
    "--watchdog/--no-watchdog",
    default=True,
    show_default=True,
    help="End sandboxes that hold a bomb; without it their caps alone hold.",
)
@click.option(
    "--least-free-disk",
    type=click.FloatRange(min=0.0, max=1.0, max_open=True),
    default=0.1,
    show_default=True,
    metavar="SHARE",
    help="Start nothing while less of the bytes or inodes is left where records, images and snapshots are; 0: never.",
)
@click.option(
    "--without-internet",
    is_flag=True,
    help="Make sandboxes for callers who ask for the internet too; they have none. Older SDKs always ask.",
)
@click.option(
    "--snapshots",
    type=click.Path(path_type=Path),
    default=None,
    help="Where snapshots of files are kept, and paused sandboxes when the node is short; in memory unless given.",
)
@click.option(
    "--leases",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="Where is written what callers were promised, for the next service; with --snapshots leases.sqlite there.",
)
@store_option
@backend_option
@directory_option
@json_option
def serve_command(
    listen: str,
    token_env: str,
    templates_path: Path | None,
    max_sandboxes: int,
    max_starting: int,
    max_timeout_s: float,
    domain: str | None,
    minimum_isolation: str,
    watchdog: bool,
    least_free_disk: float,
    without_internet: bool,
    snapshots: Path | None,
    leases: Path | None,
    store: Path | None,
    backend: str,
    directory: Path | None,
    as_json: bool,
) -> None:
    """Serve sandboxes of this machine to clients of E2B's API, until SIGTERM.

    They end with the service. With --snapshots those that are paused as files, and snapshots that are templates, are
    there again when a service is started with the same directory, also after a crash.
    """
    from rollmill.sandboxes.service import Listen, ServiceSettings, load_templates
    from rollmill.sandboxes.service.serving import check_serving, parse_listen

    check_serving()
    host, port = parse_listen(listen)
    where = Listen(host=host, port=port, token=_token(token_env), domain=domain)
    settings = ServiceSettings(
        owner=f"serve-{os.getpid()}",
        max_sandboxes=max_sandboxes,
        max_timeout_s=max_timeout_s,
        default_timeout_s=min(300.0, max_timeout_s),
        without_internet=without_internet,
    )
    provider = settings_of(
        backend,
        directory=directory,
        minimum_isolation=parse_level(minimum_isolation),
        images=ImageStoreSettings(directory=store),
        snapshot_directory=snapshots,
    )
    templates = load_templates(templates_path)

    def announce(url: str) -> None:
        show_warnings(where.warnings(), as_json=as_json)
        document = {"url": url, "pid": os.getpid(), "templates": sorted(templates), "warnings": where.warnings()}
        show(document, text=_text(url, token_env, sorted(templates)), as_json=as_json)

    if leases is None and snapshots is not None:
        leases = snapshots / "leases.sqlite"
    _run(
        _serve(
            where,
            leases=leases,
            settings=settings,
            backend=provider,
            templates=templates,
            watched=watchdog,
            max_starting=max_starting,
            least_free_disk=least_free_disk,
            announce=announce,
        )
    )


def _run(serving: Coroutine[Any, Any, None]) -> None:
    """Serve until it has been stopped.

    Raises:
        KeyboardInterrupt: on a second signal.
    """
    try:
        asyncio.run(serving)
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error


def _token(name: str) -> str:
    token = os.environ.get(name, "")
    if not token:
        raise ConfigError(
            f"the environment variable {name} (--token-env) is empty or not set; set it, for example: export "
            f"{name}=$(openssl rand -hex 16)"
        )
    return token


async def _serve(
    where: Listen,
    *,
    settings: ServiceSettings,
    backend: Any,
    templates: Mapping[str, Template],
    watched: bool,
    max_starting: int,
    least_free_disk: float,
    leases: Path | None,
    announce: Callable[[str], None],
) -> None:
    from rollmill.runtime.stopping import stop_on_signals
    from rollmill.sandboxes.admission import NodePressure
    from rollmill.sandboxes.metrics import SandboxFigures, SandboxMetrics, count_states
    from rollmill.sandboxes.service import Node, serve_node
    from rollmill.sandboxes.service.law import left_behind
    from rollmill.sandboxes.service.ledger import Ledger
    from rollmill.sandboxes.service.moving import move_to_disk
    from rollmill.sandboxes.service.room import Room, room_of
    from rollmill.sandboxes.service.stock import PooledStock
    from rollmill.sandboxes.tally import SandboxTally
    from rollmill.sandboxes.watchdog import GuardSettings, NodeGuard, NodeReader

    disks = backend.disks() if least_free_disk else ()
    tally = SandboxTally()
    ready = {one.spec(wall_s=settings.max_lifetime_s): one.ready for one in templates.values() if one.ready}
    async with contextlib.AsyncExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        provider = await stack.enter_async_context(provider_of(backend, observer=tally))
        watchdog = await stack.enter_async_context(_watchdog(provider, backend)) if watched else None
        max_running = settings.max_sandboxes + sum(ready.values())

        async def to_disk(count: int) -> int:
            return await move_to_disk(node, count)

        pool = _pool(
            provider,
            settings=settings,
            running=max_running,
            max_starting=max_starting,
            tally=tally,
            pressure=NodePressure(disks).sample,
            on_pressure=_pressure_settings(least_free_disk),
            to_disk=to_disk if _keeps_on_disk(backend) else None,
        )
        await stack.enter_async_context(pool)
        if _keeps_on_disk(backend):  # the directory is this provider's alone, so whoever made these has ended
            await provider.delete_snapshots(left_behind([one.snapshot_id for one in await provider.snapshots()]))
        stock = PooledStock(provider, pool, ready=ready)
        ledger = None if leases is None else stack.enter_context(contextlib.closing(Ledger(leases)))
        node = await stack.enter_async_context(
            Node(provider, settings=settings, templates=templates, stock=stock, ledger=ledger)
        )
        # Busy processors slow the pool's starts down; they are no reason to stop them.
        bounds = GuardSettings(cpu_some=1.0, disk_free=least_free_disk, inodes_free=least_free_disk)
        guard = await stack.enter_async_context(NodeGuard(pool, reader=NodeReader(disks), settings=bounds))

        async def metrics() -> bytes:
            waiting = pool.statistics()
            figures = SandboxFigures(
                states=count_states(await provider.list(), queued=waiting.queued),
                tally=tally.statistics(),
                pool=waiting,
                watchdog=None if watchdog is None else watchdog.statistics(),
                guard=guard.statistics(),
                reaper=await asyncio.to_thread(provider.trash),
            )
            return SandboxMetrics(lambda: figures).render()

        def room() -> Room:
            return room_of(pool.statistics(), guard.statistics(), max_running=max_running)

        await serve_node(node, listen=where, stop=stop, on_bound=announce, metrics=metrics, room=room)


def _keeps_on_disk(backend: Any) -> bool:
    """Return whether snapshots go to a disk: those in memory would make little room for what is paused there."""
    return getattr(backend, "snapshot_directory", None) is not None


def _pressure_settings(least_free_disk: float) -> PressureSettings:
    """Return how the pool slows down, with starts that become fewer a little before the guard stops them."""
    from rollmill.sandboxes.admission import PressureSettings, Ramp

    if not least_free_disk:
        return PressureSettings()
    ramp = Ramp(begin=1.2 * least_free_disk, end=0.5 * least_free_disk)
    return PressureSettings(disk_free=ramp, inodes_free=ramp)


def _pool(
    provider: Provider,
    *,
    settings: ServiceSettings,
    running: int,
    max_starting: int,
    tally: SandboxTally,
    pressure: Sample,
    on_pressure: PressureSettings,
    to_disk: Callable[[int], Awaitable[int]] | None,
) -> SandboxPool:
    from rollmill.sandboxes.admission import AdmissionSettings, PoolSettings, SandboxPool

    admission = AdmissionSettings(
        max_starting=max_starting,
        max_running=running,
        max_suspended=settings.max_sandboxes,
        deadline_s=settings.create_s,
        pressure=on_pressure,
    )
    return SandboxPool(
        provider,
        settings=PoolSettings(name="ready", admission=admission),
        pressure=pressure,
        observe=lambda acquired: tally.queued(acquired.queue_s),
        suspend_to_disk=to_disk,
    )


def _watchdog(provider: Any, backend: Any) -> Watchdog:
    from rollmill.sandboxes.backends.namespaces.oversight import NamespaceOverseen
    from rollmill.sandboxes.watchdog import NodeReader, ProviderOverseen, Watchdog, WatchdogSettings

    settings = WatchdogSettings(directory=backend.records_directory() / "evidence")
    # A subclass has a kernel between its programs and this one, which alone knows what they do.
    overseen = NamespaceOverseen if type(provider) is NamespaceProvider else ProviderOverseen
    return Watchdog(overseen(provider), settings=settings, pressure=NodeReader().pressure)


def _text(url: str, token_env: str, templates: list[str]) -> str:
    return "\n".join(
        [
            f"{url}  (templates: {', '.join(templates)})",
            f"For E2B's SDK: export E2B_API_URL={url} E2B_SANDBOX_URL={url} E2B_API_KEY=${token_env}",
            f"Stop with Ctrl-C or: kill {os.getpid()}",
        ]
    )


@click.command("route")
@click.option(
    "--node", "nodes", multiple=True, required=True, metavar="URL", help="A node that serves; may be repeated."
)
@click.option(
    "--listen",
    default="127.0.0.1:3100",
    show_default=True,
    metavar="HOST:PORT",
    help="Address; port 0 lets the system choose.",
)
@json_option
def route_command(nodes: tuple[str, ...], listen: str, as_json: bool) -> None:
    """Serve many nodes behind one address: new sandboxes go where most room is, calls where their sandbox is."""
    from rollmill.sandboxes.service.serving import check_serving, parse_listen

    check_serving()
    from rollmill.sandboxes.service.router import FleetSettings

    host, port = parse_listen(listen)
    settings = FleetSettings(nodes=nodes)

    def announce(url: str) -> None:
        text = f"{url}  (nodes: {', '.join(nodes)})\nStop with Ctrl-C or: kill {os.getpid()}"
        show({"url": url, "pid": os.getpid(), "nodes": list(nodes)}, text=text, as_json=as_json)

    _run(_route(settings, host=host, port=port, announce=announce))


async def _route(settings: FleetSettings, *, host: str, port: int, announce: Callable[[str], None]) -> None:
    from rollmill.runtime.stopping import stop_on_signals
    from rollmill.sandboxes.service import ServiceSettings
    from rollmill.sandboxes.service.router import Fleet, RouterApp
    from rollmill.sandboxes.service.serving import serve_app

    with stop_on_signals() as stop:
        async with Fleet(settings) as fleet:
            bounds = ServiceSettings()
            app = RouterApp(fleet, settings=bounds)
            await serve_app(app, host=host, port=port, settings=bounds, stop=stop, on_bound=announce)
