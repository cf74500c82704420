"""Connections of the HTTP face: silent, slow, broken or encrypted ones, and the end of the face."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from http_builders import MODEL, bound, chat, events_of, served
from rollmill.config.serving import LimitSettings
from rollmill.errors import ConfigError
from rollmill.generator.engines.fake import FakeLatency
from rollmill.generator.http import HttpLimits, serve_http
from rollmill.generator.security import TlsFiles

pytestmark = pytest.mark.integration
SLOW = FakeLatency(step_s=0.005)


@contextlib.asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def request(body: Any, *, path: str = "/v1/chat/completions", **headers: str) -> bytes:
    data = json.dumps(body).encode()
    fields = {"host": "replica", "content-length": str(len(data)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - another end of a socket has to notice something
            await asyncio.sleep(0.005)


async def rest(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionResetError):
            return await reader.read()
    return b""


async def test_a_connection_that_says_nothing_or_half_a_head_is_closed():
    first = b"GET /version HTTP/1.1\r\nhost: replica\r\n\r\n"
    async with served() as service, bound(service, bounds=HttpLimits(header_s=0.1)) as port:
        async with connection(port) as (silent, _), connection(port) as (half, writer):
            writer.write(b"POST /v1/chat/comp")
            assert await rest(silent) == b""
            assert await rest(half) == b""
        for wait in (False, True):  # a head that comes after a first request, or together with it
            async with connection(port) as (second, writer):
                writer.write(first if wait else first + b"GET /ver")
                answer = await second.readuntil(b"}")
                if wait:
                    writer.write(b"GET /ver")
                assert await rest(second) == b""
            assert answer.startswith(b"HTTP/1.1 200")


async def test_a_request_that_runs_longer_than_the_wait_for_a_head_is_not_cut():
    async with (
        served(latency=SLOW) as service,
        bound(service, bounds=HttpLimits(header_s=0.05)) as port,
        httpx2.AsyncClient(timeout=20) as client,
    ):
        body = chat(max_tokens=40, ignore_eos=True)
        answers = [await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]


async def test_what_is_no_http_is_answered_with_400_and_disturbs_nobody():
    async with served() as service, bound(service) as port:
        async with connection(port) as (reader, writer):
            writer.write(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
            assert b"400" in (await rest(reader)).split(b"\r\n")[0]
        async with httpx2.AsyncClient() as client:
            assert (await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=chat())).status_code == 200


async def test_a_head_that_grows_without_end_is_refused():
    async with served() as service, bound(service) as port, connection(port) as (reader, writer):
        writer.write(b"GET /version HTTP/1.1\r\nx-filler: " + b"x" * 200_000)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        assert b"200" not in (await rest(reader)).split(b"\r\n")[0]


async def test_a_client_that_sends_too_much_hears_that_it_did():
    limits = LimitSettings(max_body_bytes=1024)
    async with served(limits=limits) as service, bound(service) as port, httpx2.AsyncClient(timeout=20) as client:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        known = await client.post(url, content=b"x" * 3_000_000)

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(300):
                yield b"x" * 10_000

        unknown = await client.post(url, content=pieces())
    assert (known.status_code, unknown.status_code) == (413, 413)


async def test_a_reader_that_stops_reading_is_cut_off_and_others_go_on():
    limits = LimitSettings(stream_stall_s=0.2)
    settings: Any = {"max_model_len": 40_000, "latency": SLOW, "limits": limits}
    # Transport and kernel take some megabytes before the server can notice that nobody reads; the prompts fill them.
    long: Any = {"prompt": [[10] * 30_000] * 150, "max_tokens": 5_000, "return_token_ids": True, "ignore_eos": True}
    async with (
        served(**settings) as service,
        bound(service) as port,
        connection(port) as (reader, writer),
        httpx2.AsyncClient(timeout=20) as client,
    ):
        writer.write(request({**long, "stream": True}, path="/v1/completions"))
        await until(lambda: service.status().running > 0)
        other = await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=chat())
        assert other.status_code == 200
        await until(lambda: service.status().running + service.status().waiting == 0)
        assert b"[DONE]" not in await rest(reader)


async def test_the_face_ends_when_told_and_finishes_what_runs():
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with served(latency=SLOW) as service, httpx2.AsyncClient(timeout=20) as client:
        face = asyncio.ensure_future(serve_http(service, stop=stop, on_bound=port.set_result))
        url = f"http://127.0.0.1:{await port}/v1/chat/completions"
        body = chat(max_tokens=30, stream=True, ignore_eos=True)
        asking = asyncio.ensure_future(client.post(url, json=body))
        await until(lambda: service.status().running == 1)
        stop.set()
        answer = await asking
        await face
        with pytest.raises(httpx2.ConnectError):
            await client.post(url, json=body)
    assert events_of(answer.text)[-1] == "[DONE]"


async def test_a_face_that_is_cancelled_aborts_what_runs():
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with served(latency=SLOW, max_model_len=100_000) as service, httpx2.AsyncClient(timeout=20) as client:
        face = asyncio.ensure_future(serve_http(service, stop=asyncio.Event(), on_bound=port.set_result))
        url = f"http://127.0.0.1:{await port}/v1/chat/completions"
        asking = asyncio.ensure_future(client.post(url, json=chat(max_tokens=50_000, ignore_eos=True)))
        await until(lambda: service.status().running == 1)
        face.cancel()
        with pytest.raises(httpx2.TransportError):
            await asking
        with pytest.raises(asyncio.CancelledError):
            await face
        assert service.status().running == 0


async def test_signal_handlers_stay_those_of_the_process():
    def ours(*_: object) -> None: ...

    before = {one: signal.signal(one, ours) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        async with served() as service, bound(service):
            assert {signal.getsignal(one) for one in before} == {ours}
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


async def test_a_port_that_is_taken_is_a_config_error():
    async with served() as service, bound(service) as port:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be bound for HTTP"):
            await serve_http(service, port=port, stop=asyncio.Event())


def openssl(folder: Path, *arguments: str) -> None:
    command = shutil.which("openssl")
    if command is None:
        pytest.skip("openssl is not installed")
    subprocess.run([command, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that is its own authority, and its key."""
    folder = tmp_path_factory.mktemp("certificates")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    for name in ("server", "client"):
        named = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
        openssl(folder, "req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", *named)
    return folder


async def test_tls_encrypts_and_mtls_asks_for_a_certificate(certificates):
    files = TlsFiles(cert=certificates / "server.pem", key=certificates / "server.key", ca=certificates / "client.pem")
    trusting = ssl.create_default_context(cafile=certificates / "server.pem")
    known = ssl.create_default_context(cafile=certificates / "server.pem")
    known.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    async with served() as service, bound(service, tls=files) as port:
        url = f"https://127.0.0.1:{port}/v1/models"
        async with httpx2.AsyncClient(verify=known) as client:
            assert (await client.get(url)).json()["data"][0]["id"] == MODEL
        async with httpx2.AsyncClient(verify=trusting) as stranger:
            with pytest.raises(httpx2.TransportError):
                await stranger.get(url)


async def test_a_key_of_another_certificate_is_refused_at_the_start(certificates):
    files = TlsFiles(cert=certificates / "server.pem", key=certificates / "client.key")
    async with served() as service:
        with pytest.raises(ConfigError, match="Is the key that of the certificate"):
            await serve_http(service, tls=files, stop=asyncio.Event())
