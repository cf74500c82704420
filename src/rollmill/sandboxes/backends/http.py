"""HTTP to the service of somebody else: each call with a deadline and a name, each failure told apart by what it means.

Three things can go wrong, and they are different: the request never left, the answer never came, or the answer was no.
Nothing here tries a call again, except a reading one that met a connection which had been closed while it was idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import math
import os
import re
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from rollmill.errors import (
    ConfigError,
    MissingExtraError,
    RollmillError,
    SandboxError,
    SandboxRetryable,
    Unauthenticated,
)

if TYPE_CHECKING:
    import httpx2 as httpx

_MOST_WORDS = 500
_CONNECT_S = 10.0
_DEFAULT_AFTER_S = 5.0
_LONGEST_AFTER_S = 600.0
_SAFE_TO_REPEAT = frozenset({"GET", "HEAD", "DELETE"})
_QUOTA = re.compile(r"quota|limit (was |is )?(exceeded|reached)|limit_exceeded|too many sandboxes|concurren", re.I)
_LOOPBACK = ("127.", "localhost", "[::1]", "::1")


class Secret:
    """A token that no log and no message shows.

    Example:
        >>> Secret("sk-1"), Secret("sk-1").reveal()
        (Secret(***), 'sk-1')
    """

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """Return it."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)


def token_of(given: Secret | None, *, variable: str, product: str, needed: bool = True) -> str:
    """Return the token: the one that was given, or the environment variable's.

    Raises:
        ConfigError: if there is none and one is needed.
    """
    found = given.reveal() if given is not None else os.environ.get(variable, "")
    if needed and not found:
        raise ConfigError(f"{product} needs a token: set the environment variable {variable}, or give `token`")
    if any(ord(one) < 33 or ord(one) > 126 for one in found):
        raise ConfigError(f"the token of {product} (from {variable}?) holds spaces or characters no header can carry")
    return found


class Unreachable(SandboxError):
    """No connection could be made: nothing was sent."""

    code = "sandbox_unreachable"


class CutOff(SandboxError):
    """The request was sent and its answer did not come: whether it was carried out is unknown."""

    code = "sandbox_cut_off"


