"""`rollmill sandbox` as a process, and the whole contract and abuse suites as a plain user."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollmill
from sandbox_builders import REQUIRED, Provider, real_rig, required, start, until, why_no_namespaces

pytestmark = pytest.mark.integration

TESTS = Path(__file__).parents[1]
PLAIN_USER = 54321
SOMEBODY_ELSES_PYTHON = "/usr/bin/python3"
# What is chosen of them by their marks, and the files; those of a group are collected at once.
PLAIN_SUITES = {
    "contract": (
        "not slow and not gpu",
        ("contract/test_sandbox_contract.py", "contract/test_sandbox_state_contract.py"),
    ),
    "abuse": ("not slow and not gpu", ("integration/test_sandbox_abuse.py", "integration/test_sandbox_watchdog.py")),
    "images": (
        "not slow and not gpu",
        ("integration/test_sandbox_image_build.py", "integration/test_sandbox_image_store.py"),
    ),
    "service": (
        "not slow and not gpu",
        ("integration/test_sandbox_service.py", "integration/test_sandbox_snapshots.py"),
    ),
    "slow altogether": (
        "not gpu",
        (
            "contract/test_sandbox_adapters_service.py",
            "integration/test_sandbox_attacks.py",
            "integration/test_sandbox_verifier.py",
        ),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def works(tmp_path_factory: pytest.TempPathFactory) -> None:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")


def command(*arguments: str, directory: Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    name, *rest = arguments
    line = [sys.executable, "-m", "rollmill.cli", "sandbox", name, "--directory", str(directory), *rest]
    return subprocess.run(line, capture_output=True, input=stdin, timeout=60, check=False)


def test_a_command_runs_with_its_input_and_its_exit_status(tmp_path):
    script = "import sys; print(sys.stdin.read().upper()); print('oops', file=sys.stderr); sys.exit(7)"
    done = command("run", "-e", "A=b", "python", "-c", script, directory=tmp_path, stdin=b"hello")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"HELLO\n", b"oops\n")
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_takes_too_long_ends_with_124(tmp_path):
    done = command("run", "--timeout-s", "0.5", "--json", "sleep", "600", directory=tmp_path)
    document = json.loads(done.stdout)
    assert (done.returncode, document["killed_by"], document["exit_code"]) == (124, "timeout", -9)


def test_a_directory_of_the_host_is_shown_when_it_is_exposed_and_cannot_be_written(tmp_path):
    shown = tmp_path / "shown"
    shown.mkdir()
    shown.chmod(0o755)
    (shown / "f").write_text("text", encoding="ascii")
    line = f"cat {shown}/f; touch {shown}/g || echo refused"
    done = command("run", "--expose", str(shown), "sh", "-c", line, directory=tmp_path / "records")
    assert done.stdout == b"textrefused\n"
    assert not (shown / "g").exists()


def test_less_isolation_than_asked_for_is_an_error_that_says_what_to_do(tmp_path):
    done = command("run", "--minimum-isolation", "virtual_machine", "true", directory=tmp_path)
    assert done.returncode == 2
    assert b"error [isolation]" in done.stderr
    assert b"the QEMU backend with KVM" in done.stderr


def test_the_doctor_says_what_holds(tmp_path):
    done = command("doctor", "--backend", "namespaces", "--json", directory=tmp_path)
    document = json.loads(done.stdout)
    assert (done.returncode, document["works"], document["problem"]) == (0, True, "")
    held = {one["name"] for one in document["findings"] if one["holds"]}
    assert {"namespaces", "user_namespace", "no_network", "seccomp", "capabilities_dropped"} <= held
    assert document["isolation"] in {"hardened", "capped"}
    assert all(one["remedy"] for one in document["findings"])


@pytest.mark.slow  # boots a machine
def test_the_doctor_looks_at_every_backend_and_leaves_nothing_behind(tmp_path):
    done = command("doctor", "--json", directory=tmp_path)
    document = json.loads(done.stdout)
    rows = {one["name"]: one for one in document["backends"]}
    local = {"namespaces-root", "namespaces-user", "gvisor", "qemu-kvm", "qemu-emulated", "firecracker", "docker"}
    assert local | {"kubernetes", "e2b", "daytona", "prime", "modal", "swerex"} == set(rows)
    mine = rows["namespaces-root" if os.geteuid() == 0 else "namespaces-user"]
    assert (done.returncode, mine["standing"], mine["isolation"] in {"hardened", "capped"}) == (0, "works", True)
    assert rows[document["strongest"]]["standing"] == "works"
    assert all(one["todo"] for one in rows.values() if one["standing"] == "something is missing")
    assert json.loads(command("list", "--json", directory=tmp_path).stdout) == []


def test_sandboxes_of_another_process_are_listed_and_can_be_killed(tmp_path):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider, id="mine")
        listed = await _in_thread("list", "--json", directory=tmp_path)
        (row,) = json.loads(listed.stdout)
        assert (row["id"], row["state"], row["owner_pid"]) == ("mine", "running", os.getpid())
        killed = await _in_thread("kill", "mine", directory=tmp_path)
        assert (killed.returncode, killed.stdout) == (0, b"ended mine\n")
        await until(lambda: sandbox.death is not None)
        assert sandbox.death is not None
        assert sandbox.death.reason.value == "killed_by_operator"
        assert (await _in_thread("list", directory=tmp_path)).stdout == b"no sandboxes\n"

    with real_rig(tmp_path) as rig:
        rig.run(body)


def test_a_sandbox_that_sleeps_without_processes_can_be_killed_from_another_process(tmp_path):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider, id="asleep")
        await sandbox.pause(keep_memory=False)
        killed = await _in_thread("kill", "asleep", directory=tmp_path)
        assert (killed.returncode, killed.stdout) == (0, b"ended asleep\n")
        await until(lambda: sandbox.death is not None)
        assert sandbox.death is not None
        assert sandbox.death.reason.value == "killed_by_operator"

    with real_rig(tmp_path) as rig:
        rig.run(body)


async def _in_thread(*arguments: str, directory: Path) -> subprocess.CompletedProcess[bytes]:
    return await asyncio.to_thread(command, *arguments, directory=directory)


@pytest.fixture
def plain_directory() -> Iterator[str]:
    """A directory of the plain user's; pytest closes its own to others whenever a session starts."""
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, PLAIN_USER, PLAIN_USER)
        yield name


