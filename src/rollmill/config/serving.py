"""What a replica's server is told: of vLLM, of SGLang, and the limits of every replica's callers.

Sections of `[generator]`. Decides nothing. No torch here.
"""

from __future__ import annotations

from typing import Literal

from rollmill.config.section import Section, knob


class VllmSettings(Section):
    """The vLLM server that a replica starts, watches and drives."""

    python: str | None = knob(None)
    """Interpreter of the environment that holds vLLM; `None` takes what `rollmill engine install vllm` makes."""
    start_deadline_s: float = knob(
        600.0, unit="s", raising="tolerates slower starts and compilation", lowering="a hung start ends sooner", gt=0
    )
    """Longest wait until the server answers."""
    control_deadline_s: float = knob(
        60.0, unit="s", raising="tolerates slower steps", lowering="a hung server is noticed sooner", gt=0
    )
    """Longest wait for one control call (pause, resume, a phase of a weight update, a score)."""
    load_poll_s: float = knob(
        1.0, unit="s", raising="older figures of load", lowering="fresher figures, a little work for the server", gt=0
    )
    """Time between two looks at the server's metrics and health."""
    transport: Literal["file", "nccl"] = knob("file")
    """How weights get into the server: `file`, which it reads where the model repository or shared memory has it, or
    `nccl`, sent from a GPU of the replica's to those of the server. `nccl` is refused on a CPU, and has not run on a
    GPU yet."""
    nccl_device: int = knob(0, ge=0)
    """With `nccl`: the GPU that sends, counted among those that the replica may use (`CUDA_VISIBLE_DEVICES`). The
    server gets others: two ranks of a group cannot share one."""
    nccl_buffer_bytes: int = knob(
        1 << 28, unit="bytes", raising="fewer messages", lowering="less memory of each GPU", ge=4096
    )
    """With `nccl`: a message takes whole tensors until it is larger than this."""
    enforce_eager: bool | None = knob(None)
    """Run without compiled graphs: a start in seconds instead of minutes, slower steps. `None` is true on a CPU."""
    arguments: tuple[str, ...] = knob(())
    """Further arguments of the server, as its own documentation names them. Those that Rollmill sets are refused."""


class SglangSettings(Section):
    """The SGLang server that a replica starts, watches and drives."""

    python: str | None = knob(None)
    """Interpreter of the environment that holds SGLang (0.5.23 is what Rollmill is tested with); must be given."""
    start_deadline_s: float = knob(
        600.0, unit="s", raising="tolerates slower starts and compilation", lowering="a hung start ends sooner", gt=0
    )
    """Longest wait until the server answers."""
    control_deadline_s: float = knob(
        60.0, unit="s", raising="tolerates slower steps", lowering="a hung server is noticed sooner", gt=0
    )
    """Longest wait for one control call (pause, resume, a weight update, a score, an abort)."""
    load_poll_s: float = knob(
        1.0, unit="s", raising="older figures of load", lowering="fresher figures, a little work for the server", gt=0
    )
    """Time between two looks at the server's process and load."""
    overlap_schedule: bool = knob(False)
    """Let the server prepare a step while the one before computes: faster on a GPU. It then keeps no KV over an update,
    because it would give the last token before a pause the version after it: needs `kv_on_update = "recompute"`."""
    deterministic_inference: bool = knob(False)
    """Have each request draw from the seed it came with. The server computes slower in this mode, and some of its
    attention backends do not have it; without it the seeds of requests change nothing."""
    arguments: tuple[str, ...] = knob(())
    """Further arguments of the server, as its own documentation names them. Those that Rollmill sets are refused."""
    variables: dict[str, str] = knob({})
    """Further environment variables of the server."""


class LimitSettings(Section):
    """What one replica takes from its callers, so that none of them can use up its memory or stall the others."""

    max_requests: int = knob(
        4096, unit="samples", raising="longer queue, more memory", lowering="earlier refusals (429)", ge=1
    )
    """Samples that run or wait at once, each sibling counted. One more is refused, with the time to ask again."""
    max_siblings: int = knob(
        256, unit="samples", raising="larger groups in one call", lowering="smaller groups in one call", ge=1
    )
    """Samples of one call (`siblings`, `n`)."""
    max_prompt_tokens: int | None = knob(
        None, unit="tokens", raising="longer prompts", lowering="shorter prompts, earlier refusals", ge=1
    )
    """Longest prompt; `None` takes what `generator.max_model_len` leaves room for."""
    max_new_tokens: int | None = knob(
        None, unit="tokens", raising="longer outputs", lowering="shorter outputs, earlier refusals", ge=1
    )
    """Largest `max_new_tokens` of a call; `None` takes any, and the context caps the output."""
    max_body_bytes: int = knob(
        64 * 1024 * 1024, unit="bytes", raising="larger requests", lowering="less memory per call", ge=1024
    )
    """Largest message of a caller; 64 MiB hold the token ids of a million-token prompt many times over."""
    max_request_id_chars: int = knob(256, unit="characters", raising="longer ids", lowering="shorter ids", ge=16)
    """Longest id of a request, a session or a group, and longest name of a job or an adapter."""
    stream_events: int = knob(
        1024, unit="events", raising="more patience, more memory per stream", lowering="less patience", ge=16
    )
    """Events of a stream that wait for their reader; at one more the request is aborted, for its memory would grow."""
    stream_stall_s: float = knob(
        60.0, unit="s", raising="more patience", lowering="a stuck reader gives its stream back sooner", gt=0
    )
    """Longest wait for the reader of a stream to take one event."""
    keepalive_s: float = knob(30.0, unit="s", raising="less traffic", lowering="dead peers are noticed sooner", gt=0)
    """A connection on which nothing came for this long is asked whether it lives."""
    keepalive_timeout_s: float = knob(
        10.0, unit="s", raising="tolerates worse networks", lowering="dead peers are noticed sooner", gt=0
    )
    """A connection that does not answer within this time is closed, and its requests are aborted."""
