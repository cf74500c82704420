"""Import paths in the configuration: `package.module:Name`.

Decides nothing. A path that cannot be imported is a `ConfigError` that says which half is wrong. The current folder
counts as importable, so that an environment beside the configuration file works without being installed.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any

from rollmill.errors import ConfigError


def nearest(name: str, known: list[str], *, show: int = 3) -> str:
    """Return the known names closest to `name` as a phrase; all of them where none is close."""
    close = difflib.get_close_matches(name, known, n=show, cutoff=0.5)
    if close:
        return "nearest: " + ", ".join(close)
    return "known: " + ", ".join(sorted(known))


def is_import_path(text: str) -> bool:
    """Return whether the text has the form `package.module:Name`."""
    module, colon, name = text.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def import_object(path: str, *, setting: str) -> Any:
    """Return what an import path names.

    Args:
        path: `package.module:Name`.
        setting: the setting that holds the path, for the message.

    Raises:
        ConfigError: if the form is wrong, the module cannot be imported, or it has no such name.
    """
    if not is_import_path(path):
        raise ConfigError(f"{setting} = {path!r} is not an import path. Write it as 'package.module:Name'.")
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{setting} = {path!r}: importing {module_name!r} failed with {type(error).__name__}: {error}. "
            "Install the package, or start from the folder that contains it."
        ) from error
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise ConfigError(f"{setting} = {path!r}: module {module_name!r} has no {name!r} ({nearest(name, public)}).")
    return getattr(module, name)
