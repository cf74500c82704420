"""`rollmill router`: many replicas of the generator behind one address."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from rollmill.cli.access import access_of, access_options, replica_tls_options, tls_files
from rollmill.cli.output import json_option, show, show_warnings
from rollmill.errors import ConfigError

if TYPE_CHECKING:
    from rollmill.generator.router.membership import Source
    from rollmill.runtime.routing import Routed


@click.command("router")
@click.option(
    "--replica",
    "replicas",
    multiple=True,
    metavar="HOST:PORT",
    help="A replica; may be repeated. `HOST:PORT jobs=NAME,NAME` serves these jobs alone.",
)
@click.option(
    "--replicas-file",
    default=None,
    type=click.Path(path_type=Path),
    help="File with one replica a line, read again when it changes; `rollmill autoscale` writes one.",
)
@click.option(
    "--replicas-dns", default=None, metavar="NAME:PORT", help="DNS name with an A record for each replica, asked again."
)
@click.option("--config", "config_path", default=None, type=click.Path(), help="TOML file with a table [router].")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting; may be repeated.")
@click.option(
    "--model",
    default=None,
    metavar="NAME_OR_PATH",
    help="Whose tokenizer the router has: needed for text over HTTP, and to move requests in text form.",
)
@access_options
@click.option(
    "--http-port",
    default=None,
    type=click.IntRange(0, 65535),
    help="Serve OpenAI-compatible HTTP too, on this port; 0 lets the system choose.",
)
@click.option(
    "--replica-token-file",
    default=None,
    type=click.Path(),
    help="File with the token that the replicas ask for; --token-file unless given.",
)
@replica_tls_options
@click.option(
    "--drain-s",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Seconds for running requests after SIGTERM.",
)
@json_option
def router_command(
    replicas: tuple[str, ...],
    replicas_file: Path | None,
    replicas_dns: str | None,
    config_path: str | None,
    overrides: tuple[str, ...],
    model: str | None,
    host: str,
    grpc_port: int,
    http_port: int | None,
    token_file: str | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    replica_token_file: str | None,
    replica_tls_ca: Path | None,
    replica_tls_cert: Path | None,
    replica_tls_key: Path | None,
    drain_s: float,
    as_json: bool,
) -> None:
    """Route requests to many replicas behind one address, until SIGTERM, which drains."""
    from rollmill.config.router import load_router_settings
    from rollmill.generator.security import read_token

    settings = load_router_settings(config_path, overrides=overrides)
    source = _source(replicas, replicas_file, replicas_dns)
    access = access_of(host, token_file=token_file, tls_cert=tls_cert, tls_key=tls_key, tls_client_ca=tls_client_ca)
    replica_tls = tls_files(cert=replica_tls_cert, key=replica_tls_key, ca=replica_tls_ca)

    from rollmill.runtime.routing import RouterOptions, route

    def announce(routed: Routed) -> None:
        show_warnings(routed.warnings, as_json=as_json)
        show(msgspec.to_builtins(routed), text=_text(routed), as_json=as_json)

    route(
        RouterOptions(
            settings=settings,
            source=source,
            model=model,
            host=host,
            grpc_port=grpc_port,
            http_port=http_port,
            access=access,
            replica_token=access.token if replica_token_file is None else read_token(replica_token_file),
            replica_tls=replica_tls,
            drain_s=drain_s,
        ),
        on_serving=announce,
    )


def _source(replicas: tuple[str, ...], file: Path | None, dns: str | None) -> Source:
    """Return the list of replicas that was asked for, which is exactly one."""
    from rollmill.generator.router.membership import DnsList, FileList, FixedList, parse_entry

    if [bool(replicas), file is not None, dns is not None].count(True) != 1:
        raise ConfigError(
            "say where the replicas are in one way: --replica HOST:PORT (once or more), --replicas-file FILE, or "
            "--replicas-dns NAME:PORT"
        )
    if file is not None:
        return FileList(file)
    if dns is not None:
        entry = parse_entry(dns)
        name, _, port = entry.address.rpartition(":")
        return DnsList(name, int(port), jobs=entry.jobs)
    entries = [parse_entry(one) for one in replicas]
    twice = sorted({one.address for one in entries if [other.address for other in entries].count(one.address) > 1})
    if twice:
        raise ConfigError(f"{', '.join(twice)} was given twice as --replica; give each replica once")
    return FixedList(entries)


def _text(routed: Routed) -> str:
    lines = [f"gRPC  {routed.grpc}"]
    if routed.http is not None:
        lines.append(f"HTTP  {routed.http}/v1")
    lines.append(f"Stop with Ctrl-C or: kill {routed.pid}")
    return "\n".join(lines)
