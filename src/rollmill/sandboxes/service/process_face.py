"""The routes of programs: start, hear, input, signals. Thin; what a program is stands in `programs`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollmill.errors import RollmillError
from rollmill.sandboxes.records import FileInfo
from rollmill.sandboxes.service.accounts import Account, absolute
from rollmill.sandboxes.service.answers import rpc_answer
from rollmill.sandboxes.service.background import looked_at
from rollmill.sandboxes.service.connect import Codec, Envelopes, RpcProblem, codec_of, end_of_stream, envelope
from rollmill.sandboxes.service.exchange import Call, caller_of, pieces_of, streaming, unary, with_keepalive
from rollmill.sandboxes.service.inside import Inside
from rollmill.sandboxes.service.node import Node
from rollmill.sandboxes.service.problems import rpc_problem_of
from rollmill.sandboxes.service.programs import Asked, Hearer, Program
from rollmill.sandboxes.service.wire import (
    DataEvent,
    Empty,
    EndEvent,
    InputRequest,
    ListResponse,
    Message,
    ProcessEvent,
    ProcessInput,
    ProcessReply,
    PtySize,
    SelectRequest,
    Signal,
    SignalRequest,
    StartEvent,
    StartRequest,
    StreamedInput,
    UpdateRequest,
)

_SIGNALS = {Signal.SIGTERM: signal.SIGTERM, Signal.SIGKILL: signal.SIGKILL}
_KEEPALIVE = ProcessReply(event=ProcessEvent(keepalive=Empty()))
_MOST_CELLS = 1000


class ProcessFace:
    """Programs of all sandboxes of a node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def routes(self) -> list[Route]:
        """Return the routes."""
        node, base = self._node, "/process.Process"
        return [
            unary(f"{base}/List", Empty, self._list, node=node),
            streaming(f"{base}/Start", StartRequest, self._start, node=node),
            streaming(f"{base}/Connect", SelectRequest, self._connect, node=node),
            unary(f"{base}/Update", UpdateRequest, self._update, node=node),
            unary(f"{base}/SendInput", InputRequest, self._input, node=node),
            Route(f"{base}/StreamInput", self._stream_input, methods=["POST"]),
            unary(f"{base}/SendSignal", SignalRequest, self._signal, node=node),
            unary(f"{base}/CloseStdin", SelectRequest, self._close_stdin, node=node),
        ]

    async def _list(self, call: Call, _: Empty) -> ListResponse:
        return ListResponse(processes=call.served.programs.infos())

    # -- start and hear ----------------------------------------------------------------------------------------------

    async def _start(self, call: Call, message: StartRequest) -> AsyncGenerator[Message, None]:
        config = message.process
        if config is None or not config.cmd:
            raise RpcProblem("invalid_argument", "the call names no program to start")
        size = None if message.pty is None else _size(message.pty.size)
        account = await call.account()
        deadline_s = _deadline_s(call)
        asked = Asked(config=config, tag=message.tag, terminal=size is not None)
        closes = size is None and message.stdin is False
        starting = asyncio.ensure_future(self._started(call, asked, account=account, size=size, closes_stdin=closes))
        # Whoever leaves now leaves a program that runs, and that the list shows.
        program, hearer = await asyncio.shield(looked_at(starting))
        async with contextlib.aclosing(self._heard(call, program, hearer, deadline_s=deadline_s)) as replies:
            async for reply in replies:
                yield reply

    async def _started(
        self, call: Call, asked: Asked, *, account: Account, size: tuple[int, int] | None, closes_stdin: bool
    ) -> tuple[Program, Hearer]:
        served, config = call.served, asked.config
        cwd = await self._directory(call, config.cwd, account)
        process = await served.sandbox.start_process(
            [config.cmd, *config.args],
            cwd=cwd,
            env={**served.envs, **config.envs},
            user=account.name,
            timeout_s=call.timeout_s,
            output_cap_bytes=served.spec.limits.output_bytes,
            pty=size,
        )
        program = served.programs.add(process, asked)
        hearer = program.hear()
        self._node.run(program.pump(), name=f"program {program.pid} of sandbox {served.id}")
        if closes_stdin:
            await process.close_stdin()
        return program, hearer

    async def _directory(self, call: Call, cwd: str | None, account: Account) -> str | None:
        if not cwd:
            return None  # the user's home
        path = absolute(cwd, account)
        _, found = await Inside(call.served.sandbox, await call.served.accounts.names()).follow(path)
        _check_directory(path, found)
        return path

    async def _connect(self, call: Call, message: SelectRequest) -> AsyncGenerator[Message, None]:
        program = call.served.programs.find(message.process)
        replies = self._heard(call, program, program.hear(), deadline_s=_deadline_s(call))
        async with contextlib.aclosing(replies):
            async for reply in replies:
                yield reply

    async def _heard(
        self, call: Call, program: Program, hearer: Hearer, *, deadline_s: float | None
    ) -> AsyncGenerator[ProcessReply, None]:
        """Yield what a program says from now on; it goes on when its hearer leaves."""

        async def next_reply() -> ProcessReply:
            piece = await hearer.next()
            if isinstance(piece, RpcProblem):
                raise piece
            is_data = isinstance(piece, DataEvent)
            return ProcessReply(event=ProcessEvent(data=piece) if is_data else ProcessEvent(end=piece))

        replies = with_keepalive(next_reply, keepalive=_KEEPALIVE, every_s=call.keepalive_s(), deadline_s=deadline_s)
        try:
            yield ProcessReply(event=ProcessEvent(start=StartEvent(pid=program.pid)))
            async with contextlib.aclosing(replies):
                async for reply in replies:
                    yield reply
                    if reply.event is not None and isinstance(reply.event.end, EndEvent):
                        return
        finally:
            program.forget(hearer)

    # -- input and signals -------------------------------------------------------------------------------------------

    async def _update(self, call: Call, message: UpdateRequest) -> Empty:
        program = call.served.programs.find(message.process)
        if message.pty is None or not program.asked.terminal:
            raise RpcProblem("invalid_argument", f"program {program.pid} has no terminal, or the call names no size")
        rows, cols = _size(message.pty.size)
        await program.process.resize(rows, cols)
        return Empty()

    async def _input(self, call: Call, message: InputRequest) -> Empty:
        await _give(call.served.programs.find(message.process), message.input)
        return Empty()

    async def _close_stdin(self, call: Call, message: SelectRequest) -> Empty:
        program = call.served.programs.find(message.process)
        if program.asked.terminal:
            raise RpcProblem("failed_precondition", "a terminal has no end of input; send Ctrl-D (0x04) instead")
        await program.process.close_stdin()
        return Empty()

    async def _signal(self, call: Call, message: SignalRequest) -> Empty:
        number = _SIGNALS.get(message.signal) if isinstance(message.signal, Signal) else message.signal
        if number is None or number not in _SIGNALS.values():
            raise RpcProblem("invalid_argument", f"the signal {message.signal} is not sent; SIGTERM and SIGKILL are")
        program = call.served.programs.find(message.process)
        if number == signal.SIGKILL:
            await program.kill()
        else:
            await program.process.signal(int(number))
        return Empty()

    async def _stream_input(self, request: Request) -> Response:
        """Take a stream of input for one program, in its order."""
        try:
            codec = codec_of(request.headers, stream=True)
            if codec is None:
                raise RpcProblem("unimplemented", "this call takes application/connect+json or +proto")
            call = Call(request, node=self._node, served=await caller_of(request, self._node))
        except RollmillError as error:
            return rpc_answer(error)
        try:
            await self._take_input(call, codec)
            body = envelope(codec.encode(Empty())) + end_of_stream()
        except RollmillError as error:
            body = end_of_stream(rpc_problem_of(error))
        return Response(body, media_type=codec.content_type)

    async def _take_input(self, call: Call, codec: Codec) -> None:
        settings, envelopes = self._node.settings, Envelopes()
        program: Program | None = None
        limit = call.served.spec.limits.memory_bytes
        async with contextlib.aclosing(pieces_of(call.request, max_bytes=limit, wait_s=settings.body_s)) as pieces:
            async for piece in pieces:
                for data in envelopes.feed(piece):
                    message = codec.decode(data, StreamedInput)
                    if message.start is not None:
                        program = call.served.programs.find(message.start.process)
                    elif message.data is not None:
                        if program is None:
                            raise RpcProblem("invalid_argument", "the stream does not begin with the program it is for")
                        await _give(program, message.data.input)
        envelopes.check_empty()


def _deadline_s(call: Call) -> float | None:
    return None if call.timeout_s is None else asyncio.get_running_loop().time() + call.timeout_s


async def _give(program: Program, given: ProcessInput | None) -> None:
    data = None if given is None else (given.pty if program.asked.terminal else given.stdin)
    if data is None:
        kind = "a terminal: send `pty`" if program.asked.terminal else "no terminal: send `stdin`"
        raise RpcProblem("invalid_argument", f"program {program.pid} has {kind}")
    await program.process.write_stdin(data)


def _size(size: PtySize | None) -> tuple[int, int]:
    rows, cols = (24, 80) if size is None else (size.rows or 24, size.cols or 80)
    if not (0 < rows <= _MOST_CELLS and 0 < cols <= _MOST_CELLS):
        raise RpcProblem("invalid_argument", f"a terminal of {rows} rows and {cols} columns; 1 to {_MOST_CELLS} each")
    return rows, cols


def _check_directory(path: str, found: FileInfo | None) -> None:
    if found is None:
        raise RpcProblem("invalid_argument", f"cwd {path!r} does not exist")
    if found.kind != "directory":
        raise RpcProblem("invalid_argument", f"cwd {path!r} is not a directory")
