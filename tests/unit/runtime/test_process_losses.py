from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.config.schema import RunSettings
from rollmill.errors import ConfigError, EngineDead, ProducersGone, StoreError
from rollmill.runtime.failure import FailureRecord, record_of_error, record_of_exit
from rollmill.runtime.losses import (
    Action,
    Chain,
    LossRecord,
    Phase,
    append_loss,
    first_cause_of,
    life_of,
    loss_message,
    on_exit,
    on_signal,
    policy_of,
    read_losses,
)

KILLED = record_of_exit("generator-0", -9, at_wall_s=1.0)


def loss(process: str = "generator-0", *, message: str = "killed", at_wall_s: float = 1.0) -> LossRecord:
    cause = FailureRecord(process=process, code="killed", message=message, user_error=False, at_wall_s=at_wall_s)
    return LossRecord(
        process=process,
        life="1",
        pid=7,
        incarnation=1,
        at_wall_s=at_wall_s,
        exit_status=-9,
        cause=cause,
        decision="restart",
        restarts_left=2,
        pause_s=0.0,
        message=message,
    )


def decide(
    name: str,
    status: int | None = -9,
    *,
    policy: str = "restart",
    left: int = 1,
    phase: Phase = Phase.RUNNING,
    cause: FailureRecord | None = None,
) -> tuple[Phase, Action]:
    return on_exit(name, status, phase=phase, policy=policy, restarts_left=left, cause=cause)


@pytest.mark.parametrize("name", ["generator-0", "trainer", "controller"])
def test_a_lost_process_is_restarted_while_its_budget_lasts(name: str) -> None:
    assert decide(name, left=1) == (Phase.RUNNING, Action.RESTART)
    assert decide(name, left=0) == (Phase.FAILING, Action.FAIL)
    assert decide(name, policy="stop") == (Phase.FAILING, Action.FAIL)


@pytest.mark.parametrize(("policy", "action"), [("wait", Action.WAIT), ("degrade", Action.DEGRADE)])
def test_waiting_and_degrading_need_no_budget(policy: str, action: Action) -> None:
    assert decide("generator-1", policy=policy, left=0) == (Phase.RUNNING, action)


@pytest.mark.parametrize("phase", [Phase.PREFLIGHT, Phase.STOPPING])
@pytest.mark.parametrize("policy", ["restart", "wait", "degrade"])
def test_outside_a_running_run_nothing_is_made_good(phase: Phase, policy: str) -> None:
    assert decide("generator-0", policy=policy, phase=phase) == (Phase.FAILING, Action.FAIL)


@pytest.mark.parametrize("policy", ["restart", "wait", "degrade"])
def test_an_error_that_the_user_must_mend_is_never_tried_again(policy: str) -> None:
    cause = record_of_error("generator-0", ConfigError("max_model_len is 8"), at_wall_s=1.0)
    assert decide("generator-0", 2, policy=policy, cause=cause) == (Phase.FAILING, Action.FAIL)


def test_a_verdict_of_the_controller_about_others_stands() -> None:
    for error in (ProducersGone(alive=0, buffered=0), EngineDead("16 failures in a row")):
        cause = record_of_error("controller", error, at_wall_s=1.0)
        assert decide("controller", 1, cause=cause) == (Phase.FAILING, Action.FAIL)
    own = record_of_error("controller", StoreError("disk full"), at_wall_s=1.0)
    assert decide("controller", 1, cause=own) == (Phase.RUNNING, Action.RESTART)
    # The same error is the replica's own loss.
    dead = record_of_error("generator-0", EngineDead("the engine's thread ended"), at_wall_s=1.0)
    assert decide("generator-0", 1, cause=dead) == (Phase.RUNNING, Action.RESTART)


def test_a_replica_that_ends_by_itself_is_lost_whatever_its_status() -> None:
    assert decide("generator-0", 0) == (Phase.RUNNING, Action.RESTART)
    assert decide("generator-0", None) == (Phase.RUNNING, Action.RESTART)


