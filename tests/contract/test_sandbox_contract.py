"""What every sandbox backend must do: namespaces (as root or as a plain user, whoever runs the suite) and the fake."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest

from rollmill.errors import (
    ConfigError,
    ImageError,
    SandboxDead,
    SandboxError,
    SandboxExhausted,
    SandboxFileError,
    SandboxIdInUse,
    SandboxUnsupported,
)
from rollmill.sandboxes import Culprit, DeathReason, DirectoryImage, Lease, Provider, SandboxSpec, SandboxState
from sandbox_builders import LIMITS, SPEC, FakeRig, Rig, new_id, real_rig, start, until, why_no_namespaces


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


# -- programs --------------------------------------------------------------------------------------------------------


def test_a_program_runs_to_its_end_and_its_output_comes_back(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        result = await sandbox.exec(["echo", "one", "two"])
        assert (result.exit_code, result.stdout, result.stderr, result.killed_by) == (0, b"one two\n", b"", "")
        assert (result.stdout_bytes, result.truncated) == (8, False)
        assert (await sandbox.exec(["false"])).exit_code == 1
        await sandbox.kill()

    rig.run(body)


def test_input_is_passed_on_and_ends(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        data = bytes(range(256)) * 2000
        assert (await sandbox.exec(["cat"], stdin=data)).stdout == data
        assert (await sandbox.exec(["cat"])).stdout == b""
        await sandbox.kill()

    rig.run(body)


def test_a_program_has_the_environment_it_was_given_and_nothing_of_the_hosts(rig, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_HOST", "x")

    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        lines = (await sandbox.exec(["env"], env={"GIVEN": "a=b c"})).stdout.decode().splitlines()
        assert "GIVEN=a=b c" in lines
        assert not [line for line in lines if "SECRET" in line]
        assert "HOME=/root" in lines
        await sandbox.kill()

    rig.run(body)


def test_a_program_starts_in_the_directory_it_was_given_or_at_home(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        assert (await sandbox.exec(["pwd"])).stdout == b"/root\n"
        assert (await sandbox.exec(["pwd"], cwd="/tmp")).stdout == b"/tmp\n"
        await sandbox.kill()

    rig.run(body)


def test_a_program_that_does_not_exist_ends_with_127_and_says_its_name(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        result = await sandbox.exec(["no-such-program"])
        assert result.exit_code == 127
        assert b"no-such-program" in result.stderr
        await sandbox.kill()

    rig.run(body)


def test_argv_must_be_a_list(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        for wrong in ("echo hello", []):
            with pytest.raises(SandboxError, match="argv must be a list"):
                await sandbox.exec(wrong)
        await sandbox.kill()

    rig.run(body)


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout_s": 0},
        {"timeout_s": -1.0},
        {"timeout_s": float("inf")},
        {"timeout_s": float("nan")},
        {"output_cap_bytes": -1},
        {"env": {"A=B": "x"}},
        {"env": {"": "x"}},
        {"env": {"A": "x\0"}},
        {"argv": ["echo", "a\0b"]},
        {"argv": [""]},
    ],
)
def test_a_call_that_nobody_can_carry_out_is_refused_and_harms_nothing(rig, wrong):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        with pytest.raises(SandboxError):
            await sandbox.exec(**{"argv": ["true"], **wrong})
        assert (await sandbox.exec(["true"])).exit_code == 0
        await sandbox.kill()

    rig.run(body)


def test_a_program_is_killed_at_its_timeout_and_the_sandbox_lives_on(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        result = await sandbox.exec(["sleep", "600"], timeout_s=0.2)
        assert (result.timed_out, result.exit_code) == (True, -signal.SIGKILL)
        assert (result.stdout, result.stderr) == (b"", b"")
        assert 0.2 <= result.wall_s < 60
        assert (await sandbox.exec(["true"])).exit_code == 0
        assert sandbox.death is None
        await sandbox.kill()

    rig.run(body)


def test_the_timeout_of_the_limits_holds_when_a_call_names_none(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider, limited(exec_s=0.2))
        assert (await sandbox.exec(["sleep", "600"])).timed_out
        await sandbox.kill()

    rig.run(body)


def test_output_beyond_the_cap_is_counted_and_not_kept(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        result = await sandbox.exec(["cat"], stdin=b"x" * 100_000, output_cap_bytes=1000)
        assert (result.stdout, result.stdout_bytes, result.truncated) == (b"x" * 1000, 100_000, True)
        assert result.exit_code == 0
        await sandbox.kill()

    rig.run(body)


def test_a_program_that_floods_its_output_is_killed(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        result = await sandbox.exec(["yes"], output_cap_bytes=10, timeout_s=60.0)
        assert (result.killed_by, result.exit_code, result.stdout) == ("output", -signal.SIGKILL, b"y\ny\ny\ny\ny\n")
        assert result.stdout_bytes > LIMITS.output_bytes
        assert (await sandbox.exec(["true"])).exit_code == 0
        await sandbox.kill()

    rig.run(body)


def test_programs_run_side_by_side(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        results = await asyncio.gather(*(sandbox.exec(["echo", str(i)]) for i in range(10)))
        assert [one.stdout for one in results] == [f"{i}\n".encode() for i in range(10)]
        await sandbox.kill()

    rig.run(body)


def test_a_cancelled_call_kills_its_program(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        call = asyncio.ensure_future(sandbox.exec(["sleep", "600"]))
        await until(lambda: sandbox.state is SandboxState.BUSY)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: sandbox.state is SandboxState.READY)
        await sandbox.kill()

    rig.run(body)


def test_a_process_in_the_background_takes_input_and_gives_output_as_it_comes(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        process = await sandbox.start_process(["cat"])
        assert process.pid > 1
        seen = process.output()
        await process.write_stdin(b"first")
        assert await anext(seen) == ("stdout", b"first")
        await process.write_stdin(b"second")
        assert await anext(seen) == ("stdout", b"second")
        await process.close_stdin()
        assert [one async for one in seen] == []
        result = await process.wait()
        assert (result.exit_code, result.stdout) == (0, b"firstsecond")
        await sandbox.kill()

    rig.run(body)


def test_a_process_in_the_background_ends_by_a_signal(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        process = await sandbox.start_process(["sleep", "600"])
        assert sandbox.state is SandboxState.BUSY
        await process.signal(signal.SIGTERM)
        result = await process.wait()
        assert (result.exit_code, result.killed_by) == (-signal.SIGTERM, "")
        killed = await sandbox.start_process(["sleep", "600"])
        await killed.signal(signal.SIGKILL)
        assert (await killed.wait()).killed_by == "owner"
        await sandbox.kill()

    rig.run(body)


def test_an_owner_that_holds_signals_back_hands_no_block_down(tmp_path):
    if reason := why_no_namespaces(tmp_path / "probe"):
        pytest.skip(reason)
    held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        with real_rig(tmp_path / "held") as rig:

            async def body(provider: Provider) -> None:
                sandbox = await start(provider)
                process = await sandbox.start_process(["sleep", "600"])
                await process.signal(signal.SIGTERM)
                assert (await process.wait()).exit_code == -signal.SIGTERM
                await sandbox.kill()

            rig.run(body)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def test_python_runs_in_a_fresh_interpreter_each_time(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        if not (await provider.capabilities()).fast_python:
            with pytest.raises(SandboxUnsupported, match="python"):
                await sandbox.run_python("print(1)")
            return
        code = "import sys; print(sys.argv[1:], sys.stdin.read(), 'x' in globals()); x = 1; sys.exit(3)"
        for _ in range(2):
            result = await sandbox.run_python(code, args=["a", "b"], stdin=b"in")
            assert (result.exit_code, result.stdout) == (3, b"['a', 'b'] in False\n")
        failed = await sandbox.run_python("1/0")
        assert failed.exit_code == 1
        assert failed.stderr.decode().splitlines()[-1] == "ZeroDivisionError: division by zero"
        assert (await sandbox.run_python("while True: pass", timeout_s=0.3)).timed_out
        await sandbox.kill()

    rig.run(body)


# -- files -----------------------------------------------------------------------------------------------------------


def test_files_come_back_as_they_were_written_with_the_directories_above_them(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        data = bytes(range(256)) * 4096  # 1 MiB: more than one frame
        await sandbox.write("/workspace/a/b/data", data)
        await sandbox.write("/workspace/a/empty", b"", mode=0o600)
        assert await sandbox.read("/workspace/a/b/data") == data
        assert await sandbox.read("/workspace/a/empty") == b""
        await sandbox.write("/workspace/a/b/data", b"short")
        assert (await sandbox.exec(["cat", "/workspace/a/b/data"])).stdout == b"short"
        found = [(one.name, one.kind, one.size_bytes, one.mode) for one in await sandbox.list_dir("/workspace/a")]
        assert found == [("b", "directory", found[0][2], 0o755), ("empty", "file", 0, 0o600)]
        await sandbox.kill()

    rig.run(body)


def test_a_file_carries_words_where_the_backend_has_them_and_says_so_where_not(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.write("/workspace/f", b"x")
        if not (await provider.capabilities()).attributes:
            with suppress(SandboxUnsupported):  # of files in memory some kernels can, and some not
                await sandbox.set_attributes("/workspace/f", "a", {"n": "1"})
            await sandbox.kill()
            return
        await sandbox.set_attributes("/workspace/f", "a", {"n": "1", "kind": "ü"})
        await sandbox.set_attributes("/workspace/f", "b", {"n": "2"})
        assert (await sandbox.stat("/workspace/f")).attributes == {"a.n": "1", "a.kind": "ü", "b.n": "2"}
        await sandbox.set_attributes("/workspace/f", "a", {"n": "3"})
        (listed,) = [one for one in await sandbox.list_dir("/workspace") if one.name == "f"]
        assert listed.attributes == {"a.n": "3", "b.n": "2"}
        await sandbox.rename("/workspace/f", "/workspace/g")
        await sandbox.set_attributes("/workspace/g", "a", {})
        assert (await sandbox.stat("/workspace/g")).attributes == {"b.n": "2"}
        for path, group, words in (
            ("/workspace/g", "a.b", {"n": "1"}),
            ("/workspace/g", "overlay", {"n": "1"}),
            ("/workspace/g", "", {"n": "1"}),
            ("/workspace/g", "a", {"": "1"}),
            ("/workspace/g", "a", {"n": "nul\0"}),
            ("/workspace", "a", {"n": "1"}),
            ("/workspace/missing", "a", {"n": "1"}),
            ("relative", "a", {"n": "1"}),
        ):
            with pytest.raises(SandboxFileError):
                await sandbox.set_attributes(path, group, words)
        await sandbox.kill()

    rig.run(body)


def test_a_path_that_is_missing_relative_or_no_file_is_a_typed_error(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        for path in ("/nothing/here", "/tmp", "relative/path", "/nul\0"):
            with pytest.raises(SandboxFileError):
                await sandbox.read(path)
        for path in ("/tmp", "relative/path"):
            with pytest.raises(SandboxFileError):
                await sandbox.write(path, b"x")
        for path in ("/nothing", "relative"):
            with pytest.raises(SandboxFileError):
                await sandbox.list_dir(path)
        assert (await sandbox.exec(["true"])).exit_code == 0
        await sandbox.kill()

    rig.run(body)


def test_a_file_larger_than_the_caller_takes_is_refused(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.write("/tmp/f", b"x" * 1001)
        assert len(await sandbox.read("/tmp/f", max_bytes=1001)) == 1001
        with pytest.raises(SandboxFileError, match="more than 1000 bytes"):
            await sandbox.read("/tmp/f", max_bytes=1000)
        await sandbox.kill()

    rig.run(body)


def test_bytes_and_inodes_end_at_their_limits_and_the_sandbox_lives_on(rig):
    async def body(provider: Provider) -> None:
        held = (await provider.capabilities()).limits
        if not {"disk_bytes", "inodes"} <= set(held):
            pytest.skip("whoever runs these sandboxes sets these limits")
        sandbox = await start(provider, limited(disk_bytes=1024**2, inodes=600))
        with pytest.raises(SandboxExhausted):
            await sandbox.write("/tmp/big", b"x" * (2 * 1024**2))
        sandbox2 = await start(provider, limited(inodes=600))
        for i in range(400):
            await sandbox2.write(f"/tmp/{i}", b"")
        with pytest.raises(SandboxExhausted):
            await asyncio.gather(*(sandbox2.write(f"/tmp/more{i}", b"") for i in range(200)))
        for one in (sandbox, sandbox2):
            assert (await one.exec(["true"])).exit_code == 0
            await one.kill()

    rig.run(body)


def test_usage_counts_what_was_written(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        before = await sandbox.usage()
        await sandbox.write("/tmp/a", b"x" * 1_000_000)
        after = await sandbox.usage()
        if before.disk_bytes is None:
            assert after.disk_bytes is None
            await sandbox.kill()
            pytest.skip("nothing counts this here")
        assert after.disk_bytes is not None
        assert 1_000_000 <= after.disk_bytes - before.disk_bytes < 1_100_000
        assert (after.inodes or 0) - (before.inodes or 0) == 1
        assert (after.processes or 0) >= 1
        await sandbox.kill()

    rig.run(body)


def test_sandboxes_do_not_see_each_other(rig):
    async def body(provider: Provider) -> None:
        one, other = await start(provider), await start(provider)
        await one.write("/tmp/mine", b"secret")
        with pytest.raises(SandboxFileError):
            await other.read("/tmp/mine")
        await one.kill()
        await other.kill()

    rig.run(body)


# -- life ------------------------------------------------------------------------------------------------------------


def test_creating_again_with_the_same_id_and_spec_returns_the_same_sandbox(rig):
    async def body(provider: Provider) -> None:
        name = new_id()
        one = await start(provider, id=name)
        assert await start(provider, id=name) is one
        assert await provider.attach(name) is one
        with pytest.raises(SandboxIdInUse, match="another spec"):
            await start(provider, limited(pids=41), id=name)
        await one.kill()
        with pytest.raises(SandboxIdInUse, match="has ended"):
            await start(provider, id=name)

    rig.run(body)


@pytest.mark.parametrize("name", ["", "../up", "a/b", "-x", "x" * 65, "nul\0"])
def test_an_id_that_could_not_be_a_files_name_is_refused(rig, name):
    async def body(provider: Provider) -> None:
        with pytest.raises(ConfigError, match="cannot be a sandbox's id"):
            await start(provider, id=name)

    rig.run(body)


def test_an_image_that_is_not_there_is_refused_before_anything_starts(rig):
    async def body(provider: Provider) -> None:
        for layers in ((), ("relative",)):
            image = DirectoryImage(layers=layers)
            with pytest.raises(ImageError):
                await provider.prepare(image)
            name = new_id()
            with pytest.raises(ImageError):
                await start(provider, SandboxSpec(image=image), id=name)
            assert await provider.status([name]) == {}

    rig.run(body)


def test_lists_show_labels_states_and_leases_and_skip_what_is_unknown(rig):
    async def body(provider: Provider) -> None:
        names = [new_id(), new_id()]
        run = new_id()
        for i, name in enumerate(names):
            lease = Lease(owner="me", ttl_s=100.0, rollout_id=f"r{i}", generation=2, policy_version=7)
            await provider.create(SPEC, id=name, labels={"run": run, "i": str(i)}, lease=lease)
        assert sorted(one.sandbox_id for one in await provider.list(labels={"run": run})) == sorted(names)
        (only,) = await provider.list(labels={"run": run, "i": "1"})
        assert (only.sandbox_id, only.state, only.lease.rollout_id) == (names[1], SandboxState.READY, "r1")
        assert 0 < only.lease_left_s <= 100
        assert only.isolation in rig.levels
        assert set(await provider.status([*names, "unknown"])) == set(names)
        await provider.kill([names[0], "unknown"])
        assert [one.sandbox_id for one in await provider.list(labels={"run": run}, state=SandboxState.READY)] == names[
            1:
        ]
        assert (await provider.status(names))[names[0]].state is SandboxState.DEAD
        await provider.kill(names)

    rig.run(body)


def test_an_end_stands_with_its_first_reason_and_every_later_call_says_it(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        end = await sandbox.kill(DeathReason.POLICY_INODES)
        assert (end.reason, end.culprit) == (DeathReason.POLICY_INODES, Culprit.ROLLOUT)
        assert await sandbox.kill() == end
        assert (sandbox.state, sandbox.death) == (SandboxState.DEAD, end)
        calls = (
            lambda: sandbox.exec(["true"]),
            lambda: sandbox.read("/tmp/x"),
            lambda: sandbox.write("/tmp/x", b""),
            lambda: sandbox.list_dir("/"),
            lambda: sandbox.renew(Lease(owner="me")),
            lambda: sandbox.usage(),
            lambda: sandbox.start_process(["true"]),
            lambda: provider.attach(sandbox.id),
        )
        for call in calls:
            with pytest.raises(SandboxDead, match="killed_by_policy_inodes") as raised:
                await call()
            assert (raised.value.reason, raised.value.fault) == ("killed_by_policy_inodes", "rollout")

    rig.run(body)


def test_to_attach_to_what_was_never_made_is_an_infrastructure_error(rig):
    async def body(provider: Provider) -> None:
        with pytest.raises(SandboxDead, match="not known") as raised:
            await provider.attach(new_id())
        assert raised.value.fault == "infrastructure"

    rig.run(body)


def test_a_program_that_runs_when_its_sandbox_ends_fails_with_the_reason(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        process = await sandbox.start_process(["sleep", "600"])
        call = asyncio.ensure_future(sandbox.exec(["sleep", "600"]))
        await asyncio.sleep(0.05)
        await sandbox.kill()
        for waiting in (call, process.wait()):
            with pytest.raises(SandboxDead) as raised:
                await waiting
            assert (raised.value.reason, raised.value.fault) == ("released", "nobody")
        assert [one async for one in process.output()] == []

    rig.run(body)


def test_a_lease_that_is_not_renewed_ends_its_sandbox_and_that_is_not_the_rollouts_fault(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider, ttl_s=60.0)
        await sandbox.renew(Lease(owner="me", ttl_s=0.2))
        await until(lambda: sandbox.death is not None)
        assert sandbox.death is not None
        assert (sandbox.death.reason, sandbox.death.culprit) == (DeathReason.LEASE_EXPIRED, Culprit.INFRASTRUCTURE)

    rig.run(body)


def test_a_renewed_lease_counts_from_its_renewal(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider, ttl_s=60.0)
        await sandbox.renew(Lease(owner="me", ttl_s=0.3))
        await sandbox.renew(Lease(owner="you", ttl_s=500.0))
        await asyncio.sleep(0.4)
        assert sandbox.death is None
        assert (await provider.status([sandbox.id]))[sandbox.id].lease.owner == "you"
        await sandbox.kill()

    rig.run(body)


def test_a_sandbox_ends_at_its_wall_limit_and_that_is_the_rollouts_fault(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider, limited(wall_s=2.0))
        await until(lambda: sandbox.death is not None)
        assert sandbox.death is not None
        assert (sandbox.death.reason, sandbox.death.culprit) == (DeathReason.POLICY_WALL, Culprit.ROLLOUT)

    rig.run(body)


def test_a_paused_sandbox_answers_nothing_until_it_is_resumed(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        if not (await provider.capabilities()).pause:
            with pytest.raises(SandboxUnsupported):
                await sandbox.pause()
            return
        await sandbox.pause()
        assert sandbox.state is SandboxState.PAUSED
        with pytest.raises(SandboxError, match="is paused"):
            await sandbox.exec(["true"])
        await sandbox.resume()
        assert (await sandbox.exec(["true"])).exit_code == 0
        await sandbox.pause()
        assert (await sandbox.kill()).reason is DeathReason.RELEASED

    rig.run(body)
