"""A server that speaks vLLM's HTTP dialect, with the traps of the real one, in a thread of the test.

Words, statuses and orders of events were recorded from vLLM 0.32 (CPU). What it samples says by itself which weights
sampled it, and whether it used KV of older ones: `logprob_of`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from safetensors import safe_open

VOCABULARY = 96
STALE = 0.5


def logprob_of(version: int, index: int, *, stale: bool = False) -> float:
    """Log-prob of output token `index` under a version; another one where KV of an older version was used."""
    return -(version + index / 1000 + (STALE if stale else 0))


def token_of(prompt: list[int], index: int) -> int:
    return (sum(prompt) + 7 * index) % VOCABULARY


class _Request:
    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.params = body["sampling_params"]
        self.prompt: list[int] = body["token_ids"]
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.starts: list[tuple[str, int]] = []
        self.kv_label: str | None = None
        self.cached = 0
        self.reason: str | None = None
        self.folder: Path | None = None
        self.news = asyncio.Event()

    def tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def spans(self) -> list[dict[str, Any]] | None:
        if not self.starts:
            return None
        ends = [start for _, start in self.starts[1:]] + [len(self.tokens)]
        return [
            {"version": label, "start": start, "end": end}
            for (label, start), end in zip(self.starts, ends, strict=True)
        ]


class FakeVllm:
    """The server, as `rollmill.generator.engines.vllm.port.Server`.

    Attributes:
        seen: method and path of every call, in order.
        bodies: path -> bodies that were posted there.
        fail: path -> status that its next call gets.
        hang: paths that are never answered.
        lose_labels: whether replies come without their versions.
        adapters: name -> folder; what is sampled under one tells the first number in it as its version.
    """

    def __init__(self, folder: Path) -> None:
        self.pid = os.getpid()
        self.socket = folder / "socket"
        self.exit_code: int | None = None
        self.seen: list[str] = []
        self.bodies: dict[str, list[Any]] = {}
        self.fail: dict[str, int] = {}
        self.hang: set[str] = set()
        self.lose_labels = False
        self.label = "default"
        self.loaded: list[str] = []
        self.adapters: dict[str, Path] = {}
        self.stopped = 0
        self._dead = ""
        self._pause: str | None = None
        self._updating = False
        self._held: str | None = None
        self._requests: dict[str, _Request] = {}
        self._kv: dict[tuple[str, tuple[int, ...]], str] = {}
        self._totals = {"generation_tokens": 0, "prompt_tokens": 0, "prompt_tokens_cached": 0}
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

    def hold(self, path: str | None) -> None:
        """Let calls to a path wait, until another (or none) is held."""
        self._command(lambda: setattr(self, "_held", path))

    def die(self, why: str, *, half: bool = False) -> None:
        """End: the whole process, or (half) its engine, while the HTTP part lives on and answers no request."""

        def end() -> None:
            self._dead = why
            if not half:
                self.exit_code = -9
                os.close(self._end)
                self._end = -1
                self._server.close()
                for writer in self._writers:
                    writer.transport.abort()

        self._command(end)

    @property
    def running(self) -> list[str]:
        return [name for name, request in self._requests.items() if request.reason is None]

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
        return f"the vLLM server (pid {self.pid}) ended; first error in its log: {self._dead or 'none'}"

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
        self._server = await asyncio.start_unix_server(self._connection, path=str(self.socket))
        steps = asyncio.ensure_future(self._steps())
        self._up.set()
        await self._finish.wait()
        steps.cancel()
        self._held = None
        self._note()
        self._server.close()
        for name in list(self._requests):
            self._abort(name)
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
            ready = [request for request in self._requests.values() if request.reason is None]
            if self._dead or self._pause == "keep" or self._allowed <= 0 or not ready:
                await self._changed.wait()
                continue
            if self._pause is not None:  # what came after it waits
                ready = [request for request in ready if request.tokens]
                if not ready:
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
        if not request.starts or request.starts[-1][0] != self.label:
            request.starts.append((self.label, index))
        request.tokens.append(token_of(request.prompt, index))
        version = self._version_of(request)
        stale = request.kv_label != self.label
        request.logprobs.append(logprob_of(version, index, stale=stale))
        self._totals["generation_tokens"] += 1
        if request.tokens[-1] in request.params.get("stop_token_ids", ()):
            request.reason = "stop"
        elif len(request.tokens) >= request.params["max_tokens"]:
            request.reason = "length"
        request.tell()

    def _version_of(self, request: _Request) -> int:
        if request.folder is not None:  # the real one reads it again when it had to make room
            return round(float(_first_number(request.folder / "adapter_model.safetensors")))
        return int(self.label) if self.label.isdigit() else 0

    def _prefill(self, request: _Request) -> None:
        key = (request.body.get("cache_salt", "") + str(request.folder), tuple(request.prompt))
        held = None if "prompt_logprobs" in request.params else self._kv.get(key)
        request.kv_label = self.label if held is None else held
        request.cached = 0 if held is None else len(request.prompt) - 1
        self._kv[key] = request.kv_label
        self._totals["prompt_tokens"] += len(request.prompt)
        self._totals["prompt_tokens_cached"] += request.cached

    # -- HTTP

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while (head := await _head(reader)) is not None:
                method, target, length = head
                raw = await reader.readexactly(length)
                await self._answer(method, target, json.loads(raw) if raw else None, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, method: str, target: str, body: Any, writer: asyncio.StreamWriter) -> None:
        path = urlsplit(target).path
        query = {name: values[0] for name, values in parse_qs(urlsplit(target).query).items()}
        self.seen.append(f"{method} {path}")
        self.bodies.setdefault(path, []).append(body if body is not None else query)
        if path in self.hang:
            await self._finish.wait()
            return
        while path == self._held:
            await self._changed.wait()
        if path in self.fail:
            _send(writer, self.fail.pop(path), {"error": {"message": f"told to refuse {path}"}})
        elif path == "/health":
            _send(writer, 503 if self._dead else 200, {})
        elif path == "/metrics":
            _send(writer, 200, self._metrics())
        elif path == "/inference/v1/generate":
            await self._generate(body, writer)
        else:
            _send(writer, *await self._control(path, body, query))
        await writer.drain()

    async def _control(self, path: str, body: Any, query: dict[str, str]) -> tuple[int, Any]:
        if path == "/pause":
            return await self._do_pause(query["mode"], clear=query.get("clear_cache", "true") == "true")
        if path == "/resume":
            self._pause = None
        elif path == "/abort_requests":
            for name in body.get("request_ids") or list(self._requests):
                self._abort(name)
        elif path == "/start_weight_update":
            if self._pause is None and self.running:
                self._dead = "RuntimeError: Tensor on device meta is not on the expected device cpu!"
            self._updating = True
        elif path == "/update_weights":
            info = body["update_info"]
            if "path" in info and not os.path.exists(info["path"]):  # noqa: ASYNC240
                return 500, {"error": {"message": "No such file"}}
            self.loaded.append(info.get("path", "nccl"))
        elif path == "/finish_weight_update":
            if not self._updating:
                return 500, {"error": {"message": "finish_weight_update called without start"}}
            self._updating, self.label = False, body["weight_version"]
        elif path == "/weight_info":
            return 200, {"weight_version": self.label}
        elif path == "/v1/load_lora_adapter":
            return self._load_adapter(body["lora_name"], Path(body["lora_path"]))
        elif path == "/v1/unload_lora_adapter" and self.adapters.pop(body["lora_name"], None) is None:
            return 404, {"error": {"message": f"The lora adapter '{body['lora_name']}' cannot be found."}}
        self._note()
        return 200, {"status": "ok"}

    def _load_adapter(self, name: str, folder: Path) -> tuple[int, Any]:
        if name in self.adapters:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        if not (folder / "adapter_config.json").is_file():
            return 404, {"error": {"message": f"No adapter found for {name}"}}
        self.adapters[name] = folder
        return 200, {"status": "ok"}

    async def _do_pause(self, mode: str, *, clear: bool) -> tuple[int, Any]:
        self._pause = mode
        if mode == "abort":
            for name in list(self._requests):
                self._abort(name)
        if clear:
            self._kv.clear()
            for request in self._requests.values():
                request.kv_label = None  # computed anew when it goes on
        self._note()
        return 200, {"status": "paused"}

    def _abort(self, name: str) -> None:
        request = self._requests.get(name)
        if request is not None and request.reason is None:
            request.reason = "abort"
            request.tell()

    async def _generate(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        name = f"generate-tokens-{body['request_id']}"
        if "model" in body and body["model"] not in self.adapters:
            _send(writer, 404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
            return
        request = self._requests[name] = _Request(body)
        request.folder = self.adapters.get(body.get("model", ""))
        self._note()
        try:
            if body.get("stream"):
                await self._stream(request, writer)
            else:
                while request.reason is None:
                    await request.news.wait()
                _send(writer, 200, self._reply(request))
        finally:
            del self._requests[name]

    def _reply(self, request: _Request) -> dict[str, Any]:
        reply: dict[str, Any] = {"choices": [self._choice(request, 0, last=True)], "usage": _usage(request)}
        if "prompt_logprobs" in request.params:
            version = self._version_of(request)
            reply["prompt_logprobs"] = [
                None,
                *({str(token): {"logprob": -version / 10, "rank": 1}} for token in request.prompt[1:]),
            ]
        return reply

    async def _stream(self, request: _Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        told = 0
        while True:
            over = request.reason is not None
            if told < len(request.tokens) or over:
                _chunk(writer, {"choices": [self._choice(request, told, last=over)]})
                told = len(request.tokens)
            if over:
                break
            await request.news.wait()
        _chunk(writer, {"choices": [], "usage": _usage(request)})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _choice(self, request: _Request, start: int, *, last: bool) -> dict[str, Any]:
        tokens, logprobs = request.tokens[start:], request.logprobs[start:]
        content = [{"token_id": t, "logprob": p, "rank": 1} for t, p in zip(tokens, logprobs, strict=True)]
        return {
            "index": 0,
            "finish_reason": request.reason if last else None,
            "token_ids": tokens,
            "logprobs": None if "prompt_logprobs" in request.params else {"content": content},
            "weight_versions": request.spans() if last and not self.lose_labels else None,
        }

    def _metrics(self) -> str:
        lines = [f'vllm:{name}_total{{engine="0",model_name="m"}} {value}.0' for name, value in self._totals.items()]
        lines += [f'vllm:num_requests_running{{engine="0"}} {len(self.running)}.0']
        lines += ['vllm:cache_config_info{block_size="32",num_gpu_blocks="10"} 1.0', "vllm:kv_cache_usage_perc 0.25"]
        return "# HELP of it\n" + "\n".join(lines) + "\n"


def _first_number(file: Path) -> float:
    with safe_open(file, framework="np") as opened:
        return float(opened.get_tensor(sorted(opened.keys())[0]).flat[0])


async def _head(reader: asyncio.StreamReader) -> tuple[str, str, int] | None:
    line = await reader.readline()
    if not line:
        return None
    method, target, _ = line.decode().split()
    length = 0
    while (header := (await reader.readline()).strip()) != b"":
        name, _, value = header.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return method, target, length


def _usage(request: _Request) -> dict[str, Any]:
    details = {"cached_tokens": request.cached} if request.cached else None
    return {"prompt_tokens": len(request.prompt), "prompt_tokens_details": details}


def _send(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


def _chunk(writer: asyncio.StreamWriter, body: Any) -> None:
    data = f"data: {json.dumps(body)}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
