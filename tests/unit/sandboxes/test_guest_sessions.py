"""How a line is wrapped and its end told; the shell here is the machine's own, without a sandbox."""

import os
import subprocess
import sys

import pytest

from rollmill.sandboxes.guest import sessions
from rollmill.sandboxes.guest.sessions import PROLOGUE, Shell, wrap

START = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.execv(sys.argv[2], [sys.argv[2], '-s'])"
REQUEST = {"cap": 100, "hard_cap": 1000, "timeout_s": 5.0}


def shell_that_runs(line: str) -> tuple[Shell, str]:
    shell = Shell(7)
    shell.begin(9, REQUEST, line)
    word = bytes(shell.stdin).rsplit(b"command printf '", 1)[1].split(b" ")[0].decode()
    return shell, word


def test_only_the_word_of_the_running_line_tells_its_end():
    shell, word = shell_that_runs("true")
    assert not shell.take_status(b"0 0\nword 0\n\xff 0\n" + b"x" * 1000 + b" 0\n")
    assert not shell.take_status(f"{word} ".encode())
    assert shell.take_status(b"3\n")
    report = shell.end_line()
    assert (report["n"], report["code"], report["alive"]) == (9, 3, True)
    assert shell.number == 7
    assert not shell.take_status(f"{word} 0\n".encode())  # told twice, or late


def test_a_line_cannot_tell_the_end_of_the_next_one():
    shell, first = shell_that_runs("true")
    shell.take_status(f"{first} 0\n".encode())
    shell.end_line()
    shell.begin(10, REQUEST, "true")
    assert not shell.take_status(f"{first} 0\n".encode())
    assert shell.running


def test_what_is_said_without_an_end_is_not_kept():
    shell, word = shell_that_runs("true")
    for _ in range(100):
        assert not shell.take_status(b"y" * 1000)
    assert not shell.take_status(b"\n")
    assert shell.take_status(f"{word} 0\n".encode())


@pytest.mark.parametrize("program", ["/bin/sh", "/bin/bash"])
def test_shells_run_what_was_wrapped_and_tell_each_end(program):
    if not os.path.exists(program):
        pytest.skip(f"there is no {program} here")
    lines = [
        ("cd /; X='it'\\''s'", 0),
        ('echo "$PWD $X"; read nothing; echo "read: $?"', 1),
        ("echo 'open", 2),
        ("echo before $?; (exit 5)", 2),
        ("echo status $?", 5),
        ("echo lie 0 >&8", 0),
        ("f() { echo in $1; return 4; }; f x", 0),
    ]
    expected = [0, 0, 2, 5, 0, None, 4]
    text = PROLOGUE + b"".join(wrap(line, word=f"w{i}", status=before) for i, (line, before) in enumerate(lines))
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-S", "-c", START, str(write), program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(write,),
    ) as process:
        os.close(write)
        out, err = process.communicate(text, timeout=20)
    with os.fdopen(read, "rb") as stream:
        told = stream.read().decode().splitlines()
    assert out.decode().splitlines() == ["/ it's", "read: 1", "before 2", "status 5", "in x"]
    assert [one.split()[0] for one in told] == [f"w{i}" for i in range(len(lines))]
    codes = [int(one.split()[1]) for one in told]
    assert [code for code, wanted in zip(codes, expected, strict=True) if wanted is not None] == [0, 0, 2, 5, 0, 4]
    assert codes[5] != 0  # the line had no such descriptor
    assert err


def test_what_a_killed_line_starts_a_moment_later_is_killed_too_and_the_shell_only_when_its_time_is_over(monkeypatch):
    now, signalled = [100.0], []
    monkeypatch.setattr(sessions.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sessions.jobs, "signal_descendants", lambda pid, _: signalled.append(("below", pid)))
    monkeypatch.setattr(sessions.jobs, "kill_tree", lambda pid: signalled.append(("shell", pid)))
    shell, _ = shell_that_runs("sleep 600")
    shell.pid = 44
    shell.kill("owner")  # before the shell has forked
    while (at := shell.due()) is not None:
        now[0] = at
        shell.expire()
    assert signalled[-1] == ("shell", 44)
    assert set(signalled[:-1]) == {("below", 44)}
    assert len(signalled) > 5
    assert now[0] == pytest.approx(100.0 + shell.grace_s, abs=0.2)


def test_a_signal_that_comes_before_the_shell_has_started_anything_is_owed_for_a_moment(monkeypatch):
    now, below, signalled = [100.0], [False], []

    def signal_descendants(_: int, number: int) -> bool:
        if below[0]:
            signalled.append(number)
        return below[0]

    monkeypatch.setattr(sessions.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sessions.jobs, "signal_descendants", signal_descendants)
    shell, _ = shell_that_runs("sleep 600")
    shell.pid = 44

    def go_on(*, until: float) -> None:
        while (at := shell.due()) is not None and at <= until:
            now[0] = max(now[0], at)
            shell.expire()

    shell.interrupt(2)
    go_on(until=100.3)
    assert signalled == []
    below[0] = True
    go_on(until=100.5)
    assert signalled == [2]
    assert shell.due() == 105.0  # its timeout, and nothing else
    below[0] = False
    shell.interrupt(2)
    go_on(until=104.0)
    assert shell.due() == 105.0  # a shell that works by itself is not owed a signal for ever
    shell.interrupt(2)
    shell.end_line()
    shell.begin(10, REQUEST, "sleep 600")
    below[0] = True
    go_on(until=104.9)
    assert signalled == [2]  # it was not for the next line
    assert not shell.killed_by
