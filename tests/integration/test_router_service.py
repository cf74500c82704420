"""The router over real sockets, in front of real replica processes: kills, updates, joins, leaves, and every face."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from router_replica import Digests

from generator_builders import request
from rollmill.clock import SystemClock
from rollmill.config.router import RouterSettings
from rollmill.errors import DataError, EngineDead, NotServing, Unauthenticated, WeightError
from rollmill.generator.client import GeneratorClient
from rollmill.generator.engines.fake import FakeEngine
from rollmill.generator.main import serve
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.proto import policy_inference_pb2_grpc as pb_grpc
from rollmill.generator.proto import rl_inference_pb2 as rl_pb
from rollmill.generator.proto import rl_inference_pb2_grpc as rl_pb_grpc
from rollmill.generator.router.main import RouterAddresses, serve_router
from rollmill.generator.router.membership import Entry, FileList, FixedList, Source
from rollmill.generator.router.service import RouterService
from rollmill.generator.router.upstream import Connect, GrpcUpstream
from rollmill.generator.security import Access, TlsFiles
from rollmill.runtime.threads import process_environment
from rollmill.types import StopReason, Turn

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).with_name("router_replica.py")
START_S = 60.0


class Replicas:
    """Replica processes of a test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._count = 0

    async def start(self, count: int = 1, *, address: str = "", **options: Any) -> list[str]:
        """Start replicas, all at once, and return their addresses once they answer."""
        files, processes = [], []
        for _ in range(count):
            self._count += 1
            files.append(self._folder / f"replica-{self._count}.json")
            arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
            port = [f"--port={address.rpartition(':')[2]}"] if address else []
            command = [sys.executable, str(SCRIPT), *arguments, *port, f"--address-file={files[-1]}"]
            processes.append(_spawn(command))
        addresses = [await self._address(*started) for started in zip(files, processes, strict=True)]
        self._processes |= dict(zip(addresses, processes, strict=True))
        return addresses

    async def _address(self, file: Path, process: subprocess.Popen[bytes]) -> str:
        async with asyncio.timeout(START_S):
            while (address := _address_in(file)) is None:
                assert process.poll() is None, "a replica ended before it served"
                await asyncio.sleep(0.02)
        return address

    @property
    def addresses(self) -> list[str]:
        return list(self._processes)

    def kill(self, address: str) -> None:
        process = self._processes.pop(address)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    found = Replicas(tmp_path)
    yield found
    found.end()


@pytest.fixture(scope="module")
def shared_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    found = Replicas(tmp_path_factory.mktemp("shared"))
    yield found
    found.end()


@pytest.fixture
async def two(shared_process: Replicas) -> list[str]:
    """Two replicas that all tests share which leave them as they were."""
    return shared_process.addresses or await shared_process.start(2, step_s=0.02)


class Router:
    """A router of a test, in this process, with a client."""

    def __init__(self, service: RouterService, address: str, *, token: str | None = None) -> None:
        self.service, self.address = service, address
        self.client = GeneratorClient(address, token=token)

    async def until(self, true: Callable[[pb.StatusReply], bool]) -> pb.StatusReply:
        async with asyncio.timeout(START_S):
            while True:
                status = self.service.status_message()
                if true(status):
                    return status
                await asyncio.sleep(0.02)

    async def until_sampling(self, *addresses: str, tokens: int = 1) -> None:
        """Wait until these replicas have each sampled so many tokens, by their own word."""
        statuses = self.service.fleet.statuses
        await self.until(lambda _: all(statuses[address].output_tokens >= tokens for address in addresses))

    async def until_serving(self, count: int) -> pb.StatusReply:
        return await self.until(lambda status: states(status).count("serving") == count)


def states(status: pb.StatusReply) -> list[str]:
    return [one.state for one in status.replicas]


@contextlib.asynccontextmanager
async def routing(
    source: Source | list[str],
    *,
    access: Access | None = None,
    token: str | None = None,
    connect: Connect = GrpcUpstream,
    **settings: Any,
) -> AsyncIterator[Router]:
    stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()
    if isinstance(source, list):
        source = FixedList([Entry(address) for address in source])
    service = RouterService(
        RouterSettings.model_validate({"poll_s": 0.1, "list_s": 0.1, **settings}),
        source=source,
        connect=connect,
        clock=SystemClock(),
    )

    def on_serving(addresses: RouterAddresses) -> None:
        started.set_result(addresses.grpc)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_router(service, access=access, stop=stop, drain_s=0.0, on_serving=on_serving))
        router = Router(service, await started, token=token)
        try:
            yield router
        finally:
            await router.client.close()
            stop.set()


