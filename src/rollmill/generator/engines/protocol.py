"""What every inference engine answers.

An engine decides its own batching; it never decides which rollout to run or which weights to load. What it cannot do
is a capability flag, never a silent fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np

from rollmill.types import Adapter, GenerateRequest, TokenChunk, Turn

if TYPE_CHECKING:
    import torch

PauseMode = Literal["keep", "drain", "abort"]
KvPolicy = Literal["keep", "recompute"]
UpdatePolicy = Literal["keep", "recompute", "drain"]
"""What becomes of requests in flight when weights change; `rollmill.generator.drain` makes a `KvPolicy` of it."""
OnTokens = Callable[[TokenChunk], None]
"""Hears tokens as they are sampled: on the caller's event loop, in order, all of them before the turn is returned."""

REWARD_SCORE = "reward_score"
"""Capability: `RewardEngine`."""
ADAPTERS = "adapters"
"""Capability: `AdapterEngine`."""
_ENGINES_WITH: Mapping[str, tuple[str, ...]] = {REWARD_SCORE: ("embedded", "fake"), ADAPTERS: ("embedded", "vllm")}


def engines_with(capability: str) -> str:
    """Return the engines that have a capability, for a refusal.

    Example:
        >>> engines_with(REWARD_SCORE)
        'embedded, fake'
    """
    return ", ".join(_ENGINES_WITH.get(capability, ())) or "none"


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that is served beside the base: its name, and which publication it is."""

    name: str
    policy_version: int
    digest: str


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is and can do.

    Attributes:
        kv_budget: how much KV there is and where the figure comes from, for people; empty where unknown.
        adapters: served beside the base.
    """

    kind: str
    model: str
    dtype: str
    vocabulary_size: int
    max_model_len: int
    max_num_seqs: int
    kv_bytes: int
    capabilities: tuple[str, ...]
    policy_version: int
    digest: str
    kv_budget: str = ""
    adapters: tuple[AdapterInfo, ...] = ()


class HostKvLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a second tier of KV, beside the engine's own, holds and did.

    Attributes:
        used_bytes: of the places that hold something.
        capacity_bytes: of all places.
        hits: prompts that got KV back from it.
        misses: prompts of sessions and of suspended sequences that got none: nothing was there, or it did not pay.
        evictions: pieces given up for newer ones.
        damaged: pieces that could not be written, or were not read as they had been written.
        stored_bytes: written.
        restored_bytes: read back.
    """

    used_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    evictions: int
    damaged: int
    stored_bytes: int
    restored_bytes: int


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy the engine is, and where its seconds went.

    Attributes:
        seconds: cause -> seconds since the engine was made (`prefill`, `decode`, `weight_load`, `idle`, `paused`, ...);
            they sum to `wall_s`.
        deferred: of those that wait, how many are held for another reason than room: a wave that is not whole yet.
        decode_passes: passes in which sequences got a token each; 0 if the engine does not count them.
        preemptions: sequences whose KV was given up before their end.
        guessed_tokens: of speculative decoding.
        accepted_tokens: of those, how many were drawn; their share is the acceptance rate.
        host_kv: of an engine that has a second tier of KV.
    """

    running: int
    waiting: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    paused: bool
    policy_version: int
    output_tokens: int
    prefill_tokens: int
    cached_tokens: int
    wall_s: float
    seconds: dict[str, float]
    deferred: int = 0
    decode_passes: int = 0
    preemptions: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    host_kv: HostKvLoad | None = None


class UpdateReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a weight update did."""

    policy_version: int
    nbytes: int
    pause_s: float
    changed: bool


class Engine(Protocol):
    """One replica's engine. Async methods run on the server's loop; work happens on the engine's own thread."""

    def info(self) -> EngineInfo:
        """Return what the engine is and can do."""
        ...

    async def generate(self, request: GenerateRequest, *, on_tokens: OnTokens | None = None) -> Turn:
        """Return the finished (or aborted: `StopReason.ABORT`, with the partial tokens) turn.

        Args:
            on_tokens: hears the tokens as they come; must not raise.

        Raises:
            DataError: if the prompt or the sampling parameters do not fit.
            EngineError: if the id is in use or the engine cannot serve; `EngineDead` if it died.

        Cancellation:
            aborts the request and frees its KV.
        """
        ...

    async def abort(self, request_id: str) -> bool:
        """Abort exactly this request; its KV is free when this returns. Return whether it was there."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Return when no further token can be produced. Idempotent."""
        ...

    async def stage(self, tensors: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Make weights ready while the old ones serve, so that their `update` finds little to do in the pause.

        Needs the capability `stage`. Changes nothing that can be seen: until an `update` with this version and these
        very tensors, which must not change meanwhile, it may be forgotten, repeated, or followed by another version's.

        Raises:
            WeightError: if names, shapes or dtypes do not fit.
            EngineError: if the weights could not be made ready; `EngineDead` if the engine ended meanwhile.

        Cancellation:
            the work ends soon after, and nothing is ready.
        """
        ...

    async def update(
        self, tensors: Mapping[str, torch.Tensor], *, policy_version: int, digest: str, kv: KvPolicy
    ) -> UpdateReport:
        """Swap the weights; only while paused; all or nothing. A repeated version is a no-op.

        Raises:
            EngineError: if the engine is not paused or the version does not rise.
            WeightError: if names, shapes or dtypes do not fit; the old weights stay.
        """
        ...

    async def resume(self) -> None:
        """Produce tokens again. Idempotent."""
        ...

    async def flush(self) -> None:
        """No later request hits KV made before this call."""
        ...

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return float32 [n - 1]: log-prob of token i + 1 given the tokens up to i, temperature 1."""
        ...

    def load(self) -> EngineLoad:
        """Return how busy the engine is and where its seconds went."""
        ...

    def healthy(self) -> bool:
        """Return whether requests can be served."""
        ...

    async def close(self) -> None:
        """End all requests with what they have, then the engine. Idempotent."""
        ...


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward head says of a whole sequence.

    Attributes:
        scores: float32 [labels], as the head gives them: no softmax, no scale.
        policy_version: of the weights that gave them, all of them.
    """

    scores: np.ndarray
    policy_version: int


@runtime_checkable
class RewardEngine(Protocol):
    """An engine that can serve a reward head; where it does, it has the capability `reward_score`."""

    async def reward(self, token_ids: np.ndarray, *, deadline_s: float) -> Reward:
        """Return what the reward head says of a whole sequence.

        Args:
            token_ids: int [n], padding behind it included or not.
            deadline_s: longest wait.

        Raises:
            DataError: if the ids do not fit.
            EngineError: if the engine has no reward head, or stopped before it was scored; `EngineDead` if it died.
            DeadlineExceeded: if it was not scored in time.

        Cancellation:
            takes the sequence out of the queue.
        """
        ...


class Adapters(Protocol):
    """Low-rank adapters that an engine serves beside its base. Loading one pauses nobody."""

    async def stage(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        name: str,
        settings: Adapter,
        policy_version: int,
        digest: str,
    ) -> None:
        """Make a version ready; nothing that is served changes. What was staged under this name before is forgotten.

        Raises:
            WeightError: if it does not fit the model, or its rank is over `generator.max_lora_rank`.
        """
        ...

    async def score(self, token_ids: np.ndarray, *, name: str, policy_version: int | None = None) -> np.ndarray:
        """Return float32 [n - 1] as `Engine.score`, by a version that is staged or served; `None`: that is served.

        Raises:
            ModelError: if there is no such version.
        """
        ...

    async def serve(self, name: str, *, policy_version: int, kv: KvPolicy) -> tuple[str, ...]:
        """Serve what was staged, between two steps; return the names of others that had to go for it.

        Raises:
            ModelError: if it was not staged.
            EngineError: if a newer version is served; `Overloaded` if requests use all places.
        """
        ...

    def forget(self, name: str) -> None:
        """Let go of what was staged under a name and will not be served."""
        ...

    async def drop(self, name: str) -> bool:
        """Serve a name no longer; return whether it was served.

        Raises:
            EngineError: if requests use it.
        """
        ...


@runtime_checkable
class AdapterEngine(Protocol):
    """An engine that can serve adapters beside its base; where it was told to, it has the capability `adapters`."""

    @property
    def adapters(self) -> Adapters | None:
        """Load and serve them here; `None` if this one was made without places for them."""
        ...
