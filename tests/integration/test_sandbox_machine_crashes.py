"""SIGKILL of the owner of machines, at any moment: after one sweep nothing is left of them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from microvm_builders import why_no_qemu
from rollmill.sandboxes.disk_records import DiskRecords
from rollmill.sandboxes.sweep import sweep
from sandbox_builders import why_no_namespaces

pytestmark = [pytest.mark.integration, pytest.mark.slow]

OWNER = Path(__file__).with_name("machine_owner.py")
ROUNDS = 12
_LONGEST_S = 90.0


def start_owner(directory: Path, backend: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join((str(OWNER.parent.parent), str(OWNER.parent)))
    return subprocess.Popen(
        [sys.executable, str(OWNER), str(directory), backend],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )


def kill(owner: subprocess.Popen[bytes]) -> None:
    owner.kill()
    owner.wait(20)
    assert owner.stdout is not None
    owner.stdout.close()


def processes_of(directory: Path) -> list[str]:
    """Return what runs in or for a directory, whatever it is called."""
    found = []
    for one in psutil.process_iter(["cmdline", "cwd"]):
        words = " ".join(one.info["cmdline"] or [])
        if str(directory) in words + (one.info["cwd"] or "") or "rollmill-killed" in words or "987654" in words:
            found.append(words)
    return found


def nothing_left(directory: Path) -> None:
    records = DiskRecords(directory / "records")
    assert sweep(records).left == ()
    deadline = time.monotonic() + 20
    while processes_of(directory) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(directory) == []
    assert list(records.directory.iterdir()) == []


def test_a_killed_owner_of_fakes_leaves_nothing_at_any_moment(tmp_path):
    if reason := why_no_namespaces(tmp_path / "probe"):
        pytest.skip(f"the fake runs its guest in namespaces, which do not work here: {reason}")
    chance = random.Random(7)
    for number in range(ROUNDS):
        directory = tmp_path / str(number)
        owner = start_owner(directory, "firecracker")
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"open\n"
        time.sleep(chance.uniform(0.0, 3.0))
        kill(owner)
        nothing_left(directory)


@pytest.mark.parametrize("moment", ["while its template boots", "when a machine is cloned", "when all run"])
def test_a_killed_owner_of_machines_under_qemu_leaves_nothing(tmp_path, moment):
    if reason := why_no_qemu():
        pytest.skip(f"no machines under QEMU here: {reason}")
    owner = start_owner(tmp_path, "qemu")
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"open\n"
    if moment == "while its template boots":
        deadline = time.monotonic() + _LONGEST_S
        while not any("qemu" in one for one in processes_of_qemu()) and time.monotonic() < deadline:
            time.sleep(0.01)
    else:
        for number in range(1 if moment == "when a machine is cloned" else 2):
            assert owner.stdout.readline() == b"killed-%d\n" % number
    assert DiskRecords(tmp_path / "records").read_all() != ()
    kill(owner)
    nothing_left(tmp_path)
    assert [one for one in processes_of_qemu() if "rollmill-template" in one or "rollmill-killed" in one] == []


def processes_of_qemu() -> list[str]:
    found = (" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"]))
    return [one for one in found if one.startswith("qemu-system") or "/qemu-system" in one.partition(" ")[0]]
