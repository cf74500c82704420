"""Settings of the gVisor backend."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rollmill.errors import ConfigError
from rollmill.sandboxes.backends.namespaces.settings import NamespaceSettings
from rollmill.sandboxes.isolation import IsolationLevel

_MIB = 1024**2


def default_runsc() -> Path:
    """Return where `rollmill sandbox build-runsc` puts the runtime."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache.startswith("/") else Path.home() / ".cache") / "rollmill" / "gvisor" / "runsc"


class GvisorSettings(NamespaceSettings, frozen=True, kw_only=True):
    """How one provider runs sandboxes with gVisor's kernel: as the namespace backend does, and besides:

    Attributes:
        runsc: the runtime; `None`: the one on the PATH, else the one that was built here.
        platform: how it intercepts system calls, such as `systrap`, `kvm` or `ptrace`; empty: the runtime's default.
        runtime_bytes: memory that the runtime itself may take, on top of `limits.memory_bytes`. Lower it only after
            looking at the peak of a busy sandbox.
        runtime_threads: host threads that it may have on top of four for each of `limits.pids`.
        verb_s: how long it may take to pause or resume.
        checkpoint_s: how long it may take to write the memory of a sandbox to an image.
    """

    minimum_isolation: IsolationLevel = IsolationLevel.OWN_KERNEL
    runsc: Path | None = None
    platform: str = ""
    runtime_bytes: int = 192 * _MIB
    runtime_threads: int = 256
    verb_s: float = 30.0
    checkpoint_s: float = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("runtime_bytes", "runtime_threads", "verb_s", "checkpoint_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")

    def find_runsc(self) -> Path:
        """Return the runtime.

        Raises:
            ConfigError: if there is none that this user may execute.
        """
        if self.runsc is not None:
            candidates = [self.runsc]
        else:
            found = shutil.which("runsc")
            candidates = [*([Path(found)] if found else []), default_runsc()]
        for one in candidates:
            if os.access(one, os.X_OK) and one.is_file():
                return one.resolve()
        raise ConfigError(
            f"gVisor's runtime is missing: no program at {' or '.join(map(str, candidates))}. Install runsc, name it "
            "(settings: runsc), or build it from Debian's packages: `rollmill sandbox build-runsc`."
        )
