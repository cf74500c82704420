"""What a replica tells Prometheus: counted as requests end, put together when somebody asks.

Decides nothing. Gauges and counters of tokens come from the engine's own report at the moment of the scrape, counts and
histograms of requests from the service, which tells its observer what became of every call. Everything is bounded: the
labels are outcomes, phases, causes and states, never ids, sessions or jobs.

Rates and shares are those of the last minute. A turn is counted where it ends, whatever its length; a call for siblings
is one request and as many turns. The names of vLLM (`ALIASES`) show the same numbers to dashboards and autoscalers that
know those.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollmill.clock import Clock
from rollmill.errors import RequestAborted, RequestIdInUse, RollmillError, UserError
from rollmill.exposition import Table, metric_of, metrics_of, page_of, require_client
from rollmill.generator.engines.protocol import EngineInfo, EngineLoad, HostKvLoad
from rollmill.generator.gpu import GpuMeter
from rollmill.generator.loading import Replica
from rollmill.generator.state import ReplicaState
from rollmill.generator.tally import SECONDS, TOKEN_SECONDS, Histogram, Recent, RecentValues
from rollmill.generator.wire import LoadReport
from rollmill.types import GenerateRequest, StopReason, Turn

if TYPE_CHECKING:
    from prometheus_client.core import Metric

WINDOW_S = 60
QUANTILES = (0.5, 0.95)

_Labelled = tuple[str, Mapping[Any, Any]]
"""A label, and a number or histogram for each of its values."""

METRICS: Table = {
    "rollmill_requests_total": ("counter", "Calls that ended, by outcome: ok, aborted, cancelled, or an error's code."),
    "rollmill_error_rate": ("gauge", "Share of the calls of the last minute that failed; errors of the user excluded."),
    "rollmill_rollout_throughput": ("gauge", "Turns finished per second in the last minute."),
    "rollmill_rollout_latency_seconds": ("histogram", "From a call's arrival to its last turn's end."),
    "rollmill_rollout_latency_quantile_seconds": (
        "gauge",
        "p50 and p95 of rollout_latency_seconds over the last minute; absent without a call in it.",
    ),
    "rollmill_time_to_first_token_seconds": ("histogram", "From a call's arrival to a turn's first token."),
    "rollmill_inter_token_latency_seconds": ("histogram", "Between two tokens of a turn: its mean, once per interval."),
    "rollmill_request_queue_seconds": ("histogram", "From a turn's arrival in the engine to its prefill."),
    "rollmill_queue_depth": ("gauge", "Sequences that wait for room in the engine."),
    "rollmill_queue_depth_by_reason": (
        "gauge",
        "The same by reason: capacity (no room), or deferred (the engine is paused, or a wave is not whole yet).",
    ),
    "rollmill_requests_running": ("gauge", "Sequences in the engine's batch."),
    "rollmill_max_num_seqs": ("gauge", "Sequences that the engine's batch has room for."),
    "rollmill_kv_cache_usage": ("gauge", "Share of the KV cache that running sequences use, 0 to 1."),
    "rollmill_batch_size": (
        "gauge",
        "Tokens sampled per pass of the engine in the last minute, where it counts passes.",
    ),
    "rollmill_tokens_per_s": ("gauge", "Tokens sampled per second in the last minute."),
    "rollmill_generated_tokens_total": ("counter", "Tokens sampled."),
    "rollmill_prefill_tokens_total": ("counter", "Prompt tokens computed."),
    "rollmill_cached_tokens_total": ("counter", "Prompt tokens whose KV was shared instead of computed."),
    "rollmill_prefix_cache_queries_total": ("counter", "Prompt tokens looked up in the prefix cache."),
    "rollmill_prefix_cache_hits_total": ("counter", "Of those, tokens whose KV was found."),
    "rollmill_preemptions_total": ("counter", "Sequences whose KV was given up before their end."),
    "rollmill_guessed_tokens_total": ("counter", "Tokens guessed by speculative decoding."),
    "rollmill_accepted_tokens_total": ("counter", "Guessed tokens that were drawn."),
    "rollmill_host_kv_used_bytes": ("gauge", "Bytes in use on the host tier of KV; absent without one."),
    "rollmill_host_kv_capacity_bytes": ("gauge", "Bytes that the host tier of KV may use."),
    "rollmill_host_kv_lookups_total": (
        "counter",
        "Prompts of sessions and of suspended sequences: hit if KV came back from the host tier, miss if none did.",
    ),
    "rollmill_host_kv_moved_bytes_total": ("counter", "KV moved: stored on the host tier, or restored from it."),
    "rollmill_host_kv_evictions_total": ("counter", "Pieces of KV that the host tier gave up for newer ones."),
    "rollmill_host_kv_damaged_total": (
        "counter",
        "Pieces of KV that the host tier could not write, or read back whole.",
    ),
    "rollmill_engine_seconds_total": ("counter", "Where the engine's time went, by cause; they sum to wall time."),
    "rollmill_inference_gpu_util": ("gauge", "Share of time in which a GPU computed, 0 to 1; absent without a GPU."),
    "rollmill_policy_version": ("gauge", "Policy version that is served."),
    "rollmill_publish_lag_versions": ("gauge", "Newest published version minus the one that is served."),
    "rollmill_weight_loads_total": (
        "counter",
        "Weight loads that ended, by outcome: ok, unchanged, or an error's code.",
    ),
    "rollmill_weight_load_seconds": ("histogram", "Seconds of a weight load, by phase."),
    "rollmill_weight_pause_seconds": ("histogram", "Seconds without a token because of a weight load."),
    "rollmill_weight_load_cut_requests_total": (
        "counter",
        'Requests that kv_on_update = "drain" did not let finish: they went on under the new version.',
    ),
    "rollmill_replica_state": ("gauge", "1 for the state that the replica is in, 0 for the others."),
    "rollmill_replica_info": ("gauge", "Always 1; says engine, model and dtype."),
}
"""Name -> kind and meaning, of everything that is exported."""

ALIASES: dict[str, str] = {
    "vllm:num_requests_running": "rollmill_requests_running",
    "vllm:num_requests_waiting": "rollmill_queue_depth",
    "vllm:num_requests_waiting_by_reason": "rollmill_queue_depth_by_reason",
    "vllm:kv_cache_usage_perc": "rollmill_kv_cache_usage",
    "vllm:prefix_cache_queries_total": "rollmill_prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total": "rollmill_prefix_cache_hits_total",
    "vllm:num_preemptions_total": "rollmill_preemptions_total",
    "vllm:spec_decode_num_draft_tokens_total": "rollmill_guessed_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total": "rollmill_accepted_tokens_total",
    "vllm:generation_tokens_total": "rollmill_generated_tokens_total",
    "vllm:prompt_tokens_cached_total": "rollmill_cached_tokens_total",
    "vllm:request_queue_time_seconds": "rollmill_request_queue_seconds",
    "vllm:time_to_first_token_seconds": "rollmill_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "rollmill_inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds": "rollmill_rollout_latency_seconds",
    "vllm:rl_weight_update_operation_duration_seconds": "rollmill_weight_load_seconds",
}
"""Name that vLLM gives the same quantity -> ours."""
_LABELS_OF_ALIAS = {"vllm:rl_weight_update_operation_duration_seconds": {"phase": "operation"}}
"""Where vLLM calls a label otherwise: our name -> its name. The operations are our phases."""

_LOAD_PHASES = ("pull", "stage", "finish", "drain", "swap", "prove", "resume")


class ReplicaMetrics:
    """The observer of one replica's service, and its page for Prometheus.

    Args:
        replica: engine and standing.
        clock: the last minute's.
        model_name: label of the names of vLLM; the engine's own name for the model if `None`.
        newest_version: returns the newest published version at once; `LastKnown` makes that of a reading that blocks.
        gpus: asked at every scrape.
        aliases: whether the names of vLLM are exported as well.

    Raises:
        MissingExtraError: if the Prometheus client is not installed.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        clock: Clock,
        model_name: str | None = None,
        newest_version: Callable[[], int | None] | None = None,
        gpus: GpuMeter | None = None,
        aliases: bool = True,
    ) -> None:
        require_client()
        self._replica = replica
        self._clock = clock
        self._model_name = model_name
        self._newest_version = newest_version
        self._gpus = gpus
        self._aliases = aliases
        now_s = clock.now_s()
        self._requests: dict[str, int] = {"ok": 0}
        self._ended, self._failed, self._turns, self._tokens, self._passes = (
            Recent(now_s=now_s, window_s=WINDOW_S) for _ in range(5)
        )
        self._latency, self._first_token, self._queued = (Histogram(SECONDS) for _ in range(3))
        self._latencies = RecentValues(window_s=WINDOW_S)
        self._between_tokens = Histogram(TOKEN_SECONDS)
        self._loads: dict[str, int] = {"ok": 0}
        self._load_s = {phase: Histogram(SECONDS) for phase in _LOAD_PHASES}
        self._pause_s = Histogram(SECONDS)
        self._cut = 0
        self._last_load = replica.engine.load()
        self._last_load_s = now_s

    # -- what the service tells

    def served(self, request: GenerateRequest, result: Sequence[Turn] | BaseException, *, latency_s: float) -> None:
        """Count a call that ended."""
        now_s, outcome = self._clock.now_s(), outcome_of(result)
        self._requests[outcome] = self._requests.get(outcome, 0) + 1
        self._ended.add(1, now_s=now_s)
        if isinstance(result, BaseException):
            self._failed.add(is_failure(result), now_s=now_s)
            return
        self._latency.observe(latency_s)
        self._latencies.add(latency_s, now_s=now_s)
        for turn in result:
            self._count_turn(turn)
        self._turns.add(len(result), now_s=now_s)
        self._count_tokens(self._replica.engine.load())

    def _count_turn(self, turn: Turn) -> None:
        tokens, timings = len(turn.output_ids), turn.timings
        self._queued.observe(timings.queued_s)
        if tokens:
            # Its own: the call ends with its slowest sibling.
            self._first_token.observe(timings.queued_s + timings.prefill_s)
        if tokens > 1:
            self._between_tokens.observe(timings.decode_s / (tokens - 1), times=tokens - 1)

    def loaded(self, result: LoadReport | RollmillError) -> None:
        """Count a weight load that ended."""
        outcome = result.code if isinstance(result, RollmillError) else "ok" if result.changed else "unchanged"
        self._loads[outcome] = self._loads.get(outcome, 0) + 1
        if isinstance(result, RollmillError) or not result.changed:
            return
        for phase, histogram in self._load_s.items():
            histogram.observe(getattr(result, f"{phase}_s"))
        self._pause_s.observe(result.pause_s)
        self._cut += result.cut

    def _count_tokens(self, load: EngineLoad) -> None:
        """Put what the engine did since the last look into the last minute."""
        now_s, since_s, before = self._clock.now_s(), self._last_load_s, self._last_load
        self._tokens.add(load.output_tokens - before.output_tokens, since_s=since_s, now_s=now_s)
        self._passes.add(load.decode_passes - before.decode_passes, since_s=since_s, now_s=now_s)
        self._last_load, self._last_load_s = load, now_s

    # -- what Prometheus asks

    def render(self) -> bytes:
        """Return the page in Prometheus' text form."""
        return page_of(self._collect())

    def _collect(self) -> Iterator[Metric]:
        samples = self._samples()
        yield from metrics_of({name: values for name, values in samples.items() if values}, table=METRICS)
        model = {"model_name": self._model_name or self._replica.engine.info().model}
        for alias, name in ALIASES.items() if self._aliases else ():
            kind, text = METRICS[name]
            theirs = _LABELS_OF_ALIAS.get(alias, {})
            renamed = [
                ({**{theirs.get(key, key): text for key, text in labels.items()}, **model}, value)
                for labels, value in samples[name]
            ]
            yield metric_of(alias, renamed, kind=kind, text=text)

    def _samples(self) -> dict[str, list[tuple[dict[str, str], Any]]]:
        """Return name -> [(labels, number or histogram)]; an empty list where nothing can be said."""
        now_s, load, info = self._clock.now_s(), self._replica.engine.load(), self._replica.engine.info()
        self._count_tokens(load)
        plain = {**_of_load(load), **self._counted(now_s), **self._of_info(info)}
        labelled = self._by_label(load, now_s=now_s)
        if load.decode_passes:
            passes = self._passes.sum(now_s=now_s)
            plain["batch_size"] = self._tokens.sum(now_s=now_s) / passes if passes else 0.0
        if load.host_kv is not None:
            plain |= _of_host_kv(load.host_kv)
            labelled |= _by_label_of_host_kv(load.host_kv)
        found: dict[str, list[tuple[dict[str, str], Any]]] = {name: [] for name in METRICS}
        found["rollmill_replica_info"].append(({"engine": info.kind, "model": info.model, "dtype": info.dtype}, 1))
        for name, value in plain.items():
            found[f"rollmill_{name}"].append(({}, value))
        for name, (label, values) in labelled.items():
            found[f"rollmill_{name}"] += [({label: str(key)}, value) for key, value in values.items()]
        return found

    def _counted(self, now_s: float) -> dict[str, Any]:
        ended = self._ended.sum(now_s=now_s)
        return {
            "error_rate": self._failed.sum(now_s=now_s) / ended if ended else 0.0,
            "rollout_throughput": self._turns.per_s(now_s=now_s),
            "rollout_latency_seconds": self._latency,
            "time_to_first_token_seconds": self._first_token,
            "inter_token_latency_seconds": self._between_tokens,
            "request_queue_seconds": self._queued,
            "tokens_per_s": self._tokens.per_s(now_s=now_s),
            "weight_pause_seconds": self._pause_s,
            "weight_load_cut_requests_total": self._cut,
        }

    def _of_info(self, info: EngineInfo) -> dict[str, Any]:
        plain = {"max_num_seqs": info.max_num_seqs, "policy_version": info.policy_version}
        newest = None if self._newest_version is None else self._newest_version()
        return plain if newest is None else {**plain, "publish_lag_versions": max(0, newest - info.policy_version)}

    def _by_label(self, load: EngineLoad, *, now_s: float) -> dict[str, _Labelled]:
        deferred = load.waiting if load.paused else load.deferred
        return {
            "requests_total": ("outcome", self._requests),
            "rollout_latency_quantile_seconds": ("quantile", self._latencies.quantiles(QUANTILES, now_s=now_s)),
            "queue_depth_by_reason": ("reason", {"capacity": load.waiting - deferred, "deferred": deferred}),
            "engine_seconds_total": ("cause", load.seconds),
            "inference_gpu_util": ("gpu", {} if self._gpus is None else self._gpus.read()),
            "weight_loads_total": ("outcome", self._loads),
            "weight_load_seconds": ("phase", self._load_s),
            "replica_state": ("state", {s.value: int(s is self._replica.standing.state) for s in ReplicaState}),
        }


