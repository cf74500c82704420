"""Holds: small files that keep a version's tensors from being retired while somebody uses them.

A hold names the process that took it; a hold of a dead process does not count. No torch.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import psutil

from rollmill.weights.files import writing


class _Hold(msgspec.Struct, frozen=True, kw_only=True):
    policy_version: int
    owner: str
    pid: int
    started_at_s: float | None


class Holds:
    """The holds of one repository. The caller keeps the repository's lock around each call."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _path(self, policy_version: int, owner: str) -> Path:
        # Owners are free text; a digest makes a safe file name.
        return self._directory / f"v{policy_version:06d}.{hashlib.sha256(owner.encode()).hexdigest()[:16]}.json"

    def add(self, policy_version: int, *, owner: str) -> None:
        """Note that this process holds a version for `owner`.

        Raises:
            WeightError: if the disk is full or refuses.
        """
        pid = os.getpid()
        hold = _Hold(policy_version=policy_version, owner=owner, pid=pid, started_at_s=started_at_s(pid))
        path = self._path(policy_version, owner)
        partial = path.with_suffix(".partial")
        with writing("a hold on weights", into=self._directory, kept="What is served stays."):
            partial.write_bytes(msgspec.json.encode(hold) + b"\n")
            partial.rename(path)

    def remove(self, policy_version: int, *, owner: str) -> None:
        """Forget a hold; one that is not there is forgotten already."""
        self._path(policy_version, owner).unlink(missing_ok=True)

    def living(self) -> dict[int, tuple[str, ...]]:
        """Return version -> owners for holds of living processes; holds of dead ones are removed.

        One that cannot be read is a dead one's: it is written whole, and only a power cut leaves less of it.
        """
        found: dict[int, tuple[str, ...]] = {}
        for path in sorted(self._directory.glob("v*.json")):
            try:
                hold = msgspec.json.decode(path.read_bytes(), type=_Hold)
            except msgspec.DecodeError:
                hold = None
            if hold is None or started_at_s(hold.pid) != hold.started_at_s:
                path.unlink(missing_ok=True)
                continue
            found[hold.policy_version] = (*found.get(hold.policy_version, ()), hold.owner)
        return found


def started_at_s(pid: int) -> float | None:
    """Return when a living process started, which tells it from a later one with the same pid."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
