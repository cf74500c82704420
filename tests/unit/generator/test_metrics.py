"""What a replica tells Prometheus, read back with Prometheus' own parser."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollmill.clock import VirtualClock
from rollmill.errors import DataError, EngineError, RequestAborted, RequestIdInUse, RollmillError, WeightError
from rollmill.generator.engines.fake import FakeEngine
from rollmill.generator.engines.protocol import EngineLoad, HostKvLoad
from rollmill.generator.loading import Replica
from rollmill.generator.metrics import ALIASES, METRICS, LastKnown, ReplicaMetrics
from rollmill.generator.service import InferenceService
from rollmill.generator.state import ReplicaState, move
from rollmill.generator.wire import LoadReport
from rollmill.types import GenerateRequest, SamplingParams, StopReason, Turn, TurnTimings, VersionSpan

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


TIER = HostKvLoad(
    used_bytes=64,
    capacity_bytes=256,
    hits=5,
    misses=2,
    evictions=3,
    damaged=1,
    stored_bytes=4096,
    restored_bytes=1024,
)


class LoadedEngine(FakeEngine):
    """A fake engine that reports the load that a test gives it."""

    reported: EngineLoad | None = None

    def load(self) -> EngineLoad:
        return super().load() if self.reported is None else self.reported


class Rig:
    """Metrics of a replica that has no service: what is heard and reported is the test's."""

    def __init__(self, **options: Any) -> None:
        self.clock = VirtualClock(start_s=1000.0)
        self.engine = LoadedEngine(clock=self.clock, max_num_seqs=16)
        self.replica = Replica(
            engine=self.engine,
            repository=None,  # type: ignore[arg-type] - nothing is loaded here
            kv_policy="keep",
            load_deadline_s=1.0,
            owner="test",
            clock=self.clock,
        )
        self.metrics = ReplicaMetrics(self.replica, clock=self.clock, **options)

    def read(self) -> Samples:
        families = text_string_to_metric_families(self.metrics.render().decode())
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}

    def report(self, **changes: Any) -> None:
        self.engine.reported = msgspec.structs.replace(self.engine.load(), **changes)


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples[(name, tuple(sorted(labels.items())))]


def turn(tokens: int, *, reason: StopReason = StopReason.STOP, **timings: float) -> Turn:
    return Turn(
        request_id="r",
        prompt_ids=np.array([1], dtype=np.int32),
        output_ids=np.arange(tokens, dtype=np.int32),
        behavior_logprobs=np.zeros(tokens, dtype=np.float32),
        version_spans=(VersionSpan(0, tokens, 1),) if tokens else (),
        stop_reason=reason,
        timings=TurnTimings(**timings),
    )


def asked(request_id: str = "r", **changes: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=np.array([3, 4], dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=4),
        **changes,
    )


def test_latencies_are_those_of_the_requests():
    rig = Rig()
    # One call for two siblings, 3 s in all: the one that is done early waits for the other, which is not its own time.
    turns = [turn(5, queued_s=0.2, prefill_s=0.1, decode_s=1.0), turn(6, queued_s=0.3, prefill_s=1.5, decode_s=1.2)]
    rig.metrics.served(asked(), turns, latency_s=3.0)
    samples = rig.read()
    assert of(samples, "rollmill_rollout_latency_seconds_count") == 1
    assert of(samples, "rollmill_rollout_latency_seconds_sum") == 3.0
    assert of(samples, "rollmill_rollout_latency_seconds_bucket", le="2.5") == 0
    assert of(samples, "rollmill_rollout_latency_seconds_bucket", le="5.0") == 1
    # 0.2 + 0.1 and 0.3 + 1.5 seconds to the first token
    assert of(samples, "rollmill_time_to_first_token_seconds_sum") == pytest.approx(2.1)
    assert of(samples, "rollmill_time_to_first_token_seconds_bucket", le="1.0") == 1
    # 4 intervals of 0.25 s and 5 of 0.24 s
    assert of(samples, "rollmill_inter_token_latency_seconds_count") == 9
    assert of(samples, "rollmill_inter_token_latency_seconds_sum") == pytest.approx(4 * 0.25 + 5 * 0.24)
    assert of(samples, "rollmill_inter_token_latency_seconds_bucket", le="0.25") == 9
    assert of(samples, "rollmill_request_queue_seconds_sum") == pytest.approx(0.5)


