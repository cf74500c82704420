"""The pressure of a node, read from files as Linux writes them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from rollmill.sandboxes.admission import NodePressure, PressureSample, PressureSettings
from rollmill.sandboxes.admission.node_pressure import sample_of
from rollmill.sandboxes.admission.pressure import judge
from rollmill.sandboxes.watchdog import NodeReading, Pressure


def a_node(root: Path) -> Path:
    """Write a node on which half of the work waits for processors and a quarter of the memory is left."""
    (root / "proc" / "pressure").mkdir(parents=True)
    (root / "proc" / "self").mkdir()
    for name, some, full in (("cpu", "50.00", "0.00"), ("memory", "3.00", "1.00"), ("io", "2.00", "0.50")):
        lines = f"some avg10={some} avg60=0 avg300=0 total=1\nfull avg10={full} avg60=0 avg300=0 total=1\n"
        (root / "proc" / "pressure" / name).write_text(lines)
    (root / "proc" / "meminfo").write_text("MemTotal:  1000 kB\nMemAvailable:  250 kB\n")
    return root


async def test_a_node_is_read_from_its_files(tmp_path):
    found = await NodePressure([tmp_path], root=a_node(tmp_path)).sample()
    assert (found.cpu_some, found.memory_some, found.memory_full, found.io_full) == (0.5, 0.03, 0.01, 0.005)
    assert found.memory_free == pytest.approx(0.25)
    assert found.disk_free is not None
    assert 0 <= found.disk_free <= 1
    assert judge(found, settings=PressureSettings()).stop == (found.disk_free <= 0.05)


async def test_what_a_node_does_not_tell_slows_nothing(tmp_path):
    found = await NodePressure(root=tmp_path).sample()
    assert found == PressureSample()
    assert judge(found, settings=PressureSettings()).factor == 1.0


def test_every_figure_of_a_reading_reaches_the_law():
    pressure = Pressure(cpu_some=0.1, memory_some=0.2, memory_full=0.3, io_some=0.9, io_full=0.4)
    reading = NodeReading(pressure=pressure, memory_free=0.5, disk_free=0.6, inodes_free=0.7, pids_free=0.8)
    assert sample_of(reading) == PressureSample(
        cpu_some=0.1,
        io_full=0.4,
        memory_some=0.2,
        memory_full=0.3,
        memory_free=0.5,
        disk_free=0.6,
        inodes_free=0.7,
        pids_free=0.8,
    )


async def test_a_reading_that_hangs_is_waited_for_and_not_started_again(tmp_path):
    node = NodePressure(root=a_node(tmp_path))
    goes_on, begun = threading.Event(), []
    read = node._reader.read

    def slow() -> NodeReading:
        begun.append(1)
        goes_on.wait(10)
        return read()

    node._reader.read = slow  # type: ignore[method-assign]
    first = asyncio.ensure_future(node.sample())
    await asyncio.sleep(0.01)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.ensure_future(node.sample())
    await asyncio.sleep(0)
    goes_on.set()
    assert (await second).cpu_some == 0.5
    assert begun == [1]
