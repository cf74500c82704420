"""Docker and Podman by the Engine API over their Unix socket: containers with hard defaults, and a sweep of orphans.

Follows the Engine API, version 1.41 (Docker 20.10, Podman 4). A container has no time limit that can be moved, so
leases are this process's, and three things end what it leaves: the container itself, whose first process sleeps until
the wall limit; the sweep of the next provider on this machine; and `sweep` whenever somebody calls it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from rollmill.errors import ImageError, RollmillError, SandboxError, SandboxIdInUse
from rollmill.sandboxes.backends.docker.guest import ContainerGuest
from rollmill.sandboxes.backends.docker.hardening import (
    adopted_name,
    container,
    is_orphan,
    marks_of,
    owner_now,
    protections_of,
)
from rollmill.sandboxes.backends.docker.settings import DockerSettings
from rollmill.sandboxes.backends.hosted import marks as marking
from rollmill.sandboxes.backends.hosted.driver import Found, Gone, ref_of
from rollmill.sandboxes.backends.hosted.provider import HostedProvider
from rollmill.sandboxes.backends.hosted.sandbox import HostedSandbox
from rollmill.sandboxes.backends.http import Refused, VendorHttp, understood
from rollmill.sandboxes.disk_records import boot_id, is_alive, own_mark
from rollmill.sandboxes.isolation import Protection
from rollmill.sandboxes.lifecycle import death
from rollmill.sandboxes.records import (
    Capabilities,
    Death,
    DeathReason,
    Image,
    Lease,
    NamedImage,
    SandboxSpec,
    SandboxState,
)

_API = "/v1.41"
_SNAPSHOTS = "rollmill-snapshots"
_LOOK_S = 0.05
_STATES = {
    "running": SandboxState.READY,
    "paused": SandboxState.PAUSED,
    "created": SandboxState.STARTING,
    "restarting": SandboxState.STARTING,
}
_log = logging.getLogger(__name__)


class DockerDriver:
    """The adapter.

    Args:
        settings: how containers are made.
    """

    product = "the container daemon"
    protections: frozenset[Protection] | None = None

    def __init__(self, settings: DockerSettings) -> None:
        self._settings = settings
        self._socket = settings.socket_path()
        self._http = VendorHttp(
            product=self.product, base_url="http://docker", socket=self._socket, call_s=settings.call_s
        )
        self._info: Mapping[str, Any] | None = None
        self._owner = own_mark()

    @property
    def capabilities(self) -> Capabilities:
        """Return what it can do."""
        limits = ("memory_bytes", "pids", "cpus", "cpu_s", "wall_s", "exec_s", "output_bytes", "open_files")
        if self._settings.read_only_root:
            limits += ("disk_bytes", "inodes")
        elif self._settings.storage_size:
            limits += ("disk_bytes",)
        # What is in memory is no part of the image that a snapshot is.
        keeps = not self._settings.read_only_root
        return Capabilities(
            pause=True, labels=True, users=True, idempotent_create=True, files_snapshot=keeps, fork=keeps, limits=limits
        )

    async def _call(self, method: str, path: str, *, what: str, **arguments: Any) -> Any:
        reply = await self._http.call(method, _API + path, what=what, **arguments)
        return reply.json() if reply.content.strip()[:1] in (b"{", b"[") else None

    def _image(self, image: Image) -> str:
        return image.name if isinstance(image, NamedImage) else self._settings.image

    def check(self, image: Image) -> None:
        """Refuse a name that could reach past the image's part of an address."""
        name = self._image(image)
        if not name or any(one in name for one in " ?#%\\") or ".." in name or name.startswith("/"):
            raise ImageError(f"{name!r} cannot be the reference of an image")

    async def prepare(self, image: Image) -> None:
        """Pull an image if it is not there."""
        name = self._image(image)
        if self._settings.pull != "always" and await self._has(name):
            return
        if self._settings.pull == "never":
            raise ImageError(f"the image {name!r} is not there, and pull is 'never'; pull it by hand, or change that")
        await self._pull(name)

    async def _has(self, name: str) -> bool:
        try:
            await self._call("GET", f"/images/{name}/json", what=f"the image {name}")
        except Refused as error:
            if error.status == 404:
                return False
            raise
        return True

    async def _pull(self, name: str) -> None:
        what = f"pulling {name}"
        try:
            reply = await self._http.call(
                "POST",
                f"{_API}/images/create",
                what=what,
                parameters={"fromImage": name if "@" in name or ":" in name.rpartition("/")[2] else f"{name}:latest"},
                deadline_s=math.inf,  # the provider's holds
            )
        except Refused as error:
            raise ImageError(f"the image {name!r} cannot be pulled ({error.status}): {error.words}") from error
        # The daemon answers 200 before it begins, and says in the last line how it went.
        for line in reply.content.splitlines():
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if isinstance(said, dict) and said.get("error"):
                raise ImageError(f"the image {name!r} cannot be pulled: {self._http.clean(str(said['error']))}")

    async def create(self, spec: SandboxSpec, *, id: str, marks: Mapping[str, str], ttl_s: float) -> Found:
        """Make a container; `enter` starts it."""
        if await self.find({marking.ID: id}):
            raise SandboxIdInUse(f"a container of sandbox {id} exists: another process's, or one to be swept")
        await self.prepare(spec.image)
        name = self._image(spec.image)
        body = container(spec, image=name, marks=marks, owner=self._owner, settings=self._settings)
        try:
            made = await self._call(
                "POST",
                "/containers/create",
                what=f"a container of {name}",
                parameters={"name": f"rollmill-{id}"},
                body=body,
                deadline_s=math.inf,
            )
        except Refused as error:
            if error.status == 409:
                raise SandboxIdInUse(
                    f"a container of sandbox {id} exists: another process's, or one to be swept ({error.words})"
                ) from error
            if error.status == 404:
                raise ImageError(f"the image {name!r} is gone: {error.words}") from error
            if error.status in (400, 500):
                # The daemon refuses an option that this machine lacks with either; nothing was made.
                raise SandboxError(f"the daemon makes no such container: {error.words}") from error
            raise
        with understood("a container"):
            return Found(ref=ref_of(made["Id"]), marks=marks, state=SandboxState.STARTING)

    async def enter(self, found: Found, spec: SandboxSpec) -> ContainerGuest:
        """Start a container unless it runs."""
        if found.state is SandboxState.STARTING:
            try:
                await self._call("POST", f"/containers/{found.ref}/start", what="the start of a container")
            except Refused as error:
                if error.status == 404:
                    raise Gone(f"the container is gone: {error.words}") from error
                raise SandboxError(f"a container cannot be started: {error.words}. Has the image /bin/sh?") from error
        if found.access:
            await self._take_over(found)
        disks = self._settings.writable if self._settings.read_only_root else ()
        return ContainerGuest(self._http, socket=self._socket, container=found.ref, disks=disks)

    async def _take_over(self, found: Found) -> None:
        """Write this process into a container's name, so that no sweep takes it for its maker's, who may have ended."""
        name = found.access["name"]
        if owner_now(name, found.marks) == self._owner:
            return
        try:
            await self._call(
                "POST",
                f"/containers/{found.ref}/rename",
                what="to take a container over",
                parameters={"name": adopted_name(name, self._owner)},
            )
        except Refused as error:
            if error.status == 404:
                raise Gone(f"the container is gone: {error.words}") from error
            raise

    async def protections_of(self, found: Found) -> frozenset[Protection]:
        """Return what the daemon shows that keeps a container from its host."""
        if self._info is None:
            self._info = await self._call("GET", "/info", what="what the daemon can do") or {}
        shown = await self._call("GET", f"/containers/{found.ref}/json", what="a look at a container")
        return protections_of(shown, self._info or {})

    async def find(self, marks: Mapping[str, str]) -> list[Found]:
        """Return the containers with these marks, those that have stopped among them."""
        wanted = [f"{name}={value}" for name, value in marks.items()] or [marking.ID]
        shown = await self._call(
            "GET",
            "/containers/json",
            what="the list of containers",
            parameters={"all": "1", "filters": json.dumps({"label": wanted})},
        )
        return [
            Found(
                ref=ref_of(one["Id"]),
                marks=marks_of(one.get("Labels") or {}),
                state=_STATES.get(str(one.get("State")), SandboxState.DEAD),
                access={"name": str((one.get("Names") or ["/"])[0]).removeprefix("/")},
            )
            for one in shown or []
        ]

    async def explain(self, found: Found) -> Death | None:
        """Return how a container ended: by its memory cap, by its wall limit, or otherwise."""
        try:
            shown = await self._call("GET", f"/containers/{found.ref}/json", what="a look at a container")
        except Refused as error:
            if error.status == 404:
                return death(DeathReason.PROVIDER_LOST, detail="its container was removed by somebody else")
            raise
        state = shown.get("State") or {}
        if state.get("Running") or state.get("Status") == "created":
            return None
        if state.get("OOMKilled"):
            return death(DeathReason.OUT_OF_MEMORY, detail="the container's memory cap was reached")
        code = state.get("ExitCode")
        if code == 0:
            return death(DeathReason.POLICY_WALL, detail="its first process slept until its wall limit")
        return death(DeathReason.EXITED, detail=f"the container's first process ended with {code}")

    async def kill(self, found: Found) -> None:
        """Remove a container, and wait until it is gone."""
        while True:
            try:
                await self._call(
                    "DELETE",
                    f"/containers/{found.ref}",
                    what="the end of a container",
                    parameters={"force": "1", "v": "1"},
                )
                return
            except Refused as error:
                if error.status == 404:
                    return
                if error.status != 409:
                    raise
            await asyncio.sleep(_LOOK_S)  # another removal is on its way

    async def set_ttl(self, found: Found, ttl_s: float) -> None:
        """Do nothing: a container has no time limit that can be moved."""

    async def pause(self, found: Found) -> None:
        """Freeze it."""
        await self._freeze(found, "pause")

    async def resume(self, found: Found, *, ttl_s: float) -> ContainerGuest | None:
        """Let it go on."""
        await self._freeze(found, "unpause")
        return None

    async def _freeze(self, found: Found, verb: str) -> None:
        try:
            await self._call("POST", f"/containers/{found.ref}/{verb}", what=f"to {verb} a container")
        except Refused as error:
            if error.status == 404:
                raise Gone(f"the container is gone: {error.words}") from error
            if error.status != 409 and f"already {verb}d" not in error.words.lower():
                raise

    async def keep(self, found: Found, *, name: str) -> str:
        """Make an image of its files."""
        parameters = {"container": found.ref, "repo": _SNAPSHOTS, "tag": name, "pause": "1"}
        try:
            await self._call("POST", "/commit", what="an image of a container", parameters=parameters, body={})
        except Refused as error:
            if error.status == 404:
                raise Gone(f"the container is gone: {error.words}") from error
            raise
        return f"{_SNAPSHOTS}:{name}"

    async def kept(self, name: str) -> str | None:
        """Return the image's name if it is there."""
        image = f"{_SNAPSHOTS}:{name}"
        return image if await self._has(image) else None

    async def forget(self, image: str) -> None:
        """Remove the image's name; its layers stay as long as a container is made of them."""
        try:
            await self._call("DELETE", f"/images/{image}", what="the end of a snapshot", parameters={"force": "1"})
        except Refused as error:
            if error.status != 404:
                raise

    async def orphans(self) -> list[Found]:
        """Return the containers that nobody owns any more."""
        found = await self.find({})
        owners = {one.ref: owner_now(one.access["name"], one.marks) for one in found}
        alive = {owner: is_alive(owner) for owner in owners.values() if owner is not None}
        now, boot = time.time(), boot_id()
        return [
            one
            for one in found
            if is_orphan(one.marks, owner=owners[one.ref], now_wall_s=now, boot_id=boot, alive=alive)
        ]

    async def close(self) -> None:
        """Let go of all connections."""
        await self._http.close()


