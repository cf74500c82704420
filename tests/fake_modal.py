"""A module that looks like Modal's SDK, version 1.6, as far as the adapter uses it, over any provider of sandboxes.

Modal's protocol is meant for its SDK alone, so this fake stands behind the SDK's names and needs no SDK; with the SDK
itself, `modal_server` stands behind its network.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Callable
from typing import Any

from fake_e2b import GIB, engine_spec
from rollmill.errors import SandboxDead, SandboxError
from rollmill.sandboxes import Lease, Provider
from sandbox_builders import new_id


class Error(Exception):
    pass


class NotFoundError(Error):
    pass


class AlreadyExistsError(Error):
    pass


class ResourceExhaustedError(Error):
    pass


class AuthError(Error):
    pass


class ImageBuildError(Error):
    pass


class ServiceError(Error):
    pass


class SandboxTerminatedError(Error):
    pass


class Both:
    """A call as the SDK has it: blocking by itself, which is never to be used here, and asynchronous by `aio`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.aio = function

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a blocking call of the SDK, on the event loop")


class FakeStdin:
    def __init__(self, process: Any) -> None:
        self._process = process
        self._buffer = b""
        self._eof = False
        self.drain = Both(self._drain)

    def write(self, data: bytes) -> None:
        assert isinstance(data, bytes)
        self._buffer += data

    def write_eof(self) -> None:
        self._eof = True

    async def _drain(self) -> None:
        data, self._buffer = self._buffer, b""
        await self._process.write_stdin(data)
        if self._eof:
            await self._process.close_stdin()


class FakeContainerProcess:
    """A program: its two outputs are apart, as two streams that are read at the same time."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self._queues: dict[str, asyncio.Queue[bytes | None]] = {name: asyncio.Queue() for name in ("stdout", "stderr")}
        self._task = asyncio.ensure_future(self._spread())
        self.stdin = FakeStdin(process)
        self.stdout = self._read("stdout")
        self.stderr = self._read("stderr")
        self.wait = Both(self._wait)

    async def _spread(self) -> None:
        async for stream, data in self._process.output():
            self._queues[stream].put_nowait(data)
        for queue in self._queues.values():
            queue.put_nowait(None)

    async def _read(self, name: str) -> AsyncIterator[bytes]:
        while (data := await self._queues[name].get()) is not None:
            yield data

    async def _wait(self) -> int:
        try:
            code = (await self._process.wait()).exit_code
        except SandboxDead as error:
            raise SandboxTerminatedError(str(error)) from error
        return code if code >= 0 else 128 - code


class FakeModalSandbox:
    def __init__(self, ref: str, sandbox: Any, options: dict[str, Any], modal: FakeModal) -> None:
        self._modal = modal
        self.object_id = ref
        self.sandbox = sandbox
        self.options = options
        for name in ("exec", "terminate", "poll", "get_tags", "snapshot_filesystem"):
            setattr(self, name, Both(getattr(self, f"_{name}")))

    async def _exec(self, *argv: str, env: dict[str, str], workdir: str, text: bool) -> FakeContainerProcess:
        assert text is False
        try:
            process = await self.sandbox.start_process(list(argv), env=env, cwd=workdir, output_cap_bytes=GIB)
        except SandboxDead as error:
            raise NotFoundError(str(error)) from error
        except SandboxError as error:
            raise Error(str(error)) from error
        return FakeContainerProcess(process)

    async def _terminate(self, *, wait: bool) -> None:
        assert wait
        await self.sandbox.kill()

    async def _poll(self) -> int | None:
        return None if self.sandbox.death is None else 137

    async def _get_tags(self) -> dict[str, str]:
        return self.options["tags"]

    async def _snapshot_filesystem(self, *, ttl: int, **limits: int) -> FakeImage:
        assert limits.keys() == {"timeout"}
        try:
            ref = await self.sandbox.snapshot(id=new_id())
        except SandboxDead as error:
            raise NotFoundError(str(error)) from error
        image = f"im-{new_id()}"
        self._modal.images[image] = ref
        return FakeImage(self._modal, image)


class FakeImage:
    def __init__(self, modal: FakeModal, object_id: str = "", name: str = "") -> None:
        self._modal = modal
        self._name = name
        self.object_id = object_id
        self.publish = Both(self._publish)
        self.build = Both(self._build)

    async def _publish(self, name: str) -> None:
        self._modal.names[name] = self.object_id

    async def _build(self, app: Any) -> FakeImage:
        found = self._modal.names.get(self._name)
        if found not in self._modal.images:
            raise NotFoundError(self._name)
        return FakeImage(self._modal, found or "")


class FakeModal:
    """The module."""

    def __init__(self, engine: Provider) -> None:
        self._engine = engine
        self.sandboxes: dict[str, FakeModalSandbox] = {}
        self.failures: list[tuple[str, Exception]] = []
        self.App = types.SimpleNamespace(lookup=Both(self._lookup))
        self.images: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.Image = types.SimpleNamespace(
            from_registry=lambda name: f"image:{name}",
            from_id=lambda name: name,
            from_name=lambda name: FakeImage(self, name=name),
        )
        self.experimental = types.SimpleNamespace(image_delete=Both(self._image_delete))
        self.Sandbox = types.SimpleNamespace(
            create=Both(self._create), from_id=Both(self._from_id), list=Both(self._list)
        )
        self.server = types.SimpleNamespace(stop=self._stop)

    async def _stop(self) -> None:
        return

    async def _lookup(self, name: str, *, create_if_missing: bool) -> Any:
        assert create_if_missing
        return types.SimpleNamespace(app_id=f"ap-{name}")

    def _fail(self, when: str) -> None:
        for one in self.failures:
            if one[0] == when:
                self.failures.remove(one)
                raise one[1]

    async def _create(self, *, app: Any, **options: Any) -> FakeModalSandbox:
        self._fail("before")
        kept = self.images.get(options["image"])
        if options["image"].startswith("im-") and kept is None:
            raise NotFoundError(options["image"])
        if options["image"] == "image:nothing":
            raise ImageBuildError("the image could not be pulled")
        if any(one.options["name"] == options["name"] for one in self.sandboxes.values() if one.sandbox.death is None):
            raise AlreadyExistsError(options["name"])
        assert options["block_network"] is True
        assert all(len(name) <= 64 and len(value) <= 256 for name, value in options["tags"].items())
        ref = f"sb-{new_id()}"
        lease = Lease(owner="fake", ttl_s=float(options["timeout"]))
        if kept is None:
            sandbox = await self._engine.create(engine_spec(), id=ref, lease=lease)
        else:
            sandbox = await self._engine.restore(kept, id=ref, lease=lease)
        self.sandboxes[ref] = FakeModalSandbox(ref, sandbox, options, self)
        self._fail("after")
        return self.sandboxes[ref]

    async def _image_delete(self, image: str) -> None:
        if image not in self.images:
            raise NotFoundError(image)
        await self._engine.delete_snapshots([self.images.pop(image).snapshot_id])

    async def _from_id(self, ref: str) -> FakeModalSandbox:
        if ref not in self.sandboxes:
            raise NotFoundError(ref)
        return self.sandboxes[ref]

    async def _list(self, *, app_id: str, tags: dict[str, str] | None) -> AsyncIterator[FakeModalSandbox]:
        assert app_id == "ap-rollmill"
        for one in list(self.sandboxes.values()):
            if one.sandbox.death is None and (tags or {}).items() <= one.options["tags"].items():
                yield one
