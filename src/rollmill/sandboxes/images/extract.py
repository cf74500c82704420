"""From entries to a directory tree that an overlay can use as a layer.

Whatever the entries say, nothing outside the tree is touched: every name is used relative to a descriptor of a
directory of the tree, no link is followed, and nothing that is there is overwritten. OCI's whiteouts become the
overlay's own form. Modes and times of directories are set at the end, deepest first.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from rollmill.errors import ImageError
from rollmill.sandboxes.images import tree_files
from rollmill.sandboxes.images.canonical import OPAQUE_ATTRIBUTE, sealed
from rollmill.sandboxes.images.entries import (
    DEVICES,
    MOST_PATH_BYTES,
    WHITEOUT,
    Attribute,
    Entry,
    Kind,
    Marker,
    attribute_law,
    marker_of,
    split_path,
)
from rollmill.sandboxes.images.objects import Attributes, ObjectPool, Seal, object_key, seal_line
from rollmill.sandboxes.images.refusals import Refusal, refused, shown
from rollmill.sandboxes.images.work import Work
from rollmill.sandboxes.records import Record

# What a sandbox maps, and who owns what it does not.
MOST_ID, NOBODY = 65_535, 65_534
_OPAQUE = b"y"
_CHUNK = 1024**2
_BLOCK = 4096
_IMPLICIT_MODE = 0o755
_NO_DIRECTORY = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSPC, errno.E2BIG, errno.ERANGE, errno.EPERM)

Parts = tuple[bytes, ...]


class LayerFacts(Record, frozen=True, kw_only=True):
    """What is in a layer, and what of its source is not.

    Attributes:
        files: regular files, hard links among them.
        directories: directories, the root among them.
        links: symbolic links.
        whiteouts: names of lower layers that it hides, and directories whose lower content it hides.
        inodes: entries in all.
        content_bytes: content of its files.
        disk_bytes: what that takes in blocks of 4 KiB, with one for each directory.
        shared_bytes: of these, what other layers held already.
        cleared_setuid: programs whose setuid or setgid bit was taken away.
        dropped_devices: device nodes below /dev that were left out.
        dropped_sockets: sockets of a directory that were left out: they are a running process's.
        dropped_attributes: extended attributes that were left out: they have no effect in a sandbox.
        foreign_owners: entries of an owner above 65,535, given to nobody.
        foreign_markers: names of another union file system's books, left out.
    """

    files: int = 0
    directories: int = 0
    links: int = 0
    whiteouts: int = 0
    inodes: int = 0
    content_bytes: int = 0
    disk_bytes: int = 0
    shared_bytes: int = 0
    cleared_setuid: int = 0
    dropped_devices: int = 0
    dropped_sockets: int = 0
    dropped_attributes: int = 0
    foreign_owners: int = 0
    foreign_markers: int = 0


class Content(Protocol):
    """The content of a file."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes, none at the end."""
        ...


class _Counts(msgspec.Struct, kw_only=True):
    files: int = 0
    links: int = 0
    whiteouts: int = 0
    content_bytes: int = 0
    disk_bytes: int = 0
    shared_bytes: int = 0
    cleared_setuid: int = 0
    dropped_devices: int = 0
    dropped_sockets: int = 0
    dropped_attributes: int = 0
    foreign_owners: int = 0
    foreign_markers: int = 0


