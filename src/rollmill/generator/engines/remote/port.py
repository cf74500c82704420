"""What a server must be able to do to stand behind the engine protocol, whatever its words for it.

A port talks to one server. It decides nothing about requests: who waits, what may be told, and what is sound is
`RemoteEngine`'s to say.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from rollmill.errors import EngineDead
from rollmill.generator.engines.protocol import KvPolicy
from rollmill.types import GenerateRequest, StopReason, VersionSpan


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a generation.

    Attributes:
        output_ids: int32 [tokens].
        logprobs: float32 [tokens], of the distribution that was sampled from.
        reason: of the last piece: why it ended.
        record: of the last piece: the server's own record of versions, of the whole output; `None` if it keeps none.
        cached_tokens: prompt tokens found in the prefix cache, where this piece says so.
    """

    output_ids: np.ndarray
    logprobs: np.ndarray
    reason: StopReason | None = None
    record: tuple[VersionSpan, ...] | None = None
    cached_tokens: int | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What the server says of its memory for keys and values, over all its ranks, at the last look."""

    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    preemptions: int = 0


class ServerPort(Protocol):
    """One server. All async methods are called from one event loop; all of them raise `EngineDead` once it is dead."""

    def figures(self) -> Figures:
        """Return what the last look at the server found."""
        ...

    def listen(self, on_death: Callable[[EngineDead], None]) -> None:
        """Have `on_death` called once, on the event loop of the calls, should the server die."""
        ...

    @property
    def cause(self) -> EngineDead | None:
        """Why the server is dead, or `None` while it lives."""
        ...

    def generate(self, request: GenerateRequest, *, server_id: str, max_tokens: int, salt: str) -> AsyncIterator[Delta]:
        """Yield the pieces of a generation; the last one has a reason.

        Args:
            server_id: the id that the server knows it by; never used twice, and none begins with another.
            max_tokens: cap of the output.
            salt: separates prefix caches: a request never hits KV that was made under another one.

        Raises:
            DataError: if the server finds the request wrong.
            EngineError: if it fails, or the reply would make a wrong sample.

        Cancellation:
            has the server end the request, at once or, if it is frozen, when it goes on.
        """
        ...

    async def cancel(self, server_id: str) -> None:
        """Ask the server to end a request with what it has; its `generate` then yields the last piece.

        Only while it is not frozen. May overtake the request, and then does nothing.
        """
        ...

    async def freeze(self) -> None:
        """Return when no token can be produced and all that were have been yielded. Idempotent."""
        ...

    async def thaw(self) -> None:
        """Let the server go on. Idempotent."""
        ...

    async def load_weights(self, file: Path, *, policy_version: int, kv: KvPolicy) -> None:
        """Load weights while frozen. Whatever else it raises, the weights may have changed.

        Raises:
            WeightError: if the file cannot be used; the server was not asked, and nothing was changed.
            EngineError: if the server refuses, or serves something else afterwards.
            DeadlineExceeded: if it takes too long.
        """
        ...

    async def score(self, token_ids: Sequence[int], *, server_id: str) -> np.ndarray:
        """Return float32 [n - 1] log-probs under temperature 1, by a fresh prefill, before whatever waits.

        Only while it is not frozen.
        """
        ...

    def look(self) -> None:
        """Bring the figures up to date soon; returns at once."""
        ...

    async def close(self) -> None:
        """End the server and all that is its own; idempotent."""
        ...


class AdapterPort(ServerPort, Protocol):
    """A server that holds low-rank adapters beside its weights, each under a name of its own.

    `generate` then takes requests whose `adapter` is such a name.
    """

    async def load_adapter(self, folder: Path, *, server_name: str) -> None:
        """Load an adapter from a folder as PEFT writes it; what runs goes on, and nothing else changes.

        Args:
            folder: must stay until the name is unloaded and no request uses it: the server may read it again.
            server_name: never used before.

        Raises:
            EngineError: if the server refuses.
        """
        ...

    async def unload_adapter(self, server_name: str) -> None:
        """Let go of a name that no request uses."""
        ...

    async def score_with(self, token_ids: Sequence[int], *, server_id: str, server_name: str) -> np.ndarray:
        """Return `score` of the base with an adapter."""
        ...
