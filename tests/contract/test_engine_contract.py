"""What every engine must do: the embedded one (tiny random Llama), the fake one, a real vLLM and a real SGLang."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from generator_builders import (
    MAX_LEN,
    Always,
    all_ids,
    close_to,
    embedded,
    prompt_of,
    random_model,
    reference_logprobs,
    request,
    served_model,
    tensors_of,
)
from rollmill.clock import SystemClock
from rollmill.errors import DataError, EngineDead, EngineError, WeightMismatch
from rollmill.generator.engines.embedded.drafting import DraftModel
from rollmill.generator.engines.fake import FakeEngine
from rollmill.generator.engines.protocol import Engine, EngineLoad, OnTokens
from rollmill.trainer.logprobs import prepare_model, score_tokens
from rollmill.types import GenerateRequest, SamplingParams, StopReason, TokenChunk, Turn
from sglang_server import SharedServer as SharedSglang
from sglang_server import why_not as why_no_sglang
from vllm_server import SharedServer, why_not

OLD, NEW = random_model(seed=1), random_model(seed=2)
LONG = 140
"""Output tokens of a request that still runs when something happens to it."""
EQUAL = {"float32": 1e-4, "bfloat16": 0.5}
"""Dtype -> nats by which a log-prob may differ from the trainer's forward in float32 under equal weights."""
EQUAL_ON_AVERAGE = {"float32": 3e-5, "bfloat16": 0.1}
"""The same for the mean: single tokens of these models, whose weights are large, are rounded to half a nat."""
BLOCK = 32
"""Tokens of the largest block of KV of any engine here."""


