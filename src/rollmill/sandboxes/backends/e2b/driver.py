"""The control API of E2B, and of services that speak it: make, find, end, pause and prolong sandboxes.

Follows the public Python SDK, version 2.63 (`/v2/sandboxes`); `api_version=1` follows the paths before it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from rollmill.errors import ImageError, SandboxBusy, SandboxError, SandboxUnsupported
from rollmill.sandboxes.backends.e2b.envd import Envd
from rollmill.sandboxes.backends.e2b.settings import TOKEN_VARIABLE, E2BSettings
from rollmill.sandboxes.backends.hosted import marks as marking
from rollmill.sandboxes.backends.hosted.driver import Found, Gone, gone_if_unknown, ref_of
from rollmill.sandboxes.backends.hosted.provider import HostedProvider
from rollmill.sandboxes.backends.hosted.settings import ClaimedIsolation
from rollmill.sandboxes.backends.http import Refused, VendorHttp, token_of, understood
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

_PAGE = 100
_MOST_PAGES = 1000
_LOOK_S = 0.1
_STATES = {"running": SandboxState.READY, "paused": SandboxState.PAUSED}


class E2BDriver(ClaimedIsolation):
    """The adapter.

    Args:
        settings: how to reach the service.
    """

    product = "E2B"

    def __init__(self, settings: E2BSettings) -> None:
        super().__init__(settings.isolation)
        self._settings = settings
        token = token_of(settings.token, variable=TOKEN_VARIABLE, product=self.product)
        self._api = VendorHttp(
            product=self.product,
            base_url=settings.control_url(),
            headers={"X-API-Key": token},
            call_s=settings.call_s,
            secrets=(token,),
        )
        # A client of its own: the token of the control API goes to no sandbox.
        self._inside = VendorHttp(
            product="the E2B sandbox", base_url=settings.control_url(), call_s=settings.call_s, connections=2000
        )
        self._base = "/v2/sandboxes" if settings.api_version == 2 else "/sandboxes"

    @property
    def capabilities(self) -> Capabilities:
        """Return what it can do here."""
        return Capabilities(
            pause=self._settings.pauses,
            extend_ttl=True,
            labels=True,
            idempotent_create=self._settings.api_version == 2,
            users=True,
            files_snapshot=True,
            fork=True,
            terminals=True,
            max_lifetime_s=self._settings.max_lifetime_s,
            limits=("cpu_s", "wall_s", "exec_s", "output_bytes", "open_files"),
        )

    def check(self, image: Image) -> None:
        """Accept every template: whether it exists shows when a sandbox is made."""

    async def prepare(self, image: Image) -> None:
        """Ask whether a template of this name exists; templates are built by the service's own tools."""
        name = self._template(image)
        try:
            await self._api.call("GET", f"/templates/aliases/{quote(name, safe='')}", what=f"the template {name}")
        except Refused as error:
            # Servers without this call answer 404 as well, but without words about a template.
            if error.status == 404 and _about_template(error.words):
                raise _no_template(name, error) from error
            if error.status not in (404, 403, 405, 501):
                raise

    def _template(self, image: Image) -> str:
        return image.name if isinstance(image, NamedImage) else self._settings.template

    async def create(self, spec: SandboxSpec, *, id: str, marks: Mapping[str, str], ttl_s: float) -> Found:
        """Make a sandbox."""
        name = self._template(spec.image)
        body: dict[str, Any] = {
            "templateID": name,
            "timeout": self._ttl(ttl_s),
            "metadata": dict(marks),
            "envVars": {},
            "autoPause": False,
        }
        if not self._settings.internet:
            body["allow_internet_access"] = False
        if self._settings.api_version == 1:
            body["secure"] = True
        try:
            reply = await self._api.call(
                "POST",
                self._base,
                what=f"a sandbox of template {name}",
                body=body,
                headers={"Idempotency-Key": id},
                deadline_s=math.inf,  # the provider's holds
            )
        except Refused as error:
            if error.status == 404 or (error.status == 400 and _about_template(error.words)):
                raise _no_template(name, error) from error
            raise
        with understood(f"a sandbox of template {name}"):
            return self._found(reply.json(), marks)

    def _ttl(self, ttl_s: float) -> int:
        return max(1, math.ceil(min(ttl_s, self._settings.max_lifetime_s)))

    def _found(self, shown: Mapping[str, Any], marks: Mapping[str, str] | None = None) -> Found:
        try:
            access = {"domain": str(shown.get("domain") or ""), "token": str(shown.get("envdAccessToken") or "")}
            return Found(
                ref=ref_of(shown["sandboxID"]),
                marks=dict(shown.get("metadata") or {}) if marks is None else marks,
                state=_STATES.get(str(shown.get("state", "running")), SandboxState.READY),
                access=access if "envdAccessToken" in shown or "domain" in shown else {},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise SandboxError(f"E2B's answer shows no sandbox: {sorted(shown)}") from error

    async def enter(self, found: Found, spec: SandboxSpec) -> Envd:
        """Wait until envd answers."""
        access = found.access
        if not access:
            access = self._found(await self._show(found)).access
        envd = self._envd(found.ref, access)
        while found.state is not SandboxState.PAUSED and not await envd.healthy():
            await self._show(found)  # raises `Gone` if it is
            await asyncio.sleep(_LOOK_S)
        return envd

    def _envd(self, ref: str, access: Mapping[str, str]) -> Envd:
        return Envd(
            self._inside,
            address=self._settings.address_of(ref, domain=access.get("domain", "")),
            ref=ref,
            token=access.get("token", ""),
            user=self._settings.user,
        )

    async def _show(self, found: Found) -> Mapping[str, Any]:
        with gone_if_unknown(found.ref, product=self.product):
            reply = await self._api.call("GET", f"/sandboxes/{found.ref}", what=f"a look at {found.ref}")
        return reply.json()

    async def find(self, marks: Mapping[str, str]) -> list[Found]:
        """Return those that run or are paused, page by page."""
        parameters: dict[str, Any] = {"state": "running,paused", "limit": _PAGE}
        asked = {marking.ID: marks[marking.ID]} if marking.ID in marks else marks
        if asked:
            # Quoted twice, as the SDK does: the service decodes the pairs once more after the query.
            parameters["metadata"] = urlencode({quote(name): quote(value) for name, value in asked.items()})
        found: list[Found] = []
        base = self._base
        for _ in range(_MOST_PAGES):
            reply = await self._api.call("GET", base, what="the list of sandboxes", parameters=parameters)
            found += [self._found(one) for one in reply.json() or []]
            token = reply.headers.get("x-next-token", "")
            if not token:
                return found
            parameters["nextToken"] = token
        raise SandboxError(f"E2B's list of sandboxes does not end: {len(found)} after {_MOST_PAGES} pages")

    async def explain(self, found: Found) -> Death | None:
        """Return `None` while the service knows it: of one that ended it tells no reason."""
        try:
            await self._show(found)
        except Gone as error:
            return death(DeathReason.PROVIDER_LOST, detail=f"{error}. It failed there, or was ended by somebody else")
        return None

    async def kill(self, found: Found) -> None:
        """End it."""
        try:
            await self._api.call("DELETE", f"/sandboxes/{found.ref}", what=f"the end of {found.ref}")
        except Refused as error:
            if error.status != 404:
                raise

    async def set_ttl(self, found: Found, ttl_s: float) -> None:
        """Set when the service ends it."""
        path = f"/sandboxes/{found.ref}/timeout"
        await self._of(found, path, what="a longer time limit", body={"timeout": self._ttl(ttl_s)})

    async def pause(self, found: Found) -> None:
        """Pause it with its memory."""
        try:
            path = f"/sandboxes/{found.ref}/pause"
            await self._of(found, path, what="a pause", body={"memory": True})
        except Refused as error:
            if error.status == 501:
                raise SandboxUnsupported(f"the service cannot pause: {error.words}", capability="pause") from error
            if error.status != 409:  # it is paused
                raise

    async def resume(self, found: Found, *, ttl_s: float) -> Envd | None:
        """Resume it; it may be reached otherwise from now on."""
        old = self._settings.api_version == 1
        path = f"/sandboxes/{found.ref}/resume" if old else f"/v2/sandboxes/{found.ref}/connect"
        reply = await self._of(found, path, what="to go on", body={"timeout": self._ttl(ttl_s)})
        access = self._found(reply).access or self._found(await self._show(found)).access
        envd = self._envd(found.ref, access)
        while not await envd.healthy():
            await self._show(found)
            await asyncio.sleep(_LOOK_S)
        return envd

    async def _of(self, found: Found, path: str, *, what: str, body: Any) -> Any:
        with gone_if_unknown(found.ref, product=self.product):
            reply = await self._api.call("POST", path, what=f"{what} of {found.ref}", body=body)
        return reply.json()

    # -- snapshots ---------------------------------------------------------------------------------------------------

    async def keep(self, found: Found, *, name: str) -> str:
        """Make a snapshot of its files, which is a template for others."""
        path = f"/sandboxes/{found.ref}/snapshots"
        try:
            shown = await self._of(found, path, what="a snapshot", body={"name": name, "memory": False})
        except Refused as error:
            if error.status == 409:
                raise SandboxBusy(f"the service takes no snapshot now: {error.words}") from error
            raise
        envd = self._envd(found.ref, found.access or self._found(await self._show(found)).access)
        while not await envd.healthy():
            await self._show(found)
            await asyncio.sleep(_LOOK_S)
        return str(shown["snapshotID"])

    async def kept(self, name: str) -> str | None:
        """Look for a snapshot by its name; services put an account before it, and a tag behind."""
        parameters: dict[str, Any] = {"limit": _PAGE}
        for _ in range(_MOST_PAGES):
            reply = await self._api.call("GET", "/snapshots", what="the list of snapshots", parameters=parameters)
            for one in reply.json() or []:
                if name in (str(full).rpartition("/")[2].partition(":")[0] for full in one.get("names") or []):
                    return str(one["snapshotID"])
            token = reply.headers.get("x-next-token", "")
            if not token:
                return None
            parameters["nextToken"] = token
        raise SandboxError(f"E2B's list of snapshots does not end: {_MOST_PAGES} pages")

    async def forget(self, image: str) -> None:
        """Delete a snapshot."""
        try:
            await self._api.call("DELETE", f"/templates/{quote(image, safe='')}", what=f"the end of snapshot {image}")
        except Refused as error:
            if error.status != 404:
                raise

    async def close(self) -> None:
        """Let go of all connections."""
        await self._api.close()
        await self._inside.close()


class E2BProvider(HostedProvider[E2BDriver]):
    """Sandboxes of E2B, or of a service that speaks its API.

    Args:
        settings: how to reach it.
    """

    def __init__(self, settings: E2BSettings | None = None) -> None:
        settings = E2BSettings() if settings is None else settings
        super().__init__(E2BDriver(settings), settings)


def _about_template(words: str) -> bool:
    return "template" in words.lower()


def _no_template(name: str, error: Refused) -> ImageError:
    return ImageError(
        f"E2B has no template {name!r} ({error.status}: {error.words}); build it with the service's tools, or name "
        "another one. An older server has no /v2/sandboxes at all: api_version=1"
    )
