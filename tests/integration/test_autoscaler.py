"""The autoscaler with real processes: replicas come with load and go without it, and no request is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rollmill.errors import ConfigError, EngineDead, NotServing
from rollmill.generator.client import GeneratorClient
from rollmill.generator.security import TlsFiles
from rollmill.runtime.autoscaler import Autoscaler, AutoscalerOptions, ScalingEvent, write_replicas_file
from rollmill.scheduling.scaling import ScalingSettings
from rollmill.types import GenerateRequest, SamplingParams, StopReason, Turn
from tls_builders import certificates_in, tls

pytestmark = pytest.mark.integration

REPLICA = Path(__file__).with_name("fake_replica.py")
TOKENS = 20
DEADLINE_S = 60.0
QUICK = {
    "target_wait_s": 0.2,
    "out_rest_s": 0.2,
    "in_rest_s": 0.4,
    "in_window_s": 0.4,
    "unfit_limit_s": 5.0,
    "backoff_s": 0.2,
}


class Scaler:
    """A running autoscaler and what it told."""

    def __init__(
        self,
        folder: Path,
        *,
        command: list[str],
        router: str | None = None,
        tls: TlsFiles | None = None,
        **settings: Any,
    ) -> None:
        self.events: list[ScalingEvent] = []
        self.stop = asyncio.Event()
        self.list = folder / "replicas.txt"
        self.options = AutoscalerOptions(
            command=(sys.executable, str(REPLICA), *command),
            directory=folder / "replicas",
            replicas_file=self.list,
            settings=ScalingSettings(**{**QUICK, **settings}),
            router=router,
            poll_s=0.1,
            drain_s=20.0,
            tls=tls,
        )
        self.autoscaler = Autoscaler(self.options, on_event=self._hear)
        self._changed = asyncio.Event()

    def _hear(self, event: ScalingEvent) -> None:
        self.events.append(event)
        self._changed.set()

    def count(self, kind: str) -> int:
        return sum(event.kind == kind for event in self.events)

    async def until(self, ready: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not ready():
                await self._changed.wait()
                self._changed.clear()

    def addresses(self) -> list[str]:
        return [line for line in self.list.read_text().splitlines() if not line.startswith("#")]

    def pids(self) -> list[int]:
        """Processes of replicas that this process started."""
        found = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if str(REPLICA) in child.cmdline():
                    found.append(child.pid)
        return found


@contextlib.asynccontextmanager
async def scaling(
    folder: Path, *, command: list[str], router: str | None = None, **settings: Any
) -> AsyncIterator[Scaler]:
    scaler = Scaler(folder, command=command, router=router, **settings)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(scaler.autoscaler.run(scaler.stop))
        try:
            yield scaler
        finally:
            scaler.stop.set()
    assert scaler.pids() == []
    assert scaler.addresses() == []


class Callers:
    """Callers that keep so many requests in flight, and send each to the next address that takes it."""

    def __init__(self, addresses: Callable[[], list[str]]) -> None:
        self._addresses = addresses
        self._clients: dict[str, GeneratorClient] = {}
        self._numbers = itertools.count()
        self.turns: list[Turn] = []
        self.wanted = 0

    async def one(self) -> None:
        number = next(self._numbers)
        request = GenerateRequest(
            request_id=f"r{number}",
            prompt_ids=np.array([1, 2, 3], dtype=np.int32),
            sampling=SamplingParams(max_new_tokens=TOKENS, seed=number),
            deadline_s=30.0,
        )
        async with asyncio.timeout(DEADLINE_S):
            while True:
                addresses = self._addresses()
                if not addresses:
                    await asyncio.sleep(0.01)
                    continue
                address = addresses[number % len(addresses)]
                client = self._clients.setdefault(address, GeneratorClient(address))
                with contextlib.suppress(
                    NotServing, EngineDead
                ):  # it drains or is gone: the next one, as a router would
                    self.turns.append(await client.generate(request))
                    return
                number += 1

    async def keep_busy(self, count: int) -> None:
        """Keep this many requests in flight until `wanted` falls."""

        async def caller(index: int) -> None:
            while index < self.wanted:
                await self.one()

        self.wanted = count
        async with asyncio.TaskGroup() as tasks:
            for index in range(count):
                tasks.create_task(caller(index))

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()


@pytest.mark.slow
async def test_replicas_come_with_load_and_go_without_it_and_no_request_is_lost(tmp_path):
    # 4 seats, and 20 tokens of 10 ms: one replica ends 20 turns/s at most, and 24 callers need three to wait for less
    # than 0.2 s.
    async with scaling(tmp_path, command=["--seats", "4", "--step-s", "0.01"], max_replicas=3) as scaler:
        callers = Callers(scaler.addresses)
        async with asyncio.TaskGroup() as tasks:
            await scaler.until(lambda: scaler.count("serving") == 1)
            tasks.create_task(callers.keep_busy(24))
            await scaler.until(lambda: scaler.count("serving") == 3)
            assert len(scaler.addresses()) == 3
            callers.wanted = 2
            await scaler.until(lambda: scaler.count("left") == 2)
            assert len(scaler.addresses()) == 1
            assert len(scaler.pids()) == 1
            callers.wanted = 0
        await callers.close()
    assert len(callers.turns) > 24
    assert {(turn.stop_reason, len(turn.output_ids)) for turn in callers.turns} == {(StopReason.LENGTH, TOKENS)}
    assert scaler.count("lost") == scaler.count("failed") == 0
    assert all("with 0 requests unfinished" in event.text for event in scaler.events if event.kind == "left")


@contextlib.asynccontextmanager
async def router(replicas: Path) -> AsyncIterator[str]:
    """The real router, on a list of replicas that changes."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollmill.cli", "router", "--replicas-file", str(replicas), "--json"),
        *("--set", "list_s=0.1", "--set", "poll_s=0.1"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            document = await process.stdout.readuntil(b"\n}\n")
        yield json.loads(document)["grpc"]
    finally:
        process.terminate()
        assert await process.wait() == 0


@pytest.mark.slow
async def test_behind_a_router_its_queue_starts_replicas_and_leaving_ones_lose_nothing(tmp_path):
    listed = tmp_path / "replicas.txt"
    write_replicas_file(listed, ())
    async with (
        router(listed) as address,
        # A router gives 4 seats 5 samples and keeps the rest: a replica alone would look almost idle.
        scaling(tmp_path, command=["--seats", "4", "--step-s", "0.01"], router=address, max_replicas=3) as scaler,
    ):
        callers = Callers(lambda: [address])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(callers.keep_busy(24))
            await scaler.until(lambda: scaler.count("serving") == 3)
            callers.wanted = 2
            await scaler.until(lambda: scaler.count("left") == 2)
            callers.wanted = 0
        await callers.close()
    assert len(callers.turns) > 24
    assert {(turn.stop_reason, len(turn.output_ids)) for turn in callers.turns} == {(StopReason.LENGTH, TOKENS)}
    assert scaler.count("lost") == scaler.count("failed") == 0


async def test_a_replica_that_is_killed_is_replaced_and_leaves_the_list(tmp_path):
    async with scaling(tmp_path, command=[]) as scaler:
        await scaler.until(lambda: scaler.count("serving") == 1)
        first = scaler.addresses()
        os.kill(scaler.pids()[0], signal.SIGKILL)
        await scaler.until(lambda: scaler.count("serving") == 2)
        assert len(scaler.addresses()) == 1
        assert scaler.addresses() != first
    kinds = [event.kind for event in scaler.events if event.kind != "decided"]
    assert kinds == ["serving", "lost", "serving", "left"]


async def test_replicas_with_mtls_are_seen_to_serve(tmp_path):
    certificates = certificates_in(tmp_path)
    server = ["--tls-cert", "server.pem", "--tls-key", "server.key", "--tls-client-ca", "ca.pem"]
    command = [one if one.startswith("--") else str(certificates / one) for one in server]
    async with scaling(tmp_path, command=command, tls=tls(certificates, "client"), max_replicas=1) as scaler:
        await scaler.until(lambda: scaler.count("serving") == 1)
        client = GeneratorClient(scaler.addresses()[0], tls=tls(certificates, "client"))
        assert (await client.status()).policy_version == 1
        await client.close()


async def test_told_to_stop_it_lets_replicas_finish_what_they_run(tmp_path):
    # 20 tokens of 50 ms: all four requests still run when it is told to stop.
    async with scaling(tmp_path, command=["--step-s", "0.05"]) as scaler:
        await scaler.until(lambda: scaler.count("serving") == 1)
        callers = Callers(scaler.addresses)
        watching = GeneratorClient(scaler.addresses()[0])
        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(callers.one())
            async with asyncio.timeout(DEADLINE_S):
                while (await watching.status()).running < 4:
                    pass  # each turn of the loop is a round trip
            assert callers.turns == []
            scaler.stop.set()
        await watching.close()
        await callers.close()
    assert [(turn.stop_reason, len(turn.output_ids)) for turn in callers.turns] == [(StopReason.LENGTH, TOKENS)] * 4


async def test_a_replica_that_cannot_start_as_asked_ends_the_autoscaler_with_its_words(tmp_path):
    scaler = Scaler(tmp_path, command=["--fail", "2"])
    with pytest.raises(ConfigError, match="there is no such model"):
        await asyncio.wait_for(scaler.autoscaler.run(scaler.stop), DEADLINE_S)
    assert scaler.pids() == []


async def test_a_replica_that_fails_otherwise_is_tried_again_later(tmp_path):
    async with scaling(tmp_path, command=["--fail", "1"]) as scaler:
        await scaler.until(lambda: scaler.count("failed") == 2)
    starts = [event.at_s for event in scaler.events if event.kind == "decided"]
    fails = [event.at_s for event in scaler.events if event.kind == "failed"]
    assert starts[1] - fails[0] >= 0.2


async def test_a_list_that_somebody_else_keeps_is_not_written_over(tmp_path):
    scaler = Scaler(tmp_path, command=[])
    scaler.list.write_text("10.0.0.1:50051\n")
    with pytest.raises(ConfigError, match="lists 1 replicas that no autoscaler wrote"):
        await scaler.autoscaler.run(scaler.stop)
    assert scaler.list.read_text() == "10.0.0.1:50051\n"
    write_replicas_file(scaler.list, ("10.0.0.2:50051",))  # left by an autoscaler that was killed
    scaler.stop.set()
    await scaler.autoscaler.run(scaler.stop)
    assert scaler.addresses() == []


def test_a_tethered_command_dies_with_the_process_that_started_it():
    # A parent that starts a tethered child, says its pid, and is killed.
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'rollmill.runtime.tether', sys.executable, '-c',\n"
        "    'import sys; print(1, flush=True); sys.stdin.read()'], stdout=subprocess.PIPE, stdin=subprocess.PIPE,\n"
        "    env={**os.environ, 'ROLLMILL_PARENT_PID': str(os.getpid())})\n"
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        assert child.wait(timeout=10) is None
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
