"""A directory as entries in a fixed order, and the digest that names a tree whatever made it.

Nothing of the machine is in it: no inode numbers, no times of access, no order of a directory. Hard links are told from
copies, and reading goes by descriptors, so that a directory that changes underneath leads nowhere else.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from rollmill.sandboxes.images import tree_files
from rollmill.sandboxes.images.entries import WHITEOUT, Entry, Kind
from rollmill.sandboxes.images.objects import Attributes, Seal, seal_line
from rollmill.sandboxes.images.refusals import Refusal, refused, shown
from rollmill.sandboxes.images.tar_format import BLOCK, END, ByteSource, encode_header

OPAQUE_ATTRIBUTE = b"user.overlay.opaque"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHUNK = 1024**2
_NODES = {
    stat.S_IFIFO: Kind.FIFO,
    stat.S_IFCHR: Kind.CHARACTER_DEVICE,
    stat.S_IFBLK: Kind.BLOCK_DEVICE,
}


class FileContent:
    """The content of a file, which must have the size that was announced."""

    def __init__(self, descriptor: int, size: int, *, path: bytes) -> None:
        self._descriptor = descriptor
        self._left = size
        self._path = path

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes, none at the end.

        Raises:
            ImageError: if the file became shorter or longer meanwhile.
        """
        data = os.read(self._descriptor, min(size, self._left)) if self._left else b""
        self._left -= len(data)
        if (not data and self._left) or (not self._left and not data and os.read(self._descriptor, 1)):
            what = f"{shown(self._path)} changed its size while it was read; stop what writes to the directory"
            raise refused(Refusal.CHANGED, what)
        return data


class _Nothing:
    def read(self, size: int, /) -> bytes:
        return b""


NOTHING = _Nothing()
Item = tuple[Entry, ByteSource]


