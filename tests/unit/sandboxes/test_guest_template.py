"""The template of sandboxes: whose children its clones are, what is told of a refusal, and what its end means.

Each case is a process of its own, which forks: the one that runs the tests has threads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

PROGRAM = """
import json, os, signal, socket
from rollmill.sandboxes.guest import kernel
from rollmill.sandboxes.guest.template import Template

def become(agent, gate):
    os.write(agent, b"%d" % os.getppid())
    os._exit(7)

def made(template):
    ours, theirs = socket.socketpair()
    pid = template.clone(theirs.fileno(), theirs.fileno(), group=-1)
    theirs.close()
    _, status = os.waitpid(pid, 0)
    return {"status": os.waitstatus_to_exitcode(status), "parent": int(ours.recv(99)), "after": ours.recv(99).decode()}

def children():
    return [int(one) for one in os.listdir("/proc") if one.isdigit() and parent(one) == os.getpid()]

def parent(pid):
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return int(stream.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0

def state(pid):
    with open(f"/proc/{pid}/stat") as stream:
        return stream.read().rpartition(")")[2].split()[0]

template = Template(FLAGS, become)
template.start()
"""


def run(body: str, *, flags: str = "0") -> Any:
    text = PROGRAM.replace("FLAGS", flags) + body
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_clone_is_a_child_of_the_zygote_and_the_template_keeps_none_of_its_descriptors():
    found = run("""
print(json.dumps([os.getpid(), made(template), made(template)]))
""")
    own, first, second = found
    # After its one word the socket is at its end: nobody else has it open.
    assert first == second == {"status": 7, "parent": own, "after": ""}


def test_the_kernels_refusal_is_told_and_the_template_goes_on():
    number, after = run(
        """
number = 0
try:
    made(template)
except OSError as error:
    number = error.errno
print(json.dumps([number, len(children())]))
""",
        flags="kernel.CLONE_FS | kernel.CLONE_NEWNS",  # no process has both
    )
    assert (number, after) == (22, 1)


def test_a_template_that_ended_between_two_clones_is_replaced():
    first, second, result = run("""
(first,) = children()
os.kill(first, signal.SIGKILL)
os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
result = made(template)
(second,) = children()
print(json.dumps([first, second, result]))
""")
    assert first != second
    assert result["status"] == 7


def test_a_template_that_ended_while_it_was_asked_is_an_error_and_the_next_clone_gets_another():
    message, result = run("""
(first,) = children()
os.kill(first, signal.SIGSTOP)
if os.fork() == 0:
    while state(os.getppid()) != "S":  # it asks, and waits for the answer
        os.sched_yield()
    os.kill(first, signal.SIGKILL)
    os._exit(0)
message = ""
try:
    made(template)
except OSError as error:
    message = str(error)
print(json.dumps([message, made(template)]))
""")
    assert "ended while it made this one" in message
    assert result["status"] == 7


def test_a_template_ends_with_its_zygote():
    told = run("""
(first,) = children()
# It has its standard output open as well: whoever reads that waits for its end too.
print(json.dumps(first), flush=True)
os._exit(0)
""")
    assert told > 1  # the reading of the output came to its end, so the template has closed it
