"""Who may call a replica: on loopback all of this machine, elsewhere only who has a token or a client certificate.

| bound to | token | TLS | mTLS | |
|---|---|---|---|---|
| loopback | - | - | - | allowed |
| elsewhere | no | any | no | refused |
| elsewhere | yes | no | no | allowed, and said: tokens and prompts cross the network in clear |
| elsewhere | yes | yes | any | allowed |
| elsewhere | any | yes | yes | allowed |

Pure but for the reading of files; knows nothing of gRPC or HTTP.
"""

from __future__ import annotations

import hmac
from pathlib import Path

import msgspec

from rollmill.config.addresses import is_loopback
from rollmill.errors import ConfigError

MIN_TOKEN_CHARS = 16
SCHEME = "bearer"


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files of one side.

    Attributes:
        cert, key: what this side shows; a client without mTLS has none.
        ca: who signs the other side. On a server: clients must show a certificate of this authority (mTLS).
        server_name: of a client: the name in the server's certificate, where it is not the address.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            given, missing = ("certificate", "key") if self.key is None else ("key", "certificate")
            raise ConfigError(
                f"a TLS {given} was given without its {missing}; give both, for example --tls-cert server.pem "
                "--tls-key server.key"
            )

    def read(self) -> TlsContents:
        """Return the contents of the files.

        Raises:
            ConfigError: naming the file that cannot be read or is no PEM.
        """
        return TlsContents(cert=_read_pem(self.cert), key=_read_pem(self.key), ca=_read_pem(self.ca))


class TlsContents(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the files of one side; `None` where there is none."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica asks of its callers; nothing by default.

    Attributes:
        token: the bearer token of every call; `None` asks for none.
        tls: certificate and key of the server; with `ca`, mTLS.
    """

    token: str | None = None
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        if self.tls is not None and self.tls.cert is None:
            raise ConfigError(
                "TLS on a server needs a certificate and its key; give --tls-cert and --tls-key (and --tls-client-ca "
                "to ask clients for a certificate too)"
            )

    @property
    def mutual(self) -> bool:
        """Whether clients must show a certificate."""
        return self.tls is not None and self.tls.ca is not None


def check_binding(host: str, *, access: Access) -> str | None:
    """Return a warning about what is bound here, or `None`.

    Raises:
        ConfigError: if everybody on the network could call.

    Example:
        >>> check_binding("127.0.0.1", access=Access()) is None
        True
    """
    if is_loopback(host):
        return None
    if access.token is None and not access.mutual:
        raise ConfigError(
            f"{host} can be reached from other machines, and nothing says who may call: anybody could sample, load "
            "weights and drain this replica. Give a token (--token-file FILE), or ask clients for certificates (mTLS: "
            "--tls-cert, --tls-key and --tls-client-ca); or bind 127.0.0.1"
        )
    if access.tls is None:
        return (
            f"{host} is bound without TLS: the token and all prompts cross the network in clear. Give --tls-cert and "
            "--tls-key unless the network is trusted"
        )
    return None


def address_of(host: str, port: int) -> str:
    """Return `host:port`, an IPv6 address in brackets.

    Example:
        >>> address_of("::1", 80), address_of("127.0.0.1", 80)
        ('[::1]:80', '127.0.0.1:80')
    """
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def read_token(file: str | Path) -> str:
    """Return the token in a file, its only line.

    Raises:
        ConfigError: if it cannot be read, or holds no token that is worth the name.
    """
    try:
        text = Path(file).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the token file {file} cannot be read: {error}. Give a file with one line of ASCII"
        ) from error
    token = text.strip()
    if len(token) < MIN_TOKEN_CHARS or not token.isprintable() or " " in token:
        raise ConfigError(
            f"the token in {file} has {len(token)} characters; a token is one word of {MIN_TOKEN_CHARS} or more. Make "
            "one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return token


def bearer(token: str) -> str:
    """Return the value of the `authorization` header or metadata."""
    return f"Bearer {token}"


def admits(authorization: str | bytes | None, *, token: str) -> bool:
    """Return whether a header carries the token; takes equally long for every wrong token of one length.

    Example:
        >>> admits("Bearer sesame-open-sesame", token="sesame-open-sesame")
        True
        >>> admits("Bearer sesame-open", token="sesame-open-sesame")
        False
    """
    if authorization is None:
        return False
    given = authorization.encode() if isinstance(authorization, str) else authorization
    scheme, _, value = given.partition(b" ")
    return scheme.lower() == SCHEME.encode() and hmac.compare_digest(value.strip(), token.encode())


def _read_pem(file: Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"the TLS file {file} cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in content:
        raise ConfigError(f"{file} is no PEM file: it has no line that begins with -----BEGIN")
    return content
