"""Records of the watchdog: what was seen of a sandbox and of its node, what was concluded, and what was done."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import msgspec

from rollmill.sandboxes.records import Death, DeathReason, Limits, Record


class Sample(Record, frozen=True, kw_only=True):
    """What one sandbox uses at one moment; `None` where this machine does not count it.

    Attributes:
        at_s: when, on the clock of whoever watches.
        pids: processes and threads that count against `Limits.pids`.
        refused_forks: forks that its group refused, since its start.
        cpu_s: processor seconds since its start.
        memory_bytes: memory, files included where they are held in memory.
        oom_kills: processes that the kernel ended at the memory cap, since its start.
        memory_stall_s: seconds in which all of it waited for memory, since its start.
        disk_bytes: what it has written and not removed.
        inodes: files and directories that it holds.
        output_bytes: what its programs wrote to stdout and stderr, since its start.
    """

    at_s: float
    pids: int | None = None
    refused_forks: int | None = None
    cpu_s: float | None = None
    memory_bytes: int | None = None
    oom_kills: int | None = None
    memory_stall_s: float | None = None
    disk_bytes: int | None = None
    inodes: int | None = None
    output_bytes: int | None = None


def newborn(at_s: float) -> Sample:
    """Return the sample of a sandbox before its first program: nothing made, nothing refused, nothing written."""
    return Sample(at_s=at_s, pids=0, refused_forks=0, oom_kills=0, disk_bytes=0, inodes=0, output_bytes=0)


class Watched(Record, frozen=True, kw_only=True):
    """One sandbox in a survey."""

    sample: Sample
    limits: Limits


class Survey(Record, frozen=True, kw_only=True):
    """What one look at all sandboxes found.

    Attributes:
        found: by id.
        late: ids of those that live and could not be looked at in time.
    """

    found: Mapping[str, Watched]
    late: tuple[str, ...] = ()


class Pressure(Record, frozen=True, kw_only=True):
    """Shares of the last ten seconds, 0 to 1, in which work waited for a resource: some of it, or all of it."""

    cpu_some: float = 0.0
    memory_some: float = 0.0
    memory_full: float = 0.0
    io_some: float = 0.0
    io_full: float = 0.0

    def for_room(self) -> float:
        """Return the highest share in which some work waited for memory or disks: what a full sandbox may hold up."""
        return max(self.memory_some, self.io_some)


class NodeReading(Record, frozen=True, kw_only=True):
    """What a node has left; `None` where it cannot be read.

    Attributes:
        pressure: shares of time that work waited; `None` without PSI.
        memory_free: share of memory that could still be given out, of the machine or of the own group: the lesser.
        disk_free: share of the bytes of the fullest watched file system.
        inodes_free: share of its inodes.
        pids_free: share of the machine's process ids.
    """

    pressure: Pressure | None = None
    memory_free: float | None = None
    disk_free: float | None = None
    inodes_free: float | None = None
    pids_free: float | None = None


class Severity(enum.Enum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    KILL = "kill"


class Finding(Record, frozen=True, kw_only=True):
    """One thing that was seen.

    Attributes:
        reason: what the sandbox would be ended for.
        severity: whether it is.
        text: what was seen, with the numbers.
    """

    reason: DeathReason
    severity: Severity
    text: str


class Verdict(Record, frozen=True, kw_only=True):
    """What follows for one sandbox.

    Attributes:
        findings: all that is worth a word, the worst first.
    """

    findings: tuple[Finding, ...] = ()

    @property
    def severity(self) -> Severity:
        """Return the worst of all."""
        return self.findings[0].severity if self.findings else Severity.OK

    @property
    def reason(self) -> DeathReason | None:
        """Return what it is to be ended for, `None` if it is not."""
        return self.findings[0].reason if self.severity is Severity.KILL else None

    @property
    def text(self) -> str:
        """Return what it is to be ended for, in words."""
        return "; ".join(one.text for one in self.findings if one.severity is Severity.KILL)


class Step(Record, frozen=True, kw_only=True):
    """One step of an end.

    Attributes:
        name: `freeze`, `describe`, `record` or `kill`.
        wall_s: how long it took.
        error: why it failed, empty if it did not.
    """

    name: str
    wall_s: float
    error: str = ""


class Evidence(Record, frozen=True, kw_only=True):
    """Why a sandbox was ended: what is written to disk before it is.

    Attributes:
        sandbox_id: its id.
        reason: what it is ended for.
        wall_s: when, in seconds of the epoch.
        limits: its caps.
        findings: what was seen.
        samples: the window that the verdict was given on, the oldest first.
        pressure: of the node.
        details: what its provider tells of it: processes, events of its groups.
        steps: what was done before this was written.
    """

    sandbox_id: str
    reason: DeathReason
    wall_s: float
    limits: Limits
    findings: tuple[Finding, ...]
    samples: tuple[Sample, ...]
    pressure: Pressure
    details: Mapping[str, Any]
    steps: tuple[Step, ...] = ()


class KillReport(Record, frozen=True, kw_only=True):
    """How an end went.

    Attributes:
        sandbox_id: its id.
        reason: what it was to be ended for.
        detail: in words, with the evidence's path.
        evidence: path of the evidence, empty if it could not be written.
        steps: what was done.
        death: how it ended; `None` if it could not be ended.
    """

    sandbox_id: str
    reason: DeathReason
    detail: str
    evidence: str
    steps: tuple[Step, ...]
    death: Death | None


class WatchdogStatistics(Record, frozen=True, kw_only=True):
    """What a watchdog did so far.

    Attributes:
        ticks: sweeps begun.
        missed_ticks: sweeps left out because the one before, or the loop, took too long.
        late_s: how late the last sweep began.
        worst_late_s: the latest.
        sweep_s: how long the last sweep took.
        worst_sweep_s: the longest.
        failed_surveys: sweeps that found nothing out.
        late_samples: sandboxes that could not be looked at in time, summed over sweeps.
        watched: sandboxes that the last sweep saw.
        warned: of these, how many were warned of.
        condemned: sandboxes that are being ended.
        kills: ends by reason.
        failed_kills: sandboxes that could not be ended.
        failed_steps: steps that failed, by name.
    """

    ticks: int = 0
    missed_ticks: int = 0
    late_s: float = 0.0
    worst_late_s: float = 0.0
    sweep_s: float = 0.0
    worst_sweep_s: float = 0.0
    failed_surveys: int = 0
    late_samples: int = 0
    watched: int = 0
    warned: int = 0
    condemned: int = 0
    kills: Mapping[DeathReason, int] = msgspec.field(default_factory=dict)
    failed_kills: int = 0
    failed_steps: Mapping[str, int] = msgspec.field(default_factory=dict)


class GuardStatistics(Record, frozen=True, kw_only=True):
    """What a node guard did so far.

    Attributes:
        admitting: whether sandboxes may start.
        why: what stopped admission, in words; empty while it is open.
        stops: how often it was stopped.
        stopped_s: for how long, in all.
        evicted_pooled: pooled sandboxes ended.
        evicted_suspended: paused sandboxes moved to disk.
        failed_readings: times that the node could not be read.
        failed_evictions: evictions that failed or took too long.
        missed_ticks: looks left out because the one before took too long.
        reading: the last one.
    """

    admitting: bool = True
    why: str = ""
    stops: int = 0
    stopped_s: float = 0.0
    evicted_pooled: int = 0
    evicted_suspended: int = 0
    failed_readings: int = 0
    failed_evictions: int = 0
    missed_ticks: int = 0
    reading: NodeReading = NodeReading()
