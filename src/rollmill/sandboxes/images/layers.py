"""From the source of a layer to a layer of the store: unpacked beside it, proven, flushed, and named by one rename."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

import msgspec

from rollmill.errors import ImageError
from rollmill.sandboxes.images import erofs, tree_files
from rollmill.sandboxes.images.canonical import CanonicalDigest, Item
from rollmill.sandboxes.images.compression import HashedStream, unpacked
from rollmill.sandboxes.images.extract import Extractor, Parts
from rollmill.sandboxes.images.holds import Hold
from rollmill.sandboxes.images.layout import Layout
from rollmill.sandboxes.images.locks import locked
from rollmill.sandboxes.images.objects import ObjectPool
from rollmill.sandboxes.images.records import Layer
from rollmill.sandboxes.images.refusals import Refusal, refused
from rollmill.sandboxes.images.settings import ImageStoreSettings
from rollmill.sandboxes.images.tar_format import ByteSource, TarReader
from rollmill.sandboxes.images.work import Work

BOOKS_S = 60.0


class LayerSource(Protocol):
    """Where a layer comes from.

    Attributes:
        content: sha256 of its archive, unpacked, if that is known before it is read.
        what: its name in words.
    """

    content: str | None
    what: str

    def unpack(self, extractor: Extractor, *, work: Work) -> str:
        """Feed its entries to an extractor; return the sha256 of its archive, unpacked.

        Raises:
            ImageError: if it is not what it is said to be.
        """
        ...


class ArchiveLayer:
    """A layer in a tar archive, plain or packed.

    Args:
        open_packed: opens the archive as it is stored.
        what: its name in words.
        content: sha256 that its unpacked archive must have; `None` if nobody said.
        packed: sha256 that it must have as it is stored.
        packed_bytes: how long it is as it is stored.
    """

    def __init__(
        self,
        open_packed: Callable[[], AbstractContextManager[ByteSource]],
        *,
        what: str,
        content: str | None = None,
        packed: str | None = None,
        packed_bytes: int | None = None,
    ) -> None:
        self._open = open_packed
        self.what = what
        self.content = content
        self._packed = packed
        self._packed_bytes = packed_bytes

    def unpack(self, extractor: Extractor, *, work: Work) -> str:
        """Feed its entries to an extractor, and prove both digests."""
        with self._open() as stored:
            outer = HashedStream(stored, most=self._packed_bytes, what=self.what)
            with unpacked(outer, ratio=work.limits.ratio) as inside:
                inner = HashedStream(inside, what=self.what)
                for entry, body in TarReader(inner):
                    extractor.add(entry, body)
                inner.drain(work.check)
            outer.drain(work.check)
        if self._packed is not None and outer.digest != self._packed:
            raise _mismatch(f"{self.what}, {outer.count} bytes as stored,", outer.digest, self._packed)
        if self.content is not None and inner.digest != self.content:
            raise _mismatch(f"{self.what}, {inner.count} bytes unpacked,", inner.digest, self.content)
        return inner.digest


def _mismatch(what: str, found: str, told: str) -> ImageError:
    return refused(Refusal.DIGEST, f"{what} has the digest {found} and should have {told}; get the image again")


class TreeLayer:
    """A layer from entries, such as those of a directory; its archive is the canonical one.

    Args:
        entries: yields them.
        what: its name in words.
        skipped: filled by `entries` with the names of sockets.
    """

    content: str | None = None

    def __init__(self, entries: Callable[[], Iterable[Item]], *, what: str, skipped: Sequence[bytes] = ()) -> None:
        self._entries = entries
        self.what = what
        self._skipped = skipped

    def unpack(self, extractor: Extractor, *, work: Work) -> str:
        """Feed its entries to an extractor."""
        digest = CanonicalDigest()
        for entry, content in self._entries():
            digest.begin(entry)
            extractor.add(entry, _Tee(content, digest))
            digest.end(entry)
        extractor.note_skipped(len(self._skipped))
        return digest.digest()


class _Tee:
    def __init__(self, content: ByteSource, digest: CanonicalDigest) -> None:
        self._content = content
        self._digest = digest

    def read(self, size: int, /) -> bytes:
        data = self._content.read(size)
        self._digest.content(data)
        return data


def chained(content: str, below: Sequence[str]) -> str:
    """Return the id of a layer that depends on those below, as by directories that only they describe."""
    return f"sha256:{hashlib.sha256('|'.join(('chain', *below, content)).encode()).hexdigest()}"


class LayerStore:
    """Adds layers to a store.

    Args:
        layout: of the store.
        settings: how.
    """

    def __init__(self, layout: Layout, settings: ImageStoreSettings) -> None:
        self._layout = layout
        self._settings = settings
        self._pool = ObjectPool(layout.part("objects"))
        self._packs: bool | None = None

    def add(self, source: LayerSource, *, below: Sequence[Layer], work: Work, hold: Hold) -> Layer:
        """Return the layer of a source, made if it is not there, and claimed by `hold`.

        Args:
            source: where it comes from.
            below: the layers under it, the uppermost first.
            work: bounds.
            hold: of the preparation.
        """
        with self._alone(source, work):
            if source.content is not None and (known := self._find(source.content, below, hold)) is not None:
                return known
            with self._layout.scratch() as scratch:
                return self._make(source, scratch, below=below, work=work, hold=hold)

    def _alone(self, source: LayerSource, work: Work) -> AbstractContextManager[None]:
        """Let one process at a time make one layer; of those without a known digest, the first that is done counts."""
        if source.content is None:
            return nullcontext()
        path = self._layout.stripe(source.content)
        return locked(path, what=f"another preparation of {source.what}", limit_s=self._settings.lock_s, work=work)

    def _find(self, content: str, below: Sequence[Layer], hold: Hold) -> Layer | None:
        for layer_id in (content, chained(content, [one.id for one in below])):
            if self._layout.read_layer(layer_id) is None:
                continue
            with self.books_open():
                layer = self._layout.read_layer(layer_id)
                if layer is not None:
                    hold.add_layer(layer.id)
                    return layer
        return None

    @contextmanager
    def books_open(self) -> Iterator[None]:
        """Keep removals out while something is added."""
        with locked(self._layout.books, what="the books of the image store", limit_s=BOOKS_S, shared=True):
            yield

    def _make(self, source: LayerSource, scratch: Path, *, below: Sequence[Layer], work: Work, hold: Hold) -> Layer:
        made = scratch / "layer"
        made.mkdir(mode=0o700)
        (made / "root").mkdir(mode=0o700)
        as_file = self._packs_files(scratch)
        pool = None if as_file else self._pool
        owners = os.geteuid() == 0
        work.enter(f"unpack {source.what}")
        with Extractor(made / "root", work=work, pool=pool, owners=owners) as extractor:
            content = source.unpack(extractor, work=work)
            facts, seal = extractor.finish(below=[self.tree(one) for one in below])
            fresh = dict(extractor.fresh)
            own = not extractor.depends
        layer = Layer(
            id=content if own else chained(content, [one.id for one in below]),
            content=content,
            form="erofs" if as_file else "tree",
            owners=owners,
            facts=facts,
            seal=seal,
            disk_bytes=facts.disk_bytes,
        )
        if as_file:
            layer = msgspec.structs.replace(layer, disk_bytes=erofs.pack(made, work=work))
        return self._publish(layer, made, fresh=fresh, work=work, hold=hold)

    def _packs_files(self, scratch: Path) -> bool:
        """Return whether layers become files; tried once."""
        if self._packs is None:
            self._packs = erofs.wanted(self._settings.form, scratch)
        return self._packs

    def _publish(self, layer: Layer, made: Path, *, fresh: dict[str, Parts], work: Work, hold: Hold) -> Layer:
        (made / "layer.json").write_bytes(msgspec.json.encode(layer))
        work.enter("write the layer to the disk")
        if self._settings.durable:
            tree_files.flush(made)
        work.enter("name the layer")
        self._offer(made / "root", fresh)
        target = self._layout.layer(layer.id)
        with self.books_open():
            if target.exists() and self._layout.read_layer(layer.id) is None:
                self._layout.discard(target)  # damaged: this one takes its place
            hold.add_layer(layer.id)
            if (existing := self._layout.read_layer(layer.id)) is not None:
                return existing  # from another source, or another process
            try:
                made.rename(target)
            except OSError:
                if (existing := self._layout.read_layer(layer.id)) is None:
                    raise
                return existing
        if self._settings.durable:
            tree_files.flush_directory(target.parent)
        work.enter("named the layer")
        return layer

    def _offer(self, tree: Path, fresh: dict[str, Parts]) -> None:
        """Offer files to later layers; only now, since what they hold has reached the disk."""
        if not fresh:
            return
        root = tree_files.open_root(tree)
        try:
            for key, parts in fresh.items():
                above = tree_files.open_beneath(root, parts[:-1])
                try:
                    self._pool.publish(key, above, parts[-1])
                finally:
                    os.close(above)
        finally:
            os.close(root)

    def tree(self, layer: Layer) -> Path:
        """Return the directory of a layer's files, mounted if need be."""
        if layer.form == "tree":
            return self._layout.layer(layer.id) / "root"
        target = self._layout.mount(layer.id)
        erofs.mount_once(self._layout.layer(layer.id) / erofs.FILE, target)
        return target

    def drop_unused_objects(self) -> int:
        """Remove shared files that no layer holds any more."""
        return self._pool.drop_unused()
