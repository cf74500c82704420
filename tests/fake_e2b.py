"""E2B's control API and envd as a server on loopback, over any provider of sandboxes: programs really run.

Shapes follow the public Python SDK, version 2.63. Both are at one address, as with `E2B_SANDBOX_URL`: a sandbox is told
by a header. It checks what real servers check: tokens, templates, unknown ids, users.
"""

from __future__ import annotations

import base64
import contextlib
import email
import json
import struct
from collections.abc import AsyncIterator
from email.policy import HTTP
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec

from loopback_http import Answer, LoopbackServer, Request, answer_json
from rollmill.errors import (
    SandboxBusy,
    SandboxDead,
    SandboxError,
    SandboxExhausted,
    SandboxFileError,
    SandboxUnsupported,
)
from rollmill.sandboxes import Lease, Provider, Sandbox, SandboxSpec
from sandbox_builders import LIMITS, new_id

TOKEN = "e2b_test-token"
GIB = 1024**3
_GO_NAMES = {2: "interrupt", 9: "killed", 11: "segmentation fault", 15: "terminated"}


def engine_spec(**limits: Any) -> SandboxSpec:
    """A spec whose own deadlines and caps never act before those of the adapter."""
    wide = msgspec.structs.replace(LIMITS, output_bytes=GIB, wall_s=3600.0, exec_s=3600.0, **limits)
    return SandboxSpec(limits=wide)


class Machine:
    """One sandbox of a fake vendor."""

    def __init__(self, ref: str, sandbox: Sandbox, marks: dict[str, str], template: str) -> None:
        self.ref = ref
        self.sandbox = sandbox
        self.marks = marks
        self.template = template
        self.paused = False
        self.token = f"envd-{ref}"
        self.processes: dict[int, Any] = {}
        self.ttl_s = 0.0


