"""The second tier of KV: a file of blocks that were given up in memory and may be wanted again.

Bounded, keyed like the blocks in memory (token ids behind a root that holds epoch and adapter), least recently used
first out. What is read is the bytes that were written, or nothing: length and SHA-256 are compared on every read, and
what differs is forgotten. The index lives in this process alone and the file has no name, so nothing outlives the
process; a name that a crash left between its creation and its removal is swept away at the next start.

Decides what is given up; whether a move pays is `host_law`'s to say. Failures of the disk are misses, never errors of a
request. One thread uses it, that of the engine.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rollmill.clock import Clock
from rollmill.errors import ConfigError
from rollmill.generator.engines.embedded.host_law import MoveCosts
from rollmill.generator.engines.embedded.prefixes import Entry, PrefixIndex
from rollmill.generator.engines.protocol import HostKvLoad

_PREFIX = "rollmill-host-kv-"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class HostTierCounts:
    """What the tier did since it was made; the fields are those of `HostKvLoad`."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    damaged: int = 0
    stored_bytes: int = 0
    restored_bytes: int = 0


class HostTier:
    """Blocks of KV in a file.

    Args:
        folder: where the file lies; made if missing. On a disk: a folder in memory gains nothing.
        nbytes: most bytes of the file.
        block_bytes: of a block whose tokens are all known.
        block_tokens: tokens of a block.
        clock: measures what moving costs.

    Raises:
        ConfigError: if the folder cannot be used, has less room than `nbytes`, or `nbytes` holds no block.
    """

    def __init__(self, folder: Path, *, nbytes: int, block_bytes: int, block_tokens: int, clock: Clock) -> None:
        self.capacity = nbytes // block_bytes
        if not self.capacity:
            raise ConfigError(
                f"generator.host_kv_bytes is {nbytes}, and one block of {block_tokens} tokens takes {block_bytes} "
                "bytes: raise it, or leave it out to keep no KV on the host"
            )
        self.costs = MoveCosts()
        self.counts = HostTierCounts()
        self.known = PrefixIndex()
        self.block_bytes = block_bytes
        self._token_bytes = block_bytes // block_tokens
        self._clock = clock
        self._by_use: OrderedDict[int, bytes] = OrderedDict()  # slot -> digest of its bytes, least recently used first
        self._free: list[int] = []
        self._slots = 0
        self._fd = _open_nameless(folder, nbytes=self.capacity * block_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that hold something; may be read from another thread."""
        return len(self._by_use) * self.block_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slots."""
        return self.capacity * self.block_bytes

    def load(self) -> HostKvLoad:
        """Return what it holds and did; may be called from another thread."""
        return HostKvLoad(used_bytes=self.used_bytes, capacity_bytes=self.capacity_bytes, **asdict(self.counts))

    def nbytes_of(self, entry: Entry) -> int:
        """Return the bytes of an entry's keys and values."""
        return len(entry.tokens) * self._token_bytes

    def put(self, entry: Entry, read: Callable[[], np.ndarray]) -> None:
        """Keep what a block holds, unless it is here already or moving it would not pay.

        Args:
            entry: what it holds.
            read: gives its bytes, uint8 [nbytes_of(entry)].
        """
        if (there := self._holder_of(entry)) is not None:
            self._by_use.move_to_end(there)
            return
        nbytes = self.nbytes_of(entry)
        if not self.costs.decide_store(nbytes=nbytes, tokens=len(entry.tokens)):
            return
        for shorter in self.known.beginnings_of(entry):
            self._forget(shorter)
        slot = self._take_slot()
        started_s = self._clock.now_s()
        digest = self._write(slot, read())
        if digest is None:
            self._free.append(slot)
            return
        self.costs.store.see(nbytes, seconds=self._clock.now_s() - started_s)
        self.known.learn(slot, entry)
        self._by_use[slot] = digest
        self.counts.stored_bytes += nbytes

    def _holder_of(self, entry: Entry) -> int | None:
        if entry.digest is not None:
            return self.known.full(entry.digest)
        there, common = self.known.longest_below(entry.parent, entry.tokens)
        return there if common == len(entry.tokens) else None

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if self._slots < self.capacity:
            self._slots += 1
            return self._slots - 1
        self._forget(next(iter(self._by_use)))
        self.counts.evictions += 1
        return self._free.pop()

    def _write(self, slot: int, content: np.ndarray) -> bytes | None:
        """Write a slot and return the digest of its bytes, or `None` if it could not be written whole."""
        try:
            written = os.pwrite(self._fd, content.data, slot * self.block_bytes)
        except OSError as error:
            self._note_damage(f"{error.strerror}")
            return None
        if written != content.nbytes:
            self._note_damage(f"{written} of {content.nbytes} bytes were written; the disk may be full")
            return None
        return hashlib.sha256(content.data).digest()

    def get(self, slot: int, entry: Entry) -> np.ndarray | None:
        """Return the bytes of an entry, uint8 [nbytes_of(entry)]; `None` if the slot does not hold them any more."""
        if self.known.entry(slot) is not entry:  # given up meanwhile
            return None
        started_s = self._clock.now_s()
        content = np.empty(self.nbytes_of(entry), dtype=np.uint8)
        try:
            read = os.preadv(self._fd, [content.data], slot * self.block_bytes)
        except OSError as error:
            self._note_damage(f"{error.strerror}")
            read = -1
        if read != content.nbytes or hashlib.sha256(content.data).digest() != self._by_use[slot]:
            if read >= 0:
                self._note_damage(f"what was read is not what was written ({read} of {content.nbytes} bytes)")
            self._forget(slot)
            return None
        self.costs.load.see(content.nbytes, seconds=self._clock.now_s() - started_s)
        self._by_use.move_to_end(slot)
        self.counts.restored_bytes += content.nbytes
        return content

    def _note_damage(self, why: str) -> None:
        if not self.counts.damaged:
            _log.warning("the host tier of KV failed: %s. The KV is computed again; later failures are counted", why)
        self.counts.damaged += 1

    def touch(self, slots: list[int]) -> None:
        """Let these be given up last, the first of them last of all."""
        for slot in reversed(slots):
            self._by_use.move_to_end(slot)

    def _forget(self, slot: int) -> None:
        self.known.forget(slot)
        del self._by_use[slot]
        self._free.append(slot)

    def forget_space(self, space: bytes) -> None:
        """Forget what belongs to one space."""
        for slot in self.known.of_space(space):
            self._forget(slot)

    def clear(self) -> None:
        """Forget everything; the file keeps its size, for what comes next."""
        self.known.clear()
        self._by_use.clear()
        self._free = list(range(self._slots - 1, -1, -1))

    def close(self) -> None:
        """Give the file back. Idempotent; nothing may be put or read afterwards."""
        self.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_nameless(folder: Path, *, nbytes: int) -> int:
    """Return a file without a name in a folder, private to this process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        free = shutil.disk_usage(folder).free
        if free >= nbytes:
            path = folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            path.unlink(missing_ok=True)
            return handle
    except OSError as error:
        raise ConfigError(
            f"generator.host_kv_directory {folder} cannot be used: {error.strerror}. Name a folder on a disk that this "
            "process may write to"
        ) from error
    raise ConfigError(
        f"generator.host_kv_bytes asks for {nbytes} bytes in {folder}, where {free} are free: lower it, or name "
        "another generator.host_kv_directory"
    )


def sweep(folder: Path) -> None:
    """Remove the names that crashed processes left; a file that a living one has opened stays its own without it."""
    for path in folder.glob(f"{_PREFIX}*"):
        path.unlink(missing_ok=True)
