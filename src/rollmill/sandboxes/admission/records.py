"""Records of admission: what is asked for, what the law orders, and what there is to count."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from rollmill.sandboxes.records import Limits, Record, SandboxSpec


class Place(enum.StrEnum):
    """Which budget a sandbox takes from."""

    STARTING = "starting"
    POOLED = "pooled"
    RUNNING = "running"
    SUSPENDED = "suspended"


class Waiting(enum.StrEnum):
    """What somebody waits for."""

    TURN = "turn"
    """Those before it."""
    STARTING_CAP = "starting_cap"
    RUNNING = "running_budget"
    MEMORY = "memory_budget"
    CPUS = "cpu_budget"
    DISK = "disk_budget"
    INODES = "inode_budget"
    HOLD = "provider_has_no_room"
    BREAKER = "provider_breaker"
    IMAGE_BREAKER = "image_breaker"
    PRESSURE = "node_pressure"
    STOPPED = "admission_stopped"
    CREATION = "creation"
    """Its sandbox is starting, or being checked."""


class Kind(enum.IntEnum):
    """Who goes first: resumes hold work that would be lost."""

    RESUME = 0
    START = 1


class How(enum.StrEnum):
    """How a start ended that gave no sandbox."""

    NO_ROOM = "no_room"
    """The provider said so; the same is asked again later."""
    FAILED = "failed"
    """The provider's fault."""
    IMAGE = "image"
    """The image's fault."""
    REQUEST = "request"
    """The request's fault: nothing is learned about the provider."""
    CUT = "cut"
    """It was cut off by its caller's deadline or by the end of the pool."""


class Needs(Record, frozen=True, kw_only=True):
    """What one sandbox takes from the budgets."""

    memory_bytes: int = 0
    cpus: float = 0.0
    disk_bytes: int = 0
    inodes: int = 0


def needs_of(limits: Limits) -> Needs:
    """Return what a sandbox with these caps may take."""
    return Needs(memory_bytes=limits.memory_bytes, cpus=limits.cpus, disk_bytes=limits.disk_bytes, inodes=limits.inodes)


class Start(Record, frozen=True, kw_only=True):
    """Order: create this sandbox.

    Attributes:
        sandbox_id: under this id.
        spec: what it is made of.
        ask: the caller's number, `None` for one that will be idle.
        expires_s: cut it off then.
        waited_s: that its caller waited in the queue.
    """

    sandbox_id: str
    spec: SandboxSpec
    ask: int | None
    expires_s: float
    waited_s: float = 0.0


class Give(Record, frozen=True, kw_only=True):
    """Order: give this sandbox to a caller: a ready one (`fresh` if it was made for it), or one to be resumed."""

    sandbox_id: str
    ask: int
    fresh: bool = False
    waited_s: float = 0.0


class Refuse(Record, frozen=True, kw_only=True):
    """Order: tell a caller that it gets nothing."""

    ask: int
    error: Exception


class Remove(Record, frozen=True, kw_only=True):
    """Order: kill a sandbox that nobody has; `idle` if it was in the pool."""

    sandbox_id: str
    idle: bool = True


class Prepare(Record, frozen=True, kw_only=True):
    """Order: make the image of a template ready."""

    spec: SandboxSpec


Order = Start | Give | Refuse | Remove | Prepare


class Acquired(Record, frozen=True, kw_only=True):
    """How one sandbox was handed out, for histograms.

    Attributes:
        sandbox_id: its id.
        hit: it was ready.
        queue_s: waited until it could start or was given.
        create_s: its creation, 0 for a hit.
        check_s: until it had shown that it lives and had its lease, 0 for a fresh one.
    """

    sandbox_id: str
    hit: bool
    queue_s: float
    create_s: float = 0.0
    check_s: float = 0.0


class TemplateStatistics(Record, frozen=True, kw_only=True):
    """One template: what is wanted and what is there.

    Attributes:
        demand: as given last.
        target: idle ones that there should be.
        idle: idle ones that there are.
        filling: starting to become idle.
        busy: handed out, starting for a caller, or waited for.
        warm_up_s: a start of one, smoothed.
    """

    spec: SandboxSpec
    demand: int
    target: int
    idle: int
    filling: int
    busy: int
    warm_up_s: float


class PoolStatistics(Record, frozen=True, kw_only=True):
    """Everything that metrics need of one pool. Totals count from its opening.

    Attributes:
        places: sandboxes by budget: `starting`, `pooled`, `running`, `suspended`.
        stopping: of these, being killed; they keep their place until they are gone.
        waiting: callers in the queue, by what they wait for.
        starting_cap: starts allowed now, under pressure.
        adaptive_cap: the cap without pressure, as it is learned.
        pressure: factor on the cap; 0 with `stopped`.
        stopped: why nothing starts, empty if it does.
        breakers: state of the provider's breaker and of those of images that failed lately.
        hits: taken from the pool, those that a caller had to wait for among them.
        misses: made for a caller.
        resumed: suspended ones that went on.
        dead_at_hand_out: idle ones found dead when they were to be given.
        dead_idle: found dead in the pool.
        aged: idle ones replaced for their age.
        evicted: idle ones killed for room, for pressure, or because demand fell.
        started: creations that gave a sandbox.
        unused: of all that was made, never handed out.
        failures: creations that gave none, by `How`.
        adopted: creations that were cut off and whose sandbox was found.
        unresolved: ids whose creation was cut off and that are still looked for.
        kill_failures: kills that failed and were or will be tried again.
        refused: callers that got nothing, by what they waited for.
        last_failure: what was wrong the last time that nobody else was told: of a filling, a preparation, a kill, or a
            look at the pressure.
        templates: those in demand or in use.
    """

    places: Mapping[str, int]
    stopping: int
    waiting: Mapping[str, int]
    starting_cap: int
    adaptive_cap: float
    pressure: float
    stopped: str
    breakers: Mapping[str, str]
    hits: int
    misses: int
    resumed: int
    dead_at_hand_out: int
    dead_idle: int
    aged: int
    evicted: int
    started: int
    unused: int
    failures: Mapping[str, int]
    adopted: int
    unresolved: tuple[str, ...]
    kill_failures: int
    refused: Mapping[str, int]
    last_failure: str
    templates: tuple[TemplateStatistics, ...]

    @property
    def queued(self) -> int:
        """Return how many callers wait for a start that has not begun."""
        return sum(count for cause, count in self.waiting.items() if cause != Waiting.CREATION.value)
