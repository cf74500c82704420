"""`rollmill serve` as a user runs it: a process of its own, told to stop by signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from generator_builders import (
    adapter_for,
    canary_for,
    llama,
    merged_model,
    random_model,
    reference_logprobs,
    request,
    tensors_of,
)
from rollmill.errors import ModelError, WeightError
from rollmill.generator.client import GeneratorClient, open_channel
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.proto import policy_inference_pb2_grpc as pb_grpc
from rollmill.types import Adapter, SamplingParams, StopReason, Turn
from rollmill.weights.prepare import prepare
from rollmill.weights.repository import LocalModelRepository
from service_builders import until_running
from vllm_server import SHAPE as VLLM_SHAPE
from vllm_server import why_not as why_no_vllm

pytestmark = pytest.mark.integration

FAKE = ("--model", "tiny-llama", "--engine", "fake", "--set", "generator.max_model_len=4000")
TOKEN = "sesame-open-sesame"


class Process:
    """A started `rollmill serve --json` with what it said."""

    def __init__(self, process: asyncio.subprocess.Process, said: dict[str, Any]) -> None:
        self._process, self.said = process, said

    def tell(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ended(self) -> tuple[int, str]:
        """Exit status and what stood on stderr."""
        async with asyncio.timeout(60):
            _, errors = await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode, errors.decode()


@contextlib.asynccontextmanager
async def serving(*arguments: str, within_s: float = 90) -> AsyncIterator[Process]:
    command = [sys.executable, "-m", "rollmill.cli", "serve", *arguments, "--json"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(within_s):
            lines = [line.decode() async for line in _document(process.stdout)]
        assert lines, (await process.communicate())[1].decode()
        said = json.loads("".join(lines))
        assert "grpc" in said, said
        yield Process(process, said)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _document(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of one JSON document as the command line prints it."""
    async for line in stream:
        yield line
        if line.rstrip() == b"}":
            return


@pytest.mark.slow
async def test_a_directory_with_a_reward_head_is_served_by_the_command(tmp_path):
    small = prepare("tiny-llama").path
    folder = tmp_path / "judge"
    folder.mkdir()
    for file in small.iterdir():  # its tokenizer and chat template
        if file.suffix in (".json", ".jinja") and file.name != "config.json":
            shutil.copy(file, folder)
    config = AutoConfig.from_pretrained(small)
    config.num_labels, config.pad_token_id = 2, None
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config).float().eval()
    model.save_pretrained(folder)
    ids = list(range(3, 30))
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids])).logits[0].numpy()
    async with serving("--model", str(folder), "--set", "generator.dtype=float32") as process:
        client = GeneratorClient(process.said["grpc"])
        reward = await client.reward(np.array(ids))
        await client.close()
        asked = urllib.request.Request(
            f"{process.said['http']}/inference/v1/score",
            json.dumps({"token_ids": ids, "what": "reward"}).encode(),
            {"content-type": "application/json"},
        )
        reply = json.loads(await asyncio.to_thread(_body_of, asked))
        process.tell(signal.SIGTERM)
        status, errors = await process.ended()
    assert (status, "Traceback" in errors) == (0, False)
    np.testing.assert_allclose(reward.scores, expected, atol=1e-4)
    np.testing.assert_allclose(reply["rewards"], expected, atol=1e-4)


def _body_of(asked: urllib.request.Request) -> bytes:
    with urllib.request.urlopen(asked, timeout=20) as reply:
        return reply.read()


