"""Unmodified transformers model: built from its configuration, filled from published tensors, proven before use.

A model has an output head over its vocabulary, or a reward head: which one, its configuration says. Decides which
architectures may be served: those whose every layer is standard causal attention over all positions. Anything else is
refused by name, and a probe compares the packed forward pass with the model's own before the first request, so that an
unknown deviation cannot pass silently.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.initialization import no_init_weights

from rollmill.config.precision import packed_precision
from rollmill.errors import ModelError, WeightError
from rollmill.generator.engines.embedded.attention import (
    ATTENTION_NAME,
    BlockPool,
    ForwardPlan,
    Segment,
    causal_mask,
)
from rollmill.generator.engines.embedded.fusions import fuse
from rollmill.generator.engines.embedded.linears import (
    Bfloat16Packing,
    Destination,
    Float32Packing,
    Int8Packing,
    KernelChoice,
    Packing,
    choose_kernels,
    destinations,
)
from rollmill.generator.engines.embedded.low_rank import LowRank, PlainPacking, RowGroups
from rollmill.generator.engines.embedded.native import DIM_STEP, Kernels

Quantization = Literal["none", "int8"]
_PROBE_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.5}
"""In float32 of the largest difference. bfloat16 moves single log-probs by more than a nat between two right ways to
compute attention, so there it is of the mean over the vocabulary: 0.1 at most for these with SmolLM2, and 1.5 and more
where tokens are exchanged or the cache is lost."""
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
REWARD_ARCHITECTURE = "ForSequenceClassification"
"""How the name of a class with a reward head ends: `score.weight` on final hidden states, no output head."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def read_config(path: str | Path) -> PreTrainedConfig:
    """Return the configuration of a local Hugging Face directory.

    Raises:
        ModelError: if it is missing or transformers does not know the architecture.
    """
    try:
        return AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"no usable model configuration in {path}: {error}. Give a directory with a config.json; "
            "`rollmill model prepare` makes one"
        ) from error


def check_architecture(config: PreTrainedConfig) -> None:
    """Refuse what is not standard causal attention in every layer.

    Raises:
        ModelError: naming the model type and the reason.
    """
    reasons = []
    layer_types = getattr(config, "layer_types", None)
    others = sorted(set(layer_types or ()) - {"full_attention"})
    if others:
        reasons.append(f"layers of type {', '.join(others)}")
    elif not layer_types and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        reasons.append(f"a sliding window of {config.sliding_window} tokens")
    reasons += [f"soft-capped logits ({name})" for name in _SOFTCAPS if getattr(config, name, None)]
    reasons += [f"mixture of experts ({name})" for name in _EXPERTS if (getattr(config, name, None) or 0) > 1]
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("an encoder")
    if reasons:
        raise ModelError(
            f"the embedded engine cannot serve model type {config.model_type!r}: it has {'; '.join(reasons)}. It "
            "serves standard causal attention only (Llama, Qwen2, Qwen3, Gemma 1, SmolLM2, ...); choose such a model"
        )


def labels_of(config: PreTrainedConfig) -> int:
    """Return how many scores the model's reward head gives, 0 if it has an output head over its vocabulary instead."""
    architecture = (config.architectures or ["unknown"])[0]
    return int(config.num_labels or 0) if architecture.endswith(REWARD_ARCHITECTURE) else 0


