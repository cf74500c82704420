"""Builders for tests of a replica: an engine with the repository that it loads from, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Ids
from typing import Any

from generator_builders import MAX_LEN, MemoryRepository, random_model, request
from rollmill.clock import Clock, SystemClock
from rollmill.generator.engines.fake import FakeEngine, FakeFaults
from rollmill.generator.engines.protocol import Engine
from rollmill.generator.loading import Replica
from rollmill.generator.state import refusal
from rollmill.types import Turn


def repository_of(*models: Any) -> MemoryRepository:
    """Versions 1, 2, ... of these models, each with its true canary."""
    repository = MemoryRepository()
    for model in models:
        repository.put(model)
    return repository


def two_models() -> tuple[Any, Any]:
    return random_model(seed=1), random_model(seed=2)


def fake_engine(repository: MemoryRepository, *, faults: FakeFaults | None = None, **changes: Any) -> FakeEngine:
    """A fake that serves version 1 of a repository."""
    settings = {"max_num_seqs": 8, "max_model_len": MAX_LEN, **changes}
    return FakeEngine(clock=SystemClock(), digest=repository.manifest(1).digest, faults=faults, **settings)


async def started(
    engine: Engine,
    repository: MemoryRepository,
    *,
    clock: Clock | None = None,
    stage_weights: bool = True,
    **settings: Any,
) -> Replica:
    """A replica that serves version 1."""
    replica = Replica(
        engine=engine,
        repository=repository,  # pyright: ignore[reportArgumentType]
        owner="generator-0",
        clock=SystemClock() if clock is None else clock,
        stage_weights=stage_weights,
        **{"kv_policy": "keep", "load_deadline_s": 20.0, **settings},
    )
    await replica.start()
    return replica


async def in_flight(engine: FakeEngine, names: Ids[str], *, tokens: int = 12) -> list[asyncio.Task[Turn]]:
    """Start requests, wait until each has two tokens or more, and pause the engine there."""
    tasks = [
        asyncio.ensure_future(engine.generate(request(name, [1, 2, number + 3], max_new_tokens=tokens, seed=number)))
        for number, name in enumerate(names)
    ]
    async with asyncio.timeout(20):
        while engine.load().output_tokens < 2 * len(names):
            await engine.abort("nobody")
            await asyncio.sleep(0)
    await engine.pause("keep")
    return tasks


def why_refused(replica: Replica) -> str | None:
    """Why the replica takes no request, as its server says it."""
    return refusal(replica.standing, to_generate=True)
