"""Quantities that follow from the configuration: counts per step, the ceiling of the stock, bytes per process.

Pure arithmetic on settings and a few facts of the model. Estimates are upper bounds where a bound is cheap to state,
and say what they leave out. Decides nothing; `rollmill.config.plan` judges the sums against a machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollmill.config.precision import packed_precision, resolve_dtype
from rollmill.config.schema import RollmillConfig
from rollmill.errors import ConfigError

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}

TORCH_PROCESS_BYTES = 350_000_000
"""A process that has imported torch and transformers and no more: 333 MiB of PSS measured with torch 2.13 (CPU)."""

VLLM_SERVER_BYTES = 1_550_000_000
"""The three processes of a vLLM 0.32 server on a CPU, before weights and KV: 1.52 GB of PSS measured."""

PLAIN_PROCESS_BYTES = 60_000_000
"""A process with NumPy, pydantic and msgspec and no torch: 30 MiB measured, doubled for its data."""

ACTIVATION_FLOATS_PER_HIDDEN = 16
"""Values kept for the backward pass per token and layer, in units of the hidden size: norms, q, k, v, attention
output and residuals (about 8), and the three MLP intermediates at the usual ratio of 2.7 (about 8)."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What sizing needs to know of a model.

    Attributes:
        parameters: distinct parameters; tied tensors count once.
        layers: decoder layers.
        hidden_size: width of the residual stream.
        kv_heads: key and value heads.
        head_dim: width of one head.
        vocabulary_size: rows of the output head.
        max_positions: longest sequence that the model was made for.
        tied: head and embedding are one tensor; where that is unknown, assumed, because it takes more memory.
        draft: the model that guesses for it, if one does.
    """

    parameters: int
    layers: int
    hidden_size: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int
    max_positions: int
    tied: bool = True
    draft: ModelFacts | None = None

    @classmethod
    def of(cls, facts: Any) -> ModelFacts:
        """Return the facts from a mapping or from any object that has these attributes.

        Raises:
            ConfigError: if one is missing.
        """
        if isinstance(facts, cls):
            return facts
        values: dict[str, int] = {}
        for name in cls.__struct_fields__:
            if name == "draft":  # of another model
                continue
            value = facts.get(name) if isinstance(facts, Mapping) else getattr(facts, name, None)
            if value is None and name == "tied":
                value = True
            if value is None:
                raise ConfigError(f"the model's facts lack {name!r}; read them with `rollmill model list`.")
            values[name] = int(value)
        return cls(**{**values, "tied": bool(values["tied"])})

    def kv_bytes_per_token(self, *, dtype_bytes: int) -> int:
        """Return bytes of keys and values that one token keeps in all layers, those of a draft included."""
        of_draft = 0 if self.draft is None else self.draft.kv_bytes_per_token(dtype_bytes=dtype_bytes)
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes + of_draft


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated bytes of one process, by what they are for."""

    process: str
    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())