def test_a_turn_of_one_token_has_no_interval_and_one_without_tokens_no_first_token():
    rig = Rig()
    rig.metrics.served(asked(), [turn(1), turn(0, reason=StopReason.ABORT)], latency_s=1.0)
    samples = rig.read()
    assert of(samples, "rollmill_inter_token_latency_seconds_count") == 0
    assert of(samples, "rollmill_time_to_first_token_seconds_count") == 1


def test_calls_are_counted_by_outcome_and_only_faults_raise_the_error_rate():
    rig = Rig()
    ends: Sequence[Sequence[Turn] | BaseException] = [
        [turn(2)],
        [turn(2), turn(1, reason=StopReason.ABORT)],
        asyncio.CancelledError(),
        DataError("too long"),
        EngineError("dirty"),
        KeyError("bug"),
        RequestIdInUse("r is in use"),
        RequestAborted("told to"),
    ]
    for end in ends:
        rig.metrics.served(asked(), end, latency_s=1.0)
    samples = rig.read()
    outcomes = ("ok", "aborted", "cancelled", "data", "engine", "other", "request_id_in_use", "request_aborted")
    assert [of(samples, "rollmill_requests_total", outcome=outcome) for outcome in outcomes] == [1] * 8
    assert of(samples, "rollmill_error_rate") == pytest.approx(2 / 8)


def test_the_error_rate_forgets_what_is_older_than_a_minute():
    rig = Rig()
    rig.metrics.served(asked(), EngineError("dirty"), latency_s=1.0)
    rig.clock.advance(62)
    rig.metrics.served(asked(), [turn(2)], latency_s=1.0)
    samples = rig.read()
    assert of(samples, "rollmill_error_rate") == 0
    assert of(samples, "rollmill_requests_total", outcome="engine") == 1


def test_rates_are_those_of_the_last_minute():
    rig = Rig()
    rig.clock.advance(60)
    rig.report(output_tokens=600, decode_passes=100)
    for _ in range(3):
        rig.metrics.served(asked(), [turn(2)] * 8, latency_s=1.0)
    samples = rig.read()
    assert of(samples, "rollmill_rollout_throughput") == pytest.approx(24 / 60)
    assert of(samples, "rollmill_tokens_per_s") == pytest.approx(10)
    assert of(samples, "rollmill_batch_size") == pytest.approx(6)
    rig.clock.advance(61)
    samples = rig.read()
    assert of(samples, "rollmill_rollout_throughput") == 0
    assert of(samples, "rollmill_tokens_per_s") == 0


def test_quantiles_of_the_latency_are_those_of_the_last_minute_and_absent_without_calls():
    rig = Rig()
    name = "rollmill_rollout_latency_quantile_seconds"
    assert not [key for key in rig.read() if key[0] == name]
    rig.metrics.served(asked(), [turn(2)], latency_s=50.0)
    rig.clock.advance(61)
    for latency_s in range(1, 21):
        rig.metrics.served(asked(), [turn(2)], latency_s=float(latency_s))
    samples = rig.read()
    # 10 of 20 lie at or under 10 s, 19 of 20 at or under 19 s; what was a minute ago does not count
    assert (of(samples, name, quantile="0.5"), of(samples, name, quantile="0.95")) == (10.0, 19.0)


def test_what_waits_is_told_apart_by_what_it_waits_for():
    rig = Rig()
    rig.report(waiting=5, deferred=2)
    samples = rig.read()
    names = ("rollmill_queue_depth_by_reason", "vllm:num_requests_waiting_by_reason")
    for name, model in zip(names, ({}, {"model_name": "fake"}), strict=True):
        assert of(samples, name, reason="capacity", **model) == 3
        assert of(samples, name, reason="deferred", **model) == 2
    rig.report(paused=True)
    assert of(rig.read(), "rollmill_queue_depth_by_reason", reason="deferred") == 5


def test_prefix_cache_and_weight_updates_have_the_names_of_vllm_too():
    rig = Rig(model_name="policy")
    rig.report(cached_tokens=30, prefill_tokens=70)
    rig.metrics.loaded(
        LoadReport(
            policy_version=2,
            digest="d",
            nbytes=8,
            pull_s=1.0,
            pause_s=0.5,
            changed=True,
            canary_difference=None,
            swap_s=0.25,
        )
    )
    samples = rig.read()
    assert of(samples, "rollmill_prefix_cache_queries_total") == 100
    assert of(samples, "vllm:prefix_cache_queries_total", model_name="policy") == 100
    assert of(samples, "vllm:prefix_cache_hits_total", model_name="policy") == 30
    took = "vllm:rl_weight_update_operation_duration_seconds_sum"
    assert of(samples, took, operation="pull", model_name="policy") == 1.0
    assert of(samples, took, operation="swap", model_name="policy") == 0.25


