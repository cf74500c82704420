"""What every face of a replica (gRPC, HTTP) does the same way: siblings, drain, refusals, weights, standing.

| who | waits for | gives up after |
|---|---|---|
| caller of `generate` | all its siblings | the request's deadline: the engine returns what there is |
| caller of `load_weights` | pull, swap, proof | the load deadline |
| caller of `drain` | requests that run | the deadline in the call; the rest is aborted and counted |

A load goes on if its caller leaves, because half a swap helps nobody. Decides nothing about batching or weights; knows
no protocol of the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from rollmill.config.serving import LimitSettings
from rollmill.errors import (
    DataError,
    EngineDead,
    EngineError,
    ModelError,
    NotServing,
    RequestIdInUse,
    RollmillError,
)
from rollmill.generator.adapters import AdapterLoader
from rollmill.generator.engines.protocol import REWARD_SCORE, Reward, RewardEngine, engines_with
from rollmill.generator.engines.streams import mix
from rollmill.generator.limits import Places, check_limits
from rollmill.generator.loading import Replica
from rollmill.generator.state import ReplicaState, move, refusal
from rollmill.generator.wire import DEFAULT_DEADLINE_S, LoadReport, Prompt, ReplicaStatus, sibling_id
from rollmill.types import GenerateRequest, Message, TokenChunk, Turn

T = TypeVar("T")
_ADAPTER_TRIES = 4
"""How often a request loads its adapter anew, where others take its place before it has begun."""


class Listener(Protocol):
    """Hears the siblings of a call as they go on, each by its index; must not raise."""

    def tokens(self, index: int, chunk: TokenChunk) -> None:
        """Hear the next tokens of a sibling."""
        ...

    def finished(self, index: int, turn: Turn) -> None:
        """Hear the end of a sibling, after its tokens."""
        ...


class Observer(Protocol):
    """Hears what became of every call and every load; must not raise."""

    def served(self, request: GenerateRequest, result: Sequence[Turn] | BaseException, *, latency_s: float) -> None:
        """Hear the turns of a call, or what it ended with instead (a refusal, an error, its cancellation)."""
        ...

    def loaded(self, result: LoadReport | RollmillError) -> None:
        """Hear the end of a weight load."""
        ...


class TextCodec(Protocol):
    """Text and messages to ids and back, for the model that is served."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply, ascending."""
        ...

    def render(self, messages: Sequence[Message]) -> np.ndarray:
        """Return int32 [prompt_tokens] of a conversation, ready for the next reply."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Return int32 [tokens] of plain text, without a template."""
        ...

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        ...


