"""Imitates Firecracker for tests: its interface on a unix socket, strict about order and fields, and a guest.

The guest is the real one, the bridge with its zygote and agent, in namespaces of this machine instead of a machine of
its own. So what is tested is the adapter and all that the backends of machines share; a virtual machine is not.
What was kept holds no processes. Of a sandbox it holds the order that made it and the files of its usual places: a
machine that is started from it makes that sandbox again, gives it the files, and says nothing of that to its owner.
"""

from __future__ import annotations

import argparse
import http.server
import io
import json
import os
import shutil
import signal
import socket
import socketserver
import sys
import tarfile
from pathlib import Path
from typing import Any

import psutil

from rollmill.sandboxes.backends.microvm.inside import Bridge, Line, start_zygote
from rollmill.sandboxes.guest import kernel

LOG = "FAKE_FIRECRACKER_LOG"
_FIELDS = {
    "/machine-config": {"vcpu_count", "mem_size_mib"},
    "/boot-source": {"kernel_image_path", "initrd_path", "boot_args"},
    "/vsock": {"guest_cid", "uds_path"},
    "/actions": {"action_type"},
    "/vm": {"state"},
    "/snapshot/create": {"snapshot_type", "snapshot_path", "mem_file_path"},
    "/snapshot/load": {"snapshot_path", "mem_backend", "resume_vm"},
}
_PLACES = ("root", "tmp", "workspace")
_ORDER = Path("order")  # in the machine's own directory
_DRIVE = {"drive_id", "path_on_host", "is_root_device", "is_read_only"}


class Refused(Exception):
    """What Firecracker answers with status 400."""


def root_inside(guest: int) -> Path:
    """Return where the files of a guest's sandbox are seen from here."""
    ours = os.stat("/")
    for one in psutil.Process(guest).children(recursive=True):
        root = Path(f"/proc/{one.pid}/root/")
        if not os.path.samestat(os.stat(root), ours):
            return root
    raise OSError("no process of the guest has a root of its own")


def packed(root: Path) -> bytes:
    """Return the files of a sandbox's usual places."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in _PLACES:
            archive.add(root / name, name)
    return data.getvalue()


def unpack(data: bytes, root: Path) -> None:
    """Put files in place of those that a new sandbox has there, as its own root: this machine's has no name inside."""
    inside = os.open(root, os.O_PATH | os.O_DIRECTORY)
    root = Path(f"/proc/self/fd/{inside}")
    owner, before = os.stat(root / "workspace"), (os.getegid(), os.geteuid())
    os.setegid(owner.st_gid)
    os.seteuid(owner.st_uid)
    try:
        for one in (one for name in _PLACES for one in (root / name).iterdir()):
            shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(root, filter="fully_trusted")
    finally:
        os.seteuid(before[1])
        os.setegid(before[0])
        os.close(inside)


class HostGuest(Bridge):
    """The guest, with the files of this machine and no groups."""

    def go_on(self, word: dict[str, Any], files: bytes) -> None:
        """Be what was kept: with its sandbox, and the files of that."""
        self._obey(word)
        assert self._agent is not None
        said: list[bytes] = []
        while not said:
            said = self._from_agent.feed(self._agent.recv(65536))
        assert b'"ready"' in said[0], said
        unpack(files, root_inside(os.getpid()))
        kernel.die_with_parent()  # cleared by the change of ids

    def _obey(self, word: dict[str, Any]) -> None:
        if "order" in word:
            _ORDER.write_text(json.dumps(word))
            assert word["order"]["plan"]["lowers"] == ["/image/0"]
            word["order"]["groups"] = []
            word["order"]["plan"]["lowers"] = []
        super()._obey(word)


