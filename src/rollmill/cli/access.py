"""Options that the servers of the generator have, and those who call them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click

if TYPE_CHECKING:
    from rollmill.generator.security import Access, TlsFiles

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


def replica_tls_options(command: Callable[P, R]) -> Callable[P, R]:
    """Add what a caller of replicas shows and trusts; `tls_files` makes one value of the three."""
    options = (
        click.option(
            "--replica-tls-ca",
            default=None,
            type=click.Path(path_type=Path),
            help="Authority of the replicas' certificates, PEM; they are called with TLS then.",
        ),
        click.option(
            "--replica-tls-cert",
            default=None,
            type=click.Path(path_type=Path),
            help="The caller's own certificate for replicas with mTLS, PEM.",
        ),
        click.option("--replica-tls-key", default=None, type=click.Path(path_type=Path), help="Its private key, PEM."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def access_of(
    host: str, *, token_file: str | None, tls_cert: Path | None, tls_key: Path | None, tls_client_ca: Path | None
) -> Access:
    """Return what callers of a server must show, by the values of `access_options`.

    Raises:
        ConfigError: if a file cannot be read, a value came without another that it needs, or others than this machine
            could come in without showing anything.
    """
    from rollmill.generator.security import Access, check_binding, read_token

    access = Access(
        token=None if token_file is None else read_token(token_file),
        tls=tls_files(cert=tls_cert, key=tls_key, ca=tls_client_ca),
    )
    check_binding(host, access=access)
    return access


def tls_files(*, cert: Path | None, key: Path | None, ca: Path | None) -> TlsFiles | None:
    """Return the files of one side, `None` if there are none.

    Raises:
        ConfigError: if a certificate came without its key, or the other way round.
    """
    from rollmill.generator.security import TlsFiles

    return None if (cert, key, ca) == (None, None, None) else TlsFiles(cert=cert, key=key, ca=ca)
