"""The watchdog over real namespace sandboxes: each of five bombs is held by its cap and ended with evidence.

Small limits and short intervals: what takes seconds in production takes tenths here. Beside each bomb another sandbox
goes on working.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmill.errors import SandboxDead
from rollmill.sandboxes import Culprit, DeathReason, NamespaceProvider, NamespaceSettings, Provider, Sandbox
from rollmill.sandboxes.backends.namespaces.oversight import NamespaceOverseen
from rollmill.sandboxes.tally import SandboxTally
from rollmill.sandboxes.watchdog import DiskEvidence, KillReport, NodeReader, Watchdog, WatchdogSettings
from sandbox_builders import LIMITS, MIB, SPEC, RealRig, real_rig, start, until, why_no_namespaces

pytestmark = pytest.mark.integration

AS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not AS_ROOT, reason="needs cgroups, or mounts, that root may make")
QUICK = WatchdogSettings(interval_s=0.1, window_s=5.0, full_s=0.2, pids_full_s=0.5)
CONTAINED_S = 1.0


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")
    with real_rig(tmp_path_factory.mktemp("records")) as rig:
        yield rig


def end_of(
    rig: RealRig,
    folder: Path,
    attack: Callable[[Sandbox], Awaitable[Any]],
    settings: WatchdogSettings = QUICK,
) -> tuple[Sandbox, KillReport, dict[str, Any]]:
    """Attack a sandbox from inside until the watchdog ends it; return it, the report and the evidence."""

    async def body(provider: Provider) -> tuple[Sandbox, KillReport]:
        assert isinstance(provider, NamespaceProvider)
        watchdog = Watchdog(NamespaceOverseen(provider), evidence=DiskEvidence(folder), settings=settings)
        bystander = await start(provider)
        async with watchdog, asyncio.TaskGroup() as group:
            victim = await start(provider)
            attacking = group.create_task(_until_death(attack, victim))
            async with asyncio.timeout(30):
                await until(lambda: bool(watchdog.reports))
            await attacking
            assert (await bystander.exec(["echo", "well"])).stdout == b"well\n"
        assert bystander.death is None
        await bystander.kill()
        (report,) = watchdog.reports
        assert report.sandbox_id == victim.id
        return victim, report

    victim, report = rig.run(body)
    return victim, report, json.loads(Path(report.evidence).read_text())


async def _until_death(attack: Callable[[Sandbox], Awaitable[Any]], victim: Sandbox) -> None:
    with suppress(SandboxDead):
        await attack(victim)


def python(code: str) -> Callable[[Sandbox], Awaitable[Any]]:
    return lambda sandbox: sandbox.exec(["python3", "-c", code], timeout_s=30.0)


def check(
    victim: Sandbox, report: KillReport, evidence: dict[str, Any], *, reason: DeathReason, of: str | None = None
) -> None:
    """Check that it ended for this reason, as the rollout's doing, with evidence; and that its cap held it in time."""
    assert victim.death is not None
    assert (victim.death.reason, victim.death.culprit) == (reason, Culprit.ROLLOUT)
    assert victim.death.detail.endswith(f"Evidence: {report.evidence}")
    assert report.death == victim.death
    assert evidence["reason"] == reason.value
    assert evidence["findings"][0]["severity"] == "kill"
    assert evidence["details"]["events"] or not AS_ROOT
    failed = {one.name for one in report.steps if one.error}
    assert failed == (set() if AS_ROOT else {"freeze"}) or failed == set()
    if of is not None:
        counts = [(one["at_s"], one[of]) for one in evidence["samples"] if one[of] is not None]
        cap = evidence["limits"][of]
        assert max(count for _, count in counts) <= cap, "the cap did not hold"
        calm = max(at_s for at_s, count in counts if count < cap / 2)
        full = min(at_s for at_s, count in counts if count >= 0.95 * cap)
        assert full - calm < CONTAINED_S


FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


