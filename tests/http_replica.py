"""A replica with a tiny model and a real tokenizer, over gRPC and HTTP, and the public OpenAI client to it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import openai

from generator_builders import MemoryRepository, embedded, llama, random_model
from rollmill.config.serving import LimitSettings
from rollmill.environments.rendering import Renderer
from rollmill.generator.http import serve_http
from rollmill.generator.main import Addresses, serve
from rollmill.generator.service import InferenceService
from rollmill.weights.prepare import find_prepared, prepare

MODEL = "tiny"
QUESTION: Any = [{"role": "user", "content": "What is 2 + 2?"}]


class Replica(NamedTuple):
    client: openai.AsyncOpenAI
    base_url: str
    grpc_address: str
    codec: Renderer
    service: InferenceService


class HttpFace:
    """Serves the replica over HTTP too, and keeps its service for the test to look at."""

    name = "http"

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self.service: InferenceService | None = None

    async def serve(self, service: InferenceService, *, stop: asyncio.Event, on_bound: Callable[[str], None]) -> None:
        self.service = service
        await serve_http(
            service, stop=stop, on_bound=lambda port: on_bound(f"http://127.0.0.1:{port}/v1"), **self._settings
        )


def tokenizer_in(folder: Path) -> Path:
    """Return a folder with the tokenizer of SmolLM2, or of the tiny model where that one is not prepared."""
    ready = find_prepared("smollm2-135m-instruct") or prepare("tiny-llama", cache_dir=folder / "cache").path
    for file in ready.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    return folder


@contextlib.asynccontextmanager
async def replica(
    tokenizer: Path, folder: Path, *, token: str | None = None, limits: LimitSettings | None = None
) -> AsyncIterator[Replica]:
    """A tiny random model with this tokenizer, served over gRPC and HTTP."""
    codec = Renderer(tokenizer)
    # Wide enough initial weights that replies differ; the vocabulary is the tokenizer's.
    model = random_model(llama(vocab_size=codec.vocabulary_size, max_position_embeddings=512), seed=1)
    repository = MemoryRepository()
    repository.put(model)
    engine = embedded(folder, model, max_model_len=400, digest=repository.manifest(1).digest)
    face, stop = HttpFace(token=token), asyncio.Event()
    bound: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(
            serve(
                engine=engine,
                repository=repository,  # pyright: ignore[reportArgumentType]
                kv_policy="keep",
                load_deadline_s=20.0,
                stop=stop,
                codec=codec,
                models=[MODEL],
                limits=limits,
                faces=[face],
                on_serving=bound.set_result,
            )
        )
        await asyncio.wait({bound, serving}, return_when=asyncio.FIRST_COMPLETED)
        addresses = bound.result() if bound.done() else await serving
        assert addresses is not None
        assert face.service is not None
        url = addresses.others["http"]
        client = openai.AsyncOpenAI(base_url=url, api_key=token or "none", max_retries=0, timeout=30)
        try:
            yield Replica(client, url, addresses.grpc, codec, face.service)
        finally:
            await client.close()
            stop.set()
