"""What the scheduling core asks the shell to do. The shell obeys; it decides nothing."""

from __future__ import annotations

import enum

import msgspec

from rollmill.types import Wave


class DropReason(enum.Enum):
    """Why an admitted rollout will never be trained."""

    ZERO_ADVANTAGE = "zero_advantage"
    NO_TRAINABLE_TOKENS = "no_trainable_tokens"
    UNSCORED = "unscored"
    OVERLONG = "overlong"
    STALE = "stale"
    LATE = "late"
    SURPLUS = "surplus"
    GROUP_DEADLINE = "group_deadline"
    ROLLOUT_DEADLINE = "rollout_deadline"
    INFRA_FAILURE = "infra_failure"
    DATA_FAILURE = "data_failure"
    ABANDONED_HISTORY = "abandoned_history"
    LOST_IN_RESTART = "lost_in_restart"
    WAVE_RESTARTED = "wave_restarted"
    """Deterministic mode: its wave was lost in part, and is started again whole."""
    STOPPED = "stopped"


class Instruction(msgspec.Struct, frozen=True, kw_only=True, tag_field="instruction", tag=True):
    """Something the shell must do."""


class StartRollout(Instruction, frozen=True, kw_only=True):
    """Generate and score one rollout of task number `task_index` of the data stream.

    Attributes:
        deadline_s: controller clock; the core aborts the rollout itself at a later event, the shell passes it on.
        wave: in deterministic mode, what its first generation runs together with.
    """

    rollout_id: str
    group_id: str
    task_index: int
    sibling: int
    attempt: int
    deadline_s: float
    wave: Wave | None = None


class AbortRollout(Instruction, frozen=True, kw_only=True):
    """Stop a rollout and free its KV; a result that still comes is ignored (and counted) by the core."""

    rollout_id: str
    reason: str


class CloseGroup(Instruction, frozen=True, kw_only=True):
    """Compute advantages over these siblings, store the group durably, then report `GroupClosed`."""

    group_id: str
    rollout_ids: tuple[str, ...]


class DropGroup(Instruction, frozen=True, kw_only=True):
    """The group will not be trained; its stored samples can go."""

    group_id: str
    reason: DropReason


class AssignBatch(Instruction, frozen=True, kw_only=True):
    """These groups are the batch of the update that leads from `optimizer_step` to `optimizer_step + 1`."""

    batch_id: int
    group_ids: tuple[str, ...]
    optimizer_step: int


class LoadWeights(Instruction, frozen=True, kw_only=True):
    """Have a replica load and prove this version, or a newer one that was reported as published since."""

    replica_id: str
    policy_version: int


class Finish(Instruction, frozen=True, kw_only=True):
    """Nothing more is to be trained: `steps_done`, `end_of_data` or `stopped`."""

    reason: str


class Fail(Instruction, frozen=True, kw_only=True):
    """The run cannot go on; `code` names the error class, `message` says what, why and what to do."""

    code: str
    message: str


AnyInstruction = StartRollout | AbortRollout | CloseGroup | DropGroup | AssignBatch | LoadWeights | Finish | Fail
