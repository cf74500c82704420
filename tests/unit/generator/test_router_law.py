"""Where a request goes: standing, load, sessions, versions, waves, quotas, queues."""

from __future__ import annotations

import pytest

from rollmill.errors import ModelError, NotServing, Overloaded, RequestIdInUse
from rollmill.generator.router.law import RouterLaw
from rollmill.generator.router.records import Ended, Seen
from router_builders import answer, ask, law_of, place, refused, report, sent

# -- standing and load


@pytest.mark.parametrize("state", ["dirty", "draining", "starting", "dead"])
def test_a_replica_that_does_not_serve_gets_nothing(state):
    law = law_of("a", "b")
    law.report("a", report(state=state), now_s=0.0)
    assert {place(law, f"r{number}") for number in range(4)} == {"b"}


def test_a_replica_that_has_not_answered_yet_gets_nothing():
    law = law_of()
    law.table.join("a")
    assert place(law, "r") is None
    assert "a unknown (has not answered yet)" in law.why_waiting("r")


def test_requests_go_to_the_replica_with_fewest_samples():
    law = law_of("a", "b", "c", slots=10)
    assert [place(law, "r1", siblings=4), place(law, "r2"), place(law, "r3", siblings=2), place(law, "r4")] == [
        "a",
        "b",
        "c",
        "b",
    ]


def test_kv_in_use_counts_half_as_much_as_places():
    law = law_of("a", "b")
    law.report("a", report(kv_use=0.9), now_s=0.0)
    law.report("b", report(kv_use=0.3), now_s=0.0)
    # b: 1 of 4 places + 0.15 = 0.40 < a's 0.45; then 0.65 > 0.45.
    assert [place(law, f"r{number}") for number in range(3)] == ["b", "b", "a"]


def test_samples_that_came_past_the_router_count_as_load():
    law = law_of("a", "b", slots=8)
    law.report("a", report(slots=8, running=5, waiting=1), now_s=0.0)
    assert [place(law, f"r{number}") for number in range(6)] == ["b"] * 6
    assert place(law, "r6") in ("a", "b")


def test_samples_of_the_router_in_a_status_are_not_counted_twice():
    law = law_of("a", slots=4)
    place(law, "r1", siblings=2)
    law.report("a", report(running=2), now_s=0.0, in_flight_before=2)
    assert law.table["a"].others == 0
    answer(law, "r1", "a")
    law.report("a", report(running=2), now_s=0.0, in_flight_before=2)
    assert law.table["a"].others == 0


def test_a_call_with_more_siblings_than_places_goes_to_an_idle_replica():
    law = law_of("a", slots=4)
    assert place(law, "big", siblings=9) == "a"
    assert place(law, "small") is None


def test_a_replica_that_loads_weights_comes_after_others_with_room():
    law = law_of("a", "b", slots=8)
    law.table.loads("a", 2)
    # 0.25 is two of eight places.
    assert [place(law, f"r{number}") for number in range(3)] == ["b", "b", "a"]


def test_overcommit_gives_a_replica_more_than_it_decodes_at_once():
    law = law_of("a", slots=4, overcommit=1.5)
    assert [place(law, f"r{number}") for number in range(7)] == ["a"] * 6 + [None]


# -- joins, restarts, versions


def test_a_late_joiner_serves_only_after_it_has_loaded_the_fleets_version():
    law = law_of("a", version=5)
    law.table.join("b")
    law.report("b", report(1), now_s=0.0)
    assert law.table["b"].seen is Seen.JOINING
    assert law.table["b"].target == 5
    assert [place(law, "r1"), place(law, "r2")] == ["a", "a"]
    law.report("b", report(5), now_s=0.0)
    assert law.table["b"].seen is Seen.SERVING
    assert place(law, "r3") == "b"


def test_a_replica_that_was_restarted_with_old_weights_joins_anew():
    law = law_of("a", "b", version=5)
    law.report("b", report(5, age_s=100.0), now_s=0.0)
    law.report("b", report(1, age_s=2.0), now_s=1.0)
    assert law.table["b"].seen is Seen.JOINING
    assert place(law, "r") == "a"


def test_a_replica_that_is_only_behind_in_an_update_goes_on_serving():
    law = law_of("a", "b")
    law.report("b", report(2), now_s=0.0)
    assert law.table["a"].seen is Seen.SERVING


