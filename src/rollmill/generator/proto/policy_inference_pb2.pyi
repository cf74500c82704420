from collections.abc import Iterable as _Iterable
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar

from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from google.protobuf.internal import containers as _containers

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParams(_message.Message):
    __slots__ = ("max_new_tokens", "seed", "stop_token_ids", "temperature", "top_k", "top_p")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: float | None = ..., top_p: float | None = ..., top_k: int | None = ..., max_new_tokens: int | None = ..., seed: int | None = ..., stop_token_ids: _Iterable[int] | None = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("end_token", "policy_version", "start_token")
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    start_token: int
    end_token: int
    policy_version: int
    def __init__(self, start_token: int | None = ..., end_token: int | None = ..., policy_version: int | None = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("decode_s", "prefill_s", "queued_s")
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    queued_s: float
    prefill_s: float
    decode_s: float
    def __init__(self, queued_s: float | None = ..., prefill_s: float | None = ..., decode_s: float | None = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("deadline_s", "group_key", "min_policy_version", "prompt_ids", "request_id", "sampling")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    GROUP_KEY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    MIN_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    group_key: str
    deadline_s: float
    min_policy_version: int
    def __init__(self, request_id: str | None = ..., prompt_ids: _Iterable[int] | None = ..., sampling: SamplingParams | _Mapping | None = ..., group_key: str | None = ..., deadline_s: float | None = ..., min_policy_version: int | None = ...) -> None: ...

class GenerateReply(_message.Message):
    __slots__ = ("behavior_logprobs", "cached_tokens", "output_ids", "request_id", "stop_reason", "timings", "version_spans")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    behavior_logprobs: _containers.RepeatedScalarFieldContainer[float]
    version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    stop_reason: str
    timings: Timings
    cached_tokens: int
    def __init__(self, request_id: str | None = ..., output_ids: _Iterable[int] | None = ..., behavior_logprobs: _Iterable[float] | None = ..., version_spans: _Iterable[VersionSpan | _Mapping] | None = ..., stop_reason: str | None = ..., timings: Timings | _Mapping | None = ..., cached_tokens: int | None = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: str | None = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool | None = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Iterable[int] | None = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("logprobs", "policy_version")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    policy_version: int
    def __init__(self, logprobs: _Iterable[float] | None = ..., policy_version: int | None = ...) -> None: ...

class LoadWeightsRequest(_message.Message):
    __slots__ = ("policy_version",)
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    def __init__(self, policy_version: int | None = ...) -> None: ...

class LoadWeightsReply(_message.Message):
    __slots__ = ("canary_difference", "changed", "digest", "nbytes", "pause_s", "policy_version", "pull_s")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    PULL_S_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    CANARY_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    digest: str
    nbytes: int
    pull_s: float
    pause_s: float
    changed: bool
    canary_difference: float
    def __init__(self, policy_version: int | None = ..., digest: str | None = ..., nbytes: int | None = ..., pull_s: float | None = ..., pause_s: float | None = ..., changed: bool | None = ..., canary_difference: float | None = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: float | None = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("unfinished",)
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    unfinished: int
    def __init__(self, unfinished: int | None = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("cached_tokens", "digest", "dtype", "kv_capacity_tokens", "kv_used_tokens", "max_model_len", "max_slots", "output_tokens", "policy_version", "prefill_tokens", "reason", "running", "seconds", "state", "waiting", "wall_s")
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: str | None = ..., value: float | None = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WALL_S_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    state: str
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
    seconds: _containers.ScalarMap[str, float]
    max_slots: int
    max_model_len: int
    dtype: str
    def __init__(self, state: str | None = ..., reason: str | None = ..., policy_version: int | None = ..., digest: str | None = ..., running: int | None = ..., waiting: int | None = ..., kv_used_tokens: int | None = ..., kv_capacity_tokens: int | None = ..., output_tokens: int | None = ..., prefill_tokens: int | None = ..., cached_tokens: int | None = ..., wall_s: float | None = ..., seconds: _Mapping[str, float] | None = ..., max_slots: int | None = ..., max_model_len: int | None = ..., dtype: str | None = ...) -> None: ...
