"""The summary: a stable document, balanced books, and text to act on."""

import json

import pytest

from rollmill.errors import InvariantViolation
from rollmill.telemetry.advice import advise
from rollmill.telemetry.interval import proportion
from rollmill.telemetry.summary import (
    build_summary,
    check_books,
    duration,
    render_summary,
    unbalanced,
)


def evaluation(successes: int, *, version: int = 1) -> dict:
    return {**proportion(successes, 100).as_dict(), "policy_version": version, "temperature": 0.0}


def sound(**changes) -> dict:
    """A run of 200 s: 128 rollouts trained of 200 admitted, the trainer waited for a fifth of its time."""
    numbers = {
        "run": "runs/one",
        "reason": "steps_done",
        "steps": 4,
        "wall_s": 200.0,
        "cpu_s": 350.0,
        "eval_before": evaluation(20),
        "eval_after": evaluation(60, version=5),
        "rollouts": {
            "admitted": 200,
            "in_flight": 0,
            "suspended": 0,
            "buffered": 8,
            "trained": 128,
            "dropped": {"zero_advantage": 60, "stale": 4},
        },
        "seconds": {
            "trainer": {"startup": 10.0, "train": 130.0, "wait_data": 40.0, "publish": 20.0},
            "generator-0": {"startup": 10.0, "decode": 170.0, "idle": 20.0},
        },
        "seconds_wall_s": {"trainer": 200.0, "generator-0": 200.0},
        "staleness_mean": 0.75,
        "staleness_max": 2,
        "staleness_budget": 2,
        "useful_tokens": 2000,
        "peak_memory_bytes": 4_000_000_000,
        "bound_by": "generator",
    }
    return build_summary(**{**numbers, **changes})


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        ({}, "The trainer is the bound: it has a batch at hand."),
        ({"trainer": 9.0}, "The trainer is the bound: it has a batch at hand. That held for 100% of the time."),
        (
            {"start": 36.0, "trainer": 150.0, "generator": 13.5, "weights": 0.5},
            "The trainer is the bound: it has a batch at hand. That held for 75% of the time; start 18%, generator 7%.",
        ),
    ],
)
def test_the_bound_is_told_with_its_share_of_the_time_and_those_of_others(seconds, line):
    assert line in render_summary(sound(bound_by="trainer", bound_seconds=seconds)).splitlines()


def test_shares_that_would_be_shown_as_nothing_are_left_out_of_the_text():
    seconds = {"trainer": {"train": 199.5, "teardown": 0.5}}
    text = render_summary(sound(seconds=seconds, seconds_wall_s={"trainer": 200.0}))
    assert "  trainer         200.0 s: train 100%" in text.splitlines()


def test_the_document_has_the_stable_interface():
    summary = sound()
    assert {"eval", "wall_s", "cpu_s", "steps", "rollouts", "seconds", "staleness"} <= set(summary)
    assert {"useful_tokens_per_s", "peak_memory_bytes", "bound_by", "schema_version", "reason", "resume"} <= set(
        summary
    )
    assert {"accuracy", "low", "high", "n", "policy_version"} <= set(summary["eval"]["before"])
    assert set(summary["rollouts"]) == {"admitted", "in_flight", "suspended", "buffered", "trained", "dropped"}
    assert summary["seconds"]["trainer"]["sum_s"] == 200.0
    assert summary["seconds"]["trainer"]["wall_s"] == 200.0
    assert summary["staleness"] == {"mean": 0.75, "max": 2, "budget": 2}
    assert summary["useful_tokens_per_s"] == 10.0  # 2000 / 200 s
    assert json.loads(json.dumps(summary)) == summary


def test_an_evaluation_names_the_newest_policy_that_answered():
    entry = {**proportion(1, 2).as_dict(), "policy_versions": (4, 5)}
    assert sound(eval_after=entry)["eval"]["after"]["policy_version"] == 5


def test_books_that_balance_raise_nothing():
    summary = sound()
    assert summary["books"] == []
    check_books(summary)


