"""A Kubernetes API server with the agent-sandbox controller on loopback, over any provider of sandboxes.

Sandboxes, pods and `exec` over WebSockets (`v5.channel.k8s.io`), as far as the adapter uses them; programs really run.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import hashlib
import json
import re
import struct
import time
from typing import Any
from urllib.parse import parse_qsl

from fake_e2b import GIB, engine_spec, filename_of, form_of
from loopback_http import Answer, LoopbackServer, Request, Taken, answer_json
from rollmill.errors import SandboxDead, SandboxError
from rollmill.sandboxes import DeathReason, Lease, Provider
from sandbox_builders import new_id

TOKEN = "k8s-token"
_BASE = "/apis/agents.x-k8s.io/v1beta1/namespaces/default/sandboxes"


_CLAIMS = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/default/sandboxclaims"


class FakeKubernetes:
    """The cluster."""

    def __init__(self, engine: Provider) -> None:
        self._engine = engine
        self.server = LoopbackServer(self.handle)
        self.objects: dict[str, dict[str, Any]] = {}
        self.sandboxes: dict[str, Any] = {}
        self.images = {"debian:stable-slim"}
        self.page = 500
        self.pools = {"python-pool"}
        self.claims: dict[str, dict[str, Any]] = {}
        self.version = 1

    async def handle(self, request: Request) -> Answer:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        if found := re.fullmatch(r"/api/v1/namespaces/default/pods/([^/]+)(/exec)?", request.path):
            return await self._pod(request, found[1], bool(found[2]))
        if request.path.startswith("/router/"):
            return await self._router(request)
        if request.path.startswith(_CLAIMS):
            return await self._claim(request, request.path.removeprefix(_CLAIMS).strip("/"))
        if not request.path.startswith(_BASE):
            return _status(404, "the server could not find the requested resource")
        name = request.path.removeprefix(_BASE).strip("/")
        if not name:
            return await self._create(request) if request.method == "POST" else self._list(request)
        if name not in self.objects:
            return _status(404, f'sandboxes.agents.x-k8s.io "{name}" not found')
        if request.method == "DELETE":
            await self._delete(name)
        elif request.method == "PATCH":
            assert request.headers["content-type"] == "application/merge-patch+json"
            self.objects[name]["spec"] |= request.json()["spec"]
            await self.sandboxes[name].renew(Lease(owner="fake", ttl_s=self._left_s(name)))
        return answer_json(self._shown(name) if name in self.objects else {})

    def _left_s(self, name: str) -> float:
        moment = datetime.datetime.fromisoformat(self.objects[name]["spec"]["shutdownTime"].replace("Z", "+00:00"))
        return max(0.1, moment.timestamp() - time.time())

    async def _create(self, request: Request) -> Answer:
        body = request.json()
        name = body["metadata"]["name"]
        if name in self.objects:
            return _status(409, f'sandboxes.agents.x-k8s.io "{name}" already exists')
        pod = body["spec"]["podTemplate"]["spec"]
        (container,) = pod["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert pod["automountServiceAccountToken"] is False
        for label in body["metadata"]["labels"].values():
            assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", label)
        self.objects[name] = body
        if container["image"] in self.images:
            memory = int(container["resources"]["limits"]["memory"])
            self.sandboxes[name] = await self._engine.create(
                engine_spec(memory_bytes=memory), id=new_id(), lease=Lease(owner="fake", ttl_s=self._left_s(name))
            )
        return answer_json(body, 201)

    async def _delete(self, name: str) -> None:
        del self.objects[name]
        self.sandboxes.pop(f"{name}-pod", None)
        if name in self.sandboxes:
            await self.sandboxes.pop(name).kill()

    def _shown(self, name: str) -> dict[str, Any]:
        sandbox = self.sandboxes.get(name)
        ready = sandbox is not None and sandbox.death is None
        conditions = [{"type": "Ready", "status": "True" if ready else "False", "reason": "x"}]
        if sandbox is not None and sandbox.death is not None:
            conditions.append({"type": "Finished", "status": "True", "reason": "PodFailed"})
        return {**self.objects[name], "status": {"conditions": conditions}}

    def _list(self, request: Request) -> Answer:
        pairs = dict(one.split("=") for one in request.query["labelSelector"].split(","))
        found = [
            self._shown(name)
            for name, one in self.objects.items()
            if pairs.items() <= one["metadata"]["labels"].items()
        ]
        start = int(request.query.get("continue", 0))
        size = min(self.page, int(request.query["limit"]))
        more = {"continue": str(start + size)} if start + size < len(found) else {}
        return answer_json({"items": found[start : start + size], "metadata": more})

    # -- claims ------------------------------------------------------------------------------------------------------

    async def _claim(self, request: Request, name: str) -> Answer:
        if not name:
            return await self._take(request) if request.method == "POST" else self._list_claims(request)
        if name not in self.claims:
            return _status(404, f'sandboxclaims.extensions.agents.x-k8s.io "{name}" not found')
        claim = self._shown_claim(name)
        if request.method == "DELETE":
            del self.claims[name]
            if (sandbox := claim["status"].get("sandbox")) and sandbox["name"] in self.objects:
                await self._delete(sandbox["name"])
        elif request.method == "PATCH":
            assert request.headers["content-type"] == "application/merge-patch+json"
            assert request.json()["spec"]["lifecycle"]["shutdownPolicy"] == "Delete"
            self.claims[name]["spec"] |= request.json()["spec"]
        return answer_json(claim)

    async def _take(self, request: Request) -> Answer:
        """Hand out a sandbox of a pool: its name is the pool's, and its pod may have another one."""
        body = request.json()
        name = body["metadata"]["name"]
        if name in self.claims:
            return _status(409, f'sandboxclaims.extensions.agents.x-k8s.io "{name}" already exists')
        self.version += 1
        body["metadata"] |= {"uid": new_id(), "resourceVersion": str(self.version)}
        pool = body["spec"]["warmPoolRef"]["name"]
        self.claims[name] = {**body, "status": {}}
        if pool in self.pools:
            taken = f"{pool}-{new_id()}"
            sandbox = await self._engine.create(
                engine_spec(pids=400), id=new_id(), lease=Lease(owner="fake", ttl_s=3600.0)
            )
            self.sandboxes[taken] = self.sandboxes[f"{taken}-pod"] = sandbox
            metadata = {"name": taken, "annotations": {"agents.x-k8s.io/pod-name": f"{taken}-pod"}}
            self.objects[taken] = {"metadata": metadata, "spec": {}}
            self.claims[name]["status"] = {"sandbox": {"name": taken}}
        return answer_json(body, 201)

    def _shown_claim(self, name: str) -> dict[str, Any]:
        claim = self.claims[name]
        taken = claim["status"].get("sandbox", {}).get("name")
        if taken is None:
            ready = {"status": "False", "reason": "WarmPoolNotFound", "message": "no such pool"}
        elif self.sandboxes[taken].death is not None:
            ready = {"status": "False", "reason": "PodFailed", "message": "it failed"}
        else:
            ready = {"status": "True", "reason": "DependenciesReady"}
        return {**claim, "status": {**claim["status"], "conditions": [{"type": "Ready", **ready}]}}

    def _list_claims(self, request: Request) -> Answer:
        pairs = dict(one.split("=") for one in request.query.get("labelSelector", "").split(",") if one)
        field, _, wanted = request.query.get("fieldSelector", "").partition("=")
        assert field in ("", "metadata.name")
        found = [
            self._shown_claim(name)
            for name, one in self.claims.items()
            if pairs.items() <= one["metadata"]["labels"].items() and wanted in ("", name)
        ]
        if request.query.get("watch") in ("true", "True"):
            lines = [json.dumps({"type": "ADDED", "object": one}).encode() + b"\n" for one in found]
            return Answer(200, b"".join(lines), {"content-type": "application/json"})
        start = int(request.query.get("continue", 0))
        size = min(self.page, int(request.query.get("limit", self.page)))
        more = {"continue": str(start + size)} if start + size < len(found) else {}
        return answer_json({"items": found[start : start + size], "metadata": more})

    async def _router(self, request: Request) -> Answer:
        """The router to the runtime inside each sandbox, which the vendor's SDK uses; our adapter uses `exec`."""
        sandbox = self.sandboxes[request.headers["x-sandbox-id"]]
        verb, _, rest = request.path.removeprefix("/router/").partition("/")
        if verb == "execute":
            result = await sandbox.exec(["sh", "-c", request.json()["command"]])
            out, err = result.stdout.decode(), result.stderr.decode()
            return answer_json({"stdout": out, "stderr": err, "exit_code": result.exit_code})
        if verb == "upload":
            await sandbox.write(f"/workspace/{filename_of(request)}", form_of(request)["file"])
            return answer_json({"message": "uploaded"})
        return Answer(200, await sandbox.read(f"/workspace/{rest}"))

    # -- pods --------------------------------------------------------------------------------------------------------

    async def _pod(self, request: Request, name: str, run: bool) -> Answer:
        if name not in self.objects and name not in self.sandboxes:
            return _status(404, f'pods "{name}" not found')
        sandbox = self.sandboxes.get(name)
        if not run:
            return answer_json({"status": _pod_status(sandbox)})
        if sandbox is None or sandbox.death is not None:
            return _status(404, f'pods "{name}" is not running')
        assert request.headers["sec-websocket-protocol"] == "v5.channel.k8s.io"
        pairs = parse_qsl(request.headers["x-raw-query"], keep_blank_values=True)
        argv = [value for key, value in pairs if key == "command"]
        accept = hashlib.sha1((request.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode())
        request.writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Protocol: v5.channel.k8s.io\r\n"
            b"Sec-WebSocket-Accept: " + base64.b64encode(accept.digest()) + b"\r\n\r\n"
        )
        await self._exec(request, sandbox, argv)
        raise Taken

    async def _exec(self, request: Request, sandbox: Any, argv: list[str]) -> None:
        writer = request.writer
        try:
            process = await sandbox.start_process(argv, output_cap_bytes=GIB)
        except SandboxError as error:
            failed = {"status": "Failure", "reason": "InternalError", "message": str(error)}
            writer.write(_frame(3, json.dumps(failed).encode()))
            return
        feeding = asyncio.ensure_future(_feed(request.reader, process))
        try:
            with contextlib.suppress(ConnectionError, SandboxDead):
                async for stream, data in process.output():
                    writer.write(_frame(1 if stream == "stdout" else 2, data))
                    await writer.drain()
                code = (await process.wait()).exit_code
                writer.write(_frame(3, json.dumps(_end(code if code >= 0 else 128 - code)).encode()))
                writer.write(bytes([0x88, 2]) + struct.pack(">H", 1000))
                await writer.drain()
        finally:
            feeding.cancel()


