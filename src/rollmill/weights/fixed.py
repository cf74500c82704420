"""One model directory as a repository with one version: what a replica serves that follows no run.

There is no trainer, so nobody published a canary: the version is proven by its digest alone. Nothing can be published
here, and no other version can be loaded. No torch until tensors are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from rollmill.errors import WeightError
from rollmill.types import Adapter, Canary, TensorEntry, WeightManifest
from rollmill.weights.inspection import inspect, weight_files
from rollmill.weights.protocol import Publication
from rollmill.weights.tensorfile import MappedFile, check_entries, entries_of, whole_digest

if TYPE_CHECKING:
    import torch

Read = Callable[[], "dict[str, torch.Tensor]"]

FIXED_VERSION = 1


class FixedModel:
    """`ModelRepository` of one model that does not change.

    Args:
        path: Hugging Face directory with safetensors.
        at_s: when it became version 1, wall clock.
        read: gives the tensors, where the files hold them under other names than the engine's; must give the same
            ones each time. `None` takes them as they are stored.

    Raises:
        ModelError: if the directory lacks something.
        WeightError: if a file is damaged.
    """

    def __init__(self, path: str | Path, *, at_s: float, read: Read | None = None) -> None:
        self._path = Path(path)
        self._read = read
        # What is served first is read and digested once.
        self._first: _Content | None = self._content()
        entries = self._first.entries()
        dtype = inspect(self._path).dtype
        self._manifest = WeightManifest(
            policy_version=FIXED_VERSION,
            optimizer_step=0,
            parent=None,
            history_id="fixed",
            training_dtype=dtype,
            serving_dtype=dtype,
            tensors=entries,
            digest=whole_digest(entries),
            transport="file",
            location=str(self._path),
            published_at_s=at_s,
        )

    def manifests(self, *, after: int = 0) -> Sequence[WeightManifest]:
        """Return the one manifest, if it is later."""
        return [self._manifest] if self._manifest.policy_version > after else []

    def manifest(self, policy_version: int) -> WeightManifest:
        """Return the one manifest.

        Raises:
            WeightError: for every other version.
        """
        if policy_version != FIXED_VERSION:
            raise WeightError(
                f"policy version {policy_version} is unknown: this replica serves the fixed model in {self._path} as "
                f"version {FIXED_VERSION} and follows no run. To load weights of a run, start it with --repository DIR"
            )
        return self._manifest

    def latest(self) -> WeightManifest | None:
        """Return the one manifest."""
        return self._manifest

    def load(self, policy_version: int) -> dict[str, torch.Tensor]:
        """Return the tensors, memory-mapped.

        Raises:
            WeightMismatch: if the files have changed since the start.
            WeightError: for every other version, or if a file is damaged.
        """
        manifest, content = self.manifest(policy_version), self._first
        self._first = None  # the tensors keep their memory as long as somebody uses them
        if content is None:
            content = self._content()
            check_entries(content.entries(), manifest.tensors, what="the fixed model", path=self._path)
        return content.tensors()

    def _content(self) -> _Content:
        return _Files(self._path) if self._read is None else _Tensors(self._read())

    def hold(self, policy_version: int, *, owner: str) -> None:
        """Nothing is ever retired here.

        Raises:
            WeightError: for every other version.
        """
        self.manifest(policy_version)

    def release(self, policy_version: int, *, owner: str) -> None:
        """Nothing is ever retired here."""

    def retire(self) -> Sequence[int]:
        """Nothing is ever retired here."""
        return ()

    def reserve(self) -> bool:
        """Return that there is no room for a publication."""
        return False

    def put_base(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Refuse: the model is fixed."""
        self._refuse()

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
        """Refuse: the model is fixed."""
        self._refuse()

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
        """Refuse: the model is fixed."""
        self._refuse()

    def republish(self, policy_version: int, *, history_id: str, at_s: float) -> WeightManifest:
        """Refuse: the model is fixed."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise WeightError(f"nothing can be published beside the fixed model in {self._path}; use a run's repository")


class _Content(Protocol):
    """Tensors with their digests."""

    def entries(self) -> dict[str, TensorEntry]: ...

    def tensors(self) -> dict[str, torch.Tensor]: ...


class _Files:
    """Tensors as they are stored; digests and tensors come from one map of each file."""

    def __init__(self, path: Path) -> None:
        self._maps: list[MappedFile] = []
        for file in weight_files(path):
            with file.open("rb", buffering=0) as handle:
                self._maps.append(MappedFile(handle, path=file))

    def entries(self) -> dict[str, TensorEntry]:
        return {name: entry for mapped in self._maps for name, entry in mapped.entries().items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for mapped in self._maps for name, tensor in mapped.tensors().items()}


class _Tensors:
    """Tensors that somebody else read."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def entries(self) -> dict[str, TensorEntry]:
        return entries_of(self._tensors)

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._tensors
