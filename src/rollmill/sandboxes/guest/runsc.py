"""gVisor's runtime between the zygote and the agent.

A sandbox is made as any other: a clone in new namespaces, in its groups, with its root mounted from the same layers and
bounded by the same file system. Its first process does not become the agent then. It starts `runsc` with that root, and
stays as the one that pauses, resumes and checkpoints it, and that ends when it ends. So with it the kernel ends all of
the runtime, and nothing of it lies outside the namespaces.

    who waits for what
    the first process    a word of the zygote (its gate), or the end of the runtime
    the zygote           what its first processes say: the layer at their start, then answers
"""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import signal
import socket
from contextlib import suppress
from typing import Any, NoReturn

from rollmill.sandboxes.guest import kernel, oci, root, setup, zygote
from rollmill.sandboxes.guest.kernel import MS_NODEV, MS_NOEXEC, MS_NOSUID
from rollmill.sandboxes.guest.zygote import Child, Zygote

RUNTIME, MEMORY = "runsc", "memory"
LAYER = b"layer"
_MOST_WORD_BYTES = 64 * 1024
_MOST_COMPLAINT_BYTES = 2000
_MOST_FILES = 16
_RUN = "/tmp/run"
_SHARED = "/tmp/shm"
_IMAGE = "/tmp/memory"
_OWN_BYTES = 16 * 1024 * 1024
_PROTECTIONS = (
    "namespaces", "user_namespace", "no_network", "no_nested_namespaces", "capabilities_dropped", "no_new_privileges",
    "seccomp", "own_kernel",
)  # fmt: skip


class RunscZygote(Zygote):
    """A zygote whose sandboxes run under `runsc`; it keeps the images of their memory."""

    def __init__(self, control: socket.socket, owner: int) -> None:
        super().__init__(control, owner)
        self._gates: dict[int, Child] = {}
        self._written: dict[int, int] = {}
        self._memories: dict[str, dict[str, int]] = {}

    def _create(self, order: dict[str, Any], descriptors: list[int], lent: list[int]) -> None:
        plan = order["plan"]
        memory: dict[str, int] = {}
        try:
            runtime = os.open(plan["runsc"], os.O_RDONLY | os.O_CLOEXEC)
            if plan["memory"]:
                memory = self._memory(plan["memory"])
        except OSError as error:
            for one in descriptors:
                os.close(one)
            self._say({"op": "refused", "id": order["id"], "errno": error.errno or 0, "message": str(error)})
            return
        plan["lent"] = [*plan["lent"], RUNTIME, *(f"{MEMORY}/{name}" for name in memory)]
        before = set(self._children)
        try:
            super()._create(order, descriptors, [*lent, runtime, *memory.values()])
        finally:
            os.close(runtime)
        for descriptor in set(self._children) - before:
            child = self._children[descriptor]
            child.gate.setblocking(False)
            self._gates[child.gate.fileno()] = child
            self._poll.register(child.gate, select.POLLIN)

    def _memory(self, name: str) -> dict[str, int]:
        if name not in self._memories:
            raise OSError(errno.ENOENT, f"the image {name} of a sandbox's memory is not held any more")
        return self._memories[name]

    def _become(self, agent: int, gate: int) -> None:
        become_sandbox(agent, gate)

    def _layer_of(self, child: Child) -> list[int]:
        written = self._written.get(child.descriptor)
        return [] if written is None else [os.dup(written)]

    def _on_other(self, descriptor: int) -> None:
        child = self._gates.get(descriptor)
        if child is None:
            return  # buried in this turn
        try:
            message, given, _, _ = socket.recv_fds(child.gate, _MOST_WORD_BYTES, _MOST_FILES)
        except BlockingIOError:
            return  # what was ready had this number before
        except ConnectionError:
            message, given = b"", []
        if not message:
            self._poll.unregister(descriptor)  # it ends; its process descriptor says so next
            del self._gates[descriptor]
        elif message == LAYER:
            self._written[child.descriptor] = given[0]
        else:
            answer = json.loads(message)
            if given:
                self._memories[answer[MEMORY]] = dict(zip(answer["files"], given, strict=True))
            self._say({"op": "runsc", **answer})

    def _on_other_order(self, order: dict[str, Any]) -> None:
        if order["op"] == "runsc":
            child = next((one for one in self._children.values() if one.sandbox_id == order["id"]), None)
            try:
                if child is None:
                    raise ProcessLookupError(errno.ESRCH, "the sandbox has ended")
                child.gate.send(json.dumps(order).encode())
            except OSError as error:
                self._say({"op": "runsc", "n": order["n"], "status": error.errno or 1, "message": str(error)})
        elif order["op"] == "forget" and order[MEMORY] in self._memories:
            for one in self._memories.pop(order[MEMORY]).values():
                os.close(one)

    def _bury(self, child: Child) -> None:
        if self._gates.pop(child.gate.fileno(), None) is not None:
            self._poll.unregister(child.gate)
        if (written := self._written.pop(child.descriptor, None)) is not None:
            os.close(written)
        super()._bury(child)


