"""The routes of files: the file system service, and up- and downloads. Thin; what a path is stands in `inside`."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import secrets
import zlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rollmill.errors import RollmillError, SandboxFileError
from rollmill.sandboxes.service.accounts import Account, absolute
from rollmill.sandboxes.service.answers import http_answer
from rollmill.sandboxes.service.connect import RpcProblem
from rollmill.sandboxes.service.exchange import (
    Call,
    caller_of,
    linger,
    pieces_of,
    sandbox_id_of,
    streaming,
    unary,
    with_keepalive,
)
from rollmill.sandboxes.service.inside import METADATA_GROUP, Inside, metadata_of_file
from rollmill.sandboxes.service.law import READ, WRITE, HttpProblem, holder_of, signature, why_expired
from rollmill.sandboxes.service.multipart import boundary_of, parts_of
from rollmill.sandboxes.service.node import Node
from rollmill.sandboxes.service.served import Served
from rollmill.sandboxes.service.watching import MOST_WATCHERS, Watcher
from rollmill.sandboxes.service.wire import (
    Empty,
    EntryResponse,
    EventType,
    FileEvent,
    ListDirRequest,
    ListDirResponse,
    Message,
    MoveRequest,
    PathRequest,
    WatcherEvents,
    WatcherId,
    WatchReply,
    WatchRequest,
)

_KEEPALIVE = WatchReply(keepalive=Empty())
_NEW_MODE = 0o644
_DEEPEST = 64
_FORM_BYTES = 1024 * 1024
"""That a form may have beside its files."""
_AT_ONCE_BYTES = 1024 * 1024
_UNPACKED_AT_ONCE = 1024 * 1024
_GZIP = 31
_METADATA = "x-metadata-"
_BYTES = "application/octet-stream"


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
            unary(f"{base}/CreateWatcher", WatchRequest, self._create_watcher, node=node),
            unary(f"{base}/GetWatcherEvents", WatcherId, self._watcher_events, node=node),
            unary(f"{base}/RemoveWatcher", WatcherId, self._remove_watcher, node=node),
            streaming(f"{base}/WatchDir", WatchRequest, self._watch, node=node),
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

    # -- watchers ----------------------------------------------------------------------------------------------------

    async def _watcher(self, call: Call, message: WatchRequest) -> tuple[str, Watcher]:
        served = call.served
        path = absolute(message.path, await call.account())
        directory = await (await self._inside(served)).directory(path)
        if len(served.watchers) >= MOST_WATCHERS:
            raise RpcProblem("resource_exhausted", f"{MOST_WATCHERS} directories are watched; end a watcher first")
        watcher = await Watcher.start(
            served.sandbox, directory, recursive=message.recursive, with_entries=message.include_entry
        )
        name = secrets.token_hex(8)
        served.watchers[name] = watcher
        self._node.run(watcher.pump(), name=f"watcher of {directory} in sandbox {served.id}")
        try:
            await watcher.wait_ready()
        except BaseException:
            await self._close(served, name)
            raise
        return name, watcher

    async def _create_watcher(self, call: Call, message: WatchRequest) -> WatcherId:
        name, _ = await self._watcher(call, message)
        return WatcherId(watcher_id=name)

    async def _watcher_events(self, call: Call, message: WatcherId) -> WatcherEvents:
        watcher = self._found(call, message)
        events = await watcher.taken()
        return WatcherEvents(events=tuple([await self._told(call, watcher, event) for event in events]))

    async def _told(self, call: Call, watcher: Watcher, event: FileEvent) -> FileEvent:
        """Return an event with what is at its path now, if that was asked for and something is."""
        if not watcher.with_entries or event.type in (EventType.REMOVE, EventType.RENAME):
            return event
        try:
            entry = await (await self._inside(call.served)).entry(posixpath.join(watcher.directory, event.name))
        except RpcProblem:
            return event  # gone already
        return msgspec.structs.replace(event, entry=entry)

    async def _remove_watcher(self, call: Call, message: WatcherId) -> Empty:
        self._found(call, message)
        await self._close(call.served, message.watcher_id)
        return Empty()

    def _found(self, call: Call, message: WatcherId) -> Watcher:
        watcher = call.served.watchers.get(message.watcher_id)
        if watcher is None:
            raise RpcProblem("not_found", f"no watcher {message.watcher_id!r} is here; it was removed, or never made")
        return watcher

    async def _close(self, served: Served, name: str) -> None:
        watcher = served.watchers.pop(name, None)
        if watcher is not None:
            await watcher.close()

    async def _watch(self, call: Call, message: WatchRequest) -> AsyncGenerator[Message, None]:
        timeout_s = call.timeout_s
        deadline_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        name, watcher = await self._watcher(call, message)

        async def next_reply() -> WatchReply:
            return WatchReply(filesystem=await self._told(call, watcher, await watcher.next()))

        replies = with_keepalive(next_reply, keepalive=_KEEPALIVE, every_s=call.keepalive_s(), deadline_s=deadline_s)
        try:
            yield WatchReply(start=Empty())
            async with contextlib.aclosing(replies):
                async for reply in replies:
                    yield reply
        finally:
            await self._close(call.served, name)

    # -- up and down -------------------------------------------------------------------------------------------------

    async def _download(self, request: Request) -> Response:
        try:
            served = await self._caller(request, operation=READ)
            path = absolute(request.query_params.get("path", ""), await self._account(request, served))
            return await self._answer(served, path)
        except RollmillError as error:
            return http_answer(error)

    async def _answer(self, served: Served, path: str) -> Response:
        """Return a file: a small one whole, a large one as it is read."""
        pieces = aiter(served.sandbox.read_stream(path))
        head = bytearray()
        try:
            while len(head) < _AT_ONCE_BYTES:
                piece = await anext(pieces, None)
                if piece is None:
                    return Response(bytes(head), media_type=_BYTES)
                head += piece
        except SandboxFileError as error:
            raise await self._why(served, path, error) from error
        return StreamingResponse(_chained(bytes(head), pieces), media_type=_BYTES)

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
            metadata = self._metadata(request)
            boundary = boundary_of(request.headers.get("content-type", ""))
            if boundary is None:
                written = [await self._take_file(request, served, account, metadata)]
            else:
                written = await self._take_form(request, served, account, metadata, boundary=boundary)
        except RollmillError as error:
            await linger(request)
            return http_answer(error)
        return Response(msgspec.json.encode(written), media_type="application/json")

    def _metadata(self, request: Request) -> dict[str, str]:
        """Return what the files of an upload are to carry.

        Raises:
            HttpProblem: 501 where files carry nothing, 400 for what a header cannot say.
        """
        found = {
            name.removeprefix(_METADATA): text for name, text in request.headers.items() if name.startswith(_METADATA)
        }
        if found and not self._node.files_carry_words:
            raise HttpProblem(501, "metadata of files is not kept by this backend; put it in a file of its own")
        for name, text in found.items():
            if not name or not (text.isascii() and (text.isprintable() or not text)):
                raise HttpProblem(400, f"metadata {name!r} of a file is not printable ASCII under a name")
        return found

    async def _take_file(
        self, request: Request, served: Served, account: Account, metadata: dict[str, str]
    ) -> dict[str, Any]:
        """Take one file as it comes."""
        path = request.query_params.get("path", "")
        if not path:
            raise HttpProblem(400, "the upload does not say where the file is to be: add ?path=")
        encoding, most = request.headers.get("content-encoding", ""), served.spec.limits.disk_bytes
        body = pieces_of(request, max_bytes=most, wait_s=self._node.settings.body_s)
        async with contextlib.aclosing(unpacked(body, encoding, most=most)) as pieces:
            return await self._write(served, absolute(path, account), pieces, account, metadata)

    async def _take_form(
        self, request: Request, served: Served, account: Account, metadata: dict[str, str], *, boundary: bytes
    ) -> list[dict[str, Any]]:
        """Take a form of files; it is held in memory until all of it is there."""
        settings, path = self._node.settings, request.query_params.get("path", "")
        room = settings.max_upload_bytes + _FORM_BYTES
        body = pieces_of(request, max_bytes=room, wait_s=settings.body_s)
        encoding = request.headers.get("content-encoding", "")
        async with contextlib.aclosing(unpacked(body, encoding, most=room)) as pieces:
            whole = b"".join([piece async for piece in pieces])
        files = [(path or part.filename, part) for part in parts_of(whole, boundary=boundary) if part.name == "file"]
        if not files:
            raise HttpProblem(400, "the form has no field `file`")
        if path and len(files) > 1:
            raise HttpProblem(400, f"the form has {len(files)} files for one path; name each by its filename")
        if not all(name for name, _ in files):
            raise HttpProblem(400, "a file of the form has no filename, and there is no ?path=")
        return [
            await self._write(served, absolute(name, account), one_piece(part.data), account, metadata)
            for name, part in files
        ]

    async def _write(
        self,
        served: Served,
        path: str,
        pieces: AsyncIterable[bytes],
        account: Account,
        metadata: dict[str, str],
    ) -> dict[str, Any]:
        found = await (await self._inside(served)).find(path)
        mode = _NEW_MODE if found is None or found.kind != "file" else found.mode
        try:
            await served.sandbox.write_stream(path, pieces, mode=mode, user=account.name)
            if metadata or (found is not None and metadata_of_file(found)):  # what a file carried is of its old content
                await served.sandbox.set_attributes(path, METADATA_GROUP, metadata, user=account.name)
        except SandboxFileError as error:
            raise await self._why(served, path, error) from error
        told = {"metadata": metadata} if metadata else {}
        return {"name": posixpath.basename(path), "path": path, "type": "file", **told}

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


async def unpacked(body: AsyncGenerator[bytes, None], encoding: str, *, most: int) -> AsyncGenerator[bytes, None]:
    """Yield a body as it was before it was packed.

    Raises:
        HttpProblem: 415 if it is packed in an unknown way, 400 if it is damaged, 413 if more comes out than may.
    """
    if encoding not in ("", "identity", "gzip"):
        raise HttpProblem(415, f"the content encoding {encoding!r} is not read; send gzip, or the file as it is")
    unpacker, total = zlib.decompressobj(wbits=_GZIP), 0
    async with contextlib.aclosing(body):
        async for piece in body:
            if encoding != "gzip":
                yield piece
                continue
            while piece:
                try:
                    data = unpacker.decompress(piece, _UNPACKED_AT_ONCE)
                except zlib.error as error:
                    raise HttpProblem(400, f"the body is no gzip: {error}") from error
                total += len(data)
                if total > most:
                    raise HttpProblem(413, f"the body unpacks to more than {most} bytes; send less at once")
                if data:
                    yield data
                piece = unpacker.unconsumed_tail
    if encoding == "gzip" and not unpacker.eof:
        raise HttpProblem(400, "the gzip of the body is cut off")


async def one_piece(data: bytes) -> AsyncGenerator[bytes, None]:
    """Yield one piece, if it is any."""
    if data:
        yield data


async def _chained(head: bytes, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    yield head
    async for piece in pieces:
        yield piece