class Gate:
    """Stands before each step of an engine's thread, so that a test acts between two steps of its choice."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed = math.inf
        self._blocked = False
        self.plug_pulled = False

    def allow(self, steps: float) -> None:
        with self._changed:
            self._allowed, self._blocked = steps, False
            self._changed.notify_all()

    def wait_until_blocked(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._blocked, timeout=20)

    def __call__(self) -> None:
        with self._changed:
            self._blocked = self._allowed <= 0
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._allowed > 0, timeout=20)
            self._allowed -= 1
        if self.plug_pulled:
            raise RuntimeError("pulled the plug")


class Subject:
    """An engine with what a test needs to know about it. The fake runs on the test's own thread: no gate is needed."""

    died_of: type[Exception] = RuntimeError
    last_words = "pulled the plug"
    has_kv = True

    def __init__(self, engine: Engine, *, kill: Callable[[], None], gate: Gate | None = None) -> None:
        self.engine = engine
        self.kill = kill
        self.gate = gate

    async def running(self, asked: GenerateRequest, *, on_tokens: OnTokens | None = None) -> asyncio.Task[Turn]:
        """Start a request and return once it has two tokens or more; nothing moves on before `act`."""
        task = asyncio.ensure_future(self.engine.generate(asked, on_tokens=on_tokens))
        await asyncio.sleep(0)
        if self.gate is not None:
            self.gate.allow(2)
            await asyncio.to_thread(self.gate.wait_until_blocked)
            return task
        before = self.engine.load().output_tokens
        async with asyncio.timeout(20):
            while self.engine.load().output_tokens < before + 2:
                await self.engine.abort("nobody")
                await asyncio.sleep(0)
        return task

    async def act(self, *calls: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> Any:
        """Make calls between two steps, then let the engine run; return what the first call returns."""
        tasks = []
        for call in calls:
            tasks.append(asyncio.ensure_future(call))
            await asyncio.sleep(0)
        if self.gate is not None:
            self.gate.allow(math.inf)
        return await tasks[0]

    def expected(self, turn: Turn, sampling: SamplingParams, *, version: int) -> np.ndarray:
        """Log-probs of the behaviour policy by a second implementation."""
        raise NotImplementedError

    def new_weights(self) -> Mapping[str, torch.Tensor]:
        return tensors_of(NEW)

    def again(self, seed: int) -> dict[str, Any]:
        """Return sampling that gives the same tokens each time."""
        return {"seed": seed}

    async def look(self) -> EngineLoad:
        """Return the load of now."""
        return self.engine.load()

    def old_weights(self) -> tuple[Mapping[str, torch.Tensor], str]:
        """Return the first weights once more, and their digest."""
        return tensors_of(OLD), "digest-1"

    def kept(self, turn: Turn, *, cut: int) -> np.ndarray:
        """Log-probs of the tokens from `cut` on: new weights over the KV that the old ones left."""
        return mixed_logprobs(OLD, NEW, turn, cut=cut)

    def trainers(self, turn: Turn) -> np.ndarray:
        """Log-probs of the output by the trainer's own forward in float32, under the first weights."""
        return trainers_logprobs(OLD, turn)

    async def abort_within_a_step(self, request_id: str) -> EngineLoad:
        """Abort a request, let the engine make one step at most, and return the load."""
        aborting = asyncio.ensure_future(self.engine.abort(request_id))
        await asyncio.sleep(0)
        if self.gate is not None:
            self.gate.allow(1)
        assert await aborting
        return self.engine.load()


@torch.inference_mode()
def mixed_logprobs(old: Any, new: Any, turn: Turn, *, cut: int) -> np.ndarray:
    ids = torch.from_numpy(all_ids(turn))
    # When the weights changed, the newest token had not been fed yet.
    fed = len(turn.prompt_ids) + cut - 1
    cache = old(input_ids=ids[None, :fed], use_cache=True).past_key_values
    rows = new(input_ids=ids[None, fed:], cache=cache).logits[0].log_softmax(-1)
    return rows[:-1].gather(1, ids[fed + 1 :, None])[:, 0].numpy()


def trainers_logprobs(model: Any, turn: Turn) -> np.ndarray:
    policy = prepare_model(deepcopy(model))
    with torch.no_grad():
        scored = score_tokens(policy, torch.from_numpy(all_ids(turn)))
    return scored[len(turn.prompt_ids) - 1 :].numpy()


class EmbeddedSubject(Subject):
    def expected(self, turn: Turn, sampling: SamplingParams, *, version: int) -> np.ndarray:
        return reference_logprobs({1: OLD, 2: NEW}[version], turn, sampling)


class DraftedSubject(EmbeddedSubject):
    """A draft guesses in every pass: tokens come several at a time, and another seed's worth of them each time."""

    def again(self, seed: int) -> dict[str, Any]:
        # Which numbers a token is drawn with depends on whether it was guessed.
        return {"temperature": 0.0}


class FakeSubject(Subject):
    """Its policy is a table: there is no KV to keep, and its own log-probs are what a trainer would compute."""

    has_kv = False

    def kept(self, turn: Turn, *, cut: int) -> np.ndarray:
        return self.expected(turn, SamplingParams(), version=2)[cut:]

    def trainers(self, turn: Turn) -> np.ndarray:
        return self.expected(turn, SamplingParams(), version=1)

    def expected(self, turn: Turn, sampling: SamplingParams, *, version: int) -> np.ndarray:
        policy = FakeEngine(clock=SystemClock(), digest=f"digest-{version}")
        ids = all_ids(turn)
        rows = []
        for before, token in zip(ids[len(turn.prompt_ids) - 1 : -1], turn.output_ids, strict=True):
            row = torch.from_numpy(policy.logprobs(int(before))) / (sampling.temperature or 1.0)
            if sampling.top_p < 1:
                probabilities, order = row.softmax(-1).sort(descending=True)
                kept = order[: int((probabilities.cumsum(-1) < sampling.top_p).sum()) + 1]
                row = torch.full_like(row, -torch.inf).index_copy(0, kept, row[kept])
            rows.append(float(row.log_softmax(-1)[int(token)]))
        return np.array(rows, dtype=np.float32)


class VllmSubject(Subject):
    """A server steps when it likes: what runs is long, and what happened is read off the spans."""

    died_of = EngineDead
    last_words = "was killed by signal 9"

    def __init__(self, server: SharedServer) -> None:
        super().__init__(server.engine(), kill=server.kill)
        self._server = server

    async def running(self, asked: GenerateRequest, *, on_tokens: OnTokens | None = None) -> asyncio.Task[Turn]:
        two = asyncio.Event()

        def hear(chunk: TokenChunk) -> None:
            if chunk.start_token + len(chunk.output_ids) >= 2:
                two.set()
            if on_tokens is not None:
                on_tokens(chunk)

        task = asyncio.ensure_future(self.engine.generate(asked, on_tokens=hear))
        async with asyncio.timeout(20):
            await two.wait()
        return task

    def expected(self, turn: Turn, sampling: SamplingParams, *, version: int) -> np.ndarray:
        return reference_logprobs({1: self._server.old, 2: self._server.new}[version], turn, sampling)

    def new_weights(self) -> Mapping[str, torch.Tensor]:
        return tensors_of(self._server.new)

    async def look(self) -> EngineLoad:
        await self.engine.pause("keep")
        load = self.engine.load()
        await self.engine.resume()
        return load

    def old_weights(self) -> tuple[Mapping[str, torch.Tensor], str]:
        return tensors_of(self._server.old), "digest-1"

    def kept(self, turn: Turn, *, cut: int) -> np.ndarray:
        return mixed_logprobs(self._server.old, self._server.new, turn, cut=cut)

    def trainers(self, turn: Turn) -> np.ndarray:
        return trainers_logprobs(self._server.old, turn)

    async def abort_within_a_step(self, request_id: str) -> EngineLoad:
        # It steps by itself, and what it says of its KV comes later: it is frozen on both sides, and asked then.
        await self.engine.pause("keep")
        await self._until_kv(lambda used: used >= MAX_LEN - 50)
        await self.engine.resume()
        assert await self.engine.abort(request_id)
        await self.engine.pause("keep")
        return await self._until_kv(lambda used: used < MAX_LEN - 50)

    async def _until_kv(self, true: Callable[[int], bool]) -> EngineLoad:
        async with asyncio.timeout(10):
            while not true((load := self.engine.load()).kv_used_tokens):  # noqa: ASYNC110 - it is polled elsewhere
                await asyncio.sleep(0.02)
        return load


class SglangSubject(VllmSubject):
    def __init__(self, server: SharedSglang) -> None:
        Subject.__init__(self, server.engine(), kill=server.kill)
        self._server = server

    def again(self, seed: int) -> dict[str, Any]:
        # Seeds count only with `generator.sglang.deterministic_inference`, which needs a GPU.
        assert "seed" not in self.engine.info().capabilities
        return {"temperature": 0.0}


@pytest.fixture(scope="module")
def sglang_server(tmp_path_factory) -> Iterator[SharedSglang]:
    if (reason := why_no_sglang()) is not None:
        pytest.skip(reason)
    server = SharedSglang(tmp_path_factory.mktemp("sglang"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory) -> Iterator[SharedServer]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    server = SharedServer(tmp_path_factory.mktemp("vllm"))
    yield server
    server.stop()


REAL = (pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(600))


@pytest.fixture(
    params=["embedded", "drafted", "fake", *(pytest.param(name, marks=REAL) for name in ("sglang", "vllm"))]
)
async def subject(request, tmp_path) -> AsyncIterator[Subject]:
    if request.param == "vllm":
        # On this thread: the kernel ends the server with the thread that started it.
        real = VllmSubject(request.getfixturevalue("vllm_server"))
        yield real
        await real.engine.close()
        return
    if request.param == "sglang":
        real = SglangSubject(request.getfixturevalue("sglang_server"))
        yield real
        await real.engine.close()
        return
    if request.param == "fake":
        fake = FakeEngine(clock=SystemClock(), digest="digest-1", max_num_seqs=8, max_model_len=MAX_LEN)
        yield FakeSubject(fake, kill=lambda: fake.kill(RuntimeError("pulled the plug")))
        await fake.close()
        return
    gate = Gate()

    def kill() -> None:
        gate.plug_pulled = True
        gate.allow(math.inf)

    kind: type[Subject] = EmbeddedSubject
    options: dict[str, Any] = {}
    if request.param == "drafted":
        kind, small = DraftedSubject, served_model(tmp_path / "draft", close_to(OLD))
        options = {"speculation": "draft", "draft": DraftModel(small, tokens=2, law=Always())}
    engine = embedded(tmp_path, OLD, before_step=gate, **options)
    yield kind(engine, kill=kill, gate=gate)
    gate.allow(math.inf)
    await engine.close()


async def update(subject: Subject, *, version: int = 2, kv: Any = "keep"):
    return await subject.engine.update(subject.new_weights(), policy_version=version, digest=f"digest-{version}", kv=kv)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.5, "top_p": 0.6},
        {"temperature": 0.0},
    ],
    ids=str,
)
async def test_log_probs_are_those_of_the_distribution_that_was_sampled_from(subject, sampling):
    turns = await asyncio.gather(
        *(
            subject.engine.generate(request(f"r{seed}", prompt_of(5 + seed, seed=seed), seed=seed, **sampling))
            for seed in range(5)
        )
    )
    for turn in turns:
        expected = subject.expected(turn, SamplingParams(**sampling), version=1)
        np.testing.assert_allclose(turn.behavior_logprobs, expected, atol=1e-4)


