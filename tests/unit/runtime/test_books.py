from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.errors import InvariantViolation
from rollmill.runtime.books import process_seconds
from rollmill.runtime.incarnation import Life, ProcessSeconds, Segment, write_record
from rollmill.runtime.layout import ProcessLayout


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
