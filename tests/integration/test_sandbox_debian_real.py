"""A root file system bootstrapped from Debian's own packages, for real: prepared, found again, and run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from sandbox_builders import why_no_namespaces

MIRROR = "http://deb.debian.org/debian/dists/bookworm/Release"

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def needed(tmp_path: Path) -> None:
    reason = why_not(tmp_path)
    if reason and os.environ.get("REQUIRE_SANDBOXES"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


def why_not(folder: Path) -> str:
    """Return why nothing can be bootstrapped here; empty if it can."""
    if os.geteuid() != 0:
        return "a bootstrap with devices and owners is root's"
    if shutil.which("mmdebstrap") is None:
        return "mmdebstrap is not installed: apt-get install mmdebstrap"
    try:
        urllib.request.urlopen(MIRROR, timeout=20).close()
    except OSError as error:
        return f"Debian's mirror cannot be reached: {error}"
    probe = folder / "probe"
    probe.mkdir()
    return why_no_namespaces(probe) or ""


def sandbox(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollmill.cli", "sandbox", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


def test_a_debian_is_bootstrapped_once_and_its_programs_run_in_sandboxes(tmp_path: Path) -> None:
    store = ("--store", str(tmp_path / "store"))
    made = sandbox("prepare", "debian:bookworm", *store, "--json")
    assert made.returncode == 0, made.stdout + made.stderr
    said = json.loads(made.stdout)
    assert said["layers"] == 1
    assert said["disk_bytes"] > 50_000_000
    assert any("setuid or setgid bits cleared" in note for note in said["notes"])
    records = ("--directory", str(tmp_path / "records"))
    program = "cat /etc/debian_version; dpkg --print-architecture; find / -xdev -perm /6000 -type f | wc -l; id -u"
    ran = sandbox("run", *records, "--image", "debian:bookworm", *store, "sh", "-c", program)
    assert ran.returncode == 0, ran.stderr
    version, architecture, special, user = ran.stdout.split()
    assert version.startswith("12.")
    assert architecture in ("amd64", "arm64")
    assert (special, user) == ("0", "0")
    again = json.loads(sandbox("prepare", "debian:bookworm", *store, "--json").stdout)
    assert again["layers"] == 1
