"""Images that the sandboxes of one process use: one claim for each image, as long as anything uses it.

A start pays two looks at small files when the image is in use already, and one claim when it is not. What outlives the
process, such as a snapshot on a disk, has a claim of its own that does so too.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Collection
from contextlib import suppress

import msgspec

from rollmill.errors import RollmillError
from rollmill.sandboxes.images.holds import Holds
from rollmill.sandboxes.images.records import ImageConfig, is_digest
from rollmill.sandboxes.images.settings import ImageStoreSettings
from rollmill.sandboxes.images.store import HeldImage, ImageStore, has_mounts
from rollmill.sandboxes.reaper import ReaperStatistics


class ImageInUse(msgspec.Struct, frozen=True, kw_only=True):
    """An image whose layers stay where they are while somebody uses it.

    Attributes:
        digest: of its manifest.
        layers: directories, the uppermost first.
        config: what it says of its programs.
    """

    digest: str
    layers: tuple[str, ...]
    config: ImageConfig


class _Known(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    stamp: tuple[int, int]


class ImageUses:
    """The images in use by one process; its store is opened by the first use.

    Args:
        settings: of the store.
        what: who uses them, for others who look.
    """

    def __init__(self, settings: ImageStoreSettings, *, what: str) -> None:
        self._settings = settings
        self._what = what
        self._store: ImageStore | None = None
        self._opening = threading.Lock()
        self._held: dict[str, HeldImage] = {}
        self._users: dict[str, set[str]] = {}
        self._digest_of: dict[str, str] = {}
        self._names: dict[str, _Known] = {}
        self._taking: dict[str, asyncio.Task[str]] = {}
        self._waiting: dict[str, int] = {}
        self._tidying: set[asyncio.Future[None]] = set()

    async def unmount_left(self) -> None:
        """Unmount the layers that killed processes left mounted; a store without mounts is not opened."""
        await asyncio.get_running_loop().run_in_executor(None, self._unmount_left)

    def _unmount_left(self) -> None:
        # Whoever uses an image is told what is wrong with the store; a sandbox without one needs no store.
        with suppress(RollmillError, OSError):
            if has_mounts(self._settings):
                self._open()

    async def acquire(self, ref: str, *, user: str) -> ImageInUse:
        """Use an image until `release`; the same user may ask again.

        Args:
            ref: name or digest.
            user: who, such as a sandbox's id.

        Raises:
            ImageError: if there is no such image, or if it is damaged.

        Cancellation: nothing stays in use.
        """
        digest = self._known(ref)
        if digest is not None and digest in self._held:
            return self._use(digest, user)
        self._waiting[ref] = self._waiting.get(ref, 0) + 1
        taking = self._taking.get(ref)
        if taking is None:
            taking = self._taking[ref] = asyncio.ensure_future(self._take(ref))
            taking.add_done_callback(lambda _: self._settle(ref))
        try:
            return self._use(await asyncio.shield(taking), user)
        finally:
            self._waiting[ref] -= 1
            self._settle(ref)

    def _use(self, digest: str, user: str) -> ImageInUse:
        self._users[digest].add(user)
        before = self._digest_of.get(user)
        self._digest_of[user] = digest
        if before is not None and before != digest:  # the name went to another image meanwhile
            self._users[before].discard(user)
            self._let_go_if_unused(before)
        return self._view(digest)

    def _settle(self, ref: str) -> None:
        """Forget that an image is being taken, once nobody waits for that: from now on only its users keep it."""
        taking = self._taking.get(ref)
        if self._waiting.get(ref) or taking is None or not taking.done():
            return
        del self._taking[ref]
        self._waiting.pop(ref, None)
        if not taking.cancelled() and taking.exception() is None:
            self._users[taking.result()].discard(_taken_by(ref))
            self._let_go_if_unused(taking.result())

    def _known(self, ref: str) -> str | None:
        """Return the digest of an image in use, if its name still stands for it."""
        if is_digest(ref):
            return ref
        known = self._names.get(ref)
        if known is None or self._store is None or known.stamp != self._stamp(self._store, ref):
            return None
        return known.digest

    def _stamp(self, store: ImageStore, ref: str) -> tuple[int, int]:
        if is_digest(ref):
            return (0, 0)
        try:
            told = os.stat(store.layout.name(ref))
        except FileNotFoundError:
            return (0, 0)
        return told.st_ino, told.st_mtime_ns

    async def _take(self, ref: str) -> str:
        """Claim an image, with a user of its own until all who wait have seen it."""
        loop = asyncio.get_running_loop()
        stamp, held = await loop.run_in_executor(None, self._take_now, ref)
        digest = held.digest
        if digest in self._held:
            held.release()  # by its other name
        else:
            self._held[digest] = held
            self._users[digest] = set()
        if not is_digest(ref):
            self._names[ref] = _Known(digest=digest, stamp=stamp)
        self._users[digest].add(_taken_by(ref))
        return digest

    def _take_now(self, ref: str) -> tuple[tuple[int, int], HeldImage]:
        store = self._open()
        stamp = self._stamp(store, ref)  # first: if the name changes meanwhile, the next one looks again
        return stamp, store.take(ref, what=self._what)

    def _open(self) -> ImageStore:
        with self._opening:
            if self._store is None:
                self._store = ImageStore(self._settings, in_background=True)
            return self._store

    def _view(self, digest: str) -> ImageInUse:
        held = self._held[digest]
        return ImageInUse(digest=digest, layers=tuple(map(os.fspath, held.layers)), config=held.config)

    def trash(self) -> tuple[ReaperStatistics, ...]:
        """Return what was deleted of removed images; nothing while no store is open."""
        reaper = None if self._store is None else self._store.layout.reaper
        return () if reaper is None else (reaper.statistics(),)

    def in_use(self, user: str) -> ImageInUse | None:
        """Return what somebody uses."""
        digest = self._digest_of.get(user)
        return None if digest is None else self._view(digest)

    def share(self, user: str, *, to: str) -> None:
        """Let a snapshot, or what is made of one, use the image that a sandbox uses; nothing if it uses none."""
        digest = self._digest_of.get(user)
        if digest is not None:
            self._use(digest, to)

    async def pin(self, digest: str, *, holder: str, name: str, what: str) -> None:
        """Hold an image beyond this process; see `ImageStore.pin`."""
        await asyncio.to_thread(lambda: self._open().pin(digest, holder=holder, name=name, what=what))

    async def unpin(self, *, holder: str, name: str) -> None:
        """Let go of what `pin` holds; nothing if it holds nothing."""
        await asyncio.to_thread(self._pins().unpin, holder, name)

    async def unpin_all_but(self, names: Collection[str], *, holder: str) -> tuple[str, ...]:
        """Let go of what a killed process held for a thing that never came to be, or is gone; return their names."""
        return await asyncio.to_thread(self._unpin_all_but, names, holder)

    def _unpin_all_but(self, names: Collection[str], holder: str) -> tuple[str, ...]:
        pins = self._pins()
        left = tuple(sorted(pins.pinned(holder) - set(names)))
        for name in left:
            pins.unpin(holder, name)
        return left

    def _pins(self) -> Holds:
        """Return the claims as files: letting go of one needs no store to be opened, or to be there."""
        return Holds(self._settings.place() / "holds")

    def release(self, user: str) -> None:
        """End a use; one that is none counts as ended."""
        digest = self._digest_of.pop(user, None)
        if digest is not None:
            self._users[digest].discard(user)
            self._let_go_if_unused(digest)

    def _let_go_if_unused(self, digest: str) -> None:
        if digest not in self._held or self._users[digest]:
            return
        del self._users[digest]
        held = self._held.pop(digest)
        held.release()
        if held.mounted and self._store is not None:  # beside the loop: it waits for whoever has the books
            tidying = asyncio.get_running_loop().run_in_executor(None, self._store.unmount_idle)
            self._tidying.add(tidying)
            tidying.add_done_callback(self._tidying.discard)

    async def close(self) -> None:
        """End all uses, and wait until nothing of them is mounted."""
        for user in list(self._digest_of):
            self.release(user)
        for digest in list(self._held):
            self._let_go_if_unused(digest)
        await asyncio.gather(*self._tidying)
        store, self._store = self._store, None
        if store is not None:
            await asyncio.get_running_loop().run_in_executor(None, store.close)


def _taken_by(ref: str) -> str:
    return f"taking/{ref}"  # no sandbox has such an id
