"""Snapshots of real sandboxes: what they keep, what a program may try with them, what is left when parts are killed.

They run as root or as a plain user, whoever runs the suite.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from image_builders import add, new_store, small_root
from rollmill.errors import (
    ConfigError,
    ImageError,
    SandboxBusy,
    SandboxDead,
    SandboxError,
    SandboxExhausted,
    SandboxRetryable,
)
from rollmill.sandboxes import (
    DeathReason,
    DirectoryImage,
    Lease,
    NamedImage,
    NamespaceProvider,
    NamespaceSettings,
    Provider,
    Sandbox,
    SandboxSpec,
    SnapshotRef,
    resume_session,
    save_session,
)
from rollmill.sandboxes.backends.namespaces.snapshot_disk import SnapshotDisk
from rollmill.sandboxes.disk_records import is_alive, mark_of
from sandbox_builders import LIMITS, SPEC, RealRig, new_id, real_rig, start, until, why_no_namespaces

pytestmark = pytest.mark.integration

AS_ROOT = os.geteuid() == 0
LEASE = Lease(owner="test", ttl_s=300.0)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")
    with real_rig(tmp_path_factory.mktemp("records"), snapshot_depth=3) as rig:
        yield rig


@pytest.fixture
def outside() -> Iterator[Path]:
    """A directory of the host that everybody may write to, and that the scratch of a sandbox does not hide."""
    directory = Path(tempfile.mkdtemp(dir="/var/tmp"))
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory)


async def shell(sandbox: Sandbox, line: str) -> str:
    result = await sandbox.exec(["sh", "-c", line])
    assert result.exit_code == 0, result.stderr.decode()
    return result.stdout.decode()


async def restored(provider: Provider, ref: SnapshotRef) -> Sandbox:
    return await provider.restore(ref, id=new_id(), lease=LEASE)


async def copy_of(provider: Provider, sandbox: Sandbox) -> Sandbox:
    """Return a restored copy; its snapshot is let go of."""
    (copy,) = await sandbox.fork([new_id()], lease=LEASE)
    return copy


async def end(*sandboxes: Sandbox) -> None:
    for one in sandboxes:
        await one.kill()


def shelves_of(zygote: int) -> list[int]:
    """Return the processes that hold layers for a zygote."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text(encoding="ascii", errors="replace").partition("(")[2].rpartition(")")
        except OSError:
            continue  # ended meanwhile
        if name == "sandbox-shelf" and int(rest.split()[1]) == zygote:
            found.append(int(path.parent.name))
    return found


