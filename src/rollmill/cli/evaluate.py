"""`rollmill eval CHECKPOINT`: held-out accuracy of a checkpoint with its confidence interval."""

from __future__ import annotations

from pathlib import Path

import click

from rollmill.cli.output import json_option, show
from rollmill.config.load import load_config
from rollmill.errors import CheckpointError


@click.command("eval")
@click.argument("checkpoint", type=click.Path())
@click.option(
    "--config",
    "path",
    type=click.Path(),
    default=None,
    help="TOML file; the run's own if CHECKPOINT lies in a run directory.",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting; may be repeated.")
@json_option
def evaluate_command(checkpoint: str, path: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Evaluate CHECKPOINT, a checkpoint or any model source, on the held-out problems."""
    from rollmill.runtime.evaluation import evaluate_checkpoint

    config = load_config(_config_of(checkpoint, path), overrides=overrides).config
    record = evaluate_checkpoint(checkpoint, config=config)
    text = (
        f"held-out accuracy {record['accuracy']:.3f} (95 % interval {record['low']:.3f} to {record['high']:.3f}, "
        f"{record['n']} problems, temperature {record['temperature']:g}, {record['unscored']} without a verdict)"
    )
    show(record, text=text, as_json=as_json)


def _config_of(checkpoint: str, path: str | None) -> Path:
    if path is not None:
        return Path(path)
    own = Path(checkpoint).resolve().parent.parent / "config.toml"
    if own.exists():
        return own
    raise CheckpointError(
        f"{checkpoint} does not lie in a run directory, so the task is unknown. Say which with --config FILE.toml."
    )
