"""A deterministic engine without a model: for tests, dry runs and `engine = "fake"`.

Its policy is a table made of hashes: the log-probs of the next token depend on the token before and on the digest of
the weights, nothing else. So it has everything a real engine has (temperature, top-p, version spans, a reference to
compare with) and costs microseconds. Latency is modelled on the event loop's time; on a virtual loop an hour costs
nothing. Faults are injected by number. What it cannot do is load weights: it only takes their digest.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rollmill.clock import Clock
from rollmill.errors import DataError, EngineDead, EngineError, WeightError, WeightMismatch
from rollmill.generator.engines.meter import SecondsMeter
from rollmill.generator.engines.protocol import (
    REWARD_SCORE,
    EngineInfo,
    EngineLoad,
    KvPolicy,
    OnTokens,
    PauseMode,
    Reward,
    UpdateReport,
)
from rollmill.generator.engines.sequence import Sequence as LiveSequence
from rollmill.generator.engines.sequence import check_request
from rollmill.generator.engines.streams import mix, uniforms
from rollmill.types import GenerateRequest, SamplingParams, StopReason, Turn

if TYPE_CHECKING:
    import torch

_SPREAD = 6.0
"""Range of the logits: wide enough that top-p cuts something."""

Script = Callable[[GenerateRequest], Sequence[int] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeLatency:
    """Seconds a request spends: one decode step costs `step_s + per_sequence_s * running`; and those of a staging."""

    step_s: float = 0.0
    per_sequence_s: float = 0.0
    per_prompt_token_s: float = 0.0
    stage_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeFaults:
    """What goes wrong, and when.

    Attributes:
        die_at_request: the engine dies when request number n (from 1) arrives.
        hang_requests: these requests (numbers from 1) produce nothing until aborted.
        fail_stages: these policy versions cannot be made ready, nothing changed.
        refuse_updates: these policy versions are refused, nothing changed.
        spoil_updates: these policy versions fail half way and leave the engine dirty.
        fail_buckets: policy version -> bucket (from 1) at which its update fails; from the second on, weights have been
            changed and the engine is dirty.
        ignore_updates: these policy versions are said to be loaded, but the engine keeps what it has.
        old_heads: policy version -> older one whose output head it is served with, as a packed copy that is not
            refreshed does it; seen by `FakeCanary`.
    """

    die_at_request: int | None = None
    hang_requests: frozenset[int] = frozenset()
    fail_stages: frozenset[int] = frozenset()
    refuse_updates: frozenset[int] = frozenset()
    spoil_updates: frozenset[int] = frozenset()
    fail_buckets: Mapping[int, int] = field(default_factory=dict)
    ignore_updates: frozenset[int] = frozenset()
    old_heads: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeCanary:
    """What the fake scores on a canary: the trainer's log-probs, rounded as an engine of some precision does it.

    Attributes:
        logprobs: policy version -> float [n - 1], the trainer's log-probs on the canary.
        dtype: that the engine says it computes in.
        noise: standard deviation of the rounding, nats; other numbers for each version, the same each time.
        head_share: of a movement of the log-probs that comes from the output head.
    """

    logprobs: Callable[[int], np.ndarray]
    dtype: str = "bfloat16"
    noise: float = 0.03
    head_share: float = 0.6

    def scored(self, policy_version: int, *, head: int) -> np.ndarray:
        """Return float32 [n - 1] under weights whose output head is that of another version."""
        new, old = self.logprobs(policy_version), self.logprobs(head)
        noise = np.random.default_rng(policy_version).normal(0.0, self.noise, len(new))
        return (new + self.head_share * (old - new) + noise).astype(np.float32)


def _keep_no_result(result: Turn | Exception) -> None:
    """The fake reads the turn from the sequence itself."""


class _Live:
    """A request and how it ended."""

    def __init__(self, sequence: LiveSequence, *, script: Sequence[int] | None) -> None:
        self.sequence = sequence
        self.script = script
        self.running = False
        self.reason: StopReason | None = None
        self.ended = asyncio.Event()

    def end(self, reason: StopReason) -> None:
        if self.reason is None:
            self.reason = reason
            self.ended.set()


class FakeEngine:
    """Deterministic engine behind the same protocol as the real ones.

    Args:
        clock: stamps; the loop's own time drives latency and deadlines.
        vocabulary_size: ids below this are sampled.
        update_buckets: parts in which weights arrive.
        script: returns the tokens a request shall get, or `None` for sampled ones. The log-probs of scripted tokens are
            the policy's under temperature 1.
        canary: what it scores on prompts of that length; without one it has no `canary` to be proven by.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        vocabulary_size: int = 128,
        max_num_seqs: int = 32,
        max_model_len: int = 256,
        policy_version: int = 1,
        digest: str = "fake-1",
        latency: FakeLatency | None = None,
        faults: FakeFaults | None = None,
        update_buckets: int = 1,
        script: Script | None = None,
        canary: FakeCanary | None = None,
    ) -> None:
        self._clock = clock
        self._meter = SecondsMeter(clock, cause="startup")
        self._vocabulary_size = vocabulary_size
        self._max_slots, self._max_model_len = max_num_seqs, max_model_len
        self._policy_version, self._digest = policy_version, digest
        self._latency = FakeLatency() if latency is None else latency
        self._faults = FakeFaults() if faults is None else faults
        self._update_buckets = update_buckets
        self._script, self._canary = script, canary
        self._live: dict[str, _Live] = {}
        self._arrived = 0
        self._output_tokens = self._prefill_tokens = 0
        self._paused, self._admission_open = False, True
        self._dirty_reason: str | None = None
        self._cause: Exception | None = None
        self._closed = False
        self._change = asyncio.Event()

    # -- engine protocol

    def info(self) -> EngineInfo:
        """Return what this engine is and can do."""
        return EngineInfo(
            kind="fake",
            model="fake",
            dtype="float32" if self._canary is None else self._canary.dtype,
            vocabulary_size=self._vocabulary_size,
            max_model_len=self._max_model_len,
            max_num_seqs=self._max_slots,
            kv_bytes=0,
            capabilities=(
                "abort",
                "pause_abort",
                "pause_drain",
                "pause_keep",
                REWARD_SCORE,
                "score",
                "stage",
                "streaming",
                "top_k",
                "top_p",
                "version_spans",
                # What it samples depends on nothing but the request and the weights.
                "waves",
                *(() if self._canary is None else ("canary",)),
            ),
            policy_version=self._policy_version,
            digest=self._digest,
        )

    async def generate(self, request: GenerateRequest, *, on_tokens: OnTokens | None = None) -> Turn:
        """Return the finished or aborted turn, see the engine protocol."""
        check_request(request, vocabulary_size=self._vocabulary_size, max_model_len=self._max_model_len)
        self._refuse(request)
        self._arrived += 1
        number = self._arrived
        if number == self._faults.die_at_request:
            self.kill(RuntimeError(f"told to die at request {number}"))
        self._raise_if_dead()
        live = self._admit(request, on_tokens=on_tokens)
        try:
            async with asyncio.timeout(request.deadline_s):
                await self._produce(live, hang=number in self._faults.hang_requests)
        except TimeoutError:
            live.end(StopReason.ABORT)
        finally:
            del self._live[request.request_id]
            self._changed()
        self._raise_if_dead(live)
        return live.sequence.turn(live.reason or StopReason.ABORT, now_s=self._clock.now_s())

    async def abort(self, request_id: str) -> bool:
        """Abort exactly this request; its slot is free when this returns."""
        live = self._live.get(request_id)
        if live is None:
            return False
        live.end(StopReason.ABORT)
        self._changed()
        await self._until(lambda: self._live.get(request_id) is not live)
        return True

    async def pause(self, mode: PauseMode) -> None:
        """Return when no further token can be produced; idempotent."""
        self._raise_if_dead()
        if mode == "drain" and not self._paused:
            self._admission_open = False
            await self._until(lambda: self._paused or not any(live.running for live in self._live.values()))
        self._paused = True
        if mode == "abort":
            self._end_all()
            await self._until(lambda: not self._live)
        self._changed()

    async def stage(self, tensors: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Let the modelled time of a staging pass, see the engine protocol; there are no weights to make ready."""
        self._raise_if_dead()
        if self._latency.stage_s > 0:
            await asyncio.sleep(self._latency.stage_s)
            self._raise_if_dead()
        if policy_version in self._faults.fail_stages:
            raise EngineError(f"told to fail staging policy version {policy_version}; nothing was changed")

    async def update(
        self, tensors: Mapping[str, torch.Tensor], *, policy_version: int, digest: str, kv: KvPolicy
    ) -> UpdateReport:
        """Take the digest of the new weights, see the engine protocol."""
        self._raise_if_dead()
        if not self._paused:
            raise EngineError(f"update to policy version {policy_version} while running: pause the engine first")
        if policy_version == self._policy_version and self._dirty_reason is None:
            if digest != self._digest:
                raise WeightMismatch(
                    f"policy version {policy_version} is served with another digest; two publications share a number",
                    published=digest,
                    served=self._digest,
                )
            return UpdateReport(policy_version=policy_version, nbytes=0, pause_s=0.0, changed=False)
        if policy_version < self._policy_version:
            raise EngineError(
                f"update to policy version {policy_version}, but {self._policy_version} is served: versions only rise"
            )
        if policy_version in self._faults.refuse_updates:
            raise WeightError(f"told to refuse policy version {policy_version}; nothing was changed")
        if policy_version in self._faults.spoil_updates:
            self._dirty_reason = f"told to spoil the load of policy version {policy_version}"
            self._end_all()
            raise EngineError(self._dirty_reason)
        for bucket in range(1, self._update_buckets + 1):
            self._take_bucket(bucket, policy_version=policy_version)
        if policy_version in self._faults.ignore_updates:
            return UpdateReport(policy_version=policy_version, nbytes=0, pause_s=0.0, changed=False)
        self._policy_version, self._digest, self._dirty_reason = policy_version, digest, None
        return UpdateReport(
            policy_version=policy_version,
            nbytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
            pause_s=0.0,
            changed=True,
        )

    def _take_bucket(self, bucket: int, *, policy_version: int) -> None:
        if self._faults.fail_buckets.get(policy_version) != bucket:
            return
        why = f"told to fail bucket {bucket} of {self._update_buckets} of policy version {policy_version}"
        if bucket == 1:
            raise WeightError(f"{why}; nothing was changed")
        self._dirty_reason = why
        self._end_all()
        raise EngineError(why)

    async def resume(self) -> None:
        """Produce tokens again; idempotent."""
        self._raise_if_dead()
        self._paused, self._admission_open = False, True
        self._changed()

    async def flush(self) -> None:
        """There is no KV to forget."""
        self._raise_if_dead()

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return float32 [n - 1] log-probs under temperature 1."""
        self._raise_if_dead()
        ids = np.asarray(token_ids, dtype=np.int64)
        if len(ids) < 2 or ids.min() < 0 or ids.max() >= self._vocabulary_size:
            raise DataError(f"cannot score {len(ids)} token ids; 2 or more of {self._vocabulary_size} are accepted")
        version = self._policy_version
        if self._canary is not None and len(ids) == len(self._canary.logprobs(version)) + 1:
            return self._canary.scored(version, head=self._faults.old_heads.get(version, version))
        pairs = itertools.pairwise(ids)
        return np.array([self.logprobs(int(before))[after] for before, after in pairs], dtype=np.float32)

    async def reward(self, token_ids: np.ndarray, *, deadline_s: float) -> Reward:
        """Return the score of the fake's reward head: the mean log-prob of a sequence, from 2 tokens on."""
        logprobs = await self.score(token_ids)
        return Reward(scores=logprobs.mean(keepdims=True), policy_version=self._policy_version)

    def load(self) -> EngineLoad:
        """Return how busy the engine is and where its seconds went."""
        running = [live for live in self._live.values() if live.running]
        wall_s, seconds = self._meter.read()
        return EngineLoad(
            running=len(running),
            waiting=len(self._live) - len(running),
            kv_used_tokens=sum(max(0, live.sequence.kv_tokens) for live in running),
            kv_capacity_tokens=self._max_slots * self._max_model_len,
            paused=self._paused,
            policy_version=self._policy_version,
            output_tokens=self._output_tokens,
            prefill_tokens=self._prefill_tokens,
            cached_tokens=0,
            wall_s=wall_s,
            seconds=seconds,
        )

    def healthy(self) -> bool:
        """Return whether requests can be served."""
        return self._cause is None and not self._closed and self._dirty_reason is None

    async def close(self) -> None:
        """End all requests with what they have; idempotent."""
        self._closed = True
        self._end_all()
        await self._until(lambda: not self._live)
        self._meter.switch("shutdown")

    # -- for tests

    def kill(self, cause: Exception) -> None:
        """Die now: every request fails with `EngineDead` and this cause."""
        self._cause = self._cause or cause
        self._end_all()

    def logprobs(self, before: int) -> np.ndarray:
        """Return float64 [vocabulary], the policy after this token, temperature 1."""
        logits = self._logits(before)
        return logits - np.log(np.exp(logits).sum())

    # -- the policy

    def _logits(self, before: int) -> np.ndarray:
        salt = np.uint64(zlib.crc32(self._digest.encode()) + (before << 32))
        with np.errstate(over="ignore"):
            bits = mix(mix(np.full(1, salt)) + np.arange(self._vocabulary_size, dtype=np.uint64))
        return (bits >> np.uint64(11)).astype(np.float64) * (2.0**-53 * _SPREAD)

    def _sample(self, sequence: LiveSequence, *, before: int) -> tuple[int, float]:
        params = sequence.request.sampling
        if params.temperature <= 0:
            token = int(self._logits(before).argmax())
            return token, float(self.logprobs(before)[token])
        order, weights = _shape(self._logits(before) / params.temperature, params)
        cdf = weights.cumsum()
        uniform = uniforms(np.array([params.seed]), np.array([sequence.count]))[0]
        rank = int(np.searchsorted(cdf, uniform * cdf[-1], side="right"))
        return int(order[rank]), float(np.log(weights[rank] / cdf[-1]))

    # -- requests

    def _refuse(self, request: GenerateRequest) -> None:
        self._raise_if_dead()
        if self._dirty_reason is not None:
            raise EngineError(f"the engine is dirty: {self._dirty_reason}")
        if request.request_id in self._live:
            raise EngineError(f"request id {request.request_id} is in use; ids must be unique while a request lives")
        if request.min_policy_version > self._policy_version:
            raise EngineError(
                f"request {request.request_id} wants policy version {request.min_policy_version} or newer, this engine "
                f"serves {self._policy_version}; send it to another replica or wait for the next load"
            )

    def _admit(self, request: GenerateRequest, *, on_tokens: OnTokens | None) -> _Live:
        sequence = LiveSequence(
            request,
            max_model_len=self._max_model_len,
            now_s=self._clock.now_s(),
            deliver=_keep_no_result,
            on_tokens=on_tokens,
        )
        live = _Live(sequence, script=self._script(request) if self._script else None)
        self._live[request.request_id] = live
        return live

    async def _produce(self, live: _Live, *, hang: bool) -> None:
        await self._until(lambda: live.reason is not None or self._has_room())
        if hang:
            await live.ended.wait()
        if live.reason is not None:
            return
        live.running = True
        self._changed()
        sequence = live.sequence
        sequence.prefill_started_s = self._clock.now_s()
        await self._spend(live, self._latency.per_prompt_token_s * len(sequence.prompt))
        self._prefill_tokens += len(sequence.prompt)
        sequence.prefill_s = self._clock.now_s() - sequence.prefill_started_s
        while live.reason is None:
            running = sum(other.running for other in self._live.values())
            await self._spend(live, self._latency.step_s + self._latency.per_sequence_s * running)
            await self._until(lambda: live.reason is not None or not self._paused)
            if live.reason is None:
                self._append(live)

    def _append(self, live: _Live) -> None:
        sequence = live.sequence
        before = sequence.last_token if sequence.count else int(sequence.prompt[-1])
        if live.script is None:
            token, logprob = self._sample(sequence, before=before)
        else:
            token = live.script[sequence.count]
            logprob = float(self.logprobs(before)[token])
        if sequence.first_token_s is None:
            sequence.first_token_s = self._clock.now_s()
        sequence.append(token, logprob=logprob, policy_version=self._policy_version)
        self._output_tokens += 1
        reason = sequence.stop_reason()
        if reason is None and live.script is not None and sequence.count == len(live.script):
            reason = StopReason.STOP
        if reason is not None:
            live.end(reason)

    def _has_room(self) -> bool:
        running = sum(live.running for live in self._live.values())
        return not self._paused and self._admission_open and running < self._max_slots

    async def _spend(self, live: _Live, seconds: float) -> None:
        """Let modelled time pass, or less if the request ends before."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError):  # the usual end: the time is over before the request
            async with asyncio.timeout(seconds):
                await live.ended.wait()

    def _end_all(self) -> None:
        for live in self._live.values():
            live.end(StopReason.ABORT)
        self._changed()

    def _raise_if_dead(self, live: _Live | None = None) -> None:
        if self._cause is not None and (live is None or live.reason is StopReason.ABORT):
            raise EngineDead(f"the fake engine died of {self._cause!r}; restart the generator") from self._cause
        if self._closed and live is None:
            raise EngineDead("the fake engine was closed; start a new one")

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self._change.wait()

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
        busy = any(live.running for live in self._live.values())
        self._meter.switch("paused" if self._paused else "decode" if busy else "idle")


def _shape(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Return the kept tokens, most probable first, and their weights."""
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order] - logits[order[0]])
    kept = len(weights) if params.top_k == 0 else min(params.top_k, len(weights))
    order, weights = order[:kept], weights[:kept]
    if params.top_p < 1.0:
        before = weights.cumsum() - weights
        kept = int((before < params.top_p * weights.sum()).sum())
    return order[:kept], weights[:kept]
