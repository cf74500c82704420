"""The protocols that machines are controlled by, against the other side of a socket."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from rollmill.errors import SandboxDead
from rollmill.sandboxes.backends.firecracker.api import Api, ApiError
from rollmill.sandboxes.backends.microvm.channel import MachineChannel, fresh_word
from rollmill.sandboxes.backends.qemu.qmp import Qmp, QmpError
from rollmill.sandboxes.guest.frames import Parser, encode


def qmp_pair(*, answer_s: float = 5.0) -> tuple[Qmp, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    return Qmp(ours, answer_s=answer_s), theirs


async def answer(peer: socket.socket, *lines: dict) -> list[dict]:
    """Send lines, one after each command, and return the commands."""
    loop, heard, asked = asyncio.get_running_loop(), b"", []
    await loop.sock_sendall(peer, b'{"QMP": {}}\r\n')
    for line in ({"return": {}}, *lines):
        while b"\n" not in heard:
            heard += await loop.sock_recv(peer, 4096)
        first, _, heard = heard.partition(b"\n")
        asked.append(json.loads(first))
        await loop.sock_sendall(peer, json.dumps(line).encode() + b"\r\n")
    return asked


async def test_a_command_waits_for_its_answer_past_events():
    qmp, peer = qmp_pair()
    event = {"event": "STOP"}
    answering = asyncio.ensure_future(answer(peer, event))
    call = asyncio.ensure_future(qmp("migrate-set-parameters", max_bandwidth=7))
    asked = await answering
    await asyncio.get_running_loop().sock_sendall(peer, b'{"return": {"x": 1}}\r\n')
    assert await call == {"x": 1}
    assert asked == [
        {"execute": "qmp_capabilities", "arguments": {}},
        {"execute": "migrate-set-parameters", "arguments": {"max-bandwidth": 7}},
    ]
    qmp.close()
    peer.close()


async def test_a_refusal_says_what_qemu_said():
    qmp, peer = qmp_pair()
    answering = asyncio.ensure_future(answer(peer, {"error": {"class": "GenericError", "desc": "no such thing"}}))
    with pytest.raises(QmpError, match="refused 'cont': no such thing"):
        await qmp("cont")
    await answering
    qmp.close()
    peer.close()


async def test_who_waits_hears_of_the_end_of_a_machine_and_so_does_who_comes_later():
    qmp, peer = qmp_pair()
    call = asyncio.ensure_future(qmp("cont"))
    await asyncio.sleep(0)
    qmp.close()
    with pytest.raises(QmpError, match="has ended"):
        await call
    with pytest.raises(QmpError, match="has ended"):
        await qmp("cont")
    peer.close()


async def test_a_machine_that_does_not_answer_is_given_up():
    qmp, peer = qmp_pair(answer_s=0.01)
    with pytest.raises(QmpError, match=r"did not answer 'stop' within 0.01 s"):
        await qmp("stop")
    qmp.close()
    peer.close()


async def test_a_line_without_end_is_no_qmp():
    qmp, peer = qmp_pair()
    peer.setblocking(False)
    sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(peer, b"x" * (1024 * 1024 + 70_000)))
    with pytest.raises(QmpError, match="more than 1048576 bytes"):
        await qmp("stop")
    sending.cancel()
    qmp.close()
    peer.close()


async def channel_pair(**options) -> tuple[MachineChannel, asyncio.StreamReader, asyncio.StreamWriter]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    channel = MachineChannel(on_nonsense=pytest.fail, **options)
    await channel.attach(ours)
    return (channel, *await asyncio.open_unix_connection(sock=theirs))


async def test_what_is_for_the_agent_waits_while_a_machine_is_kept_and_words_do_not():
    channel, reader, writer = await channel_pair()
    channel.hold()
    asking = asyncio.ensure_future(channel.ask({"op": "usage"}))
    hushing = asyncio.ensure_future(channel.say({"vm": "hush"}, until="hushed"))
    parser = Parser()
    ((first, _),) = list(parser.feed(await reader.read(4096)))
    assert first == {"vm": "hush"}
    writer.write(encode({"op": "hushed"}))
    await hushing
    channel.let_go()
    ((second, _),) = list(parser.feed(await reader.read(4096)))
    assert second["op"] == "usage"
    writer.write(encode({"op": "data", "n": second["n"], "disk_bytes": 5}))
    assert (await asking)[0].disk_bytes == 5
    writer.close()


async def test_a_copy_begins_above_the_numbers_of_its_original():
    channel, reader, writer = await channel_pair(first_number=40)
    asking = asyncio.ensure_future(channel.ask({"op": "usage"}))
    ((head, _),) = list(Parser().feed(await reader.read(4096)))
    assert head["n"] > 40
    assert channel.next_number > head["n"]
    writer.write(encode({"op": "exit", "n": 12, "code": 1}))  # of a program that the original had started
    writer.write(encode({"op": "data", "n": head["n"]}))
    await asking
    writer.close()


async def test_the_end_of_what_runs_inside_is_told_and_later_words_fail():
    ends: list[tuple[int, int]] = []
    channel, _, writer = await channel_pair(on_gone=lambda *end: ends.append(end))
    waiting = asyncio.ensure_future(channel.say({"vm": "go"}, until="awake"))
    writer.write(encode({"op": "gone", "code": -9, "size": 2}))
    while not ends:  # noqa: ASYNC110 - the loop has to read first
        await asyncio.sleep(0)
    assert ends == [(-9, 2)]
    channel.fail_all(SandboxDead("it is over", reason="exited", fault="infrastructure"))
    with pytest.raises(SandboxDead):
        await waiting
    writer.close()


def test_no_two_machines_wake_up_with_the_same_word():
    one, other = fresh_word("go"), fresh_word("go")
    assert one["seed"] != other["seed"]
    assert len(bytes.fromhex(one["seed"])) == 64


async def served(tmp_path, reply: bytes):
    heard: list[bytes] = []

    async def serve(reader, writer):
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(reply)
        writer.close()

    return await asyncio.start_unix_server(serve, tmp_path / "api"), heard


async def test_firecracker_is_asked_in_http_and_its_refusal_is_told(tmp_path):
    body = b'{"fault_message": "not now"}'
    server, heard = await served(tmp_path, b"HTTP/1.1 400 \r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    with pytest.raises(ApiError, match=r"refused 'PATCH /vm' \(400\): not now") as raised:
        await Api(tmp_path / "api", answer_s=5.0)("PATCH", "/vm", {"state": "Paused"})
    assert raised.value.status == 400
    assert heard[0].startswith(b"PATCH /vm HTTP/1.1\r\n")
    server.close()


@pytest.mark.parametrize(
    "reply",
    [b"", b"HTTP/1.1 200 OK\r\n", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx"],
    ids=str,
)
async def test_an_answer_that_is_cut_or_no_http_is_an_error(tmp_path, reply):
    server, _ = await served(tmp_path, reply)
    with pytest.raises(ApiError, match="cannot be asked"):
        await Api(tmp_path / "api", answer_s=5.0)("GET", "/")
    server.close()


async def test_an_interface_that_never_comes_up_is_given_up(tmp_path):
    with pytest.raises(ApiError, match="cannot be asked"):
        await Api(tmp_path / "nothing", answer_s=0.02).wait()
