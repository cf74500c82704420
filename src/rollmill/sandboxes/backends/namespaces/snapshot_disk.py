"""Snapshots on a disk: layers as directories, one file for each snapshot, a lock for the one provider that has them.

    layers/ID/up/NAME    what was written at NAME
    layers/ID.part/      being copied; whoever opens the directory next discards it
    snapshots/ID.json    which layers a snapshot has; written last, removed first
    trash/               what the reaper deletes
    identity             a random word: whose claims on images these snapshots have, wherever the directory is moved

A crash at any moment leaves layers that no snapshot names. They are discarded when the directory is opened.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from pathlib import Path

import msgspec

from rollmill.errors import ConfigError, SandboxError
from rollmill.sandboxes.backends.namespaces.settings import IDS_PER_SANDBOX, LARGEST_ID
from rollmill.sandboxes.backends.namespaces.snapshot_book import Kept, Layer
from rollmill.sandboxes.disk_records import check_id, check_private
from rollmill.sandboxes.images.tree_files import write_whole
from rollmill.sandboxes.reaper import Reaper, ReaperStatistics
from rollmill.sandboxes.records import Record

MOST_BASE = LARGEST_ID - IDS_PER_SANDBOX + 1
_IDENTITY = re.compile("[0-9a-f]{16}")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Manifest(Record, frozen=True, kw_only=True):
    """What stands in a snapshot's file."""

    kept: Kept
    layers: tuple[Layer, ...]


class SnapshotDisk:
    """The snapshots of one directory. Blocks: call it in a thread, but for `path`.

    Args:
        directory: made if missing, for this user alone.

    Attributes:
        directory: as given.
        identity: the same for every process that opens it.
    """

    def __init__(self, directory: Path) -> None:
        self._layers, self._manifests = directory / "layers", directory / "snapshots"
        try:
            for one in (directory, self._layers, self._manifests):
                one.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_private(directory)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"snapshots cannot be kept in {directory}: {error}. Name another directory.") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(
                f"another provider keeps its snapshots in {directory}; each needs a directory of its own"
            ) from None
        try:
            self.directory, self.identity = directory, _identity(directory / "identity")
            self._reaper = Reaper(directory / "trash")
        except BaseException:
            os.close(self._lock)
            raise
        self._reaper.start()

    def close(self) -> None:
        """Let another provider have the directory."""
        self._reaper.close()
        os.close(self._lock)

    def trash(self) -> ReaperStatistics:
        """Return what was deleted of layers that nobody has any more."""
        return self._reaper.statistics()

    def read_all(self) -> tuple[Manifest, ...]:
        """Return the snapshots, the oldest first, and discard layers that none of them names.

        Raises:
            SandboxError: if a file is damaged.
        """
        found: list[Manifest] = []
        for path in sorted(self._manifests.glob("*.json")):
            try:
                found.append(_checked(msgspec.json.decode(path.read_bytes(), type=Manifest)))
            except (msgspec.MsgspecError, ConfigError) as error:
                raise SandboxError(
                    f"the snapshot {path} is damaged: {error}. Delete the file to give the snapshot up."
                ) from error
        named = {layer.layer_id for one in found for layer in one.layers}
        for path in self._manifests.glob(".*"):
            path.unlink()  # half of a file: the lock is ours, so nobody writes it
        for path in self._layers.iterdir():
            if path.name not in named:
                self._reaper.discard(path)
        return tuple(sorted(found, key=lambda one: one.kept.ref.created_wall_s))

    def path(self, layer_id: str) -> str:
        """Return where a layer is."""
        return str(self._layers / layer_id)

    def begin(self, layer_id: str) -> str:
        """Return a directory to copy a layer into."""
        path = self._layers / f"{layer_id}.part"
        path.mkdir(mode=0o755)
        return str(path)

    def finish(self, layer_id: str) -> None:
        """Give a layer that was copied whole its name."""
        (self._layers / f"{layer_id}.part").rename(self._layers / layer_id)
        _sync(self._layers)

    def give_up(self, layer_id: str) -> None:
        """Discard what was copied so far."""
        self._reaper.discard(self._layers / f"{layer_id}.part")

    def write(self, manifest: Manifest) -> None:
        """Write a snapshot's file; after this the snapshot outlives this process."""
        path = self._manifests / f"{check_id(manifest.kept.ref.snapshot_id)}.json"
        write_whole(path, msgspec.json.encode(manifest), durable=True)

    def remove(self, snapshot_id: str) -> None:
        """Remove a snapshot's file; its layers go when nobody has them."""
        (self._manifests / f"{check_id(snapshot_id)}.json").unlink(missing_ok=True)
        _sync(self._manifests)

    def discard(self, layer_id: str) -> None:
        """Let go of a layer. A sandbox that is above it must have ended."""
        self._reaper.discard(self._layers / layer_id)


def _identity(path: Path) -> str:
    try:
        if not path.exists():
            write_whole(path, secrets.token_hex(8).encode(), durable=True)
        found = path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"snapshots cannot be kept in {path.parent}: {error}. Make room, or name another directory."
        ) from error
    if not _IDENTITY.fullmatch(found):
        raise ConfigError(f"{path} is damaged: {found[:40]!r} is no identity. Delete the file; another one is made.")
    return found


def _checked(manifest: Manifest) -> Manifest:
    """Return a manifest that leads to nothing but layers of this directory, and gives no ids but a sandbox's."""
    names = {check_id(one.layer_id) for one in manifest.layers if one.on_disk}
    check_id(manifest.kept.ref.snapshot_id)
    if not manifest.kept.chain or not set(manifest.kept.chain) <= names:
        raise ConfigError(f"it stands on {list(manifest.kept.chain)}, and describes {sorted(names)}")
    id_base = manifest.kept.id_base
    if (id_base is None) == (os.geteuid() == 0) or (
        id_base is not None and not IDS_PER_SANDBOX <= id_base <= MOST_BASE
    ):
        raise ConfigError(f"its files belong to the ids from {id_base} on, which are no sandbox's here")
    return manifest


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, _DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
