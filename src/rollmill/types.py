"""Records that cross process borders.

Decides nothing and does no I/O. Every record is frozen; arrays are columnar (one contiguous NumPy array per
field); lengths of parallel arrays are checked when the record is made, hence also when it enters a process.
The wire form is MessagePack; nothing is pickled.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from rollmill.errors import LengthMismatch

T = TypeVar("T")


class StopReason(enum.Enum):
    """Why a turn ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Message(msgspec.Struct, frozen=True):
    """One chat message; `role` is `system`, `user`, `assistant` or `tool`."""

    role: str
    content: str


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One problem of an environment.

    Attributes:
        task_id: stable identity: a hash of the problem's content, equal in every process and run.
        environment: name of the environment that scores it.
        messages: the conversation the policy sees first.
        reference: what the scorer needs (for example the answer); never shown to the policy.
    """

    task_id: str
    environment: str
    messages: tuple[Message, ...]
    reference: dict[str, Any] = {}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits; 0 means greedy and is allowed in evaluation only.
        top_p: keep the smallest set of tokens whose probability reaches this; 1.0 keeps all.
        top_k: keep this many tokens; 0 keeps all.
        max_new_tokens: cap on output tokens.
        seed: seed of this request's own random stream.
        stop_token_ids: a sampled token among these ends the turn (and belongs to the output).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 32
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens `[start_token, end_token)` that were sampled under `policy_version`."""

    start_token: int
    end_token: int
    policy_version: int


class TurnTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds a turn spent in each phase."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tool_s: float = 0.0


def check_spans(spans: tuple[VersionSpan, ...], *, n_tokens: int) -> None:
    """Check that the spans partition `[0, n_tokens)`.

    Raises:
        LengthMismatch: if they leave a gap, overlap, or end elsewhere.
    """
    at = 0
    for span in spans:
        if span.start_token != at or span.end_token <= span.start_token:
            raise LengthMismatch(what="version_spans (start of a span)", expected=at, got=span.start_token)
        at = span.end_token
    if at != n_tokens:
        raise LengthMismatch(what="version_spans (tokens covered)", expected=n_tokens, got=at)


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One generation call and what came back.

    Attributes:
        request_id: id of the generation request.
        prompt_ids: int32 [prompt_tokens].
        output_ids: int32 [output_tokens], as sampled; never rebuilt from text.
        behavior_logprobs: float32 [output_tokens], under the distribution that was sampled from.
        version_spans: partition of the output by the policy version that sampled it.
        cached_tokens: prompt tokens whose KV was shared instead of computed.
    """

    request_id: str
    prompt_ids: np.ndarray
    output_ids: np.ndarray
    behavior_logprobs: np.ndarray
    version_spans: tuple[VersionSpan, ...]
    stop_reason: StopReason
    timings: TurnTimings = TurnTimings()
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        if len(self.behavior_logprobs) != len(self.output_ids):
            raise LengthMismatch(
                what=f"behavior_logprobs of request {self.request_id}",
                expected=len(self.output_ids),
                got=len(self.behavior_logprobs),
            )
        check_spans(self.version_spans, n_tokens=len(self.output_ids))


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a turn that is being sampled; the chunks of a turn make up its output, in order and without gaps.

    Attributes:
        start_token: index of the first one in the output.
        output_ids: int32 [tokens].
        behavior_logprobs: float32 [tokens].
        policy_version: all were sampled under it.
    """

    start_token: int
    output_ids: np.ndarray
    behavior_logprobs: np.ndarray
    policy_version: int