class Derived(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings come to.

    Attributes:
        rollouts_per_step: `batch_groups * group_size`, rollouts of one optimizer step.
        rollouts_of_run: the same over all steps, without those that carry no signal.
        members_per_group: siblings dispatched per group, with the surplus.
        stock_ceiling_rollouts: most rollouts promised and not yet trained, without the surplus of a group: whole
            groups, `(max_staleness + 1) * batch_groups * group_oversampling` of them.
        slots: sequences decoded at once over all replicas.
        tokens_per_step_at_most: output tokens of one step if every rollout reaches the cap.
        packed_tokens_per_step_at_most: the same with each prompt once, prompts as long as the context allows.
        kv_bytes_per_replica: keys and values of all slots at full length; `None` without model facts.
        weights_bytes: one published set of weights, float32; `None` without model facts.
        shared_bytes: published sets kept at once; `None` without model facts.
        memory: per process; empty without model facts.
    """

    rollouts_per_step: int
    rollouts_of_run: int
    members_per_group: int
    stock_ceiling_rollouts: int
    slots: int
    tokens_per_step_at_most: int
    packed_tokens_per_step_at_most: int
    kv_bytes_per_replica: int | None
    weights_bytes: int | None
    shared_bytes: int | None
    memory: tuple[Memory, ...]


def derive(config: RollmillConfig, *, facts: Any = None) -> Derived:
    """Return the derived quantities; bytes only where the model's facts are given.

    Args:
        config: the settings.
        facts: `ModelFacts`, or a mapping or object with its fields.

    Example:
        >>> derive(RollmillConfig()).rollouts_per_step  # 4 groups of 8
        32
    """
    schedule = config.schedule
    rollouts = schedule.batch_groups * schedule.group_size
    model = None if facts is None else ModelFacts.of(facts)
    weights = None if model is None else model.parameters * BYTES_OF["float32"]
    return Derived(
        rollouts_per_step=rollouts,
        rollouts_of_run=rollouts * config.run.steps,
        members_per_group=schedule.group_size + schedule.member_oversampling,
        stock_ceiling_rollouts=int((schedule.max_staleness + 1) * schedule.batch_groups * schedule.group_oversampling)
        * schedule.group_size,
        slots=slots_of(config),
        tokens_per_step_at_most=_output_tokens(config),
        packed_tokens_per_step_at_most=_packed_tokens(config),
        kv_bytes_per_replica=None if model is None else _kv_bytes(config, model=model),
        weights_bytes=weights,
        shared_bytes=None if model is None else _shared_bytes(config, model=model),
        memory=() if model is None else _memory(config, model=model),
    )


def slots_of(config: RollmillConfig) -> int:
    """Return how many rollouts run at once; 0 where a fleet says so only when it is asked."""
    generator = config.generator
    if generator.own_replicas:
        return generator.own_replicas * generator.max_num_seqs
    return generator.fleet.slots or 0


def check_divisible(*, prompts: int, group_size: int, mini_batch_prompts: int, ranks: int) -> None:
    """Refuse a batch that does not split evenly into mini-batches, or a mini-batch into data-parallel ranks.

    A group stays on one rank, so that its prompt is computed once; hence a mini-batch is split by prompts. An uneven
    split would give some ranks fewer samples and, with a mean per rank, a silently wrong gradient.

    Args:
        prompts: groups of one optimizer step's batch.
        group_size: rollouts per group.
        mini_batch_prompts: groups of one mini-batch.
        ranks: data-parallel ranks of the trainer.

    Raises:
        ConfigError: with rollouts per batch, per mini-batch and per rank, and the nearest valid values.
    """
    for name, value in (("prompts", prompts), ("group_size", group_size), ("ranks", ranks)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1.")
    if mini_batch_prompts < 1:
        raise ConfigError(f"mini_batch_prompts is {mini_batch_prompts}; it must be at least 1.")
    batch, mini = prompts * group_size, mini_batch_prompts * group_size
    if prompts % mini_batch_prompts == 0 and mini_batch_prompts % ranks == 0:
        return
    table = (
        f"{prompts} prompts x {group_size} rollouts = {batch} rollouts per batch; "
        f"mini-batch of {mini_batch_prompts} prompts x {group_size} = {mini} rollouts; {ranks} ranks"
    )
    if prompts % mini_batch_prompts:
        why = f"{batch} is no multiple of {mini}: the last mini-batch would be short"
    else:
        why = f"{mini_batch_prompts} prompts ({mini} rollouts) do not split evenly over {ranks} ranks"
    raise ConfigError(f"{table}. {why}. Nearest valid values: {_nearest_splits(prompts, mini_batch_prompts, ranks)}.")


def nearest_divisors(value: int, *, of: int) -> tuple[int, ...]:
    """Return the nearest divisors of `of` at or below and above `value`, ascending.

    Example:
        >>> nearest_divisors(3, of=32)
        (2, 4)
    """
    below = max((d for d in range(1, min(value, of) + 1) if of % d == 0), default=None)
    above = next((d for d in range(value, of + 1) if of % d == 0), None)
    return tuple(sorted({d for d in (below, above) if d is not None}))


def _nearest_splits(prompts: int, mini: int, ranks: int) -> str:
    options: list[str] = []
    if prompts % mini == 0:
        options.append(f"ranks {_either(nearest_divisors(ranks, of=mini))}")
    fitting = [d for d in range(ranks, prompts + 1, ranks) if prompts % d == 0]
    if fitting:
        options.append(f"mini-batch {min(fitting, key=lambda d: (abs(d - mini), d))} prompts")
    pairs = {_round_to(mini, ranks=ranks, up=up) for up in (False, True)} - {0}
    for new_mini in sorted(pairs):
        per_batch = max(1, round(prompts / new_mini))
        options.append(f"{per_batch * new_mini} prompts with a mini-batch of {new_mini}")
    return "; or ".join(options)


def _round_to(value: int, *, ranks: int, up: bool) -> int:
    return -(-value // ranks) * ranks if up else value // ranks * ranks


def _either(values: tuple[int, ...]) -> str:
    return " or ".join(str(value) for value in values)


def has_evaluator(config: RollmillConfig) -> bool:
    """Return whether a process of its own answers evaluations while the run trains."""
    evaluation = config.evaluation
    return evaluation.replica == "own" and (evaluation.at_start or 0 < evaluation.every_steps < config.run.steps)


def kept_versions(config: RollmillConfig) -> int:
    """Return how many published sets of weights lie in memory at once.

    One more than `weights.keep_versions` while the newest is written; with an evaluator one that is evaluated, and one
    that may wait for it.
    """
    return config.weights.keep_versions + 1 + (2 if has_evaluator(config) else 0)


def serving_bytes(config: RollmillConfig) -> int:
    """Return bytes per value in the generator."""
    return BYTES_OF[resolve_dtype(config.generator.dtype)]


def _output_tokens(config: RollmillConfig) -> int:
    return config.schedule.batch_groups * config.schedule.group_size * config.sampling.max_new_tokens


def _packed_tokens(config: RollmillConfig) -> int:
    longest_prompt = max(config.generator.max_model_len - config.sampling.max_new_tokens, 0)
    return _output_tokens(config) + config.schedule.batch_groups * longest_prompt


def _kv_bytes(config: RollmillConfig, *, model: ModelFacts, staged: bool | None = None) -> int:
    settings = config.generator
    if settings.kv_cache_memory_bytes is not None:
        return settings.kv_cache_memory_bytes
    if settings.memory_limit_bytes is not None:
        rest = _beside_kv(config, model=model, staged=settings.stage_weights if staged is None else staged)
        return max(0, settings.memory_limit_bytes - sum(rest.values()))
    per_token = model.kv_bytes_per_token(dtype_bytes=serving_bytes(config))
    return settings.max_num_seqs * settings.max_model_len * per_token


def _shared_bytes(config: RollmillConfig, *, model: ModelFacts) -> int:
    """Return bytes of the kept versions; adapters lie on one copy of whole weights."""
    versions = kept_versions(config) * _trained_parameters(config, model=model)
    base = model.parameters if config.trainer.lora_rank else 0
    return (base + versions) * BYTES_OF["float32"]


def _memory(config: RollmillConfig, *, model: ModelFacts) -> tuple[Memory, ...]:
    staged = config.generator.stage_weights
    replicas = tuple(
        Memory(process=f"generator-{number}", parts=_generator_parts(config, model=model, staged=staged))
        for number in range(config.generator.own_replicas)
    )
    if has_evaluator(config):
        # Nobody waits for an answer of the evaluator while it loads: it makes nothing ready beside what it serves.
        parts = _generator_parts(config, model=model, staged=False)
        replicas = (*replicas, Memory(process="evaluator", parts=parts))
    controller = Memory(process="controller", parts={"process": PLAIN_PROCESS_BYTES})
    scorers = Memory(process="scorers", parts={"process": config.environment.scoring_workers * PLAIN_PROCESS_BYTES})
    return (Memory(process="trainer", parts=_trainer_parts(config, model=model)), *replicas, controller, scorers)


def _generator_parts(config: RollmillConfig, *, model: ModelFacts, staged: bool) -> dict[str, int]:
    if config.generator.engine == "vllm":
        return _vllm_parts(config, model=model)
    kv = _kv_bytes(config, model=model, staged=staged)
    return {**_beside_kv(config, model=model, staged=staged), "kv": kv}


def _vllm_parts(config: RollmillConfig, *, model: ModelFacts) -> dict[str, int]:
    """Return bytes of a replica whose server computes on this machine's CPU; on a GPU they are the GPU's."""
    plain = serving_bytes(config)
    return {
        "process": TORCH_PROCESS_BYTES,
        "server": VLLM_SERVER_BYTES,
        "weights": model.parameters * plain,
        **({"packed_head": model.vocabulary_size * model.hidden_size * plain} if model.tied else {}),
        # Differences are added here, and what comes of it is written into shared memory for the server.
        **({"merged_weights": 2 * model.parameters * BYTES_OF["float32"]} if config.trainer.lora_rank else {}),
        "kv": _kv_bytes(config, model=model),
        "logits": 2 * config.generator.max_num_seqs * model.vocabulary_size * BYTES_OF["float32"],
    }


def _beside_kv(config: RollmillConfig, *, model: ModelFacts, staged: bool) -> dict[str, int]:
    weights = _served_weights(config, model=model)
    # Logits twice: the scores and their sorted or cumulated copy for sampling, in float32 whatever the precision.
    return {
        "process": TORCH_PROCESS_BYTES,
        **weights,
        **({"spare_weights": sum(weights.values())} if staged else {}),
        **({} if model.draft is None else {"draft_weights": sum(_served_weights(config, model=model.draft).values())}),
        # While a version is loaded: the matrices with their differences added.
        **({"merged_weights": model.parameters * BYTES_OF["float32"]} if config.trainer.lora_rank else {}),
        "logits": 2 * config.generator.max_num_seqs * model.vocabulary_size * BYTES_OF["float32"],
    }


def _served_weights(config: RollmillConfig, *, model: ModelFacts) -> dict[str, int]:
    """Return bytes of the weights that one replica serves, and of the packed copy of a tied head."""
    plain = serving_bytes(config)
    kernels, quantization = config.generator.kernels, config.generator.quantization
    # Whether a compiler is there is not known here.
    precision = packed_precision(resolve_dtype(config.generator.dtype), kernels=kernels)
    if precision is None and (quantization == "none" or kernels == "torch"):
        return {"weights": model.parameters * plain}
    embedding = model.vocabulary_size * model.hidden_size
    # Eight bits, and four bytes for every 32 of them.
    packed = 1.125 if quantization == "int8" or precision is None else BYTES_OF[precision]
    parts = {"weights": embedding * plain + int((model.parameters - embedding) * packed)}
    if model.tied:
        parts["packed_head"] = int(embedding * packed)
    return parts


def _trainer_parts(config: RollmillConfig, *, model: ModelFacts) -> dict[str, int]:
    compute = BYTES_OF[resolve_dtype(config.trainer.dtype)]
    tokens = min(config.trainer.micro_batch_tokens, _packed_tokens(config))
    # A loss token needs its logits, and their gradient in the backward pass.
    loss_tokens = min(tokens, _output_tokens(config))
    trained = _trained_parameters(config, model=model)
    parts = {
        "process": TORCH_PROCESS_BYTES,
        "weights": model.parameters * BYTES_OF["float32"],
        "gradients": trained * BYTES_OF["float32"],
        "optimizer": 2 * trained * BYTES_OF["float32"],
        "logits": 2 * loss_tokens * model.vocabulary_size * BYTES_OF["float32"],
        "activations": tokens * model.layers * ACTIVATION_FLOATS_PER_HIDDEN * model.hidden_size * compute,
    }
    if compute != BYTES_OF["float32"]:
        parts["autocast_copies"] = model.parameters * compute
    if config.trainer.checkpoint_in_background:
        # Left to itself it copies only where memory allows: no reason to refuse a run.
        parts["checkpoint_copy"] = (model.parameters + 2 * trained) * BYTES_OF["float32"]
    if config.algorithm.kl_coefficient > 0:
        parts["reference"] = model.parameters * BYTES_OF["float32"]
    return parts


def _trained_parameters(config: RollmillConfig, *, model: ModelFacts) -> int:
    """Return how many numbers are updated; of adapters at most so many: no layer is wider than 4 times the residual."""
    trainer = config.trainer
    if trainer.lora_rank == 0:
        return model.parameters
    pair = trainer.lora_rank * (model.hidden_size + 4 * model.hidden_size)
    return min(model.parameters, model.layers * len(trainer.lora_targets) * pair)
