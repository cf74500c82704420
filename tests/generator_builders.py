"""Builders for tests of engines and of the generator: tiny models on disk, requests, references, repositories."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Ids
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from rollmill.clock import Clock, SystemClock, VirtualClock
from rollmill.errors import WeightError, WeightMismatch
from rollmill.generator.engines.embedded.budget import MemoryParts, plan_kv
from rollmill.generator.engines.embedded.core import EngineCore
from rollmill.generator.engines.embedded.draft_law import DraftLaw
from rollmill.generator.engines.embedded.drafting import Drafter, DraftModel
from rollmill.generator.engines.embedded.engine import EmbeddedEngine
from rollmill.generator.engines.embedded.host_tier import HostTier
from rollmill.generator.engines.embedded.kv import BLOCK_TOKENS, KvCache
from rollmill.generator.engines.embedded.linears import KernelChoice
from rollmill.generator.engines.embedded.model import Quantization, ServedModel
from rollmill.generator.engines.embedded.settings import EmbeddedSettings
from rollmill.generator.engines.embedded.speculation import Guesser
from rollmill.generator.engines.meter import SecondsMeter
from rollmill.generator.engines.protocol import KvPolicy
from rollmill.generator.engines.sequence import Sequence
from rollmill.types import Adapter, Canary, GenerateRequest, SamplingParams, TensorEntry, Turn, WeightManifest
from rollmill.weights.adapters import merged

torch.set_num_threads(1)

VOCABULARY = 96
MAX_LEN = 160
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.4,  # large enough that attention and weights matter in the third digit
}


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{"tie_word_embeddings": True, **SHAPE, **changes})


def save_config(folder: Path, config: PreTrainedConfig | None = None) -> Path:
    (llama() if config is None else config).save_pretrained(folder)
    return folder


def random_model(config: PreTrainedConfig | None = None, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A transformers model with random weights, attention of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(llama() if config is None else config).to(dtype).eval()


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """What a trainer publishes: every distinct parameter once."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def adapter_for(
    model: Any, *, seed: int, rank: int = 2, targets: Ids[str] = ("q_proj", "o_proj", "down_proj")
) -> dict[str, torch.Tensor]:
    """A trained adapter as a trainer publishes it: pairs of random matrices, large enough to matter."""
    numbers = torch.Generator().manual_seed(seed)
    out: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets:
            out[f"{name}.lora_A.weight"] = 0.5 * torch.randn(rank, module.in_features, generator=numbers)
            out[f"{name}.lora_B.weight"] = 0.5 * torch.randn(module.out_features, rank, generator=numbers)
    return out


def merged_model(model: Any, adapter: Mapping[str, torch.Tensor], *, settings: Adapter) -> Any:
    """The model that base and adapter are together."""
    whole = deepcopy(model)
    whole.load_state_dict(merged(tensors_of(model), adapter, settings=settings), strict=False)
    return whole


def embedded(
    folder: Path,
    model: Any,
    *,
    policy_version: int = 1,
    digest: str = "digest-1",
    clock: Clock | None = None,
    draft: DraftModel | None = None,
    before_step: Callable[[], None] | None = None,
    **changes: Any,
) -> EmbeddedEngine:
    settings = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": MAX_LEN, **changes}
    return EmbeddedEngine(
        save_config(folder, model.config),
        settings=EmbeddedSettings(**settings),
        tensors=tensors_of(model),
        policy_version=policy_version,
        digest=digest,
        clock=SystemClock() if clock is None else clock,
        draft=draft,
        before_step=before_step,
    )


def close_to(model: Any, *, by: float = 0.02) -> Any:
    """The same architecture with slightly other numbers: a draft that is right often, and not always."""
    copy, noise = random_model(model.config), torch.Generator().manual_seed(5)
    moved = {n: value + by * torch.randn(value.shape, generator=noise) for n, value in tensors_of(model).items()}
    copy.load_state_dict(moved, strict=False)
    copy.tie_weights()
    return copy


class Always(DraftLaw):
    """Lets a draft guess in every pass."""

    def guesses(self, sequences: int) -> bool:
        return True


def served_model(folder: Path, model: Any, *, dtype: str = "float32", kernels: KernelChoice = "auto") -> ServedModel:
    return ServedModel(
        save_config(folder, model.config), dtype=getattr(torch, dtype), tensors=tensors_of(model), kernels=kernels
    )


