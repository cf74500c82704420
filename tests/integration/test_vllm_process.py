"""The server as a child process: what it is started with, what it says when it ends, and that nothing outlives it.

A package called vllm, put on its path, stands for the real one.
"""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rollmill.clock import SystemClock
from rollmill.errors import ConfigError, DeadlineExceeded, EngineDead
from rollmill.generator.engines.remote.process import ServerProcess
from rollmill.generator.engines.vllm.plugin import plugin_in, server_folder, socket_in
from rollmill.generator.engines.vllm.start import MODULE
from rollmill.generator.engines.vllm.unix_socket import listens
from rollmill.runtime.parent import adopt_orphans

pytestmark = pytest.mark.integration

SLEEPS = """
import os, sys, time
if os.fork() == 0:
    open(sys.argv[1] + ".child", "w").write(str(os.getpid()))
    time.sleep(60)
import importlib.metadata
found = importlib.metadata.entry_points(group="vllm.general_plugins")
open(sys.argv[1], "w").write(" ".join(entry.value for entry in found))
time.sleep(60)
"""
LEAVES_A_WORKER = """
import os, signal, sys, time
def told(text):
    open(sys.argv[1] + ".new", "w").write(text)
    os.rename(sys.argv[1] + ".new", sys.argv[1])
if os.fork() == 0:
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while time.process_time() < 0.5:
            pass
        told("ready")
    time.sleep(60)
time.sleep(60)
"""
FAILS = """
print("INFO 11-30 09:00:00 [a.py:1] starting", flush=True)
raise ValueError("no room for keys and values")
"""


def stand_in(folder: Path, code: str) -> dict[str, str]:
    """Make the package and return the server's environment variables."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for place in (package, package.parent, package.parent.parent):
        (place / "__init__.py").write_text("")
    (package / "api_server.py").write_text(code)
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder)}


def started(folder: Path, code: str, *, log: Path | None = None) -> tuple[ServerProcess, Path]:
    environment = stand_in(folder, code)
    place = server_folder(entry_point="rollmill_file")
    environment["PYTHONPATH"] += f":{plugin_in(place)}"
    process = ServerProcess(
        product="vLLM",
        section="generator.vllm",
        python=Path(sys.executable),
        module=MODULE,
        arguments=[str(folder / "told")],
        environment=environment,
        folder=place,
        log=log,
    )
    return process, place


def children_s() -> float:
    """CPU seconds of children that were waited for, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_it_finds_the_plugin_and_is_gone_with_its_children_and_its_folder_when_it_is_stopped(tmp_path):
    server, place = started(tmp_path, SLEEPS)
    told = tmp_path / "told"
    server.wait_until(lambda: told.exists() and told.read_text() != "", deadline_s=20, clock=SystemClock())
    assert told.read_text() == "rollmill_vllm_plugin:register"
    child = psutil.Process(int((tmp_path / "told.child").read_text()))
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert not listens(socket_in(place))
    server.stop(grace_s=5)
    server.stop(grace_s=5)
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running()
    assert not place.exists()


def test_the_time_of_workers_that_it_leaves_behind_is_on_the_account_of_who_adopts_them(tmp_path):
    server, _ = started(tmp_path, LEAVES_A_WORKER)
    server.wait_until((tmp_path / "told").exists, deadline_s=20, clock=SystemClock())
    before_s = children_s()
    adopt_orphans(True)
    try:
        server.stop(grace_s=5)
    finally:
        adopt_orphans(False)
    assert children_s() - before_s > 0.5
    assert [child for child in psutil.Process().children() if os.getpgid(child.pid) == server.pid] == []


@pytest.mark.parametrize("of_an_older_run", [False, True])
def test_its_log_is_for_this_user_alone_for_servers_print_the_key_of_their_callers(tmp_path, of_an_older_run):
    log = tmp_path / "server.log"
    if of_an_older_run:
        log.write_text("older")
        log.chmod(0o644)
    server, _ = started(tmp_path, SLEEPS, log=log)
    mode = stat.S_IMODE(log.stat().st_mode)
    server.stop(grace_s=5)
    assert (oct(mode), log.read_text()) == ("0o600", "")


def test_it_is_gone_when_the_process_that_started_it_is_killed(tmp_path):
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_vllm_process import SLEEPS, started
server, place = started(Path({str(tmp_path)!r}), SLEEPS)
print(server.pid, place, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, place = parent.stdout.readline().split()
    server = psutil.Process(int(pid))
    parent.send_signal(signal.SIGKILL)
    parent.communicate(timeout=10)
    _, alive = psutil.wait_procs([server], timeout=10)
    assert alive == []
    for left in Path(place).rglob("*"):  # a killed process cannot clean up
        assert left.stat().st_size < 10_000
    subprocess.run(["rm", "-r", place], check=True)


def test_one_that_fails_to_start_is_told_with_its_first_error(tmp_path):
    server, _ = started(tmp_path, FAILS)
    with pytest.raises(EngineDead, match=r"ended with 1; first error in .*: ValueError: no room for keys and values"):
        server.wait_until(lambda: False, deadline_s=20, clock=SystemClock())
    server.stop(grace_s=1)


def test_one_that_takes_too_long_is_told_with_the_end_of_its_log(tmp_path):
    server, _ = started(tmp_path, "import time; print('waiting for a GPU', flush=True); time.sleep(60)")
    log = server.log
    server.wait_until(lambda: log.stat().st_size > 0, deadline_s=20, clock=SystemClock())
    with pytest.raises(DeadlineExceeded, match=r"start_deadline_s 0.05.*waiting for a GPU"):
        server.wait_until(lambda: False, deadline_s=0.05, clock=SystemClock())
    server.stop(grace_s=1)


def test_an_interpreter_that_cannot_be_started_is_named_with_its_setting(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be started with .*/none.*generator.vllm.python"):
        ServerProcess(
            product="vLLM",
            section="generator.vllm",
            python=tmp_path / "none",
            module=MODULE,
            arguments=[],
            environment={},
            folder=tmp_path / "folder",
        )
