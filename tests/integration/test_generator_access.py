"""Tokens and certificates over a real socket: who has them is served, everybody else gets a typed refusal."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from generator_builders import request
from rollmill.errors import ConfigError, EngineDead, Unauthenticated
from rollmill.generator.client import GeneratorClient, open_channel
from rollmill.generator.main import serve
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.proto import policy_inference_pb2_grpc as pb_grpc
from rollmill.generator.proto import rl_inference_pb2 as rl_pb
from rollmill.generator.proto import rl_inference_pb2_grpc as rl_pb_grpc
from rollmill.generator.security import Access, TlsFiles
from service_builders import quick_engine, service, two_versions
from tls_builders import certificates_in, tls

pytestmark = pytest.mark.integration

TOKEN = "sesame-open-sesame"
ASKED = request("a", [1, 2], max_new_tokens=3)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates_in(tmp_path_factory.mktemp("certificates"))


async def test_a_client_with_the_token_is_served():
    repository, _, _ = two_versions()
    async with service(quick_engine(), repository, access=Access(token=TOKEN), token=TOKEN) as client:
        assert len((await client.generate(ASKED)).output_ids) == 3
        assert len((await client.generate(ASKED, on_tokens=lambda chunk: None)).output_ids) == 3
        assert (await client.status()).policy_version == 1


@pytest.mark.parametrize("token", [None, f"{TOKEN}x", "sesame"])
async def test_without_the_token_every_call_is_refused_and_nothing_runs(token):
    repository, _, _ = two_versions()
    async with service(quick_engine(), repository, access=Access(token=TOKEN), token=TOKEN) as client:
        stranger = GeneratorClient(client.address, token=token)
        for call in (
            stranger.generate(ASKED),
            stranger.generate(ASKED, on_tokens=lambda chunk: None),
            stranger.abort("a"),
            stranger.load_weights(2, deadline_s=5),
            stranger.drain(0.1),
            stranger.status(),
        ):
            with pytest.raises(Unauthenticated, match="authorization: Bearer TOKEN"):
                await call
        status = await client.status()
        await stranger.close()
    assert (status.output_tokens, status.policy_version, status.state.value) == (0, 1, "serving")


async def test_the_token_guards_everything_but_a_health_check():
    repository, _, _ = two_versions()
    async with (
        service(quick_engine(), repository, access=Access(token=TOKEN), token=TOKEN) as client,
        open_channel(client.address) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        health = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        refused: list[str] = []
        asked = rl_pb.GenerateRequest(request_id="a", prompt_ids=[1], max_new_tokens=1)
        reflection = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        for call in (
            rl_pb_grpc.PolicyInferenceStub(channel).Generate(asked, timeout=5),
            reflection(iter([b""]), timeout=5).read(),
            stub.Watch(health_pb2.HealthCheckRequest(), timeout=5).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call
            refused.append(failed.value.code().name)
    assert health.status == health.SERVING
    assert refused == ["UNAUTHENTICATED"] * 3


async def test_a_call_is_refused_before_its_message_is_read():
    repository, _, _ = two_versions()
    async with (
        service(quick_engine(), repository, access=Access(token=TOKEN), token=TOKEN) as client,
        open_channel(client.address) as channel,
    ):
        stub = pb_grpc.PolicyInferenceStub(channel)
        call = channel.unary_unary("/rollmill.generator.v1.PolicyInference/Generate")(b"\xff\xff", timeout=5)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call
        right = stub.Generate(
            pb.GenerateRequest(request_id="a", prompt_ids=[1]),
            timeout=5,
            metadata=(("authorization", f"bearer {TOKEN}"),),
        )
        assert (await right).request_id == "a"
    assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_tls_encrypts_and_a_client_that_trusts_another_authority_or_none_is_not_connected(certificates):
    repository, _, _ = two_versions()
    access = Access(token=TOKEN, tls=tls(certificates, "server", ca=False))
    async with service(quick_engine(), repository, access=access, token=TOKEN, tls=tls(certificates)) as client:
        assert len((await client.generate(ASKED)).output_ids) == 3
        named = GeneratorClient(
            client.address,
            token=TOKEN,
            tls=TlsFiles(ca=certificates / "ca.pem", server_name="replica.test"),
        )
        assert (await named.status()).policy_version == 1
        distrusting = TlsFiles(ca=certificates / "stranger.pem")
        for stranger in (
            GeneratorClient(client.address, token=TOKEN, tls=distrusting),
            GeneratorClient(client.address),
        ):
            with pytest.raises(EngineDead):
                await stranger.status()
            await stranger.close()
        await named.close()


async def test_with_mtls_only_a_client_whose_certificate_the_authority_signed_is_connected(certificates):
    repository, _, _ = two_versions()
    access = Access(tls=tls(certificates, "server"))
    async with service(quick_engine(), repository, access=access, tls=tls(certificates, "client")) as client:
        assert len((await client.generate(ASKED)).output_ids) == 3
        for mine in (tls(certificates), tls(certificates, "stranger")):
            stranger = GeneratorClient(client.address, tls=mine)
            with pytest.raises(EngineDead):
                await stranger.status()
            await stranger.close()


async def test_a_key_that_is_not_the_certificates_is_refused_at_the_start(certificates):
    repository, _, _ = two_versions()
    access = Access(tls=TlsFiles(cert=certificates / "server.pem", key=certificates / "client.key"))
    with pytest.raises(ConfigError, match="cannot be bound"):
        await serve(
            engine=quick_engine(),
            repository=repository,  # pyright: ignore[reportArgumentType]
            kv_policy="keep",
            access=access,
            stop=asyncio.Event(),
            load_deadline_s=5.0,
        )
    assert repository.held_versions() == []


async def test_a_port_that_is_taken_is_a_config_error_that_names_it():
    repository, _, _ = two_versions()
    async with service(quick_engine(), repository) as client:
        port = int(client.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be bound"):
            await serve(
                engine=quick_engine(),
                repository=repository,  # pyright: ignore[reportArgumentType]
                kv_policy="keep",
                port=port,
                stop=asyncio.Event(),
                load_deadline_s=5.0,
            )
