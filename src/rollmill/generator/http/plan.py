"""From a call's body to the requests that the service runs. Pure.

What the three calls have in common is one record, a `Plan`, so that they are run and answered by the same code.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from rollmill.generator.http.bodies import ChatMessage, ChatRequest, CompletionRequest, ScoreBody, TokenRequest
from rollmill.generator.http.problems import RequestProblem
from rollmill.generator.wire import DEFAULT_DEADLINE_S, MAX_CHARS_PER_TOKEN, Prompt, seed_of
from rollmill.types import GenerateRequest, Message, SamplingParams

ID_HEADER, DEADLINE_HEADER, SESSION_HEADER = "x-request-id", "x-request-timeout", "x-session-id"
MAX_STOPS, MAX_STOP_CHARS, MAX_PROMPTS = 16, 1024, 1024
COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; chats have none."""

Call = ChatRequest | CompletionRequest | TokenRequest


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan needs to know of the replica.

    Attributes:
        max_model_len: longest prompt plus output, tokens.
        max_new_tokens: the operator's cap for one request, if any.
        stop_token_ids: ids that end a reply of this model.
        has_tokenizer: whether text can be matched.
        adapters: names that are adapters'.
    """

    max_model_len: int
    max_new_tokens: int | None
    stop_token_ids: tuple[int, ...]
    has_tokenizer: bool
    adapters: tuple[str, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a call asks of the service.

    Attributes:
        request_id: names all its samples.
        requests: one for each prompt.
        siblings: samples of each.
        stops: text that ends a sample.
        logprobs: whether the reply shows them.
        return_token_ids: whether it shows prompt and output ids.
        stream, include_usage: how it is answered.
    """

    request_id: str
    requests: tuple[GenerateRequest, ...]
    siblings: int
    stops: tuple[str, ...]
    logprobs: bool
    return_token_ids: bool
    stream: bool
    include_usage: bool

    @property
    def deadline_s(self) -> float:
        """Seconds that the caller waits."""
        return self.requests[0].deadline_s


def prompts_of(call: Call, *, max_model_len: int) -> list[Prompt]:
    """Return the prompts of a call, each in the form that it has.

    Args:
        call: its body.
        max_model_len: what surely does not fit is refused before work is done on it.

    Raises:
        RequestProblem: if a message or a prompt is of a kind that this server does not take, or far too long.
    """
    if isinstance(call, ChatRequest):
        if not call.messages:
            raise RequestProblem("'messages' is empty; give one message or more", param="messages", code="empty_array")
        messages = tuple(_message(message, index=index) for index, message in enumerate(call.messages))
        _check_chars(sum(len(message.content) for message in messages), param="messages", max_model_len=max_model_len)
        return [messages]
    if isinstance(call, TokenRequest):
        return [_ids(call.token_ids, param="token_ids", max_model_len=max_model_len)]
    return _completion_prompts(call.prompt, max_model_len=max_model_len)