def become_sandbox(agent: int, gate: int) -> NoReturn:
    """Set this process up as the first of a sandbox, start the runtime in it, and serve the zygote; never returns.

    Args:
        agent: descriptor of the socket to the owner.
        gate: descriptor of the one to the zygote.
    """
    step = setup.Step()
    owner = socket.socket(fileno=agent)
    try:
        supervisor = _set_up(owner, socket.socket(fileno=gate), step)
    except BaseException as error:  # whatever it was, the owner must hear of it: this process has nobody else
        setup.fail(owner, step, error)
    supervisor.serve()


def _set_up(agent: socket.socket, gate: socket.socket, step: setup.Step) -> _Supervisor:
    plan, descriptors = setup.enter(agent.fileno(), gate, step=step)
    trees = setup.trees_of(plan, descriptors)
    setup.furnish(plan, step)
    plan["held"] += [] if plan["owners_mapped"] else [setup.OWNERS_NOT_MAPPED]
    step.name = "mount the root"
    path, written = root.build_for_runtime(plan, root.Trees(trees))
    for hidden in plan["hidden"]:
        if os.path.isdir(f"{path}{hidden}"):
            kernel.mount("none", f"{path}{hidden}", kind="tmpfs", flags=MS_NOSUID | MS_NODEV, data="size=4k,mode=755")
    root.Inside(path).file(oci.KEEP_TMP, b"")
    step.name = "prepare the runtime"
    os.mkdir(_SHARED)
    os.chmod(_SHARED, 0o1777)
    # What the runtime writes must not run out of space when the sandbox does.
    os.mkdir(_RUN)
    kernel.mount("run", _RUN, kind="tmpfs", flags=MS_NOSUID | MS_NODEV | MS_NOEXEC, data=f"size={_OWN_BYTES},mode=700")
    # The runtime looks for its children by the numbers that they have in here.
    kernel.mount("proc", "/proc", kind="proc", flags=MS_NOSUID | MS_NODEV | MS_NOEXEC)
    kernel.set_name("sandbox-runtime")
    for name in ("bundle", "image"):
        os.mkdir(f"{_RUN}/{name}")
    with open(f"{_RUN}/bundle/config.json", "w") as stream:
        json.dump(_configuration(plan, path), stream)
    socket.send_fds(gate, [LAYER], [written])
    os.close(written)
    supervisor = _Supervisor(plan, agent=agent, gate=gate, runtime=trees[RUNTIME])
    step.name = "start the runtime"
    prefix = f"{MEMORY}/"
    supervisor.start({name.removeprefix(prefix): one for name, one in trees.items() if name.startswith(prefix)})
    return supervisor


def _configuration(plan: dict[str, Any], path: str) -> dict[str, Any]:
    inside = {
        "all_users": plan["all_users"],
        "protections": [*_PROTECTIONS, *plan["held"]],
        "limits": {name: plan["limits"][name] for name in ("cpu_s", "process_memory_bytes")},
    }
    return oci.configuration(
        root=path,
        shared_memory=_SHARED,
        argv=oci.agent_argv(plan["loader"], inside),
        limits=plan["limits"],
        all_users=plan["all_users"],
    )


