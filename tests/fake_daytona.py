"""Daytona's API and toolboxes on loopback, over any provider of sandboxes: programs really run.

Shapes follow the Python SDK, version 0.226. The toolbox runs a command line in a shell and mixes its two outputs.
"""

from __future__ import annotations

import json
from typing import Any

from fake_e2b import GIB, engine_spec, form_of
from loopback_http import Answer, LoopbackServer, Request, answer_json
from rollmill.errors import SandboxDead, SandboxError
from rollmill.sandboxes import Lease, Provider
from sandbox_builders import new_id

TOKEN = "dtn_token"


class FakeDaytona:
    """The service."""

    def __init__(self, engine: Provider) -> None:
        self._engine = engine
        self.server = LoopbackServer(self.handle)
        self.sandboxes: dict[str, dict[str, Any]] = {}
        self.snapshots = {"", "python"}

    async def handle(self, request: Request) -> Answer:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _error(401, "Invalid credentials")
        parts = request.path.strip("/").split("/")
        if parts[0] == "toolbox":
            return await self._toolbox(request, parts[1], "/".join(parts[2:]))
        assert parts[0] == "api"
        if parts[1] == "snapshots":
            return answer_json({"name": parts[2]}) if parts[2] in self.snapshots else _error(404, "Snapshot not found")
        if len(parts) == 2:
            return await self._create(request) if request.method == "POST" else self._list(request)
        shown = self.sandboxes.get(parts[2])
        if shown is None:
            return _error(404, f"Sandbox with ID or name {parts[2]} not found")
        self._look(shown)
        if request.method == "DELETE":
            del self.sandboxes[parts[2]]
            await shown["_sandbox"].kill()
            return answer_json(_public({**shown, "state": "destroying"}))
        if parts[3:4] == ["ttl"]:
            shown["ttlMinutes"] = int(parts[4])
        elif parts[3:4] == ["toolbox-proxy-url"]:
            return answer_json({"url": f"{self.server.url}/toolbox"})
        return answer_json(_public(shown))

    def _look(self, shown: dict[str, Any]) -> None:
        if shown["_sandbox"].death is not None:
            shown["state"] = "error"
            shown["errorReason"] = "the runner lost it"
        elif shown["state"] == "starting":
            shown["state"] = "started"

    async def _create(self, request: Request) -> Answer:
        body = request.json()
        if body.get("snapshot", "") not in self.snapshots:
            return _error(400, f"Snapshot {body['snapshot']} not found")
        if any(one["name"] == body["name"] for one in self.sandboxes.values()):
            return _error(409, f"Sandbox with name {body['name']} already exists")
        ref = new_id()
        sandbox = await self._engine.create(engine_spec(pids=400), id=ref, lease=Lease(owner="fake", ttl_s=3600.0))
        shown = {
            **{name: body[name] for name in ("name", "labels", "ttlMinutes", "networkBlockAll")},
            "id": ref,
            "state": "starting",
            "_sandbox": sandbox,
        }
        self.sandboxes[ref] = shown
        return answer_json(_public(shown))

    def _list(self, request: Request) -> Answer:
        wanted = json.loads(request.query.get("labels", "{}"))
        for shown in self.sandboxes.values():
            self._look(shown)
        found = [_public(one) for one in self.sandboxes.values() if wanted.items() <= one["labels"].items()]
        start, limit = int(request.query.get("cursor", 0)), int(request.query["limit"])
        cursor = str(start + limit) if start + limit < len(found) else None
        return answer_json({"items": found[start : start + limit], "nextCursor": cursor})

    async def _toolbox(self, request: Request, ref: str, verb: str) -> Answer:
        shown = self.sandboxes.get(ref)
        if shown is None:
            return _error(404, "sandbox not found")
        sandbox = shown["_sandbox"]
        try:
            if verb == "files/bulk-upload":
                form = form_of(request)
                await sandbox.write(form["files[0].path"].decode(), form["files[0].file"])
                return answer_json({})
            assert verb == "process/execute"
            body = request.json()
            # The daemon reads both outputs from one pipe, as they come.
            line = ["sh", "-c", 'exec sh -c "$0" 2>&1', body["command"]]
            result = await sandbox.exec(line, cwd=body["cwd"], timeout_s=body["timeout"], output_cap_bytes=GIB)
        except SandboxDead:
            return _error(502, "sandbox is not running")
        except SandboxError as error:
            return _error(400, str(error))
        if result.timed_out:
            return _error(408, "command execution timeout")
        return answer_json({"exitCode": result.exit_code, "result": result.stdout.decode(errors="replace")})


def _public(shown: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shown.items() if not name.startswith("_")}


def _error(status: int, message: str) -> Answer:
    return answer_json({"statusCode": status, "message": message, "error": "Error"}, status)
