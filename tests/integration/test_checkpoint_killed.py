"""A process that is killed while a checkpoint is written in the background."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.weights import latest_checkpoint, list_checkpoints, write_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TRAINER = '''
import sys, time
import torch
from rollmill.buffer.protocol import CommitPoint
from rollmill.trainer.checkpointing import Checkpointer
from rollmill.trainer.step import TrainerState
from rollmill.weights import write_checkpoint

def stuck():
    """Read after the tensors are on the disk, before the rename."""
    print("half way", flush=True)
    time.sleep(600)
    yield from ()

class Writer:
    def write(self, state, *, commit):
        step = commit.optimizer_step
        write_checkpoint(
            sys.argv[1], optimizer_step=step, model_tensors=state.model, optimizer_tensors=state.optimizer,
            commit={"step": step}, trainer_state=state.state, extra_files=() if step == 1 else stuck(),
        )

saving = Checkpointer(Writer(), background=True, deadline_s=60.0)
for step in (1, 2):
    state = TrainerState(model={"w": torch.full((4,), float(step))}, optimizer={}, state={})
    saving.begin(state, commit=CommitPoint(
        history_id="h", optimizer_step=step, policy_version=step, trained_group_ids=(), journal_offset=0))
time.sleep(600)
'''


@pytest.mark.timeout(300)
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path: Path) -> None:
    import torch

    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "half way\n"
    finally:
        trainer.kill()
        trainer.communicate()
    assert (tmp_path / "step-000002.partial").exists()
    newest = latest_checkpoint(tmp_path)
    assert (newest.optimizer_step, newest.commit, newest.skipped) == (1, {"step": 1}, ())
    # the next checkpoint of the resumed run takes the place
    write_checkpoint(
        tmp_path,
        optimizer_step=2,
        model_tensors={"w": torch.full((4,), 3.0)},
        optimizer_tensors={},
        commit={"step": 2},
        trainer_state={},
    )
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000001", "step-000002"]
    assert float(latest_checkpoint(tmp_path).model_tensors()["w"][0]) == 3.0
    assert not list(tmp_path.glob("*.partial"))
