"""The engine over any port: what no server that answers shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rollmill.clock import SystemClock
from rollmill.errors import DeadlineExceeded, EngineDead, EngineError
from rollmill.generator.engines.meter import SecondsMeter
from rollmill.generator.engines.protocol import KvPolicy
from rollmill.generator.engines.remote.engine import RemoteEngine
from rollmill.generator.engines.remote.port import Delta, Figures
from rollmill.generator.engines.remote.requests import Live
from rollmill.generator.engines.remote.traits import Traits
from rollmill.generator.engines.remote.transfer import Spool
from rollmill.types import GenerateRequest, SamplingParams, StopReason, TokenChunk, VersionSpan

WEIGHTS = {"a": torch.zeros(3)}


def asked(request_id: str = "a", *, deadline_s: float = 20.0, tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=np.array([1, 2]),
        sampling=SamplingParams(max_new_tokens=tokens),
        deadline_s=deadline_s,
    )


def piece(*ids: int, reason: StopReason | None = None, record: tuple[VersionSpan, ...] | None = None) -> Delta:
    return Delta(
        output_ids=np.array(ids, dtype=np.int32),
        logprobs=np.full(len(ids), -1.0, dtype=np.float32),
        reason=reason,
        record=record,
    )


class ScriptedPort:
    """A port that yields what it is told to, and ends no request by itself."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[Delta] = asyncio.Queue()
        self.cause: EngineDead | None = None
        self.cancelled: list[str] = []
        self.hung_up = 0
        self.fail_load: BaseException | None = None
        self.fail_freeze: Exception | None = None
        self.thawed = 0

    def figures(self) -> Figures:
        return Figures()

    def listen(self, on_death: Callable[[EngineDead], None]) -> None:
        self.on_death = on_death

    async def generate(
        self, request: GenerateRequest, *, server_id: str, max_tokens: int, salt: str
    ) -> AsyncIterator[Delta]:
        try:
            while True:
                delta = await self.pieces.get()
                yield delta
                if delta.reason is not None:
                    return
        except asyncio.CancelledError:
            self.hung_up += 1
            raise

    async def cancel(self, server_id: str) -> None:
        self.cancelled.append(server_id)

    async def freeze(self) -> None:
        if self.fail_freeze is not None:
            raise self.fail_freeze

    async def thaw(self) -> None:
        self.thawed += 1

    async def load_weights(self, file: Path, *, policy_version: int, kv: KvPolicy) -> None:
        if self.fail_load is not None:
            raise self.fail_load

    async def score(self, token_ids: Sequence[int], *, server_id: str) -> np.ndarray:
        return np.zeros(len(token_ids) - 1, dtype=np.float32)

    def look(self) -> None: ...

    async def close(self) -> None: ...


SPOOLS: list[Spool] = []


@pytest.fixture(autouse=True)
def no_file_left() -> Iterator[None]:
    yield
    while SPOOLS:
        SPOOLS.pop().close()


def engine_over(port: ScriptedPort) -> RemoteEngine:
    SPOOLS.append(Spool())
    clock = SystemClock()
    return RemoteEngine(
        port,
        traits=Traits(
            kind="scripted",
            product="Scripted",
            model="m",
            dtype="float32",
            vocabulary_size=100,
            max_model_len=50,
            max_num_seqs=2,
            kv_bytes_per_token=0,
            capabilities=(),
            waits_for_siblings=True,
            patience_s=5.0,
            hang_up_s=0.02,
        ),
        tensors=WEIGHTS,
        policy_version=1,
        digest="digest-1",
        spool=SPOOLS[-1],
        clock=clock,
        meter=SecondsMeter(clock, cause="startup"),
    )


async def test_a_server_that_ends_nothing_is_hung_up_on_and_what_came_is_returned():
    port = ScriptedPort()
    engine = engine_over(port)
    port.pieces.put_nowait(piece(5, 6))
    turn = await engine.generate(asked(deadline_s=0.02))
    assert (turn.output_ids.tolist(), turn.stop_reason) == ([5, 6], StopReason.ABORT)
    assert turn.version_spans == (VersionSpan(0, 2, 1),)
    assert (len(port.cancelled), port.hung_up) == (1, 1)


async def test_more_tokens_than_were_asked_for_are_refused():
    port = ScriptedPort()
    engine = engine_over(port)
    port.pieces.put_nowait(piece(1, 2, 3))
    with pytest.raises(EngineError, match="3 tokens where 2 were asked for"):
        await engine.generate(asked(tokens=2))
    assert engine.load().running == 0


async def test_a_record_that_contradicts_what_was_streamed_refuses_the_turn():
    port = ScriptedPort()
    engine = engine_over(port)
    heard: list[TokenChunk] = []
    port.pieces.put_nowait(piece(1, 2))
    port.pieces.put_nowait(piece(3, reason=StopReason.STOP, record=(VersionSpan(0, 1, 1), VersionSpan(1, 3, 2))))
    with pytest.raises(EngineError, match=r"streamed as sampled under .*\(3, 1\).*record says .*\(1, 1\), \(3, 2\)"):
        await engine.generate(asked(), on_tokens=heard.append)


async def test_without_a_listener_the_servers_record_is_the_last_word():
    port = ScriptedPort()
    port.pieces.put_nowait(piece(1, 2))
    port.pieces.put_nowait(piece(3, reason=StopReason.STOP, record=(VersionSpan(0, 1, 1), VersionSpan(1, 3, 2))))
    turn = await engine_over(port).generate(asked())
    assert turn.version_spans == (VersionSpan(0, 1, 1), VersionSpan(1, 3, 2))


async def test_a_server_that_may_have_frozen_is_thawed_by_the_resume_after_the_failed_pause():
    port = ScriptedPort()
    engine = engine_over(port)
    port.fail_freeze = DeadlineExceeded("no answer")
    with pytest.raises(DeadlineExceeded):
        await engine.pause("keep")
    await engine.resume()
    assert (port.thawed, engine.load().paused) == (1, False)
    port.pieces.put_nowait(piece(1, reason=StopReason.STOP, record=(VersionSpan(0, 1, 1),)))
    assert (await engine.generate(asked())).stop_reason is StopReason.STOP


async def test_a_death_in_a_load_is_a_death_and_not_a_dirty_engine():
    port = ScriptedPort()
    engine = engine_over(port)
    port.fail_load = EngineDead("it died of a load")
    await engine.pause("keep")
    with pytest.raises(EngineDead, match="died of a load"):
        await engine.update({"a": torch.ones(3)}, policy_version=2, digest="d", kv="recompute")


async def test_a_load_that_was_cut_short_leaves_the_engine_dirty():
    port = ScriptedPort()
    engine = engine_over(port)
    await engine.pause("keep")
    port.fail_load = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await engine.update({"a": torch.ones(3)}, policy_version=2, digest="d", kv="recompute")
    assert not engine.healthy()
    with pytest.raises(EngineError, match="policy version 2 was cut short"):
        await engine.generate(asked())


def test_neighbouring_spans_of_one_version_are_joined_and_empty_ones_left_out():
    live = Live(asked(tokens=6), server_id="1", capacity=6, now_s=0.0, on_tokens=None)
    live.serve_under(1)
    live.serve_under(2)  # nothing came under version 1
    live.take(piece(1, 2), now_s=1.0)
    live.serve_under(2)
    live.take(piece(3), now_s=2.0)
    live.serve_under(3)
    live.take(piece(4), now_s=3.0)
    assert live.turn(now_s=4.0).version_spans == (VersionSpan(0, 3, 2), VersionSpan(3, 4, 3))
