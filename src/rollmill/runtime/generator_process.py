"""The generator process: one replica, from its first weights to a clean close of its books."""

from __future__ import annotations

import asyncio
import signal

from rollmill.buffer.doorbell import Doorbell
from rollmill.clock import SystemClock
from rollmill.runtime.incarnation import Preflight, ProcessSeconds, read_record, write_record
from rollmill.runtime.process import ProcessContext
from rollmill.runtime.threads import make_torch_deterministic
from rollmill.runtime.waiting import wait_until
from rollmill.types import WeightManifest
from rollmill.weights.repository import LocalModelRepository

FIRST_WEIGHTS_DEADLINE_S = 300.0


def run_generator(context: ProcessContext) -> None:
    """Serve until SIGTERM.

    Raises:
        DeadlineExceeded: if the trainer publishes no first weights.
    """
    # Torch and transformers load while the trainer, which publishes first, loads too.
    from rollmill.generator.main import build_engine, serve

    config, layout, clock = context.config, context.layout, SystemClock()
    if config.run.deterministic:
        make_torch_deterministic()
    preflight = read_record(layout.preflight, Preflight)
    repository = LocalModelRepository(
        layout.weights, transport=config.weights.transport, keep_versions=config.weights.keep_versions
    )
    manifest = _first_weights(context, repository, clock=clock)
    tensors = repository.load(manifest.policy_version)
    engine = build_engine(
        preflight.model_path,
        kind=config.generator.engine,
        dtype=config.generator.dtype,
        threads=config.generator.threads,
        max_slots=config.generator.max_slots,
        max_model_len=config.generator.max_model_len,
        tensors=tensors,
        policy_version=manifest.policy_version,
        digest=manifest.digest,
        clock=clock,
    )
    # The engine has its copy; the mapping would keep the first version's memory for the whole run.
    del tensors
    # The engine's own ledger began while it was built.
    engine_started_s = clock.now_s() - engine.load().wall_s

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await serve(
            engine=engine,
            repository=repository,
            kv_policy=config.generator.kv_on_update,
            address_file=layout.address(context.name),
            stop=stop,
            load_deadline_s=config.generator.load_deadline_s,
        )

    asyncio.run(main())
    load = engine.load()
    seconds = dict(load.seconds)
    seconds["startup"] = seconds.get("startup", 0.0) + engine_started_s - context.spawned_at_s
    closed_at_s = clock.now_s()
    seconds["shutdown"] = seconds.get("shutdown", 0.0) + closed_at_s - engine_started_s - load.wall_s
    number = context.incarnation.number
    write_record(
        layout.seconds(context.name, incarnation=number),
        ProcessSeconds(
            process=context.name,
            incarnation=number,
            spawned_at_s=context.spawned_at_s,
            closed_at_s=closed_at_s,
            seconds=seconds,
        ),
    )


def _first_weights(context: ProcessContext, repository: LocalModelRepository, *, clock: SystemClock) -> WeightManifest:
    """Return the newest manifest of this incarnation's history, waiting for it."""
    history_id = context.incarnation.history_id

    def newest() -> WeightManifest | None:
        manifest = repository.latest()
        return manifest if manifest is not None and manifest.history_id == history_id else None

    with Doorbell.bind(context.layout.run_directory, context.name) as bell:
        wait_until(
            lambda: newest() is not None,
            wait=bell.wait,
            clock=clock,
            deadline_s=FIRST_WEIGHTS_DEADLINE_S,
            what="the trainer's first publication of weights",
        )
    manifest = newest()
    if manifest is None:
        raise AssertionError("the newest manifest cannot vanish once it was seen")
    return manifest
