"""200 callers at once, with cancels, aborts, deadlines and weight swaps: no leak, no stuck request, every span right.

The weights of version v say one token and no other (its "word"), whatever the prompt. So each sampled token tells by
itself which weights made it, and the version spans are checked against that, not against another record of the engine.

`ROLLMILL_SOAK_S=300 pytest tests/integration/test_generator_soak.py -m slow` runs for five minutes.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from generator_builders import VOCABULARY, MemoryRepository, embedded, llama, random_model, request, tensors_of
from rollmill.errors import DataError
from rollmill.generator.client import GeneratorClient
from rollmill.generator.engines.protocol import KvPolicy
from rollmill.generator.main import serve
from rollmill.types import GenerateRequest, StopReason, TokenChunk, Turn

CALLERS = 200
SECONDS = float(os.environ.get("ROLLMILL_SOAK_S", "15"))
SWAP_EVERY_S = 0.5
GROWTH_BYTES = 48 * 1024 * 1024
"""Most that the process may grow between the first quarter of the time and the end."""
UNANSWERED_S = 30.0
"""A call that takes longer than its own deadline and this is stuck."""

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(SECONDS + 300)]


def word_of(version: int) -> int:
    return 1 + version % (VOCABULARY - 1)


class SpeakingModels(MemoryRepository):
    """Publishes version after version, each with a word of its own; keeps the newest few."""

    def __init__(self) -> None:
        super().__init__()
        self.model = random_model(llama(tie_word_embeddings=False))

    def say(self) -> int:
        """Publish the next version and return its number."""
        version = max(self._manifests, default=0) + 1
        tensors = tensors_of(self.model)
        for name, value in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                value.zero_()
            elif name.endswith(("embed_tokens.weight", "norm.weight")):
                value.fill_(1.0)
        # The last hidden state is all ones: 16 x 3 for the word, 0 for all others.
        tensors["lm_head.weight"][word_of(version)] = 3.0
        published = self.publish(
            tensors,
            optimizer_step=version,
            parent=None,
            history_id="h",
            training_dtype="float32",
            canary=None,
            at_s=0.0,
        )
        assert published.policy_version == version
        for old in [old for old in self._tensors if old < version - 3]:
            del self._tensors[old], self._manifests[old]
        return version


class Caller:
    """One of many callers; does one thing after another until time is up, and counts what came of it."""

    def __init__(self, number: int, *, client: GeneratorClient, outcomes: collections.Counter[str]) -> None:
        self._name, self._client, self._outcomes = f"caller-{number}", client, outcomes
        self._rng = random.Random(number)
        self._calls = 0
        self._does = (self._plain, self._stream, self._group, self._cancel, self._abort, self._hurry, self._nonsense)

    async def run(self, *, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < until_s:
            self._calls += 1
            what = self._rng.choice(self._does)
            async with asyncio.timeout(60 + UNANSWERED_S):
                self._outcomes[await what()] += 1

    def _asked(self, *, deadline_s: float = 60.0) -> GenerateRequest:
        rng = self._rng
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))]
        group = f"group-{rng.randrange(20)}" if rng.random() < 0.5 else ""
        return request(
            f"{self._name}/{self._calls}",
            prompt,
            group_key=group,
            deadline_s=deadline_s,
            seed=rng.randrange(2**32),
            max_new_tokens=rng.randint(1, 60),
            temperature=rng.choice([0.0, 0.7, 1.0]),
        )

    async def _plain(self) -> str:
        asked = self._asked()
        check(await self._client.generate(asked), asked=asked)
        return "finished"

    async def _stream(self) -> str:
        asked, heard = self._asked(), list[TokenChunk]()
        turn = await self._client.generate(asked, on_tokens=heard.append)
        check(turn, asked=asked)
        assert [int(token) for chunk in heard for token in chunk.output_ids] == turn.output_ids.tolist()
        return "streamed"

    async def _group(self) -> str:
        asked = self._asked()
        turns = await self._client.generate_group(asked, siblings=self._rng.randint(2, 6))
        for turn in turns:
            check(turn, asked=asked)
        return "group finished"

    async def _cancel(self) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rng.uniform(0.0, 0.5)):
                await self._client.generate(self._asked())
        return "cancelled"

    async def _abort(self) -> str:
        asked = self._asked()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(self._client.generate(asked))
            await asyncio.wait({call}, timeout=self._rng.uniform(0.0, 0.5))
            await self._client.abort(asked.request_id)
        check(call.result(), asked=asked, may_be_cut=True)
        return "aborted"

    async def _hurry(self) -> str:
        asked = self._asked(deadline_s=self._rng.uniform(0.01, 0.5))
        check(await self._client.generate(asked), asked=asked, may_be_cut=True)
        return "hurried"

    async def _nonsense(self) -> str:
        asked = request(f"{self._name}/{self._calls}", [VOCABULARY + 5])
        with pytest.raises(DataError):
            await self._client.generate(asked)
        return "refused"


def check(turn: Turn, *, asked: GenerateRequest, may_be_cut: bool = False) -> None:
    """Check a turn against the words of the versions that it names; `Turn` has checked that spans cover it."""
    versions = [span.policy_version for span in turn.version_spans for _ in range(span.start_token, span.end_token)]
    assert turn.output_ids.tolist() == [word_of(version) for version in versions], turn
    assert versions == sorted(versions)
    if turn.stop_reason is StopReason.ABORT:
        assert may_be_cut, f"{turn.request_id} was cut, which nobody asked for"
    else:
        assert len(turn.output_ids) == asked.sampling.max_new_tokens
    np.testing.assert_allclose(turn.behavior_logprobs, 0.0, atol=1e-5)


class Footprint:
    """What must not grow."""

    def __init__(self) -> None:
        process = psutil.Process()
        self.rss_bytes = process.memory_info().rss
        self.files = process.num_fds()
        self.threads = process.num_threads()


async def swap_again_and_again(client: GeneratorClient, repository: SpeakingModels, *, until_s: float) -> int:
    loop, version = asyncio.get_running_loop(), 1
    while loop.time() < until_s:
        version = repository.say()
        report = await client.load_weights(version, deadline_s=60)
        assert report.changed
        await asyncio.sleep(SWAP_EVERY_S)
    return version


@contextlib.asynccontextmanager
async def replica(tmp_path: Path, repository: SpeakingModels, *, kv_policy: KvPolicy):
    engine = embedded(tmp_path, repository.model, digest=repository.manifest(1).digest, max_num_seqs=32)
    # The engine was built from the architecture alone: version 1 gets its word by a load of its own weights.
    stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(
            serve(
                engine=engine,
                repository=repository,
                kv_policy=kv_policy,
                stop=stop,
                load_deadline_s=60.0,
                on_serving=lambda addresses: address.set_result(addresses.grpc),
            )
        )
        await asyncio.wait({serving, address}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        client = GeneratorClient(address.result(), control_deadline_s=60.0, grace_s=UNANSWERED_S)
        try:
            yield client
        finally:
            await client.close()
            stop.set()


@pytest.mark.parametrize("kv_policy", ["keep", "recompute"])
async def test_many_callers_and_swaps_leave_nothing_behind(tmp_path, kv_policy):
    torch.set_num_threads(1)
    repository = SpeakingModels()
    repository.say()
    outcomes: collections.Counter[str] = collections.Counter()
    loop = asyncio.get_running_loop()
    async with replica(tmp_path, repository, kv_policy=kv_policy) as client:
        await client.load_weights(repository.say(), deadline_s=60)
        begun_s = loop.time()
        until_s = begun_s + SECONDS
        warm: list[Footprint] = []
        loop.call_at(begun_s + SECONDS / 4, lambda: warm.append(Footprint()))
        async with asyncio.TaskGroup() as tasks:
            swaps = tasks.create_task(swap_again_and_again(client, repository, until_s=until_s))
            for number in range(CALLERS):
                tasks.create_task(Caller(number, client=client, outcomes=outcomes).run(until_s=until_s))
        status = await client.status()
        assert (status.running, status.waiting, status.kv_used_tokens) == (0, 0, 0)
        (before,), after = warm, Footprint()
        assert after.rss_bytes - before.rss_bytes < GROWTH_BYTES
        assert after.files - before.files < 8
        assert after.threads - before.threads < 8
    assert swaps.result() > 3
    assert set(outcomes) == {"finished", "streamed", "group finished", "cancelled", "aborted", "hurried", "refused"}
    print_result(kv_policy, outcomes=outcomes, swaps=swaps.result(), grown=after.rss_bytes - before.rss_bytes)


def print_result(kv_policy: str, **figures: Any) -> None:
    """Say what was done, where a person asked for a long run."""
    if "ROLLMILL_SOAK_S" in os.environ:
        print(f"\nsoak of {SECONDS:.0f} s with kv {kv_policy}: {figures}")  # noqa: T201
