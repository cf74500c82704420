"""Many nodes behind one address: fake providers, no sockets, virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.clock import VirtualClock
from rollmill.errors import ConfigError
from rollmill.sandboxes.admission.records import PoolStatistics
from rollmill.sandboxes.service.app import ServiceApp
from rollmill.sandboxes.service.fleet_law import (
    NodeState,
    Standing,
    merged,
    order_of,
    outcome_of,
    spread_of,
    state_of,
    why_none,
)
from rollmill.sandboxes.service.node import Node
from rollmill.sandboxes.service.room import Room, room_of
from rollmill.sandboxes.service.router import Fleet, FleetSettings, RouterApp
from rollmill.sandboxes.service.settings import ServiceSettings
from rollmill.sandboxes.service.templates import Template
from rollmill.sandboxes.watchdog.records import GuardStatistics, NodeReading
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
        self.rooms = {url: Room() for url in nodes}

    async def create(self, **headers: str) -> httpx2.Response:
        body = {"templateID": "base", "metadata": {"of": "test"}}
        return await self.client.post("/v2/sandboxes", json=body, headers={**KEY, **headers})

    async def nodes_health(self, url: str) -> httpx2.Response:
        return await self.fleet.client.get(f"{url}/health")

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
            apps = {url: ServiceApp(node, token=TOKEN, room=lambda url=url: rooms[url]) for url, node in nodes.items()}
            ways = {url: Cut(httpx2.ASGITransport(app)) for url, app in apps.items()}
            rooms: dict[str, Room] = dict.fromkeys(nodes, Room())
            inner = httpx2.AsyncClient(mounts=dict(ways))
            one = await stack.enter_async_context(Fleet(FleetSettings(nodes=(A, B)), client=inner))
            transport = httpx2.ASGITransport(RouterApp(one))
            async with httpx2.AsyncClient(transport=transport, base_url="http://fleet") as client:
                world = World(client, one, nodes, ways)
                world.rooms = rooms
                await scenario(world)

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


def test_a_node_whose_guard_has_closed_admission_gets_nothing_until_it_opens():
    async def scenario(world: World) -> None:
        world.rooms[B] = Room(admitting=False, why="4.0% of the memory is left (memory_free: 0.1)")
        await asyncio.sleep(2.5)
        assert [(await world.create()).status_code for _ in range(3)] == [201] * 3
        assert world.counts() == {A: 3, B: 0}  # B has twice the places
        world.rooms[A] = Room(admitting=False, why="stopped by its pool")
        await asyncio.sleep(2.5)
        refused = await world.create()
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "http://b: 4.0% of the memory is left" in refused.json()["message"]
        assert "2 closed" in refused.json()["message"]
        world.rooms[B] = Room()
        await asyncio.sleep(2.5)
        assert (await world.create()).status_code == 201
        assert world.counts() == {A: 3, B: 1}

    fleet(scenario, most=(5, 10))


def test_the_page_for_prometheus_counts_calls_by_node_and_outcome():
    async def scenario(world: World) -> None:
        assert [(await world.create()).status_code for _ in range(4)] == [201, 201, 201, 429]
        world.ways[A].cut = True
        await asyncio.sleep(2.5)
        await world.client.get("/v2/sandboxes")  # without a token
        page = (await world.client.get("/metrics")).text
        for line in (
            'rollmill_sandbox_router_requests_total{node="http://a",outcome="done"} 1.0',
            'rollmill_sandbox_router_requests_total{node="http://b",outcome="done"} 2.0',
            'rollmill_sandbox_router_requests_total{node="http://b",outcome="refused"} 1.0',
            "rollmill_sandbox_router_unplaced_total 1.0",
            'rollmill_sandbox_router_nodes{state="full"} 1.0',
            'rollmill_sandbox_router_nodes{state="lost"} 1.0',
            'rollmill_sandbox_router_node_sandboxes{node="http://b"} 2.0',
            "rollmill_sandbox_router_spread 0.0",
        ):
            assert line in page.splitlines(), page

    fleet(scenario, most=(1, 2))


def test_a_node_tells_a_router_what_its_pool_and_its_guard_know():
    async def scenario(world: World) -> None:
        world.rooms[A] = Room(ready=2, starting_free=1, running_free=7, memory_free=0.5, disk_free=0.25)
        told = (await world.nodes_health(A)).json()
        assert (told["sandboxes"], told["most"], told["starting"]) == (0, 10, 0)
        assert state_of(A, told).room == world.rooms[A]

    fleet(scenario)


def test_an_older_node_and_a_newer_one_are_understood_and_nonsense_is_not():
    old = state_of("a", {"version": "0", "sandboxes": 3, "most": 9})
    assert (old.free, old.headroom, old.waits, old.standing) == (6, 1.0, False, Standing.OPEN)
    assert state_of("a", {"sandboxes": 3, "most": 9, "room": {"of_tomorrow": 1, "ready": 2}}).room.ready == 2
    with pytest.raises(ValueError, match="int"):
        state_of("a", {"sandboxes": "many", "most": 9})


def pool_with(**changes: Any) -> PoolStatistics:
    zeros = dict.fromkeys(PoolStatistics.__struct_fields__, 0)
    empty = {name: {} for name in ("places", "waiting", "breakers", "failures", "refused")}
    return PoolStatistics(**{**zeros, **empty, "stopped": "", "last_failure": "", "templates": (), **changes})


def test_room_is_what_budgets_leave_and_who_closed_admission_is_named():
    pool = pool_with(places={"starting": 3, "pooled": 2, "running": 5, "suspended": 9}, starting_cap=4)
    guard = GuardStatistics(reading=NodeReading(memory_free=0.5, disk_free=0.75))
    assert room_of(pool, guard, max_running=8) == Room(
        ready=2, starting_free=1, running_free=3, memory_free=0.5, disk_free=0.75
    )
    closed = room_of(pool, GuardStatistics(admitting=False, why="no memory"), max_running=8)
    assert (closed.admitting, closed.why) == (False, "no memory")
    assert room_of(pool_with(stopped="by pressure"), None, max_running=8).why == "by pressure"
    assert "breaker_failures" in room_of(pool_with(breakers={"provider": "open"}), None, max_running=8).why
    assert room_of(None, None, max_running=8) == Room()


def test_free_places_are_weighed_by_the_scarcer_of_memory_and_disk():
    def node(url: str, sandboxes: int, **room: Any) -> NodeState:
        return NodeState(url=url, reachable=True, sandboxes=sandboxes, most=10, room=Room(**room))

    # 10 * 0.2 = 2, 6 * 0.5 = 3, 4 * 1 = 4, and one that would wait for a start.
    nodes = [node("a", 0, memory_free=0.2), node("b", 4, disk_free=0.5), node("c", 6), node("d", 0, starting_free=0)]
    assert order_of(nodes) == ("c", "b", "a", "d")
    assert NodeState(url="e", sandboxes=2, most=10, starting=3, promised=1, room=Room(running_free=5)).free == 2


def test_who_gets_nothing_is_told_how_the_nodes_stand():
    nodes = [NodeState(url="a", reachable=True), NodeState(url="b")]
    assert why_none(nodes) == "no node of the fleet has room for another sandbox (1 full, 1 lost)"


rooms = st.builds(
    Room,
    admitting=st.booleans(),
    why=st.just("why"),
    ready=st.integers(0, 3),
    starting_free=st.none() | st.integers(0, 5),
    running_free=st.none() | st.integers(0, 20),
    memory_free=st.none() | st.floats(0, 1),
    disk_free=st.none() | st.floats(0, 1),
)
counts = st.integers(0, 20)
states = st.builds(
    NodeState,
    url=st.sampled_from("abcdef"),
    reachable=st.booleans(),
    sandboxes=counts,
    most=counts,
    starting=counts,
    promised=counts,
    room=rooms,
)
fleets = st.lists(states, max_size=6, unique_by=lambda state: state.url)


@given(fleets)
def test_only_nodes_that_answer_admit_and_have_room_are_tried_and_the_order_is_theirs_alone(nodes):
    order = order_of(nodes)
    assert set(order) == {one.url for one in nodes if one.reachable and one.room.admitting and one.free > 0}
    assert order_of(nodes[::-1]) == order
    assert spread_of(nodes) >= 0.0


@given(fleets, st.data())
def test_more_room_never_moves_a_node_back(nodes, data):
    order = order_of(nodes)
    if not order:
        return
    url = data.draw(st.sampled_from(order))
    place = next(number for number, one in enumerate(nodes) if one.url == url)
    better = msgspec.structs.replace(nodes[place], most=nodes[place].most + data.draw(st.integers(1, 9)))
    room = msgspec.structs.replace(better.room, ready=better.room.ready + 1, memory_free=None, disk_free=None)
    changed = [*nodes[:place], msgspec.structs.replace(better, room=room), *nodes[place + 1 :]]
    assert order_of(changed).index(url) <= order.index(url)


@given(states, st.lists(st.sampled_from(["promise", "made", "failed"]), max_size=40))
def test_between_two_answers_a_node_is_never_promised_more_than_it_said_it_had(state, steps):
    """What was free at the answer bounds what is under way and what was made since."""
    start = msgspec.structs.replace(state, reachable=True, promised=0)
    known = Fleet(FleetSettings(nodes=("http://a",)))
    known.states["http://a"] = msgspec.structs.replace(start, url="http://a")
    made = 0
    for step in steps:
        now = known.states["http://a"]
        if step == "promise" and order_of([now]):
            known._promise("http://a", 1)
        elif step != "promise" and now.promised:
            if step == "made":
                known.took("http://a")
                made += 1
            known._promise("http://a", -1)
        assert made + known.states["http://a"].promised <= max(0, start.free) + start.starting


@pytest.mark.parametrize(("status", "outcome"), [(204, "done"), (404, "refused"), (429, "no_room"), (500, "failed")])
def test_the_outcome_of_a_call(status, outcome):
    assert outcome_of(status) == outcome


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
