"""The image store of one node: images by name, unpacked once, shared by all sandboxes, kept while somebody holds them.

Several processes may use a store at once. Books are kept in files, and changed under a lock: shared to add, alone to
remove. So whoever adds a name or a claim knows that what it names stays.

    what it waits for                       who wakes it, and until when
    the lock of the books                   whoever holds it, `BOOKS_S`
    another preparation of the same layer   that process, `settings.lock_s`

Everything here blocks; `rollmill.sandboxes.images.prepare` has the asynchronous front.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rollmill.errors import ImageError, SandboxError
from rollmill.sandboxes.disk_records import ProcessMark, own_mark
from rollmill.sandboxes.images import erofs
from rollmill.sandboxes.images.canonical import seal_of
from rollmill.sandboxes.images.collection import ImageStock, Inventory, Removal, choose
from rollmill.sandboxes.images.holds import Hold, Holds
from rollmill.sandboxes.images.layers import BOOKS_S, LayerSource, LayerStore
from rollmill.sandboxes.images.layout import Layout
from rollmill.sandboxes.images.locks import locked
from rollmill.sandboxes.images.preparation import Preparation
from rollmill.sandboxes.images.records import (
    HoldRecord,
    ImageConfig,
    Layer,
    Manifest,
    NameRecord,
    StoredImage,
    check_name,
    is_digest,
    notes_of,
)
from rollmill.sandboxes.images.refusals import Refusal, refused
from rollmill.sandboxes.images.settings import ImageStoreSettings
from rollmill.sandboxes.images.tree_files import write_whole
from rollmill.sandboxes.images.work import Work
from rollmill.sandboxes.reaper import Reaper
from rollmill.sandboxes.records import Record

_SHOWN_NAMES = 12
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CollectReport(Record, frozen=True, kw_only=True):
    """What a collection removed.

    Attributes:
        images: digests that are gone.
        layers: layers that are gone.
        files: entries that were removed from the disk.
        shared_files: files of the pool that no layer held any more.
        left_bytes: what stays.
        over_bytes: how far that is above the budget, because the rest is held.
    """

    images: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    files: int = 0
    shared_files: int = 0
    left_bytes: int = 0
    over_bytes: int = 0


class HeldImage:
    """An image that stays until it is released, with the directories of its layers.

    Attributes:
        digest: of its manifest.
        config: what it says of its programs.
        layers: directories, the uppermost first, for an overlay.
        mounted: whether some of these are mounts, which `ImageStore.unmount_idle` takes away after the release.
    """

    def __init__(
        self,
        hold: Hold,
        *,
        digest: str,
        config: ImageConfig,
        layers: tuple[Path, ...],
        renew: Callable[[float], None],
        mounted: bool = False,
    ) -> None:
        self._hold = hold
        self._renew = renew
        self.mounted = mounted
        self.digest = digest
        self.config = config
        self.layers = layers

    def renew(self, until_wall_s: float) -> None:
        """Hold it until another time, whether or not this process lives.

        Raises:
            ImageError: if the claim has ended and was tidied away: the image may be gone.
        """
        self._renew(until_wall_s)

    def release(self) -> None:
        """Let it go; to be called once or more."""
        self._hold.release()


class ImageStore:
    """Opens a store, and repairs what killed processes left.

    Args:
        settings: where and how.
        in_background: delete what is removed in a thread, at a bounded rate, until `close`; else before a call returns.
    """

    def __init__(self, settings: ImageStoreSettings | None = None, *, in_background: bool = False) -> None:
        self.settings = ImageStoreSettings() if settings is None else settings
        self._owner = own_mark()
        self.layout = Layout(self.settings.place(), owner=self._owner)
        if in_background:
            self.layout.reaper = Reaper(self.layout.part("trash"))
            self.layout.reaper.start()
        self._layers = LayerStore(self.layout, self.settings)
        self._holds = Holds(self.layout.part("holds"))
        self.repaired = self.layout.repair()
        if any(self.layout.part("mounts").iterdir()):
            self.unmount_idle()

    def close(self) -> None:
        """Stop deleting in the background; what is left waits for the next store."""
        if self.layout.reaper is not None:
            self.layout.reaper.close()

    # -- finding -----------------------------------------------------------------------------------------------------

    def resolve(self, ref: str) -> tuple[str, Manifest]:
        """Return the digest and manifest of an image.

        Args:
            ref: its name, or the digest of its manifest.

        Raises:
            ImageError: if there is none, or if it is damaged.
        """
        if is_digest(ref):
            digest = ref
        else:
            named = self.layout.read_name(check_name(ref))
            if named is None:
                raise self._unknown(ref)
            digest = named.digest
        manifest = self.layout.read_manifest(digest)
        if manifest is None and is_digest(ref):
            raise self._unknown(ref)
        if manifest is None:
            what = f"the name {ref!r} stands for {digest}, whose manifest is missing"
            raise refused(Refusal.DAMAGED, f"{what}. Prepare the image again.")
        return digest, manifest

    def _unknown(self, ref: str) -> ImageError:
        names = [repr(one.name) for one in self.layout.all_names()]
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        known = f"it has {', '.join(names[:_SHOWN_NAMES])}{more}" if names else "it is empty"
        return refused(
            Refusal.UNKNOWN,
            f"the image {ref!r} is not in the store {self.layout.directory}: {known}. Prepare it first: "
            "`rollmill sandbox prepare SOURCE --name NAME`.",
        )

    def _read_layers(self, ref: str, manifest: Manifest) -> tuple[Layer, ...]:
        found = [self.layout.read_layer(one) for one in manifest.layers]
        missing = [one for one, layer in zip(manifest.layers, found, strict=True) if layer is None]
        if missing:
            what = f"{len(missing)} of {len(found)} layers of the image {ref!r} are missing or damaged: {missing[0]}"
            raise refused(Refusal.DAMAGED, f"{what}. Prepare the image again.")
        return tuple(layer for layer in found if layer is not None)

    def show(self, ref: str) -> StoredImage:
        """Return one image as it is shown.

        Raises:
            ImageError: if there is none, or if it is damaged.
        """
        digest, manifest = self.resolve(ref)
        return self._shown(digest, manifest, self._read_layers(ref, manifest), self._claims())

    def images(self) -> tuple[StoredImage, ...]:
        """Return all images that are whole, the last used first."""
        claims = self._claims()
        found: list[StoredImage] = []
        for digest in self.layout.all_digests():
            try:
                manifest = self.layout.read_manifest(digest)
                if manifest is not None:
                    found.append(self._shown(digest, manifest, self._read_layers(digest, manifest), claims))
            except ImageError as error:
                found.append(StoredImage(digest=digest, names=self._names_of(digest), notes=(f"DAMAGED: {error}",)))
        return tuple(sorted(found, key=lambda one: (-one.used_wall_s, one.digest)))

    def _names_of(self, digest: str) -> tuple[str, ...]:
        return tuple(one.name for one in self.layout.all_names() if one.digest == digest)

    def _claims(self) -> tuple[HoldRecord, ...]:
        with self._adding():
            return self._standing(tidy=False)

    def _standing(self, *, tidy: bool) -> tuple[HoldRecord, ...]:
        try:
            return self._holds.standing(now_wall_s=time.time(), tidy=tidy)
        except msgspec.MsgspecError as error:
            what = f"a claim in {self.layout.part('holds')} cannot be read ({error}), so nothing is removed"
            raise refused(Refusal.DAMAGED, f"{what}. Look what it is, and delete the file.") from error

    def _shown(
        self, digest: str, manifest: Manifest, layers: tuple[Layer, ...], claims: tuple[HoldRecord, ...]
    ) -> StoredImage:
        return StoredImage(
            digest=digest,
            names=self._names_of(digest),
            layers=len(layers),
            disk_bytes=sum(one.disk_bytes for one in layers),
            inodes=sum(one.facts.inodes for one in layers),
            used_wall_s=self._used_wall_s(digest),
            held_by=tuple(sorted({one.what for one in claims if digest in one.images})),
            config=manifest.config,
            notes=notes_of(layers),
        )

    def _used_wall_s(self, digest: str) -> float:
        try:
            return self.layout.manifest(digest).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    # -- making ------------------------------------------------------------------------------------------------------

    def add_image(
        self,
        layers: Sequence[LayerSource],
        *,
        name: str,
        source: str,
        work: Work,
        base: str | None = None,
        config: ImageConfig | None = None,
    ) -> StoredImage:
        """Make an image of layers, and give it a name; layers that are there already are taken as they are.

        Args:
            layers: the lowest first.
            name: replaces what had this name.
            source: what it is made from, in words.
            work: bounds.
            base: an image that lies below, by name or digest.
            config: what it says of its programs; the base's unless given.

        Raises:
            ImageError: if something of it is refused.
            DeadlineExceeded: if it took too long; finished layers stay.
            SandboxError: if the disk is full, or the work was cancelled.
        """
        with self.preparing(name, source=source, work=work, base=base) as preparation:
            for one in layers:
                preparation.add(one)
            return preparation.finish(config)

    @contextmanager
    def preparing(self, name: str, *, source: str, work: Work, base: str | None = None) -> Iterator[Preparation]:
        """Make an image step by step; see `add_image` for what it takes and raises."""
        check_name(name)
        with self.explained(f"prepare {name!r}"):
            with self._adding():
                hold = self._holds.take(f"preparation of {name}", owner=self._owner)
            try:
                below, config = self._base(base, hold)
                yield Preparation(
                    name,
                    hold=hold,
                    layers=below,
                    config=config,
                    work=work,
                    layout=self.layout,
                    makers=self._layers,
                    finish=lambda manifest: self._finish(name, manifest, source=source, work=work),
                )
            finally:
                hold.release()
                if any(self.layout.part("mounts").iterdir()):
                    self.unmount_idle()

    def _base(self, base: str | None, hold: Hold) -> tuple[tuple[Layer, ...], ImageConfig]:
        if base is None:
            return (), ImageConfig()
        with self._adding():
            _, manifest = self.resolve(base)
            layers = self._read_layers(base, manifest)
            for layer in layers:
                hold.add_layer(layer.id)
        return layers, manifest.config

    def _finish(self, name: str, manifest: Manifest, *, source: str, work: Work) -> StoredImage:
        self._name(name, manifest, source=source)
        work.enter("done")
        shown = self.show(name)
        if self.settings.budget_bytes is not None:
            with self.hold(shown.digest, what=f"preparation of {name}"):
                self.collect(budget_bytes=self.settings.budget_bytes)
        return shown

    def _name(self, name: str, manifest: Manifest, *, source: str) -> None:
        digest = manifest.digest()
        durable = self.settings.durable
        with self._adding():
            path = self.layout.manifest(digest)
            if path.exists():
                os.utime(path)
            else:
                write_whole(path, manifest.encoded(), durable=durable)
            record = NameRecord(name=name, digest=digest, source=source, prepared_wall_s=time.time())
            write_whole(self.layout.name(name), msgspec.json.encode(record), durable=durable)

    def recall_step(self, key: str) -> str | None:
        """Return the layer that a step of a recipe made, if it was built before; it may be gone by now."""
        try:
            layer_id = self.layout.step(key).read_text(encoding="ascii")
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        return layer_id if is_digest(layer_id) else None

    def remember_step(self, key: str, layer_id: str) -> None:
        """Keep which layer a step of a recipe made."""
        write_whole(self.layout.step(key), layer_id.encode("ascii"), durable=self.settings.durable)

    # -- holding -----------------------------------------------------------------------------------------------------

    @contextmanager
    def hold(self, ref: str, *, what: str) -> Iterator[HeldImage]:
        """Hold an image in a `with` block."""
        held = self.take(ref, what=what)
        try:
            yield held
        finally:
            held.release()
            if held.mounted:
                self.unmount_idle()

    def take(
        self, ref: str, *, what: str, until_wall_s: float | None = None, owner: ProcessMark | None = None
    ) -> HeldImage:
        """Hold an image until it is released, and have its layers ready.

        Args:
            ref: name or digest.
            what: who holds it and what for, in words.
            until_wall_s: when the claim ends by itself; `None`: with its process.
            owner: whose claim it is; this process unless given, nobody's if only `until_wall_s` is.

        Raises:
            ImageError: if there is none, or if it is damaged.
        """
        if owner is None and until_wall_s is None:
            owner = self._owner
        with self.explained(f"use {ref!r}"):
            with self._adding():
                digest, manifest = self.resolve(ref)
                layers = self._read_layers(ref, manifest)
                hold = self._holds.take(what, images=[digest], owner=owner, until_wall_s=until_wall_s)
            try:
                os.utime(self.layout.manifest(digest))
                paths = tuple(self._layers.tree(one) for one in reversed(layers))
            except BaseException:
                hold.release()
                raise
        return HeldImage(
            hold,
            digest=digest,
            config=manifest.config,
            layers=paths,
            renew=lambda until: self._renew(hold, until),
            mounted=any(one.form == "erofs" for one in layers),
        )

    def pin(self, digest: str, *, holder: str, name: str, what: str) -> None:
        """Hold an image for what stands on it on a disk, such as a snapshot, whatever becomes of this process.

        Args:
            digest: of its manifest.
            holder: who; see `Holds.pin`. `Holds.unpin` lets go.
            name: which of the holder's things.
            what: both in words.

        Raises:
            ImageError: if there is none, or if it is damaged.
            SandboxError: if the disk is full.
        """
        with self.explained(f"hold {digest}"), self._adding():
            _, manifest = self.resolve(digest)
            self._read_layers(digest, manifest)
            self._holds.pin(digest, holder=holder, name=name, what=what)

    def _renew(self, hold: Hold, until_wall_s: float) -> None:
        with self._adding():
            if not hold.path.exists():
                what = f"the claim {hold.record.what!r} has ended, and the image may be gone"
                raise refused(Refusal.UNKNOWN, f"{what}. Take it again, and renew it in time.")
            hold.renew(until_wall_s)

    # -- removing ----------------------------------------------------------------------------------------------------

    def collect(
        self, *, budget_bytes: int | None = None, grace_s: float = 3600.0, remove: Iterable[str] = ()
    ) -> CollectReport:
        """Remove what nobody needs, and by need what was not used for longest; never what is held.

        Args:
            budget_bytes: what the layers may take; `None`: only what no image has goes.
            grace_s: how long an image without a name is kept after its last use.
            remove: digests that should go, if nobody holds them.
        """
        with locked(self.layout.books, what="the books of the image store", limit_s=BOOKS_S):
            inventory = self._inventory()
            removal = choose(
                inventory, now_wall_s=time.time(), budget_bytes=budget_bytes, grace_s=grace_s, remove=remove
            )
            self._take_out(removal)
            self._unmount(inventory)
        return CollectReport(
            images=removal.images,
            layers=removal.layers,
            files=self.layout.empty_trash(),
            shared_files=self._layers.drop_unused_objects(),
            left_bytes=removal.left_bytes,
            over_bytes=removal.over_bytes,
        )

    def _inventory(self) -> Inventory:
        """Return what is there; layers and manifests that cannot be read are nobody's."""
        claims = self._standing(tidy=True)
        names = self.layout.all_names()
        images: dict[str, ImageStock] = {}
        for digest in self.layout.all_digests():
            layers = self._layers_if_whole(digest)
            named = any(one.digest == digest for one in names)
            images[digest] = ImageStock(layers=layers, used_wall_s=self._used_wall_s(digest), named=named)
        sizes = {one: self.layout.read_layer(one) for one in self.layout.all_layers()}
        return Inventory(
            images=images,
            layers={one: 0 if layer is None else layer.disk_bytes for one, layer in sizes.items()},
            held_images=frozenset(digest for one in claims for digest in one.images),
            held_layers=frozenset(layer for one in claims for layer in one.layers),
        )

    def _layers_if_whole(self, digest: str) -> tuple[str, ...]:
        try:
            manifest = self.layout.read_manifest(digest)
        except ImageError:
            return ()
        return () if manifest is None else manifest.layers

    def _take_out(self, removal: Removal) -> None:
        """Remove names, then manifests, then layers: at no moment does a name lead to something that is not there."""
        for named in self.layout.all_names():
            if named.digest in removal.images or not self.layout.manifest(named.digest).exists():
                self.layout.name(named.name).unlink(missing_ok=True)
        for digest in removal.images:
            self.layout.manifest(digest).unlink(missing_ok=True)
        for layer_id in removal.layers:
            if self.layout.mount(layer_id).exists():
                erofs.unmount(self.layout.mount(layer_id))
            self.layout.discard(self.layout.layer(layer_id))
        for path in self.layout.part("steps").glob("[!.]*"):
            layer_id = self.recall_step(path.name)
            if layer_id is None or not self.layout.layer(layer_id).exists():
                path.unlink(missing_ok=True)

    def unmount_idle(self) -> None:
        """Unmount what nobody holds, also what killed processes left mounted."""
        with locked(self.layout.books, what="the books of the image store", limit_s=BOOKS_S):
            self._unmount(self._inventory())

    def _unmount(self, inventory: Inventory) -> None:
        claims = [one for one in self._standing(tidy=False) if not one.pinned_by]  # what is on a disk runs nowhere
        in_use = {layer for one in claims for layer in one.layers}
        for digest in {digest for one in claims for digest in one.images} & inventory.images.keys():
            in_use.update(inventory.images[digest].layers)
        for path in self.layout.part("mounts").iterdir():
            if f"sha256:{path.name}" not in in_use:
                erofs.unmount(path)

    def remove(self, ref: str) -> CollectReport:
        """Remove an image with all its names, or by name only that name where it has others.

        Raises:
            ImageError: if there is none, or if somebody holds it.
        """
        digest = self._digest_to_remove(ref)
        if not is_digest(ref) and len(self._names_of(digest)) > 1:
            with self._adding():
                self.layout.name(ref).unlink(missing_ok=True)
            return self.collect()
        report = self.collect(remove=[digest])
        if self.layout.manifest(digest).exists():
            holders = sorted({one.what for one in self._claims() if digest in one.images})
            what = f"the image {ref!r} is held by {', '.join(holders) or 'somebody who has just let it go'}"
            raise refused(Refusal.IN_USE, f"{what}; nothing was removed. End what uses it, and try again.")
        return report

    def _digest_to_remove(self, ref: str) -> str:
        """Return the digest of an image, damaged or not."""
        try:
            return self.resolve(ref)[0]
        except ImageError as error:
            if error.reason != Refusal.DAMAGED.value:
                raise
        named = None if is_digest(ref) else self.layout.read_name(ref)
        return ref if named is None else named.digest

    def verify(self, ref: str) -> tuple[str, ...]:
        """Read a whole image again, and return what of it is damaged, in words; nothing if it is as it was unpacked."""
        problems: list[str] = []
        with self.hold(ref, what="a look for damage") as held:
            _, manifest = self.resolve(held.digest)
            for layer, path in zip(reversed(self._read_layers(ref, manifest)), held.layers, strict=True):
                if seal_of(path, owners=layer.owners) != layer.seal:
                    problems.append(
                        f"layer {layer.id} is not as it was unpacked; remove the image and prepare it again"
                    )
        return tuple(problems)

    # -- helpers -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _adding(self) -> Iterator[None]:
        with self._layers.books_open():
            yield

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Say what a failing disk means."""
        try:
            yield
        except OSError as error:
            free = shutil.disk_usage(self.layout.directory).free
            where = f" at {error.filename!r}" if error.filename else ""
            if error.errno in _FULL:
                advice = "Make room: `rollmill sandbox images --budget-gib N` removes what was not used for longest"
                message = f"no room in {self.layout.directory} to {what}: {free} bytes are free{where}. {advice}."
            else:
                message = f"cannot {what}: {error.strerror or error}{where}; {free} bytes are free in the store."
            raise SandboxError(message) from error


def has_mounts(settings: ImageStoreSettings) -> bool:
    """Return whether layers of a store are mounted, by whomever; opening it unmounts those that nobody holds.

    Raises:
        OSError: if the store cannot be looked at.
    """
    try:
        return any((settings.place() / "mounts").iterdir())
    except FileNotFoundError:
        return False
