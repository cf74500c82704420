"""The plan of a run: counts by hand, and refusals before anything starts."""

import pytest

from rollmill.config import load_config
from rollmill.config.plan import plan, render
from rollmill.errors import ConfigError

SMOLLM2 = {
    "parameters": 134_515_008,
    "layers": 30,
    "hidden_size": 576,
    "kv_heads": 3,
    "head_dim": 64,
    "vocabulary_size": 49152,
    "max_positions": 8192,
}
GB = 10**9


def config_of(*overrides: str):
    return load_config(None, overrides=["trainer.dtype=float32", "generator.dtype=float32", *overrides]).config


def test_the_plan_prints_the_derived_table():
    text = render(plan(config_of(), facts=SMOLLM2, cores=2, memory_bytes=24 * GB, shm_bytes=24 * GB))
    assert "4 prompts x 8 siblings = 32 rollouts, at most 768 output tokens" in text
    assert "at most 96 rollouts ahead of the trainer (max_staleness 2)" in text
    # 2 x 30 layers x 3 heads x 64 x 4 bytes = 46,080 bytes per token; x 48 slots x 256 tokens = 0.57 GB
    assert "kv 0.57 GB" in text
    # 134.5 million x 4 bytes x (3 kept + 1) = 2.15 GB
    assert "2.15 GB in shared memory of 24.00 GB" in text
    assert "warning" not in text


def test_processes_and_threads_are_listed():
    planned = plan(config_of("generator.replicas=2", "environment.scoring_workers=3"), facts=SMOLLM2, cores=4)
    assert [(process.name, process.count, process.threads) for process in planned.processes] == [
        ("controller", 1, 1),
        ("generator", 2, 1),
        ("trainer", 1, 1),
        ("scorer", 3, 1),
    ]


def test_the_sum_is_all_processes_and_the_shared_weights():
    planned = plan(config_of("generator.replicas=2"), facts=SMOLLM2, cores=4)
    expected = sum(process.count * process.memory_bytes for process in planned.processes) + planned.shared_bytes
    assert planned.memory_bytes == expected


def test_too_little_memory_is_refused_with_both_numbers_and_what_to_lower():
    with pytest.raises(ConfigError) as caught:
        plan(config_of(), facts=SMOLLM2, cores=2, memory_bytes=4 * GB)
    message = str(caught.value)
    assert "4.00 GB are available" in message
    assert "trainer activations" in message
    assert "lower trainer.micro_batch_tokens" in message


def test_shared_memory_that_is_too_small_is_refused_when_asked_for():
    with pytest.raises(
        ConfigError, match=r"need 2.15 GB of shared memory, 0.06 GB are free.*weights.transport \"file\""
    ):
        plan(config_of("weights.transport=shm"), facts=SMOLLM2, cores=2, shm_bytes=64_000_000)


def test_shared_memory_that_is_too_small_means_files_when_left_to_auto():
    planned = plan(config_of(), facts=SMOLLM2, cores=2, shm_bytes=64_000_000)
    assert planned.transport == "file"
    assert any("through files" in sentence for sentence in planned.warnings)


def test_a_context_longer_than_the_models_is_refused():
    with pytest.raises(ConfigError, match=r"max_model_len is 9000 .* made for 8192 positions.*valid value: 8192"):
        plan(config_of("generator.max_model_len=9000", "trainer.micro_batch_tokens=9000"), facts=SMOLLM2, cores=2)


def test_an_impossible_configuration_is_refused_before_anything_is_counted():
    broken = config_of().model_copy(update={"schedule": config_of().schedule.model_copy(update={"window_groups": 1})})
    with pytest.raises(ConfigError, match="window_groups is 1"):
        plan(broken, cores=2)


def test_a_tight_fit_is_a_warning():
    needed = plan(config_of(), facts=SMOLLM2, cores=2).memory_bytes
    planned = plan(config_of(), facts=SMOLLM2, cores=2, memory_bytes=needed)
    assert any("more than 80% of" in sentence for sentence in planned.warnings)


def test_without_model_facts_counts_are_given_and_memory_is_unknown():
    text = render(plan(config_of(), cores=2, memory_bytes=GB))
    assert "32 rollouts" in text
    assert "unknown: the model is not prepared yet" in text
