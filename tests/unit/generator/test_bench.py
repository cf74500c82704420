"""A load on a generator: what is asked, how answers become figures, and the small HTTP client below it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from rollmill.errors import ConfigError, EngineDead
from rollmill.generator.bench import HttpTarget, Load, measure, render
from rollmill.generator.bench.cases import Answered, Asked, Standing, report_of, requests_of, spread
from rollmill.generator.bench.http_client import HttpConnections
from rollmill.generator.security import TlsFiles

LOAD = Load(concurrency=2, requests=8, group=4, prompt_tokens=5, new_tokens=(2, 9))


def test_requests_of_a_group_have_one_prompt_and_lengths_and_seeds_of_their_own():
    asked = list(requests_of(LOAD, name="m"))
    assert [a.group_key for a in asked] == ["m-g0"] * 4 + ["m-g1"] * 4
    assert len({a.prompt_ids for a in asked[:4]}) == 1
    assert asked[0].prompt_ids != asked[4].prompt_ids
    assert len({a.seed for a in asked}) == 8
    assert all(2 <= a.new_tokens <= 9 for a in asked)
    assert len({a.new_tokens for a in asked}) > 1
    assert all(3 <= token < 1000 for a in asked for token in a.prompt_ids)


def test_equal_seeds_ask_the_same_and_other_seeds_something_else():
    def prompts(load: Load, name: str) -> list[tuple[int, ...]]:
        return [asked.prompt_ids for asked in requests_of(load, name=name)]

    assert prompts(LOAD, "a") == prompts(LOAD, "b")
    assert prompts(LOAD, "a") != prompts(msgspec.structs.replace(LOAD, seed=1), "a")


def test_unrelated_requests_have_no_group():
    asked = list(requests_of(msgspec.structs.replace(LOAD, group=1), name="m"))
    assert {a.group_key for a in asked} == {""}
    assert len({a.prompt_ids for a in asked}) == 8


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"concurrency": 0}, "concurrency 0"),
        ({"new_tokens": (9, 2)}, "9..2 new tokens"),
        ({"vocabulary": 3}, "vocabulary of 3"),
        ({"deadline_s": 0.0}, "deadline of 0.0"),
    ],
)
def test_a_load_that_cannot_be_asked_for_is_refused_with_its_numbers(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        msgspec.structs.replace(LOAD, **changes)


def test_figures_are_those_of_the_answers():
    answers = [
        Answered(tokens=11, latency_s=3.0, first_s=1.0),  # 10 intervals of 0.2 s
        Answered(tokens=1, latency_s=0.5, first_s=0.5),  # no interval
        Answered(tokens=4, latency_s=9.0, first_s=8.0, error="engine"),
        Answered(tokens=0, latency_s=9.0, error="HTTP 429"),
        Answered(tokens=0, latency_s=9.0, error="HTTP 429"),
    ]
    looks = [Standing(running=2, waiting=0, kv_usage=0.25), Standing(running=1, waiting=3, kv_usage=0.5)]
    report = report_of(LOAD, answers, looks=looks, wall_s=4.0, cpu_s=0.5)
    assert (report.answered, report.tokens, report.tokens_per_s) == (2, 16, 4.0)
    assert (report.latency_s.p50, report.latency_s.p95) == (0.5, 3.0)
    assert (report.first_token_s.p50, report.first_token_s.p95) == (0.5, 1.0)
    assert report.between_tokens_s.p50 == pytest.approx(0.2)
    assert (report.kv_usage_max, report.running_max, report.waiting_max) == (0.5, 2, 3)
    assert report.errors == {"engine": 1, "HTTP 429": 2}


def test_percentiles_are_values_that_were_seen():
    assert msgspec.structs.astuple(spread([4.0, 1.0, 3.0, 2.0])) == (2.0, 4.0, 4.0)
    assert msgspec.structs.astuple(spread([7.0])) == (7.0, 7.0, 7.0)
    assert msgspec.structs.astuple(spread([])) == (None, None, None)


def test_the_table_has_a_line_for_each_measurement_and_says_what_is_not_known():
    report = report_of(LOAD, [Answered(tokens=0, latency_s=1.0, error="engine")], looks=[], wall_s=1.0, cpu_s=0.0)
    lines = render([report, report]).splitlines()
    assert len(lines) == 3
    assert "1 engine" in lines[1]
    assert "- / - / -" in lines[1]


class Counting:
    """A service that says how many requests it had at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.asked: list[str] = []

    async def ask(self, asked: Asked) -> Answered:
        self.asked.append(asked.request_id)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return Answered(tokens=asked.new_tokens, latency_s=1.0, first_s=0.5)

    async def look(self) -> Standing:
        return Standing(running=self.now, waiting=0, kv_usage=0.0)

    async def close(self) -> None:
        """Nothing is open."""


