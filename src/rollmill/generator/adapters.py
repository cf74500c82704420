"""Adapters of several jobs on one replica: pulled, verified, proven, then served, while everybody else goes on.

    phase                   requests of the adapter   a failure means
    pull, verify, stage     the version before        nothing happened
    prove                   the version before        nothing happened: it is scored before it is served
    serve                   the new version           -

Nothing is paused, and neither base nor other adapters are touched. An adapter that had to give way is loaded again when
it is asked for. Decides what proves a version; who gives way is the engine's to say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from rollmill.clock import Clock
from rollmill.errors import DeadlineExceeded, EngineError, ModelError, WeightError
from rollmill.generator.engines.protocol import ADAPTERS, AdapterEngine, AdapterInfo, Engine, KvPolicy, engines_with
from rollmill.generator.engines.protocol import Adapters as EngineAdapters
from rollmill.generator.proof import check_canary
from rollmill.generator.wire import LoadReport
from rollmill.types import Adapter, WeightManifest

if TYPE_CHECKING:
    import torch


class AdapterSource(Protocol):
    """Published versions of one adapter. All methods block; a run's model repository has them."""

    def latest(self) -> WeightManifest | None:
        """Return the newest manifest."""
        ...

    def manifest(self, policy_version: int) -> WeightManifest:
        """Return the manifest of one version."""
        ...

    def load_adapter(self, policy_version: int) -> Mapping[str, torch.Tensor]:
        """Return the pairs of a version, checked against their digests."""
        ...

    def hold(self, policy_version: int, *, owner: str) -> None:
        """Keep a version's tensors until `release`."""
        ...

    def release(self, policy_version: int, *, owner: str) -> None:
        """End a hold."""
        ...


class AdapterLoader:
    """Keeps an engine's adapters.

    Args:
        engine: serves the base that the adapters belong to.
        sources: name -> where its versions come from.
        kv_policy: what happens to the KV of an adapter's requests in flight when its version changes.
        load_deadline_s: a load that takes longer fails.
        owner: name under which served versions are held.
        clock: times of loads.

    Attributes:
        engine: serves them.

    Raises:
        ModelError: if the engine serves no adapters, naming the engines that can.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        sources: Mapping[str, AdapterSource],
        kv_policy: KvPolicy,
        load_deadline_s: float,
        owner: str,
        clock: Clock,
    ) -> None:
        self.engine, self._clock = engine, clock
        self._desk = _desk_of(engine)
        self._sources = dict(sources)
        self._kv_policy: KvPolicy = kv_policy
        self._load_deadline_s, self._owner = load_deadline_s, owner
        self._locks = {name: asyncio.Lock() for name in sources}
        self._proven: dict[str, WeightManifest] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Adapters that a request may ask for, loaded or not."""
        return tuple(self._sources)

    def infos(self) -> tuple[AdapterInfo, ...]:
        """Return what is served of each; one that is not loaded has version 0 and no digest."""
        served = {one.name: one for one in self.engine.info().adapters}
        return tuple(served.get(name, AdapterInfo(name=name, policy_version=0, digest="")) for name in self._sources)

    async def start(self) -> None:
        """Load the newest version of each, as far as there are places.

        Raises:
            WeightError: if nothing was published yet, or it does not fit; `WeightMismatch` if a proof fails.
            DeadlineExceeded: if one takes too long.
        """
        for name in reversed(self._sources):  # so that those named first are the last to give way
            await self.load(name)

    async def ensure(self, name: str) -> None:
        """Load the newest version of an adapter that is not served.

        Raises:
            ModelError: if nobody said where it comes from, naming those that are known.
            EngineError: if there is no place; as `load` otherwise.
        """
        self._source(name)
        if not self._is_served(name):
            async with self._locks[name]:
                if not self._is_served(name):  # another request may have loaded it meanwhile
                    await self._load_in_time(name, policy_version=None)

    async def load(self, name: str, *, policy_version: int | None = None) -> LoadReport:
        """Serve another version of an adapter; `None`: the newest.

        Raises:
            ModelError: if the name is unknown.
            WeightMismatch: if a digest or the canary disagrees; the version before is served.
            WeightError: if the version is unknown, is no adapter, or belongs to another base; as above.
            EngineError: if the version does not rise, or there is no place.
            DeadlineExceeded: if the load took too long; as above.

        Cancellation:
            leaves the version before.
        """
        self._source(name)
        async with self._locks[name]:
            return await self._load_in_time(name, policy_version=policy_version)

    async def score(self, token_ids: np.ndarray, *, name: str) -> tuple[np.ndarray, int]:
        """Return float32 [n - 1] log-probs under temperature 1, and the adapter's version that gave them.

        Raises:
            ModelError: if the name is unknown; as `ensure` otherwise.
            EngineError: if its version was changed meanwhile.
            DataError: if the ids do not fit.
        """
        await self.ensure(name)
        before = self._version_of(name)
        logprobs = await self._desk.score(token_ids, name=name)
        if self._version_of(name) != before:
            raise EngineError(f"adapter {name!r} was swapped while these tokens were scored; score them again")
        return logprobs, before

    def _version_of(self, name: str) -> int:
        return next((one.policy_version for one in self.engine.info().adapters if one.name == name), 0)

    async def close(self) -> None:
        """Give up all holds."""
        for name in tuple(self._proven):
            await self._let_go(name)

    def _source(self, name: str) -> AdapterSource:
        source = self._sources.get(name)
        if source is None:
            shown, known = name[:256], ", ".join(map(repr, self._sources))
            raise ModelError(
                f"adapter {shown!r} is unknown here; known are {known}. Start the replica with --adapter {shown}=DIR, "
                "or ask one that has it"
            )
        return source

    def _is_served(self, name: str) -> bool:
        return any(one.name == name for one in self.engine.info().adapters)

    async def _load_in_time(self, name: str, *, policy_version: int | None) -> LoadReport:
        try:
            async with asyncio.timeout(self._load_deadline_s):
                return await self._load(name, policy_version=policy_version)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the load of adapter {name!r} took longer than {self._load_deadline_s:g} s; the version before is "
                "served. Raise generator.load_deadline_s, or look for a slow disk"
            ) from error

    async def _load(self, name: str, *, policy_version: int | None) -> LoadReport:
        source, started_s = self._source(name), self._clock.now_s()
        manifest = await asyncio.to_thread(_manifest_of, source, policy_version, name=name)
        version = manifest.policy_version
        if any((one.name, one.policy_version, one.digest) == (name, version, manifest.digest) for one in self.infos()):
            return _report(manifest, changed=False)
        settings = _settings_of(manifest, name=name, base=self.engine.info().digest)
        await asyncio.to_thread(source.hold, version, owner=self._hold_of(name))
        try:
            tensors = await asyncio.to_thread(source.load_adapter, version)
            pulled_s = self._clock.now_s()
            await self._desk.stage(
                tensors, name=name, settings=settings, policy_version=version, digest=manifest.digest
            )
            staged_s = self._clock.now_s()
            difference = await self._prove(name, manifest)
            proven_s = self._clock.now_s()
            gone = await self._desk.serve(name, policy_version=version, kv=self._kv_policy)
        except BaseException:
            self._desk.forget(name)
            before = self._proven.get(name)
            if before is None or before.policy_version != version:
                await asyncio.to_thread(source.release, version, owner=self._hold_of(name))
            raise
        for other in (name, *gone):
            await self._let_go(other, unless=version if other == name else None)
        self._proven[name] = manifest
        return _report(
            manifest,
            changed=True,
            nbytes=sum(tensor.nbytes for tensor in tensors.values()),
            pull_s=pulled_s - started_s,
            stage_s=staged_s - pulled_s,
            prove_s=proven_s - staged_s,
            swap_s=self._clock.now_s() - proven_s,
            difference=difference,
        )

    async def _prove(self, name: str, manifest: WeightManifest) -> float | None:
        if manifest.canary is None:
            return None
        scored = await self._desk.score(manifest.canary.token_ids, name=name, policy_version=manifest.policy_version)
        info = msgspec.structs.replace(self.engine.info(), digest=manifest.digest)
        return check_canary(manifest, scored=scored, info=info, before=self._proven.get(name))

    async def _let_go(self, name: str, *, unless: int | None = None) -> None:
        """End the hold of what was served under a name."""
        before = self._proven.get(name)
        if before is not None and before.policy_version != unless:
            del self._proven[name]
            with contextlib.suppress(WeightError):  # what it held may be gone with its run
                await asyncio.to_thread(self._source(name).release, before.policy_version, owner=self._hold_of(name))

    def _hold_of(self, name: str) -> str:
        return f"{self._owner}-adapter-{name}"


