"""Damage and full disks around checkpoints: found at whatever place, never at the cost of the last good one."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.errors import CheckpointError, WeightError
from rollmill.weights import latest_checkpoint, list_checkpoints, read_checkpoint, write_checkpoint
from rollmill.weights.checkpoint import Checkpoint

FILES = ("checkpoint.json", "config.json", "model.safetensors", "optimizer.safetensors")


def write(root: Path, step: int, *, rows: int = 64, extra: Path | None = None) -> Path:
    return write_checkpoint(
        root,
        optimizer_step=step,
        model_tensors={"a": torch.full((rows, 8), float(step)), "b": torch.arange(5)},
        optimizer_tensors={"a.exp_avg": torch.full((rows, 8), 0.5)},
        commit={"optimizer_step": step, "trained_group_ids": ["g1", "g2"]},
        trainer_state={"lr": 2e-5},
        extra_files=[] if extra is None else [extra],
        keep=9,
    )


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    (folder / "config.json").write_text('{"hidden_size": 8}')
    return write(folder / "checkpoints", 7, extra=folder / "config.json")


def told(checkpoint: Checkpoint) -> tuple:
    """Everything that a reader is given."""
    tensors = {**checkpoint.model_tensors(), **checkpoint.optimizer_tensors()}
    return (
        checkpoint.optimizer_step,
        checkpoint.commit,
        checkpoint.trainer_state,
        {name: tensor.tolist() for name, tensor in tensors.items()},
        (checkpoint.path / "config.json").read_bytes(),
    )


@contextmanager
def changed(path: Path, data: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(FILES), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_in_any_file_is_found_or_changes_nothing_that_is_read(sound, name, where, bit):
    whole = told(read_checkpoint(sound))
    data = bytearray((sound / name).read_bytes())
    data[int(where * len(data))] ^= 1 << bit
    with changed(sound / name, bytes(data)):
        try:
            found = told(read_checkpoint(sound))
        except CheckpointError:
            return
    # Only blanks between the words of the record are read past.
    assert name == "checkpoint.json"
    assert found == whole


@pytest.mark.parametrize("word", [b'"dtype"', b'"shape"', b'"data_offsets"', b'"F32"', b"[64"])
def test_a_flipped_bit_in_a_word_of_the_tensors_header_is_told_as_damage(sound, word):
    data = bytearray((sound / "model.safetensors").read_bytes())
    data[data.index(word) + 1] ^= 1
    with changed(sound / "model.safetensors", bytes(data)), pytest.raises(CheckpointError, match="is damaged"):
        read_checkpoint(sound)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 0.25, 0.5, -8, -1])
def test_a_file_that_was_cut_anywhere_is_found(sound, name, length):
    data = (sound / name).read_bytes()
    kept = data[: int(len(data) * length) if isinstance(length, float) else length]
    if (name, length) == ("checkpoint.json", -1):
        return  # the record's last line break carries nothing
    with changed(sound / name, kept), pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        read_checkpoint(sound)


def test_a_file_that_grew_is_found(sound):
    for name in ("model.safetensors", "config.json"):
        with changed(sound / name, (sound / name).read_bytes() + b"\0"), pytest.raises(CheckpointError, match=name):
            read_checkpoint(sound)


@contextmanager
def no_file_may_grow_beyond(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("nbytes", [0, 100, 2_000, 20_000])
def test_a_write_that_the_disk_refuses_half_way_leaves_the_last_good_checkpoint(tmp_path, nbytes):
    write(tmp_path, 1)
    with no_file_may_grow_beyond(nbytes), pytest.raises(WeightError, match=r"full|needs|could not be written"):
        write(tmp_path, 2, rows=2_000)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert latest_checkpoint(tmp_path).optimizer_step == 1
    # The next attempt, with room, succeeds.
    write(tmp_path, 2, rows=2_000)
    assert latest_checkpoint(tmp_path).optimizer_step == 2


def failure_of(action: Callable[[], object]) -> str:
    """Return what a user would read; empty if it succeeded."""
    try:
        action()
    except WeightError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("call", "number"), [("fsync", 1), ("fsync", 2), ("fsync", 5), ("rename", 1), ("rename", 2), ("mkdir", 2)]
)
def test_a_full_disk_at_any_call_is_told_in_words_and_costs_no_checkpoint(tmp_path, monkeypatch, call, number):
    write(tmp_path, 1)
    real = getattr(os, call)
    calls = 0

    def full(*arguments, **keywords):
        nonlocal calls
        calls += 1
        if calls == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **keywords)

    monkeypatch.setattr(os, call, full)
    message = failure_of(lambda: write(tmp_path, 2))
    monkeypatch.undo()
    assert (message == "") == (calls < number)
    assert message == "" or "No space left on device" in message
    whole = [read_checkpoint(path).optimizer_step for path in list_checkpoints(tmp_path)]
    assert whole in ([1], [1, 2])
    assert not list(tmp_path.glob("*.partial"))
