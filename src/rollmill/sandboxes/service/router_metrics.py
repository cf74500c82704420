"""What a router tells Prometheus of its fleet, from what it knows at this moment. Pure.

The labels are nodes, states and outcomes: how many series there are depends on the fleet alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rollmill.exposition import Sample, Table, metrics_of, page_of, require_client
from rollmill.sandboxes.service.fleet_law import NodeState, Standing, spread_of

ROUTER_METRICS: Table = {
    "rollmill_sandbox_router_requests_total": (
        "counter",
        "Calls passed on, by node and outcome: done, refused (the caller's fault), no_room (429 or 503), failed, "
        "unreachable.",
    ),
    "rollmill_sandbox_router_unplaced_total": ("counter", "Creations that no node took."),
    "rollmill_sandbox_router_nodes": (
        "gauge",
        "Nodes by state: open, full, closed (nothing may start there), lost (does not answer).",
    ),
    "rollmill_sandbox_router_node_sandboxes": ("gauge", "Sandboxes of a node, as it said last."),
    "rollmill_sandbox_router_node_free": ("gauge", "For how many more a node has room; 0 where admission is closed."),
    "rollmill_sandbox_router_spread": (
        "gauge",
        "Share of its places that the fullest answering node holds, less that of the emptiest: 0 is even.",
    ),
}
"""Name -> kind and meaning, of everything that a router exports."""


def router_page(states: Sequence[NodeState], *, calls: Mapping[tuple[str, str], int], unplaced: int) -> bytes:
    """Return the page in Prometheus' text form.

    Args:
        states: of the nodes.
        calls: that were passed on, by node and outcome.
        unplaced: creations that no node took.

    Raises:
        MissingExtraError: if the Prometheus client is not installed.
    """
    require_client()
    standings = Counter(state.standing for state in states)
    answering = [state for state in states if state.reachable]
    samples: dict[str, list[Sample]] = {
        "requests_total": [({"node": node, "outcome": outcome}, count) for (node, outcome), count in calls.items()],
        "unplaced_total": [({}, unplaced)],
        "nodes": [({"state": one.value}, standings[one]) for one in Standing],
        "node_sandboxes": [({"node": state.url}, state.sandboxes) for state in answering],
        "node_free": [({"node": state.url}, max(0, state.free)) for state in answering],
        "spread": [({}, spread_of(states))],
    }
    named = {f"rollmill_sandbox_router_{name}": values for name, values in samples.items()}
    return page_of(metrics_of(named, table=ROUTER_METRICS))
