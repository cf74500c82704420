"""T09: the policy version on a token is the one that sampled it.

Reported elsewhere: the version is read after generation, so that old tokens are labelled new (rllm 622, AReaL 1569); a
request that crosses an update has no honest single version (vLLM 54443); the version advances before the engines pause
or after they resume (prime-rl 3050, 3385).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from generator_builders import SteppedEngine, llama, prompt_of, random_model, request
from rollmill.types import Turn, VersionSpan

CONFIG = llama(num_hidden_layers=1)
MODELS = [random_model(CONFIG, seed=seed) for seed in range(3)]


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_57_tokens_at_version_7_and_71_at_version_8_are_two_spans(tmp_path, kv):
    engine = SteppedEngine(tmp_path, MODELS[0])
    engine.swap(MODELS[1], policy_version=7, kv=kv)
    engine.submit(request("a", [1, 2, 3], max_new_tokens=128))
    engine.steps(57)
    engine.swap(MODELS[2], policy_version=8, kv=kv)
    engine.finish()
    assert engine.turn("a").version_spans == (VersionSpan(0, 57, 7), VersionSpan(57, 128, 8))


def spans_of_log(versions: list[int]) -> list[tuple[int, int, int]]:
    """Spans of an independent log: one version per token."""
    spans: list[tuple[int, int, int]] = []
    for at, version in enumerate(versions):
        if spans and spans[-1][2] == version:
            spans[-1] = (spans[-1][0], at + 1, version)
        else:
            spans.append((at, at + 1, version))
    return spans


class Observer:
    """Keeps its own log: which weights this test had loaded when each token appeared."""

    def __init__(self, folder: Path) -> None:
        self.engine = SteppedEngine(folder, MODELS[0], max_num_seqs=3, max_num_batched_tokens=12)
        self.loaded = 1
        self.log: dict[str, list[int]] = {}

    def submit(self, length: int) -> None:
        name = f"r{len(self.log)}"
        self.log[name] = []
        self.engine.submit(request(name, prompt_of(length, seed=length), max_new_tokens=length, seed=len(self.log)))

    def swap(self, by: int, kv: Any) -> None:
        self.loaded += by
        self.engine.swap(MODELS[self.loaded % 3], policy_version=self.loaded, kv=kv)

    def abort(self, number: int) -> None:
        self.engine.core.abort(f"r{number}")

    def step(self) -> None:
        before = self._counts()
        self.engine.steps(1)
        for name, count in self._counts().items():
            self.log[name] += [self.loaded] * (count - before[name])

    def finish(self) -> None:
        while self.engine.core.has_work():
            self.step()

    def _counts(self) -> dict[str, int]:
        live = {s.request.request_id: s.count for s in (*self.engine.core.running, *self.engine.core.waiting)}
        done = {name: len(turn.output_ids) for name, turn in self.engine.results.items() if isinstance(turn, Turn)}
        return {**live, **done}


ACTIONS = st.one_of(
    st.just(("step",)),
    st.just(("step",)),
    st.tuples(st.just("submit"), st.integers(1, 12)),
    st.tuples(st.just("swap"), st.integers(1, 3), st.sampled_from(["keep", "recompute"])),
    st.tuples(st.just("abort"), st.integers(0, 3)),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(actions=st.lists(ACTIONS, max_size=25))
def test_labels_equal_the_log_of_what_was_loaded_for_any_interleaving(actions):
    with tempfile.TemporaryDirectory() as folder:
        observer = Observer(Path(folder))
        for name, *arguments in actions:
            getattr(observer, name)(*arguments)
        observer.finish()
    assert observer.engine.results.keys() == observer.log.keys()
    for name, versions in observer.log.items():
        turn = observer.engine.turn(name)
        labels = [(span.start_token, span.end_token, span.policy_version) for span in turn.version_spans]
        assert labels == spans_of_log(versions)
        assert len(turn.output_ids) == len(versions)
