"""`rollmill engine install|list`: environments of engines that live in one of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from rollmill.cli.output import json_option, show


@click.group("engine")
def engine_group() -> None:
    """Show and make the environments of inference engines."""


@engine_group.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """Show the engines, and whether they are ready on this machine."""
    from rollmill.generator.engines.vllm import environment as vllm

    folder = vllm.managed_folder()
    ready = vllm.is_ready(folder)
    rows = [
        {"engine": "embedded", "ready": True, "environment": None},
        {"engine": "vllm", "ready": ready, "environment": str(folder)},
    ]
    lines = [
        "embedded  ready: part of Rollmill",
        f"vllm      {'ready' if ready else f'not installed: {vllm.INSTALL_COMMAND}'}  {folder}",
    ]
    show(rows, text="\n".join(lines), as_json=as_json)


@engine_group.command("install")
@click.argument("engine", type=click.Choice(["vllm"]))
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default=None,
    help="Build to install; what this machine has unless given.",
)
@json_option
def install_command(engine: str, device: Literal["cpu", "cuda"] | None, as_json: bool) -> None:
    """Make the environment of ENGINE: minutes, and 3.5 GB for vLLM on a CPU. Does nothing where it is ready."""
    from rollmill.generator.engines.vllm.environment import install

    python: Path = install(device=device)
    record = {"engine": engine, "python": str(python)}
    show(record, text=f"{engine} is ready: {python}", as_json=as_json)


@engine_group.command("plugin")
@click.argument("folder", type=click.Path(path_type=Path))
@json_option
def plugin_command(folder: Path, as_json: bool) -> None:
    """Write vLLM's transport for weights into FOLDER, a new one, for servers that `rollmill disaggregate` prints.

    Servers of a replica of Rollmill's own have it without this.
    """
    from rollmill.errors import ConfigError
    from rollmill.generator.engines.settings import TRANSPORT
    from rollmill.generator.engines.vllm.plugin import write_plugin

    if folder.exists():
        raise ConfigError(f"{folder} exists; name a new folder, or remove it first: it may hold an older transport")
    write_plugin(folder, entry_point=TRANSPORT)
    show({"folder": str(folder)}, text=f"vLLM's transport for weights is in {folder}", as_json=as_json)
