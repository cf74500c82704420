"""The embedded engine: one worker thread around `EngineCore`, with async methods in front.

| who | waits for | woken by | gives up after |
|---|---|---|---|
| worker thread | commands, or a request deadline | a command (condition) | never; ends by `close` or an error |
| caller of `generate` | its turn | the worker | the request's own deadline |
| caller of `stage` | weights written into spare buffers | the staging thread | the caller's own timeout |
| caller of any other method | the end of the step that runs | the worker | the caller's own timeout |
| caller of `close` | the end of the step, and of the tensor that is being staged | both threads | `_JOIN_S` each |

Decides nothing about batching; that is the core's. No method polls or sleeps.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from rollmill.clock import Clock
from rollmill.errors import EngineDead, EngineError, ModelError
from rollmill.generator.engines.embedded import rewards
from rollmill.generator.engines.embedded.capabilities import capabilities_of
from rollmill.generator.engines.embedded.core import EngineCore
from rollmill.generator.engines.embedded.desk import AdapterDesk
from rollmill.generator.engines.embedded.drafting import Drafter, DraftModel, draft_for
from rollmill.generator.engines.embedded.kv import KvCache
from rollmill.generator.engines.embedded.letters import Letters
from rollmill.generator.engines.embedded.low_rank import LowRank
from rollmill.generator.engines.embedded.memory import host_tier, kv_budget
from rollmill.generator.engines.embedded.model import ServedModel
from rollmill.generator.engines.embedded.settings import EmbeddedSettings, Limits, SpeculationChoice, limits_of
from rollmill.generator.engines.embedded.speculation import Guesser, Speculator
from rollmill.generator.engines.meter import SecondsMeter
from rollmill.generator.engines.protocol import (
    AdapterInfo,
    EngineInfo,
    EngineLoad,
    KvPolicy,
    OnTokens,
    PauseMode,
    Reward,
    UpdateReport,
)
from rollmill.generator.engines.sequence import Deliver, Sequence, check_request
from rollmill.priority import lower_thread_priority
from rollmill.types import GenerateRequest, Turn

R = TypeVar("R")
_log = logging.getLogger(__name__)

_JOIN_S = 30.0
"""Longest wait for the worker to finish its step, and for staging to finish its tensor, when the engine ends."""


class EmbeddedEngine:
    """Continuous batching over unmodified transformers modules on this process's CPU.

    Args:
        path: local Hugging Face directory; its configuration is read, its weights are not.
        settings: how it computes.
        tensors: the first weights.
        policy_version: their publication number.
        digest: their digest.
        clock: deadlines, timings and the seconds ledger.
        draft: the small model that guesses where `settings.speculation` is `draft`, of the same vocabulary.
        before_step: called on the worker thread before each step; an exception from it kills the engine. For fault
            injection and for tests that hold the engine between two steps.
        model: made from these arguments before, and holding these weights; made here if `None`.

    Raises:
        ConfigError: if the memory that is given holds no sequence, or a pass no prompt; if the draft is missing, or of
            another vocabulary.
        ModelError: if the architecture cannot be served.
        WeightError: if the tensors do not fit it.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        settings: EmbeddedSettings,
        tensors: Mapping[str, torch.Tensor],
        policy_version: int,
        digest: str,
        clock: Clock,
        draft: DraftModel | None = None,
        before_step: Callable[[], None] | None = None,
        model: ServedModel | None = None,
    ) -> None:
        if model is None:
            model = _new_model(path, settings=settings, tensors=tensors)
        rewards.refuse_settings(model, speculation=settings.speculation, max_loras=settings.max_loras)
        # Building the engine is its process's start-up; the engine's own seconds begin when it is made.
        self._clock, self._meter = clock, SecondsMeter(clock, cause="startup")
        limits = limits_of(settings, context_len=model.context_len)
        draft = draft_for(model, speculation=settings.speculation, draft=draft)
        self._budget = kv_budget(settings, limits=limits, model=model, draft=draft)
        self._tier = host_tier(
            settings.host_kv_directory, nbytes=settings.host_kv_bytes, budget=self._budget, clock=clock
        )
        _log.info("%s", self._kv_text())
        kept = self._budget if settings.enable_prefix_caching else self._budget.without_idle()
        kv = KvCache(model, budget=kept, tier=self._tier)
        self._core = EngineCore(
            model,
            policy_version=policy_version,
            digest=digest,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            kv=kv,
            max_wait_s=settings.max_wait_ms / 1e3,
            speculator=_guesser(settings.speculation, draft=draft, kv=kv, limits=limits),
            max_loras=settings.max_loras,
            clock=clock,
            meter=self._meter,
        )
        self._before_step = before_step
        self._rewards = itertools.count(1)
        self._start_threads()
        self._desk = None if model.low_rank is None else self._new_desk(model.low_rank, settings=settings)
        atexit.register(self._close_at_exit)

    def _start_threads(self) -> None:
        self._wake = threading.Condition()
        self._letters = Letters()
        self._commands: deque[Callable[[], None]] = deque()
        self._pending: set[Future] = set()
        self._drains: list[Future[None]] = []
        self._cause: BaseException | None = None
        self._closing = False
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="rollmill-engine", daemon=True)
        self._thread.start()
        # One thread: what is staged next waits until what was given up has let go of the spare buffers.
        self._stager = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="rollmill-staging", initializer=lower_thread_priority
        )

    def _new_desk(self, low_rank: LowRank, *, settings: EmbeddedSettings) -> AdapterDesk:
        return AdapterDesk(
            self._core,
            low_rank=low_rank,
            max_lora_rank=settings.max_lora_rank,
            between_steps=self._call,
            beside=self._on_stager,
        )

    # -- engine protocol

    @property
    def adapters(self) -> AdapterDesk | None:
        """Load adapters and serve them beside the weights; `None` if the engine was made without places for them."""
        return self._desk

    def info(self) -> EngineInfo:
        """Return what this engine is and can do."""
        core, model = self._core, self._core.model
        return EngineInfo(
            kind="embedded",
            model=model.name,
            dtype="int8" if model.quantization == "int8" else str(model.dtype).removeprefix("torch."),
            vocabulary_size=model.vocabulary_size,
            max_model_len=core.max_model_len,
            max_num_seqs=core.max_num_seqs,
            kv_bytes=self._budget.nbytes,
            capabilities=capabilities_of(
                labels=model.labels,
                native_kernels=model.native_kernels,
                host_kv=self._tier is not None,
                adapters=self._desk is not None,
            ),
            policy_version=core.policy_version,
            digest=core.digest,
            kv_budget=self._kv_text(),
            adapters=tuple(
                AdapterInfo(name=one.name, policy_version=one.policy_version, digest=one.digest)
                for one in core.shelf.loaded
            ),
        )

    def _kv_text(self) -> str:
        tier = self._tier
        more = "" if tier is None else f"; {tier.capacity} more on the host ({tier.capacity_bytes / 1e6:.0f} MB)"
        return self._budget.text() + more

    async def generate(self, request: GenerateRequest, *, on_tokens: OnTokens | None = None) -> Turn:
        """Return the finished or aborted turn, see the engine protocol.

        Raises:
            DataError: if the prompt or its parameters do not fit.
            ModelError: if its adapter is not loaded.
            EngineError: if the id is in use or the engine is dirty.
            EngineDead: if the worker thread has ended, with its first error as the cause.

        Cancellation:
            aborts the request and frees its KV at the next step.
        """
        core = self._core
        rewards.refuse_generation(core.model, asked=f"request {request.request_id} asks for tokens")
        check_request(
            request,
            vocabulary_size=core.model.vocabulary_size,
            max_model_len=core.max_model_len,
            adapters=self._desk is not None,
        )
        turn: Future[Turn] = Future()
        sequence = self._sequence(request, lambda result: self._settle(turn, result), on_tokens=on_tokens)
        return await self._served(sequence, turn)

    async def reward(self, token_ids: np.ndarray, *, deadline_s: float) -> Reward:
        """Return what the reward head says of a whole sequence; several in flight share a pass.

        Raises:
            DataError: if the ids do not fit.
            EngineError: if the model has no reward head, or the engine stopped or is dirty; `EngineDead` if it died.
            DeadlineExceeded: if it was not scored in time.

        Cancellation:
            takes the sequence out of the queue.
        """
        ids = rewards.scored_ids(self._core.model, token_ids, max_model_len=self._core.max_model_len)
        reward: Future[Reward] = Future()

        def deliver(result: Turn | Exception) -> None:
            over = result if isinstance(result, Exception) else rewards.outcome(sequence, now_s=self._clock.now_s())
            self._settle(reward, over)

        asked = rewards.request_of(ids, name=f"\x00reward {next(self._rewards)}", deadline_s=deadline_s)
        sequence = self._sequence(asked, deliver)
        return await self._served(sequence, reward)

    def _sequence(self, request: GenerateRequest, deliver: Deliver, *, on_tokens: OnTokens | None = None) -> Sequence:
        return Sequence(
            request,
            max_model_len=self._core.max_model_len,
            now_s=self._clock.now_s(),
            deliver=deliver,
            on_tokens=None if on_tokens is None else self._letters.to(asyncio.get_running_loop(), on_tokens),
        )

    async def _served(self, sequence: Sequence, result: Future[R]) -> R:
        core = self._core

        def submit() -> None:
            try:
                core.submit(sequence)
            except (EngineError, ModelError) as error:
                sequence.deliver(error)

        self._post(submit, result)
        try:
            return await asyncio.wrap_future(result)
        except asyncio.CancelledError:
            self._post(lambda: core.abort_one(sequence), None)
            raise

    async def abort(self, request_id: str) -> bool:
        """Abort exactly this request; its KV is free when this returns."""
        return await self._call(lambda: self._core.abort(request_id))

    async def pause(self, mode: PauseMode) -> None:
        """Return when no further token can be produced; idempotent.

        `keep` freezes requests, `abort` ends them with what they have, `drain` lets those in the batch finish while
        waiting ones stay queued.
        """
        if mode != "drain":
            await self._call(lambda: self._pause_now(abort=mode == "abort"))
            return
        drained: Future[None] = Future()
        self._post(lambda: self._begin_drain(drained), drained)
        await asyncio.wrap_future(drained)

    async def stage(self, tensors: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Make weights ready in spare buffers, on a thread that lets others go first, while the engine goes on.

        Raises:
            WeightError: if names, shapes or dtypes do not fit.
            EngineError: if the weights could not be made ready; `EngineDead` if the engine ended meanwhile.

        Cancellation:
            the work ends at the next tensor, and nothing is ready.
        """
        given_up = threading.Event()

        def gives_up() -> bool:
            return given_up.is_set() or self._closing

        def write() -> bool:
            return self._core.staging.write(tensors, policy_version=policy_version, gives_up=gives_up)

        try:
            ready = await self._on_stager(write)
        except asyncio.CancelledError:
            given_up.set()
            raise
        if not ready:
            raise self._dead()

    async def update(
        self, tensors: Mapping[str, torch.Tensor], *, policy_version: int, digest: str, kv: KvPolicy
    ) -> UpdateReport:
        """Swap the weights; only while paused; all or nothing; a repeated version is a no-op.

        Raises:
            EngineError: if not paused, if the version does not rise, or if copying failed half way (the engine is dirty
                then and serves nothing until a later version loads).
            WeightError: if names, shapes or dtypes do not fit; nothing was changed.
        """
        return await self._call(lambda: self._core.update(tensors, policy_version=policy_version, digest=digest, kv=kv))

    async def resume(self) -> None:
        """Produce tokens again; idempotent."""
        await self._call(self._resume_now)

    async def flush(self) -> None:
        """No later request hits KV made before this call."""
        await self._call(self._core.flush)

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return float32 [n - 1] log-probs under temperature 1; works while paused."""
        rewards.refuse_generation(self._core.model, asked="log-probs are asked for")
        return await self._call(lambda: self._score_now(token_ids))

    def load(self) -> EngineLoad:
        """Return how busy the engine is and where its seconds went."""
        core = self._core
        wall_s, seconds = self._meter.read()
        return EngineLoad(
            running=len(core.running),
            waiting=len(core.waiting) + len(core.gate.held),
            kv_used_tokens=core.kv_used_tokens,
            kv_capacity_tokens=core.kv.store.total * core.kv.store.size,
            paused=core.paused,
            policy_version=core.policy_version,
            output_tokens=core.output_tokens,
            prefill_tokens=core.prefill_tokens,
            cached_tokens=core.cached_tokens,
            wall_s=wall_s,
            seconds=seconds,
            deferred=len(core.gate.held),
            decode_passes=core.decode_passes,
            preemptions=core.preemptions,
            guessed_tokens=0 if core.speculator is None else core.speculator.guessed,
            accepted_tokens=0 if core.speculator is None else core.speculator.accepted,
            host_kv=None if self._tier is None else self._tier.load(),
        )

    def healthy(self) -> bool:
        """Return whether requests can be served: the thread lives and the weights are whole."""
        return self._cause is None and not self._closing and self._core.dirty_reason is None

    async def close(self) -> None:
        """End all requests with what they have, then the worker thread; idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        with contextlib.suppress(TimeoutError):  # a step that hangs in a kernel or at a dead disk
            async with asyncio.timeout(_JOIN_S):
                await asyncio.shield(asyncio.wrap_future(self._ended))
        # Joined, not only ended: a thread that still unwinds while the interpreter goes down aborts the process.
        await asyncio.to_thread(self._thread.join, _JOIN_S)
        with contextlib.suppress(TimeoutError):  # a tensor that cannot be read must not hold up the end
            async with asyncio.timeout(_JOIN_S):
                await asyncio.to_thread(self._stager.shutdown)
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """End the worker of an engine that nobody closed, before the interpreter pulls the ground from under it."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(_JOIN_S)

    # -- handing over to the worker

    async def _on_stager(self, work: Callable[[], R]) -> R:
        with self._wake:
            if self._closing:
                raise self._dead()
            future = self._stager.submit(work)
        return await asyncio.wrap_future(future)

    async def _call(self, command: Callable[[], R]) -> R:
        done: Future[R] = Future()

        def run() -> None:
            try:
                self._settle(done, command())
            except Exception as error:  # delivered to the caller whole; the worker goes on
                self._settle(done, error)

        self._post(run, done)
        return await asyncio.wrap_future(done)

    def _post(self, command: Callable[[], None], future: Future | None) -> None:
        """Queue a command; the future fails if the worker is gone or dies before it runs."""
        with self._wake:
            if self._ended.done() or self._closing:
                if future is not None:
                    raise self._dead()
                return
            if future is not None:
                # A caller that gives up cancels its own asyncio future; this one stays the worker's to settle.
                future.set_running_or_notify_cancel()
                self._pending.add(future)
            self._commands.append(command)
            self._wake.notify()

    def _settle(self, future: Future, result: object) -> None:
        self._letters.send()  # a caller hears its tokens before it has its turn
        with self._wake:
            if future not in self._pending:
                return
            self._pending.discard(future)
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _dead(self) -> EngineDead:
        if self._cause is None:
            return EngineDead("the embedded engine was closed; start a new one")
        error = EngineDead(
            f"the embedded engine's thread ended with {type(self._cause).__name__}: {self._cause}. Its requests are "
            "lost; restart the generator"
        )
        error.__cause__ = self._cause
        return error

    # -- on the worker thread

    def _run(self) -> None:
        try:
            while True:
                commands = self._next_commands()
                if commands is None:
                    break
                for command in commands:
                    command()
                if self._core.has_work() and self._before_step is not None:
                    self._before_step()
                self._core.step()
                self._letters.send()
                self._end_drains()
        except BaseException as error:  # whatever it was, nobody else would hear of it
            self._cause = error
        self._finish()

    def _next_commands(self) -> deque[Callable[[], None]] | None:
        with self._wake:
            if not (self._commands or self._closing or self._core.has_work()):
                self._meter.switch("paused" if self._core.paused else "idle")
                due_s = self._core.seconds_to_wake()
                self._wake.wait(None if due_s is None else min(due_s, threading.TIMEOUT_MAX))
            if self._closing and not self._commands:
                return None
            commands, self._commands = self._commands, deque()
            return commands

    def _finish(self) -> None:
        self._meter.switch("shutdown")
        self._core.kv.close()
        if self._cause is None:
            self._core.abort_all()
        with self._wake:
            self._closing = True
            pending = list(self._pending)
        for future in pending:
            self._settle(future, self._dead())
        self._ended.set_result(None)

    def _pause_now(self, *, abort: bool) -> None:
        if abort:
            self._core.abort_all()
        self._core.pause()

    def _begin_drain(self, drained: Future[None]) -> None:
        if not self._core.paused:
            self._core.admission_open = False
        self._drains.append(drained)

    def _end_drains(self) -> None:
        core = self._core
        if not self._drains or not (core.paused or not core.busy):
            return
        core.pause()
        for drained in self._drains:
            self._settle(drained, None)
        self._drains.clear()

    def _resume_now(self) -> None:
        self._core.resume()
        for drained in self._drains:
            self._settle(drained, EngineError("the engine was resumed before it had drained; pause it again"))
        self._drains.clear()

    def _score_now(self, token_ids: np.ndarray) -> np.ndarray:
        self._meter.switch("weight_load" if self._core.paused else "prefill")  # a canary, or a reader's question
        return self._core.score(token_ids)


def _new_model(path: str | Path, *, settings: EmbeddedSettings, tensors: Mapping[str, torch.Tensor]) -> ServedModel:
    return ServedModel(
        path,
        dtype=getattr(torch, settings.dtype),
        tensors=tensors,
        kernels=settings.kernels,
        quantization=settings.quantization,
        adapters=settings.max_loras > 0,
    )


def _guesser(
    speculation: SpeculationChoice, *, draft: DraftModel | None, kv: KvCache, limits: Limits
) -> Guesser | None:
    """Return what guesses tokens; a draft reads its own KV, in the same blocks."""
    if draft is not None:
        return Drafter(draft, kv=kv, max_num_batched_tokens=limits.max_num_batched_tokens)
    return Speculator() if speculation == "ngram" else None
