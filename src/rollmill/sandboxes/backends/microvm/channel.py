"""The owner's side of a machine: the frames of its agent, and the few words of the machine itself."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from rollmill.sandboxes.backends.namespaces.channel import AgentChannel, Message

_SEED_BYTES = 64


def fresh_word(word: str) -> dict[str, Any]:
    """Return a word to a machine that has just woken up, with what must differ between clones."""
    return {"vm": word, "now_s": time.time(), "seed": os.urandom(_SEED_BYTES).hex()}


class MachineChannel(AgentChannel):
    """The connection to one machine.

    Args:
        on_nonsense: called once if what comes is no frame of ours.
        on_gone: called when the sandbox inside has ended, with its exit code and how often memory ran out.
        first_number: below it are the requests of the sandbox that this one was copied from; answers to those go to
            nobody.
    """

    def __init__(
        self,
        *,
        on_nonsense: Callable[[str], None],
        on_gone: Callable[[int, int], None] = lambda _code, _kills: None,
        first_number: int = 1,
    ) -> None:
        super().__init__(on_nonsense=on_nonsense)
        self._next = first_number
        self._on_gone = on_gone
        self._held: list[tuple[dict[str, Any], bytes]] | None = None
        self._words: dict[str, asyncio.Future[None]] = {}

    @property
    def next_number(self) -> int:
        """Return a number above all that were used."""
        return self._next + 1

    async def attach(self, connection: socket.socket) -> None:
        """Talk over this connection from now on; the one before, if any, ended with a whole frame."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)

    def expect(self, word: str) -> asyncio.Future[None]:
        """Return what is done when the machine says a word; the caller bounds the wait."""
        return self._words.setdefault(word, asyncio.get_running_loop().create_future())

    async def say(self, head: dict[str, Any], *, until: str) -> None:
        """Say a word and wait for another; the caller bounds the wait."""
        answer = self.expect(until)
        self.tell_machine(head)
        await asyncio.shield(answer)

    def tell_machine(self, head: dict[str, Any]) -> None:
        """Say a word, past what is held back."""
        super()._send(head)

    def hold(self) -> None:
        """Keep what is for the agent until `let_go`."""
        if self._held is None:
            self._held = []

    def let_go(self) -> None:
        """Send what was kept."""
        held, self._held = self._held or [], None
        for head, payload in held:
            super()._send(head, payload)

    def fail_all(self, error: Exception) -> None:
        """Let everybody who waits know that no answer will come."""
        for one in self._words.values():
            if not one.done():
                one.set_exception(error)
                one.exception()  # it may have nobody who waits
        self._held = None
        super().fail_all(error)

    def _send(self, head: dict[str, Any], payload: bytes | memoryview = b"") -> None:
        if self._held is not None:
            self._held.append((head, bytes(payload)))
            return
        super()._send(head, payload)

    def _on_message(self, message: Message, payload: bytes) -> None:
        if message.n:
            super()._on_message(message, payload)
        elif message.op in ("booted", "hushed", "awake"):
            answer = self._words.pop(message.op, None)
            if answer is not None and not answer.done():
                answer.set_result(None)
        elif message.op == "gone":
            self._on_gone(message.code, message.size)
        else:
            super()._on_message(message, payload)
