"""What a fleet's status means for one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.config.fleet import FleetSettings
from rollmill.errors import DeadlineExceeded
from rollmill.generator.engines.protocol import AdapterInfo
from rollmill.generator.state import ReplicaState
from rollmill.generator.wire import FleetMember, ReplicaStatus, status_from_message, status_to_message
from rollmill.runtime.first_weights import await_first_weights
from rollmill.runtime.fleet import Standing, standing_of


def member(
    name: str, *, state: str = "serving", version: int = 3, places: int = 8, jobs: tuple[str, ...] = ()
) -> FleetMember:
    return FleetMember(
        replica=name, state=state, reason="" if state == "serving" else "it waits", policy_version=version, digest="d",
        places=places, jobs=jobs,
    )  # fmt: skip


def status(*members: FleetMember, adapters: tuple[AdapterInfo, ...] = (), **changed: object) -> ReplicaStatus:
    fields: dict[str, object] = {
        "state": ReplicaState.SERVING, "reason": "", "policy_version": 2, "digest": "d", "running": 0, "waiting": 0,
        "kv_used_tokens": 0, "kv_capacity_tokens": 0, "output_tokens": 0, "prefill_tokens": 0, "cached_tokens": 0,
        "wall_s": 1.0, "seconds": {}, "max_num_seqs": 5, "max_model_len": 64, "dtype": "float32",
    }  # fmt: skip
    return ReplicaStatus(**{**fields, **changed}, members=members, adapters=adapters)  # type: ignore[arg-type]


def settings(**changed: object) -> FleetSettings:
    return FleetSettings.model_validate({"address": "127.0.0.1:1", **changed})


def test_places_are_those_of_replicas_that_serve_this_job_and_the_oldest_version_counts() -> None:
    fleet = status(
        member("a", version=4),
        member("b", version=3, jobs=("main",)),
        member("c", jobs=("other",), version=1),
        member("d", state="draining", version=1),
    )
    assert standing_of(fleet, settings=settings(job="main")) == Standing(slots=16, policy_version=3)
    assert standing_of(fleet, settings=settings(job="third")) == Standing(slots=8, policy_version=4)
    assert standing_of(fleet, settings=settings()) == Standing(slots=24, policy_version=1)
    assert standing_of(fleet, settings=settings(job="main", slots=10)).slots == 10


def test_a_fleet_that_serves_nothing_to_this_run_says_why() -> None:
    none = standing_of(status(member("a", state="joining"), member("b", state="dirty")), settings=settings())
    assert (none.slots, none.policy_version) == (0, 0)
    assert none.why == "none of its 2 replicas serves: a is joining (it waits); b is dirty (it waits)"
    others = standing_of(status(member("a", jobs=("other",))), settings=settings(job="main"))
    assert (others.slots, others.why) == (0, "none of its 1 replicas serves job 'main'")


def test_a_replica_alone_is_a_fleet_of_one() -> None:
    assert standing_of(status(), settings=settings()) == Standing(slots=5, policy_version=2)
    loading = status(state=ReplicaState.STARTING, reason="it loads")
    assert standing_of(loading, settings=settings()) == Standing(
        slots=0, policy_version=0, why="it is starting: it loads"
    )


def test_versions_of_an_adapter_are_its_own_and_one_that_nobody_knows_is_said() -> None:
    adapters = (AdapterInfo(name="maths", policy_version=9, digest="x"),)
    fleet = status(member("a", version=1), adapters=adapters)
    assert standing_of(fleet, settings=settings(adapter="maths")) == Standing(slots=8, policy_version=9)
    unknown = standing_of(fleet, settings=settings(adapter="tools"))
    assert (unknown.slots, unknown.why) == (0, "no replica knows adapter 'tools'; known are maths")


def test_members_cross_the_wire() -> None:
    told = status(member("a", jobs=("main", "other")), member("b", state="dirty"))
    assert status_from_message(status_to_message(told)) == told


def test_a_replica_waits_for_the_first_weights_and_says_so_once(tmp_path: Path) -> None:
    said: list[str] = []
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    with pytest.raises(DeadlineExceeded, match=r"no weights were published in .* within 5 s"):
        await_first_weights(tmp_path, deadline_s=5.0, say=said.append, now_s=lambda: clock[0], sleep=sleep)
    assert clock[0] == 5.0
    assert said == [f"waiting up to 5 s for the first weights in {tmp_path}"]
