"""A Debian root file system by `mmdebstrap` or `debootstrap`, whichever is installed.

Both run the packages' own scripts on this machine, before any sandbox: this trusts the archive of the distribution, as
an installation of a package does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from rollmill.sandboxes.images.refusals import Refusal, refused
from rollmill.sandboxes.images.work import Work

_SUITE = re.compile(r"[a-z][a-z0-9-]{0,39}")
_LONGEST_S = 3600.0
_LOOK_S = 1.0
_TOLD_BYTES = 600


def bootstrap(suite: str, *, scratch: Path, work: Work) -> Path:
    """Return a tar of a minimal system.

    Args:
        suite: such as `bookworm`.
        scratch: takes the tar, and the tree of `debootstrap`.
        work: bounds.

    Raises:
        ImageError: if neither program is here, or if it failed.
    """
    if not _SUITE.fullmatch(suite):
        raise refused(Refusal.NAME, f"{suite!r} cannot be a suite of Debian; write such as debian:bookworm")
    target = scratch / "debian.tar"
    if (program := shutil.which("mmdebstrap")) is not None:
        command = [program, "--variant=minbase", "--format=tar", suite, os.fspath(target)]
        _run(command, scratch=scratch, work=work)
        return target
    program = shutil.which("debootstrap")
    if program is None:
        what = f"debian:{suite} needs mmdebstrap or debootstrap, and neither is installed"
        advice = "Install one (`apt-get install mmdebstrap`), or give an archive that was made elsewhere"
        raise refused(Refusal.BOOTSTRAP, f"{what}. {advice}.")
    if os.geteuid() != 0:
        what = "debootstrap needs root; install mmdebstrap, which does not"
        raise refused(Refusal.BOOTSTRAP, what)
    tree = scratch / "tree"
    _run([program, "--variant=minbase", suite, os.fspath(tree)], scratch=scratch, work=work)
    _run(["tar", "-C", os.fspath(tree), "-cf", os.fspath(target), "."], scratch=scratch, work=work)
    return target


def _run(command: list[str], *, scratch: Path, work: Work) -> None:
    """Run a program to its end, its output in a file, with the deadline and the end of the preparation in sight."""
    name = os.path.basename(command[0])
    work.enter(f"run {name}")
    log = scratch / "log"
    environment = {**os.environ, "TMPDIR": os.fspath(scratch), "DEBIAN_FRONTEND": "noninteractive"}
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            while child.poll() is None:
                try:
                    child.wait(min(_LOOK_S, work.left_s(most=_LONGEST_S)))
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if child.poll() is None:
                os.killpg(child.pid, 9)
                child.wait()
    if child.returncode != 0:
        told = log.read_bytes()[-_TOLD_BYTES:].decode("utf-8", "replace").strip()
        raise refused(Refusal.BOOTSTRAP, f"{name} ended with {child.returncode}: {told}")
