"""Settings that every backend of virtual machines has."""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path

from rollmill.errors import ConfigError
from rollmill.sandboxes.disk_records import default_directory
from rollmill.sandboxes.images.settings import ImageStoreSettings
from rollmill.sandboxes.isolation import IsolationLevel
from rollmill.sandboxes.records import Record

MIB = 1024**2
_DURATIONS = ("boot_s", "start_s", "answer_s", "end_s")


class MicroVmSettings(Record, frozen=True, kw_only=True):
    """How one provider runs its machines.

    Attributes:
        directory: where the records are; `None`: the user's runtime directory.
        minimum_isolation: below it nothing is started.
        kernel: image of a kernel with its modules in /lib/modules; `None`: the newest in /boot, one for clouds first.
        python: interpreter of the agent inside; any Python from 3.11.
        overhead_bytes: memory of a machine beyond the sandbox's limit: its kernel and the agent. Raising it wastes
            little, since only what is touched is taken; below 96 MiB a kernel may not start.
        boot_s: from the start of a template's machine until its agent answers.
        start_s: from the call until a clone answers.
        answer_s: how long an agent may be late with an answer before its sandbox is given up.
        end_s: from the order to end a sandbox until nothing of it is left.
        templates: booted machines that are kept, one for each image and size of memory. Raising it boots less, and
            keeps more memory: what each has touched, about 90 MB.
        snapshot_bytes: that all snapshots may take together, in memory.
        images: the store in which images are found by name.
        separate_users: as root, whether each machine's process is a user of its own, without any capability. Turn it
            off only where such a user cannot execute the program.
        scratch: where disks take their room; `None`: the system's directory for temporary files.
    """

    directory: Path | None = None
    minimum_isolation: IsolationLevel = IsolationLevel.OWN_KERNEL
    kernel: Path | None = None
    python: str = sys.executable
    overhead_bytes: int = 128 * MIB
    boot_s: float = 180.0
    start_s: float = 60.0
    answer_s: float = 60.0
    end_s: float = 30.0
    templates: int = 4
    snapshot_bytes: int = 2 * 1024**3
    images: ImageStoreSettings = ImageStoreSettings()
    separate_users: bool = True
    scratch: Path | None = None

    def __post_init__(self) -> None:
        for name in _DURATIONS:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0 and finite")
        if self.overhead_bytes < 96 * MIB:
            raise ConfigError(f"overhead_bytes is {self.overhead_bytes}; a kernel needs {96 * MIB} at least")
        if self.templates < 1:
            raise ConfigError(f"templates is {self.templates}; at least one machine must be kept to clone from")

    def records_directory(self) -> Path:
        """Return where the records of sandboxes are."""
        return default_directory() if self.directory is None else self.directory

    def disks(self) -> tuple[Path, ...]:
        """Return directories on the disks that machines, images and records take room of."""
        scratch = Path(tempfile.gettempdir()) if self.scratch is None else self.scratch
        return self.records_directory(), self.images.place(), scratch
