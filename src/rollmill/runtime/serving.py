"""One replica on its own, outside a run: from a model, or a run's repository, to a served address.

| who | waits for | gives up after |
|---|---|---|
| start | model, engine, proof of its weights, ports | an error, in words |
| serving | SIGTERM or SIGINT; the engine's death | never: it is a service |
| drain | requests that run | `drain_s`; at once on a second signal |

Decides where the first weights come from; what is refused and why is the service's.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from rollmill.clock import Clock, SystemClock
from rollmill.config.engines import OBEYED_BY, published_rounding
from rollmill.config.schema import RollmillConfig
from rollmill.environments.rendering import Renderer
from rollmill.errors import ConfigError, MissingExtraError, RunDirectoryError, WeightError
from rollmill.generator.security import Access, address_of, check_binding
from rollmill.runtime.stopping import stop_on_signals
from rollmill.runtime.threads import process_environment
from rollmill.types import WeightManifest
from rollmill.weights.fixed import FixedModel
from rollmill.weights.inspection import inspect
from rollmill.weights.protocol import ModelRepository
from rollmill.weights.repository import LocalModelRepository

if TYPE_CHECKING:
    import torch

    from rollmill.generator.engines.protocol import Engine
    from rollmill.generator.main import Addresses
    from rollmill.generator.service import InferenceService


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `rollmill serve` is asked to do.

    Attributes:
        config: the model in `model.source`, the engine in `generator`.
        repository: a run directory or its model repository; `None` serves the model's own weights as version 1.
        adapters: name -> run directory, or model repository, whose low-rank adapter is served beside their common base.
        host: interface to bind, of all faces.
        grpc_port, http_port: 0 lets the system choose; `http_port` `None` serves no HTTP.
        access: what callers must show.
        address_file: gets the gRPC address once calls are answered.
        drain_s: time for running requests to finish after a signal.
    """

    config: RollmillConfig
    repository: Path | None = None
    adapters: dict[str, Path] = {}
    host: str = "127.0.0.1"
    grpc_port: int = 0
    http_port: int | None = 0
    access: Access = Access()
    address_file: Path | None = None
    drain_s: float = 30.0


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What is served, and where.

    Attributes:
        follows: the repository that later versions can be loaded from, or `None`.
        adapters: name -> policy version of each; 0 if it is not loaded.
        kv_budget: how much KV there is, and why; empty if the engine does not say.
        warnings: what a user should know.
    """

    model: str
    engine: str
    dtype: str
    policy_version: int
    digest: str
    grpc: str
    http: str | None
    pid: int
    follows: str | None
    adapters: dict[str, int] = {}
    kv_budget: str = ""
    warnings: tuple[str, ...] = ()


def serve_replica(options: ServeOptions, *, on_serving: Callable[[Served], None]) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once.

    Args:
        on_serving: called once calls are answered.

    Raises:
        ConfigError: if an address cannot be bound.
        MissingExtraError: if HTTP is asked for and its packages are missing.
        ModelError: if the model cannot be had or served.
        RunDirectoryError: if there is no model repository.
        WeightError: if nothing was published in it.
        EngineDead: if the engine died while serving.
        KeyboardInterrupt: on a second signal.
    """
    settings = options.config.generator
    if options.http_port is not None:
        _need_http()
    for name, value in process_environment(threads=settings.threads).items():
        if name != "HF_HUB_OFFLINE":  # the model may be a hub name
            os.environ.setdefault(name, value)
    from rollmill.weights.prepare import prepare

    path = prepare(options.config.model.source, serving=True).path
    codec = Renderer(path)
    sources = {name: open_repository(folder) for name, folder in options.adapters.items()}
    repository, engine = engine_and_repository(options, path=path, clock=SystemClock(), adapters=sources)
    serving = _serve(
        options,
        engine=engine,
        repository=repository,
        path=path,
        codec=codec,
        adapters=sources,
        on_serving=on_serving,
    )
    try:
        asyncio.run(serving)
    except asyncio.CancelledError as error:
        raise KeyboardInterrupt from error


