"""One configuration for all engines, mapped to the flags of each.

Pure: settings and a few facts of the model in, arguments and environment variables out. Which engine obeys which
setting stands in `rollmill.config.engines`; this module maps those that an external engine obeys to its own words.
What the embedded engine is told stands in `embedded.settings`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from rollmill.config.derive import BYTES_OF
from rollmill.config.precision import resolve_dtype
from rollmill.config.schema import GeneratorSettings
from rollmill.errors import ConfigError, ModelError

Device = Literal["cpu", "cuda"]
Valued = Mapping[str, str | int | float]
"""Flags of a server and their values."""

TRANSPORT = "rollmill_file"
"""Name of the weight transport that the plugin registers in the server."""

SCORING_SEATS = 1
"""Sequences beyond `max_num_seqs` that the server is told to run: a score must not wait for a rollout to end."""

CPU_BLOCK_TOKENS = 32
"""KV block on a CPU. The server's own default of 128 would keep short prompts from sharing anything."""

_BACKENDS = {"file": TRANSPORT, "nccl": "nccl"}
_KV_BYTES = {"bfloat16": 2, "fp8": 1}
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What `--max-lora-rank` may be."""


class KvShape(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the size of keys and values of one token."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Mapping[str, Any], *, where: str) -> KvShape:
        """Return the shape that a model's `config.json` says.

        Raises:
            ModelError: if it does not say it.
        """
        try:
            heads = int(config["num_attention_heads"])
            return cls(
                layers=int(config["num_hidden_layers"]),
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"{where} does not say how large keys and values are ({error!r}); give a decoder-only model with a "
                "plain configuration, or set generator.kv_cache_memory_bytes"
            ) from error

    def bytes_per_token(self, *, dtype_bytes: int) -> int:
        """Return bytes of keys and values of one token in all layers.

        Example:
            >>> KvShape(layers=30, kv_heads=3, head_dim=64).bytes_per_token(dtype_bytes=4)
            46080
        """
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes


def vllm_arguments(
    settings: GeneratorSettings,
    *,
    model: str,
    listen: Mapping[str, str | int],
    device: Device,
    kv: KvShape | None,
    lora_targets: Sequence[str] = (),
    more: Mapping[str, str | int] | None = None,
) -> list[str]:
    """Return the arguments of a vLLM server that obeys these settings.

    Args:
        settings: checked; see `rollmill.config.engines` for what is refused.
        model: folder of the model; its weights are not read, they come through the weight transport.
        listen: flags that say where it listens, with their values: `{"--uds": path}`.
        device: what the server's build computes on.
        kv: of the model; needed where keys and values are sized here: on a CPU, without `kv_cache_memory_bytes`.
        lora_targets: linear layers that adapters may change, by the last part of their names; needed with places for
            adapters. Without them the server would set memory aside for the whole vocabulary too.
        more: further flags with their values, which `generator.vllm.arguments` may not set either.

    Raises:
        ConfigError: if `generator.vllm.arguments` sets what is set here, or a setting is beyond what vLLM can do.

    Example:
        >>> shape = KvShape(layers=2, kv_heads=1, head_dim=32)
        >>> arguments = vllm_arguments(
        ...     GeneratorSettings(max_num_seqs=7, max_model_len=64, dtype="float32"),
        ...     model="/m", listen={"--uds": "/s"}, device="cpu", kv=shape,
        ... )
        >>> arguments[arguments.index("--max-num-seqs") + 1]
        '8'
        >>> arguments[arguments.index("--kv-cache-memory-bytes") + 1]  # (8 * 2 + 1) blocks * 32 tokens * 512 bytes
        '278528'
    """
    valued: Valued = {
        "--model": model,
        **listen,
        **_same_everywhere(settings),
        **_pass(settings),
        **_memory(settings, device=device, kv=kv),
        **(_lora_places(settings) if settings.max_loras else {}),
        **_rounding(settings, device=device),
        **(more or {}),
    }
    switches = _switches(settings, device=device)
    _refuse_taken(settings.vllm.arguments, taken={*valued, *switches, *_KEPT_BACK})
    targets = ("--lora-target-modules", *lora_targets) if settings.max_loras else ()
    return [*command_line(valued, switches), *targets, *settings.vllm.arguments]


def command_line(valued: Valued, switches: Mapping[str, bool]) -> list[str]:
    """Return flags with their values, then the switches that are on.

    Example:
        >>> command_line({"--port": 5}, {"--quiet": True, "--loud": False})
        ['--port', '5', '--quiet']
    """
    flags = [text for name, value in valued.items() for text in (name, str(value))]
    return [*flags, *(name for name, on in switches.items() if on)]


def _same_everywhere(settings: GeneratorSettings) -> Valued:
    """Return what does not depend on the device."""
    return {
        "--load-format": "dummy",
        "--dtype": resolve_dtype(settings.dtype),
        "--max-model-len": settings.max_model_len,
        "--max-num-seqs": settings.max_num_seqs + SCORING_SEATS,
        "--kv-cache-dtype": settings.kv_cache_dtype,
        "--tensor-parallel-size": settings.tensor_parallel_size,
        "--data-parallel-size": settings.data_parallel_size,
        # The default is the log-prob before temperature and filters, which is not that of the behaviour policy.
        "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": json.dumps({"backend": _BACKENDS[settings.vllm.transport]}),
        # A score comes first, whatever waits; all else is in order of arrival.
        "--scheduling-policy": "priority",
        # Sampling parameters come with the request, never from a file beside the model.
        "--generation-config": "vllm",
        "--uvicorn-log-level": "warning",
    }


def _pass(settings: GeneratorSettings) -> Valued:
    if settings.max_num_batched_tokens is None:
        return {}
    # The server refuses less than one token for each of its sequences.
    return {"--max-num-batched-tokens": max(settings.max_num_batched_tokens, settings.max_num_seqs + SCORING_SEATS)}


def _memory(settings: GeneratorSettings, *, device: Device, kv: KvShape | None) -> Valued:
    own: Valued = (
        {"--gpu-memory-utilization": settings.gpu_memory_utilization}
        if device == "cuda"
        else {"--block-size": CPU_BLOCK_TOKENS}
    )
    kv_bytes = _kv_bytes(settings, device=device, kv=kv)
    return own if kv_bytes is None else {**own, "--kv-cache-memory-bytes": kv_bytes}


def _switches(settings: GeneratorSettings, *, device: Device) -> dict[str, bool]:
    eager = settings.vllm.enforce_eager
    return {
        "--tokens-only": True,
        "--enable-prompt-tokens-details": True,
        "--enforce-eager": device == "cpu" if eager is None else eager,
        "--enable-expert-parallel": settings.enable_expert_parallel,
        "--enable-prefix-caching": settings.enable_prefix_caching,
        "--no-enable-prefix-caching": not settings.enable_prefix_caching,
        "--enable-lora": bool(settings.max_loras),
    }


def adapter_slots(max_loras: int) -> int:
    """Return how many versions of adapters the server is told to hold at once.

    Each adapter may have a version that is served and one that its older requests end under; one more is proven.

    Example:
        >>> adapter_slots(2)
        5
    """
    return 2 * max_loras + 1


def _rounding(settings: GeneratorSettings, *, device: Device) -> Valued:
    """Return vLLM's word for it: it rounds each version while it loads it, each output of a layer by its own factor."""
    if settings.quantization == "none":
        return {}
    dtype = resolve_dtype(settings.dtype)
    if settings.quantization == "fp8" and device == "cuda" and dtype == "bfloat16":
        return {"--quantization": "fp8_per_channel"}
    raise ConfigError(
        f'generator.quantization is "{settings.quantization}", generator.dtype is "{dtype}" and vLLM computes on '
        f'"{device}": it rounds linear layers to "fp8" alone, on a GPU, from bfloat16. Nearest valid values: '
        'generator.quantization "none"; "fp8" with generator.dtype "bfloat16" on a GPU; or "int8" with '
        'generator.engine "embedded"'
    )


