"""The numbers that the scheduling core decides with, derived from the configuration once."""

from __future__ import annotations

import msgspec


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the core; see `rollmill.config.schema.ScheduleSettings` for the meaning of each.

    Attributes:
        total_steps: optimizer steps after which the run is finished.
        data_limit: task draws available in the whole run; `None` never ends.
        deterministic: sample in waves; see `rollmill.scheduling.waves`.
        loads_at_once: replicas that load a version at the same time; the others go on serving.
    """

    batch_groups: int
    group_size: int
    max_staleness: int
    total_steps: int
    window_groups: int = 8
    group_oversampling: float = 1.0
    member_oversampling: int = 0
    reopen_groups: bool = False
    replace_zero_advantage: bool = True
    rollout_deadline_s: float = 120.0
    group_deadline_s: float = 300.0
    infra_attempts: int = 4
    infra_failures_in_a_row: int = 16
    data_retries: int = 2
    data_failure_limit: int = 64
    prior_step_s: float = 5.0
    prior_group_s: float = 15.0
    prior_yield: float = 0.5
    data_limit: int | None = None
    deterministic: bool = False
    loads_at_once: int = 1
