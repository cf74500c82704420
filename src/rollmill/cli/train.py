"""`rollmill train`: the command. Starts importing for trainer and replicas before it imports what it needs itself."""

from __future__ import annotations

import contextlib
import sys

import click

from rollmill.cli.output import json_option


@click.command("train")
@click.argument("config_path", metavar="CONFIG", type=click.Path(), required=False)
@click.option("--resume", "resume_directory", metavar="RUN_DIR", default=None, help="Go on with a stopped run.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Print the plan and refuse what cannot work; start nothing.")
@json_option
def train_command(
    config_path: str | None,
    resume_directory: str | None,
    overrides: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train the model of CONFIG, a TOML file, or go on with --resume RUN_DIR."""
    from rollmill.runtime.nursery import Nursery

    # Without the kernel's help for orphans each process imports for itself.
    wanted = not dry_run and sys.platform.startswith("linux")
    with Nursery.start() if wanted else contextlib.nullcontext() as nursery:
        from rollmill.cli.training import train

        train(
            config_path,
            resume_directory=resume_directory,
            overrides=overrides,
            dry_run=dry_run,
            as_json=as_json,
            nursery=nursery,
        )
