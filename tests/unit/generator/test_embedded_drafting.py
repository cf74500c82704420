"""A draft model guesses: the same distribution, the model's log-probs, KV that comes and goes with the sequence."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
import torch

from generator_builders import (
    SteppedEngine,
    close_to,
    llama,
    prompt_of,
    random_model,
    reference_logprobs,
    request,
)
from rollmill.generator.engines.embedded.blocks import BlockStore
from rollmill.generator.engines.embedded.drafting import ReadTokens
from rollmill.generator.engines.embedded.linears import KernelChoice
from rollmill.generator.engines.embedded.native import KernelsUnavailable, load_kernels
from rollmill.types import GenerateRequest, SamplingParams, StopReason, Turn, Wave

SHAPE = llama(hidden_size=48, head_dim=8, num_attention_heads=6)  # what the compiled attention can read
SMALL = llama(hidden_size=32, head_dim=8, num_attention_heads=4, num_hidden_layers=1)
MODEL, NEW, OTHER = random_model(SHAPE, seed=1), random_model(SHAPE, seed=2), random_model(SMALL, seed=3)
PROMPT = prompt_of(21)
NEAR = close_to(MODEL)


def group(name: str = "s", *, temperature: float = 1.0, new: int = 20, **sampling) -> list[GenerateRequest]:
    return [
        request(
            f"{name}{n}", PROMPT, group_key=name, seed=n, max_new_tokens=new + n, temperature=temperature, **sampling
        )
        for n in range(4)
    ]


def check(turn: Turn, sampling: SamplingParams, *, spans: dict[int, object]) -> None:
    """Every token has the log-prob that the model of its version gives it, and a chance of being drawn."""
    for span in turn.version_spans:
        at = slice(span.start_token, span.end_token)
        expected = reference_logprobs(spans[span.policy_version], turn, sampling)[at]
        np.testing.assert_allclose(turn.behavior_logprobs[at], expected, atol=1e-4)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("draft", [NEAR, OTHER], ids=["near", "other"])
def test_greedy_tokens_are_those_without_a_draft(tmp_path, draft, kernels: KernelChoice):
    plain = SteppedEngine(tmp_path, MODEL, kernels=kernels)
    guessing = SteppedEngine(tmp_path, MODEL, kernels=kernels, draft=draft)
    for engine in (plain, guessing):
        for asked in group(temperature=0.0):
            engine.submit(asked)
            engine.steps(3)
        engine.finish()
    assert guessing.drafter is not None
    assert guessing.drafter.guessed > 20
    if draft is NEAR:
        assert guessing.drafter.accepted > 20
        assert guessing.core.decode_passes < plain.core.decode_passes
    for n in range(4):
        one, other = plain.turn(f"s{n}"), guessing.turn(f"s{n}")
        np.testing.assert_array_equal(one.output_ids, other.output_ids)
        # torch's own attention rounds by what else is in the pass
        near = 1e-5 if kernels == "auto" else 1e-4
        np.testing.assert_allclose(one.behavior_logprobs, other.behavior_logprobs, atol=near)
        assert one.stop_reason is other.stop_reason


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.6}, {"top_p": 0.7}, {"top_k": 3}, {"top_k": 9, "top_p": 0.8}]
)
def test_log_probs_are_the_models_after_its_filters_whatever_the_draft_thinks(tmp_path, sampling):
    engine = SteppedEngine(tmp_path, MODEL, draft=NEAR)
    for asked in group(**sampling):
        engine.submit(asked)
        engine.steps(2)
    engine.finish()
    assert engine.drafter is not None
    assert 10 < engine.drafter.accepted < engine.drafter.guessed
    for n in range(4):
        turn = engine.turn(f"s{n}")
        assert len(turn.output_ids) == 20 + n
        check(turn, SamplingParams(**sampling), spans={1: MODEL})
    assert engine.core.kv_used_tokens == 0


def test_a_model_with_weights_of_eight_bits_takes_a_draft_too(tmp_path):
    try:
        load_kernels()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    plain = SteppedEngine(tmp_path, MODEL, quantization="int8")
    guessing = SteppedEngine(tmp_path, MODEL, quantization="int8", draft=MODEL)
    for engine in (plain, guessing):
        engine.submit(request("a", PROMPT, max_new_tokens=30, temperature=0.0))
        engine.finish()
    assert guessing.drafter is not None
    assert 10 < guessing.drafter.accepted < guessing.drafter.guessed  # the draft is not rounded
    one, other = plain.turn("a"), guessing.turn("a")
    np.testing.assert_array_equal(one.output_ids, other.output_ids)
    np.testing.assert_allclose(one.behavior_logprobs, other.behavior_logprobs, atol=1e-5)


def test_a_draft_that_is_the_model_itself_is_nearly_always_right(tmp_path):
    engine = SteppedEngine(tmp_path, MODEL, draft=MODEL, draft_tokens=3)
    engine.submit(request("a", PROMPT, max_new_tokens=41, seed=3))
    engine.finish()
    assert engine.drafter is not None
    # One token behind the prompt, then four in each pass; a rounding error may cost one.
    assert engine.drafter.guessed - engine.drafter.accepted <= 1
    assert engine.core.decode_passes <= 12


VOCABULARY, LENGTH = 3, 5
TINY = llama(
    vocab_size=VOCABULARY, hidden_size=16, head_dim=8, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1
)
TARGET = random_model(TINY, seed=21)
ROUGH = close_to(TARGET, by=0.2)


@torch.inference_mode()
def distribution(model, prompt: list[int], *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0):
    """Probability of every output of `LENGTH` tokens, in order, by a plain forward pass over all of them."""
    outputs = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
    ids = torch.cat([torch.tensor(prompt).expand(len(outputs), -1), outputs], dim=1)
    logits = model(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 : -1].double() / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[..., -1:], -torch.inf)
    shares, order = logits.softmax(-1).sort(dim=-1, descending=True)
    left_out = (shares.cumsum(-1) - shares >= top_p).gather(-1, order.argsort(-1))
    shares = logits.masked_fill(left_out, -torch.inf).softmax(-1)
    return shares.gather(-1, outputs[..., None])[..., 0].prod(-1).numpy()


@pytest.mark.parametrize(
    ("draft", "sampling"),
    [
        (ROUGH, {}),
        *(
            pytest.param(draft, sampling, marks=pytest.mark.slow)
            for draft in (ROUGH, None)
            for sampling in ({"temperature": 0.7}, {"top_k": 2}, {"top_p": 0.8, "temperature": 1.3})
        ),
        pytest.param(None, {}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, dict) else "with" if value else "without",
)
def test_every_output_comes_as_often_as_its_probability_says(tmp_path, draft, sampling):
    """Chi-square over all 243 outputs of five tokens, with and without a draft, at a fixed set of seeds."""
    count, prompt = 600, [1, 2, 0]
    engine = SteppedEngine(tmp_path, TARGET, draft=draft, max_num_seqs=256, max_num_batched_tokens=2048)
    for n in range(count):
        engine.submit(request(f"r{n}", prompt, group_key="g", seed=n, max_new_tokens=LENGTH, **sampling))
    engine.finish()
    places = VOCABULARY ** np.arange(LENGTH)[::-1]
    found = np.bincount(
        [int(engine.turn(f"r{n}").output_ids @ places) for n in range(count)], minlength=VOCABULARY**LENGTH
    )
    expected = count * distribution(TARGET, prompt, **sampling)
    assert expected.sum() == pytest.approx(count)
    assert found[expected < 1e-9].sum() == 0
    # Outputs that come less than five times are counted as one.
    rare = expected < 5
    cells_found, cells = [*found[~rare], found[rare].sum()], [*expected[~rare], expected[rare].sum()]
    square = sum((f - e) ** 2 / e for f, e in zip(cells_found, cells, strict=True) if e > 0)
    freedom = sum(e > 0 for e in cells) - 1
    assert freedom >= 7
    # Mean `freedom`, standard deviation sqrt(2 freedom): four of them are passed less than once in 1000.
    assert square < freedom + 4 * (2 * freedom) ** 0.5
    if draft is not None:
        assert engine.drafter is not None
        assert 0.1 * engine.drafter.guessed < engine.drafter.accepted < 0.9 * engine.drafter.guessed


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_swap_leaves_the_draft_as_it_was_and_its_guesses_count_less_often(tmp_path, kv):
    engine = SteppedEngine(tmp_path, MODEL, draft=MODEL)
    assert engine.drafter is not None
    for asked in group(new=40):
        engine.submit(asked)
    engine.steps(6)
    before = engine.drafter.accepted / engine.drafter.guessed
    guessed, accepted = engine.drafter.guessed, engine.drafter.accepted
    engine.swap(NEW, policy_version=2, kv=kv)
    engine.finish()
    after = (engine.drafter.accepted - accepted) / (engine.drafter.guessed - guessed)
    assert before > 0.95
    assert after < 0.6
    for n in range(4):
        turn = engine.turn(f"s{n}")
        assert [span.policy_version for span in turn.version_spans] == [1, 2]
        if kv == "recompute":  # with `keep` later tokens see KV of both
            check(turn, SamplingParams(), spans={1: MODEL, 2: NEW})
    assert engine.core.kv_used_tokens == 0


def test_drafting_goes_on_while_blocks_run_short_and_sequences_are_preempted(tmp_path):
    engine = SteppedEngine(tmp_path, MODEL, draft=NEAR, kv_blocks=12, max_num_batched_tokens=24)
    for asked in [*group(new=60), *group("t")]:
        engine.submit(asked)
        engine.steps(4)
    engine.submit(request("long", prompt_of(70, seed=3), max_new_tokens=9))
    engine.finish()
    assert engine.core.preemptions > 0
    assert engine.drafter is not None
    assert engine.drafter.accepted > 10
    for name in ("s0", "s3", "t0", "t3", "long"):
        check(engine.turn(name), SamplingParams(), spans={1: MODEL})
    assert engine.core.kv_used_tokens == 0


def test_an_abort_frees_the_blocks_of_both_and_leaves_siblings_alone(tmp_path):
    engine = SteppedEngine(tmp_path, MODEL, draft=NEAR)
    for asked in group(new=40):
        engine.submit(asked)
    engine.steps(5)
    assert engine.core.abort("s1")
    assert engine.turn("s1").stop_reason is StopReason.ABORT
    check(engine.turn("s1"), SamplingParams(), spans={1: MODEL})
    engine.finish()
    for n in (0, 2, 3):
        check(engine.turn(f"s{n}"), SamplingParams(), spans={1: MODEL})
    assert engine.core.kv_used_tokens == 0


def test_a_stop_token_that_was_guessed_ends_the_turn(tmp_path):
    free = SteppedEngine(tmp_path, MODEL)
    free.submit(request("a", PROMPT, max_new_tokens=30, temperature=0.0))
    free.finish()
    said = free.turn("a").output_ids.tolist()
    stop = said[7]
    engine = SteppedEngine(tmp_path, MODEL, draft=MODEL)
    engine.submit(request("a", PROMPT, max_new_tokens=30, temperature=0.0, stop_token_ids=(stop,)))
    engine.finish()
    turn = engine.turn("a")
    assert turn.stop_reason is StopReason.STOP
    assert turn.output_ids.tolist() == said[: said.index(stop) + 1]


def test_a_guess_never_goes_beyond_the_end_of_an_answer_or_the_drafts_context(tmp_path):
    short = random_model(llama(hidden_size=16, max_position_embeddings=40), seed=3)
    engine = SteppedEngine(tmp_path, MODEL, draft=short)
    engine.submit(request("a", PROMPT, max_new_tokens=2))
    engine.finish()
    assert engine.drafter is not None
    assert engine.drafter.guessed == 0  # behind the first token only the last one may come
    engine.submit(request("b", PROMPT, max_new_tokens=60))
    engine.finish()
    turn = engine.turn("b")
    assert len(turn.output_ids) == 60
    assert 0 < engine.drafter.guessed <= 40 - len(PROMPT) + 4 * 20
    check(turn, SamplingParams(), spans={1: MODEL})


def test_a_wave_is_decoded_without_guesses(tmp_path):
    engine = SteppedEngine(tmp_path, MODEL, draft=NEAR)
    for n, asked in enumerate(group()):
        engine.submit(msgspec.structs.replace(asked, wave=Wave(wave_id="w", size=4, index=n)))
    engine.finish()
    assert engine.drafter is not None
    assert engine.drafter.guessed == 0


def test_a_long_prompt_is_read_in_passes_of_the_drafts_own_and_siblings_read_it_once(tmp_path):
    prompt = prompt_of(100, seed=9)
    engine = SteppedEngine(tmp_path, MODEL, draft=MODEL, max_num_batched_tokens=40)
    for n in range(3):
        engine.submit(request(f"r{n}", prompt, group_key="g", seed=n, max_new_tokens=30))
    engine.finish()
    assert engine.drafter is not None
    assert engine.drafter.accepted > 40
    # What the draft had read wrongly would show here: it is the model itself.
    assert engine.drafter.accepted > 0.97 * engine.drafter.guessed
    for n in range(3):
        check(engine.turn(f"r{n}"), SamplingParams(), spans={1: MODEL})


def test_a_draft_with_numbers_that_are_not_finite_is_left_out_and_the_log_says_so(tmp_path, caplog):
    engine = SteppedEngine(tmp_path, MODEL, draft=NEAR)
    assert engine.drafter is not None
    engine.submit(request("a", PROMPT, max_new_tokens=20))
    engine.steps(2)
    for buffer in engine.drafter.model.buffers():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    engine.finish()
    assert "guesses no more" in caplog.text
    check(engine.turn("a"), SamplingParams(), spans={1: MODEL})
    assert engine.core.dirty_reason is None


def test_what_a_draft_has_read_is_known_by_block_until_the_block_is_given_to_somebody_else():
    store = BlockStore(blocks=4, size=4)
    read = ReadTokens(store)
    blocks = store.allocate(3)
    assert read.leading(blocks) == 0
    read.set(blocks, start=0, stop=6)
    assert read.leading(blocks) == 6
    read.set(blocks, start=6, stop=11)
    assert read.leading(blocks) == 11
    read.cut(blocks, stop=8, read=11)  # three guesses did not count, and a whole block with them
    assert read.leading(blocks) == 8
    read.set(blocks, start=8, stop=12)
    assert read.leading(blocks) == 12
    read.cut(blocks, stop=3, read=12)
    assert read.leading(blocks) == 3
    read.set(blocks, start=3, stop=12)
    store.release(blocks[2:])
    assert store.allocate(1) == blocks[2:]  # the same block, another life
    assert read.leading(blocks) == 8
