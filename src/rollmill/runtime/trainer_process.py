"""The trainer process: loads the policy or a checkpoint, publishes, trains until told that nothing more comes."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rollmill.buffer.doorbell import Doorbell, ring
from rollmill.buffer.sqlite import SqliteStore
from rollmill.clock import SystemClock
from rollmill.config.precision import is_exact
from rollmill.cores import CoreBorrower
from rollmill.errors import ProcessDied
from rollmill.runtime.ahead import read_ahead, read_once
from rollmill.runtime.incarnation import ProcessSeconds, write_record
from rollmill.runtime.layout import CONTROLLER, replica_name
from rollmill.runtime.process import ProcessContext
from rollmill.runtime.run_repository import repository_of_run
from rollmill.runtime.threads import make_torch_deterministic
from rollmill.runtime.waiting import wait_for_incarnation, wait_for_preflight
from rollmill.trainer.decisions import EndReason
from rollmill.weights.checkpoint import Checkpoint, read_checkpoint
from rollmill.weights.lean_import import import_transformers, without_collection

if TYPE_CHECKING:
    from rollmill.config.schema import RollmillConfig
    from rollmill.trainer.loop import LoopResult, TrainerLoop
    from rollmill.trainer.step import Trainer

CANARY_TOKENS = 8
ROUNDED_CANARY_TOKENS = 64
"""Where either side rounds, old weights are told from new ones by statistics, which needs more tokens."""


def run_trainer(context: ProcessContext) -> None:
    """Train to the end of the run, or to a clean stop after SIGTERM.

    Raises:
        Fault: what ended the training; the checkpoint before it stays.
    """
    config, layout, clock = context.config, context.layout, SystemClock()
    _prepare_process(config)
    with Doorbell.bind(layout.run_directory, context.name) as bell:
        begun = _begin(context, wait=bell.wait, clock=clock)
        stop = _StopFlag()
        store = SqliteStore(layout.store)
        loop = _new_loop(context, begun, store=store, bell=bell, stop=stop, clock=clock)
        result = loop.run()
        # Whoever ends the run tells the trainer by the store, or asks it once the controller has ended.
        alone = stop.asked and result.reason is EndReason.STOPPED and str(store.note("phase", "running")) == "running"
    store.close()
    write_record(layout.seconds(context.name, life=context.life), _book(context, result))
    if alone:
        raise _told_alone(result.optimizer_step)
    write_record(
        layout.trainer_done(incarnation=context.incarnation.number),
        {"reason": result.reason.value, "optimizer_step": result.optimizer_step},
    )
    ring(layout.run_directory, CONTROLLER)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A trainer in the state that an incarnation begins with."""

    model_path: str
    trainer: Trainer
    checkpoint: Checkpoint | None


def _prepare_process(config: RollmillConfig) -> None:
    """Import all that training needs, while the controller looks at model and data, and set this process up."""
    with without_collection():
        import_transformers()
        importlib.import_module("rollmill.trainer.checkpointing")
        importlib.import_module("rollmill.trainer.loop")
        from rollmill.trainer.memory import keep_freed_memory
    if config.run.deterministic:
        make_torch_deterministic()
    keep_freed_memory()


def _new_loop(
    context: ProcessContext, begun: _Begun, *, store: SqliteStore, bell: Doorbell, stop: _StopFlag, clock: SystemClock
) -> TrainerLoop:
    """Return the loop of this incarnation."""
    from rollmill.trainer.checkpointing import CheckpointFolder
    from rollmill.trainer.loop import TrainerLoop

    config, layout = context.config, context.layout
    return TrainerLoop(
        config=config,
        trainer=begun.trainer,
        store=store,
        repository=repository_of_run(config, layout),
        clock=clock,
        wait=bell.wait,
        ring=lambda: _ring_others(context),
        checkpoints=CheckpointFolder(
            layout.checkpoints, model=Path(begun.model_path), keep=config.trainer.keep_checkpoints
        ),
        history_id=context.incarnation.history_id,
        canary_token_ids=canary_token_ids(begun.trainer.model.config.vocab_size, tokens=canary_tokens(config)),
        should_stop=lambda: stop.asked,
        say=lambda sentence: print(sentence, file=sys.stderr, flush=True),  # noqa: T201 - the process's own log
        start_s=context.spawned_at_s,
        committed_step=None if begun.checkpoint is None else begun.checkpoint.optimizer_step,
        parent_version=context.incarnation.parent_version,
        before_micro_batch=_borrower(context, clock=clock),
    )


