"""The embedded engine's scheduler, moved step by step: what is shared, what is exact, what a swap does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from generator_builders import (
    MAX_LEN,
    SteppedEngine,
    all_ids,
    prompt_of,
    random_model,
    reference_logprobs,
    request,
    tensors_of,
)
from rollmill.errors import EngineError, WeightError
from rollmill.types import SamplingParams, StopReason, Turn

OLD, NEW = random_model(seed=1), random_model(seed=2)
SYSTEM = prompt_of(12, seed=99)


@pytest.fixture
def engine(tmp_path) -> SteppedEngine:
    return SteppedEngine(tmp_path, OLD)


def assert_exact(turn: Turn, model=OLD) -> None:
    np.testing.assert_allclose(turn.behavior_logprobs, reference_logprobs(model, turn, SamplingParams()), atol=1e-4)


@torch.inference_mode()
def mixed_reference(turn: Turn, *, old_tokens: int) -> np.ndarray:
    """Log-probs of the new policy over KV of which the first `old_tokens` were made by the old one."""
    ids = torch.from_numpy(all_ids(turn))[None]
    first = OLD(input_ids=ids[:, :old_tokens], use_cache=True)
    cache = {"cache": first.cache} if "cache" in first else {"past_key_values": first.past_key_values}
    logits = NEW(input_ids=ids[:, old_tokens:], use_cache=True, **cache).logits[0].float()
    scored = logits.log_softmax(-1)[:-1].gather(1, ids[0, old_tokens + 1 :, None])[:, 0]
    return scored.numpy()


def swapped(engine: SteppedEngine, *, kv, tokens: int = 9) -> list[Turn]:
    """Three requests (two of them siblings), swapped after `tokens` tokens each, run to 24."""
    prompts = [prompt_of(15, seed=1, start=SYSTEM), prompt_of(15, seed=1, start=SYSTEM), prompt_of(20, seed=2)]
    for number, prompt in enumerate(prompts):
        group = "siblings" if number < 2 else ""
        engine.submit(request(f"r{number}", prompt, group_key=group, max_new_tokens=24, seed=number))
    engine.steps(tokens)
    engine.swap(NEW, policy_version=2, kv=kv)
    engine.finish()
    return [engine.turn(f"r{number}") for number in range(3)]


def test_kv_keep_equals_the_mixed_reference_and_not_the_new_policy(engine):
    for turn in swapped(engine, kv="keep"):
        expected = mixed_reference(turn, old_tokens=len(turn.prompt_ids) + 8)
        np.testing.assert_allclose(turn.behavior_logprobs[9:], expected, atol=1e-4)
        whole = reference_logprobs(NEW, turn, SamplingParams())
        assert np.abs(turn.behavior_logprobs[9:] - whole[9:]).max() > 0.01


@pytest.mark.parametrize("max_num_batched_tokens", [512, 24, 9])
def test_kv_recompute_equals_a_full_forward_pass_of_the_new_policy(tmp_path, max_num_batched_tokens):
    engine = SteppedEngine(tmp_path, OLD, max_num_batched_tokens=max_num_batched_tokens)
    for turn in swapped(engine, kv="recompute"):
        first, second = turn.version_spans
        assert (first.policy_version, second.policy_version, second.end_token) == (1, 2, 24)
        at = first.end_token
        for got, model in ((slice(0, at), OLD), (slice(at, 24), NEW)):
            expected = reference_logprobs(model, turn, SamplingParams())
            np.testing.assert_allclose(turn.behavior_logprobs[got], expected[got], atol=1e-4)


def test_a_group_waiting_together_costs_one_prefill(engine):
    for sibling in range(4):
        engine.submit(request(f"s{sibling}", prompt_of(20), group_key="g", seed=sibling))
    engine.finish()
    assert (engine.core.prefill_tokens, engine.core.cached_tokens) == (20, 60)
    assert [engine.turn(f"s{sibling}").cached_tokens for sibling in range(4)] == [0, 20, 20, 20]
    for sibling in range(4):
        assert_exact(engine.turn(f"s{sibling}"))


def test_a_sibling_that_comes_late_computes_one_token_of_the_prompt(engine):
    engine.submit(request("first", prompt_of(20), group_key="g", max_new_tokens=30))
    engine.steps(5)
    engine.submit(request("late", prompt_of(20), group_key="g", seed=1))
    engine.finish()
    assert engine.core.prefill_tokens == 20 + 1
    assert engine.turn("late").cached_tokens == 19
    assert_exact(engine.turn("late"))


def test_prompts_with_a_common_start_compute_it_once_even_in_one_pass(engine):
    for number in range(3):
        engine.submit(request(f"r{number}", prompt_of(20, seed=number, start=SYSTEM), seed=number))
    engine.finish()
    # 20 for the first; 8 for each of the others, whose 12 first tokens are the system prompt
    assert engine.core.prefill_tokens == 20 + 8 + 8
    for number in range(3):
        assert_exact(engine.turn(f"r{number}"))


def test_a_prefix_outlives_its_request(engine):
    engine.submit(request("gone", prompt_of(20, seed=1, start=SYSTEM)))
    engine.finish()
    engine.submit(request("next", prompt_of(20, seed=2, start=SYSTEM)))
    engine.finish()
    assert engine.turn("next").cached_tokens == 12
    assert_exact(engine.turn("next"))


def test_a_chain_of_prefixes_in_one_pass_is_exact(engine):
    engine.submit(request("seen", SYSTEM))
    engine.finish()
    long = prompt_of(30, seed=5, start=SYSTEM)
    engine.submit(request("a", long))  # starts behind the stored prefix
    engine.submit(request("b", [*long[:25], 7, 8]))  # starts behind 25 tokens of a, of which 12 were stored
    engine.submit(request("c", [*long[:14], 9]))
    before = engine.core.prefill_tokens
    engine.finish()
    assert engine.core.prefill_tokens - before == 18 + 2 + 1
    for name in "abc":
        assert_exact(engine.turn(name))


def test_after_a_flush_nothing_is_shared_with_what_was_there_before(engine):
    engine.submit(request("first", prompt_of(20), group_key="g", max_new_tokens=30))
    engine.steps(3)
    engine.core.flush()
    engine.submit(request("late", prompt_of(20), group_key="g"))
    engine.finish()
    assert engine.turn("late").cached_tokens == 0


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_new_request_shares_only_kv_of_the_weights_served_now(engine, kv):
    engine.submit(request("first", prompt_of(20), group_key="g", max_new_tokens=30))
    engine.steps(3)
    engine.swap(NEW, policy_version=2, kv=kv)
    engine.submit(request("late", prompt_of(20), group_key="g"))
    engine.finish()
    assert engine.turn("late").cached_tokens == (0 if kv == "keep" else 19)
    assert_exact(engine.turn("late"), NEW)


@pytest.mark.parametrize("max_num_batched_tokens", [2, 6, 17])
def test_a_long_prompt_is_computed_in_chunks_between_decode_steps(tmp_path, max_num_batched_tokens):
    engine = SteppedEngine(tmp_path, OLD, max_num_seqs=2, max_num_batched_tokens=max_num_batched_tokens)
    engine.submit(request("short", [3], max_new_tokens=40))
    engine.steps(1)
    engine.submit(request("long", prompt_of(33), max_new_tokens=4))
    running = engine.core.running[0]
    before = running.count
    while "long" not in engine.results:
        engine.steps(1)
    assert running.count - before >= -(-33 // (max_num_batched_tokens - 1)), (
        "the short request waited for the long prompt"
    )
    assert_exact(engine.turn("long"))
    engine.finish()
    assert_exact(engine.turn("short"))


def test_a_prompt_half_computed_at_a_swap_begins_again_under_the_new_weights(tmp_path):
    engine = SteppedEngine(tmp_path, OLD, max_num_seqs=7, max_num_batched_tokens=8)
    engine.submit(request("long", prompt_of(33)))
    engine.steps(2)
    engine.swap(NEW, policy_version=2, kv="keep")
    engine.finish()
    assert_exact(engine.turn("long"), NEW)


def test_slots_stay_compact_whoever_leaves(engine):
    for number in range(6):
        engine.submit(request(f"r{number}", prompt_of(5 + number, seed=number), max_new_tokens=20, seed=number))
    engine.steps(3)
    for name in ("r0", "r4", "r2"):
        assert engine.core.abort(name)
        assert engine.turn(name).stop_reason is StopReason.ABORT
    assert sorted(s.request.request_id for s in engine.core.running) == ["r1", "r3", "r5"]
    engine.finish()
    for name in ("r1", "r3", "r5"):
        assert len(engine.turn(name).output_ids) == 20
        assert_exact(engine.turn(name))


def test_requests_join_at_every_step(engine):
    for number in range(7):
        engine.submit(request(f"r{number}", prompt_of(4 + number, seed=number), max_new_tokens=12, seed=number))
        engine.steps(1)
    assert len(engine.core.running) == 7
    engine.finish()
    for number in range(7):
        assert_exact(engine.turn(f"r{number}"))


def test_a_deadline_ends_a_request_with_what_it_has(engine):
    engine.submit(request("late", prompt_of(5), max_new_tokens=100, deadline_s=5.0))
    engine.steps(3)
    engine.clock.advance(5.0)
    engine.steps(1)
    turn = engine.turn("late")
    assert (turn.stop_reason, len(turn.output_ids)) == (StopReason.ABORT, 3)
    assert turn.timings.decode_s == 5.0
    assert engine.core.kv_used_tokens == 0


def test_a_refused_update_changes_nothing(engine):
    before = engine.core.score(np.arange(1, 9))
    weights = tensors_of(NEW)
    engine.core.pause()
    for broken, message in (
        ({**weights, "model.norm.weight": torch.zeros(3)}, r"model\.norm\.weight has shape \(3,\) instead of \(16,\)"),
        ({**weights, "model.extra": torch.zeros(3)}, r"model\.extra is not part of the model"),
        ({name: value for name, value in weights.items() if "norm" not in name}, r"norm\.weight is missing"),
        ({**weights, "model.norm.weight": torch.zeros(16, dtype=torch.int64)}, "not floating point"),
    ):
        with pytest.raises(WeightError, match=message):
            engine.core.update(broken, policy_version=2, digest="d", kv="keep")
    assert (engine.core.policy_version, engine.core.dirty_reason) == (1, None)
    np.testing.assert_array_equal(engine.core.score(np.arange(1, 9)), before)


class Unreadable(torch.Tensor):
    """A tensor whose numbers are gone when they are asked for, as behind a map whose file was cut."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            raise RuntimeError("bus error")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_an_update_that_fails_half_way_leaves_the_engine_dirty_until_a_later_one_succeeds(engine):
    engine.submit(request("running", prompt_of(5), max_new_tokens=50))
    engine.steps(4)
    engine.submit(request("waiting", prompt_of(5)))
    engine.core.pause()
    weights = tensors_of(NEW)
    last = list(weights)[-1]
    with pytest.raises(EngineError, match=r"failed after weights had been changed .*bus error"):
        engine.core.update(
            {**weights, last: weights[last].as_subclass(Unreadable)}, policy_version=2, digest="d", kv="keep"
        )
    engine.core.resume()
    partial = engine.turn("running")
    assert (partial.stop_reason, len(partial.output_ids)) == (StopReason.ABORT, 4)
    assert isinstance(engine.results["waiting"], EngineError)
    assert not engine.core.has_work()
    with pytest.raises(EngineError, match="dirty"):
        engine.submit(request("late", prompt_of(5)))
    with pytest.raises(EngineError, match="dirty"):
        engine.core.score(np.arange(1, 9))
    engine.swap(NEW, policy_version=3, kv="keep")
    engine.submit(request("healed", prompt_of(5)))
    engine.finish()
    assert_exact(engine.turn("healed"), NEW)


