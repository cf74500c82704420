"""The command tree. Each command is thin: it parses, calls, prints; its module is imported when it is asked for."""

from __future__ import annotations

import importlib

import click

from rollmill import __version__

_COMMANDS = {
    "autoscale": "rollmill.cli.autoscale:autoscale_command",
    "bench": "rollmill.cli.bench:bench_group",
    "config": "rollmill.cli.config_commands:config_group",
    "disaggregate": "rollmill.cli.disaggregate:disaggregate_command",
    "engine": "rollmill.cli.engine_commands:engine_group",
    "eval": "rollmill.cli.evaluate:evaluate_command",
    "fleet": "rollmill.cli.fleet:fleet_group",
    "model": "rollmill.cli.model_commands:model_group",
    "router": "rollmill.cli.router:router_command",
    "sandbox": "rollmill.cli.sandbox:sandbox_group",
    "serve": "rollmill.cli.serve:serve_command",
    "summary": "rollmill.cli.summary:summary_command",
    "train": "rollmill.cli.train:train_command",
}


class _Commands(click.Group):
    """Commands by name, imported late."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        return getattr(importlib.import_module(module), name)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rollmill")
def cli() -> None:
    """Asynchronous reinforcement learning for language models that keeps the trainer fed."""


def main() -> None:
    """Run the command line."""
    cli(prog_name="rollmill")
