"""How many replicas of the generator there should be, and which one leaves. Pure: fleet and time in, decision out.

The load is counted in replicas: sequences that run or wait over the seats of one (`max_num_seqs`), or their KV over the
KV of one, whichever is more. Two marks keep the number still:

    more     where the KV in use goes over `high_usage` of what there is, or sequences wait for longer than
             `target_wait_s` and would find a seat on more replicas
    fewer    where one replica less would still be under `low_usage`, for all of `in_window_s`

After a step down the fleet stands at `low_usage` or under it, so nothing waits and nothing asks for more: a constant
load leaves it alone. A full batch without a queue is what a trainer wants and asks for nothing. A step is bounded and
followed by a rest. A replica that is starting counts as one that serves; one that drains does not, though it holds its
place under `max_replicas`, because it holds memory. Nothing leaves while another one starts or is not fit, because what
is seen of the load then is not all of it.

Replicas below `min_replicas`, and those that were not fit for too long, are replaced without a rest; a replica that
ends while it starts delays the next start, twice as long every time.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import msgspec

from rollmill.errors import ConfigError

MAX_BACKOFF_S = 600.0
_EPSILON = 1e-9
"""Keeps a load of exactly two replicas from asking for three."""


class ReplicaPhase(enum.StrEnum):
    """What a replica is to the autoscaler."""

    STARTING = "starting"
    SERVING = "serving"
    UNFIT = "unfit"
    """It runs and takes no requests: dirty, or it does not answer."""
    DRAINING = "draining"


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, as it was last seen.

    Attributes:
        since_s: when it came into this phase.
        running: sequences in its batch.
        waiting: sequences that wait for a seat there.
        max_num_seqs: its seats.
        turns_per_s: turns it finished lately; 0 if that is not known.
    """

    name: str
    phase: ReplicaPhase
    since_s: float = 0.0
    running: int = 0
    waiting: int = 0
    max_num_seqs: int = 1
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    turns_per_s: float = 0.0


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """All replicas, and what waits before them.

    Attributes:
        router_queue: requests that a router holds back because no replica has room.
        failed_starts: replicas in a row that ended before they served.
        failed_at_s: when the last of them ended.
        blind: part of the load could not be seen, so nothing leaves because there is little.
    """

    replicas: tuple[ReplicaLoad, ...]
    router_queue: int = 0
    blind: bool = False
    failed_starts: int = 0
    failed_at_s: float = -math.inf

    def of(self, *phases: ReplicaPhase) -> list[ReplicaLoad]:
        """Return the replicas in these phases."""
        return [replica for replica in self.replicas if replica.phase in phases]


class ScalingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that the law decides with.

    Attributes:
        min_replicas: never fewer are kept.
        max_replicas: never more are there, counting those that start, drain or are unfit.
        high_usage: share of the KV above which there should be more.
        low_usage: share of seats and of the KV that one replica less must stay under.
        target_wait_s: wait for a seat that is taken without starting a replica.
        max_step_out: most replicas started at once.
        max_step_in: most replicas drained at once.
        out_rest_s: from one start to the next because of load.
        in_rest_s: from any change to the next drain because of load.
        in_window_s: time for which the load must have been small.
        unfit_limit_s: a replica that was unfit for longer is replaced.
        start_limit_s: a replica that started for longer is replaced.
        backoff_s: delay after a replica that ended before it served.
    """

    min_replicas: int = 1
    max_replicas: int = 4
    high_usage: float = 0.9
    low_usage: float = 0.6
    target_wait_s: float = 10.0
    max_step_out: int = 2
    max_step_in: int = 1
    out_rest_s: float = 30.0
    in_rest_s: float = 120.0
    in_window_s: float = 120.0
    unfit_limit_s: float = 120.0
    start_limit_s: float = 900.0
    backoff_s: float = 10.0

    def __post_init__(self) -> None:
        problems = [text for wrong, text in self._rules() if wrong]
        if problems:
            raise ConfigError(f"these settings of scaling cannot be kept: {'; '.join(problems)}")

    def _rules(self) -> tuple[tuple[bool, str], ...]:
        low, high, least, most = self.low_usage, self.high_usage, self.min_replicas, self.max_replicas
        limits = {"unfit_limit_s": self.unfit_limit_s, "start_limit_s": self.start_limit_s, "backoff_s": self.backoff_s}
        times = {"target_wait_s": self.target_wait_s, "in_window_s": self.in_window_s, **limits}
        rests = {"out_rest_s": self.out_rest_s, "in_rest_s": self.in_rest_s}
        return (
            (least < 1, f"min_replicas {least} is below 1: a request finds nobody who could start the first one"),
            (most < least, f"max_replicas {most} is below min_replicas {least}"),
            (
                not 0 < low < high <= 1,
                f"low_usage {low} must be above 0 and below high_usage {high}, and that 1 at most; else a step down is "
                "followed by a step up",
            ),
            (self.max_step_out < 1, f"max_step_out {self.max_step_out} is below 1"),
            (self.max_step_in < 1, f"max_step_in {self.max_step_in} is below 1"),
            *((not value > 0, f"{name} {value} is not above 0") for name, value in times.items()),
            *((not value >= 0, f"{name} {value} is below 0") for name, value in rests.items()),
        )


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas the load asks for.

    Attributes:
        at_least: fewer are too few now.
        comfortable: with this many, seats and KV are under the low mark.
        why: the numbers, as a part of a sentence.
    """

    at_least: int
    comfortable: int
    why: str


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What the law remembers from one decision to the next.

    Attributes:
        began_s: first decision; `None` before it.
        out_at_s: last start because of load.
        changed_at_s: last start or drain.
        needs: (time, comfortable number) over the window, only those that later ones do not exceed.
    """

    began_s: float | None = None
    out_at_s: float = -math.inf
    changed_at_s: float = -math.inf
    needs: tuple[tuple[float, int], ...] = ()


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now.

    Attributes:
        target: replicas that serve or start once this is done.
        start: replicas to start.
        drain: names of replicas to drain and end.
        reason: one sentence.
    """

    target: int
    start: int = 0
    drain: tuple[str, ...] = ()
    reason: str


def decide(fleet: Fleet, memory: Memory, *, settings: ScalingSettings, now_s: float) -> tuple[Decision, Memory]:
    """Return what to do with this fleet now, and what to remember.

    Example:
        >>> serving = ReplicaPhase.SERVING
        >>> busy = ReplicaLoad(name="a", phase=serving, running=8, waiting=24, max_num_seqs=8, turns_per_s=1.0)
        >>> decision, memory = decide(Fleet(replicas=(busy,)), Memory(), settings=ScalingSettings(), now_s=0.0)
        >>> decision.start, decision.drain
        (2, ())
        >>> quiet = msgspec.structs.replace(busy, waiting=0)
        >>> decide(Fleet(replicas=(quiet,)), Memory(), settings=ScalingSettings(), now_s=0.0)[0].start
        0
    """
    need = need_of(fleet, settings=settings)
    memory = _remember(memory, need=need, window_s=settings.in_window_s, now_s=now_s)
    lost = _overdue(fleet, settings=settings, now_s=now_s)
    here = [r for r in fleet.of(ReplicaPhase.SERVING, ReplicaPhase.STARTING) if r not in lost]
    room = settings.max_replicas - len(fleet.replicas)
    decision = (
        _within_bounds(here, settings=settings, room=room)
        or _more(fleet, memory, here=here, need=need, settings=settings, room=room, now_s=now_s)
        or _fewer(fleet, memory, here=here, settings=settings, now_s=now_s, need=need)
        or Decision(target=len(here), reason=f"stay at {len(here)}: {need.why}")
    )
    by_load = decision.start > 0 and len(here) >= settings.min_replicas
    if decision.start and (wait_s := _backoff_s(fleet, settings=settings, now_s=now_s)) > 0:
        decision = Decision(
            target=len(here),
            reason=f"stay at {len(here)}: {fleet.failed_starts} replicas in a row ended before they served, the next "
            f"start is in {wait_s:.0f} s. Look at their logs",
        )
    if lost:
        names = ", ".join(f"{r.name} ({r.phase} for {now_s - r.since_s:.0f} s)" for r in lost)
        decision = msgspec.structs.replace(
            decision, drain=(*(r.name for r in lost), *decision.drain), reason=f"give up {names}; {decision.reason}"
        )
    if decision.start or decision.drain:
        memory = msgspec.structs.replace(
            memory, changed_at_s=now_s, out_at_s=now_s if decision.start and by_load else memory.out_at_s
        )
    return decision, memory