def test_weights_that_differ_under_one_version_are_dirty():
    law = law_of("a")
    law.table.join("b")
    law.report("b", report(1, digest="other"), now_s=0.0)
    assert law.table["b"].seen is Seen.DIRTY
    assert "version 1 has digest other, while a serves it with digest-1" in law.table["b"].reason


def test_a_request_goes_to_no_replica_with_older_weights_than_it_asks_for():
    law = law_of("a", "b")
    law.report("b", report(2), now_s=0.0)
    assert [place(law, f"r{number}", min_policy_version=2) for number in range(4)] == ["b"] * 4
    assert place(law, "r4", min_policy_version=2) is None
    assert place(law, "r5", min_policy_version=1) == "a"
    assert sent(law.report("a", report(2), now_s=0.0)) == [("r4", "a")]


def test_what_waits_for_newer_weights_holds_up_nobody():
    law = law_of("a")
    assert place(law, "new", min_policy_version=9) is None
    assert place(law, "old") == "a"
    assert "policy version 9 or newer (the newest that serves is 1)" in law.why_waiting("new")


def test_a_jobs_own_replicas_serve_no_other_job():
    law = law_of("shared")
    law.table.join("own", jobs=("x",))
    law.report("own", report(7), now_s=0.0)
    assert law.table["own"].seen is Seen.SERVING
    assert place(law, "r1", job="x", min_policy_version=7) == "own"
    assert {place(law, f"y{number}", job="y") for number in range(4)} == {"shared"}
    assert place(law, "y4", job="y") is None


# -- sessions, groups, waves


def test_turns_of_a_session_go_to_one_replica():
    law = law_of("a", "b", "c")
    home = place(law, "t1", session_id="s")
    for turn in range(2, 5):
        assert home is not None
        answer(law, f"t{turn - 1}", home)
        place(law, f"other{turn}")
        assert place(law, f"t{turn}", session_id="s") == home


def test_requests_of_a_group_go_together():
    law = law_of("a", "b", slots=8)
    assert len({place(law, f"r{number}", group_key="g") for number in range(8)}) == 1


def test_sessions_of_two_jobs_with_one_name_are_two():
    law = law_of("a", "b")
    assert place(law, "x", job="x", session_id="s") == "a"
    assert place(law, "y", job="y", session_id="s") == "b"


def test_a_session_moves_when_its_replica_leaves():
    law = law_of("a", "b")
    assert place(law, "t1", session_id="s") == "a"
    law.leave("a", now_s=0.0)
    assert place(law, "t2", session_id="s") == "b"
    assert law.table["a"].seen is Seen.LEAVING
    answer(law, "t1", "a")
    assert "a" not in law.table


def test_a_session_moves_when_its_replica_is_overloaded_beyond_the_slack():
    law = law_of("a", "b", slots=4, session_slack=0.5)
    assert place(law, "t1", session_id="s") == "a"
    law.table["a"].in_flight += 3
    # a is full, b is empty: 1.0 - 0.0 > 0.5.
    assert place(law, "t2", session_id="s") == "b"


def test_a_session_stays_at_a_full_replica_while_others_are_hardly_emptier():
    law = law_of("a", "b", slots=4, session_slack=0.5)
    assert place(law, "t1", session_id="s") == "a"
    law.table["a"].in_flight += 3
    law.table["b"].in_flight += 2
    # 1.0 - 0.5 is not more than 0.5.
    assert place(law, "t2", session_id="s") == "a"


def test_a_restarted_replica_is_no_ones_home():
    law = law_of("a", "b")
    law.report("a", report(age_s=50.0), now_s=0.0)
    assert place(law, "t1", session_id="s") == "a"
    law.report("a", report(age_s=1.0), now_s=0.0)
    assert place(law, "t2", session_id="s") == "b"


def test_a_wave_stays_together_past_places_and_quota():
    law = law_of("a", "b", slots=4, jobs={"w": {"max_in_flight": 2}})
    homes = [place(law, f"w{number}", wave_id="w", job="w") for number in range(6)]
    assert homes == ["a"] * 6