class CanonicalDigest:
    """The sha256 of the canonical archive, from the entries as they pass by."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def begin(self, entry: Entry) -> None:
        """Take a header in."""
        self._hash.update(encode_header(entry))

    def content(self, data: bytes) -> None:
        """Take content in."""
        self._hash.update(data)

    def end(self, entry: Entry) -> None:
        """Pad the content that came."""
        self._hash.update(bytes(-entry.size % BLOCK))

    def digest(self) -> str:
        """Return `sha256:` and the digest, as if the archive ended here."""
        whole = self._hash.copy()
        whole.update(END)
        return f"sha256:{whole.hexdigest()}"


def walk(
    directory: Path, *, overlay: bool = False, first_id: int = 0, skipped: list[bytes] | None = None
) -> Iterator[Item]:
    """Yield the entries of a directory, sorted by name, each before what lies in it.

    Args:
        directory: its root; other file systems that are mounted in it are refused.
        overlay: the directory is an upper layer: its whiteouts are told in OCI's form.
        first_id: what a sandbox's owner 0 is in this directory.
        skipped: takes the names of sockets, which are running processes' and mean nothing in an image.

    Raises:
        ImageError: if it changes meanwhile, or holds a name that layers cannot.
    """
    root = tree_files.open_root(directory)
    try:
        passed_over: list[bytes] = [] if skipped is None else skipped
        device = os.fstat(root).st_dev
        walker = _Walker(device=device, overlay=overlay, first_id=first_id, skipped=passed_over)
        yield from walker.directory(root, b"./")
    finally:
        os.close(root)


class _Walker:
    def __init__(self, *, device: int, overlay: bool, first_id: int, skipped: list[bytes]) -> None:
        self._skipped = skipped
        self._device = device
        self._overlay = overlay
        self._first_id = first_id
        self._linked: dict[int, bytes] = {}

    def directory(self, here: int, path: bytes) -> Iterator[Item]:
        told = os.fstat(here)
        if told.st_dev != self._device:
            raise refused(Refusal.MACHINE, f"another file system is mounted at {shown(path)}; unmount it, or leave it")
        xattrs = _attributes(here)
        opaque = self._overlay and (OPAQUE_ATTRIBUTE, b"y") in xattrs
        if self._overlay:
            xattrs = tuple(one for one in xattrs if not one[0].startswith(b"user.overlay."))
        yield self._entry(path, Kind.DIRECTORY, told, xattrs=xattrs), NOTHING
        prefix = b"" if path == b"./" else path + b"/"
        if opaque:
            yield Entry(path=prefix + b".wh..wh..opq", kind=Kind.FILE, mode=0o600), NOTHING
        for name in sorted(os.fsencode(one) for one in os.listdir(here)):
            if name.startswith(WHITEOUT):
                raise refused(Refusal.NAME, f"{shown(prefix + name)} has a name that hides others in a layer")
            yield from self._one(here, name, prefix)

    def _one(self, above: int, name: bytes, prefix: bytes) -> Iterator[Item]:
        path = prefix + name
        told = os.stat(name, dir_fd=above, follow_symlinks=False)
        kind = stat.S_IFMT(told.st_mode)
        if kind == stat.S_IFDIR:
            here = os.open(name, _DIRECTORY, dir_fd=above)
            try:
                yield from self.directory(here, path)
            finally:
                os.close(here)
        elif kind == stat.S_IFREG:
            yield from self._file(above, name, path)
        elif kind == stat.S_IFLNK:
            target = os.fsencode(os.readlink(name, dir_fd=above))
            yield self._entry(path, Kind.SYMBOLIC_LINK, told, link=target), NOTHING
        elif self._overlay and kind == stat.S_IFCHR and told.st_rdev == 0:
            yield Entry(path=prefix + WHITEOUT + name, kind=Kind.FILE, mode=0o600), NOTHING
        elif kind in _NODES:
            yield self._entry(path, _NODES[kind], told), NOTHING
        else:
            self._skipped.append(path)

    def _file(self, above: int, name: bytes, path: bytes) -> Iterator[Item]:
        descriptor = os.open(name, _FILE, dir_fd=above)
        try:
            told = os.fstat(descriptor)
            if not stat.S_ISREG(told.st_mode):
                raise refused(Refusal.CHANGED, f"{shown(path)} was exchanged while it was read")
            if told.st_nlink > 1 and (first := self._linked.setdefault(told.st_ino, path)) != path:
                yield self._entry(path, Kind.HARD_LINK, told, link=first), NOTHING
                return
            entry = self._entry(path, Kind.FILE, told, xattrs=_attributes(descriptor), size=told.st_size)
            yield entry, FileContent(descriptor, told.st_size, path=path)
        finally:
            os.close(descriptor)

    def _entry(
        self,
        path: bytes,
        kind: Kind,
        told: os.stat_result,
        *,
        link: bytes = b"",
        size: int = 0,
        xattrs: Attributes = (),
    ) -> Entry:
        return Entry(
            path=path,
            kind=kind,
            mode=0o777 if kind is Kind.SYMBOLIC_LINK else stat.S_IMODE(told.st_mode),
            uid=max(0, told.st_uid - self._first_id),
            gid=max(0, told.st_gid - self._first_id),
            mtime_ns=told.st_mtime_ns,
            link=link,
            size=size,
            xattrs=xattrs,
            device=(os.major(told.st_rdev), os.minor(told.st_rdev)) if kind in _NODES.values() else (0, 0),
        )


def _attributes(descriptor: int, *, prefix: str = "") -> Attributes:
    found = (name for name in os.listxattr(descriptor) if not name.startswith("system."))
    names = [name for name in found if name.startswith(prefix)]
    return tuple(sorted((os.fsencode(name), os.getxattr(descriptor, name)) for name in names))


def seal_of(directory: Path, *, owners: bool) -> str:
    """Return the seal of an unpacked layer, from what is on the disk now."""
    root = tree_files.open_root(directory)
    try:
        sealer = _Sealer(owners=owners)
        sealer.directory(root, b"")
    finally:
        os.close(root)
    return sealer.seal.text()


class _Sealer:
    def __init__(self, *, owners: bool) -> None:
        self.seal = Seal()
        self._owners = owners
        self._linked: dict[int, tuple[bytes, Attributes]] = {}

    def directory(self, here: int, path: bytes) -> None:
        self._add(path, os.fstat(here), xattrs=_attributes(here, prefix="user."))
        for one in os.listdir(here):
            name = os.fsencode(one)
            below = path + b"/" + name if path else name
            told = os.stat(name, dir_fd=here, follow_symlinks=False)
            if stat.S_ISDIR(told.st_mode):
                descriptor = os.open(name, _DIRECTORY, dir_fd=here)
                try:
                    self.directory(descriptor, below)
                finally:
                    os.close(descriptor)
                continue
            content, xattrs = self._inside(here, name, told)
            self._add(below, told, content=content, xattrs=xattrs)

    def _inside(self, here: int, name: bytes, told: os.stat_result) -> tuple[bytes, Attributes]:
        """Return what is in a file; one of several links is read once."""
        if told.st_nlink == 1:
            return sealed(here, name, told)
        if told.st_ino not in self._linked:
            self._linked[told.st_ino] = sealed(here, name, told)
        return self._linked[told.st_ino]

    def _add(self, path: bytes, told: os.stat_result, *, content: bytes = b"", xattrs: Attributes = ()) -> None:
        self.seal.add(seal_line(path, told, owners=self._owners, content=content, xattrs=xattrs))


def sealed(above: int, name: bytes, told: os.stat_result) -> tuple[bytes, Attributes]:
    """Return what a seal says of the inside of an entry that is no directory: its content, and its attributes."""
    if stat.S_ISLNK(told.st_mode):
        return os.fsencode(os.readlink(name, dir_fd=above)), ()
    if not stat.S_ISREG(told.st_mode):
        return b"", ()
    descriptor = os.open(name, _FILE, dir_fd=above)
    try:
        digest = hashlib.sha256()
        while data := os.read(descriptor, _CHUNK):
            digest.update(data)
        return digest.digest(), _attributes(descriptor, prefix="user.")
    finally:
        os.close(descriptor)
