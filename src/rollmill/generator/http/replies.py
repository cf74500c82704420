"""From samples to bodies and events of replies, in the shapes of OpenAI's API and of vLLM's token API. Pure.

Beside OpenAI's fields a choice says what training needs: which policy version sampled which tokens, how many prompt
tokens were cached, where the time went; with `return_token_ids` also the ids as they were sampled. Where a stop string
cut the text, the ids up to its end are all there, and `stop_match` says which ones hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from rollmill.generator.http.text import Decode, StopMatch
from rollmill.types import StopReason, TurnTimings, VersionSpan

FinishReason = Literal["stop", "length", "abort"]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One finished sample, cut where a stop string ends.

    Attributes:
        index: of its choice.
        output_ids: int32 [output_tokens].
        logprobs: float32 [output_tokens].
        spans: partition of the output by the version that sampled it.
        text: without the stop string.
        finish_reason: `abort` if it was cut short.
        stop_token: the id that ended it, where one did.
        match: the stop string that ended it, where one did.
    """

    index: int
    output_ids: np.ndarray
    logprobs: np.ndarray
    spans: tuple[VersionSpan, ...]
    text: str
    finish_reason: FinishReason
    stop_token: int | None
    match: StopMatch | None
    timings: TurnTimings
    cached_tokens: int


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Details of the prompt's tokens."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens a call took; each prompt counts once, whatever the number of its samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probability of a sampled token, in a chat.

    Attributes:
        token: its text; a token that is part of a character has none of its own.
        bytes: of its text, UTF-8, where it has one.
        top_logprobs: always empty.
    """

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[Any] = []


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a chat's reply, one for each sampled id."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a completion, one for each sampled id."""

    tokens: list[str]
    token_logprobs: list[float]
    text_offset: list[int]
    top_logprobs: None = None


class IdLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probability of a sampled id.

    Attributes:
        token: `token_id:N`, as vLLM writes it and as the client of verifiers checks it.
    """

    token: str
    token_id: int
    logprob: float
    rank: None = None
    top_logprobs: list[Any] = []


class IdLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of the sampled ids, in their order."""

    content: list[IdLogprob]


class WeightVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens `[start, end)` were sampled under this version; `version_spans` in vLLM's words."""

    version: str
    start: int
    end: int


class Extras(msgspec.Struct, kw_only=True):
    """What a choice has beside OpenAI's fields; in a stream, with its last event.

    Attributes:
        stop_reason: the stop string or stop id that ended it.
        stop_match: which output tokens hold the stop string.
        token_ids: as they were sampled; with `return_token_ids`.
        version_spans: which policy version sampled which output tokens.
        cached_tokens: prompt tokens whose KV was there already.
        timings: seconds queued, in prefill and in decode.
    """

    stop_reason: str | int | UnsetType | None = UNSET
    stop_match: StopMatch | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    version_spans: tuple[VersionSpan, ...] | UnsetType = UNSET
    cached_tokens: int | UnsetType = UNSET
    timings: dict[str, float] | UnsetType = UNSET


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of a chat."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What an event adds to a chat's reply."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Extras, kw_only=True):
    """A sample of a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatChunkChoice(Extras, kw_only=True):
    """What an event says of a sample of a chat."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class CompletionChoice(Extras, kw_only=True):
    """A sample of a completion; in a stream, what an event adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class TokenChoice(Extras, kw_only=True):
    """A sample as ids; in a stream, what an event adds to it."""

    index: int
    logprobs: IdLogprobs | None = None
    finish_reason: FinishReason | None = None
    weight_versions: list[WeightVersion] | UnsetType = UNSET


class ChatReply(msgspec.Struct, kw_only=True):
    """Answer of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """Event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionReply(msgspec.Struct, kw_only=True):
    """Answer of `POST /v1/completions`, and event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None


