"""The law of admission and pools: events in, orders out."""

from __future__ import annotations

import msgspec
import pytest

from rollmill.errors import ConfigError, ImageError, SandboxError, SandboxIdInUse, SandboxNotAdmitted
from rollmill.sandboxes import DirectoryImage, Limits, SandboxSpec
from rollmill.sandboxes.admission import AdmissionSettings, PoolSettings
from rollmill.sandboxes.admission.law import AdmissionLaw
from rollmill.sandboxes.admission.pressure import CALM, PressureVerdict
from rollmill.sandboxes.admission.queueing import Ask
from rollmill.sandboxes.admission.records import (
    Give,
    How,
    Kind,
    Order,
    Place,
    Prepare,
    Refuse,
    Remove,
    Start,
    Waiting,
)

A = SandboxSpec()
B = SandboxSpec(image=DirectoryImage(layers=("/b",)))
BIG = SandboxSpec(limits=Limits(memory_bytes=1024**3))
FAULT = SandboxError("it broke")


def law(*, pooling: bool = True, pool: dict | None = None, **admission: float) -> AdmissionLaw:
    settings = PoolSettings(admission=AdmissionSettings(**{"initial_starting": 2, **admission}), **(pool or {}))
    return AdmissionLaw(settings, prefix="p", cores=2, pooling=pooling)


def come(one: AdmissionLaw, spec: SandboxSpec = A, *, now_s: float = 0.0, wait_s: float = 100.0, **options) -> Ask:
    """Ask without being submitted."""
    return one.ask(spec, now_s=now_s, expires_s=now_s + wait_s, **options)


def submit(one: AdmissionLaw, spec: SandboxSpec = A, *, now_s: float = 0.0, **options) -> tuple[Ask, list[Order]]:
    ask = come(one, spec, now_s=now_s, **options)
    return ask, one.submit(ask, now_s=now_s)


def brief(orders: list[Order]) -> list[tuple]:
    """Return orders without what the test does not look at."""
    found: list[tuple] = []
    for order in orders:
        match order:
            case Start(sandbox_id=name, ask=ask):
                found.append(("start", name, ask))
            case Give(sandbox_id=name, ask=ask, fresh=fresh):
                found.append(("give", name, ask, fresh))
            case Refuse(ask=ask, error=error):
                found.append(("refuse", ask, type(error).__name__))
            case Remove(sandbox_id=name):
                found.append(("remove", name))
            case Prepare(spec=spec):
                found.append(("prepare", spec))
    return found


def only_start(orders: list[Order]) -> Start:
    (order,) = orders
    assert isinstance(order, Start)
    return order


def filled(one: AdmissionLaw, count: int, *, spec: SandboxSpec = A, now_s: float = 0.0) -> list[str]:
    """Fill the pool, and return the ids."""
    one.demand(spec, count, now_s=now_s)
    orders = one.prepared(spec, done=True, now_s=now_s)
    names: list[str] = []
    while orders:
        begun = [order.sandbox_id for order in orders if isinstance(order, Start)]
        names += begun
        orders = [order for name in begun for order in one.started(name, now_s=now_s)]
    return names


def got(one: AdmissionLaw, spec: SandboxSpec = A, *, now_s: float = 0.0, **options) -> str:
    """Acquire one, and return its id."""
    _, orders = submit(one, spec, now_s=now_s, **options)
    (begun,) = [order for order in orders if isinstance(order, Start)]
    one.started(begun.sandbox_id, now_s=now_s)
    one.accepted(begun.sandbox_id, now_s=now_s)
    return begun.sandbox_id


# -- the queue -------------------------------------------------------------------------------------------------------


def test_as_many_start_as_the_cap_says_and_the_next_goes_when_one_is_ready():
    one = law()
    assert brief(submit(one, sandbox_id="x")[1]) == [("start", "x", 0)]
    assert brief(submit(one)[1]) == [("start", "p-0", 1)]
    third, orders = submit(one)
    assert orders == []
    assert third.waiting is Waiting.STARTING_CAP
    assert brief(one.started("x", now_s=1.0)) == [("give", "x", 0, True), ("start", "p-1", 2)]


def test_first_come_is_first_served_and_resumes_go_before_all_that_begin():
    one = law(initial_starting=1, max_starting=1)
    submit(one, sandbox_id="first")
    for name, kind in (("b", Kind.START), ("c", Kind.START), ("resumed", Kind.RESUME)):
        submit(one, sandbox_id=name, kind=kind)
    order = []
    name = "first"
    for _ in range(3):
        (start,) = [each for each in one.started(name, now_s=1.0) if isinstance(each, Start)]
        order.append(name := start.sandbox_id)
    assert order == ["resumed", "b", "c"]