class _Supervisor:
    """The first process of a sandbox: runs the runtime's commands one by one."""

    def __init__(self, plan: dict[str, Any], *, agent: socket.socket, gate: socket.socket, runtime: int) -> None:
        self._plan = plan
        self._agent = agent
        self._gate = gate
        self._runtime = runtime
        self._flags = oci.global_flags(state=f"{_RUN}/state", platform=plan["platform"], log=f"{_RUN}/log")
        self._complaints = os.open(f"{_RUN}/stderr", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._pid = 0
        self._rests = False

    def start(self, memory: dict[str, int]) -> None:
        """Start the sandbox anew, or from the files of an image of its memory."""
        image = f"{_RUN}/image" if memory else ""
        for name, descriptor in memory.items():
            os.set_inheritable(descriptor, True)
            os.symlink(f"/proc/self/fd/{descriptor}", f"{image}/{name}")
        command = oci.start_command(bundle=f"{_RUN}/bundle", image=image, one_user=not self._plan["all_users"])
        self._pid = self._spawn(command, talks=True, kept=tuple(memory.values()))

    def _spawn(self, command: list[str], *, talks: bool = False, kept: tuple[int, ...] = ()) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            null = os.open("/dev/null", os.O_RDWR)
            # Once only: the runtime shuts a socket down for all when a program closes one of its descriptors.
            os.dup2(self._agent.fileno() if talks else null, 0)
            os.dup2(null, 1)
            os.dup2(self._complaints, 2)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            kernel.close_all_except((0, 1, 2, self._runtime, *kept))
            if zygote.MEMORY not in self._plan["held"]:
                bound = oci.memory_file_bytes(self._plan["runtime_memory_bytes"])
                resource.setrlimit(resource.RLIMIT_FSIZE, (bound, bound))
            environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/", "TMPDIR": _RUN}
            os.execve(self._runtime, ["runsc", *self._flags, *command], environment)
        except BaseException as error:
            os.write(2, f"the runtime could not be executed: {error}\n".encode())
        finally:
            os._exit(127)

    def serve(self) -> NoReturn:
        """Serve the zygote until the runtime ends, or the zygote."""
        woken, wake = os.pipe()
        for one in (woken, wake):
            os.set_blocking(one, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        poll = select.poll()
        for one in (self._gate.fileno(), woken):
            poll.register(one, select.POLLIN)
        self._gate.setblocking(True)
        self._reap()  # whatever ended before anybody was told
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == woken:
                    with suppress(BlockingIOError):
                        os.read(woken, 4096)
                    self._reap()
                else:
                    self._obey()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid, status = 0, 0
            if pid == 0:
                return
            if pid == self._pid and not self._rests:
                self._end(os.waitstatus_to_exitcode(status))

    def _end(self, code: int) -> NoReturn:
        """End with the runtime; an owner that still waits for the agent's first word gets its last ones."""
        detail = {"step": "start the runtime", "errno": 0, "message": f"runsc ended with {code}: {self._complaint()}"}
        setup.say(self._agent, {"op": "failed", **detail})
        os._exit(code if 0 <= code < 256 else 128 - code)

    def _complaint(self) -> str:
        size = os.fstat(self._complaints).st_size
        text = os.pread(self._complaints, _MOST_COMPLAINT_BYTES, max(0, size - _MOST_COMPLAINT_BYTES))
        return text.decode("utf-8", "replace").strip() or "it said nothing"

    def _obey(self) -> None:
        message = self._gate.recv(_MOST_WORD_BYTES)
        if not message:
            os._exit(0)
        order = json.loads(message)
        verb = order["verb"]
        answer: dict[str, Any] = {"n": order["n"], "status": 0, "message": ""}
        given: list[int] = []
        try:
            if verb == "checkpoint":
                os.makedirs(_IMAGE, exist_ok=True)
                kernel.mount("memory", _IMAGE, kind="tmpfs", flags=MS_NOSUID | MS_NODEV | MS_NOEXEC, data="mode=700")
                self._rests = True
            _, status = os.waitpid(self._spawn(oci.verb_command(verb, image=_IMAGE)), 0)
            answer["status"] = os.waitstatus_to_exitcode(status)
            if answer["status"]:
                answer["message"] = self._complaint()
            elif verb == "checkpoint":
                names = sorted(os.listdir(_IMAGE))[:_MOST_FILES]  # one, or with later releases several
                for name in names:
                    given.append(os.open(f"{_IMAGE}/{name}", os.O_RDONLY | os.O_CLOEXEC))  # noqa: PERF401
                size = sum(os.fstat(one).st_size for one in given)
                answer.update({MEMORY: order[MEMORY], "files": names, "size": size})
        except OSError as error:
            answer.update(status=error.errno or 1, message=str(error))
        if verb == "checkpoint":
            self._rests = not answer["status"]
            with suppress(OSError):
                kernel.detach(_IMAGE)
        socket.send_fds(self._gate, [json.dumps(answer).encode()], given)
        for one in given:
            os.close(one)
        self._reap()


def main() -> None:
    """Run as the zygote of gVisor sandboxes."""
    zygote.main(RunscZygote)
