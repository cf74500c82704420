"""Root file systems from directories, host directories that are shown, and many sandboxes at once."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rollmill.errors import ConfigError, ImageError, SandboxUnsupported
from rollmill.sandboxes import DirectoryImage, Provider, SandboxSpec
from sandbox_builders import LIMITS, RealRig, real_rig, start, why_no_namespaces

pytestmark = pytest.mark.integration

AS_ROOT = os.geteuid() == 0
PROGRAMS = ("sh", "cat", "id", "touch", "stat", "ls", "rm", "true")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")
    with real_rig(tmp_path_factory.mktemp("records")) as rig:
        yield rig


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> DirectoryImage:
    """A few programs with their libraries, in two layers; a colon in a path must do no harm."""
    base = tmp_path_factory.mktemp("image")
    lower, upper = base / "low:er", base / "upper"
    (lower / "usr/bin").mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (lower / "usr" / name).mkdir(exist_ok=True)
        (lower / name).symlink_to(f"usr/{name}")
    for name in PROGRAMS:
        program = shutil.which(name)
        assert program is not None
        shutil.copy(os.path.realpath(program), lower / "usr/bin" / name)
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+)", listed):
            target = (
                lower / library.lstrip("/").replace("lib64/", "usr/lib64/", 1) if library.startswith("/lib64") else None
            )
            target = target or lower / "usr" / library.lstrip("/").removeprefix("usr/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(library), target)
    (lower / "etc").mkdir()
    (lower / "etc/hosts").write_text("of the image\n", encoding="ascii")
    (lower / "what").write_text("lower\n", encoding="ascii")
    (lower / "private").write_text("for its owner\n", encoding="ascii")
    (lower / "private").chmod(0o600)
    upper.mkdir()
    (upper / "what").write_text("upper\n", encoding="ascii")
    return DirectoryImage(layers=(str(upper), str(lower)))


def test_an_image_of_layers_is_the_root_and_the_uppermost_wins(rig, image):
    async def body(provider: Provider) -> None:
        await provider.prepare(image)
        sandbox = await start(provider, SandboxSpec(image=image, limits=LIMITS))
        result = await sandbox.exec(["sh", "-c", "cat /what /etc/hosts /private; id -u; ls -d /usr/share 2>&1"])
        lines = result.stdout.decode().splitlines()
        assert lines[:4] == ["upper", "of the image", "for its owner", "0"]
        assert "No such file" in lines[4]
        assert {one.name for one in await sandbox.list_dir("/")} >= {"workspace", "tmp", "proc", "dev", "what"}
        with pytest.raises(SandboxUnsupported, match="python3"):
            await sandbox.run_python("print(1)")
        assert (await sandbox.exec(["true"])).exit_code == 0
        await sandbox.kill()

    rig.run(body)


def test_root_inside_owns_the_image_and_changes_only_its_copy(rig, image):
    async def body(provider: Provider) -> None:
        one, other = [await start(provider, SandboxSpec(image=image, limits=LIMITS)) for _ in "ab"]
        line = "stat -c %u /what && touch /usr/bin/new && rm /what && echo changed > /etc/hosts && cat /etc/hosts"
        result = await one.exec(["sh", "-c", line])
        assert (result.stdout, result.stderr) == (b"0\nchanged\n", b"")
        assert (await other.exec(["cat", "/what"])).stdout == b"upper\n"
        await one.kill()
        await other.kill()

    rig.run(body)
    layer = Path(image.layers[0])
    assert (layer / "what").read_text(encoding="ascii") == "upper\n"
    assert (layer / "what").stat().st_uid == os.geteuid()


@pytest.mark.skipif(not AS_ROOT, reason="a plain user's sandboxes have one user")
def test_users_inside_are_kept_from_each_others_files_and_from_roots(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.write("/workspace/secret", b"x", mode=0o600)
        await sandbox.write("/home/user/own", b"mine", mode=0o600, user="user")
        told = await sandbox.exec(["sh", "-c", "id -un; cat ~/own; cat /workspace/secret"], user="user")
        assert told.stdout == b"user\nmine"
        assert b"Permission denied" in told.stderr
        assert (await sandbox.run_python("import os; print(os.getuid())", user="user")).stdout == b"1000\n"
        with pytest.raises(SandboxUnsupported, match="no user 'stranger'"):
            await sandbox.exec(["true"], user="stranger")
        await sandbox.kill()

    rig.run(body)


@pytest.mark.skipif(AS_ROOT, reason="as root there are users")
def test_a_plain_users_sandbox_has_no_other_users(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        with pytest.raises(SandboxUnsupported, match="has one user"):
            await sandbox.exec(["true"], user="user")
        await sandbox.kill()

    rig.run(body)


@pytest.mark.parametrize("path", ["/", "/proc", "/proc/sys", "/dev/null", "/sys/..", "//", "/usr/../dev"])
def test_what_is_the_sandboxs_own_cannot_be_shown_from_the_host(rig, path):
    async def body(provider: Provider) -> None:
        with pytest.raises(ConfigError, match="is its own"):
            await start(provider, SandboxSpec(limits=LIMITS, expose=(path,)))

    rig.run(body)


@pytest.mark.parametrize("path", ["/not/there", "relative"])
def test_what_is_not_there_cannot_be_shown(rig, path):
    async def body(provider: Provider) -> None:
        with pytest.raises(ImageError):
            await start(provider, SandboxSpec(limits=LIMITS, expose=(path,)))

    rig.run(body)


def test_a_shown_directory_is_read_only_with_all_that_is_below(rig, tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/f").write_text("text", encoding="ascii")
    tmp_path.chmod(0o755)

    async def body(provider: Provider) -> None:
        sandbox = await start(provider, SandboxSpec(limits=LIMITS, expose=(str(tmp_path), str(tmp_path / "a/b/f"))))
        assert await sandbox.read(f"{tmp_path}/a/b/f") == b"text"
        for line in (f"echo x > {tmp_path}/a/b/f", f"rm {tmp_path}/a/b/f", f"touch {tmp_path}/new"):
            assert (await sandbox.exec(["sh", "-c", line])).exit_code != 0
        await sandbox.kill()

    rig.run(body)
    assert (tmp_path / "a/b/f").read_text(encoding="ascii") == "text"
    assert not (tmp_path / "new").exists()


def test_a_burst_of_starts_all_work_and_all_go(rig):
    spec = SandboxSpec(limits=msgspec.structs.replace(LIMITS, inodes=1000))

    async def one(provider: Provider, i: int) -> bytes:
        sandbox = await start(provider, spec)
        try:
            return (await sandbox.exec(["echo", str(i)])).stdout
        finally:
            await sandbox.kill()

    async def body(provider: Provider) -> list[bytes]:
        return await asyncio.gather(*(one(provider, i) for i in range(30)))

    assert rig.run(body) == [f"{i}\n".encode() for i in range(30)]
    assert list(rig.directory.iterdir()) == []


def test_a_cancelled_start_leaves_nothing(rig):
    async def body(provider: Provider) -> None:
        calls = [asyncio.ensure_future(start(provider)) for _ in range(5)]
        for call in calls:
            await asyncio.sleep(0.003)
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for call in calls:
            if not call.cancelled():
                await call.result().kill()
        async with asyncio.timeout(30):
            while rig.provider.records.read_all():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    rig.run(body)


ON_AN_OVERLAY = """
import asyncio, ctypes, sys
from pathlib import Path
from rollmill.sandboxes import Lease, NamespaceProvider, NamespaceSettings, SandboxSpec
libc, (base,) = ctypes.CDLL(None, use_errno=True), sys.argv[1:]
NEWNS, PRIVATE = 0x20000, 16384 | 1 << 18
options = f"lowerdir=/usr,upperdir={base}/up,workdir={base}/work".encode()
if libc.unshare(NEWNS) or libc.mount(b"none", b"/", None, PRIVATE, None):
    sys.exit("no mount namespace")
if libc.mount(b"tmpfs", base.encode(), b"tmpfs", 0, None):
    sys.exit("no tmpfs")
for name in ("up", "work", "records"):
    Path(base, name).mkdir()
if libc.mount(b"overlay", b"/usr", b"overlay", 0, options):
    sys.exit("no overlay")
async def main():
    async with NamespaceProvider(NamespaceSettings(directory=Path(base, "records"))) as provider:
        sandbox = await provider.create(SandboxSpec(), id="a", lease=Lease(owner="test"))
        done = await sandbox.exec(["sh", "-c", "id -u; stat -c %u /usr/bin; touch /usr/bin/new || echo refused"])
        print(done.stdout.decode().split(), "owners_not_mapped" in sandbox.protections, sandbox.isolation.name)
asyncio.run(main())
"""


@pytest.mark.skipif(not AS_ROOT, reason="only root maps owners")
def test_where_owners_cannot_be_mapped_as_in_many_containers_files_are_readable_and_that_is_reported(rig, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ON_AN_OVERLAY, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    if done.stderr.startswith("no "):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['0', '65534', 'refused'] True ")
