"""The replicas as the router sees them: standing, version, load. Pure; the time comes with each call."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from math import ceil

from rollmill.config.router import RouterSettings
from rollmill.generator.router.breaker import Breaker
from rollmill.generator.router.records import Ask, Report, Seen

KV_WEIGHT = 0.5
"""Of the KV in use beside the places in use: KV that only caches prefixes is no load."""
LOADING_WEIGHT = 0.25
"""Of a replica that is about to pause for new weights: others are better while they have room."""
ADAPTER_WEIGHT = 0.25
"""Of a replica that would have to load a request's adapter first: one that has it is better while it has room."""
_STANDING = {
    "starting": Seen.JOINING,
    "serving": Seen.SERVING,
    "dirty": Seen.DIRTY,
    "draining": Seen.DRAINING,
    "dead": Seen.DEAD,
}


class Member:
    """One replica.

    Attributes:
        adapters: name -> version, 0 for one that it can load; as it said last.
        heard: whether it has ever said what it serves.
        extra: load beside the places in use: KV, and weights that it is about to load.
        jobs: it serves these; all if empty.
        places: samples it gets at once.
        in_flight: samples that this router has there.
        others: samples there that came past this router, at the last report.
        loading: the policy version that it is loading now.
        target: the version it must load before it serves.
    """

    __slots__ = (
        "adapters",
        "age_s",
        "breaker",
        "digest",
        "extra",
        "heard",
        "in_flight",
        "jobs",
        "kv_use",
        "loading",
        "max_model_len",
        "name",
        "others",
        "places",
        "policy_version",
        "reason",
        "requests",
        "seen",
        "slots",
        "target",
    )

    def __init__(self, name: str, *, jobs: tuple[str, ...], breaker: Breaker) -> None:
        self.name = name
        self.jobs = jobs
        self.breaker = breaker
        self.seen = Seen.UNKNOWN
        self.reason = "has not answered yet"
        self.policy_version = 0
        self.digest = ""
        self.slots = self.places = 1
        self.max_model_len = 0
        self.in_flight = self.others = self.requests = 0
        self.kv_use = self.extra = 0.0
        self.age_s = 0.0
        self.loading: int | None = None
        self.target: int | None = None
        self.adapters: Mapping[str, int] = {}
        self.heard = False

    def has(self, ask: Ask) -> bool:
        """Return whether it serves, or can load, what a request asks for in a version that is new enough."""
        if not ask.adapter:
            return self.policy_version >= ask.min_policy_version
        version = self.adapters.get(ask.adapter)
        # Which version it would load is not known here; it refuses the request if that is too old, which goes on then.
        return version is not None and (version == 0 or version >= ask.min_policy_version)

    def load(self) -> float:
        """Return how busy it is; 1.0 is full."""
        return (self.in_flight + self.others) / self.places + self.extra

    def note_extra(self) -> None:
        """Weigh its KV and its load of weights anew."""
        self.extra = KV_WEIGHT * self.kv_use + (0.0 if self.loading is None else LOADING_WEIGHT)

    def has_room(self, samples: int) -> bool:
        """Return whether it gets these samples now; more than it has places for only if it is idle."""
        return self.in_flight == 0 or self.in_flight + self.others + samples <= self.places


