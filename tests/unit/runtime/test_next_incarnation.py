"""A run that goes on: from the newest checkpoint that verifies, with everything later abandoned in words."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from buffer_builders import a_step, assign, commit_at, drop, put
from rollmill.buffer import SqliteStore
from rollmill.errors import CheckpointError, RunDirectoryError, StoreError
from rollmill.runtime.books import damaged_measures, read_all
from rollmill.runtime.incarnation import Segment, write_record
from rollmill.runtime.layout import ProcessLayout
from rollmill.runtime.resume import abandoned_versions, first_incarnation, next_incarnation
from rollmill.weights import LocalModelRepository, write_checkpoint


def a_run(root: Path, *, steps: int) -> ProcessLayout:
    """One group per step, assigned and trained; version 1 is the start, version n + 1 has n updates."""
    layout = ProcessLayout(root)
    layout.processes.mkdir()
    first_incarnation(layout)
    store = SqliteStore(layout.store)
    publish(layout, step=0)
    for step in range(1, steps + 1):
        store.apply(put(f"g{step}", journal=(b"e",)))
        store.apply(assign(step, f"g{step}", step=step - 1))
        store.lease_batch(optimizer_step=step - 1, owner="trainer", now_s=0.0, lease_s=9.0)
        publish(layout, step=step)
        store.record_step(a_step(step, f"g{step}", step=step))
    store.close()
    return layout


def publish(layout: ProcessLayout, *, step: int, history: str = "h001") -> None:
    LocalModelRepository(layout.weights, transport="file").publish(
        {"w": torch.tensor([float(step)])},
        optimizer_step=step,
        parent=None,
        history_id=history,
        training_dtype="float32",
        canary=None,
        at_s=0.0,
    )


def checkpoint(layout: ProcessLayout, step: int, *groups: str) -> Path:
    return write_checkpoint(
        layout.checkpoints,
        optimizer_step=step,
        model_tensors={"w": torch.tensor([float(step)])},
        optimizer_tensors={},
        commit=msgspec.to_builtins(commit_at(step, *groups)),
        trainer_state={},
        keep=9,
    )


def spoil(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(bytes(data))


def test_a_kill_inside_the_first_checkpoint_leaves_a_run_that_begins_again(tmp_path: Path) -> None:
    layout = a_run(tmp_path, steps=2)
    (layout.checkpoints / "step-000002.partial").mkdir(parents=True)
    incarnation = next_incarnation(layout)
    assert (incarnation.number, incarnation.optimizer_step, incarnation.checkpoint) == (2, 0, None)
    assert incarnation.repairs == ()


def test_a_damaged_checkpoint_is_passed_over_set_aside_and_said_in_words(tmp_path: Path) -> None:
    layout = a_run(tmp_path, steps=4)
    checkpoint(layout, 2, "g1", "g2")
    spoil(checkpoint(layout, 4, "g3", "g4"))
    incarnation = next_incarnation(layout)
    assert incarnation.optimizer_step == 2
    assert incarnation.trained_group_ids == ("g1", "g2")
    skipped, used = incarnation.repairs
    assert "step-000004 was skipped" in skipped
    assert "tensor 'w'" in skipped
    assert "went on from checkpoint step-000002; set aside: step-000004.set-aside" in used
    # It stays said in every later start.
    assert next_incarnation(layout).repairs == (skipped, used)


def test_a_checkpoint_of_an_abandoned_history_does_not_win_after_a_second_crash(tmp_path: Path) -> None:
    layout = a_run(tmp_path, steps=4)
    checkpoint(layout, 2, "g1", "g2")
    newer = checkpoint(layout, 4, "g3", "g4")
    whole = (newer / "model.safetensors").read_bytes()
    spoil(newer)
    assert next_incarnation(layout).optimizer_step == 2
    # The disk gives the right bytes again.
    (layout.checkpoints / "step-000004.set-aside" / "model.safetensors").write_bytes(whole)
    assert next_incarnation(layout).optimizer_step == 2


def test_where_no_checkpoint_verifies_the_run_does_not_silently_begin_again(tmp_path: Path) -> None:
    layout = a_run(tmp_path, steps=2)
    spoil(checkpoint(layout, 2, "g1", "g2"))
    with pytest.raises(CheckpointError, match=r"no usable checkpoint .* move these folders away and resume"):
        next_incarnation(layout)
    assert (layout.checkpoints / "step-000002").is_dir()


def test_a_version_whose_step_was_never_recorded_is_abandoned_too(tmp_path: Path) -> None:
    """Killed between publication and record: versions 1..5 have steps 0..4, the books know of step 4 nothing."""
    layout = a_run(tmp_path, steps=3)
    checkpoint(layout, 2, "g1", "g2")
    publish(layout, step=4)
    assert next_incarnation(layout).abandoned_versions == (4, 5)


def test_the_checkpoints_own_weights_published_again_are_not_abandoned(tmp_path: Path) -> None:
    layout = a_run(tmp_path, steps=2)
    checkpoint(layout, 2, "g1", "g2")
    publish(layout, step=2, history="h002")
    publish(layout, step=3, history="h002")
    assert abandoned_versions(layout.weights, commit=commit_at(2), recorded=()) == (5,)


def test_a_version_whose_manifest_is_damaged_counts_as_abandoned(tmp_path: Path) -> None:
    layout = a_run(tmp_path, steps=2)
    (layout.weights / "manifests" / "v000003.json").write_text("{")
    assert abandoned_versions(layout.weights, commit=commit_at(2, version=2), recorded=()) == (3,)


def report(layout: ProcessLayout, *groups: str) -> None:
    with (layout.run_directory / "rollouts.jsonl").open("a") as file:
        for group in groups:
            file.write(f'{{"group_id":"{group}","rollout_id":"{group}/0.0"}}\n')


def test_acknowledged_groups_that_a_lost_log_took_are_said(tmp_path: Path) -> None:
    """The log is copied away before the last group comes, as a file system that lost it would have it."""
    layout = a_run(tmp_path, steps=2)
    store = SqliteStore(layout.store)
    store.apply(put("g3", journal=(b"e",)))
    logged = layout.store.with_name("store.sqlite-wal").read_bytes()
    store.apply(put("g4", journal=(b"e",)))
    at_the_kill = layout.store.read_bytes()
    store.close()
    layout.store.write_bytes(at_the_kill)
    layout.store.with_name("store.sqlite-wal").write_bytes(logged)
    report(layout, "g1", "g2", "g3", "g4")
    (said,) = next_incarnation(layout).repairs
    assert "lost 1 groups that it had acknowledged (g4)" in said
    assert "sampled again" in said


def test_what_was_reported_and_is_stored_is_no_loss_whatever_became_of_it(tmp_path: Path) -> None:
    layout = a_run(tmp_path, steps=2)
    store = SqliteStore(layout.store)
    store.apply(put("g3"))
    store.apply(drop("g3", "zero_advantage"))
    store.close()
    report(layout, "g1", "g2", "g3")
    with (layout.run_directory / "rollouts.jsonl").open("a") as file:
        file.write('{"group_id": "g9')  # torn by the kill: it was not acknowledged to anybody
    assert next_incarnation(layout).repairs == ()


def test_a_damaged_store_is_refused_with_what_can_be_saved(tmp_path: Path) -> None:
    layout = a_run(tmp_path, steps=2)
    checkpoint(layout, 2, "g1", "g2")
    data = bytearray(layout.store.read_bytes())
    data[data.rindex(b"trainable")] ^= 1  # inside the samples of a group
    layout.store.write_bytes(bytes(data))
    with pytest.raises(StoreError, match=r"is damaged: samples: the digest .* --set model\.source=<the newest folder"):
        next_incarnation(layout)


def test_a_store_that_is_gone_while_a_checkpoint_is_there_is_refused(tmp_path: Path) -> None:
    layout = a_run(tmp_path, steps=2)
    checkpoint(layout, 2, "g1", "g2")
    layout.store.unlink()
    with pytest.raises(StoreError, match="Checkpoint and store belong to different runs"):
        next_incarnation(layout)


def test_a_run_that_was_killed_before_its_first_process_began_begins_on_resume(tmp_path: Path) -> None:
    layout = ProcessLayout(tmp_path)
    layout.processes.mkdir()
    assert next_incarnation(layout) == first_incarnation(layout)


def test_a_store_without_the_record_of_a_start_is_not_taken_for_a_new_run(tmp_path: Path) -> None:
    layout = a_run(tmp_path, steps=1)
    layout.incarnation.unlink()
    with pytest.raises(RunDirectoryError, match=r"incarnation\.json is missing"):
        next_incarnation(layout)


def test_what_was_set_aside_by_a_start_that_was_killed_before_it_could_say_so_is_said_by_the_next(
    tmp_path: Path,
) -> None:
    layout = a_run(tmp_path, steps=4)
    checkpoint(layout, 2, "g1", "g2")
    checkpoint(layout, 4, "g3", "g4").rename(layout.checkpoints / "step-000004.set-aside")
    (said,) = next_incarnation(layout).repairs
    assert "set aside: step-000004.set-aside" in said
    assert next_incarnation(layout).repairs == (said,)


def test_a_damaged_manifest_is_said_and_its_version_abandoned(tmp_path: Path) -> None:
    layout = a_run(tmp_path, steps=2)
    checkpoint(layout, 2, "g1", "g2")
    (layout.weights / "manifests" / "v000002.json").write_text("{")
    (said,) = next_incarnation(layout).repairs
    assert "manifest of policy version 2 cannot be read" in said


@pytest.mark.parametrize(("ended", "killed"), [("running", True), ("ending", False)])
def test_a_supervisor_that_was_killed_is_told_by_the_next_start(tmp_path: Path, ended: str, killed: bool) -> None:
    layout = a_run(tmp_path, steps=2)
    checkpoint(layout, 2, "g1", "g2")
    segment = Segment(number=1, started_wall_s=1e9, wall_s=60.0, cpu_s=1.0, peak_memory_bytes=1, lives=(), ended=ended)
    write_record(layout.segment(1), segment)
    repairs = next_incarnation(layout).repairs
    assert [words for words in repairs if "supervisor of start 1 was killed" in words] == list(repairs)
    assert bool(repairs) is killed


def test_a_measure_that_a_power_cut_emptied_is_told_in_the_summary_and_counts_as_none(tmp_path: Path) -> None:
    layout = a_run(tmp_path, steps=1)
    layout.segment(1).write_bytes(b"")
    assert read_all(layout.processes, "segment.*.json", Segment) == []
    (said,) = damaged_measures(layout)
    assert said.startswith("segment.1.json is damaged")


def test_a_run_that_goes_on_has_no_end_any_more(tmp_path: Path) -> None:
    layout = a_run(tmp_path, steps=2)
    checkpoint(layout, 2, "g1", "g2")
    store = SqliteStore(layout.store)
    for key, value in (("finish_reason", "steps_done"), ("eval:after", {"n": 8}), ("eval:before", {"n": 8})):
        store.set_note(key, value)
    store.close()
    next_incarnation(layout)
    store = SqliteStore(layout.store)
    try:
        assert (store.note("finish_reason"), store.note("eval:after")) == (None, None)
        assert store.note("eval:before") == {"n": 8}
    finally:
        store.close()