class SteppedEngine:
    """The embedded engine's core on a virtual clock, moved by hand, with the turns it delivered."""

    def __init__(
        self,
        folder: Path,
        model: Any,
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        kv_blocks: int | None = None,
        tier_blocks: int | None = None,
        max_loras: int = 0,
        max_wait_s: float = 0.0,
        speculator: Guesser | None = None,
        draft: Any = None,
        draft_tokens: int = 4,
        law: DraftLaw | None = None,
        dtype: str = "float32",
        kernels: KernelChoice = "auto",
        quantization: Quantization = "none",
    ):
        self.clock = VirtualClock()
        self.meter = SecondsMeter(self.clock, cause="startup")
        served = ServedModel(
            save_config(folder, model.config),
            dtype=getattr(torch, dtype),
            tensors=tensors_of(model),
            kernels=kernels,
            quantization=quantization,
            adapters=max_loras > 0,
        )
        budget = plan_kv(
            block_bytes=1,
            block_tokens=BLOCK_TOKENS,
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_LEN,
            parts=MemoryParts(weights=0, activations=0),
            kv_cache_memory_bytes=None if kv_blocks is None else kv_blocks + MAX_LEN // BLOCK_TOKENS,
        )
        block_bytes = served.block_bytes(BLOCK_TOKENS)
        tier = None
        if tier_blocks is not None:
            nbytes = tier_blocks * block_bytes
            tier = HostTier(
                folder / "tier", nbytes=nbytes, block_bytes=block_bytes, block_tokens=BLOCK_TOKENS, clock=self.clock
            )
        self.core = EngineCore(
            served,
            policy_version=1,
            digest="digest-1",
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_LEN,
            max_num_batched_tokens=max_num_batched_tokens,
            kv=KvCache(served, budget=budget, tier=tier),
            max_wait_s=max_wait_s,
            speculator=speculator,
            max_loras=max_loras,
            clock=self.clock,
            meter=self.meter,
        )
        self.drafter: Drafter | None = None
        if draft is not None:
            small = served_model(folder / "draft", draft, dtype=dtype, kernels=kernels)
            used = DraftModel(small, tokens=draft_tokens, law=Always() if law is None else law)
            self.drafter = Drafter(used, kv=self.core.kv, max_num_batched_tokens=max_num_batched_tokens)
            self.core.speculator = self.drafter
        self.results: dict[str, Turn | Exception] = {}

    def submit(self, asked: GenerateRequest) -> None:
        def deliver(result: Turn | Exception) -> None:
            self.results[asked.request_id] = result

        self.core.submit(Sequence(asked, max_model_len=MAX_LEN, now_s=self.clock.now_s(), deliver=deliver))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.core.step()

    def finish(self) -> None:
        while self.core.has_work():
            self.core.step()

    def swap(self, model: Any, *, policy_version: int, kv: KvPolicy) -> None:
        self.core.pause()
        self.core.update(tensors_of(model), policy_version=policy_version, digest=f"digest-{policy_version}", kv=kv)
        self.core.resume()

    def turn(self, request_id: str) -> Turn:
        result = self.results[request_id]
        assert isinstance(result, Turn), result
        return result


def request(request_id: str, prompt: Ids[int], *, group_key: str = "", deadline_s: float = 60.0, **sampling: Any):
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=np.array(prompt, dtype=np.int32),
        sampling=SamplingParams(**{"max_new_tokens": 8, **sampling}),
        group_key=group_key,
        deadline_s=deadline_s,
    )


def prompt_of(length: int, *, seed: int = 0, start: Iterable[int] = ()) -> list[int]:
    rng, first = np.random.default_rng(seed), list(start)
    return [*first, *rng.integers(1, VOCABULARY, length - len(first)).tolist()]


def all_ids(turn: Turn) -> np.ndarray:
    return np.concatenate([turn.prompt_ids, turn.output_ids]).astype(np.int64)


@torch.inference_mode()
def reference_logits(model: Any, ids: np.ndarray) -> torch.Tensor:
    """Float32 [n, vocabulary] of a plain transformers forward pass."""
    return model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].float()


