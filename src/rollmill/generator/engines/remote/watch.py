"""The one owner of looking after a server: its process, and what it says of itself.

| who | waits for | woken by | gives up after |
|---|---|---|---|
| the thread | the process to end, or its next look | kernel (pidfd), `look`, `stop` | never; ends by a death |
| a look | an answer of the server | the server | the probe's deadline: the server counts as dead |

A thread, not a task: an event loop that is busy must not delay the news of a death.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import Protocol

from rollmill.errors import EngineDead

_END_S = 0.2
"""How long a server whose connection was lost may take to end, before it counts as one that does not answer."""


class Watched(Protocol):
    """A process as its watch sees it."""

    @property
    def ends(self) -> int:
        """A file descriptor that can be read once it has ended."""
        ...

    @property
    def exit_code(self) -> int | None:
        """How it ended, or `None` while it runs."""
        ...

    def last_words(self) -> str:
        """Return in a sentence that it ended, and its first error."""
        ...


class ServerWatch:
    """Watches a server from a thread of its own.

    Args:
        server: the process.
        probe: asks the server how it is, on the watching thread; raises `EngineDead` if it does not answer.
        every_s: time between two looks.
        on_death: called once, on the watching thread, with the cause.
        name: of the thread.
    """

    def __init__(
        self,
        server: Watched,
        *,
        probe: Callable[[], None],
        every_s: float,
        on_death: Callable[[EngineDead], None],
        name: str,
    ) -> None:
        self._server = server
        self._probe = probe
        self._every_s = every_s
        self._on_death = on_death
        self._bell, self._button = os.pipe()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to watch; one look is made at once."""
        self._thread.start()

    def look(self) -> None:
        """Look now rather than when it is time; returns at once."""
        if self._thread.is_alive():
            os.write(self._button, b".")

    def stop(self) -> None:
        """End the watch; blocks for the look that is under way. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        self.look()
        if self._thread.ident is not None:
            self._thread.join()
        for handle in (self._bell, self._button):
            os.close(handle)

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
        try:
            self._probe()
        except EngineDead as error:
            # A connection is lost a little before the kernel tells of the end, which says more.
            return EngineDead(self._server.last_words()) if self._ends_within(_END_S) else error
        return None

    def _ends_within(self, seconds: float) -> bool:
        ended = select.poll()
        ended.register(self._server.ends, select.POLLIN)
        return bool(ended.poll(seconds * 1000)) and self._server.exit_code is not None