def test_a_rollout_that_vanished_is_named_with_both_numbers():
    rollouts = {**sound()["rollouts"], "trained": 127}
    summary = sound(rollouts=rollouts)
    # 0 + 0 + 8 + 127 + 64 = 199
    (problem,) = summary["books"]
    assert "admitted 200" in problem
    assert "dropped 64 = 199" in problem
    with pytest.raises(InvariantViolation, match="admitted 200"):
        check_books(summary)


def test_seconds_that_nobody_booked_are_named_with_both_numbers():
    summary = sound(seconds_wall_s={"trainer": 203.0, "generator-0": 200.0})
    with pytest.raises(
        InvariantViolation, match=r"seconds of trainer: causes sum to 200.000 s, wall time is 203.000 s"
    ):
        check_books(summary)


def test_clock_noise_is_no_hole_in_the_books():
    assert sound(seconds_wall_s={"trainer": 200.1, "generator-0": 199.9})["books"] == []


def test_staleness_above_the_budget_is_a_problem():
    assert any("max 3 is above the budget 2" in problem for problem in unbalanced(sound(staleness_max=3)))


def test_an_extra_key_may_be_added_and_may_not_replace_one():
    assert sound(extra={"incarnations": 2})["incarnations"] == 2
    with pytest.raises(InvariantViolation, match="steps"):
        sound(extra={"steps": 5})


def test_the_text_says_what_happened():
    text = render_summary(sound(resume="rollmill train --resume runs/one"))
    assert "runs/one: 4 steps in 3 min 20 s (5 min 50 s of CPU time); it ended because all steps are done." in text
    assert "accuracy    0.200 [0.133, 0.289] -> 0.600 [0.502, 0.691] on 100 held-out problems" in text
    assert "200 admitted = 128 trained + 8 buffered + 0 suspended + 0 in flight + 64 dropped" in text
    assert "(zero_advantage 60, stale 4)" in text
    assert "trainer         200.0 s: train 65%, wait_data 20%, publish 10%, startup 5%" in text
    assert "mean 0.75, max 2, budget 2 steps" in text
    assert "Go on with: rollmill train --resume runs/one" in text
    assert "problem:" not in text


def test_a_run_without_evaluation_and_training_still_has_a_text():
    text = render_summary(
        sound(eval_before=None, eval_after=None, staleness_mean=None, staleness_max=None, steps=0, reason="stopped")
    )
    assert "accuracy    not evaluated" in text
    assert "it ended because it was stopped" in text
    assert "staleness" not in text


def test_a_problem_is_shown_to_the_user():
    assert "problem: rollouts: admitted" in render_summary(sound(rollouts={**sound()["rollouts"], "admitted": 300}))


def advice_of(summary: dict) -> list[tuple[str, str]]:
    return [(one["direction"], one["setting"]) for one in summary["advice"]]


def seconds_of(trainer: dict, generator: dict) -> dict:
    return {
        "seconds": {"trainer": trainer, "generator-0": generator},
        "seconds_wall_s": {"trainer": sum(trainer.values()), "generator-0": sum(generator.values())},
    }


def test_a_trainer_that_waits_for_a_busy_generator_advises_larger_batches_there():
    summary = sound(settings={"generator.max_num_seqs": 48})
    assert ("raise", "generator.max_num_seqs") in advice_of(summary)
    assert "waited for data in 20% of its time" in summary["advice"][0]["because"]
    assert summary["advice"][0]["because"].endswith("(now 48)")


def test_a_trainer_that_waits_for_an_idle_generator_advises_a_larger_budget():
    seconds = seconds_of({"train": 50.0, "wait_data": 50.0}, {"decode": 60.0, "idle": 40.0})
    held = {"trainer": 50.0, "admission": 30.0, "scoring": 20.0}
    assert ("raise", "schedule.max_staleness") in advice_of(sound(**seconds, bound_seconds=held))


def test_a_trainer_that_waits_for_scores_while_the_budget_has_room_advises_more_scoring_workers():
    seconds = seconds_of({"train": 50.0, "wait_data": 50.0}, {"decode": 60.0, "idle": 40.0})
    advice = advice_of(sound(**seconds, bound_seconds={"trainer": 50.0, "scoring": 50.0}))
    assert ("raise", "environment.scoring_workers") in advice
    assert ("raise", "schedule.max_staleness") not in advice


