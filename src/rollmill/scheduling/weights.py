"""Which replica loads which version, one after the other. Newest only: a version that was overtaken is skipped."""

from __future__ import annotations

from rollmill.errors import InvariantViolation
from rollmill.scheduling.events import WeightsLoaded, WeightsPublished
from rollmill.scheduling.failures import refresh_replicas
from rollmill.scheduling.instructions import LoadWeights
from rollmill.scheduling.state import State


def on_weights_published(state: State, event: WeightsPublished) -> None:
    """Remember the version and have older replicas load it."""
    register_version(state, policy_version=event.policy_version, optimizer_step=event.optimizer_step)
    request_loads(state)


def register_version(state: State, *, policy_version: int, optimizer_step: int) -> None:
    """Note which optimizer step a version carries."""
    state.step_of_version[policy_version] = optimizer_step
    if policy_version > state.newest_version:
        state.newest_version = policy_version
        state.newest_since_s = state.now_s


def on_weights_loaded(state: State, event: WeightsLoaded) -> None:
    """A replica serves another version; the loaded step follows, and a newer version may be due."""
    replica = state.replicas.get(event.replica_id)
    if replica is None:
        # It left while it loaded; it joins anew with the version it serves.
        return
    check_version(state, event.policy_version, who=event.replica_id)
    replica.policy_version = event.policy_version
    replica.loading = None
    refresh_replicas(state)
    _time_refresh(state)
    request_loads(state)


def _time_refresh(state: State) -> None:
    """Measure how long the newest update took to be served everywhere."""
    if state.trained_at_s is None or state.loaded_step is None or state.loaded_step < state.optimizer_step:
        return
    state.rates.refresh_s.observe(state.now_s - state.trained_at_s, 1.0)
    state.trained_at_s = None


def request_loads(state: State) -> None:
    """Ask replicas that are behind to load the newest version, those furthest behind first, a few at a time.

    Where no sample may be older than the newest version there is nothing to go on with meanwhile: all load at once.
    """
    settings, replicas = state.settings, state.replicas.values()
    none_serves = settings.deterministic or settings.max_staleness == 0
    most = len(replicas) if none_serves else settings.loads_at_once
    room = most - sum(replica.loading is not None for replica in replicas)
    for replica in sorted(state.replicas.values(), key=lambda one: one.policy_version):
        if room > 0 and replica.loading is None and replica.policy_version < state.newest_version:
            room -= 1
            replica.loading = state.newest_version
            replica.loading_since_s = state.now_s
            state.out.append(LoadWeights(replica_id=replica.replica_id, policy_version=state.newest_version))


def check_version(state: State, policy_version: int, *, who: str) -> None:
    """Refuse a version that was never published to this core.

    Raises:
        InvariantViolation: with the version and the newest known one.
    """
    if policy_version not in state.step_of_version:
        raise InvariantViolation(
            f"replica {who} serves policy version {policy_version}, which was never published to the scheduling core "
            f"(newest known: {state.newest_version}). The shell must report WeightsPublished first."
        )