def test_a_wave_whose_replica_is_gone_fails_whole():
    law = law_of("a", "b")
    assert place(law, "w0", wave_id="w") == "a"
    law.table.silent("a", reason="gone", dead=True)
    error = refused(law.submit(ask("w1", wave_id="w"), now_s=0.0))
    assert isinstance(error, NotServing)
    assert "a wave runs on one" in str(error)


# -- queue and quotas


def test_requests_wait_for_room_and_go_in_order():
    law = law_of("a", slots=2)
    assert [place(law, f"r{number}") for number in range(4)] == ["a", "a", None, None]
    assert answer(law, "r1", "a") == [("r2", "a")]
    assert answer(law, "r0", "a") == [("r3", "a")]
    law.validate()


def test_a_request_that_leaves_the_queue_lets_the_next_go():
    law = law_of("a", slots=2)
    place(law, "r0")
    place(law, "big", siblings=2)
    place(law, "small")
    assert sent(law.close("big", now_s=0.0)) == [("small", "a")]
    law.validate()


def test_small_requests_do_not_take_every_place_that_a_large_one_waits_for():
    law = law_of("a", slots=4)
    for number in range(4):
        place(law, f"r{number}")
    assert place(law, "big", siblings=4, job="x") is None
    assert place(law, "small", job="y") is None
    assert [answer(law, f"r{number}", "a") for number in range(4)] == [[], [], [], [("big", "a")]]
    assert answer(law, "big", "a") == [("small", "a")]


def test_a_full_queue_refuses_with_the_time_its_samples_will_take():
    law = law_of("a", slots=1, max_queue=2)
    place(law, "r0", now_s=0.0)
    for second in range(1, 11):
        assert answer(law, f"r{second - 1}", "a", now_s=float(second)) == []
        place(law, f"r{second}", now_s=float(second))
    place(law, "w1", now_s=10.0)
    place(law, "w2", now_s=10.0)
    error = refused(law.submit(ask("w3"), now_s=11.0))
    assert isinstance(error, Overloaded)
    # 10 samples in the 10 s since the first answer: 1 per second, and 2 wait.
    assert error.retry_after_s == pytest.approx(2.0)
    assert "2 samples wait in the router, and max_queue is 2" in str(error)


def test_a_jobs_own_queue_is_bounded_too():
    law = law_of("a", slots=1, jobs={"x": {"max_queue": 1}})
    place(law, "r0", job="x")
    place(law, "r1", job="x")
    assert "1 samples of job 'x' wait" in str(refused(law.submit(ask("r2", job="x"), now_s=0.0)))
    assert place(law, "r3", job="y") is None


def test_a_job_at_its_quota_waits_while_others_go():
    law = law_of("a", slots=8, jobs={"x": {"max_in_flight": 2, "priority": "high"}})
    assert [place(law, f"x{number}", job="x") for number in range(3)] == ["a", "a", None]
    assert "its max_in_flight is 2" in law.why_waiting("x2")
    assert place(law, "y", job="y") == "a"
    assert answer(law, "x0", "a") == [("x2", "a")]


def test_higher_classes_go_first():
    jobs = {"hi": {"priority": "high"}, "lo": {"priority": "low"}}
    law = law_of("a", slots=1, jobs=jobs)
    place(law, "r0", job="lo")
    for name in ("lo", "mid", "hi"):
        place(law, name, job=name)
    assert answer(law, "r0", "a") == [("hi", "a")]
    assert answer(law, "hi", "a") == [("mid", "a")]
    assert answer(law, "mid", "a") == [("lo", "a")]


def test_who_waited_long_rises_by_a_class():
    law = law_of("a", slots=1, jobs={"hi": {"priority": "high"}, "lo": {"priority": "low"}}, promote_after_s=5.0)
    place(law, "r0", job="hi", now_s=0.0)
    place(law, "lo", job="lo", now_s=0.0)
    place(law, "hi", job="hi", now_s=9.0)
    # After 9.9 s `lo` counts as normal, after 10 s as high, and then its lower tag decides.
    assert sent(law.close("r0", now_s=9.9)) == [("hi", "a")]
    place(law, "hi2", job="hi", now_s=9.9)
    assert answer(law, "hi", "a", now_s=10.0) == [("lo", "a")]


