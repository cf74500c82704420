"""Settings of the namespace backend."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rollmill.errors import ConfigError
from rollmill.sandboxes.disk_records import default_directory
from rollmill.sandboxes.images.settings import ImageStoreSettings
from rollmill.sandboxes.isolation import IsolationLevel
from rollmill.sandboxes.records import Record

# Above what distributions, container managers and systemd hand out, below what programs take for negative.
DEFAULT_ID_BASE = 1_900_000_000
IDS_PER_SANDBOX = 65_536
DEFAULT_ID_RANGES = 3_700
LARGEST_ID = 2**31 - 1
MOST_LAYERS = 64


class NamespaceSettings(Record, frozen=True, kw_only=True):
    """How one provider runs its sandboxes.

    Attributes:
        directory: where the records are; `None`: the user's runtime directory.
        minimum_isolation: below it nothing is started. Lower it only for code that you would run without a sandbox.
        id_base: as root, where ranges of 65,536 user ids begin that own nothing on the host; each sandbox gets one.
        id_ranges: how many such ranges there are; with more sandboxes some share one, which only means common quotas.
        python: interpreter of the zygote; standard library only, any Python from 3.11.
        start_s: from the call until the sandbox answers; longer is a start that failed.
        end_s: from the order to end a sandbox until nothing of it is left.
        answer_s: how long an agent may be late with an answer before its sandbox is given up.
        images: the store in which images are found by name.
        snapshot_directory: where snapshots are kept; `None`: in memory, where they take a moment at any size and end
            with this provider. On a disk they take as long as their files to copy, and outlive it. One provider at a
            time.
        snapshot_bytes: that all snapshots may take together. Raising it keeps more suspended rollouts on this node, and
            leaves it less memory, or disk.
        snapshot_inodes: the same for files and directories, each of which takes about a KiB of kernel memory.
        snapshot_depth: layers below a sandbox. When a snapshot would make it deeper, all are merged into one, which
            takes as long as copying them; lower is faster to open files in, and merges more often.
        store_s: how long merging or storing a snapshot may take.
    """

    directory: Path | None = None
    minimum_isolation: IsolationLevel = IsolationLevel.HARDENED
    id_base: int = DEFAULT_ID_BASE
    id_ranges: int = DEFAULT_ID_RANGES
    python: str = sys.executable
    start_s: float = 30.0
    end_s: float = 60.0
    answer_s: float = 30.0
    images: ImageStoreSettings = ImageStoreSettings()
    snapshot_directory: Path | None = None
    snapshot_bytes: int = 4 * 1024**3
    snapshot_inodes: int = 500_000
    snapshot_depth: int = 16
    store_s: float = 300.0

    def __post_init__(self) -> None:
        last = self.id_base + self.id_ranges * IDS_PER_SANDBOX - 1
        if self.id_base < IDS_PER_SANDBOX or self.id_ranges < 1 or last > LARGEST_ID:
            raise ConfigError(
                f"ids of sandboxes would go from {self.id_base} to {last} (id_base, id_ranges); they must lie between "
                f"{IDS_PER_SANDBOX} and {LARGEST_ID}, where no user of the host has an id"
            )
        for name in ("start_s", "end_s", "answer_s", "snapshot_bytes", "snapshot_inodes", "store_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        if not 1 <= self.snapshot_depth <= MOST_LAYERS:
            raise ConfigError(
                f"snapshot_depth is {self.snapshot_depth}; it must lie between 1 and {MOST_LAYERS}: the kernel takes "
                "no more layers in one mount"
            )

    def records_directory(self) -> Path:
        """Return where the records are."""
        return default_directory() if self.directory is None else self.directory

    def disks(self) -> tuple[Path, ...]:
        """Return directories on the disks that sandboxes, images and snapshots take room of."""
        places = (self.records_directory(), self.images.place(), self.snapshot_directory)
        return tuple(one for one in places if one is not None)

    def maps_ranges(self) -> bool:
        """Return whether sandboxes get ranges of ids: only root may map them. Others map their own id alone."""
        return os.geteuid() == 0

    def id_range(self, number: int) -> int | None:
        """Return the first id of a sandbox's range, `None` where there are none."""
        return self.id_base + number % self.id_ranges * IDS_PER_SANDBOX if self.maps_ranges() else None
