"""What the HTTP face needs of what it serves, and its own bounds.

A replica's service has it all, and so may a router.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from rollmill.config.serving import LimitSettings
from rollmill.errors import RollmillError
from rollmill.generator.engines.protocol import Reward
from rollmill.generator.service import Listener, TextCodec
from rollmill.generator.wire import DEFAULT_DEADLINE_S, Prompt, ReplicaStatus
from rollmill.types import GenerateRequest, Turn

ABORT_KEY = "rollmill.abort"
"""In the state of an exchange: cuts its connection at once, with what is still to be sent."""


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds that only HTTP needs; those of requests are `generator.limits`.

    Attributes:
        header_s: longest wait for the head of a request once its connection is open or its first byte is there.
        body_s: longest wait for a whole body.
        keep_alive_s: an idle connection is closed after this.
        connections: open at once; more are answered with 503.
    """

    header_s: float = 10.0
    body_s: float = 60.0
    keep_alive_s: float = 75.0
    connections: int = 8192


class Inference(Protocol):
    """Policy inference behind a face; see `InferenceService` for what its methods raise."""

    @property
    def codec(self) -> TextCodec | None:
        """Text and messages to ids and back, if there is a tokenizer."""
        ...

    @property
    def limits(self) -> LimitSettings:
        """What callers may ask for."""
        ...

    @property
    def models(self) -> tuple[str, ...]:
        """Names under which the model is served; none where any name is taken."""
        ...

    def check_model(self, name: str) -> None:
        """Refuse a name that is not served."""
        ...

    def encode(self, prompt: Prompt) -> np.ndarray:
        """Return int [prompt_tokens] of a prompt in any form."""
        ...

    async def generate(
        self, request: GenerateRequest, *, siblings: int = 1, listener: Listener | None = None
    ) -> Sequence[Turn]:
        """Return one turn for each sibling, in order of their index."""
        ...

    async def score(
        self, token_ids: np.ndarray, *, adapter: str = "", deadline_s: float = DEFAULT_DEADLINE_S, job: str = ""
    ) -> tuple[np.ndarray, int]:
        """Return float32 [n - 1] log-probs under temperature 1, and the policy version that gave them."""
        ...

    async def reward(self, token_ids: np.ndarray, *, deadline_s: float = DEFAULT_DEADLINE_S, job: str = "") -> Reward:
        """Return what the reward head says of a whole sequence."""
        ...

    async def abort(self, request_id: str) -> bool:
        """Abort exactly this request, or this one sibling (`wire.sibling_id`); return whether it was there."""
        ...

    async def take_note(self, error: RollmillError) -> None:
        """Hear what a call ended with."""
        ...

    def status(self) -> ReplicaStatus:
        """Return standing, weights and load; `max_model_len` is 0 while nothing is known that serves."""
        ...


class Metrics(Protocol):
    """What is known of a replica, in Prometheus' text form."""

    def render(self) -> bytes:
        """Return the page."""
        ...