async def test_the_version_spans_partition_the_output_across_an_update(subject):
    task = await subject.running(request("a", prompt_of(5), max_new_tokens=LONG))
    await subject.act(subject.engine.pause("keep"))
    before = subject.engine.load().output_tokens
    await update(subject)
    await subject.engine.resume()
    turn = await task
    assert [(s.start_token, s.end_token, s.policy_version) for s in turn.version_spans] == [
        (0, before, 1),
        (before, LONG, 2),
    ]


def joined(chunks: list[TokenChunk]) -> tuple[list[int], list[float], list[tuple[int, int]]]:
    """Ids, log-probs, and (version, tokens) of chunks, which must leave no gap."""
    assert [chunk.start_token for chunk in chunks] == [
        sum(len(before.output_ids) for before in chunks[:index]) for index in range(len(chunks))
    ]
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        version, tokens = runs.pop() if runs and runs[-1][0] == chunk.policy_version else (chunk.policy_version, 0)
        runs.append((version, tokens + len(chunk.output_ids)))
    ids = [token for chunk in chunks for token in chunk.output_ids.tolist()]
    return ids, [float(logprob) for chunk in chunks for logprob in chunk.behavior_logprobs], runs


async def test_the_chunks_of_a_stream_are_the_turn_and_the_turn_is_the_one_without_a_stream(subject):
    asked = {"max_new_tokens": 30, "top_p": 0.9, **subject.again(3)}
    plain = await subject.engine.generate(request("plain", prompt_of(9), **asked))
    chunks: list[TokenChunk] = []
    streamed = await subject.engine.generate(request("streamed", prompt_of(9), **asked), on_tokens=chunks.append)
    ids, logprobs, runs = joined(chunks)
    assert len(chunks) > 1
    assert ids == streamed.output_ids.tolist() == plain.output_ids.tolist()
    assert logprobs == streamed.behavior_logprobs.tolist()
    np.testing.assert_allclose(streamed.behavior_logprobs, plain.behavior_logprobs, atol=1e-5)
    assert runs == [(1, 30)]
    assert (streamed.stop_reason, streamed.version_spans) == (plain.stop_reason, plain.version_spans)


