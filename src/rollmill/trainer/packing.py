"""From groups to packed micro-batches, in NumPy.

Decides which tokens are computed and where they stand: what all prompts of a micro-batch begin with (a system prompt)
once, each distinct prompt once, then its completions side by side, no padding. Only what a loss token needs is
computed: a sequence ends before its last loss token (whose own hidden state predicts nothing), and siblings with
advantage 0 are left out where they cannot change the gradient. Deliberately no torch and no attention here;
`rollmill.trainer.attention` turns the segments into attention blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollmill.errors import DataError, LengthMismatch, NumericalFault
from rollmill.types import Group, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trainable token sequence cut from a rollout: a prompt, then tokens of which some are in the loss.

    Attributes:
        prompt: int64 [prompt_tokens]; what siblings share.
        tokens: int64 [tokens] after the prompt: outputs, and what the environment said between them.
        loss_mask: bool [tokens]; True for tokens that the policy sampled.
        behaviour: float32 [tokens] log-probs when sampled; 0 outside the loss mask.
        versions: int64 [tokens] policy version that sampled the token; -1 outside the loss mask.
        temperature: divides the logits, as in sampling.
    """

    rollout_id: str
    group_id: str
    prompt: np.ndarray
    tokens: np.ndarray
    loss_mask: np.ndarray
    behaviour: np.ndarray
    versions: np.ndarray
    advantage: float
    temperature: float

    @property
    def loss_tokens(self) -> int:
        """Tokens in the loss."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Positions `[start, start + length)` of a packed row that see what came before them, and themselves causally.

    Attributes:
        prefix: (start, length) of the stretches that come before, in order.
    """

    prefix: tuple[tuple[int, int], ...]
    start: int
    length: int

    @property
    def prefix_length(self) -> int:
        """Positions that all of this segment sees."""
        return sum(length for _, length in self.prefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One packed row and its loss tokens.

    Attributes:
        input_ids: int64 [positions].
        position_ids: int64 [positions]; restart with every completion.
        segments: who sees whom; together they cover every position once.
        source: int64 [loss_tokens]: the position whose hidden state predicts the token.
        targets: int64 [loss_tokens].
        behaviour, advantages, temperature: float32 [loss_tokens].
        versions: int64 [loss_tokens].
        sequence_index: int64 [loss_tokens], into `rollout_ids`.
        rollout_ids: rollout of each sequence.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    segments: tuple[Segment, ...]
    source: np.ndarray
    targets: np.ndarray
    behaviour: np.ndarray
    advantages: np.ndarray
    temperature: np.ndarray
    versions: np.ndarray
    sequence_index: np.ndarray
    rollout_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything an optimizer step computes.

    Attributes:
        sequence_tokens: loss tokens of every sequence in the loss, computed or not; they form the denominator.
        padded_tokens: positions that one padded row per sequence would take; against `positions` it shows the gain.
    """

    micro_batches: tuple[MicroBatch, ...]
    sequence_tokens: tuple[int, ...]
    positions: int
    padded_tokens: int
    rollout_ids: tuple[str, ...]

    @property
    def loss_tokens(self) -> int:
        """Tokens in the loss, over all sequences of the step."""
        return sum(self.sequence_tokens)


def check_rollout(rollout: Rollout) -> None:
    """Check what the record's own constructor cannot: finite log-probs and a temperature that divides.

    Raises:
        NumericalFault: if a behaviour log-prob is NaN, infinite or positive.
        DataError: if the rollout was sampled in a way the trainer cannot score.
    """
    for turn in rollout.turns:
        logprobs = turn.behavior_logprobs
        if not np.all(np.isfinite(logprobs)) or np.any(logprobs > 1e-4):
            raise NumericalFault(
                f"rollout {rollout.rollout_id}: a behaviour log-prob is not a finite number at most 0 "
                f"(lowest {np.min(logprobs)}, highest {np.max(logprobs)}). The engine's sampler is at fault; "
                "look at the replica that served it.",
                rollout_ids=(rollout.rollout_id,),
            )
    sampling = rollout.sampling
    if sampling.temperature <= 0 or sampling.top_p < 1.0 or sampling.top_k > 0:
        raise DataError(
            f"rollout {rollout.rollout_id} was sampled with temperature {sampling.temperature}, top_p {sampling.top_p} "
            f"and top_k {sampling.top_k}; the trainer scores the full distribution at a temperature above 0. "
            "Set sampling.temperature > 0, sampling.top_p = 1 and sampling.top_k = 0."
        )


def samples_of(rollout: Rollout, *, advantage: float) -> list[Sample]:
    """Return the samples of a rollout: turns that extend one another exactly are one sequence.

    A turn whose prompt does not start with the sequence so far (a template that rewrote history) begins a new one;
    masks are never shifted.
    """
    samples: list[Sample] = []
    parts: list[_Part] = []
    prompt = seen = np.empty(0, dtype=np.int64)
    for turn in rollout.turns:
        if not len(turn.output_ids):
            continue
        given = np.asarray(turn.prompt_ids, dtype=np.int64)
        if parts and len(given) >= len(seen) and np.array_equal(given[: len(seen)], seen):
            parts.append(_Part.context(given[len(seen) :]))
        else:
            samples += _finish(rollout, prompt, parts, advantage=advantage)
            prompt, parts = given, []
        output = np.asarray(turn.output_ids, dtype=np.int64)
        versions = np.concatenate(
            [np.full(s.end_token - s.start_token, s.policy_version, dtype=np.int64) for s in turn.version_spans]
        )
        parts.append(_Part(output, np.asarray(turn.behavior_logprobs, dtype=np.float32), versions))
        seen = np.concatenate([given, output])
    return samples + _finish(rollout, prompt, parts, advantage=advantage)


@dataclass(frozen=True, slots=True)
class _Part:
    tokens: np.ndarray
    behaviour: np.ndarray
    versions: np.ndarray

    @classmethod
    def context(cls, tokens: np.ndarray) -> _Part:
        return cls(tokens, np.zeros(len(tokens), dtype=np.float32), np.full(len(tokens), -1, dtype=np.int64))


def _finish(rollout: Rollout, prompt: np.ndarray, parts: list[_Part], *, advantage: float) -> list[Sample]:
    if not parts:
        return []
    if not len(prompt):
        raise LengthMismatch(what=f"prompt of rollout {rollout.rollout_id} (tokens, at least)", expected=1, got=0)
    versions = np.concatenate([part.versions for part in parts])
    return [
        Sample(
            rollout_id=rollout.rollout_id,
            group_id=rollout.group_id,
            prompt=prompt,
            tokens=np.concatenate([part.tokens for part in parts]),
            loss_mask=versions >= 0,
            behaviour=np.concatenate([part.behaviour for part in parts]),
            versions=versions,
            advantage=advantage,
            temperature=rollout.sampling.temperature,
        )
    ]


def plan_step(groups: Sequence[Group], *, budget_tokens: int, keep_zero_advantage: bool) -> StepPlan:
    """Return the packed micro-batches of an optimizer step.

    Args:
        budget_tokens: positions of one micro-batch; a group larger than it is split by siblings (its prompt is
            repeated then), and a single sequence larger than it gets a micro-batch of its own.
        keep_zero_advantage: compute siblings with advantage 0 too; needed with a KL term, where they still pull.
    """
    members = [
        (group, rollout, float(advantage))
        for group in groups
        for rollout, advantage, counts in zip(group.rollouts, group.advantages, group.in_loss, strict=True)
        if counts
    ]
    for _, rollout, _ in members:
        check_rollout(rollout)
    samples = [sample for _, rollout, advantage in members for sample in samples_of(rollout, advantage=advantage)]
    computed = [sample for sample in samples if keep_zero_advantage or sample.advantage != 0.0]
    micro_batches = tuple(_build(bundles) for bundles in _fill(_bundles(computed), budget_tokens=budget_tokens))
    longest = max((len(s.prompt) + len(s.tokens) for s in samples), default=0)
    return StepPlan(
        micro_batches=micro_batches,
        sequence_tokens=tuple(sample.loss_tokens for sample in samples),
        positions=sum(len(batch.input_ids) for batch in micro_batches),
        padded_tokens=longest * len(samples),
        rollout_ids=tuple(rollout.rollout_id for _, rollout, _ in members),
    )


def _inputs_needed(sample: Sample) -> int:
    """Return how many of the sample's tokens must be computed: those before its last loss token."""
    return int(np.flatnonzero(sample.loss_mask)[-1])


def _bundles(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return samples that share a prompt, in order of first appearance."""
    by_prompt: dict[bytes, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt.tobytes(), []).append(sample)
    return list(by_prompt.values())


def _cost(bundle: Sequence[Sample]) -> int:
    return len(bundle[0].prompt) + sum(_inputs_needed(sample) for sample in bundle)


def _split(bundle: list[Sample], *, budget_tokens: int) -> list[list[Sample]]:
    """Cut a bundle into pieces within the budget; a piece holds at least one sample."""
    pieces: list[list[Sample]] = [[]]
    for sample in bundle:
        if pieces[-1] and _cost([*pieces[-1], sample]) > budget_tokens:
            pieces.append([])
        pieces[-1].append(sample)
    return pieces


def _fill(bundles: list[list[Sample]], *, budget_tokens: int) -> list[list[list[Sample]]]:
    """Put bundles into micro-batches: largest first, each into the first that has room."""
    pieces = [piece for bundle in bundles for piece in _split(bundle, budget_tokens=budget_tokens)]
    pieces.sort(key=_cost, reverse=True)  # stable: equal costs keep the batch order, so packing is deterministic
    bins: list[list[list[Sample]]] = []
    room: list[int] = []
    for piece in pieces:
        cost = _cost(piece)
        at = next((i for i, free in enumerate(room) if free >= cost), None)
        if at is None:
            bins.append([])
            room.append(budget_tokens)
            at = len(bins) - 1
        bins[at].append(piece)
        room[at] -= cost
    return bins


def _build(bundles: Sequence[Sequence[Sample]]) -> MicroBatch:
    row = _Row()
    shared = _common_prefix([bundle[0].prompt for bundle in bundles]) if len(bundles) > 1 else 0
    common = (row.add(bundles[0][0].prompt[:shared], prefix=()),) if shared else ()
    for bundle in bundles:
        prefix = (*common, row.add(bundle[0].prompt[shared:], prefix=common))
        for sample in bundle:
            row.add_sample(sample, prefix=prefix, inputs=_inputs_needed(sample))
    return _assemble(row)


def _common_prefix(prompts: Sequence[np.ndarray]) -> int:
    """Return how many first tokens all prompts share (a system prompt), leaving each at least one of its own."""
    shortest = min(len(prompt) for prompt in prompts) - 1
    differs = np.zeros(shortest, dtype=bool)
    for prompt in prompts[1:]:
        differs |= prompt[:shortest] != prompts[0][:shortest]
    return int(differs.argmax()) if differs.any() else shortest


class _Row:
    """A packed row while it is filled."""

    def __init__(self) -> None:
        self.ids: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.segments: list[Segment] = []
        self.sources: list[np.ndarray] = []
        self.samples: list[Sample] = []
        self.at = 0

    def add(self, tokens: np.ndarray, *, prefix: tuple[tuple[int, int], ...]) -> tuple[int, int]:
        """Append a segment; return its (start, length)."""
        segment = Segment(prefix=prefix, start=self.at, length=len(tokens))
        self.ids.append(tokens)
        self.positions.append(segment.prefix_length + np.arange(len(tokens)))
        self.segments.append(segment)
        self.at += len(tokens)
        return segment.start, segment.length

    def add_sample(self, sample: Sample, *, prefix: tuple[tuple[int, int], ...], inputs: int) -> None:
        """Append the first `inputs` tokens of a sample, and note where its loss tokens are predicted."""
        start = self.at
        if inputs:
            self.add(sample.tokens[:inputs], prefix=prefix)
        # token 0 is predicted by the last prompt token, token t by token t - 1
        last_prompt = sum(prefix[-1]) - 1
        predicted_by = np.concatenate([[last_prompt], np.arange(start, start + inputs)])
        self.sources.append(predicted_by[sample.loss_mask[: inputs + 1]])
        self.samples.append(sample)


def _assemble(row: _Row) -> MicroBatch:
    samples = row.samples
    counts = [sample.loss_tokens for sample in samples]

    def per_token(values: Sequence[float]) -> np.ndarray:
        return np.repeat(np.asarray(values, dtype=np.float32), counts)

    def masked(name: str) -> np.ndarray:
        return np.concatenate([getattr(sample, name)[sample.loss_mask] for sample in samples])

    return MicroBatch(
        input_ids=np.concatenate(row.ids),
        position_ids=np.concatenate(row.positions).astype(np.int64),
        segments=tuple(row.segments),
        source=np.concatenate(row.sources).astype(np.int64),
        targets=masked("tokens"),
        behaviour=masked("behaviour"),
        advantages=per_token([sample.advantage for sample in samples]),
        temperature=per_token([sample.temperature for sample in samples]),
        versions=masked("versions"),
        sequence_index=np.repeat(np.arange(len(samples), dtype=np.int64), counts),
        rollout_ids=tuple(sample.rollout_id for sample in samples),
    )
