"""All of the service as one application: the control API, and the services that sandboxes are reached by.

| path | who asks | what opens it |
|---|---|---|
| `/health` without a sandbox; `/here?id=` | anybody; a router that looks for a sandbox | nothing |
| `/sandboxes`, `/v2/sandboxes`, ...; `/metrics` | whoever makes sandboxes, Prometheus | the token of the service |
| `/health` of a sandbox | its SDK, before it blames the network | nothing: it says only whether it runs |
| programs, the file system, `/files` | whoever uses a sandbox | its token, or for files a signature by it |
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import rollmill
from rollmill.errors import RollmillError
from rollmill.exposition import CONTENT_TYPE
from rollmill.sandboxes.service.answers import http_answer
from rollmill.sandboxes.service.control import ControlFace
from rollmill.sandboxes.service.exchange import sandbox_id_of
from rollmill.sandboxes.service.file_face import FileFace
from rollmill.sandboxes.service.law import HttpProblem
from rollmill.sandboxes.service.node import Node
from rollmill.sandboxes.service.process_face import ProcessFace
from rollmill.sandboxes.service.room import Room


class ServiceApp(Starlette):
    """The application of one node.

    Args:
        node: its sandboxes.
        token: of the control API.
        domain: what callers are told to reach sandboxes by, `None` where they name the address themselves.
        metrics: makes the page for Prometheus; `None`: there is none.
        room: tells what there is room for, for routers; `None`: its places are all that is known.
    """

    def __init__(
        self,
        node: Node,
        *,
        token: str,
        domain: str | None = None,
        metrics: Callable[[], Awaitable[bytes]] | None = None,
        room: Callable[[], Room] | None = None,
    ) -> None:
        self._node, self._metrics, self._room = node, metrics, room
        control = ControlFace(node, token=token, domain=domain)
        super().__init__(
            routes=[
                Route("/health", self._health),
                Route("/here", self._here),
                Route("/metrics", control.guarded(self._show_metrics)),
                *control.routes(),
                *ProcessFace(node).routes(),
                *FileFace(node).routes(),
            ],
            exception_handlers={
                RollmillError: self._fail,
                HTTPException: self._fail_to_route,
                ClientDisconnect: self._left,
            },
        )
        self.router.redirect_slashes = False

    async def _health(self, request: Request) -> Response:
        sandbox_id = sandbox_id_of(request)
        if not sandbox_id:
            document = {
                "version": rollmill.__version__,
                "sandboxes": len(self._node.all()),
                "most": self._node.settings.max_sandboxes,
                "starting": self._node.starting,
                "room": msgspec.to_builtins(Room() if self._room is None else self._room()),
            }
            return Response(msgspec.json.encode(document), media_type="application/json")
        await self._node.check_runs(sandbox_id)
        return Response(status_code=204)

    async def _here(self, request: Request) -> Response:
        return Response(status_code=404 if self._node.get(request.query_params.get("id", "")) is None else 204)

    async def _show_metrics(self, request: Request) -> Response:
        if self._metrics is None:
            raise HttpProblem(404, "this service was started without metrics")
        return Response(await self._metrics(), media_type=CONTENT_TYPE)

    async def _fail(self, request: Request, error: Any) -> Response:
        return http_answer(error)

    async def _fail_to_route(self, request: Request, error: Any) -> Response:
        path = request.scope["path"]
        if error.status_code == 405:
            return http_answer(HttpProblem(405, f"{path} does not take {request.method}"))
        return http_answer(HttpProblem(404, f"{path} is not served here"))

    async def _left(self, request: Request, error: Any) -> Response:
        return Response(status_code=499)