class DockerProvider(HostedProvider[DockerDriver]):
    """Sandboxes as containers of Docker or Podman.

    Args:
        settings: how they are made.
    """

    def __init__(self, settings: DockerSettings | None = None) -> None:
        settings = DockerSettings() if settings is None else settings
        super().__init__(DockerDriver(settings), settings)
        self._swept: asyncio.Task[tuple[str, ...]] | None = None

    async def create(
        self, spec: SandboxSpec, *, id: str, labels: Mapping[str, str] | None = None, lease: Lease
    ) -> HostedSandbox:
        """Start a sandbox; the first one waits for a sweep of what others left."""
        if self._swept is None:
            self._swept = asyncio.get_running_loop().create_task(self.sweep())
        await asyncio.shield(self._swept)
        return await super().create(spec, id=id, labels=labels, lease=lease)

    async def close(self) -> None:
        """End every sandbox of this provider and let go of all connections."""
        if self._swept is not None:
            self._swept.cancel()
            await asyncio.gather(self._swept, return_exceptions=True)
        await super().close()

    async def sweep(self) -> tuple[str, ...]:
        """Remove the containers of owners that ended on this machine, and those past their wall limit.

        Returns:
            Their ids. What could not be removed is left for the next sweep, and logged.
        """
        removed = []
        try:
            async with asyncio.timeout(self._settings.end_s):
                for found in await self.driver.orphans():
                    await self.driver.kill(found)
                    removed.append(found.marks.get(marking.ID, found.ref))
        except (RollmillError, TimeoutError) as error:
            _log.warning("a sweep of containers ended early, after %d: %s", len(removed), error or "out of time")
        return tuple(removed)
