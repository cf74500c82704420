"""Prime sandboxes over HTTP: the API for sandboxes, and the gateway to each for commands and files.

Follows the Python SDK prime-sandboxes, version 0.5.1. A command session cannot end a program's input, so programs are
jobs (`hosted.jobs`). A sandbox's time limit cannot be moved: it is the wall limit, and leases are this process's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from rollmill.errors import ImageError, SandboxError, SandboxRetryable, Unauthenticated
from rollmill.sandboxes.backends.e2b.connect import ConnectError, parse_json, raise_error
from rollmill.sandboxes.backends.hosted import marks as marking
from rollmill.sandboxes.backends.hosted.driver import Found, Gone, Ran, gone_if_unknown, ref_of
from rollmill.sandboxes.backends.hosted.jobs import JobGuest
from rollmill.sandboxes.backends.hosted.provider import HostedProvider
from rollmill.sandboxes.backends.hosted.settings import ClaimedIsolation, JobSettings
from rollmill.sandboxes.backends.hosted.shell import argv_of
from rollmill.sandboxes.backends.http import CutOff, Refused, VendorHttp, token_of, understood
from rollmill.sandboxes.backends.prime.wire import Events, start_request
from rollmill.sandboxes.isolation import IsolationLevel
from rollmill.sandboxes.lifecycle import death
from rollmill.sandboxes.records import (
    Capabilities,
    Death,
    DeathReason,
    Image,
    NamedImage,
    SandboxSpec,
    SandboxState,
)

TOKEN_VARIABLE = "PRIME_API_KEY"

_LOOK_S = 0.5
_PAGE = 100
_MOST_PAGES = 1000
_RETRY_AFTER_S = 2.0
_GRACE_S = 10.0
_GIB = 1024**3
_STATES = {
    "PENDING": SandboxState.STARTING,
    "PROVISIONING": SandboxState.STARTING,
    "RUNNING": SandboxState.READY,
    "PAUSED": SandboxState.PAUSED,
}


class PrimeSettings(JobSettings, frozen=True, kw_only=True):
    """How to reach Prime.

    Attributes:
        api_url: of its API.
        image: what stands for `HostImage`.
        team: whose account; empty: your own.
        internet: whether sandboxes may reach the internet.
        user: whose rights programs have.
        start_s: pulling an image there takes minutes the first time.
    """

    api_url: str = "https://api.primeintellect.ai/api/v1"
    image: str = "python:3.12-slim"
    team: str = ""
    internet: bool = False
    user: str = "root"
    start_s: float = 600.0


class Gateway:
    """The way to one sandbox: an address with a token that runs out, asked for again then.

    Args:
        api: the API.
        http: connections to gateways; holds no token of the API.
        ref: the sandbox.
        user: whose rights programs have.
    """

    def __init__(self, api: VendorHttp, http: VendorHttp, *, ref: str, user: str) -> None:
        self._api = api
        self._http = http
        self._ref = ref
        self._user = user
        self._access: Mapping[str, Any] | None = None

    async def _way(self) -> tuple[str, dict[str, str]]:
        access = self._access
        if access is None:
            try:
                reply = await self._api.call("POST", f"sandbox/{self._ref}/auth", what="the way to a sandbox")
            except Refused as error:
                raise _explain(error) from error
            access = self._access = reply.json()
        address = f"{str(access['gateway_url']).rstrip('/')}/{access['user_ns']}/{access['job_id']}"
        return address, {"Authorization": f"Bearer {access['token']}"}

    async def run(self, script: str, arguments: Sequence[str], *, deadline_s: float) -> Ran:
        """Run a script to its end."""
        try:
            return await self._run(script, arguments, deadline_s)
        except Unauthenticated:
            self._access = None  # ran out before anything was started
            return await self._run(script, arguments, deadline_s)

    async def _run(self, script: str, arguments: Sequence[str], deadline_s: float) -> Ran:
        address, headers = await self._way()
        what = "a command"
        events = Events()
        try:
            async with self._http.stream(
                "POST",
                f"{address}/command_session.CommandSession/Start",
                what=what,
                content=start_request(argv_of(script, *arguments), environment={}, user=self._user),
                headers={
                    **headers,
                    "Content-Type": "application/connect+proto",
                    "Connect-Protocol-Version": "1",
                    "Connect-Timeout-Ms": str(math.ceil(deadline_s * 1000)),
                },
                deadline_s=deadline_s + _GRACE_S,
            ) as answer:
                async for piece in self._http.pieces(answer, what=what, silence_s=math.inf):
                    events.feed(piece)
            raise_error(parse_json(events.last or b""))
        except Refused as error:
            raise _explain(error) from error
        except ConnectError as error:
            raise _explain_connect(error) from error
        if events.exit_code is None:
            raise CutOff("a command session ended without an exit code")
        return Ran(code=events.exit_code, out=bytes(events.stdout), err=bytes(events.stderr))

    async def upload(self, path: str, data: bytes) -> bool:
        """Write a file as it is."""
        address, headers = await self._way()
        try:
            await self._http.call(
                "POST",
                f"{address}/upload?path={quote(path, safe='')}&sandbox_id={self._ref}",
                what=f"an upload of {len(data)} bytes",
                files={"file": ("data", data)},
                headers=headers,
            )
        except Refused as error:
            raise _explain(error) from error
        return True


def _explain(error: Refused) -> SandboxError:
    gone = error.status == 410 or error.status == 404 or (error.status == 502 and "sandbox_not_found" in error.words)
    return Gone(f"the sandbox is gone: {error.words}") if gone else error


def _explain_connect(error: ConnectError) -> SandboxError:
    if error.kind == "not_found":
        return Gone(f"the sandbox is gone: {error.words}")
    if error.kind in ("deadline_exceeded", "unavailable", "canceled"):
        return CutOff(f"a command session was cut off: {error}")
    return error


class PrimeDriver(ClaimedIsolation):
    """The adapter.

    Args:
        settings: how to reach the service.
    """

    product = "Prime"
    capabilities = Capabilities(
        labels=True,
        idempotent_create=True,
        limits=("memory_bytes", "disk_bytes", "cpus", "cpu_s", "wall_s", "exec_s", "output_bytes", "open_files"),
    )

    def __init__(self, settings: PrimeSettings) -> None:
        super().__init__(IsolationLevel.VIRTUAL_MACHINE)  # the SDK asks for nothing else
        self._settings = settings
        token = token_of(settings.token, variable=TOKEN_VARIABLE, product=self.product)
        self._api = VendorHttp(
            product=self.product,
            base_url=settings.api_url,
            headers={"Authorization": f"Bearer {token}"},
            call_s=settings.call_s,
            secrets=(token,),
        )
        self._gateways = VendorHttp(
            product="Prime's gateway", base_url=settings.api_url, call_s=settings.call_s, connections=2000
        )

    def check(self, image: Image) -> None:
        """Accept every reference: whether it can be pulled shows when a sandbox is made."""

    async def prepare(self, image: Image) -> None:
        """Do nothing: an image is pulled by the first sandbox of it."""

    async def create(self, spec: SandboxSpec, *, id: str, marks: Mapping[str, str], ttl_s: float) -> Found:
        """Make a sandbox."""
        limits = spec.limits
        name = spec.image.name if isinstance(spec.image, NamedImage) else self._settings.image
        body: dict[str, Any] = {
            "name": f"rollmill-{id}",
            "docker_image": name,
            "cpu_cores": limits.cpus,
            "memory_gb": limits.memory_bytes / _GIB,
            "disk_size_gb": limits.disk_bytes / _GIB,
            "timeout_minutes": max(1, math.ceil(ttl_s / 60)),
            "labels": [f"{name}={value}" for name, value in marks.items()],
            "idempotency_key": id,
            "vm": True,
        }
        if not self._settings.internet:
            body["network_denylist"] = ["0.0.0.0/0"]
        if self._settings.team:
            body["team_id"] = self._settings.team
        try:
            reply = await self._api.call("POST", "sandbox", what=f"a sandbox of {name}", body=body, deadline_s=math.inf)
        except Refused as error:
            if error.status in (400, 404, 422) and "image" in error.words.lower():
                raise ImageError(f"Prime cannot run the image {name!r}: {error.words}") from error
            raise
        with understood("a sandbox"):
            return self._found(reply.json())

    def _found(self, shown: Mapping[str, Any]) -> Found:
        pairs = (str(one).partition("=") for one in shown.get("labels") or [])
        return Found(
            ref=ref_of(shown["id"]),
            marks={name: value for name, _, value in pairs},
            state=_STATES.get(str(shown.get("status")), SandboxState.DEAD),
        )

    async def _show(self, found: Found) -> Mapping[str, Any]:
        with gone_if_unknown(found.ref, product=self.product):
            reply = await self._api.call("GET", f"sandbox/{found.ref}", what=f"a look at {found.ref}")
        return reply.json()

    async def enter(self, found: Found, spec: SandboxSpec) -> JobGuest:
        """Wait until it runs."""
        while True:
            shown = await self._show(found)
            status = str(shown.get("status"))
            if status == "RUNNING":
                break
            if status not in ("PENDING", "PROVISIONING"):
                raise _start_error(shown)
            await asyncio.sleep(_LOOK_S)
        guest = JobGuest(
            Gateway(self._api, self._gateways, ref=found.ref, user=self._settings.user),
            product=self.product,
            settings=self._settings,
        )
        await guest.probe()
        return guest

    async def find(self, marks: Mapping[str, str]) -> list[Found]:
        """Return those that are active with these labels, page by page."""
        asked = {marking.ID: marks[marking.ID]} if marking.ID in marks else marks
        parameters: dict[str, Any] = {"per_page": _PAGE, "is_active": "true"}
        if asked:
            parameters["labels"] = [f"{name}={value}" for name, value in asked.items()]
        if self._settings.team:
            parameters["team_id"] = self._settings.team
        found: list[Found] = []
        for page in range(1, _MOST_PAGES + 1):
            reply = await self._api.call(
                "GET", "sandbox", what="the list of sandboxes", parameters={**parameters, "page": page}
            )
            shown = reply.json() or {}
            found += [self._found(one) for one in shown.get("sandboxes", [])]
            if not shown.get("hasNext"):
                return found
        raise SandboxError(f"Prime's list of sandboxes does not end: {len(found)} after {_MOST_PAGES} pages")

    async def explain(self, found: Found) -> Death | None:
        """Return how it ended, as Prime says it."""
        try:
            shown = await self._show(found)
        except Gone as error:
            return death(DeathReason.PROVIDER_LOST, detail=str(error))
        status, kind = str(shown.get("status")), str(shown.get("errorType") or "")
        if status in _STATES:
            return None
        detail = f"it is {status} at Prime: {kind} {shown.get('errorMessage') or ''}".strip()
        if kind == "OOM_KILLED":
            return death(DeathReason.OUT_OF_MEMORY, detail=detail)
        # The limit there is the wall limit of the spec.
        return death(DeathReason.POLICY_WALL if status == "TIMEOUT" else DeathReason.PROVIDER_LOST, detail=detail)

    async def kill(self, found: Found) -> None:
        """Delete it."""
        try:
            await self._api.call("DELETE", f"sandbox/{found.ref}", what=f"the end of {found.ref}")
        except Refused as error:
            if error.status == 409:
                raise SandboxRetryable(f"Prime cannot delete it now: {error.words}", after_s=_RETRY_AFTER_S) from error
            if error.status not in (404, 410):
                raise

    async def set_ttl(self, found: Found, ttl_s: float) -> None:
        """Never called: the time limit cannot be moved."""

    async def pause(self, found: Found) -> None:
        """Never called: it is not offered."""

    async def resume(self, found: Found, *, ttl_s: float) -> JobGuest | None:
        """Never called: it is not offered."""
        return None

    async def close(self) -> None:
        """Let go of all connections."""
        await self._api.close()
        await self._gateways.close()


class PrimeProvider(HostedProvider[PrimeDriver]):
    """Sandboxes of Prime.

    Args:
        settings: how to reach it.
    """

    def __init__(self, settings: PrimeSettings | None = None) -> None:
        settings = PrimeSettings() if settings is None else settings
        super().__init__(PrimeDriver(settings), settings)


def _start_error(shown: Mapping[str, Any]) -> SandboxError:
    kind = str(shown.get("errorType") or "")
    words = f"Prime could not start the sandbox ({shown.get('status')} {kind}): {shown.get('errorMessage') or ''}"
    return ImageError(words) if "IMAGE" in kind else SandboxError(words)
