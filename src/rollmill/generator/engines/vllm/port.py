"""One vLLM server, driven over HTTP in the words of `rollmill.generator.engines.vllm.dialect`.

What it does against the server's own ways:

* An abort only sends word to the scheduler. A question that the scheduler must answer follows it: then the KV is free.
* An update that was begun and failed stays begun; it is ended before another begins.
* The server outlives its engine for a while, and answers everything with an error: an error of its own leads to a look
  at its health.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import httpx2 as httpx
import msgspec
import numpy as np

from rollmill.config.serving import VllmSettings
from rollmill.errors import DataError, EngineDead, EngineError
from rollmill.generator.engines.protocol import KvPolicy
from rollmill.generator.engines.remote.calls import Calls, Refused
from rollmill.generator.engines.remote.port import Delta, Figures
from rollmill.generator.engines.remote.watch import ServerWatch, Watched
from rollmill.generator.engines.vllm.dialect import (
    FORGET_KV,
    GENERATE,
    HEALTH,
    METRICS,
    PAUSE,
    RESUME,
    WHICH_VERSION,
    Step,
    abort_step,
    end_half_done_step,
    generate_body,
    load_adapter_step,
    read_delta,
    read_error,
    read_metrics,
    read_scores,
    read_version,
    score_body,
    unload_adapter_step,
    update_steps,
)
from rollmill.generator.engines.vllm.transport import FileTransport, WeightTransport, in_thread
from rollmill.generator.engines.vllm.unix_socket import client_of, listens
from rollmill.types import GenerateRequest

PRODUCT = "vLLM"
SECTION = "generator.vllm"

_BAD_REQUEST = (400, 422)


async def _over(future: Future[None]) -> None:
    await asyncio.wrap_future(future)


class Server(Watched, Protocol):
    """A server process with its socket."""

    @property
    def pid(self) -> int:
        """Its process."""
        ...

    def stop(self, *, grace_s: float) -> None:
        """End it and its children, and remove what is its own; idempotent."""
        ...


class VllmPort:
    """A running server that serves its first weights, as a `ServerPort`.

    Args:
        server: its process.
        socket: the Unix socket that it listens on.
        settings: those of `generator.vllm`.
        transport: how weights get into it.
        grace_s: time it gets to end when told to.
    """

    def __init__(
        self,
        server: Server,
        *,
        socket: Path,
        settings: VllmSettings,
        transport: WeightTransport | None = None,
        grace_s: float = 10.0,
    ) -> None:
        self._server = server
        self._socket = socket
        self._settings = settings
        self._transport = FileTransport() if transport is None else transport
        self._grace_s = grace_s
        self._figures = Figures()
        self._cause: EngineDead | None = None
        self._on_death: Callable[[EngineDead], None] | None = None
        self._calls: Calls | None = None
        self._half_done = False
        self._probe_client = client_of(socket, timeout_s=settings.control_deadline_s)
        self._watch = ServerWatch(
            server,
            probe=self._probe,
            every_s=settings.load_poll_s,
            on_death=self._note_death,
            name="rollmill-vllm-watch",
        )
        self._watch.start()

    # -- server port

    def figures(self) -> Figures:
        """Return what the last look at the server found."""
        return self._figures

    def listen(self, on_death: Callable[[EngineDead], None]) -> None:
        """Have `on_death` called once, on the event loop of the calls, should the server die."""
        self._on_death = on_death

    @property
    def cause(self) -> EngineDead | None:
        """Why the server is dead, or `None` while it lives."""
        return self._cause

    async def generate(
        self, request: GenerateRequest, *, server_id: str, max_tokens: int, salt: str
    ) -> AsyncIterator[Delta]:
        """Yield the pieces of a generation, see the port's protocol."""
        body = generate_body(request, server_id=server_id, max_tokens=max_tokens, salt=salt)
        count, last = 0, None
        try:
            # Closed on the spot when the caller is cancelled: the server ends what nobody reads.
            async with contextlib.aclosing(self._here().stream(GENERATE, body=body)) as lines:
                async for line in lines:
                    delta = read_delta(line, server_id=server_id, n_before=count)
                    if delta is None:
                        continue
                    count += len(delta.output_ids)
                    if delta.reason is not None:
                        last = delta  # what it found in its cache is told after it
                    elif last is not None:
                        last = msgspec.structs.replace(last, cached_tokens=delta.cached_tokens)
                    else:
                        yield delta
        except Refused as error:
            if error.status in _BAD_REQUEST:
                raise DataError(str(error)) from error
            await self._doubt()
            raise
        except EngineError:
            await self._doubt()
            raise
        if last is None:
            raise EngineError(f"request {server_id}: the vLLM server's stream ended without saying why")
        yield last

    async def cancel(self, server_id: str) -> None:
        """Ask the server to end a request with what it has; its KV is free when this returns."""
        await self._ask(abort_step(server_id))
        await self._ask(WHICH_VERSION)

    async def freeze(self) -> None:
        """Return when no token can be produced and all that were have come."""
        await self._ask(PAUSE)
        # Tokens of the last step are written before this is asked, on connections of their own: it comes after them.
        await self._ask(WHICH_VERSION)

    async def thaw(self) -> None:
        """Let the server go on."""
        await self._ask(RESUME)

    async def load_weights(self, file: Path, *, policy_version: int, kv: KvPolicy) -> None:
        """Load weights while frozen, see the port's protocol."""
        if self._half_done:
            with contextlib.suppress(Refused):  # it was not begun at the server
                await self._ask(end_half_done_step())
        self._half_done = True
        if kv == "recompute":
            await self._ask(FORGET_KV)
        for step in update_steps(self._transport.update_info(file), policy_version=policy_version):
            if step.met_by == "send" and self._transport.meets:
                await self._ask_and_send(step, file)
            else:
                await self._ask(step)
        label = read_version(await self._ask(WHICH_VERSION))
        if label != str(policy_version):
            raise EngineError(f"after the update the server says that it serves {label!r}")
        self._half_done = False

    async def score(self, token_ids: Sequence[int], *, server_id: str) -> np.ndarray:
        """Return float32 [n - 1] log-probs under temperature 1, by a fresh prefill, before whatever waits."""
        return await self.score_with(token_ids, server_id=server_id, server_name="")

    async def score_with(self, token_ids: Sequence[int], *, server_id: str, server_name: str) -> np.ndarray:
        """Return the same of the base with an adapter."""
        body = score_body(token_ids, server_id=server_id, salt=f"score.{server_id}", adapter=server_name)
        reply = await self._ask(Step(path=GENERATE, body=body))
        return read_scores(reply, token_ids=token_ids, server_id=server_id)

    async def load_adapter(self, folder: Path, *, server_name: str) -> None:
        """Load an adapter under a name that was never used before, see the port's protocol."""
        await self._ask(load_adapter_step(str(folder), server_name=server_name))

    async def unload_adapter(self, server_name: str) -> None:
        """Let go of a name, see the port's protocol."""
        await self._ask(unload_adapter_step(server_name))

    def look(self) -> None:
        """Bring the figures up to date soon."""
        self._watch.look()

    async def close(self) -> None:
        """End the server and all that is its own; idempotent."""
        await asyncio.to_thread(self._watch.stop)
        await asyncio.to_thread(self._server.stop, grace_s=self._grace_s)
        self._probe_client.close()
        if self._calls is not None:
            self._calls.end_all(EngineDead(f"the {PRODUCT} engine was closed; start a new one"))
            await self._calls.close()

    # -- calls

    async def _ask(self, step: Step) -> bytes:
        try:
            return await self._here().ask(
                step.method,
                step.path,
                body=step.body,
                parameters=step.parameters,
                deadline_s=self._settings.control_deadline_s,
            )
        except Refused:
            await self._doubt()
            raise

    async def _ask_and_send(self, step: Step, file: Path) -> None:
        """Send weights while the server receives them. If either side fails the other waits for ever: it is over."""
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._ask(step))
                both.create_task(_over(in_thread(lambda: self._transport.send(file))))
        except BaseException as error:
            first = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            cause = EngineDead(
                f"the weights did not get to the {PRODUCT} server over {self._transport.backend}: {first!r}. A group "
                "that broke cannot be mended: the server is given up"
            )
            self._note_death(cause)
            self._here().end_all(self._cause or cause)
            if isinstance(first, Exception):
                raise cause from first
            raise

    async def _doubt(self) -> None:
        """Raise if the server is dead, after an error of its own that it may have died of."""
        calls = self._here()
        calls.raise_if_dead()
        try:
            await calls.ask("GET", HEALTH, deadline_s=self._settings.control_deadline_s)
        except Refused as error:
            self._note_death(EngineDead(f"{self._server.last_words()} (its health: {read_error(error.content)})"))
            calls.end_all(self._cause or EngineDead(self._server.last_words()))
            calls.raise_if_dead()

    def _here(self) -> Calls:
        """Return the calls of this event loop, made at the first one."""
        if self._calls is None:
            # As many connections as there are calls, and none is used twice: see `client_of`.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            transport = httpx.AsyncHTTPTransport(uds=str(self._socket), limits=limits, verify=False)
            self._calls = Calls(
                product=PRODUCT,
                deadline_setting=f"{SECTION}.control_deadline_s",
                client=httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=None),
                look=self._watch.look,
                read_error=read_error,
            )
            if self._cause is not None:
                self._calls.end_all(self._cause)
        return self._calls

    def _probe(self) -> None:
        """Look at the server, on the watch's thread."""
        if not listens(self._socket):
            raise EngineDead(f"{self._server.last_words()} (its socket is closed)")
        try:
            health = self._probe_client.get(HEALTH)
            if health.status_code != httpx.codes.OK:
                raise EngineDead(f"{self._server.last_words()} (its health: {read_error(health.content)})")
            metrics = read_metrics(self._probe_client.get(METRICS).text)
        except httpx.TimeoutException as error:
            raise EngineDead(
                f"the {PRODUCT} server did not answer within {self._settings.control_deadline_s:g} s "
                f"({SECTION}.control_deadline_s): {self._server.last_words()}"
            ) from error
        except httpx.TransportError as error:
            raise EngineDead(f"{self._server.last_words()} ({error!r})") from error
        self._figures = Figures(
            kv_used_tokens=round(metrics.kv_used * metrics.kv_capacity_tokens),
            kv_capacity_tokens=metrics.kv_capacity_tokens,
            preemptions=metrics.preemptions,
        )

    def _note_death(self, cause: EngineDead) -> None:
        """Called by the watch, on its thread, or by who finds out first."""
        if self._cause is not None:
            return
        self._cause = cause
        calls = self._calls
        if calls is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everybody who waits
                calls.loop.call_soon_threadsafe(self._hear_of_death, cause)

    def _hear_of_death(self, cause: EngineDead) -> None:
        self._here().end_all(cause)
        if self._on_death is not None:
            self._on_death(cause)
