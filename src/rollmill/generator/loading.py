"""How a replica gets new weights: pull, verify, stage, finish, pause, swap, prove, resume.

    phase                     the engine serves      a failure means
    pull, verify, stage       the old version        nothing happened
    finish (if it drains)     what runs              nothing happened
    drain, swap, prove        nothing (paused)       nothing changed: the old version goes on
                                                     partly changed: back to the old version if that can be proven,
                                                     dirty otherwise
                                                     another version than was published: dirty
    resume                    the new version        -

Decides what a failure means; what proves a version is in `rollmill.generator.proof`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from rollmill.clock import Clock
from rollmill.errors import DeadlineExceeded, EngineDead, EngineError, RollmillError, WeightMismatch
from rollmill.generator.drain import Finished, cut_text, kv_of, patience_s
from rollmill.generator.engines.protocol import Engine, UpdatePolicy, UpdateReport
from rollmill.generator.proof import History, Proof, check_canary, check_digest
from rollmill.generator.state import ReplicaState, Standing, move, refusal
from rollmill.generator.wire import LoadReport
from rollmill.priority import beside
from rollmill.types import WeightManifest
from rollmill.weights.protocol import ModelRepository

if TYPE_CHECKING:
    import torch


log = logging.getLogger(__name__)


class _Swap(msgspec.Struct, frozen=True, kw_only=True):
    """What happened while the engine was paused."""

    update: UpdateReport
    proof: Proof | None
    finished: Finished
    drain_s: float
    swap_s: float
    prove_s: float
    resume_s: float


class Replica:
    """An engine with its standing and the weights it serves.

    Args:
        engine: serves already what the repository calls `engine.info().policy_version`.
        repository: where versions are pulled from.
        kv_policy: what happens to requests in flight when weights change.
        load_deadline_s: a load that takes longer fails.
        drain_on_update_s: longest wait for requests in flight, where `kv_policy` is `drain`.
        owner: name under which the served version is held in the repository.
        stage_weights: whether an engine that can make weights ready while it serves is asked to do so.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        repository: ModelRepository,
        kv_policy: UpdatePolicy,
        load_deadline_s: float,
        owner: str,
        clock: Clock,
        stage_weights: bool = True,
        drain_on_update_s: float = 10.0,
    ) -> None:
        self.engine = engine
        self.standing = Standing(state=ReplicaState.STARTING)
        self._repository = repository
        self._kv_policy: UpdatePolicy = kv_policy
        self._load_deadline_s, self._drain_on_update_s = load_deadline_s, drain_on_update_s
        self._owner = owner
        self._stage_weights = stage_weights
        self._clock = clock
        self._loading = asyncio.Lock()
        self._held: int | None = None
        self._proven = History()

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
            EngineError: if the replica takes no weights any more, or the swap failed half way: the old version was
                loaded again and proven, and is served, or the replica is dirty; the message says which.
            WeightMismatch: if a digest or the canary disagrees. In the published tensors: nothing happened. In the
                engine: dirty.
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
            # Reading and digesting every byte must not take the core that decodes.
            tensors = await beside(lambda: self._repository.load(policy_version))
            pulled_s = self._clock.now_s()
            await self._stage(tensors, policy_version=policy_version)
            staged_s = self._clock.now_s()
            swap = await self._swap(manifest, tensors, began_s=started_s)
        except BaseException:
            served = self.engine.info().policy_version
            await self._hold_only(served, and_not=policy_version)
            raise
        await self._hold_only(policy_version)
        return LoadReport(
            policy_version=policy_version,
            digest=manifest.digest,
            nbytes=swap.update.nbytes,
            pull_s=pulled_s - started_s,
            stage_s=staged_s - pulled_s,
            pause_s=swap.drain_s + swap.swap_s + swap.prove_s + swap.resume_s,
            changed=swap.update.changed,
            finish_s=swap.finished.seconds,
            cut=swap.finished.cut,
            **numbers_of(swap.proof),
            drain_s=swap.drain_s,
            swap_s=swap.swap_s,
            prove_s=swap.prove_s,
            resume_s=swap.resume_s,
        )

    async def _stage(self, tensors: Mapping[str, torch.Tensor], *, policy_version: int) -> None:
        """Have the weights made ready while the old version serves; a failure or cancellation changes nothing."""
        if not self._stage_weights or "stage" not in self.engine.info().capabilities:
            return
        try:
            await self.engine.stage(tensors, policy_version=policy_version)
        except EngineDead as error:
            self.take_note(error)
            raise

    async def _swap(self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor], *, began_s: float) -> _Swap:
        before = self.engine.info().policy_version
        at_s: list[float] = []
        touched = False
        try:
            finished = await self._let_finish(manifest.policy_version, began_s=began_s)
            at_s.append(self._clock.now_s())
            await self.engine.pause("keep")
            at_s.append(self._clock.now_s())
            touched = True
            update = await self._update(manifest, tensors)
            at_s.append(self._clock.now_s())
            proof = await self._prove(manifest)
            at_s.append(self._clock.now_s())
        except BaseException as error:
            if isinstance(error, RollmillError):  # it ran to its end: the engine itself says whether it was changed
                touched = not self._is_as_before(before) or isinstance(error, WeightMismatch)
            await self._after_failure(manifest.policy_version, before=before, error=error, touched=touched)
            raise
        await self._go_on()
        self._take_rank(ReplicaState.SERVING, proven=True)
        at_s.append(self._clock.now_s())
        drain_s, swap_s, prove_s, resume_s = (later - earlier for earlier, later in itertools.pairwise(at_s))
        return _Swap(
            update=update,
            proof=proof,
            finished=finished,
            drain_s=drain_s,
            swap_s=swap_s,
            prove_s=prove_s,
            resume_s=resume_s,
        )

    async def _let_finish(self, policy_version: int, *, began_s: float) -> Finished:
        """Let requests in flight finish for as long as the setting says; nothing new begins meanwhile."""
        started_s = self._clock.now_s()
        bound_s = patience_s(
            self._kv_policy,
            drain_on_update_s=self._drain_on_update_s,
            left_s=began_s + self._load_deadline_s - started_s,
        )
        if not bound_s:
            return Finished()
        try:
            async with asyncio.timeout(bound_s):
                await self.engine.pause("drain")
        except TimeoutError:
            await self.engine.pause("keep")
            cut = self.engine.load().running
            what = f"policy version {policy_version}"
            log.warning("%s", cut_text(what, cut, waited_s=bound_s, drain_on_update_s=self._drain_on_update_s))
            return Finished(seconds=self._clock.now_s() - started_s, cut=cut)
        return Finished(seconds=self._clock.now_s() - started_s)

    async def _update(self, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> UpdateReport:
        report = await self.engine.update(
            tensors, policy_version=manifest.policy_version, digest=manifest.digest, kv=kv_of(self._kv_policy)
        )
        check_digest(manifest, info=self.engine.info(), report=report)
        return report

    def _is_as_before(self, version: int) -> bool:
        return self.engine.healthy() and self.engine.info().policy_version == version

    async def _after_failure(self, version: int, *, before: int, error: BaseException, touched: bool) -> None:
        if isinstance(error, EngineDead):
            self.take_note(error)
            return
        # Draining: what runs is still being finished under the old version.
        was_sound = self.standing.state in (ReplicaState.SERVING, ReplicaState.DRAINING)
        if not touched and was_sound:
            await self._go_on()
            return
        why = str(error) if isinstance(error, RollmillError) else f"its load was cut short ({type(error).__name__})"
        self._take_rank(ReplicaState.DIRTY, reason=f"policy version {version}: {why}")
        half_done = isinstance(error, RollmillError) and not isinstance(error, WeightMismatch)
        if was_sound and half_done and self.engine.info().policy_version == before:
            not_back = await self._roll_back(before)
            if not_back is None:
                raise EngineError(
                    f"policy version {version} was not loaded: {why}. Version {before} was loaded again and proven, "
                    "and goes on being served; requests that ran then were ended with what they had"
                ) from error
            self.standing = msgspec.structs.replace(
                self.standing, reason=f"{self.standing.reason}. The way back to version {before} failed too: {not_back}"
            )
        # It stays paused: what was sampled so far is sound and goes back to the callers, nothing more is sampled.
        await self.engine.pause("abort")

    def _take_rank(self, to: ReplicaState, *, reason: str = "", proven: bool = False) -> None:
        """Move, unless the replica was asked to drain or died meanwhile: there is no way back from those."""
        if self.standing.state not in (ReplicaState.DRAINING, ReplicaState.DEAD):
            self.standing = move(self.standing, to, reason=reason, proven=proven)

    async def _roll_back(self, version: int) -> str | None:
        """Load and prove the version that was served before a swap that failed half way; return why that failed.

        Its tensors are still held. The replica is dirty meanwhile, whatever interrupts this.
        """
        try:
            manifest = await asyncio.to_thread(self._repository.manifest, version)
            tensors = await asyncio.to_thread(self._repository.load, version)
            await self._update(manifest, tensors)
            await self._prove(manifest)
        except RollmillError as error:
            return str(error)
        await self._go_on()
        self._take_rank(ReplicaState.SERVING, proven=True)
        return None

    async def _go_on(self) -> None:
        """Let the engine produce tokens again; one that does not is dirty: it would take requests and answer none."""
        try:
            await self.engine.resume()
        except EngineDead as error:
            self.take_note(error)
            raise
        except BaseException as error:
            why = str(error) if isinstance(error, RollmillError) else f"cut short ({type(error).__name__})"
            self._take_rank(ReplicaState.DIRTY, reason=f"the engine did not go on after a pause for new weights: {why}")
            raise

    def take_note(self, error: RollmillError) -> None:
        """Leave the rotation if this error of a call says that the engine is gone, or serves nothing any more."""
        if isinstance(error, EngineDead):
            self.standing = move(self.standing, ReplicaState.DEAD, reason=str(error))
        elif self.standing.state is ReplicaState.SERVING and not self.engine.healthy():
            self.standing = move(self.standing, ReplicaState.DIRTY, reason=str(error))

    async def _prove(self, manifest: WeightManifest) -> Proof | None:
        """Return what the canary says, or `None` if there is nothing to compare."""
        if manifest.canary is None or "canary" not in self.engine.info().capabilities:
            return None
        scored = await self.engine.score(manifest.canary.token_ids)
        proof = check_canary(manifest, scored=scored, info=self.engine.info(), history=self._proven)
        if proof is not None and self._proven.first is None:
            log.info("%s", proof.text())
        self._proven = self._proven.then(proof)
        return proof

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


def numbers_of(proof: Proof | None) -> dict[str, Any]:
    """Return what a report says of a proof."""
    if proof is None:
        return {"canary_difference": None}
    return {
        "canary_difference": proof.largest,
        "canary_mean": proof.mean,
        "canary_mean_tolerance": proof.mean_tolerance,
        "canary_followed": proof.followed,
    }