async def _serve(
    options: ServeOptions,
    *,
    engine: Engine,
    repository: ModelRepository,
    path: Path,
    codec: Renderer,
    adapters: Mapping[str, LocalModelRepository],
    on_serving: Callable[[Served], None],
) -> None:
    from rollmill.generator.main import serve

    config, clock = options.config, SystemClock()
    faces = () if options.http_port is None else (HttpFace(options, clock=clock, repository=repository),)

    def announce(addresses: Addresses) -> None:
        info = engine.info()
        on_serving(
            Served(
                model=config.model.source,
                engine=info.kind,
                dtype=info.dtype,
                policy_version=info.policy_version,
                digest=info.digest,
                grpc=addresses.grpc,
                http=addresses.others.get("http"),
                pid=os.getpid(),
                follows=None if options.repository is None else str(options.repository),
                adapters=dict.fromkeys(adapters, 0) | {one.name: one.policy_version for one in info.adapters},
                kv_budget=info.kv_budget,
                warnings=_warnings(options),
            )
        )

    with stop_on_signals() as stop:
        await serve(
            engine=engine,
            repository=repository,
            kv_policy=config.generator.kv_on_update,
            address_file=options.address_file,
            host=options.host,
            port=options.grpc_port,
            access=options.access,
            stop=stop,
            load_deadline_s=config.generator.load_deadline_s,
            drain_on_update_s=config.generator.drain_on_update_s,
            stage_weights=config.generator.stage_weights,
            codec=codec,
            limits=config.generator.limits,
            models=_names(config.model.source, path),
            adapters=adapters,
            faces=faces,
            drain_s=options.drain_s,
            on_serving=announce,
            clock=clock,
        )


