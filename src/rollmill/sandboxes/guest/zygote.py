"""The zygote: a tiny process that has sandboxes cloned from itself, watches them and cleans up after them.

One per provider, single-threaded, and every sandbox's memory begins as its own: so it holds nothing worth stealing, and
each sandbox begins by closing every descriptor. The clones are made by its template, which is what it was at its start.
It ends when told to, or when its owner has ended, which it sees by a process descriptor rather than by the end of a
stream that somebody else may hold open. With it end all its sandboxes.

    who waits for what
    zygote           an order, the end of its owner, the end of a sandbox, an answer of the shelf of layers, and every
                     50 ms for groups that still empty
    a new sandbox    its gate: ids, groups and directories are in place
    the owner        `started` or `refused`, then the agent's own word; `gone` at the end
"""

from __future__ import annotations

import errno
import gc
import json
import marshal
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rollmill.sandboxes.guest import kernel, root, seccomp
from rollmill.sandboxes.guest.cgroups import MEMORY, Caps, Groups
from rollmill.sandboxes.guest.setup import become_sandbox
from rollmill.sandboxes.guest.template import Template

_MOST_ORDER_BYTES = 256 * 1024
_MOST_LAYERS = 128
_RETRY_MS = 50
_LAST_BREATH_S = 20.0
_NO_BIRTHS = (errno.ENOSYS, errno.EINVAL, errno.E2BIG, errno.EPERM, errno.EACCES, errno.EOPNOTSUPP)
_NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
)


class Child(NamedTuple):
    """A sandbox's first process; the gate stays open, so that its closing means the end of the zygote."""

    sandbox_id: str
    pid: int
    descriptor: int
    groups: Groups
    record: str
    gate: socket.socket


class Emptying(NamedTuple):
    """Groups of a sandbox that has ended, in which the kernel still winds processes up; what is said once it has."""

    report: dict[str, Any]
    groups: Groups


