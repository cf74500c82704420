"""How each of the three calls is answered, whole or event by event: which parts of a sample go where. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from rollmill.generator.http.plan import Plan
from rollmill.generator.http.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatReply,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    Delta,
    IdLogprobs,
    Sample,
    TokenChoice,
    TokenReply,
    Usage,
    chat_logprobs,
    completion_logprobs,
    end_of,
    id_logprobs,
    usage_of,
    weight_versions,
)
from rollmill.generator.http.text import Decode


class Answer(Protocol):
    """Makes the bodies and events of one call's answer.

    Attributes:
        wants_text: whether samples need their text.
        knows_abort: whether a sample that was cut short can be shown as such; else it is an error.
    """

    wants_text: bool
    knows_abort: bool

    def whole(self, samples: Sequence[Sample]) -> msgspec.Struct:
        """Return the body of an answer that is not streamed."""
        ...

    def opening(self) -> list[msgspec.Struct]:
        """Return the events before the first token."""
        ...

    def piece(self, index: int, *, text: str, ids: Sequence[int], logprobs: Sequence[float]) -> msgspec.Struct | None:
        """Return the event of what a sample gained, if it shows any of it."""
        ...

    def ending(self, sample: Sample) -> msgspec.Struct:
        """Return the event of a sample's end."""
        ...

    def closing(self, samples: Sequence[Sample]) -> msgspec.Struct:
        """Return the event that says how many tokens there were."""
        ...


class _Common:
    """What all answers say.

    Args:
        plan: what was asked.
        model: name of the model.
        created: seconds since 1970.
        decode: the text of ids, where there is a tokenizer.
    """

    def __init__(self, plan: Plan, *, model: str, created: int, decode: Decode | None) -> None:
        self._plan = plan
        self._head = {"created": created, "model": model}
        self._decode: Decode = decode or (lambda ids: "")
        self._no_usage: UnsetType | None = None if plan.include_usage else UNSET

    def _usage(self, samples: Sequence[Sample]) -> Usage:
        prompt_tokens = sum(len(request.prompt_ids) for request in self._plan.requests)
        return usage_of(prompt_tokens, samples, siblings=self._plan.siblings)

    def _shown(self, ids: Sequence[int]) -> list[int] | UnsetType:
        return list(ids) if self._plan.return_token_ids else UNSET

    def _prompt(self, number: int) -> list[int] | UnsetType:
        return self._plan.requests[number].prompt_ids.tolist() if self._plan.return_token_ids else UNSET

    def _is_shown(self, text: str, ids: Sequence[int]) -> bool:
        return bool(text) or (bool(ids) and (self._plan.logprobs or self._plan.return_token_ids))


class ChatAnswer(_Common):
    """Answers `POST /v1/chat/completions`."""

    wants_text, knows_abort = True, False

    def whole(self, samples: Sequence[Sample]) -> ChatReply:
        """Return the body."""
        return ChatReply(
            id=self._plan.request_id,
            choices=[
                ChatChoice(
                    index=sample.index,
                    message=AssistantMessage(content=sample.text),
                    logprobs=self._logprobs(sample.output_ids.tolist(), sample.logprobs.tolist()),
                    finish_reason=sample.finish_reason,
                    token_ids=self._shown(sample.output_ids.tolist()),
                    **end_of(sample),
                )
                for sample in samples
            ],
            usage=self._usage(samples),
            prompt_token_ids=self._prompt(0),
            **self._head,
        )

    def opening(self) -> list[msgspec.Struct]:
        """Return one event for each sample, with its role."""
        events: list[msgspec.Struct] = []
        for index in range(self._plan.siblings):
            chunk = self._chunk(ChatChunkChoice(index=index, delta=Delta(role="assistant", content="")))
            if index == 0:
                chunk.prompt_token_ids = self._prompt(0)
            events.append(chunk)
        return events

    def piece(self, index: int, *, text: str, ids: Sequence[int], logprobs: Sequence[float]) -> ChatChunk | None:
        """Return the event of what a sample gained."""
        if not self._is_shown(text, ids):
            return None
        return self._chunk(
            ChatChunkChoice(
                index=index,
                delta=Delta(content=text),
                logprobs=self._logprobs(ids, logprobs),
                token_ids=self._shown(ids),
            )
        )

    def ending(self, sample: Sample) -> ChatChunk:
        """Return the event of a sample's end."""
        choice = ChatChunkChoice(
            index=sample.index, delta=Delta(), finish_reason=sample.finish_reason, **end_of(sample)
        )
        return self._chunk(choice)

    def closing(self, samples: Sequence[Sample]) -> ChatChunk:
        """Return the event with the usage."""
        return ChatChunk(id=self._plan.request_id, choices=[], usage=self._usage(samples), **self._head)

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(id=self._plan.request_id, choices=[choice], usage=self._no_usage, **self._head)

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> ChatLogprobs | None:
        return chat_logprobs(ids, logprobs, decode=self._decode) if self._plan.logprobs else None