def _pod_status(sandbox: Any) -> dict[str, Any]:
    if sandbox is None:
        waiting = {"reason": "ErrImagePull", "message": "manifest unknown"}
        return {"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]}
    if sandbox.death is None:
        return {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}
    reason = "OOMKilled" if sandbox.death.reason is DeathReason.OUT_OF_MEMORY else "Error"
    return {"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"reason": reason, "exitCode": 137}}}]}


def _end(code: int) -> dict[str, Any]:
    if code == 0:
        return {"status": "Success"}
    causes = [{"reason": "ExitCode", "message": str(code)}]
    return {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}


def _frame(channel: int, data: bytes) -> bytes:
    length = len(data) + 1
    head = struct.pack(">BB", 0x82, length) if length < 126 else struct.pack(">BBQ", 0x82, 127, length)
    return head + bytes([channel]) + data


async def _feed(reader: asyncio.StreamReader, process: Any) -> None:
    while True:
        _, second = await reader.readexactly(2)
        length = second & 0x7F
        assert second & 0x80, "a client masks what it sends"
        if length == 126:
            (length,) = struct.unpack(">H", await reader.readexactly(2))
        elif length == 127:
            (length,) = struct.unpack(">Q", await reader.readexactly(8))
        mask = await reader.readexactly(4)
        data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(await reader.readexactly(length)))
        if data[:1] == b"\0":
            await process.write_stdin(data[1:])
        elif data == b"\xff\0":
            await process.close_stdin()


def _status(code: int, message: str) -> Answer:
    return answer_json({"kind": "Status", "status": "Failure", "message": message, "code": code}, code)
