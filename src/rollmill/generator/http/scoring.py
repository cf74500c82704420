"""Scores of given token ids for an HTTP call, within its deadline.

| wait | ends after |
|---|---|
| for log-probs or rewards | the call's deadline; the client leaves |
"""

from __future__ import annotations

import asyncio

import numpy as np

from rollmill.errors import DeadlineExceeded
from rollmill.generator.http.bodies import ScoreBody
from rollmill.generator.http.problems import RequestProblem
from rollmill.generator.http.protocol import Inference
from rollmill.generator.http.replies import ScoreReply


async def score(service: Inference, body: ScoreBody, *, deadline_s: float) -> ScoreReply:
    """Return what the model says of the ids in a body.

    Raises:
        RequestProblem: if an adapter is asked for a reward.
        RollmillError: as `InferenceService.score` and `InferenceService.reward`.
        DeadlineExceeded: if there was no answer in time.

    Cancellation:
        gives the scores up.
    """
    if body.what == "reward" and body.adapter:
        raise RequestProblem("'adapter' gives log-probs alone; leave it out for a reward", param="adapter")
    try:
        async with asyncio.timeout(deadline_s):
            return await _score(service, body, deadline_s=deadline_s)
    except TimeoutError:
        raise DeadlineExceeded(
            f"{len(body.token_ids)} token ids were not scored within {deadline_s:g} s; raise deadline_s, or add a "
            "replica"
        ) from None


async def _score(service: Inference, body: ScoreBody, *, deadline_s: float) -> ScoreReply:
    ids, job = np.array(body.token_ids, dtype=np.int64), body.job or ""
    if body.what == "reward":
        reward = await service.reward(ids, deadline_s=deadline_s, job=job)
        return ScoreReply(rewards=reward.scores.tolist(), policy_version=reward.policy_version)
    logprobs, version = await service.score(ids, adapter=body.adapter or "", deadline_s=deadline_s, job=job)
    return ScoreReply(logprobs=logprobs.tolist(), policy_version=version)
