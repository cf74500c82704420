"""What travels over NCCL to a vLLM server, in which messages, and on which GPUs. Pure; no torch.

Both sides cut the tensors into the same messages, from names, dtypes and shapes alone: a message takes whole tensors
until it is **larger** than the buffer. A message that is cut elsewhere hangs both sides.

Reference: vLLM 0.32, `vllm/distributed/weight_transfer`: `nccl_common.py`, `packed_tensor.py`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollmill.config.schema import GeneratorSettings
from rollmill.errors import ConfigError
from rollmill.generator.engines.settings import Device
from rollmill.weights.tensorfile import DTYPE_NAMES

SENDER_RANK = 0


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that travel together, one behind the other.

    Attributes:
        names: in their order.
        nbytes: of all of them.
    """

    names: tuple[str, ...]
    nbytes: int


class TransferPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One update: what the server is told of each tensor, and the messages."""

    names: tuple[str, ...]
    dtype_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    messages: tuple[Message, ...]


def plan_transfer(header: Mapping[str, Mapping[str, Any]], *, buffer_bytes: int) -> TransferPlan:
    """Return the plan for a safetensors file, layer by layer, so that few layers are half loaded at a time.

    Args:
        header: name -> dtype, shape, data_offsets.
        buffer_bytes: as the server was told.

    Example:
        >>> entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
        >>> plan = plan_transfer({"h.10.w": entry, "h.2.w": entry, "a": entry}, buffer_bytes=16)
        >>> [(message.names, message.nbytes) for message in plan.messages]
        [(('a', 'h.2.w'), 32), (('h.10.w',), 16)]
    """
    names = tuple(sorted(header, key=_by_layer))
    messages: list[Message] = []
    together: list[str] = []
    nbytes = 0
    for name in names:
        low, high = header[name]["data_offsets"]
        together.append(name)
        nbytes += high - low
        if nbytes > buffer_bytes:
            messages.append(Message(names=tuple(together), nbytes=nbytes))
            together, nbytes = [], 0
    if together:
        messages.append(Message(names=tuple(together), nbytes=nbytes))
    return TransferPlan(
        names=names,
        dtype_names=tuple(DTYPE_NAMES[header[name]["dtype"]] for name in names),
        shapes=tuple(tuple(header[name]["shape"]) for name in names),
        messages=tuple(messages),
    )


def init_info(unique_id: bytes, *, workers: int, buffer_bytes: int) -> dict[str, Any]:
    """Return what the server's workers need to join the sender's group: they come behind it.

    Args:
        unique_id: of NCCL, made by the sender. A store to meet at, the other way, would take pickles from a port.
        workers: of the server, over all its ranks.
        buffer_bytes: where a message ends.
    """
    return {
        "rank_offset": SENDER_RANK + 1,
        "world_size": workers + 1,
        "nccl_unique_id_b64": base64.b64encode(unique_id).decode("ascii"),
        "packed": True,
        "packed_buffer_size_bytes": buffer_bytes,
    }


def update_info(plan: TransferPlan) -> dict[str, Any]:
    """Return what the server is told of the tensors that come."""
    return {"names": list(plan.names), "dtype_names": list(plan.dtype_names), "shapes": [list(s) for s in plan.shapes]}


def workers_of(settings: GeneratorSettings) -> int:
    """Return how many processes of a server receive weights."""
    return settings.tensor_parallel_size * settings.data_parallel_size


def servers_gpus(settings: GeneratorSettings, *, device: Device, visible: Sequence[str]) -> tuple[str, ...]:
    """Return the GPUs that are left to the server, or refuse.

    Args:
        device: what the server's build computes on.
        visible: GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them.

    Raises:
        ConfigError: if there is no NCCL here, or too few GPUs: two ranks of one group cannot share a GPU.
    """
    vllm, needed = settings.vllm, workers_of(settings)
    if device == "cpu":
        raise ConfigError(
            'generator.vllm.transport is "nccl", and this build of vLLM computes on a CPU: NCCL moves memory of GPUs. '
            'Nearest valid value: "file", or name an environment with a GPU build as generator.vllm.python'
        )
    if len(visible) < needed + 1:
        raise ConfigError(
            f'generator.vllm.transport is "nccl": the server needs {needed} GPUs (tensor_parallel_size '
            f"{settings.tensor_parallel_size} x data_parallel_size {settings.data_parallel_size}) and the sender one "
            f"of its own, and torch sees {len(visible)} here. Give more GPUs, a torch with CUDA, or "
            'generator.vllm.transport "file"'
        )
    if vllm.nccl_device >= len(visible):
        raise ConfigError(
            f"generator.vllm.nccl_device is {vllm.nccl_device}, and {len(visible)} GPUs can be seen, counted from 0"
        )
    if settings.max_loras:
        raise ConfigError(
            'generator.vllm.transport is "nccl" and adapters are served: their base does not change, and vLLM\'s NCCL '
            'engine does not load into a server for adapters. Nearest valid value: generator.vllm.transport "file"'
        )
    return tuple(gpu for at, gpu in enumerate(visible) if at != vllm.nccl_device)[:needed]


def _by_layer(name: str) -> tuple[tuple[int, int, str], ...]:
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split("."))