async def test_a_model_is_served_as_version_1_by_id_and_by_message_until_sigterm_drains_it(tmp_path):
    file = tmp_path / "address.json"
    async with serving(*FAKE, "--no-http", "--address-file", str(file)) as process:
        said = process.said
        assert (said["model"], said["engine"], said["policy_version"]) == ("tiny-llama", "fake", 1)
        assert (said["http"], said["follows"]) == (None, None)
        assert any("no trainer has scored a canary" in warning for warning in said["warnings"])
        assert json.loads(file.read_text())["address"] == said["grpc"]
        client = GeneratorClient(said["grpc"])
        async with open_channel(said["grpc"]) as channel:
            chat = pb.Messages(messages=[pb.Message(role="user", content="hello")])
            asked = pb.GenerateRequest(
                request_id="chat", messages=chat, model="tiny-llama", sampling=pb.SamplingParams(max_new_tokens=5)
            )
            reply = await pb_grpc.PolicyInferenceStub(channel).Generate(asked, timeout=10)
            plain = pb.GenerateRequest(request_id="text", text="hello", sampling=pb.SamplingParams(max_new_tokens=5))
            events = [event async for event in pb_grpc.PolicyInferenceStub(channel).GenerateStream(plain, timeout=10)]
        with pytest.raises(WeightError, match="--repository DIR"):
            await client.load_weights(2, deadline_s=5)
        assert (await client.status()).digest == said["digest"]
        running = asyncio.ensure_future(client.generate(request("long", [1, 2], max_new_tokens=3000)))
        await until_running(client)
        process.tell(signal.SIGTERM)
        turn = await running
        assert await process.ended() == (0, "")
        await client.close()
    assert len(reply.prompt_ids) > 5
    assert reply.samples[0].HasField("text")
    assert 0 < len(events[0].prompt_ids) < len(reply.prompt_ids)  # the same word without the chat template
    assert sum(len(event.tokens.output_ids) for event in events) == events[-1].finished.output_tokens == 5
    assert events[-1].finished.HasField("text")
    assert (turn.stop_reason, len(turn.output_ids)) == (StopReason.LENGTH, 3000)


@pytest.mark.slow
async def test_a_replica_with_a_draft_says_what_it_costs_and_how_often_it_is_right():
    draft = ("generator.speculation=draft", "generator.draft_model=tiny-llama", "generator.draft_tokens=3")
    chosen = [part for setting in draft for part in ("--set", setting)]
    async with serving("--model", "tiny-llama", "--no-http", *chosen) as process:
        client = GeneratorClient(process.said["grpc"])
        turns = await client.generate_group(request("g", [9, 10, 11], max_new_tokens=120), siblings=4)
        status = await client.status()
        await client.close()
        process.tell(signal.SIGTERM)
        assert await process.ended() == (0, "")
    assert process.said["kv_budget"].endswith("of it for the draft model")
    assert [len(turn.output_ids) for turn in turns] == [120] * 4
    # A trial at least; the draft is the model itself.
    assert status.guessed_tokens >= 8 * 3
    assert status.guessed_tokens - status.accepted_tokens <= 2


async def test_a_second_signal_ends_the_drain(tmp_path):
    async with serving(*FAKE, "--no-http") as process:
        client = GeneratorClient(process.said["grpc"])
        group = asyncio.ensure_future(client.generate_group(request("g", [1], max_new_tokens=3900), siblings=200))
        async with asyncio.timeout(30):
            while not (await client.status()).running:
                pass
        process.tell(signal.SIGINT)
        async with asyncio.timeout(30):
            while (await client.status()).state.value != "draining":
                pass
        process.tell(signal.SIGINT)
        status, errors = await process.ended()
        with contextlib.suppress(Exception):
            await group
        await client.close()
    assert status == 130, errors


