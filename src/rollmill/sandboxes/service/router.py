"""Many nodes behind one address: a new sandbox goes where most room is, and a call where its sandbox is.

| wait | ends after |
|---|---|
| for a node's answer about itself | `ask_s` |
| for a connection to a node | `connect_s` |
| for the next bytes of an answer | `silence_s`, above the interval of keepalives |

Holds no token: what callers show goes on to the nodes, which share the token of their control API. Remembers where
sandboxes are and forgets nothing that matters: what it does not know it asks the nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from rollmill.errors import ConfigError, MissingExtraError, RollmillError
from rollmill.exposition import CONTENT_TYPE
from rollmill.sandboxes.records import Record
from rollmill.sandboxes.service.answers import http_answer
from rollmill.sandboxes.service.exchange import body_of, sandbox_id_of
from rollmill.sandboxes.service.fleet_law import (
    TRY_ANOTHER,
    NodeState,
    merged,
    order_of,
    outcome_of,
    state_of,
    why_none,
)
from rollmill.sandboxes.service.law import HttpProblem, limit_of
from rollmill.sandboxes.service.problems import gone
from rollmill.sandboxes.service.router_metrics import router_page
from rollmill.sandboxes.service.settings import ServiceSettings

if TYPE_CHECKING:
    import httpx2 as httpx

_log = logging.getLogger(__name__)
# Of one connection each, or made anew on the way.
_OWN_HEADERS = frozenset(
    {
        "connection",
        "keep-alive",
        "transfer-encoding",
        "te",
        "trailer",
        "upgrade",
        "proxy-authorization",
        "content-length",
    }
)
_REMEMBERED = 100_000


class FleetSettings(Record, frozen=True, kw_only=True):
    """How a fleet is served.

    Attributes:
        nodes: their addresses, `http://HOST:PORT`.
        every_s: nodes are asked how they are this often. Lower notices a lost node and a full one earlier.
        ask_s: longest wait for that answer; a node that is later counts as lost until it answers.
        connect_s: longest wait for a connection.
        silence_s: an answer of which nothing comes for so long is cut; above callers' intervals of keepalives.
    """

    nodes: tuple[str, ...]
    every_s: float = 2.0
    ask_s: float = 5.0
    connect_s: float = 5.0
    silence_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.nodes or len(set(self.nodes)) < len(self.nodes):
            raise ConfigError(f"the nodes are {list(self.nodes)}; name at least one, and each once")
        for node in self.nodes:
            if not node.startswith(("http://", "https://")) or node.endswith("/"):
                raise ConfigError(
                    f"{node!r} is no address of a node; give http://HOST:PORT, without a slash at its end"
                )
        for name in ("every_s", "ask_s", "connect_s", "silence_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of a fleet is {getattr(self, name)}; it must be above 0")


class Fleet:
    """What is known of the nodes, and the way to them. Use it as an asynchronous context manager.

    Args:
        settings: which nodes.
        client: in place of one of its own, for tests.

    Attributes:
        states: of the nodes, by address.
        calls: that were passed on, by node and outcome.
        unplaced: creations that no node took.
    """

    def __init__(self, settings: FleetSettings, *, client: httpx.AsyncClient | None = None) -> None:
        self._settings = settings
        self._client = client
        self.states = {url: NodeState(url=url) for url in settings.nodes}
        self.calls: Counter[tuple[str, str]] = Counter()
        self.unplaced = 0
        self._where: OrderedDict[str, str] = OrderedDict()
        self._asking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Fleet:
        """Ask every node once, and begin to ask again."""
        if self._client is None:
            self._client = _client(self._settings)
        await self.ask_all()
        self._asking = asyncio.ensure_future(self._ask_on())
        return self

    async def __aexit__(self, *error: object) -> None:
        """Stop asking, and close the connections."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self.client.aclose()

    @property
    def client(self) -> httpx.AsyncClient:
        """Return the client of all nodes."""
        assert self._client is not None
        return self._client

    async def _ask_on(self) -> None:
        while True:
            await asyncio.sleep(self._settings.every_s)
            await self.ask_all()

    async def ask_all(self) -> None:
        """Ask every node how it is."""
        await asyncio.gather(*(self._ask(url) for url in self._settings.nodes))

    async def _ask(self, url: str) -> None:
        before = self.states[url]
        try:
            async with asyncio.timeout(self._settings.ask_s):
                health = (await self.client.get(f"{url}/health")).json()
            now = state_of(url, health)
        except (TimeoutError, ValueError, KeyError, TypeError, AttributeError, *_failures()) as error:
            if before.reachable:
                _log.warning("the node %s does not answer: %r", url, error)
            now = msgspec.structs.replace(before, reachable=False)
        self.states[url] = msgspec.structs.replace(now, promised=self.states[url].promised)

    @contextlib.contextmanager
    def promised(self, url: str) -> Any:
        """Count a sandbox that is being made at a node."""
        self._promise(url, 1)
        try:
            yield
        finally:
            self._promise(url, -1)

    def _promise(self, url: str, change: int) -> None:
        state = self.states[url]
        self.states[url] = msgspec.structs.replace(state, promised=state.promised + change)

    def took(self, url: str) -> None:
        """Count a sandbox that a node made, until it is asked again."""
        state = self.states[url]
        left = state.room.running_free
        room = msgspec.structs.replace(state.room, running_free=None if left is None else max(0, left - 1))
        self.states[url] = msgspec.structs.replace(
            state, sandboxes=state.sandboxes + 1, starting=max(0, state.starting - 1), room=room
        )

    def remember(self, sandbox_id: str, url: str) -> None:
        """Note where a sandbox is."""
        self._where[sandbox_id] = url
        self._where.move_to_end(sandbox_id)
        while len(self._where) > _REMEMBERED:
            self._where.popitem(last=False)

    def forget(self, sandbox_id: str) -> None:
        """Note that a sandbox is not where it was."""
        self._where.pop(sandbox_id, None)

    async def find(self, sandbox_id: str) -> str | None:
        """Return the node of a sandbox; whoever does not know asks them all."""
        known = self._where.get(sandbox_id)
        if known is not None:
            return known
        answers = await asyncio.gather(*(self._has(url, sandbox_id) for url in self._settings.nodes))
        found = next((url for url, has in zip(self._settings.nodes, answers, strict=True) if has), None)
        if found is not None:
            self.remember(sandbox_id, found)
        return found

    async def _has(self, url: str, sandbox_id: str) -> bool:
        try:
            async with asyncio.timeout(self._settings.ask_s):
                answer = await self.client.get(f"{url}/here", params={"id": sandbox_id})
        except (TimeoutError, *_failures()):
            return False
        return answer.status_code == 204


