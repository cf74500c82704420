"""A node that runs short moves paused sandboxes to disk: memory and processes are given back, a connect restores them.

The sandboxes, their snapshots and the service are real; only what is read of the node is made up.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gvisor_builders import need_gvisor
from rollmill.cli.sandbox_backends import provider_of
from rollmill.sandboxes import NamespaceProvider, NamespaceSettings
from rollmill.sandboxes.admission import SandboxPool
from rollmill.sandboxes.backends.gvisor import GvisorSettings
from rollmill.sandboxes.service import Node
from rollmill.sandboxes.service.law import Plan
from rollmill.sandboxes.service.moving import move_to_disk
from rollmill.sandboxes.service.served import Order
from rollmill.sandboxes.service.stock import PooledStock
from rollmill.sandboxes.service.templates import Template
from rollmill.sandboxes.watchdog import NodeGuard, NodeReading
from sandbox_builders import why_no_namespaces

pytestmark = pytest.mark.integration

TOKEN = "sesame-open-sesame"
MARK = "sleep 918273"
ORDER = Order(template="base", timeout_s=100.0, plan=Plan(pause=True))

SERVICE = """
import os, sys
from pathlib import Path
import msgspec
from rollmill.cli.app import main
from rollmill.sandboxes.watchdog.node import NodeReader

read, short = NodeReader.read, Path(sys.argv.pop(1))
NodeReader.read = lambda self: msgspec.structs.replace(read(self), memory_free=0.01 if short.exists() else 0.9)
main()
"""


@pytest.fixture(scope="module", autouse=True)
def works(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("probe")
    if reason := why_no_namespaces(directory):
        pytest.skip(f"no namespace sandboxes here: {reason}")

    async def can_pause() -> bool:
        async with NamespaceProvider(NamespaceSettings(directory=directory)) as provider:
            return (await provider.capabilities()).pause

    if not asyncio.run(can_pause()):
        pytest.skip("no pauses that keep memory here: a cgroup v2 that may be written to is missing")


def processes() -> int:
    """How many programs of these tests there are on this machine."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += path.read_bytes().replace(b"\0", b" ").strip() == MARK.encode()
        except OSError:
            continue
    return found


@pytest.mark.parametrize("backend", ["namespaces", pytest.param("gvisor", marks=pytest.mark.slow)])
def test_a_paused_sandbox_gives_back_its_processes_and_goes_on_with_its_files(tmp_path, backend):
    records, snapshots = tmp_path / "records", tmp_path / "snapshots"
    if backend == "gvisor":
        need_gvisor(tmp_path / "probe")
    kind = GvisorSettings if backend == "gvisor" else NamespaceSettings
    settings = kind(directory=records, snapshot_directory=snapshots)

    async def main() -> None:
        free = 0.9

        async def read() -> NodeReading:
            return NodeReading(memory_free=free, disk_free=0.9)

        async with asyncio.timeout(60), provider_of(settings) as provider:

            async def to_disk(count: int) -> int:
                return await move_to_disk(node, count)

            async with SandboxPool(provider, suspend_to_disk=to_disk) as pool:
                stock = PooledStock(provider, pool, ready={})
                async with Node(provider, templates={"base": Template()}, stock=stock) as node:
                    served = await node.create(ORDER)
                    await served.sandbox.write("/workspace/notes", b"so far")
                    await served.sandbox.start_process(MARK.split())
                    await node.pause(served.id)
                    assert processes() == (backend == "namespaces")  # gVisor's are in its own kernel
                    guard = NodeGuard(pool, read=read)
                    free = 0.01
                    await guard.look()
                    assert guard.statistics().evicted_suspended == 1
                    assert processes() == 0
                    assert list(records.glob("*.json")) == []
                    assert [path.name for path in (snapshots / "snapshots").iterdir()] == [f"{served.id}-files-1.json"]
                    places = pool.statistics().places
                    assert (places["suspended"], pool.evictable().suspended) == (0, 0)
                    free = 0.9
                    await guard.look()
                    assert await node.connect(served.id, timeout_s=60.0) == (served, True)
                    assert await served.sandbox.read("/workspace/notes") == b"so far"
                    assert pool.statistics().places["running"] == 1
                    assert list((snapshots / "snapshots").iterdir()) == []

    asyncio.run(main())
    assert list((snapshots / "layers").iterdir()) == []
    assert processes() == 0


