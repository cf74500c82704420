"""Every argument that is generated for a vLLM server, read by the argument parser of the real one."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from rollmill.config.disaggregation import SplitSettings
from rollmill.config.schema import GeneratorSettings
from rollmill.config.serving import VllmSettings
from rollmill.errors import MissingExtraError
from rollmill.generator.engines.settings import KvShape, vllm_arguments, vllm_environment
from rollmill.generator.engines.vllm.environment import find_python
from rollmill.generator.engines.vllm.split import MODULE, SplitModel, plan_split

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]

READ = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

class Parser(FlexibleArgumentParser):
    def error(self, message):
        raise ValueError(message)

def plain(value):
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return str(value)

def read(arguments):
    try:
        found = make_arg_parser(Parser()).parse_args(arguments)
        validate_parsed_serve_args(found)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"read": {name: plain(value) for name, value in vars(found).items()}}

print("ANSWER " + json.dumps([read(arguments) for arguments in json.load(sys.stdin)]))
"""


def by_the_real_parser(*commands: list[str]) -> list[dict[str, Any]]:
    """What the server would make of each list of arguments."""
    try:
        python = find_python(None)
    except MissingExtraError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [str(python), "-c", READ],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=280,
        env=vllm_environment(GeneratorSettings(), base={"PATH": "/usr/bin:/bin", "HOME": "/tmp"}, plugin="/nowhere"),
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert answers, done.stderr[-3000:]
    return json.loads(answers[-1].removeprefix("ANSWER "))


def replica(device: Any = "cuda", **settings: Any) -> list[str]:
    return vllm_arguments(
        GeneratorSettings(engine="vllm", **settings),
        model="/m",
        listen={"--uds": "/s"},
        device=device,
        kv=KvShape(layers=2, kv_heads=1, head_dim=32),
        lora_targets=("q_proj", "v_proj"),
    )


def test_the_real_parser_reads_what_a_replica_and_a_split_are_told():
    model = SplitModel(parameters=8_000_000_000, layers=32, heads=32, kv_heads=8, head_dim=128, max_positions=131_072)
    split = plan_split(
        SplitSettings.model_validate(
            {"model": "/models/m", "kv_cache_dtype": "fp8", "decode": {"tensor_parallel_size": 4}}
        ),
        model=model,
    )
    servers = [list(server.command[server.command.index(MODULE) + 1 :]) for server in split.servers]
    everything = replica(
        max_num_seqs=7,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=10**9,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        kv_cache_dtype="fp8",
        tensor_parallel_size=2,
        data_parallel_size=2,
        enable_expert_parallel=True,
        max_loras=2,
        max_lora_rank=20,
        quantization="fp8",
        dtype="bfloat16",
        vllm=VllmSettings(enforce_eager=True, arguments=("--seed", "3")),
    )
    answers = by_the_real_parser(replica("cpu"), replica(), everything, *servers, [*replica(), "--no-such-flag"])
    assert [answer.get("refused") for answer in answers[:-1]] == [None] * (len(answers) - 1)
    assert "no-such-flag" in answers[-1]["refused"]  # a flag that it does not know is seen
    cpu, _, full, prefill, decode = (answer["read"] for answer in answers[:-1])
    assert (cpu["uds"], cpu["tokens_only"], cpu["load_format"], cpu["block_size"]) == ("/s", True, "dummy", 32)
    assert "rollmill_file" in json.dumps(cpu["weight_transfer_config"])
    assert (full["max_num_seqs"], full["max_loras"], full["max_lora_rank"], full["seed"]) == (8, 5, 32, 3)
    assert (full["enable_lora"], full["lora_target_modules"]) == (True, ["q_proj", "v_proj"])
    assert (full["enable_prefix_caching"], full["enable_expert_parallel"]) == (False, True)
    assert (full["quantization"], full["dtype"]) == ("fp8_per_channel", "bfloat16")
    assert [one["port"] for one in (prefill, decode)] == [8100, 8200]
    assert (decode["tensor_parallel_size"], decode["kv_cache_dtype"], decode["tokens_only"]) == (4, "fp8", True)
    assert "NixlConnector" in json.dumps(decode["kv_transfer_config"])
    assert "rollmill_file" in json.dumps(decode["weight_transfer_config"])
