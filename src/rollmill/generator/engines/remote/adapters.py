"""Adapters of an engine whose server holds them by name: one name for each version, never used twice.

    state     the server knows it   new requests   older requests
    staged    yes                   no             -
    served    yes                   yes            yes
    leaving   until nobody uses it  no             end under it, or are sent anew with the tokens that they have

A name never changes what it means, so that a version is told exactly, and KV under one name is never hit under another.
Decides who ends under an old version; who gives way is the shelf's to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from rollmill.errors import ModelError, WeightError
from rollmill.generator.engines.protocol import AdapterInfo, KvPolicy
from rollmill.generator.engines.remote.calls import Refused
from rollmill.generator.engines.remote.peft_folders import PeftFolders, check_fits
from rollmill.generator.engines.remote.port import AdapterPort
from rollmill.generator.engines.remote.transfer import Layout
from rollmill.generator.engines.shelf import Shelf
from rollmill.types import Adapter

if TYPE_CHECKING:
    import torch


Ask = Callable[[list[int], str], Awaitable[np.ndarray]]
"""Has the server score token ids, under an id for the call."""


class RemoteAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """One version of an adapter at the server.

    Attributes:
        name: under which requests ask for it.
        policy_version: publication number in its own repository.
        digest: of the publication.
        server_name: under which the server knows this version, and no other.
        folder: that it was loaded from, and may be loaded from again.
    """

    name: str
    policy_version: int
    digest: str
    server_name: str
    folder: Path


class Users(Protocol):
    """The engine's living requests, as far as adapters are concerned."""

    def ask_for(self, name: str) -> bool:
        """Return whether one asks for an adapter."""
        ...

    def run_under(self, server_name: str) -> bool:
        """Return whether the server works on one under this name."""
        ...

    def withdraw(self, server_names: Collection[str]) -> None:
        """Mark those that run under these names as to be sent anew."""
        ...


