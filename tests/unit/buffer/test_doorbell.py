"""Doorbells wake, never block, never fail, and are gone when closed."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from rollmill.buffer import Doorbell, ring
from rollmill.buffer.doorbell import address_of
from rollmill.errors import RunDirectoryError


def test_a_ring_before_the_wait_is_not_lost(tmp_path):
    with Doorbell.bind(tmp_path, "trainer") as bell:
        ring(tmp_path, "trainer")
        assert bell.wait(0.0)


def test_a_wait_without_a_ring_ends_at_its_deadline(tmp_path):
    with Doorbell.bind(tmp_path, "trainer") as bell:
        assert not bell.wait(0.0)
        assert not bell.wait(0.01)
        assert not bell.wait(-1.0)


def test_many_rings_wake_once(tmp_path):
    with Doorbell.bind(tmp_path, "trainer") as bell:
        for _ in range(5):
            ring(tmp_path, "trainer")
        assert bell.wait(0.0)
        assert not bell.wait(0.0)


def test_drain_takes_all_rings_and_counts_them(tmp_path):
    with Doorbell.bind(tmp_path, "trainer") as bell:
        assert bell.drain() == 0
        ring(tmp_path, "trainer")
        ring(tmp_path, "trainer")
        assert bell.drain() == 2
        assert bell.drain() == 0


def test_ringing_where_nobody_listens_does_nothing(tmp_path):
    ring(tmp_path, "nobody")
    Doorbell.bind(tmp_path, "gone").close()
    ring(tmp_path, "gone")
    with Doorbell.bind(tmp_path, "gone") as bell:
        assert bell.drain() == 0


def test_ringing_never_blocks_however_many_rings_wait(tmp_path):
    queued_by_the_kernel = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
    rings = queued_by_the_kernel + 50
    with Doorbell.bind(tmp_path, "trainer") as bell:
        for _ in range(rings):
            ring(tmp_path, "trainer")
        assert 0 < bell.drain() < rings


def test_doorbells_of_other_names_and_directories_stay_silent(tmp_path):
    with Doorbell.bind(tmp_path, "a") as a, Doorbell.bind(tmp_path, "b") as b, Doorbell.bind("/", "a") as elsewhere:
        ring(tmp_path, "a")
        assert (a.wait(0.0), b.wait(0.0), elsewhere.wait(0.0)) == (True, False, False)


def test_one_directory_has_one_address_however_it_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    assert address_of("run", "a") == address_of(tmp_path / "run", "a") == address_of("run/../run", "a")


def test_a_long_run_directory_still_has_a_short_address(tmp_path):
    deep = tmp_path / ("x" * 200) / ("y" * 200)
    assert len(os.fsencode(address_of(deep, "generator-0"))) < 100


def test_a_name_too_long_for_a_socket_is_refused_with_both_numbers(tmp_path):
    with pytest.raises(RunDirectoryError, match=r"has \d+ bytes, Unix allows 107"):
        Doorbell.bind(tmp_path, "n" * 120)


def test_the_folder_is_private_and_goes_with_its_last_doorbell(tmp_path):
    first, second = Doorbell.bind(tmp_path, "a"), Doorbell.bind(tmp_path, "b")
    folder = address_of(tmp_path, "a").parent
    assert folder.stat().st_mode & 0o777 == 0o700
    first.close()
    first.close()
    assert [path.name for path in folder.iterdir()] == ["b.sock"]
    second.close()
    assert not folder.exists()


def test_the_file_of_a_dead_process_is_replaced(tmp_path):
    address = address_of(tmp_path, "trainer")
    address.parent.mkdir(mode=0o700, exist_ok=True)
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    dead.bind(str(address))
    dead.close()  # as the kernel closes it at death: the file stays
    with Doorbell.bind(tmp_path, "trainer") as bell:
        ring(tmp_path, "trainer")
        assert bell.wait(0.0)


def test_a_doorbell_of_a_living_process_is_not_taken_over(tmp_path):
    with Doorbell.bind(tmp_path, "trainer") as bell:
        with pytest.raises(RunDirectoryError, match="belongs to a living process"):
            Doorbell.bind(tmp_path, "trainer")
        ring(tmp_path, "trainer")
        assert bell.wait(0.0)


def test_a_folder_that_others_can_enter_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    address_of(tmp_path, "a").parent.mkdir(mode=0o755)
    with pytest.raises(RunDirectoryError, match="not a private folder"):
        Doorbell.bind(tmp_path, "a")


async def test_an_event_loop_hears_it(tmp_path):
    import asyncio

    loop = asyncio.get_running_loop()
    rung = asyncio.Event()
    with Doorbell.bind(tmp_path, "controller") as bell:
        loop.add_reader(bell.fileno(), rung.set)
        ring(tmp_path, "controller")
        await asyncio.wait_for(rung.wait(), timeout=5)
        loop.remove_reader(bell.fileno())
        assert bell.drain() == 1
