"""Docker's Engine API on a Unix socket, over any provider of sandboxes: programs really run.

Shapes follow the Engine API, version 1.41. What a request asks for is checked and shown as a daemon does; what really
keeps a program from something is the business of the sandboxes below.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import struct
from typing import Any

from fake_e2b import GIB, engine_spec
from loopback_http import Answer, LoopbackServer, Request, Taken, answer_json
from rollmill.errors import SandboxDead, SandboxError, SandboxUnsupported
from rollmill.sandboxes import DeathReason, Lease, Provider
from sandbox_builders import new_id

HARDENED = ["name=seccomp,profile=builtin", "name=userns", "name=cgroupns"]
_NUMBERS = {"stdout": 1, "stderr": 2}


class Container:
    """One container."""

    def __init__(self, name: str, body: dict[str, Any]) -> None:
        self.id = new_id()
        self.name = name
        self.body = body
        self.status = "created"
        self.sandbox: Any = None
        self.oom_killed = False
        self.exit_code = 0

    def state(self) -> dict[str, Any]:
        if self.sandbox is not None and self.sandbox.death is not None and self.status != "exited":
            self.status = "exited"
            self.exit_code = 137
            self.oom_killed = self.sandbox.death.reason is DeathReason.OUT_OF_MEMORY
        return {
            "Status": self.status,
            "Running": self.status in ("running", "paused"),
            "Paused": self.status == "paused",
            "OOMKilled": self.oom_killed,
            "ExitCode": self.exit_code,
        }


class FakeDocker:
    """The daemon."""

    def __init__(self, engine: Provider) -> None:
        self._engine = engine
        self.server = LoopbackServer(self.handle)
        self.containers: dict[str, Container] = {}
        self.execs: dict[str, dict[str, Any]] = {}
        self.images = {"debian:stable-slim"}
        self.registry = {"debian:stable-slim", "python:3.12"}
        self.security = HARDENED
        self._numbers = itertools.count()
        self.snapshots: dict[str, Any] = {}

    async def handle(self, request: Request) -> Answer:
        path = request.path.removeprefix("/v1.41")
        if path == "/_ping":
            return Answer(200, b"", {"api-version": "1.41", "ostype": "linux"})
        if path == "/info":
            info = {"SecurityOptions": self.security, "MemoryLimit": True, "PidsLimit": True, "CpuCfsQuota": True}
            return answer_json(info)
        if found := re.fullmatch(r"/images/(.+)/json", path):
            return answer_json({}) if found[1] in self.images else _error(404, f"No such image: {found[1]}")
        if path == "/commit":
            return await self._commit(request.query)
        if request.method == "DELETE" and path.startswith("/images/"):
            return await self._untag(path.removeprefix("/images/"))
        if path == "/images/create":
            return self._pull(request.query["fromImage"])
        if path == "/containers/create":
            return self._create(request)
        if path == "/containers/json":
            return self._list(request)
        if found := re.fullmatch(r"/containers/([^/]+)(?:/([a-z]+))?", path):
            named = {one.name: one for one in self.containers.values()}
            container = self.containers.get(found[1]) or named.get(found[1])
            if container is None:
                return _error(404, f"No such container: {found[1]}")
            return await self._one(request, container, found[2] or "")
        if found := re.fullmatch(r"/exec/([^/]+)/([a-z]+)", path):
            return await self._exec(request, found[1], found[2])
        return _error(404, "page not found")

    def _pull(self, name: str) -> Answer:
        lines = [{"status": f"Pulling from {name}"}]
        if name in self.registry:
            self.images.add(name)
            lines.append({"status": "Status: Downloaded newer image"})
        else:
            lines.append({"error": f"manifest for {name} not found", "errorDetail": {}})
        return Answer(200, "\r\n".join(map(json.dumps, lines)).encode())

    async def _commit(self, query: dict[str, str]) -> Answer:
        container = self.containers.get(query["container"])
        if container is None:
            return _error(404, f"No such container: {query['container']}")
        name = f"{query['repo']}:{query['tag']}"
        self.snapshots[name] = (await container.sandbox.snapshot(id=new_id()), container.body["Labels"])
        self.images.add(name)
        return answer_json({"Id": f"sha256:{name}"}, 201)

    async def _untag(self, name: str) -> Answer:
        if name not in self.images:
            return _error(404, f"No such image: {name}")
        self.images.discard(name)
        ref, _ = self.snapshots.pop(name)
        await self._engine.delete_snapshots([ref.snapshot_id])
        return answer_json([{"Untagged": name}])

    def _create(self, request: Request) -> Answer:
        body, name = request.json(), request.query["name"]
        if any(one.name == name for one in self.containers.values()):
            return _error(409, f'Conflict. The container name "/{name}" is already in use')
        if body["Image"] not in self.images:
            return _error(404, f"No such image: {body['Image']}")
        if body["Image"] in self.snapshots:  # an image hands its labels down
            body["Labels"] = {**self.snapshots[body["Image"]][1], **body["Labels"]}
        container = Container(name, body)
        self.containers[container.id] = container
        return answer_json({"Id": container.id, "Warnings": []}, 201)

    def _list(self, request: Request) -> Answer:
        wanted = json.loads(request.query["filters"])["label"]
        found = []
        for one in self.containers.values():
            labels = one.body["Labels"]
            if all(pair in [f"{name}={value}" for name, value in labels.items()] or pair in labels for pair in wanted):
                found.append(
                    {"Id": one.id, "Names": [f"/{one.name}"], "Labels": labels, "State": one.state()["Status"]}
                )
        return answer_json(found)

    async def _one(self, request: Request, container: Container, verb: str) -> Answer:
        if request.method == "DELETE":
            del self.containers[container.id]
            if container.sandbox is not None:
                await container.sandbox.kill()
            return Answer(204)
        state = container.state()
        if verb == "json":
            return answer_json({"Id": container.id, "State": state, "HostConfig": container.body["HostConfig"]})
        if verb == "start":
            lease = Lease(owner="fake", ttl_s=3600.0)
            if container.body["Image"] in self.snapshots:
                ref = self.snapshots[container.body["Image"]][0]
                container.sandbox = await self._engine.restore(ref, id=container.id, lease=lease)
            else:
                container.sandbox = await self._engine.create(self._spec(container), id=container.id, lease=lease)
            container.status = "running"
            return Answer(204)
        if verb == "rename":
            container.name = request.query["name"]
            return Answer(204)
        if not state["Running"]:
            return _error(409, f"container {container.id} is not running")
        if verb in ("pause", "unpause"):
            return await self._freeze(container, verb)
        if verb == "stats":
            usage = await container.sandbox.usage()
            return answer_json({"pids_stats": {"current": usage.processes}, "memory_stats": {"usage": 4096}})
        if verb == "exec":
            if container.status == "paused":
                return _error(409, f"Container {container.id} is paused, unpause the container before exec")
            exec_id = f"exec{next(self._numbers)}"
            self.execs[exec_id] = {"container": container, "body": request.json(), "code": None, "started": False}
            return answer_json({"Id": exec_id}, 201)
        return _error(404, "page not found")

    def _spec(self, container: Container) -> Any:
        host = container.body["HostConfig"]
        limits = {"memory_bytes": host["Memory"], "pids": host["PidsLimit"], "cpus": host["NanoCpus"] / 1e9}
        for options in (host.get("Tmpfs") or {}).values():
            words = dict(one.partition("=")[::2] for one in options.split(","))
            limits |= {"disk_bytes": int(words["size"]), "inodes": int(words["nr_inodes"])}
        return engine_spec(**limits)

    async def _freeze(self, container: Container, verb: str) -> Answer:
        if (container.status == "paused") == (verb == "pause"):
            return _error(409, f"container {container.id} is {'already' if verb == 'pause' else 'not'} paused")
        # Where this machine freezes nothing, that nothing can be started is what counts here.
        with contextlib.suppress(SandboxUnsupported):
            await (container.sandbox.pause() if verb == "pause" else container.sandbox.resume())
        container.status = "paused" if verb == "pause" else "running"
        return Answer(204)

    # -- programs ----------------------------------------------------------------------------------------------------

    async def _exec(self, request: Request, exec_id: str, verb: str) -> Answer:
        record = self.execs.get(exec_id)
        if record is None or record["container"].id not in self.containers:
            return _error(404, f"No such exec instance: {exec_id}")
        if verb == "json":
            return answer_json({"Running": record["started"] and record["code"] is None, "ExitCode": record["code"]})
        assert request.headers["upgrade"] == "tcp"
        body = record["body"]
        try:
            process = await record["container"].sandbox.start_process(
                body["Cmd"],
                env=dict(one.split("=", 1) for one in body.get("Env") or []),
                user=None if body.get("User") in (None, "", "0", "root") else body["User"],
                cwd=body.get("WorkingDir") or "/",
                output_cap_bytes=GIB,
            )
        except SandboxUnsupported:
            return _error(400, f"unable to find user {body['User']}: no matching entries in passwd file")
        except SandboxDead:
            return _error(409, f"container {record['container'].id} is not running")
        except SandboxError as error:
            return _error(500, f"OCI runtime exec failed: {error}")
        record["started"] = True
        await self._stream(request, record, process)
        raise Taken

    async def _stream(self, request: Request, record: dict[str, Any], process: Any) -> None:
        writer = request.writer
        writer.write(b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
        feeding = asyncio.ensure_future(self._feed(request.reader, process))
        try:
            with contextlib.suppress(ConnectionError):
                async for stream, data in process.output():
                    writer.write(struct.pack(">BxxxI", _NUMBERS[stream], len(data)) + data)
                    await writer.drain()
            try:
                code = (await process.wait()).exit_code
            except SandboxDead:
                code = -9
            record["code"] = code if code >= 0 else 128 - code
        finally:
            feeding.cancel()

    async def _feed(self, reader: asyncio.StreamReader, process: Any) -> None:
        while data := await reader.read(65536):
            await process.write_stdin(data)
        await process.close_stdin()


def _error(status: int, message: str) -> Answer:
    return answer_json({"message": message}, status)
