"""Images in OCI's layout, as a directory or archive, and archives of `docker save`: documents in, layers out.

Documents are untrusted: bounded, typed, and proven by their digests before they are read. Blobs are found by the digest
alone; no name of an image ever becomes a path outside it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import msgspec

from rollmill.sandboxes.images import tree_files
from rollmill.sandboxes.images.entries import Kind, split_path
from rollmill.sandboxes.images.layers import ArchiveLayer
from rollmill.sandboxes.images.records import ImageConfig, is_digest
from rollmill.sandboxes.images.refusals import Refusal, refused
from rollmill.sandboxes.images.tar_format import ByteSource, TarReader
from rollmill.sandboxes.images.work import ImageLimits

LAYOUT_FILE, INDEX_FILE, DOCKER_FILE = "oci-layout", "index.json", "manifest.json"
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_LAYERS = (
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
)
_REF_NAMES = ("org.opencontainers.image.ref.name", "io.containerd.image.name")
_ATTESTATION = "vnd.docker.reference.type"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_MOST_INDEXED = 20_000
_MOST_NESTING = 4
_MOST_LINKS = 8

T = TypeVar("T")


class Blobs(Protocol):
    """Files of an image by their names in it."""

    def size(self, name: str) -> int | None:
        """Return the size of a file, `None` if it is not there."""
        ...

    def open(self, name: str) -> AbstractContextManager[ByteSource]:
        """Open a file that is there."""
        ...


class DirectoryBlobs:
    """Files below a directory; links are not followed.

    Args:
        directory: the layout.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def size(self, name: str) -> int | None:
        """Return the size of a file, `None` if it is not there."""
        try:
            with self._opened(name) as stream:
                return os.fstat(stream.fileno()).st_size
        except FileNotFoundError:
            return None

    def open(self, name: str) -> AbstractContextManager[ByteSource]:
        """Open a file that is there."""
        return self._opened(name)

    @contextmanager
    def _opened(self, name: str) -> Iterator[IO[bytes]]:
        parts = split_path(name.encode(), what="blob's name")
        root = tree_files.open_root(self._directory)
        try:
            above = tree_files.open_beneath(root, parts[:-1])
        finally:
            os.close(root)
        try:
            descriptor = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=above)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            what = f"{name} in {self._directory} is a link, and links of a layout are not followed"
            raise refused(Refusal.TRAVERSAL, what) from error
        finally:
            os.close(above)
        with open(descriptor, "rb") as stream:
            yield stream


class ArchiveBlobs:
    """Files in an archive that is not unpacked: where each begins is noted once.

    Args:
        path: a plain tar.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        with path.open("rb") as stream:
            self._note_all(stream)

    def _note_all(self, stream: IO[bytes]) -> None:
        whole = os.fstat(stream.fileno()).st_size

        def skip(count: int) -> bool:
            return stream.seek(count, os.SEEK_CUR) <= whole

        reader = TarReader(stream, skip=skip)
        for entry, _ in reader:
            name = b"/".join(split_path(entry.path)).decode("utf-8", "backslashreplace")
            if not _of_an_image(name):
                continue
            if len(self._places) + len(self._links) >= _MOST_INDEXED:
                what = f"the archive {self._path} has more than {_MOST_INDEXED} blobs"
                raise refused(Refusal.TOO_MANY, what)
            if entry.kind is Kind.FILE:
                if name in self._places:
                    raise refused(Refusal.DUPLICATE, f"{name!r} is in the archive {self._path} twice")
                self._places[name] = (reader.offset, entry.size)
            elif entry.kind in (Kind.SYMBOLIC_LINK, Kind.HARD_LINK):
                self._links[name] = _target(name, entry.link, symbolic=entry.kind is Kind.SYMBOLIC_LINK)

    def _place(self, name: str) -> tuple[int, int] | None:
        for _ in range(_MOST_LINKS):
            if name not in self._links:
                break
            name = self._links[name]
        return self._places.get(name)

    def size(self, name: str) -> int | None:
        """Return the size of a file, `None` if it is not there."""
        place = self._place(name)
        return None if place is None else place[1]

    @contextmanager
    def open(self, name: str) -> Iterator[ByteSource]:
        """Open a file that is there."""
        place = self._place(name)
        if place is None:
            raise FileNotFoundError(name)
        with self._path.open("rb") as stream:
            stream.seek(place[0])
            yield _Slice(stream, place[1])


class _Slice:
    def __init__(self, stream: IO[bytes], size: int) -> None:
        self._stream = stream
        self._left = size

    def read(self, size: int, /) -> bytes:
        data = self._stream.read(min(size, self._left))
        self._left -= len(data)
        return data


def _of_an_image(name: str) -> bool:
    return name in (LAYOUT_FILE, INDEX_FILE, DOCKER_FILE) or name.endswith((".json", ".tar")) or "blobs/" in name


def _target(name: str, link: bytes, *, symbolic: bool) -> str:
    """Return what a link in an archive points to; old `docker save` writes a layer once and links to it."""
    text = link.decode("utf-8", "backslashreplace")
    parts = name.split("/")[:-1] if symbolic else []
    for part in text.split("/"):
        if part == ".." and parts:
            parts.pop()
        elif part == "..":
            raise refused(Refusal.TRAVERSAL, f"the link {name!r} in the archive leads out of it, to {text!r}")
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts)


# -- documents --------------------------------------------------------------------------------------------------------


class _Platform(msgspec.Struct):
    os: str = ""
    architecture: str = ""


class _Descriptor(msgspec.Struct, rename="camel"):
    digest: str
    size: int
    media_type: str = ""
    annotations: dict[str, str] | None = None
    platform: _Platform | None = None


class _Index(msgspec.Struct):
    manifests: list[_Descriptor]


class _Manifest(msgspec.Struct):
    config: _Descriptor
    layers: list[_Descriptor]


class _RootFiles(msgspec.Struct):
    diff_ids: list[str] | None = None


class _Run(msgspec.Struct, rename="pascal"):
    env: list[str] | None = None
    working_dir: str | None = None
    user: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None


class _Config(msgspec.Struct):
    rootfs: _RootFiles
    os: str = ""
    architecture: str = ""
    config: _Run | None = None


class _DockerImage(msgspec.Struct, rename="pascal"):
    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


class OciImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image whose documents hold together.

    Attributes:
        layers: the lowest first.
        config: what it says of its programs.
    """

    layers: tuple[ArchiveLayer, ...]
    config: ImageConfig


