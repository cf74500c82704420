"""Adapters of the embedded engine: made ready on the staging thread, served from the engine's own.

Decides which versions are at hand; who has to go is `shelf`'s to say.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar

import numpy as np
import torch

from rollmill.errors import ModelError, WeightError
from rollmill.generator.engines.embedded.core import EngineCore
from rollmill.generator.engines.embedded.low_rank import LowRank, ServedAdapter
from rollmill.generator.engines.protocol import KvPolicy
from rollmill.types import Adapter

R = TypeVar("R")


class Runs(Protocol):
    """Runs work on a thread of the engine and returns what it gave."""

    def __call__(self, work: Callable[[], R], /) -> Awaitable[R]:
        """Run it."""
        ...


class AdapterDesk:
    """The engine protocol's `Adapters`.

    Args:
        core: of the engine.
        low_rank: of its model.
        max_lora_rank: greatest rank that is taken.
        between_steps: runs work on the engine's thread.
        beside: runs work on the staging thread.
    """

    def __init__(
        self, core: EngineCore, *, low_rank: LowRank, max_lora_rank: int, between_steps: Runs, beside: Runs
    ) -> None:
        self._core, self._low_rank, self._max_rank = core, low_rank, max_lora_rank
        self._between_steps, self._beside = between_steps, beside
        self._staged: dict[str, ServedAdapter] = {}

    async def stage(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        name: str,
        settings: Adapter,
        policy_version: int,
        digest: str,
    ) -> None:
        """Make a version ready; nothing that is served changes.

        Raises:
            WeightError: if it does not fit the model, or its rank is over `generator.max_lora_rank`.
            EngineDead: if the engine ended meanwhile.
        """
        if settings.rank > self._max_rank:
            raise WeightError(
                f"adapter {name!r} has rank {settings.rank}, and generator.max_lora_rank is {self._max_rank}, by which "
                "memory is set aside: raise it"
            )
        self._staged.pop(name, None)
        self._staged[name] = await self._beside(
            lambda: self._low_rank.pack(
                tensors, name=name, settings=settings, policy_version=policy_version, digest=digest
            )
        )

    async def score(self, token_ids: np.ndarray, *, name: str, policy_version: int | None = None) -> np.ndarray:
        """Return float32 [n - 1] log-probs under temperature 1, by a version that is staged or served.

        Raises:
            ModelError: if there is no such version.
            DataError: if the ids do not fit.
        """

        def score() -> np.ndarray:
            return self._core.score(token_ids, adapter=self._at_hand(name, policy_version=policy_version))

        return await self._between_steps(score)

    def _at_hand(self, name: str, *, policy_version: int | None) -> ServedAdapter:
        staged = self._staged.get(name)
        if staged is not None and staged.policy_version == policy_version:
            return staged
        served = self._core.shelf.ask(name)
        if served is None or policy_version not in (None, served.policy_version):
            raise ModelError(
                f"policy version {policy_version} of adapter {name!r} is neither staged nor served; served is "
                f"{'the base' if served is None else served.policy_version}"
            )
        return served

    async def serve(self, name: str, *, policy_version: int, kv: KvPolicy) -> tuple[str, ...]:
        """Serve what was staged, between two steps; return the names of others that had to go for it.

        Raises:
            ModelError: if it was not staged.
            EngineError: if a newer version is served; `Overloaded` if requests use all places.
            WeightMismatch: if another publication of this version is served.
        """

        def serve() -> tuple[str, ...]:
            staged = self._staged.get(name)
            if staged is None or staged.policy_version != policy_version:
                raise ModelError(f"policy version {policy_version} of adapter {name!r} is not staged; stage it first")
            gone = serve_adapter(self._core, staged, kv=kv)
            self.forget(name)
            return gone

        return await self._between_steps(serve)

    def forget(self, name: str) -> None:
        """Let go of what was staged under a name and will not be served."""
        self._staged.pop(name, None)

    async def drop(self, name: str) -> bool:
        """Serve a name no longer; return whether it was served.

        Raises:
            EngineError: if requests use it.
        """
        return await self._between_steps(lambda: drop_adapter(self._core, name))


def serve_adapter(core: EngineCore, adapter: ServedAdapter, *, kv: KvPolicy) -> tuple[str, ...]:
    """Serve a version from the engine's next step on; return the names of others that had to go for it.

    Requests of its older version go on, over the KV that they have or (`recompute`) over new KV. Nobody else notices.

    Raises:
        EngineError: if the engine is dirty or a newer version is served; `Overloaded` if there is no place.
        WeightMismatch: if another publication of this version is served.
    """
    core.refuse_if_dirty()
    if core.shelf.is_there(adapter):
        return ()
    gone = core.shelf.put(adapter, in_use=lambda name: _is_in_use(core, name))
    for old in gone:
        core.kv.forget_space(old.space)
    its = [sequence for sequence in core.running if sequence.request.adapter == adapter.name]
    if kv == "recompute":
        core.retract(its)
    else:
        core.kv.disown(its)
    return tuple(old.name for old in gone if old.name != adapter.name)


def drop_adapter(core: EngineCore, name: str) -> bool:
    """Serve an adapter no longer; return whether it was served.

    Raises:
        EngineError: if requests use it.
    """
    gone = core.shelf.drop(name, in_use=lambda other: _is_in_use(core, other))
    if gone is not None:
        core.kv.forget_space(gone.space)
    return gone is not None


def _is_in_use(core: EngineCore, name: str) -> bool:
    return any(sequence.request.adapter == name for sequence in core.living())
