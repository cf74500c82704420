"""Evidence on disk: one JSON file for each end, bounded in size, and in number by the oldest going first."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from rollmill.errors import SandboxError
from rollmill.sandboxes.disk_records import check_id, default_directory
from rollmill.sandboxes.watchdog.records import Evidence

FOLDER = "evidence"


class DiskEvidence:
    """Keeps evidence in one directory, made if missing, for this user alone.

    Args:
        directory: where; `None`: below the records of this user's sandboxes.
        most_files: newest files that stay.
        most_bytes: size of a file. What does not fit loses its details first, then its oldest samples.
    """

    def __init__(self, directory: Path | None = None, *, most_files: int = 200, most_bytes: int = 64 * 1024) -> None:
        self.directory = default_directory() / FOLDER if directory is None else directory
        self._most_files = most_files
        self._most_bytes = most_bytes

    async def keep(self, evidence: Evidence) -> str:
        """Write one in a thread, and return its path.

        Raises:
            SandboxError: if it cannot be written.
        """
        return os.fspath(await asyncio.to_thread(self.write, evidence))

    def write(self, evidence: Evidence) -> Path:
        """Write one, whole or not at all, and remove the oldest beyond the number. Blocks.

        Raises:
            SandboxError: if it cannot be written.
        """
        # Names sort by time, and one sandbox ends once.
        name = f"{int(evidence.wall_s * 1000):015d}-{check_id(evidence.sandbox_id)}"
        path = self.directory / f"{name}.json"
        scratch = self.directory / f"{name}.tmp{os.getpid()}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(bounded(evidence, most_bytes=self._most_bytes))
            scratch.replace(path)
        except OSError as error:
            with suppress(OSError):  # it was not made, or goes with whatever is wrong with its directory
                scratch.unlink()
            raise SandboxError(
                f"evidence of the end of {evidence.sandbox_id} cannot be written to {self.directory}: {error}. Make "
                "room there, or name another directory."
            ) from error
        self._rotate()
        return path

    def _rotate(self) -> None:
        files = sorted(self.directory.glob("*.json"))
        for path in files[: max(0, len(files) - self._most_files)]:
            path.unlink(missing_ok=True)


def bounded(evidence: Evidence, *, most_bytes: int) -> bytes:
    """Return evidence as JSON within a size: a sandbox must not fill its node by being ended."""
    data = _encoded(evidence)
    if len(data) > most_bytes:
        said = {"dropped": f"{len(msgspec.json.encode(dict(evidence.details)))} bytes were too large for this file"}
        evidence = msgspec.structs.replace(evidence, details=said)
        data = _encoded(evidence)
    while len(data) > most_bytes and evidence.samples:
        evidence = msgspec.structs.replace(evidence, samples=evidence.samples[(len(evidence.samples) + 1) // 2 :])
        data = _encoded(evidence)
    return data


def _encoded(evidence: Evidence) -> bytes:
    return msgspec.json.format(msgspec.json.encode(evidence), indent=1)