def is_image(blobs: Blobs) -> bool:
    """Return whether these files are an image, rather than a root file system."""
    return blobs.size(DOCKER_FILE) is not None or (
        blobs.size(LAYOUT_FILE) is not None and blobs.size(INDEX_FILE) is not None
    )


def read_image(blobs: Blobs, *, ref: str | None, limits: ImageLimits) -> OciImage:
    """Return the image that a layout holds.

    Args:
        blobs: its files.
        ref: which one, where there are several.
        limits: what its documents may take.

    Raises:
        ImageError: if there is none, several, or one that contradicts itself.
    """
    if blobs.size(INDEX_FILE) is not None:
        return _Layout(blobs, limits).image(ref)
    return _from_docker(blobs, ref, limits)


class _Layout:
    def __init__(self, blobs: Blobs, limits: ImageLimits) -> None:
        self._blobs = blobs
        self._limits = limits

    def image(self, ref: str | None) -> OciImage:
        index = _decoded(_document(self._blobs, INDEX_FILE, self._limits), _Index, INDEX_FILE)
        manifest = self._read(self._choose(index.manifests, ref), _Manifest)
        for layer in manifest.layers:
            if layer.media_type not in _LAYERS:
                what = f"a layer of the image has the type {layer.media_type!r}; readable are {', '.join(_LAYERS)}"
                raise refused(Refusal.MEDIA_TYPE, what)
        config = self._read(manifest.config, _Config)
        stored = [(_blob(one.digest), one.digest, one.size) for one in manifest.layers]
        return _assembled(self._blobs, stored, config, self._limits)

    def _choose(self, candidates: list[_Descriptor], ref: str | None, *, depth: int = 0) -> _Descriptor:
        """Return the one manifest that is meant, through indexes of platforms."""
        if depth > _MOST_NESTING:
            raise refused(Refusal.MALFORMED, f"the image's indexes are nested more than {_MOST_NESTING} deep")
        fitting = [one for one in candidates if _ATTESTATION not in (one.annotations or {})]
        if ref is not None and depth == 0:
            fitting = [one for one in fitting if _is_named(one, ref)]
        if len(fitting) > 1:
            here = [one for one in fitting if _runs_here(one.platform)]
            fitting = here or fitting
        if len(fitting) != 1:
            known = ", ".join(sorted(filter(None, map(_words, candidates)))) or "none has a name"
            what = f"{len(fitting)} images of the layout fit the reference {ref!r}" if ref else ""
            what = what or f"the layout holds {len(fitting)} images for this machine"
            raise refused(Refusal.UNKNOWN, f"{what}; say which with --ref: {known}")
        (chosen,) = fitting
        if chosen.media_type in _INDEXES:
            return self._choose(self._read(chosen, _Index).manifests, None, depth=depth + 1)
        if chosen.media_type and chosen.media_type not in _MANIFESTS:
            raise refused(Refusal.MEDIA_TYPE, f"the layout's entry has the type {chosen.media_type!r}: no image")
        return chosen

    def _read(self, descriptor: _Descriptor, kind: type[T]) -> T:
        name = _blob(descriptor.digest)
        data = _document(self._blobs, name, self._limits)
        found = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if found != descriptor.digest or len(data) != descriptor.size:
            what = f"the document {name} has {len(data)} bytes and the digest {found}"
            raise refused(Refusal.DIGEST, f"{what}; it should have {descriptor.size} and {descriptor.digest}")
        return _decoded(data, kind, name)


