"""The model repository on one machine: manifests on disk, tensors in shared memory or files.

A publication becomes visible when its manifest is renamed into place, after its tensors are complete. Versions only
rise, also across crashes and resumes. Decides nothing about when to publish or load. torch is imported only where
tensors are written or loaded, so that a process without torch can list, hold and retire versions.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from rollmill.errors import RunDirectoryError, WeightError
from rollmill.types import Canary, TensorEntry, WeightManifest
from rollmill.weights.files import PARTIAL_SUFFIX, fsync_directory, locked
from rollmill.weights.holds import Holds
from rollmill.weights.manifests import Manifests, in_words
from rollmill.weights.tensorfile import load_tensors, verify_file, whole_digest, write_tensors
from rollmill.weights.transport import (
    SHARED_MEMORY,
    Transport,
    make_shared_folder,
    resolve_transport,
    shared_folder,
)

if TYPE_CHECKING:
    import torch


class Adoption(msgspec.Struct, frozen=True, kw_only=True):
    """What a resumed run finds in its repository.

    Attributes:
        available: versions that can be loaded.
        manifest_only: versions whose tensors are gone: retired, or lost with the shared memory in a reboot.
        removed: leftovers of a publication that did not finish.
    """

    available: tuple[int, ...]
    manifest_only: tuple[int, ...]
    removed: tuple[str, ...]


class LocalModelRepository:
    """`ModelRepository` for the processes of one machine.

    Args:
        root: folder of the manifests (and of the tensors, with transport `file`); made if missing.
        transport: `shm`, `file`, or `auto`: shared memory if it has room for all kept versions and one more.
        keep_versions: newest versions that `retire` keeps beside those that are held.
        shared_memory: the memory file system.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        transport: Literal["auto", "shm", "file"] = "auto",
        keep_versions: int = 3,
        shared_memory: Path = SHARED_MEMORY,
    ) -> None:
        if keep_versions < 1:
            raise WeightError(f"keep_versions is {keep_versions}; at least the newest version must be kept.")
        self._root = Path(root)
        self._requested: Literal["auto", "shm", "file"] = transport
        self._resolved: Transport | None = None
        self._keep = keep_versions
        self._shared_memory = shared_memory
        try:
            for name in ("manifests", "tensors", "holds"):
                (self._root / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(
                f"the model repository cannot be made in {self._root}: {error.strerror}. Change the permissions or "
                "choose another run.directory."
            ) from error
        self._manifests = Manifests(self._root / "manifests")
        self._holds = Holds(self._root / "holds")

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
    ) -> WeightManifest:
        """Write tensors, then commit the manifest under max + 1.

        Raises:
            WeightError: if the space is full, tensors share memory, nothing was given, or another process publishes
                now; no version appears then.
        """
        with self._publishing():
            self._remove_leftovers()
            version = max(self._manifests.versions(), default=0) + 1
            transport = self._transport_for(sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()))
            path = self._folder(transport, make=True) / f"v{version:06d}.safetensors"
            partial = path.with_name(path.name + PARTIAL_SUFFIX)
            entries = write_tensors(partial, tensors, durable=transport == "file")
            try:
                partial.rename(path)
                fsync_directory(path.parent)
                manifest = WeightManifest(
                    policy_version=version,
                    optimizer_step=optimizer_step,
                    parent=parent,
                    history_id=history_id,
                    training_dtype=training_dtype,
                    serving_dtype=_main_dtype(entries),
                    tensors=entries,
                    digest=whole_digest(entries),
                    transport=transport,
                    location=str(path),
                    published_at_s=at_s,
                    canary=canary,
                )
                self._manifests.write(manifest)
            except BaseException:
                partial.unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                raise
            return manifest

    @contextlib.contextmanager
    def _publishing(self) -> Iterator[None]:
        """Let one publisher in; a second is told at once instead of waiting."""
        handle = os.open(self._root / "publish.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                other = os.pread(handle, 32, 0).decode().strip() or "unknown"
                raise WeightError(
                    f"process {other} is publishing to {self._root} now. A repository has one publisher: two trainers "
                    "run on one run directory. Stop one of them. Nothing was published."
                ) from error
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(handle)

    def _transport_for(self, nbytes: int) -> Transport:
        if self._resolved is None:
            self._resolved = resolve_transport(
                self._requested, bytes_needed=nbytes, versions=self._keep + 1, shared_memory=self._shared_memory
            )
        return self._resolved

    def _folder(self, transport: str, *, make: bool = False) -> Path:
        if transport == "file":
            return self._root / "tensors"
        if make:
            return make_shared_folder(self._root, shared_memory=self._shared_memory)
        return shared_folder(self._root, shared_memory=self._shared_memory)

    def _tensor_path(self, manifest: WeightManifest) -> Path:
        # Derived, not read from `location`: a run directory that was moved keeps its files.
        return self._folder(manifest.transport) / f"v{manifest.policy_version:06d}.safetensors"

    def _remove_leftovers(self) -> tuple[str, ...]:
        """Remove tensor files that no manifest speaks of, and parts of files."""
        known = {f"v{version:06d}.safetensors" for version in self._manifests.versions()}
        removed: list[str] = []
        for folder in (self._folder("file"), self._folder("shm"), self._root / "manifests"):
            pattern = f"*{PARTIAL_SUFFIX}" if folder.name == "manifests" else "v*.safetensors*"
            for path in sorted(folder.glob(pattern)):
                if path.name not in known:
                    path.unlink(missing_ok=True)
                    removed.append(path.name)
        return tuple(removed)

    def manifests(self) -> Sequence[WeightManifest]:
        """Return all manifests, ascending; those whose tensors are gone too."""
        return [self._manifests.read(version) for version in self._manifests.versions()]

    def manifest(self, policy_version: int) -> WeightManifest:
        """Return the manifest of one version."""
        return self._manifests.read(policy_version)

    def latest(self) -> WeightManifest | None:
        """Return the newest manifest, or `None` before the first publication."""
        versions = self._manifests.versions()
        return self._manifests.read(versions[-1]) if versions else None

    def optimizer_step_of(self, policy_version: int) -> int:
        """Return the committed optimizer updates in a version."""
        return self._manifests.read(policy_version).optimizer_step

    def available(self) -> tuple[int, ...]:
        """Return the versions whose tensors can be loaded, ascending."""
        return tuple(m.policy_version for m in self.manifests() if self._tensor_path(m).exists())

    def load(self, policy_version: int) -> dict[str, torch.Tensor]:
        """Return the tensors, memory-mapped, each checked against its digest.

        They stay valid after the version is retired: the mapping keeps the memory until the last tensor is gone.

        Raises:
            WeightMismatch: if a digest differs, with both digests.
            WeightError: if the version is unknown or its tensors are gone.
        """
        manifest = self._manifests.read(policy_version)
        path = self._tensor_path(manifest)
        try:
            verify_file(path, manifest.tensors, what=f"version {policy_version}")
            return load_tensors(path)
        except FileNotFoundError as error:  # retired before, or while, it was read
            raise self._gone(policy_version) from error

    def _gone(self, policy_version: int) -> WeightError:
        return WeightError(
            f"version {policy_version} has no tensors any more: it was retired (the newest {self._keep} are kept), or "
            f"its shared memory was lost in a restart. Loadable are {in_words(self.available())}. Load one of those; "
            "hold a version to keep it."
        )

    def hold(self, policy_version: int, *, owner: str) -> None:
        """Keep a version's tensors from being retired until `release`, or until this process ends.

        Raises:
            WeightError: if the version is unknown or its tensors are gone.
        """
        manifest = self._manifests.read(policy_version)
        with self._locked():
            if not self._tensor_path(manifest).exists():
                raise self._gone(policy_version)
            self._holds.add(policy_version, owner=owner)

    def release(self, policy_version: int, *, owner: str) -> None:
        """End a hold; one that is not there has ended already."""
        with self._locked():
            self._holds.remove(policy_version, owner=owner)

    def holders(self) -> Mapping[int, tuple[str, ...]]:
        """Return version -> owners of living processes that hold it."""
        with self._locked():
            return self._holds.living()

    def retire(self) -> Sequence[int]:
        """Delete tensors of versions that are neither among the newest kept nor held; return them."""
        with self._locked():
            kept = {*self._manifests.versions()[-self._keep :], *self._holds.living()}
            retired: list[int] = []
            for version in self._manifests.versions():
                path = self._tensor_path(self._manifests.read(version))
                if version not in kept and path.exists():
                    path.unlink()
                    retired.append(version)
            return retired

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        return locked(self._root / "holds.lock")

    def adopt(self) -> Adoption:
        """Take over the repository of a run that stopped: remove leftovers, say which versions still have tensors."""
        with self._publishing():
            removed = self._remove_leftovers()
        with self._locked():
            self._holds.living()
        available = self.available()
        return Adoption(
            available=available,
            manifest_only=tuple(version for version in self._manifests.versions() if version not in available),
            removed=removed,
        )

    def clean(self) -> None:
        """Give the shared memory back at the end of a run. Manifests and files stay."""
        folder = self._folder("shm")
        if folder.is_dir():
            shutil.rmtree(folder)


def _main_dtype(entries: Mapping[str, TensorEntry]) -> str:
    """Return the dtype of most bytes."""
    count: Counter[str] = Counter()
    for entry in entries.values():
        count[entry.dtype] += entry.nbytes
    return count.most_common(1)[0][0]
