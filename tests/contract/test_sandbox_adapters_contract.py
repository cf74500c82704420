"""The contract of sandbox backends, run against every hosted and container backend with a fake of its vendor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_sandbox_contract import *  # noqa: F403
from test_sandbox_state_contract import *  # noqa: F403

from adapter_rigs import OPENERS, AdapterRig, adapter_rig
from rollmill.clock import VirtualClock
from rollmill.errors import SandboxUnsupported
from rollmill.sandboxes import Lease, Provider
from rollmill.sandboxes.leases import Keeper, KeeperSettings, LeaseTable, SweepReport
from sandbox_builders import SPEC, RealRig, new_id, real_rig, start, why_no_namespaces

pytestmark = pytest.mark.integration

# Of the namespace backend alone: it looks at what a process hands down to its own children.
del test_an_owner_that_holds_signals_back_hands_no_block_down  # noqa: F821


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"the fakes run programs in namespace sandboxes, and there are none here: {reason}")
    with real_rig(tmp_path_factory.mktemp("records")) as rig:
        yield rig


ALWAYS = ("e2b",)
"""What runs the contract with every change; the others share its machinery, and run it at night."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in sorted(OPENERS)],
)
def rig(
    request: pytest.FixtureRequest, engine: RealRig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AdapterRig]:
    with adapter_rig(request.param, engine, tmp_path_factory.mktemp(request.param)) as rig:
        yield rig
    left = [one for one in engine.runner.run(engine.provider.list()) if one.death is None]
    assert left == [], "closing the provider left sandboxes at its vendor"


NEEDS = {
    "sessions": ("session", "a_line_", "a_shell_"),
    "terminals": ("terminal",),
    "files_snapshot": ("snapshot", "fork", "restor"),
}
"""What in a test's name tells that it is about something that not every backend has."""

NEEDS_MORE = {
    "sessions": ("test_nothing_is_snapshotted_while_something_runs",),
    "disk_bytes": ("test_what_a_snapshot_holds_counts_to_the_limits",),
}

FOR_ALL = ("test_a_sandbox_that_has_ended_takes_no_snapshot", "test_what_a_backend_cannot")


@pytest.fixture(autouse=True)
def only_what_the_backend_has(request: pytest.FixtureRequest, rig: AdapterRig) -> None:
    name = request.node.originalname
    has = rig.provider.driver.capabilities
    if name.startswith(FOR_ALL):
        return
    if name.startswith(NEEDS_MORE["sessions"]) and not has.sessions:
        pytest.skip("part of it is about sessions")
    if name.startswith(NEEDS_MORE["disk_bytes"]) and "disk_bytes" not in has.limits:
        pytest.skip("whoever runs these sandboxes sets this limit")
    for capability, words in NEEDS.items():
        if any(word in name for word in words) and not getattr(has, capability):
            pytest.skip(f"{rig.provider.driver.product} has not: {capability}")


def test_what_a_backend_cannot_do_is_refused_by_the_capabilitys_name_and_harms_nothing(rig):
    async def body(provider: Provider) -> None:
        has = await provider.capabilities()
        sandbox = await start(provider)
        calls = {
            "sessions": sandbox.open_session,
            "files_snapshot": lambda: sandbox.snapshot(id=new_id()),
            "fork": lambda: sandbox.fork([new_id()], lease=Lease(owner="test")),
            "terminals": lambda: sandbox.start_process(["true"], pty=(24, 80)),
            "pause": sandbox.pause,
            "pause_files": lambda: sandbox.pause(keep_memory=False),
            "full_snapshot": lambda: sandbox.snapshot(id=new_id(), full=True),
            "live_fork": lambda: sandbox.fork([new_id()], lease=Lease(owner="test"), full=True),
            "expose": lambda: sandbox.expose(8080),
            "fast_python": lambda: sandbox.run_python("print(1)"),
        }
        for capability, call in calls.items():
            if not getattr(has, capability):
                with pytest.raises(SandboxUnsupported) as raised:
                    await call()
                assert raised.value.capability == capability
        assert (await sandbox.exec(["true"])).exit_code == 0
        assert has.files_snapshot or await provider.snapshots() == ()
        await sandbox.kill()

    rig.run(body)


def test_another_provider_finds_a_sandbox_by_its_id_and_uses_it(rig):
    async def body(provider: Provider) -> None:
        if not (await provider.capabilities()).labels:
            pytest.skip("nothing is written on these sandboxes")
        sandbox = await start(provider, id=new_id())
        other = rig.another()
        try:
            attached = await other.attach(sandbox.id)
            assert attached is not sandbox
            await attached.write("/tmp/shared", b"one sandbox")
            assert await sandbox.read("/tmp/shared") == b"one sandbox"
            await other.kill([sandbox.id])
            assert (await other.status([sandbox.id]))[sandbox.id].death is not None
        finally:
            await other.close()
        await sandbox.kill()

    rig.run(body)


def test_files_of_a_rollout_are_kept_and_another_process_goes_on_with_them(rig, tmp_path):
    async def body(provider: Provider) -> None:
        has = await provider.capabilities()
        if not has.files_snapshot:
            pytest.skip("nothing is kept of these sandboxes")
        clock, table = VirtualClock(start_s=1_000_000.0), LeaseTable(tmp_path / "leases.sqlite")
        settings = KeeperSettings(name=new_id(), provider="here", ttl_s=90_000.0)
        first = Keeper(table, provider, settings=settings, owner="first", clock=clock)
        held = await first.start("r", SPEC, policy_version=1)
        await held.sandbox.write("/tmp/state", b"kept")
        if has.max_lifetime_s is None or has.extend_ttl:
            await first.suspend(held.claim, keep_memory=False)
        else:
            clock.advance(has.max_lifetime_s - settings.keep_before_s - 1.0)
            assert await first.sweep() == SweepReport()
            clock.advance(1.0)
            assert len((await first.sweep()).kept) == 1
        other = rig.another()
        try:
            second = Keeper(table, other, settings=settings, owner="second", clock=clock)
            assert await second.sweep() == SweepReport()
            again = await second.resume("r")
            assert await again.sandbox.read("/tmp/state") == b"kept"
            await second.release(again.claim)
            assert table.rows() == ()
        finally:
            await other.close()
            table.close()

    rig.run(body)