def expected(asked: Any, *, version: int = 1) -> asyncio.Future[Turn]:
    """What an undisturbed fake engine samples."""
    engine = FakeEngine(clock=SystemClock(), digest=f"fake-{version}", policy_version=version, max_model_len=1000)
    return asyncio.ensure_future(engine.generate(asked))


def asks(count: int, *, tokens: int = 50) -> list[Any]:
    return [
        request(f"r{number}", [1, 2, 3 + number % 7], max_new_tokens=tokens, seed=1000 + number)
        for number in range(count)
    ]


# -- kill -9


@pytest.mark.parametrize("keep_tokens", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_kill_9_of_one_of_three_under_load_loses_no_request_and_changes_no_token(replicas, keep_tokens):
    addresses = await replicas.start(3, step_s=0.02)
    async with routing(addresses, keep_tokens=keep_tokens) as router:
        await router.until_serving(3)
        asked = asks(24, tokens=80)
        async with asyncio.TaskGroup() as tasks:
            turns = [tasks.create_task(router.client.generate(one)) for one in asked]
            await router.until(lambda status: all(one.in_flight == 8 for one in status.replicas))
            await router.until_sampling(addresses[1], tokens=8 * 24)  # more for each than the router keeps at once
            replicas.kill(addresses[1])
        for one, turn in zip(asked, turns, strict=True):
            assert list(turn.result().output_ids) == list((await expected(one)).output_ids)
            assert turn.result().stop_reason is StopReason.LENGTH
        forwarder = router.service.forwarder
        assert forwarder.retried == 8
        assert forwarder.moved == (8 if keep_tokens else 0)
        assert states(router.service.status_message()).count("serving") == 2
        router.service.law.validate()

        # Restarted with old weights, it serves only after it has loaded the fleet's.
        reports = await router.client.load_weights(2, deadline_s=20)
        assert reports.policy_version == 2
        await replicas.start(address=addresses[1], version=1)
        await router.until_serving(3)
        back = next(one for one in router.service.status_message().replicas if one.replica == addresses[1])
        assert (back.policy_version, back.digest) == (2, "fake-2")
        turns = await asyncio.gather(*(router.client.generate(one) for one in asks(12, tokens=5)))
        assert {span.policy_version for turn in turns for span in turn.version_spans} == {2}
        assert router.service.law.table[addresses[1]].requests > 0


async def test_configured_so_what_was_lost_fails_with_a_typed_error_and_the_rest_goes_on(replicas):
    addresses = await replicas.start(2, step_s=0.02)
    async with routing(addresses, on_loss="fail") as router:
        await router.until_serving(2)
        turns = [asyncio.ensure_future(router.client.generate(one)) for one in asks(16, tokens=120)]
        await router.until(lambda status: all(one.in_flight == 8 for one in status.replicas))
        await router.until_sampling(addresses[0])
        replicas.kill(addresses[0])
        found = await asyncio.gather(*turns, return_exceptions=True)
    lost = [one for one in found if isinstance(one, BaseException)]
    assert len(lost) == 8
    assert {type(one) for one in lost} == {EngineDead}
    assert all(len(one.output_ids) == 120 for one in found if isinstance(one, Turn))


async def test_a_stream_survives_the_kill_of_its_replica(replicas):
    addresses = await replicas.start(2, step_s=0.02)
    async with routing(addresses) as router:
        await router.until_serving(2)
        (asked,) = asks(1, tokens=60)
        heard: list[int] = []
        killed = False

        def on_tokens(chunk: Any) -> None:
            nonlocal killed
            heard.extend(chunk.output_ids.tolist())
            if len(heard) >= 10 and not killed:
                killed = True
                (replica,) = router.service.law.where("r0")
                replicas.kill(replica)

        turn = await router.client.generate(asked, on_tokens=on_tokens)
        assert killed
        assert router.service.forwarder.moved == 1
        assert heard == turn.output_ids.tolist() == (await expected(asked)).output_ids.tolist()


# -- weights


async def test_an_update_rolls_over_the_replicas_one_by_one_and_reports_each(replicas):
    addresses = await replicas.start(3, step_s=0.02, load_s=0.2)
    async with routing(addresses, max_unavailable=1) as router:
        await router.until_serving(3)
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                loading = sum(one.loading != 0 for one in router.service.status_message().replicas)
                most = max(most, loading)
                await asyncio.sleep(0.01)

        async with grpc.aio.insecure_channel(router.address) as channel:
            stub = pb_grpc.PolicyInferenceStub(channel)
            watching = asyncio.ensure_future(watch())
            turns = [asyncio.ensure_future(router.client.generate(one)) for one in asks(24, tokens=80)]
            reply = await stub.LoadWeights(pb.LoadWeightsRequest(policy_version=2), timeout=30)
            watching.cancel()
        assert most == 1
        assert {(one.replica, one.result, one.digest) for one in reply.replicas} == {
            (address, "loaded", "fake-2") for address in addresses
        }
        assert (reply.policy_version, reply.digest, reply.changed) == (2, "fake-2", True)
        for turn in await asyncio.gather(*turns):
            versions = [span.policy_version for span in turn.version_spans]
            assert versions in ([1], [1, 2], [2])
        newest = request("new", [1, 2, 3])
        turn = await router.client.generate(_at_least(newest, 2))
        assert turn.version_spans[0].policy_version == 2


async def test_an_unknown_version_is_the_replicas_own_error_and_all_serve_on(two):
    async with routing(two) as router:
        await router.until_serving(2)
        with pytest.raises(WeightError, match="policy version 99 is unknown"):
            await router.client.load_weights(99, deadline_s=20)
        assert states(router.service.status_message()) == ["serving", "serving"]
        assert len((await router.client.generate(request("r", [1, 2, 3]))).output_ids) == 8


# -- joins and leaves


async def test_replicas_join_and_leave_with_the_file_and_what_runs_is_finished(replicas, tmp_path):
    addresses = await replicas.start(2, step_s=0.02)
    file = tmp_path / "replicas"
    _write(file, addresses[0])
    async with routing(FileList(file)) as router:
        await router.until_serving(1)
        _write(file, *addresses)
        await router.until_serving(2)
        turns = [asyncio.ensure_future(router.client.generate(one)) for one in asks(8)]
        await router.until(lambda status: all(one.in_flight == 4 for one in status.replicas))
        _write(file, addresses[1])
        await router.until(lambda status: "leaving" in states(status))
        assert all(len(turn.output_ids) == 50 for turn in await asyncio.gather(*turns))
        await router.until(lambda status: [one.replica for one in status.replicas] == [addresses[1]])
        assert router.service.forwarder.retried == router.service.forwarder.moved == 0


async def test_what_a_draining_replica_does_not_finish_goes_on_elsewhere(replicas):
    addresses = await replicas.start(2, step_s=0.02)
    async with routing(addresses) as router:
        await router.until_serving(2)
        asked = asks(8, tokens=150)
        turns = [asyncio.ensure_future(router.client.generate(one)) for one in asked]
        await router.until(lambda status: all(one.in_flight == 4 for one in status.replicas))
        direct = GeneratorClient(addresses[0])
        assert await direct.drain(0.2) == 4
        await direct.close()
        for one, turn in zip(asked, await asyncio.gather(*turns), strict=True):
            assert turn.output_ids.tolist() == (await expected(one)).output_ids.tolist()
        assert router.service.forwarder.moved == 4


# -- the face


async def test_every_call_of_the_service_is_answered(two):
    async with routing(two) as router:
        await router.until_serving(2)
        client = router.client
        scored = await client.score(np.array([1, 2, 3]))
        assert scored.tolist() == _scores([1, 2, 3])
        group = await client.generate_group(request("group", [1, 2, 3]), siblings=3)
        assert [turn.request_id for turn in group] == ["group#0", "group#1", "group#2"]
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(client.generate(request("long", [1, 2], max_new_tokens=900)))
            await router.until(lambda status: sum(one.in_flight for one in status.replicas) == 1)
            assert await client.abort("long")
            assert not await client.abort("nobody")
        assert task.result().stop_reason is StopReason.ABORT
        with pytest.raises(DataError, match="vocabulary"):
            await client.generate(request("bad", [1, 5000]))
        status = await client.status()
        assert status.max_num_seqs == 128
        assert await client.drain(1.0) == 0
        with pytest.raises(NotServing, match="asked to drain"):
            await client.generate(request("late", [1, 2]))


async def test_a_replica_sends_tokens_together_where_it_is_asked_to(two):
    async with grpc.aio.insecure_channel(two[0]) as channel:
        asked = pb.GenerateRequest(request_id="r", prompt_ids=[1, 2], chunk_tokens=16)
        asked.sampling.max_new_tokens = 20
        call = pb_grpc.PolicyInferenceStub(channel).GenerateStream(asked, timeout=20)
        events = [event async for event in call]
    assert [len(event.tokens.output_ids) for event in events] == [1, 16, 3, 0]
    assert events[-1].finished.output_tokens == 20


async def test_health_follows_the_fleet_and_reflection_describes_the_service(replicas):
    (address,) = await replicas.start(1)
    async with routing([address]) as router, grpc.aio.insecure_channel(router.address) as channel:
        await router.until_serving(1)
        stub = health_pb2_grpc.HealthStub(channel)
        asked = health_pb2.HealthCheckRequest(service="rollmill.generator.v1.PolicyInference")
        assert (await stub.Check(asked, timeout=5)).status == health_pb2.HealthCheckResponse.SERVING
        services = await asyncio.to_thread(_reflected, router.address)
        assert "rollmill.generator.v1.PolicyInference" in services
        replicas.kill(address)
        await router.until_serving(0)
        assert (await stub.Check(asked, timeout=5)).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_the_minimal_published_interface_is_answered_too(two):
    async with routing(two) as router, grpc.aio.insecure_channel(router.address) as channel:
        await router.until_serving(2)
        stub = rl_pb_grpc.PolicyInferenceStub(channel)
        reply = await stub.Generate(
            rl_pb.GenerateRequest(request_id="r", prompt_ids=[1, 2, 3], max_new_tokens=6), timeout=20
        )
        assert (reply.request_id, len(reply.output_ids), reply.num_generated_tokens) == ("r", 6, 6)
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await stub.Generate(rl_pb.GenerateRequest(request_id="s", prompt_ids=[-1], max_new_tokens=6), timeout=20)
    assert found.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_replicas_with_tls_and_a_token_are_reached(tmp_path):
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    names = ("-subj", "/CN=replica", "-addext", "subjectAltName=IP:127.0.0.1")
    key = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "replica.key")
    await asyncio.to_thread(
        subprocess.run,
        [openssl, "req", *key, "-out", "replica.pem", *names],
        cwd=tmp_path,
        check=True,
        stderr=subprocess.DEVNULL,
    )
    certificate, token, stop = tmp_path / "replica.pem", "sesame-open-sesame", asyncio.Event()
    served: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        replica = serve(
            engine=FakeEngine(clock=SystemClock(), digest="fake-1"),
            repository=Digests(),  # pyright: ignore[reportArgumentType]
            kv_policy="keep",
            access=Access(token=token, tls=TlsFiles(cert=certificate, key=tmp_path / "replica.key")),
            stop=stop,
            load_deadline_s=5.0,
            drain_s=0.0,
            on_serving=lambda addresses: served.set_result(addresses.grpc),
        )
        tasks.create_task(replica)
        address = await served

        def connect(address: str) -> GrpcUpstream:
            return GrpcUpstream(address, token=token, tls=TlsFiles(ca=certificate))

        async with routing([address], connect=connect) as router:
            await router.until_serving(1)
            assert len((await router.client.generate(request("r", [1, 2, 3]))).output_ids) == 8
        async with routing([address]) as router:
            await router.until(lambda status: status.replicas[:1] != [] and status.replicas[0].reason != "")
            assert "serving" not in states(router.service.status_message())
        stop.set()