def _of_load(load: EngineLoad) -> dict[str, Any]:
    return {
        "queue_depth": load.waiting,
        "requests_running": load.running,
        "kv_cache_usage": kv_usage(load),
        "generated_tokens_total": load.output_tokens,
        "prefill_tokens_total": load.prefill_tokens,
        "cached_tokens_total": load.cached_tokens,
        "prefix_cache_queries_total": load.cached_tokens + load.prefill_tokens,
        "prefix_cache_hits_total": load.cached_tokens,
        "preemptions_total": load.preemptions,
        "guessed_tokens_total": load.guessed_tokens,
        "accepted_tokens_total": load.accepted_tokens,
    }


def _of_host_kv(tier: HostKvLoad) -> dict[str, Any]:
    return {
        "host_kv_used_bytes": tier.used_bytes,
        "host_kv_capacity_bytes": tier.capacity_bytes,
        "host_kv_evictions_total": tier.evictions,
        "host_kv_damaged_total": tier.damaged,
    }


def _by_label_of_host_kv(tier: HostKvLoad) -> dict[str, _Labelled]:
    return {
        "host_kv_lookups_total": ("outcome", {"hit": tier.hits, "miss": tier.misses}),
        "host_kv_moved_bytes_total": ("direction", {"stored": tier.stored_bytes, "restored": tier.restored_bytes}),
    }


