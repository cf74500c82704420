"""The routes: who asks what, and in which order it is checked. Thin; what a call means is in `plan`, how it is answered
in `answers`.

| wait | ends after |
|---|---|
| for samples | the request's deadline (the engine returns what there is); the client leaves |
| for text to become ids | the work itself, which the body limit bounds; long texts beside the loop |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

import rollmill
from rollmill.clock import Clock, SystemClock
from rollmill.config.schema import LimitSettings
from rollmill.errors import NotServing, RollmillError, Unauthenticated
from rollmill.generator.http.answers import Answer, ChatAnswer, CompletionAnswer, TokenAnswer
from rollmill.generator.http.asgi import ClientLeft, Exchange, HttpLimits, Receive, Scope, Send
from rollmill.generator.http.bodies import AbortBody, ChatRequest, CompletionRequest, TokenRequest, decode
from rollmill.generator.http.openapi import openapi
from rollmill.generator.http.plan import ID_HEADER, Call, Facts, Plan, plan_of, prompts_of
from rollmill.generator.http.problems import RequestProblem, not_found
from rollmill.generator.http.protocol import Inference, Metrics
from rollmill.generator.http.replies import AbortReply, Health, ModelCard, ModelList, Sample, Version
from rollmill.generator.http.sampling import Sampler, why_cut
from rollmill.generator.http.stream import DONE, Events, event, stream
from rollmill.generator.security import admits
from rollmill.generator.state import ReplicaState
from rollmill.generator.wire import Prompt

_log = logging.getLogger(__name__)
_LONG_TEXT = 20_000
"""Characters above which a prompt becomes ids beside the loop: below it that takes less than 20 ms."""
_STEPS_BEHIND = 4
"""Steps of all samples of a stream that may wait for its reader, where there are more samples than events may wait."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Handler = Callable[[Exchange], Awaitable[None]]