def test_what_waits_for_a_budget_is_not_overtaken_by_what_is_smaller():
    mib = 1024**2
    one = law(memory_bytes=1200 * mib)
    holder = got(one)  # 512 MiB
    big, orders = submit(one, BIG)
    assert (orders, big.waiting) == ([], Waiting.MEMORY)
    small, orders = submit(one)
    assert (orders, small.waiting) == ([], Waiting.TURN)
    one.ended(holder, now_s=1.0)
    assert [kind[0] for kind in brief(one.gone(holder, now_s=1.0))] == ["start"]
    assert big.waiting is Waiting.CREATION
    assert small.waiting is Waiting.MEMORY  # 512 beside 1024 of 1200 MiB


def test_only_who_wants_a_broken_image_waits_for_it():
    one = law(image_failures=1, tries=1)
    _, orders = submit(one, B)
    error = ImageError("broken")
    assert brief(one.failed(only_start(orders).sandbox_id, How.IMAGE, error=error, left=False, now_s=0.0)) == [
        ("refuse", 0, "ImageError")
    ]
    waits, orders = submit(one, B)
    assert (orders, waits.waiting) == ([], Waiting.IMAGE_BREAKER)
    assert brief(submit(one, A)[1]) == [("start", "p-1", 2)]
    assert one.wakes_s(now_s=0.0) == 10.0
    probe = one.tick(now_s=10.0)
    assert brief(probe) == [("start", "p-2", 1)]
    assert submit(one, B, now_s=10.0)[1] == []  # one probe at a time
    assert brief(one.started("p-2", now_s=11.0)) == [("give", "p-2", 1, True), ("start", "p-3", 3)]


def test_who_leaves_gives_its_place_up_and_what_was_made_for_it_is_removed():
    one = law(initial_starting=1, max_starting=1)
    first, _ = submit(one, sandbox_id="x")
    second, _ = submit(one)
    one.withdraw(second.number, now_s=1.0)
    one.withdraw(first.number, now_s=1.0)
    assert brief(one.started("x", now_s=2.0)) == [("remove", "x")]
    assert one.books.count[Place.STARTING] == 1  # until it is gone
    assert one.gone("x", now_s=3.0) == []
    assert one.books.claims == {}
    assert one.counters["unused"] == 1


def test_a_full_queue_and_a_closed_pool_and_a_taken_id_are_refused_at_once():
    one = law(initial_starting=1, max_starting=1, max_waiting=1)
    submit(one, sandbox_id="x")
    submit(one)
    with pytest.raises(SandboxNotAdmitted, match=r"1 callers wait, as many as admission\.max_waiting"):
        come(one)
    with pytest.raises(ConfigError, match="the whole budget 1000"):
        come(law(memory_bytes=1000), BIG)
    other = law()
    submit(other, sandbox_id="x")
    with pytest.raises(SandboxIdInUse):
        come(other, sandbox_id="x")
    assert brief(one.close(now_s=1.0)) == [("refuse", 0, "SandboxError"), ("refuse", 1, "SandboxError")]
    with pytest.raises(SandboxError, match="closed"):
        come(one)
    assert brief(one.started("x", now_s=2.0)) == [("remove", "x")]


def test_a_late_caller_is_told_its_place_the_full_budget_and_what_to_do():
    one = law(max_running=1)
    got(one)
    first, _ = submit(one, now_s=1.0, wait_s=5.0)
    second, _ = submit(one, now_s=1.0, wait_s=5.0)
    error = one.late(second, now_s=6.0)
    assert (error.waiting_for, error.position) == ("running_budget", 2)
    assert str(error) == (
        "no sandbox within 5 s (number 2 of those who wait): the budget of 1 that are not suspended is full: 1 running."
        " Are ended ones released? Otherwise run fewer rollouts, or raise admission.max_running."
    )
    assert one.late(first, now_s=6.0).position == 1
    assert one.refused == {Waiting.RUNNING: 2}


