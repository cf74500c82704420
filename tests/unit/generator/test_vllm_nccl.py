"""Weights over NCCL: the plan, what the server is told, who waits for whom, and where it is refused."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollmill.clock import SystemClock
from rollmill.config.schema import GeneratorSettings
from rollmill.config.serving import VllmSettings
from rollmill.errors import ConfigError, DeadlineExceeded, EngineDead, EngineError
from rollmill.generator.engines.meter import SecondsMeter
from rollmill.generator.engines.remote.engine import RemoteEngine
from rollmill.generator.engines.remote.model import ServedModel
from rollmill.generator.engines.vllm.nccl import visible_gpus
from rollmill.generator.engines.vllm.nccl_plan import init_info, plan_transfer, servers_gpus, update_info
from rollmill.generator.engines.vllm.start import bring_up, open_transport
from rollmill.weights.tensorfile import read_header, write_tensors
from vllm_fake import VOCABULARY, FakeVllm

WEIGHTS = {"model.layers.0.a": torch.full((4,), 1.0), "model.layers.1.a": torch.full((2, 3), 1.0)}


def settings(**vllm: Any) -> GeneratorSettings:
    return GeneratorSettings(
        engine="vllm",
        dtype="float32",
        max_num_seqs=4,
        max_model_len=200,
        vllm=VllmSettings(transport="nccl", start_deadline_s=5.0, control_deadline_s=5.0, load_poll_s=60.0, **vllm),
    )


# -- the plan


def test_a_file_travels_layer_by_layer_in_messages_of_whole_tensors(tmp_path):
    tensors = {
        "lm.layers.10.w": torch.zeros(3, dtype=torch.bfloat16),
        "lm.layers.9.w": torch.zeros(2, 2),
        "lm.embed": torch.zeros(5),
        "lm.norm": torch.zeros(1),
    }
    path = tmp_path / "w.safetensors"
    write_tensors(path, tensors, durable=False)
    plan = plan_transfer(read_header(path)[0], buffer_bytes=20)
    assert plan.names == ("lm.embed", "lm.layers.9.w", "lm.layers.10.w", "lm.norm")
    assert update_info(plan) == {
        "names": list(plan.names),
        "dtype_names": ["float32", "float32", "bfloat16", "float32"],
        "shapes": [[5], [2, 2], [3], [1]],
    }
    # 20 bytes are not more than 20, 20 + 16 are; 6 + 4 are what is left.
    assert [(message.names, message.nbytes) for message in plan.messages] == [
        (("lm.embed", "lm.layers.9.w"), 36),
        (("lm.layers.10.w", "lm.norm"), 10),
    ]


def test_the_workers_come_behind_the_sender_and_meet_it_by_an_id_that_is_no_pickle():
    info = init_info(bytes(range(128)), workers=3, buffer_bytes=7)
    assert base64.b64decode(info.pop("nccl_unique_id_b64")) == bytes(range(128))
    assert info == {"rank_offset": 1, "world_size": 4, "packed": True, "packed_buffer_size_bytes": 7}


# -- refusals


@pytest.mark.parametrize(
    ("changes", "device", "visible", "why"),
    [
        ({}, "cpu", ("0", "1"), "this build of vLLM computes on a CPU"),
        ({}, "cuda", (), "the server needs 1 GPUs .* and the sender one of its own, and torch sees 0 here"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "cuda", ("0", "1", "2", "3"), "needs 4 GPUs"),
        ({"vllm": VllmSettings(nccl_device=2)}, "cuda", ("0", "1"), "nccl_device is 2, and 2 GPUs can be seen"),
        ({"max_loras": 1}, "cuda", ("0", "1"), "adapters are served"),
    ],
)
def test_what_cannot_send_is_refused_before_a_server_is_started(changes, device, visible, why):
    with pytest.raises(ConfigError, match=why):
        servers_gpus(settings().model_copy(update=changes), device=device, visible=visible)


def test_the_server_gets_as_many_gpus_as_it_needs_and_never_the_senders():
    given = settings(nccl_device=1).model_copy(update={"tensor_parallel_size": 2})
    assert servers_gpus(given, device="cuda", visible=("4", "5", "6", "7")) == ("4", "6")


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="has GPUs")
def test_on_a_machine_without_gpus_it_is_refused_with_the_numbers():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == ("0", "1")[: torch.cuda.device_count()]
    for device in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match=r'generator.vllm.transport is "nccl"'):
            open_transport(settings(), device=device)


# -- who waits for whom


class Scripted:
    """The sender's side, which shows what it was asked for and when."""

    backend, meets = "nccl", True

    def __init__(self) -> None:
        self.did: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.gate = threading.Event()
        self.gate.set()

    def init_info(self) -> dict[str, Any]:
        return init_info(bytes(128), workers=1, buffer_bytes=1 << 20)

    def join(self) -> None:
        self._do("join")

    def update_info(self, file: Path) -> dict[str, Any]:
        return update_info(plan_transfer(read_header(file)[0], buffer_bytes=1 << 20))

    def send(self, file: Path) -> None:
        assert file.exists()
        self._do("send")

    def _do(self, what: str) -> None:
        assert self.gate.wait(10)
        if what in self.fail:
            raise self.fail[what]
        self.did.append(what)


