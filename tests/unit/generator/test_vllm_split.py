"""A split of prefill and decode: what is generated, and every rule that refuses one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollmill.config.disaggregation import SplitSettings, load_split
from rollmill.config.schema import GeneratorSettings
from rollmill.errors import ConfigError
from rollmill.generator.engines.settings import vllm_arguments
from rollmill.generator.engines.vllm.split import SplitModel, kv_bytes_per_token, kv_capacity_tokens, plan_split

# 8 billion parameters, 32 layers, 32 heads, 8 kv heads of 128.
MODEL = SplitModel(parameters=8_000_000_000, layers=32, heads=32, kv_heads=8, head_dim=128, max_positions=131_072)


def split(**changes: Any) -> SplitSettings:
    return SplitSettings(**{"model": "/models/m", **changes})


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        plan_split(split(**changes), model=MODEL)
    return str(refused.value)


def test_two_prefill_and_one_decode_server_share_a_host_without_sharing_a_gpu_or_a_port():
    plan = plan_split(
        split(prefill={"servers": 2}, decode={"tensor_parallel_size": 4, "data_parallel_size": 1}), model=MODEL
    )
    laid = [(s.role, s.gpus, s.http_port, s.side_channel_ports) for s in plan.servers]
    assert laid == [
        ("prefill", (0,), 8100, (5600,)),
        ("prefill", (1,), 8101, (5601,)),
        ("decode", (2, 3, 4, 5), 8200, (5700,)),
    ]
    assert plan.router == (
        *("vllm-router", "--vllm-pd-disaggregation", "--port", "8000"),
        *("--prefill", "http://127.0.0.1:8100", "--prefill", "http://127.0.0.1:8101"),
        *("--decode", "http://127.0.0.1:8200"),
    )


def test_servers_fill_one_host_before_the_next():
    plan = plan_split(
        split(
            gpus_per_host=4,
            prefill={"hosts": ["a"], "servers": 4},
            decode={"hosts": ["b", "c"], "servers": 3, "tensor_parallel_size": 2},
        ),
        model=MODEL,
    )
    assert [(s.host, s.gpus) for s in plan.servers if s.role == "decode"] == [
        ("b", (0, 1)),
        ("b", (2, 3)),
        ("c", (0, 1)),
    ]


def test_both_sides_get_the_roles_of_one_connector_and_their_own_side_channel():
    plan = plan_split(split(kv_load_failure_policy="fail", kv_lease_s=60), model=MODEL)
    prefill, decode = plan.servers
    for server, role in ((prefill, "kv_producer"), (decode, "kv_consumer")):
        transfer = json.loads(server.command[server.command.index("--kv-transfer-config") + 1])
        assert transfer == {
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"kv_lease_duration": 60},
        }
    assert prefill.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert decode.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5700"
    assert "VLLM_KV_CACHE_LAYOUT" not in decode.environment


def test_each_server_is_a_replicas_own_with_another_place_to_listen_and_kv_to_exchange():
    plan = plan_split(split(python="/venv/bin/python", decode={"max_num_seqs": 9}), model=MODEL)
    replica = GeneratorSettings(
        engine="vllm", dtype="bfloat16", max_model_len=8192, max_num_seqs=9, max_num_batched_tokens=8192
    )
    own = vllm_arguments(replica, model="/models/m", listen={"--uds": "/s"}, device="cuda", kv=None)
    server = plan.servers[-1]
    assert server.command[:3] == ("/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server")
    flags = list(server.command[3:])
    for name in ("--host", "--port", "--block-size", "--kv-transfer-config"):
        at = flags.index(name)
        del flags[at : at + 2]
    at = own.index("--uds")
    del own[at : at + 2]
    assert flags == own
    # What weights need to get in, and tokens out.
    assert {"--tokens-only", "--weight-transfer-config", "--load-format"} <= set(flags)
    assert server.environment["PYTHONPATH"] == "/opt/rollmill/vllm-plugin"
    assert server.environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert server.environment["VLLM_PLUGINS"] == "rollmill_file"
    assert any("rollmill engine plugin /opt/rollmill/vllm-plugin" in note for note in plan.notes)


def test_ranks_of_different_width_ask_for_heads_that_lie_together():
    plan = plan_split(split(decode={"tensor_parallel_size": 2}), model=MODEL)
    assert {server.environment["VLLM_KV_CACHE_LAYOUT"] for server in plan.servers} == {"HND"}


def test_each_data_parallel_rank_has_a_side_channel():
    plan = plan_split(split(prefill={"servers": 2, "data_parallel_size": 2}), model=MODEL)
    assert [s.side_channel_ports for s in plan.servers if s.role == "prefill"] == [(5600, 5601), (5602, 5603)]


# 2 * 32 layers * 8 heads * 128 * 2 bytes = 131,072; a head is never halved.
@pytest.mark.parametrize(("ranks", "nbytes"), [(1, 131_072), (8, 16_384), (16, 16_384)])
def test_the_kv_of_a_token_is_shared_among_ranks_down_to_one_head(ranks, nbytes):
    assert kv_bytes_per_token(split(), model=MODEL, tensor_parallel_size=ranks) == nbytes


def test_the_kv_capacity_is_memory_less_weights_and_activations():
    # 0.9 * 80 GB - 16 GB of weights - 4 GB = 52 GB; 52e9 / (131,072 * 16) = 24,795.5 blocks of 16 tokens.
    assert kv_capacity_tokens(split(), split().decode, model=MODEL) == 24_795 * 16


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "cpu"}, "whose wheels need CUDA"),
        ({"prefill": {"tensor_parallel_size": 4}, "decode": {"tensor_parallel_size": 6}}, "one must divide the other"),
        (
            {"gpus_per_host": 32, "prefill": {"tensor_parallel_size": 16}, "decode": {"tensor_parallel_size": 8}},
            "prefill has 16 ranks for 8 kv heads",
        ),
        ({"prefill": {"block_size": 32}, "decode": {"block_size": 16}}, "block_size is 32 for prefill and 16"),
        ({"decode": {"tensor_parallel_size": 3}}, "3 does not divide the model's 32 attention heads"),
        ({"max_model_len": 200_000}, "longer than the model's 131072 positions"),
        ({"decode": {"max_num_batched_tokens": 16, "max_num_seqs": 16}}, "less than one token for each"),
        ({"gpu_memory_gb": 23.0}, "prefill: of 20.7 GB per GPU (0.9 of 23) weights take 16.0 and activations 4"),
        ({"gpus_per_host": 1}, "host 127.0.0.1 would need 2 GPUs and has 1"),
        ({"decode": {"tensor_parallel_size": 16}}, "a decode server needs 16 GPUs"),
        ({"ports": {"decode_http": 8100}}, "port 8100 on 127.0.0.1 would be used 2 times"),
        ({"ports": {"decode_side_channel": 8000}}, "port 8000 on 127.0.0.1 would be used 2 times"),
        ({"ports": {"decode_http": 65535}, "decode": {"servers": 2}}, "port 65536 on 127.0.0.1 is beyond 65535"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_split_that_cannot_work_is_refused_with_its_numbers(changes, why):
    assert why in refusal(**changes)


def test_all_reasons_are_named_at_once():
    message = refusal(device="cpu", max_model_len=200_000)
    assert "CUDA" in message
    assert "positions" in message


def test_servers_bind_their_own_host_and_a_split_over_a_network_is_told_to_keep_it_private():
    plan = plan_split(split(prefill={"hosts": ["10.0.0.1"]}, decode={"hosts": ["10.0.0.2"]}), model=MODEL)
    assert [s.command[s.command.index("--host") + 1] for s in plan.servers] == ["10.0.0.1", "10.0.0.2"]
    assert any("ask for no token" in note for note in plan.notes)
    assert not any("ask for no token" in note for note in plan_split(split(), model=MODEL).notes)


def test_a_batch_that_cannot_be_full_of_long_sequences_is_noted():
    # 396,720 tokens are 48 sequences of 8192.
    plan = plan_split(split(decode={"max_num_seqs": 64}), model=MODEL)
    assert any("48 sequences of max_model_len 8192, while max_num_seqs is 64" in note for note in plan.notes)


def test_a_file_with_an_unknown_key_is_refused_with_its_name(tmp_path):
    file = tmp_path / "split.toml"
    file.write_text('model = "/m"\n[prefill]\nserver = 2\n')
    with pytest.raises(ConfigError, match=r"prefill\.server"):
        load_split(file)


def test_a_file_is_read_whole(tmp_path):
    file = tmp_path / "split.toml"
    file.write_text('model = "/m"\nmax_model_len = 4096\n[decode]\nservers = 2\nhosts = ["a", "b"]\n')
    settings = load_split(file)
    assert (settings.max_model_len, settings.decode.servers, settings.decode.hosts) == (4096, 2, ("a", "b"))
