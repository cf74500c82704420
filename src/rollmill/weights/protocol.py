"""The model repository: the one publish path of weights.

Decides nothing about when to publish or load. Publishing has two parts: a copy, after which the trainer may go on, and
a commit, which digests the copy and makes it visible. A load is verified by digest. Versions only rise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from rollmill.types import Adapter, Canary, WeightManifest

if TYPE_CHECKING:
    import torch


class Publication(Protocol):
    """Weights that were copied and are not yet visible. Ends with `commit` or `abandon`; any one thread may call."""

    @property
    def policy_version(self) -> int:
        """The version that this becomes."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the copied tensors: they stay what they are while the trainer goes on."""
        ...

    def commit(self, *, canary: Canary | None) -> WeightManifest:
        """Digest the copy and make the version visible.

        Raises:
            WeightError: if an update changed no tensor, or the manifest cannot be written; no version appears then.
        """
        ...

    def abandon(self) -> None:
        """Remove the copy; no version appears. Idempotent."""
        ...


class ModelRepository(Protocol):
    """Published weights with manifests. All methods block."""

    def put_base(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Store the whole weights that adapters will be added to; return their digest. Idempotent; no version appears.

        Raises:
            WeightError: if the space is full or nothing was given.
        """
        ...

    def prepare(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        optimizer_step: int,
        parent: int | None,
        history_id: str,
        training_dtype: str,
        at_s: float,
        adapter: Adapter | None = None,
    ) -> Publication:
        """Copy tensors for the version max + 1; they may change again when this returns.

        Args:
            adapter: what the tensors are added to, if they are an adapter's and not whole weights.

        Raises:
            WeightError: if the space is full, nothing was given, another publication is under way, or the base of an
                adapter was not stored.
        """
        ...

    def publish(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        optimizer_step: int,
        parent: int | None,
        history_id: str,
        training_dtype: str,
        canary: Canary | None,
        at_s: float,
        adapter: Adapter | None = None,
    ) -> WeightManifest:
        """`prepare` and `commit` in one call.

        Raises:
            WeightError: as both of them; no version appears then.
        """
        ...

    def republish(self, policy_version: int, *, history_id: str, at_s: float) -> WeightManifest:
        """Publish an old version again under max + 1, with the old one's `optimizer_step`: a roll back.

        Raises:
            WeightError: if the version is unknown or was retired.
        """
        ...

    def reserve(self) -> bool:
        """Make room for the next publication ahead of time; return whether there is."""
        ...

    def manifests(self, *, after: int = 0) -> Sequence[WeightManifest]:
        """Return the manifests of later versions, ascending; those whose tensors are gone too."""
        ...

    def manifest(self, policy_version: int) -> WeightManifest:
        """Return the manifest of one version."""
        ...

    def latest(self) -> WeightManifest | None:
        """Return the newest manifest, or `None` before the first publication."""
        ...

    def load(self, policy_version: int) -> dict[str, torch.Tensor]:
        """Return the whole weights (memory-mapped where possible), each tensor checked against its digest.

        An adapter's are merged into those of its base.

        Raises:
            WeightMismatch: if a digest differs, with both digests.
            WeightError: if the version is unknown or was retired.
        """
        ...

    def hold(self, policy_version: int, *, owner: str) -> None:
        """Keep a version's tensors, and those of its base, from being retired until `release`."""
        ...

    def release(self, policy_version: int, *, owner: str) -> None:
        """End a hold."""
        ...

    def retire(self) -> Sequence[int]:
        """Delete tensors of versions that are neither among the newest kept nor held, and unused bases; return them."""
        ...