def test_gauges_are_what_the_engine_reports_at_the_scrape():
    rig = Rig(newest_version=lambda: 4)
    rig.report(
        running=7,
        waiting=3,
        kv_used_tokens=256,
        kv_capacity_tokens=1024,
        preemptions=2,
        cached_tokens=11,
        prefill_tokens=12,
        output_tokens=13,
        seconds={"decode": 5.0, "idle": 2.0},
    )
    samples = rig.read()
    expected = {
        "requests_running": 7,
        "queue_depth": 3,
        "kv_cache_usage": 0.25,
        "preemptions_total": 2,
        "cached_tokens_total": 11,
        "prefill_tokens_total": 12,
        "generated_tokens_total": 13,
        "max_num_seqs": 16,
        "policy_version": 1,
        "publish_lag_versions": 3,
    }
    assert {name: of(samples, f"rollmill_{name}") for name in expected} == expected
    assert of(samples, "rollmill_engine_seconds_total", cause="decode") == 5.0
    assert of(samples, "rollmill_replica_state", state="starting") == 1
    assert of(samples, "rollmill_replica_state", state="serving") == 0
    assert of(samples, "rollmill_replica_info", engine="fake", model="fake", dtype="float32") == 1


def test_what_cannot_be_known_is_absent_and_not_zero():
    names = {name for name, _ in Rig().read()}
    assert names.isdisjoint({"rollmill_inference_gpu_util", "rollmill_batch_size", "rollmill_publish_lag_versions"})


def test_the_newest_version_is_read_beside_the_loop_and_shown_at_the_next_scrape():
    newest: list[int | Exception] = [2, WeightError("gone"), 5, 6]

    def read() -> int:
        found = newest.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    known = LastKnown(read)
    shown = []
    for _ in range(4):
        shown.append(known())
        known.settle()
    assert shown == [None, 2, None, 5]


def test_a_reading_that_hangs_holds_up_no_scrape_and_is_not_begun_again():
    free, readings = threading.Event(), []

    def read() -> int:
        readings.append(1)
        free.wait(10)
        return 3

    known = LastKnown(read)
    assert [known(), known(), known()] == [None, None, None]
    free.set()
    known.settle()
    assert len(readings) == 1
    free.set()
    assert known() == 3
    known.settle()


def test_weight_loads_are_counted_by_outcome_and_timed_by_phase():
    rig = Rig()
    report = LoadReport(
        policy_version=2,
        digest="d",
        nbytes=1,
        pull_s=2.0,
        stage_s=0.5,
        pause_s=0.375,
        drain_s=0.0,
        swap_s=0.125,
        prove_s=0.25,
        resume_s=0.0,
        finish_s=4.0,
        cut=3,
        changed=True,
        canary_difference=None,
    )
    rig.metrics.loaded(report)
    rig.metrics.loaded(msgspec.structs.replace(report, changed=False, pull_s=99.0))
    rig.metrics.loaded(WeightError("gone"))
    samples = rig.read()
    outcomes = ("ok", "unchanged", WeightError.code)
    assert [of(samples, "rollmill_weight_loads_total", outcome=name) for name in outcomes] == [1, 1, 1]
    seconds = {p: of(samples, "rollmill_weight_load_seconds_sum", phase=p) for p in ("pull", "stage", "swap", "prove")}
    assert seconds == {"pull": 2.0, "stage": 0.5, "swap": 0.125, "prove": 0.25}
    assert of(samples, "rollmill_weight_load_seconds_sum", phase="finish") == 4.0
    assert of(samples, "rollmill_weight_load_cut_requests_total") == 3
    assert of(samples, "rollmill_weight_pause_seconds_sum") == 0.375


def test_the_names_of_vllm_show_the_same_numbers_under_the_label_they_have_there():
    rig = Rig(model_name="policy")
    rig.report(running=7, waiting=3, output_tokens=13)
    rig.metrics.served(asked(), [turn(5, decode_s=1.0)], latency_s=3.0)
    samples = rig.read()
    assert of(samples, "vllm:num_requests_running", model_name="policy") == 7
    assert of(samples, "vllm:num_requests_waiting", model_name="policy") == 3
    assert of(samples, "vllm:generation_tokens_total", model_name="policy") == 13
    assert of(samples, "vllm:e2e_request_latency_seconds_bucket", model_name="policy", le="5.0") == 1
    assert set(ALIASES.values()) <= set(METRICS)