def bring(server: FakeVllm, transport: Scripted) -> RemoteEngine:
    clock = SystemClock()
    return bring_up(
        server,
        socket=server.socket,
        settings=settings(),
        model=ServedModel(name="tiny", vocabulary_size=VOCABULARY, max_positions=200, kv=None),
        tensors=WEIGHTS,
        policy_version=1,
        digest="digest-1",
        clock=clock,
        meter=SecondsMeter(clock, cause="startup"),
        wait=lambda ready: None,
        transport=transport,
    )


@pytest.fixture
def server(tmp_path) -> Iterator[FakeVllm]:
    made = FakeVllm(tmp_path)
    yield made
    made.hold(None)
    made.stop(grace_s=1)


async def load(engine: RemoteEngine) -> Any:
    await engine.pause("keep")
    return await engine.update(dict(WEIGHTS), policy_version=2, digest="digest-2", kv="keep")


async def test_both_sides_meet_at_the_start_and_at_each_update(server):
    sender = Scripted()
    engine = bring(server, sender)
    assert sender.did == ["join", "send"]
    assert server.bodies["/init_weight_transfer_engine"] == [{"init_info": sender.init_info()}]
    told = {"names": list(WEIGHTS), "dtype_names": ["float32", "float32"], "shapes": [[4], [2, 3]]}
    await load(engine)
    assert sender.did == ["join", "send", "send"]
    assert server.bodies["/update_weights"] == [{"update_info": told}] * 2
    assert server.label == "2"
    await engine.close()


async def test_the_server_is_asked_to_finish_only_when_all_was_sent(server):
    sender = Scripted()
    engine = bring(server, sender)
    sender.gate.clear()
    updating = asyncio.ensure_future(load(engine))
    async with asyncio.timeout(10):
        while len(server.bodies["/update_weights"]) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert len(server.bodies["/finish_weight_update"]) == 1
    sender.gate.set()
    await updating
    assert len(server.bodies["/finish_weight_update"]) == 2
    await engine.close()


async def test_a_sender_that_fails_gives_up_the_server_that_waits_for_it(server):
    sender = Scripted()
    engine = bring(server, sender)
    sender.fail["send"] = RuntimeError("no memory left on the GPU")
    server.hold("/update_weights")  # a worker in a broadcast that never comes
    async with asyncio.timeout(5):
        with pytest.raises(EngineDead, match=r"did not get to the vLLM server over nccl: .*no memory left"):
            await load(engine)
    assert not engine.healthy()
    server.hold(None)
    await engine.close()


async def test_a_server_that_refuses_leaves_nobody_waiting_for_the_sender(server):
    sender = Scripted()
    engine = bring(server, sender)
    sender.gate.clear()  # a broadcast that nobody joins
    server.fail["/update_weights"] = 500
    async with asyncio.timeout(5):
        with pytest.raises(EngineDead, match="told to refuse /update_weights"):
            await load(engine)
    sender.gate.set()
    assert not engine.healthy()
    await engine.close()


def test_a_start_at_which_they_do_not_meet_ends_with_both_reasons(tmp_path):
    server, sender = FakeVllm(tmp_path), Scripted()
    sender.fail["join"] = RuntimeError("duplicate GPU")
    with pytest.raises(EngineError, match=r"did not meet over nccl at /init_weight_transfer_engine.*duplicate GPU"):
        bring(server, sender)
    assert server.stopped


def test_a_start_at_which_one_side_never_comes_ends_in_time(tmp_path):
    server, sender = FakeVllm(tmp_path), Scripted()
    sender.gate.clear()
    quick = settings().model_copy(update={"vllm": VllmSettings(transport="nccl", start_deadline_s=0.2)})
    clock = SystemClock()
    with pytest.raises(DeadlineExceeded, match=r"start_deadline_s 0\.2"):
        bring_up(
            server,
            socket=server.socket,
            settings=quick,
            model=ServedModel(name="tiny", vocabulary_size=VOCABULARY, max_positions=200, kv=None),
            tensors=WEIGHTS,
            policy_version=1,
            digest="digest-1",
            clock=clock,
            meter=SecondsMeter(clock, cause="startup"),
            wait=lambda ready: None,
            transport=sender,
        )
    sender.gate.set()
    assert server.stopped
