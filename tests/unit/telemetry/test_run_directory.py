"""Which folder may be used for a run."""

import tomllib

import pytest

from rollmill.config import RollmillConfig, load_config, parse_config
from rollmill.config.load import all_keys
from rollmill.errors import RunDirectoryError
from rollmill.telemetry.files import write_json_atomic
from rollmill.telemetry.run_directory import FOLDERS, RESUMABLE, RunDirectory, digest_of


def config_of(*overrides: str) -> RollmillConfig:
    return load_config(None, overrides=overrides).config


@pytest.fixture
def made(tmp_path):
    run = RunDirectory.create(tmp_path / "runs" / "one", config=config_of(), started_at_s=100.0)
    run.close()
    return run


def test_a_new_run_has_its_folders_and_its_configuration(made):
    assert parse_config(tomllib.loads(made.config_toml.read_text())) == config_of()
    for folder in (made.checkpoints, made.weights, made.logs, made.processes):
        assert folder.is_dir()
    (incarnation,) = made.identity().incarnations
    assert incarnation.started_at_s == 100.0
    assert incarnation.config_digest == digest_of(incarnation.config)


def test_an_empty_folder_is_taken(tmp_path):
    RunDirectory.create(tmp_path, config=config_of(), started_at_s=0.0).close()
    assert (tmp_path / "config.toml").exists()


@pytest.mark.parametrize("left", [["lock"], ["lock", "config.toml"], ["lock", "config.toml", ".config.json.x1"]])
def test_a_folder_whose_making_was_cut_short_is_taken(tmp_path, left):
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
    for name in left:
        (tmp_path / name).touch()
    made = RunDirectory.create(tmp_path, config=config_of(), started_at_s=0.0)
    assert made.identity().incarnations
    made.close()


@pytest.mark.parametrize("kept", ["notes.txt", "checkpoints/step-000004", "config.json"])
def test_a_folder_that_holds_anything_else_is_occupied(tmp_path, kept):
    for name in ("lock", kept):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(RunDirectoryError, match="is not empty"):
        RunDirectory.create(tmp_path, config=config_of(), started_at_s=0.0)


def test_a_folder_in_use_by_an_earlier_run_is_refused_with_three_ways_out(made):
    with pytest.raises(RunDirectoryError) as caught:
        RunDirectory.create(made.root, config=config_of(), started_at_s=0.0)
    message = str(caught.value)
    assert "still going, or killed" in message
    assert f"rollmill train --resume {made.root}" in message
    assert "run.name=another" in message


def test_the_refusal_says_how_the_earlier_run_ended(made):
    write_json_atomic(made.summary, {"reason": "steps_done", "steps": 32})
    with pytest.raises(RunDirectoryError, match="ended with 'steps_done' after 32 steps"):
        RunDirectory.create(made.root, config=config_of(), started_at_s=0.0)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "one").write_text("")
    with pytest.raises(RunDirectoryError, match="is a file, not a folder"):
        RunDirectory.create(tmp_path / "one", config=config_of(), started_at_s=0.0)


def test_an_unwritable_place_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"cannot be written.*another run\.directory"):
        RunDirectory.create(tmp_path / "file" / "one", config=config_of(), started_at_s=0.0)


def test_a_resumed_run_keeps_its_configuration(made):
    run, config = RunDirectory.resume(made.root, started_at_s=200.0)
    run.close()
    assert config == config_of()
    assert [one.started_at_s for one in run.identity().incarnations] == [100.0, 200.0]


def test_settings_that_do_not_change_what_is_learned_may_change_and_are_kept_per_incarnation(made):
    run, config = RunDirectory.resume(made.root, started_at_s=200.0, config=config_of("run.steps=99"))
    run.close()
    assert config.run.steps == 99
    assert [one.run.steps for one in run.configs()] == [40, 99]
    assert parse_config(tomllib.loads(run.config_toml.read_text())).run.steps == 99


def test_another_configuration_is_refused_with_every_key_and_both_values(made):
    other = config_of("schedule.group_size=4", "trainer.learning_rate=1e-4", "run.steps=99")
    with pytest.raises(RunDirectoryError) as caught:
        RunDirectory.resume(made.root, started_at_s=200.0, config=other)
    message = str(caught.value)
    assert "schedule.group_size: 8 -> 4" in message
    assert "trainer.learning_rate: 2e-05 -> 0.0001" in message
    assert "run.steps: " not in message
    assert len(made.identity().incarnations) == 1


def test_every_resumable_key_exists():
    assert RESUMABLE - set(all_keys()) == set()


def test_the_first_data_set_is_recorded_and_another_one_refused(made):
    made.check_data("abc")
    made.check_data("abc")
    with pytest.raises(RunDirectoryError, match=r"data set abc, this one is def"):
        made.check_data("def")


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunDirectoryError, match=r"is not a run directory: it has no config\.json"):
        RunDirectory.open(tmp_path)
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        RunDirectory.resume(tmp_path / "none", started_at_s=0.0)


def test_a_damaged_identity_is_refused(made):
    made.identity_json.write_text("{")
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        RunDirectory.open(made.root)


def test_an_identity_of_a_later_version_is_refused(made):
    made.identity_json.write_text(made.identity_json.read_text().replace('"schema_version": 1', '"schema_version": 9'))
    with pytest.raises(RunDirectoryError, match="schema version 9, this Rollmill reads 1"):
        RunDirectory.open(made.root)


def test_two_runs_never_write_into_one_folder(made):
    first, _ = RunDirectory.resume(made.root, started_at_s=200.0)
    with pytest.raises(RunDirectoryError, match=r"in use by process \d+"):
        RunDirectory.resume(made.root, started_at_s=201.0)
    first.close()
    RunDirectory.resume(made.root, started_at_s=202.0)[0].close()
