"""Prime's API and gateways on loopback, over any provider of sandboxes: programs really run.

Shapes follow the Python SDK prime-sandboxes, version 0.5.1. Command sessions are read and written with the messages of
that SDK's own schema, built here from its field numbers, so that the adapter's hand-written ones are held against it.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from fake_e2b import GIB, engine_spec, form_of
from loopback_http import Answer, LoopbackServer, Request, answer_json
from rollmill.errors import SandboxDead, SandboxError
from rollmill.sandboxes import Lease, Provider
from sandbox_builders import new_id

TOKEN = "prime-token"
_TEXT, _BYTES, _SINT, _BOOL, _UINT, _MESSAGE = 9, 12, 17, 8, 13, 11
_SCHEMA = {
    "Pair": [("key", 1, _TEXT, 1, ""), ("value", 2, _TEXT, 1, "")],
    "CommandSpec": [
        ("cmd", 1, _TEXT, 1, ""),
        ("args", 2, _TEXT, 3, ""),
        ("envs", 3, _MESSAGE, 3, "Pair"),
        ("cwd", 4, _TEXT, 1, ""),
        ("user", 5, _TEXT, 1, ""),
    ],
    "StartRequest": [("command", 1, _MESSAGE, 1, "CommandSpec"), ("stdin", 4, _BOOL, 1, "")],
    "StartEvent": [("pid", 1, _UINT, 1, "")],
    "DataEvent": [("stdout", 1, _BYTES, 1, ""), ("stderr", 2, _BYTES, 1, "")],
    "EndEvent": [("exit_code", 1, _SINT, 1, ""), ("exited", 2, _BOOL, 1, ""), ("status", 3, _TEXT, 1, "")],
    "Event": [
        ("start", 1, _MESSAGE, 1, "StartEvent"),
        ("data", 2, _MESSAGE, 1, "DataEvent"),
        ("end", 3, _MESSAGE, 1, "EndEvent"),
    ],
    "StartResponse": [("event", 1, _MESSAGE, 1, "Event")],
}


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="session.proto", package="session", syntax="proto3")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, number, kind, label, of in fields:
            message.field.add(
                name=field, number=number, type=kind, label=label, type_name=f".session.{of}" if of else None
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"session.{name}")) for name in _SCHEMA}


MESSAGES = _messages()


class FakePrime:
    """The service."""

    def __init__(self, engine: Provider) -> None:
        self._engine = engine
        self.server = LoopbackServer(self.handle)
        self.sandboxes: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, str] = {}
        self.tokens = 0

    async def handle(self, request: Request) -> Answer:
        parts = request.path.strip("/").split("/")
        if parts[0] == "gateway":
            return await self._gateway(request, parts[2], parts[-1])
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return answer_json({"detail": "Invalid API key"}, 401)
        assert parts[:3] == ["api", "v1", "sandbox"]
        del parts[0]
        if len(parts) == 2:
            return await self._create(request) if request.method == "POST" else self._list(request)
        shown = self.sandboxes.get(parts[2])
        if shown is None:
            return answer_json({"detail": "Sandbox not found"}, 404)
        self._look(shown)
        if request.method == "DELETE":
            del self.sandboxes[parts[2]]
            await shown["_sandbox"].kill()
            return answer_json({"message": "deleted"})
        if parts[3:] == ["auth"]:
            self.tokens += 1
            shown["_token"] = f"gateway-{self.tokens}"
            way = {"gateway_url": f"{self.server.url}/gateway", "user_ns": "ns", "job_id": parts[2]}
            return answer_json({**way, "token": shown["_token"], "expires_at": "2030-01-01T00:00:00Z"})
        return answer_json(_public(shown))

    def _look(self, shown: dict[str, Any]) -> None:
        if shown["_sandbox"].death is not None:
            shown["status"] = "ERROR"
            shown.setdefault("errorType", "SANDBOX_NOT_FOUND")
        elif shown["status"] == "PENDING":
            shown["status"] = "RUNNING"

    async def _create(self, request: Request) -> Answer:
        body = request.json()
        if body["idempotency_key"] in self.keys:
            return answer_json(_public(self.sandboxes[self.keys[body["idempotency_key"]]]))
        if "/" not in body["docker_image"] and ":" not in body["docker_image"]:
            return answer_json({"detail": f"docker_image {body['docker_image']!r} is not a known image"}, 422)
        assert body["vm"] is True
        ref = new_id()
        sandbox = await self._engine.create(engine_spec(pids=400), id=ref, lease=Lease(owner="fake", ttl_s=3600.0))
        shown = {
            "id": ref,
            "name": body["name"],
            "dockerImage": body["docker_image"],
            "cpuCores": body["cpu_cores"],
            "memoryGB": body["memory_gb"],
            "diskSizeGB": body["disk_size_gb"],
            "diskMountPath": "/",
            "gpuCount": 0,
            "vm": True,
            "createdAt": "2026-01-01T00:00:00Z",
            "updatedAt": "2026-01-01T00:00:00Z",
            "timeoutMinutes": body["timeout_minutes"],
            "labels": body["labels"],
            "status": "PENDING",
            "_sandbox": sandbox,
            "_token": "",
        }
        self.sandboxes[ref] = shown
        self.keys[body["idempotency_key"]] = ref
        return answer_json(_public(shown))

    def _list(self, request: Request) -> Answer:
        for shown in self.sandboxes.values():
            self._look(shown)
        wanted = request.query.get("labels")
        active = ("PENDING", "PROVISIONING", "RUNNING", "PAUSED")
        found = [
            _public(one)
            for one in self.sandboxes.values()
            if (wanted is None or wanted in one["labels"]) and one["status"] in active
        ]
        page, size = int(request.query["page"]), int(request.query["per_page"])
        rows = found[(page - 1) * size : page * size]
        more = page * size < len(found)
        return answer_json({"sandboxes": rows, "total": len(found), "page": page, "perPage": size, "hasNext": more})

    # -- gateways ----------------------------------------------------------------------------------------------------

    async def _gateway(self, request: Request, ref: str, verb: str) -> Answer:
        shown = self.sandboxes.get(ref)
        if shown is None:
            return answer_json({"error": "sandbox_not_found"}, 502)
        if request.headers.get("authorization") != f"Bearer {shown['_token']}":
            return answer_json({"code": "unauthenticated", "message": "token expired"}, 401)
        sandbox = shown["_sandbox"]
        try:
            if verb == "upload":
                await sandbox.write(request.query["path"], form_of(request)["file"])
                shown = {"success": True, "path": request.query["path"], "size": 0}
                return answer_json({**shown, "timestamp": "2026-01-01T00:00:00Z"})
            if verb == "download":
                return Answer(200, await sandbox.read(request.query["path"]))
            (length,) = struct.unpack(">I", request.body[1:5])
            command = MESSAGES["StartRequest"].FromString(request.body[5 : 5 + length]).command
            process = await sandbox.start_process(
                [command.cmd, *command.args],
                cwd=command.cwd or None,
                env={one.key: one.value for one in command.envs},
                user=command.user or None,
                timeout_s=int(request.headers.get("connect-timeout-ms", 60_000)) / 1000,
                output_cap_bytes=GIB,
            )
        except SandboxDead:
            return answer_json({"error": "sandbox_not_found"}, 502)
        except SandboxError as error:
            return answer_json({"code": "internal", "message": str(error)}, 500)
        await process.close_stdin()
        return Answer(200, self._events(process), {"content-type": "application/connect+proto"})

    async def _events(self, process: Any) -> AsyncIterator[bytes]:
        yield _event(start={"pid": process.pid})
        try:
            async for stream, data in process.output():
                yield _event(data={stream: data})
            result = await process.wait()
        except SandboxDead:
            yield _last(b'{"error":{"code":"not_found","message":"the sandbox is gone"}}')
            return
        if result.timed_out:
            yield _last(b'{"error":{"code":"deadline_exceeded","message":"timeout"}}')
            return
        yield _event(end={"exit_code": result.exit_code, "exited": True, "status": "x"})
        yield _last(b"{}")


def _event(**event: Any) -> bytes:
    data = MESSAGES["StartResponse"](event=event).SerializeToString()
    return struct.pack(">BI", 0, len(data)) + data


def _last(data: bytes) -> bytes:
    return struct.pack(">BI", 2, len(data)) + data


def _public(shown: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shown.items() if not name.startswith("_")}
