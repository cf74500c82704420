"""Records to messages and back. Pure; knows protobuf but not gRPC.

Lengths of parallel arrays are checked here, at the border, because a `Turn` checks itself when it is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from rollmill.errors import DataError, LengthMismatch
from rollmill.generator.engines.protocol import AdapterInfo, HostKvLoad, Reward
from rollmill.generator.engines.sequence import spans_of
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.state import ReplicaState
from rollmill.types import (
    GenerateRequest,
    Message,
    SamplingParams,
    StopReason,
    TokenChunk,
    Turn,
    TurnTimings,
    VersionSpan,
    Wave,
    derive_seed,
)

DEFAULT_DEADLINE_S = 120.0
"""Of a request that names none."""
UNCAPPED_TOKENS = 2**31 - 1
"""`max_new_tokens` of a request that names none: the context caps it."""


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a load of weights did.

    Attributes:
        pull_s: reading and verifying, while the old version was being served.
        stage_s: making the weights ready in spare buffers, while the old version was being served.
        finish_s: requests in flight finished under the old version, which `kv_on_update = "drain"` lets them do.
        cut: requests that still ran when the time for that was over; they went on under the new version.
        pause_s: no token was produced; the sum of the four parts.
        drain_s: until the engine had ended its step and stood still.
        swap_s: new weights in place, and KV recomputed where that is configured.
        prove_s: digest and canary.
        resume_s: until the engine went on.
        changed: false if the version was served already.
        canary_difference: largest difference to the trainer on the canary; `None` if it was not compared.
        canary_mean: mean absolute difference to the trainer on it.
        canary_mean_tolerance: the most that is accepted of that in the engine's precision.
        canary_followed: how far the engine's log-probs moved per nat that the trainer's did, since the version before;
            `None` where rounding hides it.
    """

    policy_version: int
    digest: str
    nbytes: int
    pull_s: float
    pause_s: float
    changed: bool
    canary_difference: float | None
    drain_s: float = 0.0
    swap_s: float = 0.0
    prove_s: float = 0.0
    resume_s: float = 0.0
    stage_s: float = 0.0
    finish_s: float = 0.0
    cut: int = 0
    canary_mean: float | None = None
    canary_mean_tolerance: float | None = None
    canary_followed: float | None = None

    def seconds(self) -> dict[str, float]:
        """Return where the time went, part -> seconds."""
        names = ("pull_s", "stage_s", "finish_s", "drain_s", "swap_s", "prove_s", "resume_s")
        return {name: round(getattr(self, name), 4) for name in names}


class FleetMember(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as its router sees it.

    Attributes:
        state: unknown, joining, serving, dirty, draining, dead or leaving.
        places: samples that it holds at once.
        jobs: that it serves alone; all if empty.
    """

    replica: str
    state: str
    reason: str
    policy_version: int
    digest: str
    places: int
    jobs: tuple[str, ...] = ()


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica says of itself; fields as in `EngineInfo` and `EngineLoad`.

    Attributes:
        finished_turns: turns that ended since the replica began.
        members: of a router: its replicas. The other fields are sums over them.
    """

    state: ReplicaState
    reason: str
    policy_version: int
    digest: str
    running: int
    waiting: int
    kv_used_tokens: int
    kv_capacity_tokens: int
    output_tokens: int
    prefill_tokens: int
    cached_tokens: int
    wall_s: float
    seconds: dict[str, float]
    max_num_seqs: int
    max_model_len: int
    dtype: str
    finished_turns: int = 0
    host_kv: HostKvLoad | None = None
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    adapters: tuple[AdapterInfo, ...] = ()
    members: tuple[FleetMember, ...] = ()


# -- generate

MAX_CHARS_PER_TOKEN = 512
"""No token of a text has more; a text that is longer than the context times this is refused before it becomes ids."""
LONG_TEXT_CHARS = 20_000
"""Characters above which a prompt becomes ids beside the loop: below it that takes less than 20 ms."""
Prompt = np.ndarray | str | tuple[Message, ...]
"""Token ids, plain text, or a conversation."""


def request_to_message(request: GenerateRequest, *, siblings: int = 1) -> pb.GenerateRequest:
    """Return the message of a request."""
    sampling, wave = request.sampling, request.wave
    return pb.GenerateRequest(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids.tolist(),
        sampling=pb.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_new_tokens,
            seed=sampling.seed,
            stop_token_ids=sampling.stop_token_ids,
        ),
        group_key=request.group_key,
        deadline_s=request.deadline_s,
        min_policy_version=request.min_policy_version,
        wave=None if wave is None else pb.Wave(wave_id=wave.wave_id, size=wave.size, index=wave.index),
        session_id=request.session_id,
        job=request.job,
        adapter=request.adapter,
        siblings=siblings,
    )


