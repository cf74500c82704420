"""HTTP calls to the server, each with a deadline and a name, each ended by the server's death.

Decides which error a failed call is.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2 as httpx

from rollmill.errors import DataError, DeadlineExceeded, EngineDead, EngineError
from rollmill.generator.engines.vllm.dialect import Step, read_error
from rollmill.generator.engines.vllm.server import Server

_GENERATE = "/inference/v1/generate"

_LEARN_OF_DEATH_S = 10.0
"""A lost connection is the first sign of a death; its cause is known once the watch has looked."""


class ServerPaused(EngineError):
    """The server takes no request now, because it is paused; the request may be sent again."""


class Calls:
    """Calls to one server, from the event loop on which this is made.

    Args:
        server: where to.
        look: has the watch look at the server now.
    """

    def __init__(self, server: Server, *, look: Callable[[], None]) -> None:
        self.cause: EngineDead | None = None
        self.loop = asyncio.get_running_loop()
        self._look = look
        self._scopes: set[asyncio.Timeout] = set()
        self._died = asyncio.Event()
        # As many connections as there are calls, and none is used twice: see `client_of`.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # No certificates are loaded: nothing is encrypted on a socket of this user's own.
        transport = httpx.AsyncHTTPTransport(uds=str(server.socket), limits=limits, verify=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=None)

    def end_all(self, cause: EngineDead) -> None:
        """The server is dead: all calls fail with this cause, now and later."""
        if self.cause is None:
            self.cause = cause
            self._died.set()
            for scope in self._scopes:
                scope.reschedule(self.loop.time())

    def raise_if_dead(self) -> None:
        """Raise a new error with the cause, if the server died."""
        if self.cause is not None:
            raise EngineDead(f"{self.cause}. Its requests are lost; restart the generator") from self.cause

    async def ask(self, step: Step, *, method: str = "POST", deadline_s: float) -> bytes:
        """Return the reply to a control call.

        Raises:
            EngineError: if the server refuses; `EngineDead` if it died.
            DeadlineExceeded: if it does not answer.
        """
        async with self._watched(step.path, deadline_s=deadline_s):
            reply = await self._client.request(method, step.path, json=step.body, params=step.parameters)
        await self._refuse(step.path, reply.status_code, reply.content)
        return reply.content

    async def generate(self, body: dict[str, Any], *, deadline_s: float = math.inf) -> bytes:
        """Return the whole reply to a generation.

        Raises:
            DataError: if the server finds the request wrong.
            EngineError: if it fails; `EngineDead` if the server died, `ServerPaused` if it takes none now.
            DeadlineExceeded: if it does not answer.
        """
        async with self._watched(_GENERATE, deadline_s=deadline_s):
            reply = await self._client.post(_GENERATE, json=body)
        await self._refuse(_GENERATE, reply.status_code, reply.content)
        return reply.content

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """Yield the lines of a generation's reply as they come; raises as `generate`."""
        async with (
            self._watched(_GENERATE, deadline_s=math.inf),
            self._client.stream("POST", _GENERATE, json=body) as reply,
        ):
            if reply.status_code != httpx.codes.OK:
                await self._refuse(_GENERATE, reply.status_code, await reply.aread())
            async for line in reply.aiter_lines():
                yield line

    async def doubt(self) -> None:
        """Raise if the server is dead, after an error of its own that it may have died of."""
        self.raise_if_dead()
        try:
            async with asyncio.timeout(_LEARN_OF_DEATH_S):
                reply = await self._client.get("/health")
            if reply.status_code == httpx.codes.OK:
                return
        except (httpx.TransportError, TimeoutError):  # as bad as a bad answer
            pass
        await self._learn_of_death()

    async def _learn_of_death(self) -> None:
        self._look()
        with contextlib.suppress(TimeoutError):  # then it lives
            async with asyncio.timeout(_LEARN_OF_DEATH_S):
                await self._died.wait()
        self.raise_if_dead()

    async def _refuse(self, path: str, status: int, content: bytes) -> None:
        """Raise what an error reply means; nothing if it is none."""
        if status == httpx.codes.OK:
            return
        message = f"the vLLM server answered {path} with {status}: {read_error(content)}"
        if status == httpx.codes.SERVICE_UNAVAILABLE and b"engine_paused" in content:
            raise ServerPaused(message)
        if path == _GENERATE and status in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY):
            raise DataError(message)
        await self.doubt()
        raise EngineError(message)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    @contextlib.asynccontextmanager
    async def _watched(self, what: str, *, deadline_s: float) -> AsyncIterator[None]:
        self.raise_if_dead()
        scope = asyncio.timeout(None if deadline_s == math.inf else deadline_s)
        self._scopes.add(scope)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            self.raise_if_dead()
            raise DeadlineExceeded(
                f"the vLLM server did not answer {what} within {deadline_s:g} s. Raise "
                "generator.vllm.control_deadline_s, or look at its log for what it is busy with"
            ) from error
        except httpx.TransportError as error:
            await self._learn_of_death()
            raise EngineError(f"the connection to the vLLM server was lost at {what}: {error!r}") from error
        finally:
            self._scopes.discard(scope)
