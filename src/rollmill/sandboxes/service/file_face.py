"""The routes of files: the file system service, and up- and downloads. Thin; what a path is stands in `inside`."""

from __future__ import annotations

import posixpath
import zlib

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollmill.errors import RollmillError, SandboxFileError
from rollmill.sandboxes.service.accounts import Account, absolute
from rollmill.sandboxes.service.connect import RpcProblem
from rollmill.sandboxes.service.exchange import Call, body_of, caller_of, linger, sandbox_id_of, unary
from rollmill.sandboxes.service.inside import Inside
from rollmill.sandboxes.service.law import READ, WRITE, HttpProblem, holder_of, signature, why_expired
from rollmill.sandboxes.service.multipart import boundary_of, parts_of
from rollmill.sandboxes.service.node import Node, Served
from rollmill.sandboxes.service.problems import http_answer, http_problem_of
from rollmill.sandboxes.service.wire import (
    Empty,
    EntryResponse,
    ListDirRequest,
    ListDirResponse,
    MoveRequest,
    PathRequest,
)

_NEW_MODE = 0o644
_DEEPEST = 64
_FORM_BYTES = 1024 * 1024
"""That a form may have beside its files."""


class FileFace:
    """Files of all sandboxes of a node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def routes(self) -> list[Route]:
        """Return the routes."""
        node, base = self._node, "/filesystem.Filesystem"
        return [
            unary(f"{base}/Stat", PathRequest, self._stat, node=node),
            unary(f"{base}/MakeDir", PathRequest, self._make_dir, node=node),
            unary(f"{base}/Move", MoveRequest, self._move, node=node),
            unary(f"{base}/ListDir", ListDirRequest, self._list, node=node),
            unary(f"{base}/Remove", PathRequest, self._remove, node=node),
            Route("/files", self._download, methods=["GET"]),
            Route("/files", self._upload, methods=["POST"]),
        ]

    # -- the file system service -------------------------------------------------------------------------------------

    async def _inside(self, served: Served) -> Inside:
        return Inside(served.sandbox, await served.accounts.names())

    async def _stat(self, call: Call, message: PathRequest) -> EntryResponse:
        path = absolute(message.path, await call.account())
        return EntryResponse(entry=await (await self._inside(call.served)).entry(path))

    async def _make_dir(self, call: Call, message: PathRequest) -> EntryResponse:
        account = await call.account()
        inside = await self._inside(call.served)
        return EntryResponse(entry=await inside.make_dir(absolute(message.path, account), account))

    async def _move(self, call: Call, message: MoveRequest) -> EntryResponse:
        account = await call.account()
        source, destination = absolute(message.source, account), absolute(message.destination, account)
        return EntryResponse(entry=await (await self._inside(call.served)).move(source, destination, account))

    async def _list(self, call: Call, message: ListDirRequest) -> ListDirResponse:
        if message.depth > _DEEPEST:
            raise RpcProblem("invalid_argument", f"depth is {message.depth}, {_DEEPEST} at most")
        path = absolute(message.path, await call.account())
        inside = await self._inside(call.served)
        return ListDirResponse(entries=await inside.list(path, depth=message.depth or 1))

    async def _remove(self, call: Call, message: PathRequest) -> Empty:
        await (await self._inside(call.served)).remove(absolute(message.path, await call.account()))
        return Empty()

    # -- up and down -------------------------------------------------------------------------------------------------

    async def _download(self, request: Request) -> Response:
        try:
            served = await self._caller(request, operation=READ)
            account = await self._account(request, served)
            data = await self._read(served, absolute(request.query_params.get("path", ""), account))
        except RollmillError as error:
            return http_answer(error)
        return Response(data, media_type="application/octet-stream")

    async def _read(self, served: Served, path: str) -> bytes:
        try:
            return await served.sandbox.read(path, max_bytes=self._node.settings.max_upload_bytes)
        except SandboxFileError as error:
            raise await self._why(served, path, error) from error

    async def _why(self, served: Served, path: str, error: SandboxFileError) -> RollmillError:
        """Return what is wrong with a path, in the words that callers know."""
        _, found = await (await self._inside(served)).follow(path)
        if found is None:
            return HttpProblem(404, f"path {path!r} does not exist")
        if found.kind == "directory":
            return HttpProblem(400, f"path {path!r} is a directory")
        return error

    async def _upload(self, request: Request) -> Response:
        try:
            served = await self._caller(request, operation=WRITE)
            account = await self._account(request, served)
            written = []
            for path, data in await self._files(request):
                written.append(await self._write(served, absolute(path, account), data, account))
        except RollmillError as error:
            if http_problem_of(error).status == 413:
                await linger(request)
            return http_answer(error)
        return Response(msgspec.json.encode(written), media_type="application/json")

    async def _files(self, request: Request) -> list[tuple[str, bytes]]:
        """Return (path, content) of what is uploaded: a form of files, or one file as it is."""
        settings, path = self._node.settings, request.query_params.get("path", "")
        boundary = boundary_of(request.headers.get("content-type", ""))
        room = settings.max_upload_bytes + (0 if boundary is None else _FORM_BYTES)
        body = await body_of(request, max_bytes=room, wait_s=settings.body_s)
        body = _unpacked(body, request.headers.get("content-encoding", ""), most=room)
        if boundary is None:
            if not path:
                raise HttpProblem(400, "the upload does not say where the file is to be: add ?path=")
            return [(path, body)]
        files = [
            (path or part.filename, part.data) for part in parts_of(body, boundary=boundary) if part.name == "file"
        ]
        if not files:
            raise HttpProblem(400, "the form has no field `file`")
        if path and len(files) > 1:
            raise HttpProblem(400, f"the form has {len(files)} files for one path; name each by its filename")
        if not all(name for name, _ in files):
            raise HttpProblem(400, "a file of the form has no filename, and there is no ?path=")
        return files

    async def _write(self, served: Served, path: str, data: bytes, account: Account) -> dict[str, str]:
        found = await (await self._inside(served)).find(path)
        mode = _NEW_MODE if found is None or found.kind != "file" else found.mode
        try:
            await served.sandbox.write(path, data, mode=mode, user=account.name)
        except SandboxFileError as error:
            raise await self._why(served, path, error) from error
        return {"name": posixpath.basename(path), "path": path, "type": "file"}

    async def _caller(self, request: Request, *, operation: str) -> Served:
        """Return the sandbox of an up- or download: its token is shown, or the link is signed with it."""
        given = request.query_params.get("signature", "")
        if not given:
            return await caller_of(request, self._node)
        path, user = request.query_params.get("path", ""), request.query_params.get("username", "")
        expiration = request.query_params.get("signature_expiration", "")
        named = sandbox_id_of(request)
        chosen = [one for one in self._node.all().values() if named in ("", one.id)]
        expected = [
            (one, signature(path=path, operation=operation, user=user, token=one.token, expiration=expiration))
            for one in chosen
        ]
        served = holder_of(given, expected)
        if served is None:
            raise HttpProblem(401, "invalid signature")
        why = why_expired(expiration, now_s=self._node.wall_s())
        if why:
            raise HttpProblem(401, why)
        return await self._node.for_traffic(served.id)

    async def _account(self, request: Request, served: Served) -> Account:
        return await served.accounts.find(request.query_params.get("username") or self._node.default_user)


def _unpacked(body: bytes, encoding: str, *, most: int) -> bytes:
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise HttpProblem(415, f"the content encoding {encoding!r} is not read; send gzip, or the file as it is")
    unpacker = zlib.decompressobj(wbits=31)
    try:
        data = unpacker.decompress(body, most + 1)
    except zlib.error as error:
        raise HttpProblem(400, f"the body is no gzip: {error}") from error
    if len(data) > most:
        raise HttpProblem(413, f"the body unpacks to more than {most} bytes; send less at once")
    if not unpacker.eof:
        raise HttpProblem(400, "the gzip of the body is cut off")
    return data
