"""What every sandbox backend with state must do: file calls, terminals, sessions, snapshots, restore and fork."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from rollmill.errors import (
    ConfigError,
    ImageError,
    SandboxBusy,
    SandboxDead,
    SandboxError,
    SandboxExhausted,
    SandboxFileError,
    SandboxIdInUse,
    SandboxUnsupported,
)
from rollmill.sandboxes import (
    DeathReason,
    Lease,
    Provider,
    Sandbox,
    SandboxSpec,
    SandboxState,
    SnapshotRef,
)
from rollmill.sandboxes.records import Address
from rollmill.testing import FakeSandbox
from sandbox_builders import LIMITS, SPEC, FakeRig, Rig, new_id, real_rig, start, until, why_no_namespaces

LEASE = Lease(owner="test", ttl_s=300.0)


@pytest.fixture(scope="module")
def namespaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")
    with real_rig(tmp_path_factory.mktemp("records")) as rig:
        yield rig


@pytest.fixture(params=[pytest.param("namespaces", marks=pytest.mark.integration), "fake"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return request.getfixturevalue("namespaces") if request.param == "namespaces" else FakeRig()


def limited(**changes: float) -> SandboxSpec:
    return SandboxSpec(limits=msgspec.structs.replace(LIMITS, **changes))


async def restored(provider: Provider, ref: SnapshotRef) -> Sandbox:
    return await provider.restore(ref, id=new_id(), lease=LEASE)


async def end(*sandboxes: Sandbox) -> None:
    for one in sandboxes:
        await one.kill()


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_directory_is_made_once_with_those_above_it(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        assert await sandbox.make_dir("/workspace/a/b", mode=0o700)
        assert not await sandbox.make_dir("/workspace/a/b")
        found = await sandbox.stat("/workspace/a/b")
        assert (found.name, found.kind, found.mode) == ("b", "directory", 0o700)
        await sandbox.write("/workspace/file", b"x")
        for path in ("/workspace/file", "/workspace/file/below", "relative"):
            with pytest.raises(SandboxFileError):
                await sandbox.make_dir(path)
        await end(sandbox)

    rig.run(body)


def test_what_is_at_a_path_is_told_and_what_is_not_there_is_an_error(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.write("/tmp/f", b"12345", mode=0o640)
        found = await sandbox.stat("/tmp/f")
        assert (found.name, found.kind, found.size_bytes, found.mode) == ("f", "file", 5, 0o640)
        assert (await sandbox.stat("/")).kind == "directory"
        for path in ("/tmp/missing", "/tmp/f/below", "relative", "/nul\0"):
            with pytest.raises(SandboxFileError):
                await sandbox.stat(path)
        await end(sandbox)

    rig.run(body)


def test_files_and_directories_get_other_names(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.write("/tmp/d/one", b"1")
        await sandbox.write("/tmp/two", b"2")
        await sandbox.rename("/tmp/two", "/tmp/d/one")  # in place of the other
        await sandbox.rename("/tmp/d", "/tmp/new/d")
        assert await sandbox.read("/tmp/new/d/one") == b"2"
        assert [one.name for one in await sandbox.list_dir("/tmp")] == ["new"]
        await sandbox.write("/tmp/file", b"")
        for path, target in (("/tmp/gone", "/tmp/x"), ("/tmp/file", "/tmp/new"), ("/tmp/new", "/tmp/new/d/e")):
            with pytest.raises(SandboxFileError):
                await sandbox.rename(path, target)
        assert await sandbox.read("/tmp/new/d/one") == b"2"
        await end(sandbox)

    rig.run(body)


def test_a_directory_that_is_not_empty_is_removed_only_when_that_is_asked_for(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.write("/tmp/d/e/f", b"1")
        await sandbox.write("/tmp/g", b"1")
        await sandbox.remove("/tmp/g")
        with pytest.raises(SandboxFileError):
            await sandbox.remove("/tmp/d")
        await sandbox.remove("/tmp/d", recursive=True)
        await sandbox.make_dir("/tmp/empty")
        await sandbox.remove("/tmp/empty")
        assert await sandbox.list_dir("/tmp") == ()
        for path in ("/tmp/g", "/tmp/d", "relative"):
            with pytest.raises(SandboxFileError):
                await sandbox.remove(path, recursive=True)
        await end(sandbox)

    rig.run(body)


def test_a_file_is_written_and_read_in_pieces(rig):
    async def pieces() -> AsyncIterator[bytes]:
        for i in range(5):
            yield bytes([i]) * 100_000
            yield b""

    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        whole = b"".join(bytes([i]) * 100_000 for i in range(5))
        assert await sandbox.write_stream("/tmp/d/big", pieces()) == 500_000
        assert await sandbox.read("/tmp/d/big") == whole
        found = [one async for one in sandbox.read_stream("/tmp/d/big")]
        assert b"".join(found) == whole
        assert len(found) > 1
        assert b"".join([one async for one in sandbox.read_stream("/tmp/d/big", offset=450_000)]) == bytes([4]) * 50_000
        assert [one async for one in sandbox.read_stream("/tmp/d/big", offset=500_000)] == []
        for path in ("/tmp/missing", "/tmp/d"):
            with pytest.raises(SandboxFileError):
                await anext(aiter(sandbox.read_stream(path)))
        await end(sandbox)

    rig.run(body)


# -- terminals -------------------------------------------------------------------------------------------------------


def test_a_program_gets_a_terminal_of_the_size_that_is_asked_for(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        process = await sandbox.start_process(["stty", "size"], pty=(24, 80))
        result = await process.wait()
        assert (result.exit_code, result.stdout, result.stderr) == (0, b"24 80\r\n", b"")
        assert (await sandbox.exec(["stty", "size"])).exit_code != 0
        for size in ((0, 80), (24, 0), (24, 70_000)):
            with pytest.raises(SandboxError, match="terminal"):
                await sandbox.start_process(["true"], pty=size)
        await end(sandbox)

    rig.run(body)


# -- sessions --------------------------------------------------------------------------------------------------------


def test_a_session_keeps_directory_and_variables_from_line_to_line(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        session = await sandbox.open_session(env={"GIVEN": "g"})
        assert (await session.run("cd /tmp; NAME='a b'")).exit_code == 0
        result = await session.run('pwd; echo "$NAME" $GIVEN')
        assert (result.stdout, result.stderr, result.exit_code) == (b"/tmp\na b g\n", b"", 0)
        await session.run("export OUT=for_programs\ncd /workspace")
        assert b"OUT=for_programs\n" in (await session.run("env")).stdout
        assert (await sandbox.exec(["pwd"])).stdout == b"/root\n"
        await session.close()
        assert not session.alive
        await end(sandbox)

    rig.run(body)


def test_the_status_of_a_line_comes_back_and_is_there_for_the_next_one(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        session = await sandbox.open_session()
        assert (await session.run("false")).exit_code == 1
        assert (await session.run("echo $?")).stdout == b"1\n"
        assert (await session.run("echo $?")).stdout == b"0\n"
        assert (await session.run("no-such-program")).exit_code == 127
        assert session.alive
        await end(sandbox)

    rig.run(body)


def test_a_line_that_is_no_whole_command_fails_alone(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        session = await sandbox.open_session()
        await session.run("KEPT=1")
        broken = await session.run("echo 'never closed")
        assert broken.exit_code != 0
        assert broken.stderr
        assert (await session.run("echo $KEPT")).stdout == b"1\n"
        await end(sandbox)

    rig.run(body)


def test_a_line_that_runs_out_of_time_is_killed_and_its_session_survives(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        session = await sandbox.open_session()
        await session.run("cd /tmp; KEPT=1")
        result = await session.run("sleep 600", timeout_s=0.2)
        assert (result.timed_out, session.alive) == (True, True)
        assert 0.2 <= result.wall_s < 60
        assert (await session.run("pwd; echo $KEPT")).stdout == b"/tmp\n1\n"
        await end(sandbox)

    rig.run(body)


def test_a_line_that_floods_its_output_is_killed_and_what_is_kept_is_capped(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        session = await sandbox.open_session()
        result = await session.run("yes", output_cap_bytes=10, timeout_s=60.0)
        assert (result.killed_by, result.stdout) == ("output", b"y\ny\ny\ny\ny\n")
        assert result.stdout_bytes > LIMITS.output_bytes
        assert (await session.run("echo after")).stdout == b"after\n"
        await end(sandbox)

    rig.run(body)


def test_a_shell_that_ends_ends_its_session_and_not_the_sandbox(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        session = await sandbox.open_session()
        assert (await session.run("exit 3")).exit_code == 3
        assert not session.alive
        with pytest.raises(SandboxError, match="ended"):
            await session.run("true")
        other = await sandbox.open_session()
        assert (await other.run("true")).exit_code == 0
        await end(sandbox)
        with pytest.raises(SandboxDead):
            await other.run("true")

    rig.run(body)


def test_a_session_runs_one_line_at_a_time_and_sessions_run_side_by_side(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        one, other = [await sandbox.open_session() for _ in range(2)]
        line = asyncio.ensure_future(one.run("sleep 600"))
        await until(lambda: sandbox.state is SandboxState.BUSY)
        with pytest.raises(SandboxBusy, match="one at a time"):
            await one.run("true")
        assert (await other.run("echo beside")).stdout == b"beside\n"
        await one.interrupt()
        assert (await line).exit_code == 128 + signal.SIGINT
        assert (await one.run("echo on")).stdout == b"on\n"
        await end(sandbox)

    rig.run(body)


def test_a_cancelled_line_is_killed_and_its_session_goes_on(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        session = await sandbox.open_session()
        await session.run("KEPT=1")
        line = asyncio.ensure_future(session.run("sleep 600"))
        await until(lambda: sandbox.state is SandboxState.BUSY)
        line.cancel()
        with pytest.raises(asyncio.CancelledError):
            await line
        await until(lambda: sandbox.state is SandboxState.READY)
        assert (await session.run("echo $KEPT")).stdout == b"1\n"
        await end(sandbox)

    rig.run(body)


@pytest.mark.parametrize("wrong", [{"line": "a\0b"}, {"line": "x" * 300_000}, {"line": "true", "timeout_s": 0}])
def test_a_line_that_no_session_can_run_is_refused_and_harms_nothing(rig, wrong):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        session = await sandbox.open_session()
        with pytest.raises(SandboxError):
            await session.run(**wrong)
        assert (await session.run("echo fine")).stdout == b"fine\n"
        await end(sandbox)

    rig.run(body)


def test_a_shell_that_the_sandbox_has_not_is_refused(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        with pytest.raises(SandboxUnsupported, match="no-such-shell"):
            await sandbox.open_session(shell="no-such-shell")
        assert (await sandbox.exec(["true"])).exit_code == 0
        await end(sandbox)

    rig.run(body)


# -- snapshots -------------------------------------------------------------------------------------------------------


def test_a_snapshot_holds_the_files_of_its_moment_and_the_sandbox_goes_on(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.write("/workspace/d/a", b"then", mode=0o600)
        await sandbox.write("/workspace/gone", b"x")
        ref = await sandbox.snapshot(id=new_id())
        assert await sandbox.read("/workspace/d/a") == b"then"
        await sandbox.write("/workspace/d/a", b"now")
        await sandbox.write("/workspace/d/b", b"now")
        await sandbox.remove("/workspace/gone")
        copy = await restored(provider, ref)
        assert await copy.read("/workspace/d/a") == b"then"
        assert (await copy.stat("/workspace/d/a")).mode == 0o600
        assert [one.name for one in await copy.list_dir("/workspace/d")] == ["a"]
        assert await copy.read("/workspace/gone") == b"x"
        assert await sandbox.read("/workspace/d/a") == b"now"
        assert sandbox.death is None
        await end(sandbox, copy)

    rig.run(body)


def test_a_snapshot_outlives_its_sandbox_and_is_not_changed_by_those_made_of_it(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.write("/tmp/a", b"1")
        ref = await sandbox.snapshot(id=new_id(), end=True)
        assert sandbox.death is not None
        assert sandbox.death.reason is DeathReason.RELEASED
        one = await restored(provider, ref)
        await one.write("/tmp/a", b"2")
        await one.remove("/tmp/a")
        other = await restored(provider, ref)
        assert await other.read("/tmp/a") == b"1"
        assert one.state is SandboxState.READY
        await end(one, other)
        await provider.delete_snapshots([ref.snapshot_id])

    rig.run(body)


def test_snapshots_stack_and_each_keeps_its_own_moment(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        refs = []
        for i in range(3):
            await sandbox.write("/tmp/count", str(i).encode())
            await sandbox.write(f"/tmp/only{i}", b"x")
            if i:
                await sandbox.remove(f"/tmp/only{i - 1}")
            refs.append(await sandbox.snapshot(id=new_id()))
        await end(sandbox)
        await provider.delete_snapshots([refs[1].snapshot_id])
        for i in (0, 2):
            copy = await restored(provider, refs[i])
            assert await copy.read("/tmp/count") == str(i).encode()
            assert [one.name for one in await copy.list_dir("/tmp")] == ["count", f"only{i}"]
            again = await copy.snapshot(id=new_id())
            deeper = await restored(provider, again)
            assert await deeper.read("/tmp/count") == str(i).encode()
            await end(copy, deeper)
            await provider.delete_snapshots([again.snapshot_id])
        await provider.delete_snapshots([one.snapshot_id for one in refs])

    rig.run(body)


def test_nothing_is_snapshotted_while_something_runs_unless_it_may_be_stopped(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        process = await sandbox.start_process(["sleep", "600"])
        with pytest.raises(SandboxBusy, match="1 process"):
            await sandbox.snapshot(id=new_id())
        assert sandbox.state is SandboxState.BUSY
        session = await sandbox.open_session()
        ref = await sandbox.snapshot(id=new_id(), stop_processes=True)
        result = await process.wait()
        assert (result.exit_code, result.killed_by) == (-signal.SIGKILL, "owner")
        assert not session.alive
        with pytest.raises(SandboxError, match="ended"):
            await session.run("true")
        assert (await sandbox.exec(["true"])).exit_code == 0
        await end(sandbox)
        await provider.delete_snapshots([ref.snapshot_id])

    rig.run(body)


def test_what_a_snapshot_holds_counts_to_the_limits_of_what_is_made_of_it(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider, limited(disk_bytes=8 * 1024**2))
        await sandbox.write("/tmp/a", b"x" * (5 * 1024**2))
        (copy,) = await sandbox.fork([new_id()], lease=LEASE)
        for one in (sandbox, copy):
            usage = await one.usage()
            assert usage.disk_bytes is not None
            assert 5 * 1024**2 <= usage.disk_bytes < 6 * 1024**2
            with pytest.raises(SandboxExhausted):
                await one.write("/tmp/b", b"x" * (5 * 1024**2))
            assert (await one.exec(["true"])).exit_code == 0
        await end(sandbox, copy)

    rig.run(body)


def test_a_fork_makes_all_of_its_sandboxes_with_the_same_files(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.write("/tmp/a", b"1")
        ids = [new_id() for _ in range(3)]
        before = await provider.snapshots()
        forks = await sandbox.fork(ids, lease=LEASE, labels={"fork": ids[0]})
        assert [one.id for one in forks] == ids
        for i, one in enumerate(forks):
            assert await one.read("/tmp/a") == b"1"
            await one.write("/tmp/a", str(i).encode())
        assert [await one.read("/tmp/a") for one in forks] == [b"0", b"1", b"2"]
        assert await sandbox.read("/tmp/a") == b"1"
        assert len(await provider.list(labels={"fork": ids[0]})) == 3
        assert await provider.snapshots() == before
        await end(sandbox, *forks)

    rig.run(body)


def test_a_fork_that_cannot_be_whole_leaves_nothing(rig):
    async def body(provider: Provider) -> None:
        sandbox, other = await start(provider), await start(provider)
        ids = [new_id(), other.id]
        before = await provider.snapshots()
        with pytest.raises(SandboxIdInUse):
            await sandbox.fork(ids, lease=LEASE)
        with pytest.raises(SandboxIdInUse):
            await sandbox.fork([ids[0], ids[0]], lease=LEASE)
        await until(lambda: sandbox.state is SandboxState.READY)
        known = await provider.status([ids[0]])
        for _ in range(500):
            known = await provider.status([ids[0]])
            if not known or known[ids[0]].death is not None:
                break
            await asyncio.sleep(0.01)
        assert not known or known[ids[0]].death is not None
        assert await provider.snapshots() == before
        assert other.death is None
        await end(sandbox, other)

    rig.run(body)


def test_a_fork_that_is_cancelled_leaves_nothing(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        before = await provider.snapshots()
        for delay_s in (0.0, 0.004, 0.02):
            ids = [new_id() for _ in range(2)]
            forking = asyncio.ensure_future(sandbox.fork(ids, lease=LEASE))
            await asyncio.sleep(delay_s)
            assert await provider.snapshots() == before
            forking.cancel()
            made = await asyncio.gather(forking, return_exceptions=True)
            if not isinstance(made[0], BaseException):
                await end(*made[0])  # it was quicker
            quiet = 0  # what goes on in the background may have made nothing yet
            for _ in range(1000):
                known = await provider.status(ids)
                quiet = quiet + 1 if all(one.death is not None for one in known.values()) else 0
                if quiet == 20:
                    break
                await asyncio.sleep(0.01)
            assert quiet == 20
            assert await provider.snapshots() == before
            assert (await sandbox.exec(["true"])).exit_code == 0
        await end(sandbox)

    rig.run(body)


def test_snapshots_are_listed_until_they_are_deleted_and_each_id_names_one(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        name = new_id()
        ref = await sandbox.snapshot(id=name)
        assert ref in await provider.snapshots()
        assert (ref.snapshot_id, ref.spec, ref.depth) == (name, SPEC, 1)
        with pytest.raises(SandboxIdInUse):
            await sandbox.snapshot(id=name)
        with pytest.raises(ConfigError):
            await sandbox.snapshot(id="../up")
        copy = await restored(provider, ref)
        await provider.delete_snapshots([name, "unknown"])
        await provider.delete_snapshots([name])
        assert ref not in await provider.snapshots()
        with pytest.raises(ImageError, match=name):
            await restored(provider, ref)
        await copy.write("/tmp/x", b"lives on")
        assert await copy.read("/tmp/x") == b"lives on"
        await end(sandbox, copy)

    rig.run(body)


def test_restoring_again_with_the_same_id_returns_the_same_sandbox(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        one, other = [await sandbox.snapshot(id=new_id()) for _ in range(2)]
        copy = await restored(provider, one)
        assert await provider.restore(one, id=copy.id, lease=LEASE) is copy
        with pytest.raises(SandboxIdInUse, match="another snapshot"):
            await provider.restore(other, id=copy.id, lease=LEASE)
        with pytest.raises(SandboxIdInUse, match="another snapshot"):
            await start(provider, id=copy.id)
        await end(sandbox, copy)
        await provider.delete_snapshots([one.snapshot_id, other.snapshot_id])

    rig.run(body)


def test_a_sandbox_that_has_ended_takes_no_snapshot_and_opens_no_session(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await end(sandbox)
        calls = (
            lambda: sandbox.snapshot(id=new_id()),
            lambda: sandbox.fork([new_id()], lease=LEASE),
            lambda: sandbox.open_session(),
            lambda: sandbox.stat("/tmp"),
            lambda: sandbox.make_dir("/tmp/x"),
            lambda: sandbox.rename("/tmp/x", "/tmp/y"),
            lambda: sandbox.remove("/tmp/x"),
        )
        for call in calls:
            with pytest.raises(SandboxDead, match="released"):
                await call()

    rig.run(body)


def test_a_paused_sandbox_takes_no_snapshot(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        if not (await provider.capabilities()).pause:
            return
        await sandbox.pause()
        with pytest.raises(SandboxError, match="is paused"):
            await sandbox.snapshot(id=new_id())
        await sandbox.resume()
        ref = await sandbox.snapshot(id=new_id())
        await sandbox.pause()
        await sandbox.resume()
        assert (await sandbox.exec(["true"])).exit_code == 0
        await end(sandbox)
        await provider.delete_snapshots([ref.snapshot_id])

    rig.run(body)


def test_a_sandbox_can_be_ended_while_its_snapshot_is_taken(rig):
    async def body(provider: Provider) -> None:
        for delay in (0.0, 0.005, 0.02):
            sandbox = await start(provider)
            taking = asyncio.ensure_future(sandbox.snapshot(id=new_id()))
            await asyncio.sleep(delay)
            end_of_it = await sandbox.kill()
            assert end_of_it.reason is DeathReason.RELEASED
            await asyncio.gather(taking, return_exceptions=True)
            await provider.delete_snapshots([one.snapshot_id for one in await provider.snapshots()])

    rig.run(body)


# -- without memory, with processes, from outside ----------------------------------------------------------------------


def test_a_pause_without_memory_ends_what_runs_and_keeps_the_files(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.write("/root/kept", b"1")
        if not (await provider.capabilities()).pause_files:
            with pytest.raises(SandboxUnsupported, match="backends that have it: namespaces, gvisor") as raised:
                await sandbox.pause(keep_memory=False)
            assert raised.value.capability == "pause_files"
            assert await sandbox.read("/root/kept") == b"1"
            await end(sandbox)
            return
        process = await sandbox.start_process(["sleep", "300"])
        await sandbox.pause(keep_memory=False)
        await sandbox.pause(keep_memory=False)
        assert sandbox.state is SandboxState.PAUSED
        assert (await process.wait()).exit_code == -signal.SIGKILL
        with pytest.raises(SandboxError, match="is paused"):
            await sandbox.exec(["true"])
        with pytest.raises(SandboxError, match="is paused"):
            await sandbox.snapshot(id=new_id())
        usage = await sandbox.usage()
        assert usage.disk_bytes is not None
        assert usage.disk_bytes >= 1
        await sandbox.renew(LEASE)
        await sandbox.resume()
        await sandbox.resume()
        assert await sandbox.read("/root/kept") == b"1"
        assert (await sandbox.exec(["true"])).exit_code == 0
        await sandbox.write("/root/more", b"2")
        await sandbox.pause(keep_memory=False)
        await sandbox.resume()
        assert [await sandbox.read(one) for one in ("/root/kept", "/root/more")] == [b"1", b"2"]
        await end(sandbox)

    rig.run(body)


def test_a_sandbox_that_is_paused_without_memory_can_end_in_every_way(rig):
    async def body(provider: Provider) -> None:
        if not (await provider.capabilities()).pause_files:
            return
        killed, expired = await start(provider), await start(provider)
        for one in (killed, expired):
            await one.pause(keep_memory=False)
        assert (await killed.kill()).reason is DeathReason.RELEASED
        await expired.renew(Lease(owner="test", ttl_s=0.05))
        await until(lambda: expired.death is not None)
        assert expired.death is not None
        assert expired.death.reason is DeathReason.LEASE_EXPIRED
        with pytest.raises(SandboxDead):
            await expired.resume()
        alive = {one.sandbox_id for one in await provider.list() if one.death is None}
        assert alive & {killed.id, expired.id} == set()
        for delay in (0.0, 0.005, 0.02):
            sandbox = await start(provider)
            pausing = asyncio.ensure_future(sandbox.pause(keep_memory=False))
            await asyncio.sleep(delay)
            assert (await sandbox.kill()).reason is DeathReason.RELEASED
            await asyncio.gather(pausing, return_exceptions=True)
            sandbox = await start(provider)
            await sandbox.pause(keep_memory=False)
            waking = asyncio.ensure_future(sandbox.resume())
            await asyncio.sleep(delay)
            assert (await sandbox.kill()).reason is DeathReason.RELEASED
            await asyncio.gather(waking, return_exceptions=True)

    rig.run(body)


def test_a_full_snapshot_goes_on_where_it_was_taken_or_is_refused_with_who_has_it(rig):
    async def body(provider: Provider) -> None:
        has = await provider.capabilities()
        sandbox = await start(provider)
        with pytest.raises(SandboxError, match="leave one of the two out"):
            await sandbox.snapshot(id=new_id(), full=True, stop_processes=True)
        if not has.full_snapshot:
            for call in (
                lambda: sandbox.snapshot(id=new_id(), full=True),
                lambda: sandbox.fork([new_id()], lease=LEASE, full=True),
            ):
                with pytest.raises(SandboxUnsupported, match=r"backends that have it: gvisor \(as root\), qemu"):
                    await call()
            await end(sandbox)
            return
        # Whole at every moment: a snapshot may fall between the emptying of a file and its writing.
        count = "cd /root; i=0; while :; do i=$((i+1)); echo $i >next; mv next count; sleep 0.05; done"
        await sandbox.start_process(["sh", "-c", count])
        await asyncio.sleep(0.5)
        ref = await sandbox.snapshot(id=new_id(), full=True)
        assert ref.full
        copy = await restored(provider, ref)
        first = int(await copy.read("/root/count"))
        await asyncio.sleep(0.5)
        assert int(await copy.read("/root/count")) > first > 0
        (fork,) = await copy.fork([new_id()], lease=LEASE, full=True)
        first = int(await fork.read("/root/count"))
        await asyncio.sleep(0.5)
        assert int(await fork.read("/root/count")) > first
        await end(sandbox, copy, fork)
        await provider.delete_snapshots([one.snapshot_id for one in await provider.snapshots()])

    rig.run(body)


SERVER = """
import socket
listening = socket.create_server(("127.0.0.1", 8080))
print("ready", flush=True)
while True:
    way, _ = listening.accept()
    with way:
        parts = []
        while piece := way.recv(65536):
            parts.append(piece)
        way.sendall(b"".join(parts)[::-1])
