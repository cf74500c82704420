"""The routes of the service on the fake provider, without a socket, in virtual time: encodings, errors, deadlines."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2
import pytest

from rollmill.clock import VirtualClock
from rollmill.errors import SandboxExhausted, SandboxRetryable
from rollmill.sandboxes.service import wire
from rollmill.sandboxes.service.app import ServiceApp
from rollmill.sandboxes.service.connect import Envelopes, envelope
from rollmill.sandboxes.service.node import Node
from rollmill.sandboxes.service.programs import Asked, Programs
from rollmill.sandboxes.service.protobuf import decode, encode
from rollmill.sandboxes.service.served import Served
from rollmill.sandboxes.service.settings import ServiceSettings
from rollmill.sandboxes.service.templates import Template
from rollmill.testing import FakeCall, FakeSandboxProvider, run_virtual
from rollmill.testing.faults import FaultInjector, Raise

TOKEN = "sesame-open-sesame"
KEY = {"x-api-key": TOKEN}


class World:
    """A service with a client, and one sandbox in it."""

    def __init__(self, client: httpx2.AsyncClient, node: Node, provider: FakeSandboxProvider) -> None:
        self.client, self.node, self.provider = client, node, provider
        self.served: Served

    async def create(self, **body: Any) -> dict[str, Any]:
        answer = await self.client.post("/v2/sandboxes", json={"templateID": "base", **body}, headers=KEY)
        assert answer.status_code == 201, answer.text
        self.served = self.node.find(answer.json()["sandboxID"])
        return answer.json()

    def inside(self, **more: str) -> dict[str, str]:
        """Headers of a call on the sandbox."""
        user = base64.b64encode(b"root:").decode()
        return {
            "e2b-sandbox-id": self.served.id,
            "x-access-token": self.served.token,
            "authorization": f"Basic {user}",
            **more,
        }

    async def call(self, method: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
        kind = {"content-type": "application/json"}
        return await self.client.post(f"/{method}", json=body, headers={**self.inside(**headers), **kind})

    async def stream(self, method: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
        """The documents of a stream; the last one says how it ended."""
        kind = {"content-type": "application/connect+json"}
        data = envelope(json.dumps(body).encode())
        answer = await self.client.post(f"/{method}", content=data, headers={**self.inside(**headers), **kind})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/connect+json")
        found, rest = [], answer.content
        while rest:
            length = int.from_bytes(rest[1:5], "big")
            assert (rest[0] == 2) == (len(rest) == 5 + length)
            found.append(json.loads(rest[5 : 5 + length]))
            rest = rest[5 + length :]
        return found


def served(
    scenario: Callable[[World], Awaitable[Any]], *, provider: dict[str, Any] | None = None, **bounds: Any
) -> Any:
    clock = VirtualClock(start_s=1000.0)

    async def main() -> Any:
        fake = FakeSandboxProvider(**(provider or {}))
        settings = ServiceSettings(**bounds)
        async with Node(fake, settings=settings, templates={"base": Template()}, clock=clock) as node:
            transport = httpx2.ASGITransport(ServiceApp(node, token=TOKEN))
            async with httpx2.AsyncClient(transport=transport, base_url="http://service") as client:
                return await scenario(World(client, node, fake))

    return run_virtual(main(), clock=clock)


def start(*argv: str, **more: Any) -> dict[str, Any]:
    return {"process": {"cmd": argv[0], "args": list(argv[1:])}, "stdin": False, **more}


def test_whoever_asks_for_the_internet_gets_a_sandbox_without_it_only_if_the_service_was_told_so():
    async def refused(world: World) -> None:
        body = {"templateID": "base", "allow_internet_access": True}
        answer = await world.client.post("/v2/sandboxes", json=body, headers=KEY)
        assert (answer.status_code, world.node.all()) == (501, {})
        assert "start the service with --without-internet" in answer.json()["message"]

    async def passed_over(world: World) -> None:
        made = await world.create(allow_internet_access=True)
        shown = await world.client.get(f"/sandboxes/{made['sandboxID']}", headers=KEY)
        assert shown.json()["allowInternetAccess"] is False
        body = {"templateID": "base", "allow_internet_access": True, "network": {"allowOut": ["1.1.1.1"]}}
        answer = await world.client.post("/v2/sandboxes", json=body, headers=KEY)
        assert answer.status_code == 501
        assert "not to be had here: network.allowOut." in answer.json()["message"]

    served(refused)
    served(passed_over, without_internet=True)


class Dying:
    """A process that is gone a while after it was killed."""

    def __init__(self, inner: Any, *, after_s: float) -> None:
        self._inner, self._after_s = inner, after_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def signal(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self._after_s, lambda: loop.create_task(self._inner.signal(number)))


@pytest.mark.parametrize(("after_s", "waited_s", "left"), [(0.5, 0.5, 0), (100.0, 1.0, 1)])
def test_a_kill_is_answered_when_the_program_is_gone_but_not_much_later(after_s, waited_s, left):
    async def scenario(world: World) -> None:
        await world.create()
        hearing = asyncio.ensure_future(world.stream("process.Process/Start", start("sleep", "1000")))
        await asyncio.sleep(1.0)  # virtual: it runs by then
        (running,) = world.served.programs.infos()
        program = world.served.programs.find(wire.Selector(pid=running.pid))
        dying: Any = Dying(program.process, after_s=after_s)
        program.process = dying
        began_s = asyncio.get_running_loop().time()
        body = {"process": {"pid": program.pid}, "signal": "SIGNAL_SIGKILL"}
        answer = await world.call("process.Process/SendSignal", body)
        assert answer.status_code == 200, answer.text
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(waited_s)
        assert len(world.served.programs.infos()) == left
        await hearing

    served(scenario)


# -- encodings --------------------------------------------------------------------------------------------------------


def test_a_program_is_started_and_heard_in_json():
    async def scenario(world: World) -> None:
        await world.create()
        began, data, end, last = await world.stream("process.Process/Start", start("echo", "hi"))
        assert began["event"]["start"]["pid"] > 0
        assert base64.b64decode(data["event"]["data"]["stdout"]) == b"hi\n"
        assert end == {"event": {"end": {"exited": True, "status": "exit status 0"}}}
        assert last == {}

    served(scenario)


def test_a_program_is_started_and_heard_in_protobuf():
    async def scenario(world: World) -> None:
        await world.create()
        asked = wire.StartRequest(process=wire.ProcessConfig(cmd="echo", args=("hi",)), stdin=False)
        headers = world.inside(**{"content-type": "application/connect+proto"})
        answer = await world.client.post("/process.Process/Start", content=envelope(encode(asked)), headers=headers)
        events = [decode(one, wire.ProcessReply).event for one in Envelopes().feed(answer.content)]
        assert [type(event).__name__ for event in events] == ["ProcessEvent"] * 3
        assert (events[1].data.stdout, events[2].end.status) == (b"hi\n", "exit status 0")
        unary = world.inside(**{"content-type": "application/proto"})
        answer = await world.client.post("/process.Process/List", content=b"", headers=unary)
        assert decode(answer.content, wire.ListResponse) == wire.ListResponse()

    served(scenario)


@pytest.mark.parametrize(
    ("kind", "body", "status", "code"),
    [
        ("text/plain", b"{}", 501, "unimplemented"),
        ("application/json", b"{", 400, "invalid_argument"),
        ("application/json", b'{"path": 5}', 400, "invalid_argument"),
        ("application/proto", b"\x0a\x05ab", 400, "invalid_argument"),
    ],
)
def test_a_body_that_is_not_understood_is_an_error_of_the_protocol(kind, body, status, code):
    async def scenario(world: World) -> None:
        await world.create()
        headers = world.inside(**{"content-type": kind})
        answer = await world.client.post("/filesystem.Filesystem/Stat", content=body, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (status, code)

    served(scenario)


# -- who may ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"x-api-key": "other"}, {"authorization": "Bearer other"}])
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v2/sandboxes"), ("POST", "/v2/sandboxes"), ("DELETE", "/sandboxes/x"), ("GET", "/metrics")],
)
def test_the_control_api_is_closed_without_its_token(method, path, headers):
    async def scenario(world: World) -> None:
        answer = await world.client.request(method, path, headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, 401)
        assert await world.provider.list() == ()

    served(scenario)


def test_a_bearer_token_opens_as_well_as_a_key():
    async def scenario(world: World) -> None:
        answer = await world.client.get("/v2/sandboxes", headers={"authorization": f"Bearer {TOKEN}"})
        assert (answer.status_code, answer.json()) == (200, [])

    served(scenario)


@pytest.mark.parametrize(
    ("change", "status", "code", "says"),
    [
        ({"x-access-token": "other"}, 401, "unauthenticated", "not the token of this sandbox"),
        ({"x-access-token": TOKEN}, 401, "unauthenticated", "not the token of this sandbox"),
        ({"e2b-sandbox-id": "nobody"}, 503, "unavailable", "was not found"),
        ({"e2b-sandbox-id": ""}, 400, "invalid_argument", "does not say for which sandbox"),
        ({"e2b-sandbox-port": "8080"}, 503, "unavailable", "port is not open"),
        ({"authorization": "Basic bm9ib2R5Og=="}, 401, "unauthenticated", "no user 'nobody'"),
        ({"authorization": "Basic !"}, 401, "unauthenticated", "cannot be read"),
    ],
)
def test_a_sandbox_is_closed_to_whoever_is_not_its_own(change, status, code, says):
    async def scenario(world: World) -> None:
        await world.create()
        answer = await world.call("filesystem.Filesystem/Stat", {"path": "/"}, **change)
        assert (answer.status_code, answer.json()["code"]) == (status, code)
        assert says in answer.json()["message"]
        file = await world.client.get("/files?path=/x", headers={**world.inside(), **change, "authorization": ""})
        if "authorization" not in change:
            assert file.status_code == {503: 502}.get(status, status)

    served(scenario)


def test_a_host_that_names_port_and_sandbox_says_which_one_it_is():
    async def scenario(world: World) -> None:
        await world.create()
        await world.served.sandbox.write("/x", b"here")
        host = f"49983-{world.served.id}.sandboxes.example"
        answer = await world.client.get("/files?path=/x", headers={"host": host, "x-access-token": world.served.token})
        assert (answer.status_code, answer.content) == (200, b"here")
        assert (await world.client.get("/health", headers={"host": host})).status_code == 204
        assert (await world.client.get("/health", headers={"host": f"80-{world.served.id}.x"})).status_code == 502

    served(scenario)


# -- deadlines --------------------------------------------------------------------------------------------------------


def test_a_stream_without_news_says_that_it_lives_as_often_as_its_caller_asked():
    async def scenario(world: World) -> None:
        await world.create(timeout=5000)
        ping = {"keepalive-ping-interval": "50"}
        documents = await world.stream("process.Process/Start", start("sleep", "170"), **ping)
        assert [next(iter(one["event"])) for one in documents[:-1]] == ["start", *["keepalive"] * 3, "end"]

    served(scenario)


def test_a_program_beyond_its_callers_deadline_is_ended_and_the_stream_says_why():
    async def scenario(world: World) -> None:
        await world.create()
        documents = await world.stream("process.Process/Start", start("sleep", "99"), **{"connect-timeout-ms": "1500"})
        assert documents[-1]["error"]["code"] == "deadline_exceeded"
        await asyncio.sleep(0)
        assert (await world.call("process.Process/List", {})).json() == {}

    served(scenario)


def test_a_deadline_of_a_listener_ends_the_stream_and_not_the_program():
    async def scenario(world: World) -> None:
        await world.create()
        started = asyncio.ensure_future(world.stream("process.Process/Start", start("sleep", "9")))
        await asyncio.sleep(1)
        (program,) = (await world.call("process.Process/List", {})).json()["processes"]
        selector = {"process": {"pid": program["pid"]}}
        heard = await world.stream("process.Process/Connect", selector, **{"connect-timeout-ms": "2000"})
        assert heard[-1]["error"]["code"] == "deadline_exceeded"
        assert (await started)[-2]["event"]["end"]["status"] == "exit status 0"

    served(scenario)


def test_a_program_ends_with_its_sandbox_and_the_stream_leaves_it_to_its_caller_to_look_for_that():
    async def scenario(world: World) -> None:
        await world.create()
        started = asyncio.ensure_future(world.stream("process.Process/Start", start("sleep", "99")))
        await asyncio.sleep(1)
        await world.node.kill(world.served.id)
        error = (await started)[-1]["error"]
        assert (error["code"], "was not found" in error["message"]) == ("unavailable", False)

    served(scenario)


def test_a_body_that_stalls_is_given_up():
    async def stalls() -> AsyncIterator[bytes]:
        yield b"abc"
        await asyncio.sleep(1000)

    async def scenario(world: World) -> None:
        await world.create()
        answer = await world.client.post("/files?path=/x", content=stalls(), headers=world.inside())
        assert (answer.status_code, "stalled for 7 s after 3 bytes" in answer.text) == (408, True)

    served(scenario, body_s=7.0)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_what_the_backend_refuses_has_its_status():
    full = Raise(lambda: SandboxExhausted("no space left"))

    async def scenario(world: World) -> None:
        answer = await world.client.post("/v2/sandboxes", json={"templateID": "base"}, headers=KEY)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
        assert answer.json()["error_code"] == "sandbox_capacity_unavailable"
        await world.create()
        answer = await world.client.post("/files?path=/x", content=b"x", headers=world.inside())
        assert answer.status_code == 507

    busy = Raise(lambda: SandboxRetryable("no room", after_s=2.5))
    served(scenario, provider={"faults": FaultInjector({("create", 1): busy, ("write", 1): full})})


def test_a_body_that_is_too_large_is_refused_before_it_is_held():
    async def scenario(world: World) -> None:
        body = json.dumps({"templateID": "base", "metadata": {"x": "y" * 2000}})
        answer = await world.client.post("/v2/sandboxes", content=body, headers=KEY)
        assert answer.status_code == 413
        await world.create()
        message = {"path": "/" + "x" * 3000}
        answer = await world.call("filesystem.Filesystem/Stat", message)
        assert (answer.status_code, answer.json()["code"]) == (429, "resource_exhausted")
        form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="/x"\r\n\r\n' + b"x" * 1_100_000
        headers = world.inside(**{"content-type": "multipart/form-data; boundary=b"})
        answer = await world.client.post("/files", content=form + b"\r\n--b--", headers=headers)
        assert answer.status_code == 413

    served(scenario, max_body_bytes=1000, max_message_bytes=2000, max_upload_bytes=1000)


@pytest.mark.parametrize("query", ["state=asleep", "startedAfter=soon", "limit=many", "nextToken=!!", "nextToken=AAAA"])
def test_a_list_that_asks_what_cannot_be_is_refused(query):
    async def scenario(world: World) -> None:
        answer = await world.client.get(f"/v2/sandboxes?{query}", headers=KEY)
        assert answer.status_code == 400, answer.text

    served(scenario)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"templateID": "base", "network": {"allowOut": ["1.1.1.1"]}}, "network.allowOut"),
        ({"templateID": "base", "mcp": {"a": 1}, "volumeMounts": [{"name": "v"}]}, "mcp, volumeMounts"),
    ],
)
def test_what_is_not_to_be_had_is_named(body, says):
    async def scenario(world: World) -> None:
        answer = await world.client.post("/v2/sandboxes", json=body, headers=KEY)
        assert (answer.status_code, says in answer.json()["message"]) == (501, True)

    served(scenario)


def test_input_that_does_not_say_for_whom_it_is_is_refused():
    async def scenario(world: World) -> None:
        await world.create()
        data = envelope(b'{"data": {"input": {"stdin": "YQ=="}}}')
        headers = world.inside(**{"content-type": "application/connect+json"})
        answer = await world.client.post("/process.Process/StreamInput", content=data, headers=headers)
        assert answer.status_code == 200
        assert b'"invalid_argument"' in answer.content
        cut = envelope(b'{"start": {"process": {"pid": 1}}}')[:-3]
        answer = await world.client.post("/process.Process/StreamInput", content=cut, headers=headers)
        assert b"ended within a message" in answer.content

    served(scenario)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("PATCH", "/files", 405)])
def test_what_is_not_served_is_said_as_json(method, path, status):
    async def scenario(world: World) -> None:
        answer = await world.client.request(method, path, headers=KEY)
        assert (answer.status_code, answer.json()["code"]) == (status, status)

    served(scenario)


# -- hearers ----------------------------------------------------------------------------------------------------------


def test_a_hearer_that_does_not_hear_is_dropped_and_the_program_and_other_hearers_go_on():
    async def chatter(call: FakeCall) -> int:
        for number in range(300):
            call.write("stdout", b"%d\n" % number)
            await asyncio.sleep(0.01)
        return 0

    async def scenario(world: World) -> None:
        await world.create()
        programs = Programs(stall_s=5.0)
        process = await world.served.sandbox.start_process(["chatter"])
        program = programs.add(process, Asked(config=wire.ProcessConfig(cmd="chatter")))
        deaf, keen = program.hear(), program.hear()
        pumping = asyncio.ensure_future(program.pump())
        heard = b""
        while not isinstance(piece := await keen.next(), wire.EndEvent):
            assert isinstance(piece, wire.DataEvent)
            heard += piece.stdout or b""
        await pumping
        assert heard == b"".join(b"%d\n" % number for number in range(300))
        assert deaf.left
        assert "not read for 5 s" in str(await deaf.next())
        assert programs.infos() == ()

    served(scenario, provider={"programs": {"chatter": chatter}})