def test_the_names_of_vllm_can_be_left_out():
    assert not [name for name, _ in Rig(aliases=False).read() if name.startswith("vllm:")]


def test_everything_that_is_exported_is_in_the_table_and_nothing_else():
    rig = Rig(aliases=False, newest_version=lambda: 1)
    rig.report(decode_passes=1, host_kv=TIER)
    rig.metrics.served(asked(), [turn(2)], latency_s=1.0)
    families = list(text_string_to_metric_families(rig.metrics.render().decode()))
    # The text form names a counter with its ending; the parser takes it off again.
    exported = {f.name + "_total" if f.type == "counter" else f.name for f in families}
    assert exported == set(METRICS) - {"rollmill_inference_gpu_util"}
    assert {f.name + ("_total" if f.type == "counter" else ""): (f.type, f.documentation) for f in families} == {
        name: METRICS[name] for name in exported
    }


def test_the_host_tier_is_shown_where_there_is_one():
    rig = Rig()
    assert not [name for name, _ in rig.read() if "host_kv" in name]
    rig.report(host_kv=TIER)
    samples = rig.read()
    shown = {
        name: of(samples, f"rollmill_host_kv_{name}")
        for name in ("used_bytes", "capacity_bytes", "evictions_total", "damaged_total")
    }
    assert shown == {"used_bytes": 64, "capacity_bytes": 256, "evictions_total": 3, "damaged_total": 1}
    assert of(samples, "rollmill_host_kv_lookups_total", outcome="hit") == 5
    assert of(samples, "rollmill_host_kv_lookups_total", outcome="miss") == 2
    assert of(samples, "rollmill_host_kv_moved_bytes_total", direction="stored") == 4096
    assert of(samples, "rollmill_host_kv_moved_bytes_total", direction="restored") == 1024


def test_the_page_does_not_grow_with_requests():
    rig = Rig()

    def serve(count: int, *, start: int) -> int:
        for index in range(start, start + count):
            rig.clock.advance(0.1)
            result: Any = [turn(4, decode_s=1.0)] if index % 3 else EngineError(f"request {index}")
            rig.metrics.served(asked(f"r{index}", session_id=f"s{index}", job=f"j{index}"), result, latency_s=index)
        return len(rig.read())

    assert serve(30, start=0) == serve(2000, start=30)


def test_a_histogram_says_where_the_median_and_the_95th_percentile_lie():
    rig = Rig()
    for latency_s in [0.2] * 60 + [2.0] * 36 + [20.0] * 4:
        rig.metrics.served(asked(), [turn(1)], latency_s=latency_s)
    samples = rig.read()
    buckets = sorted(
        (float(dict(labels)["le"]), count)
        for (name, labels), count in samples.items()
        if name == "rollmill_rollout_latency_seconds_bucket"
    )
    assert next(le for le, count in buckets if count >= 50) == 0.25
    assert next(le for le, count in buckets if count >= 95) == 2.5
    assert buckets[-1] == (math.inf, 100)


async def test_a_service_tells_its_observer_what_became_of_every_call():
    rig = Rig()
    heard: list[tuple[str, Any]] = []

    class Observer:
        def served(self, request: GenerateRequest, result: Any, *, latency_s: float) -> None:
            heard.append((request.request_id, result))
            rig.metrics.served(request, result, latency_s=latency_s)

        def loaded(self, result: LoadReport | RollmillError) -> None:
            heard.append(("load", result))

    async with asyncio.TaskGroup() as tasks:
        service = InferenceService(rig.replica, tasks=tasks)
        service.observer = Observer()
        with pytest.raises(EngineError):
            await service.generate(asked("early"))
        rig.replica.standing = move(rig.replica.standing, ReplicaState.SERVING, proven=True)
        turns = await service.generate(asked("served"), siblings=3)
        with pytest.raises(DataError):
            await service.generate(msgspec.structs.replace(asked("bad"), prompt_ids=np.array([], dtype=np.int32)))
        rig.replica.standing = move(rig.replica.standing, ReplicaState.DRAINING)
        with pytest.raises(EngineError):
            await service.load_weights(2)
    assert [name for name, _ in heard] == ["early", "served", "bad", "load"]
    assert heard[1][1] == turns
    kinds = [EngineError, DataError, EngineError]
    assert [isinstance(heard[at][1], kind) for at, kind in zip((0, 2, 3), kinds, strict=True)] == [True] * 3
    samples = rig.read()
    assert of(samples, "rollmill_requests_total", outcome="ok") == 1
    assert of(samples, "rollmill_generated_tokens_total") == sum(len(turn.output_ids) for turn in turns)
