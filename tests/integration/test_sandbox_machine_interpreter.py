"""What is put into a machine is whole: the guest's modules start from there, with what they read beside themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollmill.sandboxes.backends.microvm import interpreter

pytestmark = pytest.mark.integration

PROGRAM = """
import sys, types
for name in ("rollmill", "rollmill.sandboxes", "rollmill.sandboxes.backends", "rollmill.sandboxes.backends.microvm"):
    package = types.ModuleType(name)
    package.__path__ = [sys.argv[1] + name[len("rollmill"):].replace(".", "/")]
    sys.modules[name] = package
import rollmill.sandboxes.backends.microvm.inside as inside
print(inside.__file__)
"""


def test_the_first_process_of_a_machine_finds_all_that_it_starts_with(tmp_path: Path) -> None:
    interpreter.install(sys.executable, tmp_path)
    library = tmp_path / interpreter.LIBRARY / "rollmill"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", PROGRAM, str(library)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(library / "sandboxes/backends/microvm/inside.py")
