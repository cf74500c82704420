"""The agent of a sandbox with gVisor's kernel: the same as elsewhere, and one that can be written to an image and wake.

It is the first process inside. Its standard input is the owner's socket, also after it has woken from an image: then
the runtime has put another socket there, and the owner says `go` on it.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
from contextlib import suppress
from typing import Any

from rollmill.sandboxes.guest import kernel, seccomp
from rollmill.sandboxes.guest.agent import Agent, written_counts
from rollmill.sandboxes.guest.frames import encode
from rollmill.sandboxes.guest.oci import KEEP_TMP
from rollmill.sandboxes.guest.sessions import Shell

_FIRST_FREE = 10
_GRACE_S = 4.0  # a shell takes longer to go on where each of its calls is intercepted
_SETTLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


class RunscAgent(Agent):
    """Adds to the requests `hold` (answer, then be silent) and `go`; its layer lies on the host already.

    Args:
        connection: to the owner.
        plan: `all_users`, `limits`, and `protections` to report.
    """

    def __init__(self, connection: socket.socket, *, plan: dict[str, Any]) -> None:
        super().__init__(
            connection,
            all_users=plan["all_users"],
            limits=plan["limits"],
            zygote=connection,
            written=-1,
            woken=os.pipe(),
        )
        self._protections: list[str] = plan["protections"]
        self._silent = False

    def run(self) -> None:
        """Serve; never returns."""
        self.serve(encode({"op": "ready", "protections": self._protections}))

    def _flush(self) -> None:
        # While an image is written nothing may be half said: whoever wakes speaks to another owner.
        if not self._silent:
            super()._flush()

    def _hand_out(self) -> None:
        os.sync()

    def _hold(self, head: dict[str, Any], _: bytes) -> None:
        os.sync()
        self._send({"n": head["n"], "op": "done", **written_counts()})
        self._connection.setblocking(True)
        try:
            self._connection.sendall(self._out)
        except OSError:
            os._exit(0)  # the owner is gone
        self._connection.setblocking(False)
        self._out.clear()
        self._silent = True
        self._poll.modify(self._connection.fileno(), select.POLLIN)

    def _go(self, _: dict[str, Any], __: bytes) -> None:
        self._silent = False
        self._out[:0] = encode({"op": "ready", "protections": self._protections})
        self._flush()

    _requests = {**Agent._requests, "hold": _hold, "go": _go}  # noqa: RUF012


def main(text: str) -> None:
    """Run as the first process of a sandbox.

    Args:
        text: the plan, as JSON.
    """
    owner = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.umask(0o022)
    for number in _SETTLED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    kernel.set_no_new_privileges()
    kernel.set_dumpable(False)
    kernel.set_name("sandbox-agent")
    kernel.install_filter(seccomp.guard(kernel.machine()))
    if (program := seccomp.program(kernel.machine())) is not None:
        kernel.install_filter(program)
    with suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(f"/{KEEP_TMP}")
    connection = socket.socket(fileno=owner)
    connection.setblocking(False)
    Shell.grace_s = _GRACE_S
    agent = RunscAgent(connection, plan=json.loads(text))
    os.dup2(null, 2)  # until here a complaint reaches the runtime's log
    os.close(null)
    agent.run()
