"""One streamed request: from what the service lets hear to events that are written to a reader of any speed.

The events that wait for the reader are bounded. A reader that falls further behind, or takes too long over one event,
loses its request: it is aborted, its KV is free within a step, and the call ends with `SlowReader`. Others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rollmill.config.serving import LimitSettings
from rollmill.errors import RollmillError, SlowReader
from rollmill.generator.chunks import ChunkJoiner
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.service import InferenceService
from rollmill.generator.wire import chunk_to_message, finished_to_message
from rollmill.types import GenerateRequest, TokenChunk, Turn

Write = Callable[[pb.GenerateEvent], Awaitable[None]]


class EventMaker:
    """Makes events of what the service lets hear of a request.

    Args:
        request: with its prompt as ids.
        text: makes the text of a turn, for a caller whose prompt was text or messages; `None` sends ids only.
        chunk_tokens: tokens of a sibling that go together.
        put: takes the events, in order.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        text: Callable[[Turn], str] | None,
        chunk_tokens: int,
        put: Callable[[pb.GenerateEvent], None],
    ) -> None:
        self._joiner = ChunkJoiner(chunk_tokens)
        self._request, self._text, self._put = request, text, put

    def begin(self) -> None:
        """Say what the prompt became, where it was text or messages."""
        if self._text is not None:
            prompt_ids = self._request.prompt_ids.tolist()
            self._put(pb.GenerateEvent(request_id=self._request.request_id, prompt_ids=prompt_ids))

    def tokens(self, index: int, chunk: TokenChunk) -> None:
        """Hear the next tokens of a sibling."""
        for joined in self._joiner.add(index, chunk):
            self._put_chunk(index, joined)

    def finished(self, index: int, turn: Turn) -> None:
        """Hear the end of a sibling."""
        for joined in self._joiner.flush(index):
            self._put_chunk(index, joined)
        text = None if self._text is None else self._text(turn)
        self._put(finished_to_message(turn, request_id=self._request.request_id, index=index, text=text))

    def flush(self) -> None:
        """Send what is held back."""
        for index, chunk in self._joiner.flush_all():
            self._put_chunk(index, chunk)

    def _put_chunk(self, index: int, chunk: TokenChunk) -> None:
        self._put(chunk_to_message(chunk, request_id=self._request.request_id, index=index))


class EventStream:
    """Runs a request and writes its events, in order.

    Args:
        request: with its prompt as ids.
        siblings: samples asked for.
        limits: how many events may wait, and how long one may take.
        text, chunk_tokens: of `EventMaker`.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        siblings: int,
        limits: LimitSettings,
        text: Callable[[Turn], str] | None,
        chunk_tokens: int = 1,
    ) -> None:
        self._request, self._siblings, self._limits = request, siblings, limits
        self._maker = EventMaker(request, text=text, chunk_tokens=chunk_tokens, put=self._put)
        self._events: asyncio.Queue[pb.GenerateEvent | None] = asyncio.Queue()  # bounded by _put
        self._generation: asyncio.Task[None] | None = None
        self._error: RollmillError | None = None

    async def run(self, service: InferenceService, *, write: Write) -> None:
        """Generate and write until the last event was taken.

        Raises:
            RollmillError: what the service raised, after the events that came before it.
            SlowReader: if the reader fell behind.

        Cancellation:
            aborts the request and frees its KV.
        """
        self._maker.begin()
        async with asyncio.TaskGroup() as tasks:
            self._generation = tasks.create_task(self._generate(service), name=self._request.request_id)
            await self._write_all(write)
        if self._error is not None:
            raise self._error

    async def _generate(self, service: InferenceService) -> None:
        """Generate; an error is kept, so that the events before it are written first."""
        try:
            await service.generate(self._request, siblings=self._siblings, listener=self._maker)
        except RollmillError as error:
            self._maker.flush()  # what an engine that died had sampled
            self._error = self._error or error
        finally:
            self._maker.flush()
            self._events.put_nowait(None)

    async def _write_all(self, write: Write) -> None:
        while (event := await self._events.get()) is not None:
            try:
                async with asyncio.timeout(self._limits.stream_stall_s):
                    await write(event)
            except TimeoutError:
                self._give_up(f"took no event for {self._limits.stream_stall_s:g} s (generator.limits.stream_stall_s)")
                return

    def _put(self, event: pb.GenerateEvent) -> None:
        if self._error is not None:
            return  # given up; the call ends with the reason
        if self._events.qsize() >= self._limits.stream_events:
            waiting = self._events.qsize()
            while not self._events.empty():
                self._events.get_nowait()
            self._give_up(f"is {waiting} events behind (generator.limits.stream_events)")
            return
        self._events.put_nowait(event)

    def _give_up(self, why: str) -> None:
        self._error = SlowReader(
            f"the reader of request {self._request.request_id} {why}: the request was aborted, so that memory stays "
            "bounded. Read faster, or call Generate, which sends everything at once"
        )
        if self._generation is not None:
            self._generation.cancel()
