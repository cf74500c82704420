"""Archives, layouts and stores for tests of the image store. Honest archives are the standard library's work."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rollmill.sandboxes.images import ImageLimits, ImageStore, ImageStoreSettings, StoredImage
from rollmill.sandboxes.images.entries import Entry, Kind
from rollmill.sandboxes.images.layers import ArchiveLayer
from rollmill.sandboxes.images.sources import add_source
from rollmill.sandboxes.images.tar_format import END, encode_header
from rollmill.sandboxes.images.work import Work

Member = tuple[str, bytes | None, dict[str, Any]]


def file(name: str, data: bytes = b"", **fields: Any) -> Member:
    """A regular file, or what `type` says."""
    return name, data, fields


def directory(name: str, **fields: Any) -> Member:
    return name, None, {"type": tarfile.DIRTYPE, "mode": 0o755, **fields}


def link(name: str, target: str, **fields: Any) -> Member:
    return name, None, {"type": tarfile.SYMTYPE, "linkname": target, **fields}


def hard_link(name: str, target: str) -> Member:
    return name, None, {"type": tarfile.LNKTYPE, "linkname": target}


def device(name: str, *, kind: bytes = tarfile.CHRTYPE, major: int = 1, minor: int = 3) -> Member:
    return name, None, {"type": kind, "devmajor": major, "devminor": minor}


def tar(*members: Member, format: int = tarfile.PAX_FORMAT) -> bytes:
    """Pack members as they are given, names included."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for name, data, fields in members:
            info = tarfile.TarInfo(name)
            for field, value in fields.items():
                setattr(info, field, value)
            info.size = len(data or b"")
            archive.addfile(info, io.BytesIO(data or b""))
    return out.getvalue()


def raw_tar(entries: Iterable[tuple[Entry, bytes]]) -> bytes:
    """Pack entries by our own writer, for names that the standard library would change."""
    out = b"".join(encode_header(entry) + data + bytes(-len(data) % 512) for entry, data in entries)
    return out + END


def raw_file(path: bytes, data: bytes = b"", **fields: Any) -> tuple[Entry, bytes]:
    return Entry(path=path, kind=Kind.FILE, size=len(data), **fields), data


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def new_store(directory: Path, **settings: Any) -> ImageStore:
    """A store that does not wait for the disk."""
    return ImageStore(ImageStoreSettings(directory=directory, **{"durable": False, "form": "tree", **settings}))


def new_work(store: ImageStore, **options: Any) -> Work:
    return Work(store.settings.limits, **options)


def archive_layer(data: bytes, **options: Any) -> ArchiveLayer:
    return ArchiveLayer(lambda: nullcontext(io.BytesIO(data)), **{"what": "a layer", **options})


def add_tars(store: ImageStore, *layers: bytes, name: str = "image", base: str | None = None) -> StoredImage:
    """Make an image of layers, the lowest first."""
    sources = [archive_layer(data) for data in layers]
    return store.add_image(sources, name=name, source="test", work=new_work(store), base=base)


def add(store: ImageStore, source: Path | str, *, name: str = "image", **options: Any) -> StoredImage:
    return add_source(store, str(source), name=name, work=new_work(store), **options)


def trees(store: ImageStore, ref: str = "image") -> list[Path]:
    """The directories of an image's layers, the lowest first."""
    with store.hold(ref, what="test") as held:
        return list(reversed(held.layers))


class Layout:
    """An OCI layout in memory, honest unless something is changed before it is written."""

    def __init__(self, *layers: bytes, packed: bool = True, architecture: str = "", config: Any = None) -> None:
        self.blobs: dict[str, bytes] = {}
        stored = [gzip.compress(one, mtime=0) if packed else one for one in layers]
        media = "application/vnd.oci.image.layer.v1.tar" + ("+gzip" if packed else "")
        self.config: dict[str, Any] = {
            "architecture": architecture,
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": [digest_of(one) for one in layers]},
            "config": config,
        }
        self.manifest: dict[str, Any] = {
            "schemaVersion": 2,
            "layers": [{"mediaType": media, **self.blob(one)} for one in stored],
        }
        self.entries: list[dict[str, Any]] = []

    def blob(self, data: bytes) -> dict[str, Any]:
        self.blobs[digest_of(data)] = data
        return {"digest": digest_of(data), "size": len(data)}

    def index(self) -> bytes:
        config = json.dumps(self.config).encode()
        media = "application/vnd.oci.image.config.v1+json"
        manifest = {**self.manifest, "config": {"mediaType": media, **self.blob(config)}}
        media = "application/vnd.oci.image.manifest.v1+json"
        entry = {"mediaType": media, **self.blob(json.dumps(manifest).encode())}
        return json.dumps({"schemaVersion": 2, "manifests": self.entries or [entry]}).encode()

    def files(self) -> dict[str, bytes]:
        index = self.index()
        blobs = {f"blobs/{digest.replace(':', '/')}": data for digest, data in self.blobs.items()}
        return {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": index, **blobs}

    def write(self, directory: Path) -> Path:
        for name, data in self.files().items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return directory

    def archive(self) -> bytes:
        return tar(*(file(name, data) for name, data in self.files().items()))


def small(**limits: Any) -> ImageLimits:
    return ImageLimits(**limits)


def small_root(directory: Path, *, programs: Iterable[str]) -> Path:
    """Make a root file system of a few programs of the host with their libraries."""
    (directory / "usr/bin").mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (directory / "usr" / name).mkdir(exist_ok=True)
        (directory / name).symlink_to(f"usr/{name}")
    for name in programs:
        program = shutil.which(name)
        assert program is not None
        shutil.copy(os.path.realpath(program), directory / "usr/bin" / name)
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+)", listed):
            target = directory / "usr" / library.lstrip("/").removeprefix("usr/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(os.path.realpath(library), target)
    return directory
