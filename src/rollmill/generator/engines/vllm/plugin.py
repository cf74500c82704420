"""The folder of one vLLM server: its socket, and our plugin, as an installed distribution would lie on its path."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rollmill.errors import ConfigError
from rollmill.generator.engines.remote.folders import own_folder

_FILE = Path(__file__).parent / "server_side" / "rollmill_vllm_plugin.py"
_LONGEST_SOCKET_PATH = 100
"""The kernel takes 107 bytes."""


def server_folder(*, entry_point: str) -> Path:
    """Make a folder that only this user can enter, with the plugin in it.

    Raises:
        ConfigError: if the path of a socket in it would be too long.
    """
    folder = own_folder("vLLM")
    if len(os.fsencode(socket_in(folder))) > _LONGEST_SOCKET_PATH:
        shutil.rmtree(folder)
        raise ConfigError(
            f"the folder for temporary files, {folder.parent}, has so long a path that no socket can be made in it. "
            "Set TMPDIR to a shorter one."
        )
    write_plugin(plugin_in(folder), entry_point=entry_point)
    return folder


def socket_in(folder: Path) -> Path:
    """Return the server's socket."""
    return folder / "socket"


def plugin_in(folder: Path) -> Path:
    """Return what is put on the server's path."""
    return folder / "plugin"


def write_plugin(folder: Path, *, entry_point: str) -> None:
    """Make a folder that, on a server's path, holds the plugin with its entry point."""
    module = _FILE.stem
    information = folder / f"{module}-1.0.dist-info"
    information.mkdir(parents=True)
    shutil.copyfile(_FILE, folder / _FILE.name)
    name = module.replace("_", "-")
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (information / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{entry_point} = {module}:register\n", encoding="utf-8"
    )