class HttpFace:
    """The OpenAI-compatible face with /metrics; imported when it is served.

    Args:
        options: host, port and access.
        clock: of the metrics.
        repository: says which version is the newest.
    """

    name = "http"

    def __init__(self, options: ServeOptions, *, clock: Clock, repository: ModelRepository) -> None:
        self._options, self._clock, self._repository = options, clock, repository

    async def serve(self, service: InferenceService, *, stop: asyncio.Event, on_bound: Callable[[str], None]) -> None:
        """Serve until `stop` is set."""
        from rollmill.generator.gpu import find_gpus
        from rollmill.generator.http import serve_http
        from rollmill.generator.metrics import LastKnown, ReplicaMetrics

        options, access = self._options, self._options.access
        metrics = ReplicaMetrics(
            service.replica,
            clock=self._clock,
            model_name=service.models[0],
            newest_version=LastKnown(self._newest_version),
            gpus=find_gpus(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES")),
        )
        service.observer = metrics
        scheme = "http" if access.tls is None else "https"
        await serve_http(
            service,
            host=options.host,
            port=options.http_port or 0,
            token=access.token,
            tls=access.tls,
            metrics=metrics,
            limits=service.limits,
            stop=stop,
            on_bound=lambda port: on_bound(f"{scheme}://{address_of(options.host, port)}"),
        )

    def _newest_version(self) -> int | None:
        newest = self._repository.latest()
        return None if newest is None else newest.policy_version


def _need_http() -> None:
    """Say at once, before anything is loaded, that HTTP cannot be served."""
    for package in ("uvicorn", "starlette", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package=package, extra="serve", purpose="HTTP (or give --no-http)")


def engine_and_repository(
    options: ServeOptions, *, path: Path, clock: Clock, adapters: Mapping[str, LocalModelRepository] | None = None
) -> tuple[ModelRepository, Engine]:
    """Return an engine with its first weights, and where the later ones come from.

    Args:
        options: what is served.
        path: of the model.
        clock: of the engine.
        adapters: name -> where its versions come from; the weights are those that they were trained on.

    Raises:
        ConfigError: if there are both a repository and adapters, or an engine that cannot serve adapters.
        ModelError: if the model cannot be served.
        RunDirectoryError: if there is no model repository where one was named.
        WeightError: if nothing was published in it, or what was published does not fit the model.
    """
    if adapters:
        options = _for_adapters(options)
        base = base_of(adapters)
        fixed = FixedModel(path, at_s=clock.wall_s(), read=lambda: base)
        return fixed, _engine(options.config, path=path, repository=fixed, clock=clock)
    if options.repository is not None:
        repository = open_repository(options.repository, quantization=published_rounding(options.config.generator))
        return repository, _engine(options.config, path=path, repository=repository, clock=clock)
    try:
        fixed = FixedModel(path, at_s=clock.wall_s())
        return fixed, _engine(options.config, path=path, repository=fixed, clock=clock)
    except WeightError:
        if inspect(path).has_reward_head:
            raise
        # Older names or another layout, which the trainer's loader knows.
        fixed = FixedModel(path, at_s=clock.wall_s(), read=lambda: _converted(path))
        return fixed, _engine(options.config, path=path, repository=fixed, clock=clock)


def _for_adapters(options: ServeOptions) -> ServeOptions:
    """Return the options with as many places for adapters as are named, unless they say how many there are.

    Raises:
        ConfigError: if the settings contradict adapters.
    """
    settings, count = options.config.generator, len(options.adapters)
    if options.repository is not None:
        raise ConfigError(
            f"--repository {options.repository} and --adapter were both given: adapters belong to weights that stay "
            "what they are, and a repository's change. Leave one of them out"
        )
    if settings.engine not in OBEYED_BY["max_loras"]:
        raise ConfigError(
            f'--adapter was given and generator.engine is "{settings.engine}", which serves its weights alone. Engines '
            f"that can serve adapters beside them: {', '.join(OBEYED_BY['max_loras'])}. Or serve one run's policy, "
            "adapter included, with --repository"
        )
    if settings.max_loras == 0:
        raise ConfigError(
            f"--adapter was given and generator.max_loras is 0: there is no place for one. Valid: 1 to {count}, or "
            "leave it out"
        )
    places = {"max_loras": count if settings.max_loras is None else settings.max_loras}
    generator = settings.model_copy(update=places)
    return msgspec.structs.replace(options, config=options.config.model_copy(update={"generator": generator}))


def base_of(adapters: Mapping[str, LocalModelRepository]) -> dict[str, torch.Tensor]:
    """Return the weights that all these adapters were trained on.

    Raises:
        WeightError: if an adapter has no version yet, is whole weights, or was trained on other weights.
    """
    found: dict[str, str] = {}
    for name, repository in adapters.items():
        latest = repository.latest()
        if latest is None or latest.adapter is None:
            what = "nothing was published" if latest is None else "whole weights were published, and no adapter"
            raise WeightError(f"{what} in the repository of adapter {name!r}; name a run with trainer.lora_rank")
        found[name] = latest.adapter.base_digest
    if len(set(found.values())) > 1:
        said = ", ".join(f"{name}: {digest[:16]}..." for name, digest in found.items())
        raise WeightError(f"these adapters were trained on different weights, and one replica serves one base: {said}")
    first = next(iter(adapters.values()))
    latest = first.latest()
    if latest is None:
        raise WeightError("the repository of an adapter was emptied meanwhile")
    return first.load_base(latest.policy_version)


def _engine(config: RollmillConfig, *, path: Path, repository: ModelRepository, clock: Clock) -> Engine:
    """Return an engine that serves the newest version of a repository."""
    from rollmill.generator.main import build_engine

    manifest, settings = _hold_newest(repository), config.generator
    return build_engine(
        path,
        settings=settings,
        tensors={} if settings.engine == "fake" else repository.load(manifest.policy_version),
        policy_version=manifest.policy_version,
        digest=manifest.digest,
        clock=clock,
    )


def _hold_newest(repository: ModelRepository) -> WeightManifest:
    """Hold the newest version, so that the trainer does not retire it while it is read; return its manifest."""
    newest = repository.latest()
    while newest is not None:
        try:
            # Under the name by which the service holds what it serves.
            repository.hold(newest.policy_version, owner=f"generator-{os.getpid()}")
            return newest
        except WeightError:  # retired meanwhile: there is a newer one
            before, newest = newest, repository.latest()
            if newest is None or newest.policy_version == before.policy_version:
                raise
    raise WeightError("the repository has no published weights yet; start its run first, and serve it when it trains")


def open_repository(directory: Path, *, quantization: Literal["none", "int8"] = "none") -> LocalModelRepository:
    """Return the model repository in a directory, or in the run directory that it is.

    Args:
        quantization: what is read of versions that were published in eight bits too.

    Raises:
        RunDirectoryError: if there is none.
    """
    for root in (directory / "weights", directory):
        if (root / "manifests").is_dir():
            return LocalModelRepository(root, quantization=quantization)
    raise RunDirectoryError(
        f"there is no model repository in {directory}: neither {directory}/weights/manifests nor "
        f"{directory}/manifests. Give the directory of a run that has started, or leave --repository out to serve the "
        "model's own weights"
    )


def _converted(path: Path) -> dict[str, torch.Tensor]:
    from rollmill.trainer.model import load_policy

    return {name: parameter.detach() for name, parameter in load_policy(path).named_parameters()}


def _names(source: str, path: Path) -> tuple[str, ...]:
    """Return the names under which a model is known: as it was asked for, its folder's, and its path."""
    return tuple(dict.fromkeys((source, path.name, str(path))))


def _warnings(options: ServeOptions) -> tuple[str, ...]:
    found = [check_binding(options.host, access=options.access)]
    if options.repository is None and not options.adapters:
        found.append(
            "these weights are the model's own, proven by digest alone: no trainer has scored a canary for them. With "
            "--repository DIR a replica follows a run"
        )
    return tuple(sentence for sentence in found if sentence is not None)
