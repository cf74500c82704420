"""KV from a memory limit: the arithmetic, what is refused, and what the embedded engine says about it."""

from __future__ import annotations

import doctest

import pytest

from generator_builders import MAX_LEN, embedded, random_model
from rollmill.errors import ConfigError
from rollmill.generator.engines.embedded import budget, speculation
from rollmill.generator.engines.embedded.budget import KvBudget, MemoryParts, plan_kv

PARTS = MemoryParts(process=300, weights=500, activations=100)
MODEL = random_model(seed=1)
# keys and values of a block: 2 layers, 2 kv heads of 4, 16 tokens, 4 bytes
BLOCK_BYTES = 2 * 2 * 2 * 4 * 16 * 4


def planned(**given: int) -> KvBudget:
    return plan_kv(block_bytes=10, block_tokens=16, max_num_seqs=3, max_model_len=40, parts=PARTS, **given)


def test_without_a_limit_every_sequence_may_reach_its_greatest_length():
    # 40 tokens are 3 blocks of 16
    budget = planned()
    assert (budget.blocks, budget.scratch, budget.nbytes) == (9, 3, 120)


def test_kv_gets_what_the_limit_leaves_beside_process_weights_and_activations():
    # 1200 - 300 - 500 - 100 = 300 bytes are 30 blocks, 3 of them for scores
    budget = planned(memory_limit_bytes=1200)
    assert (budget.blocks, budget.scratch, budget.nbytes) == (27, 3, 300)
    assert budget.idle_limit is None, "memory that was given is for keeping prefixes too"


def test_what_is_given_for_kv_is_taken_whatever_the_rest_needs():
    assert planned(kv_cache_memory_bytes=109).blocks == 7
    assert planned(kv_cache_memory_bytes=100, memory_limit_bytes=1000).blocks == 7


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"memory_limit_bytes": 959}, "which take 60 bytes"),
        ({"memory_limit_bytes": 10}, "raise generator.memory_limit_bytes"),
        ({"kv_cache_memory_bytes": 59}, "lower generator.max_model_len"),
        ({"kv_cache_memory_bytes": 200, "memory_limit_bytes": 1000}, "give only one of them"),
    ],
)
def test_memory_that_does_not_hold_one_sequence_is_refused_with_what_it_takes(given, words):
    with pytest.raises(ConfigError, match=words):
        planned(**given)
    assert planned(memory_limit_bytes=960).blocks == 3


async def test_the_engine_says_how_its_memory_is_shared_out(tmp_path, caplog):
    caplog.set_level("INFO")
    engine = embedded(tmp_path, MODEL, memory_limit_bytes=360_000_000)
    try:
        told = engine.info().kv_budget
        assert "= 360 MB limit - 350 MB process - 0 MB weights" in told
        assert told in caplog.text
        # activations are between one and two megabytes here
        blocks = engine.load().kv_capacity_tokens // 16
        assert 8_000_000 < (blocks + MAX_LEN // 16) * BLOCK_BYTES < 9_000_000
        assert engine.info().kv_bytes == (blocks + MAX_LEN // 16) * BLOCK_BYTES
    finally:
        await engine.close()


async def test_spare_weights_count_where_they_will_be_made(tmp_path):
    engine = embedded(tmp_path, MODEL, memory_limit_bytes=360_000_000)
    lean = embedded(tmp_path, MODEL, memory_limit_bytes=360_000_000, stage_weights=False)
    try:
        assert lean.info().kv_bytes > engine.info().kv_bytes
    finally:
        await engine.close()
        await lean.close()


def test_a_pass_that_cannot_hold_all_sequences_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens 7 is less than generator.max_num_seqs 8"):
        embedded(tmp_path, MODEL, max_num_batched_tokens=7)


@pytest.mark.parametrize("module", [budget, speculation])
def test_the_examples_in_the_docstrings_hold(module):
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
