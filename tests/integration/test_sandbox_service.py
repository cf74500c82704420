"""`rollmill sandbox serve` as a process, driven by E2B's public SDK, unchanged, with its public options alone."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gvisor_builders import need_gvisor
from sandbox_builders import why_no_namespaces

e2b = pytest.importorskip("e2b", reason="E2B's SDK is not installed; `pip install e2b`")

pytestmark = [
    pytest.mark.integration,
    # Of the SDK's own: a name of its client's transport that is to go.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:e2b"),
]

TOKEN = "sesame-open-sesame"
USER = "user" if os.geteuid() == 0 else "root"
HOME = "/home/user" if os.geteuid() == 0 else "/root"
TEMPLATES = """
[templates.base]
disk_mib = 64
pids = 64

[templates.small]
disk_mib = 1
envs = { OF_TEMPLATE = "yes" }
"""
READY = """
[templates.base]
ready = 2
envs = { OF_TEMPLATE = "yes" }
"""


def document_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The JSON document that a command says first."""
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or lines[-1].rstrip() != "}":
        line = process.stdout.readline()
        assert line, process.communicate()
        lines.append(line)
    return json.loads("".join(lines))


class Service:
    """A started `rollmill sandbox serve --json`."""

    def __init__(self, directory: Path, *arguments: str, templates_text: str = TEMPLATES) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        templates = directory / "templates.toml"
        templates.write_text(templates_text)
        self.records = directory / "records"
        options = ["--listen", "127.0.0.1:0", "--token-env", "TOKEN_OF_TEST", "--directory", str(self.records)]
        command = [sys.executable, "-m", "rollmill.cli", "sandbox", "serve", *options, "--templates", str(templates)]
        self.process = subprocess.Popen(
            [*command, *arguments, "--json"],
            env={**os.environ, "TOKEN_OF_TEST": TOKEN},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = document_of(self.process)
        self.options: dict[str, Any] = {
            "api_key": TOKEN,
            "api_url": self.said["url"],
            "sandbox_url": self.said["url"],
            "request_timeout": 30,
        }

    def create(self, template: str = "base", **options: Any) -> Any:
        return e2b.Sandbox.create(template, **{"timeout": 120, **self.options, **options})

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@contextlib.contextmanager
def serving(directory: Path, *arguments: str, templates_text: str = TEMPLATES) -> Iterator[Service]:
    service = Service(directory, *arguments, templates_text=templates_text)
    try:
        yield service
    finally:
        if service.process.poll() is None:
            service.process.kill()
            service.process.communicate()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")
    with serving(tmp_path_factory.mktemp("service")) as one:
        yield one
        assert one.end() == (0, "")
        assert list(one.records.glob("*.json")) == []


@pytest.fixture(scope="module")
def pauses(service: Service) -> None:
    try:
        service.create(lifecycle={"on_timeout": "pause"}, retries=0).kill()
    except e2b.SandboxException as error:
        pytest.skip(f"no pauses that keep memory here: {error}")


@pytest.fixture(scope="module")
def sandbox(service: Service) -> Iterator[Any]:
    one = service.create(timeout=600)
    yield one
    one.kill()


def until(holds: Callable[[], bool], *, within_s: float = 20.0) -> None:
    """Wait for something that another process does and announces to nobody."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def refused(request: urllib.request.Request) -> tuple[int, str]:
    """Status and message of a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=20)
    with caught.value as answer:
        return answer.code, json.loads(answer.read())["message"]


# -- lifecycle --------------------------------------------------------------------------------------------------------


def test_a_sandbox_is_made_seen_given_more_time_and_ended(service):
    before = datetime.datetime.now(datetime.UTC)
    one = service.create(metadata={"run": "a b/c", "n": "1"}, envs={"GIVEN": "x"}, timeout=50)
    assert one.is_running()
    info = one.get_info()
    assert (info.sandbox_id, info.template_id, info.state.value) == (one.sandbox_id, "base", "running")
    assert info.metadata == {"run": "a b/c", "n": "1"}
    assert abs((info.end_at - before).total_seconds() - 50) < 20
    one.set_timeout(500)
    assert abs((one.get_info().end_at - before).total_seconds() - 500) < 20
    assert (info.lifecycle["on_timeout"], info.allow_internet_access) == ("kill", False)
    assert one.kill() is True
    assert one.kill() is False
    assert one.is_running() is False
    with pytest.raises(e2b.SandboxNotFoundException):
        one.get_info()
    with pytest.raises(e2b.exceptions.SandboxNotRunningException):
        one.commands.run("true")
    with pytest.raises(e2b.exceptions.SandboxNotRunningException):
        one.files.read("/etc/passwd")


