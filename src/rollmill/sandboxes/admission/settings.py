"""Settings of admission and pools."""

from __future__ import annotations

import math

from rollmill.errors import ConfigError
from rollmill.sandboxes.records import Record


def _check(record: Record, *, above: tuple[str, ...] = (), least: float = 0, names: tuple[str, ...] = ()) -> None:
    for name in above:
        if not 0 < getattr(record, name) < math.inf:
            raise ConfigError(f"{name} is {getattr(record, name)}; it must be above 0 and finite: every wait ends")
    for name in names:
        if not least <= getattr(record, name) < math.inf:
            raise ConfigError(f"{name} is {getattr(record, name)}; it must be finite and not below {least:g}")


class Ramp(Record, frozen=True, kw_only=True):
    """A straight line from 1 at `begin` to 0 at `end`; falling figures have `begin` above `end`.

    Attributes:
        begin: up to here nothing is slowed. Nearer to `end`: later and harder.
        end: from here on nothing is left of the factor.
    """

    begin: float
    end: float

    def __post_init__(self) -> None:
        if self.begin == self.end:
            raise ConfigError(f"a ramp begins and ends at {self.begin:g}; the two must differ")

    def factor(self, value: float) -> float:
        """Return how much is left at a value.

        Example:
            >>> Ramp(begin=1.0, end=4.0).factor(2.5), Ramp(begin=0.1, end=0.05).factor(0.2)
            (0.5, 1.0)
        """
        return min(1.0, max(0.0, (self.end - value) / (self.end - self.begin)))


class PressureSettings(Record, frozen=True, kw_only=True):
    """From which pressure of the node on fewer sandboxes start, and from which none.

    All figures are shares: of the last ten seconds for those of PSI, of the whole for what is free. Busy processors and
    disks slow starts down to `min_starting` at a time and never stop them; memory, space, inodes and process ids stop
    them.

    Attributes:
        cpu_some: time in which some work waited for a processor.
        io_full: time in which all work waited for a disk.
        memory_some: time in which some work waited for memory.
        memory_full: time in which all work did.
        memory_free: of the machine, or of this process's memory cgroup if that is less.
        disk_free: of the fullest file system that is watched.
        inodes_free: the same.
        pids_free: of the machine.
    """

    cpu_some: Ramp = Ramp(begin=0.6, end=0.95)
    io_full: Ramp = Ramp(begin=0.3, end=0.8)
    memory_some: Ramp = Ramp(begin=0.1, end=0.4)
    memory_full: Ramp = Ramp(begin=0.05, end=0.15)
    memory_free: Ramp = Ramp(begin=0.12, end=0.06)
    disk_free: Ramp = Ramp(begin=0.12, end=0.05)
    inodes_free: Ramp = Ramp(begin=0.12, end=0.05)
    pids_free: Ramp = Ramp(begin=0.12, end=0.05)