def test_a_fork_bomb_is_held_by_the_cap_of_processes_and_ended(rig, tmp_path):
    victim, report, evidence = end_of(rig, tmp_path, python(FORK_BOMB))
    check(victim, report, evidence, reason=DeathReason.POLICY_PIDS, of="pids")
    details = evidence["details"]
    assert 0.9 * LIMITS.pids < details["processes"] <= LIMITS.pids
    assert {one["name"] for one in details["top_cpu"]} == {"python3"}
    assert len(details["top_cpu"]) == 10
    if AS_ROOT:
        assert evidence["samples"][-1]["refused_forks"] >= QUICK.refused_forks


INODE_BOMB = """
number = 0
while True:
    try:
        open(f"/tmp/{number}", "w").close()
    except OSError:
        pass
    number += 1
"""


def test_an_inode_bomb_is_held_by_the_cap_of_inodes_and_ended(rig, tmp_path):
    victim, report, evidence = end_of(rig, tmp_path, python(INODE_BOMB))
    check(victim, report, evidence, reason=DeathReason.POLICY_INODES, of="inodes")
    (worst, *_) = evidence["details"]["top_cpu"]
    assert worst["name"] == "python3"
    assert worst["command"].startswith("python3 -c")


DISK_BOMB = """
block, number = bytes(1 << 20), 0
while True:
    try:
        with open(f"/tmp/{number}", "ab") as file:
            file.write(block)
        number += 1  # what failed is gone on with: neither do inodes run out as well, nor is space given back
    except OSError:
        pass
"""


def test_a_disk_bomb_is_held_by_the_cap_of_bytes_and_ended(rig, tmp_path):
    victim, report, evidence = end_of(rig, tmp_path, python(DISK_BOMB))
    check(victim, report, evidence, reason=DeathReason.POLICY_BYTES, of="disk_bytes")


MEMORY_BOMB = """while true; do python3 -c '
held = []
while True:
    held.append(bytes([1]) * (1 << 20))
'; done"""


@needs_root
def test_a_memory_bomb_that_is_started_again_and_again_is_ended(rig, tmp_path):
    # With more patience for memory that is full, the kernel's kills are what ends it, also on a machine that is slow.
    patient = msgspec.structs.replace(QUICK, full_s=4.0)
    victim, report, evidence = end_of(
        rig, tmp_path, lambda sandbox: sandbox.exec(["sh", "-c", MEMORY_BOMB], timeout_s=30.0), patient
    )
    check(victim, report, evidence, reason=DeathReason.POLICY_MEMORY)
    assert max(one["memory_bytes"] or 0 for one in evidence["samples"]) <= LIMITS.memory_bytes
    assert evidence["samples"][-1]["oom_kills"] >= QUICK.oom_kills


def test_floods_of_output_are_held_by_the_cap_of_a_command_and_end_its_sandbox(rig, tmp_path):
    async def floods(sandbox: Sandbox) -> None:
        while True:
            result = await sandbox.exec(["yes"], timeout_s=30.0)
            assert result.killed_by == "output"
            assert result.stdout_bytes < 4 * LIMITS.output_bytes

    victim, report, evidence = end_of(rig, tmp_path, floods)
    check(victim, report, evidence, reason=DeathReason.POLICY_OUTPUT)
    assert evidence["samples"][-1]["output_bytes"] >= 3 * LIMITS.output_bytes


# -- what is seen from outside ---------------------------------------------------------------------------------------


def test_what_is_seen_from_outside_is_what_the_agent_says(rig):
    async def body(provider: Provider) -> None:
        assert isinstance(provider, NamespaceProvider)
        sandbox, overseen = await start(provider), NamespaceOverseen(provider)
        await sandbox.write("/tmp/data", bytes(3 * MIB))
        await sandbox.exec(["sh", "-c", "for i in 1 2 3 4 5; do touch /tmp/$i; done; echo 12345"])
        usage = await sandbox.usage()
        survey = await overseen.survey(limit_s=5.0)
        sample: Any = survey.found[sandbox.id].sample
        assert survey.late == ()
        assert (sample.disk_bytes, sample.inodes) == (usage.disk_bytes, usage.inodes)
        assert sample.pids == 0
        assert sample.output_bytes == 6
        assert 0 <= sample.cpu_s < 60
        assert sample.cpu_s > 0 or not AS_ROOT  # from /proc it comes in hundredths of a second
        assert sample.memory_bytes is not None
        await sandbox.kill()
        assert sandbox.id not in (await overseen.survey(limit_s=5.0)).found

    rig.run(body)