@pytest.mark.usefixtures("pauses")
def test_lists_are_filtered_by_metadata_and_state_and_come_in_pages(service):
    mark = {"of": "this list", "odd": "a=b&c d"}
    ids = [service.create(metadata=mark).sandbox_id for _ in range(3)]
    e2b.Sandbox.pause(ids[1], **service.options)

    def listed(limit: int | None = None, **query: Any) -> list[list[str]]:
        pages = e2b.Sandbox.list(
            query=e2b.SandboxQuery(metadata=mark, **query), limit=limit, order="asc", **service.options
        )
        found = []
        while pages.has_next:
            found.append([one.sandbox_id for one in pages.next_items()])
        return found

    assert listed() == [ids]
    assert listed(limit=2) == [ids[:2], ids[2:]]
    assert listed(state=[e2b.SandboxState.PAUSED]) == [[ids[1]]]
    assert listed(template="small") == [[]]
    assert listed(started_after=datetime.datetime.now(datetime.UTC)) == [[]]
    for one in ids:
        assert e2b.Sandbox.kill(one, **service.options)


@pytest.mark.usefixtures("pauses")
def test_a_sandbox_ends_at_its_timeout_and_one_that_asks_for_it_is_paused(service):
    ends = service.create(timeout=1)
    pauses = service.create(timeout=1, lifecycle={"on_timeout": "pause"})
    pauses.files.write("kept.txt", "kept")
    wakes = service.create(timeout=1, lifecycle={"on_timeout": "pause", "auto_resume": True})
    stored = service.create(timeout=1, lifecycle={"on_timeout": {"action": "pause", "mode": "filesystem"}})
    stored.files.write("kept.txt", "as a file")
    until(lambda: not any(one.is_running() for one in (ends, pauses, wakes, stored)))
    assert stored.get_info().state.value == "paused"
    stored.connect(timeout=60)
    assert stored.files.read("kept.txt") == "as a file"
    with pytest.raises(e2b.SandboxNotFoundException):
        ends.get_info()
    assert pauses.get_info().state.value == "paused"
    with pytest.raises(e2b.exceptions.SandboxNotRunningException, match="it is paused"):
        pauses.files.read("kept.txt")
    assert e2b.Sandbox.connect(pauses.sandbox_id, timeout=60, **service.options).files.read("kept.txt") == "kept"
    assert wakes.commands.run("echo awake").stdout == "awake\n"
    for one in (pauses, wakes, stored):
        assert one.kill()


@pytest.mark.usefixtures("pauses")
def test_a_pause_stops_programs_and_connecting_lets_them_go_on(service):
    one = service.create()
    handle = one.commands.run("i=0; while true; do i=$((i+1)); echo $i > count; sleep 0.05; done", background=True)
    until(lambda: one.files.exists("count"))
    assert one.pause() is True
    assert one.pause() is False
    assert not one.is_running()
    again = e2b.Sandbox.connect(one.sandbox_id, timeout=90, **service.options)
    assert again.is_running()
    now = int(again.files.read("count") or 0)
    until(lambda: int(again.files.read("count") or 0) > now)
    assert [program.pid for program in again.commands.list()] == [handle.pid]
    assert again.kill()


def test_connecting_gives_a_running_sandbox_more_time_and_never_less(service):
    one = service.create(timeout=300)
    first = one.get_info().end_at
    one.connect(timeout=10)
    assert abs((one.get_info().end_at - first).total_seconds()) < 5
    one.connect(timeout=1000)
    assert (one.get_info().end_at - first).total_seconds() > 600
    one.kill()


def test_one_idempotency_key_makes_one_sandbox(service):
    first = service.create(idempotency_key="key-1", metadata={"n": "1"})
    again = service.create(idempotency_key="key-1", metadata={"n": "1"})
    assert first.sandbox_id == again.sandbox_id
    with pytest.raises(e2b.SandboxException, match="409"):
        service.create(idempotency_key="key-1", metadata={"n": "2"})
    first.kill()


def test_metrics_tell_what_a_sandbox_uses(service):
    one = service.create()
    one.files.write("big", b"x" * 4_000_000)
    (first,) = one.get_metrics()
    assert (first.cpu_count, first.disk_total) == (1, 64 * 1024**2)
    assert first.disk_used > 4_000_000
    one.commands.run("for i in $(seq 20000); do :; done")
    assert one.get_metrics()[-1].cpu_used_pct >= 0
    assert one.get_metrics(start=datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)) == []
    one.kill()


def test_prometheus_is_answered_with_the_token_alone(service):
    one = service.create()
    url = f"{service.said['url']}/metrics"
    assert refused(urllib.request.Request(url))[0] == 401
    with urllib.request.urlopen(
        urllib.request.Request(url, headers={"authorization": f"Bearer {TOKEN}"}), timeout=20
    ) as answer:
        page = answer.read().decode()
    (ready,) = [line for line in page.splitlines() if line.startswith('rollmill_sandboxes{state="ready"}')]
    assert float(ready.split()[1]) >= 1
    assert 'rollmill_sandbox_start_seconds_count{phase="ready"}' in page
    with urllib.request.urlopen(f"{service.said['url']}/health", timeout=20) as answer:
        assert json.loads(answer.read())["sandboxes"] >= 1
    one.kill()


