"""gVisor for real: sandboxes frozen with their processes, restored and forked; and losses that leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gvisor_builders import GvisorRig, gvisor_rig, need_gvisor
from rollmill.errors import ImageError, SandboxDead, SandboxError, SandboxRetryable, SandboxUnsupported
from rollmill.sandboxes import Culprit, DeathReason, DirectoryImage, Lease, Provider, SandboxSpec, SandboxState
from rollmill.sandboxes.disk_records import DiskRecords, ProcessMark, is_alive
from rollmill.sandboxes.guest.cgroups import PARENT_NAME, discover
from rollmill.sandboxes.sweep import kill_outright, sweep
from sandbox_builders import LIMITS, new_id, start, until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LEASE = Lease(owner="test", ttl_s=300.0)
OWNER = Path(__file__).with_name("gvisor_owner.py")
COUNT = ["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i >>/tmp/count; sleep 0.05; done"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gVisor restores processes as root only")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GvisorRig]:
    need_gvisor(tmp_path_factory.mktemp("probe"))
    with gvisor_rig(tmp_path_factory.mktemp("records")) as rig:
        yield rig


async def counted(sandbox: Any) -> int:
    return int((await sandbox.read("/tmp/count")).split()[-1])


async def counting(sandbox: Any) -> Any:
    process = await sandbox.start_process(COUNT)
    while "count" not in {one.name for one in await sandbox.list_dir("/tmp")}:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return process


# -- processes in a snapshot -----------------------------------------------------------------------------------------


@needs_root
def test_what_runs_goes_on_in_the_sandbox_and_in_what_is_restored_from_one_moment(rig):
    async def body(provider: Provider) -> None:
        sandbox: Any = await start(provider)
        process = await counting(sandbox)
        session = await sandbox.open_session()
        await session.run("KEPT=5; cd /tmp")
        call = asyncio.ensure_future(sandbox.exec(["sh", "-c", "sleep 1; echo through"]))
        await sandbox.write("/workspace/file", b"then")
        ref = await sandbox.snapshot(id=new_id(), full=True)
        await sandbox.write("/workspace/file", b"now")
        assert (await call).stdout == b"through\n"
        assert (await session.run("pwd; echo $KEPT")).stdout == b"/tmp\n5\n"
        await process.signal(signal.SIGKILL)
        assert (await process.wait()).killed_by == "owner"
        stopped_at = await counted(sandbox)

        restored: Any = await provider.restore(ref, id=new_id(), lease=LEASE)
        assert await restored.read("/workspace/file") == b"then"
        first = await counted(restored)
        assert first <= stopped_at
        async with asyncio.timeout(30):
            while await counted(restored) <= stopped_at:  # it counts on, from the number of that moment  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        numbers = [int(one) for one in (await restored.read("/tmp/count")).split()]
        assert numbers == list(range(1, len(numbers) + 1))
        assert (await restored.exec(["echo", "new"])).stdout == b"new\n"
        for one in (sandbox, restored):
            await one.kill()
        await provider.delete_snapshots([ref.snapshot_id])

    rig.run(body)


@needs_root
def test_forks_go_on_apart_from_each_other(rig):
    async def body(provider: Provider) -> None:
        sandbox: Any = await start(provider)
        await sandbox.write("/workspace/server.py", SERVER)
        await sandbox.start_process(["python3", "/workspace/server.py"])
        await until_there(sandbox, "/tmp/ready")
        forks = await sandbox.fork([new_id(), new_id()], lease=LEASE, full=True)
        for i, one in enumerate((sandbox, *forks)):
            for _ in range(i + 1):
                await one.exec(["python3", "-c", CLIENT])
            # It had answered nobody when it was forked; each has its own count in memory.
            assert (await one.exec(["python3", "-c", CLIENT])).stdout == str(i + 2).encode()
        assert await provider.snapshots() == ()
        for one in (sandbox, *forks):
            await one.kill()

    rig.run(body)


SERVER = b"""
import socket
listener = socket.create_server(('127.0.0.1', 4000))
open('/tmp/ready', 'w')
n = 0
while True:
    peer, _ = listener.accept()
    n += 1
    peer.sendall(str(n).encode())
    peer.close()
