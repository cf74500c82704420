"""Builds an engine and serves it until told to stop. Signals, configuration and first weights are the caller's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from rollmill.clock import Clock, SystemClock
from rollmill.config.precision import resolve_dtype
from rollmill.config.schema import GeneratorSettings
from rollmill.config.serving import LimitSettings
from rollmill.cores import CoreBorrower
from rollmill.errors import EngineDead, EngineError, MissingExtraError, ModelError
from rollmill.generator.adapters import AdapterLoader, AdapterSource
from rollmill.generator.engines.fake import FakeEngine
from rollmill.generator.engines.protocol import Engine, UpdatePolicy
from rollmill.generator.loading import Replica
from rollmill.generator.security import Access, address_of
from rollmill.generator.server import bind, new_server
from rollmill.generator.service import InferenceService, TextCodec
from rollmill.weights.protocol import ModelRepository

if TYPE_CHECKING:
    import torch

    from rollmill.generator.engines.embedded.drafting import DraftModel
    from rollmill.generator.engines.embedded.model import ServedModel


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where a replica answers.

    Attributes:
        grpc: `host:port`.
        others: name of a face -> its address.
    """

    grpc: str
    others: dict[str, str] = {}


class Face(Protocol):
    """Another way to call the same replica, beside gRPC."""

    @property
    def name(self) -> str:
        """Its protocol, for example `http`."""
        ...

    async def serve(self, service: InferenceService, *, stop: asyncio.Event, on_bound: Callable[[str], None]) -> None:
        """Serve until `stop` is set.

        Args:
            on_bound: gets the address, once, when calls are answered.
        """
        ...


def build_engine(
    path: str | Path,
    *,
    settings: GeneratorSettings,
    tensors: Mapping[str, torch.Tensor],
    policy_version: int,
    digest: str,
    clock: Clock,
    borrow: int = 0,
    model: ServedModel | None = None,
    log: Path | None = None,
) -> Engine:
    """Return an engine that serves these weights.

    Args:
        path: local Hugging Face directory; only its configuration is read.
        settings: which engine, and how it computes.
        tensors: the first weights.
        policy_version: their publication number.
        digest: their digest.
        clock: stamps, deadlines and the seconds ledger.
        borrow: of `embedded`: threads beside its own while cores stand idle; see `rollmill.cores`.
        model: of `embedded`, if it was made before and holds these weights.
        log: of `vllm` and `sglang`: file for what its server prints; in a folder that goes with the server if `None`.

    Raises:
        ModelError: if the architecture cannot be served.
        WeightError: if the tensors do not fit it.
        ConfigError: if the dtype is unknown, or a setting cannot be used.
        MissingExtraError: if the engine's packages or its environment are missing.
        EngineError: if the engine's server does not start.
    """
    if settings.engine == "fake":
        return FakeEngine(
            clock=clock,
            vocabulary_size=_vocabulary_size(path),
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            policy_version=policy_version,
            digest=digest,
        )
    if settings.engine != "embedded":
        return _starter(settings.engine)(
            path,
            settings=settings,
            tensors=tensors,
            policy_version=policy_version,
            digest=digest,
            clock=clock,
            log=log,
        )
    import torch

    from rollmill.generator.engines.embedded.engine import EmbeddedEngine
    from rollmill.generator.engines.embedded.settings import EmbeddedSettings

    torch.set_num_threads(settings.threads)
    return EmbeddedEngine(
        path,
        settings=EmbeddedSettings.of(settings),
        tensors=tensors,
        policy_version=policy_version,
        digest=digest,
        clock=clock,
        draft=_draft_of(path, settings=settings),
        before_step=_borrower(settings.threads, borrow=borrow, clock=clock),
        model=model,
    )


def _draft_of(path: str | Path, *, settings: GeneratorSettings) -> DraftModel | None:
    if settings.speculation != "draft":
        return None
    from rollmill.generator.draft import load_draft

    return load_draft(path, settings=settings, dtype=resolve_dtype(settings.dtype), kernels=settings.kernels)


def _borrower(threads: int, *, borrow: int, clock: Clock) -> CoreBorrower | None:
    if borrow == 0:
        return None
    import torch

    return CoreBorrower(own=threads, borrow=borrow, set_threads=torch.set_num_threads, now_s=clock.now_s)


def _starter(kind: Literal["vllm", "sglang"]) -> Callable[..., Engine]:
    try:
        if kind == "sglang":
            from rollmill.generator.engines.sglang.start import start_sglang

            return start_sglang
        from rollmill.generator.engines.vllm.start import start_vllm
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            package=error.name or "httpx2", purpose=f'generator.engine "{kind}"', extra=kind
        ) from error
    return start_vllm