def test_an_idle_sandbox_is_seen_again_as_it_was_and_one_that_works_as_it_is(rig):
    async def body(provider: Provider) -> None:
        assert isinstance(provider, NamespaceProvider)
        sandbox, overseen = await start(provider), NamespaceOverseen(provider)
        first: Any = (await overseen.survey(limit_s=5.0)).found[sandbox.id].sample
        again: Any = (await overseen.survey(limit_s=5.0)).found[sandbox.id].sample
        assert again.at_s > first.at_s
        assert (again.inodes, again.disk_bytes) == (first.inodes, first.disk_bytes)
        await sandbox.write("/tmp/new", b"x" * 100_000)
        after: Any = (await overseen.survey(limit_s=5.0)).found[sandbox.id].sample
        assert after.inodes == first.inodes + 1
        assert after.disk_bytes > first.disk_bytes
        await sandbox.kill()

    rig.run(body)


@needs_root
def test_a_paused_sandbox_is_seen_too(rig):
    async def body(provider: Provider) -> None:
        assert isinstance(provider, NamespaceProvider)
        sandbox, overseen = await start(provider), NamespaceOverseen(provider)
        await sandbox.pause()
        sample: Any = (await overseen.survey(limit_s=5.0)).found[sandbox.id].sample
        assert sample.inodes > 0
        await sandbox.kill()

    rig.run(body)


def test_a_provider_tells_its_observer_of_starts_ends_and_sweeps(tmp_path):
    if reason := why_no_namespaces(tmp_path / "probe"):
        pytest.skip(f"no namespace sandboxes here: {reason}")

    async def whole() -> SandboxTally:
        tally = SandboxTally()
        async with NamespaceProvider(NamespaceSettings(directory=tmp_path / "records"), observer=tally) as provider:
            short = msgspec.structs.replace(SPEC, limits=msgspec.structs.replace(LIMITS, wall_s=0.5))
            sandboxes = [await start(provider, SPEC), await start(provider, short)]
            await sandboxes[0].kill()
            await until(lambda: sandboxes[1].death is not None)
        return tally

    counted = asyncio.run(whole()).statistics()
    assert counted.ends == {DeathReason.RELEASED: 1, DeathReason.POLICY_WALL: 1}
    assert {phase: sum(spread.counts) for phase, spread in counted.start_s.items()} == {
        "queue": 0,
        "create": 2,
        "ready": 2,
    }
    assert 0 < counted.start_s["create"].total < 30
    assert 0 < counted.start_s["ready"].total < 30
    assert (counted.swept, counted.unswept) == (0, 0)


def test_this_node_can_be_read(tmp_path):
    found = NodeReader([tmp_path]).read()
    for share in (found.memory_free, found.disk_free, found.pids_free):
        assert share is not None
        assert 0 < share <= 1


# -- the reaper and mounts -------------------------------------------------------------------------------------------

MOUNTED = """
import subprocess, sys
from pathlib import Path
from rollmill.sandboxes.reaper import Reaper
base = Path(sys.argv[1])
(base / "tree" / "a" / "mounted").mkdir(parents=True)
(base / "tree" / "b").mkdir()
subprocess.run(["mount", "--bind", base / "kept", base / "tree" / "a" / "mounted"], check=True)
with Reaper(base / "trash") as reaper:
    reaper.discard(base / "tree")
    reaper.drain(limit_s=10.0)
    statistics = reaper.statistics()
    print(statistics.waiting, statistics.stubborn, statistics.failures, "busy" in statistics.last_failure)
"""


@needs_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
def test_the_reaper_leaves_what_is_mounted_inside_a_tree(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "precious").write_text("here")
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", MOUNTED, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["1", "1", "1", "True"]  # the directory above the mount, and nothing else
    assert (tmp_path / "kept" / "precious").read_text() == "here"