async def test_as_many_requests_are_in_flight_as_asked_for_and_each_is_sent_once():
    service = Counting()
    report = await measure(service, msgspec.structs.replace(LOAD, concurrency=3, requests=20), name="m")
    assert service.most == 3
    assert sorted(service.asked) == sorted(f"m-{n}" for n in range(20))
    assert report.answered == 20


# -- HTTP

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        finally:
            writer.close()

    serving = await asyncio.start_server(once, "127.0.0.1", 0)
    async with serving:
        yield f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}"


async def body_of(reader: asyncio.StreamReader) -> Any:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length"))
    return msgspec.json.decode(await reader.readexactly(length)) if length else None


def chunked(*pieces: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"


ASKED = Asked(request_id="a", prompt_ids=(5, 6), new_tokens=3, seed=7, group_key="g", deadline_s=5.0)


async def test_a_stream_is_read_event_by_event_wherever_it_is_cut():
    sent: list[Any] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent.append(await body_of(reader))
        events = [
            b'data: {"choices": [{"text": "x"}]}\n\n',
            b'data: {"choices": [{"text": "y"}]}\n\n',
            b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n',
            b"data: [DONE]\n\n",
        ]
        whole = b"".join(events)
        writer.write(chunked(whole[:20], whole[20:45], whole[45:]))
        await writer.drain()

    async with server(handle) as url:
        target = HttpTarget(url, model="m")
        answer = await target.ask(ASKED)
        await target.close()
    assert (answer.tokens, answer.error) == (3, None)
    assert answer.first_s is not None
    assert answer.first_s <= answer.latency_s
    assert sent[0] == {
        "prompt": [5, 6],
        "max_tokens": 3,
        "temperature": 1.0,
        "seed": 7,
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "group_key": "g",
    }


async def test_plain_requests_have_the_fields_of_openai_alone():
    sent: list[Any] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent.append(await body_of(reader))
        reply = b'{"choices": [{}], "usage": {"completion_tokens": 2}}'
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(reply), reply))
        await writer.drain()

    async with server(handle) as url:
        target = HttpTarget(url, stream=False, plain=True)
        assert (await target.ask(ASKED)).tokens == 2
        await target.close()
    assert set(sent[0]) == {"prompt", "max_tokens", "temperature", "seed"}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 2\r\n\r\n{}", "HTTP 429"),
        (chunked(b'data: {"error": {"code": "overloaded"}}\n\n'), "overloaded"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\ncut", EngineDead.code),
        (b"SSH-2.0-OpenSSH\r\n", "engine"),
        (b"", EngineDead.code),
    ],
)
async def test_an_error_of_the_service_is_an_answer(answer, error):
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await body_of(reader)
        writer.write(answer)
        await writer.drain()

    async with server(handle) as url:
        target = HttpTarget(url)
        assert (await target.ask(ASKED)).error == error
        await target.close()


async def test_a_request_past_its_deadline_is_given_up():
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with server(handle) as url:
        target = HttpTarget(url)
        answer = await target.ask(msgspec.structs.replace(ASKED, deadline_s=0.05))
        await target.close()
    assert answer.error == "deadline"


async def test_a_connection_is_used_again_and_replaced_where_the_server_has_closed_it():
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(2):
            await body_of(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await writer.drain()

    async with server(handle) as url:
        kept = HttpConnections(url)
        for _ in range(4):
            answer = await kept.request("GET", "/")
            assert await answer.read() == b"ok"
        kept.close()
    assert connections == 2


async def test_nobody_at_the_address_is_a_dead_engine():
    async with server(lambda reader, writer: asyncio.sleep(0)) as url:
        pass
    with pytest.raises(EngineDead, match="cannot be reached"):
        await HttpConnections(url).request("GET", "/")


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://"])
def test_an_address_of_another_form_is_refused(url):
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        HttpConnections(url)


def test_tls_files_for_an_address_without_tls_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="called without TLS"):
        HttpConnections("http://host:1", tls=TlsFiles(ca=tmp_path / "ca.pem"))


def test_a_tls_file_that_is_none_is_named(tmp_path):
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
    with pytest.raises(ConfigError, match=r"ca\.pem cannot be used"):
        HttpConnections("https://host:1", tls=TlsFiles(ca=tmp_path / "ca.pem"))


async def test_the_standing_is_read_from_the_names_of_vllm():
    page = (
        b'# HELP vllm:num_requests_running x\nvllm:num_requests_running{model_name="m",engine="0"} 3.0\n'
        b'vllm:num_requests_running{model_name="m",engine="1"} 4.0\nvllm:num_requests_waiting{model_name="m"} 1.0\n'
        b'vllm:kv_cache_usage_perc{model_name="m"} 0.5\n'
    )

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await body_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page))
        await writer.drain()

    async with server(handle) as url:
        target = HttpTarget(url)
        assert await target.look() == Standing(running=7.0, waiting=1.0, kv_usage=0.5)
        await target.close()
