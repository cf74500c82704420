"""`rollmill autoscale`: replicas of this machine, as many as the load asks for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollmill.cli.access import replica_tls_options, tls_files
from rollmill.cli.output import json_option
from rollmill.errors import ConfigError

if TYPE_CHECKING:
    from rollmill.runtime.autoscaler import ScalingEvent

_LAW: dict[str, tuple[type, Any, str]] = {
    "min_replicas": (int, 1, "Never fewer are kept."),
    "max_replicas": (int, 4, "Never more are there, counting those that start or drain."),
    "target_wait_s": (float, 10.0, "A shorter wait for a seat starts no replica."),
    "high_usage": (float, 0.9, "Share of the KV cache above which there are more."),
    "low_usage": (float, 0.6, "Share of seats and KV that one replica less must stay under."),
    "max_step_out": (int, 2, "Most replicas started at once."),
    "max_step_in": (int, 1, "Most replicas drained at once."),
    "out_rest_s": (float, 30.0, "From one start to the next."),
    "in_rest_s": (float, 120.0, "From any change to the next drain."),
    "in_window_s": (float, 120.0, "The load must have been small for so long before one is drained."),
    "unfit_limit_s": (float, 120.0, "A replica that is unfit for longer is replaced."),
    "start_limit_s": (float, 900.0, "A replica that starts for longer is replaced."),
    "backoff_s": (float, 10.0, "Delay after a replica that ended before it served; doubles with each."),
}


def _law_options(command: Any) -> Any:
    for name, (kind, default, text) in reversed(_LAW.items()):
        flag = f"--{name.replace('_', '-')}"
        command = click.option(flag, name, type=kind, default=default, show_default=True, help=text)(command)
    return command


@click.command("autoscale")
@click.option(
    "--replicas-file",
    required=True,
    type=click.Path(path_type=Path),
    help="Where the addresses of serving replicas are kept, for `rollmill router --replicas-file`.",
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=None,
    help="Logs of the replicas; a folder beside the replicas file unless given.",
)
@click.option("--router", default=None, metavar="HOST:PORT", help="A router whose queue counts as load.")
@_law_options
@click.option("--poll-s", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="From look to look.")
@click.option(
    "--drain-s", type=click.FloatRange(min=0), default=120.0, show_default=True, help="Time to finish what runs."
)
@click.option(
    "--token-file", type=click.Path(), default=None, help="Bearer token of the replicas and the router; passed on."
)
@replica_tls_options
@click.argument("serve_arguments", nargs=-1, type=click.UNPROCESSED)
@json_option
def autoscale_command(
    replicas_file: Path,
    directory: Path | None,
    router: str | None,
    poll_s: float,
    drain_s: float,
    token_file: str | None,
    replica_tls_ca: Path | None,
    replica_tls_cert: Path | None,
    replica_tls_key: Path | None,
    serve_arguments: tuple[str, ...],
    as_json: bool,
    **law: Any,
) -> None:
    """Keep as many replicas as the load asks for, until SIGTERM, which drains them all.

    What follows `--` is given to `rollmill serve` for every replica. Ports must be left to the system. Replicas with
    TLS get their own files there (`-- --tls-cert ...`); how they and the router are called is said before it.

    Example: rollmill autoscale --replicas-file replicas.txt --max-replicas 4 -- --model smollm2-135m-instruct
    """
    from rollmill.generator.security import read_token
    from rollmill.runtime.autoscaler import AutoscalerOptions, run_autoscaler
    from rollmill.scheduling.scaling import ScalingSettings

    tls = tls_files(cert=replica_tls_cert, key=replica_tls_key, ca=replica_tls_ca)
    if tls is None and any(one.split("=")[0] == "--tls-cert" for one in serve_arguments):
        raise ConfigError(
            "the replicas are told to serve with TLS (--tls-cert), and nothing says how to call them: none would ever "
            "be seen to serve. Give --replica-tls-ca before the --, and with mTLS --replica-tls-cert and "
            "--replica-tls-key"
        )
    given = () if token_file is None else ("--token-file", token_file)
    run_autoscaler(
        AutoscalerOptions(
            command=(sys.executable, "-m", "rollmill.cli", "serve", *serve_arguments, *given),
            directory=replicas_file.with_suffix(".replicas") if directory is None else directory,
            replicas_file=replicas_file,
            settings=ScalingSettings(**law),
            router=router,
            poll_s=poll_s,
            drain_s=drain_s,
            token=None if token_file is None else read_token(token_file),
            tls=tls,
        ),
        on_event=lambda event: _tell(event, as_json=as_json),
    )


def _tell(event: ScalingEvent, *, as_json: bool) -> None:
    """Print one line per event; with --json a document per line, because there is no end to wait for."""
    import datetime
    import json

    import msgspec

    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(event)))
        return
    at = datetime.datetime.fromtimestamp(event.at_s).strftime("%H:%M:%S")
    click.echo(f"{at}  {event.kind:<8} {f'{event.replica}: ' if event.replica else ''}{event.text}")