class Listener:
    """The socket that Firecracker offers for connections to ports of the guest."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen(8)

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = self._socket.accept()
        asked = b""
        while not asked.endswith(b"\n"):
            asked += connection.recv(1)
        assert asked == b"CONNECT 5252\n", asked
        connection.sendall(b"OK 1073741824\n")
        return connection, address


class Machine:
    """The state of one machine, as its interface shows it."""

    def __init__(self) -> None:
        self.state = "Not started"
        self.config: dict[str, Any] = {}
        self.guest = 0

    def take(self, method: str, target: str, body: dict[str, Any]) -> None:
        fields = _DRIVE if target.startswith("/drives/") else _FIELDS.get(target)
        if fields is None or method != ("PATCH" if target == "/vm" else "PUT"):
            raise Refused(f"Invalid request method and/or path: {method} {target}")
        if set(body) != fields:
            raise Refused(f"unknown or missing fields: {sorted(set(body) ^ fields)}")
        if target in ("/vm", "/snapshot/create"):
            self._while_running(target, body)
        elif self.state != "Not started":
            raise Refused("The requested operation is not supported after starting the microVM.")
        elif target == "/actions":
            self._start()
        elif target == "/snapshot/load":
            self._load(body)
        else:
            self.config[target] = body

    def _while_running(self, target: str, body: dict[str, Any]) -> None:
        if self.state == "Not started":
            raise Refused("The requested operation is not supported before starting the microVM.")
        if target == "/vm":
            self.state = {"Paused": "Paused", "Resumed": "Running"}[body["state"]]
            os.kill(self.guest, signal.SIGSTOP if self.state == "Paused" else signal.SIGCONT)
            return
        if self.state != "Paused":
            raise Refused("Cannot save the microVM state: it is not paused")
        order = json.loads(_ORDER.read_text()) if _ORDER.exists() else None
        Path(body["snapshot_path"]).write_text(json.dumps({"config": self.config, "order": order}))
        Path(body["mem_file_path"]).write_bytes(packed(root_inside(self.guest)) if order else bytes(4096))

    def _start(self) -> None:
        if missing := {"/machine-config", "/boot-source", "/vsock", "/drives/disk0", "/drives/disk1"} - set(
            self.config
        ):
            raise Refused(f"Cannot start the microVM without {sorted(missing)}")
        source = self.config["/boot-source"]
        paths = [source["kernel_image_path"], source["initrd_path"]]
        for path in [*paths, *(one["path_on_host"] for key, one in self.config.items() if key.startswith("/drives/"))]:
            Path(path).read_bytes()
        assert "rollmill.images=1" in source["boot_args"].split()
        self._run()
        self.state = "Running"

    def _load(self, body: dict[str, Any]) -> None:
        if self.config:
            raise Refused("Loading a microVM snapshot not allowed after configuring boot-specific resources.")
        assert body["mem_backend"]["backend_type"] == "File"
        memory = Path(body["mem_backend"]["backend_path"]).read_bytes()
        assert memory
        kept = json.loads(Path(body["snapshot_path"]).read_text())
        self.config = kept["config"]
        for key, one in self.config.items():
            if key.startswith("/drives/"):
                Path(one["path_on_host"]).read_bytes()
        self._run(kept["order"], memory)
        self.state = "Paused"
        os.kill(self.guest, signal.SIGSTOP)

    def _run(self, order: dict[str, Any] | None = None, memory: bytes = b"") -> None:
        listener = Listener(self.config["/vsock"]["uds_path"])
        self.guest = os.fork()
        if self.guest == 0:
            kernel.die_with_parent()
            zygote = start_zygote()
            guest = HostGuest(Line(listener=listener), zygote, wake=lambda _: None)  # type: ignore[arg-type]
            if order is not None:
                guest.go_on(order, memory)
            guest.serve()


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    machine = Machine()
    refuses = False

    def _serve(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        status, answer = 204, b""
        if self.command == "GET" and self.path == "/":
            status, answer = 200, json.dumps({"id": "x", "state": self.machine.state}).encode()
        else:
            body = json.loads(data)
            with open(os.environ.get(LOG) or os.devnull, "a") as log:
                log.write(json.dumps([self.command, self.path, body]) + "\n")
            try:
                if self.refuses:
                    raise Refused("no more machines")
                self.machine.take(self.command, self.path, body)
            except (Refused, OSError, AssertionError, KeyError) as error:
                status, answer = 400, json.dumps({"fault_message": str(error)}).encode()
        self.send_response(status)
        if answer:
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_PATCH = _serve

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        return


class Server(socketserver.UnixStreamServer):
    """The interface."""

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, _ = super().get_request()
        return connection, ("unix", 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--api-sock", required=True)
    parser.add_argument("--id", required=True)
    parser.add_argument("--refuse", action="store_true", help="refuse every request")
    options = parser.parse_args(sys.argv[1:])
    Handler.refuses = options.refuse
    with Server(options.api_sock, Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