async def test_a_stream_across_an_update_has_chunks_of_both_versions_and_none_of_mixed_ones(subject):
    chunks: list[TokenChunk] = []
    task = await subject.running(request("a", prompt_of(5), max_new_tokens=LONG), on_tokens=chunks.append)
    await subject.act(subject.engine.pause("keep"))
    await update(subject)
    await subject.engine.resume()
    turn = await task
    ids, logprobs, runs = joined(chunks)
    assert (ids, logprobs) == (turn.output_ids.tolist(), turn.behavior_logprobs.tolist())
    assert runs == [(span.policy_version, span.end_token - span.start_token) for span in turn.version_spans]
    assert [version for version, _ in runs] == [1, 2]


async def test_an_aborted_stream_has_given_every_token_of_its_partial_turn(subject):
    chunks: list[TokenChunk] = []
    task = await subject.running(request("a", prompt_of(5), max_new_tokens=LONG), on_tokens=chunks.append)
    await subject.act(subject.engine.abort("a"))
    turn = await task
    assert turn.stop_reason is StopReason.ABORT
    assert joined(chunks)[0] == turn.output_ids.tolist()
    assert 0 < len(turn.output_ids) < LONG


async def test_weights_made_ready_are_served_only_after_their_update(subject):
    task = await subject.running(request("a", prompt_of(5), max_new_tokens=LONG))
    weights = subject.new_weights()
    await subject.act(subject.engine.stage(weights, policy_version=2))
    assert (subject.engine.info().policy_version, subject.engine.info().digest) == (1, "digest-1")
    before = await task
    assert [span.policy_version for span in before.version_spans] == [1]
    np.testing.assert_allclose(
        before.behavior_logprobs, subject.expected(before, SamplingParams(), version=1), atol=1e-4
    )
    await subject.engine.pause("keep")
    report = await subject.engine.update(weights, policy_version=2, digest="digest-2", kv="keep")
    await subject.engine.resume()
    assert (report.policy_version, report.changed) == (2, True)
    after = await subject.engine.generate(request("b", prompt_of(5)))
    np.testing.assert_allclose(after.behavior_logprobs, subject.expected(after, SamplingParams(), version=2), atol=1e-4)


async def test_no_token_is_produced_between_pause_and_resume(subject):
    task = await subject.running(request("a", prompt_of(5), max_new_tokens=LONG))
    await subject.act(subject.engine.pause("keep"))
    await subject.engine.pause("keep")
    before = subject.engine.load()
    waiting = asyncio.ensure_future(subject.engine.generate(request("b", prompt_of(5))))
    for _ in range(50):
        await asyncio.sleep(0)
    await subject.engine.score(np.arange(1, 5))
    during = subject.engine.load()
    assert before.paused
    assert (during.output_tokens, during.running) == (before.output_tokens, 1)
    await subject.engine.resume()
    assert len((await task).output_ids) == LONG
    assert len((await waiting).output_ids) == 8


