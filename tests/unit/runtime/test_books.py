from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rollmill.buffer.protocol import StepRecord
from rollmill.errors import InvariantViolation
from rollmill.ledger.seconds import SecondsReport
from rollmill.runtime.books import process_seconds, restarts_of
from rollmill.runtime.failure import record_of_exit
from rollmill.runtime.incarnation import Life, ProcessSeconds, Segment, write_record
from rollmill.runtime.layout import ProcessLayout
from rollmill.runtime.losses import LossRecord


def layout_with(tmp_path: Path, *books: ProcessSeconds) -> ProcessLayout:
    layout = ProcessLayout(tmp_path)
    layout.processes.mkdir()
    for book in books:
        write_record(layout.seconds(book.process, life=f"{book.incarnation}"), book)
    return layout


def segment(number: int, **process_wall_s: float) -> Segment:
    return Segment(
        number=number,
        started_wall_s=0.0,
        wall_s=max(process_wall_s.values()),
        cpu_s=1.0,
        peak_memory_bytes=1,
        lives=tuple(
            Life(process=process, life=f"{number}", incarnation=number, spawned_at_s=100.0, wall_s=wall_s)
            for process, wall_s in process_wall_s.items()
        ),
    )


def book(seconds: dict[str, float], *, incarnation: int = 1, wall_s: float) -> ProcessSeconds:
    return ProcessSeconds(
        process="trainer", incarnation=incarnation, spawned_at_s=100.0, closed_at_s=100.0 + wall_s, seconds=seconds
    )


def test_what_the_supervisor_saw_after_the_books_closed_is_teardown(tmp_path: Path) -> None:
    layout = layout_with(tmp_path, book({"startup": 2.0, "train": 8.0}, wall_s=10.0))
    report = process_seconds(layout, [segment(1, trainer=10.5)], steps=[])["trainer"]
    assert report.seconds == {"startup": 2.0, "train": 8.0, "teardown": 0.5}
    assert report.wall_s == 10.5


def test_a_killed_process_lost_its_seconds_and_says_so(tmp_path: Path) -> None:
    report = process_seconds(layout_with(tmp_path), [segment(1, trainer=7.0)], steps=[])["trainer"]
    assert report.seconds == {"lost": 7.0}


def test_incarnations_add_up(tmp_path: Path) -> None:
    layout = layout_with(tmp_path, book({"train": 4.0}, wall_s=4.0), book({"train": 6.0}, incarnation=2, wall_s=6.0))
    report = process_seconds(layout, [segment(1, trainer=4.0), segment(2, trainer=6.0)], steps=[])["trainer"]
    assert report.seconds["train"] == 10.0
    assert report.wall_s == 10.0


def test_a_book_whose_causes_do_not_sum_to_its_own_wall_time_is_refused(tmp_path: Path) -> None:
    layout = layout_with(tmp_path, book({"train": 3.0}, wall_s=4.0))
    with pytest.raises(InvariantViolation, match="trainer"):
        process_seconds(layout, [segment(1, trainer=4.0)], steps=[])


def step(number: int, seconds: dict[str, float], *, history_id: str) -> StepRecord:
    return StepRecord(
        batch_id=number,
        history_id=history_id,
        optimizer_step=number,
        policy_version=number + 1,
        group_ids=("g000000",),
        finished_at_s=0.0,
        seconds=seconds,
        metrics={},
    )


def test_a_killed_trainer_has_the_seconds_of_its_step_records_and_lost_the_rest(tmp_path: Path) -> None:
    steps = [
        step(1, {"startup": 2.0, "train": 1.0}, history_id="h001"),
        step(2, {"wait_data": 0.5, "train": 1.0}, history_id="h001"),
        step(2, {"train": 100.0}, history_id="h002"),
    ]
    report = process_seconds(layout_with(tmp_path), [segment(1, trainer=7.0)], steps=steps)["trainer"]
    assert report.seconds == {"startup": 2.0, "train": 2.0, "wait_data": 0.5, "lost": 2.5}


def test_a_killed_replica_has_its_book_of_a_moment_ago_and_lost_the_rest(tmp_path: Path) -> None:
    last = msgspec.structs.replace(
        book({"startup": 2.0, "decode": 4.0}, wall_s=6.0), process="generator-0", closed=False
    )
    lives = [segment(1, **{"generator-0": 7.5})]
    report = process_seconds(layout_with(tmp_path, last), lives, steps=[])["generator-0"]
    # Not teardown, although it is short: the process closed nothing.
    assert report.seconds == {"startup": 2.0, "decode": 4.0, "lost": 1.5}


def test_restarts_tell_how_often_why_and_what_they_cost() -> None:
    def life(
        name: str, *, spawned_at_s: float, wall_s: float, lost_s: float, startup_s: float
    ) -> tuple[Life, SecondsReport]:
        seconds = {"startup": startup_s, "decode": wall_s - lost_s - startup_s, "lost": lost_s}
        return (
            Life(process="generator-0", life=name, incarnation=1, spawned_at_s=spawned_at_s, wall_s=wall_s),
            SecondsReport(owner="generator-0", wall_s=wall_s, seconds=seconds),
        )

    lives = [
        life("1", spawned_at_s=0.0, wall_s=10.0, lost_s=1.0, startup_s=3.0),
        life("1-1", spawned_at_s=10.5, wall_s=20.0, lost_s=2.0, startup_s=4.0),
        life("1-2", spawned_at_s=31.5, wall_s=5.0, lost_s=0.0, startup_s=2.0),
    ]
    losses = [
        LossRecord(
            process="generator-0",
            life=name,
            pid=1,
            incarnation=1,
            at_wall_s=0.0,
            exit_status=-9,
            cause=record_of_exit("generator-0", -9, at_wall_s=0.0),
            decision="restart",
            restarts_left=1,
            pause_s=0.0,
            message="",
        )
        for name in ("1", "1-1")
    ]
    entry = restarts_of(losses, lives)["generator-0"]
    assert (entry["losses"], entry["restarts"]) == (2, 2)
    # 10.5 - 10.0 and 31.5 - 30.5.
    assert entry["down_s"] == pytest.approx(1.5)
    assert entry["startup_s"] == 6.0
    assert entry["lost_s"] == 3.0
    assert all("SIGKILL" in cause for cause in entry["causes"])


def test_what_a_process_wrote_after_the_last_measure_of_a_killed_supervisor_counts(tmp_path: Path) -> None:
    """The supervisor measures every few seconds: at 7 s for the last time here, the replica's book goes to 9."""
    seconds = {"startup": 2.0, "train": 7.0}
    report = process_seconds(layout_with(tmp_path, book(seconds, wall_s=9.0)), [segment(1, trainer=7.0)], steps=[])
    assert report["trainer"].seconds == {**seconds, "teardown": 0.0}
    assert report["trainer"].wall_s == 9.0


def test_steps_recorded_after_the_last_measure_of_a_killed_supervisor_count(tmp_path: Path) -> None:
    record = StepRecord(
        batch_id=0,
        history_id="h001",
        optimizer_step=1,
        policy_version=2,
        group_ids=(),
        finished_at_s=109.0,
        seconds={"startup": 2.0, "train": 7.0},
        metrics={},
    )
    report = process_seconds(layout_with(tmp_path), [segment(1, trainer=7.0)], steps=[record])["trainer"]
    assert report.seconds == {"startup": 2.0, "train": 7.0, "lost": 0.0}
    assert report.wall_s == 9.0
