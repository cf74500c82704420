"""Processes that are forked from one that has imported: children of the run like any other."""

import os
import select
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tiny_runs import tiny_toml

from rollmill.config.load import load_config
from rollmill.runtime.children import birth_of, command_of
from rollmill.runtime.failure import read_record
from rollmill.runtime.layout import ProcessLayout
from rollmill.runtime.nursery import Nursery
from rollmill.runtime.resume import first_incarnation
from rollmill.runtime.supervisor import Supervisor
from rollmill.telemetry.run_directory import RunDirectory

pytestmark = pytest.mark.integration
DEADLINE_S = 60.0


@pytest.fixture
def run(tmp_path):
    """A new run's folder, and its configuration."""
    path = tmp_path / "train.toml"
    path.write_text(tiny_toml(tmp_path, run={"steps": 2}, generator={"engine": "fake"}))
    config = load_config(path).config
    directory = RunDirectory.create(tmp_path / "runs" / "tiny", config=config, started_at_s=time.time())
    layout = ProcessLayout(directory.root)
    return config, layout, first_incarnation(layout)


def births(layout):
    names = ("trainer", "generator-0")
    return [birth_of(name, layout=layout, life="1", incarnation=1, threads=1, now_s=1.0) for name in names]


def born(nursery):
    assert select.select([nursery], [], [], DEADLINE_S)[0]
    found = nursery.born()
    assert found is not None
    return found


def test_what_is_forked_is_a_child_of_the_supervisor_with_session_log_command_line_and_status(run):
    _, layout, _ = run
    with Nursery.start() as nursery:
        nursery.ask(births(layout))
        children = born(nursery)
        nursery.close(grace_s=10.0)
    try:
        assert sorted(children) == ["generator-0", "trainer"]
        for name, child in children.items():
            process = psutil.Process(child.pid)
            assert process.ppid() == os.getpid()
            assert os.getsid(child.pid) == child.pid
            until_s = time.monotonic() + DEADLINE_S
            while process.cmdline() != command_of(name, layout.run_directory):
                assert time.monotonic() < until_s
                select.select([], [], [], 0.05)
            assert os.path.samefile(f"/proc/{child.pid}/fd/1", layout.log(name))
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(0.0)
    finally:
        for child in children.values():
            child.send_signal(signal.SIGKILL)
    assert [child.wait(DEADLINE_S) for child in children.values()] == [-9, -9]


def test_what_is_forked_says_why_it_failed_and_ends_with_the_status_of_a_user_error(run):
    _, layout, _ = run
    (layout.run_directory / "config.toml").write_text("[run]\nsteps = 'many'\n")
    with Nursery.start() as nursery:
        nursery.ask(births(layout))
        children = born(nursery)
        assert [child.wait(DEADLINE_S) for child in children.values()] == [2, 2]
    for name in children:
        record = read_record(layout.process_failure(name, life="1"))
        assert record is not None
        assert record.user_error
        assert "run.steps" in record.message
        assert "run.steps" in layout.log(name).read_text()


def test_closing_ends_what_nobody_has_taken(run):
    _, layout, _ = run
    with Nursery.start() as nursery:
        nursery.ask(births(layout))
        assert select.select([nursery], [], [], DEADLINE_S)[0]
    left = [child for child in psutil.Process().children(recursive=True) if "rollmill.runtime" in str(child.cmdline())]
    assert left == []


def test_what_is_forked_dies_with_the_supervisor(run):
    _, layout, _ = run
    script = f"""
import select, sys
from pathlib import Path
from rollmill.runtime.children import birth_of
from rollmill.runtime.layout import ProcessLayout
from rollmill.runtime.nursery import Nursery

nursery = Nursery.start()
birth = birth_of("trainer", layout=ProcessLayout(Path({str(layout.run_directory)!r})), life="1", incarnation=1,
                 threads=1, now_s=1.0)
nursery.ask([birth])
select.select([nursery], [], [])
print(nursery.born()["trainer"].pid, flush=True)
sys.stdin.read()
"""
    supervisor = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with supervisor:
        assert supervisor.stdout is not None
        child = psutil.Process(int(supervisor.stdout.readline()))
        supervisor.kill()
    assert psutil.wait_procs([child], timeout=10)[1] == []


def test_a_nursery_that_has_died_leaves_nothing_and_the_run_starts_its_processes_without_it(run):
    config, layout, incarnation = run
    nursery = Nursery.start()
    os.kill(nursery.pid, signal.SIGKILL)
    supervisor = Supervisor(
        config=config, layout=layout, incarnation=incarnation, refresh_view=lambda: None, nursery=nursery
    )
    end = supervisor.run()
    assert end.failure is None, end.failure
    assert "the nursery failed; trainer, generator-0 are started without it" in layout.log("nursery").read_text()
    assert layout.trainer_done(incarnation=1).exists()
