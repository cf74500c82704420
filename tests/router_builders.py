"""Builders for tests of the router: a law with replicas, requests, and replicas in memory behind a real forwarder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
import numpy as np

from rollmill.clock import VirtualClock
from rollmill.config.router import RouterSettings
from rollmill.errors import EngineDead, EngineError, NotServing, RollmillError
from rollmill.generator.engines.fake import FakeEngine, FakeLatency
from rollmill.generator.engines.protocol import OnTokens
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.router.forward import Forwarder
from rollmill.generator.router.law import RouterLaw
from rollmill.generator.router.records import Ask, Ended, Instruction, Refuse, Report, Send
from rollmill.generator.router.upstream import UpstreamError, judge
from rollmill.generator.service import sibling_requests
from rollmill.generator.statuses import error_to_status
from rollmill.generator.wire import chunk_to_message, finished_to_message, request_from_message, turns_to_message
from rollmill.types import GenerateRequest, TokenChunk, Turn

T = TypeVar("T")


def settings(**changes: Any) -> RouterSettings:
    return RouterSettings.model_validate({"overcommit": 1.0, **changes})


def report(version: int = 1, **changes: Any) -> Report:
    return Report(
        **{"state": "serving", "policy_version": version, "slots": 4, "digest": f"digest-{version}", **changes}
    )


def law_of(*names: str, now_s: float = 0.0, slots: int = 4, version: int = 1, **changes: Any) -> RouterLaw:
    """A law whose replicas all serve."""
    law = RouterLaw(settings(**changes))
    for name in names:
        law.table.join(name)
        law.report(name, report(version, slots=slots), now_s=now_s)
    return law


def ask(request_id: str, **changes: Any) -> Ask:
    return Ask(request_id=request_id, **changes)


def sent(instructions: list[Instruction]) -> list[tuple[str, str]]:
    """What was sent where; fails on a refusal."""
    found = []
    for one in instructions:
        assert isinstance(one, Send), one
        found.append((one.request_id, one.replica))
    return found


def place(law: RouterLaw, request_id: str, *, now_s: float = 0.0, **changes: Any) -> str | None:
    """Submit a request; return where it was sent, `None` if it waits."""
    found = sent(law.submit(ask(request_id, **changes), now_s=now_s))
    assert len(found) <= 1
    return found[0][1] if found else None


def refused(instructions: list[Instruction]) -> Exception:
    (one,) = instructions
    assert isinstance(one, Refuse), one
    return one.error


def answer(law: RouterLaw, request_id: str, replica: str, *, now_s: float = 0.0) -> list[tuple[str, str]]:
    """A replica answers; return what is sent because of it."""
    return sent(law.ended(request_id, replica, Ended.ANSWERED, now_s=now_s)) + sent(law.close(request_id, now_s=now_s))


# -- replicas in memory


class MemoryReplica:
    """A replica with the fake engine in this process, as an `Upstream`: what its server does, without a socket."""

    def __init__(self, name: str, *, clock: VirtualClock, step_s: float = 1.0, **engine: Any) -> None:
        self.name = name
        self.engine = FakeEngine(
            clock=clock,
            latency=FakeLatency(step_s=step_s),
            **{"max_num_seqs": 8, "max_model_len": 400, "digest": "same", **engine},
        )
        self.state = "serving"
        self.kv = (0, 0)
        self.dead = False
        self.seen: list[pb.GenerateRequest] = []
        self.aborted: list[str] = []
        self.loads: list[int] = []
        self.adapters: dict[str, int] = {}
        self.fail_with: UpstreamError | None = None
        self.cut_streams_after: int | None = None
        self._death = asyncio.Event()

    def kill(self) -> None:
        """As `kill -9`: every call in flight ends, nothing is answered any more."""
        self.dead = True
        self._death.set()

    def _gone(self) -> UpstreamError:
        return UpstreamError(EngineDead(f"{self.name} is not reachable"), Ended.LOST)

    async def _unless_killed(self, work: Coroutine[Any, Any, T]) -> T:
        if self.dead:
            work.close()
            raise self._gone()
        task, death = asyncio.ensure_future(work), asyncio.ensure_future(self._death.wait())
        try:
            await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._gone()
            return task.result()
        finally:
            task.cancel()
            death.cancel()
            await asyncio.gather(task, death, return_exceptions=True)

    async def generate(self, data: bytes, *, timeout_s: float) -> bytes:
        return await self._unless_killed(self._generate(data))

    async def _generate(self, data: bytes) -> bytes:
        message, parts = self._arrived(data)
        turns = await asyncio.gather(*(self._turn(part) for part in parts))
        rendered = not message.prompt_ids
        return turns_to_message(
            turns,
            request_id=message.request_id,
            prompt_ids=parts[0].prompt_ids if rendered else None,
            texts=[f"text of {len(turn.output_ids)}" for turn in turns] if rendered else None,
        ).SerializeToString()

    async def _turn(self, part: GenerateRequest, on_tokens: OnTokens | None = None) -> Turn:
        try:
            return await self.engine.generate(part, on_tokens=on_tokens)
        except RollmillError as error:
            raise UpstreamError(error, judge(error, status=error_to_status(error)[0])) from error

    def _arrived(self, data: bytes) -> tuple[pb.GenerateRequest, list[GenerateRequest]]:
        message = pb.GenerateRequest.FromString(data)
        self.seen.append(message)
        if self.fail_with is not None:
            raise self.fail_with
        if self.state != "serving":
            raise UpstreamError(NotServing(f"{self.name} is {self.state}"), Ended.REFUSED)
        ids = np.array(message.prompt_ids or [7, 8, 9])
        # The fake samples nothing but its base: an adapter here is a name in the status.
        request = msgspec.structs.replace(request_from_message(message, prompt_ids=ids), adapter="")
        return message, sibling_requests(request, siblings=message.siblings or 1)

    async def stream(self, data: bytes, *, timeout_s: float) -> AsyncGenerator[bytes, None]:
        if self.dead:
            raise self._gone()
        message, parts = self._arrived(data)
        events: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        if not message.prompt_ids:
            first = pb.GenerateEvent(request_id=message.request_id, prompt_ids=parts[0].prompt_ids.tolist())
            events.put_nowait(first.SerializeToString())

        async def one(index: int, part: GenerateRequest) -> None:
            def hear(chunk: TokenChunk) -> None:
                event = chunk_to_message(chunk, request_id=message.request_id, index=index)
                events.put_nowait(event.SerializeToString())

            turn = await self._turn(part, hear)
            event = finished_to_message(turn, request_id=message.request_id, index=index)
            events.put_nowait(event.SerializeToString())

        async def run_parts() -> None:
            await asyncio.gather(*(one(index, part) for index, part in enumerate(parts)))

        async def all_of_them() -> None:
            try:
                await self._unless_killed(run_parts())
            except UpstreamError as error:
                events.put_nowait(error)
            else:
                events.put_nowait(None)

        work, count = asyncio.ensure_future(all_of_them()), 0
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
                count += 1
                if count == self.cut_streams_after:
                    return
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def abort(self, request_id: str, *, timeout_s: float) -> bool:
        if self.dead:
            raise self._gone()
        self.aborted.append(request_id)
        names = [name for name in self.engine._live if name == request_id or name.startswith(f"{request_id}#")]
        return any([await self.engine.abort(name) for name in names])

    async def score(self, data: bytes, *, timeout_s: float) -> bytes:
        if self.dead:
            raise self._gone()
        ids = np.array(pb.ScoreRequest.FromString(data).token_ids)
        return pb.ScoreReply(logprobs=await self.engine.score(ids), policy_version=1).SerializeToString()

    async def status(self, *, timeout_s: float) -> pb.StatusReply:
        if self.dead:
            raise self._gone()
        info, load = self.engine.info(), self.engine.load()
        return pb.StatusReply(
            state=self.state,
            policy_version=info.policy_version,
            digest=info.digest,
            running=load.running,
            waiting=load.waiting,
            max_num_seqs=info.max_num_seqs,
            max_model_len=info.max_model_len,
            kv_used_tokens=self.kv[0],
            kv_capacity_tokens=self.kv[1],
            wall_s=load.wall_s,
            adapters=[pb.AdapterStatus(name=name, policy_version=at) for name, at in self.adapters.items()],
        )

    async def load_weights(self, policy_version: int, *, timeout_s: float, adapter: str = "") -> pb.LoadWeightsReply:
        if self.dead:
            raise self._gone()
        if adapter:
            return self._load_adapter(adapter, policy_version)
        self.loads.append(policy_version)
        await asyncio.sleep(1.0)
        await self.engine.pause("keep")
        try:
            await self.engine.update({}, policy_version=policy_version, digest=f"v{policy_version}", kv="keep")
        except RollmillError as error:
            if not self.engine.healthy():
                self.state = "dirty"
            raise UpstreamError(error, Ended.FAILED) from error
        finally:
            await self.engine.resume()
        return pb.LoadWeightsReply(policy_version=policy_version, digest=f"v{policy_version}", changed=True, nbytes=10)

    def _load_adapter(self, name: str, policy_version: int) -> pb.LoadWeightsReply:
        if policy_version < self.adapters[name]:
            raise UpstreamError(EngineError(f"{name} {policy_version} is old"), Ended.FAILED)
        self.adapters[name] = policy_version
        return pb.LoadWeightsReply(policy_version=policy_version, digest=f"{name}-{policy_version}", changed=True)

    async def close(self) -> None:
        self.kill()


class Fixture:
    """A forwarder over replicas in memory that all serve."""

    def __init__(
        self, *names: str, clock: VirtualClock, codec: Any = None, step_s: float = 1.0, **changes: Any
    ) -> None:
        self.clock = clock
        self.law = RouterLaw(settings(**changes))
        self.replicas = {name: MemoryReplica(name, clock=clock, step_s=step_s) for name in names}
        self.troubles: list[str] = []
        self.forwarder = Forwarder(
            self.law, upstreams=self.replicas, clock=clock, on_trouble=self.troubles.append, codec=codec
        )
        for name in names:
            self.law.table.join(name)
            self.law.report(name, report(slots=8, digest="same", max_model_len=400), now_s=clock.now_s())

    async def generate(self, message: pb.GenerateRequest) -> pb.GenerateReply:
        return pb.GenerateReply.FromString(await self.forwarder.generate(message.SerializeToString()))

    async def stream(self, message: pb.GenerateRequest) -> list[pb.GenerateEvent]:
        events: list[pb.GenerateEvent] = []

        async def emit(event: pb.GenerateEvent, raw: bytes | None) -> None:
            assert raw is None or pb.GenerateEvent.FromString(raw) == event
            events.append(event)

        await self.forwarder.stream(message.SerializeToString(), emit=emit)
        return events

    def check_all_is_given_back(self) -> None:
        self.law.validate()
        assert self.forwarder.active == 0
        assert all(member.in_flight == 0 for member in self.law.table)
        assert self.law.queues.waiting == 0


def message(request_id: str, *, tokens: int = 10, deadline_s: float = 100.0, **changes: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=tokens, seed=11)
    fields = {"prompt_ids": [1, 2, 3], "sampling": sampling, "deadline_s": deadline_s, **changes}
    return pb.GenerateRequest(request_id=request_id, **fields)


def joined(events: list[pb.GenerateEvent], *, index: int = 0) -> tuple[list[int], list[float]]:
    """Token ids and log-probs of a sibling's chunks, which must follow each other without gaps."""
    ids: list[int] = []
    logprobs: list[float] = []
    for event in events:
        if event.index == index and event.HasField("tokens"):
            assert event.tokens.start_token == len(ids)
            ids += event.tokens.output_ids
            logprobs += event.tokens.behavior_logprobs
    return ids, logprobs