async def test_a_new_request_with_an_old_prompt_gets_the_new_policy(subject):
    prompt = prompt_of(20)
    await subject.engine.generate(request("old", prompt, group_key="g"))
    running = await subject.running(request("running", prompt, group_key="g", max_new_tokens=LONG))
    await subject.act(subject.engine.pause("keep"))
    await update(subject, kv="keep")
    await subject.engine.resume()
    turn = await subject.engine.generate(request("new", prompt, group_key="g", seed=9))
    await running
    assert turn.version_spans[0].policy_version == 2
    assert turn.cached_tokens == 0
    np.testing.assert_allclose(turn.behavior_logprobs, subject.expected(turn, SamplingParams(), version=2), atol=1e-4)


# -- KV of requests in flight when weights change


async def swapped_in_flight(subject: Subject, asked: GenerateRequest, *, kv: Any, equal: bool = False) -> Turn:
    """Let a request run across an update to version 2; return its turn, whose spans are those of the swap."""
    tensors, digest = subject.old_weights() if equal else (subject.new_weights(), "digest-2")
    task = await subject.running(asked)
    await subject.act(subject.engine.pause("keep"))
    before = subject.engine.load().output_tokens
    await subject.engine.update(tensors, policy_version=2, digest=digest, kv=kv)
    await subject.engine.resume()
    turn = await task
    cut = turn.version_spans[0].end_token
    assert [(s.start_token, s.end_token, s.policy_version) for s in turn.version_spans] == [
        (0, cut, 1),
        (cut, len(turn.output_ids), 2),
    ]
    assert 2 <= cut <= before
    return turn


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_an_update_to_equal_weights_in_flight_gives_the_identical_continuation(subject, kv):
    asked = {"max_new_tokens": LONG, **subject.again(3)}
    whole = await subject.engine.generate(request("whole", prompt_of(9), **asked))
    turn = await swapped_in_flight(subject, request("swapped", prompt_of(9), **asked), kv=kv, equal=True)
    assert turn.output_ids.tolist() == whole.output_ids.tolist()
    np.testing.assert_allclose(turn.behavior_logprobs, whole.behavior_logprobs, atol=EQUAL["float32"])


async def test_with_keep_a_request_in_flight_goes_on_over_the_keys_and_values_of_the_old_weights(subject):
    turn = await swapped_in_flight(subject, request("a", prompt_of(9), max_new_tokens=LONG), kv="keep")
    cut = turn.version_spans[0].end_token
    np.testing.assert_allclose(turn.behavior_logprobs[cut:], subject.kept(turn, cut=cut), atol=EQUAL["float32"])
    anew = subject.expected(turn, SamplingParams(), version=2)[cut:]
    assert (np.abs(turn.behavior_logprobs[cut:] - anew).max() > 0.05) == subject.has_kv
    old = subject.expected(turn, SamplingParams(), version=1)
    np.testing.assert_allclose(turn.behavior_logprobs[:cut], old[:cut], atol=EQUAL["float32"])


async def test_with_recompute_a_request_in_flight_goes_on_as_after_a_fresh_prefill(subject):
    asked = {"temperature": 0.0}
    turn = await swapped_in_flight(subject, request("a", prompt_of(9), max_new_tokens=LONG, **asked), kv="recompute")
    cut = turn.version_spans[0].end_token
    fresh = await subject.engine.generate(
        request("fresh", all_ids(turn)[: 9 + cut].tolist(), max_new_tokens=LONG - cut, **asked)
    )
    assert fresh.output_ids.tolist() == turn.output_ids[cut:].tolist()
    np.testing.assert_allclose(turn.behavior_logprobs[cut:], fresh.behavior_logprobs, atol=EQUAL["float32"])
    new = subject.expected(turn, SamplingParams(), version=2)
    np.testing.assert_allclose(turn.behavior_logprobs[cut:], new[cut:], atol=EQUAL["float32"])


async def test_an_abort_frees_the_keys_and_values_of_its_request_within_a_step(subject):
    heard = 0

    def hear(chunk: TokenChunk) -> None:
        nonlocal heard
        heard = chunk.start_token + len(chunk.output_ids)

    stays = await subject.running(request("stays", prompt_of(5), max_new_tokens=LONG), on_tokens=hear)
    gone = await subject.running(request("gone", prompt_of(MAX_LEN - 50, seed=1), max_new_tokens=50))
    load = await subject.abort_within_a_step("gone")
    assert load.running == 1
    # What is left is the other request's, in whole blocks, with one more for its next token.
    assert 0 < load.kv_used_tokens <= 5 + heard + 2 * BLOCK < MAX_LEN - 50
    if subject.gate is not None:
        subject.gate.allow(math.inf)
    await subject.engine.resume()
    assert (await gone).stop_reason is StopReason.ABORT
    assert len((await stays).output_ids) == LONG


