"""From settings to an SGLang server that serves the first weights, behind the engine protocol.

Blocks: for the start of a process, before its event loop. The server reads its first weights from a folder that is made
for it, with the model's configuration less its end tokens: what ends a turn comes with the request.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2 as httpx

from rollmill.clock import Clock
from rollmill.config.precision import resolve_dtype
from rollmill.config.schema import GeneratorSettings
from rollmill.errors import ConfigError, DeadlineExceeded, EngineDead, EngineError, ModelError
from rollmill.generator.engines.meter import SecondsMeter
from rollmill.generator.engines.remote.engine import RemoteEngine
from rollmill.generator.engines.remote.folders import own_folder
from rollmill.generator.engines.remote.model import ServedModel
from rollmill.generator.engines.remote.process import ServerProcess
from rollmill.generator.engines.remote.traits import Traits
from rollmill.generator.engines.remote.transfer import Spool
from rollmill.generator.engines.settings import kv_dtype_bytes
from rollmill.generator.engines.sglang.arguments import sglang_arguments, sglang_environment
from rollmill.generator.engines.sglang.dialect import GENERATE, READY, probe_body, read_error, returns_masks
from rollmill.generator.engines.sglang.port import PRODUCT, SECTION, Address, Server, SglangPort
from rollmill.generator.engines.vllm.environment import default_device

if TYPE_CHECKING:
    import torch

MODULE = "sglang.launch_server"
CAPABILITIES = (
    "abort",
    "canary",
    "kv_recompute",
    "pause_abort",
    "pause_drain",
    "pause_keep",
    "score",
    "stage",
    "streaming",
    "version_spans",
)

_END_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")
_STOP_GRACE_S = 2.0
"""Its own end waits for requests, and those have been ended; a run gives its replicas little time."""
_LOOK_TIMEOUT_S = 5.0
_PROBE_ID = "probe0000000"


def start_sglang(
    path: str | Path,
    *,
    settings: GeneratorSettings,
    tensors: Mapping[str, torch.Tensor],
    policy_version: int,
    digest: str,
    clock: Clock,
    log: Path | None = None,
) -> RemoteEngine:
    """Return an engine whose server serves these weights. Blocks until it does: half a minute and more.

    Args:
        path: local Hugging Face directory; only its configuration is read.
        settings: of the generator.
        tensors: the first weights.
        policy_version: their publication number.
        digest: their digest.
        clock: deadlines, timings and the seconds ledger.
        log: file for what the server prints; in a folder that goes with it if `None`.

    Raises:
        ConfigError: if the environment or a setting cannot be used.
        ModelError: if the model's configuration says too little.
        EngineError: if the server does not start, with its first error.
        DeadlineExceeded: if it takes too long.
        WeightError: if the weights cannot be handed over.
    """
    meter = SecondsMeter(clock, cause="startup")
    model = ServedModel.read(path)
    settings = settings.model_copy(update={"max_model_len": min(settings.max_model_len, model.max_positions)})
    spool = Spool()
    try:
        launched = launch(
            path, settings, model=model, tensors=tensors, policy_version=policy_version, spool=spool, log=log
        )
    except BaseException:
        spool.close()
        raise
    deadline_s = settings.sglang.start_deadline_s
    return bring_up(
        launched.process,
        address=launched.address,
        settings=settings,
        model=model,
        tensors=tensors,
        policy_version=policy_version,
        digest=digest,
        spool=spool,
        folder=launched.folder,
        clock=clock,
        meter=meter,
        wait=lambda ready: launched.process.wait_until(ready, deadline_s=deadline_s, clock=clock),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A server process that may not be ready yet.

    Attributes:
        folder: its own; for the links through which it finds weights.
    """

    process: ServerProcess
    address: Address
    folder: Path


