"""What an embedded engine is told, and how large its passes are.

Pure and without torch: settings in, settings and limits out. What takes memory is `memory`'s to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rollmill.config.engines import published_rounding
from rollmill.config.precision import resolve_dtype
from rollmill.config.schema import GeneratorSettings
from rollmill.errors import ConfigError

if TYPE_CHECKING:
    from rollmill.generator.engines.embedded.linears import KernelChoice
    from rollmill.generator.engines.embedded.model import Quantization

SpeculationChoice = Literal["off", "ngram", "draft"]

_PROMPT_TOKENS = 512
"""Tokens of prompts in one pass, beside the decoded ones, where nothing was said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSettings:
    """How an embedded engine computes.

    Attributes:
        dtype: `float32` or `bfloat16`.
        max_num_seqs: sequences decoded at once.
        max_model_len: longest prompt plus output, tokens; the model's own context where that is shorter.
        max_num_batched_tokens: most tokens of one pass, decoded ones and those of prompts; `None` leaves 512 for
            prompts.
        max_wait_ms: how long an idle engine holds the first request for company; 0 never.
        kv_cache_memory_bytes: memory of keys and values; `None` takes what `memory_limit_bytes` leaves, and without
            that what `max_num_seqs` sequences of `max_model_len` tokens need.
        memory_limit_bytes: of the whole process: keys and values get what it leaves beside weights and activations.
        enable_prefix_caching: whether KV outlives its request, for others that begin alike. Requests that run at the
            same time share either way.
        host_kv_bytes: of a file that takes the KV of idle sessions and of suspended sequences when its blocks are
            needed, until it is wanted again; `None` forgets it.
        host_kv_directory: where that file lies.
        stage_weights: whether a second set of weights will be in memory; counted against the limit.
        speculation: `ngram` guesses what followed the last tokens before, here or in a sibling, where that pays; the
            tokens are the same either way. `draft` lets a small model guess, where that pays; the distribution is the
            same either way. `off` never guesses.
        kernels: whether compiled kernels multiply with the weights: `auto`, `native` or `torch`.
        quantization: `int8` keeps the weights of linear layers in eight bits, with a factor per 32 inputs.
        max_loras: most low-rank adapters served at once beside the weights; 0 serves none.
        max_lora_rank: greatest rank of one; memory is set aside by it.
    """

    dtype: str
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int | None = None
    max_wait_ms: float = 0.0
    kv_cache_memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    enable_prefix_caching: bool = True
    host_kv_bytes: int | None = None
    host_kv_directory: str | Path | None = None
    stage_weights: bool = True
    speculation: SpeculationChoice = "off"
    kernels: KernelChoice = "auto"
    quantization: Quantization = "none"
    max_loras: int = 0
    max_lora_rank: int = 32

    @classmethod
    def of(cls, settings: GeneratorSettings) -> EmbeddedSettings:
        """Return what the settings of a generator say to this engine.

        Raises:
            ConfigError: if the dtype is unknown.

        Example:
            >>> EmbeddedSettings.of(GeneratorSettings(dtype="float32", max_loras=None)).max_loras
            0
        """
        return cls(
            dtype=resolve_dtype(settings.dtype),
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_wait_ms=settings.max_wait_ms,
            kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
            memory_limit_bytes=settings.memory_limit_bytes,
            enable_prefix_caching=settings.enable_prefix_caching,
            host_kv_bytes=settings.host_kv_bytes,
            host_kv_directory=settings.host_kv_directory,
            stage_weights=settings.stage_weights,
            speculation=settings.speculation,
            kernels=settings.kernels,
            quantization=published_rounding(settings),
            max_loras=settings.max_loras or 0,
            max_lora_rank=settings.max_lora_rank,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest pass of an engine, and its longest sequence.

    Attributes:
        max_num_seqs: sequences decoded at once.
        max_model_len: longest prompt plus output, tokens.
        max_num_batched_tokens: most tokens of one pass; at least `max_num_seqs`.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int


def limits_of(settings: EmbeddedSettings, *, context_len: int) -> Limits:
    """Return the limits of an engine.

    Args:
        settings: of the engine.
        context_len: most tokens that its model can read.

    Raises:
        ConfigError: if a pass could not give every sequence a token.

    Example:
        >>> limits_of(EmbeddedSettings(dtype="float32", max_num_seqs=8, max_model_len=256), context_len=128)
        Limits(max_num_seqs=8, max_model_len=128, max_num_batched_tokens=520)
    """
    sequences = settings.max_num_seqs
    tokens = settings.max_num_batched_tokens or sequences + _PROMPT_TOKENS
    if tokens < sequences:
        raise ConfigError(
            f"generator.max_num_batched_tokens {tokens} is less than generator.max_num_seqs {sequences}: a pass "
            "could not give every sequence a token; raise the first or lower the second"
        )
    return Limits(
        max_num_seqs=sequences,
        max_model_len=min(settings.max_model_len, context_len),
        max_num_batched_tokens=tokens,
    )
