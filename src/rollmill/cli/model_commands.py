"""`rollmill model list|prepare`."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from rollmill.cli.output import json_option, show


@click.group("model")
def model_group() -> None:
    """Show and prepare models."""


@model_group.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """Show the models that have a name, and whether they are ready."""
    from rollmill.weights.catalog import catalog
    from rollmill.weights.prepare import find_prepared

    rows = [
        {**msgspec.to_builtins(entry), "installed": entry.installed, "prepared": find_prepared(entry.name) is not None}
        for entry in catalog()
    ]
    width = max(len(row["name"]) for row in rows)
    lines = [f"{row['name']:<{width}}  {_readiness(row):<13}  {row['description']}" for row in rows]
    lines.append("Any local Hugging Face directory works too; on a machine with a hub, a hub name.")
    show(rows, text="\n".join(lines), as_json=as_json)


def _readiness(row: dict[str, Any]) -> str:
    if row["prepared"]:
        return "ready"
    return "to prepare" if row["installed"] else "not installed"


@model_group.command("prepare")
@click.argument("source")
@json_option
def prepare_command(source: str, as_json: bool) -> None:
    """Make SOURCE ready to train: a local Hugging Face directory with safetensors, made once and cached."""
    from rollmill.weights.prepare import prepare

    prepared = prepare(source)
    record = msgspec.to_builtins(prepared, enc_hook=str)
    show(record, text=f"{record['name']} is ready at {record['path']}", as_json=as_json)
