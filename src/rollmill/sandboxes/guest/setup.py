"""How a fresh clone of the zygote becomes a sandbox: from new namespaces to an agent without privileges.

The order matters. What needs privileges over the new namespaces comes first; then those are given up, and from the
seccomp filter on nothing of this process can be undone, by itself or by its children.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import socket
import struct
from typing import Any

from rollmill.sandboxes.guest import kernel, landlock, root, seccomp
from rollmill.sandboxes.guest.agent import Agent
from rollmill.sandboxes.guest.frames import encode

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_SETTLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
GO, GO_UNMAPPED = b"go", b"go unmapped"
OWNERS_NOT_MAPPED = "owners_not_mapped"


class Step:
    """Names the step that failed, for the one message that its owner gets; and what a step left for later."""

    name = "start"
    written = -1


def become_sandbox(plan: dict[str, Any], *, agent: socket.socket, gate: socket.socket) -> None:
    """Set this process up as a sandbox and serve it; never returns.

    Args:
        plan: what `build` takes, and `limits`, `held`, `seccomp`, `landlock`, `trees` and `lent` (names of what comes
            through the gate).
        agent: where the owner talks to the agent.
        gate: where the zygote says when ids and groups are in place, with descriptors of the host's directories and
            of layers; later the agent hands its own layer out there.
    """
    step = Step()
    try:
        protections = _set_up(plan, agent=agent, gate=gate, step=step)
    except BaseException as error:  # whatever it was, the owner must hear of it: this process has nobody else
        number = error.errno if isinstance(error, OSError) else 0
        detail = {"step": step.name, "errno": number or 0, "message": f"{type(error).__name__}: {error}"}
        say(agent, {"op": "failed", **detail})
        os._exit(1)
    agent.setblocking(False)
    Agent(agent, all_users=plan["all_users"], limits=plan["limits"], zygote=gate, written=step.written).serve(
        protections
    )


def say(agent: socket.socket, head: dict[str, Any]) -> None:
    """Say something to the owner while there is no agent yet."""
    try:
        agent.sendall(encode(head))
    except OSError:
        os._exit(1)  # the owner is gone: nobody to tell


def _set_up(plan: dict[str, Any], *, agent: socket.socket, gate: socket.socket, step: Step) -> list[str]:
    trees = enter(plan, agent=agent, gate=gate, step=step)
    step.name = "bring the loopback up"
    _loopback_up()
    step.name = "mount the root"
    step.written = root.build(plan, root.Trees(trees))
    # The last two are for the day when this sandbox's files become a layer of others.
    kernel.close_all_except((0, 1, 2, agent.fileno(), gate.fileno(), step.written))
    agent.set_inheritable(False)
    step.name = "set limits"
    _set_limits(plan)
    return ["namespaces", "user_namespace", "no_network", "no_nested_namespaces", *_give_up(plan, step)]


def enter(plan: dict[str, Any], *, agent: socket.socket, gate: socket.socket, step: Step) -> dict[str, int]:
    """Take the place that the zygote made: its groups, its ids, its host name; return what came through the gate."""
    step.name = "wait for the zygote"
    kernel.die_with_parent()
    for number in _SETTLED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    trees = _wait_for_gate(plan, gate, agent)
    _silence()
    step.name = "take the ids of the user namespace"
    if plan["all_users"]:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    kernel.die_with_parent()  # cleared by the change of ids
    _check_zygote(gate)
    os.setsid()
    kernel.unshare(kernel.CLONE_NEWCGROUP)
    os.umask(0o022)
    step.name = "name the host"
    socket.sethostname(plan["name"])
    return trees


def _give_up(plan: dict[str, Any], step: Step) -> list[str]:
    """Give up privileges; return what now protects the host."""
    step.name = "drop capabilities"
    kernel.keep_capabilities()
    kernel.set_no_new_privileges()
    kernel.set_name("sandbox-agent")
    kernel.hide_command_line("sandbox-agent")
    kernel.set_dumpable(False)
    kernel.die_with_parent()  # cleared by the change of capabilities
    held = ["capabilities_dropped", "no_new_privileges", *plan["held"]]
    step.name = "restrict files by Landlock"
    if plan["landlock"] and landlock.restrict("/"):
        held.append("landlock")
    step.name = "install the seccomp filter"
    if plan["seccomp"] and (filter_program := seccomp.program(kernel.machine())) is not None:
        kernel.install_filter(filter_program)
        held.append("seccomp")
    return held


def _wait_for_gate(plan: dict[str, Any], gate: socket.socket, agent: socket.socket) -> dict[str, int]:
    kernel.close_all_except((0, 1, 2, gate.fileno(), agent.fileno()))
    trees = [*plan["trees"], *plan["lent"]]
    expected = plan["entrances"] + len(trees)
    message, descriptors, _, _ = socket.recv_fds(gate, 16, expected + 1)
    if message not in (GO, GO_UNMAPPED) or len(descriptors) != expected:
        raise OSError(errno.EPIPE, "the zygote ended before this sandbox was set up")
    if message == GO_UNMAPPED:
        plan["held"].append(OWNERS_NOT_MAPPED)
    for entrance in descriptors[: plan["entrances"]]:
        os.write(entrance, b"0")  # this process
        os.close(entrance)
    return dict(zip(trees, descriptors[plan["entrances"] :], strict=True))


def _silence() -> None:
    """Point the standard streams to nowhere: the zygote's stderr is its owner's."""
    null = os.open("/dev/null", os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target)
    os.close(null)


def _check_zygote(gate: socket.socket) -> None:
    """Notice a zygote that ended before the kernel was told to kill this process with it."""
    gate.setblocking(False)
    try:
        if gate.recv(1) == b"":
            raise OSError(errno.EPIPE, "the zygote ended while this sandbox was set up")
    except BlockingIOError:
        return  # alive and silent, as it should be


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def _set_limits(plan: dict[str, Any]) -> None:
    """Set limits per process and, inside this user namespace, processes per user."""
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
        _, most = resource.getrlimit(kind)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (value, value))
