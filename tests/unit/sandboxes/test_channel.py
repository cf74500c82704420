"""The owner's side of an agent, against an agent that a test plays: it believes nothing that has the wrong shape."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from rollmill.errors import SandboxDead, SandboxExhausted, SandboxFileError, SandboxUnsupported
from rollmill.sandboxes.backends.namespaces.channel import AgentChannel, SetupFailed
from rollmill.sandboxes.guest.frames import Parser, encode
from rollmill.sandboxes.lifecycle import dead_error, death
from rollmill.sandboxes.records import DeathReason

EXEC = {"op": "exec", "cap": 10}


class Played:
    """An agent in the hands of the test."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._parser = Parser()
        self._waiting: list[dict] = []

    def says(self, head: dict, payload: bytes = b"") -> None:
        self._end.sendall(encode(head, payload))

    def writes(self, data: bytes) -> None:
        self._end.sendall(data)

    async def hears(self) -> dict:
        while not self._waiting:
            data = await asyncio.get_running_loop().sock_recv(self._end, 65536)
            self._waiting += [head for head, _ in self._parser.feed(data)]
        return self._waiting.pop(0)


def play(body: Callable[[AgentChannel, Played, list[str]], Awaitable[None]]) -> None:
    async def whole() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        complaints: list[str] = []
        channel = AgentChannel(on_nonsense=complaints.append)
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=ours)
        try:
            async with asyncio.timeout(20):
                await body(channel, Played(theirs), complaints)
        finally:
            channel.close()
            theirs.close()
            await asyncio.sleep(0)

    asyncio.run(whole())


def test_output_beyond_the_cap_is_dropped_here_too_whatever_the_agent_sends():
    async def body(channel, agent, complaints):
        job = channel.begin(EXEC)
        number = (await agent.hears())["n"]
        for _ in range(3):
            agent.says({"n": number, "op": "out", "stream": 1}, b"12345678")
        agent.says({"n": number, "op": "exit", "code": 3, "stdout_bytes": 24})
        result = await job.ended
        assert (result.stdout, result.stdout_bytes, result.exit_code) == (b"1234567812", 24, 3)
        assert not channel.busy

    play(body)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff" * 8,
        encode({"op": 5}),
        encode({"no": "op"}),
        encode({"op": "ready", "protections": "all"}),
        encode({"op": "exit", "n": 2, "code": "zero"}),
        encode({"op": "out", "n": 2, "stream": [1]}),
        b"\x01\x00\x00\x00\x00\x00\x00\x00[",
    ],
)
def test_an_agent_that_breaks_the_protocol_is_reported_once_and_cut_off(nonsense):
    async def body(channel, agent, complaints):
        channel.begin(EXEC)
        agent.writes(nonsense)
        await channel.closed
        assert len(complaints) == 1
        assert "broke the protocol" in complaints[0]

    play(body)


def test_answers_to_what_was_never_asked_change_nothing():
    async def body(channel, agent, complaints):
        job = channel.begin(EXEC)
        number = (await agent.hears())["n"]
        for stray in (
            {"n": 99, "op": "exit", "code": 0},
            {"n": 99, "op": "data"},
            {"n": number, "op": "out", "stream": 7},
        ):
            agent.says(stray, b"x")
        agent.says({"n": number, "op": "exit", "code": 0})
        assert (await job.ended).stdout == b""
        assert complaints == []

    play(body)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("exhausted", SandboxExhausted),
        ("missing", SandboxFileError),
        ("refused", SandboxFileError),
        ("not_a_file", SandboxFileError),
        ("unknown_user", SandboxUnsupported),
        ("no_python", SandboxUnsupported),
    ],
)
def test_refusals_of_the_agent_are_typed(kind, error):
    async def body(channel, agent, complaints):
        asked = asyncio.ensure_future(channel.ask({"op": "read"}))
        number = (await agent.hears())["n"]
        agent.says({"n": number, "op": "error", "kind": kind, "message": "the words"})
        with pytest.raises(error, match="the words"):
            await asked

    play(body)


def test_a_setup_that_failed_names_its_step_and_the_kernels_error():
    async def body(channel, agent, complaints):
        agent.says({"op": "failed", "step": "mount the root", "errno": 1, "message": "no"})
        with pytest.raises(SetupFailed) as raised:
            await channel.ready
        assert (raised.value.step, raised.value.errno) == ("mount the root", 1)

    play(body)


def test_everybody_who_waits_hears_of_the_end():
    async def body(channel, agent, complaints):
        asked = asyncio.ensure_future(channel.ask({"op": "read"}))
        job = channel.begin(EXEC)
        await agent.hears()
        channel.fail_all(dead_error("a", death(DeathReason.PROVIDER_LOST)))
        for waiting in (asked, job.ended, job.started, channel.ready):
            with pytest.raises(SandboxDead, match="provider_lost"):
                await waiting
        await channel.closed

    play(body)


def test_an_agent_that_reports_its_own_failure_is_a_complaint():
    async def body(channel, agent, complaints):
        agent.says({"op": "crashed", "message": "KeyError at line 7"})
        agent.says({"op": "ready", "protections": ["seccomp"]})
        assert await channel.ready == ("seccomp",)
        assert complaints == ["its agent failed: KeyError at line 7"]

    play(body)
