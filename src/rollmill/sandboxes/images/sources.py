"""What an image can be made from: tells apart what was given, and turns it into layers.

a directory          its files, as they are
OCI layout           a directory or tar with index.json
docker save          a tar with manifest.json
a tar                of a root file system, such as `docker export` writes
debian:SUITE         a bootstrap by mmdebstrap or debootstrap
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rollmill.sandboxes.images import debian
from rollmill.sandboxes.images.canonical import walk
from rollmill.sandboxes.images.compression import unpacked
from rollmill.sandboxes.images.layers import ArchiveLayer, LayerSource, TreeLayer
from rollmill.sandboxes.images.oci import (
    INDEX_FILE,
    LAYOUT_FILE,
    ArchiveBlobs,
    DirectoryBlobs,
    is_image,
    read_image,
)
from rollmill.sandboxes.images.records import ImageConfig, StoredImage
from rollmill.sandboxes.images.refusals import Refusal, refused
from rollmill.sandboxes.images.store import ImageStore
from rollmill.sandboxes.images.work import Work

_CHUNK = 1024**2
_DEBIAN = "debian:"


class SourceKind(enum.Enum):
    """What a source is."""

    AUTO = "auto"
    DIRECTORY = "directory"
    IMAGE = "image"
    ARCHIVE = "archive"
    DEBIAN = "debian"


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    layers: tuple[LayerSource, ...]
    config: ImageConfig = ImageConfig()


def add_source(
    store: ImageStore,
    source: str,
    *,
    name: str,
    work: Work,
    kind: SourceKind = SourceKind.AUTO,
    ref: str | None = None,
) -> StoredImage:
    """Make an image of a source and name it. Blocks.

    Args:
        store: where to.
        source: a path, or `debian:SUITE`.
        name: of the image; what had it before loses it.
        work: bounds.
        kind: what the source is; found out unless given.
        ref: which image of a layout, where it holds several.

    Raises:
        ImageError: if the source is none, or is refused.
    """
    with (
        store.explained(f"prepare {source!r}"),
        store.layout.scratch() as scratch,
        _opened(source, kind, ref=ref, scratch=scratch, work=work) as found,
    ):
        return store.add_image(found.layers, name=name, source=source, work=work, config=found.config)


@contextmanager
def _opened(source: str, kind: SourceKind, *, ref: str | None, scratch: Path, work: Work) -> Iterator[_Found]:
    if kind is SourceKind.DEBIAN or (kind is SourceKind.AUTO and source.startswith(_DEBIAN)):
        archive = debian.bootstrap(source.removeprefix(_DEBIAN), scratch=scratch, work=work)
        yield _Found(layers=(_one_archive(archive),))
        return
    path = Path(source)
    if path.is_dir():
        yield _from_directory(path, kind, ref=ref, work=work)
    elif path.is_file():
        yield _from_file(path, kind, ref=ref, scratch=scratch, work=work)
    else:
        what = f"{source!r} is no file or directory here, no image of the store, and not debian:SUITE"
        raise refused(Refusal.UNKNOWN, f"{what}; images are made from what is on this machine")


def _from_directory(path: Path, kind: SourceKind, *, ref: str | None, work: Work) -> _Found:
    blobs = DirectoryBlobs(path)
    looks_like_image = (path / LAYOUT_FILE).is_file() and (path / INDEX_FILE).is_file()
    if kind is SourceKind.IMAGE or (kind is SourceKind.AUTO and looks_like_image):
        image = read_image(blobs, ref=ref, limits=work.limits)
        return _Found(layers=image.layers, config=image.config)
    if kind is SourceKind.ARCHIVE:
        raise refused(Refusal.UNKNOWN, f"{str(path)!r} is a directory and no archive")
    skipped: list[bytes] = []
    return _Found(layers=(TreeLayer(lambda: walk(path, skipped=skipped), what=str(path), skipped=skipped),))


def _from_file(path: Path, kind: SourceKind, *, ref: str | None, scratch: Path, work: Work) -> _Found:
    if kind is SourceKind.DIRECTORY:
        raise refused(Refusal.UNKNOWN, f"{str(path)!r} is a file and no directory")
    if kind is SourceKind.ARCHIVE:
        return _Found(layers=(_one_archive(path),))
    plain = _plain(path, scratch=scratch, work=work)
    blobs = ArchiveBlobs(plain)
    if kind is SourceKind.IMAGE or is_image(blobs):
        image = read_image(blobs, ref=ref, limits=work.limits)
        return _Found(layers=image.layers, config=image.config)
    return _Found(layers=(_one_archive(plain),))


def _one_archive(path: Path) -> ArchiveLayer:
    return ArchiveLayer(lambda: path.open("rb"), what=path.name)


def _plain(path: Path, *, scratch: Path, work: Work) -> Path:
    """Return the archive unpacked, so that its parts can be found: itself, if it is plain."""
    with path.open("rb") as stored:
        start = stored.read(6)
    if not start.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return path
    work.enter(f"unpack {path.name}")
    target = scratch / "plain.tar"
    most = work.limits.total_bytes
    with path.open("rb") as stored, unpacked(stored, ratio=work.limits.ratio) as inside, target.open("xb") as out:
        while data := inside.read(_CHUNK):
            work.check()
            if out.tell() + len(data) > most:
                raise refused(Refusal.TOO_LARGE, f"{path.name} unpacks to more than {most} bytes (limits.total_bytes)")
            out.write(data)
    return target
