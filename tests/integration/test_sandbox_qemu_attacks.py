"""Named attacks on a machine under QEMU: those on kernels, networks and names, from inside and seen from the host.

The image is made of this machine's own Python, so that the same code runs inside.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_sandbox_attacks import ends_all_and_starts_another, node, place  # noqa: F401 - fixtures

from image_builders import small_root
from microvm_builders import MachineRig, qemu_rig, why_no_qemu
from rollmill.sandboxes import DirectoryImage, Sandbox, SandboxSpec
from sandbox_attack_rig import Host, Node, host, run_attack
from sandbox_attacks import ATTACKS, KERNEL, NAMES, NAMESPACES, NETWORK, PRIVILEGES, Attack
from sandbox_builders import LIMITS, start

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

QEMU = "qemu"
PYTHON = "/usr/bin/python3"
CHOSEN = tuple(
    one for one in ATTACKS if one.kind in (KERNEL, NAMES, NAMESPACES, NETWORK, PRIVILEGES) and QEMU not in one.left_out
)


def add_python(root: Path) -> str:
    """Copy this machine's Python with what the attacks import; return why that cannot be, if so."""
    if not Path(PYTHON).exists():
        return f"there is no {PYTHON}"
    ask = "import sysconfig, _ctypes; print(sysconfig.get_path('stdlib')); print(_ctypes.__file__)"
    told = subprocess.run([PYTHON, "-I", "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    library, extension = map(Path, told)
    shutil.copy(Path(PYTHON).resolve(), root / "usr/bin/python3")
    ignored = shutil.ignore_patterns("test", "tests", "idlelib", "tkinter", "config-*", "__pycache__", "lib2to3")
    shutil.copytree(library, root / library.relative_to("/"), ignore=ignored)
    for program in (PYTHON, extension):
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for found in re.findall(r"(/\S+)", listed):
            target = root / "usr" / found.lstrip("/").removeprefix("usr/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(found).resolve(), target)
    return ""


@pytest.fixture(scope="module")
def rig(node: Node, place: Path) -> Iterator[MachineRig]:  # noqa: F811
    if reason := why_no_qemu():
        pytest.skip(f"no machines under QEMU here: {reason}")
    with qemu_rig(place / "records", accelerator="tcg") as rig:
        yield rig


@pytest.fixture(scope="module")
def target(rig: MachineRig, node: Node, place: Path) -> Iterator[Host]:  # noqa: F811
    (place / "host").mkdir()
    with host(place / "host") as target:
        node.words += [target.sleep]
        yield target
        rig.run(ends_all_and_starts_another)
        assert target.harm() == []


@pytest.fixture(scope="module")
def shared(rig: MachineRig, target: Host, place: Path) -> Sandbox:  # noqa: F811
    root = small_root(place / "root", programs=("sh", "true", "env"))
    if reason := add_python(root):
        pytest.skip(reason)
    spec = SandboxSpec(image=DirectoryImage(layers=(str(root),)), limits=LIMITS)
    return rig.run(lambda provider: start(provider, spec))


@pytest.mark.parametrize("attack", CHOSEN, ids=lambda one: one.name)
def test_the_attack_fails(rig: MachineRig, shared: Sandbox, target: Host, attack: Attack) -> None:
    words = run_attack(rig, shared, attack, target, user=None)
    assert attack.escaped(words, QEMU) == []
    assert target.harm() == []
