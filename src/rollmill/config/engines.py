"""Which engine obeys which setting of the generator: one table, read by checks, engines and the documentation.

Pure. A setting that an engine does not obey is refused with the engines that do, never ignored. Settings that every
engine obeys are not listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from rollmill.config.schema import GeneratorSettings
from rollmill.config.section import Section

OBEYED_BY: dict[str, tuple[str, ...]] = {
    "kernels": ("embedded",),
    "quantization": ("embedded", "vllm"),
    "max_num_batched_tokens": ("embedded", "vllm", "sglang"),
    "max_wait_ms": ("embedded",),
    "kv_cache_memory_bytes": ("embedded", "vllm", "sglang"),
    "memory_limit_bytes": ("embedded",),
    "gpu_memory_utilization": ("vllm", "sglang"),
    "speculation": ("embedded",),
    "draft_model": ("embedded",),
    "draft_tokens": ("embedded",),
    "enable_prefix_caching": ("embedded", "vllm", "sglang"),
    "host_kv_bytes": ("embedded",),
    "host_kv_directory": ("embedded",),
    "max_loras": ("embedded", "vllm"),
    "max_lora_rank": ("embedded", "vllm"),
    "kv_cache_dtype": ("vllm", "sglang"),
    "tensor_parallel_size": ("vllm", "sglang"),
    "data_parallel_size": ("vllm",),
    "enable_expert_parallel": ("vllm", "sglang"),
    "vllm": ("vllm",),
    "sglang": ("sglang",),
}
"""Setting -> engines that obey it. An engine that learns to obey one is added here, with the code that does so."""

ROUNDINGS: dict[str, tuple[Literal["int8", "fp8"], ...]] = {"embedded": ("int8",), "vllm": ("fp8",)}
"""Engine -> what it can round the weights of linear layers to; vLLM has `int8` for experts alone."""

WITH_WAVES = ("embedded", "fake")
"""Engines whose samples depend on nothing but the request and the weights, as deterministic mode needs."""


def disobeyed(settings: GeneratorSettings) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each setting that was changed and that the chosen engine does not obey, with the engines that do.

    Example:
        >>> list(disobeyed(GeneratorSettings(engine="vllm", kernels="torch")))
        [('kernels', ('embedded',))]
    """
    for name, engines in OBEYED_BY.items():
        if settings.engine not in engines:
            value, default = getattr(settings, name), GeneratorSettings.model_fields[name].default
            if value != default:
                yield from ((key, engines) for key in _changed(name, value, default))


def _changed(name: str, value: object, default: object) -> Iterator[str]:
    if not (isinstance(value, Section) and isinstance(default, Section)):
        yield name
        return
    for inner in type(value).model_fields:
        if getattr(value, inner) != getattr(default, inner):
            yield f"{name}.{inner}"


def published_rounding(settings: GeneratorSettings) -> Literal["none", "int8"]:
    """Return what versions are published in beside their own precision: `fp8` is the server's own doing.

    Example:
        >>> published_rounding(GeneratorSettings(quantization="int8"))
        'int8'
        >>> published_rounding(GeneratorSettings(engine="vllm", quantization="fp8"))
        'none'
    """
    return "int8" if settings.quantization == "int8" else "none"