def plan_of(call: Call, *, prompts: Sequence[np.ndarray], headers: Mapping[str, str], facts: Facts) -> Plan:
    """Return what a call asks for.

    Args:
        call: its body.
        prompts: its prompts as ids, in their order.
        headers: of the call; `x-request-id`, `x-request-timeout` and `x-session-id` count where the body says nothing.
        facts: of the replica.

    Raises:
        RequestProblem: if a prompt leaves no room for an answer, settings contradict each other, or need a tokenizer
            that is not there.
    """
    settings = call.sampling_params if isinstance(call, TokenRequest) else call
    param = {ChatRequest: "messages", CompletionRequest: "prompt", TokenRequest: "token_ids"}[type(call)]
    _check_room(max(map(len, prompts)), param=param, max_model_len=facts.max_model_len)
    request_id = _request_id(call, headers=headers)
    deadline_s = deadline_of(call, headers=headers)
    stops = _stops(settings.stop, facts=facts)
    names = [request_id] if len(prompts) == 1 else [f"{request_id}-{index}" for index in range(len(prompts))]
    requests = tuple(
        GenerateRequest(
            request_id=name,
            prompt_ids=prompt,
            sampling=_sampling(call, request_id=name, prompt_tokens=len(prompt), facts=facts),
            group_key=call.group_key or "",
            deadline_s=deadline_s,
            min_policy_version=call.min_policy_version or 0,
            session_id=call.session_id or headers.get(SESSION_HEADER, ""),
            job=call.job or "",
            adapter=call.adapter or (model if (model := call.model or "") in facts.adapters else ""),
        )
        for name, prompt in zip(names, prompts, strict=True)
    )
    return Plan(
        request_id=request_id,
        requests=requests,
        siblings=settings.n or 1,
        stops=stops,
        logprobs=_wants_logprobs(call),
        return_token_ids=bool(call.return_token_ids),
        stream=bool(call.stream),
        include_usage=bool(call.stream_options is not None and call.stream_options.include_usage),
    )