def _lora_places(settings: GeneratorSettings) -> Valued:
    rank = next((rank for rank in _LORA_RANKS if rank >= settings.max_lora_rank), None)
    if rank is None:
        raise ConfigError(
            f"generator.max_lora_rank is {settings.max_lora_rank}, and vLLM takes adapters of rank {_LORA_RANKS[-1]} "
            "at most. Lower it, or serve the run's policy, adapter included, with --repository"
        )
    return {"--max-loras": adapter_slots(settings.max_loras or 0), "--max-lora-rank": rank}


def vllm_environment(settings: GeneratorSettings, *, base: Mapping[str, str], plugin: str) -> dict[str, str]:
    """Return the environment variables of a vLLM server.

    Args:
        base: variables to start from; what would lead its Python to other packages than its own is left out.
        plugin: folder that holds the transport's plugin.
    """
    kept = {name: value for name, value in base.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "VLLM_"))}
    threads = str(settings.threads)
    return {
        **kept,
        "PYTHONPATH": plugin,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Waiting threads that spin take the cores that the trainer computes on.
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # The routes of pause and of the weight transfer; the socket lies in a folder of ours alone.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_PLUGINS": TRANSPORT,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        # The routes that load and unload adapters.
        **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if settings.max_loras else {}),
    }


def kv_dtype_bytes(settings: GeneratorSettings) -> int:
    """Return bytes of one number of keys and values.

    Example:
        >>> kv_dtype_bytes(GeneratorSettings(dtype="float32")), kv_dtype_bytes(GeneratorSettings(kv_cache_dtype="fp8"))
        (4, 1)
    """
    return _KV_BYTES.get(settings.kv_cache_dtype, BYTES_OF[resolve_dtype(settings.dtype)])


_KEPT_BACK = frozenset(
    {
        "--uds",
        "--host",
        "--port",
        "--api-key",
        "--served-model-name",
        "--tokenizer",
        "--skip-tokenizer-init",
        "--enable-scale-out",
        "--worker-extension-cls",
        "--max-cpu-loras",
        "--lora-modules",
        "--lora-target-modules",
    }
)
"""Arguments that would break what Rollmill relies on."""


def _kv_bytes(settings: GeneratorSettings, *, device: Device, kv: KvShape | None) -> int | None:
    if settings.kv_cache_memory_bytes is not None:
        return settings.kv_cache_memory_bytes
    if device == "cuda":
        return None  # what gpu_memory_utilization leaves
    if kv is None:
        raise ConfigError(
            "the model does not say how large its keys and values are, so that a CPU server cannot be given the right "
            "memory for them. Set generator.kv_cache_memory_bytes."
        )
    blocks_each = -(-settings.max_model_len // CPU_BLOCK_TOKENS)
    # One more block: the server keeps one that holds nothing.
    blocks = (settings.max_num_seqs + SCORING_SEATS) * blocks_each + 1
    return blocks * CPU_BLOCK_TOKENS * kv.bytes_per_token(dtype_bytes=kv_dtype_bytes(settings))


def _refuse_taken(arguments: tuple[str, ...], *, taken: set[str]) -> None:
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name in taken:
            raise ConfigError(
                f"generator.vllm.arguments holds {argument!r}, which Rollmill sets itself: the configuration names "
                "each setting once, for all engines. Leave it out, and see `rollmill config explain generator`."
            )
