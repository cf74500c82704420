"""What an idle sandbox keeps for itself of the memory that all begin with, counted in pages: no clock is in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollmill.sandboxes import NamespaceProvider, Provider, Sandbox
from sandbox_builders import RealRig, real_rig, start, until, why_no_namespaces

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="a plain user may not read what the processes of a sandbox hold"),
]

KIB = 1024
# 1.0 MB with Python 3.11; 2.2 when the zygote cloned itself and the first process mounted the root.
MOST_IDLE_BYTES = 1_400 * KIB
MOST_LOST_BYTES = 64 * KIB


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")
    with real_rig(tmp_path_factory.mktemp("records")) as rig:
        yield rig


def own_bytes(pid: int) -> int:
    """Return the memory that a process has written to and shares with nobody."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * KIB
    raise AssertionError("the kernel tells no Private_Dirty")


def agent_of(provider: Provider, sandbox: Sandbox) -> int:
    assert isinstance(provider, NamespaceProvider)
    record = provider.records.read(sandbox.id)
    assert record is not None
    assert record.first_process is not None
    return record.first_process.pid


def template_of(provider: Provider, sandbox: Sandbox) -> psutil.Process:
    assert isinstance(provider, NamespaceProvider)
    record = provider.records.read(sandbox.id)
    assert record is not None
    assert record.helper is not None
    names = {one.name(): one for one in psutil.Process(record.helper.pid).children()}
    return names["zygote-template"]


def open_in(pid: int) -> list[str]:
    return sorted(os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir())


def test_an_idle_sandbox_keeps_little_memory_of_its_own(rig):
    async def body(provider: Provider) -> list[int]:
        sandboxes = [await start(provider) for _ in range(4)]
        return [own_bytes(agent_of(provider, one)) for one in sandboxes]

    assert max(rig.run(body)) < MOST_IDLE_BYTES


def test_what_is_started_later_takes_no_shared_memory_from_one_that_is_idle(rig):
    async def body(provider: Provider) -> tuple[int, int]:
        first = await start(provider)
        await start(provider)  # what the two shared and the template wrote to since is the first one's now
        before = own_bytes(agent_of(provider, first))
        for _ in range(8):
            await start(provider)
        return before, own_bytes(agent_of(provider, first))

    before, after = rig.run(body)
    assert after - before <= MOST_LOST_BYTES


def test_the_template_holds_nothing_of_the_sandboxes_that_it_made(rig):
    async def body(provider: Provider) -> tuple[list[str], list[str]]:
        one = await start(provider)
        template = template_of(provider, one)
        before = open_in(template.pid)
        await start(provider)
        return before, open_in(template.pid)

    before, after = rig.run(body)
    assert before == after
    assert len(before) == 4  # the standard streams and its socket to the zygote


def test_a_template_that_was_killed_is_replaced_and_the_sandboxes_live_on(rig):
    async def body(provider: Provider) -> tuple[int, int, int]:
        first = await start(provider)
        killed = template_of(provider, first)
        killed.kill()
        await until(lambda: killed.status() == psutil.STATUS_ZOMBIE)
        second = await start(provider)
        replaced = template_of(provider, second)
        outcomes = [await one.exec(["true"]) for one in (first, second)]
        return killed.pid, replaced.pid, max(one.exit_code for one in outcomes)

    killed, replaced, worst = rig.run(body)
    assert replaced != killed
    assert worst == 0