class HttpApp:
    """ASGI application of one replica.

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
        self._service, self._token, self._metrics = service, token, metrics
        self._limits = service.limits if limits is None else limits
        self._bounds = HttpLimits() if bounds is None else bounds
        self._clock = SystemClock() if clock is None else clock
        self._started = int(self._clock.wall_s())
        self._calls: dict[str, tuple[str, ...]] = {}
        self._routes: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._health},
            "/version": {"GET": self._version},
            "/metrics": {"GET": self._show_metrics},
            "/openapi.json": {"GET": self._openapi},
            "/v1/models": {"GET": self._models},
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completion},
            "/inference/v1/generate": {"POST": self._tokens},
            "/inference/v1/abort_requests": {"POST": self._abort},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one exchange."""
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served, not {scope['type']}")
        exchange = Exchange(scope, receive, send)
        if ID_HEADER in exchange.headers:
            exchange.always[ID_HEADER] = exchange.headers[ID_HEADER]
        try:
            await self._route(exchange)(exchange)
        except ClientLeft:
            _log.debug("the client of %s left", exchange.path)
        except RollmillError as error:
            await self._service.take_note(error)
            await exchange.fail(error)

    def _route(self, exchange: Exchange) -> Handler:
        """Return who answers, once the caller may ask."""
        path = exchange.path
        if path != "/health" and not self._admits(exchange):
            raise Unauthenticated(
                "the request has no token, or not the one that this replica was started with. Send it as "
                "'Authorization: Bearer TOKEN' (openai client: api_key=...)"
            )
        methods = {"GET": self._model} if path.startswith("/v1/models/") else self._routes.get(path)
        if methods is None:
            raise not_found(path, known=self._routes)
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            allowed = ", ".join(methods)
            raise RequestProblem(
                f"{path} answers {allowed}, not {exchange.method}",
                code="method_not_allowed",
                status=405,
                headers={"allow": allowed},
            )
        return handler

    def _admits(self, exchange: Exchange) -> bool:
        return self._token is None or admits(exchange.headers.get("authorization"), token=self._token)

    # -- what a replica says of itself

    async def _health(self, exchange: Exchange) -> None:
        status = self._service.status()
        serving = status.state is ReplicaState.SERVING
        health = Health(status=status.state.value, reason=status.reason)
        await exchange.answer_json(health, status=200 if serving else 503)

    async def _version(self, exchange: Exchange) -> None:
        await exchange.answer_json(Version(version=rollmill.__version__))

    async def _show_metrics(self, exchange: Exchange) -> None:
        if self._metrics is None:
            raise RequestProblem("this replica was started without metrics", code="unknown_url", status=404)
        await exchange.answer(self._metrics.render(), kind=METRICS_TYPE)

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.answer_json(openapi())

    async def _models(self, exchange: Exchange) -> None:
        await exchange.answer_json(ModelList(data=[self._card(name) for name in self._service.models]))

    async def _model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix("/v1/models/")
        self._service.check_model(name)
        await exchange.answer_json(self._card(name))

    def _card(self, name: str) -> ModelCard:
        status = self._service.status()
        return ModelCard(
            id=name, created=self._started, max_model_len=status.max_model_len, policy_version=status.policy_version
        )

    # -- what it samples

    async def _chat(self, exchange: Exchange) -> None:
        await self._sample(exchange, decode(await self._body(exchange), ChatRequest), kind=ChatAnswer)

    async def _completion(self, exchange: Exchange) -> None:
        await self._sample(exchange, decode(await self._body(exchange), CompletionRequest), kind=CompletionAnswer)

    async def _tokens(self, exchange: Exchange) -> None:
        await self._sample(exchange, decode(await self._body(exchange), TokenRequest), kind=TokenAnswer)

    async def _abort(self, exchange: Exchange) -> None:
        body = decode(await self._body(exchange), AbortBody)
        found = [name for name in body.request_ids if await self._abort_one(name)]
        await exchange.answer_json(AbortReply(aborted=found))

    async def _abort_one(self, name: str) -> bool:
        parts = self._calls.get(name, (name,))
        return any([await self._service.abort(part) for part in parts])

    async def _body(self, exchange: Exchange) -> bytes:
        return await exchange.body(max_bytes=self._limits.max_body_bytes, deadline_s=self._bounds.body_s)

    async def _sample(
        self,
        exchange: Exchange,
        call: Call,
        *,
        kind: type[ChatAnswer] | type[CompletionAnswer] | type[TokenAnswer],
    ) -> None:
        service = self._service
        service.check_model(call.model or "")
        facts = self._facts()
        prompts = [await self._ids(prompt) for prompt in prompts_of(call, max_model_len=facts.max_model_len)]
        plan = plan_of(call, prompts=prompts, headers=exchange.headers, facts=facts)
        exchange.always[ID_HEADER] = plan.request_id
        answer = kind(
            plan,
            model=call.model or next(iter(service.models), ""),
            created=int(self._clock.wall_s()),
            decode=None if service.codec is None else service.codec.decode,
        )
        several = plan.request_id not in self._calls and len(plan.requests) > 1
        if several:
            self._calls[plan.request_id] = tuple(request.request_id for request in plan.requests)
        try:
            await (self._stream if plan.stream else self._whole)(exchange, plan, answer=answer)
        finally:
            if several:
                del self._calls[plan.request_id]

    async def _whole(self, exchange: Exchange, plan: Plan, *, answer: Answer) -> None:
        sampler = Sampler(self._service, plan, wants_text=answer.wants_text)
        samples = await exchange.unless_gone(self._run(sampler, plan, answer=answer))
        await exchange.answer_json(answer.whole(samples))

    async def _stream(self, exchange: Exchange, plan: Plan, *, answer: Answer) -> None:
        # All samples gain a token in one step of the engine, before the reader can take any.
        samples = plan.siblings * len(plan.requests)
        events = Events(limit=max(self._limits.stream_events, _STEPS_BEHIND * samples))
        sampler = Sampler(self._service, plan, wants_text=answer.wants_text, hearer=_Heard(answer, events=events))

        async def produce() -> None:
            samples = await self._run(sampler, plan, answer=answer)
            if plan.include_usage:
                events.put(event(answer.closing(samples)))
            events.put(DONE)

        error = await stream(exchange, events, produce=produce, request_id=plan.request_id, limits=self._limits)
        if error is not None:
            await self._service.take_note(error)
            _log.warning("the stream of request %s ended early: %s", plan.request_id, error)

    async def _run(self, sampler: Sampler, plan: Plan, *, answer: Answer) -> list[Sample]:
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        samples = await sampler.run()
        cut = next((sample for sample in samples if sample.finish_reason == "abort"), None)
        if cut is not None and not answer.knows_abort:
            raise why_cut(self._service, plan, cut, waited_s=now_s() - began_s)
        return samples

    async def _ids(self, prompt: Prompt) -> np.ndarray:
        if isinstance(prompt, np.ndarray):
            return prompt
        text = [prompt] if isinstance(prompt, str) else [message.content for message in prompt]
        if sum(map(len, text)) <= _LONG_TEXT:
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
        )


class _Heard:
    """Makes events of samples as they grow."""

    def __init__(self, answer: Answer, *, events: Events) -> None:
        self._answer, self._events = answer, events
        self._opened = False

    def grew(self, index: int, *, text: str, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self._open()
        piece = self._answer.piece(index, text=text, ids=ids, logprobs=logprobs)
        if piece is not None:
            self._events.put(event(piece))

    def ended(self, sample: Sample) -> None:
        if sample.finish_reason == "abort" and not self._answer.knows_abort:
            return  # the whole call ends with an error
        self._open()
        self._events.put(event(self._answer.ending(sample)))

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            for one in self._answer.opening():
                self._events.put(event(one))
