"""A replica process that follows a repository on a disk and can stop for ever in the middle of a weight load.

python half_loading_replica.py --model DIR --repository DIR --address-file PATH [--stop-at pull|swap --mark PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import torch

from rollmill.clock import SystemClock
from rollmill.generator.engines.embedded.engine import EmbeddedEngine
from rollmill.generator.engines.embedded.model import ServedModel
from rollmill.generator.engines.embedded.settings import EmbeddedSettings
from rollmill.generator.main import serve
from rollmill.weights.repository import LocalModelRepository

MAX_LEN = 160


class Stop:
    """Where a load stops, once it is armed."""

    def __init__(self, at: str | None, mark: Path | None) -> None:
        self._at, self._mark = at, mark
        self.armed = False

    def here(self, place: str) -> None:
        """Say that the place was reached, and never return, if this is where to stop."""
        if self.armed and place == self._at and self._mark is not None:
            self._mark.touch()
            threading.Event().wait()


class HalfModel(ServedModel):
    """Weights that are half old and half new when a load stops."""

    stop: Stop | None = None

    def copy(self, pairs: list[tuple[Any, torch.Tensor]]) -> None:
        half = len(pairs) // 2
        super().copy(pairs[:half])
        if self.stop is not None:
            self.stop.here("swap")
        super().copy(pairs[half:])


class SlowRepository(LocalModelRepository):
    """A repository whose reader stops before it hands the tensors over."""

    stop: Stop | None = None

    def load(self, policy_version: int) -> dict[str, torch.Tensor]:
        tensors = super().load(policy_version)
        if self.stop is not None:
            self.stop.here("pull")
        return tensors


async def main(args: argparse.Namespace) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    repository, stop = SlowRepository(args.repository), Stop(args.stop_at, args.mark)
    newest = repository.latest()
    assert newest is not None
    tensors = repository.load(newest.policy_version)
    model = HalfModel(args.model, dtype=torch.float32, tensors=tensors)
    engine = EmbeddedEngine(
        args.model,
        settings=EmbeddedSettings(dtype="float32", max_num_seqs=4, max_model_len=MAX_LEN),
        tensors=tensors,
        policy_version=newest.policy_version,
        digest=newest.digest,
        clock=SystemClock(),
        model=model,
    )
    stop.armed = True
    repository.stop = model.stop = stop
    await serve(
        engine=engine,
        repository=repository,
        kv_policy="keep",
        address_file=args.address_file,
        stop=ended,
        load_deadline_s=60.0,
        stage_weights=False,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--address-file", required=True)
    parser.add_argument("--stop-at", choices=("pull", "swap"))
    parser.add_argument("--mark", type=Path)
    asyncio.run(main(parser.parse_args()))