async def test_thousands_of_calls_that_come_at_once_are_all_answered():
    async with routing([]) as router, grpc.aio.insecure_channel(router.address) as channel:
        stub = pb_grpc.PolicyInferenceStub(channel)
        # gRPC itself cancels calls beyond 1,000 to 3,000 that wait to be looked at, unless it is told not to.
        replies = await asyncio.gather(*(stub.Status(pb.StatusRequest(), timeout=60) for _ in range(3500)))
    assert {reply.state for reply in replies} == {"starting"}


async def test_bytes_that_are_no_message_are_refused_in_words(two):
    async with routing(two) as router, grpc.aio.insecure_channel(router.address) as channel:
        await router.until_serving(2)
        for name in ("Generate", "Score", "Abort"):
            call = channel.unary_unary(f"/rollmill.generator.v1.PolicyInference/{name}")
            with pytest.raises(grpc.aio.AioRpcError) as found:
                await call(b"\xff\xff\xff", timeout=5)
            assert found.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_router_with_a_token_asks_for_it(two):
    token = "sesame-open-sesame"
    async with routing(two, access=Access(token=token), token=token) as router:
        await router.until_serving(2)
        assert len((await router.client.generate(request("r", [1, 2, 3]))).output_ids) == 8
        stranger = GeneratorClient(router.address)
        with pytest.raises(Unauthenticated):
            await stranger.generate(request("r", [1, 2, 3]))
        await stranger.close()


