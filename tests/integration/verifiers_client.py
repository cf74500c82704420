"""Run by a Python with `renderers` (which verifiers' training client sends with): two turns against a server.

python verifiers_client.py BASE_URL MODEL

Writes one JSON document: the results of both turns, and the error of a prompt that is too long.
"""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

STOP = 2


class TokensAlone:
    """As much of a renderer as a client needs that hands over prompts as ids."""

    supports_tools = True

    def get_stop_token_ids(self) -> list[int]:
        return [STOP]

    def parse_response(self, ids: list[int], **_: Any) -> Any:
        return SimpleNamespace(content="", reasoning_content=None, tool_calls=[], reasoning_complete=True)


async def main(base_url: str, model: str) -> None:
    from openai import AsyncOpenAI
    from renderers import OverlongPromptError
    from renderers.client import generate

    client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    common: dict[str, Any] = {"client": client, "renderer": TokensAlone(), "messages": [], "model": model}
    common["extra_headers"] = {"X-Session-ID": "trace-1"}
    first = await generate(
        **common, prompt_ids=list(range(3, 40)), sampling_params={"temperature": 0.7, "max_tokens": 12, "seed": 5}
    )
    prompt = [*first["prompt_ids"], *first["completion_ids"], 7, 8]
    # A later turn of a rollout also says from where experts are wanted.
    second = await generate(
        **common,
        prompt_ids=prompt,
        sampling_params={"temperature": 0.7, "max_tokens": 6, "seed": 5, "routed_experts_prompt_start": 36},
    )
    try:
        await generate(**common, prompt_ids=[3] * 100_000, sampling_params={"max_tokens": 6})
        overlong = ""
    except OverlongPromptError as error:
        overlong = str(error)
    shown = ("prompt_ids", "completion_ids", "completion_logprobs", "finish_reason", "request_id")
    turns = [{name: turn[name] for name in shown} for turn in (first, second)]
    sys.stdout.write(json.dumps({"turns": turns, "overlong": overlong}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