class Wave(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that an engine runs together, alone and in a fixed order (deterministic mode).

    What floating-point arithmetic gives depends on which rows share a pass. An engine holds the requests of a wave
    until all have come, starts them in order of `index` on an empty batch with no cached prefix, and lets nothing else
    in until the last has ended. A wave that loses a request fails whole.

    Attributes:
        wave_id: unique; a wave that is started again has another.
        size: requests in the wave.
        index: place of this one, from 0.
    """

    wave_id: str
    size: int
    index: int


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One generation call: one sample per request, prompt ids in, sampled ids out.

    Attributes:
        request_id: unique while the request lives; abort matches it exactly, never by prefix.
        prompt_ids: int32 [prompt_tokens].
        group_key: requests with equal key and prompt share one prefill.
        deadline_s: seconds the caller will wait, counted from arrival; past it the request is aborted.
        min_policy_version: refuse (and let the caller retry elsewhere) if the engine serves an older one.
        wave: what it runs together with; `None` lets it join whatever runs.
        session_id: turns of one session go to the replica that holds their KV.
        job: whose request it is; a router gives each job its priority and quota.
        adapter: name of the low-rank adapter that samples beside the base's weights; empty for the base alone. Versions
            are the adapter's then.
    """

    request_id: str
    prompt_ids: np.ndarray
    sampling: SamplingParams
    group_key: str = ""
    deadline_s: float = 120.0
    min_policy_version: int = 0
    wave: Wave | None = None
    session_id: str = ""
    job: str = ""
    adapter: str = ""


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag="scored"):
    """The verifier gave a reward. `raw_reward` decides about signal, `shaped_reward` enters advantages."""

    raw_reward: float
    shaped_reward: float


class PolicyFailed(msgspec.Struct, frozen=True, kw_only=True, tag="policy_failed"):
    """The policy broke a rule of the environment and gets the configured reward."""

    kind: str
    reward: float


class Unscored(msgspec.Struct, frozen=True, kw_only=True, tag="unscored"):
    """No reward could be had (for example `reward_failed(timeout)`); stays out of baselines and loss."""

    reason: str


class InfraFailed(msgspec.Struct, frozen=True, kw_only=True, tag="infra_failed"):
    """Infrastructure failed; never a reward."""

    kind: str


class Cut(msgspec.Struct, frozen=True, kw_only=True, tag="cut"):
    """Ended before its natural end (for example `overlong`); stays out of baselines and loss."""

    reason: str


Outcome = Scored | PolicyFailed | Unscored | InfraFailed | Cut


def raw_reward_of(outcome: Outcome) -> float | None:
    """Return the raw reward, or `None` where the outcome must stay out of the baseline."""
    match outcome:
        case Scored(raw_reward=reward) | PolicyFailed(reward=reward):
            return reward
        case _:
            return None


def shaped_reward_of(outcome: Outcome) -> float | None:
    """Return the reward that enters advantages, or `None` where the outcome must stay out."""
    match outcome:
        case Scored(shaped_reward=reward) | PolicyFailed(reward=reward):
            return reward
        case _:
            return None


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory for one task.

    Attributes:
        rollout_id: `<group>/<sibling>.<attempt>`, unique in a run.
        started_at_s, finished_at_s: controller clock.
        seconds: phase -> seconds (`generate`, `score`, ...).
        lease_id: sandbox lease, where there was one.
        environment_digest: digest of the environment's state at the end, where it has one.
    """

    rollout_id: str
    group_id: str
    sibling: int
    attempt: int
    task: Task
    turns: tuple[Turn, ...]
    outcome: Outcome
    sampling: SamplingParams
    started_at_s: float
    finished_at_s: float
    seconds: dict[str, float] = {}
    lease_id: str | None = None
    environment_digest: str | None = None

    @property
    def output_tokens(self) -> int:
        """Output tokens over all turns."""
        return sum(len(turn.output_ids) for turn in self.turns)

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Distinct policy versions that sampled this rollout, ascending."""
        return tuple(sorted({span.policy_version for turn in self.turns for span in turn.version_spans}))