class ServedModel:
    """A model with standard attention that runs packed forward passes over a pool of blocks.

    With a reward head (`labels` is not 0) its logits are the scores of that head.

    Args:
        path: local Hugging Face directory; only its configuration is read.
        dtype: serving precision.
        tensors: the first weights; checked like every later set.
        kernels: whether compiled kernels compute the linear layers: `auto`, `native` or `torch`.
        quantization: `int8` keeps the weights of linear layers in eight bits; needs the compiled kernels.
        adapters: whether low-rank adapters may be served beside the weights.

    Raises:
        ModelError: if the architecture cannot be served, the probe disagrees, or `native` or `int8` cannot be had.
        WeightError: if the tensors do not fit the configuration.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: torch.dtype,
        tensors: Mapping[str, torch.Tensor],
        kernels: KernelChoice = "auto",
        quantization: Quantization = "none",
        adapters: bool = False,
    ) -> None:
        config = read_config(path)
        check_architecture(config)
        self.dtype = dtype
        self.name = str(path)
        self.model_type = str(config.model_type)
        self.labels = labels_of(config)
        self.pad_token_id: int | None = config.get_text_config().pad_token_id
        self._model = _build(config, dtype=dtype)
        self._body = self._model.base_model if self.labels else self._model
        compiled = choose_kernels(kernels)
        self.kernels = compiled
        """They attend, and compute what lies between products, also where torch multiplies."""
        self.quantization = quantization
        packing = _packing(compiled, choice=kernels, quantization=quantization, dtype=dtype)
        self.native_kernels = packing is not None
        self._destinations = destinations(self._model, packing=packing)
        if compiled is not None:
            fuse(self._model, compiled)
        products = PlainPacking() if compiled is None else Float32Packing(compiled)
        self.low_rank = LowRank(self._model, packing=products) if adapters else None
        text = config.get_text_config()
        self.layers = int(text.num_hidden_layers)
        self.kv_heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        self.head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        self.needs_masks = self.kernels is None or self.head_dim % DIM_STEP > 0
        self.vocabulary_size = int(text.vocab_size)
        self.context_len = int(getattr(text, "max_position_embeddings", 0) or 1 << 30)
        accepted = inspect.signature(self._body.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self.copy(self.check(tensors))
        self._probe()

    def new_pool(self, *, blocks: int, size: int) -> BlockPool:
        """Return an empty pool of this model's shape: `blocks` blocks of `size` tokens."""
        return BlockPool(
            layers=self.layers,
            blocks=blocks,
            kv_heads=self.kv_heads,
            size=size,
            head_dim=self.head_dim,
            dtype=self.dtype,
            kernels=self.kernels,
        )

    def block_bytes(self, size: int) -> int:
        """Return bytes of keys and values of `size` tokens in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * size * self.dtype.itemsize

    def activation_bytes(self, *, tokens: int, rows: int, length: int) -> int:
        """Return about how much memory a pass takes beside weights and KV.

        Args:
            tokens: computed in it.
            rows: of logits that are sampled from, in float32, scores and probabilities.
            length: longest sequence that is looked at.
        """
        text = self._model.config.get_text_config()
        hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
        inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
        masks = (1 + heads // self.kv_heads) * length
        widest = 4 * hidden + 3 * inner + 2 * (heads + 2 * self.kv_heads) * self.head_dim + masks
        return 4 * (tokens * widest + 2 * rows * (self.labels or self.vocabulary_size))

    def check(self, tensors: Mapping[str, torch.Tensor]) -> list[tuple[Destination, torch.Tensor]]:
        """Return (destination, new value) for every parameter, having copied nothing.

        A tied tensor may come under any of its names.

        Raises:
            WeightError: if a name, a shape or a kind of number does not fit.
        """
        pairs, seen, wrong = [], set(), []
        for names, destination in self._destinations:
            given = [name for name in names if name in tensors]
            seen.update(given)
            if not given:
                wrong.append(f"{names[0]} is missing")
                continue
            value = tensors[given[0]]
            if value.shape != destination.shape:
                wrong.append(f"{given[0]} has shape {tuple(value.shape)} instead of {tuple(destination.shape)}")
            elif not value.is_floating_point():
                wrong.append(f"{given[0]} has dtype {value.dtype}, which is not floating point")
            elif any(not torch.equal(tensors[name], value) for name in given[1:]):
                wrong.append(f"{' and '.join(given)} are tied in this model but differ")
            pairs.append((destination, value))
        wrong += [f"{name} is not part of the model" for name in tensors if name not in seen]
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise WeightError(
                f"the tensors do not fit {self.model_type} from {self.name}: {'; '.join(wrong[:5])}{more}. Nothing was "
                "changed; publish weights of the same architecture"
            )
        return pairs

    @torch.inference_mode()
    def copy(self, pairs: list[tuple[Destination, torch.Tensor]]) -> None:
        """Write checked values into the serving set, cast to the serving precision."""
        for destination, value in pairs:
            destination.write(value)

    def swap(self) -> None:
        """Exchange the serving set of buffers and the spare one, which `Destination.stage` has filled for all."""
        for _, destination in self._destinations:
            destination.swap()

    @property
    def weight_bytes(self) -> int:
        """Bytes of one version in the serving precision; a tied tensor counts once."""
        return sum(math.prod(destination.shape) for _, destination in self._destinations) * self.dtype.itemsize

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the serving set as it lies in memory, packed or plain."""
        return sum(destination.nbytes for _, destination in self._destinations)

    def buffers(self) -> list[torch.Tensor]:
        """Return every buffer that holds weights: plain and packed, serving and spare."""
        return [buffer for _, destination in self._destinations for buffer in destination.buffers()]

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        *,
        positions: torch.Tensor,
        plan: ForwardPlan,
        pool: BlockPool,
        keep: torch.Tensor | None,
        adapters: RowGroups = (),
    ) -> torch.Tensor:
        """Run packed tokens and return logits `[kept, vocabulary]`, of a reward head `[kept, labels]`.

        Args:
            token_ids: int64 [tokens].
            positions: int64 [tokens], position of each token in its own sequence.
            plan: what is written and read.
            pool: where KV lies.
            keep: int64 [kept], packed tokens whose logits are wanted; `None` keeps all.
            adapters: whose tokens are computed with more than the base's weights.
        """
        pool.plan = plan
        if self.low_rank is not None:
            self.low_rank.rows.groups = adapters
        try:
            out = self._body(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=True,
                block_plan=plan,
                block_kernels=self.kernels,
                **({} if self.labels else {"logits_to_keep": 0 if keep is None else keep}),
                **{self._cache_argument: pool},
            )
        finally:
            pool.plan = None
            if self.low_rank is not None:
                self.low_rank.rows.groups = ()
        return self._scores(out, keep=keep) if self.labels else out.logits[0]

    def _scores(self, out: Any, *, keep: torch.Tensor | None) -> torch.Tensor:
        states = out.last_hidden_state[0]
        return self._model.score(states if keep is None else states[keep])

    def _probe(self) -> None:
        """Compare the packed pass, split in two with a cached start, with the model's own attention."""
        tokens = min(8, self.context_len)
        ids = torch.from_numpy(np.linspace(1, self.vocabulary_size - 1, tokens).astype(np.int64))
        try:
            own = self._own_logits(ids)
            packed = self._packed_logits(ids, first=tokens // 2)
        except (RuntimeError, TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
            raise ModelError(
                f"the embedded engine cannot serve model type {self.model_type!r}: its modules do not run over a "
                f"cache of blocks ({type(error).__name__}: {error}); choose a standard-attention model"
            ) from error
        if self.labels:  # relative: scores have any size
            differences = (own - packed).abs() / (1.0 + own.abs())
        else:
            differences = (own.log_softmax(-1) - packed.log_softmax(-1)).abs()
        difference = float(differences.max() if self.dtype is torch.float32 else differences.mean())
        if not difference <= _PROBE_TOLERANCE[self.dtype]:
            raise ModelError(
                f"the embedded engine cannot serve model type {self.model_type!r}: its output over its cache "
                f"differ from the model's own by {difference:.3g} (tolerance {_PROBE_TOLERANCE[self.dtype]:g}). Either "
                "the weights are not finite or the attention is not standard; choose another model"
            )

    @torch.inference_mode()
    def _own_logits(self, ids: torch.Tensor) -> torch.Tensor:
        self._model.set_attn_implementation("sdpa")
        try:
            out = self._body(input_ids=ids[None], use_cache=False)
            return (self._scores(out, keep=None) if self.labels else out.logits[0]).float()
        finally:
            self._model.set_attn_implementation(ATTENTION_NAME)

    def _packed_logits(self, ids: torch.Tensor, *, first: int) -> torch.Tensor:
        size = max(1, len(ids) // 3)  # several blocks, the last one not full, and not in order
        table = torch.arange(-(-len(ids) // size)).flip(0)
        pool = self.new_pool(blocks=len(table), size=size)
        parts = []
        for start, stop in ((0, first), (first, len(ids))):
            positions = torch.arange(start, stop)
            mask = causal_mask(start=start, rows=stop - start, dtype=self.dtype)
            plan = ForwardPlan(
                write_rows=None,
                write_blocks=table[positions // size],
                write_offsets=positions % size,
                segments=(Segment(table=table, first_row=0, rows=stop - start, mask=mask),),
            )
            parts.append(self.forward(ids[start:stop], positions=positions, plan=plan, pool=pool, keep=None))
        return torch.cat(parts).float()


def _packing(
    kernels: Kernels | None, *, choice: KernelChoice, quantization: Quantization, dtype: torch.dtype
) -> Packing | None:
    """Return how the weights of linear layers are kept, or `None` if torch multiplies with them."""
    if kernels is None:
        if quantization == "int8":
            raise ModelError(
                "weights of eight bits are multiplied by the compiled kernels alone, and those are not used here: set "
                "generator.kernels to 'native' to read why, or generator.quantization to 'none'"
            )
        return None
    if quantization == "int8":
        return Int8Packing(kernels)
    precision = packed_precision("bfloat16" if dtype is torch.bfloat16 else "float32", kernels=choice)
    if precision == "bfloat16" and kernels.bfloat16:
        return Bfloat16Packing(kernels)
    return None if precision is None else Float32Packing(kernels)


def _build(config: PreTrainedConfig, *, dtype: torch.dtype) -> Any:
    try:
        with no_init_weights():  # every parameter is overwritten by the published tensors
            kind = AutoModelForSequenceClassification if labels_of(config) else AutoModelForCausalLM
            model = kind.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    except (ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        raise ModelError(
            f"the embedded engine cannot serve model type {config.model_type!r}: transformers does not build it as a "
            f"causal language model with exchangeable attention ({error}); choose a standard-attention model"
        ) from error
    if labels_of(config) and not isinstance(getattr(model, "score", None), nn.Linear):
        raise ModelError(
            f"the embedded engine cannot serve {type(model).__name__}: a reward head is one linear layer 'score' on "
            "the final hidden states here (Llama, Qwen2, Qwen3, ...); choose such a model"
        )
    model.tie_weights()  # skipped along with the initialisation
    return model.eval().requires_grad_(False)
