"""What clients find that are not ours: reflection as grpcurl uses it, health, and the minimal published interface."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from generator_builders import embedded, prompt_of, reference_logprobs, request
from rollmill.generator.client import open_channel
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.proto import policy_inference_pb2_grpc as pb_grpc
from rollmill.generator.proto import rl_inference_pb2 as rl_pb
from rollmill.generator.proto import rl_inference_pb2_grpc as rl_pb_grpc
from rollmill.types import SamplingParams, StopReason
from service_builders import quick_engine, service, two_versions

pytestmark = pytest.mark.integration

OURS = "rollmill.generator.v1.PolicyInference"
MINIMAL = "rl_inference.PolicyInference"
NODE_CLIENT = Path(__file__).parent / "minimal_interface_client.js"


def described(address: str) -> dict[str, dict[str, tuple[bool, dict[str, int]]]]:
    """Service -> method -> (streams its reply, fields of its request with their numbers), as a server tells it."""
    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        return {
            name: {
                method.name: (method.server_streaming, {field.name: field.number for field in method.input_type.fields})
                for method in pool.FindServiceByName(name).methods
            }
            for name in database.get_services()
        }


def serialized(message: Any) -> bytes:
    return message.SerializeToString()


def called_by_reflection(address: str, *, asked: dict[str, object]) -> Any:
    """Reply of the minimal interface to a client that knows no .proto: the bytes are made from what reflection says."""
    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName(MINIMAL).FindMethodByName("Generate")
        call = channel.unary_unary(
            f"/{MINIMAL}/Generate",
            request_serializer=serialized,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        return call(GetMessageClass(method.input_type)(**asked), timeout=10)


async def test_reflection_describes_every_service_its_methods_and_their_fields():
    repository, _, _ = two_versions()
    async with service(quick_engine(), repository) as client:
        services = await asyncio.to_thread(described, client.address)
    assert services.keys() == {
        OURS,
        MINIMAL,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert services[OURS].keys() == {
        "Generate",
        "GenerateStream",
        "Exchange",
        "Abort",
        "Score",
        "LoadWeights",
        "Drain",
        "Status",
    }
    assert services[OURS]["GenerateStream"][0]
    assert services[OURS]["Generate"][1]["prompt_ids"] == 2
    assert services[MINIMAL] == {"Generate": (False, {"request_id": 1, "prompt_ids": 2, "max_new_tokens": 3})}


async def test_a_client_that_knows_no_proto_can_call_what_reflection_describes():
    repository, _, _ = two_versions()
    async with service(quick_engine(), repository) as client:
        asked = {"request_id": "a", "prompt_ids": [1, 2], "max_new_tokens": 6}
        reply = await asyncio.to_thread(called_by_reflection, client.address, asked=asked)
    assert (reply.request_id, len(reply.output_ids), reply.num_generated_tokens) == ("a", 6, 6)


async def test_health_is_known_for_every_service_that_is_served():
    repository, _, _ = two_versions()
    async with service(quick_engine(), repository) as client, open_channel(client.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", OURS, MINIMAL):
            reply = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert reply.status == reply.SERVING


async def test_the_minimal_interface_samples_from_the_policy_and_sums_its_log_probs(tmp_path):
    repository, old, _ = two_versions()
    asked = rl_pb.GenerateRequest(request_id="a", prompt_ids=prompt_of(7), max_new_tokens=9)
    async with service(embedded(tmp_path, old), repository) as client, open_channel(client.address) as channel:
        stub = rl_pb_grpc.PolicyInferenceStub(channel)
        reply, again = await stub.Generate(asked, timeout=10), await stub.Generate(asked, timeout=10)
        ours = pb.GenerateRequest(request_id="a", prompt_ids=prompt_of(7), sampling=pb.SamplingParams(max_new_tokens=9))
        sample = (await pb_grpc.PolicyInferenceStub(channel).Generate(ours, timeout=10)).samples[0]
        turn = await client.generate(request("b", prompt_of(7), max_new_tokens=9, seed=4))
    assert (reply.request_id, reply.num_generated_tokens, len(reply.output_ids)) == ("a", 9, 9)
    # One seed for one id, whichever interface is asked; another one for another id.
    assert list(reply.output_ids) == list(again.output_ids) == list(sample.output_ids) != turn.output_ids.tolist()
    assert reply.logprob_sum == pytest.approx(sum(sample.behavior_logprobs), abs=1e-4)
    expected = reference_logprobs(old, turn, SamplingParams())
    np.testing.assert_allclose(turn.behavior_logprobs, expected, atol=1e-4)


async def test_what_a_request_leaves_out_takes_the_documented_defaults():
    repository, _, _ = two_versions()
    asked = pb.GenerateRequest(request_id="a", prompt_ids=[1, 2, 3])
    async with (
        service(quick_engine(max_model_len=40), repository) as client,
        open_channel(client.address) as channel,
    ):
        sample = (await pb_grpc.PolicyInferenceStub(channel).Generate(asked, timeout=10)).samples[0]
        greedy = pb.GenerateRequest(
            request_id="b", prompt_ids=[1, 2, 3], sampling=pb.SamplingParams(temperature=0.0, max_new_tokens=5)
        )
        likeliest = (await pb_grpc.PolicyInferenceStub(channel).Generate(greedy, timeout=10)).samples[0]
        turn = await client.generate(request("c", [1, 2, 3], temperature=0.0, max_new_tokens=5))
    assert (len(sample.output_ids), sample.stop_reason) == (37, StopReason.LENGTH.value)  # as many as fit
    assert list(likeliest.output_ids) == turn.output_ids.tolist()  # an explicit 0 is not the default


@pytest.mark.slow
async def test_the_minimal_interface_answers_a_client_in_another_language(tmp_path):
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    packages = ["@grpc/grpc-js@1", "@grpc/proto-loader@0.8"]
    patience = ["--fetch-timeout=20000", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    install = [npm, "install", "--no-audit", "--no-fund", "--silent", *patience, "--prefix", str(tmp_path), *packages]
    try:
        got = await asyncio.to_thread(subprocess.run, install, capture_output=True, text=True, timeout=100, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm did not install the client's packages in 100 s: its registry does not answer")
    if got.returncode != 0:
        pytest.skip(f"npm could not install the client's packages: {got.stderr[-200:]}")
    repository, old, _ = two_versions()
    proto = Path(rl_pb.__file__).with_name("rl_inference.proto")
    asked = {"request_id": "from-node", "prompt_ids": prompt_of(7), "max_new_tokens": 9}
    async with service(embedded(tmp_path / "model", old), repository) as client:
        done = await asyncio.to_thread(
            subprocess.run,
            [node, str(NODE_CLIENT), str(proto), client.address, json.dumps(asked)],
            env={**os.environ, "NODE_PATH": str(tmp_path / "node_modules"), "no_grpc_proxy": "127.0.0.1"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        async with open_channel(client.address) as channel:
            same = await rl_pb_grpc.PolicyInferenceStub(channel).Generate(rl_pb.GenerateRequest(**asked), timeout=10)
    reply, refusal = json.loads(done.stdout)
    assert reply["request_id"] == "from-node"
    assert reply["num_generated_tokens"] == 9
    assert reply["output_ids"] == list(same.output_ids)
    assert reply["logprob_sum"] == pytest.approx(same.logprob_sum, abs=1e-5)
    assert refusal["code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "empty prompt" in refusal["details"]
