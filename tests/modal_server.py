"""Modal's control plane and its workers' command routers on loopback, for its own SDK, over any provider of sandboxes.

The messages are the SDK's (`modal_proto`, version 1.6), so that client says what it says to the service. Methods that
are not here answer `UNIMPLEMENTED`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
import types
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpclib.const
import grpclib.server
from grpclib import GRPCError, Status
from modal_proto import api_pb2
from modal_proto import task_command_router_pb2 as router_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from fake_e2b import GIB, engine_spec
from rollmill.errors import SandboxDead, SandboxError
from rollmill.sandboxes import DeathReason, Lease, Provider
from sandbox_builders import new_id

TOKEN_ID, TOKEN_SECRET = "ak-loopback", "as-loopback"
_AHEAD_BYTES = 1024**2
_SUCCESS = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)


def _refuse(status: Status, words: str) -> GRPCError:
    return GRPCError(status, words)


def _jwt() -> str:
    parts = ({"alg": "none"}, {"exp": time.time() + 3600})
    return ".".join(base64.urlsafe_b64encode(json.dumps(one).encode()).decode().rstrip("=") for one in parts) + ".x"


class Stream:
    """One output of a program, kept until it was read; whoever is too far ahead waits."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._before = 0
        self._changed = asyncio.Condition()
        self._over = False

    async def put(self, data: bytes) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._data) < _AHEAD_BYTES)
            self._data += data
            self._changed.notify_all()

    async def close(self) -> None:
        async with self._changed:
            self._over = True
            self._changed.notify_all()

    async def read(self, offset: int) -> bytes:
        """Return what comes from an offset on, nothing at its end."""
        async with self._changed:
            if offset < self._before:
                raise _refuse(Status.DATA_LOSS, "what was read once is not kept")
            del self._data[: offset - self._before]
            self._before = offset
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._data or self._over)
            return bytes(self._data[: 64 * 1024])


