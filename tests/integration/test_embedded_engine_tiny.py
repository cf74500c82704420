"""A real run whose generator has weights of eight bits, little memory for KV, guesses and recomputed KV."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import check_books, finish, lines, processes_of, rollmill, write_config

from rollmill.generator.engines.embedded.native import KernelsUnavailable, load_kernels

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

# A block of 16 tokens of tiny-llama takes 2 x 2 layers x 2 heads x 16 x 16 x 4 bytes. 192 tokens are 12 blocks: so many
# are for a score, and 14 for all sequences.
BLOCK_BYTES = 8192
SETTINGS = {
    "generator.quantization": "int8",
    "generator.speculation": "ngram",
    "generator.max_model_len": 192,
    "generator.kv_cache_memory_bytes": (12 + 14) * BLOCK_BYTES,
    "generator.max_num_batched_tokens": 64,
    "generator.max_wait_ms": 2,
    "generator.kv_on_update": "recompute",
}


def test_a_run_trains_with_a_generator_that_has_little_memory_and_rounded_weights(tmp_path: Path) -> None:
    try:
        load_kernels()
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    chosen = [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    status, out, err = finish(
        rollmill("train", str(write_config(tmp_path, steps=6, max_staleness=0)), *chosen, "--json")
    )
    assert status == 0, err
    run = tmp_path / "runs" / "tiny"
    summary = json.loads(out)
    check_books(summary)
    assert summary["steps"] == 6
    assert summary["rollouts"]["trained"] == 6 * 2 * 4
    # What the trainer gives to the engine's tokens differs by what rounding does, and by no more.
    off = [step["mismatch_fresh_mean"] for step in lines(run / "metrics.jsonl")]
    assert len(off) == 6
    assert all(1e-4 < mean < 1e-2 for mean in off)
    assert processes_of(run) == []