class LastKnown:
    """A number that is read in a thread, so that a slow disk holds up nobody: as it was at the call before.

    Args:
        read: may block; an error of ours or of the system means that nothing is known.
    """

    def __init__(self, read: Callable[[], int | None]) -> None:
        self._read = read
        self._value: int | None = None
        self._thread: threading.Thread | None = None

    def __call__(self) -> int | None:
        """Return what the last reading gave, and begin the next one if none is under way."""
        known = self._value
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._refresh, name="metrics", daemon=True)
            self._thread.start()
        return known

    def _refresh(self) -> None:
        try:
            self._value = self._read()
        except (RollmillError, OSError):
            self._value = None  # the metric is absent then, which is what is known

    def settle(self) -> None:
        """Wait for the reading that is under way."""
        if self._thread is not None:
            self._thread.join()


def kv_usage(load: EngineLoad) -> float:
    """Return the share of the KV cache that is in use; 0 where the engine has none."""
    return load.kv_used_tokens / load.kv_capacity_tokens if load.kv_capacity_tokens else 0.0


def outcome_of(result: Sequence[Turn] | BaseException) -> str:
    """Return the outcome that a call is counted under.

    Example:
        >>> outcome_of(asyncio.CancelledError()), outcome_of(UserError("no")), outcome_of(KeyError("bug"))
        ('cancelled', 'user', 'other')
    """
    if isinstance(result, asyncio.CancelledError):
        return "cancelled"
    if isinstance(result, RollmillError):
        return result.code
    if isinstance(result, BaseException):
        return "other"
    return "aborted" if any(turn.stop_reason in (StopReason.ABORT, StopReason.ERROR) for turn in result) else "ok"


def is_failure(error: BaseException) -> bool:
    """Return whether an error counts in the error rate: faults and bugs, not what the caller did."""
    return not isinstance(error, asyncio.CancelledError | UserError | RequestIdInUse | RequestAborted)
