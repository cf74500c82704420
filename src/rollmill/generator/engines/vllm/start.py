"""From settings to a vLLM server that serves the first weights, ready for requests.

Blocks: for the start of a process, before its event loop. The server is started without weights of its own; the first
ones come the way that all others do, so that what is served is what was published.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import msgspec

from rollmill.clock import Clock
from rollmill.config.schema import GeneratorSettings
from rollmill.errors import DeadlineExceeded, EngineDead, EngineError, ModelError
from rollmill.generator.engines.settings import KvShape, vllm_arguments, vllm_environment
from rollmill.generator.engines.vllm.dialect import (
    Metrics,
    Step,
    first_steps,
    read_error,
    read_metrics,
    read_reply,
    warm_up_body,
)
from rollmill.generator.engines.vllm.environment import device_of, find_python
from rollmill.generator.engines.vllm.server import Server, ServerFolder, ServerProcess, listens
from rollmill.generator.engines.vllm.transfer import Spool

if TYPE_CHECKING:
    import torch

_STOP_GRACE_S = 10.0
_LOOK_TIMEOUT_S = 5.0


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's `config.json` says.

    Attributes:
        kv: `None` where it does not say.
    """

    name: str
    vocabulary_size: int
    max_positions: int
    kv: KvShape | None

    @classmethod
    def read(cls, path: str | Path) -> ServedModel:
        """Read it.

        Raises:
            ModelError: if the file is missing or says too little.
        """
        file = Path(path) / "config.json"
        try:
            config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            vocabulary, positions = int(config["vocab_size"]), int(config["max_position_embeddings"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{file} does not say the sizes of vocabulary and context ({error!r}); give a prepared model"
            ) from error
        kv = None
        with contextlib.suppress(ModelError):  # then the server is told or decides
            kv = KvShape.of(config, where=str(file))
        return cls(name=Path(path).name, vocabulary_size=vocabulary, max_positions=positions, kv=kv)


def client_of(server: Server, *, timeout_s: float) -> httpx.Client:
    """Return a blocking client of a server, for one thread."""
    # No certificates are loaded: nothing is encrypted on a socket of this user's own. And no connection is used twice:
    # the server closes one after an error, and a call that is sent at that moment would be lost.
    limits = httpx.Limits(max_keepalive_connections=0)
    transport = httpx.HTTPTransport(uds=str(server.socket), verify=False, limits=limits)
    return httpx.Client(transport=transport, base_url="http://vllm", timeout=timeout_s)


def launch(path: str | Path, settings: GeneratorSettings, *, model: ServedModel, log: Path | None) -> ServerProcess:
    """Start the server process; it is not ready yet.

    Raises:
        ConfigError: if its environment or a setting cannot be used.
        MissingExtraError: if there is no environment; names the command that makes it.
    """
    python = find_python(settings.vllm.python)
    folder = ServerFolder()
    try:
        arguments = vllm_arguments(
            settings, model=str(path), socket=str(folder.socket), device=device_of(python), kv=model.kv
        )
        environment = vllm_environment(settings, base=os.environ, plugin=str(folder.plugin))
        return ServerProcess(python=python, arguments=arguments, environment=environment, folder=folder, log=log)
    except BaseException:
        folder.remove()
        raise


def bring_up(
    server: Server,
    *,
    settings: GeneratorSettings,
    tensors: Mapping[str, torch.Tensor],
    policy_version: int,
    spool: Spool,
    wait: Callable[[Callable[[], bool]], None],
) -> Metrics:
    """Have a server that was just started load its first weights and answer a first request; return its counters.

    Args:
        wait: returns when what it is given returns true; raises if the server ends or takes too long.

    Raises:
        EngineError: if the server refuses; `EngineDead` if it ended.
        DeadlineExceeded: if it took too long.
        WeightError: if the weights cannot be handed over.
    """
    with client_of(server, timeout_s=_LOOK_TIMEOUT_S) as client:
        wait(lambda: listens(server) and _answers(client))
    with client_of(server, timeout_s=settings.vllm.start_deadline_s) as client:
        path = spool.write(tensors, policy_version=policy_version)
        for step in first_steps(str(path), policy_version=policy_version):
            _post(client, step, server=server)
        spool.empty()
        # The first log-probs compile a helper: seconds that no caller's deadline should pay for.
        body = warm_up_body()
        reply = read_reply(_post(client, Step(path="/inference/v1/generate", body=body), server=server), server_id="0")
        served = {span.policy_version for span in reply.spans}
        if served != {policy_version}:
            raise EngineError(f"the vLLM server labels what it samples {served}, not {policy_version}; see its log")
        return read_metrics(client.get("/metrics").text)


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:  # it listens, and is not ready
        return False


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


class StartedServer:
    """A server that serves its first weights, with what its engine needs of it.

    Args:
        server: started, perhaps not ready.
        settings: with `max_model_len` that the model can do.
        tensors: the first weights.
        policy_version: their publication number.

    Attributes:
        before: its counters before the first caller came.

    Raises:
        EngineError: as `bring_up` does; the server is stopped then.
    """

    def __init__(
        self,
        server: Server,
        *,
        settings: GeneratorSettings,
        tensors: Mapping[str, torch.Tensor],
        policy_version: int,
        wait: Callable[[Callable[[], bool]], None],
    ) -> None:
        self.server = server
        self.spool = Spool()
        try:
            self.before = bring_up(
                server,
                settings=settings,
                tensors=tensors,
                policy_version=policy_version,
                spool=self.spool,
                wait=wait,
            )
        except BaseException:
            self.stop()
            raise

    @classmethod
    def launched(
        cls,
        path: str | Path,
        *,
        settings: GeneratorSettings,
        model: ServedModel,
        tensors: Mapping[str, torch.Tensor],
        policy_version: int,
        log: Path | None,
        clock: Clock,
    ) -> StartedServer:
        """Start a server process and bring it up."""
        server = launch(path, settings, model=model, log=log)

        def wait(ready: Callable[[], bool]) -> None:
            server.wait_until(ready, deadline_s=settings.vllm.start_deadline_s, clock=clock)

        return cls(server, settings=settings, tensors=tensors, policy_version=policy_version, wait=wait)

    def stop(self) -> None:
        """End it; blocks; idempotent."""
        self.server.stop(grace_s=_STOP_GRACE_S)
        self.spool.close()
