"""One configuration, in vLLM's words."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from rollmill.config.engines import OBEYED_BY
from rollmill.config.schema import GeneratorSettings
from rollmill.config.serving import VllmSettings
from rollmill.errors import ConfigError, ModelError
from rollmill.generator.engines.settings import KvShape, vllm_arguments, vllm_environment

SHAPE = KvShape(layers=2, kv_heads=1, head_dim=32)


def arguments(device: Any = "cpu", kv: KvShape | None = SHAPE, **settings: Any) -> list[str]:
    base = {"engine": "vllm", "dtype": "float32", "max_num_seqs": 7, "max_model_len": 64}
    return vllm_arguments(
        GeneratorSettings(**{**base, **settings}), model="/m", listen={"--uds": "/s"}, device=device, kv=kv
    )


def value(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


@pytest.mark.parametrize(
    ("setting", "given", "flag", "written"),
    [
        ("max_model_len", 96, "--max-model-len", "96"),
        ("max_num_seqs", 15, "--max-num-seqs", "16"),  # one seat more, for scores
        ("max_num_batched_tokens", 512, "--max-num-batched-tokens", "512"),
        ("kv_cache_memory_bytes", 10**9, "--kv-cache-memory-bytes", "1000000000"),
        ("kv_cache_dtype", "fp8", "--kv-cache-dtype", "fp8"),
        ("tensor_parallel_size", 2, "--tensor-parallel-size", "2"),
        ("data_parallel_size", 3, "--data-parallel-size", "3"),
        ("dtype", "bfloat16", "--dtype", "bfloat16"),
    ],
)
def test_each_setting_has_its_flag(setting, given, flag, written):
    assert value(arguments(**{setting: given}), flag) == written


def test_a_step_has_a_token_for_every_sequence_also_for_that_of_a_score():
    flags = arguments(max_num_seqs=16, max_num_batched_tokens=16)
    assert (value(flags, "--max-num-seqs"), value(flags, "--max-num-batched-tokens")) == ("17", "17")


def test_switches_follow_their_settings():
    on = arguments(enable_expert_parallel=True)
    assert "--enable-expert-parallel" in on
    assert "--enable-prefix-caching" in on
    off = arguments(enable_prefix_caching=False)
    assert "--no-enable-prefix-caching" in off
    assert not {"--enable-prefix-caching", "--enable-expert-parallel"} & set(off)


def test_every_setting_that_vllm_is_said_to_obey_changes_what_the_server_is_told():
    changed: dict[str, Any] = {
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 10**9,
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "kv_cache_dtype": "fp8",
        "tensor_parallel_size": 2,
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "quantization": "fp8",
        "max_loras": 2,
        "max_lora_rank": 64,
        "vllm": VllmSettings(enforce_eager=True, arguments=("--seed", "1")),
    }
    assert set(changed) == {name for name, engines in OBEYED_BY.items() if "vllm" in engines}
    for name, given in changed.items():
        needs = {"max_lora_rank": {"max_loras": 1}, "quantization": {"dtype": "bfloat16"}}.get(name, {})
        assert arguments("cuda", **needs, **{name: given}) != arguments("cuda", **needs), name


def test_a_cpu_gets_memory_for_all_its_sequences_and_a_gpu_what_its_share_leaves():
    # (7 + 1) sequences of 64 tokens are 16 blocks of 32, and one that stays empty; 2 * 2 layers * 32 * 4 bytes a token
    assert value(arguments(), "--kv-cache-memory-bytes") == str(17 * 32 * 512)
    assert value(arguments(kv_cache_dtype="fp8"), "--kv-cache-memory-bytes") == str(17 * 32 * 128)
    gpu = arguments("cuda", gpu_memory_utilization=0.5)
    assert "--kv-cache-memory-bytes" not in gpu
    assert value(gpu, "--gpu-memory-utilization") == "0.5"
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        arguments(kv=None)


def test_compiled_graphs_are_for_gpus_unless_asked_for():
    assert "--enforce-eager" in arguments()
    assert "--enforce-eager" not in arguments("cuda")
    assert "--enforce-eager" not in arguments(vllm=VllmSettings(enforce_eager=False))


def test_log_probs_are_those_of_the_behaviour_policy_and_weights_come_through_our_transport():
    flags = arguments()
    assert value(flags, "--logprobs-mode") == "processed_logprobs"
    assert json.loads(value(flags, "--weight-transfer-config")) == {"backend": "rollmill_file"}
    assert value(flags, "--load-format") == "dummy"


@pytest.mark.parametrize("argument", ["--max-num-seqs", "--logprobs-mode=raw_logprobs", "--port", "--max_num_seqs=4"])
def test_what_rollmill_sets_cannot_be_set_twice(argument):
    with pytest.raises(ConfigError, match="which Rollmill sets itself"):
        arguments(vllm=VllmSettings(arguments=(argument,)))


def test_a_server_for_adapters_has_room_for_what_is_served_what_is_left_and_what_is_proven():
    made = vllm_arguments(
        GeneratorSettings(engine="vllm", max_loras=2, max_lora_rank=20),
        model="/m",
        listen={"--uds": "/s"},
        device="cpu",
        kv=SHAPE,
        lora_targets=("o_proj", "q_proj"),
    )
    assert "--enable-lora" in made
    assert (value(made, "--max-loras"), value(made, "--max-lora-rank")) == ("5", "32")  # vLLM has ranks of its own
    assert made[made.index("--lora-target-modules") :] == ["--lora-target-modules", "o_proj", "q_proj"]
    with pytest.raises(ConfigError, match="max_lora_rank is 513, and vLLM takes adapters of rank 512 at most"):
        arguments(max_loras=1, max_lora_rank=513)
    variables = vllm_environment(GeneratorSettings(max_loras=1), base={}, plugin="/plugin")
    assert variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert not any("LORA" in name for name in vllm_environment(GeneratorSettings(), base={}, plugin="/plugin"))
    assert not any("lora" in flag for flag in arguments(max_loras=0))


@pytest.mark.parametrize(
    ("quantization", "dtype", "device"),
    [("fp8", "bfloat16", "cpu"), ("fp8", "float32", "cuda"), ("int8", "bfloat16", "cuda")],
)
def test_weights_are_rounded_to_fp8_on_a_gpu_from_bfloat16_and_else_refused_with_what_works(
    quantization, dtype, device
):
    made = arguments("cuda", quantization="fp8", dtype="bfloat16")
    assert value(made, "--quantization") == "fp8_per_channel"
    with pytest.raises(
        ConfigError, match=f'quantization is "{quantization}".*"fp8" with .*or "int8" with .*"embedded"'
    ):
        arguments(device, quantization=quantization, dtype=dtype)


def test_further_arguments_are_passed_on_as_they_are():
    assert arguments(vllm=VllmSettings(arguments=("--seed", "3")))[-2:] == ["--seed", "3"]


def test_the_server_finds_its_own_packages_our_plugin_and_its_threads():
    base = {"PATH": "/bin", "PYTHONPATH": "/ours", "PYTHONHOME": "/x", "VIRTUAL_ENV": "/y", "VLLM_PLUGINS": "other"}
    made = vllm_environment(GeneratorSettings(threads=2), base=base, plugin="/plugin")
    assert (made["PATH"], made["PYTHONPATH"], made["VLLM_PLUGINS"]) == ("/bin", "/plugin", "rollmill_file")
    assert not {"PYTHONHOME", "VIRTUAL_ENV"} & set(made)
    assert (made["OMP_NUM_THREADS"], made["VLLM_SERVER_DEV_MODE"]) == ("2", "1")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576},
            (30, 3, 64),
        ),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "head_dim": 8}, (2, 4, 8)),
    ],
)
def test_keys_and_values_are_sized_by_the_models_configuration(config, expected):
    shape = KvShape.of(config, where="config.json")
    assert (shape.layers, shape.kv_heads, shape.head_dim) == expected
    assert shape.bytes_per_token(dtype_bytes=4) == 8 * math.prod(expected)


def test_a_configuration_that_says_too_little_is_refused():
    with pytest.raises(ModelError, match="num_hidden_layers"):
        KvShape.of({"num_attention_heads": 2}, where="config.json")
