"""The law of bombs: from the last samples of a sandbox to ok, warn or kill, with the numbers. Pure.

What is a bomb (the caps have stopped it already, whatever it is):

    processes   used up for a while, and forks refused; where those are not counted, used up for longer
    inodes      used up for a while, and half of them or more made within the window
    bytes       the same
    memory      ended by the kernel again and again, or standing still for want of memory, or beyond a cap that no group
                holds
    output      several times what one command may write
    processor   beyond a cap that no group holds, while the node is short; or beyond a total

A sandbox below every one of these bounds is never ended. A slow program that reaches a cap is not ended either: it gets
the error that the cap gives, and may clean up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rollmill.sandboxes.records import DeathReason, Limits
from rollmill.sandboxes.watchdog.records import Finding, Pressure, Sample, Severity, Verdict
from rollmill.sandboxes.watchdog.settings import WatchdogSettings

_LEAST_FLOOD_BYTES = 1024 * 1024
_EDGE_S = 1e-6  # sweeps of one second may be seen a rounding error apart
_RANK = {Severity.KILL: 0, Severity.WARN: 1, Severity.OK: 2}


def trim(samples: Sequence[Sample], *, window_s: float) -> list[Sample]:
    """Return those within the window, and one before it, so that a window is seen whole.

    Example:
        >>> [one.at_s for one in trim([Sample(at_s=float(second)) for second in range(6)], window_s=2.5)]
        [2.0, 3.0, 4.0, 5.0]
    """
    if not samples:
        return []
    begin_s = samples[-1].at_s - window_s
    first = next(place for place, one in enumerate(samples) if one.at_s > begin_s - _EDGE_S)
    whole = samples[first].at_s <= begin_s + _EDGE_S
    return list(samples[first if whole else max(0, first - 1) :])


def judge(
    samples: Sequence[Sample], *, limits: Limits, settings: WatchdogSettings, pressure: Pressure | None = None
) -> Verdict:
    """Judge one sandbox.

    Args:
        samples: those of the window, as `trim` returns them, the oldest first.
        limits: its caps.
        settings: the bounds.
        pressure: of the node; `None` counts as none.
    """
    if not samples:
        return Verdict()
    case = _Case(samples, limits=limits, settings=settings, pressure=pressure or Pressure())
    found = [one for look in _LOOKS for one in look(case)]
    return Verdict(findings=tuple(sorted(found, key=lambda one: _RANK[one.severity])))


class _Case:
    """The samples of one sandbox, and how to ask them."""

    def __init__(
        self, samples: Sequence[Sample], *, limits: Limits, settings: WatchdogSettings, pressure: Pressure
    ) -> None:
        self.samples = samples
        self.last = samples[-1]
        self.limits = limits
        self.settings = settings
        self.pressure = pressure
        self.pressed = pressure.for_room() >= settings.pressed_share

    def growth(self, name: str) -> tuple[float, float]:
        """Return how much a number grew since its least in the window, and in how many seconds."""
        known = [(one.at_s, value) for one in self.samples if (value := getattr(one, name)) is not None]
        if not known or self.last_of(name) is None:
            return 0.0, 0.0
        # The latest of equal ones: a sandbox that was idle and then filled itself did it since.
        at_s, least = min(known, key=lambda pair: (pair[1], -pair[0]))
        return known[-1][1] - least, known[-1][0] - at_s

    def rise(self, name: str) -> tuple[float, float]:
        """Return how much a count rose over the window, and in how many seconds."""
        first = next((one for one in self.samples if getattr(one, name) is not None), None)
        last = next((one for one in reversed(self.samples) if getattr(one, name) is not None), None)
        if first is None or last is None:
            return 0.0, 0.0
        return getattr(last, name) - getattr(first, name), last.at_s - first.at_s

    def last_of(self, name: str) -> float | None:
        return getattr(self.last, name)

    def at_least_for(self, name: str, bound: float) -> float | None:
        """Return for how long a number has been at least this, `None` if it is not now."""
        since_s = None
        for one in reversed(self.samples):
            value = getattr(one, name)
            if value is None or value < bound:
                break
            since_s = one.at_s
        return None if since_s is None else self.last.at_s - since_s

    def patience(self, seconds: float) -> float:
        return 0.0 if self.pressed else seconds - _EDGE_S

    def long_patience(self) -> float:
        """Return how long what is only seen by its level is waited for."""
        settings = self.settings
        return min(settings.full_s, settings.pids_full_s) if self.pressed else settings.pids_full_s - _EDGE_S


def _pids(case: _Case) -> Iterable[Finding]:
    cap, settings = case.limits.pids, case.settings
    pids = case.last_of("pids")
    if pids is None or pids < settings.warn_share * cap:
        return
    full_s = case.at_least_for("pids", settings.full_share * cap)
    refused, span_s = case.rise("refused_forks")
    counted = case.last_of("refused_forks") is not None
    text = f"{pids:.0f} of {cap} processes"
    if full_s is not None:
        text += f" for {full_s:.1f} s"
        text += f", {refused:.0f} forks refused in {span_s:.1f} s" if counted else ""
        # A program may run as many processes as it is allowed; one that is refused more and goes on asking is a bomb.
        patience_s = case.patience(settings.full_s) if counted else case.long_patience()
        if full_s >= patience_s and (not counted or refused >= settings.refused_forks):
            yield _kill(DeathReason.POLICY_PIDS, text)
            return
    yield _warn(DeathReason.POLICY_PIDS, text)


def _filled(name: str, reason: DeathReason, unit: str) -> Callable[[_Case], Iterable[Finding]]:
    """Return the look at something that is filled: inodes or bytes."""

    def look(case: _Case) -> Iterable[Finding]:
        cap, settings = getattr(case.limits, name), case.settings
        used = case.last_of(name)
        if used is None or used < settings.warn_share * cap:
            return
        full_s = case.at_least_for(name, settings.full_share * cap)
        grown, span_s = case.growth(name)
        text = f"{used:.0f} of {cap} {unit}, {grown:.0f} of them in {span_s:.1f} s"
        bomb = full_s is not None and full_s >= case.patience(settings.full_s) and grown >= settings.fill_share * cap
        yield _kill(reason, text) if bomb else _warn(reason, text)

    return look


def _memory(case: _Case) -> Iterable[Finding]:
    cap, settings = case.limits.memory_bytes, case.settings
    killed, span_s = case.rise("oom_kills")
    if killed >= settings.oom_kills:
        yield _kill(
            DeathReason.POLICY_MEMORY,
            f"{killed:.0f} processes ended in {span_s:.1f} s at the memory cap of {cap} bytes",
        )
    used = case.last_of("memory_bytes")
    if used is None:
        return
    over_s = case.at_least_for("memory_bytes", cap + 1)
    if over_s is not None and over_s >= case.patience(settings.full_s):
        text = f"{used:.0f} bytes of memory for {over_s:.1f} s, {cap} allowed and no group to hold it"
        yield _kill(DeathReason.POLICY_MEMORY, text)
    stalled_s, span_s = case.rise("memory_stall_s")
    full_s = case.at_least_for("memory_bytes", settings.full_share * cap)
    if full_s is None:
        return
    stalls = span_s > 0 and stalled_s >= settings.memory_stall_share * span_s
    if stalls and full_s >= case.patience(settings.full_s):
        text = f"{used:.0f} of {cap} bytes of memory, and {stalled_s:.1f} of {span_s:.1f} s spent waiting for more"
        yield _kill(DeathReason.POLICY_MEMORY, text)
    elif stalls or over_s is not None:
        yield _warn(DeathReason.POLICY_MEMORY, f"{used:.0f} of {cap} bytes of memory")


def _output(case: _Case) -> Iterable[Finding]:
    cap = max(case.limits.output_bytes, _LEAST_FLOOD_BYTES)
    written, span_s = case.rise("output_bytes")
    text = f"{written:.0f} bytes of output in {span_s:.1f} s, {cap} allowed to a command"
    if written >= case.settings.output_floods * cap:
        yield _kill(DeathReason.POLICY_OUTPUT, text)
    elif written >= cap:
        yield _warn(DeathReason.POLICY_OUTPUT, text)


def _cpu(case: _Case) -> Iterable[Finding]:
    settings, cap = case.settings, case.limits.cpus
    total = case.last_of("cpu_s")
    if total is None:
        return
    if settings.cpu_total_s and total >= settings.cpu_total_s:
        text = f"{total:.1f} processor seconds, {settings.cpu_total_s:g} allowed (cpu_total_s)"
        yield _kill(DeathReason.POLICY_CPU_TIME, text)
    used, span_s = case.rise("cpu_s")
    if span_s < settings.window_s - _EDGE_S or used <= settings.cpu_excess * cap * span_s:
        return
    text = f"{used / span_s:.2f} processors for {span_s:.1f} s, {cap:g} allowed and no group to hold it"
    short = case.pressure.cpu_some >= settings.cpu_kill_pressure
    yield _kill(DeathReason.POLICY_CPU_TIME, text) if short else _warn(DeathReason.POLICY_CPU_TIME, text)


_LOOKS: tuple[Callable[[_Case], Iterable[Finding]], ...] = (
    _pids,
    _filled("inodes", DeathReason.POLICY_INODES, "inodes"),
    _filled("disk_bytes", DeathReason.POLICY_BYTES, "bytes of files"),
    _memory,
    _output,
    _cpu,
)


def _kill(reason: DeathReason, text: str) -> Finding:
    return Finding(reason=reason, severity=Severity.KILL, text=text)


def _warn(reason: DeathReason, text: str) -> Finding:
    return Finding(reason=reason, severity=Severity.WARN, text=text)


def next_tick(due_s: float, *, now_s: float, interval_s: float) -> tuple[float, int]:
    """Return when the sweep after the one that was due is due, and how many are left out because time ran over them.

    Sweeps keep to their grid: one that is late does not push those after it.

    Example:
        >>> next_tick(10.0, now_s=10.2, interval_s=1.0), next_tick(10.0, now_s=13.5, interval_s=1.0)
        ((11.0, 0), (14.0, 3))
    """
    missed = max(0, int((now_s - due_s) / interval_s))
    return due_s + (missed + 1) * interval_s, missed