def test_the_disk_that_records_images_and_snapshots_take_room_of_is_watched(service, tmp_path):
    found = os.statvfs(service.records)
    until(lambda: 'rollmill_sandbox_node_free{resource="inodes"}' in page_of(service))
    free = figure(service, 'rollmill_sandbox_node_free{resource="disk"}')
    assert free <= found.f_bavail / found.f_blocks + 0.02  # others on this machine write too
    with serving(tmp_path, "--least-free-disk", "0.9999") as short:
        until(lambda: figure(short, "rollmill_sandbox_admitting") == 0)
        assert figure(short, "rollmill_sandbox_starting_cap") == 0
    with serving(tmp_path, "--least-free-disk", "0") as blind:
        until(lambda: 'rollmill_sandbox_node_free{resource="memory"}' in page_of(blind))
        assert 'rollmill_sandbox_node_free{resource="disk"}' not in page_of(blind)


def test_what_was_deleted_of_snapshots_is_told(tmp_path):
    with serving(tmp_path, "--snapshots", str(tmp_path / "snapshots")) as own:
        assert figure(own, "rollmill_sandbox_trash_deleted_total") == 0
        one = own.create()
        one.files.write("kept", "as a file")
        assert one.pause(mode="filesystem") is True
        assert one.kill()
        # the layer's directory and what it has: the root of what was written, directories down to the file, the file
        until(lambda: figure(own, "rollmill_sandbox_trash_deleted_total") >= 4)
        until(lambda: figure(own, "rollmill_sandbox_trash_entries") == 0)
        assert figure(own, "rollmill_sandbox_trash_failures_total") == 0


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        ({"template": "nope"}, "SandboxException", "404: template 'nope' is not known here; there are: base, small"),
        ({"api_key": "sesame-open-other!"}, "AuthenticationException", "no token, or not the one"),
        ({"timeout": 10**7}, "SandboxException", "must be between 0 and 86400"),
        ({"allow_internet_access": True}, "SandboxException", "not to be had here: allow_internet_access"),
        ({"mcp": {"exa": {"apiKey": "x"}}}, "SandboxException", "501: not to be had here: mcp"),
    ],
)
def test_what_cannot_be_is_refused_with_the_sdks_own_exception(service, call, error, says):
    with pytest.raises(Exception, match=says) as caught:
        service.create(**{"retries": 0, **call})
    assert type(caught.value).__name__ == error


def test_one_more_than_the_node_takes_is_a_rate_limit(service, tmp_path):
    with serving(tmp_path, "--max-sandboxes", "2", "--max-timeout-s", "60", "--without-internet") as small:
        kept = [small.create(timeout=50) for _ in range(2)]
        with pytest.raises(e2b.RateLimitException, match="2 sandboxes are here and 2 may be"):
            small.create(timeout=50, retries=0)
        kept[0].kill()
        assert small.create(timeout=50, allow_internet_access=True).is_running()  # but without it
        assert small.end(signal.SIGINT) == (0, "")


def figure(service: Service, name: str) -> float:
    """A figure of the page of metrics."""
    return next(float(line.rsplit(" ", 1)[1]) for line in page_of(service).splitlines() if line.startswith(name))


