"""SIGKILL of the owner, the zygote or both: after one sweep nothing is left of their sandboxes.

Here the kills come at chosen moments; `test_sandbox_kill_rounds.py` has those at random ones.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killed_owners import Owner, Stores, eventually, groups_of, in_play, marks_of, mounts, next_start, nothing_left

from rollmill.errors import SandboxDead, SandboxError
from rollmill.sandboxes import Culprit, DeathReason, SandboxState
from rollmill.sandboxes.disk_records import DiskRecords, ProcessMark, is_alive
from rollmill.sandboxes.sweep import kill_outright, sweep
from sandbox_builders import real_rig, start, until, why_no_namespaces

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def works(tmp_path_factory: pytest.TempPathFactory) -> None:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    stores = Stores(tmp_path_factory.mktemp("stores"))
    yield stores
    stores.unmount()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path / "records", "killed", count=2)
    yield owner
    if owner.process.poll() is None:
        owner.kill()
    sweep(DiskRecords(tmp_path / "records"))


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


def orphans_ended(records: Path, store: Path) -> None:
    """Do what the command line does."""
    words = ["sandbox", "kill", "--orphans", "--directory", str(records), "--store", str(store)]
    done = subprocess.run([sys.executable, "-m", "rollmill.cli", *words], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("form", ["tree", "erofs"])
@pytest.mark.parametrize("swept", ["by the next provider", "by the command line"])
def test_a_sweep_unmounts_the_layers_of_a_killed_owners_image(tmp_path, stores, form, swept):
    if form in stores.missing:
        pytest.skip(f"no layers of the form {form} here: {stores.missing[form]}")
    before = mounts()
    owner = Owner(tmp_path / "records", "killed", count=1, store=stores.paths[form])
    owner.started(1)
    marks = marks_of(owner)
    assert in_play(marks)
    assert len(mounts() - before) == (stores.layers if form == "erofs" else 0)
    owner.kill()
    eventually(lambda: not any(map(is_alive, marks)))
    if swept == "by the next provider":
        asyncio.run(next_start(owner.directory, stores.paths[form]))
    else:
        orphans_ended(owner.directory, stores.paths[form])
    nothing_left(owner, marks)
    assert mounts() - before == {}


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