def zygote_of(rig: RealRig) -> int:
    link = rig.provider._zygote
    assert link is not None
    assert link.mark is not None
    return link.mark.pid


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_modes_links_pipes_and_extended_attributes_are_kept(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await shell(
            sandbox,
            "cd /workspace; echo x > a; ln a b; chmod 6751 a; ln -s a link; ln -s /nowhere dangling; mkfifo -m 600 pipe"
            "; mkdir -m 1730 d; touch -d @1000000000 old; rm -rf /tmp; mkdir -m 700 /tmp",
        )
        code = (
            "import os; os.setxattr('/workspace/a', 'user.mine', b'1'); open('/workspace/hole', 'wb').truncate(1 << 24)"
        )
        assert (await sandbox.run_python(code)).exit_code == 0
        copy = await copy_of(provider, sandbox)
        for one in (sandbox, copy):
            seen = await shell(
                one,
                "cd /workspace; stat -c '%n %a %h %F' *; cat a b; readlink link dangling; stat -c %Y old"
                "; stat -c %a /tmp",
            )
            assert seen.splitlines() == [
                "a 6751 2 regular file",
                "b 6751 2 regular file",
                "d 1730 1 directory" if "d 1730 1 " in seen else "d 1730 2 directory",
                "dangling 777 1 symbolic link",
                "hole 644 1 regular file",
                "link 777 1 symbolic link",
                "old 644 1 regular empty file",
                "pipe 600 1 fifo",
                "x",
                "x",
                "a",
                "/nowhere",
                "1000000000",
                "700",
            ]
            seen_in_python = (
                "import os; print(os.getxattr('/workspace/a', 'user.mine'), os.stat('/workspace/hole').st_blocks)"
            )
            assert (await one.run_python(seen_in_python)).stdout == b"b'1' 0\n"
        await end(sandbox, copy)

    rig.run(body)


@pytest.mark.skipif(not AS_ROOT, reason="users inside need a range of ids")
def test_owners_are_kept_and_changes_to_the_hosts_directories_too(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.write("/home/user/mine", b"x", mode=0o600, user="user")
        await shell(sandbox, "echo new > /usr/share/new; rm -rf /usr/share/doc; mkdir /usr/share/doc")
        copy = await copy_of(provider, sandbox)
        deeper = await copy_of(provider, copy)
        for one in (sandbox, copy, deeper):
            assert await shell(one, "stat -c '%u %a' /home/user/mine; cat /usr/share/new; ls -A /usr/share/doc") == (
                "1000 600\nnew\n"
            )
            mine = await one.exec(["sh", "-c", "echo more >> mine; cat mine; id -u"], user="user")
            assert mine.stdout == b"xmore\n1000\n"
        await end(sandbox, copy, deeper)

    rig.run(body)


def test_a_chain_that_grows_too_deep_is_merged_and_shows_the_same(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        refs: list[SnapshotRef] = []
        for i in range(5):
            await shell(
                sandbox,
                f"cd /workspace; echo {i} > count; echo {i} > file{i}; mkdir -p d/e{i}; echo x > d/e{i}/f;"
                f" rm -rf d/e{i - 1} file{i - 2}; rm -rf swap; "
                + ("mkdir swap; echo x > swap/in" if i % 2 else "echo file > swap"),
            )
            refs.append(await sandbox.snapshot(id=new_id()))
        assert [one.depth for one in refs] == [1, 2, 3, 1, 2]
        seen = await shell(sandbox, "cd /workspace; find . -type f | sort | xargs grep . ")
        copy = await provider.restore(refs[-1], id=new_id(), lease=LEASE)
        assert await shell(copy, "cd /workspace; find . -type f | sort | xargs grep . ") == seen
        assert seen.splitlines() == ["./count:4", "./d/e4/f:x", "./file3:3", "./file4:4", "./swap:file"]
        earlier = await provider.restore(refs[2], id=new_id(), lease=LEASE)
        assert await shell(earlier, "cat /workspace/count /workspace/swap") == "2\nfile\n"
        await end(sandbox, copy, earlier)
        assert rig.provider.snapshot_totals() > (0, 0)
        await provider.delete_snapshots([one.snapshot_id for one in refs])
        assert await provider.snapshots() == ()
        assert rig.provider.snapshot_totals() == (0, 0)

    rig.run(body)


def test_an_image_of_directories_is_below_its_snapshots(rig, tmp_path):
    layer = tmp_path / "image"
    (layer / "data").mkdir(parents=True)
    (layer / "data/kept").write_text("of the image\n", encoding="ascii")
    (layer / "data/removed").write_text("of the image\n", encoding="ascii")
    spec = SandboxSpec(image=DirectoryImage(layers=(str(layer),)), limits=LIMITS)

    async def body(provider: Provider) -> None:
        sandbox = await start(provider, spec)
        await sandbox.remove("/data/removed")
        await sandbox.write("/data/written", b"x")
        copy = await copy_of(provider, sandbox)
        for one in (sandbox, copy):
            assert [entry.name for entry in await one.list_dir("/data")] == ["kept", "written"]
            assert await one.read("/data/kept") == b"of the image\n"
        assert sorted(os.listdir(layer / "data")) == ["kept", "removed"]
        await end(sandbox, copy)

    rig.run(body)


def test_a_snapshot_holds_its_image_and_stands_on_it_whatever_the_name_means_later(tmp_path, rig):
    store = new_store(tmp_path / "store")
    root = small_root(tmp_path / "root", programs=("sh", "cat"))
    spec = SandboxSpec(image=NamedImage(name="tools"), limits=LIMITS)
    (root / "version").write_text("1", encoding="ascii")
    digest = add(store, root, name="tools").digest
    with real_rig(tmp_path / "records", images=store.settings) as own:

        async def body(provider: Provider) -> None:
            sandbox = await start(provider, spec)
            await sandbox.write("/tmp/written", b"x")
            ref = await sandbox.snapshot(id=new_id(), end=True)
            assert len(store.show(digest).held_by) == 1
            (root / "version").write_text("2", encoding="ascii")
            add(store, root, name="tools")
            newer = await start(provider, spec)
            copy = await provider.restore(ref, id=new_id(), lease=LEASE)
            assert (await newer.read("/version"), await copy.read("/version")) == (b"2", b"1")
            assert (await copy.exec(["cat", "/tmp/written"])).stdout == b"x"
            await end(newer, copy)
            assert len(store.show(digest).held_by) == 1
            await provider.delete_snapshots([ref.snapshot_id])
            assert store.show(digest).held_by == ()

        own.run(body)


def test_a_warm_python_is_no_reason_to_refuse_and_is_warm_again_afterwards(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        assert (await sandbox.run_python("print(1)")).stdout == b"1\n"
        copy = await copy_of(provider, sandbox)
        for one in (sandbox, copy):
            assert (await one.run_python("print(2)")).stdout == b"2\n"
        await end(sandbox, copy)

    rig.run(body)


def test_calls_that_run_when_their_sandbox_is_stopped_for_a_snapshot_tell_so(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        session = await sandbox.open_session()
        await sandbox.run_python("pass")
        calls = [
            asyncio.ensure_future(sandbox.run_python("import time; print('on', flush=True); time.sleep(600)")),
            asyncio.ensure_future(sandbox.exec(["sh", "-c", "echo on; sleep 600"])),
            asyncio.ensure_future(session.run("echo on; sleep 600")),
        ]
        (own,) = [one for one in rig.provider.alive() if one.id == sandbox.id]
        await until(lambda: [len(one.chunks) for one in own.channel._jobs.values()] == [1, 1, 1])
        ref = await sandbox.snapshot(id=new_id(), stop_processes=True)
        for call in calls:
            result = await call
            assert (result.stdout, result.exit_code, result.killed_by) == (b"on\n", -signal.SIGKILL, "owner")
        assert not session.alive
        await session.close()
        assert (await sandbox.run_python("print(1)")).stdout == b"1\n"
        await end(sandbox)
        await provider.delete_snapshots([ref.snapshot_id])

    rig.run(body)


def test_what_was_in_shared_memory_is_gone_and_takes_no_room(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.write("/dev/shm/big", b"x" * 5_000_000)
        ref = await sandbox.snapshot(id=new_id())
        assert ref.disk_bytes < 1_000_000
        assert await sandbox.list_dir("/dev/shm") == ()
        await end(sandbox)
        await provider.delete_snapshots([ref.snapshot_id])

    rig.run(body)


# -- what a program may try ------------------------------------------------------------------------------------------


def test_an_image_whose_directories_are_links_to_the_host_changes_nothing_there(rig, tmp_path, outside):
    layer = tmp_path / "image"
    layer.mkdir()
    for name in ("etc", "home", "var", "dev", "proc", "workspace", "run"):
        (layer / name).symlink_to(outside)
    (layer / "tmp").symlink_to("../../../../../../.." + str(outside))
    image = DirectoryImage(layers=(str(layer),))

    async def body(provider: Provider) -> None:
        try:
            sandbox = await start(provider, SandboxSpec(image=image, limits=LIMITS))
        except SandboxError:
            return  # an image of which nothing can be made is as good
        await sandbox.kill()

    rig.run(body)
    assert os.listdir(outside) == []


def test_links_in_place_of_directories_lead_nowhere_when_the_sandbox_starts_anew(rig, outside):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        names = "etc home var tmp workspace run root sys opt"
        await shell(
            sandbox,
            f"for name in {names}; do mv /$name /old-$name && ln -s {outside} /$name; done"
            "; ln -sfn loop /srv; ln -sfn /srv /loop",
        )
        copy = await copy_of(provider, sandbox)
        for one in (sandbox, copy):
            assert (await one.exec(["readlink", "/etc"])).stdout.decode().strip() == str(outside)
            assert (await one.exec(["cat", "/old-etc/hostname"])).stdout == b"sandbox\n"
            assert (await one.exec(["true"])).exit_code == 0
        assert os.listdir(outside) == []
        await end(sandbox, copy)

    rig.run(body)
    assert os.listdir(outside) == []


def test_a_sandbox_without_a_byte_or_inode_left_is_snapshotted_and_goes_on(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.exec(["sh", "-c", "head -c 1G /dev/zero > /workspace/big"])
        await sandbox.run_python("for i in range(10000): open(f'/workspace/{i}', 'w')")
        copy = await copy_of(provider, sandbox)
        for one in (sandbox, copy):
            assert (await one.exec(["true"])).exit_code == 0
            usage = await one.usage()
            assert usage.disk_bytes is not None
            assert usage.disk_bytes > LIMITS.disk_bytes - 1024**2
            await one.write("/tmp/little", b"x")
            result = await one.exec(["sh", "-c", "head -c 10M /dev/zero > /tmp/more"])
            assert result.exit_code != 0
        await end(sandbox, copy)

    rig.run(body)


def test_no_device_gets_into_a_layer_and_no_layer_makes_one(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        code = """
import os, stat
for directory in ("/workspace", "/usr/share", "/tmp"):
    for kind, number in ((stat.S_IFCHR, os.makedev(1, 1)), (stat.S_IFBLK, os.makedev(8, 0)), (stat.S_IFCHR, 0)):
        try:
            os.mknod(f"{directory}/device", kind | 0o666, number)
            print("made", directory, number)
        except OSError:
            pass
"""
        assert (await sandbox.run_python(code)).stdout == b""
        copy = await copy_of(provider, sandbox)
        assert (
            await shell(copy, "find /workspace /tmp -type c -o -type b; ls /usr/share/device 2>/dev/null || true") == ""
        )
        assert (await copy.run_python(code)).stdout == b""
        await end(sandbox, copy)

    rig.run(body)


def test_marks_of_the_overlay_that_a_program_sets_itself_show_it_nothing_of_the_host(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        code = """
import os
os.makedirs("/workspace/d/etc")
for path in ("/workspace/d", "/workspace/d/etc", "/workspace"):
    for name in ("redirect", "metacopy", "origin", "opaque"):
        try:
            os.setxattr(path, "user.overlay." + name, b"y" if name == "opaque" else b"/../../../../etc")
        except OSError:
            pass
open("/workspace/d/shadow", "w").close()
"""
        assert (await sandbox.run_python(code)).exit_code == 0
        copy = await copy_of(provider, sandbox)
        for one in (sandbox, copy):
            assert await shell(one, "ls -A /workspace/d /workspace/d/etc; wc -c < /workspace/d/shadow") == (
                "/workspace/d:\netc\nshadow\n\n/workspace/d/etc:\n0\n"
            )
        await end(sandbox, copy)

    rig.run(body)


def test_a_daemon_that_left_its_parents_is_found_and_can_be_stopped(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await shell(sandbox, "(setsid sleep 600 >/dev/null 2>&1 &) ; sleep 0.05")
        with pytest.raises(SandboxBusy, match="sleep"):
            await sandbox.snapshot(id=new_id())
        writer = "(setsid sh -c 'while :; do echo x >> /workspace/log; done' >/dev/null 2>&1 &)"
        await shell(sandbox, writer + "; while ! test -s /workspace/log; do sleep 0.01; done")
        ref = await sandbox.snapshot(id=new_id(), stop_processes=True)
        before = len(await sandbox.read("/workspace/log"))
        copy = await provider.restore(ref, id=new_id(), lease=LEASE)
        assert len(await copy.read("/workspace/log")) == before
        await end(sandbox, copy)
        await provider.delete_snapshots([ref.snapshot_id])

    rig.run(body)


def test_a_sandbox_made_of_a_snapshot_is_isolated_as_the_first_was(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        copy = await copy_of(provider, sandbox)
        (one,), (other,) = [
            [found for found in await provider.list() if found.sandbox_id == which.id] for which in (sandbox, copy)
        ]
        assert one.protections == other.protections
        assert (await copy.exec(["mount", "-t", "tmpfs", "none", "/mnt"])).exit_code != 0
        assert "/var/tmp" not in await shell(copy, "cat /proc/self/mountinfo | grep ' /tmp ' || true")
        await end(sandbox, copy)

    rig.run(body)


# -- what is left ----------------------------------------------------------------------------------------------------


def test_when_the_shelf_is_killed_snapshots_in_memory_are_lost_and_sandboxes_live_on(tmp_path, rig):
    with real_rig(tmp_path / "own") as own:

        async def body(provider: Provider) -> None:
            sandbox = await start(provider)
            await sandbox.write("/workspace/a", b"1")
            ref = await sandbox.snapshot(id=new_id())
            (shelf,) = shelves_of(zygote_of(own))
            copy = await provider.restore(ref, id=new_id(), lease=LEASE)
            os.kill(shelf, signal.SIGKILL)
            await until(lambda: not own.provider._snapshots.book.snapshots())
            with pytest.raises(ImageError, match="no snapshot"):
                await provider.restore(ref, id=new_id(), lease=LEASE)
            for one in (sandbox, copy):
                assert await one.read("/workspace/a") == b"1"
                with pytest.raises(SandboxError, match="lost"):
                    await one.snapshot(id=new_id())
            fresh = await start(provider)
            await fresh.write("/workspace/a", b"2")
            again = await copy_of(provider, fresh)  # with a shelf of its own
            assert await again.read("/workspace/a") == b"2"
            await end(sandbox, copy, fresh, again)

        own.run(body)
        zygote = zygote_of(own)
    assert shelves_of(zygote) == []


def test_a_shelf_that_is_lost_in_the_middle_of_a_snapshot_ends_its_sandbox_and_that_is_said(tmp_path, rig):
    with real_rig(tmp_path / "own") as own:

        async def body(provider: Provider) -> None:
            sandbox = await start(provider)
            await sandbox.snapshot(id=new_id())
            held = own.provider._snapshots
            hold = held.hold

            async def hold_and_lose(sandbox_id: str) -> Any:
                layer = await hold(sandbox_id)
                for shelf in shelves_of(zygote_of(own)):
                    os.kill(shelf, signal.SIGKILL)
                await until(lambda: held.losses == 1)
                return layer

            held.hold = hold_and_lose
            with pytest.raises(SandboxDead, match="lost with the process that kept them") as raised:
                await sandbox.snapshot(id=new_id())
            assert (raised.value.reason, raised.value.fault) == ("provider_lost", "infrastructure")
            assert own.provider.alive() == ()
            assert await provider.snapshots() == ()
            held.hold = hold
            await end(await copy_of(provider, await start(provider)))

        own.run(body)


def test_a_shelf_ends_with_the_zygote(tmp_path, rig):
    with real_rig(tmp_path / "own") as own:

        async def body(provider: Provider) -> None:
            sandbox = await start(provider)
            await sandbox.snapshot(id=new_id())
            zygote = zygote_of(own)
            (shelf,) = shelves_of(zygote)
            mark = mark_of(shelf)
            assert mark is not None
            os.kill(zygote, signal.SIGKILL)
            await until(lambda: sandbox.death is not None)
            await until(lambda: not is_alive(mark))
            assert await provider.snapshots() == ()

        own.run(body)


def test_a_sandbox_that_ended_while_its_layer_was_taken_is_not_waited_for(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        (own,) = [one for one in rig.provider.alive() if one.id == sandbox.id]
        own.begin_snapshot()
        await own.hand_layer_out(force=False)
        await sandbox.kill()
        async with asyncio.timeout(10):
            with pytest.raises(SandboxDead, match="released"):
                await own.end_first_process()

    rig.run(body)


def test_snapshots_have_a_bound_on_what_they_take_together(tmp_path, rig):
    with real_rig(tmp_path / "own", snapshot_bytes=3_000_000) as own:

        async def body(provider: Provider) -> None:
            sandbox = await start(provider)
            await sandbox.write("/workspace/a", b"x" * 2_000_000)
            ref = await sandbox.snapshot(id=new_id())
            await sandbox.write("/workspace/b", b"x" * 2_000_000)
            with pytest.raises(SandboxRetryable, match="snapshot_bytes"):
                await sandbox.snapshot(id=new_id())
            assert await sandbox.read("/workspace/b", max_bytes=2_000_000) == b"x" * 2_000_000
            await end(sandbox)
            other = await start(provider)
            await other.write("/workspace/b", b"x" * 2_000_000)
            await provider.delete_snapshots([ref.snapshot_id])
            await other.snapshot(id=new_id(), end=True)

        own.run(body)


class Crowd:
    """Workers that do whatever they like with the sandboxes and snapshots of each other, by a seed."""

    def __init__(self, provider: Provider, *, seed: int) -> None:
        self._provider = provider
        self._choose = random.Random(seed)
        self._sandboxes: list[Sandbox] = []
        self._refs: list[SnapshotRef] = []

    async def work(self, *, steps: int) -> None:
        for _ in range(steps):
            step = self._choose.choice([self.make, self.write, self.snap, self.snap, self.give_up, self.restore,
                                        self.fork, self.end, self.delete])  # fmt: skip
            with suppress(SandboxBusy, SandboxDead, ImageError):  # by what another one did meanwhile
                await step()

    def _any(self) -> Sandbox:
        return self._choose.choice(self._sandboxes)

    async def make(self) -> None:
        self._sandboxes.append(await start(self._provider))

    async def write(self) -> None:
        await self._any().write(f"/workspace/{self._choose.randrange(4)}", self._choose.randbytes(100))

    async def snap(self) -> None:
        self._refs.append(await self._any().snapshot(id=new_id(), stop_processes=True))

    async def give_up(self) -> None:
        taking = asyncio.ensure_future(self._any().snapshot(id=new_id(), stop_processes=True))
        await asyncio.sleep(self._choose.random() * 0.03)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)

    async def restore(self) -> None:
        if self._refs:
            self._sandboxes.append(await restored(self._provider, self._choose.choice(self._refs)))

    async def fork(self) -> None:
        forks = await self._any().fork([new_id(), new_id()], lease=LEASE, stop_processes=True)
        assert await forks[0].list_dir("/workspace") == await forks[1].list_dir("/workspace")
        self._sandboxes += forks

    async def end(self) -> None:
        if len(self._sandboxes) > 2:
            await self._sandboxes.pop(self._choose.randrange(len(self._sandboxes))).kill()

    async def delete(self) -> None:
        if self._refs:
            ref = self._refs.pop(self._choose.randrange(len(self._refs)))
            await self._provider.delete_snapshots([ref.snapshot_id])


@pytest.mark.parametrize("on_disk", [False, True])
def test_whatever_is_done_at_once_only_what_is_held_is_left(tmp_path, rig, on_disk):
    directory = tmp_path / "snapshots" if on_disk else None
    with real_rig(tmp_path / "records", snapshot_directory=directory, snapshot_depth=4) as own:

        async def body(provider: Provider) -> None:
            crowd = Crowd(provider, seed=1)
            await crowd.make()
            async with asyncio.TaskGroup() as group:
                for _ in range(5):
                    group.create_task(crowd.work(steps=12))
            ends = [one.death for one in await provider.list() if one.death is not None]
            assert {end.reason for end in ends} <= {DeathReason.RELEASED}
            await provider.kill([one.sandbox_id for one in await provider.list() if one.death is None])
            await provider.delete_snapshots([one.snapshot_id for one in await provider.snapshots()])
            assert own.provider.snapshot_totals() == (0, 0)
            zygote = zygote_of(own)
            for shelf in shelves_of(zygote):
                mounts = Path(f"/proc/{shelf}/mountinfo")
                await until(lambda mounts=mounts: "/layer-" not in mounts.read_text(encoding="utf-8"))
            assert len(os.listdir(f"/proc/{zygote}/fd")) == 7  # standard streams, owner, orders, shelf, template
            if directory is not None:
                layers = directory / "layers"
                await until(lambda: not os.listdir(layers))
                assert os.listdir(directory / "snapshots") == []

        own.run(body)


# -- on a disk -------------------------------------------------------------------------------------------------------


def test_a_snapshot_whose_file_cannot_be_written_is_in_no_list_and_holds_nothing(tmp_path, rig, monkeypatch):
    with real_rig(tmp_path / "records", snapshot_directory=tmp_path / "snapshots") as own:

        async def body(provider: Provider) -> None:
            sandbox = await start(provider)
            await sandbox.write("/workspace/kept", b"x")
            with monkeypatch.context() as broken:
                broken.setattr(SnapshotDisk, "write", refuse_to_write)
                with pytest.raises(SandboxExhausted, match="No space left"):
                    await sandbox.snapshot(id="mine")
            assert await provider.snapshots() == ()
            assert await sandbox.read("/workspace/kept") == b"x"  # it goes on
            ref = await sandbox.snapshot(id="mine")  # and the id is free
            assert ref.durable
            await end(sandbox)
            await provider.delete_snapshots([ref.snapshot_id])
            assert own.provider.snapshot_totals() == (0, 0)

        own.run(body)


def refuse_to_write(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_layer_that_the_disk_does_not_let_go_of_keeps_no_sandbox_from_ending(tmp_path, rig, monkeypatch):
    directory = tmp_path / "snapshots"
    with real_rig(tmp_path / "records", snapshot_directory=directory) as own:

        async def body(provider: Provider) -> None:
            sandbox = await start(provider)
            ref = await sandbox.snapshot(id="one")
            await provider.delete_snapshots([ref.snapshot_id])  # held by the sandbox alone from now on
            with monkeypatch.context() as broken:
                broken.setattr(SnapshotDisk, "discard", refuse_to_discard)
                await end(sandbox)
            assert sandbox.death is not None
            assert [one.death is None for one in await provider.list()] == [False]
            other = await start(provider)  # the next one that goes takes it along
            again = await other.snapshot(id="two", end=True)
            await provider.delete_snapshots([again.snapshot_id])
            await until(lambda: not os.listdir(directory / "layers"))

        own.run(body)


def refuse_to_discard(*_: object) -> None:
    raise SandboxError("the trash is full")


def test_snapshots_on_a_disk_outlive_their_provider(tmp_path, rig):
    directory = tmp_path / "snapshots"
    kept: list[SnapshotRef] = []
    with real_rig(tmp_path / "one", snapshot_directory=directory, snapshot_depth=2) as one:

        async def first(provider: Provider) -> None:
            sandbox = await start(provider)
            for i in range(4):
                await shell(sandbox, f"cd /workspace; echo {i} > count; ln -f count other; echo x > only{i}")
                if i:
                    await sandbox.remove(f"/workspace/only{i - 1}")
                kept.append(await sandbox.snapshot(id=new_id()))
            assert [ref.depth for ref in kept] == [1, 2, 1, 2]
            assert all(ref.durable for ref in kept)
            forks = await sandbox.fork([new_id()], lease=LEASE)
            await forks[0].write("/workspace/later", b"x")
            deeper = await forks[0].snapshot(id=new_id())  # stores what the fork had left in memory
            assert deeper.durable
            again = await provider.restore(deeper, id=new_id(), lease=LEASE)
            assert await shell(again, "cd /workspace; ls; cat count") == "count\nlater\nonly3\nother\n3\n"
            await end(*forks, again)
            await provider.delete_snapshots([deeper.snapshot_id])
            await provider.delete_snapshots([kept[0].snapshot_id])
            await end(sandbox)

        one.run(first)
        with pytest.raises(ConfigError, match="another provider"):
            NamespaceProvider(NamespaceSettings(directory=tmp_path / "two", snapshot_directory=directory))
    with real_rig(tmp_path / "two", snapshot_directory=directory) as two:

        async def second(provider: Provider) -> None:
            assert await provider.snapshots() == tuple(kept[1:])
            for i in (1, 3):
                copy = await provider.restore(kept[i], id=new_id(), lease=LEASE)
                assert await shell(copy, "cd /workspace; ls; cat count; stat -c %h other") == (
                    f"count\nonly{i}\nother\n{i}\n2\n"
                )
                await shell(copy, "cd /workspace; rm -r *; echo new > count")
                await end(copy)
            await provider.delete_snapshots([ref.snapshot_id for ref in kept])
            await until(lambda: not os.listdir(directory / "layers"))

        two.run(second)
    assert os.listdir(directory / "snapshots") == []


def test_what_a_crash_left_half_written_is_discarded_and_a_damaged_file_is_told(tmp_path, rig):
    directory = tmp_path / "snapshots"
    settings = NamespaceSettings(directory=tmp_path / "records", snapshot_directory=directory)

    async def opened() -> tuple[SnapshotRef, ...]:
        async with NamespaceProvider(settings) as provider:
            return await provider.snapshots()

    for name in ("layers/layer-1/up/root", "layers/layer-2.part/up"):
        (directory / name).mkdir(parents=True)
    assert asyncio.run(opened()) == ()
    assert os.listdir(directory / "layers") == []
    (directory / "snapshots/s.json").write_bytes(b"{")
    with pytest.raises(SandboxError, match="damaged"):
        asyncio.run(opened())
    (directory / "snapshots/s.json").unlink()
    assert asyncio.run(opened()) == ()


@pytest.mark.parametrize("what", ["id_base", "layer", "owner"])
def test_a_file_that_leads_elsewhere_or_gives_other_ids_is_refused(tmp_path, rig, what):
    directory = tmp_path / "snapshots"
    with real_rig(tmp_path / "one", snapshot_directory=directory) as one:

        async def body(provider: Provider) -> None:
            sandbox = await start(provider)
            await sandbox.snapshot(id="s", end=True)

        one.run(body)
    path = directory / "snapshots/s.json"
    found = json.loads(path.read_bytes())
    if what == "id_base":
        found["kept"]["id_base"] = 0
    elif what == "layer":
        found["layers"][0]["layer_id"] = found["kept"]["chain"][0] = "../../etc"
    elif not AS_ROOT:
        pytest.skip("only root gives a directory away")
    else:
        os.chown(directory, 12345, 12345)
    path.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises((SandboxError, ConfigError), match="damaged" if what != "owner" else "belongs to user 12345"):
        NamespaceProvider(NamespaceSettings(directory=tmp_path / "two", snapshot_directory=directory))


def test_a_snapshot_that_finds_no_room_on_its_disk_leaves_the_sandbox_alive(tmp_path, rig):
    if not AS_ROOT:
        pytest.skip("only root mounts a disk that is too small")
    directory = tmp_path / "snapshots"
    directory.mkdir()
    mounted = os.system(f"mount -t tmpfs -o size=3m none {directory}")
    if mounted != 0:
        pytest.skip("nothing can be mounted here")
    try:
        with real_rig(tmp_path / "records", snapshot_directory=directory) as own:

            async def body(provider: Provider) -> None:
                sandbox = await start(provider, SPEC)
                data = os.urandom(6_000_000)
                await sandbox.write("/workspace/a", data)
                for end_it in (False, True):  # what was to end after it lives on too
                    with pytest.raises(SandboxError, match="No space"):
                        await sandbox.snapshot(id=new_id(), end=end_it)
                assert await sandbox.read("/workspace/a") == data
                await sandbox.remove("/workspace/a")
                assert await provider.snapshots() == ()
                await end(sandbox)

            own.run(body)
    finally:
        assert os.system(f"umount {directory}") == 0


# -- sessions --------------------------------------------------------------------------------------------------------


def test_no_output_and_no_program_left_behind_tells_the_end_of_a_line(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        session = await sandbox.open_session()
        forged = (
            "for i in 1 2 3 4 5 6 7 8 9; do for p in /proc/[0-9]*; do echo 'x 0' > $p/fd/$i; done; done 2>/dev/null"
        )
        await session.run(f"(sleep 0.1; {forged}) >/dev/null 2>&1 &")
        result = await session.run("echo rollmill 0; sleep 0.4; echo end; (exit 4)")
        # What it wrote to the shell's own output is output, and nothing else.
        assert (result.stdout.replace(b"x 0\n", b""), result.exit_code) == (b"rollmill 0\nend\n", 4)
        assert result.wall_s >= 0.4
        assert (await session.run("echo $?")).stdout == b"4\n"
        await end(sandbox)

    rig.run(body)


def test_functions_loops_here_documents_and_options_of_the_shell_stay(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        session = await sandbox.open_session()
        await session.run(
            "greet() { echo hello $1; return 4; }; set -u; umask 077; exec 5>/tmp/five; shopt -s nullglob"
        )
        assert (await session.run("greet you")).exit_code == 4
        assert (await session.run("echo to five >&5; cat /tmp/five; umask")).stdout == b"to five\n0077\n"
        assert (await session.run("for i in 1 2; do\n  echo $i\ndone\ncat <<'END'\n$i\nEND")).stdout == b"1\n2\n$i\n"
        assert (await session.run("echo $unset_one")).exit_code != 0
        assert not session.alive  # as with any shell that is told to treat this as an error
        await end(sandbox)

    rig.run(body)


@pytest.mark.parametrize("name", ["bash", "sh"])
def test_a_shell_in_a_fork_goes_on_with_what_the_first_one_had_in_mind(rig, name):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        session = await sandbox.open_session(shell=name)
        await session.run(
            "mkdir -p '/workspace/a b'; cd '/workspace/a b'; X='it'\\''s\n\"two\" $lines'; export OUT=out; umask 027"
        )
        if name == "bash":
            await session.run(
                "list=(one 'two three'); readonly FIXED=1; f() { echo \"f $X\"; }; shopt -s nullglob; set -u"
            )
        state = await save_session(session)
        assert (await session.run("echo on")).stdout == b"on\n"
        await session.close()
        (fork,) = await sandbox.fork([new_id()], lease=LEASE)
        again = await resume_session(fork, state)
        result = await again.run('echo "$X"; pwd; umask; sh -c "echo \\$OUT"')
        assert result.stdout == b'it\'s\n"two" $lines\n/workspace/a b\n0027\nout\n'
        if name == "bash":
            result = await again.run('f; echo "${list[1]} $FIXED"; shopt nullglob; case $- in *u*) echo strict;; esac')
            assert result.stdout == b'f it\'s\n"two" $lines\ntwo three 1\nnullglob       \ton\nstrict\n'
            assert result.stderr == b""
        assert await fork.list_dir("/tmp") == ()
        await end(sandbox, fork)

    rig.run(body)


def test_a_shell_whose_output_leads_elsewhere_has_no_state_to_give(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        session = await sandbox.open_session()
        await session.run("exec >/tmp/log")
        with pytest.raises(SandboxError, match="in mind"):
            await save_session(session)
        await end(sandbox)

    rig.run(body)


def test_a_loop_of_the_shell_itself_ends_with_its_session(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        session = await sandbox.open_session()
        result = await session.run("while :; do :; done", timeout_s=0.2)
        assert (result.timed_out, session.alive) == (True, False)
        assert (await sandbox.exec(["pgrep", "-c", "bash"])).stdout == b"0\n"
        await end(sandbox)

    rig.run(body)


def test_a_shell_that_is_named_runs_and_what_its_lines_started_ends_with_it(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        session = await sandbox.open_session(shell="sh")
        assert (await session.run("echo $0; x=1; sleep 600 & echo $x")).stdout == b"sh\n1\n"
        await session.close()
        assert (await sandbox.exec(["pgrep", "-c", "bash"])).stdout == b"0\n"
        ref = await sandbox.snapshot(id=new_id())  # nothing of it runs
        assert (await sandbox.exec(["pgrep", "-c", "sleep"])).stdout == b"0\n"
        await provider.delete_snapshots([ref.snapshot_id])
        await end(sandbox)

    rig.run(body)


# -- terminals -------------------------------------------------------------------------------------------------------


def test_a_terminal_controls_its_program_and_changes_its_size(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        line = "trap 'stty size' WINCH; tty; echo ready; read x; echo got $x; read y; echo end"
        process = await sandbox.start_process(["bash", "-c", line], pty=(24, 80), user="user" if AS_ROOT else None)
        seen = b""
        async for _, data in process.output():
            seen += data
            if b"ready" in seen and b"30 100" not in seen:
                await process.resize(30, 100)
                await process.write_stdin(b"hello\n")
            if b"got hello" in seen:
                await process.close_stdin()
        result = await process.wait()
        assert result.exit_code == 0
        words = result.stdout.decode().split("\r\n")
        assert words[0].startswith("/dev/pts/")
        assert {"ready", "30 100", "got hello", "end"} <= {word.removeprefix("hello") for word in words} | set(words)
        await end(sandbox)

    rig.run(body)


def test_a_signal_typed_into_a_terminal_reaches_its_program(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        process = await sandbox.start_process(["cat"], pty=(24, 80))
        await process.write_stdin(b"ready\n")
        seen = b""
        async for _, data in process.output():
            seen += data
            if seen == b"ready\r\nready\r\n":  # by the terminal, and by the program
                await process.write_stdin(b"\x03")
        assert (await process.wait()).exit_code == -signal.SIGINT
        killed = await sandbox.start_process(["sleep", "600"], pty=(24, 80))
        await killed.signal(signal.SIGKILL)
        assert (await killed.wait()).exit_code == -signal.SIGKILL
        await end(sandbox)

    rig.run(body)


def test_terminals_end_at_their_number_and_the_sandbox_lives_on(rig):
    async def body(provider: Provider) -> None:
        spec = msgspec.structs.replace(SPEC, limits=msgspec.structs.replace(LIMITS, pids=200))
        sandbox = await start(provider, spec)
        refused = 0
        processes = []
        for _ in range(70):
            try:
                processes.append(await sandbox.start_process(["sleep", "600"], pty=(24, 80)))
            except SandboxError:
                refused += 1
        assert refused >= 6
        assert (await sandbox.exec(["true"])).exit_code == 0
        for one in processes:
            await one.signal(signal.SIGKILL)
        for one in processes:
            await one.wait()
        assert (await (await sandbox.start_process(["true"], pty=(24, 80))).wait()).exit_code == 0
        await end(sandbox)

    rig.run(body)


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_large_tree_is_removed_in_parts_and_one_that_is_nested_too_deep_is_refused(rig):
    async def body(provider: Provider) -> None:
        spec = msgspec.structs.replace(SPEC, limits=msgspec.structs.replace(LIMITS, inodes=8000))
        sandbox = await start(provider, spec)
        code = """
import os
for i in range(6000):
    open(f"/workspace/tree/{i}", "w").close()
os.makedirs("/workspace/tree/a/b/c")
os.symlink("/etc", "/workspace/tree/link")
os.mkdir("/workspace/deep")
os.chdir("/workspace/deep")
for i in range(400):
    os.mkdir("d")
    os.chdir("d")
"""
        await sandbox.make_dir("/workspace/tree")
        result = await sandbox.run_python(code)
        assert result.exit_code == 0, result.stderr
        beside = asyncio.ensure_future(sandbox.remove("/workspace/tree", recursive=True))
        assert (await sandbox.exec(["true"])).exit_code == 0
        await beside
        with pytest.raises(SandboxError, match="nested deeper"):
            await sandbox.remove("/workspace/deep", recursive=True)
        assert [one.name for one in await sandbox.list_dir("/workspace")] == ["deep"]
        assert (await sandbox.stat("/etc")).kind == "directory"
        refs = [await sandbox.snapshot(id=new_id()) for _ in range(4)]
        assert [one.depth for one in refs] == [1, 2, 3, 1]  # the last one was merged
        assert (await sandbox.exec(["rm", "-r", "/workspace/deep"])).exit_code == 0
        assert await sandbox.list_dir("/workspace") == ()
        await end(sandbox)
        await provider.delete_snapshots([one.snapshot_id for one in await provider.snapshots()])

    rig.run(body)


def test_links_are_told_of_themselves_and_removed_alone(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.write("/workspace/target/f", b"1")
        await shell(sandbox, "cd /workspace; ln -s target link; ln -s /nowhere dangling; ln -s loop loop")
        found = await sandbox.stat("/workspace/link")
        assert (found.kind, found.target) == ("link", "target")
        assert (await sandbox.stat("/workspace/dangling")).target == "/nowhere"
        for name in ("link", "dangling", "loop"):
            await sandbox.remove(f"/workspace/{name}", recursive=True)
        assert [one.name for one in await sandbox.list_dir("/workspace")] == ["target"]
        assert await sandbox.read("/workspace/target/f") == b"1"
        await end(sandbox)

    rig.run(body)
