"""What the settings of a generator say to the embedded engine, and how large its passes get."""

from __future__ import annotations

import dataclasses
import doctest
from typing import Any

import pytest

from rollmill.config.precision import resolve_dtype
from rollmill.config.schema import GeneratorSettings
from rollmill.errors import ConfigError
from rollmill.generator.engines.embedded import settings as settings_module
from rollmill.generator.engines.embedded.settings import EmbeddedSettings, Limits, limits_of

# One value for each setting of the engine, none of them the default.
SAID: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_num_seqs": 5,
    "max_model_len": 77,
    "max_num_batched_tokens": 99,
    "max_wait_ms": 3.0,
    "kv_cache_memory_bytes": 1001,
    "memory_limit_bytes": 1002,
    "enable_prefix_caching": False,
    "host_kv_bytes": 1003,
    "host_kv_directory": "/kv",
    "stage_weights": False,
    "speculation": "ngram",
    "kernels": "torch",
    "quantization": "int8",
    "max_loras": 2,
    "max_lora_rank": 16,
}


def given(**changes: Any) -> EmbeddedSettings:
    return EmbeddedSettings(**{"dtype": "float32", "max_num_seqs": 8, "max_model_len": 256, **changes})


def test_every_setting_of_the_engine_is_that_of_the_generator():
    assert dataclasses.asdict(EmbeddedSettings.of(GeneratorSettings(**SAID))) == SAID


def test_what_is_left_to_the_engine_is_settled():
    settings = EmbeddedSettings.of(GeneratorSettings(dtype="auto", max_loras=None))
    assert (settings.dtype, settings.max_loras) == (resolve_dtype("auto"), 0)


def test_a_generator_without_settings_computes_as_an_engine_without_settings():
    plain = GeneratorSettings(dtype="float32")
    bare = EmbeddedSettings(dtype="float32", max_num_seqs=plain.max_num_seqs, max_model_len=plain.max_model_len)
    assert EmbeddedSettings.of(plain) == bare


def test_no_sequence_grows_beyond_what_its_model_can_read():
    # 8 sequences with a token each leave 512 of 520 to prompts
    assert limits_of(given(), context_len=100) == Limits(max_num_seqs=8, max_model_len=100, max_num_batched_tokens=520)
    assert limits_of(given(), context_len=257).max_model_len == 256


@pytest.mark.parametrize("tokens", [8, 9, 4096])
def test_a_pass_may_be_as_small_as_a_token_for_each_sequence(tokens):
    assert limits_of(given(max_num_batched_tokens=tokens), context_len=100).max_num_batched_tokens == tokens


def test_a_pass_without_a_token_for_each_sequence_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens 7 is less than generator.max_num_seqs 8"):
        limits_of(given(max_num_batched_tokens=7), context_len=100)


def test_the_examples_in_the_docstrings_hold():
    results = doctest.testmod(settings_module)
    assert (results.attempted, results.failed) == (2, 0)
