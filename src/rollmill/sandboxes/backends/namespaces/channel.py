"""The owner's side of an agent: requests out, replies in, on the event loop.

What comes in is not trusted: every message is checked for its shape, and output is bounded here too. An agent that
talks nonsense is reported once, and its sandbox is to be ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from rollmill.errors import SandboxBusy, SandboxError, SandboxExhausted, SandboxFileError, SandboxUnsupported
from rollmill.sandboxes.guest.frames import BadFrame, Parser, encode
from rollmill.sandboxes.records import ExecResult

_MOST_REPLY_HEAD_BYTES = 64 * 1024
_MOST_REPLY_BYTES = 8 * 1024 * 1024


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Any message of an agent; fields that do not belong to its `op` have their defaults."""

    op: str
    n: int = 0
    kind: str = ""
    message: str = ""
    step: str = ""
    errno: int = 0
    protections: tuple[str, ...] = ()
    pid: int = 0
    stream: int = 0
    size: int = 0
    truncated: bool = False
    code: int = 0
    killed_by: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    memory_bytes: int = 0
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    disk_bytes: int = 0
    inodes: int = 0
    processes: int = 0
    changed: bool = False
    alive: bool = False


class SetupFailed(SandboxError):
    """The sandbox could not be set up.

    Attributes:
        step: at which step.
        errno: what the kernel said.
    """

    def __init__(self, message: str, *, step: str, errno: int) -> None:
        super().__init__(message)
        self.step = step
        self.errno = errno


class RunningJob:
    """One program inside, as its owner sees it."""

    def __init__(self, number: int, *, cap_bytes: int) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.cap_bytes = cap_bytes
        self.pid = 0
        self.goes_on = False
        self.kept: dict[int, bytearray] = {1: bytearray(), 2: bytearray()}
        self.received_bytes = 0
        self.chunks: list[tuple[int, bytes]] = []
        self.news = asyncio.Event()
        self.started: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[ExecResult] = loop.create_future()
        # One of the two may have nobody who waits; its error is told by the other.
        for one in (self.started, self.ended):
            one.add_done_callback(_look)

    def take(self, stream: int, data: bytes) -> None:
        """Keep output, as far as there is room."""
        kept = self.kept[stream]
        data = data[: max(0, self.cap_bytes - len(kept))]
        if data:
            kept += data
            self.chunks.append((stream, data))
            self.news.set()

    def fail(self, error: Exception) -> None:
        """End without a result."""
        for one in (self.started, self.ended):
            if not one.done():
                one.set_exception(error)
        self.news.set()

    def finish(self, message: Message) -> None:
        """End with a result."""
        self.goes_on = message.alive
        if not self.started.done():
            self.started.set_result(None)
        if not self.ended.done():
            self.ended.set_result(
                ExecResult(
                    exit_code=message.code,
                    stdout=bytes(self.kept[1]),
                    stderr=bytes(self.kept[2]),
                    killed_by=message.killed_by,
                    stdout_bytes=message.stdout_bytes,
                    stderr_bytes=message.stderr_bytes,
                    wall_s=message.wall_s,
                    cpu_s=message.cpu_s,
                    memory_bytes=message.memory_bytes,
                )
            )
        self.news.set()


