"""Claims on images and layers, as files: they end with their owner, at their time, or with what they are for."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rollmill.sandboxes.disk_records import ProcessMark
from rollmill.sandboxes.images.records import HoldRecord
from rollmill.sandboxes.images.tree_files import write_whole

_PIN = "pin-"


class Hold:
    """One claim. Changes are on disk when the call returns; whoever calls holds the lock of the books.

    Args:
        path: its file.
        record: what it claims.
        durable: survive a power cut, which only claims without an owner need.
    """

    def __init__(self, path: Path, record: HoldRecord, *, durable: bool) -> None:
        self.path = path
        self.record = record
        self._durable = durable
        self._write()

    def _write(self) -> None:
        write_whole(self.path, msgspec.json.encode(self.record), durable=self._durable)

    def add_layer(self, layer_id: str) -> None:
        """Claim a layer as well."""
        if layer_id not in self.record.layers:
            self.record = msgspec.structs.replace(self.record, layers=(*self.record.layers, layer_id))
            self._write()

    def renew(self, until_wall_s: float) -> None:
        """Claim it until another time."""
        self.record = msgspec.structs.replace(self.record, until_wall_s=until_wall_s)
        self._write()

    def release(self) -> None:
        """End the claim; to be called once or more."""
        self.path.unlink(missing_ok=True)


class Holds:
    """The claims of one store.

    Args:
        directory: where they are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def take(
        self,
        what: str,
        *,
        images: Iterable[str] = (),
        owner: ProcessMark | None = None,
        until_wall_s: float | None = None,
    ) -> Hold:
        """Make a claim; `owner` or `until_wall_s` must be given, or it counts for nothing."""
        record = HoldRecord(what=what, images=tuple(images), owner=owner, until_wall_s=until_wall_s)
        path = self._directory / f"{os.getpid()}-{os.urandom(6).hex()}.json"
        return Hold(path, record, durable=until_wall_s is not None)

    def pin(self, image: str, *, holder: str, name: str, what: str) -> None:
        """Make a claim that only `unpin` ends; on disk when this returns.

        Args:
            image: digest.
            holder: what stands on it: letters and digits, the same in every process.
            name: which of the holder's things does.
            what: both in words.
        """
        record = HoldRecord(what=what, images=(image,), pinned_by=holder)
        path = self._pin(holder, name)
        if not _is(path, record):
            Hold(path, record, durable=True)

    def unpin(self, holder: str, name: str) -> None:
        """End such a claim; to be called once or more."""
        self._pin(holder, name).unlink(missing_ok=True)

    def pinned(self, holder: str) -> frozenset[str]:
        """Return the names of what a holder has claims for."""
        start = f"{_PIN}{holder}-"
        return frozenset(path.name[len(start) : -len(".json")] for path in self._directory.glob(f"{start}*.json"))

    def _pin(self, holder: str, name: str) -> Path:
        return self._directory / f"{_PIN}{holder}-{name}.json"

    def standing(self, *, now_wall_s: float, tidy: bool) -> tuple[HoldRecord, ...]:
        """Return the claims that count.

        A file that cannot be read keeps everything: nothing is removed by mistake.

        Args:
            now_wall_s: the time.
            tidy: remove the files of those that do not count any more; only for who has the books alone, as another
                may be renewing one.

        Raises:
            msgspec.MsgspecError: at such a file.
        """
        found: list[HoldRecord] = []
        for path in sorted(self._directory.glob("[!.]*.json")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=HoldRecord)
            except FileNotFoundError:
                continue
            if record.stands(now_wall_s=now_wall_s):
                found.append(record)
            elif tidy:
                path.unlink(missing_ok=True)
        return tuple(found)


def _is(path: Path, record: HoldRecord) -> bool:
    try:
        return msgspec.json.decode(path.read_bytes(), type=HoldRecord) == record
    except (FileNotFoundError, msgspec.MsgspecError):
        return False
