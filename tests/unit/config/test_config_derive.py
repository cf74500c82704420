"""Derived quantities, checked against arithmetic by hand."""

import pytest
from msgspec import structs

from rollmill.config import ModelFacts, RollmillConfig, check_divisible, load_config
from rollmill.config.derive import derive, nearest_divisors
from rollmill.config.precision import packed_precision
from rollmill.errors import ConfigError

TINY = ModelFacts(
    parameters=1_000_000,
    layers=2,
    hidden_size=64,
    kv_heads=2,
    head_dim=16,
    vocabulary_size=128,
    max_positions=512,
)


def test_counts_of_a_step_follow_from_groups_and_siblings():
    derived = derive(RollmillConfig())
    assert derived.rollouts_per_step == 32  # 4 x 8
    assert derived.rollouts_of_run == 1280  # 32 x 40 steps
    assert derived.stock_ceiling_rollouts == 96  # (2 + 1) x 32
    assert derived.tokens_per_step_at_most == 768  # 32 x 24
    assert derived.packed_tokens_per_step_at_most == 1696  # 768 + 4 prompts x (256 - 24)
    assert derived.memory == ()


def test_oversampling_widens_groups_and_ceiling():
    config = load_config(None, overrides=["schedule.group_oversampling=1.5", "schedule.member_oversampling=2"]).config
    derived = derive(config)
    assert derived.members_per_group == 10
    assert derived.stock_ceiling_rollouts == 144  # 96 x 1.5


def test_kv_bytes_are_two_per_layer_head_and_width():
    config = load_config(None, overrides=["generator.dtype=float32", "generator.max_num_seqs=8"]).config
    # per token 2 x 2 layers x 2 heads x 16 wide x 4 bytes = 512; 8 slots x 256 tokens x 512 = 1,048,576
    assert TINY.kv_bytes_per_token(dtype_bytes=4) == 512
    assert derive(config, facts=TINY).kv_bytes_per_replica == 1_048_576


def test_shared_memory_holds_the_kept_versions_and_the_one_being_written():
    assert derive(RollmillConfig(), facts=TINY).shared_bytes == 4 * 4_000_000  # keep_versions 3 + 1


@pytest.mark.parametrize(("background", "copy_bytes"), [("true", 12_000_000), ("false", None), (None, None)])
def test_a_copy_for_checkpoints_counts_where_it_is_asked_for(background: str | None, copy_bytes: int | None):
    overrides = [] if background is None else [f"trainer.checkpoint_in_background={background}"]
    config = load_config(None, overrides=overrides).config
    parts = next(memory.parts for memory in derive(config, facts=TINY).memory if memory.process == "trainer")
    # weights and two moments, 4 bytes each; left to itself it is made only where memory allows
    assert parts.get("checkpoint_copy") == copy_bytes


def test_the_trainer_keeps_weights_gradients_and_two_moments_in_float32():
    config = load_config(None, overrides=["trainer.dtype=float32", "algorithm.kl_coefficient=0.1"]).config
    parts = next(memory.parts for memory in derive(config, facts=TINY).memory if memory.process == "trainer")
    assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (4_000_000, 4_000_000, 8_000_000)
    assert parts["reference"] == 4_000_000
    assert parts["logits"] == 2 * 768 * 128 * 4  # loss tokens (under the 2048 of a micro-batch) x vocabulary
    assert "autocast_copies" not in parts
    # A step packs at most 1696 tokens, under the 2048 of a micro-batch; x 2 layers x 16 x 64 wide x 4 bytes.
    assert parts["activations"] == 1696 * 2 * 16 * 64 * 4


def test_adapters_need_gradients_and_moments_for_themselves_alone():
    config = load_config(None, overrides=["trainer.dtype=float32", "trainer.lora_rank=4"]).config
    derived = derive(config, facts=TINY)
    parts = {memory.process: memory.parts for memory in derived.memory}
    # 2 layers x 7 targets x rank 4 x (64 + 4 x 64) = 17,920 numbers at most, 71,680 bytes
    trainer = parts["trainer"]
    assert (trainer["weights"], trainer["gradients"], trainer["optimizer"]) == (4_000_000, 71_680, 143_360)
    assert parts["generator-0"]["merged_weights"] == 4_000_000
    # One copy of whole weights, and keep_versions 3 + 1 of the adapters.
    assert derived.shared_bytes == 4_000_000 + 4 * 71_680


def test_a_small_micro_batch_bounds_activations():
    config = load_config(None, overrides=["trainer.dtype=float32", "trainer.micro_batch_tokens=256"]).config
    parts = next(memory.parts for memory in derive(config, facts=TINY).memory if memory.process == "trainer")
    assert parts["activations"] == 256 * 2 * 16 * 64 * 4
    assert parts["logits"] == 2 * 256 * 128 * 4


def test_bfloat16_adds_copies_and_halves_the_generator_without_packed_weights():
    overrides = ["trainer.dtype=bfloat16", "generator.dtype=bfloat16", "generator.kernels=torch"]
    memory = {
        one.process: one.parts for one in derive(load_config(None, overrides=overrides).config, facts=TINY).memory
    }
    assert memory["trainer"]["autocast_copies"] == 2_000_000
    assert memory["generator-0"]["weights"] == 2_000_000
    assert "packed_head" not in memory["generator-0"]


