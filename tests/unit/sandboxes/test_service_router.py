"""Many nodes behind one address: fake providers, no sockets, virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from rollmill.clock import VirtualClock
from rollmill.errors import ConfigError
from rollmill.sandboxes.service.app import ServiceApp
from rollmill.sandboxes.service.fleet_law import NodeState, merged, order_of
from rollmill.sandboxes.service.node import Node
from rollmill.sandboxes.service.router import Fleet, FleetSettings, RouterApp
from rollmill.sandboxes.service.settings import ServiceSettings
from rollmill.sandboxes.service.templates import Template
from rollmill.testing import FakeSandboxProvider, run_virtual

TOKEN = "sesame-open-sesame"
KEY = {"x-api-key": TOKEN}
A, B = "http://a", "http://b"


class Cut(httpx2.AsyncBaseTransport):
    """The way to a node, which may be cut."""

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner
        self.cut = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self.cut:
            raise httpx2.ConnectError("cut", request=request)
        return await self._inner.handle_async_request(request)


class World:
    def __init__(self, client: httpx2.AsyncClient, fleet: Fleet, nodes: dict[str, Node], ways: dict[str, Cut]) -> None:
        self.client, self.fleet, self.nodes, self.ways = client, fleet, nodes, ways

    async def create(self, **headers: str) -> httpx2.Response:
        body = {"templateID": "base", "metadata": {"of": "test"}}
        return await self.client.post("/v2/sandboxes", json=body, headers={**KEY, **headers})

    def counts(self) -> dict[str, int]:
        return {url: len(node.all()) for url, node in self.nodes.items()}


def fleet(scenario: Callable[[World], Awaitable[Any]], *, most: tuple[int, int] = (10, 10)) -> None:
    clock = VirtualClock(start_s=1000.0)

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            nodes: dict[str, Node] = {}
            for url, limit in zip((A, B), most, strict=True):
                settings = ServiceSettings(max_sandboxes=limit)
                provider = FakeSandboxProvider(start_s=0.5)
                node = Node(provider, settings=settings, templates={"base": Template()}, clock=clock)
                nodes[url] = await stack.enter_async_context(node)
            ways = {url: Cut(httpx2.ASGITransport(ServiceApp(node, token=TOKEN))) for url, node in nodes.items()}
            inner = httpx2.AsyncClient(mounts=dict(ways))
            one = await stack.enter_async_context(Fleet(FleetSettings(nodes=(A, B)), client=inner))
            transport = httpx2.ASGITransport(RouterApp(one))
            async with httpx2.AsyncClient(transport=transport, base_url="http://fleet") as client:
                await scenario(World(client, one, nodes, ways))

    run_virtual(main(), clock=clock)


def test_sandboxes_go_where_most_room_is_also_when_many_are_asked_for_at_once():
    async def scenario(world: World) -> None:
        answers = await asyncio.gather(*(world.create() for _ in range(8)))
        assert [answer.status_code for answer in answers] == [201] * 8
        assert world.counts() == {A: 2, B: 6}  # of 4 and 8 places

    fleet(scenario, most=(4, 8))


def test_a_fleet_is_full_when_every_node_is():
    async def scenario(world: World) -> None:
        answers = [await world.create() for _ in range(4)]
        assert [answer.status_code for answer in answers] == [201, 201, 201, 429]
        assert "no node of the fleet has room" in answers[-1].json()["message"]
        assert answers[-1].headers["retry-after"] == "1"

    fleet(scenario, most=(1, 2))


def test_a_call_finds_its_sandbox_by_id_also_through_a_router_that_never_saw_it():
    async def scenario(world: World) -> None:
        made = (await world.create()).json()
        path = f"/sandboxes/{made['sandboxID']}"
        for _ in range(2):
            answer = await world.client.get(path, headers=KEY)
            assert (answer.status_code, answer.json()["sandboxID"]) == (200, made["sandboxID"])
            world.fleet.forget(made["sandboxID"])
        inside = {"e2b-sandbox-id": made["sandboxID"], "x-access-token": made["envdAccessToken"]}
        written = await world.client.post("/files?path=/x&username=root", content=b"here", headers=inside)
        assert written.status_code == 200, written.text
        read = await world.client.get("/files?path=/x", headers=inside)
        assert (read.status_code, read.content) == (200, b"here")
        assert (await world.client.delete(path, headers=KEY)).status_code == 204
        assert (await world.client.get(path, headers=KEY)).status_code == 404
        gone = await world.client.get("/health", headers=inside)
        assert (gone.status_code, "was not found" in gone.text) == (502, True)

    fleet(scenario)


def test_the_token_is_the_nodes_to_check():
    async def scenario(world: World) -> None:
        assert (await world.client.post("/v2/sandboxes", json={"templateID": "base"})).status_code == 401
        assert (await world.client.get("/v2/sandboxes")).status_code == 401
        assert world.counts() == {A: 0, B: 0}

    fleet(scenario)


def test_pages_of_all_nodes_are_one_list_in_one_order():
    async def scenario(world: World) -> None:
        made = []
        for _ in range(7):
            made.append((await world.create()).json()["sandboxID"])
            await asyncio.sleep(1.0)
        found, cursor = [], ""
        while True:
            answer = await world.client.get(f"/v2/sandboxes?limit=2&order=asc&nextToken={cursor}", headers=KEY)
            assert answer.status_code == 200, answer.text
            found += [one["sandboxID"] for one in answer.json()]
            cursor = answer.headers.get("x-next-token", "")
            if not cursor:
                break
        assert found == made
        newest = await world.client.get("/v2/sandboxes", headers=KEY)
        assert [one["sandboxID"] for one in newest.json()] == made[::-1]
        metrics = await world.client.get(f"/sandboxes/metrics?sandbox_ids={','.join(made)}", headers=KEY)
        assert sorted(metrics.json()["sandboxes"]) == sorted(made)

    fleet(scenario)


def test_a_call_with_a_key_goes_to_the_same_node_twice():
    async def scenario(world: World) -> None:
        first = (await world.create(**{"idempotency-key": "k"})).json()
        await world.create()
        await world.create()
        assert (await world.create(**{"idempotency-key": "k"})).json()["sandboxID"] == first["sandboxID"]

    fleet(scenario)


def test_a_lost_node_is_passed_over_and_taken_again_when_it_answers():
    async def scenario(world: World) -> None:
        kept = (await world.create()).json()["sandboxID"]
        home = next(url for url, count in world.counts().items() if count)
        other = B if home == A else A
        world.ways[home].cut = True
        assert [(await world.create()).status_code for _ in range(2)] == [201, 201]
        assert world.counts() == {home: 1, other: 2}
        lost = await world.client.get(f"/sandboxes/{kept}", headers=KEY)
        assert (lost.status_code, f"the node {home} does not answer" in lost.text) == (503, True)
        await asyncio.sleep(2.5)  # the next question finds out
        health = (await world.client.get("/health")).json()
        assert {node["url"]: node["reachable"] for node in health["nodes"]} == {home: False, other: True}
        world.ways[home].cut = False
        await asyncio.sleep(2.5)
        assert (await world.client.get(f"/sandboxes/{kept}", headers=KEY)).status_code == 200
        world.ways[A].cut = world.ways[B].cut = True
        await asyncio.sleep(2.5)
        assert (await world.client.get("/v2/sandboxes", headers=KEY)).status_code == 503

    fleet(scenario)


def test_the_emptiest_node_comes_first_and_promises_count():
    nodes = [
        NodeState(url="full", reachable=True, sandboxes=5, most=5),
        NodeState(url="some", reachable=True, sandboxes=5, most=10, promised=3),
        NodeState(url="more", reachable=True, sandboxes=7, most=10),
        NodeState(url="lost", sandboxes=0, most=10),
    ]
    assert order_of(nodes) == ("more", "some")
    with_key = order_of(nodes, key="k")
    assert set(with_key) == {"full", "some", "more"}
    assert order_of(nodes[::-1], key="k") == with_key


def test_a_page_says_that_there_is_more_when_any_node_has_more():
    def item(second: int) -> dict[str, str]:
        return {"startedAt": f"2026-01-01T00:00:{second:02}.000000Z", "sandboxID": f"s{second}"}

    shown, cursor = merged([([item(1), item(4)], True), ([item(2)], False)], limit=2, newest_first=False)
    assert ([one["sandboxID"] for one in shown], bool(cursor)) == (["s1", "s2"], True)
    shown, cursor = merged([([item(1)], False), ([item(2)], False)], limit=2, newest_first=True)
    assert ([one["sandboxID"] for one in shown], cursor) == (["s2", "s1"], "")


@pytest.mark.parametrize("nodes", [(), ("http://a", "http://a"), ("a:1",), ("http://a/",)])
def test_nodes_that_cannot_be_are_refused(nodes):
    with pytest.raises(ConfigError):
        FleetSettings(nodes=nodes)