class ReplicaTable:
    """All replicas of the fleet.

    Attributes:
        adapters: names that any of them knows.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._members: dict[str, Member] = {}
        self._targets: dict[tuple[str, ...], int] = {}
        self._serving: list[Member] = []
        self.adapters: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def __len__(self) -> int:
        return len(self._members)

    # -- joins, leaves, reports

    def join(self, name: str, *, jobs: tuple[str, ...] = ()) -> None:
        """Take a replica on the list; it serves nothing before it has answered."""
        member = self._members.get(name)
        if member is not None and member.seen is not Seen.LEAVING:
            return
        in_flight = 0 if member is None else member.in_flight
        settings = self._settings
        breaker = Breaker(failures=settings.breaker_failures, open_s=settings.breaker_open_s)
        self._members[name] = member = Member(name, jobs=tuple(sorted(jobs)), breaker=breaker)
        member.in_flight = in_flight
        self._see(member, member.seen, member.reason)

    def leave(self, name: str) -> None:
        """Give a replica no more requests; it is forgotten when its last one has ended."""
        member = self._members[name]
        self._see(member, Seen.LEAVING, "it was taken off the list")
        self._forget_idle(member)

    def release(self, name: str, samples: int) -> Member | None:
        """Samples at a replica have ended; return it if it is still on the list."""
        member = self._members.get(name)
        if member is not None:
            member.in_flight -= samples
            self._forget_idle(member)
        return member

    def _forget_idle(self, member: Member) -> None:
        if member.seen is Seen.LEAVING and member.in_flight <= 0:
            del self._members[member.name]
            self._note_members()

    def silent(self, name: str, *, reason: str, dead: bool = False) -> None:
        """A replica did not answer, or broke a request; it serves again once it answers."""
        member = self._members.get(name)
        if member is not None and member.seen is not Seen.LEAVING:
            self._see(member, Seen.DEAD if dead else Seen.UNKNOWN, reason)

    def report(self, name: str, report: Report, *, in_flight_before: int = 0) -> bool:
        """Take note of what a replica says; return whether its engine is another one than before.

        Args:
            in_flight_before: samples that the router had there when it asked; those that the replica has beyond them
                came past the router.
        """
        member = self._members[name]
        if member.seen is Seen.LEAVING:
            return False
        restarted = report.age_s < member.age_s
        joins = restarted or member.seen not in (Seen.SERVING, Seen.DIRTY)
        member.policy_version, member.digest = report.policy_version, report.digest
        member.slots, member.max_model_len = max(report.slots, 1), report.max_model_len
        member.places = ceil(member.slots * self._settings.overcommit)
        member.others = max(0, report.running + report.waiting - max(in_flight_before, member.in_flight))
        member.kv_use, member.age_s = report.kv_use, report.age_s
        member.adapters, member.heard = report.adapters, True
        member.note_extra()
        seen, reason = _STANDING.get(report.state, Seen.UNKNOWN), report.reason
        if seen is Seen.SERVING:
            seen, reason = self._fit(member, joins=joins)
        self._see(member, seen, reason)
        return restarted

    def loads(self, name: str, policy_version: int | None) -> None:
        """A replica loads weights now, or has stopped to."""
        member = self._members.get(name)
        if member is not None:
            member.loading = policy_version
            member.note_extra()

    def _see(self, member: Member, seen: Seen, reason: str) -> None:
        member.seen, member.reason = seen, reason
        self._note_members()

    def _note_members(self) -> None:
        self._serving = [one for one in self._members.values() if one.seen is Seen.SERVING]
        self.adapters = frozenset(name for one in self._members.values() for name in one.adapters)

    def _fit(self, member: Member, *, joins: bool) -> tuple[Seen, str]:
        """Return what a replica that says it serves is fit for in this fleet."""
        version = self.fleet_version(member.jobs)
        if joins and member.policy_version < version:
            member.target = version
            return Seen.JOINING, f"serves policy version {member.policy_version}; it joins once it serves {version}"
        if member.target is not None and member.policy_version >= member.target:
            member.target = None
        if member.target is not None:
            return member.seen, member.reason
        for other in self._members.values():
            if (
                other is not member
                and other.seen is Seen.SERVING
                and (other.jobs, other.policy_version) == (member.jobs, member.policy_version)
                and "" != other.digest != member.digest != ""
            ):
                return Seen.DIRTY, (
                    f"says policy version {member.policy_version} has digest {member.digest[:12]}, while {other.name} "
                    f"serves it with {other.digest[:12]}"
                )
        return Seen.SERVING, ""

    # -- versions

    def fleet_version(self, jobs: tuple[str, ...]) -> int:
        """Return the version that a replica of these jobs must serve to join."""
        served = (m.policy_version for m in self._members.values() if m.seen is Seen.SERVING and m.jobs == jobs)
        return max(self._targets.get(jobs, 0), max(served, default=0))

    def set_target(self, jobs: tuple[str, ...], version: int) -> None:
        """From now on replicas of these jobs join with this version or a newer one."""
        self._targets[jobs] = max(version, self._targets.get(jobs, 0))

    def of_job(self, job: str) -> list[Member]:
        """Return the replicas that serve a job, in order of their names; all of them for an empty name."""
        found = [m for m in self._members.values() if not job or not m.jobs or job in m.jobs]
        return sorted(found, key=lambda member: member.name)

    # -- choice

    def is_fit(self, member: Member, ask: Ask, *, excluded: Collection[str], now_s: float) -> bool:
        """Return whether a replica may get a request, full or not."""
        return (
            member.seen is Seen.SERVING
            and member.has(ask)
            and (not member.jobs or ask.job in member.jobs)
            and (member.breaker.closed or member.breaker.allows(now_s=now_s))
            and member.name not in excluded
        )

    def eligible(self, ask: Ask, *, excluded: Collection[str], now_s: float) -> list[Member]:
        """Return the replicas that may get a request, full or not."""
        return [one for one in self._serving if self.is_fit(one, ask, excluded=excluded, now_s=now_s)]

    def pick(
        self, ask: Ask, *, excluded: Collection[str], reserved: Collection[str], now_s: float
    ) -> tuple[Member | None, Member | None]:
        """Return the least loaded replica that has room for a request, and the least loaded one with room or without.

        Args:
            excluded: replicas that it must not go to.
            reserved: replicas whose room is promised to others.
        """
        job, version, samples, adapter = ask.job, ask.min_policy_version, ask.siblings, ask.adapter
        serving = self._serving
        if adapter:
            serving, version = [one for one in serving if one.has(ask)], 0
        best: Member | None = None
        least: Member | None = None
        best_load = least_load = 0.0
        # The one loop that every request goes through, hence without calls.
        for one in serving:
            if one.policy_version < version or (one.jobs and job not in one.jobs) or one.name in excluded:
                continue
            if not one.breaker.closed and not one.breaker.allows(now_s=now_s):
                continue
            used = one.in_flight + one.others
            load = used / one.places + one.extra
            if adapter and not one.adapters[adapter]:
                load += ADAPTER_WEIGHT
            if least is None or load < least_load:
                least, least_load = one, load
            if (one.in_flight and used + samples > one.places) or one.name in reserved:
                continue
            if (
                best is None
                or load < best_load
                or (load == best_load and (one.requests, one.name) < (best.requests, best.name))
            ):
                best, best_load = one, load
        return best, least

    def unknown_adapter(self, ask: Ask) -> str | None:
        """Return why no replica will ever serve a request's adapter, as far as is known; `None` if one may.

        A replica that has not answered yet may know it.
        """
        members = [one for one in self.of_job(ask.job) if one.seen is not Seen.LEAVING]
        if not ask.adapter or not members or any(not one.heard or ask.adapter in one.adapters for one in members):
            return None
        return (
            f"no replica{f' of job {ask.job}' if ask.job else ''} knows adapter {ask.adapter[:256]!r}: "
            f"{self.who_has(ask)}. Start one with --adapter {ask.adapter[:256]}=DIR, or ask for one of those"
        )

    def who_has(self, ask: Ask) -> str:
        """Return which replica has a request's adapter, and in which version, or else which ones it has."""
        return "; ".join(f"{one.name} {_has_text(one, ask.adapter)}" for one in self.of_job(ask.job))

    def has_room(self) -> bool:
        """Return whether any replica could take one more sample."""
        return any(not one.in_flight or one.in_flight + one.others < one.places for one in self._serving)

    def summary(self) -> str:
        """Return who is in which state, for a refusal and for people."""
        return (
            "; ".join(
                f"{member.name} {member.seen.value}"
                + (f" ({member.reason})" if member.reason else f" version {member.policy_version}")
                for member in sorted(self._members.values(), key=lambda one: one.name)
            )
            or "the list of replicas is empty"
        )


def _has_text(member: Member, adapter: str) -> str:
    version = member.adapters.get(adapter)
    if version is None:
        others = ", ".join(f"{name!r}" for name in member.adapters) or "none"
        return f"has {others}" if member.heard else "has not answered yet"
    has = f"has version {version}" if version else "can load it"
    return has if member.seen is Seen.SERVING else f"{has}, and is {member.seen.value}"
