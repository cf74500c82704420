"""SIGKILL at random moments, with and without a named image: after one sweep nothing is left.

Killed are the owner, its zygote and both; the service; an owner with leases; and the zygote alone, whose owner goes on.
Nothing: no process, mount, group, directory, row or descriptor.

`pytest -m slow tests/integration/test_sandbox_kill_rounds.py --sandbox-rounds 100` kills a hundred times in each test.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from killed_owners import (
    Killable,
    Owner,
    Stores,
    eventually,
    groups_of,
    in_play,
    marks_of,
    mounts,
    next_start,
    nothing_left,
    sleepers,
)
from sandbox_owner import IMAGE, PROGRAM, images_of, spec_of

from rollmill.clock import SystemClock
from rollmill.errors import RollmillError, SandboxDead
from rollmill.sandboxes import Lease, NamespaceProvider, NamespaceSettings, Provider
from rollmill.sandboxes.disk_records import ProcessMark, is_alive, mark_of
from rollmill.sandboxes.leases import Keeper, KeeperSettings, LeaseTable, Phase
from sandbox_builders import new_id, real_rig, start, until, why_no_namespaces

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ENOUGH = 60
"""From so many rounds on each form of images must have been in play when something was killed."""


AT_WORK = 3


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--sandbox-rounds")


@pytest.fixture(scope="module", autouse=True)
def works(tmp_path_factory: pytest.TempPathFactory) -> None:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    stores = Stores(tmp_path_factory.mktemp("stores"))
    yield stores
    stores.unmount()


def kill_some(owner: Owner | Service, victims: str) -> list[ProcessMark]:
    """Kill the owner, its zygote or both, and the owner in any case; return who must be gone soon."""
    children = psutil.Process(owner.pid).children()
    zygotes = [mark for child in children if (mark := mark_of(child.pid)) is not None]
    if victims != "owner":
        for child in children:
            child.kill()
    marks = [*zygotes, *marks_of(owner)]
    if victims == "zygote":
        time.sleep(0.2)
    owner.kill()
    return marks


def cleared(owner: Killable, marks: list[ProcessMark], *, store: Path | None) -> None:
    """Wait until a zygote that lives has seen the end of its owner; then let the next provider start, and look."""
    eventually(lambda: not any(map(is_alive, marks)))
    asyncio.run(next_start(owner.directory, store))
    nothing_left(owner, marks)


def all_were_in_play(seen: Counter[str], stores: Stores, *, rounds: int) -> None:
    if rounds >= ENOUGH:
        assert [form for form in stores.paths if form != "host" and not seen[form]] == [], seen


# -- the owner, its zygote, or both -----------------------------------------------------------------------------------


@pytest.mark.timeout(1800)
def test_after_a_kill_of_an_owner_at_a_random_moment_one_sweep_leaves_nothing(tmp_path, rounds, stores):
    draw = random.Random(5)
    before, seen = mounts(), Counter[str]()
    for turn in range(rounds):
        form = sorted(stores.paths)[turn % len(stores.paths)]
        owner = Owner(tmp_path / str(turn), f"r{turn}", count=50, store=stores.paths[form])
        if draw.random() < 0.3:  # while it starts
            time.sleep(draw.uniform(0.1, 1.0))
        else:
            owner.started(draw.randrange(1, 5))
            time.sleep(draw.uniform(0.0, 0.1))
        seen[form] += in_play(marks_of(owner))
        marks = kill_some(owner, draw.choice(["owner", "zygote", "both"]))
        cleared(owner, marks, store=stores.paths[form])
        assert mounts(below=tmp_path.parent) - before == {}, f"round {turn}, {form}"
    all_were_in_play(seen, stores, rounds=rounds)


# -- the service ------------------------------------------------------------------------------------------------------


class Service:
    """`rollmill sandbox serve` with callers who start, use, pause and end sandboxes as fast as they can."""

    def __init__(self, directory: Path, *, store: Path | None) -> None:
        directory.mkdir()
        templates = directory / "templates.toml"
        image = "" if store is None else f'image = "{IMAGE}"\n'
        text = f"[templates.base]\nready = 3\ndisk_mib = 16\nmemory_mib = 64\n{image}"
        templates.write_text(text, encoding="ascii")
        self.directory = directory / "records"
        command = [sys.executable, "-m", "rollmill.cli", "sandbox", "serve", "--listen", "127.0.0.1:0", "--json"]
        options = ["--token-env", "TOKEN", "--templates", str(templates), "--directory", str(self.directory)]
        options += [] if store is None else ["--store", str(store)]
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


@pytest.mark.timeout(1800)
def test_after_a_kill_of_the_service_at_a_random_moment_one_sweep_leaves_nothing(tmp_path, rounds, stores):
    draw = random.Random(6)
    before, seen = mounts(), Counter[str]()
    calls = 0
    for turn in range(rounds):
        form = sorted(stores.paths)[turn % len(stores.paths)]
        service = Service(tmp_path / str(turn), store=stores.paths[form])
        if draw.random() < 0.8:
            service.call(turn)
            time.sleep(draw.uniform(0.0, 0.8))
        else:  # while it starts
            time.sleep(draw.uniform(0.1, 1.0))
        seen[form] += in_play(marks_of(service))
        marks = kill_some(service, draw.choice(["owner", "zygote", "both"]))
        calls += service.calls
        cleared(service, marks, store=stores.paths[form])
        assert mounts(below=tmp_path.parent) - before == {}, f"round {turn}, {form}"
    all_were_in_play(seen, stores, rounds=rounds)
    assert calls > 10 * rounds


# -- an owner with leases ---------------------------------------------------------------------------------------------


@pytest.mark.timeout(1800)
def test_after_a_kill_of_an_owner_with_leases_one_sweep_of_the_next_leaves_no_row_without_a_sandbox(
    tmp_path, rounds, stores
):
    """Rows are written before sandboxes are made, and some sandboxes are stored: whatever is cut in half is cleared."""
    draw = random.Random(7)
    before, seen = mounts(), Counter[str]()
    kept = 0
    for turn in range(rounds):
        form = sorted(stores.paths)[turn % len(stores.paths)]
        root = tmp_path / str(turn)
        root.mkdir()
        owner = Owner(root / "records", "leases", count=turn, store=stores.paths[form])
        time.sleep(draw.uniform(0.3, 1.5))
        seen[form] += in_play(marks_of(owner))
        marks = kill_some(owner, draw.choice(["owner", "both"]))
        eventually(lambda marks=marks: not any(map(is_alive, marks)))
        kept += asyncio.run(next_owner(root, stores.paths[form], turn=turn))
        nothing_left(owner, marks)
        assert mounts(below=tmp_path.parent) - before == {}, f"round {turn}, {form}"
    all_were_in_play(seen, stores, rounds=rounds)
    assert kept > rounds // 10


class AfterTheGrace(SystemClock):
    """When no creation of the owner before can go on any more."""

    def wall_s(self) -> float:
        return super().wall_s() + KeeperSettings(name="any", provider="any").grace_s


async def next_owner(root: Path, store: Path | None, *, turn: int) -> int:
    """Sweep once, with a provider that has swept at its start; return how many rollouts could go on."""
    settings = NamespaceSettings(
        directory=root / "records", snapshot_directory=root / "snapshots", images=images_of(store)
    )
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


# -- the zygote alone -------------------------------------------------------------------------------------------------


async def use(
    provider: NamespaceProvider, store: Path | None, *, seed: str, stop: asyncio.Event
) -> RollmillError | None:
    """Start, use, keep, fork and end sandboxes until a call fails, or until told to stop; return what failed."""
    draw = random.Random(seed)
    lease = Lease(owner="rounds", ttl_s=600.0)
    try:
        while not stop.is_set():
            sandbox = await start(provider, spec_of(store))
            await sandbox.start_process(PROGRAM)
            if draw.random() < 0.5:
                await sandbox.snapshot(id=f"{sandbox.id}-kept", stop_processes=True)
                await sandbox.fork([new_id()], lease=lease)
            if draw.random() < 0.5:
                await sandbox.kill()
    except RollmillError as error:
        return error
    return None


async def lose_a_zygote(provider: Any, store: Path | None, draw: random.Random) -> tuple[bool, int]:
    """Kill the zygote under an owner at work; return whether an image was in play, and how many calls failed.

    A call that ends a sandbox does not fail when the zygote has ended it first.
    """
    stop = asyncio.Event()
    working = [asyncio.ensure_future(use(provider, store, seed=f"{draw.random()}", stop=stop)) for _ in range(AT_WORK)]
    await asyncio.sleep(draw.uniform(0.0, 0.25))
    (zygote,) = psutil.Process().children()
    marks = [mark for mark in (mark_of(zygote.pid), *first_processes(provider)) if mark is not None]
    played = in_play(marks)
    zygote.kill()
    stop.set()
    errors = [one for one in await asyncio.gather(*working) if one is not None]
    assert {one.fault for one in errors if isinstance(one, SandboxDead)} <= {"infrastructure"}
    # No sweep: the owner lives, and clears up what its zygote left. What it has started since is ended by its own call.
    await provider.kill([one.id for one in provider.alive()])
    await provider.delete_snapshots([one.snapshot_id for one in await provider.snapshots()])
    await until(lambda: provider.records.read_all() == () and not any(map(is_alive, marks)))
    return played, len(errors)


def first_processes(provider: Any) -> list[ProcessMark]:
    return [one.first_process for one in provider.records.read_all() if one.first_process is not None]


async def works_again(provider: Provider, store: Path | None) -> None:
    sandbox = await start(provider, spec_of(store))
    assert (await sandbox.exec(["true"])).exit_code == 0
    await sandbox.kill()


@pytest.mark.timeout(1800)
def test_after_a_kill_of_the_zygote_alone_at_a_random_moment_its_owner_leaves_nothing_and_goes_on(
    tmp_path, rounds, stores
):
    draw = random.Random(8)
    before, seen, failed = mounts(), Counter[str](), 0
    for index, (form, store) in enumerate(stores.paths.items()):
        with real_rig(tmp_path / form, images=images_of(store)) as rig:
            rig.run(lambda provider, store=store: works_again(provider, store))
            descriptors = len(os.listdir("/proc/self/fd"))
            for turn in range(index, rounds, len(stores.paths)):
                where = f"round {turn}, {form}"
                played, errors = rig.run(lambda provider, store=store: lose_a_zygote(provider, store, draw))
                seen[form] += played
                failed += errors
                eventually(lambda: groups_of(os.getpid()) == [])
                eventually(lambda: mounts(below=tmp_path.parent) - before == {})  # a layer is unmounted beside the loop
                assert sleepers() == [], where
                rig.run(lambda provider, store=store: works_again(provider, store))
                eventually(lambda: mounts(below=tmp_path.parent) - before == {})
                assert len(os.listdir("/proc/self/fd")) <= descriptors, where
            assert list(rig.directory.iterdir()) == []
    all_were_in_play(seen, stores, rounds=rounds)
    assert failed > rounds