class FakeE2B:
    """The service."""

    def __init__(self, engine: Provider, *, page: int = 100) -> None:
        self._engine = engine
        self._page = page
        self.server = LoopbackServer(self.handle)
        self.machines: dict[str, Machine] = {}
        self.keys: dict[str, str] = {}
        self.templates = {"base", "python"}
        self.snapshots: dict[str, tuple[str, Any]] = {}

    async def handle(self, request: Request) -> Answer:
        if "e2b-sandbox-id" in request.headers:
            return await self._envd(request)
        if request.headers.get("x-api-key") != TOKEN:
            return answer_json({"code": 401, "message": f"no such key: {request.headers.get('x-api-key')}"}, 401)
        parts = request.path.removeprefix("/v2").strip("/").split("/")
        if parts[:2] == ["templates", "aliases"]:
            known = parts[2] in self.templates
            return answer_json(
                {"templateID": parts[2]} if known else {"message": "template not found"}, 200 if known else 404
            )
        if parts == ["snapshots"]:
            return self._page_of(
                request, [{"snapshotID": one, "names": [name]} for one, (name, _) in self.snapshots.items()]
            )
        if request.method == "DELETE" and parts[0] == "templates":
            return await self._forget(parts[1])
        if parts[0] != "sandboxes":
            return answer_json({"code": 404, "message": "no such route"}, 404)
        if len(parts) == 1:
            return await self._create(request) if request.method == "POST" else self._list(request)
        machine = self.machines.get(parts[1])
        if machine is None or machine.sandbox.death is not None:
            return answer_json({"code": 404, "message": f"sandbox {parts[1]} not found"}, 404)
        return await self._one(request, machine, parts[2] if len(parts) > 2 else "")

    async def _create(self, request: Request) -> Answer:
        body = request.json()
        key = request.headers.get("idempotency-key", "")
        if key in self.keys:
            return answer_json(self._shown(self.machines[self.keys[key]], whole=True), 201)
        if body["templateID"] not in self.templates | set(self.snapshots):
            return answer_json({"code": 404, "message": f"template {body['templateID']!r} not found"}, 404)
        ref = new_id()
        lease = Lease(owner="fake", ttl_s=float(body["timeout"]))
        if body["templateID"] in self.snapshots:
            sandbox = await self._engine.restore(self.snapshots[body["templateID"]][1], id=ref, lease=lease)
        else:
            sandbox = await self._engine.create(engine_spec(), id=ref, lease=lease)
        machine = Machine(ref, sandbox, body.get("metadata", {}), body["templateID"])
        machine.ttl_s = body["timeout"]
        self.machines[ref] = machine
        if key:
            self.keys[key] = ref
        return answer_json(self._shown(machine, whole=True), 201)

    def _shown(self, machine: Machine, *, whole: bool) -> dict[str, Any]:
        found = {
            "templateID": machine.template,
            "sandboxID": machine.ref,
            "clientID": "fake",
            "startedAt": "2026-01-01T00:00:00Z",
            "endAt": "2026-01-01T01:00:00Z",
            "envdVersion": "0.6.8",
            "cpuCount": 1,
            "memoryMB": 512,
            "diskSizeMB": 512,
            "state": "paused" if machine.paused else "running",
            "metadata": machine.marks,
        }
        return {**found, "envdAccessToken": machine.token, "domain": None} if whole else found

    def _list(self, request: Request) -> Answer:
        # Quoted twice by clients: once as pairs, once as a part of the query.
        pairs = parse_qsl(request.query.get("metadata", ""))
        wanted = {unquote(name): unquote(value) for name, value in pairs}
        states = request.query.get("state", "running,paused").split(",")
        found = [
            machine
            for machine in self.machines.values()
            if machine.sandbox.death is None
            and wanted.items() <= machine.marks.items()
            and ("paused" if machine.paused else "running") in states
        ]
        return self._page_of(request, [self._shown(one, whole=False) for one in found])

    def _page_of(self, request: Request, found: list[Any]) -> Answer:
        start = int(request.query.get("nextToken", 0))
        page = min(self._page, int(request.query.get("limit", 100)))
        answer = answer_json(found[start : start + page])
        if start + page < len(found):
            answer.headers["x-next-token"] = str(start + page)
        return answer

    async def _one(self, request: Request, machine: Machine, verb: str) -> Answer:
        if request.method == "DELETE":
            await machine.sandbox.kill()
            return Answer(204)
        if request.method == "GET":
            return answer_json(self._shown(machine, whole=True))
        body = request.json() or {}
        if "timeout" in body:
            machine.ttl_s = body["timeout"]
            await machine.sandbox.renew(Lease(owner="fake", ttl_s=float(body["timeout"])))
        if verb == "timeout":
            return Answer(204)
        if verb == "pause":
            if machine.paused:
                return answer_json({"code": 409, "message": "already paused"}, 409)
            machine.paused = True
            # Where this machine freezes nothing, that nothing answers is what counts here.
            with contextlib.suppress(SandboxUnsupported):
                await machine.sandbox.pause()
            return Answer(204)
        if verb == "snapshots":
            return await self._snapshot(machine, body)
        if verb in ("connect", "resume"):
            machine.paused = False
            await machine.sandbox.resume()
            return answer_json(self._shown(machine, whole=True), 201)
        return answer_json({"code": 404, "message": "no such route"}, 404)

    async def _snapshot(self, machine: Machine, body: dict[str, Any]) -> Answer:
        assert body["memory"] is False
        try:
            ref = await machine.sandbox.snapshot(id=new_id())
        except SandboxBusy as error:
            return answer_json({"code": 409, "message": str(error)}, 409)
        self.snapshots[ref.snapshot_id] = (f"team/{body['name']}:default", ref)
        return answer_json({"snapshotID": ref.snapshot_id, "names": [body["name"]]}, 201)

    async def _forget(self, snapshot: str) -> Answer:
        if snapshot not in self.snapshots:
            return answer_json({"code": 404, "message": "template not found"}, 404)
        del self.snapshots[snapshot]
        await self._engine.delete_snapshots([snapshot])
        return Answer(204)

    # -- envd --------------------------------------------------------------------------------------------------------

    async def _envd(self, request: Request) -> Answer:
        machine = self.machines.get(request.headers["e2b-sandbox-id"])
        if machine is None or machine.sandbox.death is not None or machine.paused:
            return answer_json({"message": "The sandbox was not found", "code": 502}, 502)
        if request.headers.get("x-access-token") != machine.token:
            return answer_json({"code": 401, "message": "unauthorized"}, 401)
        if request.path == "/health":
            return Answer(204)
        try:
            if request.path == "/files":
                return await self._files(request, machine)
            return await self._call(request, machine, request.path.rpartition("/")[2])
        except SandboxExhausted as error:
            return answer_json({"code": 507, "message": str(error)}, 507)
        except SandboxFileError as error:
            status = 404 if "missing" in str(error) or "No such" in str(error) else 400
            return answer_json({"code": status, "message": str(error)}, status)
        except SandboxDead:
            return answer_json({"message": "The sandbox was not found", "code": 502}, 502)

    async def _files(self, request: Request, machine: Machine) -> Answer:
        path = request.query["path"]
        if request.method == "GET":
            return Answer(200, await machine.sandbox.read(path))
        data = form_of(request)["file"]
        await machine.sandbox.write(path, data, user=None)
        return answer_json([{"name": path.rpartition("/")[2], "type": "file", "path": path}])

    async def _call(self, request: Request, machine: Machine, method: str) -> Answer:
        if method == "Start":
            (length,) = struct.unpack(">I", request.body[1:5])
            return await self._start(request, machine, json.loads(request.body[5 : 5 + length]))
        body = request.json()
        if method == "ListDir":
            return answer_json(
                {"entries": [_entry(one, body["path"]) for one in await machine.sandbox.list_dir(body["path"])]}
            )
        process = machine.processes.get(body["process"]["pid"])
        if process is None:
            return answer_json({"code": "not_found", "message": "process not found"}, 404)
        if method == "SendInput":
            await process.write_stdin(base64.b64decode(body["input"]["pty" if process.terminal else "stdin"]))
        elif method == "Update":
            await process.resize(body["pty"]["size"]["rows"], body["pty"]["size"]["cols"])
        elif method == "CloseStdin":
            await process.close_stdin()
        elif method == "SendSignal":
            await process.signal({"SIGNAL_SIGKILL": 9, "SIGNAL_SIGTERM": 15}[body["signal"]])
        return answer_json({})

    async def _start(self, request: Request, machine: Machine, message: dict[str, Any]) -> Answer:
        user = base64.b64decode(request.headers["authorization"].removeprefix("Basic ")).decode().rstrip(":")
        config = message["process"]
        timeout_ms = request.headers.get("connect-timeout-ms")
        try:
            process = await machine.sandbox.start_process(
                [config["cmd"], *config.get("args", [])],
                env=config.get("envs", {}),
                user=user,
                timeout_s=int(timeout_ms) / 1000 if timeout_ms else None,
                output_cap_bytes=GIB,
                pty=(message["pty"]["size"]["rows"], message["pty"]["size"]["cols"]) if "pty" in message else None,
            )
        except SandboxUnsupported as error:
            return self._stream(_failed("unauthenticated", f"error looking up user: {error}"))
        except SandboxError as error:
            return self._stream(_failed("internal", str(error)))
        machine.processes[process.pid] = process
        process.terminal = "pty" in message
        if not message.get("stdin", True):
            await process.close_stdin()
        return self._stream(self._events(machine, process))

    def _stream(self, body: AsyncIterator[bytes]) -> Answer:
        return Answer(200, body, {"content-type": "application/connect+json"})

    async def _events(self, machine: Machine, process: Any) -> AsyncIterator[bytes]:
        yield _message({"event": {"start": {"pid": process.pid}}})
        try:
            async for stream, data in process.output():
                stream = "pty" if process.terminal else stream
                yield _message({"event": {"data": {stream: base64.b64encode(data).decode()}}})
            result = await process.wait()
        except SandboxDead:
            yield _last({"error": {"code": "unavailable", "message": "The sandbox was not found"}})
            return
        finally:
            machine.processes.pop(process.pid, None)
        code = result.exit_code
        words = f"exit status {code}" if code >= 0 else f"signal: {_GO_NAMES[-code]}"
        end = {"exitCode": max(code, -1), "exited": code >= 0, "status": words}
        yield _message({"event": {"end": {name: value for name, value in end.items() if value}}})
        yield _last({})


