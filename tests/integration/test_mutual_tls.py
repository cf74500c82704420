"""Certificates on both sides, everywhere a replica is called from: router, load generator, autoscaler."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from generator_builders import request
from rollmill.cli.app import cli
from rollmill.clock import SystemClock
from rollmill.config.router import RouterSettings
from rollmill.errors import EngineDead
from rollmill.generator.client import GeneratorClient
from rollmill.generator.http import serve_http
from rollmill.generator.router.main import RouterAddresses, serve_router
from rollmill.generator.router.membership import Entry, FixedList
from rollmill.generator.router.service import RouterService
from rollmill.generator.router.upstream import GrpcUpstream
from rollmill.generator.security import Access, TlsFiles
from rollmill.generator.service import InferenceService
from rollmill.runtime.threads import process_environment
from service_builders import quick_engine, service, two_versions
from tls_builders import certificates_in, tls

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates_in(tmp_path_factory.mktemp("certificates"))


@contextlib.asynccontextmanager
async def routed(replicas: list[str], *, shown: TlsFiles, access: Access) -> AsyncIterator[tuple[RouterService, str]]:
    """A router that shows replicas these files, and asks its own callers for what `access` says."""
    router = RouterService(
        RouterSettings.model_validate({"poll_s": 0.1}),
        source=FixedList([Entry(address) for address in replicas]),
        connect=lambda address: GrpcUpstream(address, tls=shown),
        clock=SystemClock(),
    )
    stop = asyncio.Event()
    started: asyncio.Future[RouterAddresses] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            serve_router(router, access=access, stop=stop, drain_s=0.0, on_serving=started.set_result), name="router"
        )
        try:
            yield router, (await started).grpc
        finally:
            stop.set()


async def until(router: RouterService, ready: Callable[[list[Any]], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not ready(list(router.status_message().replicas)):
            router.changed.clear()
            await router.changed.wait()


async def test_a_router_with_a_certificate_reaches_replicas_that_ask_for_one_and_asks_for_one_itself(certificates):
    access = Access(tls=tls(certificates, "server"))
    async with contextlib.AsyncExitStack() as open_:
        mine = tls(certificates, "client")
        clients = [
            await open_.enter_async_context(service(quick_engine(), two_versions()[0], access=access, tls=mine))
            for _ in range(2)
        ]
        addresses = [client.address for client in clients]
        async with routed(addresses, shown=mine, access=access) as (router, address):
            await until(router, lambda seen: [one.state for one in seen] == ["serving"] * 2)
            caller = GeneratorClient(address, tls=mine)
            turns = [await caller.generate(request(f"r{number}", [1, 2, number + 3])) for number in range(4)]
            assert [len(turn.output_ids) for turn in turns] == [8] * 4
            await caller.close()
            for files in (tls(certificates), tls(certificates, "stranger")):
                stranger = GeneratorClient(address, tls=files)
                with pytest.raises(EngineDead):
                    await stranger.status()
                await stranger.close()
        # A router that shows nothing, or what nobody signed, sees no replica serve, and says why.
        for files in (tls(certificates), tls(certificates, "stranger")):
            async with routed(addresses, shown=files, access=Access()) as (router, _):
                await until(
                    router,
                    lambda seen: [one.state for one in seen] == ["unknown"] * 2 and all(one.reason for one in seen),
                )


class HttpsFace:
    name = "http"

    def __init__(self, files: TlsFiles) -> None:
        self._files = files

    async def serve(self, service: InferenceService, *, stop: asyncio.Event, on_bound: Callable[[str], None]) -> None:
        await serve_http(
            service, tls=self._files, stop=stop, on_bound=lambda port: on_bound(f"https://127.0.0.1:{port}")
        )


async def test_the_load_generator_shows_its_certificate_over_grpc_and_over_https(certificates):
    server = tls(certificates, "server")
    bound: dict[str, str] = {}

    class Told(HttpsFace):
        async def serve(
            self, service: InferenceService, *, stop: asyncio.Event, on_bound: Callable[[str], None]
        ) -> None:
            def tell(address: str) -> None:
                bound["http"] = address
                on_bound(address)

            await super().serve(service, stop=stop, on_bound=tell)

    def bench(*arguments: str) -> Any:
        load = ["--concurrency", "2", "--requests", "4", "--prompt-tokens", "4", "--new-tokens", "4", "--json"]
        return CliRunner().invoke(cli, ["bench", "generator", "--vocabulary", "100", *load, *arguments])

    shown = ["--replica-tls-ca", str(certificates / "ca.pem")]
    mutual = [
        *shown,
        *("--replica-tls-cert", str(certificates / "client.pem")),
        *("--replica-tls-key", str(certificates / "client.key")),
    ]
    settings = {"access": Access(tls=server), "faces": (Told(server),)}
    async with service(quick_engine(), two_versions()[0], tls=tls(certificates, "client"), **settings) as client:
        for where in (["--target", client.address], ["--http", bound["http"]]):
            done = await asyncio.to_thread(bench, *where, *mutual)
            assert done.exit_code == 0, done.output
            (report,) = json.loads(done.output)
            assert (report["answered"], report["errors"], report["tokens"]) == (4, {}, 16)
            refused = await asyncio.to_thread(bench, *where, *shown)
            assert refused.exit_code == 1
            assert "engine_dead" in json.loads(refused.output)["error"]["message"]


@pytest.mark.slow
async def test_the_autoscaler_command_calls_its_replicas_with_the_files_it_was_given(certificates, tmp_path):
    listed = tmp_path / "replicas.txt"
    path = {name: str(certificates / name) for name in ("ca.pem", "client.pem", "client.key", "server.pem")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollmill.cli", "autoscale", "--replicas-file", str(listed), "--json"),
        *("--max-replicas", "1", "--poll-s", "0.1", "--replica-tls-ca", path["ca.pem"]),
        *("--replica-tls-cert", path["client.pem"], "--replica-tls-key", path["client.key"]),
        *("--", "--model", "tiny-llama", "--engine", "fake", "--no-http", "--tls-client-ca", path["ca.pem"]),
        *("--tls-cert", path["server.pem"], "--tls-key", str(certificates / "server.key")),
        stdout=asyncio.subprocess.PIPE,
        env=process_environment(threads=1),
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            kinds = []
            while "serving" not in kinds:
                line = await process.stdout.readline()
                assert line, kinds
                kinds.append(json.loads(line)["kind"])
        (address,) = [line for line in listed.read_text().splitlines() if not line.startswith("#")]
        client = GeneratorClient(address, tls=tls(certificates, "client"))
        assert len((await client.generate(request("r", [1, 2, 3]))).output_ids) == 8
        await client.close()
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            await process.communicate()
    assert process.returncode == 0
