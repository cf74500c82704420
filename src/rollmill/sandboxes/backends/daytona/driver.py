"""Daytona over HTTP: its API for sandboxes, and the toolbox inside each for commands.

Follows the Python SDK, version 0.226. The toolbox runs a command line to its end and returns one text, so programs are
jobs (`hosted.jobs`). Forks are made from a snapshot: the service's own call for them takes no labels, so one that was
cut off could not be found.
"""

from __future__ import annotations

import asyncio
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rollmill.errors import (
    ImageError,
    SandboxBusy,
    SandboxError,
    SandboxIdInUse,
    SandboxRetryable,
    SandboxUnsupported,
)
from rollmill.sandboxes.backends.hosted.driver import Found, Gone, Ran, gone_if_unknown, ref_of
from rollmill.sandboxes.backends.hosted.jobs import JobGuest, apart, parted
from rollmill.sandboxes.backends.hosted.provider import HostedProvider
from rollmill.sandboxes.backends.hosted.settings import ClaimedIsolation, JobSettings
from rollmill.sandboxes.backends.hosted.shell import argv_of
from rollmill.sandboxes.backends.http import CutOff, Refused, VendorHttp, token_of, understood
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

TOKEN_VARIABLE = "DAYTONA_API_KEY"

_LOOK_S = 0.2
_PAGE = 100
_MOST_PAGES = 1000
_RETRY_AFTER_S = 5.0
_GRACE_S = 10.0
_BEGINNING = frozenset(
    {
        *("creating", "restoring", "starting", "resuming", "pending_build", "building_snapshot", "pulling_snapshot"),
        "unknown",
    }
)
_MACHINES = frozenset({"linux-vm", "windows"})
_PAUSED = frozenset({"pausing", "paused"})
_ENDED = frozenset({"destroyed", "destroying", "error", "build_failed", "archived", "archiving"})


class DaytonaSettings(JobSettings, frozen=True, kw_only=True):
    """How to reach Daytona.

    Attributes:
        api_url: of its API.
        snapshot: what stands for `HostImage`; empty: the service's default. Memory, disk and processors are its.
        target: region; empty: the account's.
        isolation: what keeps a sandbox from its host there; the service does not show it.
    """

    api_url: str = "https://app.daytona.io/api"
    snapshot: str = ""
    target: str = ""
    isolation: IsolationLevel = IsolationLevel.HARDENED


class ToolboxShell:
    """The call of a toolbox that runs command lines.

    Args:
        http: connections.
        address: of this toolbox.
    """

    def __init__(self, http: VendorHttp, *, address: str) -> None:
        self._http = http
        self._address = address
        self._runs = asyncio.Event()
        self._runs.set()

    def hold(self) -> None:
        """Let calls wait: the sandbox is being paused."""
        self._runs.clear()

    def release(self) -> None:
        """Let calls go on."""
        self._runs.set()

    async def run(self, script: str, arguments: Sequence[str], *, deadline_s: float) -> Ran:
        """Run a script to its end; in a paused sandbox once it goes on, which its lease bounds."""
        await self._runs.wait()
        line = shlex.join(argv_of(*_flat(apart(script, arguments))))
        try:
            reply = await self._http.call(
                "POST",
                f"{self._address}/process/execute",
                what="a command",
                body={"command": line, "cwd": "/", "timeout": math.ceil(deadline_s)},
                deadline_s=deadline_s + _GRACE_S,
            )
        except Refused as error:
            raise _explain(error) from error
        shown = reply.json()
        return parted(int(shown.get("exitCode", shown.get("code", 0))), str(shown.get("result") or "").encode())

    async def upload(self, path: str, data: bytes) -> bool:
        """Write a file as it is."""
        try:
            await self._http.call(
                "POST",
                f"{self._address}/files/bulk-upload",
                what=f"an upload of {len(data)} bytes",
                files={"files[0].path": (None, path.encode()), "files[0].file": (path, data)},
            )
        except Refused as error:
            raise _explain(error) from error
        return True


def _flat(pair: tuple[str, list[str]]) -> list[str]:
    return [pair[0], *pair[1]]


