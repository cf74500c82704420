"""Builds an engine and serves it until told to stop. Signals, configuration and first weights are the caller's."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rollmill.clock import Clock, SystemClock
from rollmill.config.precision import resolve_dtype
from rollmill.errors import EngineDead, ModelError
from rollmill.generator.engines.fake import FakeEngine
from rollmill.generator.engines.protocol import Engine, KvPolicy
from rollmill.generator.loading import Replica
from rollmill.generator.server import PolicyInferenceServicer, new_server
from rollmill.generator.service import InferenceService, TextCodec
from rollmill.weights.protocol import ModelRepository

if TYPE_CHECKING:
    import torch

    from rollmill.generator.engines.embedded.model import ServedModel

EngineKind = Literal["embedded", "fake"]


def build_engine(
    path: str | Path,
    *,
    kind: EngineKind = "embedded",
    dtype: str = "auto",
    kernels: Literal["auto", "native", "torch"] = "auto",
    threads: int = 1,
    max_num_seqs: int,
    max_model_len: int,
    tensors: Mapping[str, torch.Tensor],
    policy_version: int,
    digest: str,
    clock: Clock,
    model: ServedModel | None = None,
) -> Engine:
    """Return an engine that serves these weights.

    Args:
        path: local Hugging Face directory; only its configuration is read.
        kind: `embedded` or `fake`.
        dtype: `auto`, `float32` or `bfloat16`.
        kernels: whether compiled kernels multiply with the weights: `auto`, `native` or `torch`.
        threads: torch threads of this process.
        max_num_seqs: sequences decoded at once.
        max_model_len: longest prompt plus output, tokens.
        tensors: the first weights.
        policy_version: their publication number.
        digest: their digest.
        clock: stamps, deadlines and the seconds ledger.
        model: of `embedded`, if it was made before and holds these weights.

    Raises:
        ModelError: if the architecture cannot be served.
        WeightError: if the tensors do not fit it.
        ConfigError: if the dtype is unknown.
    """
    if kind == "fake":
        return FakeEngine(
            clock=clock,
            vocabulary_size=_vocabulary_size(path),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            policy_version=policy_version,
            digest=digest,
        )
    import torch

    from rollmill.generator.engines.embedded.engine import EmbeddedEngine

    torch.set_num_threads(threads)
    return EmbeddedEngine(
        path,
        dtype=resolve_dtype(dtype),
        kernels=kernels,
        tensors=tensors,
        policy_version=policy_version,
        digest=digest,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        clock=clock,
        model=model,
    )


async def serve(
    *,
    engine: Engine,
    repository: ModelRepository,
    kv_policy: KvPolicy,
    address_file: str | Path,
    host: str = "127.0.0.1",
    stop: asyncio.Event,
    load_deadline_s: float,
    stage_weights: bool = True,
    codec: TextCodec | None = None,
    drain_s: float = 5.0,
    on_serving: Callable[[], None] | None = None,
    clock: Clock | None = None,
) -> None:
    """Serve until `stop` is set, then drain and close engine and server.

    The engine's version is held in the repository and proven on its canary before the address is written.

    Args:
        engine: serves a version that the repository knows.
        repository: where later versions are pulled from.
        kv_policy: what happens to the KV of requests in flight when weights change.
        address_file: gets `{"address": ..., "pid": ..., "policy_version": ...}`, atomically, once calls are answered.
        host: interface to bind; the port is chosen by the system.
        stop: ends the service.
        load_deadline_s: a weight load that takes longer fails.
        stage_weights: whether new weights are made ready while the old ones serve, where the engine can.
        codec: of the model's tokenizer; without it only token ids are taken.
        drain_s: time for running requests to finish after `stop`.
        on_serving: called once the address is written; wakes whoever waits for it.
        clock: times of loads; the machine's if `None`.

    Raises:
        EngineDead: if the engine died while serving, with its first error as the cause.
        WeightMismatch: if the first version's canary disagrees.

    Cancellation:
        closes engine and server without draining.
    """
    replica = Replica(
        engine=engine,
        repository=repository,
        kv_policy=kv_policy,
        load_deadline_s=load_deadline_s,
        stage_weights=stage_weights,
        owner=f"generator-{os.getpid()}",
        clock=SystemClock() if clock is None else clock,
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            service = InferenceService(replica, tasks=tasks, codec=codec)
            servicer = PolicyInferenceServicer(service)
            server = new_server(servicer)
            port = server.add_insecure_port(f"{host}:0")
            try:
                await replica.start()
                await servicer.publish_health()
                await server.start()
                _write_address(Path(address_file), address=f"{host}:{port}", engine=engine)
                if on_serving is not None:
                    on_serving()
                await _until_over(stop, service.engine_died)
                await service.drain(drain_s, reason="the generator was told to stop")
            finally:
                await server.stop(grace=1.0)
    except BaseExceptionGroup as group:  # one error as a rule, and the first is the cause of the others
        raise group.exceptions[0] from group
    finally:
        await engine.close()
        await replica.close()
    if service.engine_died.is_set():
        raise EngineDead(replica.standing.reason)


async def _until_over(stop: asyncio.Event, engine_died: asyncio.Event) -> None:
    async with asyncio.TaskGroup() as waits:
        waiting = {waits.create_task(event.wait()) for event in (stop, engine_died)}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for wait in waiting:
            wait.cancel()


def _write_address(path: Path, *, address: str, engine: Engine) -> None:
    record = {"address": address, "pid": os.getpid(), "policy_version": engine.info().policy_version}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(record), encoding="utf-8")
    partial.replace(path)


def _vocabulary_size(path: str | Path) -> int:
    config = Path(path) / "config.json"
    try:
        return int(json.loads(config.read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{config} does not say the vocabulary's size ({error}); give a prepared model") from error
