"""Options that several commands of `rollmill sandbox` have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

P = ParamSpec("P")
R = TypeVar("R")

BACKENDS = ("namespaces", "gvisor", "qemu")
"""Backends of this machine."""


def backend_option(command: Callable[P, R]) -> Callable[P, R]:
    """Add `--backend`."""
    text = "What runs sandboxes: the kernel's own namespaces, gVisor's kernel within them, or machines under QEMU."
    option = click.option("--backend", type=click.Choice(BACKENDS), default=BACKENDS[0], show_default=True, help=text)
    return option(command)


def isolation_option(command: Callable[P, R]) -> Callable[P, R]:
    """Add `--minimum-isolation`."""
    text = "Refuse to run with less than this level."
    return click.option("--minimum-isolation", default="hardened", show_default=True, help=text)(command)


def directory_option(command: Callable[P, R]) -> Callable[P, R]:
    """Add `--directory`, of the records of sandboxes."""
    text = "Where the records of sandboxes are; the user's runtime directory unless given."
    return click.option("--directory", type=click.Path(path_type=Path), default=None, help=text)(command)


def store_option(command: Callable[P, R]) -> Callable[P, R]:
    """Add `--store`, of images."""
    text = "Where images are kept; /var/lib/rollmill/images as root, else below the user's data directory."
    return click.option("--store", type=click.Path(path_type=Path), default=None, help=text)(command)
