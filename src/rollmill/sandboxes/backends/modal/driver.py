"""Modal through its own SDK, which speaks a protocol that only it is meant to speak.

Follows the SDK `modal`, version 1.6. Its asynchronous calls are the attributes `aio`. A sandbox's time limit cannot be
moved, so it is the wall limit or the service's own, whichever is shorter, and leases are this process's. A snapshot of
its files is an image there, published under a name that follows from the snapshot's id.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rollmill.errors import (
    ConfigError,
    ImageError,
    MissingExtraError,
    RollmillError,
    SandboxError,
    SandboxExhausted,
    SandboxIdInUse,
    SandboxRetryable,
    SandboxUnsupported,
    Unauthenticated,
)
from rollmill.sandboxes.backends.hosted import marks as marking
from rollmill.sandboxes.backends.hosted.driver import Command, Exit, Found, Gone, Lost, Output, ref_of
from rollmill.sandboxes.backends.hosted.provider import HostedProvider
from rollmill.sandboxes.backends.hosted.settings import ClaimedIsolation, HostedSettings
from rollmill.sandboxes.backends.hosted.shell import announced, launched
from rollmill.sandboxes.backends.hosted.streams import ShellGuest, ShellProcess, begun
from rollmill.sandboxes.backends.http import CutOff
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

_MIB = 1024**2
_RETRY_AFTER_S = 5.0
_MOST_LIFE_S = 86_400.0
_INPUT_CHUNK_BYTES = 256 * 1024
_TIMED_OUT = 124
_IMAGE_ID = "im-"
_CAPPED = f"{marking.PREFIX}capped"
"""Marks a sandbox that the service ends before its wall limit."""

_SHORT = frozenset({marking.ID, marking.OWNER, marking.SPEC, _CAPPED})


class ModalSettings(HostedSettings, frozen=True, kw_only=True):
    """How to use Modal. The account comes from the SDK's own configuration (`MODAL_TOKEN_ID`, `MODAL_TOKEN_SECRET`).

    Attributes:
        app: name of the app that sandboxes belong to; made if it is missing.
        image: what stands for `HostImage`, by its registry's name, or by its id at Modal (`im-...`).
        isolation: what keeps a sandbox from its host there: gVisor, as the service documents it.
        internet: whether sandboxes may reach the internet.
        kept_s: how long the service keeps a snapshot that nobody deletes.
    """

    app: str = "rollmill"
    image: str = "python:3.12-slim"
    isolation: IsolationLevel = IsolationLevel.OWN_KERNEL
    internet: bool = False
    kept_s: float = 30 * 86_400.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token is not None:
            raise ConfigError("Modal takes its tokens from the SDK's configuration; give no `token` here")
        if not 1 <= self.kept_s < math.inf:
            raise ConfigError(f"kept_s is {self.kept_s}; it must be at least 1 and finite")


def load_sdk() -> Any:
    """Return the SDK.

    Raises:
        MissingExtraError: if it is not installed.
    """
    try:
        import modal  # pyright: ignore[reportMissingImports]
        import modal.experimental  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise MissingExtraError(package="modal", purpose="the backend Modal", extra="modal") from error
    return modal


def explain_error(error: Exception, *, what: str) -> RollmillError | None:
    """Return what an exception of the SDK means, `None` for one that is not the SDK's.

    Example:
        >>> class ResourceExhaustedError(Exception): pass
        >>> type(explain_error(ResourceExhaustedError("full"), what="a sandbox")).__name__
        'SandboxRetryable'
    """
    names = {one.__name__ for one in type(error).__mro__}
    words = f"Modal, {what}: {error}"
    if names & {"SandboxTerminatedError", "SandboxTimeoutError", "NotFoundError"}:
        return Gone(words)
    if "ResourceExhaustedError" in names:
        return SandboxRetryable(f"{words}; try again after {_RETRY_AFTER_S:g} s", after_s=_RETRY_AFTER_S)
    if names & {"AuthError", "PermissionDeniedError"}:
        return Unauthenticated(f"{words}. Set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or run `modal token new`")
    if "AlreadyExistsError" in names:
        return SandboxIdInUse(words)
    if "ImageBuildError" in names:
        return ImageError(words)
    if "ConflictError" in names:
        # What the SDK says of a sandbox that has finished, in words of the service: whether it has is asked for then.
        return CutOff(words)
    if names & {"ConnectionError", "ServiceError", "InternalError", "TimeoutError", "ClientClosed", "StreamTerminated"}:
        return CutOff(f"{words}. Whether it was carried out is unknown")
    if names & {"Error", "GRPCError"}:
        return SandboxError(words)
    return None


class ModalProcess(ShellProcess):
    """A program that runs at Modal."""

    def __init__(self, guest: ModalGuest, process: Any) -> None:
        super().__init__(guest)
        self._process = process
        self._queue: asyncio.Queue[Output | Exception | None] = asyncio.Queue(maxsize=64)
        self._early: list[Output] = []
        loop = asyncio.get_running_loop()
        self._readers = [loop.create_task(self._read(name)) for name in ("stdout", "stderr")]

    async def _read(self, stream: str) -> None:
        try:
            async for data in getattr(self._process, stream):
                await self._queue.put(Output(stream=stream, data=data))
        except Exception as error:
            await self._queue.put(error)
        await self._queue.put(None)

    async def _next(self) -> Output | None:
        event = await self._queue.get()
        if isinstance(event, Exception):
            known = explain_error(event, what="the output of a program")
            if known is None:
                raise event
            raise Lost(str(known)) if isinstance(known, CutOff) else known from event
        return event

    async def began(self) -> None:
        """Wait for the first line, which holds its process id."""
        line = b""
        ended = 0
        while b"\n" not in line:
            event = await self._next()
            if event is None:
                ended += 1
                if ended == len(self._readers):
                    said = b"".join(one.data for one in self._early)[:500].decode(errors="replace")
                    words = f"a program was not started: {said.strip() or 'no words'}. Has the image /bin/sh?"
                    raise SandboxExhausted(words) if "fork" in said else SandboxError(words)
            elif event.stream == "stdout":
                line += event.data
            else:
                self._early.append(event)
        self.pid, rest = announced(line)
        self._early.insert(0, Output(stream="stdout", data=rest))
        self._open = len(self._readers) - ended

    async def events(self) -> AsyncIterator[Output | Exit]:
        """Yield output, and the exit."""
        for event in self._early:
            yield event
        while self._open:
            event = await self._next()
            if event is None:
                self._open -= 1
            else:
                yield event
        code = await call(self._process.wait, what="the end of a program")
        yield Exit(code=int(code))

    async def send(self, data: bytes) -> None:
        """Give it input."""
        for start in range(0, len(data), _INPUT_CHUNK_BYTES):
            self._process.stdin.write(data[start : start + _INPUT_CHUNK_BYTES])
            await call(self._process.stdin.drain, what="input of a program")

    async def end_input(self) -> None:
        """End its input."""
        self._process.stdin.write_eof()
        await call(self._process.stdin.drain, what="the end of a program's input")

    async def close(self) -> None:
        """Stop reading; the program goes on."""
        for one in self._readers:
            one.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)


class ModalGuest(ShellGuest):
    """A sandbox's inside.

    Args:
        sandbox: the SDK's.
    """

    def __init__(self, sandbox: Any) -> None:
        super().__init__()
        self._sandbox = sandbox

    async def start(self, command: Command) -> ModalProcess:
        """Start a program, and wait until it has begun."""
        if command.user not in ("", "root", "0"):
            raise SandboxUnsupported(f"Modal runs every program as root, not as {command.user!r}", capability="users")
        process = ModalProcess(
            self,
            await call(
                self._sandbox.exec,
                *launched(command, announce=True),
                what=f"the start of {command.argv[0]}",
                env=dict(command.env),
                workdir="/",
                text=False,
            ),
        )
        return await begun(process)


async def call(function: Any, *arguments: Any, what: str, **named: Any) -> Any:
    """Return what a call of the SDK returns; its errors become those of the tree."""
    try:
        return await function.aio(*arguments, **named)
    except asyncio.CancelledError:
        raise
    except Exception as error:
        known = explain_error(error, what=what)
        if known is None:
            raise
        raise known from error


class ModalDriver(ClaimedIsolation):
    """The adapter.

    Args:
        settings: how to use it.
        sdk: the SDK's module.
    """

    product = "Modal"
    capabilities = Capabilities(
        labels=True,
        files_snapshot=True,
        fork=True,
        max_lifetime_s=_MOST_LIFE_S,
        limits=("memory_bytes", "cpus", "cpu_s", "wall_s", "exec_s", "output_bytes", "open_files"),
    )

    def __init__(self, settings: ModalSettings, sdk: Any) -> None:
        super().__init__(settings.isolation)
        self._settings = settings
        self._sdk = sdk
        self._app: Any = None

    def check(self, image: Image) -> None:
        """Accept every reference: whether it can be pulled shows when a sandbox is made."""

    async def prepare(self, image: Image) -> None:
        """Do nothing: an image is built by the first sandbox of it."""

    async def _own_app(self) -> Any:
        if self._app is None:
            self._app = await call(self._sdk.App.lookup, self._settings.app, what="the app", create_if_missing=True)
        return self._app

    async def create(self, spec: SandboxSpec, *, id: str, marks: Mapping[str, str], ttl_s: float) -> Found:
        """Make a sandbox."""
        name = spec.image.name if isinstance(spec.image, NamedImage) else self._settings.image
        # Tags are short: what an owner that ended knew of limits is not among them.
        tags = {key: value for key, value in marks.items() if key in _SHORT or not key.startswith(marking.PREFIX)}
        if spec.limits.wall_s > _MOST_LIFE_S:
            tags[_CAPPED] = "true"
        app = await self._own_app()
        try:
            sandbox = await self._create(name, app=app, id=id, tags=tags, spec=spec, ttl_s=ttl_s)
        except Gone as error:
            raise ImageError(f"Modal has no image {name!r} (any more): {error}") from error
        return Found(ref=ref_of(sandbox.object_id), marks={**marks, **tags})

    async def _create(
        self, name: str, *, app: Any, id: str, tags: Mapping[str, str], spec: SandboxSpec, ttl_s: float
    ) -> Any:
        limits = spec.limits
        memory_mib = math.ceil(limits.memory_bytes / _MIB)
        return await call(
            self._sdk.Sandbox.create,
            what=f"a sandbox of {name}",
            app=app,
            name=f"rollmill-{id}",
            tags=tags,
            image=self._image(name),
            timeout=math.ceil(min(ttl_s, _MOST_LIFE_S)),
            cpu=(limits.cpus, limits.cpus),
            memory=(memory_mib, memory_mib),
            block_network=not self._settings.internet,
        )

    def _image(self, name: str) -> Any:
        images = self._sdk.Image
        return images.from_id(name) if name.startswith(_IMAGE_ID) else images.from_registry(name)

    async def _sandbox(self, found: Found) -> Any:
        return await call(self._sdk.Sandbox.from_id, found.ref, what=f"a look at {found.ref}")

    async def enter(self, found: Found, spec: SandboxSpec) -> ModalGuest:
        """Return its inside; its first program waits until it runs."""
        guest = ModalGuest(await self._sandbox(found))
        await guest.run_script("exit 0")
        return guest

    async def find(self, marks: Mapping[str, str]) -> list[Found]:
        """Return those that run with these tags."""
        asked = {key: value for key, value in marks.items() if key in _SHORT or not key.startswith(marking.PREFIX)}
        app = await self._own_app()
        found = []
        try:
            async for one in self._sdk.Sandbox.list.aio(app_id=app.app_id, tags=asked or None):
                tags = await call(one.get_tags, what=f"the tags of {one.object_id}")
                found.append(Found(ref=one.object_id, marks=dict(tags), state=SandboxState.READY))
        except Exception as error:
            known = error if isinstance(error, RollmillError) else explain_error(error, what="the list of sandboxes")
            if known is None or known is error:
                raise
            raise known from error
        return found

    async def explain(self, found: Found) -> Death | None:
        """Return how it ended."""
        try:
            code = await call((await self._sandbox(found)).poll, what=f"a look at {found.ref}")
        except Gone as error:
            return death(DeathReason.PROVIDER_LOST, detail=str(error))
        if code is None:
            return None
        if code == _TIMED_OUT and _CAPPED in found.marks:
            detail = f"it lived {_MOST_LIFE_S:g} s, the most that Modal gives, which is less than its wall limit"
            return death(DeathReason.PROVIDER_LOST, detail=detail)
        if code == _TIMED_OUT:
            return death(DeathReason.POLICY_WALL, detail="its time limit at Modal, which is its wall limit")
        return death(DeathReason.PROVIDER_LOST, detail=f"it ended at Modal with {code}")

    async def kill(self, found: Found) -> None:
        """Terminate it, and wait until it has stopped."""
        try:
            await call((await self._sandbox(found)).terminate, what=f"the end of {found.ref}", wait=True)
        except Gone:
            return

    async def set_ttl(self, found: Found, ttl_s: float) -> None:
        """Never called: the time limit cannot be moved."""

    async def pause(self, found: Found) -> None:
        """Never called: it is not offered."""

    async def resume(self, found: Found, *, ttl_s: float) -> ModalGuest | None:
        """Never called: it is not offered."""
        return None

    # -- snapshots ---------------------------------------------------------------------------------------------------

    async def keep(self, found: Found, *, name: str) -> str:
        """Make an image of its files, and publish it under the name."""
        what = f"a snapshot of {found.ref}"
        limits_s = {"timeout": math.ceil(self._settings.start_s), "ttl": math.ceil(self._settings.kept_s)}
        image = await call((await self._sandbox(found)).snapshot_filesystem, what=what, **limits_s)
        await call(image.publish, name, what=f"the name {name} of an image")
        return str(image.object_id)

    async def kept(self, name: str) -> str | None:
        """Look for an image by the name under which it was published."""
        try:
            app = await self._own_app()
            image = await call(self._sdk.Image.from_name(name).build, app, what=f"the image {name}")
        except Gone:
            return None
        return str(image.object_id)

    async def forget(self, image: str) -> None:
        """Delete an image."""
        try:
            await call(self._sdk.experimental.image_delete, image, what=f"the end of image {image}")
        except Gone:
            return

    async def close(self) -> None:
        """Do nothing: the SDK keeps one client for the process."""


class ModalProvider(HostedProvider[ModalDriver]):
    """Sandboxes of Modal.

    Args:
        settings: how to use it.
        sdk: the SDK's module, imported if `None`.
    """

    def __init__(self, settings: ModalSettings | None = None, sdk: Any = None) -> None:
        settings = ModalSettings() if settings is None else settings
        super().__init__(ModalDriver(settings, load_sdk() if sdk is None else sdk), settings)
