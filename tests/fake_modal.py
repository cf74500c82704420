"""A module that looks like Modal's SDK, version 1.6, as far as the adapter uses it, over any provider of sandboxes.

Modal's protocol is meant for its SDK alone, so the fake stands behind the SDK's names, not behind its network.
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
    def __init__(self, ref: str, sandbox: Any, options: dict[str, Any]) -> None:
        self.object_id = ref
        self.sandbox = sandbox
        self.options = options
        for name in ("exec", "terminate", "poll", "get_tags"):
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

    async def _terminate(self) -> None:
        await self.sandbox.kill()

    async def _poll(self) -> int | None:
        return None if self.sandbox.death is None else 137

    async def _get_tags(self) -> dict[str, str]:
        return self.options["tags"]


class FakeModal:
    """The module."""

    def __init__(self, engine: Provider) -> None:
        self._engine = engine
        self.sandboxes: dict[str, FakeModalSandbox] = {}
        self.failures: list[tuple[str, Exception]] = []
        self.App = types.SimpleNamespace(lookup=Both(self._lookup))
        self.Image = types.SimpleNamespace(from_registry=lambda name: f"image:{name}")
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
        if options["image"] == "image:nothing":
            raise ImageBuildError("the image could not be pulled")
        if any(one.options["name"] == options["name"] for one in self.sandboxes.values() if one.sandbox.death is None):
            raise AlreadyExistsError(options["name"])
        assert options["block_network"] is True
        assert all(len(name) <= 64 and len(value) <= 256 for name, value in options["tags"].items())
        ref = f"sb-{new_id()}"
        lease = Lease(owner="fake", ttl_s=float(options["timeout"]))
        sandbox = await self._engine.create(engine_spec(), id=ref, lease=lease)
        self.sandboxes[ref] = FakeModalSandbox(ref, sandbox, options)
        self._fail("after")
        return self.sandboxes[ref]

    async def _from_id(self, ref: str) -> FakeModalSandbox:
        if ref not in self.sandboxes:
            raise NotFoundError(ref)
        return self.sandboxes[ref]

    async def _list(self, *, app_id: str, tags: dict[str, str] | None) -> AsyncIterator[FakeModalSandbox]:
        assert app_id == "ap-rollmill"
        for one in list(self.sandboxes.values()):
            if one.sandbox.death is None and (tags or {}).items() <= one.options["tags"].items():
                yield one