"""


def test_a_port_inside_is_reached_from_outside_where_the_backend_can(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        with pytest.raises(SandboxError, match="port 0 cannot be"):
            await sandbox.expose(0)
        python = (await sandbox.exec(["python3", "-c", ""])).exit_code == 0
        if not ((await provider.capabilities()).expose and python):
            with pytest.raises(SandboxUnsupported, match="backends that have it: namespaces"):
                await sandbox.expose(8080)
            await end(sandbox)
            return
        server = await sandbox.start_process(["python3", "-c", SERVER])
        assert await anext(aiter(server.output())) == ("stdout", b"ready\n")
        address = await sandbox.expose(8080)
        assert await sandbox.expose(8080) == address
        said = bytes(range(256)) * 4000
        answers = await asyncio.gather(*(_asked(address, said) for _ in range(3)))
        assert answers == [said[::-1]] * 3
        closed = await sandbox.expose(8081)  # nobody listens there
        with pytest.raises(ConnectionError):
            await _asked(closed, b"x")
        await sandbox.kill()
        with pytest.raises(ConnectionError):
            await _asked(address, b"x")

    rig.run(body)


async def _asked(address: Address, said: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(said)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), 60.0)
    finally:
        writer.close()


def test_a_sandbox_says_that_it_is_being_forked(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        forking = asyncio.ensure_future(sandbox.fork([new_id(), new_id()], lease=LEASE))
        seen = set()
        while not forking.done():
            seen.add(sandbox.state)
            await asyncio.sleep(0)
        assert isinstance(sandbox, FakeSandbox) or SandboxState.FORKING in seen
        made = await forking
        while sandbox.state is not SandboxState.READY:  # what it is made of may come back later than the others
            seen.add(sandbox.state)
            await asyncio.sleep(0)
        assert SandboxState.SNAPSHOTTING not in seen
        await end(sandbox, *made)

    rig.run(body)
