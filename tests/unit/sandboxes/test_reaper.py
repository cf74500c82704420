"""The reaper: what is discarded goes, all of it, and nothing outside of it."""

from __future__ import annotations

import doctest
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rollmill.sandboxes.reaper
from rollmill.errors import ConfigError, SandboxError
from rollmill.sandboxes.reaper import Reaper, ReaperSettings

FAST = ReaperSettings(entries_per_s=1e9)


def tree(root: Path, *, files: int = 5, folders: int = 3) -> Path:
    for folder in range(folders):
        (root / str(folder) / "deep").mkdir(parents=True)
        for number in range(files):
            (root / str(folder) / str(number)).touch()
    return root


def test_the_examples_in_the_docstring_work():
    result = doctest.testmod(rollmill.sandboxes.reaper)
    assert (result.failed, result.attempted) == (0, 3)


def test_a_discarded_tree_is_away_at_once_and_deleted_later(tmp_path: Path):
    reaper = Reaper(tmp_path / "trash", settings=FAST)
    assert reaper.discard(tree(tmp_path / "tree"))
    assert not (tmp_path / "tree").exists()
    assert reaper.statistics().waiting == 1
    reaper.start()
    assert reaper.drain(limit_s=10.0)
    statistics = reaper.statistics()
    assert (statistics.waiting, statistics.discarded, statistics.failures) == (0, 1, 0)
    assert statistics.entries == 1 + 3 * (1 + 1 + 5)
    assert list((tmp_path / "trash").iterdir()) == []
    reaper.close()


def test_what_is_not_there_cannot_be_discarded_and_is_no_error(tmp_path: Path):
    with Reaper(tmp_path / "trash") as reaper:
        assert not reaper.discard(tmp_path / "nothing")
        assert not reaper.discard(tmp_path / "nothing" / "below")
    with pytest.raises(SandboxError, match="is closed"):
        reaper.discard(tmp_path)


def test_links_are_removed_and_never_followed(tmp_path: Path):
    kept = tree(tmp_path / "kept")
    doomed = tree(tmp_path / "doomed")
    (doomed / "file").symlink_to(kept / "0" / "0")
    (doomed / "folder").symlink_to(kept)
    (doomed / "0" / "up").symlink_to("../../..")
    (tmp_path / "link").symlink_to(kept)
    with Reaper(tmp_path / "trash", settings=FAST) as reaper:
        reaper.discard(doomed)
        reaper.discard(tmp_path / "link")
        assert reaper.drain(limit_s=10.0)
        assert reaper.statistics().failures == 0
    assert sum(1 for _ in kept.rglob("*")) == 3 * 7


def test_a_tree_of_any_depth_goes_with_few_descriptors(tmp_path: Path):
    at = os.open(tmp_path, os.O_RDONLY)
    for name in ("deep", *["a-name-of-20-letters"] * 250):  # longer than a path may be
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    with Reaper(tmp_path / "trash", settings=FAST) as reaper:
        reaper.discard(tmp_path / "deep")
        assert reaper.drain(limit_s=10.0)
        assert (reaper.statistics().entries, reaper.statistics().failures) == (251, 0)


def test_directories_that_nobody_may_read_or_write_go_too(tmp_path: Path):
    doomed = tree(tmp_path / "doomed")
    for path in [*doomed.glob("*/deep"), *(one for one in doomed.glob("*") if one.is_dir()), doomed]:
        path.chmod(0)
    with Reaper(tmp_path / "trash", settings=FAST) as reaper:
        reaper.discard(doomed)
        assert reaper.drain(limit_s=10.0)
        assert reaper.statistics().failures == 0


def test_what_a_killed_process_left_in_the_trash_is_taken_up(tmp_path: Path):
    tree(tmp_path / "trash" / "left-by-another")
    (tmp_path / "trash" / "a-file").touch()
    with Reaper(tmp_path / "trash", settings=FAST) as reaper:
        assert reaper.drain(limit_s=10.0)
        assert reaper.statistics().waiting == 0


def test_closing_stops_in_the_middle_and_the_next_reaper_goes_on(tmp_path: Path):
    slow = Reaper(tmp_path / "trash", settings=ReaperSettings(entries_per_s=1.0, burst=1))
    slow.discard(tree(tmp_path / "tree", files=50))
    slow.start()
    began_s = time.monotonic()
    slow.close()
    assert time.monotonic() - began_s < 5.0
    assert any((tmp_path / "trash").iterdir())
    with Reaper(tmp_path / "trash", settings=FAST) as fast:
        assert fast.drain(limit_s=10.0)
        assert fast.statistics().waiting == 0


def test_deletion_keeps_to_its_rate_over_many_small_directories(tmp_path: Path):
    settings = ReaperSettings(entries_per_s=1000.0, burst=20)
    reaper = Reaper(tmp_path / "trash", settings=settings)
    reaper.discard(tree(tmp_path / "tree", files=1, folders=40))  # 121 entries, two or three to a directory
    began_s = time.monotonic()
    reaper.start()
    assert reaper.drain(limit_s=10.0)
    assert time.monotonic() - began_s >= 0.099  # five whole bursts of 20 between the first and the last
    reaper.close()


def test_two_reapers_share_a_trash(tmp_path: Path):
    with Reaper(tmp_path / "trash", settings=FAST) as one, Reaper(tmp_path / "trash", settings=FAST) as other:
        for number in range(10):
            (one if number % 2 else other).discard(tree(tmp_path / f"tree{number}"))
        assert one.drain(limit_s=10.0)
        assert other.drain(limit_s=10.0)
        assert one.statistics().failures == other.statistics().failures == 0
        assert one.statistics().entries + other.statistics().entries == 10 * 22


def test_those_who_look_into_the_trash_at_once_all_see_all_of_it(tmp_path: Path):
    reaper = Reaper(tmp_path / "trash", settings=FAST)  # not started: nothing goes
    for number in range(3):
        (tmp_path / f"{number}").touch()
        reaper.discard(tmp_path / f"{number}")
    with ThreadPoolExecutor(4) as lookers:
        seen = list(lookers.map(lambda _: reaper.statistics().waiting, range(8000)))
    assert set(seen) == {3}
    reaper.close()


def test_a_trash_that_is_a_link_or_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match="cannot be a trash directory"):
            Reaper(tmp_path / name)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no second file system")
def test_a_tree_of_another_file_system_is_refused_and_stays(tmp_path: Path):
    if os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("the temporary directory is on /dev/shm")
    other = Path(f"/dev/shm/rollmill-test-{os.getpid()}")
    other.mkdir()
    try:
        with Reaper(tmp_path / "trash") as reaper, pytest.raises(SandboxError, match="same file system"):
            reaper.discard(other)
        assert other.is_dir()
    finally:
        other.rmdir()


@pytest.mark.parametrize("wrong", [{"entries_per_s": 0.0}, {"burst": 0}, {"close_s": float("inf")}])
def test_settings_that_would_never_end_are_refused(wrong):
    with pytest.raises(ConfigError):
        ReaperSettings(**wrong)
