"""Does an engine serve what was published? Pure: numbers in, a verdict out.

Four things are compared. The digest that the engine reports. Its log-probs on the canary with the trainer's, by the
largest difference and by the mean one. And how far they moved since an earlier version, with how far the trainer's did:
one optimizer step moves log-probs by less than any tolerance, so agreement with the new canary alone does not tell new
weights from old ones, nor from new ones under an old output head.

    tolerance    largest difference: the manifest's, which depends on the precisions of both sides. Where an engine
                 rounds, unlikely tokens are far off now and then, and seven eighths must keep it
                 mean difference: `MARGIN` times that of the first version proven in this precision, or of the last one
                 if that was more, between a floor for the precision and the manifest's tolerance
    movement     the slope of the engine's movement over the trainer's, by least squares. Rounding is noise in it, which
                 the residuals measure; what is missing to 1 must be more than `MISSING` and `SIGMAS` standard errors

Movement is looked at since the version before and since the first: a head that is never refreshed stands out of the
noise once the steps have added up.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from rollmill.errors import WeightMismatch
from rollmill.generator.engines.protocol import EngineInfo, UpdateReport
from rollmill.types import Canary, WeightManifest

NOISE = 1e-5
"""Nats: float32 log-probs of equal weights differ by less than this on average, whatever pass computes them."""
NEARER = 4.0
"""The engine serves the old weights if their canary is this many times nearer than that of the new ones."""
MARGIN = 4.0
"""The mean difference of a version may be this many times that of earlier ones: it varies with the weights."""
KEEPING = 7 / 8
"""Share of the log-probs that must keep the tolerance where an engine rounds: the largest of 63 is far larger than that
of 7, for which the tolerance is meant."""
FLOORS = {"float32": 1e-4, "bfloat16": 0.02, "int8": 0.05}
"""Dtype of an engine -> nats that the mean difference may always be: the first version may have been a lucky one."""
_OTHER_FLOOR = 0.05
MISSING = 0.25
"""Share of the trainer's movement that must be missing in that of an engine that computes in float32."""
MISSING_ROUNDED = 0.5
"""The same of one that rounds: SmolLM2 in bfloat16 followed by 0.83 to 0.89, whatever was refreshed."""
SIGMAS = 6.0
"""Standard errors by which it must be missing: a false alarm costs a replica, and there are thousands of loads."""
ENOUGH = 16
"""Log-probs that residuals need before they say how much noise there is."""
SPREAD = 4.0
"""Log-probs over which a movement must be spread: one that is rounded badly must not speak for all."""
STILL = 1e-4
"""Nats, mean: if the trainer's log-probs moved by more, those of an engine that rounds do not stay equal to the bit."""


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What was found when a version was proven.

    Attributes:
        scored: float32 [n - 1], the engine's log-probs on the canary.
        dtype: the engine's.
        largest: absolute difference to the trainer's, nats.
        judged: of which the tolerance is asked: the largest, or what seven eighths keep.
        mean: of the absolute differences.
        mean_tolerance: the most that was accepted of it.
        followed: slope of the engine's movement over the trainer's since the version before, 1 if it followed; `None`
            where there is none, or noise hides it.
    """

    policy_version: int
    canary: Canary
    scored: np.ndarray
    dtype: str
    digest: str
    largest: float
    judged: float
    mean: float
    mean_tolerance: float
    followed: float | None = None

    def text(self) -> str:
        """Return how a first version calibrates its precision, for people."""
        tolerance = mean_tolerance(self.canary, dtype=self.dtype, history=History(first=self, last=self))
        return (
            f"canary in {self.dtype}: policy version {self.policy_version} differs from the trainer by {self.mean:.3g} "
            f"nats on average, {self.judged:.3g} where {self.canary.tolerance:g} is accepted, {self.largest:.3g} at "
            f"most; later ones may by {tolerance:.3g} on average"
        )


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The proofs that later ones are compared with.

    Attributes:
        first: calibrates the tolerance of its precision, and movements are compared with it.
        last: of what is served; the same.
    """

    first: Proof | None = None
    last: Proof | None = None

    def then(self, proof: Proof | None) -> History:
        """Return the history after one more proof; another canary or precision begins it anew."""
        if proof is None:
            return self
        goes_on = self.first is not None and _comparable(self.first, proof.canary, dtype=proof.dtype)
        return History(first=self.first if goes_on else proof, last=proof)


