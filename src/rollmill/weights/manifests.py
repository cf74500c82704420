"""Manifests on disk: one readable JSON file per version. No torch.

Decides nothing; a manifest is written once and never changed.
"""

from __future__ import annotations

import contextlib
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollmill.errors import WeightError
from rollmill.types import WeightManifest
from rollmill.weights.files import read_sealed_json, write_sealed_json

_KEPT = 32
_NAME = re.compile(r"v(\d{6,})\.json")


class Manifests:
    """The manifests of one repository. Those read last are kept, for they never change; one has 150 KB and more."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: OrderedDict[int, WeightManifest] = OrderedDict()
        self._steps: dict[int, int] = {}

    def versions(self) -> tuple[int, ...]:
        """Return all published versions, ascending."""
        found = (_NAME.fullmatch(path.name) for path in self._directory.iterdir())
        return tuple(sorted(int(match[1]) for match in found if match))

    def read(self, policy_version: int) -> WeightManifest:
        """Return one manifest.

        Raises:
            WeightError: if there is none, with those that exist; or if its file is damaged.
        """
        if policy_version not in self._known:
            path = self._path(policy_version)
            if not path.exists():
                raise WeightError(
                    f"version {policy_version} was never published in {self._directory.parent}; published are "
                    f"{in_words(self.versions())}."
                )
            self._known[policy_version] = _decode(read_sealed_json(path), path=path)
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return self._known[policy_version]

    def optimizer_step_of(self, policy_version: int) -> int:
        """Return the optimizer updates in a version; asked of every sample, so it is remembered for all versions.

        Raises:
            WeightError: as `read`.
        """
        if policy_version not in self._steps:
            self._steps[policy_version] = self.read(policy_version).optimizer_step
        return self._steps[policy_version]

    def readable(self, *, after: int = 0) -> tuple[WeightManifest, ...]:
        """Return later manifests that can be read, ascending: a damaged one is no reason to lose the others."""
        found: list[WeightManifest] = []
        for version in self.versions():
            if version > after:
                with contextlib.suppress(WeightError):
                    found.append(self.read(version))
        return tuple(found)

    def damaged(self) -> tuple[int, ...]:
        """Return the versions whose manifests cannot be read; their numbers stay taken."""
        return tuple(sorted({*self.versions()} - {one.policy_version for one in self.readable()}))

    def write(self, manifest: WeightManifest) -> None:
        """Write a manifest; the version is published when this returns."""
        write_sealed_json(self._path(manifest.policy_version), _encode(manifest))

    def _path(self, policy_version: int) -> Path:
        return self._directory / f"v{policy_version:06d}.json"


def in_words(versions: tuple[int, ...]) -> str:
    """Return versions for a message: all of a few, the ends of many."""
    if not versions:
        return "none"
    if len(versions) > 12:
        return f"{versions[0]} to {versions[-1]} ({len(versions)} of them)"
    return ", ".join(map(str, versions))


def _encode(manifest: WeightManifest) -> dict[str, Any]:
    if manifest.canary is not None and not np.isfinite(manifest.canary.logprobs).all():
        raise WeightError(
            f"version {manifest.policy_version} cannot be published: its canary has log-probs that are not finite. "
            "The model computes NaN or infinity; look at the step that made it. Nothing was published."
        )
    return msgspec.to_builtins(manifest, enc_hook=_array_to_json)


def _decode(content: dict[str, Any], *, path: Path) -> WeightManifest:
    try:
        return msgspec.convert(content, WeightManifest, dec_hook=_array_from_json)
    except msgspec.ValidationError as error:
        raise WeightError(
            f"{path} is not a manifest that this Rollmill reads: {error}. Use the Rollmill that wrote it."
        ) from error


def _array_to_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.name, "values": value.tolist()}
    raise NotImplementedError(f"a {type(value).__name__} cannot be written to a manifest")


def _array_from_json(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        return np.array(value["values"], dtype=value["dtype"])
    raise NotImplementedError(f"a {kind.__name__} cannot be read from a manifest")