class CompletionAnswer(_Common):
    """Answers `POST /v1/completions`."""

    wants_text, knows_abort = True, False

    def __init__(self, plan: Plan, *, model: str, created: int, decode: Decode | None) -> None:
        super().__init__(plan, model=model, created=created, decode=decode)
        self._offsets: dict[int, int] = {}

    def whole(self, samples: Sequence[Sample]) -> CompletionReply:
        """Return the body."""
        choices = [
            CompletionChoice(
                index=sample.index,
                text=sample.text,
                logprobs=self._logprobs(sample.index, sample.output_ids.tolist(), sample.logprobs.tolist()),
                finish_reason=sample.finish_reason,
                token_ids=self._shown(sample.output_ids.tolist()),
                prompt_token_ids=self._prompt(sample.index // self._plan.siblings),
                **end_of(sample),
            )
            for sample in samples
        ]
        return CompletionReply(id=self._plan.request_id, choices=choices, usage=self._usage(samples), **self._head)

    def opening(self) -> list[msgspec.Struct]:
        """Return one event for each prompt, with its ids, if they are shown."""
        if not self._plan.return_token_ids:
            return []
        return [
            self._chunk(
                CompletionChoice(index=number * self._plan.siblings, text="", prompt_token_ids=self._prompt(number))
            )
            for number in range(len(self._plan.requests))
        ]

    def piece(self, index: int, *, text: str, ids: Sequence[int], logprobs: Sequence[float]) -> CompletionReply | None:
        """Return the event of what a sample gained."""
        if not self._is_shown(text, ids):
            return None
        return self._chunk(
            CompletionChoice(
                index=index,
                text=text,
                logprobs=self._logprobs(index, ids, logprobs),
                token_ids=self._shown(ids),
            )
        )

    def ending(self, sample: Sample) -> CompletionReply:
        """Return the event of a sample's end."""
        choice = CompletionChoice(index=sample.index, text="", finish_reason=sample.finish_reason, **end_of(sample))
        return self._chunk(choice)

    def closing(self, samples: Sequence[Sample]) -> CompletionReply:
        """Return the event with the usage."""
        return CompletionReply(id=self._plan.request_id, choices=[], usage=self._usage(samples), **self._head)

    def _chunk(self, choice: CompletionChoice) -> CompletionReply:
        return CompletionReply(id=self._plan.request_id, choices=[choice], usage=self._no_usage, **self._head)

    def _logprobs(self, index: int, ids: Sequence[int], logprobs: Sequence[float]) -> CompletionLogprobs | None:
        if not self._plan.logprobs:
            return None
        offset = self._offsets.get(index, 0)
        found = completion_logprobs(ids, logprobs, decode=self._decode, offset=offset)
        self._offsets[index] = offset + sum(map(len, found.tokens))
        return found


class TokenAnswer(_Common):
    """Answers `POST /inference/v1/generate`; a sample that was cut short comes with what it has."""

    wants_text, knows_abort = False, True

    def __init__(self, plan: Plan, *, model: str, created: int, decode: Decode | None) -> None:
        super().__init__(plan, model=model, created=created, decode=decode)
        self.wants_text = bool(plan.stops)

    def whole(self, samples: Sequence[Sample]) -> TokenReply:
        """Return the body."""
        choices = [
            TokenChoice(
                index=sample.index,
                logprobs=self._logprobs(sample.output_ids.tolist(), sample.logprobs.tolist()),
                finish_reason=sample.finish_reason,
                token_ids=sample.output_ids.tolist(),
                weight_versions=weight_versions(sample.spans),
                **end_of(sample),
            )
            for sample in samples
        ]
        return self._reply(choices, usage=self._usage(samples), prompt_token_ids=self._prompt(0))

    def opening(self) -> list[msgspec.Struct]:
        """Return an event with the prompt's ids, if they are asked for."""
        return [self._reply([], prompt_token_ids=self._prompt(0))] if self._plan.return_token_ids else []

    def piece(self, index: int, *, text: str, ids: Sequence[int], logprobs: Sequence[float]) -> TokenReply | None:
        """Return the event of what a sample gained."""
        if not ids:
            return None
        return self._reply([TokenChoice(index=index, logprobs=self._logprobs(ids, logprobs), token_ids=list(ids))])

    def ending(self, sample: Sample) -> TokenReply:
        """Return the event of a sample's end."""
        choice = TokenChoice(
            index=sample.index,
            finish_reason=sample.finish_reason,
            token_ids=[],
            weight_versions=weight_versions(sample.spans),
            **end_of(sample),
        )
        return self._reply([choice])

    def closing(self, samples: Sequence[Sample]) -> TokenReply:
        """Return the event with the usage."""
        return self._reply([], usage=self._usage(samples))

    def _reply(self, choices: list[TokenChoice], **fields: Any) -> TokenReply:
        named = {"usage": self._no_usage, **fields}
        return TokenReply(request_id=self._plan.request_id, choices=choices, **named, **self._head)

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> IdLogprobs | None:
        return id_logprobs(ids, logprobs) if self._plan.logprobs else None
