"""Prefill and decode on separate vLLM servers: the split as typed settings. Pure; no vLLM, no torch.

What a split turns into, and what makes one impossible, is in `rollmill.generator.engines.vllm.split`. Prefill and
decode exchange KV through vLLM's NixlConnector, which moves memory of GPUs: on a CPU the split is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from rollmill.config.load import read_toml
from rollmill.config.section import Section, knob
from rollmill.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1}


class RoleSettings(Section):
    """The servers of one side, all alike."""

    hosts: tuple[str, ...] = knob(("127.0.0.1",))
    """Machines; servers are laid on them in order, as many on each as its GPUs allow."""
    servers: int = knob(1, unit="servers", raising="more of this side", lowering="fewer GPUs", ge=1)
    """vLLM servers."""
    tensor_parallel_size: int = knob(
        1, unit="GPUs", raising="more memory for KV per server, shorter steps", lowering="fewer GPUs per server", ge=1
    )
    """GPUs that share each layer of one server."""
    data_parallel_size: int = knob(1, unit="ranks", raising="more ranks behind one server", lowering="fewer GPUs", ge=1)
    """Ranks of one server that hold the whole model each."""
    gpu_memory_utilization: float = knob(
        0.9, unit="share", raising="more KV", lowering="leaves memory for others", gt=0, le=1
    )
    """Share of a GPU's memory that vLLM may take for weights, activations and KV."""
    max_num_seqs: int = knob(
        64, unit="sequences", raising="larger batches", lowering="shorter steps, fewer preemptions", ge=1
    )
    """Sequences in one step; a server gets one more, for scores."""
    max_num_batched_tokens: int = knob(
        8192, unit="tokens", raising="faster prefill, longer steps", lowering="shorter steps", ge=16
    )
    """Tokens in one step."""
    block_size: int = knob(
        16, unit="tokens", raising="fewer and larger transfers", lowering="less waste at the end of a sequence", ge=1
    )
    """Tokens of one KV block."""


class PortSettings(Section):
    """First ports; each further server on a host takes the next free ones."""

    prefill_http: int = knob(8100, ge=1, le=65535)
    """HTTP port of the first prefill server on a host."""
    decode_http: int = knob(8200, ge=1, le=65535)
    """HTTP port of the first decode server on a host."""
    prefill_side_channel: int = knob(5600, ge=1, le=65535)
    """Port of the handshake about KV of the first prefill server on a host; each data-parallel rank takes one more."""
    decode_side_channel: int = knob(5700, ge=1, le=65535)
    """The same of the first decode server."""
    router: int = knob(8000, ge=1, le=65535)
    """Port of the router in front of both sides, on the first decode host."""


class SplitSettings(Section):
    """A split of prefill and decode."""

    model: str = knob("")
    """Model directory, at the same path on every host."""
    device: Literal["cuda", "cpu"] = knob("cuda")
    """What the servers run on. `cpu` is refused, with the reason."""
    python: str = knob("python")
    """Interpreter of the environment that holds vLLM, at the same path on every host."""
    plugin_folder: str = knob("/opt/rollmill/vllm-plugin")
    """Folder that holds the servers' transport for weights, at the same path on every host; `rollmill engine plugin`
    writes it."""
    dtype: Literal["bfloat16", "float32"] = knob("bfloat16")
    """Serving precision of both sides: KV can only be exchanged between equal ones."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8"] = knob("auto")
    """Precision of the KV of both sides; `auto` is the serving precision."""
    max_model_len: int = knob(
        8192, unit="tokens", raising="longer prompts and answers", lowering="more sequences in the same memory", ge=8
    )
    """Longest prompt plus output, on both sides."""
    gpus_per_host: int = knob(8, unit="GPUs", raising="more servers on each host", lowering="fewer of them", ge=1)
    """GPUs of every host."""
    gpu_memory_gb: float = knob(80.0, unit="GB", raising="more KV is planned", lowering="less KV is planned", gt=0)
    """Memory of every GPU, in units of 10^9 bytes."""
    activation_gb: float = knob(
        4.0, unit="GB", raising="safer estimate, less KV", lowering="more KV, nearer to running out", ge=0
    )
    """Memory of a GPU that activations and vLLM's own buffers are expected to take."""
    kv_load_failure_policy: Literal["fail", "recompute"] = knob("recompute")
    """A block that cannot be fetched: `recompute` it on the decode server, or `fail` the request."""
    kv_lease_s: int = knob(
        30, unit="s", raising="tolerates slow decode servers", lowering="prefill memory is free sooner", ge=6
    )
    """How long a prefill server keeps a prompt's blocks for a decode server that does not report."""
    prefill: RoleSettings = knob(RoleSettings())
    """The servers that compute prompts."""
    decode: RoleSettings = knob(RoleSettings())
    """The servers that sample."""
    ports: PortSettings = knob(PortSettings())
    """Ports."""


def load_split(path: str | Path) -> SplitSettings:
    """Read a split from a TOML file.

    Raises:
        ConfigError: if the file cannot be read, or a setting is unknown, mistyped or out of range.
    """
    data = read_toml(Path(path), example="the one in docs/how-to/disaggregation.md")
    try:
        return SplitSettings(**data)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']} (got {problem['input']!r})"
            for problem in error.errors()
        )
        raise ConfigError(
            f"{path}: {problems}. Keys are {', '.join(SplitSettings.model_fields)}, and those of [prefill], [decode] "
            "and [ports]; see docs/how-to/disaggregation.md"
        ) from error
