"""The owner's side of an agent that was written to an image and wakes on another socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from rollmill.sandboxes.backends.gvisor.sandbox import GvisorChannel
from rollmill.sandboxes.guest.frames import Parser, encode

HEAD = {"op": "exec", "cap": 100}


class Inside:
    """The other end: what an agent would hear and say."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.parser = Parser()

    async def hears(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        while True:
            for head, _ in self.parser.feed(await loop.sock_recv(self.peer, 4096)):
                return head

    async def says(self, head: dict[str, Any], payload: bytes = b"") -> None:
        await asyncio.get_running_loop().sock_sendall(self.peer, encode(head, payload))


async def connect(channel: GvisorChannel) -> Inside:
    ours, theirs = socket.socketpair()
    for one in (ours, theirs):
        one.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
    return Inside(theirs)


def run(body: Callable[[GvisorChannel], Awaitable[None]]) -> None:
    async def whole() -> None:
        complaints: list[str] = []
        channel = GvisorChannel(on_nonsense=complaints.append)
        async with asyncio.timeout(10):
            await body(channel)
        channel.close()
        assert complaints == []

    asyncio.run(whole())


def test_a_program_goes_on_over_the_next_connection_and_its_output_is_whole():
    async def body(channel: GvisorChannel) -> None:
        before = await connect(channel)
        await before.says({"op": "ready", "protections": ["a"]})
        assert await channel.ready == ("a",)
        job = channel.begin(HEAD)
        number = (await before.hears())["n"]
        await before.says({"op": "started", "n": number, "pid": 9})
        await before.says({"op": "out", "n": number, "stream": 1}, b"first ")
        await job.started
        while not job.chunks:
            await job.news.wait()

        channel.restart()
        assert not channel.ready.done()
        channel.wakes = True
        after = await connect(channel)
        assert await after.hears() == {"op": "go"}
        await after.says({"op": "ready", "protections": ["b"]})
        assert await channel.ready == ("b",)
        await after.says({"op": "out", "n": number, "stream": 1}, b"second")
        await after.says({"op": "exit", "n": number, "code": 0, "stdout_bytes": 12})
        assert (await job.ended).stdout == b"first second"
        assert not channel.closed.done()  # the end of the first connection is not this one's
        before.peer.close()
        after.peer.close()
        await channel.closed

    run(body)


def test_an_agent_that_is_new_is_told_nothing_and_speaks_first():
    async def body(channel: GvisorChannel) -> None:
        inside = await connect(channel)
        await inside.says({"op": "ready", "protections": []})
        await channel.ready
        asked = asyncio.ensure_future(channel.ask({"op": "usage"}))
        head = await inside.hears()
        assert head["op"] == "usage"
        await inside.says({"op": "data", "n": head["n"], "processes": 3})
        assert (await asked)[0].processes == 3
        inside.peer.close()

    run(body)


def test_requests_are_numbered_above_those_of_whoever_had_the_agent_before():
    async def body(channel: GvisorChannel) -> None:
        channel.follow_number(40)
        channel.follow_number(7)  # never back
        inside = await connect(channel)
        channel.begin(HEAD)
        assert (await inside.hears())["n"] == channel.number == 41
        await inside.says({"op": "out", "n": 12, "stream": 1}, b"of another owner's program")
        await inside.says({"op": "exit", "n": 41, "code": 3})
        while channel.busy:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert channel.output_bytes == 0
        inside.peer.close()

    run(body)
