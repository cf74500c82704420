"""One optimizer step: groups in, new weights and metrics out.

Packs, scores, forms the loss, clips, updates. Knows nothing of processes, stores or publication. Deterministic: equal
weights and an equal batch order give equal bits on the same CPU. Nothing is changed by a step that fails.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rollmill.algorithms.losses import (
    LossOutput,
    LossSettings,
    LossStatistics,
    TokenBatch,
    loss_denominator,
    policy_loss,
)
from rollmill.config.precision import resolve_dtype
from rollmill.config.schema import AlgorithmSettings, RollmillConfig
from rollmill.errors import CheckpointError, ConfigError, InvariantViolation, NumericalFault
from rollmill.trainer.canary import CanaryScorer, score_canary
from rollmill.trainer.logprobs import PackedInput, packed_logprobs, prepare_model
from rollmill.trainer.low_rank import adapt, base_of
from rollmill.trainer.metrics import Mismatch, StepMetrics
from rollmill.trainer.packing import MicroBatch, StepPlan, plan_step
from rollmill.types import Adapter, Canary, Group
from rollmill.weights.adapters import merged

_MOMENTS = ("exp_avg", "exp_avg_sq")
_ADAPTER = "adapter"
"""Beside the moments in a checkpoint, where its weights are merged ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Everything that a step depends on, for a checkpoint.

    Attributes:
        model: name -> float32 tensor, each distinct tensor once (tied ones are not repeated); adapters are merged in.
        optimizer: `exp_avg.<name>` and `exp_avg_sq.<name>` -> tensor, none before the first update; adapters as
            `adapter.<name>`.
        state: values that JSON can hold.
    """

    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    state: dict[str, Any]


@dataclass(slots=True)
class _Sums:
    """What the micro-batches of a step add up to."""

    loss: float = 0.0
    statistics: LossStatistics = field(default_factory=LossStatistics)
    fresh: Mismatch = field(default_factory=Mismatch)
    stale: Mismatch = field(default_factory=Mismatch)


def loss_settings(settings: AlgorithmSettings) -> LossSettings:
    """Return the loss part of the configuration.

    Raises:
        ConfigError: if DAPO is asked for with another normalisation than its own (arXiv 2503.14476, eq. 8).
    """
    if settings.loss == "dapo" and settings.normalisation != "token":
        raise ConfigError(
            f"algorithm.loss is 'dapo' and algorithm.normalisation is {settings.normalisation!r}: DAPO is normalised "
            "over tokens by definition. Set algorithm.normalisation = 'token', or algorithm.loss = 'ppo', which clips "
            "alike."
        )
    return LossSettings(
        loss=settings.loss,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        normalisation=settings.normalisation,
        correction=settings.correction,
        correction_cap=settings.correction_cap,
        kl_coefficient=settings.kl_coefficient,
    )


def warmed_up(learning_rate: float, *, optimizer_step: int, warmup_steps: int) -> float:
    """Return the learning rate of the update that leads on from `optimizer_step`: linear up, then constant.

    Example:
        >>> [warmed_up(1.0, optimizer_step=step, warmup_steps=2) for step in range(3)]
        [0.5, 1.0, 1.0]
    """
    return learning_rate * min(1.0, (optimizer_step + 1) / max(warmup_steps, 1))


def fresh_tokens(steps: np.ndarray, *, sequence_index: np.ndarray, optimizer_step: int) -> np.ndarray:
    """Return bool [tokens]: tokens of sequences that were sampled by the present weights from their first token on.

    A token sampled after a weight swap carries the new version, but its context may be KV of the old weights: such a
    sequence says nothing about pure numerics.

    Args:
        steps: int [tokens]: optimizer step of the weights that sampled each token.
        sequence_index: int [tokens]: which sequence a token belongs to.

    Example:
        >>> fresh_tokens(np.array([3, 4, 4, 4]), sequence_index=np.array([0, 0, 1, 1]), optimizer_step=4)
        array([False, False,  True,  True])
    """
    oldest = np.full(int(sequence_index.max(initial=-1)) + 1, optimizer_step)
    np.minimum.at(oldest, sequence_index, steps)
    return oldest[sequence_index] >= optimizer_step


class Trainer:
    """A policy, its optimizer and their update.

    Args:
        model: float32 master weights; its attention is switched to packed attention.
        config: `trainer`, `algorithm`, `sampling` and `weights` are read.
        reference: the initial policy, for a KL term; a frozen copy of `model` where it is `None` and one is needed.
    """

    def __init__(
        self, model: PreTrainedModel, *, config: RollmillConfig, reference: PreTrainedModel | None = None
    ) -> None:
        self._adapters = _adapted(model, config)
        self.model = prepare_model(model)
        self.optimizer_step = 0
        self._config = config
        self._loss = loss_settings(config.algorithm)
        self._dtype = resolve_dtype(config.trainer.dtype)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._reference = self._frozen(reference) if self._loss.kl_coefficient > 0 else None
        head: Any = model.get_output_embeddings()
        self._head_flops = _flops_per_token(head.weight)
        # an embedding is looked up, not multiplied; a tied one is the head's matrix
        embedding: Any = model.get_input_embeddings()
        self._body_flops = sum(map(_flops_per_token, model.parameters())) - _flops_per_token(embedding.weight)
        if head.weight is not embedding.weight:
            self._body_flops -= self._head_flops

    @functools.cached_property
    def _optimizer(self) -> torch.optim.AdamW:
        """Made at its first use: that imports torch's compiler, for which the first publication need not wait."""
        settings = self._config.trainer
        return torch.optim.AdamW(
            list(self._parameters.values()),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def _frozen(self, reference: PreTrainedModel | None) -> PreTrainedModel:
        frozen = prepare_model(reference if reference is not None else copy.deepcopy(self.model))
        return frozen.requires_grad_(False)

    # the step

    def train_step(
        self,
        groups: Sequence[Group],
        *,
        optimizer_step_of: Callable[[int], int],
        heartbeat: Callable[[], None] = lambda: None,
    ) -> StepMetrics:
        """Update the weights with one batch of groups.

        Args:
            groups: the batch, in its assigned order.
            optimizer_step_of: policy version -> optimizer step; splits the mismatch into numerics and drift.
            heartbeat: called before every micro-batch; keeps a lease alive through a long step.

        Raises:
            NumericalFault: if a log-prob, the loss or the gradient is not finite; names the rollouts, and the weights
                and the optimizer are as they were.
            DataError: if a rollout was sampled in a way the trainer cannot score.
        """
        plan = plan_step(
            groups,
            budget_tokens=self._config.trainer.micro_batch_tokens,
            keep_zero_advantage=self._reference is not None,
        )
        if not plan.micro_batches:
            raise InvariantViolation(
                f"a batch of {len(groups)} groups has no sequence with a non-zero advantage; groups without signal "
                "must be filtered before they are assigned."
            )
        denominator = loss_denominator(
            self._loss.normalisation,
            sequence_tokens=plan.sequence_tokens,
            batch_rollouts=self._config.schedule.batch_groups * self._config.schedule.group_size,
            max_new_tokens=self._config.sampling.max_new_tokens,
        )
        self._optimizer.zero_grad(set_to_none=True)
        try:
            sums = _Sums()
            for batch in plan.micro_batches:
                heartbeat()
                self._accumulate(batch, sums, denominator=denominator, optimizer_step_of=optimizer_step_of)
            grad_norm = self._clipped_norm(plan)
        except BaseException:
            self._optimizer.zero_grad(set_to_none=True)
            raise
        learning_rate = self._update()
        return self._metrics(
            plan, groups, sums, grad_norm=grad_norm, learning_rate=learning_rate, optimizer_step_of=optimizer_step_of
        )

    def _accumulate(
        self, batch: MicroBatch, sums: _Sums, *, denominator: float, optimizer_step_of: Callable[[int], int]
    ) -> None:
        packed = PackedInput(batch)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._dtype == "bfloat16"):
            logprobs = packed_logprobs(self.model, packed)
            reference = None
            if self._reference is not None:
                with torch.no_grad():
                    reference = packed_logprobs(self._reference, packed)
        # The proximal policy is the policy before this update. A batch gets exactly one update, so it is the policy
        # that was just scored: no second pass, a ratio of 1 that still carries the gradient, and the distance to the
        # behaviour policy is the correction's alone.
        proximal = logprobs.detach()
        output = policy_loss(
            TokenBatch(
                logprobs=logprobs,
                proximal=proximal,
                behaviour=packed.behaviour,
                advantages=packed.advantages,
                mask=torch.ones(len(proximal), dtype=torch.bool),
                sequence_index=packed.sequence_index,
                reference=reference,
            ),
            settings=self._loss,
            denominator=denominator,
        )
        _check_finite(batch, output, step=self.optimizer_step)
        output.loss.backward()
        sums.loss += float(output.loss.detach())
        sums.statistics += output.statistics
        fresh = fresh_tokens(
            np.array([optimizer_step_of(int(version)) for version in batch.versions]),
            sequence_index=batch.sequence_index,
            optimizer_step=self.optimizer_step,
        )
        trainer = proximal.numpy()
        sums.fresh += Mismatch.measure(trainer=trainer[fresh], behaviour=batch.behaviour[fresh])
        sums.stale += Mismatch.measure(trainer=trainer[~fresh], behaviour=batch.behaviour[~fresh])

    def _clipped_norm(self, plan: StepPlan) -> float:
        """Clip the gradient; return its norm before.

        Raises:
            NumericalFault: if it is not finite.
        """
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            rollout_ids = tuple(dict.fromkeys(r for batch in plan.micro_batches for r in batch.rollout_ids))
            raise NumericalFault(
                f"the gradient of step {self.optimizer_step + 1} has norm {norm} although every loss term is finite: a "
                f"backward pass overflowed ({self._dtype}). The weights are unchanged. Look at the samples "
                f"{', '.join(rollout_ids[:8])}; lower trainer.learning_rate or use trainer.dtype = 'float32'.",
                rollout_ids=rollout_ids,
            )
        limit = self._config.trainer.max_grad_norm
        if norm > limit:
            torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), limit, torch.tensor(norm))
        return norm

    def _update(self) -> float:
        trainer = self._config.trainer
        learning_rate = warmed_up(
            trainer.learning_rate, optimizer_step=self.optimizer_step, warmup_steps=trainer.warmup_steps
        )
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.optimizer_step += 1
        return learning_rate

    def _metrics(
        self,
        plan: StepPlan,
        groups: Sequence[Group],
        sums: _Sums,
        *,
        grad_norm: float,
        learning_rate: float,
        optimizer_step_of: Callable[[int], int],
    ) -> StepMetrics:
        ages = [
            self.optimizer_step - 1 - min(optimizer_step_of(version) for version in rollout.policy_versions)
            for group in groups
            for rollout, counts in zip(group.rollouts, group.in_loss, strict=True)
            if counts
        ]
        computed_loss_tokens = sum(len(batch.targets) for batch in plan.micro_batches)
        return StepMetrics(
            optimizer_step=self.optimizer_step,
            loss=sums.loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            loss_tokens=plan.loss_tokens,
            computed_tokens=plan.positions,
            padded_tokens=plan.padded_tokens,
            micro_batches=len(plan.micro_batches),
            sequences=len(plan.sequence_tokens),
            staleness_mean=sum(ages) / len(ages),
            staleness_max=float(max(ages)),
            # attention scores are left out (a few percent when short)
            model_flops=self._body_flops * plan.positions + self._head_flops * computed_loss_tokens,
            statistics=sums.statistics,
            mismatch_fresh=sums.fresh,
            mismatch_stale=sums.stale,
        )

    # what others read

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return the live weights by name, each distinct tensor once: what is published. Of adapters only those."""
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def base_tensors(self) -> dict[str, torch.Tensor] | None:
        """Return the frozen weights under the adapters, by name; `None` if whole weights are trained."""
        return base_of(self.model) if self._adapters else None

    def adapter_on(self, base_digest: str) -> Adapter:
        """Return what the published tensors are added to, and how."""
        trainer = self._config.trainer
        return Adapter(base_digest=base_digest, rank=trainer.lora_rank, alpha=trainer.lora_alpha)

    def canary(self, token_ids: np.ndarray) -> Canary:
        """Score a fixed prompt with the present weights, for engines to agree with after loading.

        Args:
            token_ids: int [n], n at least 2.
        """
        return score_canary(self.model, token_ids, config=self._config)

    def canary_scorer(self, token_ids: np.ndarray) -> CanaryScorer:
        """Return a scorer of the same prompt for published copies of the weights, independent of the next steps."""
        return CanaryScorer(self.model, token_ids=token_ids, config=self._config)

    @property
    def training_dtype(self) -> str:
        """The precision of the compute: `float32` or `bfloat16`; master weights are always float32."""
        return self._dtype

    # checkpoints

    def state(self) -> TrainerState:
        """Return what `load_state` needs to go on bit for bit; tensors are live, not copies."""
        optimizer: dict[str, torch.Tensor] = {}
        updates = 0
        for name, parameter in self._parameters.items():
            moments = self._optimizer.state.get(parameter)
            if moments:
                updates = int(moments["step"])
                optimizer |= {f"{moment}.{name}": moments[moment] for moment in _MOMENTS}
        state = {"optimizer_step": self.optimizer_step, "adam_updates": updates}
        if not self._adapters:
            return TrainerState(model=self.named_tensors(), optimizer=optimizer, state=state)
        adapters = {f"{_ADAPTER}.{name}": p.detach() for name, p in self._adapters.items()}
        return TrainerState(model=self._merged(self.named_tensors()), optimizer=optimizer | adapters, state=state)

    def _merged(self, adapters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return merged(base_of(self.model), adapters, settings=self.adapter_on(""))

    def load_state(
        self, *, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor], state: Mapping[str, Any]
    ) -> None:
        """Take over a state that `state` returned.

        With adapters, this model holds the weights that the run started from, not those of the checkpoint.

        Raises:
            CheckpointError: if names or shapes do not fit this model, or adapters were trained on another one; nothing
                is changed then.
        """
        if self._adapters:
            model, optimizer = self._split_adapters(model, optimizer)
        else:
            _check_tensors("model", dict(self.model.named_parameters()), model)
        if optimizer:
            moments = {f"{m}.{name}": p for name, p in self._parameters.items() for m in _MOMENTS}
            _check_tensors("optimizer", moments, optimizer)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(model[name])
        self._optimizer.state.clear()
        if optimizer:
            for name, parameter in self._parameters.items():
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(state["adam_updates"])),
                    **{moment: optimizer[f"{moment}.{name}"].clone() for moment in _MOMENTS},
                }
        self.optimizer_step = int(state["optimizer_step"])

    def _split_adapters(
        self, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the adapters and the moments of a checkpoint, once they make its weights of this model."""
        start = f"{_ADAPTER}."
        adapters = {name.removeprefix(start): t for name, t in optimizer.items() if name.startswith(start)}
        _check_tensors("adapter", self._adapters, adapters)
        whole = self._merged(adapters)
        _check_tensors("model", whole, model)
        differing = [name for name, tensor in whole.items() if not torch.equal(tensor, model[name])]
        if differing:
            raise CheckpointError(
                f"the checkpoint's adapters on this model do not give the checkpoint's weights: {len(differing)} "
                f"tensors differ, {sorted(differing)[0]} for one. They were trained on another model.source"
            )
        return adapters, {name: t for name, t in optimizer.items() if not name.startswith(start)}


