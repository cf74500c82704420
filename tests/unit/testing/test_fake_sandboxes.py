"""The fake provider beyond the contract: time, scripted programs, scripted failures, a lost node."""

import asyncio

import pytest

from rollmill.clock import VirtualClock
from rollmill.errors import CreateUnknown, IsolationError, SandboxDead, SandboxRetryable
from rollmill.sandboxes import IsolationLevel, Lease, SandboxSpec, SandboxState
from rollmill.testing import Delay, FakeCall, FakeSandboxProvider, FaultInjector, Raise, run_virtual

LEASE = Lease(owner="test", ttl_s=10_000.0)


def test_a_start_takes_its_time_of_the_clock():
    clock = VirtualClock()

    async def body() -> None:
        provider = FakeSandboxProvider(start_s=60.0)
        sandbox = await provider.create(SandboxSpec(), id="a", lease=LEASE)
        assert (clock.now_s(), sandbox.state) == (60.0, SandboxState.READY)

    run_virtual(body(), clock=clock)


def test_programs_are_functions_that_the_test_gave():
    async def solve(call: FakeCall) -> int:
        call.files["/answer"] = call.argv[1].encode()
        call.write("stderr", b"done")
        return 5

    async def body() -> None:
        provider = FakeSandboxProvider(programs={"solve": solve, "python": solve})
        sandbox = await provider.create(SandboxSpec(), id="a", lease=LEASE)
        result = await sandbox.exec(["solve", "42"])
        assert (result.exit_code, result.stderr) == (5, b"done")
        assert await sandbox.read("/answer") == b"42"
        assert (await sandbox.run_python("print(1)")).exit_code == 5
        assert await sandbox.read("/answer") == b"print(1)"

    run_virtual(body())


def test_a_creation_that_is_cut_off_has_made_its_sandbox_to_be_adopted():
    faults = FaultInjector({("create", 1): Raise(lambda: CreateUnknown("cut off", sandbox_id="a"))})

    async def body() -> None:
        provider = FakeSandboxProvider(faults=faults)
        with pytest.raises(CreateUnknown) as raised:
            await provider.create(SandboxSpec(), id="a", lease=LEASE)
        adopted = await provider.attach(raised.value.sandbox_id)
        assert adopted.state is SandboxState.READY

    run_virtual(body())


def test_a_creation_that_fails_leaves_nothing_alive():
    faults = FaultInjector({("create", 1): Raise(lambda: SandboxRetryable("full", after_s=5.0))})

    async def body() -> None:
        provider = FakeSandboxProvider(faults=faults)
        with pytest.raises(SandboxRetryable):
            await provider.create(SandboxSpec(), id="a", lease=LEASE)
        assert [one.state for one in await provider.list()] == [SandboxState.DEAD]
        assert (await provider.create(SandboxSpec(), id="b", lease=LEASE)).state is SandboxState.READY

    run_virtual(body())


def test_a_lease_that_expires_during_a_slow_start_ends_it():
    faults = FaultInjector({("create", 1): Delay(100.0)})

    async def body() -> None:
        provider = FakeSandboxProvider(faults=faults)
        with pytest.raises(SandboxDead, match="lease_expired"):
            await provider.create(SandboxSpec(), id="a", lease=Lease(owner="test", ttl_s=50.0))

    run_virtual(body())


def test_a_lost_node_takes_everything_and_is_nobodys_score():
    async def body() -> None:
        provider = FakeSandboxProvider()
        sandboxes = [await provider.create(SandboxSpec(), id=name, lease=LEASE) for name in "ab"]
        call = asyncio.ensure_future(sandboxes[0].exec(["sleep", "100"]))
        await asyncio.sleep(1)
        provider.lose()
        with pytest.raises(SandboxDead) as raised:
            await call
        assert raised.value.fault == "infrastructure"
        assert [one.state for one in sandboxes] == [SandboxState.LOST] * 2

    run_virtual(body())


def test_less_isolation_than_the_minimum_is_refused():
    async def body() -> None:
        provider = FakeSandboxProvider(protections=frozenset(), minimum_isolation=IsolationLevel.HARDENED)
        with pytest.raises(IsolationError):
            await provider.create(SandboxSpec(), id="a", lease=LEASE)
        assert await provider.list() == ()

    run_virtual(body())


def test_an_error_of_a_program_reaches_the_caller():
    async def broken(_: FakeCall) -> int:
        raise RuntimeError("a mistake in the test")

    async def body() -> None:
        sandbox = await FakeSandboxProvider(programs={"broken": broken}).create(SandboxSpec(), id="a", lease=LEASE)
        with pytest.raises(RuntimeError, match="a mistake in the test"):
            await sandbox.exec(["broken"])

    run_virtual(body())


def test_the_sandboxes_of_a_fork_start_side_by_side():
    clock = VirtualClock()

    async def body() -> None:
        provider = FakeSandboxProvider(start_s=60.0)
        sandbox = await provider.create(SandboxSpec(), id="a", lease=LEASE)
        forks = await sandbox.fork(["b", "c", "d"], lease=LEASE)
        assert ([one.state for one in forks], clock.now_s()) == ([SandboxState.READY] * 3, 120.0)

    run_virtual(body(), clock=clock)


def test_a_restore_that_fails_by_script_undoes_its_fork():
    async def body() -> None:
        faults = FaultInjector({("restore", 2): Raise(lambda: SandboxRetryable("no room", after_s=1.0))})
        provider = FakeSandboxProvider(faults=faults)
        sandbox = await provider.create(SandboxSpec(), id="a", lease=LEASE)
        with pytest.raises(SandboxRetryable, match="no room"):
            await sandbox.fork(["b", "c", "d"], lease=LEASE)
        assert [one.sandbox_id for one in await provider.list() if one.death is None] == ["a"]
        assert await provider.snapshots() == ()

    run_virtual(body())


def test_a_snapshot_that_fails_by_script_leaves_the_sandbox_as_it_was():
    async def body() -> None:
        faults = FaultInjector({("snapshot", 1): Raise(lambda: SandboxRetryable("no room", after_s=1.0))})
        provider = FakeSandboxProvider(faults=faults)
        sandbox = await provider.create(SandboxSpec(), id="a", lease=LEASE)
        process = await sandbox.start_process(["sleep", "60"])
        with pytest.raises(SandboxRetryable, match="no room"):
            await sandbox.snapshot(id="s", stop_processes=True)
        assert sandbox.state is SandboxState.BUSY
        ref = await sandbox.snapshot(id="s", stop_processes=True)
        assert (await process.wait()).killed_by == "owner"
        assert await provider.snapshots() == (ref,)

    run_virtual(body())