def test_a_deterministic_run_takes_turns_and_is_not_told_to_raise_its_budget():
    seconds = seconds_of({"train": 50.0, "wait_data": 50.0}, {"decode": 60.0, "idle": 40.0})
    summary = sound(**seconds, bound_seconds={"trainer": 50.0, "admission": 50.0})
    moves = {one["setting"] for one in advise(summary, settings={"run.deterministic": True})}
    assert not moves & {"schedule.max_staleness", "environment.scoring_workers", "generator.max_num_seqs"}


def test_an_idle_generator_and_a_busy_trainer_advise_trainer_threads():
    seconds = seconds_of({"train": 95.0, "wait_data": 5.0}, {"decode": 60.0, "idle": 40.0})
    assert ("raise", "trainer.threads") in advice_of(sound(**seconds))


def test_many_groups_without_signal_advise_other_tasks():
    rollouts = {**sound()["rollouts"], "admitted": 400, "dropped": {"zero_advantage": 264}}
    seconds = seconds_of({"train": 95.0, "wait_data": 5.0}, {"decode": 99.0, "idle": 1.0})
    summary = sound(rollouts=rollouts, **seconds)
    # 264 of 264 + 128 = 67 %
    assert advice_of(summary) == [("change", "environment.tasks")]
    assert "67%" in summary["advice"][0]["because"]


def test_groups_without_signal_that_the_length_penalty_tells_apart_advise_to_train_on_them():
    rollouts = {**sound()["rollouts"], "admitted": 400, "dropped": {"zero_advantage": 264}}
    seconds = seconds_of({"train": 95.0, "wait_data": 5.0}, {"decode": 99.0, "idle": 1.0})
    settings = {"schedule.overlong": "soft_penalty", "algorithm.signal": "raw_reward"}
    (advice,) = advise(sound(rollouts=rollouts, **seconds), settings=settings)
    assert (advice["direction"], advice["setting"]) == ("change", "algorithm.signal")
    assert "67%" in advice["because"]
    shaped = advise(sound(rollouts=rollouts, **seconds), settings={**settings, "algorithm.signal": "shaped_reward"})
    assert [one["setting"] for one in shaped] == ["environment.tasks"]


def test_accuracy_that_did_not_clearly_rise_advises_more_steps():
    assert ("raise", "run.steps") in advice_of(sound(eval_after=evaluation(25)))


def test_stale_drops_advise_less_oversampling():
    rollouts = {**sound()["rollouts"], "admitted": 236, "dropped": {"zero_advantage": 60, "stale": 40}}
    assert ("lower", "schedule.group_oversampling") in advice_of(sound(rollouts=rollouts))
    exact = advise(sound(rollouts=rollouts), settings={"schedule.group_oversampling": 1.0})
    assert "schedule.group_oversampling" not in {one["setting"] for one in exact}


def test_the_wait_for_the_first_batch_is_not_held_against_the_generator():
    seconds = seconds_of({"train": 60.0, "wait_data": 40.0}, {"decode": 95.0, "idle": 5.0})
    # 40 s waited, 30 s of them before the first batch: 10 % of the time is left, which is not notable
    assert ("raise", "generator.max_num_seqs") in advice_of(sound(**seconds, bound_seconds={"trainer": 60.0}))
    assert advice_of(sound(**seconds, bound_seconds={"start": 30.0, "trainer": 60.0})) == []


def test_a_balanced_run_gets_no_advice():
    seconds = seconds_of({"train": 95.0, "wait_data": 5.0}, {"decode": 95.0, "idle": 5.0})
    assert sound(**seconds)["advice"] == []
    assert "Try next" not in render_summary(sound(**seconds))


def test_at_most_two_moves_are_advised():
    rollouts = {**sound()["rollouts"], "admitted": 440, "dropped": {"zero_advantage": 264, "stale": 40}}
    assert len(sound(rollouts=rollouts, eval_after=evaluation(20))["advice"]) == 2


@pytest.mark.parametrize(("seconds", "text"), [(59.4, "59 s"), (59.6, "1 min 00 s"), (3599.0, "59 min 59 s")])
def test_a_duration_is_written_for_reading(seconds, text):
    assert duration(seconds) == text
