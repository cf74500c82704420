"""What every face of a router (gRPC, HTTP) does the same way; to a face it looks like the service of one replica.

Requests are passed on as the bytes they came in where the face has them (gRPC), and made into bytes where it does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import numpy as np

from rollmill.clock import Clock
from rollmill.config.router import RouterSettings
from rollmill.config.serving import LimitSettings
from rollmill.errors import DataError, ModelError, NotServing, RollmillError
from rollmill.generator.engines.protocol import Reward
from rollmill.generator.limits import check_limits
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.router.calls import Emit
from rollmill.generator.router.fleet import Fleet, ReplicaLoad
from rollmill.generator.router.forward import Forwarder
from rollmill.generator.router.law import RouterLaw
from rollmill.generator.router.membership import Source
from rollmill.generator.router.records import Ask, Ended, Seen
from rollmill.generator.router.table import Member
from rollmill.generator.router.upstream import Connect, UpstreamError
from rollmill.generator.service import Listener, TextCodec
from rollmill.generator.state import ReplicaState
from rollmill.generator.wire import (
    DEFAULT_DEADLINE_S,
    Prompt,
    ReplicaStatus,
    TurnAssembler,
    chunk_from_message,
    request_to_message,
    reward_from_message,
    sibling_id,
    status_from_message,
    turns_from_message,
)
from rollmill.types import GenerateRequest, Turn

_SUMMED = (
    "running", "waiting", "kv_used_tokens", "kv_capacity_tokens", "output_tokens", "prefill_tokens", "cached_tokens",
    "max_num_seqs", "finished_turns", "guessed_tokens", "accepted_tokens",
)  # fmt: skip

ANY_MODEL = "default"
"""What the model is called where nobody said its name; then a request may ask for any."""


class RouterService:
    """Many replicas, as one.

    Args:
        settings: of the router.
        source: the list of replicas.
        connect: opens a connection to an address.
        clock: the law's time.
        codec: of the model's tokenizer; without it text is made token ids by the replicas alone.
        limits: what one caller may ask for.
        models: names under which a request may ask for the model; any if there are none.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        source: Source,
        connect: Connect,
        clock: Clock,
        codec: TextCodec | None = None,
        limits: LimitSettings | None = None,
        models: Sequence[str] = (),
    ) -> None:
        self.settings = settings
        self.law = RouterLaw(settings)
        self.codec = codec
        self.limits = LimitSettings() if limits is None else limits
        self.models = tuple(models) or (ANY_MODEL,)
        self._any_model = not models
        self.changed = asyncio.Event()
        self._clock = clock
        self._draining: str | None = None
        self._scores = 0
        self.fleet = Fleet(
            self.law,
            source=source,
            connect=connect,
            obey=lambda instructions: self.forwarder.obey(instructions),
            clock=clock,
            on_change=self.changed.set,
        )
        self.forwarder = Forwarder(
            self.law,
            upstreams=self.fleet.upstreams,
            clock=clock,
            on_trouble=self.fleet.look,
            codec=codec,
            limits=self.limits,
        )

    async def run(self) -> None:
        """Follow the list of replicas and their standing for ever.

        Cancellation:
            closes all connections.
        """
        await self.fleet.run()

    # -- requests as bytes

    async def generate_bytes(self, data: bytes) -> bytes:
        """Return the serialized reply to a serialized request; see `Forwarder.generate`."""
        return await self.forwarder.generate(data)

    async def stream_bytes(self, data: bytes, *, emit: Emit) -> None:
        """Hand the events of a serialized request to `emit`; see `Forwarder.stream`."""
        await self.forwarder.stream(data, emit=emit)

    async def score_bytes(self, data: bytes, *, timeout_s: float) -> bytes:
        """Return the serialized reply to a serialized request for scores, from the least loaded replica.

        Raises:
            RollmillError: the last replica's, if all that were tried failed.
        """
        message = pb.ScoreRequest.FromString(data)
        self._scores += 1
        name, now_s = f"\x00score {self._scores}", self._clock.now_s()
        tried: set[str] = set()
        while True:
            ask = Ask(request_id=name, job=message.job, adapter=message.adapter)
            if message.adapter and (why := self.law.table.unknown_adapter(ask)) is not None:
                raise ModelError(f"these tokens are not scored: {why}")
            members = self.law.table.eligible(ask, excluded=tried, now_s=now_s)
            if not members:
                having = f" by adapter {message.adapter!r} ({self.law.table.who_has(ask)})" if message.adapter else ""
                raise NotServing(
                    f"no replica can score now{having}: {self.law.table.summary()}. Look at the replicas' logs"
                )
            replica = min(members, key=lambda member: (member.load(), member.requests, member.name)).name
            try:
                return await self.fleet.upstreams[replica].score(data, timeout_s=timeout_s)
            except UpstreamError as error:
                tried.add(replica)
                if error.ended in (Ended.LOST, Ended.REFUSED, Ended.FAILED):
                    self.fleet.look(replica)
                if error.ended is Ended.INVALID or len(tried) >= min(self.settings.max_attempts, len(self.law.table)):
                    raise error.error from error

    # -- requests as records, for faces without bytes

    async def score(
        self, token_ids: np.ndarray, *, adapter: str = "", deadline_s: float = DEFAULT_DEADLINE_S, job: str = ""
    ) -> tuple[np.ndarray, int]:
        """Return float32 [n - 1] log-probs, and the policy version that gave them; see `score_bytes`."""
        asked = pb.ScoreRequest(token_ids=token_ids.tolist(), adapter=adapter, job=job)
        reply = pb.ScoreReply.FromString(await self.score_bytes(asked.SerializeToString(), timeout_s=deadline_s))
        return np.array(reply.logprobs, dtype=np.float32), reply.policy_version

    async def reward(self, token_ids: np.ndarray, *, deadline_s: float = DEFAULT_DEADLINE_S, job: str = "") -> Reward:
        """Return what the reward head of a replica says of a whole sequence; see `score_bytes`."""
        asked = pb.ScoreRequest(token_ids=token_ids.tolist(), what="reward", job=job)
        return reward_from_message(
            pb.ScoreReply.FromString(await self.score_bytes(asked.SerializeToString(), timeout_s=deadline_s))
        )

    def check_model(self, name: str) -> None:
        """Refuse a request for another model than the one that is served.

        Raises:
            ModelError: naming the models that are served.
        """
        if name and not self._any_model and name not in self.models:
            raise ModelError(f"model {name!r} is not served here; served is {', '.join(map(repr, self.models))}")

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Return int [prompt_tokens] of a prompt in any form.

        Raises:
            DataError: if it is no token ids and the router has no tokenizer.
        """
        if isinstance(prompt, np.ndarray):
            return prompt
        if self.codec is None:
            raise DataError(
                "this router has no tokenizer, so over HTTP it takes token ids only; start it with --model, or send "
                "token ids"
            )
        return self.codec.encode(prompt) if isinstance(prompt, str) else self.codec.render(prompt)

    async def generate(
        self, request: GenerateRequest, *, siblings: int = 1, listener: Listener | None = None
    ) -> list[Turn]:
        """Return one turn for each sibling; see `InferenceService.generate`."""
        check_limits(request, siblings=siblings, limits=self.limits, setting="router.max_siblings")
        try:
            data = request_to_message(request, siblings=siblings).SerializeToString()
        except ValueError as error:  # a number that the message has no room for
            raise DataError(
                f"request {request.request_id} is refused: {error}. Token ids, seed and counts are 0 or more"
            ) from error
        if listener is None:
            reply = pb.GenerateReply.FromString(await self.forwarder.generate(data))
            return turns_from_message(reply, prompt_ids=request.prompt_ids, siblings=siblings)
        events = _Heard(request, siblings=siblings, listener=listener)
        await self.forwarder.stream(data, emit=events.take)
        return events.all()

    async def abort(self, request_id: str) -> bool:
        """Abort exactly this request, or this one sibling, wherever it is; return whether it was there."""
        return await self.forwarder.abort(request_id)

    async def take_note(self, error: RollmillError) -> None:
        """Nothing: what an error says about a replica was heard where it came from."""

    # -- control

    async def load_weights(self, policy_version: int, *, job: str = "", adapter: str = "") -> list[ReplicaLoad]:
        """Have the replicas of a job load a version; see `Fleet.load_weights` and `Fleet.load_adapter`."""
        if adapter:
            return await self.fleet.load_adapter(adapter, policy_version, job=job)
        return await self.fleet.load_weights(policy_version, job=job)

    async def drain(self, deadline_s: float, *, reason: str) -> int:
        """Take nothing new, wait for what runs, abort the rest; return how many were aborted. Replicas go on."""
        self._draining = reason
        self.changed.set()
        return await self.forwarder.drain(deadline_s, reason=reason)

    # -- standing

    def standing(self) -> tuple[ReplicaState, str]:
        """Return whether the router takes requests, and why not."""
        if self._draining is not None:
            return ReplicaState.DRAINING, self._draining
        serving = sum(member.seen is Seen.SERVING for member in self.law.table)
        if serving:
            return ReplicaState.SERVING, ""
        return ReplicaState.STARTING, f"no replica serves: {self.law.table.summary()}"

    def status(self) -> ReplicaStatus:
        """Return the fleet as if it were one replica: sums, and the oldest version that serves."""
        return status_from_message(self.status_message())

    def _shortest_context(self, members: Sequence[Member]) -> int:
        known = [self.fleet.statuses[one.name] for one in members if one.name in self.fleet.statuses]
        return min((status.max_model_len for status in known), default=0)

    def status_message(self) -> pb.StatusReply:
        """Return the fleet as if it were one replica, and each replica beside that."""
        state, reason = self.standing()
        members = self.law.table.of_job("")
        statuses = [self.fleet.statuses[one.name] for one in members if one.name in self.fleet.statuses]
        serving = [member for member in members if member.seen is Seen.SERVING]
        oldest = min(serving, key=lambda member: member.policy_version, default=None)
        found = pb.StatusReply(
            state=state.value,
            reason=reason,
            policy_version=0 if oldest is None else oldest.policy_version,
            digest="" if oldest is None else oldest.digest,
            wall_s=max((status.wall_s for status in statuses), default=0.0),
            max_model_len=self._shortest_context(serving) or self._shortest_context(members),
            dtype=statuses[0].dtype if statuses else "",
        )
        for name in _SUMMED:
            setattr(found, name, sum(getattr(status, name) for status in statuses))
        found.waiting += self.law.queues.waiting
        for status in statuses:
            for cause, seconds in status.seconds.items():
                found.seconds[cause] += seconds
            if status.HasField("host_kv"):
                for field, value in status.host_kv.ListFields():
                    setattr(found.host_kv, field.name, getattr(found.host_kv, field.name) + value)
        found.adapters.extend(_adapters_of(statuses))
        found.replicas.extend(
            pb.FleetMember(
                replica=one.name,
                state=one.seen.value,
                reason=one.reason,
                policy_version=one.policy_version,
                digest=one.digest,
                in_flight=one.in_flight,
                others=one.others,
                places=one.places,
                kv_use=one.kv_use,
                loading=one.loading or 0,
                jobs=one.jobs,
                adapters=[pb.AdapterStatus(name=name, policy_version=at) for name, at in one.adapters.items()],
            )
            for one in members
        )
        return found


class _Heard:
    """Makes turns out of the events of a stream, and lets a listener hear them."""

    def __init__(self, request: GenerateRequest, *, siblings: int, listener: Listener) -> None:
        self._listener = listener
        self._parts = [
            TurnAssembler(sibling_id(request.request_id, index, siblings=siblings), prompt_ids=request.prompt_ids)
            for index in range(siblings)
        ]
        self._turns: dict[int, Turn] = {}

    async def take(self, event: pb.GenerateEvent, raw: bytes | None) -> None:
        kind = event.WhichOneof("event")
        if kind == "tokens":
            chunk = chunk_from_message(event.tokens)
            self._parts[event.index].add(chunk)
            self._listener.tokens(event.index, chunk)
        elif kind == "finished":
            turn = self._parts[event.index].finish(event.finished)
            self._turns[event.index] = turn
            self._listener.finished(event.index, turn)

    def all(self) -> list[Turn]:
        return [self._turns[index] for index in range(len(self._parts))]


def _adapters_of(statuses: Iterable[pb.StatusReply]) -> list[pb.AdapterStatus]:
    """Return the adapters that any replica knows, each in the oldest version that one has loaded."""
    found: dict[str, pb.AdapterStatus] = {}
    for status in statuses:
        for adapter in status.adapters:
            before = found.setdefault(adapter.name, adapter)
            if adapter.policy_version and not 0 < before.policy_version <= adapter.policy_version:
                found[adapter.name] = adapter
    return list(found.values())