def test_jobs_of_one_class_share_by_weight():
    law = law_of("a", slots=1, jobs={"x": {"weight": 3.0}, "y": {"weight": 1.0}})
    place(law, "first")
    for number in range(40):
        place(law, f"x{number}", job="x")
        place(law, f"y{number}", job="y")
    served, current = [], "first"
    for _ in range(24):
        ((current, _),) = answer(law, current, "a")
        served.append(current[0])
    assert served.count("x") == 18
    assert served.count("y") == 6


def test_who_was_idle_saved_nothing_up():
    law = law_of("a", slots=1)
    place(law, "x0", job="x")
    for number in range(1, 20):
        place(law, f"x{number}", job="x")
    current = "x0"
    for _ in range(10):
        ((current, _),) = answer(law, current, "a")
    for number in range(10):
        place(law, f"y{number}", job="y")
    served = []
    for _ in range(8):
        ((current, _),) = answer(law, current, "a")
        served.append(current[0])
    assert sorted(served) == ["x"] * 4 + ["y"] * 4


def test_an_id_in_use_is_refused_and_disturbs_nothing():
    law = law_of("a", "b")
    assert place(law, "r") == "a"
    assert isinstance(refused(law.submit(ask("r"), now_s=0.0)), RequestIdInUse)
    assert law.where("r") == ["a"]
    law.validate()


def test_a_draining_router_takes_nothing_new_and_finishes_what_waits():
    law = law_of("a", slots=1)
    place(law, "r0")
    place(law, "r1")
    law.drain("the router was told to stop")
    assert isinstance(refused(law.submit(ask("r2"), now_s=0.0)), NotServing)
    assert answer(law, "r0", "a") == [("r1", "a")]


# -- failures


def test_a_lost_replica_gets_nothing_until_it_answers_again():
    law = law_of("a", "b")
    place(law, "r0")
    law.ended("r0", "a", Ended.LOST, now_s=0.0, why="connection reset")
    assert law.table["a"].seen is Seen.DEAD
    assert sent(law.resubmit(ask("r0"), excluded={"a"}, arrived_s=0.0, now_s=0.0)) == [("r0", "b")]
    law.report("a", report(), now_s=1.0)
    assert place(law, "r1") == "a"


def test_what_comes_back_goes_before_all_others_of_its_job():
    law = law_of("a", slots=1)
    place(law, "r0")
    place(law, "r1")
    assert sent(law.ended("r0", "a", Ended.LOST, now_s=0.0)) == []
    assert sent(law.resubmit(ask("r0"), excluded={"a"}, arrived_s=0.0, now_s=0.0)) == []
    # The only replica has lost it before, and is better than none.
    assert sent(law.report("a", report(slots=1), now_s=1.0)) == [("r0", "a")]


def test_a_replica_that_fails_requests_is_left_alone_and_probed():
    law = law_of("a", "b", breaker_failures=2, breaker_open_s=10.0)
    for number in range(2):
        law.table["b"].in_flight = 4
        assert place(law, f"f{number}") == "a"
        law.table["b"].in_flight = 0
        law.ended(f"f{number}", "a", Ended.FAILED, now_s=0.0)
        law.close(f"f{number}", now_s=0.0)
    assert {place(law, f"r{number}", now_s=9.9) for number in range(4)} == {"b"}
    assert place(law, "probe", now_s=10.0) == "a"
    assert place(law, "more", now_s=10.0) is None
    assert answer(law, "probe", "a", now_s=10.5) == [("more", "a")]


def test_a_bad_request_says_nothing_against_its_replica():
    law = law_of("a", breaker_failures=1)
    place(law, "r")
    law.ended("r", "a", Ended.INVALID, now_s=0.0)
    law.close("r", now_s=0.0)
    assert place(law, "next") == "a"


def test_a_hedge_goes_to_another_replica_within_the_budget():
    law = law_of("a", "b", hedge_budget=0.5)
    assert place(law, "r0") == "a"
    assert law.hedge("r0", now_s=1.0) is None
    place(law, "r1")
    hedge = law.hedge("r0", now_s=1.0)
    assert hedge is not None
    assert hedge.replica == "b"
    assert law.where("r0") == ["a", "b"]
    assert law.hedge("r1", now_s=1.0) is None
    law.validate()
    law.close("r0", now_s=1.0)
    law.validate()
    assert law.table["a"].in_flight == 0


# -- adapters


def fleet_with_adapters(**adapters: dict[str, int]) -> RouterLaw:
    law = law_of(*adapters, slots=4)
    for name, has in adapters.items():
        law.report(name, report(adapters=has), now_s=0.0)
    return law


