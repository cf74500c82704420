"""Speculative decoding: the same tokens as without it, guesses from prompts and siblings, and only where it pays."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from generator_builders import SteppedEngine, llama, prompt_of, random_model, reference_logprobs, request
from rollmill.generator.engines.embedded.linears import KernelChoice
from rollmill.generator.engines.embedded.speculation import Guess, PassCost, Rate, Speculator
from rollmill.generator.engines.sequence import Sequence
from rollmill.types import GenerateRequest, SamplingParams, Wave

SHAPE = llama(hidden_size=48, head_dim=8, num_attention_heads=6)  # what the compiled attention can read
MODEL, NEW = random_model(SHAPE, seed=1), random_model(SHAPE, seed=2)
LOOP = [5, 6, 7, 8, 9, 10] * 4


class FreeRows(PassCost):
    """A machine on which one row more costs next to nothing."""

    @property
    def free_rows(self) -> float:
        return 1e6


def eager() -> Speculator:
    """A speculator that guesses whenever it can."""
    speculator = Speculator()
    speculator.cost = FreeRows()
    return speculator


def group(name: str = "s", *, temperature: float = 1.0, new: int = 30, **sampling) -> list[GenerateRequest]:
    """Four siblings; those of another name have the same seeds, and so repeat them."""
    return [
        request(
            f"{name}{n}", [*LOOP, 5], group_key="g", seed=n, max_new_tokens=new + n, temperature=temperature, **sampling
        )
        for n in range(4)
    ]


def living(asked: GenerateRequest) -> Sequence:
    return Sequence(asked, max_model_len=160, now_s=0.0, deliver=lambda turn: None)


def say(sequence: Sequence, *tokens: int) -> None:
    for token in tokens:
        sequence.append(token, logprob=0.0, policy_version=1)


def both(folder, *, kernels: KernelChoice = "auto", **changes) -> tuple[SteppedEngine, SteppedEngine]:
    return (
        SteppedEngine(folder, MODEL, kernels=kernels, **changes),
        SteppedEngine(folder, MODEL, kernels=kernels, speculator=eager(), **changes),
    )


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.3}, {"top_p": 0.8}, {"top_k": 3}, {"temperature": 0.0}, {"stop_token_ids": (7,)}]
)
def test_the_same_seeds_give_the_same_tokens_with_and_without_guesses(tmp_path, sampling):
    plain, guessing = both(tmp_path)
    for engine in (plain, guessing):
        for asked in [*group("s", **sampling), *group("t", **sampling)]:
            engine.submit(asked)
            engine.steps(3)
        engine.finish()
    assert guessing.core.speculator is not None
    assert 30 < guessing.core.speculator.accepted <= guessing.core.speculator.guessed
    if sampling.get("temperature") != 0.0:
        assert guessing.core.speculator.accepted < guessing.core.speculator.guessed, "nothing was guessed wrong"
    assert guessing.core.decode_passes < plain.core.decode_passes
    assert guessing.core.output_tokens == plain.core.output_tokens
    for name in (f"{letter}{n}" for letter in "st" for n in range(4)):
        one, other = plain.turn(name), guessing.turn(name)
        np.testing.assert_array_equal(one.output_ids, other.output_ids)
        np.testing.assert_allclose(one.behavior_logprobs, other.behavior_logprobs, atol=1e-5)
        assert one.stop_reason is other.stop_reason


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_guesses_are_exact_while_others_join_and_blocks_run_short(tmp_path, kernels):
    plain, guessing = both(tmp_path, kernels=kernels, kv_blocks=11, max_num_batched_tokens=20)
    for engine in (plain, guessing):
        for asked in [*group(new=60), *group("t")]:
            engine.submit(asked)
            engine.steps(4)
        engine.submit(request("long", prompt_of(70, seed=3), max_new_tokens=5))
        engine.finish()
    assert guessing.core.preemptions > 0
    assert guessing.core.speculator is not None
    assert guessing.core.speculator.accepted > 10
    for name in ("s0", "s1", "s2", "s3", "t0", "t3", "long"):
        one, other = plain.turn(name), guessing.turn(name)
        np.testing.assert_array_equal(one.output_ids, other.output_ids)
        expected = reference_logprobs(MODEL, other, SamplingParams())
        np.testing.assert_allclose(other.behavior_logprobs, expected, atol=1e-4)
    assert guessing.core.kv_used_tokens == 0


def test_spans_and_log_probs_are_those_of_the_weights_that_each_token_was_drawn_from(tmp_path):
    guessing = SteppedEngine(tmp_path, MODEL, speculator=eager())
    for asked in group():
        guessing.submit(asked)
    guessing.steps(14)
    for asked in group("t"):
        guessing.submit(asked)
    guessing.steps(4)
    assert guessing.core.speculator is not None
    assert guessing.core.speculator.accepted > 5
    guessing.swap(NEW, policy_version=2, kv="recompute")
    guessing.finish()
    for n in range(4):
        turn = guessing.turn(f"t{n}")
        first, second = turn.version_spans
        assert (first.policy_version, second.policy_version, second.end_token) == (1, 2, 30 + n)
        at = first.end_token
        for got, model in ((slice(0, at), MODEL), (slice(at, None), NEW)):
            expected = reference_logprobs(model, turn, SamplingParams())
            np.testing.assert_allclose(turn.behavior_logprobs[got], expected[got], atol=1e-4)


def test_a_wave_is_decoded_without_guesses(tmp_path):
    engine = SteppedEngine(tmp_path, MODEL, speculator=eager())
    for n, asked in enumerate(group()):
        engine.submit(msgspec.structs.replace(asked, wave=Wave(wave_id="w", size=4, index=n)))
    engine.finish()
    assert engine.core.speculator is not None
    assert engine.core.speculator.guessed == 0


def test_a_guess_is_what_followed_the_longest_known_run():
    speculator = eager()
    sequence = living(request("a", [1, 2, 3, 4, 9, 3, 4, 5], max_new_tokens=50))
    # Behind 3, 4 came 9 first and 5 later; behind 2, 3, 4 came 9.
    say(sequence, 3, 4)
    assert speculator.guess([sequence], rows=1, most=1) == [Guess((5,), 2)]
    say(sequence, 2, 3, 4)
    assert speculator.guess([sequence], rows=1, most=3) == [Guess((9, 3, 4), 3)]


def test_siblings_repeat_each_other_also_one_that_is_over():
    speculator = eager()
    first, second = (living(request(name, [1, 2, 3], group_key="g", max_new_tokens=50)) for name in "ab")
    say(first, 11, 12, 13, 14, 15)
    speculator.guess([first], rows=1, most=4)
    speculator.forget(first)
    say(second, 11)
    assert speculator.guess([second], rows=1, most=4) == [Guess((12, 13, 14, 15), 4)]
    stranger = living(request("c", [1, 2, 4], max_new_tokens=50))
    say(stranger, 11)
    assert speculator.guess([stranger], rows=1, most=4) == [Guess()]


def test_a_guess_never_goes_beyond_the_end_of_an_answer():
    speculator = eager()
    sequence = living(request("a", LOOP, max_new_tokens=3))
    say(sequence, 5)
    # Two more tokens may come: one that was guessed, and the one that is drawn behind it.
    assert len(speculator.guess([sequence], rows=1, most=8)[0].tokens) == 1
    say(sequence, 6)
    assert speculator.guess([sequence], rows=1, most=8) == [Guess()]


def test_guessing_stops_where_it_does_not_pay_and_is_tried_again():
    speculator = Speculator()
    sequences = [living(request(f"r{n}", LOOP, max_new_tokens=100)) for n in range(32)]
    for sequence in sequences:
        say(sequence, 5)
    # 32 rows cost as much as 43 do without what every pass costs: a guess must be right 3 times in 4.
    assert speculator.cost.break_even(32) == pytest.approx(32 / 43)
    assert not any(guess.tokens for guess in speculator.guess(sequences, rows=32, most=99))
    # One row costs as much as 12: a guess that is right once in 12 times pays, and the prior is once in two.
    assert speculator.guess(sequences[:1], rows=1, most=99)[0].tokens[:2] == (6, 7)
    for _ in range(400):
        speculator.see(Guess((6,), 4), right=0)
        speculator.see(Guess((6,), 3), right=0)
        speculator.see(Guess((6,), 2), right=0)
    tried = [sum(len(g.tokens) for g in speculator.guess(sequences[:8], rows=8, most=99)) for _ in range(65)]
    assert tried == [0] * 64 + [4]


def test_rates_forget_and_lines_are_measured():
    rate, cost = Rate(), PassCost()
    for _ in range(300):
        rate.see(True)
    assert rate.value > 0.98
    for rows in (1, 8, 32, 4) * 10:
        cost.see(rows, seconds=0.03 + 0.002 * rows)
    assert cost.free_rows == pytest.approx(15.0)
    assert cost.break_even(5) == pytest.approx(0.25)
    # Somebody else's work makes passes slower, and says nothing.
    for rows in (1, 8, 32, 4):
        cost.see(rows, seconds=1.0 * rows)
    assert cost.free_rows == pytest.approx(15.0, rel=0.02)
    # A machine that became slower by the row is believed after a while.
    for rows in (1, 8, 32, 4) * 200:
        cost.see(rows, seconds=0.03 + 0.006 * rows)
    assert cost.free_rows == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize(("sizes", "free"), [((8,), 11.0), ((8, 9), 11.0), ((8, 16, 4), 40.0)])
def test_too_few_sizes_of_pass_say_nothing_and_what_cannot_be_is_not_believed(sizes, free):
    cost = PassCost()
    for _ in range(100):
        for rows in sizes:
            cost.see(rows, seconds=0.1 + 1e-5 * rows)
    assert cost.free_rows == free