def need_of(fleet: Fleet, *, settings: ScalingSettings) -> Need:
    """Return how many replicas the load asks for.

    Example:
        >>> replica = ReplicaLoad(
        ...     name="a", phase=ReplicaPhase.SERVING, running=8, waiting=24, max_num_seqs=8, turns_per_s=1.0
        ... )
        >>> need = need_of(Fleet(replicas=(replica,)), settings=ScalingSettings())
        >>> need.at_least  # 24 wait; at 1 turn/s each, 24 / (1 * 10 s) replicas work them off in time
        3
        >>> need.comfortable  # 32 / (8 * 0.6)
        7
    """
    serving = fleet.of(ReplicaPhase.SERVING)
    running, waiting = sum(r.running for r in serving), sum(r.waiting for r in serving) + fleet.router_queue
    if not serving:
        least = 1 if waiting else 0
        return Need(at_least=least, comfortable=least, why=f"no replica serves and {waiting} sequences wait")
    seats = max(1.0, sum(r.max_num_seqs for r in serving) / len(serving))
    kv, used = sum(r.kv_capacity_tokens for r in serving) / len(serving), sum(r.kv_used_tokens for r in serving)
    # Those that wait will need as much KV as those that run have now.
    kv_of_one = used / running if running else 0.0
    all_of_it = max((running + waiting) / seats, kv_of_one * (running + waiting) / kv if kv else 0.0)
    rate = sum(r.turns_per_s for r in serving)
    wait_s = waiting / rate if rate else math.inf if waiting else 0.0
    in_time = all_of_it if math.isinf(wait_s) else wait_s * len(serving) / settings.target_wait_s
    kv_share = used / (kv * len(serving)) if kv else 0.0
    too_few = max(kv_share * len(serving) / settings.high_usage, min(in_time, all_of_it / settings.high_usage))
    # What is being finished on replicas that leave comes back as the next turns.
    leaving = sum(r.running + r.waiting for r in fleet.of(ReplicaPhase.DRAINING))
    returning = max(leaving / seats, kv_of_one * leaving / kv if kv else 0.0)
    expected = "an unknown time" if math.isinf(wait_s) else f"{wait_s:.1f} s"
    return Need(
        at_least=_whole(too_few),
        comfortable=max(_whole(too_few), _whole((all_of_it + returning) / settings.low_usage)),
        why=f"{len(serving)} serve {running} sequences on {seats * len(serving):.0f} seats with {kv_share:.0%} of the "
        f"KV, {waiting} wait for {expected}",
    )


def _whole(replicas: float) -> int:
    return math.ceil(replicas - _EPSILON)


def _remember(memory: Memory, *, need: Need, window_s: float, now_s: float) -> Memory:
    kept = [(at, number) for at, number in memory.needs if at > now_s - window_s and number > need.comfortable]
    began_s = now_s if memory.began_s is None else memory.began_s
    return msgspec.structs.replace(memory, began_s=began_s, needs=(*kept, (now_s, need.comfortable)))


