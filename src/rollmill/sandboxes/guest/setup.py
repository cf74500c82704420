"""How a fresh clone becomes a sandbox: from new namespaces to an agent without privileges.

The order matters. What needs privileges over the new namespaces comes first; then those are given up, and from the
seccomp filter on nothing of this process can be undone, by itself or by its children.

Each page of memory that this process writes to is one that it no longer shares with all the other sandboxes, and keeps
for its life. So most of the work is done by a second process in the same namespaces, with the same descriptors and the
same root. It has ended before anything is said to the owner, and so before anything of a sandbox runs.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]  # typeshed has no stub of it
import _socket
import errno
import fcntl
import marshal
import os
import resource
import select
import signal
import socket
import struct
from typing import Any, NoReturn

from rollmill.sandboxes.guest import kernel, landlock, root, seccomp
from rollmill.sandboxes.guest.agent import Agent
from rollmill.sandboxes.guest.frames import encode

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_SETTLED_SIGNALS = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)))
_DEFAULT = int(signal.SIG_DFL)
_MOST_PLAN_BYTES = 512 * 1024
_ROOM = socket.CMSG_SPACE(4 * 253)  # the kernel's bound on descriptors of one message
_CLOSED = int(socket.MSG_CMSG_CLOEXEC)
_MOST_WORD_BYTES = 64 * 1024
_SAID, _RULES = 3, 4
OWNERS_NOT_MAPPED = "owners_not_mapped"


class Step:
    """Names the step that failed, for the one message that its owner gets."""

    name = "start"


def become_sandbox(agent: int, gate: int) -> NoReturn:
    """Set this process up as a sandbox and serve it; never returns.

    Args:
        agent: descriptor of the socket where the owner talks to the agent.
        gate: descriptor of that where the zygote sends the plan when ids and groups are in place, with descriptors of
            the host's directories and of layers; later the agent hands its own layer out there. The plan is what
            `build` takes, and `limits`, `held`, `seccomp`, `landlock`, `entrances` (the number of descriptors that come
            first), `trees` and `lent` (names of the further ones) and `owners_mapped`.
    """
    step = Step()
    owner = _socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, agent)
    zygote = _socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, gate)
    try:
        served, ready = _set_up(owner, zygote, step)
    except BaseException as error:  # whatever it was, the owner must hear of it: this process has nobody else
        fail(owner, step, error)
    served.serve(ready)


class Places:
    """Where the second process leaves what it has opened for the first: the layer, rules, the agent's first word."""

    def __init__(self, first: int) -> None:
        self.written, self.rules, self.ready = first, first + 1, first + 2


def say(agent: _socket.socket, head: dict[str, Any]) -> None:
    """Say something to the owner while there is no agent yet."""
    try:
        agent.sendall(encode(head))
    except OSError:
        os._exit(1)  # the owner is gone: nobody to tell


def fail(agent: _socket.socket, step: Step, error: BaseException) -> NoReturn:
    """Tell the owner why there will be no sandbox, and end."""
    number = error.errno if isinstance(error, OSError) else 0
    detail = {"step": step.name, "errno": number or 0, "message": f"{type(error).__name__}: {error}"}
    say(agent, {"op": "failed", **detail})
    os._exit(_SAID)


def _set_up(owner: _socket.socket, gate: _socket.socket, step: Step) -> tuple[Agent, bytes]:
    plan, descriptors = enter(owner.fileno(), gate, step=step)
    os.set_inheritable(owner.fileno(), False)
    own = (0, 1, 2, owner.fileno(), gate.fileno())
    woken = os.pipe()
    places = Places(max(*own, *descriptors, *woken) + 1)
    # Made before the second process: while that one opens and closes descriptors, which are common, this one does not.
    agent = Agent(
        owner, all_users=plan["all_users"], limits=plan["limits"], zygote=gate, written=places.written, woken=woken
    )
    step.name = "build the sandbox"
    pid = kernel.clone(kernel.CLONE_FILES | kernel.CLONE_FS)
    if pid == 0:
        _build(plan, descriptors, owner, kept=(*own, *woken), places=places)
    _give_up(plan, step)
    step.name = "build the sandbox"
    _, status = os.waitpid(pid, 0)
    if status == _SAID << 8:
        os._exit(_SAID)
    if status not in (0, _RULES << 8):
        raise OSError(errno.ECHILD, f"the process that builds it ended with status {status:#x}")
    ready = os.read(places.ready, _MOST_WORD_BYTES)
    os.close(places.ready)
    step.name = "restrict files by Landlock"
    if status:
        landlock.restrict(places.rules)
    owner.setblocking(False)
    return agent, ready


def _build(
    plan: dict[str, Any], descriptors: list[int], owner: _socket.socket, *, kept: tuple[int, ...], places: Places
) -> NoReturn:
    """Make all that needs no change of the first process itself, and end: no memory that this takes outlives it.

    What this opens stays open for the first process, with which it shares its descriptors, its root and its directory.
    """
    step = Step()
    rules = -1
    try:
        kernel.die_with_parent()
        furnish(plan, step)
        step.name = "bring the loopback up"
        _loopback_up()
        step.name = "mount the root"
        made = root.build(plan, root.Trees(trees_of(plan, descriptors)))
        step.name = "restrict files by Landlock"
        if plan["landlock"]:
            rules = landlock.rules("/")
        word = os.memfd_create("ready", os.MFD_CLOEXEC)
        os.write(word, encode({"op": "ready", "protections": _protections(plan, landlocked=rules >= 0)}))
        os.lseek(word, 0, os.SEEK_SET)
        # The layer and the gate are for the day when this sandbox's files become a layer of others.
        opened = {places.written: made, places.ready: word, **({places.rules: rules} if rules >= 0 else {})}
        _leave_open(opened, kept=kept)
        step.name = "set limits"
        _set_limits(plan, os.getppid())
    except BaseException as error:  # as in the first process
        fail(owner, step, error)
    os._exit(_RULES if rules >= 0 else 0)


