"""SIGKILL of the owner, the zygote or both, at any moment: after one sweep nothing is left of their sandboxes.

`pytest -m slow tests/integration/test_sandbox_crashes.py --sandbox-rounds 100` kills a hundred times in each test.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollmill.clock import SystemClock
from rollmill.errors import SandboxDead, SandboxError
from rollmill.sandboxes import Culprit, DeathReason, NamespaceProvider, NamespaceSettings, SandboxState
from rollmill.sandboxes.disk_records import DiskRecords, ProcessMark, is_alive, mark_of
from rollmill.sandboxes.guest.cgroups import PARENT_NAME, discover
from rollmill.sandboxes.leases import Keeper, KeeperSettings, LeaseTable, Phase
from rollmill.sandboxes.sweep import kill_outright, sweep
from sandbox_builders import real_rig, start, until, why_no_namespaces

pytestmark = pytest.mark.integration

OWNER = Path(__file__).with_name("sandbox_owner.py")


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--sandbox-rounds")


@pytest.fixture(scope="module", autouse=True)
def works(tmp_path_factory: pytest.TempPathFactory) -> None:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")


class Owner:
    """A process with sandboxes, to be killed; `leases` as its name: with rows in a table and stored rollouts."""

    def __init__(self, directory: Path, name: str, *, count: int) -> None:
        command = [sys.executable, str(OWNER), str(directory), name, str(count)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        self.directory = directory
        self.pid = self.process.pid

    def started(self, count: int) -> list[str]:
        assert self.process.stdout is not None
        return [self.process.stdout.readline().decode().strip() for _ in range(count)]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path / "records", "killed", count=2)
    yield owner
    if owner.process.poll() is None:
        owner.kill()
    sweep(DiskRecords(tmp_path / "records"))


def groups_of(pid: int) -> list[Path]:
    return [path for one in discover() for path in Path(one.group, PARENT_NAME).glob(f"{pid}-*")]


def eventually(holds, *, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.01)


def nothing_left(owner: Owner | Service, marks: list[ProcessMark]) -> None:
    assert [mark for mark in marks if is_alive(mark)] == []
    assert groups_of(owner.pid) == []
    assert list(owner.directory.iterdir()) == []
    sleepers = [one.pid for one in psutil.process_iter(["cmdline"]) if "987654" in (one.info["cmdline"] or [])]
    assert sleepers == []


def marks_of(owner: Owner | Service) -> list[ProcessMark]:
    records = DiskRecords(owner.directory).read_all()
    return [mark for one in records for mark in (one.helper, one.first_process) if mark is not None]


def test_a_killed_owner_takes_its_sandboxes_with_it_without_any_sweep(owner):
    assert owner.started(2) == ["killed-0", "killed-1"]
    marks = marks_of(owner)
    assert len(set(marks)) == 3  # one zygote, two first processes
    owner.kill()
    eventually(lambda: not any(map(is_alive, marks)))
    nothing_left(owner, marks)


def test_a_sandbox_that_ended_while_its_owner_was_dying_leaves_no_record(owner):
    owner.started(2)
    marks = marks_of(owner)
    os.kill(owner.pid, signal.SIGSTOP)  # it will not hear that a sandbox has ended
    os.kill(marks[-1].pid, signal.SIGKILL)
    eventually(lambda: not is_alive(marks[-1]))
    owner.kill()
    eventually(lambda: not any(map(is_alive, marks)))
    nothing_left(owner, marks)


def test_an_owner_and_its_zygote_killed_together_leave_what_one_sweep_removes(owner):
    owner.started(2)
    marks = marks_of(owner)
    os.kill(marks[0].pid, signal.SIGSTOP)  # the zygote must not tidy up
    owner.kill()
    os.kill(marks[0].pid, signal.SIGKILL)
    report = sweep(DiskRecords(owner.directory))
    assert (sorted(report.removed), report.left) == (["killed-0", "killed-1"], ())
    nothing_left(owner, marks)


def test_a_sweep_removes_what_a_zygote_that_hangs_would_keep(owner):
    owner.started(2)
    marks = marks_of(owner)
    os.kill(marks[0].pid, signal.SIGSTOP)
    owner.kill()
    sweep(DiskRecords(owner.directory))
    nothing_left(owner, marks)


def test_a_sweep_leaves_the_sandboxes_of_owners_that_live(owner):
    owner.started(2)
    marks = marks_of(owner)
    assert sweep(DiskRecords(owner.directory)).removed == ()
    assert all(map(is_alive, marks))


def test_a_lost_zygote_is_infrastructures_fault_and_the_next_sandbox_gets_a_new_one(tmp_path):
    async def body(provider: Any) -> None:
        sandbox = await start(provider)
        call = asyncio.ensure_future(sandbox.exec(["sleep", "600"]))
        await until(lambda: sandbox.state is SandboxState.BUSY)
        record = provider.records.read(sandbox.id)
        os.kill(record.helper.pid, signal.SIGKILL)
        with pytest.raises(SandboxDead, match="the zygote is gone") as raised:
            await call
        assert raised.value.fault == "infrastructure"
        assert sandbox.death is not None
        assert (sandbox.state, sandbox.death.reason) == (SandboxState.LOST, DeathReason.PROVIDER_LOST)
        again = await start(provider)
        assert (await again.exec(["true"])).exit_code == 0
        await again.kill()
        await until(lambda: provider.records.read_all() == ())

    with real_rig(tmp_path / "records") as rig:
        rig.run(body)
    assert groups_of(os.getpid()) == []


def test_a_first_process_killed_from_outside_is_told_apart_from_an_operators_kill(tmp_path):
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

    with real_rig(tmp_path / "records") as rig:
        assert rig.run(body) == [
            (DeathReason.PROVIDER_LOST, Culprit.INFRASTRUCTURE),
            (DeathReason.KILLED_BY_OPERATOR, Culprit.INFRASTRUCTURE),
        ]
        assert list((tmp_path / "records").iterdir()) == []


def test_closing_a_provider_ends_what_lives_and_leaves_nothing(tmp_path):
    async def body(provider: Any) -> list[ProcessMark]:
        for _ in range(3):
            sandbox = await start(provider)
            await sandbox.start_process(["sleep", "600"])
        return [one.first_process for one in provider.records.read_all()]

    with real_rig(tmp_path / "records") as rig:
        marks = rig.run(body)
    assert len(marks) == 3
    assert not any(map(is_alive, marks))
    assert list((tmp_path / "records").iterdir()) == []
    assert groups_of(os.getpid()) == []


def test_a_record_that_cannot_be_removed_keeps_nobody_waiting(tmp_path, caplog):
    async def body(provider: Any) -> None:
        sandbox = await start(provider)
        remove, provider.records.remove = provider.records.remove, _fail
        try:
            assert (await sandbox.kill()).reason is DeathReason.RELEASED
        finally:
            provider.records.remove = remove
        assert [one.sandbox_id for one in provider.records.read_all()] == [sandbox.id]
        remove(sandbox.id)

    with real_rig(tmp_path / "records") as rig:
        rig.run(body)
    assert "the disk is gone" in caplog.text


def test_without_a_record_nothing_is_started(tmp_path):
    async def body(provider: Any) -> None:
        provider.records.directory.rmdir()
        with pytest.raises(SandboxError, match="nothing is started that could not be cleaned up"):
            await start(provider)
        assert await provider.list() == ()
        provider.records.directory.mkdir()

    with real_rig(tmp_path / "records") as rig:
        rig.run(body)


def _fail(_: str) -> None:
    raise OSError("the disk is gone")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_after_a_kill_at_a_random_moment_one_sweep_leaves_nothing(tmp_path, rounds):
    draw = random.Random(5)
    for turn in range(rounds):
        owner = Owner(tmp_path / str(turn), f"r{turn}", count=50)
        # From before the zygote runs until some sandboxes work.
        time.sleep(draw.uniform(0.1, 1.2))
        marks = kill_some(owner, draw.choice(["owner", "zygote", "both"]))
        swept_once(owner.directory, marks, turn=turn)
        nothing_left(owner, marks)


def kill_some(owner: Owner | Service, victims: str) -> list[ProcessMark]:
    """Kill the owner, its zygote or both, and the owner in any case; return who must be gone soon."""
    children = psutil.Process(owner.pid).children()
    zygotes = [mark for child in children if (mark := mark_of(child.pid)) is not None]
    if victims != "owner":
        for child in children:
            child.kill()
    marks = [*zygotes, *(marks_of(owner) if owner.directory.exists() else [])]
    if victims == "zygote":
        time.sleep(0.2)
    owner.kill()
    return marks


def swept_once(directory: Path, marks: list[ProcessMark], *, turn: int) -> None:
    """Wait until a zygote that lives has seen the end of its owner, then sweep, once."""
    eventually(lambda: not any(map(is_alive, marks)))
    assert sweep(DiskRecords(directory)).left == (), f"round {turn}"


class Service:
    """`rollmill sandbox serve` with callers who start, use, pause and end sandboxes as fast as they can."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        templates = directory / "templates.toml"
        templates.write_text("[templates.base]\nready = 3\ndisk_mib = 16\nmemory_mib = 64\n", encoding="ascii")
        self.directory = directory / "records"
        command = [sys.executable, "-m", "rollmill.cli", "sandbox", "serve", "--listen", "127.0.0.1:0", "--json"]
        options = ["--token-env", "TOKEN", "--templates", str(templates), "--directory", str(self.directory)]
        self.process = subprocess.Popen(
            [*command, *options], env={**os.environ, "TOKEN": TOKEN}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.pid = self.process.pid
        self.calls = 0
        self._callers: list[threading.Thread] = []

    def call(self, seed: int) -> None:
        """Begin to call, from three threads, once it says where it is."""
        assert self.process.stdout is not None
        lines: list[bytes] = []
        while not lines or lines[-1].rstrip() != b"}":
            lines.append(self.process.stdout.readline())
            assert lines[-1]
        url = json.loads(b"".join(lines))["url"]
        for number in range(3):
            thread = threading.Thread(target=self._call, args=(url, random.Random(f"{seed}/{number}")), daemon=True)
            thread.start()
            self._callers.append(thread)

    def _call(self, url: str, draw: random.Random) -> None:
        def ask(method: str, path: str, body: object = None) -> dict[str, Any]:
            data = None if body is None else json.dumps(body).encode()
            headers = {"X-API-Key": TOKEN, "Content-Type": "application/json"}
            request = urllib.request.Request(url + path, data=data, headers=headers, method=method)
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read()
            self.calls += 1
            return json.loads(text) if text else {}

        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):  # until it is killed
            while True:
                made = [
                    ask("POST", "/sandboxes", {"templateID": "base", "timeout": 60})
                    for _ in range(draw.randrange(1, 4))
                ]
                for one in made:
                    with contextlib.suppress(urllib.error.HTTPError):  # no pauses here, or it was pressed for room
                        if draw.random() < 0.4:
                            ask("POST", f"/sandboxes/{one['sandboxID']}/pause")
                    if draw.random() < 0.7:
                        ask("DELETE", f"/sandboxes/{one['sandboxID']}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)
        for thread in self._callers:
            thread.join(40)
        assert self.process.stdout is not None
        self.process.stdout.close()


TOKEN = "sesame-open-sesame"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_after_a_kill_of_the_service_at_a_random_moment_one_sweep_leaves_nothing(tmp_path, rounds):
    draw = random.Random(6)
    calls = 0
    for turn in range(rounds):
        service = Service(tmp_path / str(turn))
        if draw.random() < 0.8:
            service.call(turn)
            time.sleep(draw.uniform(0.0, 0.8))
        else:  # while it starts
            time.sleep(draw.uniform(0.1, 1.0))
        marks = kill_some(service, draw.choice(["owner", "zygote", "both"]))
        calls += service.calls
        swept_once(service.directory, marks, turn=turn)
        nothing_left(service, marks)
    assert calls > 10 * rounds


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_after_a_kill_of_an_owner_with_leases_one_sweep_of_the_next_leaves_no_row_without_a_sandbox(tmp_path, rounds):
    """Rows are written before sandboxes are made, and some sandboxes are stored: whatever is cut in half is cleared."""
    draw = random.Random(7)
    kept = 0
    for turn in range(rounds):
        root = tmp_path / str(turn)
        root.mkdir()
        owner = Owner(root / "records", "leases", count=turn)
        time.sleep(draw.uniform(0.3, 1.5))
        marks = kill_some(owner, draw.choice(["owner", "both"]))
        eventually(lambda marks=marks: not any(map(is_alive, marks)))
        kept += asyncio.run(next_owner(root, turn=turn))
        nothing_left(owner, marks)
    assert kept > rounds // 10


class AfterTheGrace(SystemClock):
    """When no creation of the owner before can go on any more."""

    def wall_s(self) -> float:
        return super().wall_s() + KeeperSettings(name="any", provider="any").grace_s


async def next_owner(root: Path, *, turn: int) -> int:
    """Sweep once, with a provider that has swept at its start; return how many rollouts could go on."""
    settings = NamespaceSettings(directory=root / "records", snapshot_directory=root / "snapshots")
    table = LeaseTable(root / "leases.sqlite")
    kept = 0
    async with NamespaceProvider(settings) as provider:
        settled = KeeperSettings(name="rounds", provider="here")
        keeper = Keeper(table, provider, settings=settled, owner="next", clock=AfterTheGrace())
        await keeper.sweep()
        rows = table.rows()
        stored = {one.snapshot_id for one in await provider.snapshots()}
        assert {one.phase for one in rows} <= {Phase.SUSPENDED}, f"round {turn}: {rows}"
        for row in rows:
            held = await keeper.resume(row.rollout_id)
            assert await held.sandbox.read("/root/notes") == row.rollout_id.encode()
            await keeper.release(held.claim)
            kept += 1
        await provider.delete_snapshots(sorted(stored))
        assert (table.rows(), await provider.snapshots()) == ((), ()), f"round {turn}"
    table.close()
    return kept
