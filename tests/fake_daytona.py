"""Daytona's API and toolboxes on loopback, over any provider of sandboxes: programs really run.

Shapes follow the Python SDK, version 0.226, which `test_sandbox_vendor_daytona` runs against this. The toolbox runs a
command line in a shell and mixes its two outputs. What the service does in the background is done by the second look.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from fake_e2b import GIB, engine_spec, form_of
from loopback_http import Answer, LoopbackServer, Request, answer_json
from rollmill.errors import SandboxBusy, SandboxDead, SandboxError, SandboxFileError, SandboxUnsupported
from rollmill.sandboxes import Lease, Provider
from sandbox_builders import new_id

TOKEN = "dtn_token"
_THEN = {
    "starting": "started",
    "snapshotting": "started",
    "pausing": "paused",
    "resuming": "started",
    "stopping": "stopped",
}
_MOMENT = "2026-01-01T00:00:00Z"
_BOUNDARY = "between-files"


class FakeDaytona:
    """The service."""

    def __init__(self, engine: Provider) -> None:
        self._engine = engine
        self.server = LoopbackServer(self.handle)
        self.sandboxes: dict[str, dict[str, Any]] = {}
        self.snapshots: dict[str, dict[str, Any]] = {}
        self.containers = True
        for name in ("", "python"):
            self._add_snapshot(name, None, state="active")

    async def handle(self, request: Request) -> Answer:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _error(401, "Invalid credentials")
        parts = request.path.strip("/").split("/")
        if parts[0] == "toolbox":
            return await self._toolbox(request, parts[1], "/".join(parts[2:]))
        assert parts[0] == "api"
        if parts[1] == "snapshots":
            return await self._snapshot(request, parts[2])
        if parts[1] != "sandbox":
            return _error(404, f"Cannot {request.method} {request.path}")
        if len(parts) == 2:
            return await self._create(request) if request.method == "POST" else self._list(request)
        shown = self._named(self.sandboxes, parts[2])
        if shown is None:
            return _error(404, f"Sandbox with ID or name {parts[2]} not found")
        self._look(shown)
        if request.method == "DELETE":
            del self.sandboxes[shown["id"]]
            await shown["_sandbox"].kill()
            return answer_json(_public({**shown, "state": "destroying"}))
        return await self._one(request, shown, parts[3:])

    def _named(self, rows: dict[str, dict[str, Any]], name: str) -> dict[str, Any] | None:
        return rows.get(name) or next((one for one in rows.values() if one["name"] == name), None)

    async def _one(self, request: Request, shown: dict[str, Any], verb: list[str]) -> Answer:
        match verb:
            case ["ttl", minutes]:
                shown["ttlMinutes"] = int(minutes)
            case ["toolbox-proxy-url"]:
                return answer_json({"url": f"{self.server.url}/toolbox"})
            case ["labels"]:
                shown["labels"] = request.json()["labels"]
                return answer_json({"labels": shown["labels"]})
            case ["pause"] | ["start"]:
                return await self._move(shown, verb[0])
            case ["snapshot"]:
                return await self._keep(shown, request.json())
            case ["fork"]:
                (sandbox,) = await shown["_sandbox"].fork([new_id()], lease=Lease(owner="fake", ttl_s=3600.0))
                name = request.json().get("name") or sandbox.id
                return answer_json(_public(self._add(sandbox, {**shown, "name": name})))
            case []:
                pass
            case _:
                return _error(404, f"Cannot {request.method} {request.path}")
        return answer_json(_public(shown))

    def _look(self, shown: dict[str, Any]) -> None:
        if shown["_sandbox"].death is not None:
            shown["state"] = "error"
            shown["errorReason"] = "the runner lost it"
        else:
            shown["state"] = _THEN.get(shown["state"], shown["state"])

    async def _create(self, request: Request) -> Answer:
        body = request.json()
        snapshot = self._named(self.snapshots, body.get("snapshot") or "")
        if snapshot is None or snapshot["state"] != "active":
            return _error(400, f"Snapshot {body['snapshot']} not found")
        if body.get("name") and self._named(self.sandboxes, body["name"]):
            return _error(409, f"Sandbox with name {body['name']} already exists")
        ref, lease = new_id(), Lease(owner="fake", ttl_s=3600.0)
        if snapshot["_ref"] is None:
            sandbox = await self._engine.create(engine_spec(pids=400), id=ref, lease=lease)
        else:
            sandbox = await self._engine.restore(snapshot["_ref"], id=ref, lease=lease)
        return answer_json(_public(self._add(sandbox, {"name": ref, **body})))

    def _add(self, sandbox: Any, body: dict[str, Any]) -> dict[str, Any]:
        shown = self.sandboxes[sandbox.id] = {
            "id": sandbox.id,
            "organizationId": "org",
            "name": body["name"],
            "snapshot": body.get("snapshot") or "",
            "user": "daytona",
            "env": {},
            "labels": body.get("labels") or {},
            "public": False,
            "networkBlockAll": bool(body.get("networkBlockAll")),
            "kvm": False,
            "target": "us",
            "cpu": 1,
            "gpu": 0,
            "memory": 1,
            "disk": 3,
            "sandboxClass": "container" if self.containers else "linux-vm",
            "ttlMinutes": body.get("ttlMinutes"),
            "state": "starting",
            "toolboxProxyUrl": f"{self.server.url}/toolbox",
            "_sandbox": sandbox,
        }
        return shown

    def _list(self, request: Request) -> Answer:
        wanted = json.loads(request.query.get("labels", "{}"))
        for shown in self.sandboxes.values():
            self._look(shown)
        found = [_public(one) for one in self.sandboxes.values() if wanted.items() <= one["labels"].items()]
        start, limit = int(request.query.get("cursor", 0)), int(request.query.get("limit", 100))
        cursor = str(start + limit) if start + limit < len(found) else None
        return answer_json({"items": found[start : start + limit], "nextCursor": cursor})

    async def _move(self, shown: dict[str, Any], verb: str) -> Answer:
        sandbox, state = shown["_sandbox"], shown["state"]
        if verb == "pause":
            if state != "started":
                return _error(409, f"Sandbox is {state}, not started")
            # Where this machine freezes nothing, that nothing answers is what counts here.
            with contextlib.suppress(SandboxUnsupported):
                await sandbox.pause()
            shown["state"] = "pausing"
        else:
            if state not in ("paused", "stopped"):
                return _error(409, f"Sandbox is {state}")
            await sandbox.resume()
            shown["state"] = "resuming"
        return answer_json(_public(shown))

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def _add_snapshot(self, name: str, ref: Any, *, state: str) -> None:
        shown = {"id": new_id(), "organizationId": "org", "name": name, "state": state, "general": False}
        more = {"size": 1, "entrypoint": None, "cpu": 1, "gpu": 0, "mem": 1, "disk": 3, "errorReason": None}
        times = {"createdAt": _MOMENT, "updatedAt": _MOMENT, "lastUsedAt": None}
        self.snapshots[shown["id"]] = {**shown, **more, **times, "_ref": ref}

    async def _keep(self, shown: dict[str, Any], body: dict[str, Any]) -> Answer:
        assert not body.get("includeMemory")
        if self._named(self.snapshots, body["name"]):
            return _error(409, f"Snapshot with name {body['name']} already exists")
        if shown["state"] != "started":
            return _error(409, f"Sandbox is {shown['state']}")
        if shown["sandboxClass"] != "container":
            return _error(400, "Sandbox must be stopped")
        try:
            ref = await shown["_sandbox"].snapshot(id=new_id())
        except SandboxBusy as error:
            return _error(409, str(error))
        self._add_snapshot(body["name"], ref, state="snapshotting")
        shown["state"] = "snapshotting"
        return answer_json(_public(shown))

    async def _snapshot(self, request: Request, name: str) -> Answer:
        found = self._named(self.snapshots, name)
        if found is None:
            return _error(404, f"Snapshot with ID or name {name} not found")
        if request.method == "DELETE":
            if found["id"] != name:
                return _error(404, f"Snapshot with ID {name} not found")
            if found["_ref"] is not None:
                await self._engine.delete_snapshots([found["_ref"].snapshot_id])
            del self.snapshots[name]
            return Answer(200)
        answer = answer_json(_public(found))
        found["state"] = "active"
        return answer

    # -- toolboxes ---------------------------------------------------------------------------------------------------

    async def _toolbox(self, request: Request, ref: str, verb: str) -> Answer:
        shown = self.sandboxes.get(ref)
        if shown is None:
            return _error(404, "sandbox not found")
        if shown["state"] in ("pausing", "paused", "stopped"):
            return _error(400, "failed to get runner info: sandbox is not running")
        sandbox = shown["_sandbox"]
        try:
            if verb == "files/bulk-upload":
                form = form_of(request)
                await sandbox.write(form["files[0].path"].decode(), form["files[0].file"])
                return answer_json({})
            if verb == "files/bulk-download":
                return await self._download(sandbox, request.json()["paths"])
            if verb != "process/execute":
                return _error(404, f"no route {verb}")
            body = request.json()
            # The daemon reads both outputs from one pipe, as they come.
            line = ["sh", "-c", 'exec sh -c "$0" 2>&1', body["command"]]
            result = await sandbox.exec(
                line,
                cwd=body.get("cwd"),
                env=body.get("envs") or {},
                timeout_s=body.get("timeout"),
                output_cap_bytes=GIB,
            )
        except SandboxDead:
            return _error(502, "sandbox is not running")
        except SandboxError as error:
            return _error(400, str(error))
        if result.timed_out:
            return _error(408, "command execution timeout")
        return answer_json({"exitCode": result.exit_code, "result": result.stdout.decode(errors="replace")})

    async def _download(self, sandbox: Any, paths: list[str]) -> Answer:
        parts = b""
        for path in paths:
            name = "file"
            try:
                data = await sandbox.read(path)
            except SandboxFileError as error:
                name, data = "error", json.dumps({"message": str(error), "statusCode": 404}).encode()
            head = f'Content-Disposition: form-data; name="{name}"; filename="{path}"'
            kind = "application/octet-stream" if name == "file" else "application/json"
            parts += f"--{_BOUNDARY}\r\n{head}\r\nContent-Type: {kind}\r\n\r\n".encode() + data + b"\r\n"
        whole = parts + f"--{_BOUNDARY}--\r\n".encode()
        return Answer(200, whole, {"content-type": f"multipart/form-data; boundary={_BOUNDARY}"})


def _public(shown: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shown.items() if not name.startswith("_")}


def _error(status: int, message: str) -> Answer:
    return answer_json({"statusCode": status, "message": message, "error": "Error"}, status)
