"""A real run on a disk that is full: it ends with the cause in words, and goes on where it was once there is room."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kill_world import END_DEADLINE_S, Run, check_acknowledged, check_end, tiny_job

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