def test_weights_that_are_not_finite_fail_the_requests_and_never_leak_into_later_ones(engine):
    broken = random_model(seed=3)
    with torch.no_grad():
        broken.model.layers[0].self_attn.v_proj.weight.fill_(float("nan"))
    engine.swap(broken, policy_version=2, kv="keep")
    engine.submit(request("nan", prompt_of(40)))
    engine.steps(1)
    assert isinstance(engine.results["nan"], EngineError)
    assert "not finite" in str(engine.results["nan"])
    engine.swap(NEW, policy_version=3, kv="keep")
    engine.submit(request("sound", prompt_of(5), max_new_tokens=60))
    engine.finish()
    assert_exact(engine.turn("sound"), NEW)


def test_bfloat16_serves_log_probs_close_to_float32(tmp_path):
    engine = SteppedEngine(tmp_path, OLD, dtype="bfloat16")
    for number in range(3):
        engine.submit(request(f"r{number}", prompt_of(20, seed=number, start=SYSTEM), seed=number))
    engine.finish()
    for number in range(3):
        turn = engine.turn(f"r{number}")
        assert turn.behavior_logprobs.dtype == np.float32
        expected = reference_logprobs(OLD, turn, SamplingParams())
        np.testing.assert_allclose(turn.behavior_logprobs, expected, atol=0.3)
        exact = reference_logprobs(random_model(seed=1, dtype=torch.bfloat16), turn, SamplingParams())
        np.testing.assert_allclose(turn.behavior_logprobs, exact, atol=0.15)


def test_scores_of_a_long_text_equal_one_forward_pass(engine):
    ids = np.array(prompt_of(MAX_LEN, seed=4))
    logits = OLD(input_ids=torch.from_numpy(ids)[None]).logits[0].float().log_softmax(-1)
    expected = logits[:-1].gather(1, torch.from_numpy(ids[1:])[:, None])[:, 0].detach().numpy()
    np.testing.assert_allclose(engine.core.score(ids), expected, atol=1e-4)
