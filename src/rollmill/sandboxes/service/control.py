"""The control API: who may make, see, keep and end sandboxes. Thin; what is done stands in `node`."""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rollmill.errors import RollmillError, SandboxDead
from rollmill.sandboxes.service import control_shapes as shapes
from rollmill.sandboxes.service.answers import http_answer
from rollmill.sandboxes.service.exchange import body_of, linger
from rollmill.sandboxes.service.law import (
    MOST_PER_PAGE,
    Filter,
    HttpProblem,
    Standing,
    limit_of,
    metadata_of,
    page,
    same,
)
from rollmill.sandboxes.service.node import Node
from rollmill.sandboxes.service.problems import http_problem_of
from rollmill.sandboxes.service.served import Order, Served

T = TypeVar("T", bound=shapes.Asked)
Handler = Callable[[Request], Awaitable[Response]]

_KEY = re.compile(r"[a-z0-9-]{1,255}")
_ALWAYS_ASKED = (
    ". Older versions of the SDK always ask for the internet: name allow_internet_access=False, or start the service "
    "with --without-internet"
)
_OLD_TIMEOUT_S = 15
"""Of a resume or a creation by the first version of the API, whose callers may name none."""


class ControlFace:
    """Sandboxes of a node.

    Args:
        node: whose.
        token: that callers must show, as `X-API-Key` or as a bearer token.
        domain: where callers reach sandboxes, if they are to do so by names of hosts.
    """

    def __init__(self, node: Node, *, token: str, domain: str | None = None) -> None:
        self._node, self._token, self._domain = node, token, domain

    def routes(self) -> list[Route]:
        """Return the routes; those of the API's first version lead to the same."""
        one = "/sandboxes/{sandbox_id}"
        table: list[tuple[str, str, Handler]] = [
            ("POST", "/v2/sandboxes", functools.partial(self._create, default_s=self._node.settings.default_timeout_s)),
            ("POST", "/sandboxes", functools.partial(self._create, default_s=_OLD_TIMEOUT_S)),
            ("GET", "/v2/sandboxes", functools.partial(self._list, default=(Standing.RUNNING, Standing.PAUSED))),
            ("GET", "/sandboxes", functools.partial(self._list, default=(Standing.RUNNING,))),
            ("GET", "/sandboxes/metrics", self._all_metrics),
            ("GET", one, self._show),
            ("DELETE", one, self._kill),
            ("POST", f"{one}/timeout", self._timeout),
            ("POST", f"{one}/refreshes", self._refresh),
            ("POST", f"{one}/pause", self._pause),
            ("POST", f"{one}/resume", functools.partial(self._connect, only_paused=True)),
            ("POST", f"{one}/connect", self._connect),
            ("POST", f"/v2{one}/connect", self._connect),
            ("GET", f"{one}/metrics", self._metrics),
            ("PUT", f"{one}/network", self._network),
            ("POST", f"{one}/snapshots", self._snapshot),
            ("POST", f"{one}/fork", self._fork),
            ("GET", "/snapshots", self._snapshots),
            ("GET", "/templates", self._templates),
            ("GET", "/templates/aliases/{name}", self._alias),
            ("DELETE", "/templates/{name:path}", self._delete_template),
            ("POST", "/v3/templates", self._no_build),
        ]
        return [Route(path, self.guarded(handler), methods=[method]) for method, path, handler in table]

    def guarded(self, handler: Handler) -> Handler:
        """Return a handler for callers with the token, whose errors are answers."""

        async def endpoint(request: Request) -> Response:
            try:
                self._check_token(request)
                return await handler(request)
            except SandboxDead as error:
                return http_answer(HttpProblem(404, str(error)))
            except RollmillError as error:
                if http_problem_of(error).status == 413:
                    await linger(request)
                return http_answer(error)

        return endpoint

    def _check_token(self, request: Request) -> None:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = request.headers.get("x-api-key") or (bearer if scheme.lower() == "bearer" else None)
        if not same(given, self._token):
            raise HttpProblem(
                401,
                "the call has no token, or not the one that this service was started with. Send it as X-API-Key: TOKEN "
                "(E2B_API_KEY of the SDK) or as Authorization: Bearer TOKEN",
            )

    async def _body(self, request: Request, kind: type[T]) -> T:
        settings = self._node.settings
        body = await body_of(request, max_bytes=settings.max_body_bytes, wait_s=settings.body_s)
        try:
            return msgspec.json.decode(body or b"{}", type=kind)
        except msgspec.MsgspecError as error:
            raise HttpProblem(400, f"the body is not understood: {error}") from error

    # -- make and see ------------------------------------------------------------------------------------------------

    async def _create(self, request: Request, *, default_s: float) -> Response:
        asked = await self._body(request, shapes.NewSandbox)
        if missing := asked.unsupported(without_internet=self._node.settings.without_internet):
            hint = _ALWAYS_ASKED if asked.allow_internet_access else ""
            raise HttpProblem(501, f"not to be had here: {missing}. Sandboxes of this service have no network{hint}")
        key = request.headers.get("idempotency-key", "")
        if key and not _KEY.fullmatch(key):
            raise HttpProblem(400, "the idempotency key is not 1 to 255 lowercase letters, digits and hyphens")
        order = Order(
            template=asked.template_id,
            timeout_s=float(default_s if asked.timeout is None else asked.timeout),
            metadata=asked.metadata or {},
            envs=asked.env_vars or {},
            plan=asked.plan(),
            key=key,
        )
        return _json(shapes.created(await self._node.create(order), domain=self._domain), 201)

    async def _list(self, request: Request, *, default: tuple[Standing, ...]) -> Response:
        query = request.query_params
        wanted = Filter(
            metadata=metadata_of(query.get("metadata", "")),
            standings=_standings(query.get("state", "")) or default,
            template=query.get("template", ""),
            started_after_s=_moment(query.get("startedAfter", "")),
            newest_first=query.get("order", "desc") != "asc",
        )
        served = self._node.all()
        items = [one.listed() for one in served.values()]
        try:
            ids, cursor = page(
                items, wanted=wanted, limit=limit_of(query.get("limit", "")), cursor=query.get("nextToken", "")
            )
        except (ValueError, UnicodeDecodeError) as error:
            raise HttpProblem(400, f"nextToken is none of this service's: {error}") from error
        answer = _json([shapes.listed(served[one], node=self._node) for one in ids])
        if cursor:
            answer.headers["x-next-token"] = cursor
        return answer

    async def _show(self, request: Request) -> Response:
        return _json(shapes.detailed(self._found(request), node=self._node, domain=self._domain))

    def _found(self, request: Request) -> Served:
        return self._node.find(request.path_params["sandbox_id"])

    # -- keep and end ------------------------------------------------------------------------------------------------

    async def _kill(self, request: Request) -> Response:
        await self._node.kill(request.path_params["sandbox_id"])
        return Response(status_code=204)

    async def _timeout(self, request: Request) -> Response:
        asked = await self._body(request, shapes.TimeoutAsked)
        await self._node.set_timeout(request.path_params["sandbox_id"], timeout_s=float(asked.timeout))
        return Response(status_code=204)

    async def _refresh(self, request: Request) -> Response:
        asked = await self._body(request, shapes.RefreshAsked)
        timeout_s = float(_OLD_TIMEOUT_S if asked.duration is None else asked.duration)
        await self._node.connect(self._running(request).id, timeout_s=timeout_s)
        return Response(status_code=204)

    def _running(self, request: Request) -> Served:
        served = self._found(request)
        if served.standing is not Standing.RUNNING:
            raise HttpProblem(404, f"sandbox {served.id} is paused; connect to it, which resumes it")
        return served

    async def _pause(self, request: Request) -> Response:
        asked = await self._body(request, shapes.PauseAsked)
        await self._node.pause(request.path_params["sandbox_id"], keep_memory=asked.memory is not False)
        return Response(status_code=204)

    async def _connect(self, request: Request, *, only_paused: bool = False) -> Response:
        asked = await self._body(request, shapes.ConnectAsked)
        served = self._found(request)
        if asked.memory is False and served.standing is Standing.PAUSED and served.files is None:
            raise HttpProblem(501, "a paused sandbox goes on where it was; it cannot be started from its files alone")
        if only_paused and served.standing is not Standing.PAUSED:
            raise HttpProblem(409, f"sandbox {served.id} runs already")
        timeout_s = self._node.settings.default_timeout_s if asked.timeout is None else float(asked.timeout)
        served, resumed = await self._node.connect(served.id, timeout_s=timeout_s)
        return _json(shapes.created(served, domain=self._domain), 201 if resumed else 200)

    async def _network(self, request: Request) -> Response:
        self._found(request)
        asked = await self._body(request, shapes.NetworkAsked)
        if asked.allow_out or asked.rules or asked.egress_proxy:
            raise HttpProblem(501, "sandboxes of this service have no network, and cannot be given one")
        return Response(status_code=204)

    # -- use ---------------------------------------------------------------------------------------------------------

    async def _metrics(self, request: Request) -> Response:
        served = self._found(request)
        start_s, end_s = (_number(request.query_params.get(name, "")) for name in ("start", "end"))
        samples = [
            sample
            for sample in await served.sample(self._node.wall_s)
            if (start_s is None or sample.wall_s >= start_s) and (end_s is None or sample.wall_s < end_s + 1)
        ]
        return _json([shapes.metric(sample, served=served) for sample in samples])

    async def _all_metrics(self, request: Request) -> Response:
        served = self._node.all()
        asked = [one for one in request.query_params.get("sandbox_ids", "").split(",") if one in served]
        found = {one: (await served[one].sample(self._node.wall_s))[-1] for one in asked[:MOST_PER_PAGE]}
        return _json({"sandboxes": {one: shapes.metric(last, served=served[one]) for one, last in found.items()}})

    # -- snapshots and templates -------------------------------------------------------------------------------------

    async def _snapshot(self, request: Request) -> Response:
        served = self._found(request)
        asked = await self._body(request, shapes.SnapshotAsked)
        # Which kind is made of one that is not named is the service's to say.
        kept = await self._node.snapshot(served.id, name=asked.name or "", full=bool(asked.memory))
        return _json(shapes.snapshot_info(kept), 201)

    async def _fork(self, request: Request) -> Response:
        served = self._found(request)
        asked = await self._body(request, shapes.ForkAsked)
        timeout_s = float(_OLD_TIMEOUT_S if asked.timeout is None else asked.timeout)
        count = 1 if asked.count is None else asked.count
        results = await self._node.fork(served.id, count=count, timeout_s=timeout_s)
        return _json([shapes.forked(one, domain=self._domain) for one in results], 201)

    async def _snapshots(self, request: Request) -> Response:
        query = request.query_params
        chosen = self._node.shelf.chosen(sandbox_id=query.get("sandboxID", ""), name=query.get("name", ""))
        start = int(_number(query.get("nextToken", "")) or 0)
        end = start + limit_of(query.get("limit", ""))
        answer = _json([shapes.snapshot_info(kept) for kept in chosen[start:end]])
        if end < len(chosen):
            answer.headers["x-next-token"] = str(end)
        return answer

    async def _templates(self, request: Request) -> Response:
        return _json([{"templateID": name, "names": [name], "public": False} for name in sorted(self._node.templates)])

    async def _alias(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._node.templates:
            raise HttpProblem(404, f"template {name!r} is not known here")
        return _json({"templateID": name, "public": False})

    async def _delete_template(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name in self._node.templates:
            raise HttpProblem(403, f"template {name!r} stands in the settings of this service; remove it there")
        if not await self._node.delete_snapshot(name):
            raise HttpProblem(404, f"no template or snapshot {name!r} is here")
        return Response(status_code=204)

    async def _no_build(self, request: Request) -> Response:
        raise HttpProblem(501, "templates are not built over HTTP; name images in the service's file of templates")


def _json(document: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status_code=status, media_type="application/json")


def _standings(text: str) -> tuple[Standing, ...]:
    try:
        return tuple(Standing(word) for word in text.split(",") if word)
    except ValueError as error:
        raise HttpProblem(400, f"state is {text!r}; it is running, paused, or both with a comma") from error


def _moment(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp() if text else 0.0
    except ValueError as error:
        raise HttpProblem(400, f"startedAfter is {text!r}, which is no time: {error}") from error


def _number(text: str) -> float | None:
    if not text:
        return None
    if not text.isdecimal() or len(text) > 15:
        raise HttpProblem(400, f"{text!r} is no number")
    return float(text)
