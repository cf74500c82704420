"""Where things are in a store, and how a store that was left in the middle of something becomes whole again.

    store.json      the format
    layers/HEX/     one unpacked layer: layer.json, and root/ or layer.erofs; appears and goes by one rename
    images/HEX.json manifests, named by their digest; the time of change is that of the last use
    names/          names of images
    steps/HEX       the layer that a step of a recipe made
    objects/        files that layers share
    holds/          claims: what must not go
    mounts/         mounted layers
    tmp/            what living processes are at, named by them
    trash/          what is being removed

Nothing is ever changed in place. So the only thing that a killed process leaves is rubbish: `repair` removes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rollmill.errors import ConfigError
from rollmill.sandboxes.disk_records import ProcessMark, is_alive
from rollmill.sandboxes.images.records import FORMAT, Layer, Manifest, NameRecord, file_name, is_digest
from rollmill.sandboxes.images.refusals import Refusal, refused
from rollmill.sandboxes.images.tree_files import remove_tree, write_whole
from rollmill.sandboxes.reaper import Reaper

_PARTS = ("layers", "images", "names", "steps", "objects", "holds", "locks", "mounts", "tmp", "trash")
_STRIPES = 64


class StoreFormat(msgspec.Struct, frozen=True):
    """What `store.json` says."""

    format: int


class Layout:
    """The directory of a store.

    Args:
        directory: made if missing, for this user alone: what is unpacked there is untrusted.
        owner: this process.
    """

    def __init__(self, directory: Path, *, owner: ProcessMark) -> None:
        self.directory = directory
        self.reaper: Reaper | None = None
        self._owner = owner
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            told, above = directory.stat(), directory.parent.stat()
            for part in _PARTS:
                (directory / part).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"images cannot be kept in {directory}: {error}. Name another directory.") from error
        if told.st_uid != os.geteuid() or told.st_mode & 0o022:
            raise ConfigError(
                f"{directory} belongs to user {told.st_uid} and has mode {told.st_mode & 0o7777:o}; an image store "
                f"must be this user's ({os.geteuid()}) and writable to nobody else: whoever writes there writes images."
            )
        if above.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"{directory.parent} belongs to user {above.st_uid}, who could exchange the images in it."
            )
        self._check_format()

    def _check_format(self) -> None:
        path = self.directory / "store.json"
        try:
            told = msgspec.json.decode(path.read_bytes(), type=StoreFormat)
        except FileNotFoundError:
            self._write_format(path)
            return
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} cannot be read: {error}. Is {self.directory} an image store?") from error
        if told.format != FORMAT:
            raise ConfigError(f"{self.directory} has format {told.format}, this version reads {FORMAT}; name another")

    def _write_format(self, path: Path) -> None:
        try:
            write_whole(path, msgspec.json.encode(StoreFormat(FORMAT)), durable=False)
        except OSError as error:
            raise ConfigError(
                f"images cannot be kept in {self.directory}: {error}. Make room, or name another directory."
            ) from error

    # -- where things are --------------------------------------------------------------------------------------------

    def part(self, name: str) -> Path:
        """Return one of the store's directories."""
        return self.directory / name

    def layer(self, layer_id: str) -> Path:
        """Return where a layer is."""
        return self.directory / "layers" / layer_id.removeprefix("sha256:")

    def manifest(self, digest: str) -> Path:
        """Return where a manifest is."""
        return self.directory / "images" / f"{digest.removeprefix('sha256:')}.json"

    def name(self, name: str) -> Path:
        """Return where a name is."""
        return self.directory / "names" / file_name(name)

    def step(self, key: str) -> Path:
        """Return where the layer of a recipe's step is told."""
        return self.directory / "steps" / key.removeprefix("sha256:")

    def mount(self, layer_id: str) -> Path:
        """Return where a layer is mounted."""
        return self.directory / "mounts" / layer_id.removeprefix("sha256:")

    def stripe(self, key: str) -> Path:
        """Return the lock that preparations of one thing share; a few, since lock files are never removed."""
        return self.directory / "locks" / f"{int(key.removeprefix('sha256:')[:8], 16) % _STRIPES:02d}"

    @property
    def books(self) -> Path:
        """Return the lock of the books: shared to add, alone to remove."""
        return self.directory / "locks" / "books"

    # -- reading -----------------------------------------------------------------------------------------------------

    def read_layer(self, layer_id: str) -> Layer | None:
        """Return a layer, `None` if it is not there, or not whole."""
        try:
            layer = msgspec.json.decode((self.layer(layer_id) / "layer.json").read_bytes(), type=Layer)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return layer if layer.id == layer_id else None

    def read_manifest(self, digest: str) -> Manifest | None:
        """Return a manifest, `None` if there is none.

        Raises:
            ImageError: if it is not what its name says.
        """
        path = self.manifest(digest)
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise refused(Refusal.DAMAGED, f"the manifest {path} cannot be read: {error}. {_AGAIN}") from error
        if manifest.digest() != digest:
            raise refused(Refusal.DAMAGED, f"the manifest {path} has the digest {manifest.digest()}. {_AGAIN}")
        return manifest

    def read_name(self, name: str) -> NameRecord | None:
        """Return what a name stands for, `None` if nothing."""
        try:
            return msgspec.json.decode(self.name(name).read_bytes(), type=NameRecord)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise refused(Refusal.DAMAGED, f"the name {self.name(name)} cannot be read: {error}. {_AGAIN}") from error

    def all_names(self) -> tuple[NameRecord, ...]:
        """Return all names that can be read, in order."""
        found: list[NameRecord] = []
        for path in sorted(self.part("names").glob("[!.]*.json")):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=NameRecord))
            except (FileNotFoundError, msgspec.MsgspecError):
                continue  # went meanwhile, or says nothing: asking for it by name says so
        return tuple(found)

    def all_digests(self) -> tuple[str, ...]:
        """Return the digests of all manifests."""
        stems = sorted(path.stem for path in self.part("images").glob("*.json"))
        return tuple(digest for stem in stems if is_digest(digest := f"sha256:{stem}"))

    def all_layers(self) -> tuple[str, ...]:
        """Return the ids of all layers, whole or not."""
        return tuple(f"sha256:{entry.name}" for entry in sorted(self.part("layers").iterdir()))

    # -- rubbish -----------------------------------------------------------------------------------------------------

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Give a directory that goes at the end, or when a later process finds it."""
        path = self.part("tmp") / f"{self._owner.pid}.{self._owner.started_ticks}.{self._owner.boot_id}.{_random()}"
        path.mkdir(mode=0o700)
        try:
            yield path
        finally:
            remove_tree(path)

    def discard(self, path: Path) -> None:
        """Take something out of the store by one rename; `empty_trash` or the reaper removes it."""
        if self.reaper is not None:
            self.reaper.discard(path)
            return
        try:
            path.rename(self.part("trash") / f"{path.name}.{_random()}")
        except FileNotFoundError:
            return  # another process was quicker

    def empty_trash(self) -> int:
        """Remove what was discarded, unless a reaper does; return how many files and directories went."""
        if self.reaper is not None:
            return 0
        return sum(remove_tree(Path(entry.path)) for entry in os.scandir(self.part("trash")))

    def repair(self) -> int:
        """Remove what killed processes left in the middle of something; return how many things they were."""
        found = sum(1 for _ in os.scandir(self.part("trash")))
        for entry in os.scandir(self.part("tmp")):
            mark = _mark_of_scratch(entry.name)
            if mark is None or not is_alive(mark):
                self.discard(Path(entry.path))
                found += 1
        self.empty_trash()
        for part in ("images", "names", "steps", "holds"):
            for path in self.part(part).glob(".*"):
                if _left_alone(path):
                    path.unlink(missing_ok=True)
                    found += 1
        return found


_AGAIN = "Remove the image and prepare it again."


def _random() -> str:
    return os.urandom(6).hex()


def _mark_of_scratch(name: str) -> ProcessMark | None:
    words = name.split(".")
    if len(words) != 4 or not (words[0].isdigit() and words[1].isdigit()):
        return None
    return ProcessMark(pid=int(words[0]), started_ticks=int(words[1]), boot_id=words[2])


def _left_alone(path: Path) -> bool:
    """Return whether the process that was writing this file has ended: `.NAME.PID.RANDOM`."""
    pid = path.name.rsplit(".", 2)[-2]
    return not pid.isdigit() or not Path(f"/proc/{pid}").exists()
