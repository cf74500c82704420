"""What a run does when a process ends or a signal comes: pure decisions, and the record of each loss.

The supervisor acts on them; nothing here starts, ends or waits for a process.
"""

from __future__ import annotations

import enum
import os
import signal
from collections import Counter
from pathlib import Path

import msgspec

from rollmill.config.schema import RunSettings
from rollmill.errors import EngineDead, ProducersGone
from rollmill.runtime.failure import FailureRecord
from rollmill.runtime.layout import CONTROLLER, TRAINER
from rollmill.telemetry.files import end_torn_line

LONGEST_PAUSE_S = 4.0
"""So that a lost process is started again within 5 s, however often it was lost."""

VERDICTS = frozenset({ProducersGone.code, EngineDead.code})
"""Failures that the controller reports of others: it is not broken itself, and another one would say the same."""


class Phase(enum.Enum):
    """Where the run stands, as the supervisor sees it."""

    PREFLIGHT = "preflight"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDING = "ending"
    FAILING = "failing"


class Action(enum.Enum):
    """What the supervisor must do."""

    NOTHING = "nothing"
    STOP_CLEANLY = "stop_cleanly"
    END_OTHERS = "end_others"
    RESTART = "restart"
    WAIT = "wait"
    DEGRADE = "degrade"
    FAIL = "fail"
    KILL_ALL = "kill_all"


LOSSES = frozenset({Action.RESTART, Action.WAIT, Action.DEGRADE, Action.FAIL})


class LossRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A process that was lost: a line of `losses.jsonl`.

    Attributes:
        process: `controller`, `trainer`, `generator-0`, ...
        life: which of its lives: the incarnation it was started in, and how often it had been lost before.
        pid: its process id.
        incarnation: of the run when it was lost.
        exit_status: negative for a signal; `None` if somebody else had started the process.
        cause: its own account of the failure, or what its end says.
        decision: `restart`, `wait`, `degrade` or `fail`.
        restarts_left: of `run.restart_budget`, after this decision.
        pause_s: before it is started again.
        message: all of this in one sentence or two.
    """

    process: str
    life: str
    pid: int
    incarnation: int
    at_wall_s: float
    exit_status: int | None
    cause: FailureRecord
    decision: str
    restarts_left: int
    pause_s: float
    message: str


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """Losses of one process with no progress between them, oldest first.

    Attributes:
        reached_step: highest optimizer step that the run had reached when the first of them came.
    """

    losses: tuple[LossRecord, ...] = ()
    reached_step: int = 0

    def at(self, reached_step: int) -> Chain:
        """Return the chain that a loss belongs to now: a new one if the run has got further than ever before.

        Steps that are made again after a return to a checkpoint are no progress: a trainer that fails at the same step
        each time would go on for ever.
        """
        return self if reached_step <= self.reached_step else Chain(reached_step=reached_step)

    def restarts_left(self, budget: int) -> int:
        """Return how many restarts the budget still allows."""
        return max(0, budget - len(self.losses))

    def pause_s(self) -> float:
        """Return the pause before the next restart: 0, 1, 2, 4, 4, ... seconds."""
        return min(LONGEST_PAUSE_S, 2.0 ** (len(self.losses) - 1)) if self.losses else 0.0


def policy_of(process: str, settings: RunSettings) -> str:
    """Return the setting that says what the run does without this process."""
    if process == CONTROLLER:
        return settings.on_controller_loss
    if process == TRAINER:
        return settings.on_trainer_loss
    return settings.on_generator_loss


def on_exit(
    name: str, status: int | None, *, phase: Phase, policy: str, restarts_left: int, cause: FailureRecord | None
) -> tuple[Phase, Action]:
    """Return what the exit of a child means.

    The controller leads: its clean exit ends the run. The trainer may end cleanly before it (it was told to in the
    store). A replica never ends by itself. Only in a running run is anything lost made good.

    Args:
        status: negative for a signal; `None` if it is not known.
        policy: the setting for this process.
        restarts_left: of `run.restart_budget`.
        cause: the child's own account of its failure, if it left one.
    """
    if phase in (Phase.FAILING, Phase.ENDING):
        return phase, Action.NOTHING
    if status == 0 and name == CONTROLLER:
        return Phase.ENDING, Action.END_OTHERS
    if status == 0 and name == TRAINER:
        return phase, Action.NOTHING
    if phase is Phase.STOPPING and name == CONTROLLER and status == -signal.SIGTERM:
        # Told to stop before it could listen, because it had just been restarted.
        return Phase.ENDING, Action.END_OTHERS
    if phase is Phase.RUNNING and not _is_final(name, cause):
        if policy == "restart" and restarts_left > 0:
            return phase, Action.RESTART
        if policy == "wait":
            return phase, Action.WAIT
        if policy == "degrade":
            return phase, Action.DEGRADE
    return Phase.FAILING, Action.FAIL


def _is_final(name: str, cause: FailureRecord | None) -> bool:
    """Whether the same would come again: the user must act, or the controller has judged the run."""
    return cause is not None and (cause.user_error or (name == CONTROLLER and cause.code in VERDICTS))


def on_signal(count: int, *, phase: Phase, leaders_run: bool) -> tuple[Phase, Action]:
    """Return what the `count`-th Ctrl-C or SIGTERM means.

    Args:
        leaders_run: controller and trainer are both there; without one of them there is nobody to wind up with, and
            the last checkpoint stands.
    """
    if count > 1 or phase is Phase.PREFLIGHT:
        return Phase.FAILING, Action.KILL_ALL
    if phase is Phase.RUNNING:
        return (Phase.STOPPING, Action.STOP_CLEANLY) if leaders_run else (Phase.ENDING, Action.END_OTHERS)
    return phase, Action.NOTHING


def loss_message(
    process: str, cause: FailureRecord, *, action: Action, restarts_left: int, pause_s: float, how: str
) -> str:
    """Return what is told of a loss.

    Args:
        how: for a restart of the trainer or a wait: what happens next, in words.
    """
    match action:
        case Action.RESTART:
            when = f"in {pause_s:g} s" if pause_s else "now"
            next_ = f"It is started again {when}; {restarts_left} more restarts without an optimizer step are allowed."
        case Action.DEGRADE:
            next_ = "The run goes on without it."
        case Action.FAIL:
            next_ = "The run stops."
        case _:
            next_ = ""
    return " ".join(part for part in (f"lost {process}: {cause.message}", next_, how) if part)


def first_cause_of(chain: Chain, *, budget: int) -> FailureRecord:
    """Return why a run ends: the loss itself, or the first of the chain that used up the budget, with the count."""
    if not 0 < budget < len(chain.losses):
        return chain.losses[-1].cause
    first = chain.losses[0].cause
    count, name = len(chain.losses), chain.losses[0].process
    return msgspec.structs.replace(
        first,
        message=f"{name} was lost {count} times with no optimizer step between them, which is more than "
        f"run.restart_budget = {budget} allows. The first time: {first.message} losses.jsonl has them all.",
    )


def append_loss(path: Path, loss: LossRecord) -> None:
    """Append a loss durably: it must outlive whatever happens next."""
    with path.open("ab") as file:
        end_torn_line(path, file)
        file.write(msgspec.json.encode(loss) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_losses(path: Path) -> list[LossRecord]:
    """Return all losses of a run, oldest first; a line torn by a crash is passed over."""
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    found: list[LossRecord] = []
    for line in whole.splitlines():
        try:
            found.append(msgspec.json.decode(line, type=LossRecord))
        except msgspec.DecodeError:
            continue
    return found


def life_of(process: str, *, incarnation: int, losses: list[LossRecord]) -> str:
    """Return the name of the next life of a process: unique over the whole run."""
    lost = Counter(loss.process for loss in losses)[process]
    return f"{incarnation}-{lost}" if lost else f"{incarnation}"