@pytest.mark.slow
@pytest.mark.parametrize("group", PLAIN_SUITES)
def test_the_suites_pass_as_a_plain_user(group, plain_directory):
    marked, suites = PLAIN_SUITES[group]
    if os.geteuid() != 0:
        assert not required(), "start these tests as root: only then do they run as root and as a plain user"
        pytest.skip("this whole suite runs as a plain user already")
    version = subprocess.run([SOMEBODY_ELSES_PYTHON, "-V"], capture_output=True, text=True, check=False).stdout
    if not version.startswith(f"Python {sys.version_info.major}.{sys.version_info.minor}."):
        assert not required(), f"a plain user has {version!r}, which cannot load these packages"
        pytest.skip(f"a plain user has {version!r} at {SOMEBODY_ELSES_PYTHON}, which cannot load these packages")
    packages = os.pathsep.join(
        [str(Path(rollmill.__file__).parents[1]), os.path.dirname(os.path.dirname(pytest.__file__))]
    )
    done = subprocess.run(
        [
            *(SOMEBODY_ELSES_PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not fake"),
            *("-m", marked, *(TESTS / one for one in suites)),
        ],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": packages,
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": plain_directory,
            "HOME": plain_directory,
            REQUIRED: "1",  # a suite that skips itself has not passed
        },
        user=PLAIN_USER,
        group=PLAIN_USER,
        extra_groups=[],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
