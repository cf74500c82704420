"""A child that another process forked is handled as one of `subprocess`."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from rollmill.runtime.handles import Forked

TRUE, CAT = "/bin/true", "/bin/cat"


@pytest.fixture
def waiting():
    """A child that waits for its standard input, and the pipe that it waits for."""
    read, write = os.pipe()
    pid = os.posix_spawn(CAT, [CAT], {}, file_actions=[(os.POSIX_SPAWN_DUP2, read, 0)])
    os.close(read)
    yield Forked(pid), write
    os.close(write)


def test_a_living_child_has_no_status_and_a_wait_for_it_times_out(waiting):
    child, _ = waiting
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.0)
    child.send_signal(signal.SIGKILL)
    assert child.wait(10.0) == -signal.SIGKILL


def test_the_status_is_kept_and_no_signal_goes_to_a_number_that_may_be_another_process():
    child = Forked(os.posix_spawn(TRUE, [TRUE], {}))
    assert child.wait() == 0
    assert (child.poll(), child.wait(0.0)) == (0, 0)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == 0


def test_a_process_shows_the_command_line_that_it_is_given_cut_to_its_room():
    script = """
import sys
from rollmill.runtime.parent import show_as
show_as(["python", "-m", "rollmill.runtime.process", "trainer", "/runs/one"])
print(flush=True)
sys.stdin.readline()
show_as(["x" * 10_000])
print(flush=True)
sys.stdin.readline()
"""
    command = [sys.executable, "-c", script, "-" * 200]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        shown = psutil.Process(process.pid)
        assert shown.cmdline() == ["python", "-m", "rollmill.runtime.process", "trainer", "/runs/one"]
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        (title,) = shown.cmdline()
        assert title == "x" * len(title)
        assert 200 < len(title) < 2000
        process.stdin.close()
        process.stdin = None
