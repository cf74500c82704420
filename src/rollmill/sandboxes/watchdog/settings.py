"""Settings of the watchdog and of the node guard."""

from __future__ import annotations

import math
from pathlib import Path

from rollmill.errors import ConfigError
from rollmill.sandboxes.records import Record


class WatchdogSettings(Record, frozen=True, kw_only=True):
    """When a sandbox is ended, and how. The hard caps stop every bomb; this ends the sandbox that held it.

    Attributes:
        interval_s: between two sweeps. Raising it costs less processor time and finds bombs later.
        window_s: over which growth and rates are measured. Raising it finds slower bombs, and remembers longer.
        warn_share: of a cap, from which on a sandbox is warned of. Never ends one.
        full_share: of a cap, from which on it counts as used up. Raising it spares programs that come close.
        fill_share: of a cap, that must have been filled within the window for a bomb. Raising it spares programs that
            unpack much at once; at 1 hardly anything is a bomb.
        full_s: how long bytes or inodes must be used up, or processes with refused forks. Raising it spares programs
            that clean up after themselves.
        pids_full_s: how long processes must be used up where refused forks are not counted.
        refused_forks: within the window, from which on processes that are used up are a fork bomb. Raising it spares
            programs that try again and again.
        oom_kills: within the window, from which on a program that is started again after each is a memory bomb.
        memory_stall_share: of the time, in which all of a sandbox that has used up its memory waited for memory.
        output_floods: times `Limits.output_bytes`, written within the window. One command is killed at 1 already.
        cpu_excess: times `Limits.cpus`, used over a whole window; only possible where no group caps it.
        cpu_kill_pressure: share of time in which work of the node waits for processors, from which on such a sandbox
            is ended and not only warned of. 0 ends it in any case.
        cpu_total_s: processor seconds of a whole sandbox, 0 for no bound.
        pressed_share: share of time in which work of the node waits for memory or disks, from which on nothing that
            is used up is waited for: `full_s` counts as 0, and `pids_full_s` as `full_s`.
        survey_s: how long one look at all sandboxes may take; what was not seen by then is left out and counted.
        freeze_s: how long a sandbox's freeze may take.
        describe_s: how long the look for evidence may take.
        record_s: how long writing the evidence may take.
        kill_s: how long an end may take until it is tried again.
        kill_attempts: how often it is tried.
        evidence_files: newest files that are kept.
        evidence_bytes: largest size of one.
        directory: where evidence is written; `None`: below the records of sandboxes.
    """

    interval_s: float = 1.0
    window_s: float = 10.0
    warn_share: float = 0.8
    full_share: float = 0.95
    fill_share: float = 0.5
    full_s: float = 2.0
    pids_full_s: float = 5.0
    refused_forks: int = 20
    oom_kills: int = 3
    memory_stall_share: float = 0.5
    output_floods: float = 3.0
    cpu_excess: float = 1.5
    cpu_kill_pressure: float = 0.5
    cpu_total_s: float = 0.0
    pressed_share: float = 0.6
    survey_s: float = 0.5
    freeze_s: float = 1.0
    describe_s: float = 1.0
    record_s: float = 2.0
    kill_s: float = 60.0
    kill_attempts: int = 3
    evidence_files: int = 200
    evidence_bytes: int = 64 * 1024
    directory: Path | None = None

    def __post_init__(self) -> None:
        for name in ("interval_s", "survey_s", "freeze_s", "describe_s", "record_s", "kill_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0 and finite")
        for name in ("kill_attempts", "evidence_files", "refused_forks", "oom_kills"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("full_s", "pids_full_s", "cpu_total_s", "cpu_kill_pressure", "pressed_share"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be below 0")
        if not 0 < self.warn_share <= self.full_share <= 1:
            raise ConfigError(
                f"warn_share is {self.warn_share} and full_share {self.full_share}; both must be above 0 and at most "
                "1, and the warning must not come after the cap"
            )
        for name in ("fill_share", "memory_stall_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0 and at most 1")
        for name in ("output_floods", "cpu_excess"):
            if not getattr(self, name) >= 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; below 1 a sandbox within its limits would be ended"
                )
        if self.evidence_bytes < 4096:
            raise ConfigError(f"evidence_bytes is {self.evidence_bytes}; less than 4096 holds no evidence")
        if self.window_s < max(self.full_s, self.pids_full_s) + 2 * self.interval_s:
            raise ConfigError(
                f"window_s is {self.window_s}, but full_s {self.full_s} and pids_full_s {self.pids_full_s} with two "
                f"sweeps of {self.interval_s} s must fit into it: what filled a sandbox would be forgotten before it "
                f"is judged. Set window_s to {max(self.full_s, self.pids_full_s) + 2 * self.interval_s:g} or more."
            )


class GuardSettings(Record, frozen=True, kw_only=True):
    """When a node takes no more sandboxes, and when it ends some that nobody uses.

    Attributes:
        interval_s: between two looks.
        cpu_some: share of time in which some work waits for processors, from which on nothing starts.
        memory_some: the same for memory.
        memory_full: share of time in which all work waits for memory, from which on nothing starts.
        io_full: the same for disks.
        memory_free: share of memory, below which nothing starts.
        disk_free: share of the bytes of a disk.
        inodes_free: share of its inodes.
        pids_free: share of the machine's process ids.
        evict_share: of a free share above, below which pooled sandboxes are ended, then paused ones moved to disk.
        evict_memory_full: share of time in which all work waits for memory, from which on the same is done.
        relief: admission opens again when every pressure is below this share of its bound, and every free share above
            its bound divided by it. 1: at the bound itself, which may open and close at each look.
        evict_part: part of those that can be evicted that goes at a time, at least one.
        settle_s: between two evictions, until the first can be felt.
        read_s: how long reading the node may take.
        evict_s: how long one eviction may take.
    """

    interval_s: float = 1.0
    cpu_some: float = 0.95
    memory_some: float = 0.2
    memory_full: float = 0.1
    io_full: float = 0.5
    memory_free: float = 0.1
    disk_free: float = 0.1
    inodes_free: float = 0.1
    pids_free: float = 0.15
    evict_share: float = 0.5
    evict_memory_full: float = 0.25
    relief: float = 0.8
    evict_part: float = 0.25
    settle_s: float = 3.0
    read_s: float = 0.5
    evict_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("interval_s", "settle_s", "read_s", "evict_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0 and finite")
        for name in ("cpu_some", "memory_some", "memory_full", "io_full", "evict_memory_full", "relief", "evict_part"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0 and at most 1")
        for name in ("memory_free", "disk_free", "inodes_free", "pids_free", "evict_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 to 1, and below 1")
        if self.evict_memory_full < self.memory_full:
            raise ConfigError(
                f"evict_memory_full is {self.evict_memory_full} and memory_full {self.memory_full}: sandboxes would be "
                "evicted while others may still start. Set evict_memory_full to memory_full or more."
            )