def _explain(error: Refused) -> SandboxError:
    words = error.words.lower()
    if "not started" in words or "is not running" in words:
        # It may have ended, or be paused by somebody: its state tells.
        return CutOff(f"the sandbox's toolbox does not run: {error.words}")
    if error.status in (404, 410) or "not found" in words:
        return Gone(f"the sandbox's toolbox is gone: {error.words}")
    if error.status in (408, 504) or "timeout" in words:
        return CutOff(f"a command of the toolbox took too long: {error.words}")
    return error


class DaytonaDriver(ClaimedIsolation):
    """The adapter.

    Args:
        settings: how to reach the service.
    """

    product = "Daytona"
    capabilities = Capabilities(
        pause=True,
        extend_ttl=True,
        labels=True,
        files_snapshot=True,
        fork=True,
        limits=("cpu_s", "wall_s", "exec_s", "output_bytes", "open_files"),
    )

    def __init__(self, settings: DaytonaSettings) -> None:
        super().__init__(settings.isolation)
        self._settings = settings
        token = token_of(settings.token, variable=TOKEN_VARIABLE, product=self.product)
        self._http = VendorHttp(
            product=self.product,
            base_url=settings.api_url,
            headers={"Authorization": f"Bearer {token}"},
            call_s=settings.call_s,
            secrets=(token,),
        )
        self._shells: dict[str, ToolboxShell] = {}

    def check(self, image: Image) -> None:
        """Accept every snapshot's name: whether it exists shows when a sandbox is made."""

    async def prepare(self, image: Image) -> None:
        """Look whether there is a snapshot of this name; they are built by the service's own tools."""
        name = image.name if isinstance(image, NamedImage) else self._settings.snapshot
        if not name:
            return
        try:
            await self._http.call("GET", f"snapshots/{name}", what=f"the snapshot {name}")
        except Refused as error:
            if error.status == 404:
                raise _no_snapshot(name, error) from error
            raise

    async def create(self, spec: SandboxSpec, *, id: str, marks: Mapping[str, str], ttl_s: float) -> Found:
        """Make a sandbox."""
        name = spec.image.name if isinstance(spec.image, NamedImage) else self._settings.snapshot
        body: dict[str, Any] = {
            "name": f"rollmill-{id}",
            "labels": dict(marks),
            "networkBlockAll": True,
            "public": False,
            "ttlMinutes": _minutes(ttl_s),
            "autoStopInterval": 0,  # ours ends it; a silent program is no idle one
            "autoDeleteInterval": 0,  # what has stopped is of no use
        }
        if name:
            body["snapshot"] = name
        if self._settings.target:
            body["target"] = self._settings.target
        try:
            reply = await self._http.call("POST", "sandbox", what="a sandbox", body=body, deadline_s=math.inf)
        except Refused as error:
            if error.status in (400, 404) and "snapshot" in error.words.lower():
                raise _no_snapshot(name, error) from error
            if error.status == 409:
                raise SandboxError(f"Daytona has a sandbox rollmill-{id} already: {error.words}") from error
            raise
        with understood("a sandbox"):
            return self._found(reply.json(), marks)

    def _found(self, shown: Mapping[str, Any], marks: Mapping[str, str] | None = None) -> Found:
        state = str(shown.get("state", "unknown"))
        known = SandboxState.STARTING if state in _BEGINNING else SandboxState.READY
        known = SandboxState.PAUSED if state in _PAUSED else known
        return Found(
            ref=ref_of(shown["id"]),
            marks=dict(shown.get("labels") or {}) if marks is None else marks,
            state=SandboxState.DEAD if state in _ENDED or state == "stopped" else known,
            access={"toolbox": str(shown.get("toolboxProxyUrl") or "")},
        )

    async def _show(self, found: Found) -> Mapping[str, Any]:
        with gone_if_unknown(found.ref, product=self.product):
            reply = await self._http.call("GET", f"sandbox/{found.ref}", what=f"a look at {found.ref}")
        return reply.json()

    async def enter(self, found: Found, spec: SandboxSpec) -> JobGuest:
        """Wait until it has started, or find it paused."""
        while True:
            shown = await self._show(found)
            state = str(shown.get("state"))
            if state in ("started", "paused"):
                break
            if state in ("error", "build_failed"):
                raise _start_error(str(shown.get("errorReason") or state))
            if state in _ENDED:
                raise Gone(f"the sandbox ended before it started: {state}")
            await asyncio.sleep(_LOOK_S)
        guest = await self._guest(found, shown)
        if state == "started":
            await guest.probe()
        return guest

    async def _guest(self, found: Found, shown: Mapping[str, Any]) -> JobGuest:
        toolbox = str(shown.get("toolboxProxyUrl") or "") or await self._toolbox(found)
        shell = ToolboxShell(self._http, address=f"{toolbox.rstrip('/')}/{found.ref}")
        return JobGuest(
            self._shells.setdefault(found.ref, shell),
            product=self.product,
            settings=self._settings,
        )

    async def _toolbox(self, found: Found) -> str:
        reply = await self._http.call("GET", f"sandbox/{found.ref}/toolbox-proxy-url", what="the toolbox's address")
        return str(reply.json()["url"])

    async def find(self, marks: Mapping[str, str]) -> list[Found]:
        """Return those with these labels, page by page."""
        parameters: dict[str, Any] = {"limit": _PAGE}
        if marks:
            parameters["labels"] = json.dumps(dict(marks))
        found: list[Found] = []
        for _ in range(_MOST_PAGES):
            reply = await self._http.call("GET", "sandbox", what="the list of sandboxes", parameters=parameters)
            shown = reply.json() or {}
            found += [self._found(one) for one in shown.get("items", [])]
            if not shown.get("nextCursor"):
                return [one for one in found if one.state is not SandboxState.DEAD]
            parameters["cursor"] = shown["nextCursor"]
        raise SandboxError(f"Daytona's list of sandboxes does not end: {len(found)} after {_MOST_PAGES} pages")

    async def explain(self, found: Found) -> Death | None:
        """Return how it ended; the service tells a reason of errors alone."""
        try:
            shown = await self._show(found)
        except Gone as error:
            return death(DeathReason.PROVIDER_LOST, detail=str(error))
        state = str(shown.get("state"))
        if state in _ENDED or state == "stopped":
            detail = f"it is {state} at Daytona: {shown.get('errorReason') or 'no reason given'}"
            return death(DeathReason.PROVIDER_LOST, detail=detail)
        return None

    async def kill(self, found: Found) -> None:
        """Delete it."""
        self._shells.pop(found.ref, None)
        try:
            await self._http.call("DELETE", f"sandbox/{found.ref}", what=f"the end of {found.ref}")
        except Refused as error:
            if error.status == 409:  # its state is changing
                raise SandboxRetryable(
                    f"Daytona cannot delete it now: {error.words}", after_s=_RETRY_AFTER_S
                ) from error
            if error.status not in (404, 410):
                raise

    async def set_ttl(self, found: Found, ttl_s: float) -> None:
        """Set when the service ends it."""
        await self._ask(found, f"ttl/{_minutes(ttl_s)}", what=f"a longer time limit of {found.ref}")

    async def _ask(self, found: Found, verb: str, *, what: str, body: Any = None) -> None:
        with gone_if_unknown(found.ref, product=self.product):
            await self._http.call("POST", f"sandbox/{found.ref}/{verb}", what=what, body=body)

    async def pause(self, found: Found) -> None:
        """Freeze its processes; what waits for a program there waits until it goes on."""
        shell = self._shells.get(found.ref)
        if shell is not None:
            shell.hold()
        try:
            await self._ask(found, "pause", what=f"a pause of {found.ref}")
            await self._until(found, "paused")
        except BaseException as error:
            if shell is not None:
                shell.release()
            if isinstance(error, Refused) and error.status in (400, 403, 405, 501):
                raise SandboxUnsupported(f"Daytona cannot pause {found.ref}: {error}", capability="pause") from error
            raise

    async def resume(self, found: Found, *, ttl_s: float) -> JobGuest | None:
        """Let its processes go on."""
        try:
            await self._ask(found, "start", what=f"the resumption of {found.ref}")
        except Refused as error:
            if error.status != 409:  # it goes on already
                raise
        shown = await self._until(found, "started")
        await self.set_ttl(found, ttl_s)
        guest = await self._guest(found, shown)
        self._shells[found.ref].release()
        await guest.probe()
        return guest

    async def _until(self, found: Found, state: str) -> Mapping[str, Any]:
        """Return it as it is shown once it has a state."""
        try:
            async with asyncio.timeout(self._settings.call_s):
                while True:
                    shown = await self._show(found)
                    if (seen := str(shown.get("state"))) == state:
                        return shown
                    if seen in _ENDED:
                        raise Gone(f"sandbox {found.ref} is {seen} at Daytona: {shown.get('errorReason') or ''}")
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            raise CutOff(
                f"sandbox {found.ref} was not {state} at Daytona within {self._settings.call_s:g} s (call_s)"
            ) from error

    # -- snapshots ---------------------------------------------------------------------------------------------------

    async def keep(self, found: Found, *, name: str) -> str:
        """Make a snapshot of its files, which others are made of by its name."""
        kind = (await self._show(found)).get("sandboxClass")
        if kind in _MACHINES:
            raise SandboxUnsupported(
                f"Daytona keeps the files of a {kind} when it is stopped, and deletes it then; take a snapshot whose "
                "sandboxes are containers",
                capability="files_snapshot",
            )
        try:
            await self._ask(found, "snapshot", what=f"a snapshot of {found.ref}", body={"name": name})
        except Refused as error:
            if error.status == 409 and "exist" in error.words:
                raise SandboxIdInUse(f"Daytona has a snapshot {name} already: {error.words}") from error
            if error.status == 409:
                raise SandboxBusy(f"Daytona takes no snapshot now: {error.words}") from error
            raise
        while True:
            passing = (await self._show(found)).get("state") == "snapshotting"
            shown = await self._snapshot(name) or {}
            if shown.get("state") == "active" and not passing:
                return name
            if shown.get("state") in ("error", "build_failed"):
                raise SandboxError(f"Daytona could not keep the files of {found.ref}: {shown.get('errorReason')}")
            await asyncio.sleep(_LOOK_S)

    async def _snapshot(self, name: str) -> Mapping[str, Any] | None:
        try:
            return (await self._http.call("GET", f"snapshots/{name}", what=f"the snapshot {name}")).json()
        except Refused as error:
            if error.status == 404:
                return None
            raise

    async def kept(self, name: str) -> str | None:
        """Look whether there is a snapshot of this name."""
        shown = await self._snapshot(name)
        return None if shown is None or shown.get("state") == "removing" else name

    async def forget(self, image: str) -> None:
        """Delete a snapshot, by the id that its name stands for."""
        shown = await self._snapshot(image)
        if shown is None:
            return
        try:
            await self._http.call("DELETE", f"snapshots/{ref_of(shown['id'])}", what=f"the end of snapshot {image}")
        except Refused as error:
            if error.status != 404:
                raise

    async def close(self) -> None:
        """Let go of all connections."""
        await self._http.close()


class DaytonaProvider(HostedProvider[DaytonaDriver]):
    """Sandboxes of Daytona.

    Args:
        settings: how to reach it.
    """

    def __init__(self, settings: DaytonaSettings | None = None) -> None:
        settings = DaytonaSettings() if settings is None else settings
        super().__init__(DaytonaDriver(settings), settings)


def _minutes(ttl_s: float) -> int:
    return max(1, math.ceil(ttl_s / 60))


def _start_error(reason: str) -> SandboxError:
    kind = ImageError if any(one in reason.lower() for one in ("snapshot", "image", "pull", "build")) else SandboxError
    return kind(f"Daytona could not start the sandbox: {reason}")


def _no_snapshot(name: str, error: Refused) -> ImageError:
    return ImageError(
        f"Daytona has no snapshot {name!r} ({error.status}: {error.words}); build it there, or name another"
    )
