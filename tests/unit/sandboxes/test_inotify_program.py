"""What is told of a directory that is watched, by the program that runs inside."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollmill.sandboxes.service import inotify_program

ROUNDS = 150


class Watching:
    """The program over a directory."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, inotify_program.__file__, str(directory), "1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.said() == {"ready": True}

    def said(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def until_answered(self) -> list[tuple[str, str]]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found = []
        while "answered" not in (one := self.said()):
            found.append((one["type"], one["name"]))
        return found


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    program = Watching(tmp_path)
    yield program
    program.process.kill()
    program.process.communicate()


def test_who_hears_of_a_new_directory_can_write_there_at_once_and_is_told_of_it(
    watching: Watching, tmp_path: Path
) -> None:
    for number in range(ROUNDS):
        place = tmp_path / f"new{number}"
        place.mkdir()
        assert watching.said() == {"type": "CREATE", "name": place.name}
        (place / "file").write_text("x")
        told = watching.until_answered()
        assert ("WRITE", f"{place.name}/file") in told, (number, told)


def test_what_was_written_before_a_directory_was_watched_is_told_after_it(watching: Watching, tmp_path: Path) -> None:
    outside = tmp_path.with_name(f"{tmp_path.name}-outside")
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "full").write_text("x")
    (outside / "empty").touch()
    outside.rename(tmp_path / "moved")
    told = watching.until_answered()
    assert told[0] == ("CREATE", "moved")
    assert set(told[1:]) == {
        ("CREATE", "moved/deep"),
        ("CREATE", "moved/deep/full"),
        ("WRITE", "moved/deep/full"),
        ("CREATE", "moved/empty"),
    }
