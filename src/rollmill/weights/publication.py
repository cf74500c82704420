"""A publication between the copy of its tensors and the commit of its manifest.

The copy is all that the trainer waits for. Digests are computed from the copy, which nobody changes, on whatever
thread calls `commit`; the version is visible when its manifest is renamed into place, complete tensors before it.
Decides one thing: weights that an update did not change are not published.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rollmill.errors import InvariantViolation, WeightError
from rollmill.types import Canary, Rounded, TensorEntry, WeightManifest
from rollmill.weights.files import fsync_directory
from rollmill.weights.manifests import Manifests
from rollmill.weights.tensorfile import MappedFile, whole_digest, write_tensors

if TYPE_CHECKING:
    import torch


class LocalPublication:
    """`Publication` of a repository on one machine; holds the repository's publish lock until it ends.

    Args:
        draft: the manifest, still without tensors, digests and canary.
        handle: the open tensor file, complete.
        partial: its name now.
        final: its name once it is published.
        rounded: where the weights go that are rounded to eight bits; `None` does not round any.
        durable: flush it to the disk before it is published.
        manifests: where the manifest goes.
        held: what is given back when the publication ends: the publish lock, and the handle.
    """

    def __init__(
        self,
        draft: WeightManifest,
        *,
        handle: io.FileIO,
        partial: Path,
        final: Path,
        rounded: Path | None,
        durable: bool,
        manifests: Manifests,
        held: contextlib.ExitStack,
    ) -> None:
        self._draft = draft
        self._handle = handle
        self._partial = partial
        self._final = final
        self._rounded = rounded
        self._durable = durable
        self._manifests = manifests
        self._held = held
        self._mapped: MappedFile | None = None
        self._ended = False

    @property
    def policy_version(self) -> int:
        """The version that this becomes."""
        return self._draft.policy_version

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the copied tensors, memory-mapped: they stay what they are while the trainer goes on."""
        return self._map().tensors()

    def _map(self) -> MappedFile:
        if self._ended:
            raise InvariantViolation(f"the publication of version {self.policy_version} has ended")
        if self._mapped is None:
            self._mapped = MappedFile(self._handle, path=self._partial)
        return self._mapped

    def commit(self, *, canary: Canary | None) -> WeightManifest:
        """Digest the copy and make the version visible.

        Raises:
            WeightError: if no tensor differs from the parent's though the optimizer stepped, the canary is not finite,
                or the manifest cannot be written; no version appears then.
        """
        with self._end():
            try:
                return self._commit(canary)
            except OSError as error:
                self._remove()
                raise WeightError(
                    f"version {self.policy_version} could not be published: {error.strerror} at {self._final.parent} "
                    "or beside its manifest. Free space there, or choose another place. Its files were removed."
                ) from error
            except BaseException:
                self._remove()
                raise

    def _remove(self) -> None:
        """Remove what was written, unless the manifest is visible after all."""
        if self.policy_version not in self._manifests.versions():
            self._partial.unlink(missing_ok=True)
            self._final.unlink(missing_ok=True)
            if self._rounded is not None:
                self._rounded.unlink(missing_ok=True)

    def _commit(self, canary: Canary | None) -> WeightManifest:
        entries = self._map().entries()
        manifest = msgspec.structs.replace(
            self._draft,
            tensors=entries,
            digest=whole_digest(entries),
            serving_dtype=main_dtype(entries),
            canary=canary,
        )
        self._check_changed(manifest)
        manifest = msgspec.structs.replace(manifest, rounded=self._write_rounded())
        if self._durable:
            os.fsync(self._handle.fileno())
        self._partial.rename(self._final)
        fsync_directory(self._final.parent)
        # From writer to reader: whoever still looks at our own map keeps the file from being written again.
        fcntl.flock(self._handle, fcntl.LOCK_SH)
        self._manifests.write(manifest)
        return manifest

    def _write_rounded(self) -> Rounded | None:
        if self._rounded is None:
            return None
        from rollmill.weights.rounding import rounded

        # No reader knows the name before the manifest is there; after a crash the next publication removes the file.
        entries = write_tensors(self._rounded, rounded(self._map().tensors()), durable=self._durable)
        return Rounded(dtype="int8", tensors=entries, digest=whole_digest(entries), location=str(self._rounded))

    def _check_changed(self, manifest: WeightManifest) -> None:
        if manifest.parent is None or manifest.parent not in self._manifests.versions():
            return
        parent = self._manifests.read(manifest.parent)
        if parent.digest == manifest.digest and manifest.optimizer_step > parent.optimizer_step:
            raise WeightError(
                f"optimizer step {manifest.optimizer_step} changed no tensor: the weights have digest "
                f"{manifest.digest[:16]}..., as version {parent.policy_version} of optimizer step "
                f"{parent.optimizer_step} has. The optimizer does not update what is published, or the learning rate "
                "is too small for the precision of the weights. Nothing was published."
            )

    def abandon(self) -> None:
        """Remove the copy; no version appears. Idempotent; does nothing after a commit."""
        if not self._ended:
            with self._end():
                self._partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _end(self) -> Iterator[None]:
        if self._ended:
            raise InvariantViolation(f"the publication of version {self.policy_version} has ended")
        try:
            with self._held:
                yield
        finally:
            self._ended, self._mapped = True, None


def main_dtype(entries: Mapping[str, TensorEntry]) -> str:
    """Return the dtype of most bytes."""
    count: Counter[str] = Counter()
    for entry in entries.values():
        count[entry.dtype] += entry.nbytes
    return count.most_common(1)[0][0]
