"""Which replica gets a request, and when. Pure: events with their time in, instructions out.

    submit --> waiting --Send--> at a replica --ended--> answered, or retried elsewhere, or closed with an error
                  \\--Refuse (queue full, wave broken)

Every request is in one place: it waits, or it is at one replica (two with a hedge), until `close`. What is waiting goes
out as soon as a replica has room; `dispatch` is asked after everything that may have made some. Time limits are the
shell's: it calls `close` for whom it does not want to wait for any longer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rollmill.config.router import RouterSettings
from rollmill.errors import InvariantViolation, ModelError, NotServing, Overloaded, RequestIdInUse
from rollmill.generator.router.affinity import Homes, Key
from rollmill.generator.router.hedging import HedgeLaw
from rollmill.generator.router.queues import JobQueues, Ticket
from rollmill.generator.router.rate import AnswerRate
from rollmill.generator.router.records import Ask, Ended, Instruction, Refuse, Report, Seen, Send
from rollmill.generator.router.table import Member, ReplicaTable

_NOBODY: frozenset[str] = frozenset()


class RouterLaw:
    """Table, queues and sessions of one router.

    Args:
        settings: of the router.

    Attributes:
        table: the replicas.
        queues: what waits, by job.
        hedges: when a first token is late.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.table = ReplicaTable(settings)
        self.queues = JobQueues(settings)
        self.hedges = HedgeLaw(budget=settings.hedge_budget, percentile=settings.hedge_percentile)
        self.rate = AnswerRate()
        self._homes = Homes(limit=settings.max_sessions)
        self._tickets: dict[str, Ticket] = {}
        self._closed_to_new: str | None = None

    # -- requests

    def submit(self, ask: Ask, *, now_s: float) -> list[Instruction]:
        """Take a request: it is sent, refused, or waits."""
        if ask.request_id in self._tickets:
            why = f"request id {ask.request_id} is in use; ids must be unique while a request lives"
            return [Refuse(ask.request_id, RequestIdInUse(why))]
        if self._closed_to_new is not None:
            why = f"request {ask.request_id} refused: {self._closed_to_new}"
            return [Refuse(ask.request_id, NotServing(why))]
        if ask.adapter and (why := self.table.unknown_adapter(ask)) is not None:
            return [Refuse(ask.request_id, ModelError(f"request {ask.request_id} refused: {why}"))]
        job = self.queues.job(ask.job)
        ticket = Ticket(ask, job=job, arrived_s=now_s, excluded=_NOBODY)
        self.hedges.request()
        # Nobody waits, so nobody is overtaken.
        if self._is_pinned(ask) or (not self.queues.waiting and job.within_quota(ask.siblings)):
            member, short_of = self._choose(ticket, now_s=now_s, reserved=_NOBODY)
            if short_of == _BROKEN:
                return [self._broken_wave(ask)]
            if member is not None:
                self._tickets[ask.request_id] = ticket
                return [self._send(ticket, member)]
        full = self.queues.full(job, samples=ask.siblings)
        if full is not None:
            return [Refuse(ask.request_id, self._overloaded(ask, full, now_s=now_s))]
        self._tickets[ask.request_id] = ticket
        self.queues.put(ticket)
        return self.dispatch(now_s=now_s)

    def resubmit(self, ask: Ask, *, excluded: Iterable[str], arrived_s: float, now_s: float) -> list[Instruction]:
        """Take a request, or what is left of one, that a replica has lost: it waits before all others of its job."""
        if (old := self._tickets.get(ask.request_id)) is not None and (old.on or old.waiting):
            raise InvariantViolation(f"request {ask.request_id} is sent again while it lives")
        ticket = Ticket(ask, job=self.queues.job(ask.job), arrived_s=arrived_s, excluded=frozenset(excluded))
        self._tickets[ask.request_id] = ticket
        self.queues.put(ticket, first=True)
        return self.dispatch(now_s=now_s)

    def ended(self, request_id: str, replica: str, how: Ended, *, now_s: float, why: str = "") -> list[Instruction]:
        """An attempt has ended; its places are free."""
        ticket = self._tickets[request_id]
        ticket.on.remove(replica)
        samples = ticket.ask.siblings
        ticket.job.in_flight -= samples
        member = self.table.release(replica, samples)
        if how is Ended.ANSWERED:
            self.rate.answered(samples, now_s=now_s)
        else:
            ticket.excluded.add(replica)
        if member is not None:
            self._judge(member, how, now_s=now_s, why=why)
        return self.dispatch(now_s=now_s)

    def _judge(self, member: Member, how: Ended, *, now_s: float, why: str) -> None:
        match how:
            case Ended.ANSWERED | Ended.INVALID:
                member.breaker.succeeded()
            case Ended.FAILED:
                member.breaker.failed(now_s=now_s)
            case Ended.LOST:
                member.breaker.undecided()
                self.table.silent(member.name, reason=why or "it broke a request", dead=True)
            case Ended.REFUSED:
                member.breaker.undecided()
                self.table.silent(member.name, reason=why or "it refused a request")
            case Ended.DECLINED | Ended.DROPPED:
                member.breaker.undecided()

    def close(self, request_id: str, *, now_s: float) -> list[Instruction]:
        """Forget a request, wherever it is; attempts that run still are dropped."""
        ticket = self._tickets.pop(request_id, None)
        if ticket is None:
            return []
        if ticket.waiting:
            self.queues.remove(ticket)
        for replica in ticket.on:
            ticket.job.in_flight -= ticket.ask.siblings
            member = self.table.release(replica, ticket.ask.siblings)
            if member is not None:
                member.breaker.undecided()
        return self.dispatch(now_s=now_s)

    def hedge(self, request_id: str, *, now_s: float) -> Send | None:
        """Send a request whose first token is late to a second replica, if that is within the budget."""
        ticket = self._tickets.get(request_id)
        if ticket is None or len(ticket.on) != 1 or ticket.ask.wave_id or self.queues.waiting:
            return None
        if not ticket.job.within_quota(ticket.ask.siblings):
            return None
        others = self.table.eligible(ticket.ask, excluded={*ticket.excluded, *ticket.on}, now_s=now_s)
        free = [member for member in others if member.has_room(ticket.ask.siblings)]
        if not free or not self.hedges.take():
            return None
        return self._send(ticket, min(free, key=_by_load))

    def drain(self, reason: str) -> None:
        """Take no new requests."""
        self._closed_to_new = reason

    def why_waiting(self, request_id: str) -> str:
        """Return what a request waits for, with the numbers."""
        ticket = self._tickets[request_id]
        ask, job = ticket.ask, ticket.job
        if not job.within_quota(ask.siblings):
            return (
                f"its job has {job.in_flight} samples in flight, and its max_in_flight is {job.settings.max_in_flight}"
            )
        serving = self.table.eligible(ask, excluded=_NOBODY, now_s=float("inf"))
        if not serving and ask.adapter:
            wanted = f" in policy version {ask.min_policy_version} or newer" if ask.min_policy_version else ""
            return f"no replica serves adapter {ask.adapter!r}{wanted}: {self.table.who_has(ask)}"
        if not serving:
            newest = max((m.policy_version for m in self.table if m.seen is Seen.SERVING), default=None)
            wanted = f" policy version {ask.min_policy_version} or newer" if ask.min_policy_version else ""
            have = "none serves" if newest is None else f"the newest that serves is {newest}"
            return f"no replica serves{wanted}{f' job {ask.job}' if ask.job else ''} ({have}): {self.table.summary()}"
        taken = sum(member.in_flight + member.others for member in serving)
        places = sum(member.places for member in serving)
        return f"{taken} of {places} places of {len(serving)} replicas are taken, {self.queues.waiting} samples wait"

    def serves(self, request_id: str, *, now_s: float) -> bool:
        """Return whether some replica could take this request if it had room."""
        ask = self._tickets[request_id].ask
        return bool(self.table.eligible(ask, excluded=_NOBODY, now_s=now_s))

    def where(self, request_id: str) -> list[str]:
        """Return the replicas that have a request now."""
        ticket = self._tickets.get(request_id)
        return [] if ticket is None else list(ticket.on)

    def retry_after_s(self, *, now_s: float) -> float:
        """Return when a place in the queue is likely to be free."""
        return self.rate.retry_after_s(max(self.queues.waiting, 1), now_s=now_s)

    # -- replicas

    def report(self, name: str, report: Report, *, now_s: float, in_flight_before: int = 0) -> list[Instruction]:
        """Hear a replica's status."""
        if self.table.report(name, report, in_flight_before=in_flight_before):
            self._homes.forget(name)
        return self.dispatch(now_s=now_s)

    def leave(self, name: str, *, now_s: float) -> list[Instruction]:
        """Take a replica off the list."""
        self.table.leave(name)
        self._homes.forget(name)
        return self.dispatch(now_s=now_s)

    # -- dispatch

    def dispatch(self, *, now_s: float) -> list[Instruction]:
        """Send what can be sent.

        A request that is next but finds no room reserves the replica that is nearest to having some, so that smaller
        ones behind it cannot take each place as it becomes free.
        """
        found: list[Instruction] = []
        queues = self.queues
        while queues.waiting and (queues.waves or self.table.has_room()):
            step = self._next(now_s=now_s)
            if step is None:
                break
            found.append(step)
        return found

    def _next(self, *, now_s: float) -> Instruction | None:
        reserved: set[str] = set()
        for job in self.queues.in_order(now_s=now_s):
            for ticket in job.heads():
                if not (job.within_quota(ticket.ask.siblings) or self._is_pinned(ticket.ask)):
                    continue
                member, short_of = self._choose(ticket, now_s=now_s, reserved=reserved)
                if member is not None:
                    self.queues.remove(ticket)
                    return self._send(ticket, member)
                if short_of == _BROKEN:
                    self.queues.remove(ticket)
                    del self._tickets[ticket.ask.request_id]
                    return self._broken_wave(ticket.ask)
                if short_of is not None:
                    reserved.add(short_of)
        return None

    def _choose(self, ticket: Ticket, *, now_s: float, reserved: Collection[str]) -> tuple[Member | None, str | None]:
        """Return the replica for a request; or else the one whose room it waits for, if there is any that fits."""
        ask, table = ticket.ask, self.table
        excluded = ticket.excluded
        best, least = table.pick(ask, excluded=excluded, reserved=reserved, now_s=now_s)
        if least is None and excluded and not ask.wave_id:
            # All that are left have failed it before: better one of them again than none.
            excluded = _NOBODY
            best, least = table.pick(ask, excluded=excluded, reserved=reserved, now_s=now_s)
        if ask.wave_id and (name := self._homes.get(("wave", ask.job, ask.wave_id))) is not None:
            home = self._fit_home(name, ask, excluded=excluded, now_s=now_s)
            return (home, None) if home is not None else (None, _BROKEN)
        if least is None:
            return None, None
        home = None
        if ask.session_id or ask.group_key:
            home = self._home(ask, excluded=excluded, now_s=now_s)
        if home is not None:
            if home.name in reserved:
                return None, None
            if home.has_room(ask.siblings):
                return home, None
            # It is full, but to begin elsewhere costs its KV: that pays only if elsewhere is much emptier.
            if best is not None and home.load() - best.load() <= self.settings.session_slack:
                return home, None
        return (best, None) if best is not None else (None, least.name)

    def _home(self, ask: Ask, *, excluded: Collection[str], now_s: float) -> Member | None:
        for key in _affinity_keys(ask):
            name = self._homes.get(key)
            if name is not None:
                return self._fit_home(name, ask, excluded=excluded, now_s=now_s)
        return None

    def _fit_home(self, name: str, ask: Ask, *, excluded: Collection[str], now_s: float) -> Member | None:
        if name not in self.table:
            return None
        home = self.table[name]
        return home if self.table.is_fit(home, ask, excluded=excluded, now_s=now_s) else None

    def _send(self, ticket: Ticket, member: Member) -> Send:
        ask = ticket.ask
        member.in_flight += ask.siblings
        member.requests += 1
        member.breaker.sent()
        self.queues.charge(ticket.job, ask.siblings)
        ticket.on.append(member.name)
        if len(ticket.on) == 1:
            for key in _affinity_keys(ask):
                self._homes.put(key, member.name)
        return Send(ask.request_id, member.name)

    def _is_pinned(self, ask: Ask) -> bool:
        """Return whether others of its wave are at a replica: it must follow them, or they wait for ever."""
        return bool(ask.wave_id) and self._homes.get(("wave", ask.job, ask.wave_id)) is not None

    def _broken_wave(self, ask: Ask) -> Refuse:
        why = (
            f"request {ask.request_id} refused: the replica that has the others of wave {ask.wave_id} is not there any "
            f"more, and a wave runs on one. Start the wave again: {self.table.summary()}"
        )
        return Refuse(ask.request_id, NotServing(why))

    def _overloaded(self, ask: Ask, why: str, *, now_s: float) -> Overloaded:
        wait_s = self.retry_after_s(now_s=now_s)
        return Overloaded(
            f"request {ask.request_id} refused: {why}. Ask again in {wait_s:.1f} s, or add a replica",
            retry_after_s=wait_s,
        )

    # -- books

    def validate(self) -> None:
        """Check the books.

        Raises:
            InvariantViolation: if counts disagree with the requests.
        """
        tickets = list(self._tickets.values())
        for member in self.table:
            expected = sum(t.ask.siblings for t in tickets for name in t.on if name == member.name)
            if member.in_flight != expected:
                raise InvariantViolation(
                    f"{member.name} counts {member.in_flight} samples in flight, it has {expected}"
                )
        for job in self.queues:
            flying = sum(t.ask.siblings * len(t.on) for t in tickets if t.job is job)
            waiting = sum(t.ask.siblings for t in tickets if t.job is job and t.waiting)
            if (job.in_flight, job.waiting) != (flying, waiting):
                raise InvariantViolation(
                    f"job {job.name!r} counts {job.in_flight} in flight and {job.waiting} waiting, it has {flying} and "
                    f"{waiting}"
                )
        if any(ticket.waiting and ticket.on for ticket in tickets):
            raise InvariantViolation("a request waits and runs at once")


_BROKEN = "\x00wave"


def _by_load(member: Member) -> tuple[float, int, str]:
    return member.load(), member.requests, member.name


def _affinity_keys(ask: Ask) -> list[Key]:
    keys: list[Key] = []
    if ask.wave_id:
        keys.append(("wave", ask.job, ask.wave_id))
    if ask.session_id:
        keys.append(("session", ask.job, ask.session_id))
    if ask.group_key:
        keys.append(("group", ask.job, ask.group_key))
    return keys