@pytest.mark.parametrize("waiting", list(Waiting))
def test_every_wait_has_words_with_an_action(waiting):
    one = law(memory_bytes=10**10, cpus=5.0, disk_bytes=10**10, inodes=10**6)
    ask, _ = submit(one)
    text = one.words.why(waiting, ask, now_s=0.0)
    assert len(text) > 60
    assert text.endswith(".")


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_failed_start_is_tried_again_under_another_id_in_its_old_place_and_at_last_its_caller_gets_the_error():
    one = law(initial_starting=1, max_starting=1, tries=3, breaker_failures=9)
    submit(one, sandbox_id="x")
    submit(one, sandbox_id="y")
    assert brief(one.failed("x", How.FAILED, error=FAULT, left=True, now_s=1.0)) == [("start", "x-r2", 0)]
    assert one.books.claims["x"].stopping  # something of it may be there
    assert brief(one.failed("x-r2", How.FAILED, error=FAULT, left=False, now_s=2.0)) == [("start", "x-r3", 0)]
    assert brief(one.failed("x-r3", How.FAILED, error=FAULT, left=False, now_s=3.0)) == [
        ("refuse", 0, "SandboxError"),
        ("start", "y", 1),
    ]


def test_the_requests_own_fault_is_told_at_once_and_nobody_else_waits_for_it():
    one = law(breaker_failures=1)
    submit(one, sandbox_id="x")
    assert brief(one.failed("x", How.REQUEST, error=ConfigError("bad"), left=False, now_s=1.0)) == [
        ("refuse", 0, "ConfigError")
    ]
    assert brief(submit(one)[1]) == [("start", "p-0", 1)]


def test_a_provider_without_room_lets_all_wait_as_long_as_it_asks_and_no_try_is_used_up():
    one = law(tries=1, initial_starting=1)
    submit(one, sandbox_id="x")
    assert one.failed("x", How.NO_ROOM, error=FAULT, after_s=7.0, left=False, now_s=1.0) == []
    assert one.wakes_s(now_s=1.0) == 8.0
    assert one.tick(now_s=7.9) == []
    assert brief(one.tick(now_s=8.0)) == [("start", "x-r2", 0)]


def test_who_cannot_be_served_before_its_deadline_is_told_at_once():
    one = law(initial_starting=1)
    submit(one, sandbox_id="x", wait_s=5.0)
    orders = one.failed("x", How.NO_ROOM, error=FAULT, after_s=60.0, left=False, now_s=1.0)
    (refused,) = orders
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, SandboxNotAdmitted)
    assert (refused.error.after_s, refused.error.waiting_for) == (60.0, "provider_has_no_room")
    assert "the next start can be in 60 s, and the caller waits for 4 s only" in str(refused.error)


def test_an_open_breaker_lets_one_probe_through_and_all_others_after_it():
    one = law(breaker_failures=2, tries=1, initial_starting=2)
    for name in "xy":
        submit(one, sandbox_id=name)
    for name in "xy":
        one.failed(name, How.FAILED, error=FAULT, left=False, now_s=1.0)
    waits = [submit(one, now_s=2.0)[0] for _ in range(3)]
    assert [ask.waiting for ask in waits] == [Waiting.BREAKER, Waiting.TURN, Waiting.TURN]
    assert one.wakes_s(now_s=2.0) == 11.0
    probe = only_start(one.tick(now_s=11.0))
    # The failures halved the cap to 1, and this crowded success makes it 1 + 1/1.
    assert [kind for kind, *_ in brief(one.started(probe.sandbox_id, now_s=12.0))] == ["give", "start", "start"]


def test_a_creation_that_was_cut_off_by_its_caller_blames_nobody():
    one = law(breaker_failures=1, initial_starting=2)
    submit(one, sandbox_id="x")
    assert one.failed("x", How.CUT, error=FAULT, left=True, now_s=1.0) == []
    assert one.gates.provider.closed
    assert one.gates.cap.value == 2.0


# -- pools -----------------------------------------------------------------------------------------------------------


def test_the_image_is_prepared_before_the_first_is_filled_and_again_later_if_that_fails():
    one = law()
    assert brief(one.demand(A, 3, now_s=0.0)) == [("prepare", A)]
    assert one.demand(A, 4, now_s=0.0) == []  # under way
    assert one.prepared(A, done=False, now_s=0.0) == []
    assert one.wakes_s(now_s=0.0) == 0.5
    assert brief(one.tick(now_s=0.5)) == [("prepare", A)]
    assert brief(one.prepared(A, done=True, now_s=0.6)) == [("start", "p-0", None), ("start", "p-1", None)]


def test_a_pool_follows_its_demand_up_and_down_at_once():
    one = law(max_starting=8, initial_starting=8)
    assert len(filled(one, 6)) == 6
    assert len(one.templates.of(A).idle) == 6
    assert [kind for kind, *_ in brief(one.demand(A, 2, now_s=1.0))] == ["remove"] * 4
    assert [kind for kind, *_ in brief(one.demand(A, 0, now_s=1.0))] == ["remove"] * 2
    for name in list(one.books.claims):
        one.gone(name, now_s=1.0)
    assert list(one.templates) == []