class Extractor:
    """Makes one tree. Use it as a context manager; `finish` completes the tree.

    Args:
        directory: an empty directory that nobody else may write to.
        work: bounds.
        pool: where equal files of other layers are; `None`: nothing is shared.
        owners: whether to set owners, which only root can.

    Attributes:
        fresh: files that later layers may share, by key.
        depends: whether the tree depends on the layers below: by directories that no entry described (but the root,
            which looks the same everywhere), or by whiteouts that hide nothing.
    """

    def __init__(self, directory: Path, *, work: Work, pool: ObjectPool | None = None, owners: bool) -> None:
        self._root = tree_files.open_root(directory)
        self._directory = directory
        self._work = work
        self._pool = pool
        self._owners = owners
        self._counts = _Counts()
        self._seal = Seal()
        self._directories: dict[Parts, Entry | None] = {(): None}
        self._hidden: list[tuple[Parts, bytes]] = []
        self._opaque: set[Parts] = set()
        self._last: tuple[Parts, int] | None = None
        self._begun_inodes = work.done_inodes
        self.fresh: dict[str, Parts] = {}
        self.depends = False
        self._used: set[str] = set()
        self._contents: dict[Parts, tuple[bytes, Attributes]] = {}

    def __enter__(self) -> Extractor:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close descriptors."""
        self._forget_last()
        os.close(self._root)

    def add(self, entry: Entry, content: Content) -> None:
        """Make one entry.

        Raises:
            ImageError: if it is refused.
        """
        parts = split_path(entry.path)
        if any(part.startswith(WHITEOUT) for part in parts[:-1]):
            raise refused(Refusal.NAME, f"{shown(entry.path)} lies in a directory whose name hides another")
        self._work.take_inode()
        if parts and (marker := marker_of(parts[-1])) is not None:
            self._note_marker(parts[:-1], *marker)
            return
        try:
            self._make(parts, entry, content)
        except FileExistsError:
            raise refused(Refusal.DUPLICATE, f"{shown(entry.path)} is in the layer twice") from None

    def _make(self, parts: Parts, entry: Entry, content: Content) -> None:
        if entry.kind is Kind.DIRECTORY:
            self._make_directory(parts, entry)
            return
        if not parts:
            raise refused(Refusal.MALFORMED, f"the root of the layer is a {entry.kind.value}, not a directory")
        if entry.kind in DEVICES:
            self._refuse_device(parts, entry)
            return
        parent = self._parent(parts[:-1], entry.path)
        if entry.kind is Kind.FILE:
            self._make_file(parent, parts, entry, content)
        elif entry.kind is Kind.SYMBOLIC_LINK:
            self._make_link(parent, parts, entry)
        elif entry.kind is Kind.HARD_LINK:
            self._make_hard_link(parent, parts, entry)
        else:
            os.mkfifo(parts[-1], 0o600, dir_fd=parent)
            self._dress(parent, parts, entry)

    # -- directories -------------------------------------------------------------------------------------------------

    def _make_directory(self, parts: Parts, entry: Entry) -> None:
        """Make a directory; one that is there is described anew, as it may come after what is in it."""
        if parts:
            parent = self._parent(parts[:-1], entry.path)
            try:
                os.mkdir(parts[-1], 0o700, dir_fd=parent)
            except FileExistsError:
                if not tree_files.is_directory(parent, parts[-1]):
                    raise
        self._directories[parts] = entry

    def _parent(self, parts: Parts, path: bytes) -> int:
        """Return a descriptor of a directory of this tree, made if it is missing; good until the next call."""
        if self._last is not None and self._last[0] == parts:
            return self._last[1]
        self._forget_last()
        try:
            descriptor = self._open(parts, path)
        except FileNotFoundError:
            self._make_implicit(parts, path)
            descriptor = self._open(parts, path)
        self._last = (parts, descriptor)
        return descriptor

    def _open(self, parts: Parts, path: bytes) -> int:
        try:
            return tree_files.open_beneath(self._root, parts)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EXDEV):
                raise
            what = f"{shown(path)} in the layer leads through a link or file of the same layer"
            raise refused(Refusal.TRAVERSAL, what) from error

    def _make_implicit(self, parts: Parts, path: bytes) -> None:
        for depth in range(1, len(parts) + 1):
            here = parts[:depth]
            if here in self._directories:
                continue
            above = self._open(here[:-1], path)
            try:
                os.mkdir(here[-1], 0o700, dir_fd=above)
            except FileExistsError:
                continue  # a file or link: opening it for what lies below is refused
            finally:
                os.close(above)
            self._work.take_inode()
            self._directories[here] = None
            self.depends = True

    def _forget_last(self) -> None:
        if self._last is not None:
            os.close(self._last[1])
            self._last = None

    # -- files -------------------------------------------------------------------------------------------------------

    def _make_file(self, parent: int, parts: Parts, entry: Entry, content: Content) -> None:
        self._work.announce_file(entry.size, name=entry.path)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(parts[-1], flags, 0o600, dir_fd=parent)
        try:
            digest = self._copy(descriptor, content)
            self._set_attributes(descriptor, entry)
            if self._owners:
                os.fchown(descriptor, *self._owner(entry))
            os.fchmod(descriptor, self._file_mode(entry))
            os.utime(descriptor, ns=(entry.mtime_ns, entry.mtime_ns))
            told = os.fstat(descriptor)
            attributes = _kept(entry)
        finally:
            os.close(descriptor)
        self._counts.files += 1
        self._counts.content_bytes += entry.size
        self._counts.disk_bytes += -(-entry.size // _BLOCK) * _BLOCK
        self._seal.add(seal_line(b"/".join(parts), told, owners=self._owners, content=digest, xattrs=attributes))
        self._contents[parts] = digest, attributes
        self._share(parent, parts, key=object_key(told, content=digest, xattrs=attributes), size=entry.size)

    def _copy(self, descriptor: int, content: Content) -> bytes:
        digest = hashlib.sha256()
        while data := content.read(_CHUNK):
            digest.update(data)
            self._work.take_bytes(len(data))
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        return digest.digest()

    def _share(self, parent: int, parts: Parts, *, key: str, size: int) -> None:
        """Put a file of another layer in the place of an equal one.

        Never twice within a layer: programs that copy trees would take two equal files for hard links of each other.
        """
        if self._pool is None or not self._pool.wants(size) or key in self._used:
            return
        self._used.add(key)
        if self._pool.replace(key, parent, parts[-1], size=size):
            self._counts.shared_bytes += size
        else:
            self.fresh[key] = parts

    def _make_link(self, parent: int, parts: Parts, entry: Entry) -> None:
        if not entry.link or b"\0" in entry.link or len(entry.link) > MOST_PATH_BYTES:
            what = f"the link {shown(entry.path)} has a target of {len(entry.link)} bytes that no link can have"
            raise refused(Refusal.NAME, f"{what}: {shown(entry.link)}")
        os.symlink(entry.link, parts[-1], dir_fd=parent)
        self._counts.links += 1
        self._dress(parent, parts, entry)

    def _make_hard_link(self, parent: int, parts: Parts, entry: Entry) -> None:
        target = split_path(entry.link, what="hard link's target")
        try:
            above = self._open(target[:-1], entry.link)
        except FileNotFoundError:
            raise self._no_target(entry) from None
        try:
            told = os.stat(target[-1] if target else b".", dir_fd=above, follow_symlinks=False)
            if not target or stat.S_ISDIR(told.st_mode):
                raise refused(Refusal.HARD_LINK, f"{shown(entry.path)} is a hard link to a directory")
            os.link(target[-1], parts[-1], src_dir_fd=above, dst_dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            raise self._no_target(entry) from None
        finally:
            os.close(above)
        self._counts.files += 1
        # Known, where the target is a file: many links to a large one must not cost a reading each.
        inside, attributes = self._contents.get(target) or sealed(parent, parts[-1], told)
        self._contents[parts] = inside, attributes
        path = b"/".join(parts)
        self._seal.add(seal_line(path, told, owners=self._owners, content=inside, xattrs=attributes))

    def _no_target(self, entry: Entry) -> ImageError:
        what = f"{shown(entry.path)} is a hard link to {shown(entry.link)}, which is not in the layer before it"
        return refused(Refusal.HARD_LINK, what)

    def _refuse_device(self, parts: Parts, entry: Entry) -> None:
        if parts[0] == b"dev" and self._work.limits.devices == "drop":
            self._counts.dropped_devices += 1
            return
        major, minor = entry.device
        what = f"{shown(entry.path)} is a {entry.kind.value} ({major}:{minor}); sandboxes have devices of their own"
        raise refused(Refusal.DEVICE, f"{what}. Leave it out of the image.")

    # -- owners, modes and attributes --------------------------------------------------------------------------------

    def _dress(self, parent: int, parts: Parts, entry: Entry) -> None:
        """Give a link or pipe its owner, mode and time."""
        name = parts[-1]
        if self._owners:
            uid, gid = self._owner(entry)
            os.chown(name, uid, gid, dir_fd=parent, follow_symlinks=False)
        if entry.kind is not Kind.SYMBOLIC_LINK:
            os.chmod(name, entry.mode & 0o1777, dir_fd=parent)
        self._counts.dropped_attributes += len(entry.xattrs)
        os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=parent, follow_symlinks=False)
        told = os.stat(name, dir_fd=parent, follow_symlinks=False)
        self._seal.add(seal_line(b"/".join(parts), told, owners=self._owners, content=entry.link))

    def _owner(self, entry: Entry) -> tuple[int, int]:
        if entry.uid <= MOST_ID and entry.gid <= MOST_ID:
            return entry.uid, entry.gid
        self._counts.foreign_owners += 1
        uid, gid = (one if one <= MOST_ID else NOBODY for one in (entry.uid, entry.gid))
        return uid, gid

    def _file_mode(self, entry: Entry) -> int:
        special = entry.mode & (stat.S_ISUID | stat.S_ISGID)
        if not special:
            return entry.mode
        if self._work.limits.setuid == "refuse":
            what = f"{shown(entry.path)} has mode {entry.mode:o}: a setuid or setgid program (limits.setuid)"
            raise refused(Refusal.SETUID, what)
        self._counts.cleared_setuid += 1
        return entry.mode & ~special

    def _set_attributes(self, descriptor: int, entry: Entry) -> None:
        for name, value in entry.xattrs:
            law = attribute_law(name)
            if law is Attribute.FORBID:
                what = f"{shown(entry.path)} has the attribute {shown(name)}, which is the overlay's own"
                raise refused(Refusal.ATTRIBUTE, what)
            if law is Attribute.DROP:
                self._counts.dropped_attributes += 1
                continue
            self._set_attribute(descriptor, name, value, path=entry.path)

    def _set_attribute(self, descriptor: int, name: bytes, value: bytes, *, path: bytes) -> None:
        try:
            os.setxattr(descriptor, name, value)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            what = f"{shown(path)} needs the attribute {shown(name)} ({len(value)} bytes): {error.strerror}"
            advice = f"The file system of {self._directory} cannot hold it; ext4, xfs, btrfs and tmpfs can"
            raise refused(Refusal.MACHINE, f"{what}. {advice}.") from error

    def note_skipped(self, sockets: int) -> None:
        """Count what a directory held and an image cannot."""
        self._counts.dropped_sockets += sockets

    # -- the end -----------------------------------------------------------------------------------------------------

    def finish(self, *, below: Sequence[Path] = ()) -> tuple[LayerFacts, str]:
        """Set what could not be set before, and return what is in the tree, with its seal.

        Args:
            below: the layers under this one, the uppermost first: directories without an entry look as they do there.
        """
        self._forget_last()
        self._hide(below)
        for parts in sorted(self._directories, key=len, reverse=True):
            entry = self._directories[parts]
            self._dress_directory(parts, _like(parts, below) if entry is None else entry)
        self._counts.disk_bytes += len(self._directories) * _BLOCK
        counts = msgspec.structs.asdict(self._counts)
        inodes = self._work.done_inodes - self._begun_inodes
        return LayerFacts(**counts, directories=len(self._directories), inodes=inodes), self._seal.text()

    def _note_marker(self, parent: Parts, marker: Marker, hidden: bytes) -> None:
        if marker is Marker.FOREIGN:
            self._counts.foreign_markers += 1
        elif marker is Marker.OPAQUE:
            self._parent(parent, b"/".join(parent))
            self._opaque.add(parent)
        else:
            self._hidden.append((parent, hidden))

    def _hide(self, below: Sequence[Path]) -> None:
        """Write whiteouts as the overlay wants them: a device 0:0, or for a directory made anew an attribute.

        One that hides nothing is left out: in a directory that only this layer has, it would be seen in listings.
        """
        for parent, hidden in self._hidden:
            if parent in self._opaque:
                continue  # nothing of below is seen there anyway
            with suppress(FileNotFoundError):
                os.close(self._open(parent, b"/".join((*parent, hidden))))  # refused if it leads through a link
            if not _is_below((*parent, hidden), below):
                self.depends = True
                continue
            above = self._parent(parent, b"/".join((*parent, hidden)))
            try:
                if tree_files.is_directory(above, hidden):
                    self._opaque.add((*parent, hidden))
            except FileNotFoundError:
                self._make_whiteout(above, (*parent, hidden))
        self._counts.whiteouts += len(self._opaque)
        self._forget_last()

    def _make_whiteout(self, above: int, parts: Parts) -> None:
        try:
            os.mknod(parts[-1], stat.S_IFCHR, 0, dir_fd=above)
        except PermissionError as error:
            what = f"the layer hides {shown(b'/'.join(parts))} of a lower one, and this user cannot make a whiteout"
            raise refused(Refusal.MACHINE, f"{what}: {error.strerror}. Kernels from 5.8 on allow it.") from error
        os.utime(parts[-1], ns=(0, 0), dir_fd=above, follow_symlinks=False)
        self._counts.whiteouts += 1
        told = os.stat(parts[-1], dir_fd=above, follow_symlinks=False)
        self._seal.add(seal_line(b"/".join(parts), told, owners=self._owners))

    def _dress_directory(self, parts: Parts, entry: Entry) -> None:
        descriptor = tree_files.open_beneath(self._root, parts)
        try:
            self._set_attributes(descriptor, entry)
            attributes = _kept(entry)
            if parts in self._opaque:
                self._set_attribute(descriptor, OPAQUE_ATTRIBUTE, _OPAQUE, path=b"/".join(parts))
                attributes = tuple(sorted((*attributes, (OPAQUE_ATTRIBUTE, _OPAQUE))))
            if self._owners:
                os.fchown(descriptor, *self._owner(entry))
            os.fchmod(descriptor, entry.mode & 0o3777)
            os.utime(descriptor, ns=(entry.mtime_ns, entry.mtime_ns))
            told = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        self._seal.add(seal_line(b"/".join(parts), told, owners=self._owners, xattrs=attributes))


def _kept(entry: Entry) -> tuple[tuple[bytes, bytes], ...]:
    return tuple(one for one in entry.xattrs if attribute_law(one[0]) is Attribute.KEEP)


def _is_below(parts: Parts, below: Sequence[Path]) -> bool:
    """Return whether a lower layer has something of this name."""
    for layer in below:
        root = tree_files.open_root(layer)
        try:
            parent = tree_files.open_beneath(root, parts[:-1])
        except OSError as error:
            if error.errno not in _NO_DIRECTORY:
                raise
            continue
        finally:
            os.close(root)
        try:
            os.stat(parts[-1], dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            continue
        finally:
            os.close(parent)
        return True
    return False


def _like(parts: Parts, below: Sequence[Path]) -> Entry:
    """Return how a directory looks in the layers below, or how one looks that nobody described."""
    for layer in below if parts else ():
        root = tree_files.open_root(layer)
        try:
            descriptor = tree_files.open_beneath(root, parts)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY:
                raise
            continue  # not there, or no directory there
        finally:
            os.close(root)
        try:
            told = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        mode = stat.S_IMODE(told.st_mode)
        path = b"/".join(parts)
        return Entry(
            path=path, kind=Kind.DIRECTORY, mode=mode, uid=told.st_uid, gid=told.st_gid, mtime_ns=told.st_mtime_ns
        )
    return Entry(path=b"/".join(parts), kind=Kind.DIRECTORY, mode=_IMPLICIT_MODE)
