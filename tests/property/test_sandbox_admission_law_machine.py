"""The law of admission under any order of events: its books balance, its budgets hold, and nobody is overtaken.

The machine plays the shell: it carries out orders, and lets starts, kills and callers end in any order and way.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollmill.errors import SandboxError, SandboxNotAdmitted
from rollmill.sandboxes import DirectoryImage, Limits, SandboxSpec
from rollmill.sandboxes.admission import AdmissionSettings, PoolSettings
from rollmill.sandboxes.admission.law import AdmissionLaw
from rollmill.sandboxes.admission.pressure import CALM, PressureVerdict
from rollmill.sandboxes.admission.queueing import Ask
from rollmill.sandboxes.admission.records import Give, How, Kind, Order, Place, Prepare, Refuse, Remove, Start

MIB = 1024**2
SPECS = [
    SandboxSpec(limits=Limits(memory_bytes=100 * MIB, cpus=0.3)),
    SandboxSpec(limits=Limits(memory_bytes=250 * MIB, cpus=1.0)),
    SandboxSpec(image=DirectoryImage(layers=("/b",)), limits=Limits(memory_bytes=100 * MIB, cpus=0.3)),
]
ADMISSION = AdmissionSettings(
    initial_starting=2,
    max_starting=4,
    max_running=6,
    max_suspended=2,
    memory_bytes=700 * MIB,
    cpus=2.5,
    tries=2,
    breaker_failures=3,
    breaker_open_s=5.0,
    hold_s=0.5,
)
SPEC = st.sampled_from(SPECS)
PICK = st.integers(0, 1000)


class AdmissionMachine(RuleBasedStateMachine):
    """The model knows what it was told to do and has not done, and who holds what."""

    def __init__(self) -> None:
        super().__init__()
        pool = PoolSettings(admission=ADMISSION, max_age_s=50.0)
        self.law = AdmissionLaw(pool, prefix="p", cores=2)
        self.now_s = 0.0
        self.waiting: dict[int, Ask] = {}
        self.starting: dict[str, Start] = {}
        self.given: dict[str, int] = {}
        self.running: list[str] = []
        self.suspended: list[str] = []
        self.doomed: list[str] = []
        self.idle: set[str] = set()
        self.preparing: list[SandboxSpec] = []
        self.stopped = False

    def carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case Start(sandbox_id=name, ask=ask):
                    assert name not in self.starting
                    assert not self.stopped
                    assert order.expires_s > self.now_s
                    if ask is not None:
                        self.nobody_was_overtaken(ask)
                    else:
                        assert all(
                            one not in self.law.queue or self.only_its_image(one) for one in self.waiting.values()
                        )
                    self.starting[name] = order
                case Give(sandbox_id=name, ask=ask):
                    assert ask in self.waiting
                    self.idle.discard(name)
                    if name in self.suspended:
                        self.suspended.remove(name)
                    self.given[name] = ask
                case Refuse(ask=ask, error=error):
                    assert isinstance(error, SandboxError)
                    del self.waiting[ask]
                case Remove(sandbox_id=name):
                    assert name not in self.running
                    assert name not in self.doomed
                    self.idle.discard(name)
                    self.doomed.append(name)
                case Prepare(spec=spec):
                    self.preparing.append(spec)

    def nobody_was_overtaken(self, number: int) -> None:
        ask = self.waiting[number]
        for other in self.waiting.values():
            before = (other.kind, other.number) < (ask.kind, ask.number)
            assert not (before and other in self.law.queue and other.expires_s > self.now_s) or self.only_its_image(
                other
            )

    def only_its_image(self, ask: Ask) -> bool:
        breaker = self.law.gates.images.get(ask.spec.image)
        return ask.expires_s <= self.now_s or (breaker is not None and not breaker.closed)

    def pick(self, names, number: int):
        ordered = sorted(names)
        return ordered[number % len(ordered)]

    # -- callers

    @rule(spec=SPEC, wait_s=st.sampled_from([1.0, 20.0]), resumes=st.booleans(), poolable=st.booleans())
    def somebody_comes(self, spec, wait_s, resumes, poolable):
        ask = self.law.ask(
            spec,
            kind=Kind.RESUME if resumes else Kind.START,
            poolable=poolable,
            now_s=self.now_s,
            expires_s=self.now_s + wait_s,
        )
        self.waiting[ask.number] = ask
        self.carry_out(self.law.submit(ask, now_s=self.now_s))

    @precondition(lambda self: self.waiting)
    @rule(number=PICK)
    def somebody_leaves(self, number):
        self.leave(self.pick(self.waiting, number))

    def leave(self, number: int) -> None:
        ask = self.waiting.pop(number)
        late = self.law.late(ask, now_s=self.now_s)
        assert isinstance(late, SandboxNotAdmitted)
        for name in [name for name, one in self.given.items() if one == number]:
            del self.given[name]
            if not self.law.books.claims[name].used:
                self.idle |= {name} if self.law.books.claims[name].poolable else set()
                self.carry_out(self.law.untaken(name, now_s=self.now_s))
            else:
                self.running.append(name)
                self.carry_out(self.law.untaken(name, now_s=self.now_s))
        self.carry_out(self.law.withdraw(number, now_s=self.now_s))

    @precondition(lambda self: self.given)
    @rule(number=PICK, lives=st.booleans())
    def somebody_takes(self, number, lives):
        name = self.pick(self.given, number)
        ask = self.waiting[self.given.pop(name)]
        if lives or self.law.books.claims[name].used:
            del self.waiting[ask.number]
            self.running.append(name)
            self.carry_out(self.law.accepted(name, now_s=self.now_s))
            return
        self.carry_out(self.law.dead_at_hand_out(name, now_s=self.now_s))
        self.carry_out(self.law.submit(ask, now_s=self.now_s))

    # -- sandboxes

    @precondition(lambda self: self.starting)
    @rule(number=PICK)
    def a_start_ends_well(self, number):
        name = self.pick(self.starting, number)
        if self.starting.pop(name).ask is None:
            self.idle.add(name)
        self.carry_out(self.law.started(name, now_s=self.now_s))

    @precondition(lambda self: self.starting)
    @rule(number=PICK, how=st.sampled_from(list(How)), left=st.booleans())
    def a_start_fails(self, number, how, left):
        name = self.pick(self.starting, number)
        del self.starting[name]
        if left:
            self.doomed.append(name)
        error = SandboxError("it broke")
        self.carry_out(self.law.failed(name, how, error=error, after_s=1.0, left=left, now_s=self.now_s))

    @precondition(lambda self: self.running or self.suspended)
    @rule(number=PICK)
    def a_sandbox_ends(self, number):
        name = self.pick([*self.running, *self.suspended], number)
        (self.running if name in self.running else self.suspended).remove(name)
        self.carry_out(self.law.ended(name, now_s=self.now_s))
        assert name in self.doomed

    @precondition(lambda self: self.doomed)
    @rule(number=PICK)
    def a_sandbox_is_gone(self, number):
        name = self.pick(self.doomed, number)
        self.doomed.remove(name)
        self.carry_out(self.law.gone(name, now_s=self.now_s))

    @precondition(lambda self: self.idle)
    @rule(number=PICK)
    def an_idle_one_dies(self, number):
        self.carry_out(self.law.dead_idle(self.pick(self.idle, number), now_s=self.now_s))

    @precondition(lambda self: self.running)
    @rule(number=PICK, done=st.booleans())
    def one_is_suspended(self, number, done):
        name = self.pick(self.running, number)
        try:
            self.law.may_pause(name)
        except SandboxNotAdmitted:
            return
        if done:
            self.running.remove(name)
            self.suspended.append(name)
        self.carry_out(self.law.paused(name, done=done, now_s=self.now_s))

    @precondition(lambda self: self.suspended)
    @rule(number=PICK)
    def one_is_to_go_on(self, number):
        name = self.pick(self.suspended, number)
        spec, kind = self.law.books.claims[name].spec, Kind.RESUME
        ask = self.law.ask(spec, thaws=name, kind=kind, now_s=self.now_s, expires_s=self.now_s + 20.0)
        self.waiting[ask.number] = ask
        self.carry_out(self.law.submit(ask, now_s=self.now_s))

    # -- outside

    @rule(spec=SPEC, count=st.integers(0, 5))
    def demand_changes(self, spec, count):
        self.carry_out(self.law.demand(spec, count, now_s=self.now_s))

    @precondition(lambda self: self.preparing)
    @rule(done=st.booleans())
    def an_image_is_prepared(self, done):
        self.carry_out(self.law.prepared(self.preparing.pop(0), done=done, now_s=self.now_s))

    @rule(factor=st.sampled_from([0.0, 0.5, 1.0]), stop=st.booleans())
    def pressure_changes(self, factor, stop):
        self.stopped = stop
        verdict = PressureVerdict(factor=factor, stop=stop, cause="pressure") if stop or factor < 1 else CALM
        self.carry_out(self.law.press(verdict, now_s=self.now_s))

    @rule(count=st.integers(1, 3))
    def the_guard_evicts(self, count):
        before = len(self.idle)
        self.carry_out(self.law.evict(count, now_s=self.now_s))
        assert before - len(self.idle) == min(count, before)

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 30.0]))
    def time_passes(self, seconds):
        self.now_s += seconds
        for number in [number for number, ask in self.waiting.items() if ask.expires_s <= self.now_s]:
            if number in self.waiting:
                self.leave(number)
        self.carry_out(self.law.tick(now_s=self.now_s))

    # -- what always holds

    @invariant()
    def the_books_are_those_of_the_model(self):
        claims = self.law.books.claims
        assert {name for name, one in claims.items() if one.stopping} == set(self.doomed)
        live = {name: one.place for name, one in claims.items() if not one.stopping}
        assert {name for name, place in live.items() if place is Place.STARTING} == set(self.starting)
        assert {name for name, place in live.items() if place is Place.POOLED} == self.idle
        assert {name for name, place in live.items() if place is Place.RUNNING} == {*self.running, *self.given}
        assert {name for name, place in live.items() if place is Place.SUSPENDED} == set(self.suspended)
        assert set(self.law.asks) == set(self.waiting)

    @invariant()
    def no_budget_is_exceeded(self):
        books, claims = self.law.books, self.law.books.claims.values()
        awake = [one for one in claims if one.place is not Place.SUSPENDED]
        assert len(awake) == books.running() <= ADMISSION.max_running
        assert sum(one.needs.memory_bytes for one in claims) == books.memory_bytes <= ADMISSION.memory_bytes
        assert sum(round(1000 * one.needs.cpus) for one in awake) == books.millicpus <= 1000 * ADMISSION.cpus
        assert len(claims) - len(awake) <= ADMISSION.max_suspended
        assert books.starting == len(self.starting) <= ADMISSION.max_starting

    @invariant()
    def templates_count_what_is_theirs(self):
        claims = self.law.books.claims
        for spec in SPECS:
            template = self.law.templates.known(spec)
            if template is None:
                continue
            mine = [name for name, one in claims.items() if one.spec == spec]
            assert set(template.idle) == self.idle & set(mine)
            assert template.filling == sum(self.starting[name].ask is None for name in mine if name in self.starting)
            assert template.held == len([name for name in mine if name in self.running])
            assert template.asking == sum(one.spec == spec for one in self.waiting.values())
            would_take = [one for one in self.waiting.values() if one.spec == spec and one.poolable]
            assert not (template.idle and any(one in self.law.queue for one in would_take))

    @invariant()
    def nobody_waits_without_a_reason(self):
        first = next((one for one in self.law.queue if not self.only_its_image(one)), None)
        if first is not None:
            assert self.law._why_not(first, now_s=self.now_s) is not None

    def teardown(self):
        for name in sorted(self.given):
            self.leave(self.given[name])
        self.carry_out(self.law.close(now_s=self.now_s))
        for name in sorted(self.starting):
            del self.starting[name]
            self.carry_out(self.law.started(name, now_s=self.now_s))
        held = [*self.running, *self.suspended]
        self.running, self.suspended = [], []
        for name in held:
            self.carry_out(self.law.ended(name, now_s=self.now_s))
        assert sorted(self.law.books.claims) == sorted(self.doomed)
        for name in list(self.doomed):
            self.law.gone(name, now_s=self.now_s)
        assert (self.law.books.claims, self.law.asks, len(self.law.queue)) == ({}, {}, 0)
        assert (self.law.books.millicpus, self.law.books.memory_bytes, self.law.books.running()) == (0, 0, 0)


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
