"""One connection: uvicorn's, with a deadline for what is not a request yet and an end for peers that went silent."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from rollmill.generator.http.protocol import ABORT_KEY, HttpLimits

_PROBES = 3


def connection_class(limits: HttpLimits, *, keepalive_s: float, silent_s: float) -> type[H11Protocol]:
    """Return the class of a server's connections.

    Args:
        limits: the deadline for the head of a request.
        keepalive_s: a connection on which nothing came for this long is asked whether it lives.
        silent_s: and is closed if it does not answer within this.
    """

    class Connection(H11Protocol):
        """A connection that may not say nothing."""

        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore
            super().connection_made(transport)
            self.app_state = {**self.app_state, ABORT_KEY: transport.abort}
            _ask_whether_alive(transport, keepalive_s=keepalive_s, silent_s=silent_s)
            self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_came()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:  # the first bytes of a head
                self._expect_head()
            else:
                self._head_came()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:  # a head that came too early, in part
                self._expect_head()

        def timeout_keep_alive_handler(self) -> None:
            if self.transport.get_write_buffer_size():  # an answer that nobody reads
                self.transport.abort()
            else:
                super().timeout_keep_alive_handler()

        def _expect_head(self) -> None:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(limits.header_s, self.transport.abort)

        def _head_came(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return Connection


def _ask_whether_alive(transport: asyncio.Transport, *, keepalive_s: float, silent_s: float) -> None:
    """Let the kernel find out that a peer is gone without a word, so that its requests are aborted."""
    connection = cast("socket.socket | None", transport.get_extra_info("socket"))
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", max(1, round(keepalive_s))),
        ("TCP_KEEPINTVL", max(1, round(silent_s / _PROBES))),
        ("TCP_KEEPCNT", _PROBES),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
