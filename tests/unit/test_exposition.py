"""Pages for Prometheus, byte for byte."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest

from rollmill.errors import MissingExtraError
from rollmill.exposition import Table, buckets_of, metric_of, metrics_of, page_of, require_client

pytest.importorskip("prometheus_client")

TABLE: Table = {
    "calls_total": ("counter", "Calls that ended."),
    "waiting": ("gauge", "Callers that wait."),
    "wait_seconds": ("histogram", "How long they waited."),
}


@dataclass(frozen=True)
class Waits:
    bounds: tuple[float, ...] = (0.5, 1.0)
    counts: tuple[int, ...] = (2, 0, 1)
    total: float = 8.5


def test_a_page_has_each_name_in_order_with_its_kind_its_meaning_and_its_samples():
    samples = {
        "waiting": [({}, 3)],
        "calls_total": [({"outcome": "ok", "node": "a"}, 2), ({"node": "b", "outcome": "ok"}, 0.5)],
        "wait_seconds": [({"phase": "queue"}, Waits())],
    }
    # 2 at or under 0.5 s, none more at or under 1 s, one above.
    assert page_of(metrics_of(samples, table=TABLE)) == (
        b"# HELP waiting Callers that wait.\n"
        b"# TYPE waiting gauge\n"
        b"waiting 3.0\n"
        b"# HELP calls_total Calls that ended.\n"
        b"# TYPE calls_total counter\n"
        b'calls_total{node="a",outcome="ok"} 2.0\n'
        b'calls_total{node="b",outcome="ok"} 0.5\n'
        b"# HELP wait_seconds How long they waited.\n"
        b"# TYPE wait_seconds histogram\n"
        b'wait_seconds_bucket{le="0.5",phase="queue"} 2.0\n'
        b'wait_seconds_bucket{le="1.0",phase="queue"} 2.0\n'
        b'wait_seconds_bucket{le="+Inf",phase="queue"} 3.0\n'
        b'wait_seconds_count{phase="queue"} 3.0\n'
        b'wait_seconds_sum{phase="queue"} 8.5\n'
    )


def test_a_name_without_samples_is_told_without_a_number():
    page = page_of(metrics_of({"calls_total": []}, table=TABLE))
    assert page == b"# HELP calls_total Calls that ended.\n# TYPE calls_total counter\n"


def test_samples_of_one_name_have_the_same_labels():
    with pytest.raises(AssertionError, match=r"job.*node"):
        metric_of("waiting", [({"node": "a"}, 1), ({"node": "a", "job": "x"}, 1)], kind="gauge", text="")


def test_counts_that_do_not_fit_their_bounds_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        buckets_of(Waits(counts=(2, 1)))


def test_a_missing_client_is_told_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"'prometheus-client'.*pip install 'rollmill\[serve\]'"):
        require_client()


def test_names_are_told_without_the_client():
    modules = ("exposition", "sandboxes.metrics", "sandboxes.service.router_metrics")
    code = f"import sys; {'; '.join(f'import rollmill.{name}' for name in modules)}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "rollmill.exposition" in result.stdout.split()
    assert not {"prometheus_client", "torch"} & set(result.stdout.split())
