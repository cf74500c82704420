"""`rollmill config explain [KEY]` and `rollmill config check`."""

from __future__ import annotations

from pathlib import Path

import click

from rollmill.cli.output import json_option, show
from rollmill.config.explain import explain, render_explained
from rollmill.config.explain_others import explain_other, explain_others, is_other
from rollmill.config.load import load_config


@click.group("config")
def config_group() -> None:
    """Explain and check configurations."""


@config_group.command("explain")
@click.argument("key", required=False)
@click.option("--config", "path", type=click.Path(), default=None, help="TOML file; defaults alone without it.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting; may be repeated.")
@json_option
def explain_command(key: str | None, path: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print every resolved value, its unit, where it came from, and what moving it does.

    Keys of `router` and of `split` (prefill and decode) belong to the files of `rollmill router` and
    `rollmill disaggregate`; --config is such a file then.
    """
    if key is not None and is_other(key):
        rows = explain_other(key, path=None if path is None else Path(path), overrides=overrides)
    else:
        rows = explain(load_config(path, overrides=overrides), key)
        rows += explain_others() if key is None else []
    show(rows, text=render_explained(rows), as_json=as_json)


@config_group.command("check")
@click.argument("path", type=click.Path())
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting; may be repeated.")
@json_option
def check_command(path: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Refuse what cannot work, without starting anything."""
    load_config(path, overrides=overrides)
    show({"ok": True, "path": path}, text=f"{path} can work.", as_json=as_json)
