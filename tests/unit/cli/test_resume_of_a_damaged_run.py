"""What a user sees who resumes a run whose disk has failed: what is damaged, what can be saved, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner, Result

from buffer_builders import a_step, assign, commit_at, put
from rollmill.buffer import SqliteStore
from rollmill.cli.app import cli
from rollmill.config.load import load_config
from rollmill.runtime.layout import ProcessLayout
from rollmill.runtime.resume import first_incarnation
from rollmill.telemetry.run_directory import RunDirectory
from rollmill.weights import write_checkpoint


@pytest.fixture
def layout(tmp_path: Path) -> ProcessLayout:
    """A run of two steps with a checkpoint after each, as it lies on the disk."""
    (tmp_path / "train.toml").write_text('[model]\nsource = "tiny-llama"\n[[environment.tasks]]\nname = "chain_sum"\n')
    config = load_config(tmp_path / "train.toml").config
    directory = RunDirectory.create(tmp_path / "run", config=config, started_at_s=0.0)
    directory.close()
    layout = ProcessLayout(directory.root)
    first_incarnation(layout)
    store = SqliteStore(layout.store)
    for step in (1, 2):
        store.apply(put(f"g{step}", journal=(b"e",)))
        store.apply(assign(step, f"g{step}", step=step - 1))
        store.lease_batch(optimizer_step=step - 1, owner="trainer", now_s=0.0, lease_s=9.0)
        store.record_step(a_step(step, f"g{step}", step=step))
        write_checkpoint(
            layout.checkpoints,
            optimizer_step=step,
            model_tensors={"w": torch.zeros(4)},
            optimizer_tensors={},
            commit=msgspec.to_builtins(commit_at(step, f"g{step}", offset=step)),
            trainer_state={},
        )
    store.close()
    return layout


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def resume(layout: ProcessLayout, *options: str) -> Result:
    return CliRunner().invoke(cli, ["train", "--resume", str(layout.run_directory), *options])


def test_a_damaged_store_ends_with_status_one_and_says_what_can_be_saved(layout: ProcessLayout) -> None:
    flip(layout.store, layout.store.read_bytes().rindex(b"trainable"))
    result = resume(layout)
    assert result.exit_code == 1
    assert "error [store]" in result.stderr
    assert "is damaged: samples: the digest does not fit the content: g" in result.stderr
    assert "restore store.sqlite with its -wal file from a copy" in result.stderr
    assert "--set model.source=<the newest folder in checkpoints>" in result.stderr


def test_programs_are_told_the_same_as_a_document(layout: ProcessLayout) -> None:
    layout.store.write_bytes(layout.store.read_bytes()[:5000])
    result = resume(layout, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["code"] == "store"


def test_a_run_without_one_good_checkpoint_says_so_and_changes_nothing(layout: ProcessLayout) -> None:
    for step in (1, 2):
        flip(layout.checkpoints / f"step-{step:06d}" / "model.safetensors", -1)
    result = resume(layout)
    assert result.exit_code == 2
    assert "step-000002 was skipped" in result.stderr
    assert "step-000001 was skipped" in result.stderr
    assert "move these folders away and resume" in result.stderr
    assert len(list(layout.checkpoints.iterdir())) == 2
