"""Admission and pools as one law: events with their time in, orders out. Pure.

    ask --> given a ready one                                     accepted --> suspended <-> running
        \\--> waits --> its start is ordered --> started, given --^                 \\--> ended --> gone
                 \\--> refused             \\--> failed: waits again in its place, or refused

Every sandbox is in one place of the books from the order of its start until nothing of it is left. What waits goes on
as soon as gates and budgets let it; idle sandboxes make room for what waits, and nothing is filled while somebody waits
for a budget or a gate. Deadlines are the shell's: it withdraws whoever does not wait any longer.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable

from rollmill.errors import (
    ConfigError,
    InvariantViolation,
    SandboxError,
    SandboxIdInUse,
    SandboxNotAdmitted,
)
from rollmill.sandboxes.admission.books import Books, Claim
from rollmill.sandboxes.admission.gates import Gates
from rollmill.sandboxes.admission.pressure import PressureVerdict
from rollmill.sandboxes.admission.queueing import Ask, AskQueue
from rollmill.sandboxes.admission.records import (
    Give,
    How,
    Kind,
    Needs,
    Order,
    Place,
    Prepare,
    Refuse,
    Remove,
    Start,
    Waiting,
    needs_of,
)
from rollmill.sandboxes.admission.settings import PoolSettings
from rollmill.sandboxes.admission.targets import eviction_order
from rollmill.sandboxes.admission.templates import Template, Templates
from rollmill.sandboxes.admission.words import Words
from rollmill.sandboxes.records import SandboxSpec

_LONGEST_ID = 64
_AGAIN_S = 1.0
_ROOM = (Waiting.RUNNING, Waiting.MEMORY, Waiting.CPUS, Waiting.DISK, Waiting.INODES)


class AdmissionLaw:
    """Queue, gates, budgets and templates of one pool.

    Args:
        settings: of the pool.
        prefix: of the ids it chooses; no other pool may use it.
        cores: of this machine, the first cap of starts.
        pooling: whether leases can be renewed; without, an idle sandbox could not be handed out.

    Attributes:
        counters: totals by name, for statistics.
        refused: callers that got nothing, by what they waited for.
        failures: starts that gave nothing, by `How`.
    """

    def __init__(self, settings: PoolSettings, *, prefix: str, cores: int, pooling: bool = True) -> None:
        self.settings = settings
        self.books = Books(settings.admission)
        self.gates = Gates(settings.admission, cores=cores)
        self.templates = Templates(settings)
        self.queue = AskQueue()
        self.words = Words(settings.admission, books=self.books, gates=self.gates)
        self.asks: dict[int, Ask] = {}
        self.counters: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.pooling = pooling
        self._prefix = prefix
        self._numbers = itertools.count()
        self._names = itertools.count()
        self._closed = False

    # -- callers -----------------------------------------------------------------------------------------------------

    def ask(
        self,
        spec: SandboxSpec,
        *,
        sandbox_id: str = "",
        poolable: bool = True,
        thaws: str = "",
        kind: Kind = Kind.START,
        now_s: float,
        expires_s: float,
    ) -> Ask:
        """Take somebody into the books, who must be submitted next.

        Raises:
            ConfigError: if it would not fit into the empty budgets.
            SandboxError: if the pool is closed.
            SandboxNotAdmitted: if too many wait.
        """
        if self._closed:
            raise SandboxError("this pool is closed; open another one")
        needs = self._fitting(spec)
        if sandbox_id in self.books.claims and not thaws:
            raise SandboxIdInUse(f"sandbox {sandbox_id} lives in this pool; an id names one sandbox, so choose another")
        if len(self.queue) >= self.settings.admission.max_waiting:
            self.refused[Waiting.TURN] += 1
            raise SandboxNotAdmitted(
                f"{len(self.queue)} callers wait, as many as admission.max_waiting. Ask for fewer at a time.",
                after_s=_AGAIN_S,
                waiting_for=Waiting.TURN,
                position=len(self.queue) + 1,
            )
        ask = Ask(
            next(self._numbers),
            kind=kind,
            spec=spec,
            needs=needs,
            sandbox_id=sandbox_id,
            poolable=poolable and self.pooling and not thaws,
            thaws=thaws,
            arrived_s=now_s,
            expires_s=expires_s,
        )
        self.asks[ask.number] = ask
        self.templates.of(spec).asking += 1
        return ask

    def submit(self, ask: Ask, *, now_s: float) -> list[Order]:
        """Serve somebody: at once from the pool, else in its turn."""
        template = self.templates.of(ask.spec)
        if ask.poolable and template.idle:
            _, claim = template.idle.popitem(last=False)
            return [self._give(claim, ask, now_s=now_s), *self._pump(now_s, template)]
        ask.waiting = Waiting.TURN
        self.queue.put(ask)
        return self._pump(now_s, template)

    def withdraw(self, number: int, *, now_s: float) -> list[Order]:
        """Forget somebody who is gone; what is being made for it is removed when it is there."""
        ask = self.asks.get(number)
        if ask is None:
            return []
        self.queue.remove(ask)
        return self._pump(now_s, self._forget(ask))

    def accepted(self, sandbox_id: str, *, now_s: float) -> list[Order]:
        """Note that its caller has it."""
        claim = self.books.claims[sandbox_id]
        template = self.templates.of(claim.spec)
        if claim.ask is not None and (ask := self.asks.get(claim.ask)) is not None:
            self._forget(ask)
        template.held += 1
        if claim.used:
            self.counters["resumed"] += 1
        else:
            self.counters["hits" if claim.poolable else "misses"] += 1
            template.rate.taken(now_s=now_s)
        claim.ask, claim.used = None, True
        return self._pump(now_s, template)

    def late(self, ask: Ask, *, now_s: float) -> SandboxNotAdmitted:
        """Return the error of somebody whose deadline came."""
        position, first = self.queue.position(ask), self.queue.nth(0)
        # Who waits for its turn waits for what the first one waits for.
        waiting = first.waiting if ask.waiting is Waiting.TURN and first is not None else ask.waiting
        self.refused[waiting] += 1
        return SandboxNotAdmitted(
            self.words.late(ask, waiting, position=position, now_s=now_s),
            after_s=_AGAIN_S,
            waiting_for=waiting,
            position=position,
        )

    # -- a sandbox's life --------------------------------------------------------------------------------------------

    def started(self, sandbox_id: str, *, now_s: float) -> list[Order]:
        """Note that a sandbox answers."""
        claim = self.books.claims[sandbox_id]
        template = self.templates.of(claim.spec)
        self.counters["started"] += 1
        self.gates.succeeded(claim, now_s=now_s)
        if claim.poolable:
            template.filling -= 1
            template.failures = 0
            return [*self._offer(claim, template, now_s=now_s), *self._pump(now_s, template)]
        ask = None if claim.ask is None else self.asks.get(claim.ask)
        if ask is None:
            return [self._stop(claim, idle=False), *self._pump(now_s, template)]
        self.books.move(claim, Place.RUNNING, now_s=now_s)
        give = Give(sandbox_id=sandbox_id, ask=ask.number, fresh=True, waited_s=claim.born_s - ask.arrived_s)
        return [give, *self._pump(now_s, template)]

    def failed(
        self, sandbox_id: str, how: How, *, error: Exception, after_s: float = 0.0, left: bool, now_s: float
    ) -> list[Order]:
        """Note a start that gave no sandbox.

        Args:
            sandbox_id: its id.
            how: whose fault it is.
            error: for the caller, if it is not tried again.
            after_s: how long the provider asked to wait.
            left: whether something of it may be there: then it keeps its place until `gone`.
            now_s: time.
        """
        claim = self.books.claims[sandbox_id]
        template = self.templates.of(claim.spec)
        self.failures[how] += 1
        self.gates.failed(claim, how, after_s=after_s, now_s=now_s)
        if left:
            self.books.stop(claim)
        else:
            self.books.remove(claim)
        if claim.poolable:
            template.filling -= 1
            if how is not How.CUT:
                template.backs_off(hold_s=self.settings.admission.hold_s, now_s=now_s)
            return self._pump(now_s, template)
        ask = None if claim.ask is None else self.asks.get(claim.ask)
        if ask is None or how is How.CUT:
            return self._pump(now_s, template)
        ask.tries += how is How.FAILED
        if how is How.NO_ROOM or (how is How.FAILED and ask.tries < self.settings.admission.tries):
            return self.submit(ask, now_s=now_s)
        self.refused[Waiting.CREATION] += 1
        return [Refuse(ask=ask.number, error=error), *self._pump(now_s, self._forget(ask))]

    def dead_at_hand_out(self, sandbox_id: str, *, now_s: float) -> list[Order]:
        """Note that a sandbox was dead when it was given; its caller is to be submitted again."""
        self.counters["dead_at_hand_out"] += 1
        return self.ended(sandbox_id, now_s=now_s)

    def dead_idle(self, sandbox_id: str, *, now_s: float) -> list[Order]:
        """Note that an idle sandbox was found dead."""
        claim = self.books.claims.get(sandbox_id)
        if claim is None or claim.place is not Place.POOLED or claim.stopping:
            return []  # it was given away, or is being killed, since it was looked at
        self.counters["dead_idle"] += 1
        return self.ended(sandbox_id, now_s=now_s)

    def untaken(self, sandbox_id: str, *, now_s: float) -> list[Order]:
        """Take back what was given to a caller that was gone before it looked.

        A suspended sandbox stays suspended, and in the running budget, where the next `resume` finds it.
        """
        claim = self.books.claims[sandbox_id]
        template = self.templates.of(claim.spec)
        claim.ask = None
        if claim.used:
            template.held += 1
            return self._pump(now_s, template)
        if not claim.poolable:
            return self.ended(sandbox_id, now_s=now_s)
        return [*self._offer(claim, template, now_s=now_s), *self._pump(now_s, template)]

    def ended(self, sandbox_id: str, *, now_s: float) -> list[Order]:
        """Note that a sandbox ended or is to end; it keeps its place until `gone`."""
        claim = self.books.claims.get(sandbox_id)
        if claim is None or claim.stopping:
            return []
        template = self.templates.of(claim.spec)
        template.idle.pop(sandbox_id, None)
        if claim.used and claim.place is Place.RUNNING and claim.ask is None:
            template.held -= 1
        return [self._stop(claim, idle=False), *self._pump(now_s, template)]

    def gone(self, sandbox_id: str, *, now_s: float) -> list[Order]:
        """Note that nothing of a sandbox is left."""
        claim = self.books.claims.get(sandbox_id)
        if claim is None:
            return []
        if not claim.stopping:
            raise InvariantViolation(f"sandbox {sandbox_id} is gone and nobody ordered its end")
        self.books.remove(claim)
        self.counters["unused"] += not claim.used
        return self._pump(now_s, self.templates.of(claim.spec))

    # -- suspension --------------------------------------------------------------------------------------------------

    def may_pause(self, sandbox_id: str) -> None:
        """Reserve a place among the suspended.

        Raises:
            SandboxNotAdmitted: if there is none.
        """
        count = self.books.count[Place.SUSPENDED] + self.books.pausing
        if count >= self.settings.admission.max_suspended:
            raise SandboxNotAdmitted(
                f"sandbox {sandbox_id} cannot be suspended: {count} are, as many as admission.max_suspended. Resume or "
                "release some, or raise it.",
                after_s=_AGAIN_S,
                waiting_for="suspended_budget",
            )
        self.books.pausing += 1

    def paused(self, sandbox_id: str, *, done: bool, now_s: float) -> list[Order]:
        """Give the reserved place back, and move the sandbox there if it was paused."""
        self.books.pausing -= 1
        claim = self.books.claims.get(sandbox_id)
        if not done or claim is None or claim.stopping or claim.place is not Place.RUNNING:
            return []
        self.books.move(claim, Place.SUSPENDED, now_s=now_s)
        template = self.templates.of(claim.spec)
        template.held -= 1
        return self._pump(now_s, template)

    # -- from outside ------------------------------------------------------------------------------------------------

    def demand(self, spec: SandboxSpec, count: int, *, now_s: float) -> list[Order]:
        """Set how many sandboxes of a template are wanted in all.

        Raises:
            ConfigError: if the count is below 0, or one would not fit into the empty budgets.
        """
        if count < 0:
            raise ConfigError(f"a demand of {count} sandboxes is none; give how many are wanted in all, 0 at the end")
        self._fitting(spec)
        template = self.templates.of(spec)
        template.demand = count
        orders: list[Order] = []
        if count and self.pooling and template.prepared is False:
            template.prepared = None
            orders.append(Prepare(spec=spec))
        return [*orders, *self._pump(now_s, template)]

    def prepared(self, spec: SandboxSpec, *, done: bool, now_s: float) -> list[Order]:
        """Note that a template's image is ready, or that it could not be made ready."""
        template = self.templates.known(spec)
        if template is None:
            return []
        template.prepared = done
        if not done:
            template.backs_off(hold_s=self.settings.admission.hold_s, now_s=now_s)
        return self._pump(now_s, template)

    def press(self, verdict: PressureVerdict, *, now_s: float) -> list[Order]:
        """Take a new verdict on the node's pressure."""
        self.gates.verdict = verdict
        return self._pump(now_s, *self.templates)

    def stop(self, reason: str, *, now_s: float) -> list[Order]:
        """Start and resume nothing; what is idle is given still. An empty reason lets all go on."""
        self.gates.stopped = reason
        return self._pump(now_s, *self.templates)

    def evict(self, count: int, *, now_s: float) -> list[Order]:
        """Kill idle sandboxes, by the order of eviction; those that are missing then start again in time."""
        doomed = eviction_order(self.templates.evictable())[:count]
        return [self._evict(self.books.claims[one]) for one in doomed]

    def tick(self, *, now_s: float) -> list[Order]:
        """Do what time alone asks for: replace old idle sandboxes, follow falling rates, try again what was put off."""
        orders: list[Order] = []
        for template in list(self.templates):
            while template.idle and now_s - next(iter(template.idle.values())).born_s > self.settings.max_age_s:
                _, claim = template.idle.popitem(last=False)
                self.counters["aged"] += 1
                orders.append(self._stop(claim, idle=True))
            if template.prepared is False and template.demand and self.pooling and now_s >= template.not_before_s:
                template.prepared = None
                orders.append(Prepare(spec=template.spec))
        return [*orders, *self._pump(now_s, *self.templates)]

    def wakes_s(self, *, now_s: float) -> float | None:
        """Return when a tick would change something, `None` if nothing waits for a time."""
        if not self.queue and not self.templates.short:
            return None
        times = [*self.gates.times(), *(one.not_before_s for one in self.templates.short.values())]
        return min((one for one in times if one > now_s), default=None)

    def close(self, *, now_s: float) -> list[Order]:
        """Refuse everybody who waits, and drop what is idle."""
        self._closed = True
        refused = [
            Refuse(ask=number, error=SandboxError("this pool is closed and its caller gets nothing; open another one"))
            for number in self.asks
        ]
        for ask in list(self.asks.values()):
            self.queue.remove(ask)
            self._forget(ask)
        return [*refused, *self.stop("the pool is closing", now_s=now_s)]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _fitting(self, spec: SandboxSpec) -> Needs:
        needs = needs_of(spec.limits)
        if never := self.books.never_fits(needs):
            raise ConfigError(f"a sandbox of this spec never fits: {never}. Lower the limit, or raise the budget.")
        return needs

    def _give(self, claim: Claim, ask: Ask, *, now_s: float) -> Give:
        self.queue.remove(ask)
        self.books.move(claim, Place.RUNNING, now_s=now_s)
        claim.ask, ask.waiting = ask.number, Waiting.CREATION
        return Give(sandbox_id=claim.sandbox_id, ask=ask.number, waited_s=now_s - ask.arrived_s)

    def _offer(self, claim: Claim, template: Template, *, now_s: float) -> list[Order]:
        """Give a ready sandbox to the first who waits for its template, or let it be idle."""
        if (ask := self.queue.first_for(claim.spec)) is not None:
            return [self._give(claim, ask, now_s=now_s)]
        self.books.move(claim, Place.POOLED, now_s=now_s)
        template.idle[claim.sandbox_id] = claim
        return []

    def _forget(self, ask: Ask) -> Template:
        del self.asks[ask.number]
        template = self.templates.of(ask.spec)
        template.asking -= 1
        return template

    def _stop(self, claim: Claim, *, idle: bool) -> Remove:
        self.books.stop(claim)
        return Remove(sandbox_id=claim.sandbox_id, idle=idle)

    def _evict(self, claim: Claim) -> Remove:
        self.counters["evicted"] += 1
        self.templates.of(claim.spec).idle.pop(claim.sandbox_id, None)
        return self._stop(claim, idle=True)

    def _pump(self, now_s: float, *changed: Template) -> list[Order]:
        """Let go on what can go on."""
        orders: list[Order] = []
        for template in changed:
            self._refresh(template, now_s=now_s)
            surplus = list(template.idle.values())[: max(0, len(template.idle) - template.target)]
            orders.extend(self._evict(one) for one in surplus)
        if self._serve(orders, now_s=now_s):
            self._fill(orders, now_s=now_s)
        return orders

    def _refresh(self, template: Template, *, now_s: float) -> None:
        warm_up_s = self.gates.cap.warm_up_s(template.spec)
        closed = self.gates.verdict.stop or self._closed or not self.pooling
        self.templates.refresh(template, warm_up_s=warm_up_s, closed=closed, now_s=now_s)

    def _serve(self, orders: list[Order], *, now_s: float) -> bool:
        """Start for those who wait, in their order; return whether none of them is kept back by what all share."""
        passed = 0
        while (ask := self.queue.nth(passed)) is not None:
            if ask.expires_s <= now_s:
                passed += 1  # it is being told so
                continue
            if ask.thaws and not self._can_thaw(ask.thaws):
                orders.append(self._refuse(ask, SandboxError(f"sandbox {ask.thaws} ended while it waited to go on")))
                continue
            waiting = self._why_not(ask, now_s=now_s)
            if waiting is None:
                orders.append(self._begin(ask, now_s=now_s))
                continue
            ask.waiting = waiting
            opens_s = self.gates.opens_s(waiting, ask.spec.image, now_s=now_s)
            if opens_s is not None and opens_s >= ask.expires_s:
                orders.append(self._hopeless(ask, waiting, opens_s=opens_s, now_s=now_s))
            elif waiting is Waiting.IMAGE_BREAKER:
                passed += 1  # only those who want this image wait for it
            else:
                if waiting in _ROOM:
                    self._make_room(ask, orders)
                return False
        return True

    def _why_not(self, ask: Ask, *, now_s: float) -> Waiting | None:
        thaw = bool(ask.thaws)
        image = None if thaw else ask.spec.image
        gate = self.gates.why_not(image, starting=self.books.starting, now_s=now_s)
        return gate if gate is not None else self.books.short_of(ask.needs, thaw=thaw)

    def _begin(self, ask: Ask, *, now_s: float) -> Order:
        if ask.thaws:
            return self._give(self.books.claims[ask.thaws], ask, now_s=now_s)
        self.queue.remove(ask)
        ask.waiting = Waiting.CREATION
        claim = self._claim(ask.spec, name=self._name(ask), ask=ask.number, now_s=now_s)
        return Start(
            sandbox_id=claim.sandbox_id,
            spec=ask.spec,
            ask=ask.number,
            expires_s=min(ask.expires_s, now_s + self.settings.admission.start_s),
            waited_s=now_s - ask.arrived_s,
        )

    def _claim(self, spec: SandboxSpec, *, name: str, ask: int | None, now_s: float) -> Claim:
        claim = Claim(name, spec=spec, needs=needs_of(spec.limits), ask=ask, now_s=now_s)
        self.books.add(claim)
        self.gates.began(claim, starting=self.books.starting)
        return claim

    def _name(self, ask: Ask) -> str:
        """Return the id of a fresh sandbox: the caller's, and another one each time that one is used up."""
        ask.names += 1
        name = ask.sandbox_id if ask.names == 1 else f"{ask.sandbox_id}-r{ask.names}"
        if not ask.sandbox_id or len(name) > _LONGEST_ID or name in self.books.claims:
            return self._own_name()
        return name

    def _own_name(self) -> str:
        return f"{self._prefix}-{next(self._names)}"

    def _hopeless(self, ask: Ask, waiting: Waiting, *, opens_s: float, now_s: float) -> Refuse:
        self.refused[waiting] += 1
        error = SandboxNotAdmitted(
            self.words.hopeless(ask, waiting, opens_s=opens_s, now_s=now_s),
            after_s=opens_s - now_s,
            waiting_for=waiting,
            position=self.queue.position(ask),
        )
        return self._refuse(ask, error)

    def _refuse(self, ask: Ask, error: Exception) -> Refuse:
        self.queue.remove(ask)
        self._forget(ask)
        return Refuse(ask=ask.number, error=error)

    def _can_thaw(self, sandbox_id: str) -> bool:
        claim = self.books.claims.get(sandbox_id)
        return claim is not None and not claim.stopping and claim.place is Place.SUSPENDED

    def _make_room(self, ask: Ask, orders: list[Order]) -> None:
        """Evict as few idle sandboxes as make room, if all that may go would; those being killed count as gone."""

        def fits(freed: list[Claim]) -> bool:
            return self.books.short_of(ask.needs, freed=freed, thaw=bool(ask.thaws)) is None

        going = [one for one in self.books.claims.values() if one.stopping] if self.books.stopping else []
        if not self.books.count[Place.POOLED] or fits(going):
            return
        idle = [self.books.claims[one] for one in eviction_order(self.templates.evictable())]
        if not fits([*going, *idle]):
            return
        count = _least(len(idle), lambda count: fits([*going, *idle[:count]]))
        orders.extend(self._evict(one) for one in idle[:count])

    def _fill(self, orders: list[Order], *, now_s: float) -> None:
        if not self.templates.short or self.books.starting >= self.gates.limit:
            return
        shortest = self.templates.by_shortage(now_s=now_s)
        while shortest:
            _, _, template = heapq.heappop(shortest)
            waiting = self.gates.why_not(template.spec.image, starting=self.books.starting, now_s=now_s)
            if waiting is not None and waiting is not Waiting.IMAGE_BREAKER:
                return
            if waiting is not None or self.books.short_of(needs_of(template.spec.limits)) is not None:
                continue
            orders.append(self._fill_one(template, now_s=now_s))
            if template.missing:
                heapq.heappush(shortest, (template.share, len(orders), template))

    def _fill_one(self, template: Template, *, now_s: float) -> Start:
        claim = self._claim(template.spec, name=self._own_name(), ask=None, now_s=now_s)
        template.filling += 1
        self._refresh(template, now_s=now_s)
        expires_s = now_s + self.settings.admission.start_s
        return Start(sandbox_id=claim.sandbox_id, spec=template.spec, ask=None, expires_s=expires_s)


def _least(bound: int, holds: Callable[[int], bool]) -> int:
    """Return the least count up to `bound` for which something holds that goes on holding."""
    low, high = 1, bound
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
