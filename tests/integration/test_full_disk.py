"""A real run on a disk that is full: it ends with the cause in words, and goes on where it was once there is room."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_world import END_DEADLINE_S, Run, check_acknowledged, check_end, count_lines, tiny_job

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]


WHAT_MAY_FAIL = {
    # The first weights have 330 kB.
    200_000: (("trainer", "could not be written: File too large"),),
    # The first optimizer has 660 kB, and the store's log gets there at about the same time.
    500_000: (
        ("trainer", "could not be written: File too large"),
        ("controller", "store.sqlite: disk I/O error (SQLITE_IOERR_WRITE). The change was undone"),
        ("trainer", "store.sqlite: disk I/O error (SQLITE_IOERR_WRITE). The change was undone"),
    ),
}


@pytest.mark.parametrize("largest_file_bytes", WHAT_MAY_FAIL)
def test_a_full_disk_ends_the_run_in_words_and_costs_nothing(tmp_path: Path, largest_file_bytes: int) -> None:
    run = Run(tmp_path, job=tiny_job(), seed=1, policy="stop")
    try:
        run.start(largest_file_bytes=largest_file_bytes)
        assert run.ended(within_s=END_DEADLINE_S)
        assert run.status() == 1, run.tail()
        failure = json.loads(run.layout.failure.read_text())
        expected = WHAT_MAY_FAIL[largest_file_bytes]
        assert any(failure["process"] == process and words in failure["message"] for process, words in expected), (
            failure
        )
        assert failure["code"] in ("weights", "store")
        assert not list(run.layout.checkpoints.glob("step-*"))
        assert run.processes() == {}
        check_acknowledged(run)

        run.start()
        assert run.ended(within_s=END_DEADLINE_S)
        assert run.status() == 0, run.tail()
        check_end(run)
    finally:
        run.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, so that even the smallest file finds no room."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=48m,mode=700", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(path: Path) -> None:
    """Take every byte that is left."""
    handle = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(handle, bytes(size))
    finally:
        os.close(handle)


@pytest.mark.parametrize("policy", ["stop", "restart"])
def test_a_disk_without_a_byte_ends_the_run_in_words_and_costs_nothing(
    tmp_path: Path, small_disk: Path, policy: str
) -> None:
    run = Run(small_disk, job=tiny_job(), seed=2, policy=policy, log=tmp_path / "output.log")
    filler = small_disk / "filler"
    try:
        run.start()
        while count_lines(run.directory / "metrics.jsonl") < 4:
            assert not run.ended(within_s=0.02), run.tail()
        fill(filler)
        assert run.ended(within_s=END_DEADLINE_S)
        assert run.status() == 1, run.tail()
        assert run.processes() == {}
        said = run.tail()
        assert "No space left" in said or "disk is full" in said, said
        assert "Traceback" not in said
        filler.unlink()

        run.start()
        assert run.ended(within_s=END_DEADLINE_S)
        assert run.status() == 0, run.tail()
        check_end(run)
    finally:
        filler.unlink(missing_ok=True)
        run.close()