class TokenReply(msgspec.Struct, kw_only=True):
    """Answer of `POST /inference/v1/generate`, and event of its stream."""

    request_id: str
    output_mode: Literal["tokens"] = "tokens"
    created: int
    model: str
    choices: list[TokenChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A name under which the model is served.

    Attributes:
        policy_version: publication number of the weights that are served now.
    """

    id: str
    created: int
    max_model_len: int
    policy_version: int
    object: Literal["model"] = "model"
    owned_by: str = "rollmill"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /v1/models`."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class AbortReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `POST /inference/v1/abort_requests`.

    Attributes:
        aborted: the ids that named a living request.
    """

    aborted: list[str]


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of `POST /inference/v1/score`.

    Attributes:
        logprobs: of token i + 1 given the tokens up to i, where they were asked for.
        rewards: one score for each label of the reward head, where it was asked for, without softmax or scale.
        policy_version: of the weights that gave all of them.
    """

    logprobs: list[float] | UnsetType = UNSET
    rewards: list[float] | UnsetType = UNSET
    policy_version: int


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /health`."""

    status: str
    reason: str = ""


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /version`."""

    version: str


# -- parts of a choice


def finish_reason_of(reason: StopReason, *, match: StopMatch | None) -> FinishReason:
    """Return OpenAI's word for why a sample ended; `abort` where it has none."""
    if match is not None or reason is StopReason.STOP:
        return "stop"
    return "length" if reason is StopReason.LENGTH else "abort"


def spans_until(spans: Sequence[VersionSpan], end: int) -> tuple[VersionSpan, ...]:
    """Return the spans of the first `end` tokens.

    Example:
        >>> [(s.start_token, s.end_token) for s in spans_until([VersionSpan(0, 3, 1), VersionSpan(3, 9, 2)], 5)]
        [(0, 3), (3, 5)]
    """
    return tuple(
        VersionSpan(span.start_token, min(span.end_token, end), span.policy_version)
        for span in spans
        if span.start_token < end
    )


def usage_of(prompt_tokens: int, samples: Sequence[Sample], *, siblings: int) -> Usage:
    """Return the tokens of a call.

    Args:
        prompt_tokens: of all its prompts.
        samples: in the order of their index.
        siblings: samples of each prompt. They share it, so what the first of them found in the cache is what counts.
    """
    output = sum(len(sample.output_ids) for sample in samples)
    groups = [samples[at : at + siblings] for at in range(0, len(samples), siblings)]
    cached = sum(min(sample.cached_tokens for sample in group) for group in groups)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=output,
        total_tokens=prompt_tokens + output,
        prompt_tokens_details=PromptTokens(cached_tokens=cached),
    )


def end_of(sample: Sample) -> dict[str, Any]:
    """Return the extra fields of a sample's end."""
    timings = sample.timings
    return {
        "stop_reason": sample.stop_token if sample.match is None else sample.match.text,
        "stop_match": UNSET if sample.match is None else sample.match,
        "version_spans": sample.spans,
        "cached_tokens": sample.cached_tokens,
        "timings": {
            "queued_s": round(timings.queued_s, 6),
            "prefill_s": round(timings.prefill_s, 6),
            "decode_s": round(timings.decode_s, 6),
        },
    }


def weight_versions(spans: Sequence[VersionSpan]) -> list[WeightVersion]:
    """Return version spans in vLLM's words."""
    return [WeightVersion(version=str(s.policy_version), start=s.start_token, end=s.end_token) for s in spans]


def chat_logprobs(ids: Sequence[int], logprobs: Sequence[float], *, decode: Decode) -> ChatLogprobs:
    """Return the log-probabilities of sampled ids as a chat has them."""
    content = []
    for token, logprob in zip(ids, logprobs, strict=True):
        text = decode([token])
        whole = "\N{REPLACEMENT CHARACTER}" not in text
        content.append(TokenLogprob(token=text, logprob=logprob, bytes=list(text.encode()) if whole else None))
    return ChatLogprobs(content=content)


def completion_logprobs(
    ids: Sequence[int], logprobs: Sequence[float], *, decode: Decode, offset: int = 0
) -> CompletionLogprobs:
    """Return the log-probabilities of sampled ids as a completion has them.

    Args:
        offset: characters of the tokens before these.
    """
    tokens = [decode([token]) for token in ids]
    offsets = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    return CompletionLogprobs(tokens=tokens, token_logprobs=list(logprobs), text_offset=offsets)


def id_logprobs(ids: Sequence[int], logprobs: Sequence[float]) -> IdLogprobs:
    """Return the log-probabilities of sampled ids as the token API has them."""
    return IdLogprobs(
        content=[
            IdLogprob(token=f"token_id:{token}", token_id=token, logprob=value)
            for token, value in zip(ids, logprobs, strict=True)
        ]
    )