def _client(settings: FleetSettings) -> httpx.AsyncClient:
    try:
        import httpx2 as httpx
    except ImportError:
        raise MissingExtraError(package="httpx2", extra="vllm", purpose="routing to many nodes") from None
    return httpx.AsyncClient(
        timeout=httpx.Timeout(settings.silence_s, connect=settings.connect_s, pool=settings.connect_s),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
        trust_env=False,
    )


def _failures() -> tuple[type[Exception], ...]:
    import httpx2 as httpx

    return (httpx.HTTPError, httpx.StreamError)


class RouterApp(Starlette):
    """The application in front of a fleet.

    Args:
        fleet: its nodes.
        settings: bounds of bodies that are held.
    """

    def __init__(self, fleet: Fleet, *, settings: ServiceSettings | None = None) -> None:
        self._fleet = fleet
        self._settings = ServiceSettings() if settings is None else settings
        one = "/sandboxes/{sandbox_id}"
        every = ["GET", "POST", "PUT", "DELETE", "PATCH"]
        table: list[tuple[list[str], str, Callable[[Request], Awaitable[Response]]]] = [
            (["GET"], "/health", self._health),
            (["GET"], "/metrics", self._metrics),
            (["POST"], "/sandboxes", self._create),
            (["POST"], "/v2/sandboxes", self._create),
            (["GET"], "/sandboxes", self._list),
            (["GET"], "/v2/sandboxes", self._list),
            (["GET"], "/sandboxes/metrics", self._all_metrics),
            (every, one, self._by_path),
            (every, f"{one}/{{rest:path}}", self._by_path),
            (every, f"/v2{one}/{{rest:path}}", self._by_path),
            (["GET"], "/templates", self._any),
            (["GET"], "/templates/aliases/{name}", self._any),
            (every, "/{rest:path}", self._inside),
        ]
        super().__init__(routes=[Route(path, _guarded(handler), methods=methods) for methods, path, handler in table])
        self.router.redirect_slashes = False

    # -- one node ----------------------------------------------------------------------------------------------------

    async def _by_path(self, request: Request) -> Response:
        return await self._at_home(request, request.path_params["sandbox_id"], unknown=404)

    async def _inside(self, request: Request) -> Response:
        sandbox_id = sandbox_id_of(request)
        if sandbox_id:
            return await self._at_home(request, sandbox_id, unknown=502)
        if request.url.path == "/files" and request.method == "GET":
            return await self._signed(request)
        raise HttpProblem(400, "the call does not say for which sandbox it is: send the header E2b-Sandbox-Id")

    async def _at_home(self, request: Request, sandbox_id: str, *, unknown: int) -> Response:
        url = await self._fleet.find(sandbox_id)
        if url is None:
            if unknown == 502:
                raise gone(sandbox_id, "no node has it")
            raise HttpProblem(404, f"sandbox {sandbox_id!r} is on no node: it was never made, or has ended")
        answer = await self._forward(request, url, request.stream())
        if answer.status_code in (404, 502) or request.method == "DELETE":
            self._fleet.forget(sandbox_id)
        return answer

    async def _signed(self, request: Request) -> Response:
        """Try a signed link, which names no sandbox, at every node."""
        answer: Response | None = None
        for url in self._reachable():
            answer = await self._forward(request, url, None)
            if answer.status_code != 401:
                return answer
        return http_answer(HttpProblem(503, "no node of the fleet answers")) if answer is None else answer

    async def _any(self, request: Request) -> Response:
        for url in self._reachable():
            return await self._forward(request, url, None)
        raise HttpProblem(503, "no node of the fleet answers")

    def _reachable(self) -> list[str]:
        return [url for url, state in self._fleet.states.items() if state.reachable]

    async def _forward(self, request: Request, url: str, body: AsyncIterator[bytes] | bytes | None) -> Response:
        """Pass a call on as it is, and its answer back as it comes."""
        client = self._fleet.client
        query = f"?{request.url.query}" if request.url.query else ""
        headers = [(name, value) for name, value in request.headers.items() if name not in _OWN_HEADERS]
        call = client.build_request(
            request.method, f"{url}{request.url.path}{query}", headers=headers, content=_unless_empty(request, body)
        )
        try:
            answer = await client.send(call, stream=True)
        except _failures() as error:
            self._fleet.calls[url, "unreachable"] += 1
            raise HttpProblem(503, f"the node {url} does not answer: {error!r}", after_s=1.0) from error
        self._fleet.calls[url, outcome_of(answer.status_code)] += 1
        passed = StreamingResponse(_pieces(answer), status_code=answer.status_code)
        passed.raw_headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in answer.headers.multi_items()
            if name.lower() not in _OWN_HEADERS - {"content-length"}
        ]
        return passed

    # -- a node that is chosen ---------------------------------------------------------------------------------------

    async def _create(self, request: Request) -> Response:
        """Make a sandbox where most room is; a node that refuses for want of room is followed by the next."""
        body = await body_of(request, max_bytes=self._settings.max_body_bytes, wait_s=self._settings.body_s)
        order = order_of(self._fleet.states.values(), key=request.headers.get("idempotency-key", ""))
        refusal: Response = http_answer(HttpProblem(429, why_none(self._fleet.states.values()), after_s=1.0))
        for url in order:
            with self._fleet.promised(url):
                try:
                    answer = await self._whole(request, url, body)
                except HttpProblem as error:
                    refusal = http_answer(error)
                    continue
            if answer.status_code not in TRY_ANOTHER:
                self._note(answer, url)
                return answer
            refusal = answer
        self._fleet.unplaced += 1
        return refusal

    def _note(self, answer: Response, url: str) -> None:
        if answer.status_code == 201:
            self._fleet.remember(msgspec.json.decode(bytes(answer.body))["sandboxID"], url)
            self._fleet.took(url)

    async def _whole(self, request: Request, url: str, body: bytes | None) -> Response:
        """Pass a call on, and return its whole answer."""
        passed = await self._forward(request, url, body)
        assert isinstance(passed, StreamingResponse)
        data = b"".join([bytes(piece) async for piece in passed.body_iterator])  # pyright: ignore[reportArgumentType]
        whole = Response(data, status_code=passed.status_code)
        whole.raw_headers = [*(one for one in passed.raw_headers if one[0] != b"content-length"), *_length(data)]
        return whole

    # -- all nodes ---------------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        sandbox_id = sandbox_id_of(request)
        if sandbox_id:
            return await self._at_home(request, sandbox_id, unknown=502)
        states = list(self._fleet.states.values())
        document = {
            "sandboxes": sum(state.sandboxes for state in states if state.reachable),
            "most": sum(state.most for state in states if state.reachable),
            "nodes": [{**msgspec.to_builtins(state), "standing": state.standing.value} for state in states],
        }
        return Response(msgspec.json.encode(document), media_type="application/json")

    async def _metrics(self, request: Request) -> Response:
        fleet = self._fleet
        page = router_page(list(fleet.states.values()), calls=fleet.calls, unplaced=fleet.unplaced)
        return Response(page, media_type=CONTENT_TYPE)

    async def _everywhere(self, request: Request) -> list[Response]:
        """Ask every node that answers the same; a refusal is the answer."""
        answers = await asyncio.gather(*(self._whole(request, url, None) for url in self._reachable()))
        if not answers:
            raise HttpProblem(503, "no node of the fleet answers")
        return list(answers)

    async def _list(self, request: Request) -> Response:
        answers = await self._everywhere(request)
        if refused := next((one for one in answers if one.status_code != 200), None):
            return refused
        pages = [(msgspec.json.decode(bytes(one.body)), "x-next-token" in one.headers) for one in answers]
        for url, (page, _) in zip(self._reachable(), pages, strict=False):
            for item in page:
                self._fleet.remember(item["sandboxID"], url)
        query = request.query_params
        shown, cursor = merged(
            pages, limit=limit_of(query.get("limit", "")), newest_first=query.get("order", "desc") != "asc"
        )
        answer = Response(msgspec.json.encode(shown), media_type="application/json")
        if cursor:
            answer.headers["x-next-token"] = cursor
        return answer

    async def _all_metrics(self, request: Request) -> Response:
        answers = await self._everywhere(request)
        if refused := next((one for one in answers if one.status_code != 200), None):
            return refused
        found: dict[str, Any] = {}
        for one in answers:
            found.update(msgspec.json.decode(bytes(one.body))["sandboxes"])
        return Response(msgspec.json.encode({"sandboxes": found}), media_type="application/json")


def _guarded(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except RollmillError as error:
            return http_answer(error)

    return endpoint


def _unless_empty(request: Request, body: AsyncIterator[bytes] | bytes | None) -> AsyncIterator[bytes] | bytes | None:
    announced = request.headers.get("content-length", "")
    return body if "transfer-encoding" in request.headers or announced not in ("", "0") else None


def _length(data: bytes) -> Iterable[tuple[bytes, bytes]]:
    return [(b"content-length", str(len(data)).encode())]


async def _pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()
