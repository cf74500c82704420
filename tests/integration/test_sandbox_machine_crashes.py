"""SIGKILL of the owner of machines, at any moment: after one sweep nothing is left of them."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from sandbox_owner import ASLEEP_S

from microvm_builders import why_no_qemu
from rollmill.sandboxes.disk_records import DiskRecords, ProcessMark, is_alive, mark_of
from rollmill.sandboxes.sweep import sweep
from sandbox_builders import why_no_namespaces

pytestmark = [pytest.mark.integration, pytest.mark.slow]

OWNER = Path(__file__).with_name("machine_owner.py")
ROUNDS = 12
_LONGEST_S = 90.0


@contextlib.contextmanager
def owner_of(directory: Path, backend: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start an owner of machines; it has ended behind this, also where the test failed."""
    path = os.pathsep.join((str(OWNER.parent.parent), str(OWNER.parent)))
    owner = subprocess.Popen(
        [sys.executable, str(OWNER), str(directory), backend],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        assert line_of(owner) == "open"
        yield owner
    finally:
        owner.kill()
        owner.wait(20)
        assert owner.stdout is not None
        owner.stdout.close()


def line_of(owner: subprocess.Popen[bytes]) -> str:
    assert owner.stdout is not None
    return owner.stdout.readline().decode().rstrip()


def processes_of(directory: Path) -> list[str]:
    """Return what runs in or for a directory, whatever it is called, and the programs of its sandboxes."""
    found = []
    for one in psutil.process_iter(["cmdline", "cwd"]):
        words = " ".join(one.info["cmdline"] or [])
        if str(directory) in words + (one.info["cwd"] or "") or ASLEEP_S in words:
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
        with owner_of(directory, "firecracker"):
            time.sleep(chance.uniform(0.0, 3.0))
        nothing_left(directory)


@pytest.mark.parametrize("moment", ["while its template boots", "when a machine is cloned", "when all run"])
def test_a_killed_owner_of_machines_under_qemu_leaves_nothing(tmp_path, moment):
    if reason := why_no_qemu():
        pytest.skip(f"no machines under QEMU here: {reason}")
    with owner_of(tmp_path, "qemu") as owner:
        if moment == "while its template boots":
            deadline = time.monotonic() + _LONGEST_S
            while not emulators_of(owner) and time.monotonic() < deadline:
                time.sleep(0.01)
        else:
            for number in range(1 if moment == "when a machine is cloned" else 2):
                assert line_of(owner) == f"killed-{ASLEEP_S}-{number}"
        assert DiskRecords(tmp_path / "records").read_all() != ()
        emulators = emulators_of(owner)
        assert emulators != []
    nothing_left(tmp_path)
    assert [mark for mark in emulators if is_alive(mark)] == []


def emulators_of(owner: subprocess.Popen[bytes]) -> list[ProcessMark]:
    children = psutil.Process(owner.pid).children(recursive=True)
    return [mark for one in children if "qemu-system" in one.name() and (mark := mark_of(one.pid)) is not None]
