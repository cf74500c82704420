"""The model repository on one machine: manifests on disk, tensors in shared memory or files.

A publication becomes visible when its manifest is renamed into place, after its tensors are complete and digested.
Versions only rise, also across crashes and resumes. Decides nothing about when to publish or load. torch is imported
only where tensors are written or loaded, so that a process without torch can list, hold and retire versions.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from rollmill.errors import InvariantViolation, RunDirectoryError, WeightError
from rollmill.types import Adapter, Canary, Rounded, TensorEntry, WeightManifest
from rollmill.weights.bases import base_path, load_base, put_base, retire_bases
from rollmill.weights.files import PARTIAL_SUFFIX, fsync_directory, locked
from rollmill.weights.holds import Holds
from rollmill.weights.manifests import Manifests, in_words
from rollmill.weights.publication import LocalPublication
from rollmill.weights.reuse import open_to_read, reserve_spare, retire_file, take_spare
from rollmill.weights.tensorfile import MappedFile, TensorsInFile, copy_tensors
from rollmill.weights.transport import (
    SHARED_MEMORY,
    Transport,
    make_shared_folder,
    resolve_transport,
    shared_folder,
)

if TYPE_CHECKING:
    import torch

Quantization = Literal["none", "int8"]
_TENSORS = re.compile(r"v(\d{6,})\.safetensors")


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
        quantization: with `int8` whole weights are also published in eight bits, and read in them where they were.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        transport: Literal["auto", "shm", "file"] = "auto",
        keep_versions: int = 3,
        shared_memory: Path = SHARED_MEMORY,
        quantization: Quantization = "none",
    ) -> None:
        if keep_versions < 1:
            raise WeightError(f"keep_versions is {keep_versions}; at least the newest version must be kept.")
        self._root = Path(root)
        self._requested: Literal["auto", "shm", "file"] = transport
        self._resolved: Transport | None = None
        self._keep = keep_versions
        self._shared_memory = shared_memory
        self._quantization: Quantization = quantization
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
        self._base: tuple[str, Mapping[str, torch.Tensor]] | None = None

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
        """Write tensors, then commit the manifest under max + 1.

        Raises:
            WeightError: if the space is full, tensors share memory, nothing was given or changed, or another process
                publishes now; no version appears then.
        """
        return self.prepare(
            tensors,
            optimizer_step=optimizer_step,
            parent=parent,
            history_id=history_id,
            training_dtype=training_dtype,
            at_s=at_s,
            adapter=adapter,
        ).commit(canary=canary)

    def put_base(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Store the whole weights that adapters will be added to; return their digest. Idempotent; no version appears.

        Raises:
            WeightError: if the space is full, tensors share memory, or nothing was given.
        """
        transport = self._transport_for(_bytes_of(tensors))
        return put_base(self._folder(transport, make=True), tensors, durable=transport == "file")

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
    ) -> LocalPublication:
        """Copy tensors, so that they may change again, for the version max + 1; its `commit` makes it visible.

        Until it ends, by `commit` or `abandon`, nobody else can publish.

        Args:
            adapter: what the tensors are added to, if they are an adapter's and not whole weights.

        Raises:
            WeightError: if the space is full, tensors share memory, nothing was given, another process publishes now,
                or the base of an adapter was not stored; no version appears then.
        """
        with contextlib.ExitStack() as held:
            held.enter_context(self._publishing())
            self._remove_leftovers()
            version = max(self._manifests.versions(), default=0) + 1
            nbytes = _bytes_of(tensors)
            transport = self._transport_for(nbytes if self._quantization == "none" else round(1.3 * nbytes))
            if adapter is not None:
                self._refuse_without_base(adapter, transport=transport)
            final = self._folder(transport, make=True) / f"v{version:06d}.safetensors"
            partial = final.with_name(final.name + PARTIAL_SUFFIX)
            handle = held.enter_context(self._open_partial(partial, transport=transport))
            _copy_or_remove(tensors, handle, path=partial)
            draft = WeightManifest(
                policy_version=version,
                optimizer_step=optimizer_step,
                parent=parent,
                history_id=history_id,
                training_dtype=training_dtype,
                serving_dtype="",
                tensors={},
                digest="",
                transport=transport,
                location=str(final),
                published_at_s=at_s,
                adapter=adapter,
            )
            return LocalPublication(
                draft,
                handle=handle,
                partial=partial,
                final=final,
                rounded=self._rounded_beside(final) if self._quantization == "int8" and adapter is None else None,
                durable=transport == "file",
                manifests=self._manifests,
                held=held.pop_all(),
            )
        raise InvariantViolation("unreachable: nothing in this block swallows an exception")

    def _refuse_without_base(self, adapter: Adapter, *, transport: Transport) -> None:
        if not base_path(self._folder(transport), adapter.base_digest).exists():
            raise WeightError(
                f"the weights with digest {adapter.base_digest[:16]}... under this adapter are not in the "
                "repository. Store them with `put_base` first. Nothing was published"
            )

    def _open_partial(self, partial: Path, *, transport: str) -> io.FileIO:
        """Return the file that a publication is written to: in shared memory a retired one, where there is one."""
        if transport == "shm":
            with self._locked():
                spare = take_spare(partial)
            if spare is not None:
                return spare
        return partial.open("x+b", buffering=0)

    def republish(self, policy_version: int, *, history_id: str, at_s: float) -> WeightManifest:
        """Publish an old version again under max + 1: a roll back. No tensor is copied or digested again.

        The new manifest carries the old one's `optimizer_step`, because that is how old these weights are, and its
        canary; its parent is the old version.

        Raises:
            WeightError: if the version is unknown or its tensors are gone, or another process publishes now.
        """
        old = self._manifests.read(policy_version)
        with self._publishing():
            self._remove_leftovers()
            version = self._manifests.versions()[-1] + 1
            final = self._folder(old.transport) / f"v{version:06d}.safetensors"
            rounded = self._rounded_beside(final)
            try:
                with self._locked():
                    os.link(self._tensor_path(old), final)
                    if old.rounded is not None:
                        os.link(self._rounded_beside(self._tensor_path(old)), rounded)
            except FileNotFoundError as error:
                raise self._gone(policy_version) from error
            try:
                fsync_directory(final.parent)
                manifest = msgspec.structs.replace(
                    old,
                    policy_version=version,
                    parent=policy_version,
                    history_id=history_id,
                    location=str(final),
                    published_at_s=at_s,
                    rounded=old.rounded and msgspec.structs.replace(old.rounded, location=str(rounded)),
                )
                self._manifests.write(manifest)
            except BaseException:
                if version not in self._manifests.versions():
                    final.unlink(missing_ok=True)
                    rounded.unlink(missing_ok=True)
                raise
            return manifest

    def reserve(self) -> bool:
        """Make room for the next publication ahead of time, off everybody's critical path; return whether there is."""
        latest = self.latest()
        if latest is None or latest.transport != "shm":
            return False
        try:
            nbytes = self._tensor_path(latest).stat().st_size
            with self._locked():
                return reserve_spare(self._folder("shm"), nbytes=nbytes)
        except FileNotFoundError:
            return False

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

    def _rounded_beside(self, path: Path) -> Path:
        return path.with_suffix(".int8.safetensors")

    def _remove_leftovers(self) -> tuple[str, ...]:
        """Remove tensor files that no manifest speaks of, and parts of files."""
        versions = self._manifests.versions()
        known = {f"v{version:06d}{end}" for version in versions for end in (".safetensors", ".int8.safetensors")}
        removed: list[str] = []
        for folder in (self._folder("file"), self._folder("shm"), self._root / "manifests"):
            pattern = f"*{PARTIAL_SUFFIX}" if folder.name == "manifests" else "v*.safetensors*"
            for path in sorted(folder.glob(pattern)):
                if path.name not in known:
                    path.unlink(missing_ok=True)
                    removed.append(path.name)
        return tuple(removed)

    def manifests(self, *, after: int = 0) -> Sequence[WeightManifest]:
        """Return later manifests that can be read, ascending; those whose tensors are gone too."""
        return self._manifests.readable(after=after)

    def manifest(self, policy_version: int) -> WeightManifest:
        """Return the manifest of one version."""
        return self._manifests.read(policy_version)

    def latest(self) -> WeightManifest | None:
        """Return the newest manifest that can be read, or `None` before the first publication."""
        for version in reversed(self._manifests.versions()):
            with contextlib.suppress(WeightError):
                return self._manifests.read(version)
        return None

    def optimizer_step_of(self, policy_version: int) -> int:
        """Return the committed optimizer updates in a version."""
        return self._manifests.optimizer_step_of(policy_version)

    def available(self) -> tuple[int, ...]:
        """Return the versions whose tensors can be loaded, ascending."""
        with_tensors = {version for _, version, _ in self._tensor_files()}
        return tuple(version for version in self._manifests.versions() if version in with_tensors)

    def _tensor_files(self) -> list[tuple[Transport, int, Path]]:
        """Return where tensors lie: there are few such files, however many versions there were."""
        transports: tuple[Transport, ...] = ("file", "shm")
        return [
            (transport, int(match[1]), path)
            for transport in transports
            for path in sorted(self._folder(transport).glob("v*.safetensors"))
            if (match := _TENSORS.fullmatch(path.name))
        ]

    def load(self, policy_version: int) -> dict[str, torch.Tensor]:
        """Return the whole weights, memory-mapped, each tensor checked against its digest.

        An adapter's are merged into those of its base, in memory of their own where they differ. Those of eight bits
        are restored to float32. They stay valid after the version is retired: the mapping keeps the memory until the
        last tensor is gone.

        Raises:
            WeightMismatch: if a digest differs, with both digests.
            WeightError: if the version is unknown or its tensors are gone.
        """
        manifest = self._manifests.read(policy_version)
        if manifest.rounded is not None and self._quantization == manifest.rounded.dtype:
            from rollmill.weights.rounding import restored

            return restored(self._load_rounded(manifest, manifest.rounded))
        if manifest.adapter is None:
            return self._load_stored(manifest)
        from rollmill.weights.adapters import merged

        stored, base = self._load_stored(manifest), self._load_base(manifest, manifest.adapter)
        return merged(base, stored, settings=manifest.adapter)

    def load_adapter(self, policy_version: int) -> dict[str, torch.Tensor]:
        """Return an adapter alone, as it was published, memory-mapped, each tensor checked against its digest.

        Raises:
            WeightMismatch: if a digest differs.
            WeightError: if the version is unknown, its tensors are gone, or it is whole weights.
        """
        return self._load_stored(self._adapter_manifest(policy_version)[0])

    def load_base(self, policy_version: int) -> dict[str, torch.Tensor]:
        """Return the weights under an adapter, memory-mapped and verified.

        Raises:
            WeightMismatch: if they are damaged.
            WeightError: if the version is unknown or is whole weights, or its base is gone.
        """
        return dict(self._load_base(*self._adapter_manifest(policy_version)))

    def _adapter_manifest(self, policy_version: int) -> tuple[WeightManifest, Adapter]:
        manifest = self._manifests.read(policy_version)
        if manifest.adapter is None:
            raise WeightError(
                f"version {policy_version} in {self._root} is whole weights and no adapter: its run trained without "
                "trainer.lora_rank. Serve it with --repository"
            )
        return manifest, manifest.adapter

    def _load_base(self, manifest: WeightManifest, adapter: Adapter) -> Mapping[str, torch.Tensor]:
        """Return the weights under an adapter, read and verified once: all versions of a run have the same ones."""
        if self._base is None or self._base[0] != adapter.base_digest:
            self._base = adapter.base_digest, load_base(self._folder(manifest.transport), adapter)
        return self._base[1]

    def _load_stored(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        path = self._tensor_path(manifest)
        return TensorsInFile(self._load_file(path, manifest.tensors, of=manifest.policy_version), path=path)

    def _load_rounded(self, manifest: WeightManifest, rounded: Rounded) -> dict[str, torch.Tensor]:
        path = self._rounded_beside(self._tensor_path(manifest))
        return self._load_file(path, rounded.tensors, of=manifest.policy_version)

    def _load_file(self, path: Path, expected: Mapping[str, TensorEntry], *, of: int) -> dict[str, torch.Tensor]:
        try:
            with open_to_read(path) as handle:
                mapped = MappedFile(handle, path=path)
            mapped.verify(expected, what=f"version {of}")
            return mapped.tensors()
        except FileNotFoundError as error:  # retired before, or while, it was read
            raise self._gone(of) from error

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
        """Delete tensors of versions that are neither among the newest kept, nor held; return them.

        Bases that none of those is an adapter on go too.
        """
        with self._locked():
            published = self._manifests.versions()
            kept = {*published[-self._keep :], *self._holds.living()}
            retired: list[int] = []
            for transport, version, path in self._tensor_files():
                if version in kept or version not in published:
                    continue
                if transport == "shm":
                    retire_file(path)
                else:
                    path.unlink()
                self._rounded_beside(path).unlink(missing_ok=True)
                retired.append(version)
            self._retire_bases(kept)
            return sorted(retired)

    def _retire_bases(self, kept: set[int]) -> None:
        try:
            adapters = [self._manifests.read(version).adapter for version in kept]
        except WeightError:
            return  # nobody knows what the damaged one stands on
        bases = {adapter.base_digest for adapter in adapters if adapter is not None}
        for transport in ("file", "shm"):
            retire_bases(self._folder(transport), kept=bases)

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


def _bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _copy_or_remove(tensors: Mapping[str, torch.Tensor], handle: io.FileIO, *, path: Path) -> None:
    """Write a whole file of tensors, or leave none."""
    try:
        copy_tensors(handle, tensors, path=path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
