"""The command tree. Each command is thin: it parses, calls, prints."""

from __future__ import annotations

import click

from rollmill import __version__
from rollmill.cli.config_commands import config_group
from rollmill.cli.evaluate import evaluate_command
from rollmill.cli.model_commands import model_group
from rollmill.cli.summary import summary_command
from rollmill.cli.train import train_command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rollmill")
def cli() -> None:
    """Asynchronous reinforcement learning for language models that keeps the trainer fed."""


cli.add_command(train_command)
cli.add_command(evaluate_command)
cli.add_command(model_group)
cli.add_command(config_group)
cli.add_command(summary_command)


def main() -> None:
    """Run the command line."""
    cli(prog_name="rollmill")
