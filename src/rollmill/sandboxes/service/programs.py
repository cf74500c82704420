"""Running programs of one sandbox, each heard by any number of callers.

| who | waits for | until |
|---|---|---|
| the pump of a program | its output and its end | its timeout, or the sandbox's end |
| the pump | room at each hearer | `stream_stall_s`: then that hearer is dropped, and the program goes on |
| a hearer | the next piece | its caller's own deadline |
| whoever killed it | its end | one second |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable

from rollmill.errors import RollmillError, SandboxDead
from rollmill.sandboxes.protocol import Process
from rollmill.sandboxes.records import Record
from rollmill.sandboxes.service.connect import RpcProblem
from rollmill.sandboxes.service.law import end_event
from rollmill.sandboxes.service.problems import rpc_problem_of
from rollmill.sandboxes.service.wire import DataEvent, EndEvent, ProcessConfig, ProcessInfo, Selector

_log = logging.getLogger(__name__)
_PIECES = 64
"""That may wait at one hearer; an agent sends 128 KiB at most in one."""

_GONE_S = 1.0

Piece = DataEvent | EndEvent | RpcProblem


class Hearer:
    """One caller that hears a program from now on."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue(_PIECES)
        self.left = False

    async def next(self) -> Piece:
        """Return the next piece; `EndEvent` and `RpcProblem` are the last."""
        return await self._pieces.get()

    async def take(self, piece: Piece, *, stall_s: float) -> None:
        """Give it a piece; one that takes nothing for too long hears no more."""
        if self.left:
            return
        try:
            async with asyncio.timeout(stall_s):
                await self._pieces.put(piece)
        except TimeoutError:
            self._drop(RpcProblem("resource_exhausted", f"this stream was not read for {stall_s:g} s; connect again"))

    def leave(self) -> None:
        """Hear no more, and keep nobody waiting."""
        self.left = True
        self._empty()

    def _drop(self, problem: RpcProblem) -> None:
        self.leave()
        self._pieces.put_nowait(problem)

    def _empty(self) -> None:
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                self._pieces.get_nowait()


class Asked(Record, frozen=True, kw_only=True):
    """What a caller asked to run.

    Attributes:
        config: as asked.
        tag: a name of the caller's.
        terminal: whether it runs in one.
    """

    config: ProcessConfig
    tag: str | None = None
    terminal: bool = False


class Program:
    """One program that runs.

    Args:
        process: the backend's.
        asked: what was asked for.
        stall_s: see `ServiceSettings.stream_stall_s`.
        on_end: called when it has ended.
    """

    def __init__(self, process: Process, asked: Asked, *, stall_s: float, on_end: Callable[[Program], None]) -> None:
        self.process = process
        self.asked = asked
        self._stall_s, self._on_end = stall_s, on_end
        self._hearers: set[Hearer] = set()
        self._has_ended = asyncio.Event()

    @property
    def pid(self) -> int:
        """Return its process id inside."""
        return self.process.pid

    def info(self) -> ProcessInfo:
        """Return it as lists show it."""
        return ProcessInfo(config=self.asked.config, pid=self.pid, tag=self.asked.tag)

    def hear(self) -> Hearer:
        """Return a new hearer, which gets everything from now on."""
        hearer = Hearer()
        self._hearers.add(hearer)
        return hearer

    def forget(self, hearer: Hearer) -> None:
        """Let a hearer go."""
        self._hearers.discard(hearer)
        hearer.leave()

    async def pump(self) -> None:
        """Pass everything on until its end, which is passed on too."""
        try:
            last = await self._pass_on()
        except SandboxDead as error:
            # Not in the words for a sandbox that was not found: callers then ask for its health, and say what they see.
            # Older versions of the public SDK pass these words on; newer ones say them themselves.
            why = "the sandbox was killed or reached its end of life before the stream ended"
            last = RpcProblem("unavailable", f"{why}: {error}")
        except RollmillError as error:
            last = rpc_problem_of(error)
        self._on_end(self)
        self._has_ended.set()
        await self._tell(last)

    async def kill(self) -> None:
        """Kill it, and give it a moment to be gone: whoever looks after this finds no process that is still dying."""
        await self.process.signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # what the kernel holds longer goes when it lets go
            async with asyncio.timeout(_GONE_S):
                await self._has_ended.wait()

    async def _pass_on(self) -> Piece:
        async for stream, data in self.process.output():
            await self._tell(self._data(stream, data))
        return end_event(await self.process.wait())

    def _data(self, stream: str, data: bytes) -> DataEvent:
        if self.asked.terminal:
            return DataEvent(pty=data)
        return DataEvent(stderr=data) if stream == "stderr" else DataEvent(stdout=data)

    async def _tell(self, piece: Piece) -> None:
        for hearer in list(self._hearers):
            await hearer.take(piece, stall_s=self._stall_s)


class Programs:
    """The programs of one sandbox that callers started.

    Args:
        stall_s: see `ServiceSettings.stream_stall_s`.
        earlier: what became of those before this start of the sandbox, in words.
    """

    def __init__(self, *, stall_s: float, earlier: str = "") -> None:
        self._stall_s, self._earlier = stall_s, earlier or "it may have ended"
        self._running: dict[int, Program] = {}

    def add(self, process: Process, asked: Asked) -> Program:
        """Take a program that was started; its pump is the caller's to run."""
        program = Program(process, asked, stall_s=self._stall_s, on_end=self._ended)
        self._running[program.pid] = program
        return program

    def _ended(self, program: Program) -> None:
        if self._running.get(program.pid) is program:
            del self._running[program.pid]

    def infos(self) -> tuple[ProcessInfo, ...]:
        """Return those that run, in order of their start."""
        return tuple(program.info() for program in self._running.values())

    def find(self, selector: Selector | None) -> Program:
        """Return the program that a caller means.

        Raises:
            RpcProblem: `invalid_argument` if it means none, `not_found` if that one does not run.
        """
        if selector is None or (selector.pid is None and selector.tag is None):
            raise RpcProblem("invalid_argument", "the call does not say which program it is for: give a pid or a tag")
        if selector.pid is not None and (program := self._running.get(selector.pid)) is not None:
            return program
        if selector.tag is not None:
            for program in self._running.values():
                if program.asked.tag == selector.tag:
                    return program
        name = f"pid {selector.pid}" if selector.pid is not None else f"tag {selector.tag!r}"
        raise RpcProblem("not_found", f"no program with {name} runs here; {self._earlier}")
