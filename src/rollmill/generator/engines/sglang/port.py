"""One SGLang server, driven over HTTP in the words of `rollmill.generator.engines.sglang.dialect`.

What it does against the server's own ways:

* A pause only tells the scheduler to stop; two questions that the scheduler must answer prove that it has, and that
  what it sampled before has come.
* While it is paused, the front end remembers an abort of what it holds back, and the scheduler never hears of it: in a
  pause requests are ended by hanging up.
* An update that fails while it reads ends the server: the file is looked at before.
* An update that was refused may have changed the weights: the schedulers' own label decides, and an error stays one.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import httpx2 as httpx
import numpy as np

from rollmill.config.serving import SglangSettings
from rollmill.errors import DataError, EngineDead, EngineError, WeightError
from rollmill.generator.engines.protocol import KvPolicy
from rollmill.generator.engines.remote.calls import Calls, Refused
from rollmill.generator.engines.remote.port import Delta, Figures
from rollmill.generator.engines.remote.watch import ServerWatch, Watched
from rollmill.generator.engines.sglang.dialect import (
    ABORT,
    CONTINUE,
    GENERATE,
    LOADS,
    PAUSE,
    SERVER_INFO,
    UPDATE,
    generate_body,
    is_filtered,
    read_delta,
    read_error,
    read_figures,
    read_labels,
    read_scores,
    score_body,
    update_body,
)
from rollmill.types import GenerateRequest
from rollmill.weights.tensorfile import read_header

PRODUCT = "SGLang"
SECTION = "generator.sglang"

_ROUND_TRIPS = 2
"""The first answer may overtake tokens on their way from the scheduler; the second one comes after them."""
_BAD_REQUEST = (400, 422)
_NO_CERTIFICATES = False
"""Plain HTTP on the loopback interface: reading the system's certificates would take half a second a client."""


class Server(Watched, Protocol):
    """A server process with its address."""

    def stop(self, *, grace_s: float) -> None:
        """End it and its children, and remove what is its own; idempotent."""
        ...


