"""From the one configuration for all engines to the flags and variables of an SGLang server. Pure.

Which setting SGLang obeys stands in `rollmill.config.engines`.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollmill.config.precision import resolve_dtype
from rollmill.config.schema import GeneratorSettings
from rollmill.errors import ConfigError
from rollmill.generator.engines.settings import Device, KvShape, Valued, command_line, kv_dtype_bytes

SCORING_SEATS = 1
"""Sequences beyond `max_num_seqs` that the server is told to run: a score must not wait for a rollout to end."""

SPARE_TOKENS = 8
"""The server keeps a few tokens of its context for itself: 6 of a prompt, 2 of prompt and output together."""

_KV_DTYPES = {"auto": "auto", "bfloat16": "bfloat16", "fp8": "fp8_e4m3"}


def sglang_arguments(
    settings: GeneratorSettings,
    *,
    model: str,
    key_file: str,
    port: int,
    policy_version: int,
    device: Device,
    kv: KvShape | None,
    vocabulary_size: int,
) -> list[str]:
    """Return the arguments of an SGLang server that obeys these settings.

    Args:
        settings: checked; see `rollmill.config.engines` for what is refused.
        model: folder with the first weights, and a configuration without an end token.
        key_file: configuration file of the server with the key that callers must show.
        port: to listen on, on the loopback interface.
        policy_version: label of the first weights.
        device: what the server computes on.
        kv: of the model; needed where keys and values are sized here.
        vocabulary_size: longest sampling mask.

    Raises:
        ConfigError: if `generator.sglang.arguments` sets what is set here, or KV cannot be sized.

    Example:
        >>> arguments = sglang_arguments(
        ...     GeneratorSettings(max_num_seqs=7, max_model_len=64, dtype="float32"),
        ...     model="/m", key_file="/k", port=5, policy_version=3, device="cpu",
        ...     kv=KvShape(layers=2, kv_heads=1, head_dim=32), vocabulary_size=96,
        ... )
        >>> arguments[arguments.index("--max-running-requests") + 1]
        '8'
        >>> arguments[arguments.index("--max-total-tokens") + 1]  # 8 sequences of 64 + 8 tokens
        '576'
    """
    valued: Valued = {
        "--config": key_file,
        "--model-path": model,
        "--host": "127.0.0.1",
        "--port": port,
        "--weight-version": policy_version,
        # A request is refused whose filtered distribution has more tokens than the mask holds.
        "--sampling-mask-max-tokens": vocabulary_size,
        **_same_everywhere(settings),
        **_pass(settings),
        **_memory(settings, device=device, kv=kv),
    }
    switches = _switches(settings)
    _refuse_taken(settings.sglang.arguments, taken={*valued, *switches, *_KEPT_BACK})
    return [*command_line(valued, switches), *settings.sglang.arguments]


def _same_everywhere(settings: GeneratorSettings) -> Valued:
    """Return what does not depend on the device."""
    return {
        "--load-format": "safetensors",
        "--dtype": resolve_dtype(settings.dtype),
        "--context-length": settings.max_model_len + SPARE_TOKENS,
        "--max-running-requests": settings.max_num_seqs + SCORING_SEATS,
        "--kv-cache-dtype": _KV_DTYPES[settings.kv_cache_dtype],
        "--tp-size": settings.tensor_parallel_size,
        "--ep-size": settings.tensor_parallel_size if settings.enable_expert_parallel else 1,
        "--default-priority-value": 0,
        "--grammar-backend": "none",
        "--log-level-http": "warning",
    }


def _pass(settings: GeneratorSettings) -> Valued:
    tokens = settings.max_num_batched_tokens
    return {} if tokens is None else {"--chunked-prefill-size": tokens, "--max-prefill-tokens": tokens}


def _memory(settings: GeneratorSettings, *, device: Device, kv: KvShape | None) -> Valued:
    own: Valued = {"--device": "cpu"} if device == "cpu" else {"--mem-fraction-static": settings.gpu_memory_utilization}
    total = _total_tokens(settings, device=device, kv=kv)
    return own if total is None else {**own, "--max-total-tokens": total}


def _switches(settings: GeneratorSettings) -> dict[str, bool]:
    return {
        "--skip-tokenizer-init": True,
        "--incremental-streaming-output": True,
        # A score comes before whatever waits; all else is in order of arrival.
        "--enable-priority-scheduling": True,
        "--disable-radix-cache": not settings.enable_prefix_caching,
        # With it the last token before a pause is processed after an update, and gets the version after it.
        "--disable-overlap-schedule": not settings.sglang.overlap_schedule,
        "--enable-deterministic-inference": settings.sglang.deterministic_inference,
    }


def sglang_environment(settings: GeneratorSettings, *, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of an SGLang server.

    Args:
        base: variables to start from; what would lead its Python to other packages than its own is left out.
    """
    kept = {name: value for name, value in base.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "SGLANG_"))}
    threads = str(settings.threads)
    return {
        **kept,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Waiting threads that spin take the cores that the trainer computes on.
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # The context is a little longer than the model's, see SPARE_TOKENS; no request comes into that part.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        **settings.sglang.variables,
    }


_KEPT_BACK = frozenset(
    {
        "--api-key",
        "--admin-api-key",
        "--data-parallel-size",
        "--dp-size",
        "--grpc-mode",
        "--model",
        "--nnodes",
        "--served-model-name",
        "--speculative-algorithm",
        "--stream-interval",
        "--tensor-parallel-size",
        "--tokenizer-path",
        "--tokenizer-worker-num",
    }
)
"""Arguments that would break what Rollmill relies on."""


def _total_tokens(settings: GeneratorSettings, *, device: Device, kv: KvShape | None) -> int | None:
    if settings.kv_cache_memory_bytes is None:
        if device == "cuda":
            return None  # what gpu_memory_utilization leaves
        return (settings.max_num_seqs + SCORING_SEATS) * (settings.max_model_len + SPARE_TOKENS)
    if kv is None:
        raise ConfigError(
            "generator.kv_cache_memory_bytes is set, and the model does not say how large its keys and values are. "
            "Leave it out, or give a model with a plain configuration."
        )
    tokens = settings.kv_cache_memory_bytes // kv.bytes_per_token(dtype_bytes=kv_dtype_bytes(settings))
    if tokens < settings.max_model_len + SPARE_TOKENS:
        raise ConfigError(
            f"generator.kv_cache_memory_bytes {settings.kv_cache_memory_bytes} holds {tokens} tokens, and one sequence "
            f"needs {settings.max_model_len + SPARE_TOKENS}. Raise it, or lower generator.max_model_len."
        )
    return tokens


def _refuse_taken(arguments: tuple[str, ...], *, taken: set[str]) -> None:
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name in taken:
            raise ConfigError(
                f"generator.sglang.arguments holds {argument!r}, which Rollmill sets itself or relies on: the "
                "configuration names each setting once, for all engines. Leave it out, and see "
                "`rollmill config explain generator`."
            )
