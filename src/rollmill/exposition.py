"""Pages for Prometheus, written by its own client: what every part with `/metrics` shares. Pure.

Whoever has numbers gives them by name when somebody asks, beside a table that says what each name is. Nothing is
counted here. The client is imported when a page is made: who only names metrics needs none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, cast

from rollmill.errors import MissingExtraError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""What HTTP calls a page."""

Kind = Literal["counter", "gauge", "histogram"]
Table = Mapping[str, tuple[Kind, str]]
"""Name -> kind and meaning. The name is as it is exported: that of a counter ends with `_total`."""


class Distribution(Protocol):
    """How many values lie between bounds."""

    @property
    def bounds(self) -> Sequence[float]:
        """Upper bounds, ascending."""
        ...

    @property
    def counts(self) -> Sequence[int]:
        """Values between each bound and the one before, and last those above all bounds."""
        ...

    @property
    def total(self) -> float:
        """Sum of the values."""
        ...


Sample = tuple[Mapping[str, str], "float | Distribution"]
"""Labels, and a number or (of a histogram) a distribution. All samples of a name have the same labels."""


def require_client() -> None:
    """Say at once, rather than at the first scrape, that there is no client.

    Raises:
        MissingExtraError: if the Prometheus client is not installed.
    """
    try:
        import prometheus_client  # noqa: F401 - only whether it is there
    except ImportError:
        raise MissingExtraError(package="prometheus-client", purpose="/metrics", extra="serve") from None


def page_of(metrics: Iterable[Metric]) -> bytes:
    """Return the page in Prometheus' text form; `CONTENT_TYPE` says so in HTTP."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(metrics))
    return generate_latest(registry)


def metrics_of(samples: Mapping[str, Sequence[Sample]], *, table: Table) -> Iterator[Metric]:
    """Yield a metric for each name, in their order; one without samples is named without a number."""
    for name, values in samples.items():
        kind, text = table[name]
        yield metric_of(name, values, kind=kind, text=text)


def metric_of(name: str, samples: Sequence[Sample], *, kind: Kind, text: str) -> Metric:
    """Return a metric with its samples.

    Args:
        name: as it is exported; that of a counter ends with `_total`.
        samples: each with values of its own for the same labels.
        kind: says how the samples are written.
        text: what it means.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    labels = tuple(samples[0][0]) if samples else ()
    if kind == "histogram":
        histogram = HistogramMetricFamily(name, text, labels=labels)
        for own, value in samples:
            distribution = cast("Distribution", value)
            histogram.add_metric(_values(own, labels), buckets_of(distribution), distribution.total)
        return histogram
    metric = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, text, labels=labels)
    for own, value in samples:
        metric.add_metric(_values(own, labels), cast("float", value))
    return metric


def buckets_of(distribution: Distribution) -> list[tuple[str, int]]:
    """Return (upper bound as text, values at or under it) of each bound, and last of all values."""
    bounds = (*map(str, distribution.bounds), "+Inf")
    return list(zip(bounds, itertools.accumulate(distribution.counts), strict=True))


class _Collected:
    """What a registry of the client takes."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _values(own: Mapping[str, str], labels: Sequence[str]) -> list[str]:
    # The client would leave out a label that only some samples of a name have.
    assert own.keys() == set(labels), f"samples of one name have the labels {sorted(own)} and {sorted(labels)}"
    return [own[label] for label in labels]
