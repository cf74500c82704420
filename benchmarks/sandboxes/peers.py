"""Other launchers of the same machine: each runs a program in fresh namespaces, over the host's `/usr`, offline."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollmill.errors import ConfigError
from rollmill.sandboxes.backends.gvisor import GvisorSettings

DEADLINE_S = 30.0
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}


class Peer:
    """A launcher, or why it is left out.

    Args:
        name: of the program.
        program: its path.
        version: its first line of `--version`.
    """

    def __init__(self, name: str, version: str, *, program: str) -> None:
        self.name, self.version, self.program = name, version, program

    def run(self, argv: Sequence[str]) -> None:
        """Run a program in a fresh sandbox, from the start to the end of the launcher."""
        raise NotImplementedError


class Bubblewrap(Peer):
    """One process per sandbox: no limits, no root file system of its own."""

    def run(self, argv: Sequence[str]) -> None:
        """Run a program."""
        links = [part for name, target in LINKS.items() for part in ("--symlink", target, f"/{name}")]
        options = ["--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr", *links]
        options += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        subprocess.run([self.program, *options, "--", *argv], check=True, capture_output=True, timeout=DEADLINE_S)


class OciRuntime(Peer):
    """`runc`, `crun` or `runsc`: a bundle whose root has the host's `/usr`, its own overlay of nothing, and limits.

    Args:
        folder: where the bundle is made.
    """

    options = ()

    def __init__(self, name: str, version: str, *, program: str, folder: Path) -> None:
        super().__init__(name, version, program=program)
        self._bundle = folder / name
        root = self._bundle / "rootfs"
        for inside in ("usr", "proc", "dev", "sys", "tmp"):
            (root / inside).mkdir(parents=True)
        for link, target in LINKS.items():
            (root / link).symlink_to(target)
        subprocess.run([program, "spec"], cwd=self._bundle, check=True, capture_output=True, timeout=DEADLINE_S)
        self._spec: dict[str, Any] = json.loads((self._bundle / "config.json").read_text())
        self._spec["mounts"] += [
            {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["size=64m", "nr_inodes=20000"]},
        ]
        self._spec["process"]["terminal"] = False

    def run(self, argv: Sequence[str]) -> None:
        """Run a program."""
        self._spec["process"]["args"] = list(argv)
        (self._bundle / "config.json").write_text(json.dumps(self._spec))
        command = [self.program, *self.options, "run", "--bundle", str(self._bundle), f"bench-{uuid.uuid4().hex[:12]}"]
        subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL)


class Gvisor(OciRuntime):
    """`runsc`: as above, without a network of its own making."""

    options = ("--network=none", "--ignore-cgroups")


class Peers:
    """The launchers that are installed and work here; those that are not, with the reason. A context manager."""

    def __enter__(self) -> Peers:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-peers-")
        self.found: list[Peer] = []
        self.left_out: dict[str, str] = {}
        for name in ("bwrap", "runc", "crun", "runsc"):
            try:
                peer = self._peer(name, folder=Path(self._folder.name))
                peer.run(["true"])
            except (OSError, subprocess.SubprocessError, LookupError, ConfigError) as error:
                told = getattr(error, "stderr", None)
                self.left_out[name] = told.decode(errors="replace").strip()[-300:] if told else str(error)
            else:
                self.found.append(peer)
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def _peer(self, name: str, *, folder: Path) -> Peer:
        program = _program(name)
        told = subprocess.run([program, "--version"], check=True, capture_output=True, text=True, timeout=DEADLINE_S)
        version = told.stdout.splitlines()[0]
        if name == "bwrap":
            return Bubblewrap(name, version, program=program)
        return (Gvisor if name == "runsc" else OciRuntime)(name, version, program=program, folder=folder)


def _program(name: str) -> str:
    if name == "runsc":  # also the one that `rollmill sandbox build-runsc` made
        return str(GvisorSettings().find_runsc())
    if (found := shutil.which(name)) is None:
        raise LookupError("not installed")
    return found
