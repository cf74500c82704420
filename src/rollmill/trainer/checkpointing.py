"""Checkpoints off the critical path: the state is copied once, and written while the next steps train.

    who waits                           for                            gives up after
    the next checkpoint, the end        the checkpoint under way       trainer.checkpoint_deadline_s

The commit point stays the rename of the finished folder: until then a crash falls back to the checkpoint before, as if
this one had never begun. One checkpoint is under way at a time. A failure is raised where the trainer next looks:
before it takes another batch, before the next checkpoint, or at the end. Decides nothing about when one is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from rollmill.buffer.protocol import CommitPoint
from rollmill.trainer.background import BackgroundJob
from rollmill.trainer.decisions import background_pays
from rollmill.trainer.memory import free_memory_bytes
from rollmill.trainer.step import TrainerState
from rollmill.weights.checkpoint import model_files, write_checkpoint


class CheckpointWriter(Protocol):
    """Makes a state durable; the rename of a checkpoint is the commit point of the run."""

    def write(self, state: TrainerState, *, commit: CommitPoint) -> None:
        """Return when the checkpoint is durable and visible.

        Raises:
            Fault: if it could not be written; the checkpoint before it stays.
        """
        ...


class CheckpointFolder:
    """Writes checkpoints into a folder, each a Hugging Face directory with the optimizer's state and the commit point.

    Args:
        model: folder of the model; its configuration and tokenizer are copied into every checkpoint.
        keep: newest checkpoints that stay.
    """

    def __init__(self, root: Path, *, model: Path, keep: int = 2) -> None:
        self._root = root
        self._keep = keep
        self._extra_files = model_files(model)

    def write(self, state: TrainerState, *, commit: CommitPoint) -> None:
        """Return when the checkpoint is durable and visible.

        Raises:
            WeightError: if it could not be written; the checkpoint before it stays.
        """
        write_checkpoint(
            self._root,
            optimizer_step=commit.optimizer_step,
            model_tensors=state.model,
            optimizer_tensors=state.optimizer,
            commit=msgspec.to_builtins(commit),
            trainer_state=state.state,
            extra_files=self._extra_files,
            keep=self._keep,
        )


class Checkpointer:
    """Writes checkpoints through a writer, in the background where memory allows.

    Args:
        background: copy the state and write it on a thread; `None` decides it at the first checkpoint, by memory.
        deadline_s: longest wait for a checkpoint under way.
        say: takes a sentence for people.
        free_bytes: memory that is free now.
        executor: runs the writes, one at a time; a thread of its own if `None`.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        *,
        background: bool | None,
        deadline_s: float,
        say: Callable[[str], None] = lambda _: None,
        free_bytes: Callable[[], int] = free_memory_bytes,
        executor: Executor | None = None,
    ) -> None:
        self._writer = writer
        self._background = background
        self._deadline_s = deadline_s
        self._say = say
        self._free_bytes = free_bytes
        self._job = BackgroundJob("the checkpoint", deadline_s=deadline_s, executor=executor)
        self._copies: dict[str, torch.Tensor] = {}

    def begin(self, state: TrainerState, *, commit: CommitPoint) -> None:
        """Take a state that may change again when this returns; wait for the checkpoint before, if it is under way.

        Raises:
            Exception: that of the checkpoint before, or of this one where it is not written in the background.
        """
        self.settle()
        if not self._in_background(state):
            self._writer.write(state, commit=commit)
            return
        copied = self._copy(state)
        self._job.begin(
            lambda: self._write_copy(copied, commit),
            late=f"the checkpoint of optimizer step {commit.optimizer_step} is not written after another "
            f"{self._deadline_s:g} s (trainer.checkpoint_deadline_s): the disk hangs or is far too slow. Look at the "
            "disk, raise the deadline, or checkpoint less often. The checkpoint before it stays.",
        )

    def write(self, state: TrainerState, *, commit: CommitPoint) -> None:
        """Return when this state is durable.

        Raises:
            Exception: that of the checkpoint before, or of this one; a `Fault` unless it is a bug.
        """
        self.settle()
        self._writer.write(state, commit=commit)

    def check(self) -> None:
        """Raise the failure of the checkpoint under way, if it has failed; never wait."""
        if not self._job.under_way:
            self.settle()

    def settle(self) -> None:
        """Wait until nothing is under way.

        Raises:
            Exception: what made the checkpoint fail; once, since the one before it stays and another may be written.
            DeadlineExceeded: if it took too long.
        """
        try:
            self._job.settle()
        finally:
            self._job.forget()

    def close(self, *, cause: BaseException | None = None) -> None:
        """Finish what is under way and end the thread.

        Args:
            cause: why the loop ended; it stays the first cause, whatever the checkpoint says.

        Raises:
            Exception: as `settle`, if there is no cause before it.
        """
        self._job.close(cause=cause)

    def _write_copy(self, copied: TrainerState, commit: CommitPoint) -> None:
        try:
            self._writer.write(copied, commit=commit)
        except Exception as error:
            error.add_note(
                f"That was the checkpoint of optimizer step {commit.optimizer_step}, written while the next steps "
                "trained. The checkpoint before it is the one to resume from."
            )
            raise

    def _in_background(self, state: TrainerState) -> bool:
        if self._background is None:
            state_bytes = sum(t.nbytes for tensors in (state.model, state.optimizer) for t in tensors.values())
            free_bytes = self._free_bytes()
            self._background = background_pays(state_bytes=state_bytes, free_bytes=free_bytes)
            if not self._background:
                self._say(
                    f"checkpoints are written while training waits: a copy of the trainer's state needs {state_bytes} "
                    f"bytes, and {free_bytes} are free. Set trainer.checkpoint_in_background = true to copy anyway."
                )
        return self._background

    def _copy(self, state: TrainerState) -> TrainerState:
        """Return the state in memory of its own; the same memory for every checkpoint."""
        return TrainerState(
            model=self._copy_tensors("model.", state.model),
            optimizer=self._copy_tensors("optimizer.", state.optimizer),
            state=dict(state.state),
        )

    def _copy_tensors(self, prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        copies: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for name, tensor in tensors.items():
                kept = self._copies.get(prefix + name)
                if kept is None:
                    kept = self._copies[prefix + name] = torch.empty_like(tensor)
                copies[name] = kept.copy_(tensor)
        return copies