async def test_log_probs_are_those_of_the_trainers_forward_under_equal_weights(subject):
    turn = await subject.engine.generate(request("a", prompt_of(9), max_new_tokens=40, seed=5))
    differences = np.abs(turn.behavior_logprobs - subject.trainers(turn))
    assert differences.max() < EQUAL["float32"]
    assert differences.mean() < EQUAL_ON_AVERAGE["float32"]


async def test_while_weights_load_the_engine_is_sound_and_what_comes_waits_for_the_new_version(subject):
    await subject.engine.pause("keep")
    loading = asyncio.ensure_future(update(subject))
    await asyncio.sleep(0)
    late = asyncio.ensure_future(subject.engine.generate(request("late", prompt_of(5))))
    sound = subject.engine.healthy()
    while not loading.done():
        sound = sound and subject.engine.healthy()
        await asyncio.sleep(0)
    assert (sound, late.done()) == (True, False)
    await subject.engine.resume()
    assert {span.policy_version for span in (await late).version_spans} == {2}


async def test_abort_of_a1_leaves_a10_alone(subject):
    a1 = asyncio.ensure_future(subject.engine.generate(request("a1", prompt_of(5), max_new_tokens=LONG)))
    a10 = await subject.running(request("a10", prompt_of(5), max_new_tokens=LONG))
    assert await subject.act(subject.engine.abort("a1"))
    assert not await subject.engine.abort("a1")
    assert (await a1).stop_reason is StopReason.ABORT
    assert (await a10).stop_reason is StopReason.LENGTH


async def test_a_partial_turn_carries_ids_and_log_probs_and_its_tokens_go_on_as_they_would_have(subject):
    whole = await subject.engine.generate(request("whole", prompt_of(5), max_new_tokens=LONG, **subject.again(3)))
    task = await subject.running(request("part", prompt_of(5), max_new_tokens=LONG, **subject.again(3)))
    await subject.act(subject.engine.abort("part"))
    part = await task
    n = len(part.output_ids)
    assert part.stop_reason is StopReason.ABORT
    assert 0 < n < LONG
    assert part.output_ids.tolist() == whole.output_ids[:n].tolist()
    np.testing.assert_allclose(part.behavior_logprobs, whole.behavior_logprobs[:n], atol=1e-5)
    assert part.version_spans[-1].end_token == n


async def test_pause_abort_ends_everything_with_what_it_has(subject):
    tasks = [await subject.running(request(f"r{n}", prompt_of(5), max_new_tokens=LONG)) for n in range(2)]
    await subject.act(subject.engine.pause("abort"))
    assert subject.engine.load().running == 0
    turns = await asyncio.gather(*tasks)
    assert {turn.stop_reason for turn in turns} == {StopReason.ABORT}


async def test_pause_drain_lets_running_requests_finish_and_keeps_waiting_ones(subject):
    task = await subject.running(request("a", prompt_of(5), max_new_tokens=LONG))
    draining = asyncio.ensure_future(subject.engine.pause("drain"))
    late = asyncio.ensure_future(subject.engine.generate(request("late", prompt_of(5))))
    await subject.act(draining, late)
    assert len((await task).output_ids) == LONG
    assert not late.done()
    await update(subject)
    await subject.engine.resume()
    assert {span.policy_version for span in (await late).version_spans} == {2}


async def test_an_update_while_running_is_refused(subject):
    with pytest.raises(EngineError, match="pause the engine first"):
        await update(subject)
    assert subject.engine.info().policy_version == 1


async def test_a_repeated_update_changes_nothing_and_one_with_another_digest_is_a_mismatch(subject):
    await subject.engine.pause("keep")
    first, second = await update(subject), await update(subject)
    assert (first.changed, second.changed, second.nbytes) == (True, False, 0)
    assert first.nbytes == sum(tensor.nbytes for tensor in subject.new_weights().values())
    with pytest.raises(WeightMismatch):
        await subject.engine.update(subject.new_weights(), policy_version=2, digest="other", kv="keep")


async def test_versions_only_rise(subject):
    await subject.engine.pause("keep")
    await update(subject, version=5)
    with pytest.raises(EngineError, match="only rise"):
        await update(subject, version=4)
    assert subject.engine.info().policy_version == 5


async def test_scores_are_log_probs_under_temperature_one_of_what_is_served(subject):
    turn = await subject.engine.generate(request("a", prompt_of(5), max_new_tokens=20))
    scored = await subject.engine.score(all_ids(turn))
    np.testing.assert_allclose(scored[4:], turn.behavior_logprobs, atol=1e-4)
    await subject.engine.pause("keep")
    await update(subject)
    rescored = await subject.engine.score(all_ids(turn))
    np.testing.assert_allclose(rescored[4:], subject.expected(turn, SamplingParams(), version=2), atol=1e-4)


