"""The router's law under any order of events: replicas that come, go, break and load, requests of several jobs.

No request is lost or in two places, none goes to a replica that is not fit for it, quotas hold, sessions are stable,
and nobody starves.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollmill.config.router import RouterSettings
from rollmill.errors import ModelError
from rollmill.generator.router.law import RouterLaw
from rollmill.generator.router.records import Ask, Ended, Instruction, Refuse, Report, Seen, Send
from rollmill.generator.router.rolling import Result, RollingUpdate

REPLICAS = ("a", "b", "c")
JOBS = {
    "x": {"priority": "high", "max_in_flight": 3},
    "y": {"weight": 2.0, "max_queue": 6},
    "z": {"priority": "low"},
}
ADAPTERS = ("maths", "tools")
OWN = {"c": ("x", "y")}
"""This replica serves no other job."""


class LawMachine(RuleBasedStateMachine):
    """The model knows only who was sent where; everything else is asked of the law."""

    def __init__(self) -> None:
        super().__init__()
        self.law = RouterLaw(
            RouterSettings.model_validate(
                {"overcommit": 1.0, "jobs": JOBS, "max_queue": 12, "hedge_budget": 0.5, "breaker_failures": 2}
            )
        )
        self.now_s = 0.0
        self.count = 0
        self.at: dict[str, list[str]] = {}
        self.asks: dict[str, Ask] = {}
        self.waiting: set[str] = set()
        self.homes: dict[tuple[str, str], str] = {}

    def hear(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            request = self.asks[one.request_id]
            assert one.request_id in self.waiting, f"{one} for a request that does not wait"
            self.waiting.discard(one.request_id)
            if isinstance(one, Refuse):
                del self.asks[one.request_id]
                continue
            self.check_sent(one, request)
            self.at[one.request_id] = [one.replica]

    def check_sent(self, one: Send, request: Ask) -> None:
        member = self.law.table[one.replica]
        assert member.seen is Seen.SERVING
        if request.adapter:
            # It has this adapter in a version that is new enough, or can load it.
            assert member.adapters[request.adapter] == 0 or (
                member.adapters[request.adapter] >= request.min_policy_version
            )
        else:
            assert member.policy_version >= request.min_policy_version
        assert not member.jobs or request.job in member.jobs
        if request.session_id:
            self.check_session(one, request)

    def check_session(self, one: Send, request: Ask) -> None:
        key = (request.job, request.session_id)
        home = self.homes.get(key)
        self.homes[key] = one.replica
        if home is None or home == one.replica or home not in self.law.table:
            return
        left = self.law.table[home]
        fit = left.seen is Seen.SERVING and left.has(request) and left.breaker.allows(now_s=self.now_s)
        # It moved although its replica is fit: then the request had failed there, or there was no room for it.
        assert not fit or not left.has_room(request.siblings) or request.request_id in self.retried

    @property
    def retried(self) -> set[str]:
        return {name for name in self.asks if name.startswith("again")}

    # -- replicas

    @rule(name=st.sampled_from(REPLICAS))
    def join(self, name):
        self.law.table.join(name, jobs=OWN.get(name, ()))

    @rule(
        name=st.sampled_from(REPLICAS),
        state=st.sampled_from(["serving", "serving", "serving", "dirty", "draining", "starting"]),
        version=st.integers(1, 3),
        running=st.integers(0, 3),
        adapters=st.dictionaries(st.sampled_from(ADAPTERS), st.integers(0, 3)),
    )
    def report(self, name, state, version, running, adapters):
        if name not in self.law.table:
            return
        age_s = self.now_s + 1.0
        found = Report(
            state=state,
            policy_version=max(version, self.law.table[name].policy_version),
            digest="same",
            running=running,
            slots=2,
            kv_use=running / 4,
            age_s=age_s,
            adapters=adapters,
        )
        self.hear(self.law.report(name, found, now_s=self.now_s, in_flight_before=0))

    @precondition(lambda self: len(self.law.table))
    @rule(name=st.sampled_from(REPLICAS))
    def restart(self, name):
        if name not in self.law.table:
            return
        self.homes = {key: home for key, home in self.homes.items() if home != name}
        self.law.table.silent(name, reason="killed", dead=True)
        self.law.table[name].policy_version = 1
        age_s = self.law.table[name].age_s / 2
        report = Report(state="serving", policy_version=1, digest="same", slots=2, age_s=age_s)
        self.hear(self.law.report(name, report, now_s=self.now_s))

    @rule(name=st.sampled_from(REPLICAS))
    def leave(self, name):
        if name in self.law.table and self.law.table[name].seen is not Seen.LEAVING:
            self.homes = {key: home for key, home in self.homes.items() if home != name}
            self.hear(self.law.leave(name, now_s=self.now_s))

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def time_passes(self, seconds):
        self.now_s += seconds

    # -- requests

    @rule(
        job=st.sampled_from(["x", "y", "z", "unlisted"]),
        session=st.sampled_from(["", "s", "t"]),
        version=st.sampled_from([0, 0, 1, 3]),
        siblings=st.sampled_from([1, 1, 2, 5]),
        adapter=st.sampled_from(["", "", *ADAPTERS]),
    )
    def submit(self, job, session, version, siblings, adapter):
        self.count += 1
        name = f"r{self.count}"
        request = Ask(
            request_id=name,
            job=job,
            session_id=session,
            min_policy_version=version,
            siblings=siblings,
            adapter=adapter,
        )
        self.asks[name] = request
        self.waiting.add(name)
        said = self.law.submit(request, now_s=self.now_s)
        self.check_refused(said, request)
        self.hear(said)

    def check_refused(self, said: list[Instruction], request: Ask) -> None:
        """An adapter is refused as unknown just when no replica that may get this job's requests may ever have it."""
        unknown = any(isinstance(one, Refuse) and isinstance(one.error, ModelError) for one in said)
        members = [one for one in self.law.table.of_job(request.job) if one.seen is not Seen.LEAVING]
        nobody = bool(members) and all(one.heard and request.adapter not in one.adapters for one in members)
        assert unknown == (bool(request.adapter) and nobody)

    @precondition(lambda self: self.at)
    @rule(data=st.data(), how=st.sampled_from([Ended.ANSWERED, Ended.ANSWERED, *Ended]), again=st.booleans())
    def end(self, data, how, again):
        name = data.draw(st.sampled_from(sorted(self.at)))
        replica = data.draw(st.sampled_from(self.at[name]))
        self.at[name].remove(replica)
        self.hear(self.law.ended(name, replica, how, now_s=self.now_s))
        if self.at[name]:
            return
        del self.at[name]
        old = self.asks.pop(name)
        if again and how in (Ended.LOST, Ended.FAILED, Ended.REFUSED, Ended.DECLINED):
            new_name = f"again {name}"
            self.hear(self.law.close(name, now_s=self.now_s))
            request = Ask(
                request_id=new_name, job=old.job, session_id=old.session_id, siblings=old.siblings, adapter=old.adapter
            )
            self.asks[new_name] = request
            self.waiting.add(new_name)
            self.hear(self.law.resubmit(request, excluded={replica}, arrived_s=self.now_s, now_s=self.now_s))
        else:
            self.hear(self.law.close(name, now_s=self.now_s))

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def hedge(self, data):
        name = data.draw(st.sampled_from(sorted(self.at)))
        found = self.law.hedge(name, now_s=self.now_s)
        if found is not None:
            assert found.replica not in self.at[name]
            assert self.law.table[found.replica].seen is Seen.SERVING
            self.at[name].append(found.replica)

    @precondition(lambda self: self.asks)
    @rule(data=st.data())
    def the_caller_leaves(self, data):
        name = data.draw(st.sampled_from(sorted(self.asks)))
        self.waiting.discard(name)
        self.at.pop(name, None)
        del self.asks[name]
        self.hear(self.law.close(name, now_s=self.now_s))

    # -- what always holds

    @invariant()
    def the_books_balance(self):
        self.law.validate()

    @invariant()
    def every_request_is_in_one_place(self):
        for name in self.asks:
            assert (name in self.waiting) != (name in self.at)
            assert sorted(self.law.where(name)) == sorted(self.at.get(name, []))
        assert self.law.queues.waiting == sum(self.asks[name].siblings for name in self.waiting)

    @invariant()
    def quotas_hold(self):
        for job in self.law.queues:
            quota = job.settings.max_in_flight
            alone = [self.asks[name] for name in self.at if self.asks[name].job == job.name]
            if quota is not None and len(alone) > 1:
                assert job.in_flight <= quota

    @invariant()
    def nobody_waits_who_could_go(self):
        assert self.law.dispatch(now_s=self.now_s) == []


LawMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLawMachine = LawMachine.TestCase


def serving(**changes) -> RouterLaw:
    law = RouterLaw(RouterSettings.model_validate({"overcommit": 1.0, **changes}))
    for name in ("a", "b"):
        law.table.join(name)
        law.report(name, Report(state="serving", policy_version=1, slots=8), now_s=0.0)
    return law


@settings(max_examples=60, deadline=None)
@given(
    quota=st.integers(1, 6),
    events=st.lists(st.tuples(st.sampled_from(["x", "y", "end"]), st.integers(1, 4)), max_size=40),
)
def test_a_job_never_has_more_in_flight_than_its_quota_but_for_one_request_alone(quota, events):
    law = serving(jobs={"x": {"max_in_flight": quota}})
    asks: dict[str, Ask] = {}
    at: dict[str, str] = {}

    def hear(found: list[Instruction]) -> None:
        at.update({one.request_id: one.replica for one in found if isinstance(one, Send)})

    for number, (what, size) in enumerate(events):
        if what == "end" and at:
            name, replica = list(at.items())[size % len(at)]
            del at[name]
            hear(law.ended(name, replica, Ended.ANSWERED, now_s=0.0))
            hear(law.close(name, now_s=0.0))
        elif what != "end":
            asks[f"r{number}"] = Ask(request_id=f"r{number}", job=what, siblings=size)
            hear(law.submit(asks[f"r{number}"], now_s=0.0))
        flying = [asks[name].siblings for name in at if asks[name].job == "x"]
        assert sum(flying) <= quota or len(flying) == 1


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(st.sampled_from("stu"), st.booleans()), min_size=2, max_size=30), kv=st.floats(0, 1))
def test_a_session_stays_where_it_is_while_there_is_room(turns, kv):
    law = serving()
    law.report("a", Report(state="serving", policy_version=1, slots=8, kv_use=kv), now_s=0.0)
    homes: dict[str, str] = {}
    for number, (session, answered) in enumerate(turns):
        home = homes.get(session)
        had_room = home is None or law.table[home].has_room(1)
        (one,) = law.submit(Ask(request_id=f"r{number}", session_id=session), now_s=0.0) or [None]
        if not isinstance(one, Send):
            continue
        assert home is None or one.replica == home or not had_room
        homes[session] = one.replica
        if answered:
            law.ended(one.request_id, one.replica, Ended.ANSWERED, now_s=0.0)
            law.close(one.request_id, now_s=0.0)


