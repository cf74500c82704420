"""The owner's side of the zygote: starts it, hands it orders, and passes on what it says. Decides nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rollmill
from rollmill.errors import SandboxError
from rollmill.sandboxes.disk_records import ProcessMark, mark_of

_MOST_REPORT_BYTES = 64 * 1024
_MOST_COMPLAINT_BYTES = 2000
_BROKEN = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)
# The packages are made by hand, so that none of them imports what a sandbox has no use for.
_BOOT = """
import sys, types
root = sys.argv.pop(1)
for name in ("rollmill", "rollmill.sandboxes"):
    package = types.ModuleType(name)
    package.__path__ = [root + name[len("rollmill"):].replace(".", "/")]
    sys.modules[name] = package
import importlib
importlib.import_module("rollmill.sandboxes.guest." + sys.argv.pop(1)).main()
"""


class ZygoteLink:
    """One zygote.

    Args:
        python: its interpreter.
        on_report: called with each thing it says.
        on_lost: called once when it has ended unasked, with what is known of the cause.
        program: module of the guest package that it runs.
    """

    def __init__(
        self,
        *,
        python: str,
        on_report: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str], None],
        program: str = "zygote",
    ) -> None:
        self._python = python
        self._program = program
        self._on_report = on_report
        self._on_lost = on_lost
        self._orders: deque[tuple[dict[str, Any], list[socket.socket]]] = deque()
        self._writing = False
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._complaint = -1
        self.mark: ProcessMark | None = None

    async def start(self) -> None:
        """Start the process.

        Raises:
            SandboxError: if the interpreter does not start.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._complaint = os.memfd_create("zygote-stderr", os.MFD_CLOEXEC)
        loop = asyncio.get_running_loop()
        try:
            process = await loop.run_in_executor(None, self._launch, theirs)
        except OSError as error:
            ours.close()
            os.close(self._complaint)
            raise SandboxError(
                f"the zygote could not start under {self._python}: {error}. Name a Python 3.11 or later that this user "
                "may execute (settings: python)."
            ) from error
        finally:
            theirs.close()
        self._process = process
        self.mark = mark_of(process.pid)
        ours.setblocking(False)
        self._control = ours
        loop.add_reader(ours.fileno(), self._on_readable)

    def _launch(self, control: socket.socket) -> subprocess.Popen[bytes]:
        source = str(Path(rollmill.__file__).parent)
        return subprocess.Popen(
            [self._python, "-I", "-S", "-c", _BOOT, source, self._program, str(os.getpid()), str(control.fileno())],
            pass_fds=(control.fileno(),),
            # The last one: what is looked up when it is first called would be looked up, and noted, by each sandbox.
            env={"LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "LD_BIND_NOW": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._complaint,
            cwd="/",
        )

    @property
    def alive(self) -> bool:
        """Return whether orders can be given."""
        return self._control is not None

    def order(self, message: dict[str, Any], *, descriptors: Sequence[socket.socket] = ()) -> bool:
        """Hand an order over, `False` if the zygote is gone; the sockets are closed here in either case."""
        if self._control is None:
            for one in descriptors:
                one.close()
            return False
        self._orders.append((message, list(descriptors)))
        self._write()
        return True

    def _write(self) -> None:
        if self._control is None:
            return
        loop = asyncio.get_running_loop()
        while self._orders:
            message, sockets = self._orders[0]
            data = json.dumps(message).encode()
            try:
                socket.send_fds(self._control, [data], [one.fileno() for one in sockets])
            except BlockingIOError:
                if not self._writing:
                    loop.add_writer(self._control.fileno(), self._write)
                    self._writing = True
                return
            except OSError as error:
                # Others refuse this order alone: it is too long, or too many descriptors of this user are on their way.
                if error.errno in _BROKEN or not self._refuse(message, error):
                    self._lose(f"an order could not be handed over: {error}")
                    return
            self._orders.popleft()
            for one in sockets:
                one.close()
        if self._writing:
            loop.remove_writer(self._control.fileno())
            self._writing = False

    def _refuse(self, order: dict[str, Any], error: OSError) -> bool:
        """Answer an order in the zygote's place; return whether it is one that has an answer."""
        report = {"errno": error.errno or 0, "message": f"the order could not be handed over: {error.strerror}"}
        if order["op"] == "create":
            report = {"op": "refused", "id": order["id"], **report}
        elif "n" in order:
            report = {"op": "kept", "n": order["n"], **report}
        else:
            return False
        asyncio.get_running_loop().call_soon(self._on_report, report)
        return True

    def _on_readable(self) -> None:
        while self._control is not None:
            try:
                data = self._control.recv(_MOST_REPORT_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(str(error))
                return
            if not data:
                self._lose("it ended")
                return
            self._on_report(json.loads(data))

    def _lose(self, cause: str) -> None:
        self._release()
        complaint = self._read_complaint()
        self._on_lost(f"the zygote is gone: {cause}" + (f"; it said: {complaint}" if complaint else ""))

    def _read_complaint(self) -> str:
        if self._complaint < 0:
            return ""
        text = os.pread(self._complaint, _MOST_COMPLAINT_BYTES, max(0, os.fstat(self._complaint).st_size - 1000))
        os.close(self._complaint)
        self._complaint = -1
        return text.decode("utf-8", "replace").strip()

    def _release(self) -> None:
        if self._control is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._control.fileno())
        if self._writing:
            loop.remove_writer(self._control.fileno())
        self._control.close()
        self._control = None
        for _, sockets in self._orders:
            for one in sockets:
                one.close()
        self._orders.clear()

    async def quit(self, *, limit_s: float) -> None:
        """Tell it to quit, and wait for its end; kill it at the limit, and its sandboxes with it."""
        if self._control is not None and self._process is not None:
            self.order({"op": "quit"})
        await asyncio.get_running_loop().run_in_executor(None, lambda: self.reap(limit_s=limit_s))
        self._release()
        self._read_complaint()

    def reap(self, *, limit_s: float) -> None:
        """Wait for the process to end, and kill it at the limit. Blocks: call it in a thread."""
        if self._process is None:
            return
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
