"""A connection may not hold memory for an answer that nobody reads, nor its place without asking for anything."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from rollmill.generator.http import HttpLimits
from rollmill.generator.http.connection import connection_class
from rollmill.testing import run_virtual


class Wire(asyncio.Transport):
    """A transport whose peer has taken all but `waiting` bytes."""

    def __init__(self, *, waiting: int = 0) -> None:
        super().__init__()
        self.ended = ""
        self._waiting = waiting

    def get_write_buffer_size(self) -> int:
        return self._waiting

    def is_closing(self) -> bool:
        return bool(self.ended)

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


async def answers_nothing(scope: Any, receive: Any, send: Any) -> None:
    await receive()


def connected(wire: Wire) -> Any:
    config = uvicorn.Config(answers_nothing, lifespan="off", ws="none", log_config=None, proxy_headers=False)
    config.load()
    kind = connection_class(HttpLimits(header_s=10.0), keepalive_s=30.0, silent_s=10.0)
    connection = kind(config=config, server_state=ServerState(), app_state={})
    connection.connection_made(wire)
    return connection


@pytest.mark.parametrize(("waiting", "ended"), [(0, "closed"), (1, "aborted")])
def test_an_idle_connection_is_closed_and_one_whose_answer_is_not_read_is_aborted(waiting, ended):
    async def main() -> str:
        wire = Wire(waiting=waiting)
        connected(wire).timeout_keep_alive_handler()
        return wire.ended

    assert run_virtual(main()) == ended


@pytest.mark.parametrize(
    ("sent", "ended"),
    [
        ([], "aborted"),
        ([b"GET / HTT"], "aborted"),
        ([b"GET / HTTP/1.1\r\n", b"host: a\r\n"], "aborted"),
        ([b"GET / HTTP/1.1\r\n", b"host: a\r\n\r\n"], ""),
    ],
)
def test_the_head_of_a_request_has_ten_seconds_in_all(sent, ended):
    async def main() -> str:
        wire = Wire()
        connection = connected(wire)
        for piece in sent:
            connection.data_received(piece)
            await asyncio.sleep(4)
        await asyncio.sleep(11 - 4 * len(sent))
        found = wire.ended
        connection.connection_lost(None)
        return found

    assert run_virtual(main()) == ended