class RemoteDesk:
    """The engine protocol's `Adapters` over a server.

    Args:
        port: to the server.
        lives: the engine's requests.
        layout: of the weights that are served.
        max_loras: adapters that are served at once.
        max_lora_rank: greatest rank that is taken.
        score_by: checks ids, then has the server score them, also in a pause.
        refuse_if_unfit: raises if the engine is dead or dirty.
        note_change: has requests look at what was marked.

    Attributes:
        shelf: what is served.
    """

    def __init__(
        self,
        port: AdapterPort,
        *,
        lives: Users,
        layout: Layout,
        max_loras: int,
        max_lora_rank: int,
        score_by: Callable[[np.ndarray, Ask], Awaitable[np.ndarray]],
        refuse_if_unfit: Callable[[], None],
        note_change: Callable[[], None],
    ) -> None:
        self.shelf: Shelf[RemoteAdapter] = Shelf(max_loras)
        self._port, self._lives, self._layout = port, lives, layout
        self._score_by, self._refuse_if_unfit, self._note_change = score_by, refuse_if_unfit, note_change
        self._max_rank = max_lora_rank
        self._folders = PeftFolders()
        self._family, self._numbers = secrets.token_hex(4), itertools.count(1)
        self._staged: dict[str, RemoteAdapter] = {}
        self._leaving: list[RemoteAdapter] = []

    def infos(self) -> tuple[AdapterInfo, ...]:
        """Return what is served."""
        return tuple(
            AdapterInfo(name=one.name, policy_version=one.policy_version, digest=one.digest)
            for one in self.shelf.loaded
        )

    async def stage(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        name: str,
        settings: Adapter,
        policy_version: int,
        digest: str,
    ) -> None:
        """Have the server load a version under a name of its own; nothing that is served changes.

        Raises:
            WeightError: if it does not fit the model, its rank is over `generator.max_lora_rank`, or the server refuses
                it.
            EngineDead: if the server died.
        """
        if settings.rank > self._max_rank:
            raise WeightError(
                f"adapter {name!r} has rank {settings.rank}, and generator.max_lora_rank is {self._max_rank}, by which "
                "memory is set aside: raise it"
            )
        check_fits(tensors, name=name, settings=settings, layout=self._layout)
        self.forget(name)
        await self._clear_away()
        folder = await asyncio.to_thread(self._folders.write, tensors, settings=settings)
        one = RemoteAdapter(
            name=name,
            policy_version=policy_version,
            digest=digest,
            server_name=f"{name}.{policy_version}.{self._family}{next(self._numbers)}",
            folder=folder,
        )
        try:
            await self._port.load_adapter(folder, server_name=one.server_name)
        except Refused as error:
            self._leaving.append(one)
            raise WeightError(f"the server refuses adapter {name!r}, version {policy_version}: {error}") from error
        except BaseException:  # nobody can say whether the server has it
            self._leaving.append(one)
            raise
        self._staged[name] = one

    async def score(self, token_ids: np.ndarray, *, name: str, policy_version: int | None = None) -> np.ndarray:
        """Return float32 [n - 1] log-probs under temperature 1, by a version that is staged or served.

        Raises:
            ModelError: if there is no such version.
            DataError: if the ids do not fit.
        """
        one = self._at_hand(name, policy_version=policy_version)
        return await self._score_by(
            token_ids,
            lambda ids, server_id: self._port.score_with(ids, server_id=server_id, server_name=one.server_name),
        )

    async def serve(self, name: str, *, policy_version: int, kv: KvPolicy) -> tuple[str, ...]:
        """Serve what was staged; return the names of others that had to go for it.

        Older requests end under the version that they began with (`keep`), or are sent anew with what they have
        (`recompute`). A third version never waits for the first: whoever still runs under that is sent anew.

        Raises:
            ModelError: if it was not staged.
            EngineError: if the engine is dirty or a newer version is served; `Overloaded` if requests use all places.
            WeightMismatch: if another publication of this version is served.
        """
        staged = self._staged.get(name)
        if staged is None or staged.policy_version != policy_version:
            raise ModelError(f"policy version {policy_version} of adapter {name!r} is not staged; stage it first")
        self._refuse_if_unfit()
        # From here to the end nothing waits: whoever is cut short finds all of it done, or none.
        if self.shelf.is_there(staged):
            self.forget(name)
            return ()
        gone = self.shelf.put(staged, in_use=self._lives.ask_for)
        del self._staged[name]
        older = [one.server_name for one in self._leaving if one.name == name]
        self._lives.withdraw([*older, *(one.server_name for one in gone if kv == "recompute")])
        self._leaving += gone
        self._note_change()
        return tuple(one.name for one in gone if one.name != name)

    def forget(self, name: str) -> None:
        """Let go of what was staged under a name and will not be served; the server hears of it at the next load."""
        staged = self._staged.pop(name, None)
        if staged is not None:
            self._leaving.append(staged)

    async def drop(self, name: str) -> bool:
        """Serve a name no longer; return whether it was served.

        Raises:
            EngineError: if requests use it.
        """
        gone = self.shelf.drop(name, in_use=self._lives.ask_for)
        if gone is not None:
            self._leaving.append(gone)
        await self._clear_away()
        return gone is not None

    def close(self) -> None:
        """Give all memory back; idempotent. Blocks."""
        self._folders.close()

    def _at_hand(self, name: str, *, policy_version: int | None) -> RemoteAdapter:
        staged = self._staged.get(name)
        if staged is not None and staged.policy_version == policy_version:
            return staged
        served = self.shelf.ask(name)
        if served is None or policy_version not in (None, served.policy_version):
            raise ModelError(
                f"policy version {policy_version} of adapter {name!r} is neither staged nor served; served is "
                f"{'the base' if served is None else served.policy_version}"
            )
        return served

    async def _clear_away(self) -> None:
        """Unload what nobody uses any more."""
        for one in [one for one in self._leaving if not self._lives.run_under(one.server_name)]:
            with contextlib.suppress(Refused):  # it was never there
                await self._port.unload_adapter(one.server_name)
            self._leaving.remove(one)
            await asyncio.to_thread(self._folders.remove, one.folder)