def chars_of(prompt: str | tuple[Message, ...]) -> int:
    """Return how many characters a prompt of text has.

    Example:
        >>> chars_of((Message(role="user", content="2 + 2"),))
        5
    """
    return len(prompt) if isinstance(prompt, str) else sum(len(message.content) for message in prompt)


def prompt_from_message(message: pb.GenerateRequest) -> Prompt:
    """Return the prompt of a message in the one form it has.

    Raises:
        DataError: if it has none, or several.
    """
    forms: list[tuple[str, Prompt]] = []
    if message.prompt_ids:
        forms.append(("prompt_ids", np.array(message.prompt_ids, dtype=np.int64)))
    if message.HasField("text"):
        forms.append(("text", message.text))
    if message.HasField("messages"):
        forms.append(("messages", tuple(Message(m.role, m.content) for m in message.messages.messages)))
    if len(forms) == 1:
        return forms[0][1]
    have = " and ".join(name for name, _ in forms) or "an empty prompt"
    raise DataError(
        f"request {message.request_id} has {have}; give exactly one of prompt_ids, text and messages, and not empty"
    )


def request_from_message(
    message: pb.GenerateRequest,
    *,
    prompt_ids: np.ndarray,
    stop_token_ids: Sequence[int] = (),
    max_new_tokens: int | None = None,
) -> GenerateRequest:
    """Return the request of a message.

    Args:
        prompt_ids: int [prompt_tokens], what the prompt became.
        stop_token_ids: those that count where the message names none.
        max_new_tokens: the cap where the message names none; `None` leaves that to the context.
    """
    return GenerateRequest(
        request_id=message.request_id,
        prompt_ids=np.asarray(prompt_ids, dtype=np.int64),
        sampling=_sampling_from_message(
            message, stop_token_ids=stop_token_ids, max_new_tokens=max_new_tokens or UNCAPPED_TOKENS
        ),
        group_key=message.group_key,
        deadline_s=message.deadline_s or DEFAULT_DEADLINE_S,
        min_policy_version=message.min_policy_version,
        wave=Wave(wave_id=message.wave.wave_id, size=message.wave.size, index=message.wave.index)
        if message.HasField("wave")
        else None,
        session_id=message.session_id,
        job=message.job,
        adapter=message.adapter,
    )


def _sampling_from_message(
    message: pb.GenerateRequest, *, stop_token_ids: Sequence[int], max_new_tokens: int
) -> SamplingParams:
    sampling = message.sampling
    given = {name: _shortest(getattr(sampling, name)) for name in ("temperature", "top_p") if sampling.HasField(name)}
    return SamplingParams(
        **given,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens if sampling.HasField("max_new_tokens") else max_new_tokens,
        seed=sampling.seed if sampling.HasField("seed") else seed_of(message.request_id),
        stop_token_ids=tuple(sampling.stop_token_ids) or tuple(stop_token_ids),
    )


def seed_of(request_id: str) -> int:
    """Return the seed of a request that names none: another one for every id, and the same when it is sent again."""
    return derive_seed("request", request_id)


def _shortest(value: float) -> float:
    """Return the decimal that was meant by a float32 from the wire: 0.7, not 0.699999988."""
    return float(str(np.float32(value)))


def sibling_id(request_id: str, index: int, *, siblings: int) -> str:
    """Return the id of one sibling's turn: the request's own if it is alone."""
    return request_id if siblings == 1 else f"{request_id}#{index}"


def turns_to_message(
    turns: Sequence[Turn],
    *,
    request_id: str,
    prompt_ids: np.ndarray | None = None,
    texts: Sequence[str] | None = None,
) -> pb.GenerateReply:
    """Return the reply with one sample for each turn.

    Args:
        prompt_ids: for a caller who did not give them.
        texts: of the outputs, where the caller gave text.
    """
    return pb.GenerateReply(
        request_id=request_id,
        samples=[
            pb.Sample(
                index=index,
                output_ids=turn.output_ids.tolist(),
                behavior_logprobs=turn.behavior_logprobs.tolist(),
                version_spans=[
                    pb.VersionSpan(start_token=s.start_token, end_token=s.end_token, policy_version=s.policy_version)
                    for s in turn.version_spans
                ],
                stop_reason=turn.stop_reason.value,
                timings=_timings_to_message(turn.timings),
                cached_tokens=turn.cached_tokens,
                text=None if texts is None else texts[index],
            )
            for index, turn in enumerate(turns)
        ],
        prompt_ids=None if prompt_ids is None else prompt_ids.tolist(),
    )


