"""A server that speaks SGLang's HTTP dialect, with the traps of the real one, in a thread of the test.

Words, statuses and orders of events were recorded from SGLang 0.5.23 (CPU). What it samples says by itself which
weights sampled it, and whether it used KV of older ones: `logprob_of`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

VOCABULARY = 96
STALE = 0.5
MASKED = 0.25
KEY = "s3cret"


def logprob_of(version: int, index: int, *, stale: bool = False, masked: bool = False) -> float:
    """Log-prob of output token `index` under a version; others where old KV was used, and of a filtered draw."""
    return -(version + index / 1000 + (STALE if stale else 0)) + (MASKED if masked else 0)


def token_of(prompt: list[int], index: int) -> int:
    return (sum(prompt) + 7 * index) % VOCABULARY


class _Request:
    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.params = body["sampling_params"]
        self.prompt: list[int] = body["input_ids"]
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.changes: list[tuple[str, int]] = []
        self.kv_label: str | None = None
        self.cached = 0
        self.reason: dict[str, Any] | None = None
        self.dispatched = self.abort_sent = self.ending = self.queue_abort = False
        self.news = asyncio.Event()

    def tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def spans(self, label: str) -> list[dict[str, Any]]:
        spans, start = [], 0
        for version, end in [*self.changes, (label, len(self.tokens))]:
            if end > start:
                spans.append({"version": version, "start": start, "end": end})
                start = end
        return spans


class FakeSglang:
    """The server, as `rollmill.generator.engines.sglang.port.Server`.

    Attributes:
        seen: method and path of every call, in order.
        bodies: path -> bodies that were posted there.
        fail: path -> status that its next call gets.
        hang: paths that are never answered.
        masks: whether it knows sampling masks.
        lose_spans: whether replies come without their versions.
        loaded: files of weights that it found, by where the links led.
        refuse_update: the message of an update that fails after weights were changed.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.exit_code: int | None = None
        self.seen: list[str] = []
        self.bodies: dict[str, list[Any]] = {}
        self.fail: dict[str, int] = {}
        self.hang: set[str] = set()
        self.masks = True
        self.lose_spans = False
        self.refuse_update = ""
        self.label = "1"
        self.loaded: list[str] = []
        self.stopped = 0
        self.port = 0
        self._dead = ""
        self._front_paused = self._paused = False
        self._requests: dict[str, _Request] = {}
        self._kv: dict[tuple[str, tuple[int, ...]], str] = {}
        self._allowed = float("inf")
        self.ends, self._end = os.pipe()
        self._changed = asyncio.Event()
        self._up = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._up.wait(10)

    # -- for tests, from any thread

    def allow(self, steps: float) -> None:
        """Let it make this many steps from now on."""
        self._command(lambda: setattr(self, "_allowed", steps))

    def die(self, why: str) -> None:
        """End the whole process."""

        def end() -> None:
            self._dead = why
            self.exit_code = -9
            os.close(self._end)
            self._end = -1
            self._server.close()
            for writer in self._writers:
                writer.transport.abort()

        self._command(end)

    @property
    def running(self) -> list[str]:
        return [rid for rid, request in self._requests.items() if request.reason is None]

    def count(self, rid: str) -> int:
        """Tokens that it has made for a request."""
        request = self._requests.get(rid)
        return 0 if request is None else len(request.tokens)

    def _command(self, act: Callable[[], None]) -> None:
        if self.stopped:
            return
        done = threading.Event()

        def run() -> None:
            act()
            self._note()
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(10)

    # -- `Server`

    def last_words(self) -> str:
        return f"the SGLang server (pid {self.pid}) ended; first error in its log: {self._dead or 'none'}"

    def stop(self, *, grace_s: float) -> None:
        del grace_s
        self.stopped += 1
        if self.stopped > 1:
            return
        if self._end >= 0:
            os.close(self._end)
        self.exit_code = 0
        self._loop.call_soon_threadsafe(self._finish.set)
        self._thread.join()
        os.close(self.ends)
        # A connection that was accepted while its loop ended is closed by nobody; it goes here, not in another test.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()

    # -- its loop

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._finish = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._connection, host="127.0.0.1", port=0)
        self.port = self._server.sockets[0].getsockname()[1]
        steps = asyncio.ensure_future(self._steps())
        self._up.set()
        await self._finish.wait()
        steps.cancel()
        self._server.close()
        for request in list(self._requests.values()):
            request.reason = request.reason or {"type": "abort"}
            request.tell()
        # Not cancelled: asyncio's streams report a cancelled connection as an error. Again and again: a connection that
        # was just being accepted becomes a task of its own.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for writer in list(self._writers):
                writer.transport.abort()
            await asyncio.wait(others, timeout=0.01, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0)  # what was closed last lets go of its socket

    def _note(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _steps(self) -> None:
        while True:
            ready = [r for r in self._requests.values() if r.dispatched and r.reason is None]
            if self._dead or self._paused or self._allowed <= 0 or not ready:
                await self._changed.wait()
                continue
            self._allowed -= 1
            for request in ready:
                self._step(request)
            await asyncio.sleep(0)

    def _step(self, request: _Request) -> None:
        if request.kv_label is None:
            self._prefill(request)
        index = len(request.tokens)
        request.tokens.append(token_of(request.prompt, index))
        version = int(self.label)
        request.logprobs.append(logprob_of(version, index, stale=request.kv_label != self.label))
        if request.ending:
            request.reason = {"type": "abort", "message": "Aborted", "status_code": None}
        elif request.tokens[-1] in request.params.get("stop_token_ids", ()):
            request.reason = {"type": "stop", "matched": request.tokens[-1]}
        elif len(request.tokens) >= request.params["max_new_tokens"]:
            request.reason = {"type": "length", "length": len(request.tokens)}
        request.tell()

    def _prefill(self, request: _Request) -> None:
        key = (request.body.get("extra_key", ""), tuple(request.prompt))
        held = None if "logprob_start_len" in request.body else self._kv.get(key)
        request.kv_label = self.label if held is None else held
        request.cached = 0 if held is None else len(request.prompt) - 1
        self._kv[key] = request.kv_label

    # -- HTTP

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while (head := await _head(reader)) is not None:
                method, target, length, key = head
                raw = await reader.readexactly(length)
                if key != f"Bearer {KEY}":
                    _send(writer, 401, {"error": "Unauthorized"})
                    continue
                await self._answer(method, target, json.loads(raw) if raw else None, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(
        self, method: str, target: str, body: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        path = urlsplit(target).path
        self.seen.append(f"{method} {path}")
        self.bodies.setdefault(path, []).append(body)
        if path in self.hang:
            await self._finish.wait()
            return
        if path in self.fail:
            _send(writer, self.fail.pop(path), {"error": {"message": f"told to refuse {path}"}})
        elif path == "/generate":
            await self._generate(body, reader, writer)
        else:
            _send(writer, *self._control(path, body))
        await writer.drain()

    def _control(self, path: str, body: Any) -> tuple[int, Any]:
        status, reply = 200, {"status": "ok"}
        if path == "/ready":
            status = 503 if self._front_paused else 200
        elif path == "/pause_generation":
            self._front_paused = self._paused = True
            if body["mode"] == "retract":
                for request in self._requests.values():
                    request.kv_label = None
        elif path == "/continue_generation":
            self._front_paused = self._paused = False
            for request in self._requests.values():
                request.dispatched = True
        elif path == "/abort_request":
            self._abort(body["rid"])
        elif path == "/update_weights_from_disk":
            status, reply = self._update(body)
        elif path == "/server_info":
            reply = {"internal_states": [{"weight_version": self.label}], "version": "0.5.23"}
        elif path == "/v1/loads":
            reply = {"loads": [{"num_used_tokens": 25, "max_total_num_tokens": 100}]}
        self._note()
        return status, reply

    def _update(self, body: dict[str, Any]) -> tuple[int, Any]:
        file = os.path.join(body["model_path"], "model.safetensors")
        if not os.path.exists(file):
            return 400, {"success": False, "message": f"Cannot find any model weights with `{body['model_path']}`."}
        self.loaded.append(os.path.realpath(file))
        old, self.label = self.label, body["weight_version"]
        for request in self._requests.values():
            if request.tokens:
                request.changes.append((old, len(request.tokens)))
        if self.refuse_update:
            return 400, {"success": False, "message": self.refuse_update}
        if body["flush_cache"]:
            if any(request.kv_label is not None for request in self._requests.values()):
                return 400, {"success": False, "message": "Weights were updated, but the cache was not flushed"}
            self._kv.clear()
        return 200, {"success": True, "message": "Succeeded to update model weights."}

    def _abort(self, rid: str) -> None:
        state = self._requests.get(rid)
        if state is None or state.abort_sent:
            return
        state.abort_sent = True
        for name, request in self._requests.items():
            if name.startswith(rid) and request.dispatched and request.reason is None:
                if request.kv_label is None:  # in the queue
                    request.queue_abort = True
                    request.reason = {"type": "abort", "message": "Abort in waiting queue"}
                    request.tell()
                else:
                    request.ending = True

    async def _generate(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if body.get("return_sampling_mask") and not self.masks:
            _send(writer, 400, {"error": {"message": "unknown field return_sampling_mask"}})
            return
        request = self._requests[body["rid"]] = _Request(body)
        request.dispatched = not self._front_paused
        self._note()
        try:
            if body.get("stream"):
                await self._stream(request, reader, writer)
            else:
                while request.reason is None:
                    await request.news.wait()
                _send(writer, 200, self._piece(request, 0, last=True))
        finally:
            del self._requests[body["rid"]]

    async def _stream(self, request: _Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        told = 0
        hung_up = asyncio.ensure_future(reader.read(1))  # nothing comes before the reply has ended
        try:
            while True:
                over = request.reason is not None
                if told < len(request.tokens) or over:
                    _chunk(writer, self._piece(request, told, last=over))
                    told = len(request.tokens)
                if over:
                    break
                news = asyncio.ensure_future(request.news.wait())
                await asyncio.wait({news, hung_up}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if hung_up.done():
                    raise ConnectionError("the caller hung up")
        finally:
            hung_up.cancel()
            await asyncio.wait({hung_up})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _piece(self, request: _Request, start: int, *, last: bool) -> dict[str, Any]:
        # The last token comes once more, with the log-probs of all, where a request was aborted in the queue.
        again = last and request.queue_abort and request.tokens
        first = len(request.tokens) - 1 if again else start
        ids = request.tokens[first:]
        entries = list(zip(request.logprobs, request.tokens, [None] * len(request.tokens), strict=True))
        meta: dict[str, Any] = {
            "id": request.body["rid"],
            "finish_reason": request.reason if last else None,
            "completion_tokens": len(request.tokens),
            "output_token_logprobs": entries if again else entries[start:],
        }
        if not again:
            meta["cached_tokens"] = request.cached
            if request.body.get("return_sampling_mask"):
                meta["output_token_sampling_logprobs"] = [entry[0] + MASKED for entry in entries[start:]]
        if last and not self.lose_spans:
            meta["weight_versions"] = request.spans(self.label)
        if "logprob_start_len" in request.body:
            values = [None, *(-int(self.label) / 10 for _ in request.prompt[1:])]
            meta["input_token_logprobs"] = [[v, t, None] for v, t in zip(values, request.prompt, strict=True)]
        return {"output_ids": ids, "meta_info": meta}


async def _head(reader: asyncio.StreamReader) -> tuple[str, str, int, str] | None:
    line = await reader.readline()
    if not line:
        return None
    method, target, _ = line.decode().split()
    length, key = 0, ""
    while (header := (await reader.readline()).strip()) != b"":
        name, _, value = header.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
        elif name.lower() == b"authorization":
            key = value.strip().decode()
    return method, target, length, key


def _send(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


def _chunk(writer: asyncio.StreamWriter, body: Any) -> None:
    data = f"data: {json.dumps(body)}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
