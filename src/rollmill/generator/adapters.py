"""Adapters of several jobs on one replica: pulled, verified, proven, then served, while everybody else goes on.

    phase                   requests of the adapter   a failure means
    pull, verify, stage     the version before        nothing happened
    prove                   the version before        nothing happened: it is scored before it is served
    finish (if it drains)   the version before        nothing happened; new requests of the adapter wait
    serve                   the new version           -

Nothing is paused, and neither base nor other adapters are touched. An adapter that had to give way is loaded again when
it is asked for. Decides what proves a version; who gives way is the engine's to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from rollmill.clock import Clock
from rollmill.errors import DeadlineExceeded, EngineError, ModelError, WeightError
from rollmill.generator.drain import Finished, cut_text, kv_of, patience_s
from rollmill.generator.engines.protocol import (
    ADAPTERS,
    AdapterEngine,
    AdapterInfo,
    Engine,
    UpdatePolicy,
    engines_with,
)
from rollmill.generator.engines.protocol import Adapters as EngineAdapters
from rollmill.generator.loading import numbers_of
from rollmill.generator.proof import History, Proof, check_canary
from rollmill.generator.wire import LoadReport
from rollmill.types import Adapter, WeightManifest

if TYPE_CHECKING:
    import torch


log = logging.getLogger(__name__)


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
        kv_policy: what happens to an adapter's requests in flight when its version changes.
        load_deadline_s: a load that takes longer fails.
        drain_on_update_s: longest wait for those requests, where `kv_policy` is `drain`.
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
        kv_policy: UpdatePolicy,
        load_deadline_s: float,
        owner: str,
        clock: Clock,
        drain_on_update_s: float = 10.0,
    ) -> None:
        self.engine, self._clock = engine, clock
        self._desk = _desk_of(engine)
        self._sources = dict(sources)
        self._kv_policy: UpdatePolicy = kv_policy
        self._load_deadline_s, self._owner = load_deadline_s, owner
        self._drain_on_update_s = drain_on_update_s
        self._locks = {name: asyncio.Lock() for name in sources}
        self._held: dict[str, WeightManifest] = {}
        self._proven: dict[str, History] = {}
        self._uses: Counter[str] = Counter()
        self._open = {name: asyncio.Event() for name in sources}
        for event in self._open.values():
            event.set()
        self._unused = asyncio.Event()

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

    def takes(self, name: str) -> bool:
        """Return whether new requests of a known adapter begin now; while its older ones drain they wait."""
        return self._open[name].is_set()

    def check(self, name: str) -> None:
        """Refuse an adapter of which nobody said where it comes from.

        Raises:
            ModelError: naming those that are known.
        """
        self._source(name)

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

    @contextlib.asynccontextmanager
    async def using(self, name: str, *, requests: int) -> AsyncIterator[None]:
        """Be in flight with so many requests of an adapter, which is loaded then; waits while its older ones drain.

        Raises:
            ModelError: as `ensure`.
        """
        await self.ensure(name)
        await self._open[name].wait()
        self._uses[name] += requests
        try:
            yield
        finally:
            self._uses[name] -= requests
            self._unused.set()

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
        for name in tuple(self._held):
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
            proof = await self._prove(name, manifest)
            proven_s = self._clock.now_s()
            async with self._finished(name, version, began_s=started_s) as finished:
                finished_s = self._clock.now_s()
                gone = await self._desk.serve(name, policy_version=version, kv=kv_of(self._kv_policy))
        except BaseException:
            self._desk.forget(name)
            before = self._held.get(name)
            if before is None or before.policy_version != version:
                await asyncio.to_thread(source.release, version, owner=self._hold_of(name))
            raise
        for other in (name, *gone):
            await self._let_go(other, unless=version if other == name else None)
        self._held[name] = manifest
        self._proven[name] = self._proven.get(name, History()).then(proof)
        return _report(
            manifest,
            changed=True,
            nbytes=sum(tensor.nbytes for tensor in tensors.values()),
            pull_s=pulled_s - started_s,
            stage_s=staged_s - pulled_s,
            prove_s=proven_s - staged_s,
            swap_s=self._clock.now_s() - finished_s,
            finished=finished,
            proof=proof,
        )

    @contextlib.asynccontextmanager
    async def _finished(self, name: str, version: int, *, began_s: float) -> AsyncIterator[Finished]:
        """Let an adapter's requests in flight finish first, as the setting says; new ones wait meanwhile."""
        started_s = self._clock.now_s()
        bound_s = patience_s(
            self._kv_policy,
            drain_on_update_s=self._drain_on_update_s,
            left_s=began_s + self._load_deadline_s - started_s,
        )
        if not bound_s or not self._is_served(name):  # requests that wait for its first version must not be waited for
            yield Finished()
            return
        self._open[name].clear()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(bound_s):
                    await self._until_unused(name)
            if cut := self._uses[name]:
                what = f"adapter {name!r}, policy version {version}"
                log.warning("%s", cut_text(what, cut, waited_s=bound_s, drain_on_update_s=self._drain_on_update_s))
            yield Finished(seconds=self._clock.now_s() - started_s, cut=cut)
        finally:
            self._open[name].set()

    async def _until_unused(self, name: str) -> None:
        while self._uses[name]:
            self._unused.clear()
            await self._unused.wait()

    async def _prove(self, name: str, manifest: WeightManifest) -> Proof | None:
        if manifest.canary is None:
            return None
        scored = await self._desk.score(manifest.canary.token_ids, name=name, policy_version=manifest.policy_version)
        info = msgspec.structs.replace(self.engine.info(), digest=manifest.digest)
        return check_canary(manifest, scored=scored, info=info, history=self._proven.get(name))

    async def _let_go(self, name: str, *, unless: int | None = None) -> None:
        """End the hold of what was served under a name."""
        before = self._held.get(name)
        if before is not None and before.policy_version != unless:
            del self._held[name]
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
    finished: Finished | None = None,
    proof: Proof | None = None,
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
        finish_s=0.0 if finished is None else finished.seconds,
        cut=0 if finished is None else finished.cut,
        **numbers_of(proof),
    )
