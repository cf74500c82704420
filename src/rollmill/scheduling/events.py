"""What the scheduling core is told.

Every event carries `at_s`, the controller's clock: the core has no clock of its own. Events are journaled in
order, so that the core's state is the fold of the journal.
"""

from __future__ import annotations

import enum

import msgspec

from rollmill.scheduling.settings import SchedulerSettings


class FailureClass(enum.Enum):
    """Who is to blame, hence whose budget pays. Unknown errors count as the data's, so that bugs surface."""

    INFRA = "infra"
    DATA = "data"


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    """Something that happened at `at_s` (controller clock, seconds)."""

    at_s: float


class RunStarted(Event, frozen=True, kw_only=True):
    """A new run begins with these weights published.

    Attributes:
        settings: what the core decides with from here on; journaled, so that the fold of a run that was resumed with
            other deadlines decides as the run did. `None` keeps those it has.
    """

    history_id: str
    optimizer_step: int
    policy_version: int
    settings: SchedulerSettings | None = None


class RunResumed(Event, frozen=True, kw_only=True):
    """A run goes on after a stop or a crash, reconciled to the commit point.

    Everything in flight is lost with its processes. Groups trained after `optimizer_step` are not in the
    surviving history: they go back to the buffer and age, or are dropped(abandoned_history).

    Attributes:
        optimizer_step: the checkpoint's.
        policy_version: the version published anew for it (max + 1).
        trained_group_ids: groups that the surviving history has trained, over all its checkpoints.
        abandoned_above: policy versions above this one (and below `policy_version`) belong to no history any more.
        abandoned_group_ids: stored groups with tokens of abandoned versions.
        settings: as in `RunStarted`.
    """

    history_id: str
    optimizer_step: int
    policy_version: int
    trained_group_ids: tuple[str, ...]
    abandoned_above: int
    abandoned_group_ids: tuple[str, ...]
    settings: SchedulerSettings | None = None


class ReplicaJoined(Event, frozen=True, kw_only=True):
    """A replica serves `policy_version` and can run `slots` rollouts at once."""

    replica_id: str
    slots: int
    policy_version: int


class ReplicaResized(Event, frozen=True, kw_only=True):
    """A replica that is a whole fleet can run another number of rollouts at once."""

    replica_id: str
    slots: int


class ControllerRestarted(Event, frozen=True, kw_only=True):
    """A new controller goes on in the same history: trainer and replicas lived on.

    What was in flight is lost with the old controller, which held its tokens; batches stay as they are. The replicas
    join anew.
    """


class AfterLoss(enum.Enum):
    """What the run does without a replica that it lost."""

    FAIL = "fail"
    """It ends when nobody is left to fill a batch."""
    AWAIT = "await"
    """It waits: the replica comes back, or whoever restarts it ends the run."""
    DEGRADE = "degrade"
    """It goes on with the others; without any it trains what is there and finishes."""


class ReplicaLeft(Event, frozen=True, kw_only=True):
    """A replica is gone or dirty; its rollouts fail one by one in events of their own."""

    replica_id: str
    reason: str
    then: AfterLoss = AfterLoss.FAIL


class WeightsPublished(Event, frozen=True, kw_only=True):
    """The trainer committed a new set of weights to the repository."""

    policy_version: int
    optimizer_step: int


class WeightsLoaded(Event, frozen=True, kw_only=True):
    """A replica serves a new version, proven by digest."""

    replica_id: str
    policy_version: int


class RolloutFinished(Event, frozen=True, kw_only=True):
    """A rollout ended with an outcome that is not an infrastructure failure.

    Attributes:
        oldest_optimizer_step: lowest optimizer step among its output tokens.
        counts: the outcome enters baseline and loss (scored or policy_failed).
        reason: why it does not count (`unscored: ...`, `overlong`), else empty.
    """

    rollout_id: str
    output_tokens: int
    oldest_optimizer_step: int
    counts: bool
    reason: str = ""


class RolloutFailed(Event, frozen=True, kw_only=True):
    """A rollout produced no outcome."""

    rollout_id: str
    failure: FailureClass
    reason: str


class GroupClosed(Event, frozen=True, kw_only=True):
    """The shell computed the advantages that `CloseGroup` asked for, and the group is durable.

    Attributes:
        has_signal: at least one sibling in the loss has a non-zero advantage (float-noise-safe, on raw outcomes).
        oldest_optimizer_step: lowest optimizer step among tokens in the loss.
        loss_tokens: tokens in the loss.
    """

    group_id: str
    has_signal: bool
    oldest_optimizer_step: int
    loss_tokens: int
    reason: str = ""


class BatchTaken(Event, frozen=True, kw_only=True):
    """The trainer leased an assigned batch."""

    batch_id: int


class BatchTrained(Event, frozen=True, kw_only=True):
    """The trainer committed the optimizer update of a batch; it is now at `optimizer_step`.

    Attributes:
        step_s: time of the step without waiting for data; measures the consumption rate.
    """

    batch_id: int
    optimizer_step: int
    step_s: float


class StopRequested(Event, frozen=True, kw_only=True):
    """The user asked for a clean stop: admit nothing more, abort what runs, keep what is buffered."""

    reason: str


class Tick(Event, frozen=True, kw_only=True):
    """Time passed; deadlines are looked at. Changes nothing unless a deadline has passed."""


AnyEvent = (
    RunStarted
    | RunResumed
    | ControllerRestarted
    | ReplicaJoined
    | ReplicaResized
    | ReplicaLeft
    | WeightsPublished
    | WeightsLoaded
    | RolloutFinished
    | RolloutFailed
    | GroupClosed
    | BatchTaken
    | BatchTrained
    | StopRequested
    | Tick
)