async def test_one_seed_gives_the_same_tokens_alone_and_in_company(subject):
    alone = await subject.engine.generate(request("alone", prompt_of(9), max_new_tokens=30, **subject.again(11)))
    company = await asyncio.gather(
        *(
            subject.engine.generate(request(f"r{n}", prompt_of(9, seed=n), max_new_tokens=30, seed=n, top_p=0.9))
            for n in range(5)
        ),
        subject.engine.generate(request("same", prompt_of(9), max_new_tokens=30, **subject.again(11))),
    )
    assert company[-1].output_ids.tolist() == alone.output_ids.tolist()
    assert company[0].output_ids.tolist() != alone.output_ids.tolist()


async def test_a_stop_token_ends_the_turn_and_belongs_to_it(subject):
    free = await subject.engine.generate(request("free", prompt_of(5), max_new_tokens=30, **subject.again(2)))
    stop = int(free.output_ids[4])
    first = free.output_ids.tolist().index(stop)
    turn = await subject.engine.generate(
        request("stopped", prompt_of(5), max_new_tokens=30, stop_token_ids=(stop,), **subject.again(2))
    )
    assert turn.stop_reason is StopReason.STOP
    assert turn.output_ids.tolist() == free.output_ids[: first + 1].tolist()


async def test_more_requests_than_slots_are_all_served_in_turn(subject):
    turns = await asyncio.gather(
        *(subject.engine.generate(request(f"r{n}", prompt_of(4 + n % 5, seed=n), seed=n)) for n in range(21))
    )
    assert [len(turn.output_ids) for turn in turns] == [8] * 21
    load = await subject.look()
    assert (load.running, load.waiting, load.output_tokens) == (0, 0, 21 * 8)
    assert load.kv_used_tokens == 0


async def test_an_output_never_exceeds_max_model_len(subject):
    turn = await subject.engine.generate(request("a", prompt_of(MAX_LEN - 3), max_new_tokens=50))
    assert (len(turn.output_ids), turn.stop_reason) == (3, StopReason.LENGTH)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "empty prompt"),
        ([1] * MAX_LEN, {}, f"{MAX_LEN} tokens"),
        ([1, 10_000], {}, r"1\.\.10000 outside the vocabulary"),
        ([1], {"temperature": -1.0}, "temperature -1.0"),
        ([1], {"temperature": math.nan}, "temperature nan"),
        ([1], {"temperature": math.inf}, "temperature inf"),
        ([1], {"top_p": 0.0}, "top_p 0.0"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens 0"),
    ],
)
async def test_a_request_that_cannot_be_served_is_refused_with_its_numbers(subject, prompt, sampling, message):
    with pytest.raises(DataError, match=message):
        await subject.engine.generate(request("a", prompt, **sampling))
    assert subject.engine.load().waiting == 0


async def test_an_id_in_use_is_refused(subject):
    task = await subject.running(request("a", prompt_of(5), max_new_tokens=LONG))
    with pytest.raises(EngineError, match="in use"):
        await subject.act(subject.engine.generate(request("a", prompt_of(5))))
    assert len((await task).output_ids) == LONG


async def test_a_request_for_a_newer_version_is_refused(subject):
    asked = GenerateRequest(
        request_id="a", prompt_ids=np.array([1, 2]), sampling=SamplingParams(), min_policy_version=2
    )
    with pytest.raises(EngineError, match="serves 1"):
        await subject.engine.generate(asked)


async def test_a_killed_engine_fails_all_requests_keeps_the_first_cause_and_is_not_healthy(subject):
    tasks = [await subject.running(request(f"r{n}", prompt_of(5), max_new_tokens=LONG)) for n in range(2)]
    assert subject.engine.healthy()
    subject.kill()
    for task in tasks:
        with pytest.raises(EngineDead, match=subject.last_words) as died:
            await task
        assert isinstance(died.value.__cause__, subject.died_of)
    assert not subject.engine.healthy()
    with pytest.raises(EngineDead, match=subject.last_words):
        await subject.engine.generate(request("late", prompt_of(5)))
    with pytest.raises(EngineDead):
        await subject.engine.pause("keep")


