"""What is sent over NCCL, as vLLM's own code takes it: its checks of what it is told, and where its messages end."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import torch

from rollmill.config.schema import GeneratorSettings
from rollmill.errors import MissingExtraError
from rollmill.generator.engines.settings import vllm_environment
from rollmill.generator.engines.vllm.environment import find_python
from rollmill.generator.engines.vllm.nccl_plan import init_info, plan_transfer, update_info
from rollmill.weights.tensorfile import read_header, write_tensors

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(300)]

READ = """
import dataclasses, json, sys
import torch
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

told = json.load(sys.stdin)
init = NCCLWeightTransferInitInfo(**told["init"])
update = NCCLWeightTransferUpdateInfo(**told["update"])
each = zip(update.names, update.dtype_names, update.shapes)
tensors = iter([(name, torch.zeros(shape, dtype=getattr(torch, dtype))) for name, dtype, shape in each])
messages = []
while (chunk := pack_tensors(tensors, lambda item: item[1], init.packed_buffer_size_bytes)) is not None:
    messages.append([chunk.names, chunk.packed_tensor.numel()])
print("ANSWER " + json.dumps({"id": len(init.nccl_unique_id_bytes), "packed": init.packed, "messages": messages}))
"""


def test_vllms_own_code_takes_what_it_is_told_and_ends_its_messages_where_the_sender_does(tmp_path):
    try:
        python = find_python(None)
    except MissingExtraError as error:
        pytest.skip(str(error))
    tensors = {
        **{f"model.layers.{n}.w": torch.zeros(40 + 8 * n, 16, dtype=torch.bfloat16) for n in range(12)},
        "model.embed_tokens.weight": torch.zeros(96, 16),
        "model.norm.weight": torch.zeros(16),
    }
    path, buffer_bytes = tmp_path / "w.safetensors", 4096
    write_tensors(path, tensors, durable=False)
    plan = plan_transfer(read_header(path)[0], buffer_bytes=buffer_bytes)
    told = {
        "init": init_info(bytes(128), workers=2, buffer_bytes=buffer_bytes),
        "update": update_info(plan),
    }
    done = subprocess.run(
        [str(python), "-c", READ],
        input=json.dumps(told),
        capture_output=True,
        text=True,
        timeout=280,
        env=vllm_environment(GeneratorSettings(), base={"PATH": "/usr/bin:/bin", "HOME": "/tmp"}, plugin="/nowhere"),
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert answers, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(answers[-1].removeprefix("ANSWER "))
    assert (answer["id"], answer["packed"]) == (128, True)
    assert len(plan.messages) > 3
    assert answer["messages"] == [[list(message.names), message.nbytes] for message in plan.messages]