def _desk_of(engine: Engine) -> EngineAdapters:
    desk = engine.adapters if isinstance(engine, AdapterEngine) else None
    if desk is None:
        raise ModelError(
            f"the {engine.info().kind} engine serves its weights alone. Engines that can serve adapters beside them: "
            f"{engines_with(ADAPTERS)}, with generator.max_loras of 1 or more"
        )
    return desk


def _manifest_of(source: AdapterSource, policy_version: int | None, *, name: str) -> WeightManifest:
    manifest = source.latest() if policy_version is None else source.manifest(policy_version)
    if manifest is None:
        raise WeightError(f"nothing was published for adapter {name!r} yet; start its run first")
    return manifest


def _settings_of(manifest: WeightManifest, *, name: str, base: str) -> Adapter:
    if manifest.adapter is None:
        raise WeightError(
            f"policy version {manifest.policy_version} for adapter {name!r} is whole weights: its run trains without "
            "trainer.lora_rank. Serve it by itself, with --repository"
        )
    if manifest.adapter.base_digest != base:
        raise WeightError(
            f"adapter {name!r} was trained on weights with digest {manifest.adapter.base_digest[:16]}..., and "
            f"{base[:16]}... are served: it belongs to another base"
        )
    return manifest.adapter


def _report(
    manifest: WeightManifest,
    *,
    changed: bool,
    nbytes: int = 0,
    pull_s: float = 0.0,
    stage_s: float = 0.0,
    prove_s: float = 0.0,
    swap_s: float = 0.0,
    difference: float | None = None,
) -> LoadReport:
    """Return what a load did; nothing is paused, so that proof and exchange are no part of a pause."""
    return LoadReport(
        policy_version=manifest.policy_version,
        digest=manifest.digest,
        nbytes=nbytes,
        pull_s=pull_s,
        stage_s=stage_s,
        pause_s=0.0,
        prove_s=prove_s,
        swap_s=swap_s,
        changed=changed,
        canary_difference=difference,
    )