def launch(
    path: str | Path,
    settings: GeneratorSettings,
    *,
    model: ServedModel,
    tensors: Mapping[str, torch.Tensor],
    policy_version: int,
    spool: Spool,
    log: Path | None,
) -> Launched:
    """Start the server process on its first weights; it is not ready yet.

    Args:
        settings: with `max_model_len` that the model can do.

    Raises:
        ConfigError: if its environment or a setting cannot be used.
        ModelError: if the model's configuration says too little.
        WeightError: if the weights cannot be handed over.
    """
    python, folder = find_python(settings.sglang.python), own_folder(PRODUCT)
    try:
        weights = spool.write(tensors, policy_version=policy_version)
        write_model(folder / "model", config=Path(path) / "config.json", weights=weights)
        port, key = free_port(), secrets.token_hex(16)
        arguments = sglang_arguments(
            settings,
            model=str(folder / "model"),
            key_file=str(write_key(folder, key=key)),
            port=port,
            policy_version=policy_version,
            device=default_device(),
            kv=model.kv,
            vocabulary_size=model.vocabulary_size,
        )
        process = ServerProcess(
            product=PRODUCT,
            section=SECTION,
            python=python,
            module=MODULE,
            arguments=arguments,
            environment=sglang_environment(settings, base=os.environ),
            folder=folder,
            log=log,
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Launched(process=process, address=Address(port=port, key=key), folder=folder)


def bring_up(
    server: Server,
    *,
    address: Address,
    settings: GeneratorSettings,
    model: ServedModel,
    tensors: Mapping[str, torch.Tensor],
    policy_version: int,
    digest: str,
    spool: Spool,
    folder: Path,
    clock: Clock,
    meter: SecondsMeter,
    wait: Callable[[Callable[[], bool]], None],
) -> RemoteEngine:
    """Return an engine of a server that was just started, once it answers; the server is stopped if that fails.

    Args:
        settings: with `max_model_len` that the model can do.
        folder: for the links through which it finds weights.
        wait: returns when what it is given returns true; raises if the server ends or takes too long.
    """
    try:
        with address.client(timeout_s=_LOOK_TIMEOUT_S) as client:
            wait(lambda: _answers(client))
        with address.client(timeout_s=settings.sglang.start_deadline_s) as client:
            # It also pays for what is compiled at the first request, which no caller's deadline should.
            masks = _probe(client, server=server, vocabulary_size=model.vocabulary_size)
        spool.empty()
        port = SglangPort(
            server,
            address=address,
            settings=settings.sglang,
            vocabulary_size=model.vocabulary_size,
            has_masks=masks,
            folder=folder,
            grace_s=_STOP_GRACE_S,
        )
    except BaseException:
        server.stop(grace_s=_STOP_GRACE_S)
        spool.close()
        raise
    return RemoteEngine(
        port,
        traits=traits_of(settings, model=model, masks=masks),
        tensors=tensors,
        policy_version=policy_version,
        digest=digest,
        spool=spool,
        clock=clock,
        meter=meter,
    )


def traits_of(settings: GeneratorSettings, *, model: ServedModel, masks: bool) -> Traits:
    """Return what an SGLang engine with these settings is.

    Args:
        masks: whether the server returns the log-probs of filtered distributions.
    """
    has = {
        "kv_keep": not settings.sglang.overlap_schedule,
        "prefix_cache": settings.enable_prefix_caching,
        "seed": settings.sglang.deterministic_inference,
        "top_k": masks,
        "top_p": masks,
    }
    return Traits(
        kind="sglang",
        product=PRODUCT,
        model=model.name,
        dtype=resolve_dtype(settings.dtype),
        vocabulary_size=model.vocabulary_size,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        kv_bytes_per_token=(0 if model.kv is None else model.kv.bytes_per_token(dtype_bytes=kv_dtype_bytes(settings))),
        capabilities=(*CAPABILITIES, *(name for name, can in has.items() if can)),
        waits_for_siblings=settings.enable_prefix_caching,
        patience_s=settings.sglang.control_deadline_s,
        how_to_keep='Set generator.kv_on_update "recompute", or leave generator.sglang.overlap_schedule out',
    )


def find_python(configured: str | None) -> Path:
    """Return the interpreter to start SGLang with.

    Raises:
        ConfigError: if none is configured, or it cannot be run.
    """
    if configured is None:
        raise ConfigError(
            'generator.engine is "sglang" and generator.sglang.python is not set: SGLang pins packages that Rollmill '
            "must not be bound to, and lives in an environment of its own. Make one with `python3.11 -m venv sglang && "
            "sglang/bin/pip install sglang==0.5.23`, then set generator.sglang.python to sglang/bin/python"
        )
    python = Path(configured).expanduser()
    if not os.access(python, os.X_OK):
        raise ConfigError(
            f"generator.sglang.python is {configured!r}, which is no program that can be run. Give the interpreter of "
            "an environment with SGLang."
        )
    return python


def write_model(folder: Path, *, config: Path, weights: Path) -> None:
    """Make the folder that the server starts from.

    Args:
        config: `config.json` of the model.
        weights: safetensors file.

    Raises:
        ModelError: if the configuration cannot be read, or names no architecture.
    """
    try:
        found: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{config} cannot be read ({error}); give a prepared model") from error
    if not found.get("architectures"):
        raise ModelError(f"{config} names no `architectures`, by which SGLang finds the model's code; add them")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**found, **dict.fromkeys(_END_TOKENS)}), encoding="utf-8")
    (folder / "model.safetensors").symlink_to(weights.absolute())


def write_key(folder: Path, *, key: str) -> Path:
    """Write the configuration file with the server's key: on the command line others could read it."""
    file = folder / "key.yaml"
    file.touch(mode=0o600)
    file.write_text(f"api-key: {key}\n", encoding="ascii")
    return file


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _answers(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):  # it does not listen yet
        return client.get(READY).status_code == httpx.codes.OK
    return False


def _probe(client: httpx.Client, *, server: Server, vocabulary_size: int) -> bool:
    """Return whether the server returns the log-probs of filtered distributions."""
    body = probe_body(server_id=_PROBE_ID, vocabulary_size=vocabulary_size)
    try:
        reply = client.post(GENERATE, json=body)
        if reply.status_code != httpx.codes.OK:  # perhaps because it does not know masks
            plain = {name: value for name, value in body.items() if name != "return_sampling_mask"}
            reply = client.post(GENERATE, json={**plain, "rid": _PROBE_ID.replace("0", "1", 1)})
    except httpx.TimeoutException as error:
        raise DeadlineExceeded(
            f"the {PRODUCT} server did not answer its first request within {SECTION}.start_deadline_s: "
            f"{server.last_words()}"
        ) from error
    except httpx.TransportError as error:
        raise EngineDead(f"{server.last_words()} (at its first request: {error!r})") from error
    if reply.status_code != httpx.codes.OK:
        raise EngineError(
            f"the {PRODUCT} server answered its first request with {reply.status_code}: {read_error(reply.content)}. "
            f"{server.last_words()}"
        )
    return returns_masks(reply.content)
