"""What a pool reports, from the law's books. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rollmill.sandboxes.admission.law import AdmissionLaw
from rollmill.sandboxes.admission.records import PoolStatistics, TemplateStatistics
from rollmill.sandboxes.admission.templates import Template
from rollmill.sandboxes.records import Image


def statistics_of(
    law: AdmissionLaw,
    *,
    adopted: int,
    unresolved: tuple[str, ...],
    kill_failures: int,
    last_failure: str,
    now_s: float,
) -> PoolStatistics:
    """Return everything that is known of a pool now."""
    gates, counters = law.gates, law.counters
    return PoolStatistics(
        places={place.value: count for place, count in law.books.count.items()},
        stopping=law.books.stopping,
        waiting=dict(Counter(ask.waiting.value for ask in law.asks.values())),
        starting_cap=gates.limit,
        adaptive_cap=gates.cap.value,
        pressure=0.0 if gates.closed_by else gates.verdict.factor,
        stopped=gates.closed_by,
        breakers=_breakers(law, now_s=now_s),
        hits=counters["hits"],
        misses=counters["misses"],
        resumed=counters["resumed"],
        dead_at_hand_out=counters["dead_at_hand_out"],
        dead_idle=counters["dead_idle"],
        aged=counters["aged"],
        evicted=counters["evicted"],
        started=counters["started"],
        unused=counters["unused"],
        failures=_plain(law.failures),
        adopted=adopted,
        unresolved=unresolved,
        kill_failures=kill_failures,
        refused=_plain(law.refused),
        last_failure=last_failure,
        templates=tuple(_template(law, one) for one in law.templates),
    )


def _plain(counts: Mapping[str, int]) -> dict[str, int]:
    return {str(name): count for name, count in counts.items()}


def _breakers(law: AdmissionLaw, *, now_s: float) -> dict[str, str]:
    states = {"provider": law.gates.provider.state(now_s=now_s).value}
    for image, breaker in law.gates.images.items():
        states[_image(image)] = breaker.state(now_s=now_s).value
    return states


def _image(image: Image) -> str:
    return f"image {image}"


def _template(law: AdmissionLaw, template: Template) -> TemplateStatistics:
    return TemplateStatistics(
        spec=template.spec,
        demand=template.demand,
        target=template.target,
        idle=len(template.idle),
        filling=template.filling,
        busy=template.busy,
        warm_up_s=law.gates.cap.warm_up_s(template.spec),
    )
