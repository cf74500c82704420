"""SWE-ReX's own server in place of our fake of it: one in each namespace sandbox, reached by a relay inside.

Needs a directory with SWE-ReX and what it imports, for the Python of the host's system directories: the one that an
environment variable names, or that of this environment. The sandboxes have no network, so each request goes in as the
input of a short program.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from fake_e2b import GIB, engine_spec
from fake_swerex import TOKEN, FakeRuntime, FakeSweRex
from loopback_http import Answer, Request
from rollmill.errors import SandboxDead, SandboxRetryable
from rollmill.sandboxes import IsolationLevel, Lease, Provider
from rollmill.sandboxes.backends.http import Secret
from rollmill.sandboxes.backends.swerex import Endpoint, SweRexProvider, SweRexSettings
from rollmill.sandboxes.records import Image
from sandbox_builders import new_id

SITE_VARIABLE = "ROLLMILL_SWEREX_SITE"
_PORT = 8000
_PYTHON = "/usr/bin/python3"
_PASSED_ON = ("x-api-key", "content-type", "x-request-id")
_START_S, _LOOK_S, _RELAY_S = 30.0, 0.1, 60.0

_RELAY = f"""
import base64, http.client, json, sys
asked = json.load(sys.stdin.buffer)
connection = http.client.HTTPConnection("127.0.0.1", {_PORT}, timeout=40)
try:
    connection.request(asked["method"], asked["path"], base64.b64decode(asked["body"]), asked["headers"])
    answer = connection.getresponse()
    told = [answer.status, answer.headers.get("content-type", ""), answer.read()]
except OSError as error:
    told = [502, "text/plain", str(error).encode()]
json.dump([*told[:2], base64.b64encode(told[2]).decode()], sys.stdout)
"""


def site() -> str:
    """Return the directory with SWE-ReX, empty if there is none."""
    if named := os.environ.get(SITE_VARIABLE, ""):
        return named
    found = importlib.util.find_spec("swerex")
    return "" if found is None or found.origin is None else str(Path(found.origin).parents[1])


def why_no_swerex() -> str:
    """Why the real one cannot be had here; empty if it can."""
    named = site()
    if not named:
        return f"SWE-ReX is not installed, `make test-vendors` has it, and {SITE_VARIABLE} names no directory with it"
    if not (Path(named) / "swerex").is_dir():
        return f"{named!r} holds no swerex"
    if Path(named).resolve().is_relative_to("/tmp"):
        return f"{named!r} is shown inside at the same path, and the tests look at what is in /tmp there"
    inside = subprocess.run([_PYTHON, "-V"], capture_output=True, text=True, check=False).stdout.strip()
    wanted = f"Python {sys.version_info.major}.{sys.version_info.minor}."
    return "" if inside.startswith(wanted) else f"{_PYTHON} is {inside!r}, and SWE-ReX is there for {wanted}x"


class RealRuntime(FakeRuntime):
    """One sandbox with a server in it, and what reads away the server's log."""

    drain: asyncio.Task[None]


class RealSweRex(FakeSweRex):
    """All servers, and their deployment."""

    async def start(self, *, id: str, image: Image) -> Endpoint:
        ref = new_id()
        spec = msgspec.structs.replace(engine_spec(pids=400), expose=(site(),))
        sandbox = await self._engine.create(spec, id=ref, lease=Lease(owner="fake", ttl_s=3600.0))
        runtime = self.runtimes[ref] = RealRuntime(sandbox)
        argv = ["python3", "-m", "swerex", "--host", "127.0.0.1", "--port", str(_PORT), "--auth-token", TOKEN]
        env = {"PYTHONPATH": site(), "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin"}
        process = await sandbox.start_process(argv, env=env, output_cap_bytes=GIB)
        runtime.drain = asyncio.create_task(_drain(process))
        for _ in range(round(_START_S / _LOOK_S)):
            if (await _relay(sandbox, "GET", "/is_alive", b"", {"x-api-key": TOKEN})).status == 200:
                return Endpoint(url=f"{self.server.url}/r/{ref}", token=Secret(TOKEN))
            await asyncio.sleep(_LOOK_S)
        await sandbox.kill()
        raise SandboxRetryable(f"SWE-ReX's server did not answer within {_START_S:g} s", after_s=1.0)

    async def stop(self, endpoint: Endpoint) -> None:
        runtime = self.runtimes.get(endpoint.url.rpartition("/")[2])
        await super().stop(endpoint)
        if isinstance(runtime, RealRuntime):
            await asyncio.wait([runtime.drain])

    async def handle(self, request: Request) -> Answer:
        _, _, ref, verb = request.path.split("/")
        runtime = self.runtimes.get(ref)
        if runtime is None or runtime.sandbox.death is not None:
            return Answer(502)
        headers = {name: value for name, value in request.headers.items() if name in _PASSED_ON}
        try:
            return await _relay(runtime.sandbox, request.method, f"/{verb}", request.body, headers)
        except SandboxDead:
            return Answer(502)


async def _relay(sandbox: Any, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
    asked = {"method": method, "path": path, "headers": headers, "body": base64.b64encode(body).decode()}
    done = await sandbox.run_python(_RELAY, stdin=json.dumps(asked).encode(), timeout_s=_RELAY_S, output_cap_bytes=GIB)
    if not done.stdout:
        return Answer(502, done.stderr)
    status, kind, data = json.loads(done.stdout)
    return Answer(status, base64.b64decode(data), {"content-type": kind})


async def _drain(process: Any) -> None:
    try:
        async for _ in process.output():
            pass
    except SandboxDead:
        return  # it was ended with its sandbox


async def open_real_swerex(engine: Provider, directory: Path, **settings: Any) -> tuple[SweRexProvider, RealSweRex]:
    real = RealSweRex(engine)
    await real.server.start()
    return SweRexProvider(real, SweRexSettings(isolation=IsolationLevel.HARDENED, **settings)), real
