"""What a draft has read is what stands there: its guesses have the chances of a plain forward pass, after anything."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from generator_builders import (
    Always,
    SteppedEngine,
    close_to,
    llama,
    prompt_of,
    random_model,
    reference_logits,
    reference_logprobs,
    request,
)
from rollmill.generator.engines.embedded.drafting import Drafter
from rollmill.generator.engines.embedded.rejection import Draft
from rollmill.generator.engines.embedded.speculation import Guess
from rollmill.generator.engines.sequence import Sequence
from rollmill.types import SamplingParams

MODEL = random_model(llama(hidden_size=16, head_dim=8, num_attention_heads=2, num_hidden_layers=1), seed=4)
NEW = random_model(MODEL.config, seed=5)
DRAFT = close_to(MODEL, by=0.1)


class Switch(Always):
    """Lets the draft guess or not, as it is told."""

    on = True

    def guesses(self, sequences: int) -> bool:
        return self.on


class Watched:
    """A drafter whose guesses are compared with what the draft says to all tokens before them, read anew."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.see, self.passed = drafter.see, drafter.passed
        self.forget, self.clear = drafter.forget, drafter.clear

    @property
    def guessed(self) -> int:
        return self._drafter.guessed

    @property
    def accepted(self) -> int:
        return self._drafter.accepted

    def guess(self, sequences: list[Sequence], *, rows: int, most: int) -> list[Guess]:
        found = self._drafter.guess(sequences, rows=rows, most=most)
        for sequence, guess in zip(sequences, found, strict=True):
            if isinstance(guess, Draft):
                ids = np.concatenate([sequence.kv_ids(), [sequence.last_token], guess.tokens])
                said = reference_logits(DRAFT, ids).softmax(-1)[-1 - len(guess.tokens) : -1]
                expected = said[np.arange(len(guess.tokens)), np.array(guess.tokens)]
                np.testing.assert_allclose(guess.chances, expected, atol=1e-4)
        return found


# Prompts that share blocks: whole ones, the beginning of one, none.
PROMPTS = [prompt_of(37), prompt_of(50, start=prompt_of(37)), prompt_of(60, start=prompt_of(20)), prompt_of(5, seed=8)]
SUBMIT = st.tuples(st.just("submit"), st.integers(0, 3), st.integers(1, 3), st.integers(2, 24))
EVENTS = st.one_of(
    SUBMIT,
    SUBMIT,
    st.tuples(st.just("steps"), st.integers(1, 5)),
    st.tuples(st.just("guess"), st.booleans()),
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("swap"), st.sampled_from(["keep", "recompute"])),
)


def version_of(policy_version: int) -> Any:
    return MODEL if policy_version % 2 else NEW


def happen(engine: SteppedEngine, law: Switch, event: tuple[Any, ...], *, number: int) -> None:
    match event:
        case "submit", prompt, siblings, new:
            for n in range(siblings):
                name = f"{number}-{n}"
                seed = 10 * number + n
                engine.submit(request(name, PROMPTS[prompt], group_key=str(number), seed=seed, max_new_tokens=new))
        case "steps", count:
            engine.steps(count)
        case "guess", on:
            law.on = on
        case "abort", place:
            running = engine.core.running
            if running:
                assert engine.core.abort(running[place % len(running)].request.request_id)
        case "swap", kv:
            version = engine.core.policy_version + 1
            engine.swap(version_of(version), policy_version=version, kv=kv)
        case _:
            raise AssertionError(event)


@settings(max_examples=12, deadline=None)
@given(st.lists(EVENTS, min_size=5, max_size=25), st.sampled_from([11, 14, 40]), st.sampled_from([12, 30, 200]))
def test_a_draft_guesses_from_what_stands_there_after_any_history(tmp_path_factory, events, blocks, batched):
    law = Switch()
    engine = SteppedEngine(
        tmp_path_factory.mktemp("engine"),
        MODEL,
        draft=DRAFT,
        draft_tokens=3,
        law=law,
        kv_blocks=blocks,
        max_num_seqs=6,
        max_num_batched_tokens=batched,
    )
    assert engine.drafter is not None
    engine.core.speculator = Watched(engine.drafter)
    for number, event in enumerate([("submit", 0, 2, 12), *events]):
        happen(engine, law, event, number=number)
    law.on = True
    happen(engine, law, ("submit", 1, 2, 12), number=99)
    engine.finish()
    assert 0 < engine.drafter.accepted < engine.drafter.guessed
    assert engine.core.kv_used_tokens == 0
    for name in engine.results:
        turn = engine.turn(name)
        if len(turn.version_spans) == 1:  # across versions, old keys and values may be among those that were seen
            served = version_of(turn.version_spans[0].policy_version)
            expected = reference_logprobs(served, turn, SamplingParams())
            np.testing.assert_allclose(turn.behavior_logprobs, expected, atol=1e-4)
