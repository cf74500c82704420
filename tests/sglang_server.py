"""A real SGLang server for tests: a tiny random Llama, one server for many tests, each with an adapter of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil

from generator_builders import MAX_LEN, llama, random_model, save_config, tensors_of
from integration.sglang_rig import make as rig
from rollmill.clock import SystemClock
from rollmill.config.schema import GeneratorSettings
from rollmill.config.serving import SglangSettings
from rollmill.generator.engines.meter import SecondsMeter
from rollmill.generator.engines.remote.engine import RemoteEngine
from rollmill.generator.engines.remote.model import ServedModel
from rollmill.generator.engines.remote.process import ServerProcess
from rollmill.generator.engines.remote.transfer import Spool
from rollmill.generator.engines.sglang.dialect import ABORT, CONTINUE, LOADS, PAUSE, UPDATE, update_body
from rollmill.generator.engines.sglang.port import linked_folder
from rollmill.generator.engines.sglang.start import Launched, bring_up, launch

ENOUGH_MEMORY_BYTES = 6_000_000_000
"""A server with this model takes a third; what it would take from others is worse."""
START_DEADLINE_S = 400.0


def why_not() -> str | None:
    """Why no server can be started here, or `None`."""
    if not rig.is_ready():
        return f"there is no environment with SGLang in {rig.folder()}; make it with `{rig.COMMAND}`"
    free = psutil.virtual_memory().available
    return None if free > ENOUGH_MEMORY_BYTES else f"{free} bytes of memory are free, {ENOUGH_MEMORY_BYTES} are needed"


def settings_here(*, overlap_schedule: bool = False, **changes: Any) -> GeneratorSettings:
    """Settings with which the test rig's environment serves, telling its load after each step."""
    return GeneratorSettings(
        **{
            "engine": "sglang",
            "dtype": "float32",
            "max_num_seqs": 8,
            "max_model_len": MAX_LEN,
            "sglang": SglangSettings(
                python=str(rig.python()),
                arguments=(*rig.ARGUMENTS, "--load-snapshot-publish-interval", "1"),
                variables=rig.VARIABLES,
                start_deadline_s=START_DEADLINE_S,
                load_poll_s=0.2,
                overlap_schedule=overlap_schedule,
            ),
            **changes,
        }
    )


class SharedServer:
    """A server that outlives the adapters that were built on it, unless one of them kills it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.old, self.new = random_model(seed=1), random_model(seed=2)
        self.settings = settings_here(**changes)
        self.log = folder / "server.log"
        self._folder = save_config(folder, llama(architectures=["LlamaForCausalLM"]))
        self._model = ServedModel.read(self._folder)
        self._launched: Launched | None = None
        self._spool = Spool()

    def engine(self) -> RemoteEngine:
        """Return a new adapter that serves the old model as version 1; starts the server if none runs."""
        clock = SystemClock()
        meter = SecondsMeter(clock, cause="startup")
        tensors = tensors_of(self.old)
        if self._launched is not None and self.process.exit_code is None:
            self._load(tensors)
        else:
            self.stop()
            self._launched = launch(
                self._folder,
                self.settings,
                model=self._model,
                tensors=tensors,
                policy_version=1,
                spool=self._spool,
                log=self.log,
            )
        launched = self._launched
        assert launched is not None
        return bring_up(
            _Kept(launched.process),
            address=launched.address,
            settings=self.settings,
            model=self._model,
            tensors=tensors,
            policy_version=1,
            digest="digest-1",
            spool=Spool(),
            folder=launched.folder,
            clock=clock,
            meter=meter,
            wait=lambda ready: launched.process.wait_until(ready, deadline_s=START_DEADLINE_S, clock=clock),
        )

    def _load(self, tensors: Any) -> None:
        """Bring the server back to the old model, with nothing running and nothing in its cache."""
        launched = self._launched
        assert launched is not None
        with (
            launched.address.client(timeout_s=60.0) as client,
            linked_folder(self._spool.write(tensors, policy_version=1), parent=launched.folder) as folder,
        ):
            for path, body in (
                (CONTINUE, {"torch_empty_cache": False}),
                (ABORT, {"rid": "", "abort_all": True}),
                (PAUSE, {"mode": "retract"}),  # what is still ending must not hold up the flush
                (UPDATE, update_body(str(folder), policy_version=1, flush=True)),
                (CONTINUE, {"torch_empty_cache": False}),
            ):
                client.post(path, json=body).raise_for_status()

    @property
    def process(self) -> ServerProcess:
        assert self._launched is not None
        return self._launched.process

    @property
    def folder(self) -> Path:
        assert self._launched is not None
        return self._launched.folder

    def async_client(self) -> httpx.AsyncClient:
        """Return a client of the server itself, past any adapter."""
        assert self._launched is not None
        address = self._launched.address
        return httpx.AsyncClient(base_url=address.url, headers=address.headers, timeout=60.0, trust_env=False)

    def loads(self) -> dict[str, Any]:
        """Return what the server says of its load."""
        assert self._launched is not None
        with self._launched.address.client(timeout_s=60.0) as client:
            return client.get(LOADS).json()["loads"][0]

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        if self._launched is not None:
            self._launched.process.stop(grace_s=10.0)
            self._launched = None
        self._spool.close()


class _Kept:
    """The server as its adapter sees it; what ends the adapter does not end it."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process
        self.pid, self.ends = process.pid, process.ends

    @property
    def exit_code(self) -> int | None:
        return self._process.exit_code

    def last_words(self) -> str:
        return self._process.last_words()

    def stop(self, *, grace_s: float) -> None:
        del grace_s
