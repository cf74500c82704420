"""The one owner of looking after the server: its process, its health, its metrics.

| who | waits for | woken by | gives up after |
|---|---|---|---|
| watching thread | the server's end, or the next look | kernel, `look`, `stop` | never; ends by `stop` or a death |
| a look | an answer of the server | the server | the deadline: then the server counts as dead |

Decides when a server counts as dead: its process ended, its port is closed, or it does not answer.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

import httpx2 as httpx

from rollmill.errors import EngineDead
from rollmill.generator.engines.vllm.dialect import Metrics, read_error, read_metrics
from rollmill.generator.engines.vllm.server import Server, listens

_ENGINE_GONE = 503


class ServerWatch:
    """Watches a server from a thread of its own.

    Args:
        server: the process.
        client: for this thread alone.
        every_s: time between two looks.
        on_death: called once, on the watching thread, with the cause.
    """

    def __init__(
        self,
        server: Server,
        *,
        client: httpx.Client,
        every_s: float,
        on_death: Callable[[EngineDead], None],
    ) -> None:
        self.metrics = Metrics()
        self._server = server
        self._client = client
        self._every_s = every_s
        self._on_death = on_death
        self._bell, self._button = os.pipe()
        self._stopping = False
        self._bell_lock = threading.Lock()
        self._bell_closed = False
        self._thread = threading.Thread(target=self._run, name="rollmill-vllm-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch; one look is made at once."""
        self._thread.start()

    def look(self) -> None:
        """Look now rather than when it is time; returns at once."""
        with self._bell_lock:
            if not self._bell_closed:
                os.write(self._button, b".")

    def stop(self) -> None:
        """End the watch, and with it the client; blocks for the look that is under way. Idempotent."""
        self._stopping = True
        self.look()
        if self._thread.ident is not None:
            self._thread.join()
        self._client.close()
        with self._bell_lock:
            if not self._bell_closed:
                self._bell_closed = True
                os.close(self._bell)
                os.close(self._button)

    def _run(self) -> None:
        watched = select.poll()
        watched.register(self._server.ends, select.POLLIN)
        watched.register(self._bell, select.POLLIN)
        while not self._stopping:
            cause = self._look()
            if cause is None:
                for handle, _ in watched.poll(self._every_s * 1000):
                    if handle == self._bell:
                        os.read(self._bell, 4096)
            elif not self._stopping:
                self._on_death(cause)
                return

    def _look(self) -> EngineDead | None:
        if self._server.exit_code is not None:
            return EngineDead(self._server.last_words())
        if not listens(self._server):
            # The API process outlives a dead engine for a while.
            return EngineDead(f"{self._server.last_words()} (its socket is closed)")
        try:
            health = self._client.get("/health")
            if health.status_code == _ENGINE_GONE:
                return EngineDead(f"{self._server.last_words()} (its health: {read_error(health.content)})")
            self.metrics = read_metrics(self._client.get("/metrics").text)
        except httpx.TimeoutException as error:
            return EngineDead(
                f"the vLLM server (pid {self._server.pid}) did not answer within {error.request.extensions['timeout']}"
                f" s: {self._server.last_words()}"
            )
        except httpx.TransportError as error:
            return EngineDead(f"{self._server.last_words()} ({error!r})")
        return None
