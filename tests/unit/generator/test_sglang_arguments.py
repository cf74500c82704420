"""From the one configuration to SGLang's flags, variables and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollmill.config.load import load_config
from rollmill.config.schema import GeneratorSettings
from rollmill.config.serving import SglangSettings
from rollmill.errors import ConfigError, ModelError
from rollmill.generator.engines.remote.model import ServedModel
from rollmill.generator.engines.settings import KvShape
from rollmill.generator.engines.sglang.arguments import sglang_arguments, sglang_environment
from rollmill.generator.engines.sglang.start import find_python, traits_of, write_key, write_model

KV = KvShape(layers=2, kv_heads=1, head_dim=32)  # 512 bytes a token in float32
MODEL = ServedModel(name="tiny", vocabulary_size=96, max_positions=160, kv=KV)


def arguments(device: Any = "cpu", *, kv: KvShape | None = KV, **settings: Any) -> list[str]:
    return sglang_arguments(
        GeneratorSettings(
            **{"engine": "sglang", "dtype": "float32", "max_num_seqs": 7, "max_model_len": 64, **settings}
        ),
        model="/m",
        key_file="/k",
        port=5,
        policy_version=3,
        device=device,
        kv=kv,
        vocabulary_size=96,
    )


def value(name: str, found: list[str]) -> str:
    return found[found.index(name) + 1]


def test_each_setting_becomes_its_flag():
    found = arguments(
        "cuda",
        max_num_batched_tokens=256,
        gpu_memory_utilization=0.8,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        kv_cache_dtype="fp8",
        enable_prefix_caching=False,
    )
    assert value("--max-running-requests", found) == "8"  # one more: a score must not wait for a rollout
    assert value("--context-length", found) == "72"  # the server keeps up to 8 for itself
    assert (value("--chunked-prefill-size", found), value("--max-prefill-tokens", found)) == ("256", "256")
    assert value("--mem-fraction-static", found) == "0.8"
    assert (value("--tp-size", found), value("--ep-size", found)) == ("2", "2")
    assert value("--kv-cache-dtype", found) == "fp8_e4m3"
    assert "--disable-radix-cache" in found
    assert not {"--device", "--max-total-tokens"} & set(found)


def test_what_samples_must_have_is_always_asked_for():
    found = arguments()
    assert {"--skip-tokenizer-init", "--incremental-streaming-output", "--enable-priority-scheduling"} <= set(found)
    assert "--disable-overlap-schedule" in found
    assert (value("--weight-version", found), value("--sampling-mask-max-tokens", found)) == ("3", "96")
    assert (value("--host", found), value("--config", found), value("--device", found)) == ("127.0.0.1", "/k", "cpu")
    assert "--disable-radix-cache" not in found


def test_switches_of_its_own_are_obeyed_and_further_arguments_come_last():
    own = SglangSettings(overlap_schedule=True, deterministic_inference=True, arguments=("--page-size", "4"))
    found = arguments(sglang=own)
    assert "--disable-overlap-schedule" not in found
    assert "--enable-deterministic-inference" in found
    assert found[-2:] == ["--page-size", "4"]


@pytest.mark.parametrize("taken", ["--port", "--weight-version=x", "--skip_tokenizer_init", "--api-key", "--dp-size"])
def test_an_argument_that_is_set_here_is_refused(taken):
    with pytest.raises(ConfigError, match="sets itself or relies on"):
        arguments(sglang=SglangSettings(arguments=(taken,)))


def test_memory_for_keys_and_values_becomes_tokens():
    assert value("--max-total-tokens", arguments()) == "576"  # (7 + 1) * (64 + 8)
    assert value("--max-total-tokens", arguments("cuda", kv_cache_memory_bytes=512 * 100)) == "100"
    with pytest.raises(ConfigError, match="holds 71 tokens, and one sequence needs 72"):
        arguments(kv_cache_memory_bytes=512 * 72 - 1)
    with pytest.raises(ConfigError, match="does not say how large"):
        arguments(kv=None, kv_cache_memory_bytes=1 << 20)


def test_variables_that_would_lead_its_python_astray_are_left_out():
    settings = GeneratorSettings(engine="sglang", threads=3, sglang=SglangSettings(variables={"PYTHONPATH": "/stub"}))
    found = sglang_environment(
        settings, base={"PATH": "/bin", "PYTHONHOME": "/x", "SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
    )
    assert (found["PATH"], found["OMP_NUM_THREADS"], found["PYTHONPATH"]) == ("/bin", "3", "/stub")
    assert not {"PYTHONHOME", "SGLANG_RETURN_ORIGINAL_LOGPROB"} & set(found)


def test_the_servers_model_has_no_end_token_of_its_own(tmp_path: Path):
    config, weights = tmp_path / "config.json", tmp_path / "v.weights"
    config.write_text(json.dumps({"architectures": ["X"], "eos_token_id": 2, "vocab_size": 96}), encoding="utf-8")
    weights.write_bytes(b"w")
    write_model(tmp_path / "model", config=config, weights=weights)
    written = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    assert (written["eos_token_id"], written["vocab_size"]) == (None, 96)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == b"w"
    config.write_text(json.dumps({"vocab_size": 96}), encoding="utf-8")
    with pytest.raises(ModelError, match="names no `architectures`"):
        write_model(tmp_path / "other", config=config, weights=weights)


def test_the_key_is_in_a_file_that_only_this_user_can_read(tmp_path: Path):
    file = write_key(tmp_path, key="abc")
    assert file.read_text(encoding="ascii") == "api-key: abc\n"
    assert file.stat().st_mode & 0o077 == 0


def test_an_environment_must_be_named_and_be_one(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"generator\.sglang\.python is not set.*pip install sglang"):
        find_python(None)
    with pytest.raises(ConfigError, match="no program that can be run"):
        find_python(str(tmp_path / "python"))


def test_capabilities_say_what_the_settings_leave_of_them():
    plain = traits_of(GeneratorSettings(engine="sglang", dtype="float32"), model=MODEL, masks=True)
    assert {"kv_keep", "prefix_cache", "top_k", "top_p"} <= set(plain.capabilities)
    assert "seed" not in plain.capabilities
    assert plain.kv_bytes_per_token == 512
    bare = GeneratorSettings(
        engine="sglang",
        enable_prefix_caching=False,
        sglang=SglangSettings(overlap_schedule=True, deterministic_inference=True),
    )
    found = set(traits_of(bare, model=MODEL, masks=False).capabilities)
    assert "seed" in found
    assert not {"kv_keep", "prefix_cache", "top_k", "top_p"} & found


def test_kept_kv_with_an_overlapped_schedule_is_an_impossible_configuration(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[generator]\nengine = "sglang"\n[generator.sglang]\npython = "/p"\noverlap_schedule = true\n', encoding="utf-8"
    )
    with pytest.raises(ConfigError, match="labels the last token before an update"):
        load_config(file)


def test_an_environment_that_is_not_named_is_told_before_anything_starts(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text('[generator]\nengine = "sglang"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"generator\.sglang\.python is not set"):
        load_config(file)