def turns_from_message(message: pb.GenerateReply, *, prompt_ids: np.ndarray, siblings: int = 1) -> list[Turn]:
    """Return the turns of a reply, in order of their index.

    Raises:
        LengthMismatch: if samples are missing, or log-probs or version spans do not fit the token ids.
    """
    if [sample.index for sample in message.samples] != list(range(siblings)):
        raise LengthMismatch(
            what=f"samples of request {message.request_id}", expected=siblings, got=len(message.samples)
        )
    return [
        Turn(
            request_id=sibling_id(message.request_id, sample.index, siblings=siblings),
            prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
            output_ids=np.array(sample.output_ids, dtype=np.int32),
            behavior_logprobs=np.array(sample.behavior_logprobs, dtype=np.float32),
            version_spans=tuple(
                VersionSpan(s.start_token, s.end_token, s.policy_version) for s in sample.version_spans
            ),
            stop_reason=StopReason(sample.stop_reason),
            timings=_timings_from_message(sample.timings),
            cached_tokens=sample.cached_tokens,
        )
        for sample in message.samples
    ]


def chunk_to_message(chunk: TokenChunk, *, request_id: str, index: int) -> pb.GenerateEvent:
    """Return the event of tokens that were sampled."""
    return pb.GenerateEvent(
        request_id=request_id,
        index=index,
        tokens=pb.TokenChunk(
            start_token=chunk.start_token,
            output_ids=chunk.output_ids.tolist(),
            behavior_logprobs=chunk.behavior_logprobs.tolist(),
            policy_version=chunk.policy_version,
        ),
    )


def chunk_from_message(message: pb.TokenChunk) -> TokenChunk:
    """Return the tokens of an event.

    Raises:
        LengthMismatch: if there are more log-probs than tokens, or fewer.
    """
    if len(message.output_ids) != len(message.behavior_logprobs):
        raise LengthMismatch(
            what="behavior_logprobs of a chunk", expected=len(message.output_ids), got=len(message.behavior_logprobs)
        )
    return TokenChunk(
        start_token=message.start_token,
        output_ids=np.array(message.output_ids, dtype=np.int32),
        behavior_logprobs=np.array(message.behavior_logprobs, dtype=np.float32),
        policy_version=message.policy_version,
    )


def finished_to_message(turn: Turn, *, request_id: str, index: int, text: str | None = None) -> pb.GenerateEvent:
    """Return the event of a turn's end."""
    return pb.GenerateEvent(
        request_id=request_id,
        index=index,
        finished=pb.Finished(
            output_tokens=len(turn.output_ids),
            stop_reason=turn.stop_reason.value,
            timings=_timings_to_message(turn.timings),
            cached_tokens=turn.cached_tokens,
            text=text,
        ),
    )


class TurnAssembler:
    """Makes a turn out of the chunks of a stream.

    Args:
        request_id: of the turn.
        prompt_ids: int [prompt_tokens].
    """

    def __init__(self, request_id: str, *, prompt_ids: np.ndarray) -> None:
        self._request_id = request_id
        self._prompt_ids = np.asarray(prompt_ids, dtype=np.int32)
        self._chunks: list[TokenChunk] = []
        self._count = 0

    def add(self, chunk: TokenChunk) -> None:
        """Take the next tokens.

        Raises:
            LengthMismatch: if tokens between this chunk and the one before are missing, or come twice.
        """
        if chunk.start_token != self._count:
            raise LengthMismatch(
                what=f"start of a chunk of request {self._request_id}", expected=self._count, got=chunk.start_token
            )
        self._chunks.append(chunk)
        self._count += len(chunk.output_ids)

    def finish(self, message: pb.Finished) -> Turn:
        """Return the whole turn.

        Raises:
            LengthMismatch: if tokens are missing.
        """
        if message.output_tokens != self._count:
            raise LengthMismatch(
                what=f"streamed tokens of request {self._request_id}", expected=message.output_tokens, got=self._count
            )
        chunks = self._chunks
        versions = [np.full(len(c.output_ids), c.policy_version, dtype=np.int64) for c in chunks]
        return Turn(
            request_id=self._request_id,
            prompt_ids=self._prompt_ids,
            output_ids=np.concatenate([np.empty(0, np.int32), *(c.output_ids for c in chunks)]),
            behavior_logprobs=np.concatenate([np.empty(0, np.float32), *(c.behavior_logprobs for c in chunks)]),
            version_spans=spans_of(np.concatenate([np.empty(0, np.int64), *versions])),
            stop_reason=StopReason(message.stop_reason),
            timings=_timings_from_message(message.timings),
            cached_tokens=message.cached_tokens,
        )