async def test_a_full_router_refuses_with_the_time_to_ask_again(two):
    async with routing(two[:1], jobs={"": {"max_in_flight": 1}}, max_queue=1) as router:
        await router.until_serving(1)
        running = [asyncio.ensure_future(router.client.generate(one)) for one in asks(2, tokens=20)]
        await router.until(lambda status: router.service.law.queues.waiting == 1)
        async with grpc.aio.insecure_channel(router.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as found:
                await pb_grpc.PolicyInferenceStub(channel).Generate(
                    pb.GenerateRequest(request_id="third", prompt_ids=[1]), timeout=5
                )
        assert found.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        metadata = dict(found.value.trailing_metadata() or ())
        assert float(metadata["retry-after"]) > 0
        await asyncio.gather(*running)


# -- the command


async def test_the_command_routes_grpc_and_http_until_it_is_told_to_stop(two, tmp_path):
    pytest.importorskip("uvicorn")
    file = tmp_path / "replicas"
    _write(file, *two)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollmill.cli", "router", "--replicas-file", str(file), "--http-port", "0", "--json"),
        *("--set", "poll_s=0.1"),
        stdout=asyncio.subprocess.PIPE,
        env=process_environment(threads=1),
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            text = await process.stdout.readuntil(b"\n}")
        found = json.loads(text)
        client = GeneratorClient(found["grpc"])
        over_grpc = await client.generate(request("r", [1, 2, 3], seed=5))
        await client.close()
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 8, "seed": 5}}
        reply = await asyncio.to_thread(_post, f"{found['http']}/inference/v1/generate", body)
        assert reply["choices"][0]["token_ids"] == over_grpc.output_ids.tolist()
        page = await asyncio.to_thread(_get, f"{found['http']}/metrics")
        assert 'rollmill_router_requests_total{outcome="ok"} 2.0' in page
    finally:
        process.terminate()
        async with asyncio.timeout(START_S):
            status = await process.wait()
    assert status == 0


def _spawn(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=process_environment(threads=1))


def _address_in(file: Path) -> str | None:
    return json.loads(file.read_text())["address"] if file.exists() else None


def _post(url: str, body: dict[str, Any]) -> Any:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=20) as reply:
        return json.load(reply)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as reply:
        return reply.read().decode()


def _write(file: Path, *addresses: str) -> None:
    partial = file.with_suffix(".new")
    partial.write_text("".join(f"{address}\n" for address in addresses))
    partial.replace(file)


def _at_least(asked: Any, version: int) -> Any:
    return msgspec.structs.replace(asked, min_policy_version=version)


def _scores(ids: list[int]) -> list[float]:
    engine = FakeEngine(clock=SystemClock(), digest="fake-1")
    return [float(np.float32(engine.logprobs(before)[after])) for before, after in itertools.pairwise(ids)]


def _reflected(address: str) -> list[str]:
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        service = DescriptorPool(database).FindServiceByName("rollmill.generator.v1.PolicyInference")
        assert "LoadWeights" in service.methods_by_name
        return list(database.get_services())