def _adapted(model: PreTrainedModel, config: RollmillConfig) -> dict[str, torch.nn.Parameter]:
    """Put adapters on the model where the configuration asks for them; return them, none for whole weights."""
    trainer = config.trainer
    if trainer.lora_rank == 0:
        return {}
    return adapt(
        model, rank=trainer.lora_rank, alpha=trainer.lora_alpha, targets=trainer.lora_targets, seed=config.run.seed
    )


def _flops_per_token(weight: torch.Tensor) -> float:
    """Return forward 2 and backward 4 per number; a frozen one needs no gradient of its own."""
    return (6.0 if weight.requires_grad else 4.0) * weight.numel()


def _check_finite(batch: MicroBatch, output: LossOutput, *, step: int) -> None:
    """Raise `NumericalFault` naming the rollouts whose loss terms are not finite."""
    if bool(torch.isfinite(output.per_token).all()) and bool(torch.isfinite(output.loss)):
        return
    broken = np.unique(batch.sequence_index[~torch.isfinite(output.per_token).numpy()])
    rollout_ids = tuple(batch.rollout_ids[i] for i in broken) or batch.rollout_ids
    raise NumericalFault(
        f"the loss of step {step + 1} is {float(output.loss.detach())}: {len(rollout_ids)} rollouts have terms that "
        f"are not finite ({', '.join(rollout_ids[:8])}). The weights are unchanged. If the samples look sane, "
        "the policy has diverged: go back to the checkpoint before and lower trainer.learning_rate.",
        rollout_ids=rollout_ids,
    )


def _check_tensors(what: str, wanted: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]) -> None:
    missing, extra = sorted(wanted.keys() - got.keys()), sorted(got.keys() - wanted.keys())
    shapes = [name for name in wanted.keys() & got.keys() if wanted[name].shape != got[name].shape]
    if missing or extra or shapes:
        raise CheckpointError(
            f"the checkpoint's {what} tensors do not fit this model: {len(missing)} missing {missing[:3]}, "
            f"{len(extra)} unknown {extra[:3]}, {len(shapes)} of another shape {sorted(shapes)[:3]}. It is of another "
            "model; resume with the model.source that the run was started with."
        )
