"""vLLM behind the engine protocol.

| who | waits for | woken by | gives up after |
|---|---|---|---|
| `generate`, not sent | a seat, the end of a pause | who frees one; `resume` | the request's deadline |
| `generate`, sent | the server's reply | the server; a death | the request's deadline: ended with what it has |
| control methods | the control before, the server | the server; a death | `control_deadline_s` a call |
| `pause("drain")` | requests that were sent | their ends; `resume` | the caller's own timeout |
| watching thread | see `rollmill.generator.engines.vllm.watch` | | |

At most `max_num_seqs` requests are with the server; the others wait here, in order of arrival, so that a pause finds
none half sent. Where the server's ways differ from the protocol:

* It scores nothing while it is paused. A score in a pause lets it run for as long as that takes; what it samples
  meanwhile is held back until `resume`, and cut off if the version that sampled it is never proven.
* It dies of an update without a pause: refused here. New requests would hit KV of old weights: each version has a cache
  salt of its own. An update that failed may have changed weights all the same: then the engine is dirty.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from rollmill.clock import Clock
from rollmill.config.precision import resolve_dtype
from rollmill.config.schema import GeneratorSettings
from rollmill.errors import DataError, DeadlineExceeded, EngineDead, EngineError, RollmillError, WeightMismatch
from rollmill.generator.engines.meter import SecondsMeter
from rollmill.generator.engines.protocol import EngineInfo, EngineLoad, KvPolicy, OnTokens, PauseMode, UpdateReport
from rollmill.generator.engines.sequence import check_request
from rollmill.generator.engines.settings import kv_dtype_bytes
from rollmill.generator.engines.vllm.calls import Calls, ServerPaused
from rollmill.generator.engines.vllm.dialect import (
    ABORT_ALL,
    FORGET_KV,
    METRICS,
    PAUSE_ABORT,
    PAUSE_KEEP,
    RESUME,
    WHICH_VERSION,
    Metrics,
    Reply,
    Step,
    abort_step,
    generate_body,
    read_delta,
    read_metrics,
    read_reply,
    read_scores,
    read_version,
    score_body,
    update_steps,
)
from rollmill.generator.engines.vllm.requests import Live, sound_part
from rollmill.generator.engines.vllm.start import ServedModel, StartedServer, client_of
from rollmill.generator.engines.vllm.transfer import check_layout, layout_of, nbytes_of
from rollmill.generator.engines.vllm.watch import ServerWatch
from rollmill.types import GenerateRequest, Turn

if TYPE_CHECKING:
    import torch

CAPABILITIES = (
    "abort",
    "canary",
    "kv_keep",
    "kv_recompute",
    "pause_abort",
    "pause_drain",
    "pause_keep",
    "score",
    "stage",
    "streaming",
    "top_k",
    "top_p",
    "version_spans",
)

_ABORT_AGAIN_S = 0.5
"""An abort that overtakes its request finds nothing; it is repeated until the request has ended."""
_CLOSING_S = 5.0


class VllmEngine:
    """A vLLM server as an engine. Its methods are called from one event loop.

    Args:
        started: the server, serving `policy_version`.
        model: what its `config.json` says.
        settings: those that the server was started with.
        tensors: the weights that it serves; their names and shapes are what later ones must have.
        policy_version: their publication number.
        digest: their digest.
        clock: stamps, deadlines and the seconds ledger.
        meter: began when the server was started.
    """

    def __init__(
        self,
        started: StartedServer,
        *,
        model: ServedModel,
        settings: GeneratorSettings,
        tensors: Mapping[str, torch.Tensor],
        policy_version: int,
        digest: str,
        clock: Clock,
        meter: SecondsMeter,
    ) -> None:
        self._started = started
        self._model = model
        self._settings = settings
        self._layout = layout_of(tensors)
        self._policy_version, self._digest = policy_version, digest
        self._clock = clock
        self._meter = meter
        self._lives: dict[str, Live] = {}
        self._queue: deque[Live] = deque()
        self._numbers = itertools.count(1)
        # What the server counts and no caller asked for: what came before, and scores.
        self._own = started.before
        self._at_pause: tuple[Metrics, Metrics] | None = None
        self._flushes = 0
        self._gate_open, self._paused, self._peeked = True, False, False
        self._unproven: int | None = None
        self._loading = False
        self._dirty_reason: str | None = None
        self._cause: EngineDead | None = None
        self._closing = False
        self._calls: Calls | None = None
        self._change = asyncio.Event()
        self._control = asyncio.Lock()
        self._watch = ServerWatch(
            started.server,
            client=client_of(started.server, timeout_s=settings.vllm.control_deadline_s),
            every_s=settings.vllm.load_poll_s,
            on_death=self._on_death,
        )
        self._watch.start()
        self._meter.switch("idle")

    # -- engine protocol

    def info(self) -> EngineInfo:
        """Return what this engine is and can do."""
        settings, model = self._settings, self._model
        per_token = 0 if model.kv is None else model.kv.bytes_per_token(dtype_bytes=kv_dtype_bytes(settings))
        return EngineInfo(
            kind="vllm",
            model=model.name,
            dtype=resolve_dtype(settings.dtype),
            vocabulary_size=model.vocabulary_size,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            kv_bytes=self._watch.metrics.kv_capacity_tokens * per_token,
            capabilities=(*CAPABILITIES, "prefix_cache") if settings.enable_prefix_caching else CAPABILITIES,
            policy_version=self._policy_version,
            digest=self._digest,
        )

    async def generate(self, request: GenerateRequest, *, on_tokens: OnTokens | None = None) -> Turn:
        """Return the finished or aborted turn, see the engine protocol.

        The time of a prefill is told apart only where tokens are streamed.

        Raises:
            DataError: if the prompt or its parameters do not fit.
            EngineError: if the id is in use, or the engine is dirty.
            EngineDead: if the server died, with its log's first error.

        Cancellation:
            aborts the request and frees its KV.
        """
        settings = self._settings
        check_request(request, vocabulary_size=self._model.vocabulary_size, max_model_len=settings.max_model_len)
        self._refuse(request)
        live = Live(
            request,
            server_id=f"{next(self._numbers):012d}",
            capacity=min(request.sampling.max_new_tokens, settings.max_model_len - len(request.prompt_ids)),
            now_s=self._clock.now_s(),
            on_tokens=on_tokens,
        )
        self._lives[request.request_id] = live
        self._queue.append(live)
        try:
            return await self._generate(live)
        finally:
            self._forget(live)

    async def abort(self, request_id: str) -> bool:
        """Abort exactly this request; its KV is free when this returns."""
        self._here()
        live = self._lives.get(request_id)
        if live is None:
            return False
        await self._end(live)
        return True

    async def pause(self, mode: PauseMode) -> None:
        """Return when no further token can be produced; idempotent.

        `keep` freezes what is with the server, `abort` ends everything with what it has, `drain` lets what is with the
        server finish while the rest stays queued.
        """
        self._here().raise_if_dead()
        self._gate_open = False
        if mode == "drain" and not self._paused:
            await self._until(lambda: self._gate_open or self._paused or not self._sent())
            if self._gate_open:  # resumed meanwhile
                return
        async with self._control:
            if mode == "abort":
                await self._end_all()
            elif not self._paused:
                await self._ask(PAUSE_KEEP)
            self._paused = True
            self._note_change()
            if self._at_pause is None:
                self._at_pause = (read_metrics((await self._ask(METRICS, method="GET")).decode()), self._own)

    async def stage(self, tensors: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Write weights that lie in no file yet into one, in shared memory, while the old ones serve.

        Raises:
            WeightError: if names, shapes or dtypes do not fit, or there is no room.
            EngineDead: if the server died.
        """
        self._here().raise_if_dead()
        check_layout(tensors, expected=self._layout)
        await asyncio.to_thread(self._started.spool.write, tensors, policy_version=policy_version)

    async def update(
        self, tensors: Mapping[str, torch.Tensor], *, policy_version: int, digest: str, kv: KvPolicy
    ) -> UpdateReport:
        """Swap the weights in place; only while paused; a repeated version is a no-op.

        Raises:
            EngineError: if not paused, if the version does not rise, or if the server failed half way: the engine is
                dirty then, requests ended with what they had.
            WeightError: if names, shapes or dtypes do not fit; nothing was changed.
            WeightMismatch: if the version is served with another digest.
        """
        async with self._control:
            self._here().raise_if_dead()
            if not self._paused:
                raise EngineError(f"update to policy version {policy_version} while running: pause the engine first")
            if policy_version == self._policy_version and self._dirty_reason is None:
                return self._repeated(policy_version, digest=digest)
            if policy_version < self._policy_version:
                raise EngineError(
                    f"update to policy version {policy_version}, but {self._policy_version} is served: versions only "
                    "rise"
                )
            check_layout(tensors, expected=self._layout)
            path = await asyncio.to_thread(self._started.spool.write, tensors, policy_version=policy_version)
            started_s = self._clock.now_s()
            await self._load(str(path), policy_version=policy_version, kv=kv)
            self._policy_version, self._digest, self._dirty_reason = policy_version, digest, None
            self._started.spool.empty()
            return UpdateReport(
                policy_version=policy_version,
                nbytes=nbytes_of(tensors),
                pause_s=self._clock.now_s() - started_s,
                changed=True,
            )

    async def resume(self) -> None:
        """Produce tokens again; what was held back goes out. Idempotent."""
        async with self._control:
            self._here().raise_if_dead()
            if self._paused:
                await self._ask(RESUME)
            self._paused, self._gate_open, self._peeked, self._unproven = False, True, False, None
            self._at_pause = None
            self._note_change()

    async def flush(self) -> None:
        """No later request hits KV made before this call: it has another salt."""
        self._here().raise_if_dead()
        self._flushes += 1

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return float32 [n - 1] log-probs under temperature 1; works while paused, see the module."""
        ids = np.asarray(token_ids, dtype=np.int64)
        if (
            not 2 <= len(ids) < self._settings.max_model_len
            or ids.min() < 0
            or ids.max() >= self._model.vocabulary_size
        ):
            raise DataError(
                f"cannot score {len(ids)} token ids: 2 to {self._settings.max_model_len - 1} of a vocabulary of "
                f"{self._model.vocabulary_size} are accepted"
            )
        async with self._control:
            self._here().raise_if_dead()
            if not self._paused:
                return await self._score(ids)
            self._peeked = True
            try:
                await self._ask(RESUME)
                return await self._score(ids)
            finally:
                # Should this fail, what is sampled is still held back, and the next pause("abort") ends it.
                await self._ask(PAUSE_KEEP)

    def load(self) -> EngineLoad:
        """Return how busy the engine is. Tokens and KV are those of the watch's last look, or of a pause's begin."""
        metrics, own = self._at_pause or (self._watch.metrics, self._own)
        wall_s, seconds = self._meter.read()
        sent = self._sent()
        # The server counts its KV when it makes a step, and makes none after the last request.
        kv_used = metrics.kv_used if sent else 0.0
        return EngineLoad(
            running=sent,
            waiting=len(self._lives) - sent,
            kv_used_tokens=round(kv_used * metrics.kv_capacity_tokens),
            kv_capacity_tokens=metrics.kv_capacity_tokens,
            paused=self._paused,
            policy_version=self._policy_version,
            output_tokens=max(0, metrics.output_tokens - own.output_tokens),
            prefill_tokens=max(
                0, metrics.prompt_tokens - metrics.cached_tokens - own.prompt_tokens + own.cached_tokens
            ),
            cached_tokens=max(0, metrics.cached_tokens - own.cached_tokens),
            preemptions=max(0, metrics.preemptions - own.preemptions),
            wall_s=wall_s,
            seconds=seconds,
        )

    def healthy(self) -> bool:
        """Return whether requests can be served: the server lives and its weights are whole."""
        return self._cause is None and not self._closing and self._dirty_reason is None

    async def close(self) -> None:
        """End all requests with what they have, then the server; idempotent."""
        first = not self._closing
        calls, self._closing, self._gate_open = self._here(), True, False
        self._note_change()
        if first and calls.cause is None:
            with contextlib.suppress(RollmillError):  # then the server's end ends them
                async with self._control:
                    await self._end_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSING_S):
                    await self._until(lambda: not self._lives)
        if first:
            await asyncio.to_thread(self._watch.stop)
            await asyncio.to_thread(self._started.stop)
            calls.end_all(EngineDead("the vLLM engine was closed; start a new one"))
            self._note_change()
            await calls.close()
            self._meter.switch("shutdown")

    # -- requests

    def _refuse(self, request: GenerateRequest) -> None:
        self._here().raise_if_dead()
        if self._closing:
            raise EngineDead("the vLLM engine was closed; start a new one")
        if request.wave is not None:
            raise DataError(
                f"request {request.request_id} belongs to a wave: what vLLM samples depends on which requests share a "
                "pass. Engines that can: embedded, fake. Set generator.engine, or run.deterministic false"
            )
        if self._dirty_reason is not None:
            raise EngineError(f"the engine is dirty: {self._dirty_reason}")
        if request.request_id in self._lives:
            raise EngineError(f"request id {request.request_id} is in use; ids must be unique while a request lives")
        if request.min_policy_version > self._policy_version:
            raise EngineError(
                f"request {request.request_id} wants policy version {request.min_policy_version} or newer, this engine "
                f"serves {self._policy_version}; send it to another replica or wait for the next load"
            )

    async def _generate(self, live: Live) -> Turn:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + live.request.deadline_s
        reply: Reply | None = None
        with contextlib.suppress(TimeoutError):
            while reply is None and await self._get_seat(live, until_s=until_s):
                try:
                    reply = await self._run(live, until_s=until_s)
                except ServerPaused:
                    # A pause overtook it: it waits here. Without one of ours, somebody else commands the server.
                    if self._gate_open:
                        raise
        if reply is not None:
            reply = await self._let_out(live, reply, until_s=until_s)
        return live.turn(reply, now_s=self._clock.now_s())

    async def _get_seat(self, live: Live, *, until_s: float) -> bool:
        """Return whether the request may be sent now; false if it was aborted before."""

        def first_in_line() -> bool:
            return self._gate_open and self._queue[0] is live and self._sent() < self._settings.max_num_seqs

        async with asyncio.timeout_at(None if until_s == math.inf else until_s):
            await self._until(lambda: live.gave_up or first_in_line())
        if live.gave_up:
            return False
        self._queue.remove(live)
        live.sent_s = self._clock.now_s()
        self._note_change()
        return True

    async def _run(self, live: Live, *, until_s: float) -> Reply:
        """Send a request; past its deadline end it, and return what came."""
        try:
            async with asyncio.TaskGroup() as tasks:
                call = tasks.create_task(self._call(live))
                left_s = until_s - asyncio.get_running_loop().time()
                await asyncio.wait({call}, timeout=None if left_s == math.inf else max(0.0, left_s))
                if not call.done():
                    tasks.create_task(self._abort_until(call, live))
            return call.result()
        except BaseExceptionGroup as group:
            self._unsend(live)
            raise group.exceptions[0] from group.exceptions[0].__cause__

    def _unsend(self, live: Live) -> None:
        live.sent_s = None
        if live not in self._queue:
            self._queue.appendleft(live)

    async def _call(self, live: Live) -> Reply:
        stream = live.stream
        body = generate_body(
            live.request,
            server_id=live.server_id,
            max_tokens=live.capacity,
            salt=f"{self._policy_version}.{self._flushes}",
            stream=stream is not None,
        )
        calls = self._here()
        if stream is None:
            return read_reply(await calls.generate(body), server_id=live.server_id)
        finished, cached = None, 0
        async for line in calls.stream(body):
            try:
                delta = read_delta(line, server_id=live.server_id, n_before=stream.count)
            except EngineError:
                await calls.doubt()
                raise
            if delta is None:
                continue
            if live.first_token_s is None and len(delta.output_ids):
                live.first_token_s = self._clock.now_s()
            stream.take(delta)
            finished = delta.finished or finished
            cached = cached if delta.cached_tokens is None else delta.cached_tokens
            if not self._paused and not self._loading:
                stream.tell(policy_version=self._policy_version)
        if finished is None:
            raise EngineError(f"request {live.server_id}: the server's stream ended without saying why")
        ids, logprobs = stream.arrays()
        return Reply(output_ids=ids, logprobs=logprobs, spans=finished[1], reason=finished[0], cached_tokens=cached)

    async def _let_out(self, live: Live, reply: Reply, *, until_s: float) -> Reply:
        """Return what of a reply is sound, once that is known."""
        with contextlib.suppress(TimeoutError):  # past its deadline it goes without what is not proven
            async with asyncio.timeout_at(None if until_s == math.inf else until_s):
                await self._until(lambda: not self._peeked or live.gave_up or self._closing)
        reply = sound_part(reply, unproven=self._unproven)
        if live.stream is not None:
            live.stream.tell_rest(reply.spans)
        return reply

    async def _end(self, live: Live) -> None:
        """End a request with what it has, and return when its KV is free and its caller has it."""
        live.gave_up = True
        self._note_change()
        if live.sent_s is not None:
            async with self._within("the end of an aborted request"):
                while not live.over.is_set():
                    await self._ask(abort_step(live.server_id))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_ABORT_AGAIN_S):
                            await live.over.wait()
                await self._ask(WHICH_VERSION, method="GET")
        await live.over.wait()

    async def _end_all(self) -> None:
        """Pause, and end everything with what it has: what waits here and what is with the server."""
        # Those of now: what comes later waits for the end of the pause.
        ending = tuple(self._lives.values())
        for live in ending:
            live.gave_up = True
        self._note_change()
        await self._ask(PAUSE_ABORT)
        async with self._within("the end of all requests"):
            # One that arrives at the server only now finds it paused, and would wait there.
            while not all(live.over.is_set() for live in ending):
                await self._ask(ABORT_ALL)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ABORT_AGAIN_S):
                        await self._until(lambda: all(live.over.is_set() for live in ending))

    async def _abort_until(self, call: asyncio.Task[Reply], live: Live) -> None:
        async with self._within(f"the end of request {live.request.request_id}, which is past its deadline"):
            while not call.done():
                await self._ask(abort_step(live.server_id))
                await asyncio.wait({call}, timeout=_ABORT_AGAIN_S)

    def _forget(self, live: Live) -> None:
        del self._lives[live.request.request_id]
        if live in self._queue:
            self._queue.remove(live)
        live.over.set()
        self._note_change()

    def _sent(self) -> int:
        return sum(live.sent_s is not None for live in self._lives.values())

    # -- weights

    def _repeated(self, policy_version: int, *, digest: str) -> UpdateReport:
        if digest != self._digest:
            raise WeightMismatch(
                f"policy version {policy_version} is served with another digest; two publications share a number",
                published=digest,
                served=self._digest,
            )
        return UpdateReport(policy_version=policy_version, nbytes=0, pause_s=0.0, changed=False)

    async def _load(self, path: str, *, policy_version: int, kv: KvPolicy) -> None:
        """Have the server load a file; whatever goes wrong after the first call leaves the engine dirty."""
        for live in self._lives.values():
            if live.stream is not None and live.sent_s is not None:
                live.stream.doubt()
        again = self._dirty_reason is not None
        self._loading = True
        self._note_change()
        try:
            # Until the end is reached nobody can say which weights the server has.
            self._dirty_reason = f"its load of policy version {policy_version} was cut short"
            self._unproven = policy_version
            if again:
                await self._close_half_done()
            if kv == "recompute":
                await self._ask(FORGET_KV)
            for step in update_steps(path, policy_version=policy_version):
                await self._ask(step)
            label = read_version(await self._ask(WHICH_VERSION, method="GET"))
            if label != str(policy_version):
                raise EngineError(f"after the update the server says that it serves {label!r}")
        except BaseException as error:
            why = str(error) if isinstance(error, RollmillError) else f"it was cut short ({type(error).__name__})"
            self._dirty_reason = f"its load of policy version {policy_version} failed half way: {why}"
            if isinstance(error, EngineDead) or not isinstance(error, RollmillError):
                raise
            await self._end_all()
            raise EngineError(f"{self._dirty_reason}. Nothing is sampled until a version loads") from error
        finally:
            self._loading = False
            self._note_change()

    async def _close_half_done(self) -> None:
        """End an update that was begun and not finished, so that another can begin; there may be none."""
        with contextlib.suppress(EngineError):
            self._here().raise_if_dead()
            await self._ask(Step(path="/finish_weight_update", body={"weight_version": "half done"}))
        self._here().raise_if_dead()

    async def _score(self, ids: np.ndarray) -> np.ndarray:
        server_id = f"{next(self._numbers):012d}"
        given: list[int] = ids.tolist()
        body = score_body(given, server_id=server_id, salt=f"score.{server_id}")
        reply = await self._here().generate(body, deadline_s=self._settings.vllm.control_deadline_s)
        self._own = msgspec.structs.replace(
            self._own,
            output_tokens=self._own.output_tokens + 1,
            prompt_tokens=self._own.prompt_tokens + len(given),
        )
        return read_scores(reply, token_ids=given, server_id=server_id)

    # -- waiting

    def _here(self) -> Calls:
        """Return the calls of this event loop, made at the first one."""
        if self._calls is None:
            self._calls = Calls(self._started.server, look=self._watch.look)
            if self._cause is not None:
                self._calls.end_all(self._cause)
        return self._calls

    async def _ask(self, step: Step, *, method: str = "POST") -> bytes:
        return await self._here().ask(step, method=method, deadline_s=self._settings.vllm.control_deadline_s)

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self._change.wait()
            self._here().raise_if_dead()

    @contextlib.asynccontextmanager
    async def _within(self, what: str) -> AsyncIterator[None]:
        deadline_s = self._settings.vllm.control_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                yield
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the vLLM server did not bring {what} within generator.vllm.control_deadline_s {deadline_s:g}; look "
                "at its log for what it is busy with"
            ) from error

    def _on_death(self, cause: EngineDead) -> None:
        """Called by the watch, on its thread."""
        self._cause = cause
        calls = self._calls
        if calls is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everybody who waits
                calls.loop.call_soon_threadsafe(self._hear_of_death, cause)

    def _hear_of_death(self, cause: EngineDead) -> None:
        self._here().end_all(cause)
        self._note_change()

    def _note_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
        busy = "decode" if self._sent() else "idle"
        self._meter.switch("weight_load" if self._loading else "paused" if self._paused else busy)


def start_vllm(
    path: str | Path,
    *,
    settings: GeneratorSettings,
    tensors: Mapping[str, torch.Tensor],
    policy_version: int,
    digest: str,
    clock: Clock,
    log: Path | None = None,
) -> VllmEngine:
    """Return an engine whose server serves these weights. Blocks until it does: half a minute and more.

    Args:
        path: local Hugging Face directory; only its configuration is read.
        settings: of the generator.
        tensors: the first weights.
        policy_version: their publication number.
        digest: their digest.
        clock: deadlines, timings and the seconds ledger.
        log: file for what the server prints; in a folder that goes with it if `None`.

    Raises:
        MissingExtraError: if there is no environment with vLLM.
        ConfigError: if the environment or a setting cannot be used.
        ModelError: if the model's configuration says too little.
        EngineError: if the server does not start, with its first error.
        DeadlineExceeded: if it takes too long.
        WeightError: if the weights cannot be handed over.
    """
    meter = SecondsMeter(clock, cause="startup")
    model = ServedModel.read(path)
    settings = settings.model_copy(update={"max_model_len": min(settings.max_model_len, model.max_positions)})
    started = StartedServer.launched(
        path, settings=settings, model=model, tensors=tensors, policy_version=policy_version, log=log, clock=clock
    )
    return VllmEngine(
        started,
        model=model,
        settings=settings,
        tensors=tensors,
        policy_version=policy_version,
        digest=digest,
        clock=clock,
        meter=meter,
    )
