"""Options that every server of the generator has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

P = ParamSpec("P")
R = TypeVar("R")


def access_options(command: Callable[P, R]) -> Callable[P, R]:
    """Add the interface, the port of gRPC, and what callers must show."""
    options = (
        click.option(
            "--host",
            default="127.0.0.1",
            show_default=True,
            help="Interface to bind. Others than loopback need a token or mTLS.",
        ),
        click.option(
            "--grpc-port",
            default=0,
            type=click.IntRange(0, 65535),
            help="Port of gRPC; 0 lets the system choose.",
        ),
        click.option(
            "--token-file", default=None, type=click.Path(), help="File with the bearer token that callers must give."
        ),
        click.option(
            "--tls-cert", default=None, type=click.Path(path_type=Path), help="Certificate of this server, PEM."
        ),
        click.option("--tls-key", default=None, type=click.Path(path_type=Path), help="Its private key, PEM."),
        click.option(
            "--tls-client-ca",
            default=None,
            type=click.Path(path_type=Path),
            help="Authority, PEM: clients must show a certificate that it signed (mTLS).",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command