class Address:
    """Where a server listens, and the key that its callers must show."""

    def __init__(self, *, port: int, key: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.headers = {"Authorization": f"Bearer {key}"}

    def client(self, *, timeout_s: float) -> httpx.Client:
        """Return a blocking client, for one thread."""
        return httpx.Client(
            base_url=self.url, headers=self.headers, timeout=timeout_s, trust_env=False, verify=_NO_CERTIFICATES
        )


class SglangPort:
    """A running server that serves its first weights, as a `ServerPort`.

    Args:
        server: its process.
        address: where it listens.
        settings: those of `generator.sglang`.
        vocabulary_size: of the model.
        has_masks: whether it returns the log-probs of filtered distributions.
        folder: for the links through which it finds weights.
        grace_s: time it gets to end when told to.
    """

    def __init__(
        self,
        server: Server,
        *,
        address: Address,
        settings: SglangSettings,
        vocabulary_size: int,
        has_masks: bool,
        folder: Path,
        grace_s: float = 10.0,
    ) -> None:
        self._server = server
        self._address = address
        self._settings = settings
        self._vocabulary_size = vocabulary_size
        self._has_masks = has_masks
        self._folder = folder
        self._grace_s = grace_s
        self._figures = Figures()
        self._cause: EngineDead | None = None
        self._on_death: Callable[[EngineDead], None] | None = None
        self._calls: Calls | None = None
        self._probe_client = address.client(timeout_s=settings.control_deadline_s)
        self._watch = ServerWatch(
            server,
            probe=self._probe,
            every_s=settings.load_poll_s,
            on_death=self._note_death,
            name="rollmill-sglang-watch",
        )
        self._watch.start()

    # -- server port

    def figures(self) -> Figures:
        """Return what the last look at the server found."""
        return self._figures

    def listen(self, on_death: Callable[[EngineDead], None]) -> None:
        """Have `on_death` called once, on the event loop of the calls, should the server die."""
        self._on_death = on_death

    @property
    def cause(self) -> EngineDead | None:
        """Why the server is dead, or `None` while it lives."""
        return self._cause

    async def generate(
        self, request: GenerateRequest, *, server_id: str, max_tokens: int, salt: str
    ) -> AsyncIterator[Delta]:
        """Yield the pieces of a generation, see the port's protocol."""
        filtered = is_filtered(request.sampling)
        if filtered and not self._has_masks:
            raise DataError(
                f"request {request.request_id} wants top_p {request.sampling.top_p:g} and top_k "
                f"{request.sampling.top_k}: this SGLang returns no sampling mask, hence no log-probs of the filtered "
                "distribution. Engines that can: embedded, vllm, fake. Set top_p 1 and top_k 0, or generator.engine"
            )
        body = generate_body(
            request, server_id=server_id, max_tokens=max_tokens, salt=salt, vocabulary_size=self._vocabulary_size
        )
        count, ended = 0, False
        try:
            # Closed on the spot when the caller is cancelled: the server ends what nobody reads.
            async with contextlib.aclosing(self._here().stream(GENERATE, body=body)) as lines:
                async for line in lines:
                    delta = read_delta(line, server_id=server_id, n_before=count, filtered=filtered)
                    if delta is None:
                        continue
                    count += len(delta.output_ids)
                    ended = delta.reason is not None
                    yield delta
        except Refused as error:
            if error.status in _BAD_REQUEST:
                raise DataError(str(error)) from error
            raise
        if not ended:
            raise EngineError(f"request {server_id}: the SGLang server's stream ended without saying why")

    async def cancel(self, server_id: str) -> None:
        """Ask the server to end a request with what it has."""
        await self._ask("POST", ABORT, body={"rid": server_id})

    async def freeze(self) -> None:
        """Return when no token can be produced and all that were have come."""
        # The overlapped schedule holds back the result of the last step; only a retraction processes it.
        mode = "retract" if self._settings.overlap_schedule else "in_place"
        await self._ask("POST", PAUSE, body={"mode": mode})
        for _ in range(_ROUND_TRIPS):
            await self._ask("GET", SERVER_INFO)

    async def thaw(self) -> None:
        """Let the server go on."""
        await self._ask("POST", CONTINUE, body={"torch_empty_cache": False})

    async def load_weights(self, file: Path, *, policy_version: int, kv: KvPolicy) -> None:
        """Load weights while frozen, see the port's protocol."""
        await asyncio.to_thread(check_file, file)
        flush = kv == "recompute"
        if flush:
            # Back into the queue and without KV: else the flush is refused, after the weights were changed.
            await self._ask("POST", PAUSE, body={"mode": "retract"})
        with linked_folder(file, parent=self._folder) as folder:
            await self._ask("POST", UPDATE, body=update_body(str(folder), policy_version=policy_version, flush=flush))
        labels = read_labels(await self._ask("GET", SERVER_INFO))
        if labels != {str(policy_version)}:
            raise EngineError(f"after the update its schedulers say that they serve {sorted(labels)}")

    async def score(self, token_ids: Sequence[int], *, server_id: str) -> np.ndarray:
        """Return float32 [n - 1] log-probs under temperature 1, by a fresh prefill."""
        reply = await self._ask("POST", GENERATE, body=score_body(token_ids, server_id=server_id))
        return read_scores(reply, token_ids=token_ids, server_id=server_id)

    def look(self) -> None:
        """Bring the figures up to date soon."""
        self._watch.look()

    async def close(self) -> None:
        """End the server and all that is its own; idempotent."""
        await asyncio.to_thread(self._watch.stop)
        await asyncio.to_thread(self._server.stop, grace_s=self._grace_s)
        self._probe_client.close()
        if self._calls is not None:
            self._calls.end_all(EngineDead(f"the {PRODUCT} engine was closed; start a new one"))
            await self._calls.close()

    # -- calls

    async def _ask(self, method: str, path: str, *, body: dict[str, object] | None = None) -> bytes:
        return await self._here().ask(method, path, body=body, deadline_s=self._settings.control_deadline_s)

    def _here(self) -> Calls:
        """Return the calls of this event loop, made at the first one."""
        if self._calls is None:
            # As many connections as there are requests: each is one long call.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            client = httpx.AsyncClient(
                base_url=self._address.url,
                headers=self._address.headers,
                timeout=None,
                limits=limits,
                trust_env=False,
                verify=_NO_CERTIFICATES,
            )
            self._calls = Calls(
                product=PRODUCT,
                deadline_setting=f"{SECTION}.control_deadline_s",
                client=client,
                look=self._watch.look,
                read_error=read_error,
            )
            if self._cause is not None:
                self._calls.end_all(self._cause)
        return self._calls

    def _probe(self) -> None:
        """Look at the server, on the watch's thread."""
        try:
            self._figures = read_figures(self._probe_client.get(LOADS).content)
        except httpx.TimeoutException as error:
            raise EngineDead(
                f"the {PRODUCT} server did not answer within {self._settings.control_deadline_s:g} s "
                f"({SECTION}.control_deadline_s): {self._server.last_words()}"
            ) from error
        except httpx.TransportError as error:
            raise EngineDead(f"{self._server.last_words()} ({error!r})") from error

    def _note_death(self, cause: EngineDead) -> None:
        """Called by the watch, on its thread."""
        self._cause = cause
        calls = self._calls
        if calls is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everybody who waits
                calls.loop.call_soon_threadsafe(self._hear_of_death, cause)

    def _hear_of_death(self, cause: EngineDead) -> None:
        self._here().end_all(cause)
        if self._on_death is not None:
            self._on_death(cause)


def check_file(file: Path) -> None:
    """Refuse a file that the server would die of: after a load that fails it loads the same file again.

    Raises:
        WeightError: if it is missing, cut short, or no safetensors.
    """
    try:
        read_header(file)
    except OSError as error:
        raise WeightError(
            f"the weights in {file} cannot be read ({error.strerror or error}); the old ones go on being served. "
            "Was the version retired while it was loaded?"
        ) from error


@contextlib.contextmanager
def linked_folder(file: Path, *, parent: Path) -> Iterator[Path]:
    """Make a folder that holds a file of weights by the name that the server looks for."""
    folder = parent / file.stem
    folder.mkdir()
    try:
        (folder / "model.safetensors").symlink_to(file.absolute())
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