def _message(message: Any, flags: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


def _last(message: Any) -> bytes:
    return _message(message, 2)


async def _failed(kind: str, words: str) -> AsyncIterator[bytes]:
    yield _last({"error": {"code": kind, "message": words}})


def _entry(info: Any, above: str) -> dict[str, Any]:
    kinds = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY", "link": "FILE_TYPE_SYMLINK"}
    return {
        "name": info.name,
        "type": kinds.get(info.kind, "FILE_TYPE_UNSPECIFIED"),
        "path": f"{above}/{info.name}",
        "size": str(info.size_bytes),
        "mode": info.mode,
        "modifiedTime": "2026-01-01T00:00:00.123456789Z",
        **({"symlinkTarget": "/target"} if info.kind == "link" else {}),
    }


def form_of(request: Request) -> dict[str, bytes]:
    """Return the parts of a form by their names."""
    head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
    message = email.message_from_bytes(head + request.body, policy=HTTP)
    found = {}
    for part in message.iter_parts():  # type: ignore[attr-defined]
        found[part.get_param("name", header="content-disposition")] = part.get_payload(decode=True)
    return found


def filename_of(request: Request) -> str:
    """Return the file's name in a form."""
    head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
    message = email.message_from_bytes(head + request.body, policy=HTTP)
    (part,) = message.iter_parts()  # type: ignore[attr-defined]
    return part.get_filename()
