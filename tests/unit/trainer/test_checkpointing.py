"""Checkpoints in the background, with an executor that runs when told and a writer that fails when told."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest
import torch
from executor_builders import ByHand, Inline

from rollmill.buffer.protocol import CommitPoint
from rollmill.errors import DeadlineExceeded, NumericalFault, WeightError
from rollmill.trainer.checkpointing import Checkpointer
from rollmill.trainer.decisions import background_pays
from rollmill.trainer.memory import free_memory_bytes
from rollmill.trainer.step import TrainerState


class Writer:
    """Keeps (optimizer step, first weight, addresses of the tensors)."""

    def __init__(self) -> None:
        self.written: list[tuple[int, float]] = []
        self.addresses: list[int] = []
        self.failure: Exception | None = None

    def write(self, state: TrainerState, *, commit: CommitPoint) -> None:
        if self.failure is not None:
            raise self.failure
        self.written.append((commit.optimizer_step, float(state.model["w"][0])))
        self.addresses.append(state.model["w"].data_ptr())


def state_of(weight: torch.Tensor) -> TrainerState:
    return TrainerState(model={"w": weight}, optimizer={"exp_avg.w": torch.zeros(3)}, state={})


def commit_of(step: int) -> CommitPoint:
    return CommitPoint(history_id="h", optimizer_step=step, policy_version=step, trained_group_ids=(), journal_offset=0)


def checkpointer(writer: Writer, executor: Executor, **changed: Any) -> Checkpointer:
    return Checkpointer(writer, **{"background": True, "deadline_s": 0.01, "executor": executor, **changed})


def test_what_is_written_is_the_state_at_the_time_of_the_checkpoint() -> None:
    writer, executor, weight = Writer(), ByHand(), torch.full((3,), 1.0)
    saving = checkpointer(writer, executor)
    saving.begin(state_of(weight), commit=commit_of(1))
    weight.fill_(2.0)  # the next step trains
    assert writer.written == []
    executor.run()
    saving.settle()
    assert writer.written == [(1, 1.0)]


def test_every_checkpoint_is_copied_into_the_same_memory() -> None:
    writer, weight = Writer(), torch.full((3,), 1.0)
    saving = checkpointer(writer, Inline())
    for step in (1, 2):
        weight.fill_(float(step))
        saving.begin(state_of(weight), commit=commit_of(step))
    assert writer.written == [(1, 1.0), (2, 2.0)]
    assert writer.addresses[0] == writer.addresses[1] != weight.data_ptr()


def test_the_next_checkpoint_waits_for_the_one_under_way_and_no_longer_than_the_deadline() -> None:
    writer, executor = Writer(), ByHand()
    saving = checkpointer(writer, executor)
    saving.begin(state_of(torch.zeros(3)), commit=commit_of(4))
    for call in (saving.begin, saving.write):
        with pytest.raises(DeadlineExceeded, match=r"optimizer step 4 is not written after another 0\.01 s"):
            call(state_of(torch.zeros(3)), commit=commit_of(5))
    assert writer.written == []


def test_a_written_checkpoint_is_durable_at_once_and_comes_after_the_one_before() -> None:
    writer, weight = Writer(), torch.full((3,), 1.0)
    saving = checkpointer(writer, Inline())
    saving.begin(state_of(weight), commit=commit_of(1))
    saving.write(state_of(weight), commit=commit_of(2))
    assert writer.written == [(1, 1.0), (2, 1.0)]
    assert writer.addresses[1] == weight.data_ptr()


def test_a_failure_in_the_background_is_raised_at_the_next_look_with_the_step_it_belongs_to() -> None:
    writer, executor = Writer(), ByHand()
    saving = checkpointer(writer, executor)
    writer.failure = WeightError("the disk is full")
    saving.begin(state_of(torch.zeros(3)), commit=commit_of(7))
    saving.check()  # still under way: nothing to say
    executor.run()
    with pytest.raises(WeightError, match="the disk is full") as caught:
        saving.check()
    assert "the checkpoint of optimizer step 7" in caught.value.__notes__[0]
    saving.check()  # raised once
    writer.failure = None
    saving.write(state_of(torch.zeros(3)), commit=commit_of(8))
    assert writer.written == [(8, 0.0)]


def test_an_error_that_is_a_time_out_itself_is_no_late_checkpoint() -> None:
    writer, executor = Writer(), ByHand()
    saving = checkpointer(writer, executor)
    writer.failure = TimeoutError(110, "the network's file system does not answer")
    saving.begin(state_of(torch.zeros(3)), commit=commit_of(7))
    executor.run()
    with pytest.raises(TimeoutError, match="does not answer"):
        saving.settle()


def test_closing_waits_and_keeps_the_first_cause() -> None:
    writer, executor = Writer(), ByHand()
    saving = checkpointer(writer, executor)
    writer.failure = WeightError("the disk is full")
    saving.begin(state_of(torch.zeros(3)), commit=commit_of(7))
    executor.run()
    cause = NumericalFault("NaN", rollout_ids=("x",))
    saving.close(cause=cause)
    assert "the checkpoint under way failed too: the disk is full" in cause.__notes__[0]

    saving = checkpointer(writer, Inline())
    saving.begin(state_of(torch.zeros(3)), commit=commit_of(7))
    with pytest.raises(WeightError, match="the disk is full"):
        saving.close()


def test_without_a_copy_the_checkpoint_is_durable_when_begin_returns() -> None:
    writer, weight = Writer(), torch.full((3,), 1.0)
    saving = checkpointer(writer, ByHand(), background=False)
    saving.begin(state_of(weight), commit=commit_of(1))
    assert writer.written == [(1, 1.0)]
    assert writer.addresses == [weight.data_ptr()]


@pytest.mark.parametrize(("free_bytes", "background"), [(47, False), (48, True)])
def test_memory_decides_once_and_a_refusal_is_said_with_its_numbers(free_bytes: int, background: bool) -> None:
    # the state is two tensors of 3 float32: 24 bytes; the copy must fit and leave as much free
    asked: list[int] = []
    said: list[str] = []

    def free() -> int:
        asked.append(free_bytes)
        return free_bytes

    writer, executor = Writer(), ByHand()
    saving = checkpointer(writer, executor, background=None, free_bytes=free, say=said.append)
    for step in (1, 2):
        saving.begin(state_of(torch.zeros(3)), commit=commit_of(step))
        executor.run()
    assert len(writer.written) == 2
    assert len(asked) == 1
    assert len(said) == (0 if background else 1)
    assert all("needs 24 bytes, and 47 are free" in sentence for sentence in said)
    assert background_pays(state_bytes=24, free_bytes=free_bytes) is background


def test_free_memory_is_the_smaller_of_the_machines_and_the_containers(tmp_path: Path) -> None:
    assert free_memory_bytes(available=1000, cgroup=tmp_path) == 1000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes(available=1000, cgroup=tmp_path) == 1000
    (tmp_path / "memory.max").write_text("500\n")
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 50\n")
    # 500 - 300 used + 50 that files give back
    assert free_memory_bytes(available=1000, cgroup=tmp_path) == 250
    assert free_memory_bytes(available=200, cgroup=tmp_path) == 200
    assert free_memory_bytes(cgroup=tmp_path) == 250


KEEPING = """
import resource
from rollmill.trainer.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        bytearray(1 << 26)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

default = faults()
assert keep_freed_memory()
faults()
print(default, faults())
"""


def test_freed_memory_is_kept_for_the_next_step() -> None:
    # in a process of its own: the setting is the whole process's
    ended = subprocess.run([sys.executable, "-c", KEEPING], capture_output=True, text=True, check=True)
    default, kept = map(int, ended.stdout.split())
    # four blocks of 64 MiB are 65,536 pages of 4 KiB
    assert kept < 1000 < 16_000 < default