def _timings_to_message(timings: TurnTimings) -> pb.Timings:
    return pb.Timings(queued_s=timings.queued_s, prefill_s=timings.prefill_s, decode_s=timings.decode_s)


def _timings_from_message(message: pb.Timings) -> TurnTimings:
    return TurnTimings(queued_s=message.queued_s, prefill_s=message.prefill_s, decode_s=message.decode_s)


# -- weights and status

_OPTIONAL_OF_A_REPORT = ("canary_mean", "canary_mean_tolerance", "canary_followed")


def reward_to_message(reward: Reward) -> pb.ScoreReply:
    """Return the message of what a reward head said."""
    message = pb.ScoreReply(policy_version=reward.policy_version, rewards=reward.scores.tolist())
    if len(reward.scores) == 1:
        message.reward = float(reward.scores[0])
    return message


def reward_from_message(message: pb.ScoreReply) -> Reward:
    """Return what a reward head said."""
    return Reward(scores=np.array(message.rewards, dtype=np.float32), policy_version=message.policy_version)


def report_to_message(report: LoadReport) -> pb.LoadWeightsReply:
    """Return the message of a load report."""
    return pb.LoadWeightsReply(
        policy_version=report.policy_version,
        digest=report.digest,
        nbytes=report.nbytes,
        pull_s=report.pull_s,
        pause_s=report.pause_s,
        changed=report.changed,
        canary_difference=-1.0 if report.canary_difference is None else report.canary_difference,
        drain_s=report.drain_s,
        swap_s=report.swap_s,
        prove_s=report.prove_s,
        resume_s=report.resume_s,
        stage_s=report.stage_s,
        finish_s=report.finish_s,
        cut=report.cut,
        canary_mean=report.canary_mean,
        canary_mean_tolerance=report.canary_mean_tolerance,
        canary_followed=report.canary_followed,
    )


def report_from_message(message: pb.LoadWeightsReply) -> LoadReport:
    """Return the load report of a message."""
    return LoadReport(
        policy_version=message.policy_version,
        digest=message.digest,
        nbytes=message.nbytes,
        pull_s=message.pull_s,
        pause_s=message.pause_s,
        changed=message.changed,
        canary_difference=None if message.canary_difference < 0 else message.canary_difference,
        drain_s=message.drain_s,
        swap_s=message.swap_s,
        prove_s=message.prove_s,
        resume_s=message.resume_s,
        stage_s=message.stage_s,
        finish_s=message.finish_s,
        cut=message.cut,
        **{name: getattr(message, name) if message.HasField(name) else None for name in _OPTIONAL_OF_A_REPORT},
    )


def status_to_message(status: ReplicaStatus) -> pb.StatusReply:
    """Return the message of a status."""
    tier = None if status.host_kv is None else pb.HostKv(**msgspec.structs.asdict(status.host_kv))
    adapters = [pb.AdapterStatus(**msgspec.structs.asdict(one)) for one in status.adapters]
    members = [pb.FleetMember(**msgspec.structs.asdict(one)) for one in status.members]
    made = {"state": status.state.value, "host_kv": tier, "adapters": adapters, "replicas": members}
    fields = {name: value for name, value in msgspec.structs.asdict(status).items() if name != "members"}
    return pb.StatusReply(**{**fields, **made})


def status_from_message(message: pb.StatusReply) -> ReplicaStatus:
    """Return the status of a message."""
    fields = {name: getattr(message, name) for name in ReplicaStatus.__struct_fields__ if name != "members"}
    tier = None
    if message.HasField("host_kv"):
        tier = HostKvLoad(**{name: getattr(message.host_kv, name) for name in HostKvLoad.__struct_fields__})
    adapters = tuple(
        AdapterInfo(name=one.name, policy_version=one.policy_version, digest=one.digest) for one in message.adapters
    )
    members = tuple(
        FleetMember(
            replica=one.replica,
            state=one.state,
            reason=one.reason,
            policy_version=one.policy_version,
            digest=one.digest,
            places=one.places,
            jobs=tuple(one.jobs),
        )
        for one in message.replicas
    )
    made = {"state": ReplicaState(message.state), "seconds": dict(message.seconds), "members": members}
    return ReplicaStatus(**{**fields, **made, "host_kv": tier, "adapters": adapters})
