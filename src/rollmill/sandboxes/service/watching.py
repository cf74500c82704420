"""Watchers of directories: what a small program inside says, kept until somebody asks or heard as it comes.

| who | waits for | until |
|---|---|---|
| whoever makes a watcher | its program's first word | `_START_S` |
| whoever asks what happened | the answer of the program | `_ANSWER_S` |
| a watcher | what its program says | it is removed, its directory is gone, or the sandbox ends |
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections import deque
from pathlib import Path

from rollmill.errors import RollmillError
from rollmill.sandboxes.protocol import Process, Sandbox
from rollmill.sandboxes.service import inotify_program
from rollmill.sandboxes.service.connect import RpcProblem
from rollmill.sandboxes.service.problems import rpc_problem_of
from rollmill.sandboxes.service.wire import EventType, FileEvent

MOST_WATCHERS = 8
"""Of one sandbox: so many the kernel gives to one of its users."""
_MOST_EVENTS = 10_000
_MOST_LINE_BYTES = 64 * 1024
_START_S = 20.0
_ANSWER_S = 10.0
_OUTPUT_BYTES = 64 * 1024**2
_REPEATED = frozenset({EventType.WRITE, EventType.CHMOD})
_SOURCE = Path(inotify_program.__file__)


class Watcher:
    """One directory that is watched.

    Attributes:
        directory: which one.
        with_entries: whether its callers want to know what is at each path, too.
    """

    def __init__(self, process: Process, *, directory: str, with_entries: bool) -> None:
        self.directory, self.with_entries = directory, with_entries
        self._process = process
        self._events: deque[FileEvent] = deque()
        self._told: set[tuple[str, EventType]] = set()
        self._news = asyncio.Event()
        self._asked: deque[asyncio.Future[None]] = deque()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end: RpcProblem | None = None

    @classmethod
    async def start(cls, sandbox: Sandbox, path: str, *, recursive: bool, with_entries: bool) -> Watcher:
        """Start the program of a watcher; its `pump` is the caller's to run."""
        argv = ["python3", "-c", _program(), path, str(int(recursive))]
        process = await sandbox.start_process(argv, cwd="/", user="root", output_cap_bytes=_OUTPUT_BYTES)
        return cls(process, directory=path, with_entries=with_entries)

    async def pump(self) -> None:
        """Take in what the program says until its end."""
        rest = b""
        try:
            async for stream, data in self._process.output():
                if stream != "stdout":
                    continue
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(line)
                if len(rest) > _MOST_LINE_BYTES:
                    raise RpcProblem("internal", "the program of a watcher says more than it can")
            result = await self._process.wait()
            self._finish(_why_ended(result.exit_code, result.stderr))
        except RollmillError as error:
            self._finish(rpc_problem_of(error))

    def _take(self, line: bytes) -> None:
        """Take one line in; it comes from inside, so nothing in it is trusted."""
        try:
            said = json.loads(line)
        except ValueError:
            return
        if not isinstance(said, dict):
            return
        if "error" in said:
            self._finish(RpcProblem("resource_exhausted", f"it cannot be watched: {said['error']}"))
        elif "ready" in said:
            if not self.ready.done():
                self.ready.set_result(None)
        elif "answered" in said:
            if self._asked and not (asked := self._asked.popleft()).done():
                asked.set_result(None)
        elif "overflow" in said:
            self._finish(RpcProblem("resource_exhausted", "too much happened at once, and some of it was lost"))
        elif said.get("type") in EventType.__members__ and isinstance(said.get("name"), str):
            self._add(FileEvent(name=said["name"], type=EventType[said["type"]]))

    def _add(self, event: FileEvent) -> None:
        """Keep an event; of many writes to one file that nobody has asked for yet, one."""
        if event.type in _REPEATED:
            if (event.name, event.type) in self._told:
                return
            self._told.add((event.name, event.type))
        else:
            self._told -= {(event.name, kind) for kind in _REPEATED}
        if len(self._events) >= _MOST_EVENTS:
            self._finish(RpcProblem("resource_exhausted", f"more than {_MOST_EVENTS} events were not asked for"))
            return
        self._events.append(event)
        self._news.set()

    def _finish(self, problem: RpcProblem) -> None:
        self._end = self._end or problem
        if not self.ready.done():
            self.ready.set_exception(self._end)
            self.ready.exception()
        for asked in self._asked:
            if not asked.done():
                asked.set_result(None)
        self._news.set()

    async def wait_ready(self) -> None:
        """Wait until everything that happens is seen.

        Raises:
            RpcProblem: if it cannot be.
        """
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.shield(self.ready)
        except TimeoutError:
            raise RpcProblem("deadline_exceeded", f"the watcher did not begin within {_START_S:g} s") from None

    async def taken(self) -> tuple[FileEvent, ...]:
        """Return what happened since the last question, and all that happened before this one.

        Raises:
            RpcProblem: if it has ended and there is nothing more.
        """
        if self._end is None:
            asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._asked.append(asked)
            await self._process.write_stdin(b"\n")
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await asked
            except TimeoutError:
                text = f"the program of the watcher did not answer within {_ANSWER_S:g} s; the sandbox is too busy"
                raise RpcProblem("unavailable", text) from None
        events = tuple(self._events)
        self._events.clear()
        self._told.clear()
        self._news.clear()
        if not events and self._end is not None:
            raise self._end
        return events

    async def next(self) -> FileEvent:
        """Return the next event.

        Raises:
            RpcProblem: at its end.
        """
        while not self._events:
            if self._end is not None:
                raise self._end
            self._news.clear()
            await self._news.wait()
        event = self._events.popleft()
        self._told.discard((event.name, event.type))
        return event

    async def close(self) -> None:
        """End its program."""
        await self._process.signal(9)


@functools.cache
def _program() -> str:
    return _SOURCE.read_text(encoding="utf-8")


def _why_ended(exit_code: int, stderr: bytes) -> RpcProblem:
    if exit_code == 127:
        return RpcProblem("unimplemented", "a directory is watched by a program in Python, and this image has none")
    if exit_code == 0:
        return RpcProblem("not_found", "the directory that was watched is gone")
    text = stderr.decode("utf-8", "replace").strip()[-500:]
    return RpcProblem("unavailable", f"the program of the watcher ended with {exit_code}: {text}")
