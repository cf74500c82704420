from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.errors import ConfigError, EngineDead
from rollmill.runtime.failure import earliest, read_record, record_of_error, record_of_exit, write_record
from rollmill.runtime.losses import Action, Phase, on_exit, on_signal
from rollmill.runtime.supervisor import KILL_AFTER_S
from rollmill.runtime.threads import process_environment


@pytest.mark.parametrize("phase", [Phase.PREFLIGHT, Phase.RUNNING, Phase.STOPPING])
@pytest.mark.parametrize("name", ["controller", "trainer", "generator-0"])
@pytest.mark.parametrize("status", [1, 2, -9])
def test_the_death_of_any_process_ends_the_run(phase: Phase, name: str, status: int) -> None:
    assert on_exit(name, status, phase=phase, policy="stop", restarts_left=3, cause=None) == (
        Phase.FAILING,
        Action.FAIL,
    )


def test_the_controllers_clean_end_ends_the_others() -> None:
    assert on_exit("controller", 0, phase=Phase.RUNNING, policy="stop", restarts_left=3, cause=None) == (
        Phase.ENDING,
        Action.END_OTHERS,
    )


def test_the_trainer_may_end_first_and_a_replica_never_ends_by_itself() -> None:
    assert on_exit("trainer", 0, phase=Phase.RUNNING, policy="stop", restarts_left=3, cause=None) == (
        Phase.RUNNING,
        Action.NOTHING,
    )
    assert on_exit("generator-0", 0, phase=Phase.RUNNING, policy="stop", restarts_left=3, cause=None) == (
        Phase.FAILING,
        Action.FAIL,
    )


def test_what_does_not_end_by_itself_is_killed_early_enough_for_the_promised_five_seconds() -> None:
    assert KILL_AFTER_S <= 4.0


def test_deaths_after_the_first_change_nothing() -> None:
    assert on_exit("trainer", -15, phase=Phase.FAILING, policy="stop", restarts_left=3, cause=None) == (
        Phase.FAILING,
        Action.NOTHING,
    )
    assert on_exit("generator-0", 0, phase=Phase.ENDING, policy="stop", restarts_left=3, cause=None) == (
        Phase.ENDING,
        Action.NOTHING,
    )


def test_one_ctrl_c_stops_cleanly_and_two_kill() -> None:
    assert on_signal(1, phase=Phase.RUNNING, leaders_run=True) == (Phase.STOPPING, Action.STOP_CLEANLY)
    assert on_signal(2, phase=Phase.STOPPING, leaders_run=True) == (Phase.FAILING, Action.KILL_ALL)
    assert on_signal(1, phase=Phase.PREFLIGHT, leaders_run=True) == (Phase.FAILING, Action.KILL_ALL)


def test_the_first_cause_is_reported_not_the_first_noticed() -> None:
    engine = record_of_error("generator-0", EngineDead("out of memory"), at_wall_s=10.0)
    controller = record_of_exit("controller", 1, at_wall_s=12.0)
    assert earliest([controller, engine]).process == "generator-0"


def test_a_record_keeps_the_first_leaf_of_a_group_and_its_code(tmp_path: Path) -> None:
    error = ExceptionGroup("tasks", [ExceptionGroup("inner", [ConfigError("max_model_len is 8")]), ValueError("later")])
    record = record_of_error("controller", error, at_wall_s=1.0)
    assert (record.code, record.user_error, record.message) == ("config", True, "max_model_len is 8")
    path = tmp_path / "failure.json"
    write_record(path, record)
    write_record(path, record_of_exit("trainer", -9, at_wall_s=2.0))
    assert read_record(path) == record


def test_a_killed_process_is_named_with_its_signal() -> None:
    record = record_of_exit("trainer", -9, at_wall_s=1.0)
    assert "SIGKILL" in record.message
    assert "memory" in record.message


def test_children_get_their_threads_and_wait_passively() -> None:
    environment = process_environment(threads=2, base={"PATH": "/bin"})
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["OMP_WAIT_POLICY"] == "passive"
    assert environment["GOMP_SPINCOUNT"] == "0"
    assert environment["PATH"] == "/bin"