class Movement(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine's log-probs moved beside the trainer's, between two versions.

    Attributes:
        slope: nats of the engine per nat of the trainer.
        error: standard error of the slope; infinite if nothing can be said.
        moved: mean absolute movement of the trainer's, nats.
        still: the engine's did not move at all.
    """

    slope: float
    error: float
    moved: float
    still: bool

    def lags(self, *, exact: bool) -> bool:
        """Return whether the engine stayed behind, beyond what noise explains.

        Args:
            exact: whether trainer and engine compute in float32.
        """
        missing, least = 1.0 - self.slope, MISSING if exact else MISSING_ROUNDED
        return (self.still and self.moved > STILL) or (missing > least and missing > SIGMAS * self.error)

    def decided(self) -> bool:
        """Return whether an engine that stayed behind altogether would be seen."""
        return SIGMAS * self.error < 1.0


def canary_difference(canary: Canary, *, scored: np.ndarray) -> float:
    """Return the largest absolute difference per token, NaN if any is not a number."""
    return float(np.max(np.abs(canary.logprobs.astype(np.float64) - scored.astype(np.float64))))


def check_digest(manifest: WeightManifest, *, info: EngineInfo, report: UpdateReport) -> None:
    """Check what the engine says of itself after an update.

    Raises:
        WeightMismatch: with both digests, if it did not take the update or serves something else.
    """
    served = (info.policy_version, info.digest)
    if served == (manifest.policy_version, manifest.digest) and report.policy_version == manifest.policy_version:
        return
    raise WeightMismatch(
        f"policy version {manifest.policy_version} with digest {manifest.digest} was published; after the update the "
        f"engine says that it serves version {info.policy_version} with digest {info.digest} (changed: "
        f"{report.changed}). It ignored the update, or took another one. Nothing is sampled until a version loads and "
        "proves itself",
        published=manifest.digest,
        served=info.digest,
    )


def check_canary(
    manifest: WeightManifest, *, scored: np.ndarray, info: EngineInfo, history: History | None = None
) -> Proof | None:
    """Check the engine's log-probs on the canary; return what was found, or `None` if there is no canary.

    Args:
        scored: float32 [n - 1], the engine's log-probs.
        info: of the engine.
        history: what was served and proven until now.

    Raises:
        WeightMismatch: with both digests, if they are not those of the published weights.
    """
    canary = manifest.canary
    if canary is None:
        return None
    history = History() if history is None else history
    tolerance = mean_tolerance(canary, dtype=info.dtype, history=history)
    largest, mean = canary_difference(canary, scored=scored), _distance(canary, scored)
    judged = largest if _is_exact(manifest, info) else _judged(canary, scored)
    if not judged <= canary.tolerance:
        raise _differs(manifest, f"{judged:.3g} nats, tolerance {canary.tolerance:g}", info=info)
    found = [
        _check_movement(manifest, earlier, scored=scored, info=info, first=history.first)
        for earlier in (history.first, history.last)
        if earlier is not None and _comparable(earlier, canary, dtype=info.dtype)
    ]
    if not mean <= tolerance:
        by = f"{mean:.3g} nats on average, tolerance {tolerance:.3g}{_calibrated_by(history.first)}"
        raise _differs(manifest, by, info=info)
    movement = found[-1] if found else None
    return Proof(
        policy_version=manifest.policy_version,
        canary=canary,
        scored=scored,
        dtype=info.dtype,
        digest=manifest.digest,
        largest=largest,
        judged=judged,
        mean=mean,
        mean_tolerance=tolerance,
        followed=movement.slope if movement is not None and movement.decided() else None,
    )


def mean_tolerance(canary: Canary, *, dtype: str, history: History) -> float:
    """Return the mean difference that is accepted in a precision, nats.

    Args:
        canary: of the version; its tolerance is the most.
        dtype: of the engine.
        history: calibrates, in this precision; without it only the most is known.

    Example:
        >>> ids = np.arange(3, dtype=np.int32)
        >>> new = Canary(token_ids=ids, logprobs=np.array([-1.0, -2.0], np.float32), tolerance=0.5)
        >>> mean_tolerance(new, dtype="int8", history=History())
        0.5
    """
    means = [proof.mean for proof in (history.first, history.last) if proof is not None and proof.dtype == dtype]
    if not means:
        return canary.tolerance
    return min(canary.tolerance, max(FLOORS.get(dtype, _OTHER_FLOOR), MARGIN * max(means)))


def movement_since(earlier: Proof, canary: Canary, *, scored: np.ndarray, noise: float | None) -> Movement:
    """Return how the engine's log-probs moved beside the trainer's.

    Args:
        earlier: the version that both are compared with, of the same canary.
        canary: the trainer's log-probs now.
        scored: the engine's.
        noise: nats of noise in the trainer's and the engine's log-probs, where that is known and small; `None`
            measures it by the residuals.
    """
    theirs = canary.logprobs.astype(np.float64) - earlier.canary.logprobs.astype(np.float64)
    ours = scored.astype(np.float64) - earlier.scored.astype(np.float64)
    power, moved = float(theirs @ theirs), float(np.mean(np.abs(theirs)))
    if power == 0.0:
        return Movement(slope=0.0, error=math.inf, moved=0.0, still=not ours.any())
    slope = float(ours @ theirs) / power
    if noise is not None:
        error = noise * math.sqrt(len(theirs) / power)  # all of it may point along the movement
    elif len(theirs) < ENOUGH:
        error = math.inf
    else:
        error = _slope_error(theirs, ours - slope * theirs, power=power)
    return Movement(slope=slope, error=error, moved=moved, still=not ours.any())


def _slope_error(moved: np.ndarray, rest: np.ndarray, *, power: float) -> float:
    """Return the standard error of a slope without intercept, by its residuals.

    The larger of two: that of equal noise everywhere, and one that holds where unlikely tokens, which move most, are
    also rounded worst (HC3; MacKinnon and White 1985, doi:10.1016/0304-4076(85)90158-7).
    """
    leverage = moved**2 / power
    if float(leverage @ leverage) * SPREAD > 1.0:
        return math.inf
    plain = math.sqrt(float(rest @ rest) / (len(rest) - 1) / power)
    return max(plain, float(np.sqrt(np.sum((moved * rest / (1.0 - leverage)) ** 2))) / power)


def _check_movement(
    manifest: WeightManifest, earlier: Proof, *, scored: np.ndarray, info: EngineInfo, first: Proof | None
) -> Movement:
    canary = manifest.canary
    assert canary is not None
    exact = _is_exact(manifest, info)
    noise = max(NOISE, 0.0 if first is None else first.mean) if exact else None
    movement = movement_since(earlier, canary, scored=scored, noise=noise)
    if manifest.training_dtype != "float32" and first is not None and movement.moved < NEARER * first.mean:
        # Noise in what is compared with lowers the slope too.
        movement = msgspec.structs.replace(movement, error=math.inf)
    if exact and serves_older(canary, older=earlier.canary, scored=scored):
        raise WeightMismatch(
            f"policy version {manifest.policy_version}: the engine's log-probs on the canary are still those of "
            f"version {earlier.policy_version}, though the trainer's have moved by "
            f"{canary_difference(canary, scored=earlier.canary.logprobs):.3g} nats. The engine reports the update but "
            "does not use it; look for a copy of the weights that it does not refresh",
            published=manifest.digest,
            served=earlier.digest,
        )
    if not movement.lags(exact=exact):
        return movement
    share = "not at all" if movement.still else f"{movement.slope:.2f} times as far"
    raise WeightMismatch(
        f"policy version {manifest.policy_version}: since version {earlier.policy_version} the trainer's log-probs on "
        f"the canary have moved by {movement.moved:.3g} nats on average, and the engine's {share} (standard error "
        f"{movement.error:.2g}): they are still those of older weights, in whole or in part. The engine reports the "
        "update but does not use it; look for a copy of the weights that it does not refresh, such as a packed output "
        "head",
        published=manifest.digest,
        served=earlier.digest,
    )


def serves_older(canary: Canary, *, older: Canary | None, scored: np.ndarray) -> bool:
    """Return whether float32 log-probs are those of older weights, beyond what rounding explains.

    Example:
        >>> ids = np.arange(3, dtype=np.int32)
        >>> new = Canary(token_ids=ids, logprobs=np.array([-1.0, -2.0], np.float32), tolerance=1e-3)
        >>> old = Canary(token_ids=ids, logprobs=np.array([-1.001, -2.001], np.float32), tolerance=1e-3)
        >>> serves_older(new, older=old, scored=old.logprobs), serves_older(new, older=old, scored=new.logprobs)
        (True, False)
    """
    if older is None or not np.array_equal(canary.token_ids, older.token_ids):
        return False
    to_new, to_old = _distance(canary, scored), _distance(older, scored)
    return to_new > NOISE and to_old * NEARER < to_new


def _is_exact(manifest: WeightManifest, info: EngineInfo) -> bool:
    return info.dtype == manifest.training_dtype == "float32"


def _judged(canary: Canary, scored: np.ndarray) -> float:
    """Return the difference that the tolerance is asked of, NaN if any is not a number."""
    differences = np.abs(canary.logprobs.astype(np.float64) - scored.astype(np.float64))
    return float(np.quantile(differences, KEEPING) if len(differences) >= ENOUGH else differences.max())


def _comparable(earlier: Proof, canary: Canary, *, dtype: str) -> bool:
    return earlier.dtype == dtype and np.array_equal(earlier.canary.token_ids, canary.token_ids)


def _distance(canary: Canary, scored: np.ndarray) -> float:
    return float(np.mean(np.abs(canary.logprobs.astype(np.float64) - scored.astype(np.float64))))


def _differs(manifest: WeightManifest, by: str, *, info: EngineInfo) -> WeightMismatch:
    return WeightMismatch(
        f"policy version {manifest.policy_version}: the engine's log-probs on the canary differ from the trainer's by "
        f"{by}. The weights being served are not the weights that were published, or the precisions differ; see "
        "weights.canary_tolerance",
        published=manifest.digest,
        served=info.digest,
    )


def _calibrated_by(first: Proof | None) -> str:
    return "" if first is None else f" (version {first.policy_version} had {first.mean:.3g} in {first.dtype})"
