"""`rollmill config explain [KEY]` and `rollmill config check`."""

from __future__ import annotations

import click

from rollmill.cli.output import json_option, show
from rollmill.config.explain import explain, render_explained
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
    """Print every resolved value, its unit, where it came from, and what moving it does."""
    rows = explain(load_config(path, overrides=overrides), key)
    show(rows, text=render_explained(rows), as_json=as_json)


@config_group.command("check")
@click.argument("path", type=click.Path())
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting; may be repeated.")
@json_option
def check_command(path: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Refuse what cannot work, without starting anything."""
    load_config(path, overrides=overrides)
    show({"ok": True, "path": path}, text=f"{path} can work.", as_json=as_json)
