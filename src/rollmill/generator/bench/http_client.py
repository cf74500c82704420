"""As much of HTTP/1.1 as a load needs: a request with a body on a kept connection, and its answer piece by piece.

Repeats only what was sent on a kept connection that the server had closed. It is here because a load generator must
cost little: it shares the machine with what it measures.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlsplit

from rollmill.errors import ConfigError, EngineDead, EngineError
from rollmill.generator.security import TlsFiles

_LINE_BYTES = 64 * 1024


_PORTS = {"http": 80, "https": 443}


class HttpConnections:
    """Kept connections to one server.

    Args:
        url: `http://HOST:PORT`, or `https://HOST:PORT`.
        token: sent as bearer token.
        tls: of this side, for `https`; without it the system's authorities are trusted.

    Raises:
        ConfigError: if the URL is none of that form, or there are TLS files and it is not `https`, or they cannot be
            used.
    """

    def __init__(self, url: str, *, token: str | None = None, tls: TlsFiles | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise ConfigError(
                f"{url} is no address of the form http://HOST:PORT or https://HOST:PORT; other schemes are not measured"
            )
        if tls is not None and parts.scheme != "https":
            raise ConfigError(
                f"TLS files were given and {url} is called without TLS; write https://, or leave them out"
            )
        self.host, self.port, self.path = parts.hostname, parts.port or _PORTS[parts.scheme], parts.path.rstrip("/")
        self._origin = f"{parts.scheme}://{self.host}:{self.port}"
        self._context = _context(tls) if parts.scheme == "https" else None
        self._server_name = tls.server_name if tls is not None and tls.server_name else self.host
        self._token = token
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def request(self, method: str, path: str, *, body: bytes = b"") -> HttpAnswer:
        """Send a request and return its answer's head; its body must be read or closed.

        Raises:
            EngineDead: if the server cannot be reached or hung up.
            EngineError: if the answer is no HTTP.
        """
        stale = bool(self._idle)
        reader, writer = self._idle.pop() if self._idle else await self._connect()
        try:
            return await self._send(reader, writer, method=method, path=path, body=body)
        except EngineDead:
            # A kept connection that the server has closed meanwhile: nothing was begun on it.
            if not stale:
                raise
            reader, writer = await self._connect()
            return await self._send(reader, writer, method=method, path=path, body=body)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            secured = {} if self._context is None else {"ssl": self._context, "server_hostname": self._server_name}
            return await asyncio.open_connection(self.host, self.port, limit=_LINE_BYTES * 16, **secured)
        except OSError as error:
            raise EngineDead(
                f"{self._origin} cannot be reached: {error}. Is it served, and with a certificate that is trusted here?"
            ) from error

    async def _send(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, method: str, path: str, body: bytes
    ) -> HttpAnswer:
        lines = [
            f"{method} {self.path}{path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            f"Content-Length: {len(body)}",
        ]
        if body:
            lines.append("Content-Type: application/json")
        if self._token is not None:
            lines.append(f"Authorization: Bearer {self._token}")
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            await writer.drain()
            status, headers = await _head(reader)
        except (OSError, asyncio.IncompleteReadError) as error:
            _drop(writer)
            raise EngineDead(f"{self._origin} hung up: {error}") from error
        except BaseException:
            _drop(writer)
            raise
        return HttpAnswer(status, headers, reader=reader, writer=writer, keep=self._idle)

    def close(self) -> None:
        """Close the connections that are not in use."""
        for _, writer in self._idle:
            _drop(writer)
        self._idle.clear()


class HttpAnswer:
    """An answer whose body is still to come."""

    def __init__(
        self,
        status: int,
        headers: Mapping[str, str],
        *,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        keep: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
    ) -> None:
        self.status = status
        self.headers = headers
        self._reader, self._writer, self._keep = reader, writer, keep

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes; the connection is kept once it is whole, else closed."""
        whole = False
        try:
            if self.headers.get("transfer-encoding", "").lower() == "chunked":
                while size := int((await _line(self._reader)).split(b";")[0], 16):
                    yield await self._reader.readexactly(size)
                    await self._reader.readexactly(2)
                await _line(self._reader)
            else:
                yield await self._reader.readexactly(int(self.headers.get("content-length", "0")))
            whole = True
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise EngineDead(f"the answer was cut: {error}") from error
        finally:
            if whole and self.headers.get("connection", "").lower() != "close":
                self._keep.append((self._reader, self._writer))
            else:
                _drop(self._writer)

    async def read(self) -> bytes:
        """Return the whole body."""
        return b"".join([piece async for piece in self.pieces()])


def _drop(writer: asyncio.StreamWriter) -> None:
    """Close a connection at once: with TLS a polite end waits for the server, and nobody waits here."""
    writer.transport.abort()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first = (await _line(reader)).split(b" ", 2)
    if len(first) < 2 or not first[0].startswith(b"HTTP/1.") or not first[1].isdigit():
        raise EngineError(f"the answer is no HTTP: it begins with {b' '.join(first)[:80]!r}")
    headers = {}
    while line := await _line(reader):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(first[1]), headers


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return (await reader.readuntil(b"\r\n"))[:-2]
    except asyncio.LimitOverrunError as error:
        raise EngineError(f"a line of the answer is longer than {_LINE_BYTES * 16} bytes") from error


def _context(tls: TlsFiles | None) -> ssl.SSLContext:
    """Return the TLS of a client.

    Raises:
        ConfigError: if a file is no certificate, key or authority.
    """
    if tls is None:
        return ssl.create_default_context()
    tls.read()  # says which file cannot be read
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
    except ssl.SSLError as error:
        raise ConfigError(f"the TLS files {tls.cert}, {tls.key} and {tls.ca} cannot be used: {error}") from error
    return context
