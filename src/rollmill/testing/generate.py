"""A policy that says what it is told to, as a `generate` function; for tests that need no engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from rollmill.testing.faults import FaultInjector
from rollmill.testing.tokenizer import ToyTokenizer
from rollmill.types import GenerateRequest, StopReason, Turn, VersionSpan


def reply_with(
    replies: str | Sequence[str],
    *,
    tokenizer: ToyTokenizer,
    policy_version: int = 1,
    faults: FaultInjector | None = None,
) -> Callable[[GenerateRequest], Awaitable[Turn]]:
    """Return a `generate` that answers its n-th request with reply n, again from the start past the end.

    A reply is closed with the end of a turn (`StopReason.STOP`), unless the request's token cap cuts it before
    (`StopReason.LENGTH`). Log-probs are 0: the policy was certain.

    Args:
        replies: one for all requests, or one per request.
        tokenizer: turns them into ids.
        policy_version: that all tokens are stamped with.
        faults: reached with `generate`.
    """
    texts = (replies,) if isinstance(replies, str) else tuple(replies)
    served = 0

    async def generate(request: GenerateRequest) -> Turn:
        nonlocal served
        text = texts[served % len(texts)]
        served += 1
        if faults is not None:
            await faults.reach("generate")
        ids = [*tokenizer.encode(text), tokenizer.end_of_turn_id]
        kept = np.array(ids[: request.sampling.max_new_tokens], dtype=np.int32)
        return Turn(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            output_ids=kept,
            behavior_logprobs=np.zeros(len(kept), dtype=np.float32),
            version_spans=(VersionSpan(0, len(kept), policy_version),),
            stop_reason=StopReason.STOP if len(kept) == len(ids) else StopReason.LENGTH,
        )

    return generate