"""
CLIENT = "import socket; print(socket.create_connection(('127.0.0.1', 4000)).recv(9).decode(), end='')"


async def until_there(sandbox: Any, path: str) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                await sandbox.stat(path)
                return
            except SandboxError:
                await asyncio.sleep(0.05)


@needs_root
def test_a_sandbox_can_end_with_its_snapshot_and_come_back(rig):
    async def body(provider: Provider) -> None:
        sandbox: Any = await start(provider)
        await counting(sandbox)
        ref = await sandbox.snapshot(id=new_id(), full=True, end=True)
        assert sandbox.death is not None
        assert sandbox.death.reason is DeathReason.RELEASED
        before = None
        for _ in range(2):
            again: Any = await provider.restore(ref, id=new_id(), lease=LEASE)
            found = (await again.read("/tmp/count")).split()[:1]
            before = before or found
            assert found == before == [b"1"]
            await again.kill()
        await provider.delete_snapshots([ref.snapshot_id])
        with pytest.raises(ImageError, match="no snapshot"):
            await provider.restore(ref, id=new_id(), lease=LEASE)

    rig.run(body)


@needs_root
def test_files_of_an_image_and_of_earlier_snapshots_are_below_what_is_restored(rig, tmp_path):
    for name in ("bin", "lib", "lib64", "usr"):
        (tmp_path / name).symlink_to(f"/usr/{name}") if name != "usr" else (tmp_path / "usr").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "of-the-image").write_text("i", encoding="utf-8")
    tmp_path.chmod(0o755)
    image = DirectoryImage(layers=(str(tmp_path),))

    async def body(provider: Provider) -> None:
        sandbox: Any = await start(provider, SandboxSpec(image=image, limits=LIMITS))
        assert await sandbox.read("/data/of-the-image") == b"i"  # the agent needs nothing of the image
        await sandbox.write("/data/one", b"1")
        await sandbox.snapshot(id=new_id())
        await sandbox.write("/data/two", b"2")
        ref = await sandbox.snapshot(id=new_id(), full=True, end=True)
        assert ref.depth == 2
        again: Any = await provider.restore(ref, id=new_id(), lease=LEASE)
        assert [(await again.read(f"/data/{one}")) for one in ("of-the-image", "one", "two")] == [b"i", b"1", b"2"]
        await again.kill()
        await provider.delete_snapshots([one.snapshot_id for one in await provider.snapshots()])

    rig.run(body)
    assert sorted(one.name for one in (tmp_path / "data").iterdir()) == ["of-the-image"]


@needs_root
def test_an_image_of_memory_for_which_there_is_no_room_is_refused_and_the_sandbox_goes_on(tmp_path):
    async def body(provider: Provider) -> None:
        sandbox: Any = await start(provider)
        with pytest.raises(SandboxRetryable, match="has no room: 0 of 1000000 are held"):
            await sandbox.snapshot(id=new_id(), full=True)
        with pytest.raises(SandboxRetryable):
            await sandbox.fork([new_id()], lease=LEASE, full=True)
        assert sandbox.state is SandboxState.READY
        assert (await sandbox.exec(["true"])).exit_code == 0
        await sandbox.kill()

    need_gvisor(tmp_path / "probe")
    with gvisor_rig(tmp_path / "records", snapshot_bytes=1_000_000) as rig:
        rig.run(body)


@needs_root
def test_when_there_is_no_room_for_the_files_the_processes_go_on_unharmed(tmp_path):
    async def body(provider: Provider) -> None:
        sandbox: Any = await start(provider)
        process = await counting(sandbox)
        before = await counted(sandbox)
        with pytest.raises(SandboxRetryable, match="inodes has no room"):
            await sandbox.snapshot(id=new_id(), full=True)
        async with asyncio.timeout(30):
            while await counted(sandbox) <= before:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert sandbox.state is SandboxState.BUSY
        await process.signal(signal.SIGKILL)
        assert (await process.wait()).killed_by == "owner"
        await sandbox.kill()

    need_gvisor(tmp_path / "probe")
    with gvisor_rig(tmp_path / "records", snapshot_inodes=10) as rig:
        rig.run(body)


@pytest.mark.skipif(os.geteuid() == 0, reason="as root the runtime can restore processes")
def test_without_root_a_snapshot_with_processes_is_refused_and_one_of_files_is_not(rig):
    async def body(provider: Provider) -> None:
        sandbox: Any = await start(provider)
        with pytest.raises(SandboxUnsupported) as raised:
            await sandbox.snapshot(id=new_id(), full=True)
        assert raised.value.capability == "full_snapshot"
        ref = await sandbox.snapshot(id=new_id())
        await provider.delete_snapshots([ref.snapshot_id])
        await sandbox.kill()

    rig.run(body)


def test_what_runs_stands_still_while_its_sandbox_is_paused(rig):
    async def body(provider: Provider) -> None:
        sandbox: Any = await start(provider)
        await counting(sandbox)
        usage = await sandbox.usage()
        assert usage.processes is not None
        assert 3 <= usage.processes <= 6  # those inside, not the threads of the runtime
        await sandbox.pause()
        assert (await sandbox.usage()).processes is None
        await asyncio.sleep(0.3)
        await sandbox.resume()
        numbers = await counted(sandbox)
        async with asyncio.timeout(30):
            while await counted(sandbox) <= numbers:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await sandbox.kill()

    rig.run(body)


def test_a_pause_that_is_cancelled_is_carried_through_and_calls_meanwhile_are_refused(rig):
    async def body(provider: Provider) -> None:
        sandbox: Any = await start(provider)
        pausing = asyncio.ensure_future(sandbox.pause())
        await until(lambda: sandbox.state is SandboxState.PAUSING)
        pausing.cancel()
        for call in (lambda: sandbox.exec(["true"]), sandbox.usage):
            with pytest.raises(SandboxError, match="is being paused"):
                await call()
        await until(lambda: sandbox.state is SandboxState.PAUSED)
        resuming = asyncio.ensure_future(sandbox.resume())
        await until(lambda: sandbox.state is SandboxState.PAUSING)
        resuming.cancel()
        await until(lambda: sandbox.state is SandboxState.READY)
        assert (await sandbox.exec(["true"])).exit_code == 0
        await sandbox.kill()

    rig.run(body)


# -- losses ----------------------------------------------------------------------------------------------------------


class Owner:
    """A process with sandboxes, to be killed."""

    def __init__(self, directory: Path, name: str, *, count: int) -> None:
        command = [sys.executable, str(OWNER), str(directory), name, str(count)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        self.directory, self.pid = directory, self.process.pid

    def started(self, count: int) -> list[str]:
        assert self.process.stdout is not None
        return [self.process.stdout.readline().decode().strip() for _ in range(count)]

    def marks(self) -> list[ProcessMark]:
        if not self.directory.exists():
            return []
        records = DiskRecords(self.directory).read_all()
        return [mark for one in records for mark in (one.helper, one.first_process) if mark is not None]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


def eventually(holds: Any, *, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.02)


def family(pid: int) -> list[psutil.Process]:
    """Return what a process has started, the runtime and its helpers among that."""
    return psutil.Process(pid).children(recursive=True)


def nothing_left(owner: Owner, marks: list[ProcessMark], helpers: list[psutil.Process]) -> None:
    assert [mark for mark in marks if is_alive(mark)] == []
    eventually(lambda: not any(map(psutil.Process.is_running, helpers)), limit_s=5.0)
    groups = [path for one in discover() for path in Path(one.group, PARENT_NAME).glob(f"{owner.pid}-*")]
    assert groups == []
    assert list(owner.directory.iterdir()) == []


@pytest.mark.parametrize("victims", ["owner", "both"])
def test_a_killed_owner_leaves_nothing_after_one_sweep(tmp_path, victims):
    need_gvisor(tmp_path / "probe")
    owner = Owner(tmp_path / "records", "killed", count=2)
    assert owner.started(2) == ["killed-0", "killed-1"]
    marks = owner.marks()
    assert len(set(marks)) == 3  # one zygote, two first processes
    helpers = family(owner.pid)
    assert len(helpers) >= 3 + 2 * 3  # of each runtime the command, its kernel and its server of files
    if victims == "both":
        os.kill(marks[0].pid, signal.SIGSTOP)  # the zygote must not tidy up
    owner.kill()
    if victims == "both":
        os.kill(marks[0].pid, signal.SIGKILL)
    else:
        eventually(lambda: not any(map(is_alive, marks)))
    assert sweep(DiskRecords(owner.directory)).left == ()
    nothing_left(owner, marks, helpers)


@pytest.mark.timeout(900)
def test_after_a_kill_at_a_random_moment_one_sweep_leaves_nothing(tmp_path, request):
    need_gvisor(tmp_path / "probe")
    draw = random.Random(7)
    for turn in range(request.config.getoption("--sandbox-rounds") // 2):
        owner = Owner(tmp_path / str(turn), f"r{turn}", count=20)
        time.sleep(draw.uniform(0.3, 3.0))
        children, helpers = psutil.Process(owner.pid).children(), family(owner.pid)
        if children and draw.random() < 0.5:
            children[0].kill()
        marks = owner.marks()
        owner.kill()
        records = DiskRecords(owner.directory)
        assert sweep(records).left == (), f"round {turn}"
        eventually(lambda marks=marks: not any(map(is_alive, marks)))
        sweep(records)  # what a zygote was about to start when its owner was killed
        nothing_left(owner, marks, helpers)


def test_a_lost_zygote_is_infrastructures_fault_and_the_next_sandbox_gets_a_new_one(tmp_path):
    async def body(provider: Any) -> None:
        sandbox = await start(provider)
        call = asyncio.ensure_future(sandbox.exec(["sleep", "600"]))
        await until(lambda: sandbox.state is SandboxState.BUSY)
        os.kill(provider.records.read(sandbox.id).helper.pid, signal.SIGKILL)
        with pytest.raises(SandboxDead, match="the zygote is gone") as raised:
            await call
        assert raised.value.fault == "infrastructure"
        again = await start(provider)
        assert (await again.exec(["true"])).exit_code == 0
        await again.kill()
        await until(lambda: provider.records.read_all() == ())

    need_gvisor(tmp_path / "probe")
    with gvisor_rig(tmp_path / "records") as rig:
        rig.run(body)


def test_a_runtime_that_is_killed_is_told_apart_from_an_operators_kill(rig):
    async def body(provider: Any) -> list[tuple[DeathReason, Culprit]]:
        found = []
        for noted in (False, True):
            sandbox = await start(provider)
            record = provider.records.read(sandbox.id)
            if noted:
                provider.records.note_kill(sandbox.id)
            kill_outright(record)
            await until(lambda sandbox=sandbox: sandbox.death is not None)
            assert sandbox.death is not None
            found.append((sandbox.death.reason, sandbox.death.culprit))
        return found

    assert rig.run(body) == [
        (DeathReason.PROVIDER_LOST, Culprit.INFRASTRUCTURE),
        (DeathReason.KILLED_BY_OPERATOR, Culprit.INFRASTRUCTURE),
    ]


def test_closing_a_provider_ends_what_lives_and_leaves_nothing(tmp_path):
    async def body(provider: Any) -> list[ProcessMark]:
        for _ in range(2):
            sandbox = await start(provider)
            await sandbox.start_process(["sleep", "600"])
        return [one.first_process for one in provider.records.read_all()]

    need_gvisor(tmp_path / "probe")
    before = set(family(os.getpid()))
    with gvisor_rig(tmp_path / "records") as rig:
        marks = rig.run(body)
        helpers = set(family(os.getpid())) - before
    assert len(marks) == 2
    assert len(helpers) >= 1 + 2 * 3
    assert not any(map(is_alive, marks))
    assert not any(map(psutil.Process.is_running, helpers))
    assert list((tmp_path / "records").iterdir()) == []


def test_a_runtime_that_cannot_start_says_why_and_leaves_nothing(tmp_path):
    need_gvisor(tmp_path / "probe")
    broken = tmp_path / "runsc"
    broken.write_text("#!/bin/sh\necho this is no runtime >&2; exit 3\n", encoding="utf-8")
    broken.chmod(0o755)

    async def body(provider: Provider) -> None:
        with pytest.raises(SandboxError, match=r"runsc ended with .*"):
            await start(provider)
        assert [one for one in await provider.list() if one.death is None] == []

    with gvisor_rig(tmp_path / "records", runsc=broken) as rig:
        rig.run(body)
    assert list((tmp_path / "records").iterdir()) == []


def test_the_command_line_runs_programs_under_gvisor_and_says_what_holds(tmp_path):
    need_gvisor(tmp_path / "probe")

    def command(*words: str) -> subprocess.CompletedProcess[bytes]:
        argv = [sys.executable, "-m", "rollmill.cli", "sandbox", *words]
        return subprocess.run(argv, capture_output=True, timeout=90, stdin=subprocess.DEVNULL, check=False)

    ran = command("run", "--backend", "gvisor", "--directory", str(tmp_path / "r"), "sh", "-c", "uname -r; exit 4")
    assert (ran.returncode, ran.stdout) == (4, b"4.4.0\n"), ran.stderr
    found = command("doctor", "--backend", "gvisor", "--directory", str(tmp_path / "r"), "--json")
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    assert (document["backend"], document["works"], document["isolation"]) == ("gvisor", True, "own_kernel")
    assert list((tmp_path / "r").iterdir()) == []


def test_the_service_serves_gvisors_sandboxes_too(tmp_path):
    need_gvisor(tmp_path / "probe")
    e2b = pytest.importorskip("e2b", reason="E2B's SDK is not installed; `pip install e2b`")
    from test_sandbox_service import READY, serving, until_ready

    with serving(tmp_path, "--backend", "gvisor", templates_text=READY) as service:
        until_ready(service, 2)
        sandbox = service.create()
        assert sandbox.commands.run("uname -r").stdout == "4.4.0\n"
        sandbox.files.write("f", "kept")
        assert sandbox.files.read("f") == "kept"
        with pytest.raises(e2b.SandboxException):
            sandbox.files.write("g", "x", metadata={"a": "b"})
        sandbox.kill()
        assert service.end() == (0, "")
        assert list(service.records.glob("*.json")) == []
