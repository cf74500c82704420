"""`make bench` without a benchmark: a stub in place of Python, in a folder that looks set up."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Says which script it was given; the one of "broken" fails.
STUB = '#!/bin/sh\necho "ran $*"\ncase "$1" in *broken*) exit 3 ;; esac\n'

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text(STUB)
    python.chmod(0o755)
    for stamp in (".python", ".run", ".bench"):
        (folder / stamp).touch()
    return subprocess.run(
        ["make", "-s", "-C", str(ROOT), "bench", f"VENV={folder}", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def scripts(result: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.removeprefix("ran ") for line in result.stdout.splitlines() if line.startswith("ran ")]


def test_every_benchmark_folder_with_a_script_is_run_once(tmp_path: Path) -> None:
    result = bench(tmp_path)
    assert result.returncode == 0, result.stderr
    assert scripts(result) == sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("benchmarks/*/run.py"))


def test_one_benchmark_is_run_with_its_arguments(tmp_path: Path) -> None:
    result = bench(tmp_path, "BENCH=trainer", "ARGS=--runs 1")
    assert scripts(result) == ["benchmarks/trainer/run.py --runs 1"]


def test_a_benchmark_that_fails_fails_make_and_the_others_still_run(tmp_path: Path) -> None:
    result = bench(tmp_path, "BENCH=broken startup")
    assert result.returncode == 2
    assert "benchmarks that failed: broken" in result.stderr
    assert scripts(result) == ["benchmarks/broken/run.py", "benchmarks/startup/run.py"]
