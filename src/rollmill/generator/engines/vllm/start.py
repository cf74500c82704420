"""From settings to a vLLM server that serves the first weights, behind the engine protocol.

Blocks: for the start of a process, before its event loop. The server is started without weights of its own; the first
ones come the way that all others do, so that what is served is what was published.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2 as httpx

from rollmill.clock import Clock
from rollmill.config.precision import resolve_dtype
from rollmill.config.schema import GeneratorSettings
from rollmill.errors import DeadlineExceeded, EngineDead, EngineError
from rollmill.generator.engines.meter import SecondsMeter
from rollmill.generator.engines.protocol import ADAPTERS
from rollmill.generator.engines.remote.engine import RemoteEngine
from rollmill.generator.engines.remote.model import ServedModel
from rollmill.generator.engines.remote.peft_folders import lora_targets
from rollmill.generator.engines.remote.process import ServerProcess
from rollmill.generator.engines.remote.traits import Traits
from rollmill.generator.engines.remote.transfer import Spool, layout_of
from rollmill.generator.engines.settings import TRANSPORT, Device, kv_dtype_bytes, vllm_arguments, vllm_environment
from rollmill.generator.engines.vllm.dialect import (
    GENERATE,
    HEALTH,
    Step,
    first_steps,
    read_error,
    read_reply,
    warm_up_body,
)
from rollmill.generator.engines.vllm.environment import device_of, find_python
from rollmill.generator.engines.vllm.nccl_plan import servers_gpus
from rollmill.generator.engines.vllm.plugin import plugin_in, server_folder, socket_in
from rollmill.generator.engines.vllm.port import PRODUCT, SECTION, Server, VllmPort
from rollmill.generator.engines.vllm.split import MODULE
from rollmill.generator.engines.vllm.transport import FileTransport, WeightTransport, in_thread
from rollmill.generator.engines.vllm.unix_socket import client_of, listens

if TYPE_CHECKING:
    import torch

CAPABILITIES = (
    "abort",
    "canary",
    "kv_keep",
    "kv_recompute",
    "pause_abort",
    "pause_drain",
    "pause_keep",
    "score",
    "seed",
    "stage",
    "streaming",
    "top_k",
    "top_p",
    "version_spans",
)

_STOP_GRACE_S = 10.0
_LOOK_TIMEOUT_S = 5.0


def start_vllm(
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
        MissingExtraError: if there is no environment with vLLM.
        ConfigError: if the environment or a setting cannot be used.
        ModelError: if the model's configuration says too little.
        EngineError: if the server does not start, with its first error.
        DeadlineExceeded: if it takes too long.
        WeightError: if the weights cannot be handed over.
    """
    meter = SecondsMeter(clock, cause="startup")
    model = ServedModel.read(path)
    transport, gpus = open_transport(settings, device=device_of(find_python(settings.vllm.python)))
    settings = settings.model_copy(update={"max_model_len": min(settings.max_model_len, model.max_positions)})
    launched = launch(path, settings, model=model, log=log, lora_targets=lora_targets(layout_of(tensors)), gpus=gpus)
    deadline_s = settings.vllm.start_deadline_s
    return bring_up(
        launched.process,
        socket=launched.socket,
        settings=settings,
        model=model,
        tensors=tensors,
        policy_version=policy_version,
        digest=digest,
        clock=clock,
        meter=meter,
        transport=transport,
        wait=lambda ready: launched.process.wait_until(ready, deadline_s=deadline_s, clock=clock),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A server process that may not be ready yet."""

    process: ServerProcess
    socket: Path


def launch(
    path: str | Path,
    settings: GeneratorSettings,
    *,
    model: ServedModel,
    log: Path | None,
    lora_targets: Sequence[str] = (),
    gpus: Sequence[str] = (),
) -> Launched:
    """Start the server process; it is not ready yet.

    Args:
        settings: with `max_model_len` that the model can do.
        lora_targets: linear layers that adapters may change, where it has places for them.
        gpus: that it may use; those of this process if empty.

    Raises:
        ConfigError: if its environment or a setting cannot be used.
        MissingExtraError: if there is no environment; names the command that makes it.
    """
    python = find_python(settings.vllm.python)
    folder = server_folder(entry_point=TRANSPORT)
    socket = socket_in(folder)
    try:
        arguments = vllm_arguments(
            settings,
            model=str(path),
            listen={"--uds": str(socket)},
            device=device_of(python),
            kv=model.kv,
            lora_targets=lora_targets,
        )
        process = ServerProcess(
            product=PRODUCT,
            section=SECTION,
            python=python,
            module=MODULE,
            arguments=arguments,
            environment=vllm_environment(settings, base=os.environ, plugin=str(plugin_in(folder)))
            | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
            folder=folder,
            log=log,
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Launched(process=process, socket=socket)


def bring_up(
    server: Server,
    *,
    socket: Path,
    settings: GeneratorSettings,
    model: ServedModel,
    tensors: Mapping[str, torch.Tensor],
    policy_version: int,
    digest: str,
    clock: Clock,
    meter: SecondsMeter,
    wait: Callable[[Callable[[], bool]], None],
    transport: WeightTransport | None = None,
) -> RemoteEngine:
    """Return an engine of a server that was just started, once it answers; the server is stopped if that fails.

    Args:
        settings: with `max_model_len` that the model can do.
        wait: returns when what it is given returns true; raises if the server ends or takes too long.
        transport: how weights get into it; by a file if `None`.
    """
    spool, transport = Spool(), FileTransport() if transport is None else transport
    try:
        with client_of(socket, timeout_s=_LOOK_TIMEOUT_S) as client:
            wait(lambda: listens(socket) and _answers(client))
        with client_of(socket, timeout_s=settings.vllm.start_deadline_s) as client:
            path = spool.write(tensors, policy_version=policy_version)
            steps = first_steps(transport.init_info(), transport.update_info(path), policy_version=policy_version)
            for step in steps:
                _post_and_meet(client, step, server=server, transport=transport, file=path)
            _warm_up(client, server=server, policy_version=policy_version)
        spool.empty()
        port = VllmPort(server, socket=socket, settings=settings.vllm, transport=transport, grace_s=_STOP_GRACE_S)
    except BaseException:
        server.stop(grace_s=_STOP_GRACE_S)
        spool.close()
        raise
    return RemoteEngine(
        port,
        traits=traits_of(settings, model=model),
        tensors=tensors,
        policy_version=policy_version,
        digest=digest,
        spool=spool,
        clock=clock,
        meter=meter,
        adapter_port=port if settings.max_loras else None,
    )


def traits_of(settings: GeneratorSettings, *, model: ServedModel) -> Traits:
    """Return what a vLLM engine with these settings is."""
    more = [*(["prefix_cache"] if settings.enable_prefix_caching else []), *([ADAPTERS] if settings.max_loras else [])]
    return Traits(
        kind="vllm",
        product=PRODUCT,
        model=model.name,
        dtype=resolve_dtype(settings.dtype),
        vocabulary_size=model.vocabulary_size,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        kv_bytes_per_token=(0 if model.kv is None else model.kv.bytes_per_token(dtype_bytes=kv_dtype_bytes(settings))),
        capabilities=(*CAPABILITIES, *more),
        # Members find the first one's blocks even in the same step.
        waits_for_siblings=False,
        patience_s=settings.vllm.control_deadline_s,
        max_loras=settings.max_loras or 0,
        max_lora_rank=settings.max_lora_rank,
    )


def _answers(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):  # it listens, and is not ready
        return client.get(HEALTH).status_code == httpx.codes.OK
    return False


def _warm_up(client: httpx.Client, *, server: Server, policy_version: int) -> None:
    """Have it answer a request: the first log-probs compile a helper, which no caller's deadline should pay for."""
    reply = read_reply(_post(client, Step(path=GENERATE, body=warm_up_body()), server=server), server_id="0")
    served = {span.policy_version for span in reply.spans}
    if served != {policy_version}:
        raise EngineError(f"the vLLM server labels what it samples {served}, not {policy_version}; see its log")


def open_transport(settings: GeneratorSettings, *, device: Device) -> tuple[WeightTransport, tuple[str, ...]]:
    """Return how weights get into a server, and the GPUs that it may use: empty for those of this process.

    Args:
        device: what the server's build computes on.

    Raises:
        ConfigError: if NCCL is asked for and cannot be used here.
    """
    if settings.vllm.transport == "file":
        return FileTransport(), ()
    from rollmill.generator.engines.vllm.nccl import NcclTransport, visible_gpus

    gpus = servers_gpus(settings, device=device, visible=visible_gpus())
    return NcclTransport(settings), gpus


def _post_and_meet(client: httpx.Client, step: Step, *, server: Server, transport: WeightTransport, file: Path) -> None:
    """Make a call while this side of the transport does its part, if it has one; the first error ends both."""
    if step.met_by is None or not transport.meets:
        _post(client, step, server=server)
        return
    meet = transport.join if step.met_by == "join" else lambda: transport.send(file)
    both = (in_thread(lambda: _discard(_post(client, step, server=server))), in_thread(meet))
    deadline_s = client.timeout.read or 0.0
    done, waiting = wait_for(both, timeout=deadline_s, return_when=FIRST_EXCEPTION)
    for one in done:
        if (error := one.exception()) is not None:
            raise EngineError(
                f"the vLLM server and its replica did not meet over {transport.backend} at {step.path}: {error!r}. "
                f"{server.last_words()}"
            ) from error
    if waiting:
        raise DeadlineExceeded(
            f"the vLLM server and its replica did not meet over {transport.backend} at {step.path} within "
            f"generator.vllm.start_deadline_s {deadline_s:g}: {server.last_words()}"
        )


def _discard(_: bytes) -> None:
    return None


def _post(client: httpx.Client, step: Step, *, server: Server) -> bytes:
    try:
        reply = client.post(step.path, json=step.body, params=step.parameters)
    except httpx.TimeoutException as error:
        raise DeadlineExceeded(
            f"the vLLM server did not answer {step.path} within generator.vllm.start_deadline_s "
            f"{client.timeout.read:g}: {server.last_words()}"
        ) from error
    except httpx.TransportError as error:
        raise EngineDead(f"{server.last_words()} (at {step.path}: {error!r})") from error
    if reply.status_code != httpx.codes.OK:
        raise EngineError(
            f"the vLLM server answered {step.path} with {reply.status_code}: {read_error(reply.content)}. "
            f"{server.last_words()}"
        )
    return reply.content