class InferenceService:
    """One replica, as its faces see it.

    Args:
        replica: the engine, its standing and its loader.
        tasks: owns loads that outlive their call.
        codec: of the model's tokenizer; without it only token ids are taken.
        limits: what one caller may ask for, and how much all of them at once.
        models: names under which a request may ask for the model; the engine's name for it if there are none.
        adapters: of the engine, if it serves any.

    Attributes:
        engine_died: set by the first call that finds the engine dead.
        on_standing: called after everything that may have changed the replica's standing.
        observer: hears what became of every call.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        tasks: asyncio.TaskGroup,
        codec: TextCodec | None = None,
        limits: LimitSettings | None = None,
        models: Sequence[str] = (),
        adapters: AdapterLoader | None = None,
    ) -> None:
        self.replica, self.adapters = replica, adapters
        self.codec = codec
        self.limits = LimitSettings() if limits is None else limits
        self.models = tuple(models) or (replica.engine.info().model,)
        self.engine_died = asyncio.Event()
        self.on_standing: Callable[[], Awaitable[None]] | None = None
        self.observer: Observer | None = None
        self._tasks = tasks
        self._siblings: dict[str, tuple[str, ...]] = {}
        self._names: set[str] = set()
        self._places = Places(self.limits)
        self._active = self._finished_turns = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def check_model(self, name: str) -> None:
        """Refuse a request for another model than the one that is served; an empty name means whatever is served.

        Raises:
            ModelError: naming the models that are served.
        """
        served = (*self.models, *(() if self.adapters is None else self.adapters.names))
        if name and name not in served:
            raise ModelError(f"model {name!r} is not served here; served is {', '.join(map(repr, served))}")

    def is_adapter(self, name: str) -> bool:
        """Return whether a model's name is that of an adapter."""
        return self.adapters is not None and name in self.adapters.names

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Return int [prompt_tokens] of a prompt in any form.

        Raises:
            DataError: if it is no token ids and this replica has no tokenizer, or the chat template refuses it.
        """
        if isinstance(prompt, np.ndarray):
            return prompt
        if self.codec is None:
            raise DataError(
                "this replica serves a model without a tokenizer, so it takes token ids only; serve a prepared model, "
                "or send prompt_ids"
            )
        return self.codec.encode(prompt) if isinstance(prompt, str) else self.codec.render(prompt)

    async def generate(
        self, request: GenerateRequest, *, siblings: int = 1, listener: Listener | None = None
    ) -> list[Turn]:
        """Return one turn for each sibling, in order of their index.

        Siblings share the prefill of their prompt. The first one has the request's seed, and the others seeds that
        follow from it.

        Args:
            request: its id names all siblings: `abort` ends them together.
            listener: hears tokens as they come.

        Raises:
            NotServing: if the replica is starting, dirty or draining; `EngineDead` if it is dead.
            DataError: if prompt or parameters do not fit, or are over a limit.
            RequestIdInUse: if another request with this id lives.
            Overloaded: if as many samples as the replica takes run or wait, or its adapter finds no place.
            EngineError: if the served weights are older than the request asks for.
            ModelError: if its adapter is unknown; `WeightError` and `WeightMismatch` if that cannot be loaded.

        Cancellation:
            aborts all siblings and frees their KV.
        """
        observer = self.observer
        if observer is None:
            return await self._generate(request, siblings=siblings, listener=listener)
        now_s = asyncio.get_running_loop().time
        started_s = now_s()
        try:
            turns = await self._generate(request, siblings=siblings, listener=listener)
        except BaseException as error:
            observer.served(request, error, latency_s=now_s() - started_s)
            raise
        observer.served(request, turns, latency_s=now_s() - started_s)
        return turns

    async def _generate(self, request: GenerateRequest, *, siblings: int, listener: Listener | None) -> list[Turn]:
        self._refuse_unless_serving(f"request {request.request_id}")
        check_limits(request, siblings=siblings, limits=self.limits)
        parts = sibling_requests(request, siblings=siblings)
        names = {request.request_id, *(part.request_id for part in parts)}
        if used := names & self._names:
            raise RequestIdInUse(
                f"request id {min(used)} is in use; ids, also those of siblings, must be unique while a request lives"
            )
        with self._busy(siblings, request_id=request.request_id):
            self._siblings[request.request_id] = tuple(part.request_id for part in parts)
            self._names |= names
            try:
                return await self._run_with_adapter(parts, listener=listener)
            finally:
                del self._siblings[request.request_id]
                self._names -= names

    async def _run_with_adapter(self, parts: list[GenerateRequest], *, listener: Listener | None) -> list[Turn]:
        name = parts[0].adapter
        if not name or self.adapters is None:
            return await self._run(parts, listener=listener)
        for _ in range(_ADAPTER_TRIES - 1):
            try:
                return await self._run_as_user(parts, self.adapters, listener=listener)
            except ModelError:  # it gave way to another one before the engine knew of this request; nothing was begun
                self.adapters.check(name)
        return await self._run_as_user(parts, self.adapters, listener=listener)

    async def _run_as_user(
        self, parts: list[GenerateRequest], adapters: AdapterLoader, *, listener: Listener | None
    ) -> list[Turn]:
        async with adapters.using(parts[0].adapter, requests=len(parts)):
            return await self._run(parts, listener=listener)

    async def _run(self, parts: list[GenerateRequest], *, listener: Listener | None) -> list[Turn]:
        if len(parts) == 1:
            return [await self._run_one(0, parts[0], listener=listener)]
        try:
            async with asyncio.TaskGroup() as tasks:
                turns = [
                    tasks.create_task(self._run_one(index, part, listener=listener), name=part.request_id)
                    for index, part in enumerate(parts)
                ]
        except BaseExceptionGroup as group:  # the others were cancelled because of the first
            raise group.exceptions[0] from group
        return [turn.result() for turn in turns]

    async def _run_one(self, index: int, request: GenerateRequest, *, listener: Listener | None) -> Turn:
        hears = None if listener is None else functools.partial(listener.tokens, index)
        turn = await self.replica.engine.generate(request, on_tokens=hears)
        self._places.learn(turn)
        self._finished_turns += 1
        if listener is not None:
            listener.finished(index, turn)
        return turn

    async def abort(self, request_id: str) -> bool:
        """Abort exactly this request with all its siblings, or this one sibling; return whether it was there."""
        one = (request_id,) if request_id in self._names else ()
        parts = self._siblings.get(request_id, one)
        return any([await self.replica.engine.abort(part) for part in parts])

    async def score(
        self, token_ids: np.ndarray, *, adapter: str = "", deadline_s: float = DEFAULT_DEADLINE_S, job: str = ""
    ) -> tuple[np.ndarray, int]:
        """Return float32 [n - 1] log-probs under temperature 1, and the policy version that gave them.

        Args:
            token_ids: int [n].
            adapter: that scores; empty for the base alone.
            deadline_s, job: what a router goes by; the caller's own timeout counts here.

        Raises:
            EngineError: if the weights were swapped meanwhile.
            DataError: if the ids do not fit.
            ModelError: if the adapter is unknown.
        """
        engine = self.replica.engine
        if adapter:
            if self.adapters is None:
                raise ModelError(f"adapter {adapter!r} cannot score: this replica serves its weights alone")
            return await self.adapters.score(token_ids, name=adapter)
        version = engine.info().policy_version
        logprobs = await engine.score(token_ids)
        if engine.info().policy_version != version:
            raise EngineError("the weights were swapped while these tokens were scored; score them again")
        return logprobs, version

    async def reward(self, token_ids: np.ndarray, *, deadline_s: float = DEFAULT_DEADLINE_S, job: str = "") -> Reward:
        """Return what the reward head says of a whole sequence; it takes a place as a sample does.

        Args:
            token_ids: int [n].
            deadline_s: longest wait.
            job: what a router goes by.

        Raises:
            NotServing: if the replica is starting, dirty or draining; `EngineDead` if it is dead.
            EngineError: if the engine serves no reward head, naming the engines that can.
            DataError: if the ids do not fit.
            Overloaded: if as many samples as the replica takes run or wait.
            DeadlineExceeded: if it was not scored in time.

        Cancellation:
            takes the sequence out of the queue.
        """
        engine = self.replica.engine
        info = engine.info()
        if REWARD_SCORE not in info.capabilities or not isinstance(engine, RewardEngine):
            raise EngineError(
                f"the {info.kind} engine serves {info.model} without a reward head, so it gives no rewards. Engines "
                f"that can serve one (a ...ForSequenceClassification): {engines_with(REWARD_SCORE)}; or ask for "
                "logprobs"
            )
        self._refuse_unless_serving("a sequence to score")
        with self._busy(1, request_id="to score a sequence"):
            return await engine.reward(token_ids, deadline_s=deadline_s)

    def _refuse_unless_serving(self, what: str) -> None:
        if (why := refusal(self.replica.standing, to_generate=True)) is not None:
            kind = EngineDead if self.replica.standing.state is ReplicaState.DEAD else NotServing
            raise kind(f"{what} refused: {why}")

    @contextlib.contextmanager
    def _busy(self, places: int, *, request_id: str) -> Iterator[None]:
        """Hold places, and a drain back, while a call runs."""
        self._places.take(places, request_id=request_id)
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._places.give_back(places)
            self._active -= 1
            if not self._active:
                self._idle.set()

    async def load_weights(self, policy_version: int, *, adapter: str = "") -> LoadReport:
        """Serve another version; see `Replica.load` and, with an adapter's name, `AdapterLoader.load` for the errors.

        Cancellation:
            the load goes on.
        """
        load = self._tasks.create_task(self._load(policy_version, adapter=adapter), name=f"load {policy_version}")
        result = await asyncio.shield(load)
        if isinstance(result, RollmillError):
            raise result
        return result

    async def _load(self, policy_version: int, *, adapter: str) -> LoadReport | RollmillError:
        """Load; an error is a value here, so that it reaches its caller and not the task group."""
        result: LoadReport | RollmillError
        try:
            if not adapter:
                result = await self.replica.load(policy_version)
            elif self.adapters is None:
                raise ModelError(f"adapter {adapter!r} cannot be loaded: this replica serves its weights alone")
            else:
                result = await self.adapters.load(adapter, policy_version=policy_version or None)
        except RollmillError as error:
            result = error
        except (OSError, MemoryError) as error:  # of the disk or the machine: no reason to drop what is served
            result = EngineError(
                f"policy version {policy_version} was not loaded: {type(error).__name__}: {error}. The replica is "
                f"{self.replica.standing.state}"
            )
            result.__cause__ = error
        finally:
            await self.publish_standing()
        if self.observer is not None:
            self.observer.loaded(result)
        return result

    async def drain(self, deadline_s: float, *, reason: str) -> int:
        """Take nothing new, wait for what runs, abort the rest; return how many were aborted."""
        replica = self.replica
        if replica.standing.state is not ReplicaState.DEAD:
            replica.standing = move(replica.standing, ReplicaState.DRAINING, reason=reason)
        await self.publish_standing()
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            unfinished = self._active
            if replica.standing.state is not ReplicaState.DEAD:
                await replica.engine.pause("abort")
            return unfinished
        return 0

    async def publish_standing(self) -> None:
        """Tell whoever shows the replica's standing that it may have changed."""
        if self.on_standing is not None:
            await self.on_standing()

    async def take_note(self, error: RollmillError) -> None:
        """Let the replica leave the rotation if this error of a call says that the engine is gone or unsound."""
        self.replica.take_note(error)
        await self.publish_standing()
        if isinstance(error, EngineDead):
            self.engine_died.set()

    def status(self) -> ReplicaStatus:
        """Return standing, weights and load."""
        engine, standing = self.replica.engine, self.replica.standing
        info, load = engine.info(), engine.load()
        return ReplicaStatus(
            state=standing.state,
            reason=standing.reason,
            policy_version=info.policy_version,
            digest=info.digest,
            running=load.running,
            waiting=load.waiting,
            kv_used_tokens=load.kv_used_tokens,
            kv_capacity_tokens=load.kv_capacity_tokens,
            output_tokens=load.output_tokens,
            prefill_tokens=load.prefill_tokens,
            cached_tokens=load.cached_tokens,
            wall_s=load.wall_s,
            seconds=load.seconds,
            max_num_seqs=info.max_num_seqs,
            max_model_len=info.max_model_len,
            dtype=info.dtype,
            finished_turns=self._finished_turns,
            host_kv=load.host_kv,
            adapters=() if self.adapters is None else self.adapters.infos(),
            guessed_tokens=load.guessed_tokens,
            accepted_tokens=load.accepted_tokens,
        )


def sibling_requests(request: GenerateRequest, *, siblings: int) -> list[GenerateRequest]:
    """Return the engine's requests of one call: the request itself if it is alone.

    Example:
        >>> asked = GenerateRequest(request_id="a", prompt_ids=np.array([1]), sampling=SamplingParams(seed=7))
        >>> [(part.request_id, part.group_key) for part in sibling_requests(asked, siblings=2)]
        [('a#0', 'a'), ('a#1', 'a')]
        >>> sibling_requests(asked, siblings=1) == [asked]
        True
    """
    if siblings == 1:
        return [request]
    return [
        msgspec.structs.replace(
            request,
            request_id=sibling_id(request.request_id, index, siblings=siblings),
            group_key=request.group_key or request.request_id,
            sampling=msgspec.structs.replace(request.sampling, seed=sibling_seed(request.sampling.seed, index)),
        )
        for index in range(siblings)
    ]


def sibling_seed(seed: int, index: int) -> int:
    """Return the seed of one sibling's own stream: the request's for the first, and unrelated ones for the others."""
    if index == 0:
        return seed
    with np.errstate(over="ignore"):
        return int(mix(np.array([seed], dtype=np.uint64) ^ mix(np.array([index], dtype=np.uint64)))[0])
