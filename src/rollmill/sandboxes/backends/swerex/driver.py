"""SWE-ReX runtimes over HTTP: one runtime is one sandbox.

Follows SWE-ReX 1.4. A runtime runs commands one at a time, as text and without input, so programs are jobs
(`hosted.jobs`). Its bash sessions are not used: they mix output with prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.errors import SandboxError
from rollmill.sandboxes.backends.hosted.driver import Found, Gone, Ran
from rollmill.sandboxes.backends.hosted.jobs import JobGuest
from rollmill.sandboxes.backends.hosted.provider import HostedProvider
from rollmill.sandboxes.backends.hosted.settings import ClaimedIsolation
from rollmill.sandboxes.backends.hosted.shell import argv_of
from rollmill.sandboxes.backends.http import CutOff, Refused, Unreachable, VendorHttp
from rollmill.sandboxes.backends.swerex.deployment import Deployment, Endpoint
from rollmill.sandboxes.backends.swerex.settings import SweRexSettings
from rollmill.sandboxes.lifecycle import death
from rollmill.sandboxes.records import Capabilities, Death, DeathReason, Image, SandboxSpec

_EXCEPTION = 511
_FROM_A_PROXY = (502, 503, 504)
_LOOK_S = 0.1
_GRACE_S = 5.0


class RuntimeShell:
    """The call of one runtime that runs commands.

    Args:
        http: its server.
    """

    def __init__(self, http: VendorHttp) -> None:
        self._http = http

    async def run(self, script: str, arguments: Sequence[str], *, deadline_s: float) -> Ran:
        """Run a script to its end."""
        body = {"command": list(argv_of(script, *arguments)), "timeout": deadline_s, "shell": False, "cwd": "/"}
        try:
            reply = await self._http.call(
                "POST", "execute", what="a command", body=body, deadline_s=deadline_s + _GRACE_S
            )
        except Refused as error:
            raise explain(error) from error
        shown = reply.json()
        return Ran(code=int(shown["exit_code"]), out=shown["stdout"].encode(), err=shown["stderr"].encode())

    async def upload(self, path: str, data: bytes) -> bool:
        """Write a file as it is."""
        try:
            await self._http.call(
                "POST",
                "upload",
                what=f"an upload of {len(data)} bytes",
                files={"file": ("data", data)},
                form={"target_path": path, "unzip": "false"},
            )
        except Refused as error:
            raise explain(error) from error
        return True


def explain(error: Refused) -> SandboxError:
    """Return what an exception inside a runtime means.

    SWE-ReX sends it with its class; nothing is imported or raised by that name here.
    """
    if error.status in _FROM_A_PROXY:
        return CutOff(f"the runtime does not answer what is before it: {error}")
    if error.status != _EXCEPTION:
        return error
    try:
        sent = json.loads(error.content).get("swerexception", {})
        name, words = str(sent.get("class_path", "")).rpartition(".")[2], str(sent.get("message", ""))
    except (ValueError, AttributeError):
        return error
    if name == "CommandTimeoutError":
        return CutOff(f"a command of the runtime took too long: {words}")
    return SandboxError(f"the runtime failed ({name}): {words[:500]}")


class SweRexDriver(ClaimedIsolation):
    """The adapter.

    Args:
        deployment: where runtimes come from.
        settings: how to talk to them.
    """

    product = "SWE-ReX"
    capabilities = Capabilities(limits=("cpu_s", "wall_s", "exec_s", "output_bytes", "open_files"))

    def __init__(self, deployment: Deployment, settings: SweRexSettings) -> None:
        super().__init__(settings.isolation)
        self._deployment = deployment
        self._settings = settings
        self._runtimes: dict[str, tuple[Found, Endpoint, VendorHttp]] = {}

    def check(self, image: Image) -> None:
        """Leave it to the deployment."""

    async def prepare(self, image: Image) -> None:
        """Leave it to the deployment."""

    async def create(self, spec: SandboxSpec, *, id: str, marks: Mapping[str, str], ttl_s: float) -> Found:
        """Take a runtime."""
        endpoint = await self._deployment.start(id=id, image=spec.image)
        http = VendorHttp(
            product=self.product,
            base_url=endpoint.url,
            headers={"X-API-Key": endpoint.token.reveal()},
            call_s=self._settings.call_s,
            secrets=(endpoint.token.reveal(),),
        )
        found = Found(ref=id, marks=marks)
        self._runtimes[id] = (found, endpoint, http)
        return found

    async def enter(self, found: Found, spec: SandboxSpec) -> JobGuest:
        """Wait until the runtime answers."""
        _, _, http = self._runtime(found)
        while not await self._alive(http):  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_S)
        guest = JobGuest(
            RuntimeShell(http),
            product=self.product,
            settings=self._settings,
        )
        await guest.probe()
        return guest

    def _runtime(self, found: Found) -> tuple[Found, Endpoint, VendorHttp]:
        if found.ref not in self._runtimes:
            raise Gone(f"the runtime of {found.ref} was stopped")
        return self._runtimes[found.ref]

    async def _alive(self, http: VendorHttp) -> bool:
        try:
            reply = await http.call("GET", "is_alive", what="a look at a runtime")
        except (Unreachable, CutOff, Refused):
            return False
        shown: Any = reply.json()
        return bool(shown.get("is_alive"))

    async def find(self, marks: Mapping[str, str]) -> list[Found]:
        """Return those of this process: a runtime carries no marks, so nobody else can find one."""
        return [found for found, _, _ in self._runtimes.values()]

    async def explain(self, found: Found) -> Death | None:
        """Return `None` while the runtime answers."""
        if found.ref in self._runtimes and await self._alive(self._runtimes[found.ref][2]):
            return None
        return death(DeathReason.PROVIDER_LOST, detail="its runtime does not answer any more")

    async def kill(self, found: Found) -> None:
        """Stop the runtime."""
        if found.ref not in self._runtimes:
            return
        _, endpoint, http = self._runtimes[found.ref]
        with contextlib.suppress(Refused, Unreachable, CutOff):  # it ends with its deployment in any case
            await http.call("POST", "close", what="the end of a runtime", deadline_s=_GRACE_S)
        await self._deployment.stop(endpoint)
        self._runtimes.pop(found.ref, None)
        await http.close()

    async def set_ttl(self, found: Found, ttl_s: float) -> None:
        """Do nothing: a runtime has no time limit."""

    async def pause(self, found: Found) -> None:
        """Never called: it cannot."""

    async def resume(self, found: Found, *, ttl_s: float) -> JobGuest | None:
        """Never called: it cannot."""
        return None

    async def close(self) -> None:
        """Let go of all connections."""
        for _, _, http in self._runtimes.values():
            await http.close()


class SweRexProvider(HostedProvider[SweRexDriver]):
    """Sandboxes as SWE-ReX runtimes.

    Args:
        deployment: where runtimes come from.
        settings: how to talk to them.
    """

    def __init__(self, deployment: Deployment, settings: SweRexSettings | None = None) -> None:
        settings = SweRexSettings() if settings is None else settings
        super().__init__(SweRexDriver(deployment, settings), settings)