def page_of(service: Service) -> str:
    request = urllib.request.Request(f"{service.said['url']}/metrics", headers={"authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def until_ready(service: Service, count: int) -> None:
    deadline_s = time.monotonic() + 60
    while figure(service, 'rollmill_sandbox_places{budget="pooled"}') < count:
        assert time.monotonic() < deadline_s, f"{count} sandboxes were not ready within 60 s"


def test_ready_sandboxes_are_handed_over_with_their_callers_words_and_made_up_for(service, tmp_path):
    with serving(tmp_path, templates_text=READY) as quick:
        until_ready(quick, 2)
        made = [quick.create(metadata={"number": str(number)}, envs={"OWN": str(number)}) for number in (1, 2)]
        assert figure(quick, "rollmill_sandbox_pool_hits_total") == 2
        for number, sandbox in enumerate(made, start=1):
            assert sandbox.get_info().metadata == {"number": str(number)}
            assert sandbox.commands.run("echo $OF_TEMPLATE $OWN").stdout == f"yes {number}\n"
            sandbox.kill()
        until_ready(quick, 2)
        assert quick.end() == (0, "")
        assert list(quick.records.glob("*.json")) == []


def test_fifty_sandboxes_at_once_keep_their_files_apart(service):
    def one(number: int) -> str:
        sandbox = service.create(metadata={"number": str(number)})
        try:
            sandbox.files.write("mine", str(number))
            return sandbox.commands.run("cat mine; sleep 0.2").stdout
        finally:
            sandbox.kill()

    with concurrent.futures.ThreadPoolExecutor(50) as threads:
        assert list(threads.map(one, range(50))) == [str(number) for number in range(50)]


@pytest.mark.parametrize(
    ("options", "token", "says"),
    [
        (["--token-env", "NOT_SET_ANYWHERE"], TOKEN, "NOT_SET_ANYWHERE (--token-env) is empty or not set"),
        (["--token-env", "TOKEN_OF_TEST"], "short", "it needs at least 16"),
        (["--token-env", "TOKEN_OF_TEST", "--listen", "nowhere"], TOKEN, "no address to listen at"),
        (["--token-env", "TOKEN_OF_TEST", "--templates", "/not/here"], TOKEN, "templates cannot be read"),
        (["--token-env", "TOKEN_OF_TEST", "--listen", "TAKEN"], TOKEN, "cannot be bound for the sandbox service"),
    ],
)
def test_what_cannot_be_served_is_one_line_of_error(service, tmp_path, options, token, says):
    taken = service.said["url"].removeprefix("http://")
    command = [sys.executable, "-m", "rollmill.cli", "sandbox", "serve", "--directory", str(tmp_path / "records")]
    done = subprocess.run(
        [*command, *(taken if one == "TAKEN" else one for one in options)],
        env={**os.environ, "TOKEN_OF_TEST": token},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error [config]: ")
    assert says in done.stderr


def test_a_sandbox_of_the_service_is_shown_by_its_id_to_the_same_user(service):
    one = service.create(metadata={"run": "shown"})
    command = [sys.executable, "-m", "rollmill.cli", "sandbox", "show", "--directory", str(service.records), "--json"]
    shown = subprocess.run([*command, one.sandbox_id], capture_output=True, text=True, timeout=60, check=True)
    document = json.loads(shown.stdout)
    assert (document["id"], document["state"], document["owner_pid"]) == (
        one.sandbox_id,
        "running",
        service.said["pid"],
    )
    assert document["labels"]["run"] == "shown"
    one.kill()
    gone = subprocess.run([*command, one.sandbox_id], capture_output=True, text=True, timeout=60, check=False)
    assert (gone.returncode, json.loads(gone.stdout)["error"]["code"]) == (1, "sandbox_dead")


def test_two_nodes_behind_a_router_are_one_service_to_the_sdk(service, tmp_path):
    with serving(tmp_path, "--max-sandboxes", "2") as other:
        nodes = [part for one in (service, other) for part in ("--node", one.said["url"])]
        command = [sys.executable, "-m", "rollmill.cli", "sandbox", "route", "--listen", "127.0.0.1:0", *nodes]
        with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as router:
            try:
                url = document_of(router)["url"]
                options = {**service.options, "api_url": url, "sandbox_url": url}
                made = [e2b.Sandbox.create("base", timeout=60, **options) for _ in range(3)]
                made[0].files.write("mine", "1")
                heard: list[str] = []
                made[0].commands.run("cat mine; sleep 0.1; echo 2", on_stdout=heard.append)
                assert heard == ["1", "2\n"]
                found = {one.sandbox_id for one in e2b.Sandbox.list(**options).next_items()}
                assert {one.sandbox_id for one in made} <= found
                terminal = made[1].pty.create(e2b.PtySize(rows=24, cols=80))
                made[1].pty.send_stdin(terminal.pid, b"exit 0\n")
                assert terminal.wait().exit_code == 0
                for one in made:
                    assert one.kill()
                assert not made[0].is_running()
            finally:
                router.terminate()
        assert router.returncode == 0


def test_killing_the_service_leaves_no_sandbox(service, tmp_path):
    with serving(tmp_path) as doomed:
        doomed.create().commands.run("sleep 1000", background=True)
        assert doomed.end(signal.SIGKILL)[0] == -signal.SIGKILL
        sweep = [sys.executable, "-m", "rollmill.cli", "sandbox", "kill", "--orphans", "--directory"]
        subprocess.run([*sweep, str(doomed.records)], check=True, capture_output=True, timeout=60)
        assert list(doomed.records.glob("*.json")) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_after_a_restart_paused_files_and_templates_are_there_and_what_ran_is_gone(service, tmp_path, number):
    kept = ("--snapshots", str(tmp_path / "snapshots"))
    with serving(tmp_path, *kept) as first:
        paused, running = first.create(metadata={"kept": "yes"}), first.create()
        paused.files.write("state", "before the end")
        running.files.write("state", "in a template")
        running.create_snapshot(mode="filesystem", name="my-state")
        running.commands.run("sleep 1000", background=True)
        assert paused.pause(mode="filesystem") is True
        first.end(number)
    with serving(tmp_path, *kept) as second:
        (found,) = e2b.Sandbox.list(**second.options).next_items()
        assert (found.sandbox_id, found.state.value, found.metadata) == (paused.sandbox_id, "paused", {"kept": "yes"})
        again = e2b.Sandbox.connect(paused.sandbox_id, timeout=60, **second.options)
        assert again.files.read("state") == "before the end"
        assert second.create("my-state").files.read("state") == "in a template"
        with pytest.raises(e2b.NotFoundException):
            e2b.Sandbox.connect(running.sandbox_id, timeout=60, **second.options)
        assert second.end()[0] == 0
        assert list(second.records.glob("*.json")) == []


def test_two_services_do_not_share_what_they_promised(service, tmp_path):
    kept = ("--leases", str(tmp_path / "leases.sqlite"))
    with serving(tmp_path / "one", *kept):
        options = ["--listen", "127.0.0.1:0", "--token-env", "TOKEN_OF_TEST", "--directory", str(tmp_path / "two")]
        done = subprocess.run(
            [sys.executable, "-m", "rollmill.cli", "sandbox", "serve", *options, *kept],
            env={**os.environ, "TOKEN_OF_TEST": TOKEN},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2
        assert "another service has its leases in" in done.stderr


# -- commands ---------------------------------------------------------------------------------------------------------


def test_a_command_has_its_users_home_its_environment_and_its_output(sandbox):
    done = sandbox.commands.run('echo "$A $E2B_SANDBOX"; pwd; id -un; echo bad >&2', envs={"A": "given"})
    assert (done.stdout, done.stderr, done.exit_code) == (f"given true\n{HOME}\n{USER}\n", "bad\n", 0)
    assert sandbox.commands.run("pwd; id -un", user="root", cwd="/tmp").stdout == "/tmp\nroot\n"
    assert sandbox.commands.run("echo ünï").stdout == "ünï\n"


def test_environments_of_template_sandbox_and_command_come_in_this_order(service):
    one = service.create("small", envs={"OF_SANDBOX": "1", "BOTH": "sandbox"})
    text = one.commands.run('echo "$OF_TEMPLATE $OF_SANDBOX $BOTH"', envs={"BOTH": "command"}).stdout
    assert text == "yes 1 command\n"
    one.kill()


def test_a_command_that_fails_is_an_exception_with_its_code_and_output(sandbox):
    with pytest.raises(e2b.CommandExitException) as caught:
        sandbox.commands.run("echo out; echo err >&2; exit 7")
    assert (caught.value.exit_code, caught.value.stdout, caught.value.stderr) == (7, "out\n", "err\n")
    with pytest.raises(e2b.CommandExitException) as caught:
        sandbox.commands.run("kill -9 $$")
    assert (caught.value.exit_code, caught.value.error) == (-1, "signal: killed")


def test_callbacks_hear_output_as_it_comes(sandbox):
    heard: list[str] = []
    sandbox.commands.run(
        "echo one; sleep 0.2; echo two >&2",
        on_stdout=lambda text: heard.append(f"out {text}"),
        on_stderr=lambda text: heard.append(f"err {text}"),
    )
    assert heard == ["out one\n", "err two\n"]


def test_a_command_beyond_its_timeout_is_ended(sandbox):
    with pytest.raises(e2b.TimeoutException):
        sandbox.commands.run("touch began; sleep 100; touch late", timeout=1)
    assert sandbox.files.exists("began")
    until(lambda: sandbox.commands.list() == [])


def test_a_background_command_takes_input_is_listed_and_is_killed(sandbox):
    handle = sandbox.commands.run("cat; echo end", background=True, stdin=True)
    (listed,) = sandbox.commands.list()
    assert (listed.pid, listed.cmd, listed.args) == (handle.pid, "/bin/bash", ["-l", "-c", "cat; echo end"])
    handle.send_stdin("one ")
    sandbox.commands.stream_input(handle.pid, ["two ", b"three\n"])
    handle.close_stdin()
    assert handle.wait().stdout == "one two three\nend\n"
    sleeper = sandbox.commands.run("sleep 1000", background=True)
    assert sandbox.commands.kill(sleeper.pid) is True
    with pytest.raises(e2b.CommandExitException, match=r"-1"):
        sleeper.wait()
    assert sandbox.commands.kill(sleeper.pid) is False
    with pytest.raises(e2b.NotFoundException):
        sandbox.commands.send_stdin(sleeper.pid, "x")


def test_a_program_goes_on_when_its_caller_leaves_and_is_heard_by_another(sandbox):
    handle = sandbox.commands.run("read a; echo got $a; read b; echo got $b", background=True, stdin=True)
    handle.disconnect()
    again = sandbox.commands.connect(handle.pid)
    sandbox.commands.send_stdin(handle.pid, "1\n")
    sandbox.commands.send_stdin(handle.pid, "2\n")
    assert again.wait().stdout == "got 1\ngot 2\n"


def test_big_and_binary_output_comes_whole(sandbox):
    size = 5_000_000
    text = sandbox.commands.run(f"head -c {size} /dev/zero | tr '\\0' x").stdout
    assert (len(text), set(text)) == (size, {"x"})
    done = sandbox.commands.run(r"printf '\377\376ok\303'")
    assert done.stdout == "\ufffd\ufffdok\ufffd"


def test_a_sandbox_that_is_killed_ends_its_commands_with_the_sdks_word_for_it(service):
    one = service.create()
    handle = one.commands.run("sleep 1000", background=True)
    killer = threading.Timer(0.3, one.kill)
    killer.start()
    with pytest.raises(e2b.exceptions.SandboxNotRunningException, match="killed or reached its end of life while"):
        handle.wait()
    killer.join()


def test_no_such_user_and_no_such_directory_are_said(sandbox):
    with pytest.raises(e2b.AuthenticationException, match="no user 'nobody-here'"):
        sandbox.commands.run("true", user="nobody-here")
    with pytest.raises(e2b.InvalidArgumentException, match="cwd '/not/there' does not exist"):
        sandbox.commands.run("true", cwd="/not/there")


# -- terminals --------------------------------------------------------------------------------------------------------


def test_a_terminal_has_a_size_takes_input_and_ends_with_its_shell(sandbox):
    terminal = sandbox.pty.create(e2b.PtySize(rows=24, cols=80), envs={"PS1": "$ "}, cwd="/tmp")
    sandbox.pty.resize(terminal.pid, e2b.PtySize(rows=31, cols=101))
    sandbox.pty.send_stdin(terminal.pid, b"stty size; pwd; echo $TERM; tty; exit 5\n")
    heard: list[bytes] = []
    with pytest.raises(e2b.CommandExitException) as caught:
        terminal.wait(on_pty=heard.append)
    said = b"".join(heard).decode()
    assert caught.value.exit_code == 5
    assert "31 101\r\n/tmp\r\nxterm-256color\r\n/dev/pts/" in said


def test_a_terminal_is_heard_again_after_its_caller_left_and_is_killed(sandbox):
    terminal = sandbox.pty.create(e2b.PtySize(rows=24, cols=80))
    terminal.disconnect()
    again = sandbox.pty.connect(terminal.pid, timeout=20)
    sandbox.pty.send_stdin(terminal.pid, b"echo $((40+2))\n")
    heard = b""
    for _, _, piece in again:
        heard += piece or b""
        if b"42\r\n" in heard:
            break
    assert b"42\r\n" in heard
    assert sandbox.pty.kill(terminal.pid) is True
    until(lambda: sandbox.pty.kill(terminal.pid) is False)
    plain = sandbox.commands.run("sleep 100", background=True)
    with pytest.raises(e2b.InvalidArgumentException, match="has no terminal"):
        sandbox.pty.resize(plain.pid, e2b.PtySize(rows=1, cols=1))
    plain.kill()


# -- snapshots --------------------------------------------------------------------------------------------------------


def test_a_snapshot_of_files_is_a_template_until_it_is_deleted(service):
    one = service.create(envs={"KEPT": "env"})
    one.files.write("state", "first")
    snapshot = one.create_snapshot(mode="filesystem", name="my-state")
    assert snapshot.names == ["my-state"]
    one.files.write("state", "second")
    copies = [service.create(name) for name in (snapshot.snapshot_id, "my-state")]
    assert [copy.commands.run("cat state; echo $KEPT").stdout for copy in copies] == ["firstenv\n"] * 2
    assert one.files.read("state") == "second"
    listed = e2b.Sandbox.list_snapshots(sandbox_id=one.sandbox_id, **service.options).next_items()
    assert [found.snapshot_id for found in listed] == [snapshot.snapshot_id]
    assert e2b.Sandbox.delete_snapshot(snapshot.snapshot_id, **service.options) is True
    assert e2b.Sandbox.delete_snapshot(snapshot.snapshot_id, **service.options) is False
    assert copies[0].files.read("state") == "first"
    with pytest.raises(e2b.SandboxException, match="template 'my-state' is not known"):
        service.create("my-state")
    for copy in (one, *copies):
        copy.kill()


def test_what_would_keep_memory_is_refused_in_words(service):
    one = service.create()
    with pytest.raises(e2b.SandboxException, match="mode='filesystem'"):
        one.create_snapshot(mode="full")
    handle = one.commands.run("sleep 100", background=True)
    with pytest.raises(e2b.SandboxException, match="409"):
        one.create_snapshot(mode="filesystem")
    with pytest.raises(e2b.SandboxException, match=r"409.*processes run"):
        one.fork(count=2)
    handle.kill()
    one.kill()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="gVisor restores processes as root only")
def test_with_a_backend_that_keeps_processes_snapshots_and_forks_go_on_where_they_were(tmp_path):
    need_gvisor(tmp_path / "probe")
    with serving(tmp_path, "--backend", "gvisor") as service:
        one = service.create()
        one.commands.run("i=0; while :; do i=$((i+1)); echo $i >count; sleep 0.05; done", background=True)
        until(lambda: one.files.exists("count"))
        snapshot = one.create_snapshot(mode="full", name="counting")
        (fork,) = one.fork(count=1, timeout=60)
        for each in (service.create(snapshot.snapshot_id), fork, one):
            first = int(each.files.read("count"))
            until(lambda each=each, first=first: int(each.files.read("count") or 0) > first)
        assert service.end()[0] == 0


def test_forks_begin_with_the_files_of_a_sandbox_in_which_nothing_runs(service):
    one = service.create(envs={"KEPT": "env"})
    one.files.write("state", "before")
    forks = one.fork(count=2, timeout=60)
    assert [fork.commands.run("cat state; echo $KEPT").stdout for fork in forks] == ["beforeenv\n"] * 2
    forks[0].files.write("state", "after")
    assert [each.files.read("state") for each in (one, forks[1])] == ["before"] * 2
    assert e2b.Sandbox.list_snapshots(**service.options).next_items() == []
    for each in (one, *forks):
        assert each.kill() is True


def test_a_pause_that_keeps_files_alone_ends_programs_and_goes_on_with_the_files(service):
    one = service.create(metadata={"kept": "yes"})
    one.files.write("state", "kept")
    one.commands.run("sleep 1000", background=True)
    assert one.pause(mode="filesystem") is True
    assert one.get_info().state.value == "paused"
    one.connect(timeout=60)
    assert one.files.read("state") == "kept"
    assert one.commands.list() == []
    assert one.get_info().metadata == {"kept": "yes"}
    assert one.pause(mode="filesystem") is True
    assert one.kill() is True


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_are_written_read_described_moved_and_removed(sandbox):
    info = sandbox.files.write("d1/d2/hello.txt", "hällo")
    assert (info.name, info.path) == ("hello.txt", f"{HOME}/d1/d2/hello.txt")
    assert sandbox.files.read("d1/d2/hello.txt") == "hällo"
    entry = sandbox.files.get_info("~/d1/d2/hello.txt")
    assert (entry.type.value, entry.size, entry.mode, entry.permissions) == ("file", 6, 0o644, "-rw-r--r--")
    assert (entry.owner, entry.group) == (USER, USER)
    assert abs((entry.modified_time - datetime.datetime.now(datetime.UTC)).total_seconds()) < 60
    assert [one.path for one in sandbox.files.list("d1", depth=2)] == [f"{HOME}/d1/d2", f"{HOME}/d1/d2/hello.txt"]
    moved = sandbox.files.rename("d1/d2/hello.txt", "elsewhere/new.txt")
    assert (moved.path, sandbox.files.exists("d1/d2/hello.txt")) == (f"{HOME}/elsewhere/new.txt", False)
    assert sandbox.files.make_dir("d1/d3") is True
    assert sandbox.files.make_dir("d1/d3") is False
    assert sandbox.files.get_info("d1/d3").owner == USER
    sandbox.files.remove("d1")
    assert not sandbox.files.exists("d1")
    assert sandbox.files.list("elsewhere")[0].name == "new.txt"


def test_links_are_shown_as_what_they_lead_to_with_where_that_is(sandbox):
    sandbox.commands.run("mkdir -p links/dir; ln -s dir links/to-dir; ln -s nowhere links/broken; touch links/f")
    found = {one.name: one for one in sandbox.files.list("links")}
    assert {name: one.type.value for name, one in found.items() if one.type} == {
        "dir": "dir",
        "f": "file",
        "to-dir": "dir",
        "broken": "symlink",
    }
    assert (found["to-dir"].symlink_target, found["f"].symlink_target) == (f"{HOME}/links/dir", None)
    assert found["broken"].symlink_target == "nowhere"
    sandbox.files.write("links/to-dir/inside", "x")
    assert sandbox.files.exists("links/dir/inside")


def test_bytes_streams_and_many_files_are_uploaded_as_they_are(sandbox):
    data = os.urandom(3_000_000)
    sandbox.files.write("big.bin", data)
    assert bytes(sandbox.files.read("big.bin", format="bytes")) == data
    assert hashlib.sha256(b"".join(sandbox.files.read("big.bin", format="stream"))).digest() == (
        hashlib.sha256(data).digest()
    )
    sandbox.files.write("stream.bin", io.BytesIO(data))
    sandbox.files.write("zipped.bin", data, gzip=True)
    sums = sandbox.commands.run("sha256sum big.bin stream.bin zipped.bin | cut -c1-64 | uniq | wc -l").stdout
    assert sums.strip() == "1"
    sandbox.files.write("octets", b"a\r\nb", use_octet_stream=True)
    assert sandbox.files.read("octets", gzip=True) == "a\r\nb"
    names = [f'odd "{number}" ü.txt' for number in range(5)]
    written = sandbox.files.write_files([{"path": f"many/{name}", "data": name} for name in names])
    assert [one.name for one in written] == names
    assert [sandbox.files.read(f"many/{name}") for name in names] == names
    assert sandbox.files.write("empty", "").path == f"{HOME}/empty"
    assert sandbox.files.read("empty") == ""


def test_writing_over_a_file_keeps_its_mode(sandbox):
    sandbox.files.write("run.sh", "echo first")
    sandbox.commands.run("chmod 750 run.sh")
    sandbox.files.write("run.sh", "echo second")
    assert sandbox.commands.run("bash run.sh; stat -c %a run.sh").stdout == "second\n750\n"


def test_wrong_paths_are_said_with_the_sdks_exceptions(sandbox):
    sandbox.files.write("file", "x")
    with pytest.raises(e2b.FileNotFoundException, match="does not exist"):
        sandbox.files.read("not-here")
    with pytest.raises(e2b.InvalidArgumentException, match="is a directory"):
        sandbox.files.read("/tmp")
    with pytest.raises(e2b.FileNotFoundException):
        sandbox.files.list("not-here")
    with pytest.raises(e2b.InvalidArgumentException, match="is not a directory"):
        sandbox.files.list("file")
    with pytest.raises(e2b.FileNotFoundException):
        sandbox.files.rename("not-here", "there")
    with pytest.raises(e2b.InvalidArgumentException, match="is no place for a directory"):
        sandbox.files.make_dir("file")
    sandbox.files.remove("not-here")
    with pytest.raises(e2b.AuthenticationException):
        sandbox.files.read("file", user="nobody-here")


def test_a_file_carries_the_metadata_of_its_last_upload(sandbox):
    try:
        written = sandbox.files.write("marked", "x", metadata={"Kind": "a b", "n": "1"})
    except e2b.SandboxException as error:
        pytest.skip(f"files in memory carry nothing here: {error}")
    assert written.metadata == {"kind": "a b", "n": "1"}
    assert sandbox.files.get_info("marked").metadata == {"kind": "a b", "n": "1"}
    listed = {entry.name: entry.metadata for entry in sandbox.files.list(".")}
    assert listed["marked"] == {"kind": "a b", "n": "1"}
    assert listed.get(".bashrc") is None
    sandbox.files.rename("marked", "moved")
    assert sandbox.files.get_info("moved").metadata == {"kind": "a b", "n": "1"}
    pair = [{"path": "one", "data": "1"}, {"path": "two", "data": "2"}]
    assert [entry.metadata for entry in sandbox.files.write_files(pair, metadata={"x": "y"})] == [{"x": "y"}] * 2
    sandbox.files.write("moved", "other", metadata={"n": "2"})
    assert sandbox.files.get_info("moved").metadata == {"n": "2"}
    sandbox.files.write("moved", "none")
    assert sandbox.files.get_info("moved").metadata is None
    assert sandbox.commands.run("python3 -c 'import os; print(os.listxattr(\"one\"))'").stdout == "['user.e2b.x']\n"


def test_a_full_sandbox_says_so(service):
    one = service.create("small")
    with pytest.raises(e2b.NotEnoughSpaceException):
        one.files.write("big", b"x" * 4_000_000)
    assert one.commands.run("echo alive").stdout == "alive\n"
    one.kill()


def test_a_watcher_tells_what_happens_below_a_directory(sandbox):
    sandbox.files.make_dir("watched/deep")
    flat = sandbox.files.watch_dir("watched")
    deep = sandbox.files.watch_dir("watched", recursive=True)
    sandbox.commands.run(
        "cd watched; echo x > deep/f; mkdir new; echo y > new/g; mv new moved; chmod 700 deep; rm -r moved"
    )
    seen: dict[str, list[tuple[str, str]]] = {"flat": [], "deep": []}

    def done() -> bool:
        for name, watcher in (("flat", flat), ("deep", deep)):
            seen[name] += [(event.type.value, event.name) for event in watcher.get_new_events()]
        return all(("remove", "moved") in events for events in seen.values())

    until(done)
    assert [one for one in seen["flat"] if "/" in one[1]] == []
    for expected in [("create", "new"), ("rename", "new"), ("create", "moved"), ("chmod", "deep")]:
        assert expected in seen["flat"]
    assert ("create", "deep/f") in seen["deep"]
    assert ("write", "deep/f") in seen["deep"]
    full = sandbox.files.watch_dir("watched", include_entry=True)
    sandbox.files.write("watched/told", "abc")
    told = [event for event in full.get_new_events() if event.type.value == "write"]
    assert [(event.entry.path, event.entry.size) for event in told] == [(f"{HOME}/watched/told", 3)]
    for watcher in (flat, deep, full):
        watcher.stop()
    with pytest.raises(e2b.FileNotFoundException):
        sandbox.files.watch_dir("not-here")
    assert not [
        program for program in sandbox.commands.run("ps -ef || true").stdout.splitlines() if "inotify" in program
    ]


def test_a_signed_link_opens_one_file_until_it_expires(service, sandbox):
    sandbox.files.write("signed.txt", "open")

    def fetch(url: str) -> bytes:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.read()

    assert fetch(sandbox.download_url("signed.txt")) == b"open"
    assert fetch(sandbox.download_url("signed.txt", user=USER, use_signature_expiration=100)) == b"open"
    for url, why in [
        (sandbox.download_url("signed.txt", use_signature_expiration=-100), "signature is already expired"),
        (sandbox.download_url("signed.txt").replace("signed.txt", "/etc/passwd"), "invalid signature"),
        (sandbox.upload_url("signed.txt"), "invalid signature"),
        (f"{service.said['url']}/files?path=/etc/passwd", "does not say for which sandbox"),
    ]:
        assert why in refused(urllib.request.Request(url))[1]
    form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nuploaded\r\n--b--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=b"}
    fetch_upload = urllib.request.Request(sandbox.upload_url("up.txt"), data=form, headers=headers)
    with urllib.request.urlopen(fetch_upload, timeout=20) as answer:
        assert json.loads(answer.read())[0]["path"] == f"{HOME}/up.txt"
    assert sandbox.files.read("up.txt") == "uploaded"


def test_the_token_of_one_sandbox_opens_no_other(service, sandbox):
    other = service.create()
    headers = {"E2b-Sandbox-Id": other.sandbox_id, "X-Access-Token": sandbox._envd_access_token}
    request = urllib.request.Request(f"{service.said['url']}/files?path=/etc/passwd", headers=headers)
    assert refused(request)[0] == 401
    other.kill()
