"""Settings of the namespace backend."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rollmill.errors import ConfigError
from rollmill.sandboxes.disk_records import default_directory
from rollmill.sandboxes.isolation import IsolationLevel
from rollmill.sandboxes.records import Record

# Above what distributions, container managers and systemd hand out, below what programs take for negative.
DEFAULT_ID_BASE = 1_900_000_000
IDS_PER_SANDBOX = 65_536
_LARGEST_ID = 2**31 - 1


class NamespaceSettings(Record, frozen=True, kw_only=True):
    """How one provider runs its sandboxes.

    Attributes:
        directory: where the records are; `None`: the user's runtime directory.
        minimum_isolation: below it nothing is started. Lower it only for code that you would run without a sandbox.
        id_base: as root, the first of 65,536 user ids of the host that own nothing there; `None` to use one id only.
        python: interpreter of the zygote; standard library only, any Python from 3.11.
        start_s: from the call until the sandbox answers; longer is a start that failed.
        end_s: from the order to end a sandbox until nothing of it is left.
        answer_s: how long an agent may be late with an answer before its sandbox is given up.
    """

    directory: Path | None = None
    minimum_isolation: IsolationLevel = IsolationLevel.HARDENED
    id_base: int | None = DEFAULT_ID_BASE
    python: str = sys.executable
    start_s: float = 30.0
    end_s: float = 60.0
    answer_s: float = 30.0

    def __post_init__(self) -> None:
        if self.id_base is not None and not 65_536 <= self.id_base <= _LARGEST_ID - IDS_PER_SANDBOX:
            raise ConfigError(
                f"id_base is {self.id_base}; it must be between 65536 and {_LARGEST_ID - IDS_PER_SANDBOX}, where no "
                "user of the host has an id"
            )
        for name in ("start_s", "end_s", "answer_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")

    def records_directory(self) -> Path:
        """Return where the records are."""
        return default_directory() if self.directory is None else self.directory

    def effective_id_base(self) -> int | None:
        """Return the base of ids as it can be used: only root may map a range."""
        return self.id_base if os.geteuid() == 0 else None
