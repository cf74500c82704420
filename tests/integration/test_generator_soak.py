"""200 callers at once, over gRPC and HTTP, with cancels, aborts, deadlines and swaps: no leak, every span right.

The weights of version v say one token and no other (its "word"), whatever the prompt. So each sampled token tells by
itself which weights made it, and the version spans are checked against that, not against another record of the engine.
One replica alone, and three behind a router, each with KV kept or computed anew.

`ROLLMILL_SOAK_S=300 pytest tests/integration/test_generator_soak.py -m slow` runs each for five minutes, as
`make test-nightly` does.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import httpx2
import numpy as np
import openai
import psutil
import pytest
import torch

from generator_builders import VOCABULARY, MemoryRepository, embedded, llama, random_model, request, tensors_of
from http_builders import CODEC
from http_replica import MODEL, HttpFace
from rollmill.clock import SystemClock
from rollmill.config.router import RouterSettings
from rollmill.errors import DataError, DeadlineExceeded
from rollmill.generator.client import GeneratorClient
from rollmill.generator.engines.protocol import KvPolicy
from rollmill.generator.http import serve_http
from rollmill.generator.main import Addresses, serve
from rollmill.generator.router.main import RouterAddresses, serve_router
from rollmill.generator.router.membership import Entry, FixedList
from rollmill.generator.router.service import RouterService
from rollmill.generator.router.upstream import GrpcUpstream
from rollmill.types import GenerateRequest, StopReason, TokenChunk, Turn

CALLERS = 200
SECONDS = float(os.environ.get("ROLLMILL_SOAK_S", "10"))
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


class Served(NamedTuple):
    """What the callers call: one replica, or a router."""

    client: GeneratorClient
    openai: openai.AsyncOpenAI
    http: httpx2.AsyncClient


class Caller:
    """One of many callers; does one thing after another until time is up, and counts what came of it."""

    def __init__(self, number: int, *, served: Served, outcomes: collections.Counter[str]) -> None:
        self._name, self._client, self._outcomes = f"caller-{number}", served.client, outcomes
        self._openai, self._http = served.openai, served.http
        self._rng = random.Random(number)
        self._calls = 0
        self._does = (
            self._plain, self._stream, self._group, self._cancel, self._abort, self._hurry, self._nonsense,
            self._completion, self._completion_stream, self._completion_left, self._token_ids,
        )  # fmt: skip

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
        try:
            check(await self._client.generate(asked), asked=asked, may_be_cut=True)
        except DeadlineExceeded as error:
            # It may never have left the router's queue: then there is no turn to be cut.
            if "in the router" not in str(error):
                raise
        return "hurried"

    async def _completion(self) -> str:
        reply: Any = await self._openai.completions.create(**self._completed(), n=self._rng.randint(1, 3))
        for choice in reply.choices:
            check_words(choice.token_ids, spans=choice.version_spans)
            assert choice.finish_reason == "length"
        return "completion"

    async def _completion_stream(self) -> str:
        stream: Any = await self._openai.completions.create(**self._completed(), stream=True)
        ids, spans = [], []
        async for chunk in stream:
            for choice in chunk.choices:
                ids += getattr(choice, "token_ids", None) or []
                spans = getattr(choice, "version_spans", None) or spans
        check_words(ids, spans=spans)
        return "completion streamed"

    async def _completion_left(self) -> str:
        stream: Any = await self._openai.completions.create(**self._completed(), stream=True)
        async for _ in stream:
            break
        await stream.close()
        return "completion left"

    async def _token_ids(self) -> str:
        asked = self._asked()
        body = {
            "request_id": asked.request_id,
            "token_ids": asked.prompt_ids.tolist(),
            "sampling_params": {
                "max_tokens": asked.sampling.max_new_tokens,
                "seed": asked.sampling.seed % 2**31,
                "ignore_eos": True,
            },
        }
        reply = await self._http.post("/inference/v1/generate", json=body)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        versions = [int(one["version"]) for one in choice["weight_versions"] for _ in range(one["start"], one["end"])]
        assert choice["token_ids"] == [word_of(version) for version in versions]
        return "token ids"

    def _completed(self) -> dict[str, Any]:
        asked = self._asked()
        return {
            "model": MODEL,
            "prompt": asked.prompt_ids.tolist(),
            "max_tokens": asked.sampling.max_new_tokens,
            "seed": asked.sampling.seed % 2**31,
            "extra_body": {"return_token_ids": True, "ignore_eos": True},  # some version's word is the end of a turn
        }

    async def _nonsense(self) -> str:
        asked = request(f"{self._name}/{self._calls}", [VOCABULARY + 5])
        with pytest.raises(DataError):
            await self._client.generate(asked)
        return "refused"


def check_words(ids: list[int], *, spans: list[dict[str, int]]) -> None:
    """Check what came over HTTP against the words of the versions that it names."""
    versions = [span["policy_version"] for span in spans for _ in range(span["start_token"], span["end_token"])]
    assert ids
    assert ids == [word_of(version) for version in versions]


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
async def replica(tmp_path: Path, repository: SpeakingModels, *, kv_policy: KvPolicy) -> AsyncIterator[tuple[str, str]]:
    """Serve a replica; gives its addresses of gRPC and HTTP."""
    engine = embedded(tmp_path, repository.model, digest=repository.manifest(1).digest, max_num_seqs=32)
    # The engine was built from the architecture alone: version 1 gets its word by a load of its own weights.
    stop, served = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(
            serve(
                engine=engine,
                repository=repository,
                kv_policy=kv_policy,
                stop=stop,
                load_deadline_s=60.0,
                codec=CODEC,
                models=[MODEL],
                faces=[HttpFace()],
                drain_s=5.0,
                on_serving=served.set_result,
            )
        )
        await asyncio.wait({serving, served}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        addresses: Addresses = served.result()
        try:
            yield addresses.grpc, addresses.others["http"]
        finally:
            stop.set()


@contextlib.asynccontextmanager
async def routed(replicas: list[str]) -> AsyncIterator[tuple[str, str]]:
    """Serve a router over replicas; gives its addresses of gRPC and HTTP."""

    async def http(service: RouterService, stop: asyncio.Event, on_bound: Callable[[str], None]) -> None:
        await serve_http(service, stop=stop, on_bound=lambda port: on_bound(f"http://127.0.0.1:{port}/v1"))

    service = RouterService(
        RouterSettings.model_validate({"poll_s": 0.1}),
        source=FixedList([Entry(address) for address in replicas]),
        connect=GrpcUpstream,
        clock=SystemClock(),
        codec=CODEC,
        models=[MODEL],
    )
    stop, served = asyncio.Event(), asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_router(service, faces=[http], stop=stop, drain_s=5.0, on_serving=served.set_result))
        addresses: RouterAddresses = await served
        async with asyncio.timeout(60):
            while any(one.state != "serving" for one in service.status_message().replicas):
                service.changed.clear()
                await service.changed.wait()
        try:
            yield addresses.grpc, addresses.faces[0]
        finally:
            stop.set()


@contextlib.asynccontextmanager
async def called(grpc_address: str, base_url: str) -> AsyncIterator[Served]:
    """The clients of what is served."""
    client = GeneratorClient(grpc_address, control_deadline_s=60.0, grace_s=UNANSWERED_S)
    # No connection is kept for later: then what is open at the end was leaked.
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    old = openai.DefaultAsyncHttpxClient(limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))
    try:
        async with (
            openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, http_client=old) as clients,
            httpx2.AsyncClient(base_url=base_url.removesuffix("/v1"), limits=limits, timeout=90) as http,
        ):
            yield Served(client, clients, http)
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def fleet(
    tmp_path: Path, repository: SpeakingModels, *, kv_policy: KvPolicy, replicas: int
) -> AsyncIterator[Served]:
    """Serve one replica, or several behind a router."""
    folders = [tmp_path / f"{number}" for number in range(replicas)]
    async with contextlib.AsyncExitStack() as stack:
        serving = [
            await stack.enter_async_context(replica(folder, repository, kv_policy=kv_policy)) for folder in folders
        ]
        addresses = serving[0]
        if replicas > 1:
            addresses = await stack.enter_async_context(routed([grpc for grpc, _ in serving]))
        yield await stack.enter_async_context(called(*addresses))


# A stream of the openai client that is left leaves its HTTP client's generators to the garbage collector. Here that may
# run on an engine's thread, while the loop is closing them; Python then says that it lets them be.
@pytest.mark.filterwarnings(
    r"ignore:Exception ignored in. <async_generator object (AsyncResponseStream|BoundAsyncStream|Response)\."
    ":pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize(("kv_policy", "replicas"), [("keep", 1), ("recompute", 1), ("keep", 3), ("recompute", 3)])
async def test_many_callers_and_swaps_leave_nothing_behind(tmp_path, kv_policy, replicas):
    torch.set_num_threads(1)
    repository = SpeakingModels()
    repository.say()
    outcomes: collections.Counter[str] = collections.Counter()
    loop = asyncio.get_running_loop()
    async with fleet(tmp_path, repository, kv_policy=kv_policy, replicas=replicas) as served:
        client = served.client
        await client.load_weights(repository.say(), deadline_s=60)
        begun_s, idle = loop.time(), Footprint()
        until_s = begun_s + SECONDS
        warm: list[Footprint] = []
        loop.call_at(begun_s + SECONDS / 4, lambda: warm.append(Footprint()))
        async with asyncio.TaskGroup() as tasks:
            swaps = tasks.create_task(swap_again_and_again(client, repository, until_s=until_s))
            for number in range(CALLERS):
                tasks.create_task(Caller(number, served=served, outcomes=outcomes).run(until_s=until_s))
        await until_idle(client)
        (before,), after = warm, Footprint()
        assert after.rss_bytes - before.rss_bytes < GROWTH_BYTES
        assert after.files - idle.files < 8
        assert after.threads - before.threads < 8
    assert swaps.result() > 3
    assert set(outcomes) == {
        "finished", "streamed", "group finished", "cancelled", "aborted", "hurried", "refused", "completion",
        "completion streamed", "completion left", "token ids",
    }  # fmt: skip
    print_result(
        f"{kv_policy}, replicas {replicas}",
        outcomes=outcomes,
        swaps=swaps.result(),
        grown=after.rss_bytes - before.rss_bytes,
    )


async def until_idle(client: GeneratorClient) -> None:
    """Return when nothing runs, waits or holds KV; a router hears that at its next look."""
    async with asyncio.timeout(10):
        while True:
            status = await client.status()
            if (status.running, status.waiting, status.kv_used_tokens) == (0, 0, 0):
                return
            await asyncio.sleep(0.05)


def print_result(kv_policy: str, **figures: Any) -> None:
    """Say what was done, where a person asked for a long run."""
    if "ROLLMILL_SOAK_S" in os.environ:
        print(f"\nsoak of {SECONDS:.0f} s with kv {kv_policy}: {figures}")  # noqa: T201
