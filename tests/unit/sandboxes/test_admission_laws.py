"""Breaker, starting cap, pressure, targets, eviction order, budgets: the laws that admission is made of."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

from rollmill.errors import (
    ConfigError,
    CreateUnknown,
    DeadlineExceeded,
    ImageError,
    IsolationError,
    SandboxDead,
    SandboxIdInUse,
    SandboxRetryable,
)
from rollmill.sandboxes import DirectoryImage, Limits, SandboxSpec
from rollmill.sandboxes.admission import (
    AdmissionSettings,
    PoolSettings,
    PressureSample,
    PressureSettings,
    Ramp,
    breaker,
    outcomes,
    pool,
    pressure,
    settings,
    starting_cap,
    targets,
)
from rollmill.sandboxes.admission.books import Books, Claim
from rollmill.sandboxes.admission.breaker import Breaker, BreakerState
from rollmill.sandboxes.admission.gates import Gates
from rollmill.sandboxes.admission.outcomes import Left, outcome_of
from rollmill.sandboxes.admission.pressure import PressureVerdict, judge
from rollmill.sandboxes.admission.records import How, Needs, Place, Waiting
from rollmill.sandboxes.admission.starting_cap import StartingCap
from rollmill.sandboxes.admission.targets import Idle, TakeRate, eviction_order, idle_target

EXAMPLES = [breaker, outcomes, pool, pressure, settings, starting_cap, targets]
SPEC = SandboxSpec()
OTHER = SandboxSpec(image=DirectoryImage(layers=("/other",)))


def claim(name: str = "a", *, spec: SandboxSpec = SPEC, needs: Needs | None = None, now_s: float = 0.0) -> Claim:
    return Claim(name, spec=spec, needs=Needs() if needs is None else needs, ask=None, now_s=now_s)


@pytest.mark.parametrize("module", EXAMPLES, ids=lambda module: module.__name__)
def test_examples_in_docstrings_work(module):
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0


# -- breaker ---------------------------------------------------------------------------------------------------------


def test_a_breaker_opens_at_failures_in_a_row_and_a_success_between_them_starts_the_count_again():
    breaker = Breaker(failures=2, open_s=10.0)
    breaker.failed(now_s=0.0)
    breaker.succeeded()
    breaker.failed(now_s=1.0)
    assert breaker.allows(now_s=1.0)
    breaker.failed(now_s=2.0)
    assert (breaker.state(now_s=11.9), breaker.state(now_s=12.0)) == (BreakerState.OPEN, BreakerState.HALF_OPEN)


def test_a_half_open_breaker_lets_one_probe_through_and_its_failures_double_the_rest_up_to_sixteen_times():
    breaker = Breaker(failures=1, open_s=10.0)
    breaker.failed(now_s=0.0)
    rests = []
    for _ in range(6):
        now_s = breaker.reopens_s
        assert breaker.allows(now_s=now_s)
        assert breaker.began()
        assert not breaker.allows(now_s=now_s)
        breaker.failed(now_s=now_s, probe=True)
        rests.append(breaker.reopens_s - now_s)
    assert rests == [20.0, 40.0, 80.0, 160.0, 160.0, 160.0]
    breaker.began()
    breaker.succeeded()
    assert breaker.state(now_s=0.0) is BreakerState.CLOSED
    breaker.failed(now_s=1000.0)
    assert breaker.reopens_s == 1010.0  # and the doubling is forgotten


def test_what_began_before_a_breaker_opened_neither_closes_its_probe_nor_makes_its_rest_longer():
    breaker = Breaker(failures=1, open_s=10.0)
    breaker.failed(now_s=0.0)
    breaker.failed(now_s=5.0)
    assert breaker.reopens_s == 10.0
    assert breaker.began()
    breaker.undecided()
    assert breaker.allows(now_s=10.0)


# -- starting cap ----------------------------------------------------------------------------------------------------


def cap(*, initial: int = 4, maximum: int = 8) -> StartingCap:
    return StartingCap(minimum=1, initial=initial, maximum=maximum, slow_factor=3.0)


def test_crowded_starts_that_are_not_slow_raise_the_cap_by_one_for_each_cap_of_them():
    one = cap(initial=2)
    one.succeeded(SPEC, began_s=0.0, took_s=1.0, crowded=True, now_s=1.0)
    assert one.value == 2.5
    one.succeeded(SPEC, began_s=0.0, took_s=1.0, crowded=True, now_s=1.0)
    assert one.value == 2.9
    assert one.limit(factor=1.0, stop=False) == 2
    for _ in range(100):
        one.succeeded(SPEC, began_s=0.0, took_s=1.0, crowded=True, now_s=1.0)
    assert one.limit(factor=1.0, stop=False) == 8


def test_starts_that_had_room_say_nothing_about_a_larger_cap():
    one = cap()
    for _ in range(100):
        one.succeeded(SPEC, began_s=0.0, took_s=1.0, crowded=False, now_s=1.0)
    assert one.value == 4.0


def test_starts_that_became_slow_cut_the_cap_once_and_what_began_before_the_cut_counts_no_more():
    one = cap(initial=8)
    for _ in range(4):
        one.succeeded(SPEC, began_s=0.0, took_s=0.1, crowded=True, now_s=1.0)
    # The mean goes 0.1 -> 0.1 + 0.3 (1.0 - 0.1) = 0.37, more than 3 times the best, 0.1.
    one.succeeded(SPEC, began_s=1.0, took_s=1.0, crowded=True, now_s=2.0)
    assert one.value == 6.0
    for _ in range(9):
        one.succeeded(SPEC, began_s=1.9, took_s=1.0, crowded=True, now_s=2.5)
    assert one.value == 6.0


def test_a_slow_template_is_compared_with_itself_only():
    one = cap(initial=4)
    for _ in range(10):
        one.succeeded(SPEC, began_s=0.0, took_s=0.1, crowded=False, now_s=1.0)
        one.succeeded(OTHER, began_s=0.0, took_s=9.0, crowded=False, now_s=1.0)
    assert one.value == 4.0
    assert (round(one.warm_up_s(SPEC), 6), round(one.warm_up_s(OTHER), 6)) == (0.1, 9.0)


def test_what_is_slow_for_good_is_taken_for_normal_at_the_lowest_cap_and_not_before():
    one = cap(initial=8)
    for at_s in range(4):
        one.succeeded(SPEC, began_s=at_s, took_s=0.1, crowded=True, now_s=at_s)
    cuts = []
    for at_s in range(10, 200):
        before = one.value
        one.succeeded(SPEC, began_s=at_s, took_s=1.0, crowded=True, now_s=at_s)
        if one.value < before:
            cuts.append(at_s)
    assert cuts
    assert one.value > 4.0  # it has grown again: at 1 s a start is as fast as it gets


def test_failures_of_starts_that_were_under_way_together_halve_the_cap_once():
    one = cap(initial=8)
    assert [one.failed(began_s=0.0, now_s=1.0) for _ in range(5)] == [True, False, False, False, False]
    assert one.value == 4.0
    for at_s in (2.0, 3.0, 4.0):
        one.failed(began_s=at_s, now_s=at_s)
    assert one.value == 1.0  # and never below the minimum


def test_pressure_shrinks_what_may_start_to_the_minimum_and_a_stop_to_nothing():
    one = cap(initial=8)
    assert [one.limit(factor=factor, stop=False) for factor in (1.0, 0.5, 0.2, 0.0)] == [8, 4, 1, 1]
    assert one.limit(factor=0.0, stop=True) == 0


# -- pressure --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "factor", "stop"),
    [
        ({}, 1.0, False),
        ({"cpu_some": 0.6}, 1.0, False),
        ({"cpu_some": 1.0}, 0.0, False),  # busy processors slow down, they never stop
        ({"io_full": 0.55}, 0.5, False),
        ({"memory_some": 0.25}, 0.5, False),
        ({"memory_some": 0.4}, 0.0, True),
        ({"memory_full": 0.15}, 0.0, True),
        ({"memory_free": 0.09}, 0.5, False),
        ({"memory_free": 0.06}, 0.0, True),
        ({"disk_free": 0.01}, 0.0, True),
        ({"inodes_free": 0.05}, 0.0, True),
        ({"pids_free": 0.05}, 0.0, True),
        ({"cpu_some": 0.775, "memory_free": 0.5}, 0.5, False),
        ({"cpu_some": 1.0, "memory_free": 0.01}, 0.0, True),  # of two that leave nothing, the one that stops counts
    ],
)
def test_the_worst_figure_decides_and_only_what_does_not_come_back_stops(seen, factor, stop):
    verdict = judge(PressureSample(**seen), settings=PressureSettings())
    assert (round(verdict.factor, 9), verdict.stop) == (factor, stop)
    assert bool(verdict.cause) == (factor < 1)


def test_a_ramp_without_length_is_refused():
    with pytest.raises(ConfigError, match="must differ"):
        Ramp(begin=0.5, end=0.5)


# -- targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("demand", "busy", "rate_per_s", "warm_up_s", "target"),
    [
        (0, 0, 100.0, 1.0, 0),  # no demand, no spare
        (96, 0, 0.0, 0.02, 96),
        (96, 96, 0.0, 0.02, 0),
        (96, 200, 0.0, 0.02, 0),
        (96, 96, 2.0, 0.5, 1),  # one is taken while one starts
        (96, 96, 100.0, 1.0, 10),  # at most a tenth of the demand
        (960, 96, 0.0, 0.02, 864),
        (5000, 0, 0.0, 0.02, 1000),  # max_idle
    ],
)
def test_idle_ones_follow_demand_and_beyond_it_cover_one_warm_up(demand, busy, rate_per_s, warm_up_s, target):
    found = idle_target(demand=demand, busy=busy, rate_per_s=rate_per_s, warm_up_s=warm_up_s, settings=PoolSettings())
    assert found == target


def test_a_least_number_is_kept_while_there_is_demand_and_not_after():
    settings = PoolSettings(min_idle=3)
    wanted = [
        idle_target(demand=demand, busy=1, rate_per_s=0.0, warm_up_s=0.0, settings=settings) for demand in (1, 9, 0)
    ]
    assert wanted == [3, 8, 0]


def test_a_rate_fades_within_its_window():
    rate = TakeRate(window_s=10.0)
    for _ in range(20):
        rate.taken(now_s=5.0)
    assert rate.per_s(now_s=5.0) == 2.0
    assert round(rate.per_s(now_s=15.0), 4) == 0.7358  # 2 / e


def test_idle_ones_go_before_suspended_surplus_before_wanted_and_old_before_young():
    order = eviction_order(
        [
            Idle(sandbox_id="suspended", since_s=0.0, suspended=True),
            Idle(sandbox_id="wanted-much", since_s=1.0, demand=50),
            Idle(sandbox_id="wanted-little", since_s=9.0, demand=2),
            Idle(sandbox_id="surplus-young", since_s=8.0, over_target=True, demand=60),
            Idle(sandbox_id="surplus-old", since_s=7.0, over_target=True, demand=60),
        ]
    )
    assert order == ["surplus-old", "surplus-young", "wanted-little", "wanted-much", "suspended"]


# -- budgets ---------------------------------------------------------------------------------------------------------


def test_every_budget_is_named_when_it_is_full():
    needs = Needs(memory_bytes=10, cpus=0.1, disk_bytes=10, inodes=10)
    for budgets, waiting in (
        (AdmissionSettings(max_running=2), Waiting.RUNNING),
        (AdmissionSettings(memory_bytes=29), Waiting.MEMORY),
        (AdmissionSettings(cpus=0.29), Waiting.CPUS),
        (AdmissionSettings(disk_bytes=29), Waiting.DISK),
        (AdmissionSettings(inodes=29), Waiting.INODES),
    ):
        books = Books(budgets)
        for name in "ab":
            assert books.short_of(needs) is None
            books.add(claim(name, needs=needs))
        assert books.short_of(needs) is waiting


def test_a_budget_is_used_to_its_last_byte_and_many_shares_add_up_exactly():
    books = Books(AdmissionSettings(cpus=1.0, memory_bytes=100))
    needs = Needs(memory_bytes=10, cpus=0.1)
    for number in range(10):
        assert books.short_of(needs) is None
        books.add(claim(str(number), needs=needs))
    assert books.short_of(needs) is Waiting.CPUS
    for one in list(books.claims.values()):
        books.remove(one)
    assert (books.held("cpus"), books.held("memory_bytes"), books.running()) == (0.0, 0, 0)


def test_a_suspended_sandbox_gives_back_its_processors_and_keeps_its_memory():
    books = Books(AdmissionSettings(cpus=1.0, memory_bytes=100, max_running=1))
    one = claim(needs=Needs(memory_bytes=60, cpus=1.0))
    books.add(one)
    books.move(one, Place.SUSPENDED, now_s=1.0)
    assert books.short_of(Needs(memory_bytes=40, cpus=1.0)) is None
    assert books.short_of(Needs(memory_bytes=41, cpus=1.0)) is Waiting.MEMORY
    assert books.short_of(one.needs, thaw=True) is None  # to go on it needs no memory a second time


def test_a_sandbox_that_is_being_killed_has_left_the_starting_cap_and_nothing_else():
    books = Books(AdmissionSettings(max_running=1))
    one = claim()
    books.add(one)
    books.stop(one)
    assert (books.starting, books.running(), books.short_of(Needs())) == (0, 1, Waiting.RUNNING)
    assert books.short_of(Needs(), freed=[one]) is None


# -- gates -----------------------------------------------------------------------------------------------------------


def gates(**settings: Any) -> Gates:
    return Gates(AdmissionSettings(**settings), cores=4)


def test_gates_are_asked_from_the_widest_to_the_narrowest():
    one = gates(initial_starting=2)
    assert one.why_not(SPEC.image, starting=1, now_s=0.0) is None
    assert one.why_not(SPEC.image, starting=2, now_s=0.0) is Waiting.STARTING_CAP
    for _ in range(2):
        one.failed(claim(), How.IMAGE, after_s=0.0, now_s=0.0)
    assert one.why_not(SPEC.image, starting=2, now_s=0.0) is Waiting.IMAGE_BREAKER
    assert one.why_not(OTHER.image, starting=1, now_s=0.0) is None
    for at_s in range(5):
        one.failed(claim(now_s=at_s), How.FAILED, after_s=0.0, now_s=at_s)
    assert one.why_not(SPEC.image, starting=0, now_s=4.0) is Waiting.BREAKER
    one.failed(claim(now_s=5.0), How.NO_ROOM, after_s=3.0, now_s=5.0)
    assert one.why_not(SPEC.image, starting=0, now_s=7.9) is Waiting.HOLD
    one.verdict = PressureVerdict(factor=0.0, stop=True, cause="memory")
    assert one.why_not(SPEC.image, starting=0, now_s=7.9) is Waiting.PRESSURE
    one.stopped = "the guard says so"
    assert one.why_not(SPEC.image, starting=0, now_s=7.9) is Waiting.STOPPED
    assert one.limit == 0


def test_a_resume_passes_all_gates_but_a_stop():
    one = gates(initial_starting=1)
    one.failed(claim(), How.NO_ROOM, after_s=100.0, now_s=0.0)
    assert one.why_not(None, starting=9, now_s=0.0) is None
    one.stopped = "the guard says so"
    assert one.why_not(None, starting=9, now_s=0.0) is Waiting.STOPPED


def test_a_provider_without_room_is_left_alone_for_as_long_as_it_says_and_longer_each_time_in_a_row():
    one = gates(hold_s=0.5, max_hold_s=3.0)
    rests = []
    for number in range(5):
        now_s = 10.0 * number
        one.failed(claim(now_s=now_s), How.NO_ROOM, after_s=0.0, now_s=now_s)
        rests.append(one.hold_until_s - now_s)
    assert rests == [0.5, 1.0, 2.0, 3.0, 3.0]
    one.failed(claim(now_s=100.0), How.NO_ROOM, after_s=60.0, now_s=100.0)
    assert one.hold_until_s == 160.0
    one.succeeded(claim(now_s=160.0), now_s=161.0)
    one.failed(claim(now_s=170.0), How.NO_ROOM, after_s=0.0, now_s=170.0)
    assert one.hold_until_s == 170.5


def test_many_refusals_at_once_count_as_one():
    one = gates(hold_s=0.5)
    for _ in range(20):
        one.failed(claim(now_s=0.0), How.NO_ROOM, after_s=0.0, now_s=1.0)
    assert one.hold_until_s == 1.5


def test_only_the_providers_own_failures_open_its_breaker():
    one = gates(breaker_failures=1)
    for how in (How.NO_ROOM, How.IMAGE, How.REQUEST, How.CUT):
        one.failed(claim(), how, after_s=0.0, now_s=0.0)
        assert one.provider.closed
    one.failed(claim(), How.FAILED, after_s=0.0, now_s=0.0)
    assert not one.provider.closed


# -- outcomes and settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "how", "left"),
    [
        (SandboxRetryable("full", after_s=1.0), How.NO_ROOM, Left.NOTHING),
        (CreateUnknown("cut", sandbox_id="a"), How.FAILED, Left.UNKNOWN),
        (ImageError("broken"), How.IMAGE, Left.NOTHING),
        (SandboxIdInUse("taken"), How.REQUEST, Left.NOTHING),
        (IsolationError("too little"), How.REQUEST, Left.NOTHING),
        (ConfigError("bad"), How.REQUEST, Left.NOTHING),
        (SandboxDead("gone", reason="exited", fault="infrastructure"), How.FAILED, Left.MAYBE),
        (ConnectionResetError("cut"), How.FAILED, Left.UNKNOWN),
        (DeadlineExceeded("too long"), How.FAILED, Left.UNKNOWN),
        (ZeroDivisionError("a bug"), How.REQUEST, Left.MAYBE),
    ],
)
def test_each_error_of_a_creation_says_whose_fault_it_is_and_what_may_be_left(error, how, left):
    found = outcome_of(error)
    assert (found.how, found.left) == (how, left)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdmissionSettings(max_starting=1, min_starting=2),
        lambda: AdmissionSettings(slow_factor=1.0),
        lambda: AdmissionSettings(deadline_s=0.0),
        lambda: AdmissionSettings(start_s=float("inf")),
        lambda: AdmissionSettings(memory_bytes=-1),
        lambda: AdmissionSettings(max_running=0),
        lambda: PoolSettings(max_idle=1, min_idle=2),
        lambda: PoolSettings(close_s=float("nan")),
        lambda: PoolSettings(spare_share=-0.1),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_what_never_fits_is_named_with_both_numbers():
    books = Books(AdmissionSettings(memory_bytes=100))
    assert books.never_fits(Needs(memory_bytes=101)) == "limits.memory_bytes is 101 and the whole budget 100"
    assert books.never_fits(Needs(memory_bytes=100)) == ""
    assert Limits().memory_bytes == 512 * 1024**2