class AdmissionSettings(Record, frozen=True, kw_only=True):
    """How many sandboxes start, live and wait at a time.

    Attributes:
        min_starting: starts at a time that are always allowed, except under a stop.
        initial_starting: the adaptive cap at the beginning; 0: the processors of this machine. It settles by itself;
            nearer to the truth saves the first seconds.
        max_starting: the cap never grows beyond it. More only helps where starts wait for something far away.
        max_running: sandboxes that live and are not suspended, those in pools and those being killed included.
        max_suspended: suspended ones.
        max_waiting: callers in the queue; one more is refused at once.
        memory_bytes: sum of `limits.memory_bytes` of all, suspended ones included; 0: no bound. Limits are caps, not
            use: a bound above the machine's memory counts on most staying far below theirs.
        cpus: sum of `limits.cpus` of those that are not suspended; 0: no bound.
        disk_bytes: sum of `limits.disk_bytes` of all; 0: no bound.
        inodes: sum of `limits.inodes` of all; 0: no bound.
        deadline_s: of an acquisition that names none: queue, creation and check together.
        start_s: longest single start, whatever the caller's deadline.
        slow_factor: starts this many times slower than at their best shrink the cap. Lower: fewer at a time.
        tries: starts of one acquisition that may fail before its caller gets the error.
        hold_s: rest of all starts after the provider had no room, doubled each time in a row; its own wish, if longer.
        max_hold_s: bound of that doubling.
        breaker_failures: failed starts in a row after which the provider is left alone.
        image_failures: failed uses of one image in a row after which it is left alone.
        breaker_open_s: for how long; then one probe, and twice as long if it fails, up to 16 times.
        pressure: when the node is too busy.
    """

    min_starting: int = 1
    initial_starting: int = 0
    max_starting: int = 64
    max_running: int = 1000
    max_suspended: int = 1000
    max_waiting: int = 10_000
    memory_bytes: int = 0
    cpus: float = 0.0
    disk_bytes: int = 0
    inodes: int = 0
    deadline_s: float = 300.0
    start_s: float = 120.0
    slow_factor: float = 3.0
    tries: int = 3
    hold_s: float = 0.5
    max_hold_s: float = 30.0
    breaker_failures: int = 5
    image_failures: int = 2
    breaker_open_s: float = 10.0
    pressure: PressureSettings = PressureSettings()

    def __post_init__(self) -> None:
        _check(self, above=("deadline_s", "start_s", "hold_s", "max_hold_s", "breaker_open_s"))
        _check(self, least=0, names=("initial_starting", "memory_bytes", "cpus", "disk_bytes", "inodes"))
        _check(self, least=0, names=("max_suspended", "max_waiting"))
        _check(self, least=1, names=("min_starting", "max_running", "tries", "breaker_failures", "image_failures"))
        if self.max_starting < self.min_starting:
            raise ConfigError(
                f"max_starting is {self.max_starting} and min_starting {self.min_starting}; the first must not be below"
            )
        if not self.slow_factor > 1:
            raise ConfigError(f"slow_factor is {self.slow_factor:g}; at 1 or below every start is slow")


class PoolSettings(Record, frozen=True, kw_only=True):
    """How sandboxes are kept ready.

    Attributes:
        name: label `rollmill.pool` of everything the pool makes, and the beginning of the ids it chooses.
        admission: how many start and live.
        min_idle: kept ready for each template that is in demand, whatever the signal says.
        max_idle: kept ready for one template at most.
        spare_share: share of a template's demand that may be ready beyond it, to cover one warm-up of the rate at
            which its sandboxes are taken. More: fewer misses while rollouts follow each other; more waste.
        rate_window_s: memory of that rate. Longer: smoother and slower.
        max_age_s: an idle one older than this is replaced. Its own `wall_s` is longer by as much, so that whoever gets
            it has all of the time asked for. Its lease is as long, and so long at most it outlives a killed pool.
        check_s: for how long a sandbox may take to say that it lives.
        adopt_s: for how long a creation that was cut off is looked for before another one is tried.
        watch_s: between two looks at who has died and at the node's pressure.
        kill_s: longest order to kill before it is tried again.
        unknown_s: for how long an id is looked for whose creation was cut off.
        prepare_s: longest preparation of an image.
        close_s: for how long a closing pool waits for starts under way and kills.
    """

    name: str = "pool"
    admission: AdmissionSettings = AdmissionSettings()
    min_idle: int = 0
    max_idle: int = 1000
    spare_share: float = 0.1
    rate_window_s: float = 10.0
    max_age_s: float = 600.0
    check_s: float = 5.0
    adopt_s: float = 5.0
    watch_s: float = 1.0
    kill_s: float = 60.0
    unknown_s: float = 60.0
    prepare_s: float = 900.0
    close_s: float = 60.0

    def __post_init__(self) -> None:
        times = ("rate_window_s", "max_age_s", "check_s", "adopt_s", "watch_s", "kill_s")
        _check(self, above=(*times, "unknown_s", "prepare_s", "close_s"))
        _check(self, least=0, names=("min_idle", "spare_share"))
        if self.max_idle < self.min_idle:
            raise ConfigError(f"max_idle is {self.max_idle} and min_idle {self.min_idle}; the first must not be below")
