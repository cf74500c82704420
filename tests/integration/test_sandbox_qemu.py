"""Machines under QEMU for real: copies that go on, what differs between them, images, and what limits hold inside."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from microvm_builders import MachineRig, qemu_rig, why_no_qemu
from rollmill.errors import ImageError, SandboxError, SandboxFileError, SandboxUnsupported
from rollmill.sandboxes import Culprit, DeathReason, DirectoryImage, IsolationLevel, Lease, Provider, SandboxSpec
from sandbox_builders import LIMITS, SPEC, new_id, start, until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

COUNTING = "i=0; while :; do i=$((i+1)); echo $i > /tmp/n.new; mv /tmp/n.new /tmp/n; sleep 0.05; done"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineRig]:
    if reason := why_no_qemu():
        pytest.skip(f"no machines under QEMU here: {reason}")
    with qemu_rig(tmp_path_factory.mktemp("records"), accelerator="tcg") as rig:
        yield rig


async def count_in(sandbox) -> int:
    return int(await sandbox.read("/tmp/n"))


async def goes_on(sandbox) -> bool:
    """Return whether the counter inside moves within a few seconds."""
    before = await count_in(sandbox)
    async with asyncio.timeout(20):
        while await count_in(sandbox) == before:  # noqa: ASYNC110 - files in a machine announce themselves to nobody
            await asyncio.sleep(0.05)
    return True


def status_of(pid: int) -> dict[str, str]:
    return dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())


async def begin_counting(sandbox) -> None:
    await sandbox.start_process(["sh", "-c", COUNTING])
    async with asyncio.timeout(20):
        while True:
            try:
                await count_in(sandbox)
                return
            except SandboxFileError:
                await asyncio.sleep(0.05)


def test_copies_go_on_with_what_ran_and_know_nothing_of_each_other(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await begin_counting(sandbox)
        await sandbox.write("/tmp/before", b"shared")
        copies = await sandbox.fork([new_id(), new_id()], lease=Lease(owner="test"))
        for one in (sandbox, *copies):
            assert await one.read("/tmp/before") == b"shared"
            assert await goes_on(one)
            await one.write("/tmp/mine", one.id.encode())
        for one in (sandbox, *copies):
            assert await one.read("/tmp/mine") == one.id.encode()
        assert await provider.snapshots() == ()
        await provider.kill([sandbox.id, *(one.id for one in copies)])

    rig.run(body)


def test_a_paused_machine_stands_still(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await begin_counting(sandbox)
        await sandbox.pause()
        await sandbox.resume()
        before = await count_in(sandbox)
        await sandbox.pause()
        await asyncio.sleep(1.5)  # thirty rounds of the loop, had it gone on
        await sandbox.resume()
        assert await count_in(sandbox) - before < 25
        assert await goes_on(sandbox)
        await sandbox.kill()

    rig.run(body)


def test_clones_differ_in_randomness_and_agree_on_the_time(rig):
    async def body(provider: Provider) -> None:
        boxes = [await start(provider), await start(provider)]
        draw = ["sh", "-c", "head -c 16 /dev/urandom | base64; cat /proc/sys/kernel/random/uuid"]
        drawn = [(await one.exec(draw)).stdout for one in boxes]
        assert len({one.strip() for one in b"".join(drawn).splitlines()}) == 4
        for one in boxes:
            told = int((await one.exec(["date", "+%s"])).stdout)
            assert abs(told - time.time()) < 10
            await one.kill()

    rig.run(body)


def test_a_snapshot_outlives_its_sandbox_and_what_was_stopped_does_not_run_in_copies(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await begin_counting(sandbox)
        ref = await sandbox.snapshot(id=new_id(), stop_processes=True, end=True)
        assert sandbox.death is not None
        assert sandbox.death.reason is DeathReason.RELEASED
        copy = await provider.restore(ref, id=new_id(), lease=Lease(owner="test"))
        before = await count_in(copy)
        assert b"n.new" not in (await copy.exec(["ps"])).stdout
        await asyncio.sleep(0.5)
        assert await count_in(copy) == before
        await provider.delete_snapshots([ref.snapshot_id])
        assert await count_in(copy) == before
        with pytest.raises(ImageError, match="no snapshot"):
            await provider.restore(ref, id=new_id(), lease=Lease(owner="test"))
        await copy.kill()

    rig.run(body)


def test_a_session_of_the_original_lives_on_and_the_copy_opens_its_own(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        session = await sandbox.open_session()
        await session.run("cd /tmp; x=5")
        (copy,) = await sandbox.fork([new_id()], lease=Lease(owner="test"))
        assert (await session.run("echo $x; pwd")).stdout == b"5\n/tmp\n"
        other = await copy.open_session()
        assert (await other.run("echo ${x:-none}")).stdout == b"none\n"
        await provider.kill([sandbox.id, copy.id])

    rig.run(body)


def test_a_process_that_takes_all_memory_ends_and_its_sandbox_lives_on(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        bomb = await sandbox.exec(["sh", "-c", "x=0123456789abcdef; while :; do x=$x$x; done"], timeout_s=60.0)
        assert bomb.exit_code == -signal.SIGKILL
        assert bomb.killed_by == ""
        assert (await sandbox.exec(["true"])).exit_code == 0
        await sandbox.kill()

    rig.run(body)


def test_a_fork_bomb_ends_at_its_limit_and_the_sandbox_lives_on(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        script = "n=0; while sleep 1000 & do n=$((n+1)); [ $n -gt 100 ] && break; done; jobs | wc -l"
        result = await sandbox.exec(["sh", "-c", script], timeout_s=60.0)
        assert b"fork" in result.stderr
        counts = await sandbox.usage()
        assert (counts.processes or 0) <= LIMITS.pids + 1
        await sandbox.kill()

    rig.run(body)


def test_layers_of_a_directory_image_lie_over_each_other_and_stay_as_they_are(rig, tmp_path):
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    for name in ("bin", "etc", "tmp"):
        (lower / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", lower / "bin" / "busybox")
    for name in ("sh", "cat", "echo", "id"):
        (lower / "bin" / name).symlink_to("busybox")
    (lower / "etc" / "both").write_text("lower")
    (lower / "etc" / "below").write_text("below")
    (upper / "etc").mkdir(parents=True)
    (upper / "etc" / "both").write_text("upper")

    async def body(provider: Provider) -> None:
        image = DirectoryImage(layers=(str(upper), str(lower)))
        sandbox = await start(provider, SandboxSpec(image=image, limits=LIMITS))
        assert (await sandbox.exec(["cat", "/etc/both", "/etc/below"])).stdout == b"upperbelow"
        await sandbox.write("/etc/both", b"mine")
        assert await sandbox.read("/etc/both") == b"mine"
        other = await start(provider, SandboxSpec(image=image, limits=LIMITS))
        assert await other.read("/etc/both") == b"upper"
        await provider.kill([sandbox.id, other.id])

    rig.run(body)
    assert (upper / "etc" / "both").read_text() == "upper"


def test_emulation_is_reported_as_a_kernel_of_its_own_and_no_more(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        assert sandbox.isolation is IsolationLevel.OWN_KERNEL
        kernel = (await sandbox.exec(["uname", "-r"])).stdout.decode().strip()
        assert kernel != os.uname().release
        names = (await sandbox.exec(["ls", "/sys/class/net"])).stdout + (
            await sandbox.exec(["cat", "/proc/net/dev"])
        ).stdout
        assert b"eth" not in names
        await sandbox.kill()

    rig.run(body)


def test_a_machine_that_is_killed_from_outside_is_the_providers_loss(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        mark = rig.provider.records.read(sandbox.id).first_process
        os.kill(mark.pid, signal.SIGKILL)
        await until(lambda: sandbox.death is not None)
        assert (sandbox.death.reason, sandbox.death.culprit) == (DeathReason.PROVIDER_LOST, Culprit.INFRASTRUCTURE)
        assert rig.provider.records.read(sandbox.id) is None

    rig.run(body)


def test_nothing_of_the_host_is_shown(rig):
    async def body(provider: Provider) -> None:
        with pytest.raises(SandboxUnsupported, match="expose"):
            await start(provider, msgspec.structs.replace(SPEC, expose=("/usr/share",)))

    rig.run(body)


def test_a_machine_runs_as_nobody_without_capabilities_and_may_start_no_program(rig):
    if os.geteuid() != 0:
        pytest.skip("only root can choose who a machine runs as")

    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        told = status_of(rig.provider.records.read(sandbox.id).first_process.pid)
        assert int(told["Uid"].split()[0]) > 1_000_000_000
        assert {told[name].strip() for name in ("CapEff", "CapPrm", "CapBnd")} == {"0" * 16}
        assert (told["NoNewPrivs"].strip(), told["Seccomp"].strip()) == ("1", "2")
        await sandbox.kill()

    rig.run(body)


def test_a_template_that_does_not_boot_in_time_says_so_and_leaves_nothing(tmp_path):
    if reason := why_no_qemu():
        pytest.skip(f"no machines under QEMU here: {reason}")
    with qemu_rig(tmp_path, accelerator="tcg", boot_s=0.2) as rig:

        async def body(provider: Provider) -> None:
            with pytest.raises(SandboxError, match=r"did not boot within 0.2 s"):
                await start(provider)
            assert list(tmp_path.iterdir()) == []

        rig.run(body)


def test_the_command_line_runs_a_program_in_a_machine_and_passes_its_end_on(tmp_path):
    if reason := why_no_qemu():
        pytest.skip(f"no machines under QEMU here: {reason}")
    words = ["sandbox", "run", "--backend", "qemu", "--directory", str(tmp_path), "--", "sh", "-c", "uname -r; exit 7"]
    done = subprocess.run(
        [sys.executable, "-m", "rollmill.cli", *words], capture_output=True, timeout=110, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stderr) == (7, b"")
    assert done.stdout.decode().strip() not in ("", os.uname().release)
    assert list(tmp_path.iterdir()) == []
