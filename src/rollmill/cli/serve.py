"""`rollmill serve`: one replica of the generator on its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from rollmill.cli.access import access_of, access_options
from rollmill.cli.output import json_option, show, show_warnings

if TYPE_CHECKING:
    from rollmill.runtime.serving import Served


@click.command("serve")
@click.option(
    "--model",
    default=None,
    metavar="NAME_OR_PATH",
    help="A name of `rollmill model list`, a Hugging Face directory, or a hub name.",
)
@click.option(
    "--engine",
    default=None,
    type=click.Choice(["embedded", "fake", "sglang", "vllm"]),
    help="What computes; see generator.engine.",
)
@click.option("--config", "config_path", default=None, type=click.Path(), help="TOML file, for example that of a run.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting; may be repeated.")
@click.option(
    "--repository",
    default=None,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Run directory whose published weights are served; LoadWeights takes later ones from there. Without it the "
    "model's own weights are served.",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=DIR",
    help="Run directory whose low-rank adapter is served beside the weights that it was trained on; may be repeated. "
    "Requests ask for it by NAME, LoadWeights takes later versions.",
)
@click.option(
    "--wait-s",
    default=0.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Seconds to wait for the first weights of --repository or --adapter, where the run is started later.",
)
@access_options
@click.option("--http-port", default=0, type=click.IntRange(0, 65535), help="Port of HTTP; 0 lets the system choose.")
@click.option("--no-http", is_flag=True, help="Serve gRPC alone.")
@click.option(
    "--address-file",
    default=None,
    type=click.Path(path_type=Path),
    help="Gets the gRPC address as JSON once calls are answered.",
)
@click.option(
    "--drain-s",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Seconds for running requests after SIGTERM.",
)
@json_option
def serve_command(
    model: str | None,
    engine: str | None,
    config_path: str | None,
    overrides: tuple[str, ...],
    repository: Path | None,
    adapters: tuple[str, ...],
    wait_s: float,
    host: str,
    grpc_port: int,
    http_port: int,
    no_http: bool,
    token_file: str | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    address_file: Path | None,
    drain_s: float,
    as_json: bool,
) -> None:
    """Serve a model: gRPC and OpenAI-compatible HTTP with /metrics, until SIGTERM, which drains."""
    from rollmill.config.checks import check_serving
    from rollmill.config.load import load_config

    chosen = _overrides(model=model, engine=engine)
    config = load_config(config_path, overrides=[*overrides, *chosen], rules=check_serving).config
    access = access_of(host, token_file=token_file, tls_cert=tls_cert, tls_key=tls_key, tls_client_ca=tls_client_ca)
    named_adapters = _named(adapters)
    if wait_s:
        _await_weights(*(() if repository is None else (repository,)), *named_adapters.values(), deadline_s=wait_s)

    from rollmill.runtime.serving import ServeOptions, serve_replica

    def announce(served: Served) -> None:
        show_warnings(served.warnings, as_json=as_json)
        show(msgspec.to_builtins(served), text=_text(served), as_json=as_json)

    serve_replica(
        ServeOptions(
            config=config,
            repository=repository,
            adapters=named_adapters,
            host=host,
            grpc_port=grpc_port,
            http_port=None if no_http else http_port,
            access=access,
            address_file=address_file,
            drain_s=drain_s,
        ),
        on_serving=announce,
    )


def _overrides(*, model: str | None, engine: str | None) -> list[str]:
    """Return options that have a setting of the same meaning as overrides of that setting."""
    named = (("model.source", model), ("generator.engine", engine))
    return [f"{key}={json.dumps(value)}" for key, value in named if value is not None]


def _await_weights(*directories: Path, deadline_s: float) -> None:
    from rollmill.runtime.first_weights import await_first_weights

    for directory in directories:
        await_first_weights(directory, deadline_s=deadline_s, say=lambda text: click.echo(text, err=True))


def _named(adapters: tuple[str, ...]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for text in adapters:
        name, sign, folder = text.partition("=")
        if not (name and sign and folder) or name in found:
            raise click.BadParameter(f"{text!r} is not NAME=DIR with a new name", param_hint="--adapter")
        found[name] = Path(folder)
    return found


def _text(served: Served) -> str:
    lines = [
        f"{served.model}: {served.engine} engine, {served.dtype}, policy version {served.policy_version}, digest "
        f"{served.digest[:12]}",
        f"gRPC  {served.grpc}",
    ]
    if served.http is not None:
        lines.append(f"HTTP  {served.http}/v1  (metrics: {served.http}/metrics)")
    lines += [f"adapter {name}: policy version {version}" for name, version in served.adapters.items()]
    if served.kv_budget:
        lines.append(served.kv_budget)
    lines.append(f"Stop with Ctrl-C or: kill {served.pid}")
    return "\n".join(lines)