def _overdue(fleet: Fleet, *, settings: ScalingSettings, now_s: float) -> list[ReplicaLoad]:
    limits = {ReplicaPhase.UNFIT: settings.unfit_limit_s, ReplicaPhase.STARTING: settings.start_limit_s}
    return [r for r in fleet.replicas if r.phase in limits and now_s - r.since_s > limits[r.phase]]


def _within_bounds(here: Sequence[ReplicaLoad], *, settings: ScalingSettings, room: int) -> Decision | None:
    count = len(here)
    if count < settings.min_replicas:
        start = min(settings.min_replicas - count, max(0, room))
        waits = "" if start else "; none is started before one of the others has left"
        return Decision(
            target=count + start,
            start=start,
            reason=f"start {start}: {count} are there, and the minimum is {settings.min_replicas}{waits}",
        )
    if count > settings.max_replicas:
        leaving = _least_missed(here)[: count - settings.max_replicas]
        return Decision(
            target=settings.max_replicas,
            drain=tuple(r.name for r in leaving),
            reason=f"drain {len(leaving)}: {count} are there, and the maximum is {settings.max_replicas}",
        )
    return None


def _more(
    fleet: Fleet,
    memory: Memory,
    *,
    here: Sequence[ReplicaLoad],
    need: Need,
    settings: ScalingSettings,
    room: int,
    now_s: float,
) -> Decision | None:
    count, wanted = len(here), min(need.at_least, settings.max_replicas)
    if wanted <= count:
        return None
    rest_s = memory.out_at_s + settings.out_rest_s - now_s
    start = min(wanted - count, settings.max_step_out, max(0, room))
    if rest_s > 0 or not start:
        why = (
            f"the last start was {settings.out_rest_s - rest_s:.0f} s ago" if rest_s > 0 else "others must leave first"
        )
        return Decision(target=count, reason=f"stay at {count} though {need.at_least} are needed: {why}; {need.why}")
    return Decision(
        target=count + start,
        start=start,
        reason=f"start {start}: {need.at_least} are needed and {count} are there or starting; {need.why}",
    )


def _fewer(
    fleet: Fleet, memory: Memory, *, here: Sequence[ReplicaLoad], need: Need, settings: ScalingSettings, now_s: float
) -> Decision | None:
    count = len(here)
    needed = max(settings.min_replicas, *(number for _, number in memory.needs))
    since_s = max(memory.changed_at_s + settings.in_rest_s, (memory.began_s or 0.0) + settings.in_window_s)
    hidden = fleet.blind or fleet.of(ReplicaPhase.STARTING, ReplicaPhase.UNFIT)
    if needed >= count or now_s < since_s or hidden:
        return None
    leaving = _least_missed(here)[: min(count - needed, settings.max_step_in)]
    names = ", ".join(r.name for r in leaving)
    return Decision(
        target=count - len(leaving),
        drain=tuple(r.name for r in leaving),
        reason=f"drain {names}: {needed} were enough for the last {settings.in_window_s:.0f} s; {need.why}",
    )


def _least_missed(replicas: Sequence[ReplicaLoad]) -> list[ReplicaLoad]:
    """Return the replicas in the order in which they leave: starting ones, then those with the least to finish."""

    def cost(replica: ReplicaLoad) -> tuple[bool, int, int, float, str]:
        serves = replica.phase is ReplicaPhase.SERVING
        return serves, replica.running + replica.waiting, replica.kv_used_tokens, -replica.since_s, replica.name

    return sorted(replicas, key=cost)


def _backoff_s(fleet: Fleet, *, settings: ScalingSettings, now_s: float) -> float:
    if not fleet.failed_starts:
        return 0.0
    delay_s = min(MAX_BACKOFF_S, settings.backoff_s * 2.0 ** min(fleet.failed_starts - 1, 30))
    return fleet.failed_at_s + delay_s - now_s
