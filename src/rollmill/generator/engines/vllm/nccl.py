"""Weights over NCCL: this process is rank 0 of a group, the workers of one vLLM server are the others.

For GPUs alone; it has not run on one yet. Thin: what travels, and in which messages, is `nccl_plan`'s to say. A group
that broke cannot be mended, so that whoever sees an error here gives up its server.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

from rollmill.config.schema import GeneratorSettings
from rollmill.errors import EngineError
from rollmill.generator.engines.vllm.nccl_plan import (
    SENDER_RANK,
    TransferPlan,
    init_info,
    plan_transfer,
    update_info,
    workers_of,
)
from rollmill.weights.tensorfile import read_header


def visible_gpus(variables: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the GPUs that this process may use, by the names that a child process can be given."""
    named = (os.environ if variables is None else variables).get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return tuple(map(str, range(count))) if named is None else tuple(named.split(","))[:count]


class NcclTransport:
    """The sender of one server.

    Args:
        settings: checked by `nccl_plan.servers_gpus`.
    """

    backend = "nccl"
    meets = True

    def __init__(self, settings: GeneratorSettings) -> None:
        self._workers, self._buffer_bytes = workers_of(settings), settings.vllm.nccl_buffer_bytes
        self._device = torch.device("cuda", settings.vllm.nccl_device)
        self._unique_id: bytes = nccl.unique_id()
        self._group: Any = None

    def init_info(self) -> dict[str, Any]:
        """Return what the server's workers need to join."""
        return init_info(self._unique_id, workers=self._workers, buffer_bytes=self._buffer_bytes)

    def join(self) -> None:
        """Enter the group, which waits for all workers, then sum one number with them, as each of them does first."""
        with torch.cuda.device(self._device):
            self._group = nccl.init_rank(self._workers + 1, self._unique_id, SENDER_RANK)
            nccl.all_reduce([torch.zeros(1, device=self._device)], comms=[self._group])
            torch.cuda.current_stream().synchronize()

    def update_info(self, file: Path) -> dict[str, Any]:
        """Return names, dtypes and shapes of a file."""
        return update_info(self._plan(file))

    def send(self, file: Path) -> None:
        """Send a file, message by message; returns when the last has gone out.

        Raises:
            EngineError: if nobody joined before.
        """
        if self._group is None:
            raise EngineError("weights were to be sent over NCCL before the server's workers joined; start it again")
        from safetensors import safe_open

        with safe_open(file, framework="pt") as opened, torch.cuda.device(self._device):
            for message in self._plan(file).messages:
                packed = torch.empty(message.nbytes, dtype=torch.uint8, device=self._device)
                at = 0
                for name in message.names:
                    piece = opened.get_tensor(name).contiguous().view(-1).view(torch.uint8)
                    packed[at : at + piece.numel()].copy_(piece)
                    at += piece.numel()
                nccl.broadcast([packed], SENDER_RANK, comms=[self._group])
            torch.cuda.current_stream().synchronize()

    def _plan(self, file: Path) -> TransferPlan:
        return plan_transfer(read_header(file)[0], buffer_bytes=self._buffer_bytes)