def test_a_controller_that_was_told_to_stop_before_it_could_listen_ends_the_run_cleanly() -> None:
    assert decide("controller", -15, phase=Phase.STOPPING) == (Phase.ENDING, Action.END_OTHERS)


def test_ctrl_c_while_controller_or_trainer_is_down_ends_the_rest() -> None:
    assert on_signal(1, phase=Phase.RUNNING, leaders_run=False) == (Phase.ENDING, Action.END_OTHERS)
    assert on_signal(2, phase=Phase.ENDING, leaders_run=False) == (Phase.FAILING, Action.KILL_ALL)


def test_the_pause_before_a_restart_grows_and_stays_inside_the_promised_five_seconds() -> None:
    chains = [Chain(losses=(loss(),) * count) for count in range(6)]
    assert [chain.pause_s() for chain in chains] == [0.0, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_each_loss_without_a_step_between_takes_one_restart() -> None:
    chains = [Chain(losses=(loss(),) * count) for count in range(5)]
    assert [chain.restarts_left(3) for chain in chains] == [3, 2, 1, 0, 0]
    assert Chain().restarts_left(0) == 0


def test_only_a_step_beyond_those_ever_made_gives_the_budget_back() -> None:
    chain = Chain(losses=(loss(), loss()), reached_step=6)
    # The trainer went back to step 4 and made 5 and 6 again, then failed as before.
    assert chain.at(6) == chain
    assert chain.at(7) == Chain(reached_step=7)


def test_a_used_up_budget_is_told_with_the_first_cause_and_the_count() -> None:
    first, later = loss(message="CUDA error 700"), loss(message="address in use", at_wall_s=2.0)
    cause = first_cause_of(Chain(losses=(first, later, later)), budget=2)
    assert "lost 3 times" in cause.message
    assert "run.restart_budget = 2" in cause.message
    assert "CUDA error 700" in cause.message
    assert cause.at_wall_s == 1.0
    # A loss that is not to be made good is its own cause, whatever was made good before.
    assert first_cause_of(Chain(losses=(first, later)), budget=2) == later.cause
    assert first_cause_of(Chain(losses=(later,)), budget=0) == later.cause


def test_each_kind_of_process_has_its_own_setting() -> None:
    settings = RunSettings(on_generator_loss="wait", on_trainer_loss="restart", on_controller_loss="stop")
    assert policy_of("generator-3", settings) == "wait"
    assert policy_of("trainer", settings) == "restart"
    assert policy_of("controller", settings) == "stop"


def test_what_is_told_of_a_loss_holds_cause_decision_and_what_is_left() -> None:
    told = loss_message("generator-0", KILLED, action=Action.RESTART, restarts_left=2, pause_s=1.0, how="")
    assert told.startswith("lost generator-0: ")
    assert "SIGKILL" in told
    assert "in 1 s" in told
    assert "2 more restarts" in told
    assert "run stops" in loss_message("trainer", KILLED, action=Action.FAIL, restarts_left=0, pause_s=0.0, how="")
    assert loss_message("g", KILLED, action=Action.WAIT, restarts_left=0, pause_s=0.0, how="Start it: x").endswith("x")


def test_losses_outlive_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    assert read_losses(path) == []
    append_loss(path, loss(message="first"))
    append_loss(path, loss("trainer", message="second"))
    with path.open("ab") as file:
        file.write(b'{"process": "gener')
    assert [one.message for one in read_losses(path)] == ["first", "second"]
    append_loss(path, loss(message="third"))
    assert [one.message for one in read_losses(path)] == ["first", "second", "third"]


def test_every_life_of_a_process_has_a_name_of_its_own() -> None:
    losses = [loss(), loss("trainer"), loss()]
    assert life_of("generator-0", incarnation=3, losses=[]) == "3"
    assert life_of("generator-0", incarnation=3, losses=losses) == "3-2"
    assert life_of("generator-1", incarnation=3, losses=losses) == "3"


def test_a_status_that_nobody_knows_is_told_as_such() -> None:
    assert "only who started it knows" in record_of_exit("generator-0", None, at_wall_s=1.0).message
