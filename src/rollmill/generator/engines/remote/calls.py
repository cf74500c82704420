"""HTTP calls to a server, each with a deadline and a name, each ended by the server's death.

Decides which error a failed call is, but for refusals: those are the port's to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import httpx2 as httpx

from rollmill.errors import DeadlineExceeded, EngineDead, EngineError

_LEARN_OF_DEATH_S = 10.0
"""A lost connection is the first sign of a death; its cause is known once the watch has looked."""


class Refused(EngineError):
    """The server answered with another status than 200.

    Attributes:
        status: of HTTP.
        content: what it sent.
    """

    def __init__(self, message: str, *, status: int, content: bytes) -> None:
        super().__init__(message)
        self.status = status
        self.content = content


class Calls:
    """Calls to one server, from the event loop on which this is made.

    Args:
        product: name of the server in sentences.
        deadline_setting: name of the setting that caps a call, for messages.
        client: to the server, without a timeout of its own.
        look: has the watch look at the server now.
        read_error: finds the message in a refusal.
    """

    def __init__(
        self,
        *,
        product: str,
        deadline_setting: str,
        client: httpx.AsyncClient,
        look: Callable[[], None],
        read_error: Callable[[bytes], str],
    ) -> None:
        self.cause: EngineDead | None = None
        self.loop = asyncio.get_running_loop()
        self._product = product
        self._deadline_setting = deadline_setting
        self._client = client
        self._look = look
        self._read_error = read_error
        self._scopes: set[asyncio.Timeout] = set()
        self._died = asyncio.Event()

    def end_all(self, cause: EngineDead) -> None:
        """The server is dead: all calls fail with this cause, now and later."""
        if self.cause is None:
            self.cause = cause
            self._died.set()
            for scope in self._scopes:
                scope.reschedule(self.loop.time())

    async def ask(
        self,
        method: str,
        path: str,
        *,
        deadline_s: float,
        body: Mapping[str, Any] | None = None,
        parameters: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return the reply to a call.

        Raises:
            Refused: if the server refuses.
            EngineError: if the connection is lost; `EngineDead` if the server died.
            DeadlineExceeded: if it does not answer.
        """
        async with self._watched(path, deadline_s=deadline_s):
            reply = await self._client.request(method, path, json=body, params=parameters)
        self._check(path, reply.status_code, reply.content)
        return reply.content

    async def stream(self, path: str, *, body: Mapping[str, Any]) -> AsyncGenerator[str, None]:
        """Yield the lines of a reply as they come; raises as `ask` does, but waits as long as its caller."""
        async with (
            self._watched(path, deadline_s=math.inf),
            self._client.stream("POST", path, json=body) as reply,
        ):
            if reply.status_code != httpx.codes.OK:
                self._check(path, reply.status_code, await reply.aread())
            async for line in reply.aiter_lines():
                yield line

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    def raise_if_dead(self) -> None:
        """Raise a new error with the cause, if the server died."""
        if self.cause is not None:
            raise EngineDead(f"{self.cause}. Its requests are lost; restart the generator") from self.cause

    def _check(self, path: str, status: int, content: bytes) -> None:
        if status != httpx.codes.OK:
            raise Refused(
                f"the {self._product} server answered {path} with {status}: {self._read_error(content)}",
                status=status,
                content=content,
            )

    @contextlib.asynccontextmanager
    async def _watched(self, what: str, *, deadline_s: float) -> AsyncIterator[None]:
        self.raise_if_dead()
        try:
            async with self._scope(deadline_s):
                yield
        except TimeoutError as error:
            self.raise_if_dead()
            raise DeadlineExceeded(
                f"the {self._product} server did not answer {what} within {deadline_s:g} s. Raise "
                f"{self._deadline_setting}, or look at its log for what it is busy with"
            ) from error
        except httpx.TransportError as error:
            self._look()
            with contextlib.suppress(TimeoutError):  # then it lives, and only this connection was lost
                async with asyncio.timeout(_LEARN_OF_DEATH_S):
                    await self._died.wait()
            self.raise_if_dead()
            raise EngineError(f"the connection to the {self._product} server was lost at {what}: {error!r}") from error

    @contextlib.asynccontextmanager
    async def _scope(self, deadline_s: float) -> AsyncIterator[None]:
        """Run out of time at the deadline, or when the server dies."""
        scope = asyncio.timeout(None if deadline_s == math.inf else deadline_s)
        async with scope:
            self._scopes.add(scope)
            try:
                yield
            finally:  # while it can still be rescheduled
                self._scopes.discard(scope)
