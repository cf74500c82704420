"""The token API as the training client of verifiers uses it: what it sends is taken, what it checks is there.

What it sends and checks was read in verifiers 0.4.0 (`v1/clients/train.py`) and renderers 0.1.12 (`client.py`).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from http_replica import MODEL, Replica, replica, tokenizer_in
from rollmill.runtime.threads import process_environment

pytestmark = pytest.mark.integration

PYTHON = os.environ.get("ROLLMILL_VERIFIERS_PYTHON")
SCRIPT = Path(__file__).with_name("verifiers_client.py")


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Replica]:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    async with replica(tokenizer_in(folder), tmp_path) as found:
        yield found


async def test_what_the_client_sends_is_taken_and_what_it_checks_is_there(served):
    server = served.base_url.removesuffix("/v1")  # it takes /v1 off its base URL for this call
    sampling = {"temperature": 0.7, "max_tokens": 12, "seed": 5, "stop_token_ids": [2], "logprobs": 1}
    sampling |= {"skip_special_tokens": False, "routed_experts_prompt_start": 36}
    body = {"model": MODEL, "token_ids": list(range(3, 40)), "sampling_params": sampling}
    async with httpx2.AsyncClient() as client:
        cards = (await client.get(f"{served.base_url}/models")).json()["data"]
        answers = [
            await client.post(f"{server}/inference/v1/generate", json=body, headers={"X-Session-ID": "trace-1"})
            for _ in range(2)
        ]
    assert [card["max_model_len"] for card in cards if card["id"] == MODEL] == [400]
    assert [answer.status_code for answer in answers] == [200, 200]
    reply: Any = answers[0].json()
    (choice,) = reply["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(math.isfinite(entry["logprob"]) and entry["logprob"] <= 0 for entry in content)
    assert (len(content), choice["finish_reason"], bool(reply["request_id"])) == (12, "length", True)


@pytest.mark.skipif(PYTHON is None, reason="ROLLMILL_VERIFIERS_PYTHON names no Python with the package renderers")
async def test_the_client_itself_samples_two_turns_of_a_rollout_and_refuses_what_is_too_long(served):
    process = await asyncio.create_subprocess_exec(
        *(str(PYTHON), str(SCRIPT), served.base_url, MODEL),
        stdout=asyncio.subprocess.PIPE,
        env=process_environment(threads=1),
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    assert process.returncode == 0
    found = json.loads(out)
    for turn, tokens in zip(found["turns"], (12, 6), strict=True):
        assert (len(turn["completion_ids"]), turn["finish_reason"]) == (tokens, "length")
        ids = np.array(turn["prompt_ids"] + turn["completion_ids"])
        scored = (await served.service.score(ids))[0][len(turn["prompt_ids"]) - 1 :]
        # Sampled at temperature 0.7, scored at 1: the order of the two is known, their values are the engine's.
        assert np.corrcoef(scored, turn["completion_logprobs"])[0, 1] > 0.9
    assert "100000" in found["overlong"].replace(",", "").replace("_", "")
    assert "400" in found["overlong"]