class Execution:
    """A program."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.streams = {
            router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT: Stream(),
            router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR: Stream(),
        }
        self.written = 0
        self.task = asyncio.get_running_loop().create_task(self._spread())

    async def _spread(self) -> None:
        out, err = self.streams.values()
        with contextlib.suppress(SandboxDead):
            async for stream, data in self.process.output():
                await (out if stream == "stdout" else err).put(data)
        for one in (out, err):
            await one.close()


class ModalSandbox:
    def __init__(self, ref: str, sandbox: Any, request: Any) -> None:
        self.object_id = ref
        self.sandbox = sandbox
        self.request = request
        self.made_s = time.time()
        self.terminated = False
        self.executions: dict[str, Execution] = {}

    @property
    def tags(self) -> dict[str, str]:
        return {one.tag_name: one.tag_value for one in self.request.tags}

    def result(self) -> api_pb2.GenericResult:
        kinds = api_pb2.GenericResult
        death = self.sandbox.death
        if death is None:
            return kinds()
        if death.reason in (DeathReason.POLICY_WALL, DeathReason.LEASE_EXPIRED):
            return kinds(status=kinds.GENERIC_STATUS_TIMEOUT)
        status = kinds.GENERIC_STATUS_TERMINATED if self.terminated else kinds.GENERIC_STATUS_FAILURE
        return kinds(status=status, exitcode=137)


class Control:
    """The control plane; methods have the names of its calls."""

    def __init__(self, server: ModalServer) -> None:
        self._server = server

    def check(self, stream: Any) -> None:
        """Refuse whoever shows no token."""
        shown = stream.metadata
        if (shown.get("x-modal-token-id"), shown.get("x-modal-token-secret")) != (TOKEN_ID, TOKEN_SECRET):
            raise _refuse(Status.UNAUTHENTICATED, "no such token")

    async def ClientHello(self, _: Any) -> Any:
        return api_pb2.ClientHelloResponse()

    async def AuthTokenGet(self, _: Any) -> Any:
        return api_pb2.AuthTokenGetResponse(token=_jwt())

    async def AppGetOrCreate(self, request: Any) -> Any:
        return api_pb2.AppGetOrCreateResponse(app_id=f"ap-{request.app_name}")

    async def EnvironmentGetOrCreate(self, _: Any) -> Any:
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    # -- images ------------------------------------------------------------------------------------------------------

    async def ImageGetOrCreate(self, request: Any) -> Any:
        first = request.image.dockerfile_commands[0]
        if first == "FROM nothing":
            failed = api_pb2.GenericResult(
                status=api_pb2.GenericResult.GENERIC_STATUS_FAILURE, exception="manifest unknown"
            )
            return api_pb2.ImageGetOrCreateResponse(image_id="im-broken", result=failed)
        self._server.images.setdefault(f"im-{first.removeprefix('FROM ')}", None)
        return api_pb2.ImageGetOrCreateResponse(image_id=f"im-{first.removeprefix('FROM ')}", result=_SUCCESS)

    async def ImageFromId(self, request: Any) -> Any:
        if request.image_id not in self._server.images:
            raise _refuse(Status.NOT_FOUND, f"no image {request.image_id}")
        return api_pb2.ImageFromIdResponse(image_id=request.image_id)

    async def ImagePublish(self, request: Any) -> Any:
        self._server.names[request.tag] = request.image_id
        return api_pb2.ImagePublishResponse()

    async def ImageGetByTag(self, request: Any) -> Any:
        image = self._server.names.get(request.tag)
        if image not in self._server.images:
            raise _refuse(Status.NOT_FOUND, f"no image {request.tag}")
        return api_pb2.ImageGetByTagResponse(image_id=image)

    async def ImageDelete(self, request: Any) -> Any:
        if request.image_id not in self._server.images:
            raise _refuse(Status.NOT_FOUND, f"no image {request.image_id}")
        kept = self._server.images.pop(request.image_id)
        if kept is not None:
            await self._server.engine.delete_snapshots([kept.snapshot_id])
        return api_pb2.google_dot_protobuf_dot_empty__pb2.Empty()

    # -- sandboxes ---------------------------------------------------------------------------------------------------

    def _one(self, ref: str) -> ModalSandbox:
        if ref not in self._server.sandboxes:
            raise _refuse(Status.NOT_FOUND, f"no sandbox {ref}")
        return self._server.sandboxes[ref]

    def _alive(self) -> list[ModalSandbox]:
        return [one for one in self._server.sandboxes.values() if one.sandbox.death is None]

    async def SandboxCreateV2(self, request: Any) -> Any:
        wanted = request.definition
        if self._server.busy:
            self._server.busy -= 1
            raise _refuse(Status.RESOURCE_EXHAUSTED, "too many sandboxes")
        if any(one.request.definition.name == wanted.name for one in self._alive()):
            raise _refuse(Status.ALREADY_EXISTS, f"a sandbox has the name {wanted.name}")
        assert wanted.network_access.network_access_type == api_pb2.NetworkAccess.BLOCKED
        kept = self._server.images[wanted.image_id]
        ref, engine = f"sb-{new_id()}", self._server.engine
        lease = Lease(owner="fake", ttl_s=float(wanted.timeout_secs))
        if kept is None:
            sandbox = await engine.create(engine_spec(), id=ref, lease=lease)
        else:
            sandbox = await engine.restore(kept, id=ref, lease=lease)
        self._server.sandboxes[ref] = ModalSandbox(ref, sandbox, request)
        return api_pb2.SandboxCreateV2Response(
            sandbox_id=ref, task_id=f"ta-{ref}", metadata=api_pb2.SandboxHandleMetadata(app_id=request.app_id)
        )

    async def SandboxGetFromNameV2(self, request: Any) -> Any:
        for one in self._alive():
            if (f"ap-{request.app_name}", request.sandbox_name) == (one.request.app_id, one.request.definition.name):
                return api_pb2.SandboxGetFromNameResponse(sandbox_id=one.object_id)
        raise _refuse(Status.NOT_FOUND, f"no sandbox {request.sandbox_name}")

    async def SandboxWaitV2(self, request: Any) -> Any:
        one = self._one(request.sandbox_id)
        ends = asyncio.get_running_loop().time() + request.timeout
        while one.sandbox.death is None and asyncio.get_running_loop().time() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return api_pb2.SandboxWaitResponse(result=one.result())

    async def SandboxListV2(self, request: Any) -> Any:
        wanted = {one.tag_name: one.tag_value for one in request.tags}
        found = sorted(self._alive(), key=lambda one: -one.made_s)
        rows = [
            api_pb2.SandboxInfo(id=one.object_id, created_at=one.made_s)
            for one in found
            if one.request.app_id == request.app_id
            and wanted.items() <= one.tags.items()
            and (not request.before_timestamp or one.made_s < request.before_timestamp)
        ]
        return api_pb2.SandboxListResponse(sandboxes=rows[: self._server.page])

    async def SandboxTagsGetV2(self, request: Any) -> Any:
        return api_pb2.SandboxTagsGetResponse(tags=self._one(request.sandbox_id).request.tags)

    async def SandboxTerminateV2(self, request: Any) -> Any:
        one = self._one(request.sandbox_id)
        one.terminated = True
        # The service stops it after its answer.
        self._server.spawn(one.sandbox.kill())
        return api_pb2.SandboxTerminateResponse(existing_result=one.result())

    async def SandboxGetTaskIdV2(self, request: Any) -> Any:
        one = self._one(request.sandbox_id)
        if one.sandbox.death is not None:
            return api_pb2.SandboxGetTaskIdResponse(task_result=one.result())
        return api_pb2.SandboxGetTaskIdResponse(task_id=f"ta-{one.object_id}")

    async def SandboxGetCommandRouterAccess(self, request: Any) -> Any:
        one = self._one(request.sandbox_id)
        if one.sandbox.death is not None:
            raise _refuse(Status.FAILED_PRECONDITION, "the sandbox has finished")
        return api_pb2.SandboxGetCommandRouterAccessResponse(url=self._server.url, jwt=_jwt())


class Router:
    """The command router of a worker."""

    def __init__(self, server: ModalServer) -> None:
        self._server = server

    def check(self, stream: Any) -> None:
        """Refuse whoever shows no token."""
        if not str(stream.metadata.get("authorization", "")).startswith("Bearer "):
            raise _refuse(Status.UNAUTHENTICATED, "no token")

    def _task(self, task_id: str) -> ModalSandbox:
        one = self._server.sandboxes.get(task_id.removeprefix("ta-"))
        if one is None or one.sandbox.death is not None:
            raise _refuse(Status.NOT_FOUND, f"no task {task_id}")
        return one

    def _execution(self, request: Any) -> Execution:
        found = self._task(request.task_id).executions.get(request.exec_id)
        if found is None:
            raise _refuse(Status.NOT_FOUND, f"no program {request.exec_id}")
        return found

    async def TaskExecStart(self, request: Any) -> Any:
        one = self._task(request.task_id)
        env = {name: value for source in request.secret_sources for name, value in source.env.contents.items()}
        if request.exec_id not in one.executions:
            try:
                process = await one.sandbox.start_process(
                    list(request.command_args), env=env, cwd=request.workdir or None, output_cap_bytes=GIB
                )
            except SandboxDead as error:
                raise _refuse(Status.NOT_FOUND, str(error)) from error
            except SandboxError as error:
                raise _refuse(Status.FAILED_PRECONDITION, str(error)) from error
            one.executions[request.exec_id] = Execution(process)
        return router_pb2.TaskExecStartResponse()

    async def TaskExecStdioRead(self, request: Any) -> AsyncIterator[Any]:
        stream = self._execution(request).streams[request.file_descriptor]
        offset = request.offset
        while data := await stream.read(offset):
            yield router_pb2.TaskExecStdioReadResponse(data=data)
            offset += len(data)
        self._task(request.task_id)  # an output that its sandbox's end cut off is no whole one

    async def TaskExecWait(self, request: Any) -> Any:
        execution = self._execution(request)
        try:
            code = (await execution.process.wait()).exit_code
        except SandboxDead as error:
            raise _refuse(Status.NOT_FOUND, str(error)) from error
        if code < 0:
            return router_pb2.TaskExecWaitResponse(signal=-code)
        return router_pb2.TaskExecWaitResponse(code=code)

    async def TaskExecStdinWrite(self, request: Any) -> Any:
        execution = self._execution(request)
        assert request.offset == execution.written
        execution.written += len(request.data)
        try:
            if request.data:
                await execution.process.write_stdin(request.data)
            if request.eof:
                await execution.process.close_stdin()
        except SandboxDead as error:
            raise _refuse(Status.NOT_FOUND, str(error)) from error
        except SandboxError as error:
            raise _refuse(Status.FAILED_PRECONDITION, str(error)) from error
        return router_pb2.TaskExecStdinWriteResponse()

    async def TaskSnapshotFilesystem(self, request: Any) -> Any:
        one = self._task(request.task_id)
        try:
            ref = await one.sandbox.snapshot(id=new_id())
        except SandboxDead as error:
            raise _refuse(Status.NOT_FOUND, str(error)) from error
        image = f"im-{uuid.uuid4().hex[:22]}"
        self._server.images[image] = ref
        return router_pb2.TaskSnapshotFilesystemResponse(image_id=image)


class _Face:
    """A service of gRPC of which some methods are there."""

    def __init__(self, base: Any, methods: Any, seen: list[str]) -> None:
        self._handlers: dict[str, Any] = {}
        for path, one in base.__mapping__(_Nothing()).items():
            name = path.rpartition("/")[2]
            call = _called(getattr(methods, name, None), methods.check, one.cardinality, name, seen)
            self._handlers[path] = grpclib.const.Handler(call, one.cardinality, one.request_type, one.reply_type)

    def __mapping__(self) -> dict[str, Any]:
        return self._handlers


class _Nothing:
    def __getattr__(self, name: str) -> None:
        return None


def _called(method: Any, check: Any, cardinality: Any, name: str, seen: list[str]) -> Any:
    async def call(stream: Any) -> None:
        if method is None:
            raise _refuse(Status.UNIMPLEMENTED, f"{name} is not here")
        check(stream)
        seen.append(name)
        request = await stream.recv_message()
        if cardinality is grpclib.const.Cardinality.UNARY_STREAM:
            async for reply in method(request):
                await stream.send_message(reply)
        else:
            await stream.send_message(await method(request))

    return call


class _Grpc(grpclib.server.Server):
    """A server that closes the connections it accepted; the library's leaves them to their other ends."""

    def __init__(self, faces: list[Any]) -> None:
        super().__init__(faces)
        self._accepted: list[Any] = []

    def _protocol_factory(self) -> Any:
        protocol = super()._protocol_factory()
        self._accepted.append(protocol)
        return protocol

    async def end(self) -> None:
        self.close()
        for one in self._accepted:
            one.connection.close()
        await self.wait_closed()
        await asyncio.sleep(0)  # transports close themselves in the next turn


class ModalServer:
    """The service."""

    def __init__(self, engine: Provider, *, page: int = 100) -> None:
        self.engine = engine
        self.page = page
        self.images: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.sandboxes: dict[str, ModalSandbox] = {}
        self.busy = 0
        self.seen: list[str] = []
        self.url = ""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._grpc: _Grpc | None = None
        self.server = types.SimpleNamespace(stop=self.stop)

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def start(self) -> None:
        faces: list[Any] = [
            _Face(ModalClientBase, Control(self), self.seen),
            _Face(TaskCommandRouterBase, Router(self), self.seen),
        ]
        self._grpc = _Grpc(faces)
        await self._grpc.start("127.0.0.1", 0)
        sockets = self._grpc._server.sockets  # type: ignore[union-attr]
        self.url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)
        for one in self.sandboxes.values():
            for execution in one.executions.values():
                execution.task.cancel()
        if self._grpc is not None:
            await self._grpc.end()
