"""`rollmill disaggregate`: the commands of a vLLM fleet that is split into prefill and decode."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from rollmill.cli.output import json_option, show

if TYPE_CHECKING:
    from rollmill.generator.engines.vllm.split import Server, SplitPlan


@click.command("disaggregate")
@click.argument("split_path", metavar="SPLIT", type=click.Path())
@json_option
def disaggregate_command(split_path: str, as_json: bool) -> None:
    """Print the commands of the vLLM servers and of the router for SPLIT, a TOML file.

    Ranks, memory and ports are checked first; a split that cannot work is refused with every reason. Nothing is
    started.
    """
    from rollmill.config.disaggregation import load_split
    from rollmill.errors import ConfigError
    from rollmill.generator.engines.vllm.split import SplitModel, plan_split
    from rollmill.weights.inspection import inspect

    settings = load_split(split_path)
    if not settings.model:
        raise ConfigError(f"{split_path} names no model: set model = 'PATH' to a local Hugging Face directory")
    facts = inspect(settings.model)
    model = SplitModel(**{name: getattr(facts, name) for name in SplitModel.__struct_fields__})
    plan = plan_split(settings, model=model)
    show(plan, text=_text(plan), as_json=as_json)


def _text(plan: SplitPlan) -> str:
    parts = [_server_text(server) for server in plan.servers]
    parts.append(f"# router, on {plan.router_host}\n{shlex.join(plan.router)}")
    parts += [f"# note: {note}." for note in plan.notes]
    return "\n\n".join(parts)


def _server_text(server: Server) -> str:
    gpus = ", ".join(map(str, server.gpus))
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in server.environment.items())
    return (
        f"# {server.role} {server.index}, on {server.host}, GPUs {gpus}; KV of {server.kv_capacity_tokens} tokens\n"
        f"{variables} {shlex.join(server.command)}"
    )
