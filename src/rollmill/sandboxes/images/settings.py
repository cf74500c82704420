"""Settings of an image store."""

from __future__ import annotations

import os
from pathlib import Path

from rollmill.errors import ConfigError
from rollmill.sandboxes.images.work import ImageLimits
from rollmill.sandboxes.records import Record

FORMS = ("auto", "tree", "erofs")


class ImageStoreSettings(Record, frozen=True, kw_only=True):
    """How one store keeps its images.

    Attributes:
        directory: where it is; `None`: `/var/lib/rollmill/images` as root, else below the user's data directory.
        limits: what one image may take.
        form: `tree`: unpacked directories that share equal files; `erofs`: one file for each layer, mounted by the
            first use, which needs root, `mkfs.erofs` and Linux 6.12; `auto`: erofs where it works.
        durable: flush what was written before it gets its name. Without it a power cut may leave damaged layers.
        lock_s: how long to wait for another process that prepares the same layer.
        budget_bytes: what the layers may take after a preparation; `None`: nothing is evicted.
    """

    directory: Path | None = None
    limits: ImageLimits = ImageLimits()
    form: str = "auto"
    durable: bool = True
    lock_s: float = 900.0
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ConfigError(f"the form of an image store is {self.form!r}; it is one of {', '.join(FORMS)}")
        if not self.lock_s > 0:
            raise ConfigError(f"lock_s of an image store is {self.lock_s}; it must be above 0")
        if self.budget_bytes is not None and self.budget_bytes < 0:
            raise ConfigError(f"budget_bytes of an image store is {self.budget_bytes}; it must not be below 0")

    def place(self) -> Path:
        """Return where the store is."""
        return default_directory() if self.directory is None else self.directory


def default_directory() -> Path:
    """Return where this user's images are.

    Raises:
        ConfigError: if this user has no home.
    """
    if os.geteuid() == 0:
        return Path("/var/lib/rollmill/images")
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    if data.startswith("~"):
        raise ConfigError(
            f"user {os.geteuid()} has no home, so there is no place for images; set HOME or XDG_DATA_HOME, or name a "
            "directory for them"
        )
    return Path(data) / "rollmill" / "images"
