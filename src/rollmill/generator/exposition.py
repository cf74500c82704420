"""Samples to Prometheus' own records. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from rollmill.generator.tally import Histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Kind = Literal["counter", "gauge", "histogram"]
Sample = tuple[Mapping[str, str], "float | Histogram"]
"""Labels, and a number or a histogram."""


def metric_of(name: str, samples: Sequence[Sample], *, kind: Kind, text: str) -> Metric:
    """Return a metric with its samples.

    Args:
        name: as it is exported; that of a counter ends with `_total`.
        samples: each with labels of its own.
        kind: says how the samples are written.
        text: what it means.
    """
    from prometheus_client.core import Metric

    metric = Metric(name.removesuffix("_total") if kind == "counter" else name, text, kind)
    for labels, value in samples:
        if isinstance(value, Histogram):
            for bound, count in value.cumulative():
                metric.add_sample(f"{name}_bucket", {**labels, "le": bound}, count)
            metric.add_sample(f"{name}_count", dict(labels), value.count)
            metric.add_sample(f"{name}_sum", dict(labels), value.total)
        else:
            metric.add_sample(name, dict(labels), value)
    return metric
