"""A real vLLM server for tests: a tiny random Llama, one server for many tests, each with an adapter of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil

from generator_builders import MAX_LEN, VOCABULARY, llama, random_model, save_config, tensors_of
from rollmill.clock import SystemClock
from rollmill.config.schema import GeneratorSettings
from rollmill.config.serving import VllmSettings
from rollmill.errors import MissingExtraError
from rollmill.generator.engines.meter import SecondsMeter
from rollmill.generator.engines.remote.engine import RemoteEngine
from rollmill.generator.engines.remote.model import ServedModel
from rollmill.generator.engines.remote.peft_folders import lora_targets
from rollmill.generator.engines.remote.process import ServerProcess
from rollmill.generator.engines.remote.transfer import layout_of
from rollmill.generator.engines.vllm.environment import find_python
from rollmill.generator.engines.vllm.start import Launched, bring_up, launch

ENOUGH_MEMORY_BYTES = 6_000_000_000
"""A server with this model takes less than half; what it would take from others is worse."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that its CPU attention takes
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.25,
}


def why_not() -> str | None:
    """Why no server can be started here, or `None`."""
    try:
        find_python(None)
    except MissingExtraError as error:
        return str(error)
    free = psutil.virtual_memory().available
    return None if free > ENOUGH_MEMORY_BYTES else f"{free} bytes of memory are free, {ENOUGH_MEMORY_BYTES} are needed"


class SharedServer:
    """A server that outlives the adapters that were built on it, unless one of them kills it."""

    def __init__(self, folder: Path, *, max_num_seqs: int = 8, dtype: str = "float32", **settings: Any) -> None:
        self.old, self.new = random_model(llama(**SHAPE), seed=1), random_model(llama(**SHAPE), seed=2)
        self._folder = save_config(folder, self.old.config)
        self.settings = GeneratorSettings(
            engine="vllm",
            dtype=dtype,  # pyright: ignore[reportArgumentType]
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_LEN,
            vllm=VllmSettings(start_deadline_s=400.0, load_poll_s=0.2),
            **settings,
        )
        self._model = ServedModel.read(self._folder)
        self._launched: Launched | None = None
        self.log = folder / "server.log"

    def engine(self, *, digest: str = "digest-1") -> RemoteEngine:
        """Return a new adapter that serves the old model as version 1; starts the server if none runs."""
        clock = SystemClock()
        meter = SecondsMeter(clock, cause="startup")
        if self._launched is None or self._launched.process.exit_code is not None:
            self.stop()
            self._launched = launch(
                self._folder,
                self.settings,
                model=self._model,
                log=self.log,
                lora_targets=lora_targets(layout_of(tensors_of(self.old))),
            )
        process = self._launched.process
        return bring_up(
            _Kept(process),
            socket=self._launched.socket,
            settings=self.settings,
            model=self._model,
            tensors=tensors_of(self.old),
            policy_version=1,
            digest=digest,
            clock=clock,
            meter=meter,
            wait=lambda ready: process.wait_until(ready, deadline_s=400.0, clock=clock),
        )

    @property
    def process(self) -> ServerProcess:
        assert self._launched is not None
        return self._launched.process

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self) -> None:
        if self._launched is not None:
            self._launched.process.stop(grace_s=10.0)
            self._launched = None


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
