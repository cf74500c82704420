"""The generator process: one replica, from its first weights to a clean close of its books."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
from typing import TYPE_CHECKING

import msgspec

from rollmill.buffer.doorbell import Doorbell, ring
from rollmill.clock import SystemClock
from rollmill.config.engines import published_rounding
from rollmill.config.schema import RollmillConfig
from rollmill.errors import RunDirectoryError, WeightError
from rollmill.runtime.ahead import read_ahead, read_once
from rollmill.runtime.incarnation import Evaluating, Incarnation, ProcessSeconds, read_record, write_record
from rollmill.runtime.layout import CONTROLLER, EVALUATOR
from rollmill.runtime.parent import adopt_orphans
from rollmill.runtime.process import ProcessContext
from rollmill.runtime.run_repository import repository_of_run
from rollmill.runtime.threads import make_torch_deterministic
from rollmill.runtime.waiting import wait_for_preflight, wait_until
from rollmill.types import WeightManifest
from rollmill.weights.lean_import import import_transformers, without_collection
from rollmill.weights.repository import LocalModelRepository

if TYPE_CHECKING:
    import torch

    from rollmill.generator.early import EarlyModel
    from rollmill.generator.engines.embedded.model import ServedModel
    from rollmill.generator.engines.protocol import Engine

FIRST_WEIGHTS_DEADLINE_S = 300.0
BOOK_EVERY_S = 2.0
"""A killed replica loses the account of at most this long."""


def run_generator(context: ProcessContext) -> None:
    """Serve until SIGTERM.

    Raises:
        DeadlineExceeded: if the trainer publishes no first weights.
    """
    config, clock = context.config, SystemClock()
    # vLLM ends before its workers do, and their time would be on nobody's account.
    adopt_orphans(True)
    _import_all(config)
    if config.run.deterministic:
        make_torch_deterministic()
    repository = repository_of_run(config, context.layout)
    engine = _first_engine(context, repository, clock=clock)
    # The engine's own ledger began while it was built.
    engine_started_s = clock.now_s() - engine.load().wall_s
    asyncio.run(_serve(context, engine, repository=repository, engine_started_s=engine_started_s, clock=clock))
    ended_s = clock.now_s()
    book = _book(context, engine, engine_started_s=engine_started_s)
    write_record(context.layout.seconds(context.name, life=context.life), closed(book, at_s=ended_s))


def _import_all(config: RollmillConfig) -> None:
    """Import while the controller looks at model and data, and the trainer, which publishes first, imports."""
    with without_collection():
        if config.generator.engine == "embedded":
            import_transformers()
            importlib.import_module("rollmill.generator.engines.embedded.engine")
        importlib.import_module("rollmill.generator.main")


def _first_engine(context: ProcessContext, repository: LocalModelRepository, *, clock: SystemClock) -> Engine:
    """Return an engine over the newest weights.

    It has its copy of them: what was read here ends here, for the mapping would keep the first version's memory for the
    whole run.
    """
    from rollmill.generator.main import build_engine

    model_path, early = _read_early(context, repository, clock=clock)
    manifest, tensors, model = _load_newest(context, repository, early=early, clock=clock)
    # What it read early is in the model, or worth nothing.
    del early
    settings = context.config.generator
    return build_engine(
        model_path,
        settings=settings,
        borrow=_borrowed_threads(context),
        tensors=tensors,
        policy_version=manifest.policy_version,
        digest=manifest.digest,
        clock=clock,
        model=model,
        log=context.layout.log(f"{context.name}.{settings.engine}"),
    )


def _read_early(
    context: ProcessContext, repository: LocalModelRepository, *, clock: SystemClock
) -> tuple[str, EarlyModel | None]:
    """Return the model's directory, and what could be read of it before anything was published."""

    def read(path: str) -> EarlyModel | None:
        return _load_early(context, path, repository)

    with Doorbell.bind(context.layout.run_directory, context.name) as bell:
        ahead = read_ahead(context, read)
        preflight = wait_for_preflight(context.layout, wait=bell.wait, clock=clock)
    return preflight.model_path, read_once(preflight.model_path, ahead=ahead, read=read)


async def _serve(
    context: ProcessContext,
    engine: Engine,
    *,
    repository: LocalModelRepository,
    engine_started_s: float,
    clock: SystemClock,
) -> None:
    """Serve until SIGTERM, and keep the books meanwhile."""
    from rollmill.generator.main import serve

    settings, layout = context.config.generator, context.layout
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with asyncio.TaskGroup() as tasks:
        books = tasks.create_task(_keep_books(context, engine, engine_started_s=engine_started_s, clock=clock))
        await serve(
            engine=engine,
            repository=repository,
            kv_policy=settings.kv_on_update,
            address_file=layout.address(context.name),
            stop=stop,
            load_deadline_s=settings.load_deadline_s,
            drain_on_update_s=settings.drain_on_update_s,
            # Nobody waits for an answer of the evaluator while it loads: memory is worth more there.
            stage_weights=settings.stage_weights and context.name != EVALUATOR,
            limits=settings.limits,
            on_serving=lambda _: ring(layout.run_directory, CONTROLLER),
        )
        books.cancel()