async def test_a_token_guards_the_process(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    async with serving(*FAKE, "--no-http", "--token-file", str(file), "--host", "0.0.0.0") as process:
        address = "127.0.0.1:" + process.said["grpc"].rpartition(":")[2]
        assert any("in clear" in warning for warning in process.said["warnings"])
        client = GeneratorClient(address, token=TOKEN)
        assert (await client.status()).policy_version == 1
        await client.close()
        process.tell(signal.SIGTERM)
        assert (await process.ended())[0] == 0


async def test_http_and_metrics_are_served_beside_grpc_and_count_what_grpc_was_asked():
    async with serving(*FAKE) as process:
        client = GeneratorClient(process.said["grpc"])
        await client.generate(request("a", [1, 2], max_new_tokens=7))
        await client.close()
        models = json.loads(await asyncio.to_thread(fetched, f"{process.said['http']}/v1/models"))
        metrics = (await asyncio.to_thread(fetched, f"{process.said['http']}/metrics")).decode()
        process.tell(signal.SIGTERM)
        assert (await process.ended())[0] == 0
    assert "tiny-llama" in [model["id"] for model in models["data"]]
    assert "rollmill_generated_tokens_total 7.0" in metrics
    assert 'rollmill_requests_total{outcome="ok"} 1.0' in metrics


def fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return reply.read()


@pytest.mark.slow
async def test_a_replica_starts_with_the_newest_version_of_a_run_and_loads_later_ones(tmp_path):
    # As many ids as the tokenizer has that is served with it.
    models = [random_model(llama(vocab_size=128), seed=seed) for seed in (1, 2, 3)]
    repository = LocalModelRepository(tmp_path / "run" / "weights", transport="file")

    def publish(model: Any) -> int:
        return repository.publish(
            tensors_of(model),
            optimizer_step=0,
            parent=None,
            history_id="h",
            training_dtype="float32",
            canary=canary_for(model),
            at_s=0.0,
        ).policy_version

    publish(models[0])
    publish(models[1])
    folder = _servable(tmp_path / "model", models[0])
    # Canaries are those of an engine in float32.
    settings = ("--set", "generator.dtype=float32", "--set", "generator.max_model_len=128")
    arguments = ("--model", str(folder), "--repository", str(tmp_path / "run"), "--no-http", *settings)
    async with serving(*arguments) as process:
        client = GeneratorClient(process.said["grpc"])
        turn = await client.generate(request("a", [1, 2, 3], seed=4))
        assert publish(models[2]) == 3
        report = await client.load_weights(3, deadline_s=20)
        later = await client.generate(request("b", [1, 2, 3], seed=4))
        await client.close()
        process.tell(signal.SIGTERM)
        assert (await process.ended())[0] == 0
    assert (process.said["policy_version"], process.said["warnings"]) == (2, [])
    assert (report.policy_version, report.changed) == (3, True)
    assert (turn.version_spans[0].policy_version, later.version_spans[0].policy_version) == (2, 3)
    for got, model in ((turn, models[1]), (later, models[2])):
        np.testing.assert_allclose(got.behavior_logprobs, reference_logprobs(model, got, SamplingParams()), atol=1e-4)


def _servable(folder: Path, model: Any) -> Path:
    """A directory of this model with the tokenizer of the tiny one."""
    model.save_pretrained(folder)
    prepared = prepare("tiny-llama").path
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((prepared / name).read_bytes())
    return folder


def _publish(run: Path, *, base: Any, pairs: dict[str, Any]) -> tuple[int, Adapter]:
    """Publish an adapter as a run does, and return its version."""
    repository = LocalModelRepository(run / "weights", transport="file")
    settings = Adapter(base_digest=repository.put_base(tensors_of(base)), rank=2, alpha=3.0)
    manifest = repository.publish(
        pairs,
        optimizer_step=0,
        parent=None,
        history_id="h",
        training_dtype="float32",
        canary=canary_for(merged_model(base, pairs, settings=settings)),
        at_s=0.0,
        adapter=settings,
    )
    return manifest.policy_version, settings


@pytest.mark.slow
async def test_a_replica_serves_the_adapters_of_two_runs_and_leaves_no_kv_on_the_disk_when_it_is_killed(tmp_path):
    base = random_model(llama(vocab_size=128), seed=1)
    pairs = {seed: adapter_for(base, seed=seed) for seed in (11, 12, 13)}
    settings: dict[str, Adapter] = {}

    def publish(run: str, seed: int) -> int:
        version, settings[run] = _publish(tmp_path / run, base=base, pairs=pairs[seed])
        return version

    publish("maths", 11)
    publish("tools", 12)
    chosen = {
        "dtype": '"float32"',  # that of the canary, also where the CPU has bfloat16
        "max_model_len": "128",
        "kv_cache_memory_bytes": str(16 * 2048),  # 8 blocks, and as many for scores
        "host_kv_bytes": "1000000",
        "host_kv_directory": json.dumps(str(tmp_path / "kv")),
    }
    arguments = ["--model", str(_servable(tmp_path / "model", base)), "--no-http"]
    arguments += [part for key, value in chosen.items() for part in ("--set", f"generator.{key}={value}")]
    arguments += [part for run in ("maths", "tools") for part in ("--adapter", f"{run}={tmp_path / run}")]
    async with serving(*arguments) as process:
        client = GeneratorClient(process.said["grpc"])

        async def ask(adapter: str, ids: list[int], session_id: str = "") -> Turn:
            asked = request(f"{adapter}-{len(ids)}-{session_id}", ids, seed=4)
            return await client.generate(msgspec.structs.replace(asked, adapter=adapter, session_id=session_id))

        turns = {(name, seed): await ask(name, [1, 2, 3]) for name, seed in (("maths", 11), ("tools", 12), ("", 0))}
        with pytest.raises(ModelError, match="adapter 'x' is unknown here; known are 'maths', 'tools'"):
            await ask("x", [1, 2, 3])
        assert publish("maths", 13) == 2
        report = await client.load_weights(0, deadline_s=20, adapter="maths")
        turns["maths", 13] = await ask("maths", [1, 2, 3, 4])
        first = await ask("tools", list(range(1, 61)), "s")
        await ask("", list(range(1, 121)))  # takes all blocks
        turns["tools", 12] = await ask("tools", [*first.prompt_ids, *first.output_ids, 5], "s")
        status = await client.status()
        await client.close()
        process.tell(signal.SIGKILL)
        await process.ended()
    assert process.said["adapters"] == {"maths": 1, "tools": 1}
    assert (report.policy_version, report.changed, report.pause_s) == (2, True, 0.0)
    assert {one.name: one.policy_version for one in status.adapters} == {"maths": 2, "tools": 1}
    assert status.host_kv is not None
    assert status.host_kv.hits + status.host_kv.misses == 2
    assert status.host_kv.stored_bytes > 0
    assert list((tmp_path / "kv").iterdir()) == []
    for (name, seed), got in turns.items():
        model = merged_model(base, pairs[seed], settings=settings[name]) if name else base
        np.testing.assert_allclose(got.behavior_logprobs, reference_logprobs(model, got, SamplingParams()), atol=3e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_vllm_serves_the_adapters_of_two_runs_and_takes_a_new_version_of_one(tmp_path):
    if (reason := why_no_vllm()) is not None:
        pytest.skip(reason)
    base = random_model(llama(**{**VLLM_SHAPE, "vocab_size": 128}), seed=1)
    pairs = {seed: adapter_for(base, seed=seed) for seed in (11, 12, 13)}
    _, settings = _publish(tmp_path / "maths", base=base, pairs=pairs[11])
    _publish(tmp_path / "tools", base=base, pairs=pairs[12])
    arguments = ["--model", str(_servable(tmp_path / "model", base)), "--engine", "vllm", "--no-http"]
    arguments += ["--set", "generator.max_model_len=128", "--set", "generator.max_num_seqs=4"]
    arguments += ["--set", 'generator.dtype="float32"']
    arguments += [part for run in ("maths", "tools") for part in ("--adapter", f"{run}={tmp_path / run}")]
    turns: list[tuple[int, Turn]] = []
    async with serving(*arguments, within_s=500) as process:
        client = GeneratorClient(process.said["grpc"])

        async def ask(adapter: str, seed: int) -> None:
            asked = msgspec.structs.replace(request(f"{adapter}-{seed}", [1, 2, 3], seed=4), adapter=adapter)
            turns.append((seed, await client.generate(asked)))

        await asyncio.gather(ask("maths", 11), ask("tools", 12), ask("", 0))
        assert _publish(tmp_path / "maths", base=base, pairs=pairs[13])[0] == 2
        report = await client.load_weights(0, deadline_s=60, adapter="maths")
        await asyncio.gather(ask("maths", 13), ask("tools", 12))
        status = await client.status()
        await client.close()
        process.tell(signal.SIGTERM)
        code, errors = await process.ended()
    assert code == 0, errors
    assert process.said["adapters"] == {"maths": 1, "tools": 1}
    assert (report.policy_version, report.changed, report.pause_s) == (2, True, 0.0)
    assert report.canary_difference is not None
    assert {one.name: one.policy_version for one in status.adapters} == {"maths": 2, "tools": 1}
    for seed, got in turns:
        model = merged_model(base, pairs[seed], settings=settings) if seed else base
        np.testing.assert_allclose(got.behavior_logprobs, reference_logprobs(model, got, SamplingParams()), atol=3e-4)
