"""Pressure of the node as a law: what is seen in, a factor on the cap of starts out. Pure."""

from __future__ import annotations

from rollmill.sandboxes.admission.settings import PressureSettings
from rollmill.sandboxes.records import Record

# What is out of these does not come back by waiting a little, so nothing may start.
_STOPPING = ("memory_some", "memory_full", "memory_free", "disk_free", "inodes_free", "pids_free")
_SLOWING = ("cpu_some", "io_full")


class PressureSample(Record, frozen=True, kw_only=True):
    """What was seen of a node; `None` where this machine does not say. Units are those of `PressureSettings`."""

    cpu_some: float | None = None
    io_full: float | None = None
    memory_some: float | None = None
    memory_full: float | None = None
    memory_free: float | None = None
    disk_free: float | None = None
    inodes_free: float | None = None
    pids_free: float | None = None


class PressureVerdict(Record, frozen=True, kw_only=True):
    """What follows from it.

    Attributes:
        factor: on the cap of starts, from 0 to 1; at least one start stays unless `stop`.
        stop: nothing starts or resumes, and idle sandboxes go.
        cause: the figure that decided, with its numbers; empty at a factor of 1.
    """

    factor: float = 1.0
    stop: bool = False
    cause: str = ""


CALM = PressureVerdict()


def judge(sample: PressureSample, *, settings: PressureSettings) -> PressureVerdict:
    """Return what a sample allows: the smallest of all factors.

    Example:
        >>> judge(PressureSample(cpu_some=0.95, memory_free=0.05), settings=PressureSettings())
        PressureVerdict(factor=0.0, stop=True, cause='memory_free is 0.05, starts stop at 0.06')
    """
    worst, verdict = 1.0, CALM
    for name in (*_STOPPING, *_SLOWING):
        value = getattr(sample, name)
        if value is None:
            continue
        ramp = getattr(settings, name)
        factor = ramp.factor(value)
        if factor < worst:
            stop = factor == 0.0 and name in _STOPPING
            verb = "starts stop at" if stop else f"starts slow down from {ramp.begin:g} to"
            worst = factor
            verdict = PressureVerdict(factor=factor, stop=stop, cause=f"{name} is {value:.3g}, {verb} {ramp.end:g}")
    return verdict
