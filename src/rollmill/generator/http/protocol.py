"""What the HTTP face needs of what it serves: a replica's service has it all, and so may a router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rollmill.config.schema import LimitSettings
from rollmill.errors import RollmillError
from rollmill.generator.service import Listener, TextCodec
from rollmill.generator.wire import Prompt, ReplicaStatus
from rollmill.types import GenerateRequest, Turn


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