def test_a_ready_one_is_given_at_once_the_oldest_first_and_nothing_is_filled_for_it():
    one = law()
    oldest, _ = filled(one, 2)
    ask, orders = submit(one, sandbox_id="mine", now_s=1.0)
    assert brief(orders) == [("give", oldest, ask.number, False)]  # demand 2: one busy, one idle
    one.accepted(oldest, now_s=1.0)
    assert (one.counters["hits"], one.books.count[Place.POOLED], one.books.count[Place.RUNNING]) == (1, 1, 1)
    # Its end makes room for the next one of the two wanted.
    assert [kind for kind, *_ in brief(one.ended(oldest, now_s=2.0))] == ["remove", "start"]


def test_one_that_was_starting_for_the_pool_goes_to_who_waits_for_its_template():
    one = law(initial_starting=2, max_starting=2)
    one.demand(A, 2, now_s=0.0)
    fills = [order.sandbox_id for order in one.prepared(A, done=True, now_s=0.0) if isinstance(order, Start)]
    other, _ = submit(one, B)
    ask, orders = submit(one, A)
    assert orders == []
    assert brief(one.started(fills[0], now_s=1.0)) == [
        ("give", fills[0], ask.number, False),
        ("start", "p-2", other.number),
    ]


def test_nothing_is_filled_while_somebody_waits():
    one = law(initial_starting=1, max_starting=1)
    submit(one, B, sandbox_id="x")
    submit(one, B, sandbox_id="y")
    one.demand(A, 5, now_s=0.0)
    assert one.prepared(A, done=True, now_s=0.0) == []
    assert [name for _, name, *_ in brief(one.started("x", now_s=1.0))] == ["x", "y"]
    assert [name for _, name, *_ in brief(one.started("y", now_s=2.0))] == ["y", "p-0"]


def test_labels_and_own_makers_get_nothing_from_the_pool():
    one = law()
    filled(one, 2)
    ask, orders = submit(one, sandbox_id="x", poolable=False)
    # Of the two wanted this is one, so one idle one is too many.
    assert brief(orders) == [("remove", "p-0"), ("start", "x", ask.number)]


def test_where_leases_cannot_be_renewed_there_is_no_pool():
    one = law(pooling=False)
    assert one.demand(A, 5, now_s=0.0) == []
    assert one.tick(now_s=1.0) == []


def test_idle_ones_make_room_as_few_as_needed_and_only_if_that_helps():
    one = law(max_running=4, initial_starting=4)
    names = filled(one, 3)
    got(one, B)
    waits, orders = submit(one, B, sandbox_id="x", now_s=1.0)
    assert brief(orders) == [("remove", names[0])]
    assert waits.waiting is Waiting.RUNNING
    assert one.tick(now_s=2.0) == []  # that one is on its way out; another one need not go
    assert brief(one.gone(names[0], now_s=3.0)) == [("start", "x", waits.number)]
    tight = law(memory_bytes=1024**3, initial_starting=4)
    got(tight)
    filled(tight, 2)  # 512 MiB each: the running one and this one fill the budget
    assert submit(tight, BIG)[1] == []  # without the running one's end, nothing of the pool would help


def test_dead_idle_ones_are_replaced_and_counted():
    one = law()
    names = filled(one, 2)
    assert brief(one.dead_idle(names[0], now_s=1.0)) == [("remove", names[0]), ("start", "p-2", None)]
    assert one.dead_idle(names[0], now_s=1.0) == []
    ask, (give,) = submit(one, now_s=1.0)
    assert isinstance(give, Give)
    assert brief(one.dead_at_hand_out(give.sandbox_id, now_s=1.0))[0] == ("remove", give.sandbox_id)
    one.submit(ask, now_s=1.0)
    assert (one.counters["dead_idle"], one.counters["dead_at_hand_out"]) == (1, 1)
    assert ask.number in one.asks


def test_old_idle_ones_are_replaced():
    one = law(pool={"max_age_s": 60.0})
    names = filled(one, 2)
    assert one.tick(now_s=60.0) == []
    assert [order for order in brief(one.tick(now_s=60.1)) if order[0] == "remove"] == [("remove", n) for n in names]
    assert one.counters["aged"] == 2


def test_a_pool_that_cannot_be_filled_is_tried_less_and_less_often():
    one = law(initial_starting=1, breaker_failures=99, hold_s=1.0)
    one.demand(A, 1, now_s=0.0)
    start = only_start(one.prepared(A, done=True, now_s=0.0))
    rests, now_s = [], 0.0
    for _ in range(4):
        assert one.failed(start.sandbox_id, How.REQUEST, error=FAULT, left=False, now_s=now_s) == []
        wakes_s = one.wakes_s(now_s=now_s)
        assert wakes_s is not None
        rests.append(wakes_s - now_s)
        now_s = wakes_s
        start = only_start(one.tick(now_s=now_s))
    assert rests == [1.0, 2.0, 4.0, 8.0]


