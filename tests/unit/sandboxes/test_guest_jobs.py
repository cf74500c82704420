"""Processes as the agent starts and ends them; these run without a sandbox."""

import os
import signal

import pytest

from rollmill.sandboxes.guest import jobs


@pytest.fixture
def passwd(tmp_path):
    path = tmp_path / "passwd"
    path.write_text(
        "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1001:u:/home/user:/bin/sh\nbroken\nodd:x:a:b:::\n", encoding="utf-8"
    )
    return str(path)


def sleeper() -> int:
    """A child that is no leader of a group, as it is between its fork and its setsid."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    return pid


def test_a_signal_reaches_a_process_that_has_no_group_of_its_own_yet():
    pid = sleeper()
    jobs.signal_group(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_a_signal_to_what_has_ended_is_no_error():
    pid = sleeper()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    jobs.signal_group(pid, signal.SIGTERM)


def test_killing_a_tree_reaches_a_descendant_that_left_the_group():
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        child = os.fork()
        if child == 0:
            os.setsid()  # away from the group
            os.write(write, b"ready")
            signal.pause()
            os._exit(0)
        signal.pause()
        os._exit(0)
    os.close(write)
    assert os.read(read, 5) == b"ready"
    jobs.kill_tree(pid)
    os.waitpid(pid, 0)
    assert os.read(read, 1) == b""  # the last writer has ended
    os.close(read)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("root", ("root", 0, 0, "/root")),
        ("user", ("user", 1000, 1001, "/home/user")),
        ("1000", ("user", 1000, 1001, "/home/user")),
        ("7:8", ("7", 7, 8, "/")),
        ("7", ("7", 7, 7, "/")),
    ],
)
def test_users_are_found_by_name_and_by_id(passwd, name, expected):
    user = jobs.find_user(name, passwd=passwd)
    assert (user.name, user.uid, user.gid, user.home) == expected


@pytest.mark.parametrize("name", ["nobody-here", "odd", "broken", "-1", "1:x", "65536", ""])
def test_users_that_are_not_there_are_refused(passwd, name):
    with pytest.raises(jobs.UserUnknown):
        jobs.find_user(name, passwd=passwd)


def test_root_is_known_without_a_list_of_users(tmp_path):
    assert jobs.find_user("root", passwd=str(tmp_path / "missing")).uid == 0


def test_an_environment_is_what_was_given_over_a_few_defaults():
    user = jobs.User("user", 1000, 1000, "/home/user")
    found = jobs.environment({"PATH": "/mine", "A": "b"}, user)
    assert found == {"PATH": "/mine", "A": "b", "HOME": "/home/user", "USER": "user", "LANG": "C.UTF-8", "TERM": "dumb"}


def test_a_process_that_was_killed_is_dying_and_one_that_runs_is_not():
    pid = sleeper()
    assert not jobs.is_dying(pid)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    assert not jobs.is_dying(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert jobs.is_dying(pid)
