"""Log-probs of given tokens, in blocks of their own that no sequence uses."""

from __future__ import annotations

import numpy as np
import torch

from rollmill.errors import DataError
from rollmill.generator.engines.embedded.kv import KvCache
from rollmill.generator.engines.embedded.low_rank import ServedAdapter, groups_of
from rollmill.generator.engines.embedded.model import ServedModel
from rollmill.generator.engines.embedded.prefill import PrefillJob, PrefillPlanner

_ROWS = 64
"""Rows of logits held at once."""


def score_tokens(
    model: ServedModel, token_ids: np.ndarray, *, kv: KvCache, max_model_len: int, adapter: ServedAdapter | None
) -> np.ndarray:
    """Return float32 [n - 1]: log-prob of token i + 1 given the tokens up to i, temperature 1.

    Args:
        model: that scores.
        token_ids: int [n].
        kv: whose scratch blocks are used.
        max_model_len: most tokens that fit there.
        adapter: that scores beside the base's weights.

    Raises:
        DataError: if the ids do not fit.
    """
    ids = np.ascontiguousarray(token_ids, dtype=np.int64)
    if not 2 <= len(ids) <= max_model_len or ids.min() < 0 or ids.max() >= model.vocabulary_size:
        raise DataError(
            f"cannot score {len(ids)} token ids: 2 to {max_model_len} of a vocabulary of {model.vocabulary_size} are "
            "accepted"
        )
    out = np.empty(len(ids) - 1, dtype=np.float32)
    for start in range(0, len(ids) - 1, _ROWS):
        stop = min(start + _ROWS, len(ids) - 1)
        planner = PrefillPlanner(kv.store.size)
        planner.add(PrefillJob(ids[:stop], (kv.scratch,), resident=start, adapter=adapter))
        work = planner.build(dtype=model.dtype, masks=False)
        logits = model.forward(
            work.token_ids,
            positions=work.positions,
            plan=work.plan,
            pool=kv.pool,
            keep=None,
            adapters=groups_of(work.owners),
        ).float()
        targets = torch.from_numpy(ids[start + 1 : stop + 1])[:, None]
        out[start:stop] = (logits.gather(1, targets)[:, 0] - logits.logsumexp(-1)).numpy()
    return out