def test_a_node_under_pressure_starts_nothing_drops_what_is_idle_and_goes_on_afterwards():
    one = law()
    names = filled(one, 2)
    stop = PressureVerdict(factor=0.0, stop=True, cause="memory_free is 0.01")
    assert brief(one.press(stop, now_s=1.0)) == [("remove", name) for name in names]
    waits, orders = submit(one, now_s=1.0)
    assert (orders, waits.waiting) == ([], Waiting.PRESSURE)
    assert [kind for kind, *_ in brief(one.press(CALM, now_s=2.0))] == ["start", "start"]
    assert [kind for kind, *_ in brief(one.stop("guard", now_s=3.0))] == []
    assert one.late(submit(one, now_s=3.0)[0], now_s=9.0).waiting_for == "admission_stopped"


def test_eviction_on_request_takes_surplus_first_and_no_more_than_asked():
    one = law(initial_starting=4)
    names = filled(one, 3)
    assert brief(one.evict(2, now_s=1.0)) == [("remove", name) for name in names[:2]]
    assert one.counters["evicted"] == 2


# -- suspension ------------------------------------------------------------------------------------------------------


def suspended(one: AdmissionLaw, name: str, *, now_s: float) -> list[Order]:
    one.may_pause(name)
    return one.paused(name, done=True, now_s=now_s)


def test_a_suspended_one_lets_another_run_and_goes_on_before_those_that_begin():
    one = law(max_running=1)
    first = got(one)
    waits, _ = submit(one, sandbox_id="x")
    assert brief(suspended(one, first, now_s=1.0)) == [("start", "x", waits.number)]
    one.started("x", now_s=2.0)
    one.accepted("x", now_s=2.0)
    submit(one, sandbox_id="y", now_s=3.0)
    resume, orders = submit(one, now_s=4.0, thaws=first, kind=Kind.RESUME)
    assert (orders, resume.waiting) == ([], Waiting.RUNNING)
    one.ended("x", now_s=5.0)
    assert brief(one.gone("x", now_s=5.0)) == [("give", first, resume.number, False)]
    one.accepted(first, now_s=5.0)
    assert one.counters["resumed"] == 1


def test_no_more_are_suspended_than_may_be_those_on_their_way_counted():
    one = law(max_suspended=1, initial_starting=2)
    first, second = got(one), got(one)
    one.may_pause(first)
    with pytest.raises(SandboxNotAdmitted, match="max_suspended"):
        one.may_pause(second)
    one.paused(first, done=False, now_s=1.0)
    suspended(one, second, now_s=1.0)
    assert one.books.count[Place.SUSPENDED] == 1


def test_who_waits_for_one_that_dies_is_told_and_a_resume_whose_caller_left_is_not_given_to_others():
    one = law(max_running=1)
    first = got(one)
    suspended(one, first, now_s=1.0)
    got(one, now_s=1.0)
    submit(one, now_s=2.0, thaws=first, kind=Kind.RESUME)
    assert brief(one.ended(first, now_s=3.0)) == [("remove", first), ("refuse", 2, "SandboxError")]
    other = law()
    name = got(other)
    suspended(other, name, now_s=1.0)
    ask, (give,) = submit(other, now_s=2.0, thaws=name, kind=Kind.RESUME)
    assert brief([give]) == [("give", name, ask.number, False)]
    other.untaken(name, now_s=2.0)
    other.withdraw(ask.number, now_s=2.0)
    assert other.books.count[Place.POOLED] == 0
    assert other.templates.of(A).held == 1


def test_what_was_never_looked_at_goes_back_to_the_pool_or_to_the_next_who_waits():
    one = law(max_running=1)
    (name,) = filled(one, 1)
    ask, _ = submit(one, now_s=1.0)
    following, _ = submit(one, now_s=1.0)
    assert brief(one.untaken(name, now_s=2.0)) == [("give", name, following.number, False)]
    one.withdraw(ask.number, now_s=2.0)
    one.untaken(name, now_s=3.0)
    one.withdraw(following.number, now_s=3.0)
    assert one.books.claims[name].place is Place.POOLED


def test_settings_and_orders_can_be_written_down():
    settings = PoolSettings(admission=AdmissionSettings(max_running=7))
    assert msgspec.json.decode(msgspec.json.encode(settings), type=PoolSettings) == settings