def generator_parts(*overrides: str, tied: bool = True, process: str = "generator-0") -> dict[str, int]:
    config = load_config(None, overrides=["generator.dtype=float32", "generator.kernels=native", *overrides]).config
    facts = structs.replace(TINY, tied=tied)
    return next(memory.parts for memory in derive(config, facts=facts).memory if memory.process == process)


def test_packed_weights_hold_a_tied_head_twice():
    # the embedding has 128 x 64 numbers of 4 bytes
    parts = generator_parts()
    assert (parts["weights"], parts["packed_head"]) == (4_000_000, 32_768)
    assert "packed_head" not in generator_parts(tied=False)
    assert "packed_head" not in generator_parts("generator.kernels=torch")


def test_packed_weights_take_four_bytes_in_bfloat16_and_the_embedding_two_but_for_a_cpu_that_multiplies_in_it():
    parts = generator_parts("generator.dtype=bfloat16")
    # 8192 x 2 + (1,000,000 - 8192) x 4 bytes, or 1,000,000 x 2
    expected = {"float32": (3_983_616, 32_768), "bfloat16": (2_000_000, 16_384)}
    assert (parts["weights"], parts["packed_head"]) == expected[packed_precision("bfloat16", kernels="native")]


def test_weights_made_ready_beside_those_that_serve_take_as_much_again():
    assert generator_parts()["spare_weights"] == 4_032_768
    assert generator_parts("generator.kernels=torch")["spare_weights"] == 4_000_000
    assert "spare_weights" not in generator_parts("generator.stage_weights=false")


def test_a_draft_takes_its_weights_once_and_kv_beside_the_models():
    draft = structs.replace(TINY, parameters=100_000, layers=1, hidden_size=32)
    overrides = ["generator.dtype=float32", "generator.kernels=torch", "generator.speculation=draft"]
    config = load_config(None, overrides=[*overrides, "generator.draft_model=small"]).config
    derived = derive(config, facts=structs.replace(TINY, draft=draft))
    parts = next(memory.parts for memory in derived.memory if memory.process == "generator-0")
    assert parts["draft_weights"] == 400_000
    assert parts["spare_weights"] == 4_000_000
    # 48 sequences of 256 tokens, keys and values of 2 heads of 16 in 2 + 1 layers, 4 bytes
    assert derived.kv_bytes_per_replica == parts["kv"] == 48 * 256 * 2 * 2 * 16 * 3 * 4
    limited = load_config(
        None, overrides=[*overrides, "generator.draft_model=small", "generator.memory_limit_bytes=500000000"]
    ).config
    for facts in (TINY, structs.replace(TINY, draft=draft)):
        parts = next(m.parts for m in derive(limited, facts=facts).memory if m.process == "generator-0")
        assert sum(parts.values()) == 500_000_000


def test_an_evaluator_makes_nothing_ready_beside_what_it_serves():
    overrides = ("evaluation.replica=own", "evaluation.every_steps=5")
    assert generator_parts(*overrides, process="evaluator")["packed_head"] == 32_768
    assert "spare_weights" not in generator_parts(*overrides, process="evaluator")


def test_a_head_is_taken_for_tied_where_that_is_not_known():
    facts = {name: getattr(TINY, name) for name in ModelFacts.__struct_fields__ if name != "tied"}
    assert ModelFacts.of(facts).tied
    assert not ModelFacts.of({**facts, "tied": False}).tied


def test_a_vllm_replica_is_its_adapter_and_a_server_that_reads_the_weights_where_they_lie():
    parts = generator_parts(
        "generator.engine=vllm", "generator.kernels=auto", "generator.dtype=float32", "generator.max_num_seqs=8"
    )
    assert parts == {
        "process": 350_000_000,
        "server": 1_550_000_000,
        "weights": 4_000_000,
        "packed_head": 32_768,  # 128 x 64 x 4
        "kv": 1_048_576,
        "logits": 8_192,  # 2 x 8 x 128 x 4
    }
    untied = generator_parts("generator.engine=vllm", "generator.kernels=auto", "trainer.lora_rank=4", tied=False)
    assert "packed_head" not in untied
    assert untied["merged_weights"] == 8_000_000  # here and in shared memory


def test_facts_may_be_a_mapping_or_any_object_and_missing_ones_are_named():
    assert ModelFacts.of({name: getattr(TINY, name) for name in ModelFacts.__struct_fields__}) == TINY
    with pytest.raises(ConfigError, match="lack 'layers'"):
        ModelFacts.of({"parameters": 1})


def test_an_even_split_passes():
    check_divisible(prompts=64, group_size=8, mini_batch_prompts=32, ranks=4)
    check_divisible(prompts=4, group_size=8, mini_batch_prompts=4, ranks=1)


def test_a_short_last_mini_batch_is_refused():
    with pytest.raises(ConfigError, match="512 is no multiple of 192"):
        check_divisible(prompts=64, group_size=8, mini_batch_prompts=24, ranks=1)


@pytest.mark.parametrize("name", ["prompts", "group_size", "mini_batch_prompts", "ranks"])
def test_a_count_below_one_is_refused(name):
    counts = {"prompts": 4, "group_size": 8, "mini_batch_prompts": 4, "ranks": 1, name: 0}
    with pytest.raises(ConfigError, match=f"{name} is 0; it must be at least 1"):
        check_divisible(**counts)


def test_nearest_divisors_lie_on_both_sides():
    assert nearest_divisors(3, of=32) == (2, 4)
    assert nearest_divisors(4, of=32) == (4,)
    assert nearest_divisors(40, of=32) == (32,)
