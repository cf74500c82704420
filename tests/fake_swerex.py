"""SWE-ReX runtimes on loopback, and the deployment that starts them, over any provider of sandboxes.

Shapes follow SWE-ReX 1.4: one command at a time, output as text with what is no UTF-8 written as escapes, exceptions as
status 511 with a class. All runtimes are at one port, told apart by a path.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fake_e2b import GIB, engine_spec, form_of
from loopback_http import Answer, LoopbackServer, Request, answer_json
from rollmill.errors import SandboxDead, SandboxError
from rollmill.sandboxes import Lease, Provider
from rollmill.sandboxes.backends.http import Secret
from rollmill.sandboxes.backends.swerex import Endpoint
from rollmill.sandboxes.records import Image
from sandbox_builders import new_id

TOKEN = "rex-token"


class FakeRuntime:
    """One runtime."""

    def __init__(self, sandbox: Any) -> None:
        self.sandbox = sandbox
        self.turn = asyncio.Lock()
        self.closed = False


class FakeSweRex:
    """All runtimes, and their deployment."""

    def __init__(self, engine: Provider) -> None:
        self._engine = engine
        self.server = LoopbackServer(self.handle)
        self.runtimes: dict[str, FakeRuntime] = {}

    # -- the deployment ----------------------------------------------------------------------------------------------

    async def start(self, *, id: str, image: Image) -> Endpoint:
        ref = new_id()
        lease = Lease(owner="fake", ttl_s=3600.0)
        self.runtimes[ref] = FakeRuntime(await self._engine.create(engine_spec(pids=400), id=ref, lease=lease))
        return Endpoint(url=f"{self.server.url}/r/{ref}", token=Secret(TOKEN))

    async def stop(self, endpoint: Endpoint) -> None:
        runtime = self.runtimes.pop(endpoint.url.rpartition("/")[2], None)
        if runtime is not None:
            await runtime.sandbox.kill()

    # -- the runtimes ------------------------------------------------------------------------------------------------

    async def handle(self, request: Request) -> Answer:
        _, _, ref, verb = request.path.split("/")
        runtime = self.runtimes.get(ref)
        if runtime is None or runtime.sandbox.death is not None:
            return Answer(502)
        if request.headers.get("x-api-key") != TOKEN:
            return answer_json({"detail": "Invalid API Key"}, 401)
        if verb == "is_alive":
            return answer_json({"is_alive": not runtime.closed, "message": ""})
        async with runtime.turn:
            try:
                return answer_json(await self._carry_out(runtime, verb, request))
            except SandboxDead:
                return Answer(502)
            except SandboxError as error:
                return _exception("builtins.OSError", str(error))
            except TimeoutError as error:
                return _exception("swerex.exceptions.CommandTimeoutError", str(error))

    async def _carry_out(self, runtime: FakeRuntime, verb: str, request: Request) -> Any:
        if verb == "close":
            runtime.closed = True
            return {}
        if verb == "upload":
            form = form_of(request)
            await runtime.sandbox.write(form["target_path"].decode(), form["file"])
            return {}
        body = request.json()
        if verb == "read_file":
            content = await runtime.sandbox.read(body["path"])
            return {"content": content.decode(body["encoding"] or "utf-8", body["errors"] or "strict")}
        if verb == "write_file":
            await runtime.sandbox.write(body["path"], body["content"].encode())
            return {}
        assert verb == "execute"
        result = await runtime.sandbox.exec(
            body["command"],
            cwd=body["cwd"],
            env=body.get("env") or {},
            timeout_s=body["timeout"],
            output_cap_bytes=GIB,
        )
        if result.timed_out:
            raise TimeoutError(f"Timeout ({body['timeout']}s) exceeded while running command")
        return {
            "stdout": result.stdout.decode(errors="backslashreplace"),
            "stderr": result.stderr.decode(errors="backslashreplace"),
            "exit_code": result.exit_code,
        }


def _exception(name: str, words: str) -> Answer:
    sent = {"message": words, "class_path": name, "traceback": "", "extra_info": {}}
    return answer_json({"swerexception": sent}, 511)