class Refused(SandboxError):
    """The service answered, and not with success.

    Attributes:
        status: of HTTP.
        words: what it said.
        content: the beginning of its body, unread.
        after_s: when it asks to be called again, `None` if it does not say.
    """

    code = "sandbox_refused"

    def __init__(
        self, message: str, *, status: int, words: str, content: bytes = b"", after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.words = words
        self.content = content
        self.after_s = after_s


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """An answer.

    Attributes:
        status: of HTTP.
        content: its body.
        headers: names in lower case.
    """

    status: int
    content: bytes
    headers: Mapping[str, str]

    def json(self) -> Any:
        """Return its body as JSON, `None` if it is empty.

        Raises:
            SandboxError: if it is none.
        """
        if not self.content:
            return None
        try:
            return json.loads(self.content)
        except ValueError as error:
            raise SandboxError(f"an answer that should be JSON is none: {self.content[:200]!r}") from error


def retry_after_s(value: str | None, *, now_wall_s: float) -> float | None:
    """Return the seconds that a `Retry-After` header asks for, in either of its two forms.

    Example:
        >>> retry_after_s("7", now_wall_s=0.0), retry_after_s("Thu, 01 Jan 1970 00:01:00 GMT", now_wall_s=20.0)
        (7.0, 40.0)
        >>> retry_after_s("soon", now_wall_s=0.0) is None
        True
    """
    if value is None:
        return None
    try:
        found = float(value)
    except ValueError:
        parsed = email.utils.parsedate_tz(value)
        if parsed is None:
            return None
        found = email.utils.mktime_tz(parsed) - now_wall_s
    return min(max(0.0, found), _LONGEST_AFTER_S) if math.isfinite(found) else None


def words_of(content: bytes) -> str:
    """Return the message in a refusal: what JSON has under the usual names, else the text, cut.

    Example:
        >>> words_of(b'{"code": 404, "message": "no such thing"}'), words_of(b'<html>')
        ('no such thing', '<html>')
    """
    text = content[: 8 * _MOST_WORDS].decode(errors="replace")
    try:
        found = json.loads(content)
    except ValueError:
        return text[:_MOST_WORDS]
    for name in ("message", "detail", "error", "msg"):
        value = found.get(name) if isinstance(found, dict) else None
        if isinstance(value, Mapping):
            value = value.get("message")
        if isinstance(value, str) and value:
            return value[:_MOST_WORDS]
    return text[:_MOST_WORDS]


def as_retryable(error: Refused, *, product: str, what: str) -> SandboxError:
    """Return what a refusal means for whoever wants a sandbox: to wait, or that it failed."""
    if error.status in (429, 503) or (error.status in (400, 402, 403) and _QUOTA.search(error.words)):
        after_s = _DEFAULT_AFTER_S if error.after_s is None else error.after_s
        return SandboxRetryable(
            f"{product} has no room for {what} now ({error.status}: {error.words}); try again after {after_s:g} s, or "
            "ask for fewer at a time",
            after_s=after_s,
        )
    return error


@contextlib.contextmanager
def understood(what: str) -> Iterator[None]:
    """Read the answer to something that was carried out: one that is not understood counts as one that did not come.

    Raises:
        CutOff: in place of what goes wrong inside.
    """
    try:
        yield
    except CutOff:
        raise
    except (SandboxError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CutOff(f"the answer to {what} is not understood, and it was carried out: {error!r}") from error


class VendorHttp:
    """Calls to one service.

    Args:
        product: its name in messages.
        base_url: where it is.
        headers: sent with every call; the token is one of them.
        call_s: deadline of a call that names none.
        socket: path of a Unix socket to go through.
        connections: most of them at once.
        secrets: never repeated in messages, also when the service repeats them.
        trust: which certificates are trusted, the system's if `None`.
        extra: which extra of the project brings the HTTP client.
    """

    def __init__(
        self,
        *,
        product: str,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        call_s: float = 60.0,
        socket: str = "",
        connections: int = 200,
        secrets: tuple[str, ...] = (),
        trust: ssl.SSLContext | None = None,
        extra: str = "hosted",
    ) -> None:
        try:
            import httpx2 as httpx
        except ModuleNotFoundError as error:
            raise MissingExtraError(package="httpx2", purpose=f"the backend {product}", extra=extra) from error
        self._httpx = httpx
        self.product = product
        self.base_url = base_url.rstrip("/")
        self.call_s = call_s
        self._secrets = tuple(one for one in secrets if one)
        host = urlsplit(base_url).hostname or ""
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        transport = httpx.AsyncHTTPTransport(uds=socket, verify=False, limits=limits) if socket else None
        try:
            self._client = httpx.AsyncClient(
                base_url=self.base_url,
                headers=dict(headers or {}),
                transport=transport,
                verify=True if trust is None else trust,
                limits=limits,
                timeout=httpx.Timeout(None, connect=_CONNECT_S),
                follow_redirects=False,  # a token goes nowhere else
                trust_env=not host.startswith(_LOOPBACK),
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"{base_url!r} cannot be the address of {product}: {error}") from error

    async def call(
        self,
        method: str,
        path: str,
        *,
        what: str,
        body: Any = None,
        content: bytes | None = None,
        parameters: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        files: Mapping[str, Any] | None = None,
        form: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        most_bytes: int | None = None,
    ) -> Reply:
        """Return the answer to a call.

        Args:
            method: of HTTP.
            path: below the base address, or a whole address.
            what: what the call is for, in messages.
            body: sent as JSON.
            content: sent as it is.
            parameters: of the query.
            headers: more of them.
            files: sent as a form's parts.
            form: sent as a form's fields.
            deadline_s: for all of it.
            most_bytes: of the answer that are kept; one more tells that there was more.

        Raises:
            Unreachable: if nothing was sent.
            CutOff: if the answer did not come.
            Refused: if the answer is no.
            Unauthenticated: if the token is not taken.
        """
        sent = {"json": body, "content": content, "files": files, "data": form}
        arguments = {name: value for name, value in sent.items() if value is not None}
        repeats = 1 if method in _SAFE_TO_REPEAT else 0
        for turn in range(repeats + 1):
            try:
                async with self.stream(
                    method, path, what=what, parameters=parameters, headers=headers, deadline_s=deadline_s, **arguments
                ) as answer:
                    data = await _body(answer, most_bytes)
                    return Reply(status=answer.status_code, content=data, headers=dict(answer.headers))
            except CutOff as error:
                closed = isinstance(error.__cause__, self._httpx.RemoteProtocolError)
                if turn == repeats or not closed:
                    raise
        raise AssertionError("the loop above returns or raises")

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        what: str,
        parameters: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        **arguments: Any,
    ) -> AsyncIterator[httpx.Response]:
        """Yield an answer whose body is still to come; raises as `call` does, within the block too."""
        limit_s = self.call_s if deadline_s is None else deadline_s
        httpx = self._httpx
        try:
            # A stream without a deadline may end in another task than it began, which a timeout may not.
            async with (
                contextlib.nullcontext() if limit_s == math.inf else asyncio.timeout(limit_s),
                self._client.stream(
                    method, path, params=parameters, headers=dict(headers or {}), **arguments
                ) as answer,
            ):
                if answer.status_code >= 300 or answer.status_code < 200:
                    raise self._refusal(what, answer, await _body(answer, 64 * 1024))
                yield answer
        except TimeoutError as error:
            raise CutOff(
                f"{self.product} did not answer within {limit_s:g} s: {what}. It may have been carried out; raise the "
                "deadline if the service is slow"
            ) from error
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol) as error:
            raise Unreachable(
                f"{self.product} cannot be reached at {self.base_url}: {error!r}. Nothing was sent ({what}); look at "
                "the address, and at what stands between"
            ) from error
        except (httpx.InvalidURL, httpx.LocalProtocolError) as error:
            raise SandboxError(f"{self.product}: a request that cannot be sent, {what}: {error}") from error
        except httpx.TransportError as error:
            raise CutOff(
                f"the connection to {self.product} was cut off: {what} ({error!r}). Whether it was carried out is "
                "unknown"
            ) from error

    async def pieces(self, answer: httpx.Response, *, what: str, silence_s: float) -> AsyncIterator[bytes]:
        """Yield the body of a stream as it comes.

        Raises:
            CutOff: if the connection is lost, or nothing comes for `silence_s`.
        """
        body = answer.aiter_raw()
        while True:
            try:
                async with asyncio.timeout(None if silence_s == math.inf else silence_s):
                    piece = await anext(body, None)
            except TimeoutError as error:
                raise CutOff(f"{self.product} gave no sign of life for {silence_s:g} s: {what}") from error
            except self._httpx.TransportError as error:
                raise CutOff(f"the connection to {self.product} was lost: {what} ({error!r})") from error
            if piece is None:
                return
            yield piece

    def _refusal(self, what: str, answer: httpx.Response, content: bytes) -> RollmillError:
        words = self.clean(words_of(content))
        status = answer.status_code
        if status == 401 or (status == 403 and not _QUOTA.search(words)):
            return Unauthenticated(
                f"{self.product} refuses the token ({status}: {words}) for: {what}. Look at the environment variable "
                "or setting that it comes from, and at what it may do"
            )
        after_s = retry_after_s(answer.headers.get("retry-after"), now_wall_s=time.time())
        return Refused(
            f"{self.product} answered {status} to: {what}. {words}",
            status=status,
            words=words,
            content=content,
            after_s=after_s,
        )

    def clean(self, words: str) -> str:
        """Return words without the secrets that a service may have repeated in them."""
        for secret in self._secrets:
            words = words.replace(secret, "***")
        return words

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()


async def _body(answer: httpx.Response, most_bytes: int | None) -> bytes:
    found = bytearray()
    async for piece in answer.aiter_bytes():
        found += piece
        if most_bytes is not None and len(found) > most_bytes:
            return bytes(found[: most_bytes + 1])
    return bytes(found)
