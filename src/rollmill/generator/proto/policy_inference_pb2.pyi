from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_new_tokens", "seed", "stop_token_ids")
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
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("start_token", "end_token", "policy_version")
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    start_token: int
    end_token: int
    policy_version: int
    def __init__(self, start_token: _Optional[int] = ..., end_token: _Optional[int] = ..., policy_version: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queued_s", "prefill_s", "decode_s")
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    queued_s: float
    prefill_s: float
    decode_s: float
    def __init__(self, queued_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ...) -> None: ...

class Wave(_message.Message):
    __slots__ = ("wave_id", "size", "index")
    WAVE_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    wave_id: str
    size: int
    index: int
    def __init__(self, wave_id: _Optional[str] = ..., size: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Messages(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_ids", "text", "messages", "sampling", "group_key", "deadline_s", "min_policy_version", "wave", "session_id", "siblings", "job", "model", "chunk_tokens", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    GROUP_KEY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    MIN_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    WAVE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SIBLINGS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    messages: Messages
    sampling: SamplingParams
    group_key: str
    deadline_s: float
    min_policy_version: int
    wave: Wave
    session_id: str
    siblings: int
    job: str
    model: str
    chunk_tokens: int
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., messages: _Optional[_Union[Messages, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., group_key: _Optional[str] = ..., deadline_s: _Optional[float] = ..., min_policy_version: _Optional[int] = ..., wave: _Optional[_Union[Wave, _Mapping]] = ..., session_id: _Optional[str] = ..., siblings: _Optional[int] = ..., job: _Optional[str] = ..., model: _Optional[str] = ..., chunk_tokens: _Optional[int] = ..., adapter: _Optional[str] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("index", "output_ids", "behavior_logprobs", "version_spans", "stop_reason", "timings", "cached_tokens", "text")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    index: int
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    behavior_logprobs: _containers.RepeatedScalarFieldContainer[float]
    version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    stop_reason: str
    timings: Timings
    cached_tokens: int
    text: str
    def __init__(self, index: _Optional[int] = ..., output_ids: _Optional[_Iterable[int]] = ..., behavior_logprobs: _Optional[_Iterable[float]] = ..., version_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., stop_reason: _Optional[str] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class GenerateReply(_message.Message):
    __slots__ = ("request_id", "samples", "prompt_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., prompt_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenChunk(_message.Message):
    __slots__ = ("start_token", "output_ids", "behavior_logprobs", "policy_version")
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    start_token: int
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    behavior_logprobs: _containers.RepeatedScalarFieldContainer[float]
    policy_version: int
    def __init__(self, start_token: _Optional[int] = ..., output_ids: _Optional[_Iterable[int]] = ..., behavior_logprobs: _Optional[_Iterable[float]] = ..., policy_version: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("output_tokens", "stop_reason", "timings", "cached_tokens", "text")
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    output_tokens: int
    stop_reason: str
    timings: Timings
    cached_tokens: int
    text: str
    def __init__(self, output_tokens: _Optional[int] = ..., stop_reason: _Optional[str] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("request_id", "index", "tokens", "finished", "prompt_ids")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    tokens: TokenChunk
    finished: Finished
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., tokens: _Optional[_Union[TokenChunk, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., prompt_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("call", "generate", "stream", "cancel")
    CALL_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    call: int
    generate: bytes
    stream: bytes
    cancel: bool
    def __init__(self, call: _Optional[int] = ..., generate: _Optional[bytes] = ..., stream: _Optional[bytes] = ..., cancel: _Optional[bool] = ...) -> None: ...

class AskFrame(_message.Message):
    __slots__ = ("asks",)
    ASKS_FIELD_NUMBER: _ClassVar[int]
    asks: _containers.RepeatedCompositeFieldContainer[Ask]
    def __init__(self, asks: _Optional[_Iterable[_Union[Ask, _Mapping]]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("call", "reply", "event", "ended", "failure")
    CALL_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    call: int
    reply: bytes
    event: bytes
    ended: bool
    failure: Failure
    def __init__(self, call: _Optional[int] = ..., reply: _Optional[bytes] = ..., event: _Optional[bytes] = ..., ended: _Optional[bool] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class AnswerFrame(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    def __init__(self, answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("status", "details", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    status: str
    details: str
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, status: _Optional[str] = ..., details: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("token_ids", "what", "job", "adapter")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    what: str
    job: str
    adapter: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., what: _Optional[str] = ..., job: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("logprobs", "policy_version", "reward", "rewards")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    policy_version: int
    reward: float
    rewards: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., policy_version: _Optional[int] = ..., reward: _Optional[float] = ..., rewards: _Optional[_Iterable[float]] = ...) -> None: ...

class LoadWeightsRequest(_message.Message):
    __slots__ = ("policy_version", "job", "adapter")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    job: str
    adapter: str
    def __init__(self, policy_version: _Optional[int] = ..., job: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class LoadWeightsReply(_message.Message):
    __slots__ = ("policy_version", "digest", "nbytes", "pull_s", "pause_s", "changed", "canary_difference", "drain_s", "swap_s", "prove_s", "resume_s", "stage_s", "replicas", "finish_s", "cut", "canary_mean", "canary_mean_tolerance", "canary_followed")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    PULL_S_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    CANARY_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    SWAP_S_FIELD_NUMBER: _ClassVar[int]
    PROVE_S_FIELD_NUMBER: _ClassVar[int]
    RESUME_S_FIELD_NUMBER: _ClassVar[int]
    STAGE_S_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    FINISH_S_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    CANARY_MEAN_FIELD_NUMBER: _ClassVar[int]
    CANARY_MEAN_TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    CANARY_FOLLOWED_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    digest: str
    nbytes: int
    pull_s: float
    pause_s: float
    changed: bool
    canary_difference: float
    drain_s: float
    swap_s: float
    prove_s: float
    resume_s: float
    stage_s: float
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaLoad]
    finish_s: float
    cut: int
    canary_mean: float
    canary_mean_tolerance: float
    canary_followed: float
    def __init__(self, policy_version: _Optional[int] = ..., digest: _Optional[str] = ..., nbytes: _Optional[int] = ..., pull_s: _Optional[float] = ..., pause_s: _Optional[float] = ..., changed: _Optional[bool] = ..., canary_difference: _Optional[float] = ..., drain_s: _Optional[float] = ..., swap_s: _Optional[float] = ..., prove_s: _Optional[float] = ..., resume_s: _Optional[float] = ..., stage_s: _Optional[float] = ..., replicas: _Optional[_Iterable[_Union[ReplicaLoad, _Mapping]]] = ..., finish_s: _Optional[float] = ..., cut: _Optional[int] = ..., canary_mean: _Optional[float] = ..., canary_mean_tolerance: _Optional[float] = ..., canary_followed: _Optional[float] = ...) -> None: ...

class ReplicaLoad(_message.Message):
    __slots__ = ("replica", "result", "error", "digest", "pause_s")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    replica: str
    result: str
    error: str
    digest: str
    pause_s: float
    def __init__(self, replica: _Optional[str] = ..., result: _Optional[str] = ..., error: _Optional[str] = ..., digest: _Optional[str] = ..., pause_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: _Optional[float] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("unfinished",)
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    unfinished: int
    def __init__(self, unfinished: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("state", "reason", "policy_version", "digest", "running", "waiting", "kv_used_tokens", "kv_capacity_tokens", "output_tokens", "prefill_tokens", "cached_tokens", "wall_s", "seconds", "max_num_seqs", "max_model_len", "dtype", "finished_turns", "replicas", "host_kv", "guessed_tokens", "accepted_tokens", "adapters")
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
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
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_TURNS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    HOST_KV_FIELD_NUMBER: _ClassVar[int]
    GUESSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
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
    max_num_seqs: int
    max_model_len: int
    dtype: str
    finished_turns: int
    replicas: _containers.RepeatedCompositeFieldContainer[FleetMember]
    host_kv: HostKv
    guessed_tokens: int
    accepted_tokens: int
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterStatus]
    def __init__(self, state: _Optional[str] = ..., reason: _Optional[str] = ..., policy_version: _Optional[int] = ..., digest: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_used_tokens: _Optional[int] = ..., kv_capacity_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., wall_s: _Optional[float] = ..., seconds: _Optional[_Mapping[str, float]] = ..., max_num_seqs: _Optional[int] = ..., max_model_len: _Optional[int] = ..., dtype: _Optional[str] = ..., finished_turns: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[FleetMember, _Mapping]]] = ..., host_kv: _Optional[_Union[HostKv, _Mapping]] = ..., guessed_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[AdapterStatus, _Mapping]]] = ...) -> None: ...

class AdapterStatus(_message.Message):
    __slots__ = ("name", "policy_version", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    policy_version: int
    digest: str
    def __init__(self, name: _Optional[str] = ..., policy_version: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class HostKv(_message.Message):
    __slots__ = ("used_bytes", "capacity_bytes", "hits", "misses", "evictions", "damaged", "stored_bytes", "restored_bytes")
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESTORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    used_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    evictions: int
    damaged: int
    stored_bytes: int
    restored_bytes: int
    def __init__(self, used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., evictions: _Optional[int] = ..., damaged: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., restored_bytes: _Optional[int] = ...) -> None: ...

class FleetMember(_message.Message):
    __slots__ = ("replica", "state", "reason", "policy_version", "digest", "in_flight", "others", "places", "kv_use", "loading", "jobs", "adapters")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    KV_USE_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    state: str
    reason: str
    policy_version: int
    digest: str
    in_flight: int
    others: int
    places: int
    kv_use: float
    loading: int
    jobs: _containers.RepeatedScalarFieldContainer[str]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterStatus]
    def __init__(self, replica: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., policy_version: _Optional[int] = ..., digest: _Optional[str] = ..., in_flight: _Optional[int] = ..., others: _Optional[int] = ..., places: _Optional[int] = ..., kv_use: _Optional[float] = ..., loading: _Optional[int] = ..., jobs: _Optional[_Iterable[str]] = ..., adapters: _Optional[_Iterable[_Union[AdapterStatus, _Mapping]]] = ...) -> None: ...
