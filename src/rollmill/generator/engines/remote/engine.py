"""The engine protocol over any server that a port can drive.

| who | waits for | woken by | gives up after |
|---|---|---|---|
| `generate`, not sent | a seat, its group's prefill, the end of a pause | who frees one; `resume` | its deadline |
| `generate`, sent | the server's pieces | the server; a death | its deadline: ended with what it has |
| `generate`, over in a pause | a proof of the version | `resume`, an end of all | its deadline: cut to what is proven |
| control methods | the control before, the server | the server; a death | the port's deadline for a call |
| `pause("drain")` | requests that were sent | their ends or deadlines; `resume` | the caller's own timeout |

At most `max_num_seqs` requests are with the server; the others wait here, in order of arrival. Members of a group wait
for the first one's prefill, so that the server finds it in its cache. What servers cannot do is done here:

* They score nothing while they are paused. A score in a pause lets the server run for as long as that takes; what it
  samples meanwhile is told to nobody until `resume`, and cut off if the version that sampled it is never proven.
* They let new requests hit KV of old weights. Each version has a salt of its own, and a request that has no token yet
  when weights change under kept KV is taken back and sent anew.
* An update that failed may have changed the weights: the engine is dirty until one succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from rollmill.clock import Clock
from rollmill.errors import (
    DataError,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    RollmillError,
    WeightError,
    WeightMismatch,
)
from rollmill.generator.engines.meter import SecondsMeter
from rollmill.generator.engines.protocol import EngineInfo, EngineLoad, KvPolicy, OnTokens, PauseMode, UpdateReport
from rollmill.generator.engines.remote.adapters import Ask, RemoteDesk
from rollmill.generator.engines.remote.port import AdapterPort, Delta, ServerPort
from rollmill.generator.engines.remote.requests import GroupKey, Live, Lives
from rollmill.generator.engines.remote.traits import Traits
from rollmill.generator.engines.remote.transfer import Spool, check_layout, layout_of, nbytes_of
from rollmill.generator.engines.sequence import check_request
from rollmill.types import GenerateRequest, Turn

if TYPE_CHECKING:
    import torch

_CANCEL_AGAIN_S = 0.5
"""A cancellation that overtakes its request does nothing; it is repeated until the request has ended."""
_CLOSING_S = 6.0


class RemoteEngine:
    """A server as an engine. Its methods are called from one event loop.

    Args:
        port: to a server that serves `policy_version` and is not frozen.
        traits: what the engine is.
        tensors: the weights that it serves; their names and shapes are what later ones must have.
        policy_version: their publication number.
        digest: their digest.
        spool: where weights are written that lie in no file.
        clock: stamps, deadlines and the seconds ledger.
        meter: began when the server was started.
        adapter_port: to the same server, if it holds adapters.

    Attributes:
        adapters: where they are loaded and served; `None` if the server holds none.
    """

    def __init__(
        self,
        port: ServerPort,
        *,
        traits: Traits,
        tensors: Mapping[str, torch.Tensor],
        policy_version: int,
        digest: str,
        spool: Spool,
        clock: Clock,
        meter: SecondsMeter,
        adapter_port: AdapterPort | None = None,
    ) -> None:
        self._port = port
        self._traits = traits
        self._layout = layout_of(tensors)
        self._policy_version, self._digest = policy_version, digest
        self._spool = spool
        self._clock = clock
        self._meter = meter
        self._lives = Lives()
        self._queue: deque[Live] = deque()
        self._leading: dict[GroupKey, Live] = {}
        self._family, self._numbers = secrets.token_hex(4), itertools.count(1)
        self._output_tokens = self._prefill_tokens = self._cached_tokens = 0
        self._flushes = 0
        # Paused: as callers see it. Frozen: the server itself. Peeked: it ran within this pause.
        self._gate_open, self._paused, self._frozen, self._peeked = True, False, False, False
        # Told to freeze; whether it did is not known where that call failed.
        self._must_thaw = False
        self._unproven: int | None = None
        self._loading = False
        self._dirty_reason: str | None = None
        self._closing = False
        self._change = asyncio.Event()
        self._control = asyncio.Lock()
        self.adapters: RemoteDesk | None = None
        if adapter_port is not None:
            self.adapters = RemoteDesk(
                adapter_port,
                lives=self._lives,
                layout=self._layout,
                max_loras=traits.max_loras,
                max_lora_rank=traits.max_lora_rank,
                score_by=self._score_by,
                refuse_if_unfit=self._refuse_if_unfit,
                note_change=self._note_change,
            )
        port.listen(lambda _: self._note_change())
        self._meter.switch("idle")

    # -- engine protocol

    def info(self) -> EngineInfo:
        """Return what this engine is and can do."""
        traits = self._traits
        return EngineInfo(
            kind=traits.kind,
            model=traits.model,
            dtype=traits.dtype,
            vocabulary_size=traits.vocabulary_size,
            max_model_len=traits.max_model_len,
            max_num_seqs=traits.max_num_seqs,
            kv_bytes=self._port.figures().kv_capacity_tokens * traits.kv_bytes_per_token,
            capabilities=traits.capabilities,
            policy_version=self._policy_version,
            digest=self._digest,
            adapters=() if self.adapters is None else self.adapters.infos(),
        )

    async def generate(self, request: GenerateRequest, *, on_tokens: OnTokens | None = None) -> Turn:
        """Return the finished or aborted turn, see the engine protocol.

        Raises:
            DataError: if the prompt or its parameters do not fit, or the server cannot do them.
            ModelError: if its adapter is not loaded.
            EngineError: if the id is in use, or the engine is dirty.
            EngineDead: if the server died, with its log's first error.

        Cancellation:
            aborts the request and frees its KV.
        """
        traits = self._traits
        check_request(
            request,
            vocabulary_size=traits.vocabulary_size,
            max_model_len=traits.max_model_len,
            adapters=self.adapters is not None,
        )
        self._refuse(request)
        live = Live(
            request,
            server_id=self._new_id(),
            capacity=min(request.sampling.max_new_tokens, traits.max_model_len - len(request.prompt_ids)),
            now_s=self._clock.now_s(),
            on_tokens=on_tokens,
        )
        self._lives[request.request_id] = live
        self._queue.append(live)
        try:
            await self._serve(live)
            live.settle(unproven=self._unproven)
            self._tell(live)
            return live.turn(now_s=self._clock.now_s())
        finally:
            self._forget(live)

    async def abort(self, request_id: str) -> bool:
        """Abort exactly this request; its KV is free when this returns, or in a pause once it is over."""
        live = self._lives.get(request_id)
        if live is None:
            return False
        live.gave_up = True
        self._note_change()
        await live.over.wait()
        return True

    async def pause(self, mode: PauseMode) -> None:
        """Return when no further token can be produced; idempotent.

        `keep` freezes what is with the server, `abort` ends everything with what it has, `drain` lets what is with the
        server finish while the rest stays queued.
        """
        self._raise_if_dead()
        self._gate_open = False
        if mode == "drain" and not self._paused:
            await self._until(lambda: self._gate_open or self._paused or not self._sent())
            if self._gate_open:  # resumed meanwhile
                return
        async with self._control:
            if mode == "abort":
                await self._end_all()
            await self._freeze()
            self._paused = True
            self._note_change()
            self._port.look()

    async def stage(self, tensors: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Write weights that lie in no file yet into one, in shared memory, while the old ones serve.

        Raises:
            WeightError: if names, shapes or dtypes do not fit, or there is no room.
            EngineDead: if the server died.
        """
        self._raise_if_dead()
        check_layout(tensors, expected=self._layout)
        await asyncio.to_thread(self._spool.write, tensors, policy_version=policy_version)

    async def update(
        self, tensors: Mapping[str, torch.Tensor], *, policy_version: int, digest: str, kv: KvPolicy
    ) -> UpdateReport:
        """Swap the weights in place; only while paused; a repeated version is a no-op.

        Raises:
            EngineError: if not paused, if the version does not rise, if KV is to be kept and cannot be; or if the
                server failed: the engine is dirty then, requests ended with what they had.
            WeightError: if names, shapes or dtypes do not fit; nothing was changed.
            WeightMismatch: if the version is served with another digest.
        """
        async with self._control:
            self._raise_if_dead()
            if not self._paused:
                raise EngineError(f"update to policy version {policy_version} while running: pause the engine first")
            if policy_version == self._policy_version and self._dirty_reason is None:
                return self._repeated(policy_version, digest=digest)
            if policy_version < self._policy_version:
                raise EngineError(
                    f"update to policy version {policy_version}, but {self._policy_version} is served: versions only "
                    "rise"
                )
            if self.adapters is not None:
                self.adapters.shelf.refuse_update(policy_version)
            if kv == "keep" and "kv_keep" not in self._traits.capabilities:
                raise EngineError(
                    f"{self._traits.product} cannot keep KV over an update as it is set up; nothing was changed. "
                    f"{self._traits.how_to_keep}"
                )
            check_layout(tensors, expected=self._layout)
            started_s = self._clock.now_s()
            await self._load(tensors, policy_version=policy_version, kv=kv)
            self._policy_version, self._digest, self._dirty_reason = policy_version, digest, None
            for live in self._lives.values():
                if live.sent_s is not None:
                    live.serve_under(policy_version)
            return UpdateReport(
                policy_version=policy_version,
                nbytes=nbytes_of(tensors),
                pause_s=self._clock.now_s() - started_s,
                changed=True,
            )

    async def resume(self) -> None:
        """Produce tokens again; what was held back goes out. Idempotent."""
        async with self._control:
            self._raise_if_dead()
            if self._must_thaw:
                await self._port.thaw()
                self._frozen = self._must_thaw = False
            self._paused, self._gate_open, self._peeked, self._unproven = False, True, False, None
            for live in self._lives.values():
                self._tell(live)
            self._note_change()

    async def flush(self) -> None:
        """No later request hits KV made before this call: it has another salt."""
        self._raise_if_dead()
        self._flushes += 1

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return float32 [n - 1] log-probs under temperature 1; works while paused, see the module."""
        return await self._score_by(token_ids, lambda ids, server_id: self._port.score(ids, server_id=server_id))

    async def _score_by(self, token_ids: np.ndarray, ask: Ask) -> np.ndarray:
        ids = self._scorable(token_ids)
        async with self._control:
            self._raise_if_dead()
            if not self._frozen:
                return await ask(ids, self._new_id())
            self._peeked = True
            try:
                await self._port.thaw()
                self._frozen = False
                return await ask(ids, self._new_id())
            finally:
                # Should this fail, what is sampled is still held back, and the next pause("abort") ends it.
                await self._freeze()

    def load(self) -> EngineLoad:
        """Return how busy the engine is. Memory for KV is that of the last look at the server."""
        figures, sent = self._port.figures(), self._sent()
        wall_s, seconds = self._meter.read()
        return EngineLoad(
            running=sent,
            waiting=len(self._lives) - sent,
            kv_used_tokens=figures.kv_used_tokens if sent else 0,
            kv_capacity_tokens=figures.kv_capacity_tokens,
            paused=self._paused,
            policy_version=self._policy_version,
            output_tokens=self._output_tokens,
            prefill_tokens=self._prefill_tokens,
            cached_tokens=self._cached_tokens,
            wall_s=wall_s,
            seconds=seconds,
            preemptions=figures.preemptions,
        )

    def healthy(self) -> bool:
        """Return whether requests can be served: the server lives and its weights are whole."""
        return self._port.cause is None and not self._closing and self._dirty_reason is None

    async def close(self) -> None:
        """End all requests with what they have, then the server; idempotent."""
        if self._closing:
            return
        self._closing, self._gate_open = True, False
        self._note_change()
        if self._port.cause is None:
            with contextlib.suppress(RollmillError):  # then the server's end ends them
                async with self._control:
                    await self._end_all(patience_s=_CLOSING_S)
        await self._port.close()
        await asyncio.to_thread(self._spool.close)
        if self.adapters is not None:
            await asyncio.to_thread(self.adapters.close)
        self._note_change()
        self._meter.switch("shutdown")

    # -- requests

    def _refuse_if_unfit(self) -> None:
        self._raise_if_dead()
        if self._dirty_reason is not None:
            raise EngineError(f"the engine is dirty: {self._dirty_reason}")

    def _refuse(self, request: GenerateRequest) -> None:
        self._raise_if_dead()
        if request.wave is not None:
            raise DataError(
                f"request {request.request_id} belongs to a wave: what {self._traits.product} samples depends on which "
                "requests share a pass. Engines that can: embedded, fake. Set generator.engine, or run.deterministic "
                "false"
            )
        self._refuse_if_unfit()
        if request.request_id in self._lives:
            raise EngineError(f"request id {request.request_id} is in use; ids must be unique while a request lives")
        adapter = None if self.adapters is None else self.adapters.shelf.ask(request.adapter)
        served = self._policy_version if adapter is None else adapter.policy_version
        if request.min_policy_version > served:
            raise EngineError(
                f"request {request.request_id} wants policy version {request.min_policy_version} or newer, this engine "
                f"serves {served}; send it to another replica or wait for the next load"
            )

    async def _serve(self, live: Live) -> None:
        """Return when the request has ended, and what came of it may go out; or past its deadline."""
        deadline_s = live.request.deadline_s
        until_s = None if deadline_s == math.inf else asyncio.get_running_loop().time() + deadline_s
        with contextlib.suppress(TimeoutError):  # it ends with what it has
            while live.reason is None and not live.gave_up:
                async with asyncio.timeout_at(until_s):
                    await self._until(lambda: live.gave_up or self._first_in_line() is live)
                if not live.gave_up:
                    self._send(live)
                    await self._run(live, until_s=until_s)
            async with asyncio.timeout_at(until_s):
                await self._until(lambda: live.gave_up or not self._peeked)

    def _first_in_line(self) -> Live | None:
        if not self._gate_open or self._sent() >= self._traits.max_num_seqs:
            return None
        return next((live for live in self._queue if live.group not in self._leading), None)

    def _send(self, live: Live) -> None:
        self._queue.remove(live)
        live.withdrawn, live.sent_s = False, self._clock.now_s()
        live.adapter = None if self.adapters is None else self.adapters.shelf.served(live.request.adapter)
        live.serve_under(self._policy_version if live.adapter is None else live.adapter.policy_version)
        if live.group is not None and self._traits.waits_for_siblings:
            self._leading[live.group] = live
        self._note_change()

    async def _run(self, live: Live, *, until_s: float | None) -> None:
        """Have the server work on a request until it ends, is taken back or told to end, or its time is over."""
        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read(live))
                reading.add_done_callback(lambda _: self._note_change())
                try:
                    async with asyncio.timeout_at(until_s):
                        await self._until(lambda: reading.done() or live.gave_up or live.withdrawn)
                except TimeoutError:
                    live.gave_up = True
                if not reading.done():
                    await self._cut(live, reading)
        except BaseExceptionGroup as group:  # one of several: the first says why
            raise group.exceptions[0] from group.exceptions[0].__cause__
        finally:
            self._lead_no_more(live)
        if live.withdrawn and live.reason is None:
            live.sent_s, live.server_id = None, self._new_id()
            self._queue.appendleft(live)
            self._note_change()

    async def _read(self, live: Live) -> None:
        salt = f"{self._policy_version}.{self._flushes}"
        asked, before = live.to_send(), live.count
        if before:  # sent anew: its own tokens are a prompt now
            self._prefill_tokens += len(asked.prompt_ids)
        async for delta in self._port.generate(
            asked, server_id=live.server_id, max_tokens=live.capacity - before, salt=salt
        ):
            if before:
                delta = msgspec.structs.replace(delta, cached_tokens=None)
            self._count_prefill(live, delta)
            if live.first_token_s is None and len(delta.output_ids):
                self._lead_no_more(live)
            live.take(delta, now_s=self._clock.now_s())
            if not self._peeked:
                self._tell(live)

    async def _cut(self, live: Live, reading: asyncio.Task[None]) -> None:
        """End a request at the server: by its id while it runs, by hanging up while it is frozen."""
        with contextlib.suppress(
            TimeoutError
        ):  # then it is hung up on; whether the server lives is for the port to say
            async with asyncio.timeout(0 if live.withdrawn else self._traits.hang_up_s):
                while not (reading.done() or self._frozen or self._port.cause):
                    await self._port.cancel(live.server_id)
                    await asyncio.wait({reading}, timeout=_CANCEL_AGAIN_S)
        reading.cancel()

    async def _end_all(self, *, patience_s: float | None = None) -> None:
        """End everything with what it has, also what waits here."""
        # Those of now: what comes later waits for the end of the pause.
        ending = tuple(self._lives.values())
        for live in ending:
            live.gave_up = True
        self._note_change()
        async with self._within("the end of all requests", patience_s=patience_s):
            await self._until(lambda: all(live.over.is_set() for live in ending))

    def _tell(self, live: Live) -> None:
        self._output_tokens += live.tell()

    def _count_prefill(self, live: Live, delta: Delta) -> None:
        if live.first_token_s is None and len(delta.output_ids):
            self._prefill_tokens += len(live.request.prompt_ids)
        if delta.cached_tokens is not None:  # some servers tell it with the first token, some at the end
            more = delta.cached_tokens - live.cached_tokens
            self._cached_tokens += more
            self._prefill_tokens -= more

    def _lead_no_more(self, live: Live) -> None:
        if live.group is not None and self._leading.get(live.group) is live:
            del self._leading[live.group]
            self._note_change()

    def _forget(self, live: Live) -> None:
        del self._lives[live.request.request_id]
        if live in self._queue:
            self._queue.remove(live)
        live.over.set()
        self._note_change()

    def _sent(self) -> int:
        return sum(live.sent_s is not None for live in self._lives.values())

    def _new_id(self) -> str:
        # Of one length: no id begins with another. Never used twice: some servers end an id again after it has ended.
        return f"{self._family}{next(self._numbers):010d}"

    # -- weights

    async def _freeze(self) -> None:
        if not self._frozen:
            self._must_thaw = True
            await self._port.freeze()
            self._frozen = True

    def _repeated(self, policy_version: int, *, digest: str) -> UpdateReport:
        if digest != self._digest:
            raise WeightMismatch(
                f"policy version {policy_version} is served with another digest; two publications share a number",
                published=digest,
                served=self._digest,
            )
        return UpdateReport(policy_version=policy_version, nbytes=0, pause_s=0.0, changed=False)

    async def _load(self, tensors: Mapping[str, torch.Tensor], *, policy_version: int, kv: KvPolicy) -> None:
        """Have the server load weights; whatever goes wrong once it was asked leaves the engine dirty."""
        file = await asyncio.to_thread(self._spool.write, tensors, policy_version=policy_version)
        unproven_before = self._unproven
        self._loading = True
        self._note_change()
        try:
            if kv == "keep":
                await self._take_back_unstarted()
            self._unproven = policy_version
            await self._port.load_weights(file, policy_version=policy_version, kv=kv)
        except EngineDead:
            raise
        except WeightError:
            self._unproven = unproven_before
            raise
        except RollmillError as error:
            self._dirty_reason = f"its load of policy version {policy_version} failed: {error}"
            await self._end_all()
            raise EngineError(f"{self._dirty_reason}. Nothing is sampled until a version loads") from error
        except BaseException:  # cancelled: nobody can say which weights the server has
            self._dirty_reason = f"its load of policy version {policy_version} was cut short"
            raise
        finally:
            self._loading = False
            self._note_change()
        self._spool.empty()

    async def _take_back_unstarted(self) -> None:
        """Take back what was sent and has no token: it would find prompts in the cache that old weights computed."""
        for live in self._lives.values():
            live.withdrawn = live.sent_s is not None and live.count == 0
        self._note_change()
        async with self._within("the end of requests that have no token yet"):
            await self._until(lambda: not any(live.withdrawn and live.sent_s for live in self._lives.values()))

    def _scorable(self, token_ids: np.ndarray) -> list[int]:
        ids = np.asarray(token_ids, dtype=np.int64)
        traits = self._traits
        if not 2 <= len(ids) < traits.max_model_len or ids.min() < 0 or ids.max() >= traits.vocabulary_size:
            raise DataError(
                f"cannot score {len(ids)} token ids: 2 to {traits.max_model_len - 1} of a vocabulary of "
                f"{traits.vocabulary_size} are accepted"
            )
        return ids.tolist()

    # -- waiting

    def _raise_if_dead(self) -> None:
        cause = self._port.cause
        if cause is not None:
            raise EngineDead(f"{cause}. Its requests are lost; restart the generator") from cause
        if self._closing:
            raise EngineDead(f"the {self._traits.product} engine was closed; start a new one")

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self._change.wait()
            if self._port.cause is not None:
                self._raise_if_dead()

    @contextlib.asynccontextmanager
    async def _within(self, what: str, *, patience_s: float | None = None) -> AsyncIterator[None]:
        patience_s = self._traits.patience_s if patience_s is None else patience_s
        try:
            async with asyncio.timeout(patience_s):
                yield
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the {self._traits.product} server did not bring {what} within {patience_s:g} s; look at its log for "
                "what it is busy with"
            ) from error

    def _note_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
        busy = "decode" if self._sent() else "idle"
        self._meter.switch("weight_load" if self._loading else "paused" if self._paused else busy)
