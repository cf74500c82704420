"""Does an engine serve what was published? Pure: numbers in, a verdict out.

Three things are compared: the digest that the engine reports, its log-probs on the canary, and whether those are the
log-probs of the version that it served before. One optimizer step moves the log-probs by less than the tolerance, so
agreement with the new canary alone does not tell the new weights from the old ones.
"""

from __future__ import annotations

import numpy as np

from rollmill.errors import WeightMismatch
from rollmill.generator.engines.protocol import EngineInfo, UpdateReport
from rollmill.types import Canary, WeightManifest

NOISE = 1e-5
"""Nats: float32 log-probs of equal weights differ by less than this on average, whatever pass computes them."""
NEARER = 4.0
"""The engine serves the old weights if their canary is this many times nearer than that of the new ones."""


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
    manifest: WeightManifest, *, scored: np.ndarray, info: EngineInfo, before: WeightManifest | None
) -> float | None:
    """Check the engine's log-probs on the canary; return the largest difference to the trainer's.

    Args:
        before: what was served and proven until now.

    Raises:
        WeightMismatch: with both digests, if they are not those of the published weights.
    """
    canary = manifest.canary
    if canary is None:
        return None
    difference = canary_difference(canary, scored=scored)
    if not difference <= canary.tolerance:
        raise WeightMismatch(
            f"policy version {manifest.policy_version}: the engine's log-probs on the canary differ from the "
            f"trainer's by {difference:.3g} nats, tolerance {canary.tolerance:g}. The weights being served are not "
            "the weights that were published, or the precisions differ; see weights.canary_tolerance",
            published=manifest.digest,
            served=info.digest,
        )
    exact = info.dtype == manifest.training_dtype == "float32"
    if exact and before is not None and serves_older(canary, older=before.canary, scored=scored):
        raise WeightMismatch(
            f"policy version {manifest.policy_version}: the engine's log-probs on the canary are still those of "
            f"version {before.policy_version}, though the trainer's have moved by "
            f"{_moved(canary, before.canary):.3g} nats. The engine reports the update but does not use it; look for "
            "a copy of the weights that it does not refresh",
            published=manifest.digest,
            served=before.digest,
        )
    return difference


def serves_older(canary: Canary, *, older: Canary | None, scored: np.ndarray) -> bool:
    """Return whether log-probs are those of older weights, beyond what rounding explains.

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


def _distance(canary: Canary, scored: np.ndarray) -> float:
    return float(np.mean(np.abs(canary.logprobs.astype(np.float64) - scored.astype(np.float64))))


def _moved(canary: Canary, older: Canary | None) -> float:
    return 0.0 if older is None else canary_difference(canary, scored=older.logprobs)