def reference_logprobs(model: Any, turn: Turn, sampling: SamplingParams) -> np.ndarray:
    """Log-probs of the output under the distribution that ought to have been sampled, written the slow way."""
    logits = reference_logits(model, all_ids(turn))[len(turn.prompt_ids) - 1 : -1]
    out = []
    for row, token in zip(logits, turn.output_ids, strict=True):
        row = row / (sampling.temperature or 1.0)
        if sampling.top_k:
            row = torch.where(row >= row.topk(sampling.top_k).values[-1], row, -torch.inf)
        if sampling.top_p < 1:
            probabilities, order = row.softmax(-1).sort(descending=True)
            kept = order[: int((probabilities.cumsum(-1) < sampling.top_p).sum()) + 1]
            row = torch.full_like(row, -torch.inf).index_copy(0, kept, row[kept])
        out.append(float(row.log_softmax(-1)[int(token)]))
    return np.array(out, dtype=np.float32)


def canary_for(model: Any, *, tolerance: float = 1e-3) -> Canary:
    ids = np.arange(1, 12, dtype=np.int32)
    logprobs = reference_logits(model, ids.astype(np.int64)).log_softmax(-1)[:-1]
    scored = logprobs.gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]
    return Canary(token_ids=ids, logprobs=scored.numpy(), tolerance=tolerance)


class MemoryRepository:
    """`ModelRepository` of a test: versions in memory, each with its digest; says who holds what."""

    def __init__(self) -> None:
        self._manifests: dict[int, WeightManifest] = {}
        self._tensors: dict[int, dict[str, torch.Tensor]] = {}
        self.holds: set[tuple[int, str]] = set()

    def publish(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        optimizer_step: int,
        parent: int | None,
        history_id: str,
        training_dtype: str,
        canary: Canary | None,
        at_s: float,
    ) -> WeightManifest:
        version = max(self._manifests, default=0) + 1
        entries = {
            name: TensorEntry(dtype="float32", shape=tuple(value.shape), nbytes=value.nbytes, sha256=_sha256(value))
            for name, value in tensors.items()
        }
        manifest = WeightManifest(
            policy_version=version,
            optimizer_step=optimizer_step,
            parent=parent,
            history_id=history_id,
            training_dtype=training_dtype,
            serving_dtype=training_dtype,
            tensors=entries,
            digest=hashlib.sha256("".join(entry.sha256 for entry in entries.values()).encode()).hexdigest(),
            transport="shm",
            location="memory",
            published_at_s=at_s,
            canary=canary,
        )
        self._manifests[version], self._tensors[version] = manifest, dict(tensors)
        return manifest

    def put(self, model: Any, *, canary: Canary | None = None) -> int:
        """Publish a model's weights with a true canary, unless another one is given."""
        return self.publish(
            tensors_of(model),
            optimizer_step=0,
            parent=None,
            history_id="h",
            training_dtype="float32",
            canary=canary_for(model) if canary is None else canary,
            at_s=0.0,
        ).policy_version

    def republish(self, policy_version: int) -> int:
        """Publish an old version again under a new number: equal weights, equal digest."""
        version = max(self._manifests) + 1
        self._manifests[version] = msgspec.structs.replace(
            self._manifests[policy_version], policy_version=version, parent=policy_version
        )
        self._tensors[version] = self._tensors[policy_version]
        return version

    def damage(self, policy_version: int) -> None:
        """Change one number after the publication."""
        name = next(iter(self._tensors[policy_version]))
        self._tensors[policy_version][name] = self._tensors[policy_version][name] + 1e-3

    def manifests(self, *, after: int = 0) -> Ids[WeightManifest]:
        return [self._manifests[version] for version in sorted(self._manifests) if version > after]

    def manifest(self, policy_version: int) -> WeightManifest:
        if policy_version not in self._manifests:
            raise WeightError(f"policy version {policy_version} is unknown")
        return self._manifests[policy_version]

    def latest(self) -> WeightManifest | None:
        return self._manifests[max(self._manifests)] if self._manifests else None

    def load(self, policy_version: int) -> dict[str, torch.Tensor]:
        manifest = self.manifest(policy_version)
        for name, value in self._tensors[policy_version].items():
            published, served = manifest.tensors[name].sha256, _sha256(value)
            if published != served:
                raise WeightMismatch(f"tensor {name} was damaged", published=published, served=served)
        return self._tensors[policy_version]

    def hold(self, policy_version: int, *, owner: str) -> None:
        self.holds.add((policy_version, owner))

    def release(self, policy_version: int, *, owner: str) -> None:
        self.holds.discard((policy_version, owner))

    def retire(self) -> Ids[int]:
        return ()

    def held_versions(self) -> list[int]:
        return sorted(version for version, _ in self.holds)


def _sha256(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