def _borrowed_threads(context: ProcessContext) -> int:
    """Return how many threads beside its own a replica may take while cores stand idle."""
    config = context.config
    if config.run.deterministic or context.name == EVALUATOR:
        return 0
    asked = config.generator.borrowed_threads
    return config.trainer.threads if asked is None else asked


async def _keep_books(context: ProcessContext, engine: Engine, *, engine_started_s: float, clock: SystemClock) -> None:
    """Write down where the seconds went so far, in case this process is killed."""
    path = context.layout.seconds(context.name, life=context.life)
    while True:
        await asyncio.to_thread(write_record, path, _book(context, engine, engine_started_s=engine_started_s))
        await asyncio.sleep(BOOK_EVERY_S)


def _book(context: ProcessContext, engine: Engine, *, engine_started_s: float) -> ProcessSeconds:
    load = engine.load()
    seconds = dict(load.seconds)
    seconds["startup"] = seconds.get("startup", 0.0) + engine_started_s - context.spawned_at_s
    return ProcessSeconds(
        process=context.name,
        incarnation=context.incarnation.number,
        spawned_at_s=context.spawned_at_s,
        closed_at_s=engine_started_s + load.wall_s,
        seconds=seconds,
        closed=False,
    )


def closed(book: ProcessSeconds, *, at_s: float) -> ProcessSeconds:
    """Return the last book of a process that ends: what is left since its engine closed its own is `shutdown`.

    Example:
        >>> book = ProcessSeconds(process="g", incarnation=1, spawned_at_s=0, closed_at_s=9.0, seconds={"decode": 9.0})
        >>> closed(book, at_s=9.5).seconds
        {'decode': 9.0, 'shutdown': 0.5}
    """
    seconds = {**book.seconds, "shutdown": book.seconds.get("shutdown", 0.0) + at_s - book.closed_at_s}
    return msgspec.structs.replace(book, closed_at_s=at_s, seconds=seconds, closed=True)


def _load_early(context: ProcessContext, model_path: str, repository: LocalModelRepository) -> EarlyModel | None:
    """Return the model that a new run begins with, read while the trainer reads and publishes it too."""
    from rollmill.generator.early import load_early

    generator, layout = context.config.generator, context.layout
    begins = context.incarnation.checkpoint is None and repository.latest() is None
    if generator.engine != "embedded" or not begins or layout.asked_version(context.name).exists():
        return None
    return load_early(
        model_path,
        dtype=generator.dtype,
        kernels=generator.kernels,
        quantization=published_rounding(generator),
        threads=generator.threads,
    )


def _load_newest(
    context: ProcessContext, repository: LocalModelRepository, *, early: EarlyModel | None, clock: SystemClock
) -> tuple[WeightManifest, dict[str, torch.Tensor], ServedModel | None]:
    """Return the newest weights, or those that an evaluation under way asks for, where they can still be had.

    Args:
        early: what was read before anything was published; returned instead of tensors if it was just that.
    """
    newest = _first_weights(context, repository, clock=clock)
    if early is not None and early.is_what_was_published(newest):
        with contextlib.suppress(WeightError):  # retired by now
            _hold(repository, newest.policy_version)
            return newest, {}, early.model
    file = context.layout.asked_version(context.name)
    if file.exists():
        with contextlib.suppress(WeightError, RunDirectoryError):
            asked = read_record(file, Evaluating).policy_version
            return repository.manifest(asked), _held_and_loaded(repository, asked), None
    while True:
        manifest = newest
        version = manifest.policy_version
        try:
            return manifest, _held_and_loaded(repository, version), None
        except WeightError:
            # It was retired meanwhile: there is a newer one.
            newest = _first_weights(context, repository, clock=clock)
            if newest.policy_version == version:
                raise


def _held_and_loaded(repository: LocalModelRepository, version: int) -> dict[str, torch.Tensor]:
    """Return weights, held before they are read so that the trainer does not retire them meanwhile."""
    _hold(repository, version)
    return repository.load(version)


def _hold(repository: LocalModelRepository, version: int) -> None:
    # Under the name by which the service holds what it serves.
    repository.hold(version, owner=f"generator-{os.getpid()}")


def _first_weights(context: ProcessContext, repository: LocalModelRepository, *, clock: SystemClock) -> WeightManifest:
    """Return the newest manifest of the run's present history, waiting for it."""

    def newest() -> WeightManifest | None:
        # Read anew each time: the trainer may be lost, and with it this history, while a replica waits.
        history_id = read_record(context.layout.incarnation, Incarnation).history_id
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
