"""Other launchers of the same machine: each runs a program in fresh namespaces, over the host's `/usr`, offline."""

from __future__ import annotations

import json
import os
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
    """A launcher.

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
    """`runc`, `crun` or `runsc`: a bundle whose root has the host's `/usr`, no overlay, and no limits of ours.

    Args:
        folder: where bundle and state are.
        options: of the program, before the verb.
    """

    def __init__(self, name: str, version: str, *, program: str, folder: Path, options: Sequence[str] = ()) -> None:
        super().__init__(name, version, program=program)
        self._bundle = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
        before = _hiding_version_2() if HIDDEN in options else []
        own = [one for one in options if one != HIDDEN]
        self._command = [*before, program, "--root", str(self._bundle / "state"), *own]
        root = self._bundle / "rootfs"
        for inside in ("usr", "proc", "dev", "sys", "tmp"):
            (root / inside).mkdir(parents=True)
        for link, target in LINKS.items():
            (root / link).symlink_to(target)
        rootless = ["--rootless"] if os.geteuid() != 0 and name != "runsc" else []
        self._call([program, "spec", *rootless], cwd=self._bundle)
        self._spec: dict[str, Any] = json.loads((self._bundle / "config.json").read_text())
        self._spec["mounts"] += [
            {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["size=64m", "nr_inodes=20000"]},
        ]
        self._spec["process"]["terminal"] = False

        self._write(["sleep", "1000000"])

    def _write(self, argv: Sequence[str]) -> None:
        self._spec["process"]["args"] = list(argv)
        (self._bundle / "config.json").write_text(json.dumps(self._spec))

    def _call(self, command: Sequence[str], *, cwd: Path | None = None) -> None:
        # Into a file: what a detached container keeps open of a pipe would be waited for. And from one: runc and crun
        # give what they find there to the container's user, and this machine's /dev/null is not theirs to give.
        with tempfile.TemporaryFile() as nothing, tempfile.TemporaryFile() as said:
            done = subprocess.run(
                command, cwd=cwd, stdin=nothing, stdout=said, stderr=said, timeout=DEADLINE_S, check=False
            )
            if done.returncode != 0:
                said.seek(0)
                raise subprocess.CalledProcessError(done.returncode, command, stderr=said.read())

    def run(self, argv: Sequence[str]) -> None:
        """Run a program."""
        self._write(argv)
        self._call([*self._command, "run", "--bundle", str(self._bundle), _new_name()])
        self._write(["sleep", "1000000"])

    def start(self, *, below: str | None = None) -> str:
        """Start a container that sleeps; return its name. Several threads may, unless `below` names a group for it."""
        name = _new_name()
        if below is not None:
            self._spec["linux"]["cgroupsPath"] = f"{below}/{name}"
            self._write(["sleep", "1000000"])
        self._call([*self._command, "run", "--detach", "--bundle", str(self._bundle), name])
        return name

    def exec(self, name: str, argv: Sequence[str]) -> None:
        """Run a program in a container that is there, to its end."""
        self._call([*self._command, "exec", name, *argv])

    def end(self, name: str) -> None:
        """End a container, and what is left of it."""
        self._call([*self._command, "delete", "--force", name])


def _hiding_version_2() -> list[str]:
    """Return the command that runs another one without sight of version 2 of cgroups."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    place = next((fields[1] for fields in mounts if fields[2] == "cgroup2"), None)
    if place is None:
        raise LookupError("there is no version 2 of cgroups to hide")
    return ["unshare", "--mount", "sh", "-c", 'umount -l "$0" && exec "$@"', place]


def _new_name() -> str:
    return f"bench-{uuid.uuid4().hex[:12]}"


HIDDEN = "(version 2 of cgroups hidden by unshare)"
# Tried one after the other. gVisor without a network of its own making; crun refuses version 1 and 2 of cgroups side by
# side, so there the latter is hidden from it, which adds the time of unshare and sh to each of its calls.
OPTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "runc": ((),),
    "crun": ((), (HIDDEN,)),
    "runsc": (("--network=none", "--ignore-cgroups"), ("--network=none", "--ignore-cgroups", "--rootless")),
}


class Peers:
    """The launchers that are installed and work here; those that are not, with the reason. A context manager.

    Args:
        names: which ones to try.
    """

    def __init__(self, names: Sequence[str] = ("bwrap", "runc", "crun", "runsc")) -> None:
        self._names = names

    def __enter__(self) -> Peers:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-peers-")
        self.found: list[Peer] = []
        self.left_out: dict[str, str] = {}
        for name in self._names:
            for options in OPTIONS.get(name, ((),)):
                try:
                    peer = self._peer(name, folder=Path(self._folder.name), options=options)
                    peer.run(["true"])
                except (OSError, subprocess.SubprocessError, LookupError, ConfigError) as error:
                    told = getattr(error, "stderr", None)
                    self.left_out[name] = told.decode(errors="replace").strip()[-300:] if told else str(error)
                else:
                    self.left_out.pop(name, None)
                    self.found.append(peer)
                    break
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def _peer(self, name: str, *, folder: Path, options: Sequence[str]) -> Peer:
        program = _program(name)
        told = subprocess.run([program, "--version"], check=True, capture_output=True, text=True, timeout=DEADLINE_S)
        version = " ".join([told.stdout.splitlines()[0], *options])
        if name == "bwrap":
            return Bubblewrap(name, version, program=program)
        return OciRuntime(name, version, program=program, folder=folder, options=options)


def _program(name: str) -> str:
    if name == "runsc":  # also the one that `rollmill sandbox build-runsc` made
        return str(GvisorSettings().find_runsc())
    if (found := shutil.which(name)) is None:
        raise LookupError("not installed")
    return found