@settings(max_examples=40, deadline=None)
@given(
    loads=st.lists(st.tuples(st.sampled_from(["x", "y", "z"]), st.integers(1, 3)), min_size=1, max_size=25),
    patience_s=st.sampled_from([1.0, 5.0]),
)
def test_whatever_else_comes_a_low_request_is_served_within_bounds(loads, patience_s):
    jobs = {"x": {"priority": "high", "weight": 5.0}, "y": {}, "z": {"priority": "low"}}
    law = RouterLaw(RouterSettings.model_validate({"overcommit": 1.0, "jobs": jobs, "promote_after_s": patience_s}))
    law.table.join("a")
    law.report("a", Report(state="serving", policy_version=1, slots=3), now_s=0.0)
    at: list[str] = []

    def hear(found: list[Instruction]) -> None:
        at.extend(one.request_id for one in found if isinstance(one, Send))

    hear(law.submit(Ask(request_id="busy", job="x", siblings=3), now_s=0.0))
    hear(law.submit(Ask(request_id="low", job="z", siblings=3), now_s=0.0))
    now_s, number = 0.0, 0
    # One sample per second ends, and a high one comes for it, for ever.
    while "low" not in at:
        now_s += 1.0
        for job, siblings in loads:
            number += 1
            hear(law.submit(Ask(request_id=f"r{number}", job=job, siblings=siblings), now_s=now_s))
        for name in list(at):
            at.remove(name)
            hear(law.ended(name, "a", Ended.ANSWERED, now_s=now_s))
            hear(law.close(name, now_s=now_s))
        # Two classes up, then its share of one sixth or more beside `x`.
        assert now_s <= 2 * patience_s + 12, "it starves"


@given(
    results=st.lists(st.sampled_from([Result.LOADED, Result.KEPT, Result.BROKEN]), min_size=1, max_size=8),
    bound=st.integers(1, 3),
    order=st.randoms(use_true_random=False),
)
def test_an_update_takes_no_more_replicas_out_than_its_bound_and_tells_of_each(results, bound, order):
    fate = {f"r{number}": result for number, result in enumerate(results)}
    update = RollingUpdate(list(fate), max_unavailable=bound)
    loading: list[str] = []
    while True:
        loading += update.start()
        broken = sum(result is Result.BROKEN for result in update.results.values())
        assert len(loading) + broken <= bound
        if not loading:
            break
        name = loading.pop(order.randrange(len(loading)))
        update.done(name, fate[name])
    assert update.over
    skipped = [name for name, result in update.results.items() if result is Result.SKIPPED]
    assert {name: result for name, result in update.results.items() if name not in skipped} == {
        name: fate[name] for name in fate if name not in skipped
    }
    assert not skipped or broken == bound
