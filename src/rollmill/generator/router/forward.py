"""Takes a request to a replica, and on to another one if the first is lost.

| waits for | woken by | gives up after |
|---|---|---|
| a place at a replica | whatever makes room: an answer, a report, a join | `queue_wait_s`, or the request's deadline |
| the reply, or the next event of a stream | the replica | the request's deadline and `grace_s` |
| a late first token, before a hedge | the first token | a percentile of the last ones; then two replicas race |
| the reader of a stream | the reader | whatever writes to it (`emit`) |

Which replica gets a request, and whether it may be sent again, is the law's and the settings'. Before anything of a
request has been seen it goes elsewhere freely; after that with the tokens it has, as one request for each sibling.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager

import msgspec

from rollmill.clock import Clock
from rollmill.config.serving import LimitSettings
from rollmill.errors import (
    DataError,
    DeadlineExceeded,
    EngineDead,
    LengthMismatch,
    ModelError,
    NotServing,
    Overloaded,
    RequestIdInUse,
    RollmillError,
)
from rollmill.generator.limits import check_message
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.router.calls import AT_THE_DEADLINE_S, Call, Emit, Piece, ask_of
from rollmill.generator.router.law import RouterLaw
from rollmill.generator.router.records import Ask, Ended, Instruction, Refuse, Send
from rollmill.generator.router.upstream import Upstream, UpstreamError, read
from rollmill.generator.service import TextCodec
from rollmill.generator.tally import SECONDS, Histogram, RecentValues

CONTROL_S = 10.0
"""Deadline of calls that abort a request."""
LONGEST_S = 7 * 24 * 3600.0
"""A deadline beyond this, or without end, is taken as this by the transport."""


class _AbortedHere(Exception):
    """The caller aborted a request that waits in the router."""


class Forwarder:
    """All requests of one router.

    Args:
        law: says where requests go.
        upstreams: replica -> its connection.
        clock: the law's time.
        on_trouble: told of a replica that broke or refused a request.
        codec: of the model's tokenizer, if the router has it.
        limits: what one call may ask for.
    """

    def __init__(
        self,
        law: RouterLaw,
        *,
        upstreams: Mapping[str, Upstream],
        clock: Clock,
        on_trouble: Callable[[str], None],
        codec: TextCodec | None = None,
        limits: LimitSettings | None = None,
    ) -> None:
        self._limits = LimitSettings() if limits is None else limits
        self._law = law
        self._settings = law.settings
        self._upstreams = upstreams
        self._clock = clock
        self._on_trouble = on_trouble
        self._codec = codec
        # Appended to a serialized request it sets this one field.
        self._in_chunks = pb.GenerateRequest(chunk_tokens=law.settings.chunk_tokens).SerializeToString()
        self._calls: dict[str, Call] = {}
        self._names: set[str] = set()
        self._waiting: dict[str, asyncio.Future[str]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.moved = self.retried = self.hedged = 0
        self.outcomes: Counter[str] = Counter()
        self.latency, self.latencies = Histogram(SECONDS), RecentValues()

    # -- calls

    @property
    def active(self) -> int:
        """Calls that wait or run."""
        return len(self._calls)

    async def generate(self, data: bytes) -> bytes:
        """Return the serialized reply to a serialized request.

        Raises:
            RollmillError: what the replica, the last of several, or the router refused it with.

        Cancellation:
            ends it at its replicas.
        """
        with self._living(data, emit=None) as call:
            try:
                if self._settings.streams_upstream:
                    await self._whole(call)
                elif (reply := await self._in_one_piece(call)) is not None:
                    return reply
                await self._go_on(call)
            except _AbortedHere:
                call.end_open(all_of_them=True)
            return call.progress.reply().SerializeToString()

    async def stream(self, data: bytes, *, emit: Emit) -> None:
        """Hand the events of a request to `emit`, one at a time, until its last sample has ended.

        Raises:
            RollmillError: as `generate`.

        Cancellation:
            ends it at its replicas.
        """
        with self._living(data, emit=emit) as call:
            try:
                await self._whole(call)
                await self._go_on(call)
            except _AbortedHere:
                for index in call.end_open(all_of_them=True):
                    await emit(call.progress.finished(index), None)

    async def abort(self, request_id: str) -> bool:
        """Abort exactly this request, or this one sibling of one, wherever it is; return whether it was there."""
        call = self._calls.get(request_id)
        if call is not None:
            call.aborted = True
            return any([await self._abort_named(name, request_id=name) for name in list(call.names)])
        whole, _, number = request_id.rpartition("#")
        call = self._calls.get(whole)
        if call is None or not number.isdigit() or int(number) >= call.siblings:
            return False
        call.gone.add(int(number))
        return await self._abort_named(request_id if request_id in call.names else whole, request_id=request_id)

    async def _abort_named(self, name: str, *, request_id: str) -> bool:
        """Abort what the law knows under this name, which may be more than the request that is meant."""
        waiting = self._waiting.get(name)
        if waiting is not None and not waiting.done() and name == request_id:
            waiting.set_exception(_AbortedHere())
            return True
        return any([await self._abort_at(replica, request_id) for replica in self._law.where(name)])

    async def _abort_at(self, replica: str, request_id: str) -> bool:
        upstream = self._upstreams.get(replica)
        if upstream is None:
            return False
        try:
            return await upstream.abort(request_id, timeout_s=CONTROL_S)
        except UpstreamError:  # it is gone, and the request with it; whoever waits for the request is told
            self._on_trouble(replica)
            return True

    async def drain(self, deadline_s: float, *, reason: str) -> int:
        """Take nothing new, wait for what runs, abort the rest; return how many were aborted."""
        self._law.drain(reason)
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            left = list(self._calls)
            # Together: one replica that hangs must not cost the others' callers what they have.
            await asyncio.gather(*(self.abort(request_id) for request_id in left))
            return len(left)
        return 0

    def obey(self, instructions: Sequence[Instruction]) -> None:
        """Pass on what the law says to whom it concerns."""
        for instruction in instructions:
            waiting = self._waiting.get(instruction.request_id)
            if waiting is None or waiting.done():
                continue
            if isinstance(instruction, Send):
                waiting.set_result(instruction.replica)
            else:
                waiting.set_exception(instruction.error)

    # -- the life of a call

    @contextmanager
    def _living(self, data: bytes, *, emit: Emit | None) -> Iterator[Call]:
        """Keep the books of a call while it lives, and count how it ends."""
        outcome, call = "cancelled", None
        try:
            call = self._begin(data, emit=emit)
            yield call
            outcome = "ok"
            self._note_latency(call)
        except RollmillError as error:
            outcome = error.code
            raise
        finally:
            self.outcomes[outcome] += 1
            if call is not None:
                self._end(call)

    def _note_latency(self, call: Call) -> None:
        now_s = self._clock.now_s()
        self.latency.observe(now_s - call.started_s)
        self.latencies.add(now_s - call.started_s, now_s=now_s)

    def _begin(self, data: bytes, *, emit: Emit | None) -> Call:
        message = pb.GenerateRequest.FromString(data)
        # Before anything is made of it: a small message may ask for more than there is memory.
        check_message(message, limits=self._limits)
        names = names_of(message.request_id, siblings=message.siblings or 1)
        if taken := names & self._names:
            raise RequestIdInUse(
                f"request id {min(taken)} is in use; ids must be unique while a request lives, and siblings have "
                "theirs: ID#0, ID#1, ..."
            )
        if not message.deadline_s >= 0:
            raise DataError(f"request {message.request_id} has a deadline of {message.deadline_s:g} s; give 0 or more")
        call = Call(
            message,
            data,
            now_s=self._clock.now_s(),
            emit=emit,
            codec=self._codec,
            adapters=self._law.table.adapters,
        )
        self._calls[message.request_id] = call
        self._names |= names
        self._idle.clear()
        return call

    def _end(self, call: Call) -> None:
        del self._calls[call.message.request_id]
        self._names -= names_of(call.message.request_id, siblings=call.siblings)
        now_s = self._clock.now_s()
        for name in call.names:
            self.obey(self._law.close(name, now_s=now_s))
        if not self._calls:
            self._idle.set()

    async def _in_one_piece(self, call: Call) -> bytes | None:
        """Return the reply of a replica as it is; `None` if samples were cut short and have to go on."""
        piece = call.whole()
        while True:
            replica = await self._place(call, piece)
            try:
                reply, message = await self._reply_of(call, piece, replica)
            except UpstreamError as failure:
                # Whether there were tokens is not known; where it may matter they are taken to have been there.
                begun = failure.ended in (Ended.LOST, Ended.FAILED)
                self._retry_or_raise(call, piece, replica, failure, begun=begun)
                piece = call.whole()
            else:
                return self._whole_reply(call, reply, message, replica=replica)

    async def _reply_of(self, call: Call, piece: Piece, replica: str) -> tuple[bytes, pb.GenerateReply]:
        ended, why = Ended.DROPPED, ""
        now_s = self._clock.now_s()
        try:
            reply = await self._upstream(replica).generate(
                call.data_at(piece, now_s=now_s), timeout_s=self._timeout_s(call, now_s=now_s)
            )
            message = read(pb.GenerateReply, reply, replica=replica)
            ended = Ended.ANSWERED
        except UpstreamError as error:
            error.ended = ended = self._judged(error, piece, replica)
            why = str(error.error)
            raise
        finally:
            self._tell(piece, replica, ended, why=why)
        return reply, message

    def _timeout_s(self, call: Call, *, now_s: float) -> float:
        return min(call.deadline_at_s - now_s + self._settings.grace_s, LONGEST_S)

    def _whole_reply(self, call: Call, reply: bytes, message: pb.GenerateReply, *, replica: str) -> bytes | None:
        """Return a reply as it is; `None` if samples in it were cut short, which are in the books then."""
        now_s = self._clock.now_s()
        cut = [one.index for one in message.samples if call.is_cut(one.index, one.stop_reason, now_s=now_s)]
        if not cut or not all(self._may_move(call, index) for index in cut):
            return reply
        call.progress.take_reply(message)
        if not call.progress.can_move():
            return reply
        for index in cut:
            call.progress.reopen(index)
        self._note_cut(call, cut, replica)
        return None

    async def _whole(self, call: Call) -> None:
        """Stream a call from a replica; it starts again elsewhere while nothing of it is known or shown."""
        while not await self._piece(call, call.whole()):
            call.progress.forget()

    async def _go_on(self, call: Call) -> None:
        """Let the siblings that were cut short go on elsewhere until all have ended."""
        while call.progress.open():
            left_s = call.deadline_at_s - self._clock.now_s()
            over = left_s <= AT_THE_DEADLINE_S or call.aborted
            for index in call.end_open(all_of_them=over):
                await self._show(call, call.progress.finished(index))
            open_ones = call.progress.open()
            self.moved += len(open_ones)
            pieces = [self._next_piece(call, index, deadline_s=left_s) for index in open_ones]
            await self._together(call, pieces)

    def _next_piece(self, call: Call, index: int, *, deadline_s: float) -> Piece:
        base = call.progress.count(index)
        message = call.progress.move(index, deadline_s=deadline_s)
        call.names.add(message.request_id)
        return Piece(
            ask=msgspec.structs.replace(ask_of(message), adapter=call.ask.adapter),
            data=message.SerializeToString(),
            siblings=(index,),
            bases=(base,),
            fresh=False,
        )

    async def _together(self, call: Call, pieces: Sequence[Piece]) -> None:
        if len(pieces) == 1:
            await self._part(call, pieces[0])
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for piece in pieces:
                    tasks.create_task(self._part(call, piece), name=piece.ask.request_id)
        except BaseExceptionGroup as group:  # the others were cancelled because of the first
            raise group.exceptions[0] from group

    async def _part(self, call: Call, piece: Piece) -> None:
        try:
            await self._piece(call, piece)
        except _AbortedHere:
            if call.aborted:  # else this sibling alone was meant
                raise
        except (DeadlineExceeded, NotServing, Overloaded):
            # At the deadline a call ends with what it has.
            if not self._has_tokens(call, piece) or self._clock.now_s() < call.deadline_at_s:
                raise

    def _has_tokens(self, call: Call, piece: Piece) -> bool:
        return not piece.fresh and any(call.progress.count(index) > 0 for index in piece.siblings)

    # -- one piece

    async def _piece(self, call: Call, piece: Piece) -> bool:
        """Stream a piece until its siblings have ended or were cut; return false if the call must start again."""
        while True:
            replica = await self._place(call, piece)
            try:
                await self._race(call, piece, replica)
            except UpstreamError as failure:
                begun = any(call.progress.count(i) > b for i, b in zip(piece.siblings, piece.bases, strict=True))
                replica = failure.replica or replica
                if begun and not call.progress.can_move() and call.emit is not None:
                    raise call.cannot_move(failure.error) from failure
                self._retry_or_raise(call, piece, replica, failure, begun=begun)
                if begun:
                    return await self._settled(call, piece, replica)
                piece = msgspec.structs.replace(piece, fresh=False)
            else:
                return True

    async def _settled(self, call: Call, piece: Piece, replica: str) -> bool:
        """End the siblings that had all their tokens when the replica was lost; return false to start again."""
        if not call.progress.can_move():
            return False
        longest = self._law.table[replica].max_model_len if replica in self._law.table else 0
        for index in piece.siblings:
            if call.progress.settle(index, max_model_len=longest):
                await self._show(call, call.progress.finished(index))
        return True

    async def _race(self, call: Call, piece: Piece, replica: str) -> None:
        """Stream from a replica, and from a second one if the first token is late; the earlier one goes on."""
        delay_s = self._law.hedges.delay_s()
        if delay_s is None or piece.ask.wave_id:
            await self._attempt(call, piece, replica, claim=lambda: True)
            return
        winner: list[str] = []
        failures: list[UpstreamError] = []
        running: dict[str, asyncio.Task[None]] = {}

        def claim(name: str) -> bool:
            if not winner:
                winner.append(name)
                for other, task in running.items():
                    if other != name:
                        task.cancel()
            return winner[0] == name

        async def attempt(name: str) -> None:
            try:
                await self._attempt(call, piece, name, claim=lambda: claim(name))
            except UpstreamError as failure:
                if winner and winner[0] != name:
                    return
                failures.append(failure)

        try:
            async with asyncio.TaskGroup() as tasks:
                running[replica] = tasks.create_task(attempt(replica), name=f"{piece.ask.request_id} at {replica}")
                await asyncio.wait(running.values(), timeout=delay_s)
                if not winner and not running[replica].done():
                    second = self._law.hedge(piece.ask.request_id, now_s=self._clock.now_s())
                    if second is not None:
                        self.hedged += 1
                        name = second.replica
                        running[name] = tasks.create_task(attempt(name), name=f"{piece.ask.request_id} at {name}")
        except BaseExceptionGroup as group:  # of the reader
            raise group.exceptions[0] from group
        # One that failed before its first token is no matter if the other one answered.
        lost = [one for one in failures if not winner or one.replica == winner[0]]
        if lost:
            raise lost[-1]

    async def _attempt(self, call: Call, piece: Piece, replica: str, *, claim: Callable[[], bool]) -> None:
        """Stream a piece from one replica; `claim` is asked at its first token whether it is the one that counts."""
        now_s = self._clock.now_s()
        sent_s, ended, why = now_s, Ended.DROPPED, ""
        timeout_s = self._timeout_s(call, now_s=now_s)
        data = call.data_at(piece, now_s=now_s)
        if call.emit is None:  # nobody reads along, so larger chunks do
            data += self._in_chunks
        claimed = False
        try:
            async with aclosing(self._upstream(replica).stream(data, timeout_s=timeout_s)) as events:
                async for raw in events:
                    event = read(pb.GenerateEvent, raw, replica=replica)
                    if not claimed and event.WhichOneof("event") is not None:
                        if not claim():
                            return
                        claimed = True
                        self._law.hedges.first_token(self._clock.now_s() - sent_s)
                    await self._take(call, piece, event, raw, replica=replica)
            self._check_ended(call, piece, replica)
            ended = Ended.ANSWERED
        except UpstreamError as error:
            error.ended = ended = self._judged(error, piece, replica)
            why, error.replica = str(error.error), replica
            raise
        except LengthMismatch as error:
            ended, why = Ended.FAILED, str(error)
            raise UpstreamError(error, ended, replica=replica) from error
        finally:
            self._tell(piece, replica, ended, why=why)

    def _check_ended(self, call: Call, piece: Piece, replica: str) -> None:
        samples = call.progress.samples
        missing = [i for i in piece.siblings if not samples[i].stop_reason and not samples[i].cut]
        if missing:
            error = EngineDead(
                f"the stream of request {piece.ask.request_id} from the replica {replica} ended without the finish of "
                f"{len(missing)} of its samples"
            )
            raise UpstreamError(error, Ended.FAILED)

    async def _take(self, call: Call, piece: Piece, event: pb.GenerateEvent, raw: bytes, *, replica: str) -> None:
        """Take an event into the books, and show it to a caller who streams."""
        progress = call.progress
        kind = event.WhichOneof("event")
        if kind is None:
            if not progress.prompt_ids:
                progress.prompt_ids = list(event.prompt_ids)
                await self._show(call, event, raw)
            return
        index, base = piece.siblings[event.index], piece.bases[event.index]
        as_it_is = piece.siblings[event.index] == event.index and base == 0 and call.ask is piece.ask
        if kind == "tokens":
            progress.take_chunk(index, event.tokens, base=base)
            if not as_it_is:
                event.request_id, event.index = call.message.request_id, index
                event.tokens.start_token += base
            await self._show(call, event, raw if as_it_is else None)
            return
        progress.take_finished(index, event.finished, base=base)
        cut = call.is_cut(index, event.finished.stop_reason, now_s=self._clock.now_s())
        if cut and self._may_move(call, index) and progress.can_move():
            progress.reopen(index)
            self._note_cut(call, [index], replica)
        else:
            await self._show(call, event if as_it_is else progress.finished(index), raw if as_it_is else None)

    async def _show(self, call: Call, event: pb.GenerateEvent, raw: bytes | None = None) -> None:
        if call.emit is not None:
            await call.emit(event, raw)

    # -- places, attempts, errors

    async def _place(self, call: Call, piece: Piece) -> str:
        """Return the replica that a piece goes to, once there is one."""
        ask, now_s = piece.ask, self._clock.now_s()
        if piece.fresh:
            said = self._law.submit(ask, now_s=now_s)
        else:
            tried = {replica for replica, _ in call.causes}
            said = self._law.resubmit(ask, excluded=tried, arrived_s=call.started_s, now_s=now_s)
        if len(said) == 1 and said[0].request_id == ask.request_id:  # as a rule: nobody waits
            return _sent_to(said[0])
        waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[ask.request_id] = waiting
        try:
            self.obey(said)
            left_s = max(call.deadline_at_s - now_s, 0.0)
            patience_s = left_s if self._has_tokens(call, piece) else min(self._settings.queue_wait_s, left_s)
            async with asyncio.timeout(patience_s):
                return await waiting
        except TimeoutError:
            raise self._waited(call, ask, since_s=now_s) from None
        finally:
            del self._waiting[ask.request_id]

    def _waited(self, call: Call, ask: Ask, *, since_s: float) -> RollmillError:
        now_s = self._clock.now_s()
        why = self._law.why_waiting(ask.request_id)
        text = f"request {ask.request_id} waited {now_s - since_s:.1f} s in the router: {why}{call.story()}"
        if not self._law.serves(ask.request_id, now_s=now_s):
            return NotServing(f"{text}. Look at the replicas' logs, or ask for an older version")
        if now_s >= call.deadline_at_s:
            return DeadlineExceeded(f"{text}. Raise its deadline, or add a replica")
        wait_s = self._law.retry_after_s(now_s=now_s)
        return Overloaded(f"{text}. Ask again in {wait_s:.1f} s, or add a replica", retry_after_s=wait_s)

    def _upstream(self, replica: str) -> Upstream:
        upstream = self._upstreams.get(replica)
        if upstream is None:
            gone = NotServing(f"the replica {replica} was taken off the list")
            raise UpstreamError(gone, Ended.REFUSED, replica=replica)
        return upstream

    def _tell(self, piece: Piece, replica: str, ended: Ended, *, why: str) -> None:
        now_s = self._clock.now_s()
        self.obey(self._law.ended(piece.ask.request_id, replica, ended, now_s=now_s, why=why))
        if ended in (Ended.LOST, Ended.REFUSED, Ended.FAILED):
            self._on_trouble(replica)

    def _judged(self, error: UpstreamError, piece: Piece, replica: str) -> Ended:
        """Return how an attempt ended: a replica that lost its adapter has not seen a bad request."""
        if error.ended is not Ended.INVALID or not piece.ask.adapter or not isinstance(error.error, ModelError):
            return error.ended
        self._on_trouble(replica)  # it was restarted with others: look what it has now
        return Ended.DECLINED

    def _may_move(self, call: Call, index: int) -> bool:
        return self._settings.on_loss == "continue" and call.tries[index] + 1 < self._settings.max_attempts

    def _note_cut(self, call: Call, siblings: Sequence[int], replica: str) -> None:
        call.lost(siblings, replica, "it ended the request before its time (it drains)")
        self._on_trouble(replica)

    def _retry_or_raise(self, call: Call, piece: Piece, replica: str, failure: UpstreamError, *, begun: bool) -> None:
        call.lost(piece.siblings, replica, str(failure.error))
        final = (
            failure.ended is Ended.INVALID
            or bool(call.ask.wave_id)
            or (begun and self._settings.on_loss == "fail")
            or call.tries_of(piece.siblings) >= self._settings.max_attempts
            or self._clock.now_s() >= call.deadline_at_s
        )
        if call.aborted:
            raise _AbortedHere
        if final:
            raise call.final(failure.error) from failure
        self.retried += 1


def names_of(request_id: str, *, siblings: int) -> set[str]:
    """Return the ids that a call may have at replicas: its own, and one for each sibling that goes on alone."""
    return {request_id, *(f"{request_id}#{index}" for index in range(siblings))}


def _sent_to(instruction: Instruction) -> str:
    if isinstance(instruction, Refuse):
        raise instruction.error
    return instruction.replica