class Service:
    """A `rollmill sandbox serve` that believes to be short of memory while a file is there."""

    def __init__(self, root: Path) -> None:
        self.root, self.short = root, root / "short"
        options = ["--listen", "127.0.0.1:0", "--token-env", "TOKEN_OF_TEST", "--directory", str(root / "records")]
        options += ["--snapshots", str(root / "snapshots")]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVICE, str(self.short), "sandbox", "serve", *options, "--json"],
            env={**os.environ, "TOKEN_OF_TEST": TOKEN},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        lines: list[str] = []
        while not lines or lines[-1].rstrip() != "}":
            lines.append(self.process.stdout.readline())
            assert lines[-1], "the service ended before it was bound"
        self.url = json.loads("".join(lines))["url"]

    def get(self, path: str) -> Any:
        headers = {"authorization": f"Bearer {TOKEN}"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=30) as answer:
            return answer.read().decode()

    def figure(self, name: str) -> float:
        lines = self.get("/metrics").splitlines()
        return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def pause_mode(self, sandbox_id: str) -> str:
        return json.loads(self.get(f"/sandboxes/{sandbox_id}"))["pauseMode"]

    def kept(self) -> list[str]:
        return [path.name for path in (self.root / "snapshots/snapshots").iterdir()]


def end(service: Service, number: int) -> int:
    service.process.send_signal(number)
    service.process.communicate(timeout=60)
    return service.process.returncode


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    if service.process.poll() is None:
        end(service, signal.SIGKILL)


def until(holds: Any, *, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:e2b")
def test_e2bs_users_see_a_pause_of_files_and_programs_that_are_gone(service):
    e2b = pytest.importorskip("e2b", reason="E2B's SDK is not installed; `pip install e2b`")
    options = {"api_key": TOKEN, "api_url": service.url, "sandbox_url": service.url, "request_timeout": 30}
    made = [e2b.Sandbox.create("base", timeout=300, **options) for _ in range(2)]
    for number, one in enumerate(made):
        one.files.write("notes", f"of {number}")
    pid = made[0].commands.run(MARK, background=True, timeout=0).pid
    for one in made:
        assert one.pause() is True
    assert [service.pause_mode(one.sandbox_id) for one in made] == ["full", "full"]
    assert service.figure('rollmill_sandbox_places{budget="suspended"}') == 2
    service.short.touch()
    until(lambda: [service.pause_mode(one.sandbox_id) for one in made] == ["full", "filesystem"])  # nothing is lost
    until(lambda: service.pause_mode(made[0].sandbox_id) == "filesystem")
    assert [one.get_info().state.value for one in made] == ["paused", "paused"]
    until(lambda: service.figure('rollmill_sandbox_guard_evicted_total{kind="suspended"}') == 2)
    assert service.figure('rollmill_sandbox_places{budget="suspended"}') == 0
    assert (processes(), len(service.kept()), list((service.root / "records").glob("*.json"))) == (0, 2, [])
    service.short.unlink()
    until(lambda: service.figure("rollmill_sandbox_admitting") == 1)
    for number, one in enumerate(made):
        again = e2b.Sandbox.connect(one.sandbox_id, timeout=60, **options)
        assert again.files.read("notes") == f"of {number}"
        assert again.commands.list() == []
    with pytest.raises(e2b.NotFoundException, match="when this node ran short of memory or process ids and moved it"):
        made[0].commands.connect(pid).wait()
    assert service.kept() == []
    assert end(service, signal.SIGTERM) == 0


@pytest.mark.slow
def test_what_a_killed_service_moved_to_disk_goes_on_in_the_next_one_and_is_gone_with_its_sandbox(service, tmp_path):
    e2b = pytest.importorskip("e2b", reason="E2B's SDK is not installed; `pip install e2b`")
    options = {"api_key": TOKEN, "api_url": service.url, "sandbox_url": service.url, "request_timeout": 30}
    one = e2b.Sandbox.create("base", timeout=300, **options)
    one.files.write("notes", "of the first")
    assert one.pause() is True
    service.short.touch()
    until(lambda: service.pause_mode(one.sandbox_id) == "filesystem")
    assert end(service, signal.SIGKILL) == -signal.SIGKILL
    (kept,) = service.kept()
    assert kept.startswith(f"{one.sandbox_id}-files-1")
    service.short.unlink()
    second = Service(tmp_path)
    try:
        assert second.kept() == [kept]
        options |= {"api_url": second.url, "sandbox_url": second.url}
        again = e2b.Sandbox.connect(one.sandbox_id, timeout=60, **options)
        assert again.files.read("notes") == "of the first"
        assert second.kept() == []
        assert again.kill() is True
        until(lambda: list((tmp_path / "snapshots/layers").iterdir()) == [])
    finally:
        assert end(second, signal.SIGTERM) == 0