async def serve(
    *,
    engine: Engine,
    repository: ModelRepository,
    kv_policy: UpdatePolicy,
    address_file: str | Path | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    access: Access | None = None,
    stop: asyncio.Event,
    load_deadline_s: float,
    drain_on_update_s: float = 10.0,
    stage_weights: bool = True,
    codec: TextCodec | None = None,
    limits: LimitSettings | None = None,
    models: Sequence[str] = (),
    adapters: Mapping[str, AdapterSource] | None = None,
    faces: Sequence[Face] = (),
    drain_s: float = 5.0,
    on_serving: Callable[[Addresses], None] | None = None,
    clock: Clock | None = None,
) -> None:
    """Serve until `stop` is set, then drain and close engine, server and other faces.

    The engine's version is held in the repository and proven on its canary before the address is written.

    Args:
        engine: serves a version that the repository knows.
        repository: where later versions are pulled from.
        kv_policy: what happens to requests in flight when weights change.
        address_file: gets `{"address": ..., "pid": ..., "policy_version": ...}`, atomically, once calls are answered;
            `None` writes none.
        host: interface to bind.
        port: of gRPC; 0 lets the system choose.
        access: what callers must show; who may bind what is `security.check_binding`'s to say.
        stop: ends the service.
        load_deadline_s: a weight load that takes longer fails.
        drain_on_update_s: longest wait for requests in flight, where `kv_policy` is `drain`.
        stage_weights: whether new weights are made ready while the old ones serve, where the engine can.
        codec: of the model's tokenizer; without it only token ids are taken.
        limits: what one caller may ask for, and how much all of them at once.
        models: names under which a request may ask for the model.
        adapters: name -> where its versions come from; the newest of each is loaded before calls are answered, as far
            as there are places.
        faces: what serves the same replica beside gRPC.
        drain_s: time for running requests to finish after `stop`.
        on_serving: called once all faces are bound and calls are answered; gets the addresses.
        clock: times of loads; the machine's if `None`.

    Raises:
        EngineDead: if the engine died while serving, with its first error as the cause.
        WeightMismatch: if the first version's canary disagrees.

    Cancellation:
        closes engine and server without draining.
    """
    clock = SystemClock() if clock is None else clock
    owner = f"generator-{os.getpid()}"
    replica = Replica(
        engine=engine,
        repository=repository,
        kv_policy=kv_policy,
        load_deadline_s=load_deadline_s,
        drain_on_update_s=drain_on_update_s,
        stage_weights=stage_weights,
        owner=owner,
        clock=clock,
    )
    loader = None
    if adapters:
        loader = AdapterLoader(
            engine,
            sources=adapters,
            kv_policy=kv_policy,
            load_deadline_s=load_deadline_s,
            drain_on_update_s=drain_on_update_s,
            owner=owner,
            clock=clock,
        )
    try:
        async with asyncio.TaskGroup() as tasks:
            service = InferenceService(replica, tasks=tasks, codec=codec, limits=limits, models=models, adapters=loader)
            async with _answering(service, tasks=tasks, host=host, port=port, access=access, faces=faces) as addresses:
                if address_file is not None:
                    _write_address(Path(address_file), address=addresses.grpc, engine=engine)
                if on_serving is not None:
                    on_serving(addresses)
                await _until_over(stop, service.engine_died)
                await service.drain(drain_s, reason="the generator was told to stop")
    except BaseExceptionGroup as group:  # one error as a rule, and the first is the cause of the others
        raise group.exceptions[0] from group
    finally:
        await engine.close()
        await replica.close()
        if loader is not None:
            await loader.close()
    if service.engine_died.is_set():
        raise EngineDead(replica.standing.reason)


@contextlib.asynccontextmanager
async def _answering(
    service: InferenceService,
    *,
    tasks: asyncio.TaskGroup,
    host: str,
    port: int,
    access: Access | None,
    faces: Sequence[Face],
) -> AsyncIterator[Addresses]:
    """Prove what is served, answer calls on every face, and stop listening at the end of the block."""
    closing = asyncio.Event()
    server, servicer = new_server(service, access=access)
    bound = bind(server, address_of(host, port), access=access)
    try:
        await service.replica.start()
        if service.adapters is not None:
            await service.adapters.start()
        await servicer.publish_health()
        await server.start()
        others = [await _start_face(face, service, tasks=tasks, stop=closing) for face in faces]
        yield Addresses(grpc=address_of(host, bound), others=dict(others))
    finally:
        closing.set()
        servicer.exchanges.end()
        await server.stop(grace=1.0)


async def _start_face(
    face: Face, service: InferenceService, *, tasks: asyncio.TaskGroup, stop: asyncio.Event
) -> tuple[str, str]:
    """Start a face and return its name and address once it is bound."""
    bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = tasks.create_task(face.serve(service, stop=stop, on_bound=bound.set_result), name=face.name)
    await asyncio.wait({bound, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not bound.done():  # it ended before it was bound: with an error
        bound.cancel()
        await serving
        raise EngineError(f"the {face.name} face ended before it was bound")
    return face.name, bound.result()


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