async def test_past_its_deadline_a_request_ends_with_what_it_has_also_while_paused(subject):
    await subject.engine.pause("keep")
    patient = asyncio.ensure_future(subject.engine.generate(request("b", prompt_of(5), deadline_s=math.inf)))
    turn = await subject.engine.generate(request("a", prompt_of(5), deadline_s=0.02))
    assert (turn.stop_reason, len(turn.output_ids)) == (StopReason.ABORT, 0)
    assert turn.version_spans == ()
    await subject.engine.resume()
    assert len((await patient).output_ids) == 8


async def test_cancelling_a_caller_frees_its_slot(subject):
    task = await subject.running(request("a", prompt_of(5), max_new_tokens=LONG))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await subject.act(subject.engine.flush())
    assert subject.engine.load().running == 0


async def test_closing_returns_partial_turns_and_refuses_later_calls(subject):
    task = await subject.running(request("a", prompt_of(5), max_new_tokens=LONG))
    await subject.act(subject.engine.close())
    await subject.engine.close()
    assert (await task).stop_reason is StopReason.ABORT
    assert not subject.engine.healthy()
    # a thread that outlives its engine aborts the process when the interpreter goes down
    assert not any(thread.name == "rollmill-engine" for thread in threading.enumerate())
    with pytest.raises(EngineDead, match="closed"):
        await subject.engine.generate(request("late", prompt_of(5)))


async def test_the_seconds_sum_to_the_wall_time(subject):
    await subject.engine.generate(request("a", prompt_of(5)))
    await subject.engine.pause("keep")
    await update(subject)
    load = subject.engine.load()
    assert sum(load.seconds.values()) == pytest.approx(load.wall_s, abs=1e-9)
    assert {"startup", "decode", "paused", "idle"} <= load.seconds.keys()


# -- bfloat16


@pytest.fixture(scope="module")
def rounded_server(tmp_path_factory) -> Iterator[SharedServer]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    server = SharedServer(tmp_path_factory.mktemp("vllm-bfloat16"), dtype="bfloat16")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def rounded_sglang(tmp_path_factory) -> Iterator[SharedSglang]:
    if (reason := why_no_sglang()) is not None:
        pytest.skip(reason)
    server = SharedSglang(tmp_path_factory.mktemp("sglang-bfloat16"), dtype="bfloat16")
    yield server
    server.stop()


@pytest.fixture(params=["embedded", *(pytest.param(name, marks=REAL) for name in ("sglang", "vllm"))])
async def rounded(request, tmp_path) -> AsyncIterator[Subject]:
    """An engine in bfloat16. A few tokens only: CPUs without it emulate it."""
    if request.param == "vllm":
        real = VllmSubject(request.getfixturevalue("rounded_server"))
        yield real
        await real.engine.close()
        return
    if request.param == "sglang":
        real = SglangSubject(request.getfixturevalue("rounded_sglang"))
        yield real
        await real.engine.close()
        return
    engine = embedded(tmp_path, OLD, dtype="bfloat16")
    yield EmbeddedSubject(engine, kill=lambda: None)
    await engine.close()


async def test_in_bfloat16_log_probs_are_the_trainers_to_its_tolerance_and_stay_so_across_a_swap(rounded):
    assert rounded.engine.info().dtype == "bfloat16"
    turn = await rounded.engine.generate(request("a", prompt_of(9), max_new_tokens=16, seed=5))
    differences = np.abs(turn.behavior_logprobs - rounded.trainers(turn))
    assert differences.max() < EQUAL["bfloat16"]
    assert EQUAL_ON_AVERAGE["float32"] < differences.mean() < EQUAL_ON_AVERAGE["bfloat16"]
    await rounded.engine.pause("keep")
    await update(rounded, kv="recompute")
    await rounded.engine.resume()
    after = await rounded.engine.generate(request("b", prompt_of(9), max_new_tokens=16, seed=5))
    new, old = (rounded.expected(after, SamplingParams(), version=version) for version in (2, 1))
    assert np.abs(after.behavior_logprobs - new).mean() < EQUAL_ON_AVERAGE["bfloat16"]
    assert np.abs(after.behavior_logprobs - old).mean() > 3 * EQUAL_ON_AVERAGE["bfloat16"]


async def test_in_bfloat16_a_stream_gives_what_its_turn_has_and_the_turn_without_one(rounded):
    asked = {"max_new_tokens": 8, "temperature": 0.0}
    plain = await rounded.engine.generate(request("plain", prompt_of(9), **asked))
    chunks: list[TokenChunk] = []
    streamed = await rounded.engine.generate(request("streamed", prompt_of(9), **asked), on_tokens=chunks.append)
    ids, logprobs, runs = joined(chunks)
    assert ids == streamed.output_ids.tolist() == plain.output_ids.tolist()
    assert (logprobs, runs) == (streamed.behavior_logprobs.tolist(), [(1, 8)])
