"""Makes the environment in which the real SGLang runs on a CPU, for tests of the adapter.

    python tests/integration/sglang_rig/make.py        # Python 3.11; 5 minutes, 3.3 GB in the cache directory

The wheel is the ordinary one from the package index, installed without its dependencies: those pin CUDA builds. In
their place come the ordinary packages that its text path imports, at its own versions where it names one, and a CPU
build of torch. `torchvision` and `sgl_kernel` do not load without a GPU; `stub/sitecustomize.py` stands in for them. A
test rig, not a way to serve.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rollmill.weights.catalog import cache_directory

SGLANG = "0.5.23"
STUB = Path(__file__).parent / "stub"
COMMAND = "python tests/integration/sglang_rig/make.py"
STEP_DEADLINE_S = 1800.0

PACKAGES = (
    "aiohttp",
    "anthropic>=0.20.0",
    "apache-tvm-ffi==0.1.11",
    "blobfile==3.0.0",
    "build",
    "compressed-tensors==0.18.0",
    "datasets",
    "distro",
    "easydict",
    "einops",
    "fastapi",
    "gguf",
    "interegular",
    "IPython",
    "llguidance>=1.7.6,<2",
    "mistral_common>=1.11.5",
    "msgspec",
    "ninja",
    "numba==0.65.1",
    "numpy",
    "nvidia-ml-py",
    "openai==2.8.0",
    "openai-harmony==0.0.4",
    "orjson",
    "outlines==0.1.11",
    "packaging",
    "partial_json_parser",
    "pillow",
    "prometheus-client>=0.20.0",
    "psutil",
    "py-spy",
    "pybase64",
    "pydantic",
    "python-dateutil<3",
    "python-multipart",
    "pyzmq>=25.1.2",
    "regex",
    "requests",
    "scipy",
    "sentencepiece==0.2.1",
    "setproctitle",
    "soundfile==0.13.1",
    "tiktoken",
    "torch==2.13.0",
    "tqdm",
    "transformers==5.19.0",
    "triton",
    "uvicorn>=0.51",
    "uvloop",
    "watchfiles",
    "xxhash",
    "zstandard",
)
WITHOUT_DEPENDENCIES = (f"sglang=={SGLANG}", "xgrammar==0.2.7")

ARGUMENTS = ("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph")
"""`generator.sglang.arguments` in this environment."""
VARIABLES = {
    "PYTHONPATH": str(STUB),
    # Without it its layers look for CUDA kernels also on a CPU.
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""`generator.sglang.variables` in this environment."""


def folder() -> Path:
    """Return where the environment lies."""
    return cache_directory().parent / "engines" / f"sglang-cpu-{SGLANG}"


def python() -> Path:
    """Return its interpreter."""
    return folder() / "bin" / "python"


def is_ready() -> bool:
    """Return whether it was made to its end."""
    return (folder() / "ready").exists()


def steps() -> tuple[tuple[str, ...], ...]:
    """Return the commands that make it."""
    pip = (str(python()), "-m", "pip", "install", "-q")
    return (
        (sys.executable, "-m", "venv", str(folder())),
        (*pip, *PACKAGES),
        (*pip, "--no-deps", *WITHOUT_DEPENDENCIES),
    )


def make() -> None:
    """Make it, unless it is there; a second process waits for the first. One that was left unfinished is made anew.

    Raises:
        SystemExit: if a step fails.
    """
    if sys.version_info[:2] != (3, 11):
        raise SystemExit(f"SGLang {SGLANG} is tested with Python 3.11, and this is {sys.version.split()[0]}")
    folder().parent.mkdir(parents=True, exist_ok=True)
    with (folder().parent / f".{folder().name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_ready():
            return
        shutil.rmtree(folder(), ignore_errors=True)
        for step in steps():
            _run(step)
        (folder() / "ready").write_text(folder().name, encoding="utf-8")


def _run(step: Sequence[str]) -> None:
    try:
        subprocess.run(step, check=True, timeout=STEP_DEADLINE_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise SystemExit(f"the environment for SGLang was not made: {error}") from error


if __name__ == "__main__":
    make()
