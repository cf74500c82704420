"""Entry of every child process: `python -m rollmill.runtime.process ROLE RUN_DIRECTORY`.

Sets up what all roles share: dies with its parent, writes its failure where the supervisor looks, ends with a status
that tells a user error (2) from a fault (1). The roles are imported late, so that each imports only what it needs.

A person may start a replica by hand where the run waits for one (`run.on_generator_loss = "wait"`); it ends with the
run's supervisor all the same.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

from rollmill.config.load import load_config
from rollmill.config.schema import RollmillConfig
from rollmill.errors import RunDirectoryError
from rollmill.priority import lower_priority
from rollmill.runtime.failure import FailureRecord, record_of_error, write_record
from rollmill.runtime.incarnation import Incarnation, read_record
from rollmill.runtime.layout import CONTROLLER, EVALUATOR, TRAINER, ProcessLayout
from rollmill.runtime.losses import life_of, read_losses
from rollmill.runtime.parent import PARENT_VARIABLE, die_with_parent

SPAWNED_VARIABLE = "ROLLMILL_SPAWNED_AT_S"
LIFE_VARIABLE = "ROLLMILL_LIFE"
INCARNATION_VARIABLE = "ROLLMILL_INCARNATION"


class ProcessContext:
    """What a role knows about itself.

    Attributes:
        life: names this start of the process among all its starts.
        spawned_for: number of the incarnation it is to serve; a trainer that is started again is there before it.
    """

    def __init__(self, name: str, run_directory: Path) -> None:
        self.name = name
        self.layout = ProcessLayout(run_directory)
        self.config: RollmillConfig = load_config(run_directory / "config.toml").config
        self.incarnation = read_record(self.layout.incarnation, Incarnation)
        self.life = os.environ.get(LIFE_VARIABLE) or life_of(
            name, incarnation=self.incarnation.number, losses=read_losses(self.layout.losses)
        )
        self.spawned_for = int(os.environ.get(INCARNATION_VARIABLE, self.incarnation.number))
        # CLOCK_MONOTONIC is one for all processes, so the ledger can begin when the parent spawned this process.
        self.spawned_at_s = float(os.environ.get(SPAWNED_VARIABLE, time.monotonic()))


def die_with_run(name: str, layout: ProcessLayout) -> None:
    """Tie a process that a person started to the supervisor of the run: it ends when that ends.

    Raises:
        RunDirectoryError: if no run is going on there, or the process is not one that a run waits for.
    """
    if name == EVALUATOR:
        raise RunDirectoryError(f"{name} cannot be started by hand; the controller does when an evaluation is due.")
    if name in (CONTROLLER, TRAINER):
        raise RunDirectoryError(
            f'{name} cannot be started by hand; only a lost replica can. Set run.on_{name}_loss = "restart" to have '
            "the run start it again."
        )
    try:
        supervisor = os.pidfd_open(int(layout.lock.read_text()))
    except (FileNotFoundError, ValueError, ProcessLookupError):
        raise RunDirectoryError(
            f"no run is going on in {layout.run_directory}: there is nothing for {name} to serve. Go on with the run: "
            f"`rollmill train --resume {layout.run_directory}`."
        ) from None

    def watch() -> None:
        select.select([supervisor], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="supervisor", daemon=True).start()


def run_role(context: ProcessContext) -> None:
    """Run the role that the process name says."""
    if context.name == CONTROLLER:
        from rollmill.runtime.controller_process import run_controller

        run_controller(context)
    elif context.name == TRAINER:
        from rollmill.runtime.trainer_process import run_trainer

        run_trainer(context)
    else:
        from rollmill.runtime.generator_process import run_generator

        if context.name == EVALUATOR:
            lower_priority()
        run_generator(context)


def _leave_word(path: Path, record: FailureRecord) -> None:
    """Write the failure down; where the disk refuses that, what was said to the log must do."""
    try:
        write_record(path, record)
    except OSError as error:
        sys.stderr.write(f"this could not be written to {path}: {error}\n")


def main(arguments: list[str]) -> int:
    """Run one process of a run; return its exit status."""
    name, run_directory = arguments
    spawned = PARENT_VARIABLE in os.environ
    if spawned:
        die_with_parent()
        # The supervisor alone answers Ctrl-C; it tells the controller with SIGTERM.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    context: ProcessContext | None = None
    try:
        if not spawned:
            die_with_run(name, ProcessLayout(Path(run_directory)))
        context = ProcessContext(name, Path(run_directory))
        run_role(context)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (0, None):
            return 0
        record = record_of_error(name, error, at_wall_s=time.time())
        sys.stderr.write(record.traceback or f"{record.code}: {record.message}\n")
        life = context.life if context else os.environ.get(LIFE_VARIABLE)
        if life is not None:
            _leave_word(ProcessLayout(Path(run_directory)).process_failure(name, life=life), record)
        return 2 if record.user_error else 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Torch and gRPC take up to a second to tear down, and nothing is left to do.
    os._exit(status)
