"""Whether a draft model pays: measured against passes without it, with hysteresis, and tried again now and then."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.generator.engines.embedded.draft_law import DraftLaw, Share


class Machine:
    """A machine on which a pass over `n` rows takes 10 + n ms, and a pass with guesses as long as it is told."""

    def __init__(self, *, sequences: int = 1) -> None:
        self.law, self.sequences = DraftLaw(), sequences
        self.plain_s = 0.010 + 0.001 * sequences

    def run(self, passes: int, *, tokens: int, seconds: float, steady: bool = True) -> list[bool]:
        """Run passes; `tokens` come of one with guesses, in so many seconds."""
        guessed = []
        for _ in range(passes):
            guessed.append(self.law.guesses(self.sequences))
            if guessed[-1]:
                self.law.see_guessed(self.sequences, tokens=tokens, seconds=seconds, steady=steady)
            else:
                self.law.see_plain(self.sequences, seconds=self.plain_s)
        return guessed


def test_a_trial_follows_the_first_plain_passes_and_decides():
    machine = Machine()
    # Three tokens take 33 ms one by one.
    guessed = machine.run(13, tokens=3, seconds=0.022)
    assert guessed == [False] * 5 + [True] * 8
    assert machine.law.pays(1)
    assert machine.law.cost(1) == pytest.approx(22 / 33)
    assert all(machine.run(60, tokens=3, seconds=0.022))


def test_while_it_is_on_every_sixty_fourth_pass_is_without_guesses_so_that_the_comparison_stays_fresh():
    machine = Machine()
    machine.run(13, tokens=3, seconds=0.022)
    guessed = machine.run(640, tokens=3, seconds=0.022)
    assert guessed.count(False) == 10
    assert guessed[63] is False
    # The machine's plain passes become twice as quick, and that is noticed.
    machine.plain_s /= 2
    machine.run(64 * 60, tokens=3, seconds=0.022)
    assert not machine.law.pays(1)


def test_a_gain_of_less_than_five_percent_does_not_begin_and_does_not_end():
    machine = Machine()
    machine.run(13, tokens=3, seconds=0.97 * 0.033)
    assert not machine.law.pays(1)
    machine = Machine()
    machine.run(13, tokens=3, seconds=0.5 * 0.033)
    machine.run(600, tokens=3, seconds=0.97 * 0.033)
    assert machine.law.pays(1)


def test_it_ends_as_the_policy_drifts_away_and_begins_again_when_it_comes_back():
    machine = Machine()
    machine.run(400, tokens=3, seconds=0.022)
    assert machine.law.pays(1)
    guessed = machine.run(200, tokens=2, seconds=0.026)  # two tokens take 22 ms one by one
    assert not machine.law.pays(1)
    assert 20 < guessed.count(True) < 80
    # It had held for long: the next trial comes after 64 passes, and then, if it fails, after 128.
    machine.run(300, tokens=3, seconds=0.022)
    assert machine.law.pays(1)


def test_a_trial_that_fails_is_repeated_ever_more_rarely():
    machine = Machine()
    guessed = machine.run(5000, tokens=1, seconds=0.012)
    starts = [n for n in range(1, 5000) if guessed[n] and not guessed[n - 1]]
    # After the first plain passes, then behind pauses of 64, 128, ... passes and the 8 of each trial.
    assert starts == [5, 5 + 8 + 63, 76 + 8 + 127, 211 + 8 + 255, 474 + 8 + 511, 993 + 8 + 1023, 2024 + 8 + 2047]


@pytest.mark.parametrize(("seconds", "trial"), [(0.012, 8), (0.014, 4), (0.020, 2)])
def test_a_trial_that_costs_much_ends_early(seconds, trial):
    assert Machine().run(60, tokens=1, seconds=seconds).count(True) == trial


def test_a_trial_that_lost_much_is_repeated_when_that_is_little():
    guessed = Machine().run(400, tokens=1, seconds=0.033)
    starts = [n for n in range(1, 400) if guessed[n] and not guessed[n - 1]]
    # Two passes of three plain ones each lost four: 2 % of 200.
    assert starts[0] == 5
    assert starts[1] == pytest.approx(5 + 2 + 200, abs=1)


@settings(deadline=None)
@given(seconds=st.floats(0.0111, 0.4), unsteady=st.integers(0, 30), sequences=st.sampled_from([1, 8, 40]))
def test_a_draft_that_never_pays_costs_two_percent_and_its_first_trial(seconds, unsteady, sequences):
    machine = Machine(sequences=sequences)
    plain_s, first_s, lost_s, guessed, passes = machine.plain_s, 0.0, 0.0, 0, 20_000
    spent_s = seconds * plain_s / 0.011
    for _ in range(passes):
        if machine.run(1, tokens=sequences, seconds=spent_s, steady=guessed % (unsteady + 1) == unsteady)[0]:
            guessed += 1
            lost_s += spent_s - plain_s
        elif not first_s:
            first_s = lost_s
    assert lost_s <= 0.02 * passes * plain_s + first_s + 1e-6


@settings(deadline=None)
@given(seconds=st.floats(1.02, 3.0), passes=st.integers(500, 4000))
def test_a_draft_that_pays_in_trials_alone_costs_two_percent_and_its_first_turn(seconds, passes):
    machine = Machine()
    lost_s, first_s, was_on = 0.0, 0.0, False
    for _ in range(passes):
        spent_s = machine.plain_s * (seconds if machine.law.pays(1) else 0.5)
        if machine.run(1, tokens=1, seconds=spent_s)[0]:
            lost_s += spent_s - machine.plain_s
        if was_on and not machine.law.pays(1) and not first_s:
            first_s = lost_s
        was_on = machine.law.pays(1)
    assert lost_s <= 0.02 * passes * machine.plain_s + max(first_s, 0.0) + 1e-6


@settings(deadline=None)
@given(gain=st.floats(0.3, 0.9), bad=st.integers(0, 2000))
def test_a_draft_that_begins_to_pay_is_found_after_no_more_passes_than_have_gone_by(gain, bad):
    machine = Machine()
    machine.run(bad, tokens=1, seconds=0.02)
    guessed = machine.run(2 * bad + 200, tokens=3, seconds=gain * 0.033)
    assert machine.law.pays(1)
    assert guessed[-1] or guessed[-2]


def test_passes_in_which_the_draft_reads_what_it_missed_do_not_decide_a_trial_and_do_not_prolong_it_for_ever():
    machine = Machine()
    machine.run(5, tokens=1, seconds=0.1)
    assert machine.run(23, tokens=1, seconds=0.02, steady=False) == [True] * 23
    assert machine.law.cost(1) == 0.0
    machine.run(8, tokens=3, seconds=0.022)
    assert machine.law.pays(1)
    machine = Machine()
    guessed = machine.run(60, tokens=1, seconds=0.02, steady=False)
    assert guessed == [False] * 5 + [True] * 24 + [False] * 31


def test_while_it_is_on_reading_prompts_counts():
    machine = Machine()
    machine.run(13, tokens=3, seconds=0.022)
    machine.run(40, tokens=3, seconds=0.040, steady=False)
    assert not machine.law.pays(1)


def test_sizes_of_batches_are_judged_apart_and_share_what_plain_passes_cost():
    law = DraftLaw()
    for sequences in (1, 2, 4, 8, 16, 32) * 8:
        law.see_plain(sequences, seconds=0.010 + 0.001 * sequences)
    for _ in range(8):
        assert law.guesses(1)
        law.see_guessed(1, tokens=3, seconds=0.020, steady=True)  # 33 ms one by one
        assert law.guesses(32)
        law.see_guessed(32, tokens=64, seconds=0.095, steady=True)  # 84 ms
    assert law.pays(1)
    assert not law.pays(32)
    # Nearly: the first passes were taken in before the line through their lengths was known.
    assert law.cost(1) == pytest.approx(20 / 33, rel=0.05)
    assert law.cost(32) == pytest.approx(95 / 84, rel=0.05)


@settings(max_examples=20, deadline=None)
@given(
    seconds=st.lists(st.tuples(st.floats(0.001, 0.1), st.integers(1, 5)), min_size=1, max_size=20),
    plain=st.floats(0.001, 0.1),
)
def test_whatever_is_measured_the_law_never_stops_trying_nor_comparing(seconds, plain):
    law = DraftLaw()
    since_guess = since_plain = 0
    for spent, tokens in itertools.islice(itertools.cycle(seconds), 6000):
        if law.guesses(4):
            since_guess, since_plain = 0, since_plain + 1
            law.see_guessed(4, tokens=4 * tokens, seconds=spent, steady=True)
        else:
            since_guess, since_plain = since_guess + 1, 0
            law.see_plain(4, seconds=plain)
        assert since_guess <= 4096
        assert since_plain <= 64 + 8


def test_a_clock_that_stands_still_decides_nothing():
    machine = Machine()
    machine.plain_s = 0.0
    machine.run(300, tokens=3, seconds=0.0)
    assert not machine.law.pays(1)


def test_a_share_forgets_slowly():
    share = Share()
    assert share.value == 0.0
    for _ in range(500):
        share.see(2.0, of=1.0)
    for _ in range(50):
        share.see(1.0, of=1.0)
    # 0.98 ** 50 = 0.364 of what is remembered is old: 1 + 0.364
    assert share.value == pytest.approx(1.364, abs=0.01)