def _begin(context: ProcessContext, *, wait: Callable[[float], bool], clock: SystemClock) -> _Begun:

    def load(path: str) -> tuple[Trainer, Checkpoint | None]:
        return _load(context, path)

    ahead = read_ahead(context, load)
    preflight = wait_for_preflight(context.layout, wait=wait, clock=clock)
    context.incarnation = wait_for_incarnation(context.layout, context.spawned_for, wait=wait, clock=clock)
    trainer, checkpoint = read_once(preflight.model_path, ahead=ahead, read=load)
    return _Begun(preflight.model_path, trainer, checkpoint)


def _book(context: ProcessContext, result: LoopResult) -> ProcessSeconds:
    return ProcessSeconds(
        process=context.name,
        incarnation=context.incarnation.number,
        spawned_at_s=context.spawned_at_s,
        closed_at_s=context.spawned_at_s + result.wall_s,
        seconds=result.seconds,
    )


def _told_alone(step: int) -> ProcessDied:
    return ProcessDied(
        f"the trainer was told to end (SIGTERM) at step {step} while the run went on; its checkpoint of that step is "
        "whole. Somebody or something outside the run did: a person, a job scheduler, or a guard against full memory "
        "such as earlyoom. To stop a run, send the signal to `rollmill train`."
    )


def canary_tokens(config: RollmillConfig) -> int:
    """Return how long the canary is: it is scored while generation stands still, so no longer than is needed."""
    tokens = CANARY_TOKENS if is_exact(config) else ROUNDED_CANARY_TOKENS
    return min(tokens, config.generator.max_model_len - 1)


def canary_token_ids(vocabulary_size: int, *, tokens: int = CANARY_TOKENS) -> np.ndarray:
    """Return int32 [tokens]: a fixed prompt spread over the vocabulary, the same in every run of a model."""
    return (np.arange(1, tokens + 1, dtype=np.int64) * 7919 % vocabulary_size).astype(np.int32)


def _load(context: ProcessContext, model_path: str) -> tuple[Trainer, Checkpoint | None]:
    from rollmill.trainer.model import load_policy
    from rollmill.trainer.step import Trainer

    config, path = context.config, context.incarnation.checkpoint
    reference = load_policy(model_path) if config.algorithm.kl_coefficient > 0 else None
    if path is None:
        return Trainer(load_policy(model_path), config=config, reference=reference), None
    checkpoint: Checkpoint = read_checkpoint(path)
    # Adapters are added to what the run started from; the checkpoint's own weights have them merged in.
    trainer = Trainer(load_policy(model_path if config.trainer.lora_rank else path), config=config, reference=reference)
    trainer.load_state(
        model=checkpoint.model_tensors(),
        optimizer=checkpoint.optimizer_tensors(),
        state=checkpoint.trainer_state,
    )
    return trainer, checkpoint


def _borrower(context: ProcessContext, *, clock: SystemClock) -> Callable[[], None]:
    """Return what is called before each micro-batch: it takes threads of cores that nobody else uses."""
    config = context.config
    asked = config.trainer.borrowed_threads
    borrow = config.generator.threads if asked is None else asked
    if config.run.deterministic or borrow == 0:
        return lambda: None
    import torch

    return CoreBorrower(own=config.trainer.threads, borrow=borrow, set_threads=torch.set_num_threads, now_s=clock.now_s)


def _ring_others(context: ProcessContext) -> None:
    for name in (CONTROLLER, *(replica_name(index) for index in range(context.config.generator.own_replicas))):
        ring(context.layout.run_directory, name)


class _StopFlag:
    """True after SIGTERM."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True