def _words(one: _Descriptor) -> str:
    names = [(one.annotations or {}).get(key, "") for key in _REF_NAMES]
    name = next(filter(None, names), "")
    return name or ("" if one.platform is None else f"{one.platform.os}/{one.platform.architecture}")


def _is_named(one: _Descriptor, ref: str) -> bool:
    names = [(one.annotations or {}).get(key, "") for key in _REF_NAMES]
    return one.digest == ref or any(name == ref or name.endswith(f"/{ref}") for name in names if name)


def _runs_here(one: _Platform | None) -> bool:
    machine = platform.machine()
    return one is not None and one.os == "linux" and one.architecture == _MACHINES.get(machine, machine)


def _from_docker(blobs: Blobs, ref: str | None, limits: ImageLimits) -> OciImage:
    images = _decoded(_document(blobs, DOCKER_FILE, limits), list[_DockerImage], DOCKER_FILE)
    fitting = [one for one in images if ref is None or ref in (one.repo_tags or ())]
    if len(fitting) != 1:
        known = ", ".join(sorted(tag for one in images for tag in one.repo_tags or ())) or "none has a tag"
        what = f"{len(fitting)} images of the archive fit the reference {ref!r}"
        raise refused(Refusal.UNKNOWN, f"{what}; say which with --ref: {known}")
    (chosen,) = fitting
    config = _decoded(_document(blobs, chosen.config, limits), _Config, chosen.config)
    stored: list[tuple[str, str | None, int | None]] = [(name, None, None) for name in chosen.layers]
    return _assembled(blobs, stored, config, limits)


def _assembled(blobs: Blobs, stored: Any, config: _Config, limits: ImageLimits) -> OciImage:
    """Match layers with the digests of their content, and see that they are there."""
    contents = config.rootfs.diff_ids or []
    if len(contents) != len(stored):
        what = f"the image has {len(stored)} layers and its configuration names {len(contents)}"
        raise refused(Refusal.MALFORMED, what)
    if len(contents) > limits.layers:
        raise refused(
            Refusal.TOO_MANY, f"the image has {len(contents)} layers, most is {limits.layers} (limits.layers)"
        )
    if config.os not in ("", "linux") or (
        config.architecture and not _runs_here(_Platform("linux", config.architecture))
    ):
        what = f"the image is for {config.os}/{config.architecture}, this machine is linux/{platform.machine()}"
        raise refused(Refusal.MEDIA_TYPE, what)
    layers: list[ArchiveLayer] = []
    for number, ((name, packed, size), content) in enumerate(zip(stored, contents, strict=True), start=1):
        if not is_digest(content):
            raise refused(Refusal.MALFORMED, f"layer {number} of the image has the digest {content!r}: no sha256")
        there = blobs.size(name)
        if there is None:
            raise refused(
                Refusal.TRUNCATED, f"layer {number} of the image, {name}, is not there; was the copy cut off?"
            )
        if size is not None and there != size:
            raise refused(Refusal.DIGEST, f"layer {number} of the image, {name}, has {there} bytes and not {size}")
        what = f"layer {number} of {len(contents)}"
        layers.append(ArchiveLayer(_opener(blobs, name), what=what, content=content, packed=packed, packed_bytes=size))
    return OciImage(layers=tuple(layers), config=_told(config.config))


def _opener(blobs: Blobs, name: str) -> Callable[[], AbstractContextManager[ByteSource]]:
    return lambda: blobs.open(name)


def _told(run: _Run | None) -> ImageConfig:
    if run is None:
        return ImageConfig()
    return ImageConfig(
        env=tuple(run.env or ()),
        workdir=run.working_dir or "",
        user=run.user or "",
        command=(*(run.entrypoint or ()), *(run.cmd or ())),
    )


def _blob(digest: str) -> str:
    if not is_digest(digest):
        raise refused(Refusal.MALFORMED, f"the image names a blob by {digest!r}; readable is sha256: and 64 digits")
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _document(blobs: Blobs, name: str, limits: ImageLimits) -> bytes:
    size = blobs.size(name)
    if size is None:
        raise refused(Refusal.TRUNCATED, f"the document {name} of the image is not there; was the copy cut off?")
    if size > limits.document_bytes:
        what = f"the document {name} of the image has {size} bytes, most is {limits.document_bytes}"
        raise refused(Refusal.TOO_LARGE, f"{what} (limits.document_bytes)")
    with blobs.open(name) as stream:
        return stream.read(size)


def _decoded(data: bytes, kind: type[T], name: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise refused(Refusal.MALFORMED, f"the document {name} of the image cannot be read: {error}") from error