class Zygote:
    """Takes orders one by one.

    Args:
        control: sequenced-packet socket to the owner.
        owner: process descriptor of the owner.
    """

    def __init__(self, control: socket.socket, owner: int) -> None:
        self._control = control
        self._owner = owner
        self._children: dict[int, Child] = {}
        self._emptying: list[Emptying] = []
        self._told: list[str] = []
        self._shelf: socket.socket | None = None
        self._shelf_pid = 0
        self._asked: dict[int, Callable[[dict[str, Any], list[int]], None]] = {}
        self._number = 0
        self._births = True
        self._template: Template | None = Template(_NAMESPACES, self._become)
        self._parked: set[str] = set()
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(owner, select.POLLIN)

    def serve(self) -> None:
        """Serve until told to quit or until the owner has ended; then end every sandbox."""
        if self._template is not None:
            self._template.start()
        while self._turn():
            pass
        self._end_all()

    def _turn(self) -> bool:
        for descriptor, _ in self._poll.poll(_RETRY_MS if self._emptying else None):
            if descriptor == self._owner:
                return False
            if descriptor == self._control.fileno():
                if not self._take_order():
                    return False
            elif self._shelf is not None and descriptor == self._shelf.fileno():
                self._on_shelf()
            elif descriptor in self._children:
                self._bury(self._children[descriptor])
            else:
                self._on_other(descriptor)
        self._look_at_emptying()
        return True

    def _look_at_emptying(self) -> None:
        """Remove groups that are empty by now, and say what waited for that."""
        for one in [one for one in self._emptying if one.groups.destroy()]:
            self._emptying.remove(one)
            self._say(one.report)

    def _take_order(self) -> bool:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, _MOST_ORDER_BYTES, 4)
        except ConnectionError:
            return False  # the owner was killed with words of ours unread
        if not message:
            return False  # every copy of the owner's end is closed
        order = json.loads(message)
        if order["op"] == "quit":
            return False
        if order["op"] == "create" and order["plan"]["lent"]:
            lend = {"op": "lend", "layers": order["plan"]["lent"]}
            self._parked.add(order["id"])
            self._ask_shelf(lend, lambda answer, trees: self._lent(order, descriptors, answer, trees))
        elif order["op"] == "create":
            self._create(order, descriptors, [])
        elif order["op"] == "hold":
            self._hold(order)
        elif order["op"] in ("drop", "merge", "join", "store"):
            self._pass_on(order)
        elif order["op"] == "kill":
            self._parked.discard(order["id"])
            self._signal(order["id"], signal.SIGKILL)
        else:
            self._on_other_order(order)
        return True

    # -- what other runtimes than the kernel alone need ----------------------------------------------------------------

    def _on_other(self, descriptor: int) -> None:
        """Take what a descriptor says that only they have."""

    def _on_other_order(self, order: dict[str, Any]) -> None:
        """Carry out an order that only they know."""

    def _layer_of(self, child: Child) -> list[int]:
        """Return the layer that a sandbox has handed out, as one descriptor."""
        return _take_layer(child.gate)

    def _become(self, agent: int, gate: int) -> None:
        """Turn a fresh clone into a sandbox; does not return."""
        become_sandbox(agent, gate)

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError:
            return  # the owner is ending; its process descriptor says so next

    # -- layers ------------------------------------------------------------------------------------------------------

    def _hold(self, order: dict[str, Any]) -> None:
        """Take the layer that a sandbox's agent put into its gate, and give it to the shelf."""
        given: list[int] = []
        for child in self._children.values():
            if child.sandbox_id == order["id"]:
                given = self._layer_of(child)
        if not given:
            message = "the sandbox ended, or its agent handed no layer out"
            self._say({"op": "kept", "n": order["n"], "errno": errno.ESRCH, "message": message})
            return
        try:
            self._ask_shelf(order, lambda answer, _: self._say({**answer, "n": order["n"]}), given)
        finally:
            for one in given:
                os.close(one)

    def _pass_on(self, order: dict[str, Any]) -> None:
        """Let the shelf do something, and its answer be heard by the owner."""
        given: list[int] = []
        try:
            for directory in order.get("directories", ()):
                given.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))  # noqa: PERF401
            self._ask_shelf(order, lambda answer, _: self._say({**answer, "n": order["n"]}), given)
        except OSError as error:
            self._say({"op": "kept", "n": order["n"], "errno": error.errno or 0, "message": str(error)})
        finally:
            for one in given:
                os.close(one)

    def _ask_shelf(
        self,
        request: dict[str, Any],
        then: Callable[[dict[str, Any], list[int]], None],
        descriptors: list[int] | None = None,
    ) -> None:
        self._number += 1
        number = self._number
        try:
            shelf = self._running_shelf()
            socket.send_fds(shelf, [json.dumps({**request, "n": number}).encode()], descriptors or [])
        except OSError as error:
            then({"op": "kept", "errno": error.errno or 0, "message": f"the shelf of layers: {error}"}, [])
            return
        self._asked[number] = then

    def _running_shelf(self) -> socket.socket:
        """Return the connection to the shelf; fork it if there is none."""
        if self._shelf is not None:
            return self._shelf
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        plain = os.geteuid() != 0
        try:
            pid = kernel.clone(kernel.CLONE_NEWNS | (kernel.CLONE_NEWUSER if plain else 0))
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            # Here, so that sandboxes do not carry what they have no use for.
            from rollmill.sandboxes.guest import shelf

            shelf.run(theirs)
            os._exit(1)
        theirs.close()
        if plain:
            _map_ids(pid, base=None)
        ours.send(b"go")
        self._shelf, self._shelf_pid = ours, pid
        self._poll.register(ours, select.POLLIN)
        return ours

    def _on_shelf(self) -> None:
        assert self._shelf is not None
        try:
            message, descriptors, _, _ = socket.recv_fds(self._shelf, _MOST_ORDER_BYTES, _MOST_LAYERS)
        except ConnectionError:
            message, descriptors = b"", []
        if not message:
            self._lose_shelf()
            return
        answer = json.loads(message)
        try:
            self._asked.pop(answer["n"])(answer, descriptors)
        finally:
            for one in descriptors:
                os.close(one)

    def _lose_shelf(self) -> None:
        assert self._shelf is not None
        self._poll.unregister(self._shelf)
        self._shelf.close()
        self._shelf = None
        os.waitpid(self._shelf_pid, 0)
        self._say({"op": "shelf_lost"})
        asked, self._asked = list(self._asked.values()), {}
        for then in asked:
            then({"op": "kept", "errno": errno.EPIPE, "message": "the shelf of layers ended"}, [])

    def _lent(self, order: dict[str, Any], descriptors: list[int], answer: dict[str, Any], trees: list[int]) -> None:
        if order["id"] not in self._parked:
            answer = {"errno": errno.ECANCELED, "message": "it was to end before it started"}
        self._parked.discard(order["id"])
        if "errno" in answer:
            for one in descriptors:
                os.close(one)
            why = {"errno": answer["errno"], "message": answer["message"]}
            self._say({"op": "refused", "id": order["id"], **why})
            return
        self._create(order, descriptors, trees)

    # -- sandboxes ---------------------------------------------------------------------------------------------------

    def _create(self, order: dict[str, Any], descriptors: list[int], lent: list[int]) -> None:
        agent = socket.socket(fileno=descriptors[0])
        plan = order["plan"]
        groups = Groups(order["groups"])
        # One that starts anew takes up the groups of its last life; they must not be removed under it.
        self._emptying = [one for one in self._emptying if one.groups.directories != groups.directories]
        try:
            plan["held"] = list(groups.create(Caps(**order["caps"])))
            # Without a cgroup that bounds the sandbox as a whole, each of its processes is bounded.
            whole = MEMORY in plan["held"]
            plan["limits"]["process_memory_bytes"] = 0 if whole else plan["limits"]["memory_bytes"]
            child = self._clone(order, groups, agent, lent)
        except OSError as error:
            why = {"errno": error.errno or 0, "message": str(error)}
            self._told.append(order["record"])
            self._say_once_empty({"op": "refused", "id": order["id"], **why}, groups)
            return
        finally:
            agent.close()
        self._children[child.descriptor] = child
        self._poll.register(child.descriptor, select.POLLIN)
        self._say({"op": "started", "id": order["id"], "pid": child.pid})

    def _clone(self, order: dict[str, Any], groups: Groups, agent: socket.socket, lent: list[int]) -> Child:
        plan = order["plan"]
        _real_paths(plan, mapped=order["id_base"] is not None)
        home = groups.open_home() if self._births else -1
        entrances: list[int] = []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            entrances = groups.open_entrances(born_inside=home >= 0)
            plan["entrances"] = len(entrances)
            pid = self._born(agent.fileno(), theirs.fileno(), group=home)
        except OSError as error:
            for one in (ours.detach(), theirs.detach(), *entrances):
                os.close(one)
            if home >= 0 and error.errno in _NO_BIRTHS:
                self._births = False  # an older kernel, or a container whose filter hides the call: it enters later
                return self._clone(order, groups, agent, lent)
            raise
        finally:
            if home >= 0:
                os.close(home)
        theirs.close()
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)  # a child of ours, and not waited for: the number is still its own
            os.waitpid(pid, 0)
            for one in (ours.detach(), *entrances):
                os.close(one)
            raise
        child = Child(order["id"], pid, descriptor, groups, order["record"], ours)
        try:
            _map_ids(pid, base=order["id_base"])
            trees, plan["owners_mapped"] = _open_trees(plan, pid)
            entrances += trees
            socket.send_fds(ours, [marshal.dumps(plan)], [*entrances, *lent])
        except OSError:
            signal.pidfd_send_signal(child.descriptor, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(child.descriptor)
            ours.close()
            raise
        finally:
            for one in entrances:
                os.close(one)
        return child

    def _born(self, agent: int, gate: int, *, group: int) -> int:
        """Return the process id of a fresh clone, from the template, or from this process where that may not be."""
        refused: OSError | None = None
        if self._template is not None:
            try:
                return self._template.clone(agent, gate, group=group)
            except OSError as error:
                if error.errno not in _NO_BIRTHS:
                    raise
                refused = error
        pid = kernel.clone(_NAMESPACES, group=group)
        if pid == 0:
            self._become(agent, gate)
            os._exit(1)
        if refused is not None and self._template is not None:
            self._template.end()  # children for one's parent: a container's filter or an older kernel refuses that
            self._template = None
        return pid

    def _signal(self, sandbox_id: str, number: int) -> None:
        for child in self._children.values():
            if child.sandbox_id == sandbox_id:
                # A frozen process does not die in version 1 groups; those of version 2 let it.
                signal.pidfd_send_signal(child.descriptor, number)

    def _bury(self, child: Child) -> None:
        """Take note of a sandbox that ended: with its first process the kernel has killed all the others."""
        _, status = os.waitpid(child.pid, 0)
        self._poll.unregister(child.descriptor)
        os.close(child.descriptor)
        child.gate.close()
        del self._children[child.descriptor]
        usage = child.groups.usage()
        exit_code = os.waitstatus_to_exitcode(status)
        self._say_once_empty({"op": "gone", "id": child.sandbox_id, "exit": exit_code, "usage": usage}, child.groups)
        # The owner removes the record when it hears that; one that is being killed may not.
        self._told = [record for record in self._told if os.path.exists(record)] + [child.record]

    def _say_once_empty(self, report: dict[str, Any], groups: Groups) -> None:
        """Remove the groups of a sandbox that has ended, and say so; its record, which names them, goes after that."""
        if groups.destroy():
            self._say(report)
        else:
            self._emptying.append(Emptying(report, groups))

    def _end_all(self) -> None:
        """End all sandboxes and remove their records: after this nothing of them is left."""
        for child in self._children.values():
            signal.pidfd_send_signal(child.descriptor, signal.SIGKILL)
        if self._template is not None:
            self._template.end()
        for child in list(self._children.values()):
            self._bury(child)
        if self._shelf is not None:
            os.kill(self._shelf_pid, signal.SIGKILL)
            os.waitpid(self._shelf_pid, 0)
        deadline = time.monotonic() + _LAST_BREATH_S
        while self._emptying and time.monotonic() < deadline:
            self._look_at_emptying()
            select.poll().poll(_RETRY_MS if self._emptying else 0)
        for record in self._told if not self._emptying else []:
            try:
                os.unlink(record)
            except FileNotFoundError:
                continue  # its owner was quicker


def _real_paths(plan: dict[str, Any], *, mapped: bool) -> None:
    """Resolve links here, with the owner's view of the host, and name the directories that the sandbox gets opened."""
    plan["lowers"] = [os.path.realpath(path, strict=True) for path in plan["lowers"]]
    shown = [(os.path.abspath(one), one) if isinstance(one, str) else one for one in plan["expose"]]
    plan["expose"] = [(target, os.path.realpath(path, strict=True)) for target, path in shown]
    plan["trees"] = []
    plan["mapped"] = []
    if not mapped:
        return
    plan["mapped"] = plan["lowers"] or [f"/{name}" for name, link in root.host_directories().items() if link is None]
    stored = [one for one in plan["layers"] if one.startswith("/")]
    plan["trees"] = list(dict.fromkeys([*plan["mapped"], *stored, *(path for _, path in plan["expose"])]))


def _take_layer(gate: socket.socket) -> list[int]:
    """Return the one descriptor that an agent handed out last."""
    found: list[int] = []
    gate.setblocking(False)  # Python 3.11 passes no flags on with descriptors
    while True:
        try:
            message, given, _, _ = socket.recv_fds(gate, 16, 4)
        except BlockingIOError:
            return found
        for one in found:
            os.close(one)
        found = given[:1]
        for one in given[1:]:
            os.close(one)
        if not message:
            return found


def _map_ids(pid: int, *, base: int | None) -> None:
    """Map the ids of a sandbox: to a range that owns nothing on the host, or to this user alone."""
    if base is None:
        with open(f"/proc/{pid}/setgroups", "w") as stream:
            stream.write("deny")
    for kind, own in (("uid", os.getuid()), ("gid", os.getgid())):
        with open(f"/proc/{pid}/{kind}_map", "w") as stream:
            stream.write(f"0 {own} 1" if base is None else f"0 {base} 65536")


def _open_trees(plan: dict[str, Any], pid: int) -> tuple[list[int], bool]:
    """Open the host's directories for a sandbox; those below an overlay show their owners as the sandbox's.

    Some file systems cannot map owners, overlays among them, on which containers have their root. Then the files of the
    image belong to nobody inside: what everybody may read can be read, and nothing is changed. The agent reports it.
    """
    trees: list[int] = []
    all_mapped = True
    namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for path in plan["trees"]:
            mapped = path in plan["mapped"]
            trees.append(kernel.open_tree(path, recursive=not mapped))
            if mapped:
                all_mapped = _map_owners(trees[-1], namespace) and all_mapped
    except OSError:
        for one in trees:
            os.close(one)
        raise
    finally:
        os.close(namespace)
    return trees, all_mapped


def _map_owners(tree: int, namespace: int) -> bool:
    try:
        kernel.map_owners(tree, user_namespace=namespace)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return False
    return True


def main(kind: type[Zygote] = Zygote) -> None:
    """Run as the zygote of the process that the first argument names; orders come on the descriptor of the second."""
    owner_pid, control = int(sys.argv[1]), int(sys.argv[2])
    kernel.set_name("sandbox-zygote")
    kernel.hide_command_line("sandbox-zygote")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C is the owner's business: it quits by message
    # What a sandbox runs must be open to every signal, whatever the owner holds back at this moment.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.setsid()
    os.chdir("/")
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two for each sandbox
    root.host_directories()
    root.host_configuration()
    kernel.prepare(seccomp.program(kernel.machine()))
    # What is here now is shared by all sandboxes; the collector must not write to its pages.
    gc.disable()
    gc.freeze()
    kind(socket.socket(fileno=control), owner).serve()