def _check_room(tokens: int, *, param: str, max_model_len: int) -> None:
    if tokens >= max_model_len:
        raise RequestProblem(
            f"the prompt has {tokens} tokens, and max_model_len {max_model_len} leaves no room for an answer; "
            "raise generator.max_model_len or shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )


def _check_chars(chars: int, *, param: str, max_model_len: int) -> None:
    if chars > max_model_len * MAX_CHARS_PER_TOKEN:
        raise RequestProblem(
            f"the prompt has {chars} characters, which no {max_model_len} tokens hold (max_model_len); raise "
            "generator.max_model_len or shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )


def _sampling(call: Call, *, request_id: str, prompt_tokens: int, facts: Facts) -> SamplingParams:
    settings = call.sampling_params if isinstance(call, TokenRequest) else call
    own = () if settings.ignore_eos else facts.stop_token_ids
    return SamplingParams(
        temperature=1.0 if settings.temperature is None else settings.temperature,
        top_p=1.0 if settings.top_p is None else settings.top_p,
        top_k=max(settings.top_k or 0, 0),
        max_new_tokens=_max_new_tokens(call, prompt_tokens=prompt_tokens, facts=facts),
        # The engine's streams take 64 bits without a sign; what OpenAI's clients may send has one.
        seed=seed_of(request_id) if settings.seed is None else settings.seed % 2**64,
        stop_token_ids=tuple(sorted({*own, *(settings.stop_token_ids or ())})),
    )


def _max_new_tokens(call: Call, *, prompt_tokens: int, facts: Facts) -> int:
    asked = call.sampling_params.max_tokens if isinstance(call, TokenRequest) else call.max_tokens
    if isinstance(call, ChatRequest):
        newer = call.max_completion_tokens
        if None not in (asked, newer) and asked != newer:
            raise RequestProblem(
                f"'max_tokens' is {asked} and 'max_completion_tokens' {newer}; they are one setting under two names, "
                "give one of them",
                param="max_tokens",
            )
        asked = newer if asked is None else asked
    if asked is None and isinstance(call, CompletionRequest):
        asked = COMPLETION_TOKENS
    if asked is not None:
        return asked
    room = facts.max_model_len - prompt_tokens
    return room if facts.max_new_tokens is None else min(room, facts.max_new_tokens)


def _wants_logprobs(call: Call) -> bool:
    if isinstance(call, ChatRequest):
        return bool(call.logprobs)
    if isinstance(call, TokenRequest):
        return call.sampling_params.logprobs is not None
    if call.logprobs:
        raise RequestProblem(
            f"'logprobs' is {call.logprobs}, but the engine records the log-probability of the sampled token alone; "
            "0 asks for that",
            param="logprobs",
            code="unsupported_value",
        )
    if call.best_of not in (None, call.n or 1):
        raise RequestProblem(
            f"'best_of' is {call.best_of} and 'n' {call.n or 1}: no samples are thrown away here, choose among n",
            param="best_of",
            code="unsupported_value",
        )
    return call.logprobs is not None


def _stops(stop: str | list[str] | None, *, facts: Facts) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if stops and not facts.has_tokenizer:
        raise RequestProblem("this replica has no tokenizer to match 'stop' with; give stop_token_ids", param="stop")
    if len(stops) > MAX_STOPS or any(not 1 <= len(text) <= MAX_STOP_CHARS for text in stops):
        raise RequestProblem(
            f"'stop' has {len(stops)} strings of {min(map(len, stops))} to {max(map(len, stops))} characters; up to "
            f"{MAX_STOPS} of 1 to {MAX_STOP_CHARS} are taken",
            param="stop",
        )
    return stops


def _request_id(call: Call, *, headers: Mapping[str, str]) -> str:
    if call.request_id is not None:
        return call.request_id
    kind = {ChatRequest: "chatcmpl", CompletionRequest: "cmpl", TokenRequest: "generate"}[type(call)]
    return headers.get(ID_HEADER) or f"{kind}-{secrets.token_hex(12)}"


def deadline_of(call: Call | ScoreBody, *, headers: Mapping[str, str]) -> float:
    """Return the seconds that a caller waits: the body's, else the header's, else the default.

    Raises:
        RequestProblem: if the header is no number.
    """
    if call.deadline_s is not None:
        return call.deadline_s
    text = headers.get(DEADLINE_HEADER)
    if text is None:
        return DEFAULT_DEADLINE_S
    try:
        deadline_s = float(text)
    except ValueError:
        deadline_s = math.nan
    if not math.isfinite(deadline_s):
        raise RequestProblem(f"the header {DEADLINE_HEADER} is {text!r}; give seconds", param=DEADLINE_HEADER)
    return deadline_s


def _message(message: ChatMessage, *, index: int) -> Message:
    for name in ("refusal", "audio", "function_call", "tool_calls", "tool_call_id"):
        if getattr(message, name):
            raise RequestProblem(
                f"'messages[{index}].{name}' is not supported: a message is a role and text here",
                param=f"messages[{index}].{name}",
                code="unsupported_parameter",
            )
    if message.content is None:
        raise RequestProblem(
            f"'messages[{index}].content' is missing; give its text",
            param=f"messages[{index}].content",
            code="missing_required_parameter",
        )
    text = message.content if isinstance(message.content, str) else "".join(part.text for part in message.content)
    return Message(role="system" if message.role == "developer" else message.role, content=text)


def _completion_prompts(prompt: str | list[str | int | list[int]], *, max_model_len: int) -> list[Prompt]:
    if isinstance(prompt, str):
        _check_chars(len(prompt), param="prompt", max_model_len=max_model_len)
        return [prompt]
    texts = [one for one in prompt if isinstance(one, str)]
    ids = [one for one in prompt if isinstance(one, int)]
    lists = [one for one in prompt if isinstance(one, list)]
    if len(prompt) in (len(texts), len(ids), len(lists)) and len(texts) + len(lists) <= MAX_PROMPTS:
        if texts:
            _check_chars(max(map(len, texts)), param="prompt", max_model_len=max_model_len)
            return list(texts)
        return [_ids(one, param="prompt", max_model_len=max_model_len) for one in (lists or [ids])]
    raise RequestProblem(
        f"'prompt' has {len(texts)} texts, {len(ids)} token ids and {len(lists)} lists of ids; give one kind, and "
        f"{MAX_PROMPTS} prompts at most",
        param="prompt",
    )


def _ids(ids: Sequence[int], *, param: str, max_model_len: int) -> np.ndarray:
    if not ids:
        raise RequestProblem(
            f"'{param}' is empty; a policy needs at least one token to go on from", param=param, code="empty_array"
        )
    _check_room(len(ids), param=param, max_model_len=max_model_len)
    return np.array(ids, dtype=np.int64)
