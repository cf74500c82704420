"""What callers send over HTTP, and what of it this server takes. Pure.

Three kinds of fields. Those that change what is sampled are obeyed, or refused by name. Those that the OpenAI client
sends and that change nothing here (`user`, `metadata`, ...) are taken and not looked at. All others are refused by
name: a setting that is silently ignored is an experiment that was never run.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from rollmill.generator.http.problems import RequestProblem

Count = Annotated[int, msgspec.Meta(ge=1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message; text only."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of a conversation, in the form in which the OpenAI client sends it, replies sent back included.

    Attributes:
        role: `developer` is what OpenAI calls `system` now, and is rendered as that.
        name: taken, not shown to the model: chat templates know no names.
        tool_calls, tool_call_id, function_call, audio, refusal: refused unless empty.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream.

    Attributes:
        include_usage: one more event before the end says how many tokens there were.
        include_obfuscation: taken; nothing is padded here.
    """

    include_usage: bool | None = False
    include_obfuscation: bool | None = None


class _Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of all three calls.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches this.
        top_k: keep this many tokens; 0 or -1 keeps all.
        max_tokens: cap on output tokens; the context caps it too.
        seed: of the request's own random stream; follows from the request's id if left out, so a random id has a random
            one, and a request that is sent again has the same.
        n: samples of each prompt; they share its prefill.
        stop: text that ends the reply and is not part of it.
        stop_token_ids: these ids end the reply too, beside the model's own.
        ignore_eos: the model's own ids do not end the reply.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    max_tokens: Count | None = None
    seed: Seed | None = None
    n: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = False
    # Only with the value that changes nothing.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    include_stop_str_in_output: bool | None = None


class _OpenAi(_Sampling, kw_only=True):
    """What both calls of OpenAI's share beside their sampling parameters.

    Attributes:
        model: a name under which this replica serves; any if left out.
        stream: answer token by token, as server-sent events.
        return_token_ids: the reply has `prompt_token_ids` and `token_ids`.
        request_id: names the request for `abort_requests`; else the header `x-request-id`, else one is made.
        session_id: turns of one session go to the replica that holds their KV.
        group_key: requests with equal key and prompt share one prefill.
        min_policy_version: refuse if the replica serves an older one.
        deadline_s: longest wait for the whole answer, s; else the header `x-request-timeout`, else 120.
        job: whose request it is.
        adapter: low-rank adapter that samples; an adapter's name as `model` says the same.
        priority: only 0: within a replica all requests are equal.
        user, metadata, service_tier, store: taken where they change nothing.
    """

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    request_id: str | None = None
    session_id: str | None = None
    group_key: str | None = None
    min_policy_version: Annotated[int, msgspec.Meta(ge=0)] | None = None
    deadline_s: float | None = None
    job: str | None = None
    adapter: str | None = None
    priority: int | None = None
    skip_special_tokens: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: bool | None = None


class ChatRequest(_OpenAi, kw_only=True):
    """Body of `POST /v1/chat/completions`.

    Attributes:
        messages: the conversation; the model's own chat template renders it.
        max_completion_tokens: the newer name of `max_tokens`; all that the context leaves if neither is given.
        logprobs: the reply has the log-probability of every sampled token, under the distribution it was sampled from.
        top_logprobs: only 0: the engine records the sampled token's alone.
    """

    messages: list[ChatMessage]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # Only with the value that changes nothing.
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None
    moderation: Any = None


class CompletionRequest(_OpenAi, kw_only=True):
    """Body of `POST /v1/completions`.

    Attributes:
        prompt: text, token ids, or several of one kind; one choice for each sample of each, in their order.
        max_tokens: 16 if left out, as OpenAI has it.
        logprobs: only 0: the log-probability of every sampled token and no alternatives.
        echo, suffix, best_of: refused unless they change nothing.
    """

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class TokenSampling(_Sampling, kw_only=True):
    """Sampling parameters of `POST /inference/v1/generate`.

    Attributes:
        max_tokens: all that the context leaves if left out.
        logprobs: 0 or 1: that of every sampled token; the engine records no alternatives.
        detokenize, skip_special_tokens, spaces_between_special_tokens: taken; ids go out, not text.
        routed_experts_prompt_start: taken; no model that is served here has experts to tell of.
    """

    logprobs: Annotated[int, msgspec.Meta(ge=0, le=1)] | None = None
    prompt_logprobs: int | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    routed_experts_prompt_start: int | None = None


class TokenRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /inference/v1/generate`: token ids in and out, the form that vLLM and verifiers use.

    Attributes:
        token_ids: the prompt.
        cache_salt: only empty: the prefix cache is keyed by the weights, not by a word of the caller's.
        output_mode: only `tokens`.
        model, stream, request_id, ...: as in the other calls; the header `x-session-id` stands in for `session_id`.
    """

    token_ids: list[TokenId]
    sampling_params: TokenSampling
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    request_id: str | None = None
    session_id: str | None = None
    group_key: str | None = None
    min_policy_version: Annotated[int, msgspec.Meta(ge=0)] | None = None
    deadline_s: float | None = None
    job: str | None = None
    adapter: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    output_mode: Literal["tokens"] = "tokens"
    features: Any = None
    kv_transfer_params: dict[str, Any] | None = None


class AbortBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /inference/v1/abort_requests`."""

    request_ids: list[str]


class ScoreBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /inference/v1/score`: what the model says of given token ids; nothing is sampled.

    Attributes:
        token_ids: the whole sequence.
        what: `logprobs` of each token given those before it (temperature 1), or the `reward` of a reward head.
        model, adapter, job, deadline_s: as in the other calls; an adapter gives log-probs alone.
    """

    token_ids: list[TokenId]
    what: Literal["logprobs", "reward"] = "logprobs"
    model: str | None = None
    adapter: str | None = None
    job: str | None = None
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


B = TypeVar("B", ChatRequest, CompletionRequest, TokenRequest, AbortBody, ScoreBody)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "priority": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "store": (None, False),
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "moderation": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "prompt_logprobs": (None,),
    "cache_salt": (None, ""),
    "features": (None,),
    "kv_transfer_params": (None, {}),
}
"""Fields that are taken only with these values, which change nothing."""
_OF_TEXT = frozenset({"skip_special_tokens"})
"""Among them those that mean nothing where no text goes out."""
_WHY: dict[str, str] = {
    "top_logprobs": "the engine records the log-probability of the sampled token alone; set logprobs, and leave "
    "top_logprobs out",
    "priority": "within a replica all requests are equal; a router gives each job its priority, by `job`",
    "tools": "replies are plain text here; describe the tools in a message and read the calls from the reply",
    "store": "nothing is stored here",
    "cache_salt": "the prefix cache is keyed by the weights; leave it out",
    "echo": "the prompt is not repeated; return_token_ids gives its ids",
}
MAX_NODES = 1_000_000
"""Lists and objects of a body: a million take half a second to make, during which nobody else is served."""
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`")


def decode(body: bytes, kind: type[B]) -> B:
    """Return the call in a body.

    Raises:
        RequestProblem: naming the field that is unknown, missing, of another type, out of range, or not supported.
    """
    nodes = body.count(b"[") + body.count(b"{")
    if nodes > MAX_NODES:
        raise RequestProblem(f"the body has {nodes} opening brackets; {MAX_NODES} are taken", code="request_too_large")
    try:
        call = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _problem_of(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestProblem(f"the body is no JSON that can be read: {error}", code="invalid_json") from None
    _refuse_what_is_not_neutral(call)
    return call


def _problem_of(text: str) -> RequestProblem:
    """Return what a validation error says, in OpenAI's words for it.

    Example:
        >>> problem = _problem_of("Expected `int | null`, got `str` - at `$.max_tokens`")
        >>> problem.param, problem.problem_code
        ('max_tokens', 'invalid_type')
    """
    found = _PATH.search(text)
    path = "" if found is None else found["path"]
    said = _PATH.sub("", text)
    for pattern, code, word in (
        (_UNKNOWN, "unknown_parameter", "Unknown parameter"),
        (_MISSING, "missing_required_parameter", "Missing required parameter"),
    ):
        name = pattern.search(text)
        if name is not None:
            param = f"{path}.{name['name']}" if path else name["name"]
            return RequestProblem(
                f"{word}: '{param}'. No setting is ignored silently; /openapi.json lists those of every call",
                param=param,
                code=code,
            )
    code = "invalid_type" if ", got " in said else "invalid_value"
    return RequestProblem(f"Invalid value for '{path or 'the body'}': {said}", param=path or None, code=code)


def _refuse_what_is_not_neutral(call: Any) -> None:
    for name in call.__struct_fields__:
        allowed, value = NEUTRAL.get(name), getattr(call, name)
        if allowed is None or value in allowed or (isinstance(call, TokenSampling) and name in _OF_TEXT):
            continue
        raise RequestProblem(
            f"'{name}' is not supported: {_WHY.get(name, 'this server cannot do it')}. Only {neutral_values(name)} is "
            "taken",
            param=name,
            code="unsupported_parameter",
        )
    if isinstance(call, TokenRequest):
        _refuse_what_is_not_neutral(call.sampling_params)


def neutral_values(name: str) -> str:
    """Return the values that a field of `NEUTRAL` may have, in words.

    Example:
        >>> neutral_values("tool_choice")
        '"none" or "auto"'
    """
    values = [msgspec.json.encode(value).decode() for value in NEUTRAL[name] if value is not None]
    return " or ".join(values) or "null"