class FilterVerdict(enum.Enum):
    """Whether a group may enter a training batch."""

    TRAINABLE = "trainable"
    ZERO_ADVANTAGE = "zero_advantage"
    NO_TRAINABLE_TOKENS = "no_trainable_tokens"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Sibling rollouts of one task that share a baseline.

    Attributes:
        rollouts: all siblings at the close, also those that stay out of the loss.
        advantages: float32 [siblings]; NaN-free; 0 for a sibling that stays out of the loss.
        in_loss: bool [siblings]; False keeps the sibling out of loss and baseline.
        oldest_optimizer_step: lowest `optimizer_step` among tokens in the loss.
        newest_optimizer_step: highest one; the spread inside the group.
    """

    group_id: str
    task_index: int
    rollouts: tuple[Rollout, ...]
    advantages: np.ndarray
    in_loss: np.ndarray
    verdict: FilterVerdict
    oldest_optimizer_step: int
    newest_optimizer_step: int

    def __post_init__(self) -> None:
        for name in ("advantages", "in_loss"):
            if len(getattr(self, name)) != len(self.rollouts):
                raise LengthMismatch(
                    what=f"{name} of group {self.group_id}", expected=len(self.rollouts), got=len(getattr(self, name))
                )


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a published set of weights."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """A fixed prompt scored by the trainer when it published; an engine must agree after loading.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n - 1]: log-prob of token i + 1 given tokens up to i, temperature 1.
        tolerance: largest accepted absolute difference per token; depends on the precisions of both sides.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    tolerance: float

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.token_ids) - 1:
            raise LengthMismatch(what="canary logprobs", expected=len(self.token_ids) - 1, got=len(self.logprobs))


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """What a publication of low-rank differences is added to; see `rollmill.weights.adapters`.

    Attributes:
        base_digest: digest of the whole weights under it.
        rank: inner dimension of each pair of matrices.
        alpha: the product of a pair counts `alpha / rank` times.
    """

    base_digest: str
    rank: int
    alpha: float


class Rounded(msgspec.Struct, frozen=True, kw_only=True):
    """The same weights once more, rounded when they were published; see `rollmill.weights.rounding`.

    Attributes:
        dtype: `int8`.
        tensors: integers, their factors, and what is not rounded.
        digest: sha256 over the sorted (name, tensor digest) pairs.
        location: path of the tensors.
    """

    dtype: str
    tensors: dict[str, TensorEntry]
    digest: str
    location: str


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a published set of weights is, and where.

    Attributes:
        policy_version: publication number, only ever rising.
        optimizer_step: committed optimizer updates in these weights.
        parent: version they were trained from; `None` for the first.
        history_id: changes with every resume; versions of an abandoned history keep the old one.
        training_dtype, serving_dtype: `float32`, `bfloat16`, ...
        digest: sha256 over the sorted (name, tensor digest) pairs.
        transport: `shm` or `file`.
        location: path of the tensors.
        adapter: what the tensors, which are an adapter's then, are added to; `None` if they are whole weights.
        rounded: these weights in fewer bits, for replicas that serve them so; `None` if they were not published.
    """

    policy_version: int
    optimizer_step: int
    parent: int | None
    history_id: str
    training_dtype: str
    serving_dtype: str
    tensors: dict[str, TensorEntry]
    digest: str
    transport: str
    location: str
    published_at_s: float = 0.0
    canary: Canary | None = None
    adapter: Adapter | None = None
    rounded: Rounded | None = None


def derive_seed(*parts: str | int) -> int:
    """Return a 63-bit seed that depends on the parts alone, in this order.

    Example:
        >>> derive_seed("run", 1, 0) == derive_seed("run", 1, 0)
        True
        >>> derive_seed("run", 1, 0) == derive_seed("run", 0, 1)
        False
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def rollout_seed(run_seed: int, *, task_index: int, sibling: int) -> int:
    """Return the seed of a rollout: of its place in the data, whatever its group is called and however often it runs.

    Args:
        run_seed: of the run.
        task_index: number of the task in the data stream.
        sibling: number of the rollout in its group.
    """
    return derive_seed(run_seed, "rollout", task_index, sibling)


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, np.dtype[Any]]", value)
        return [array.dtype.str, list(array.shape), np.ascontiguousarray(array).tobytes()]
    if isinstance(value, np.generic):
        return cast("Any", value).item()
    raise NotImplementedError(f"a {type(value).__name__} cannot cross a process border")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, shape, data = value
        array = np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)
        array.flags.writeable = False
        return array
    raise NotImplementedError(f"a {kind.__name__} cannot cross a process border")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(record: Any) -> bytes:
    """Return the MessagePack form of a record."""
    return _ENCODER.encode(record)


def decode(data: bytes, kind: type[T]) -> T:
    """Return the record that `encode` made, checked against `kind`.

    Raises:
        msgspec.ValidationError: if a field is missing or has another type.
        LengthMismatch: if parallel arrays disagree.
    """
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)
