"""Checkpoints appear whole, verify when read, and damaged ones are passed over in words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollmill.errors import CheckpointError, WeightError
from rollmill.weights import (
    latest_checkpoint,
    list_checkpoints,
    model_files,
    read_checkpoint,
    set_aside_newer,
    write_checkpoint,
)

COMMIT = {"history_id": "h1", "optimizer_step": 20, "trained_group_ids": ["g1", "g2"], "journal_offset": 7}


def write(root: Path, step: int, *, keep: int = 3, value: float = 1.0, extra_files=()) -> Path:
    return write_checkpoint(
        root,
        optimizer_step=step,
        model_tensors={"w": torch.full((3,), value)},
        optimizer_tensors={"w.exp_avg": torch.full((3,), value / 2), "w.step": torch.tensor(float(step))},
        commit=COMMIT,
        trainer_state={"data": {"seed": 3}, "lr": 2e-5, "steps": {1: "a", 10: "b", 9: "c"}},
        extra_files=extra_files,
        keep=keep,
    )


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path):
    path = write(tmp_path, 20)
    assert path == tmp_path / "step-000020"
    checkpoint = read_checkpoint(path)
    assert checkpoint.optimizer_step == 20
    assert checkpoint.commit == COMMIT
    assert checkpoint.trainer_state["data"] == {"seed": 3}
    assert checkpoint.trainer_state["steps"] == {"1": "a", "10": "b", "9": "c"}  # JSON has text keys
    assert checkpoint.model_tensors()["w"].tolist() == [1.0, 1.0, 1.0]
    assert checkpoint.optimizer_tensors()["w.exp_avg"].tolist() == [0.5, 0.5, 0.5]
    assert checkpoint.optimizer_tensors()["w.step"].shape == ()
    assert checkpoint.skipped == ()


def test_an_optimizer_without_state_is_allowed(tmp_path):
    path = write_checkpoint(
        tmp_path,
        optimizer_step=0,
        model_tensors={"w": torch.ones(1)},
        optimizer_tensors={},
        commit={},
        trainer_state={},
    )
    assert read_checkpoint(path).optimizer_tensors() == {}


def test_the_model_files_are_copied_and_weights_are_not(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        (model / name).write_text(name)
    for name in ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "rollmill.json"):
        (model / name).write_text("weights")
    files = model_files(model)
    assert [file.name for file in files] == ["chat_template.jinja", "config.json", "tokenizer.json"]
    path = write(tmp_path / "checkpoints", 1, extra_files=files)
    assert (path / "tokenizer.json").read_text() == "tokenizer.json"
    # A checkpoint is a model directory: its own files are not copied into the next one.
    assert [file.name for file in model_files(path)] == ["chat_template.jinja", "config.json", "tokenizer.json"]


def test_two_files_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(folder)
    with pytest.raises(WeightError, match=r"two files named config\.json"):
        write(tmp_path / "c", 1, extra_files=[tmp_path / "a" / "config.json", tmp_path / "b" / "config.json"])
    assert list((tmp_path / "c").iterdir()) == []


def test_the_oldest_beyond_keep_are_removed(tmp_path):
    for step in (5, 10, 15, 20):
        write(tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000015", "step-000020"]


def test_steps_are_ordered_by_number_not_by_text(tmp_path):
    for step in (999_999, 1_000_000):
        write(tmp_path, step)
    assert latest_checkpoint(tmp_path).optimizer_step == 1_000_000


def test_a_failed_write_leaves_the_older_ones_and_no_part(tmp_path):
    write(tmp_path, 1)
    shared = torch.ones(3)
    with pytest.raises(WeightError, match="share memory"):
        write_checkpoint(
            tmp_path,
            optimizer_step=2,
            model_tensors={"a": shared, "b": shared},
            optimizer_tensors={},
            commit={},
            trainer_state={},
        )
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_what_a_crash_left_is_never_read_and_cleared_by_the_next_write(tmp_path):
    write(tmp_path, 1)
    (tmp_path / "step-000002.partial").mkdir()
    (tmp_path / "step-000002.partial" / "model.safetensors").write_bytes(b"half")
    assert latest_checkpoint(tmp_path).optimizer_step == 1
    write(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_a_step_of_an_abandoned_history_is_replaced(tmp_path):
    write(tmp_path, 3, value=1.0)
    write(tmp_path, 3, value=2.0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]
    assert read_checkpoint(tmp_path / "step-000003").model_tensors()["w"].tolist() == [2.0, 2.0, 2.0]


def test_a_checkpoint_that_a_run_did_not_go_on_from_never_wins_later(tmp_path):
    """A run of steps 6 and 9 goes on from 6 (9 could not be read), makes step 7, and is killed again."""
    for step in (6, 9):
        write(tmp_path, step)
    moved = set_aside_newer(tmp_path, than=6)
    assert [path.name for path in moved] == ["step-000009.set-aside"]
    write(tmp_path, 7)
    # Its bytes are as good as ever; only its history is gone.
    assert latest_checkpoint(tmp_path).optimizer_step == 7
    assert (tmp_path / "step-000009.set-aside" / "model.safetensors").exists()


def test_nothing_set_aside_is_ever_overwritten(tmp_path):
    for value in (1.0, 2.0, 3.0):
        write(tmp_path, 9, value=value)
        set_aside_newer(tmp_path, than=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000009.set-aside",
        "step-000009.set-aside-2",
        "step-000009.set-aside-3",
    ]


@pytest.mark.parametrize("keep", [1, 2])
def test_retention_never_removes_the_checkpoint_that_was_just_written(tmp_path, keep):
    """Folders of later steps belong to an abandoned history, or are damaged: they do not count for `keep`."""
    for step in (6, 8, 9):
        write(tmp_path, step)
    flip(tmp_path / "step-000009" / "model.safetensors", -1)
    assert write(tmp_path, 7, keep=keep).is_dir()
    assert latest_checkpoint(tmp_path).optimizer_step == 7
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000006", "step-000007"][-keep:]


@pytest.mark.parametrize(
    ("name", "at", "word"),
    [
        ("model.safetensors", -1, "tensor 'w'"),
        ("optimizer.safetensors", -1, "sha256"),
        ("model.safetensors", 0, "header"),
        ("checkpoint.json", 150, "damaged"),
        ("config.json", 0, r"config\.json has sha256"),
    ],
)
def test_a_flipped_byte_anywhere_is_found(tmp_path, name, at, word):
    (tmp_path / "config.json").write_text("{}")
    path = write(tmp_path / "c", 1, extra_files=[tmp_path / "config.json"])
    flip(path / name, at)
    with pytest.raises(CheckpointError, match=word):
        read_checkpoint(path)


def test_a_truncated_record_is_found(tmp_path):
    path = write(tmp_path, 1)
    record = path / "checkpoint.json"
    record.write_bytes(record.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "checkpoint.json", "config.json"])
def test_a_missing_file_is_found(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    path = write(tmp_path / "c", 1, extra_files=[tmp_path / "config.json"])
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        read_checkpoint(path)


def test_the_newest_that_verifies_is_taken_and_the_damaged_ones_are_named(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    flip(tmp_path / "step-000003" / "model.safetensors", -1)
    (tmp_path / "step-000002" / "checkpoint.json").unlink()
    found = latest_checkpoint(tmp_path)
    assert found.optimizer_step == 1
    assert [text.split(" ")[0] for text in found.skipped] == ["step-000003", "step-000002"]
    assert "tensor 'w'" in found.skipped[0]


def test_without_a_usable_checkpoint_the_reasons_are_given(tmp_path):
    with pytest.raises(CheckpointError, match="No step was saved"):
        latest_checkpoint(tmp_path / "absent")
    flip(write(tmp_path, 1) / "model.safetensors", -1)
    with pytest.raises(CheckpointError, match=r"step-000001 was skipped: .* move these folders away and resume"):
        latest_checkpoint(tmp_path)


def test_a_path_that_is_no_checkpoint_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        read_checkpoint(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"checkpoint\.json does not exist"):
        read_checkpoint(tmp_path / "empty")
