"""The routes: who asks what, and in which order it is checked. Thin; what a call means is in `plan`, how it is answered
in `answers`.

| wait | ends after |
|---|---|
| for samples | the request's deadline (the engine returns what there is); the client leaves |
| for text to become ids | the work itself, which the body limit bounds; long texts beside the loop |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import rollmill
from rollmill.clock import Clock, SystemClock
from rollmill.config.serving import LimitSettings
from rollmill.errors import NotServing, RollmillError
from rollmill.exposition import CONTENT_TYPE
from rollmill.generator.http.answers import Answer, ChatAnswer, CompletionAnswer, TokenAnswer
from rollmill.generator.http.bodies import AbortBody, ChatRequest, CompletionRequest, ScoreBody, TokenRequest, decode
from rollmill.generator.http.exchange import Gate, Json, body_of, failure, unless_gone
from rollmill.generator.http.openapi import openapi
from rollmill.generator.http.plan import Call, Facts, Plan, deadline_of, plan_of, prompts_of
from rollmill.generator.http.problems import RequestProblem, not_found, status_of, wrong_method
from rollmill.generator.http.protocol import HttpLimits, Inference, Metrics
from rollmill.generator.http.replies import AbortReply, Health, ModelCard, ModelList, Sample, Version
from rollmill.generator.http.sampling import Sampler, why_cut
from rollmill.generator.http.scoring import score
from rollmill.generator.http.stream import DONE, EventStream, event
from rollmill.generator.state import ReplicaState
from rollmill.generator.wire import LONG_TEXT_CHARS, Prompt, chars_of

_STEPS_BEHIND = 4
"""Steps of all samples of a stream that may wait for its reader, where there are more samples than events may wait."""
_LINGER_S = 5.0
"""What is left of a body that is too large is taken this long."""


class HttpApp(Starlette):
    """The application of one replica.

    Args:
        service: what is served.
        token: that callers must give as `Authorization: Bearer TOKEN`, for all but /health; `None` asks for none.
        metrics: what `/metrics` shows.
        limits: of requests and streams; the service's if `None`.
        bounds: that only HTTP needs.
        clock: says when a reply was made.
    """

    def __init__(
        self,
        service: Inference,
        *,
        token: str | None = None,
        metrics: Metrics | None = None,
        limits: LimitSettings | None = None,
        bounds: HttpLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._service, self._metrics = service, metrics
        self._limits = service.limits if limits is None else limits
        self._bounds = HttpLimits() if bounds is None else bounds
        self._clock = SystemClock() if clock is None else clock
        self._started = int(self._clock.wall_s())
        self._calls: dict[str, tuple[str, ...]] = {}
        super().__init__(
            routes=[
                Route("/health", self._health),
                Route("/version", self._version),
                Route("/metrics", self._show_metrics),
                Route("/openapi.json", self._openapi),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._model),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completion, methods=["POST"]),
                Route("/inference/v1/generate", self._tokens, methods=["POST"]),
                Route("/inference/v1/score", self._score, methods=["POST"]),
                Route("/inference/v1/abort_requests", self._abort, methods=["POST"]),
            ],
            middleware=[Middleware(Gate, token=token)],
            exception_handlers={RollmillError: self._fail, HTTPException: self._fail_to_route},
        )
        self.router.redirect_slashes = False

    async def _fail(self, request: Request, error: Any) -> Response:
        """Answer with an error of ours."""
        await self._service.take_note(error)
        if status_of(error) == 413:  # a client that sends too much reads no answer before it has sent it
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_S):
                    while (await request.receive()).get("more_body", False):
                        pass
        return failure(error)

    async def _fail_to_route(self, request: Request, error: Any) -> Response:
        """Answer for the router, which found no path, or one that takes another method."""
        path = request.scope["path"]
        if error.status_code == 405:
            return failure(wrong_method(path, method=request.method, allowed=error.headers["Allow"].split(", ")))
        return failure(not_found(path, known=[route.path_format for route in self.routes if isinstance(route, Route)]))

    # -- what a replica says of itself

    async def _health(self, request: Request) -> Response:
        status = self._service.status()
        serving = status.state is ReplicaState.SERVING
        health = Health(status=status.state.value, reason=status.reason)
        return Json(health, status_code=200 if serving else 503)

    async def _version(self, request: Request) -> Response:
        return Json(Version(version=rollmill.__version__))

    async def _show_metrics(self, request: Request) -> Response:
        if self._metrics is None:
            raise RequestProblem("this replica was started without metrics", code="unknown_url", status=404)
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    async def _openapi(self, request: Request) -> Response:
        return Json(openapi())

    async def _models(self, request: Request) -> Response:
        names = (*self._service.models, *(one.name for one in self._service.status().adapters))
        return Json(ModelList(data=[self._card(name) for name in names]))

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._service.check_model(name)
        return Json(self._card(name))

    def _card(self, name: str) -> ModelCard:
        status = self._service.status()
        version = next((one.policy_version for one in status.adapters if one.name == name), status.policy_version)
        return ModelCard(id=name, created=self._started, max_model_len=status.max_model_len, policy_version=version)

    # -- what it samples

    async def _chat(self, request: Request) -> Response:
        return await self._sample(request, decode(await self._body(request), ChatRequest), kind=ChatAnswer)

    async def _completion(self, request: Request) -> Response:
        return await self._sample(request, decode(await self._body(request), CompletionRequest), kind=CompletionAnswer)

    async def _tokens(self, request: Request) -> Response:
        return await self._sample(request, decode(await self._body(request), TokenRequest), kind=TokenAnswer)

    async def _score(self, request: Request) -> Response:
        body = decode(await self._body(request), ScoreBody)
        self._service.check_model(body.model or "")
        deadline_s = deadline_of(body, headers=request.headers)
        work = score(self._service, body, deadline_s=deadline_s)
        return Json(await unless_gone(request.receive, work))

    async def _abort(self, request: Request) -> Response:
        body = decode(await self._body(request), AbortBody)
        return Json(AbortReply(aborted=[name for name in body.request_ids if await self._abort_one(name)]))

    async def _abort_one(self, name: str) -> bool:
        parts = self._calls.get(name, (name,))
        return any([await self._service.abort(part) for part in parts])

    async def _body(self, request: Request) -> bytes:
        return await body_of(request, max_bytes=self._limits.max_body_bytes, deadline_s=self._bounds.body_s)

    async def _sample(
        self,
        request: Request,
        call: Call,
        *,
        kind: type[ChatAnswer] | type[CompletionAnswer] | type[TokenAnswer],
    ) -> Response:
        service = self._service
        service.check_model(call.model or "")
        facts = self._facts()
        prompts = [await self._ids(prompt) for prompt in prompts_of(call, max_model_len=facts.max_model_len)]
        plan = plan_of(call, prompts=prompts, headers=request.headers, facts=facts)
        request.state.request_id = plan.request_id
        answer = kind(
            plan,
            model=call.model or next(iter(service.models), ""),
            created=int(self._clock.wall_s()),
            decode=None if service.codec is None else service.codec.decode,
        )
        if plan.stream:
            return self._stream(plan, answer=answer)
        sampler = Sampler(service, plan, wants_text=answer.wants_text)
        return Json(answer.whole(await unless_gone(request.receive, self._run(sampler, plan, answer=answer))))

    def _stream(self, plan: Plan, *, answer: Answer) -> EventStream:
        # All samples gain a token in one step of the engine, before the reader can take any.
        limit = max(self._limits.stream_events, _STEPS_BEHIND * plan.siblings * len(plan.requests))

        async def produce(put: Callable[[bytes], None]) -> None:
            heard = _Heard(answer, put=put)
            sampler = Sampler(self._service, plan, wants_text=answer.wants_text, hearer=heard)
            samples = await self._run(sampler, plan, answer=answer)
            if plan.include_usage:
                put(event(answer.closing(samples)))
            put(DONE)

        return EventStream(
            produce,
            request_id=plan.request_id,
            limit=limit,
            stall_s=self._limits.stream_stall_s,
            take_note=self._service.take_note,
        )

    async def _run(self, sampler: Sampler, plan: Plan, *, answer: Answer) -> list[Sample]:
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        with self._named(plan):
            samples = await sampler.run()
        cut = next((sample for sample in samples if sample.finish_reason == "abort"), None)
        if cut is not None and not answer.knows_abort:
            raise why_cut(self._service, plan, cut, waited_s=now_s() - began_s)
        return samples

    @contextlib.contextmanager
    def _named(self, plan: Plan) -> Iterator[None]:
        """Let an abort find all requests of a call by the one name that its caller knows."""
        parts = tuple(request.request_id for request in plan.requests)
        if len(parts) == 1 or plan.request_id in self._calls:
            yield
            return
        self._calls[plan.request_id] = parts
        try:
            yield
        finally:
            del self._calls[plan.request_id]

    async def _ids(self, prompt: Prompt) -> np.ndarray:
        if isinstance(prompt, np.ndarray):
            return prompt
        if chars_of(prompt) <= LONG_TEXT_CHARS:
            return np.asarray(self._service.encode(prompt), dtype=np.int64)
        return np.asarray(await asyncio.to_thread(self._service.encode, prompt), dtype=np.int64)

    def _facts(self) -> Facts:
        service, status = self._service, self._service.status()
        if status.max_model_len == 0:  # a router that knows no replica yet
            because = f": {status.reason}" if status.reason else ""
            raise NotServing(f"nothing is known that serves requests{because}; ask again when /health is 200")
        return Facts(
            max_model_len=status.max_model_len,
            max_new_tokens=self._limits.max_new_tokens,
            stop_token_ids=() if service.codec is None else tuple(service.codec.stop_token_ids),
            has_tokenizer=service.codec is not None,
            adapters=tuple(one.name for one in status.adapters),
        )


class _Heard:
    """Makes events of samples as they grow."""

    def __init__(self, answer: Answer, *, put: Callable[[bytes], None]) -> None:
        self._answer, self._put = answer, put
        self._opened = False

    def grew(self, index: int, *, text: str, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self._open()
        piece = self._answer.piece(index, text=text, ids=ids, logprobs=logprobs)
        if piece is not None:
            self._put(event(piece))

    def ended(self, sample: Sample) -> None:
        if sample.finish_reason == "abort" and not self._answer.knows_abort:
            return  # the whole call ends with an error
        self._open()
        self._put(event(self._answer.ending(sample)))

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            for one in self._answer.opening():
                self._put(event(one))
