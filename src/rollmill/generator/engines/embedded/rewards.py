"""Scores of a reward head: which tokens are scored, what comes out, and what such a model cannot be asked for.

A sequence to be scored waits, shares prefixes and is computed in chunks like the prompt of a request; it ends with its
prefill. Pure; when that happens is the scheduler's to say.
"""

from __future__ import annotations

import numpy as np
import torch

from rollmill.errors import ConfigError, DataError, DeadlineExceeded, EngineError, RollmillError
from rollmill.generator.engines.embedded.model import ServedModel
from rollmill.generator.engines.embedded.sampling import refuse_infinite
from rollmill.generator.engines.protocol import REWARD_SCORE, Reward, engines_with
from rollmill.generator.engines.sequence import Sequence
from rollmill.types import GenerateRequest, SamplingParams


def refuse_generation(model: ServedModel, *, asked: str) -> None:
    """Refuse what needs an output head.

    Args:
        model: that is served.
        asked: what was asked for, in words.

    Raises:
        EngineError: if the model has a reward head instead.
    """
    if model.labels:
        raise EngineError(
            f"{asked} from {model.name}, which has a reward head and no output head over its vocabulary: it gives "
            f"{model.labels} score(s) for a whole sequence and samples nothing. Ask it for rewards, or serve a "
            "...ForCausalLM"
        )


def refuse_settings(model: ServedModel, *, speculation: str, max_loras: int) -> None:
    """Refuse settings that would do nothing for a reward head.

    Raises:
        ConfigError: naming the setting.
    """
    said = {f'generator.speculation is "{speculation}"': speculation != "off"}
    said |= {f"generator.max_loras is {max_loras}": max_loras > 0}
    for text in (text for text, there in said.items() if there and model.labels):
        raise ConfigError(
            f"{text}, and {model.name} has a reward head: nothing is sampled there and it is served without adapters. "
            "Leave that setting out"
        )


def scored_ids(model: ServedModel, token_ids: np.ndarray, *, max_model_len: int) -> np.ndarray:
    """Return int64 [n], the tokens up to the last one that is no padding: the head reads the state behind that one.

    Raises:
        EngineError: if the model has no reward head.
        DataError: if the ids do not fit.
    """
    if not model.labels:
        raise EngineError(
            f"the embedded engine serves {model.name} without a reward head, so it gives no rewards. Engines that can "
            f"serve one (a ...ForSequenceClassification): {engines_with(REWARD_SCORE)}; or ask for logprobs"
        )
    ids = np.ascontiguousarray(token_ids, dtype=np.int64)
    if not 1 <= len(ids) <= max_model_len or ids.min() < 0 or ids.max() >= model.vocabulary_size:
        raise DataError(
            f"cannot score {len(ids)} token ids: 1 to {max_model_len} of a vocabulary of {model.vocabulary_size} are "
            "accepted"
        )
    if model.pad_token_id is None:
        return ids
    real = np.flatnonzero(ids != model.pad_token_id)
    if not len(real):
        raise DataError(f"cannot score {len(ids)} token ids: all of them are padding (id {model.pad_token_id})")
    return ids[: int(real[-1]) + 1]


def request_of(ids: np.ndarray, *, name: str, deadline_s: float) -> GenerateRequest:
    """Return a sequence as the scheduler takes it; nothing is sampled behind it."""
    return GenerateRequest(
        request_id=name, prompt_ids=ids, sampling=SamplingParams(max_new_tokens=1), deadline_s=deadline_s
    )


def give_rewards(scores: torch.Tensor, sequences: list[Sequence], *, policy_version: int) -> None:
    """Give every sequence its row of scores.

    Args:
        scores: [sequences, labels].
        sequences: in the order of the rows.
        policy_version: of the weights that computed all of them.

    Raises:
        EngineError: if a score is not finite.
    """
    rows = scores.float().numpy()
    refuse_infinite(rows.sum(axis=1))
    for sequence, row in zip(sequences, rows, strict=True):
        sequence.reward = Reward(scores=row.copy(), policy_version=policy_version)


def outcome(sequence: Sequence, *, now_s: float) -> Reward | RollmillError:
    """Return what became of a sequence that is over."""
    if sequence.reward is not None:
        return sequence.reward
    tokens = len(sequence.prompt)
    if now_s >= sequence.deadline_s:
        return DeadlineExceeded(
            f"a sequence of {tokens} tokens was not scored within {sequence.request.deadline_s:g} s; raise the "
            "deadline, send less at once, or add a replica"
        )
    return EngineError(f"a sequence of {tokens} tokens was not scored: the engine was told to stop; ask another one")