def _leave_open(opened: dict[int, int], *, kept: tuple[int, ...]) -> None:
    """Have descriptors at these numbers, and nothing else but what is kept."""
    out_of_the_way = {place: fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, max(opened) + 1) for place, one in opened.items()}
    for place, one in out_of_the_way.items():
        os.dup2(one, place, inheritable=False)
    kernel.close_all_except((*kept, *opened))


def _protections(plan: dict[str, Any], *, landlocked: bool) -> list[str]:
    """Return what will protect the host when the first process has given up its privileges; else it says nothing."""
    words = ["namespaces", "user_namespace", "no_network", "no_nested_namespaces"]
    words += ["capabilities_dropped", "no_new_privileges", *plan["held"]]
    if not plan["owners_mapped"]:
        words.append(OWNERS_NOT_MAPPED)
    if landlocked:
        words.append("landlock")
    if plan["seccomp"] and seccomp.program(kernel.machine()) is not None:
        words.append("seccomp")
    return words


def enter(agent: int, gate: _socket.socket, *, step: Step) -> tuple[dict[str, Any], list[int]]:
    """Take the place that the zygote made: its groups and its ids.

    Returns:
        The plan, and the descriptors that came with it.
    """
    step.name = "wait for the zygote"
    kernel.die_with_parent()
    for number in _SETTLED_SIGNALS:
        _signal.signal(number, _DEFAULT)
    plan, descriptors = _wait_for_gate(gate, agent)
    step.name = "take the ids of the user namespace"
    if plan["all_users"]:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    kernel.die_with_parent()  # cleared by the change of ids
    _check_zygote(gate)
    os.setsid()
    kernel.unshare(kernel.CLONE_NEWCGROUP)
    return plan, descriptors


def furnish(plan: dict[str, Any], step: Step) -> None:
    """Set what a process shares with those of the same namespaces, directory and descriptors."""
    _silence()
    os.umask(0o022)
    step.name = "name the host"
    socket.sethostname(plan["name"])


def trees_of(plan: dict[str, Any], descriptors: list[int]) -> dict[str, int]:
    """Return the descriptors of directories and layers by name."""
    return dict(zip((*plan["trees"], *plan["lent"]), descriptors, strict=True))


def _give_up(plan: dict[str, Any], step: Step) -> None:
    """Give up privileges, all but the reach of files: the root is not there yet."""
    step.name = "drop capabilities"
    kernel.keep_capabilities()
    kernel.set_no_new_privileges()
    kernel.set_name("sandbox-agent")
    kernel.hide_command_line("sandbox-agent")
    kernel.set_dumpable(False)
    kernel.die_with_parent()  # cleared by the change of capabilities
    step.name = "install the seccomp filter"
    if plan["seccomp"] and (filter_program := seccomp.program(kernel.machine())) is not None:
        kernel.install_filter(filter_program)


def _wait_for_gate(gate: _socket.socket, agent: int) -> tuple[dict[str, Any], list[int]]:
    kernel.close_all_except((0, 1, 2, gate.fileno(), agent))
    message, ancillary, _, _ = gate.recvmsg(_MOST_PLAN_BYTES, _ROOM, _CLOSED)
    if not message:
        raise OSError(errno.EPIPE, "the zygote ended before this sandbox was set up")
    plan: dict[str, Any] = marshal.loads(message)  # by the same interpreter, and of our own making
    descriptors = memoryview(ancillary[0][2]).cast("i").tolist() if ancillary else []
    for entrance in descriptors[: plan["entrances"]]:
        os.write(entrance, b"0")  # this process
        os.close(entrance)
    return plan, descriptors[plan["entrances"] :]


def _silence() -> None:
    """Point the standard streams to nowhere: the zygote's stderr is its owner's."""
    null = os.open("/dev/null", os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target)
    os.close(null)


def _check_zygote(gate: _socket.socket) -> None:
    """Notice a zygote that ended before the kernel was told to kill this process with it."""
    poll = select.poll()
    poll.register(gate, select.POLLIN)
    if poll.poll(0):  # alive it is silent
        raise OSError(errno.EPIPE, "the zygote ended while this sandbox was set up")


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def _set_limits(plan: dict[str, Any], pid: int) -> None:
    """Set another process's limits per process and, inside this user namespace, processes per user."""
    limits = plan["limits"]
    chosen = {
        # One above the group's bound, where there is one: the group then refuses first, and counts what it refuses.
        resource.RLIMIT_NPROC: limits["pids"] + (1 if "pids" in plan["held"] else 0),
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_CORE: 1,  # not 0: with 0 the kernel still runs a host's program for each crash
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_FSIZE: limits["disk_bytes"],
        resource.RLIMIT_MEMLOCK: 64 * 1024,
        resource.RLIMIT_MSGQUEUE: 800 * 1024,
        resource.RLIMIT_SIGPENDING: 4096,
    }
    for kind, value in chosen.items():
        _, most = resource.prlimit(pid, kind)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.prlimit(pid, kind, (value, value))