def test_a_request_for_an_adapter_goes_to_a_replica_that_has_it_however_busy_others_are_not():
    law = fleet_with_adapters(a={"maths": 3}, b={"tools": 1}, c={})
    assert [place(law, f"m{number}", adapter="maths") for number in range(4)] == ["a"] * 4
    assert place(law, "m4", adapter="maths") is None  # b and c have room, and not the adapter
    assert place(law, "t", adapter="tools") == "b"
    assert "4 of 4 places of 1 replicas are taken" in law.why_waiting("m4")


def test_a_replica_that_has_an_adapter_loaded_comes_before_one_that_would_load_it():
    law = law_of("a", "b", slots=8)
    for name, version in (("a", 0), ("b", 2)):
        law.report(name, report(slots=8, adapters={"maths": version}), now_s=0.0)
    # A quarter of eight places is two: b until it has two more than a.
    assert [place(law, f"r{number}", adapter="maths") for number in range(4)] == ["b", "b", "a", "b"]


def test_the_version_that_is_wanted_of_an_adapter_is_its_own_and_not_that_of_the_base():
    law = fleet_with_adapters(a={"maths": 3}, b={"maths": 5})  # the base is at 1 on both
    assert [place(law, f"r{n}", adapter="maths", min_policy_version=5) for n in range(3)] == ["b"] * 3
    assert place(law, "newer", adapter="maths", min_policy_version=6) is None
    assert law.why_waiting("newer") == (
        "no replica serves adapter 'maths' in policy version 6 or newer: a has version 3; b has version 5"
    )
    assert place(law, "base", min_policy_version=1) == "a"
    assert sent(law.report("a", report(adapters={"maths": 6}), now_s=1.0)) == [("newer", "a")]


def test_an_adapter_that_no_replica_knows_is_refused_at_once_with_who_has_what():
    law = fleet_with_adapters(a={"maths": 3, "tools": 0}, b={})
    error = refused(law.submit(ask("r", adapter="poems"), now_s=0.0))
    assert isinstance(error, ModelError)
    assert "no replica knows adapter 'poems': a has 'maths', 'tools'; b has none" in str(error)
    law.validate()


def test_an_adapter_is_waited_for_while_a_replica_that_may_have_it_has_not_answered():
    law = fleet_with_adapters(a={})
    law.table.join("b")
    assert place(law, "r", adapter="maths") is None
    assert "a has none; b has not answered yet" in law.why_waiting("r")
    assert sent(law.report("b", report(slots=4, adapters={"maths": 0}), now_s=1.0)) == [("r", "b")]


def test_an_adapter_of_a_replica_that_does_not_serve_now_is_waited_for():
    law = fleet_with_adapters(a={"maths": 2}, b={})
    law.report("a", report(state="dirty", adapters={"maths": 2}), now_s=0.0)
    assert place(law, "r", adapter="maths") is None
    assert "a has version 2, and is dirty; b has none" in law.why_waiting("r")


def test_requests_that_wait_for_an_adapter_hold_up_nobody_else():
    law = fleet_with_adapters(a={"maths": 1}, b={})
    law.report("a", report(state="draining", adapters={"maths": 1}), now_s=0.0)
    assert place(law, "r", adapter="maths") is None
    assert place(law, "base") == "b"


def test_a_session_moves_from_a_replica_that_was_restarted_without_its_adapter():
    law = fleet_with_adapters(a={"maths": 1}, b={"maths": 1})
    home = place(law, "r1", adapter="maths", session_id="s")
    answer(law, "r1", "a")
    assert home == "a"
    law.report("a", report(adapters={}), now_s=0.0)
    assert place(law, "r2", adapter="maths", session_id="s") == "b"


def test_an_adapter_of_another_job_is_unknown_to_this_one():
    law = fleet_with_adapters(a={"maths": 1})
    law.table.join("own", jobs=("x",))
    law.report("own", report(adapters={"tools": 1}), now_s=0.0)
    assert place(law, "r", adapter="tools", job="x") == "own"
    error = refused(law.submit(ask("s", adapter="tools", job="y"), now_s=0.0))
    assert "no replica of job y knows adapter 'tools': a has 'maths'" in str(error)
