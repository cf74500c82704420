"""What a router tells Prometheus, put together when somebody asks. Decides nothing.

Labels are bounded: replicas on the list, jobs with a table of their own (all others are `other`), states and outcomes;
never ids or sessions.
"""

from __future__ import annotations

from collections import Counter

from rollmill.clock import Clock
from rollmill.exposition import Sample, Table, metrics_of, page_of, require_client
from rollmill.generator.router.records import Seen
from rollmill.generator.router.service import RouterService

OTHER_JOBS = "other"
QUANTILES = (0.5, 0.95)

METRICS: Table = {
    "rollmill_router_requests_total": ("counter", "Calls that ended, by outcome: ok, cancelled, or an error's code."),
    "rollmill_router_latency_seconds": ("histogram", "From a call's arrival at the router to its answer's end."),
    "rollmill_router_latency_quantile_seconds": (
        "gauge",
        "p50 and p95 of latency_seconds over the last minute; absent without a call in it.",
    ),
    "rollmill_router_moved_total": ("counter", "Samples that went on at another replica with their tokens."),
    "rollmill_router_retried_total": ("counter", "Attempts that were made again at another replica."),
    "rollmill_router_hedged_total": ("counter", "Requests sent to a second replica because the first token was late."),
    "rollmill_router_answered_per_s": ("gauge", "Samples answered per second lately."),
    "rollmill_router_queue_depth": ("gauge", "Samples that wait in the router, by job."),
    "rollmill_router_in_flight": ("gauge", "Samples that replicas hold for this router, by job."),
    "rollmill_router_kv_cache_usage": ("gauge", "Share of the KV of all replicas that is in use, 0 to 1."),
    "rollmill_router_replica_kv_cache_usage": ("gauge", "Share of a replica's KV that is in use, 0 to 1."),
    "rollmill_router_replica_in_flight": ("gauge", "Samples that a replica holds for this router."),
    "rollmill_router_replica_places": ("gauge", "Samples that a replica gets at once."),
    "rollmill_router_replica_policy_version": ("gauge", "Policy version that a replica serves."),
    "rollmill_router_replica_state": ("gauge", "1 for the state that a replica is in, 0 for the others."),
}
"""Name -> kind and meaning, of everything that is exported."""


class RouterMetrics:
    """The page of one router for Prometheus.

    Args:
        service: whose numbers these are.
        clock: the service's.

    Raises:
        MissingExtraError: if the Prometheus client is not installed.
    """

    def __init__(self, service: RouterService, *, clock: Clock) -> None:
        require_client()
        self._service, self._clock = service, clock

    def render(self) -> bytes:
        """Return the page in Prometheus' text form."""
        return page_of(metrics_of(self._samples(), table=METRICS))

    def _samples(self) -> dict[str, list[Sample]]:
        forwarder, law = self._service.forwarder, self._service.law
        now_s = self._clock.now_s()
        rate = law.rate.per_s(now_s=now_s)
        counters = {"moved": forwarder.moved, "retried": forwarder.retried, "hedged": forwarder.hedged}
        found: dict[str, list[Sample]] = {
            f"rollmill_router_{name}_total": [({}, float(count))] for name, count in counters.items()
        }
        found["rollmill_router_requests_total"] = [
            ({"outcome": outcome}, float(count)) for outcome, count in sorted(forwarder.outcomes.items())
        ]
        found["rollmill_router_answered_per_s"] = [({}, rate or 0.0)]
        found["rollmill_router_latency_seconds"] = [({}, forwarder.latency)]
        found["rollmill_router_latency_quantile_seconds"] = [
            ({"quantile": str(share)}, value)
            for share, value in forwarder.latencies.quantiles(QUANTILES, now_s=now_s).items()
        ]
        return found | self._jobs() | self._replicas()

    def _jobs(self) -> dict[str, list[Sample]]:
        waiting: Counter[str] = Counter({OTHER_JOBS: 0})
        flying: Counter[str] = Counter({OTHER_JOBS: 0})
        for queue in self._service.law.queues:
            name = queue.name if queue.name in self._service.settings.jobs else OTHER_JOBS
            waiting[name] += queue.waiting
            flying[name] += queue.in_flight
        return {
            f"rollmill_router_{name}": [({"job": job}, float(count)) for job, count in sorted(counts.items())]
            for name, counts in (("queue_depth", waiting), ("in_flight", flying))
        }

    def _replicas(self) -> dict[str, list[Sample]]:
        members = self._service.law.table.of_job("")
        numbers = {
            "in_flight": [member.in_flight for member in members],
            "places": [member.places for member in members],
            "policy_version": [member.policy_version for member in members],
            "kv_cache_usage": [member.kv_use for member in members],
        }
        status = self._service.status()
        capacity = status.kv_capacity_tokens
        found: dict[str, list[Sample]] = {
            f"rollmill_router_replica_{name}": [
                ({"replica": member.name}, float(value)) for member, value in zip(members, values, strict=True)
            ]
            for name, values in numbers.items()
        }
        found["rollmill_router_kv_cache_usage"] = [({}, status.kv_used_tokens / capacity if capacity else 0.0)]
        found["rollmill_router_replica_state"] = [
            ({"replica": member.name, "state": state.value}, float(member.seen is state))
            for member in members
            for state in Seen
        ]
        return found
