"""How a replica gets new weights: pull, verify, pause, swap, prove, resume.

Pulling and verifying happen while the old version is served; only the swap and its proof need a pause. Decides what a
failure means: nothing changed, then the old version goes on; something changed, then the replica is dirty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rollmill.clock import Clock
from rollmill.errors import DeadlineExceeded, EngineDead, EngineError, RollmillError, WeightMismatch
from rollmill.generator.engines.protocol import Engine, KvPolicy, UpdateReport
from rollmill.generator.state import ReplicaState, Standing, move, refusal
from rollmill.generator.wire import LoadReport
from rollmill.types import Canary, WeightManifest
from rollmill.weights.protocol import ModelRepository

if TYPE_CHECKING:
    import torch


class Replica:
    """An engine with its standing and the weights it serves.

    Args:
        engine: serves already what the repository calls `engine.info().policy_version`.
        repository: where versions are pulled from.
        kv_policy: what happens to the KV of requests in flight when weights change.
        load_deadline_s: a load that takes longer fails.
        owner: name under which the served version is held in the repository.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        repository: ModelRepository,
        kv_policy: KvPolicy,
        load_deadline_s: float,
        owner: str,
        clock: Clock,
    ) -> None:
        self.engine = engine
        self.standing = Standing(state=ReplicaState.STARTING)
        self._repository = repository
        self._kv_policy: KvPolicy = kv_policy
        self._load_deadline_s = load_deadline_s
        self._owner = owner
        self._clock = clock
        self._loading = asyncio.Lock()
        self._held: int | None = None

    async def start(self) -> None:
        """Hold and prove the version that the engine was built with, then serve.

        Raises:
            WeightMismatch: if the canary disagrees.
            WeightError: if the repository does not know the version.
        """
        version = self.engine.info().policy_version
        await asyncio.to_thread(self._repository.hold, version, owner=self._owner)
        self._held = version
        manifest = await asyncio.to_thread(self._repository.manifest, version)
        await self._prove(manifest)
        self.standing = move(self.standing, ReplicaState.SERVING, proven=True)

    async def load(self, policy_version: int) -> LoadReport:
        """Serve another version.

        Raises:
            EngineError: if the replica takes no weights any more, or the swap failed half way (dirty then).
            WeightMismatch: if a digest or the canary disagrees; the latter leaves the replica dirty.
            WeightError: if the version is unknown or its tensors do not fit; the old version is served.
            DeadlineExceeded: if the load took too long; dirty if the swap had begun.

        Cancellation:
            leaves the old version serving, or the replica dirty if the swap had begun.
        """
        async with self._loading:
            if (why := refusal(self.standing, to_generate=False)) is not None:
                raise EngineError(f"no new weights: {why}")
            try:
                async with asyncio.timeout(self._load_deadline_s):
                    return await self._load(policy_version)
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"the load of policy version {policy_version} took longer than {self._load_deadline_s:g} s; "
                    f"the replica is {self.standing.state}. Raise generator.load_deadline_s, or look for a slow disk"
                ) from error

    async def _load(self, policy_version: int) -> LoadReport:
        info = self.engine.info()
        if policy_version == info.policy_version and self.standing.state is ReplicaState.SERVING:
            return LoadReport(
                policy_version=policy_version,
                digest=info.digest,
                nbytes=0,
                pull_s=0.0,
                pause_s=0.0,
                changed=False,
                canary_difference=None,
            )
        started_s = self._clock.now_s()
        await asyncio.to_thread(self._repository.hold, policy_version, owner=self._owner)
        try:
            manifest = await asyncio.to_thread(self._repository.manifest, policy_version)
            tensors = await asyncio.to_thread(self._repository.load, policy_version)
            pulled_s = self._clock.now_s()
            report, difference = await self._swap(manifest, tensors)
        except BaseException:
            served = self.engine.info().policy_version
            await self._hold_only(served, and_not=policy_version)
            raise
        await self._hold_only(policy_version)
        return LoadReport(
            policy_version=policy_version,
            digest=manifest.digest,
            nbytes=report.nbytes,
            pull_s=pulled_s - started_s,
            pause_s=self._clock.now_s() - pulled_s,
            changed=report.changed,
            canary_difference=difference,
        )

    async def _swap(
        self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[UpdateReport, float | None]:
        version, before = manifest.policy_version, self.engine.info().policy_version
        touched = False
        try:
            await self.engine.pause("keep")
            touched = True
            report = await self.engine.update(
                tensors, policy_version=version, digest=manifest.digest, kv=self._kv_policy
            )
            difference = await self._prove(manifest)
        except BaseException as error:
            if isinstance(error, RollmillError):  # it ran to its end: the engine itself says whether it was changed
                touched = not self.engine.healthy() or self.engine.info().policy_version != before
            await self._after_failure(version, error=error, touched=touched)
            raise
        self.standing = move(self.standing, ReplicaState.SERVING, proven=True)
        await self.engine.resume()
        return report, difference

    async def _after_failure(self, version: int, *, error: BaseException, touched: bool) -> None:
        if isinstance(error, EngineDead):
            self.take_note(error)
            return
        if not touched and self.standing.state is ReplicaState.SERVING:
            await self.engine.resume()
            return
        why = str(error) if isinstance(error, RollmillError) else f"its load was cut short ({type(error).__name__})"
        self.standing = move(self.standing, ReplicaState.DIRTY, reason=f"policy version {version}: {why}")
        # It stays paused: what was sampled so far is sound and goes back to the callers, nothing more is sampled.
        await self.engine.pause("abort")

    def take_note(self, error: RollmillError) -> None:
        """Leave the rotation if this error of a call says that the engine is gone, or serves nothing any more."""
        if isinstance(error, EngineDead):
            self.standing = move(self.standing, ReplicaState.DEAD, reason=str(error))
        elif self.standing.state is ReplicaState.SERVING and not self.engine.healthy():
            self.standing = move(self.standing, ReplicaState.DIRTY, reason=str(error))

    async def _prove(self, manifest: WeightManifest) -> float | None:
        """Return the largest difference on the canary, or `None` if there is nothing to compare."""
        canary = manifest.canary
        if canary is None or "canary" not in self.engine.info().capabilities:
            return None
        difference = canary_difference(canary, scored=await self.engine.score(canary.token_ids))
        if not difference <= canary.tolerance:
            raise WeightMismatch(
                f"policy version {manifest.policy_version}: the engine's log-probs on the canary differ from the "
                f"trainer's by {difference:.3g} nats, tolerance {canary.tolerance:g}. The weights being served are not "
                "the weights that were published, or the precisions differ; see weights.canary_tolerance",
                published=manifest.digest,
                served=self.engine.info().digest,
            )
        return difference

    async def _hold_only(self, policy_version: int, *, and_not: int | None = None) -> None:
        """Hold what is served; let go of what was served before, or of what could not be loaded."""
        others = {version for version in (self._held, and_not) if version is not None and version != policy_version}
        for other in others:
            await asyncio.to_thread(self._repository.release, other, owner=self._owner)
        self._held = policy_version

    async def close(self) -> None:
        """Give up the hold on the served version."""
        if self._held is not None:
            await asyncio.to_thread(self._repository.release, self._held, owner=self._owner)
            self._held = None


def canary_difference(canary: Canary, *, scored: np.ndarray) -> float:
    """Return the largest absolute difference per token, NaN if any is not a number."""
    return float(np.max(np.abs(canary.logprobs.astype(np.float64) - scored.astype(np.float64))))
