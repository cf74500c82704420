"""Templates: the names by which callers ask for an image and its limits.

[templates.base]                 # the host's own system directories
memory_mib = 512
cpus = 1.0
ready = 8                        # kept started, for callers who come next

[templates.tools]
layers = ["/srv/images/tools"]   # unpacked root file systems, the uppermost first
envs = { LANG = "C.UTF-8" }

[templates.python]
image = "python:3.12"            # a name that the backend knows
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rollmill.errors import ConfigError
from rollmill.sandboxes.records import DirectoryImage, HostImage, Image, Limits, NamedImage, Record, SandboxSpec

DEFAULT_TEMPLATE = "base"
_MIB = 1024**2


class Template(Record, frozen=True, kw_only=True):
    """What a name stands for.

    Attributes:
        layers: directories of an unpacked root file system, the uppermost first; none: the host's own.
        image: a name that the backend knows, instead of `layers`.
        memory_mib, disk_mib, inodes, pids, cpus, output_mib, open_files: see `Limits`.
        expose: files and directories of the host that are shown, read only.
        envs: environment of every command.
        ready: how many are kept started beside those in use. Raising it serves larger bursts at once, and takes an idle
            sandbox's memory for each.
    """

    layers: tuple[str, ...] = ()
    image: str = ""
    memory_mib: int = 512
    disk_mib: int = 512
    inodes: int = 50_000
    pids: int = 128
    cpus: float = 1.0
    output_mib: int = 64
    open_files: int = 1024
    expose: tuple[str, ...] = ()
    envs: Mapping[str, str] = msgspec.field(default_factory=dict)
    ready: int = 0

    def __post_init__(self) -> None:
        if self.ready < 0:
            raise ConfigError(f"ready of a template is {self.ready}; it must not be below 0")
        if self.layers and self.image:
            raise ConfigError(
                f"a template has layers {list(self.layers)} and the image {self.image!r}; give one of them, or none "
                "for the host's own directories"
            )

    def spec(self, *, wall_s: float) -> SandboxSpec:
        """Return what a sandbox of it is made of; `wall_s` bounds its life."""
        limits = Limits(
            memory_bytes=self.memory_mib * _MIB,
            disk_bytes=self.disk_mib * _MIB,
            inodes=self.inodes,
            pids=self.pids,
            cpus=self.cpus,
            output_bytes=self.output_mib * _MIB,
            open_files=self.open_files,
            wall_s=wall_s,
        )
        return SandboxSpec(image=self._image(), limits=limits, expose=self.expose)

    def _image(self) -> Image:
        if self.layers:
            return DirectoryImage(layers=self.layers)
        return NamedImage(name=self.image) if self.image else HostImage()


class _File(Record, frozen=True, kw_only=True):
    templates: dict[str, Template]


def load_templates(path: Path | None) -> Mapping[str, Template]:
    """Return the templates of a file; without one `base`, the host's own directories.

    Raises:
        ConfigError: if the file is missing, no TOML, or says what no template has.
    """
    if path is None:
        return {DEFAULT_TEMPLATE: Template()}
    try:
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File).templates
        for template in found.values():
            template.spec(wall_s=1.0)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"templates cannot be read from {path}: {error}") from error
    if not found:
        raise ConfigError(f"{path} names no template, so no sandbox could be made; add a table [templates.base]")
    return found