def _look(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


class AgentChannel(asyncio.Protocol):
    """The connection to one agent.

    Args:
        on_nonsense: called once if the agent breaks the protocol.

    Attributes:
        output_bytes: output of all programs so far; what their agent dropped is added at their end.
    """

    def __init__(self, *, on_nonsense: Callable[[str], None]) -> None:
        self._on_nonsense = on_nonsense
        self._parser = Parser(most_head_bytes=_MOST_REPLY_HEAD_BYTES, most_payload_bytes=_MOST_REPLY_BYTES)
        self._transport: asyncio.Transport | None = None
        self._next = 1
        self._failure: Exception | None = None
        self._waiting: dict[int, asyncio.Future[tuple[Message, bytes]]] = {}
        self._jobs: dict[int, RunningJob] = {}
        self.output_bytes = 0
        self.ready: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(_look)
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def busy(self) -> bool:
        """Return whether a program runs."""
        return bool(self._jobs)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take bytes in."""
        try:
            for head, payload in self._parser.feed(data):
                self._on_message(msgspec.convert(head, Message), payload)
        except (BadFrame, msgspec.ValidationError) as error:
            self.close()
            self._on_nonsense(f"its agent broke the protocol: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end: whatever the agent said before it has been read."""
        if not self.closed.done():
            self.closed.set_result(None)

    def close(self) -> None:
        """Close the connection; the agent ends when it sees that."""
        if self._transport is not None:
            self._transport.abort()

    def fail_all(self, error: Exception) -> None:
        """Let everybody who waits, now or later, know that no answer will come."""
        self._failure = error
        for future in [*self._waiting.values(), self.ready]:
            if not future.done():
                future.set_exception(error)
        for job in self._jobs.values():
            job.fail(error)
        self._waiting.clear()
        self._jobs.clear()
        self.close()

    def _send(self, head: dict[str, Any], payload: bytes | memoryview = b"") -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(head, payload))

    async def ask(self, head: dict[str, Any], payload: bytes | memoryview = b"") -> tuple[Message, bytes]:
        """Send a request and wait for its one reply; the caller bounds the wait."""
        if self._failure is not None:
            raise self._failure
        number = self._number()
        future: asyncio.Future[tuple[Message, bytes]] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_look)
        self._waiting[number] = future
        self._send({**head, "n": number}, payload)
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    def begin(self, head: dict[str, Any], payload: bytes = b"") -> RunningJob:
        """Start a program."""
        if self._failure is not None:
            raise self._failure
        job = RunningJob(self._number(), cap_bytes=head["cap"])
        self._jobs[job.number] = job
        self._send({**head, "n": job.number}, payload)
        return job

    def tell(self, job: RunningJob, head: dict[str, Any], payload: bytes = b"") -> None:
        """Say something about a running program: a signal, or input."""
        if self._jobs.get(job.number) is job:
            self._send({**head, "n": job.number}, payload)

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _on_message(self, message: Message, payload: bytes) -> None:
        if message.op == "ready":
            if not self.ready.done():
                self.ready.set_result(message.protections)
        elif message.op == "crashed":
            self._on_nonsense(f"its agent failed: {message.message}")
        elif message.op == "failed":
            if not self.ready.done():
                self.ready.set_exception(SetupFailed(message.message, step=message.step, errno=message.errno))
        elif (job := self._jobs.get(message.n)) is not None:
            self._on_job(job, message, payload)
        elif (future := self._waiting.pop(message.n, None)) is not None and not future.done():
            if message.op == "error":
                future.set_exception(_error(message))
            else:
                future.set_result((message, payload))

    def _on_job(self, job: RunningJob, message: Message, payload: bytes) -> None:
        if message.op == "out" and message.stream in job.kept:
            self.output_bytes += len(payload)
            job.received_bytes += len(payload)
            job.take(message.stream, payload)
        elif message.op == "started":
            job.pid = message.pid
            if not job.started.done():
                job.started.set_result(None)
        elif message.op == "exit":
            del self._jobs[job.number]
            self.output_bytes += max(0, message.stdout_bytes + message.stderr_bytes - job.received_bytes)
            job.finish(message)
        elif message.op == "error":
            del self._jobs[job.number]
            job.fail(_error(message))


def _error(message: Message) -> SandboxError:
    if message.kind == "exhausted":
        return SandboxExhausted(
            f"the sandbox is out of something that its limits bound: {message.message}. End processes, remove files, "
            "or raise the limit."
        )
    if message.kind in ("missing", "refused", "not_a_file"):
        return SandboxFileError(message.message)
    if message.kind == "unsupported":
        return SandboxUnsupported(f"the file system inside cannot do this: {message.message}", capability="attributes")
    if message.kind == "busy":
        return SandboxBusy(
            f"this needs a sandbox in which nothing runs: {message.message}. Wait for them, or have them stopped "
            "(stop_processes)."
        )
    if message.kind == "no_session":
        return SandboxError(message.message)
    if message.kind == "unknown_user":
        return SandboxUnsupported(message.message, capability="users")
    if message.kind == "no_python":
        return SandboxUnsupported(f"{message.message}; use an image with python3 on its PATH", capability="fast_python")
    return SandboxError(f"the sandbox's agent refused a request: {message.message}")
