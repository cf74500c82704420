"""Rules between settings: which combinations cannot work, and which do nothing.

Pure. `check` refuses with a `ConfigError` that prints both numbers, why they clash, and the nearest valid values;
`warnings_of` returns sentences about combinations that work but waste something or have no effect. Ranges of a
single setting live in `rollmill.config.schema`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from rollmill.config.addresses import is_loopback
from rollmill.config.derive import has_evaluator, slots_of
from rollmill.config.engines import ROUNDINGS, WITH_WAVES, disobeyed
from rollmill.config.fleet import FleetSettings
from rollmill.config.schema import AlgorithmSettings, GeneratorSettings, RollmillConfig, ScheduleSettings
from rollmill.errors import ConfigError

Rule = Callable[[RollmillConfig], Iterator[str]]


def check(config: RollmillConfig) -> None:
    """Refuse combinations that cannot work.

    Raises:
        ConfigError: one line per broken rule: both values, why they clash, the nearest valid values.
    """
    problems = [problem for rule in RULES for problem in rule(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def check_serving(config: RollmillConfig) -> None:
    """Refuse combinations that cannot be served; what concerns training alone is not looked at.

    Raises:
        ConfigError: as `check`.
    """
    if problems := list(_engine(config)):
        raise ConfigError("\n".join(problems))


def warnings_of(config: RollmillConfig, *, cores: int | None = None) -> tuple[str, ...]:
    """Return a sentence for each setting that has no effect or is likely to cost more than it gives.

    Args:
        config: the settings.
        cores: processor cores of this machine; `None` leaves the rule about threads out.
    """
    found = [sentence for rule in WARNINGS for sentence in rule(config)]
    if cores is not None:
        found.extend(_threads(config, cores=cores))
    return tuple(found)


def _sampling(config: RollmillConfig) -> Iterator[str]:
    sampling = config.sampling
    if sampling.temperature == 0:
        yield (
            "sampling.temperature is 0: all siblings of a group would be equal, so every advantage would be 0 and "
            "nothing would be learned. Valid: above 0, for example 1.0. (evaluation.temperature may be 0.)"
        )
    neutral = "The trainer computes log-probs over the whole vocabulary and cannot renormalise over a cut one yet"
    if sampling.top_p != 1.0:
        yield (
            f"sampling.top_p is {sampling.top_p} in training. {neutral}, so ratios would be wrong by the mass that was "
            "cut. Nearest valid value: 1.0."
        )
    if sampling.top_k != 0:
        yield (
            f"sampling.top_k is {sampling.top_k} in training. {neutral}, so ratios would be wrong by the mass that was "
            "cut. Nearest valid value: 0 (keeps all)."
        )


def _lengths(config: RollmillConfig) -> Iterator[str]:
    longest = config.generator.max_model_len
    caps = {"sampling.max_new_tokens": config.sampling.max_new_tokens}
    if config.evaluation.max_new_tokens is not None:
        caps["evaluation.max_new_tokens"] = config.evaluation.max_new_tokens
    for key, cap in caps.items():
        if cap >= longest:
            yield (
                f"{key} is {cap} and generator.max_model_len is {longest}: no room is left for a prompt. Nearest valid "
                f"values: {key} at most {longest - 1}, or generator.max_model_len at least {cap + 1}, plus the length "
                "of your longest prompt."
            )
    budget = config.trainer.micro_batch_tokens
    if budget < longest:
        yield (
            f"trainer.micro_batch_tokens is {budget} and generator.max_model_len is {longest}: the longest sequence "
            f"would not fit into one pass. Nearest valid values: trainer.micro_batch_tokens at least {longest}, or "
            f"generator.max_model_len at most {budget}."
        )
    schedule = config.schedule
    if schedule.overlong == "soft_penalty" and schedule.overlong_buffer_tokens > config.sampling.max_new_tokens:
        yield (
            f"schedule.overlong_buffer_tokens is {schedule.overlong_buffer_tokens} and sampling.max_new_tokens is "
            f"{config.sampling.max_new_tokens}: the penalty would start before the first token. Nearest valid value: "
            f"{config.sampling.max_new_tokens}."
        )


def _groups(config: RollmillConfig) -> Iterator[str]:
    schedule = config.schedule
    if schedule.window_groups < schedule.batch_groups:
        yield (
            f"schedule.window_groups is {schedule.window_groups} and schedule.batch_groups is {schedule.batch_groups}: "
            "a batch could never be filled from the window. Nearest valid values: schedule.window_groups "
            f"{schedule.batch_groups}, or schedule.batch_groups {schedule.window_groups}."
        )
    if schedule.reopen_groups and schedule.member_oversampling == 0:
        yield (
            "schedule.reopen_groups is true and schedule.member_oversampling is 0: no sibling can come after the "
            "close, so nothing would ever be reopened. Nearest valid values: schedule.member_oversampling 1, or "
            "schedule.reopen_groups false."
        )
    if schedule.data_epochs is not None and schedule.data_epochs < 1:
        yield (
            f"schedule.data_epochs is {schedule.data_epochs}: there would be no task to train on. Nearest valid "
            "value: 1; leave it out for no end."
        )


def _deadlines(config: RollmillConfig) -> Iterator[str]:
    schedule, run = config.schedule, config.run
    ordered = (
        (
            "schedule.rollout_deadline_s", schedule.rollout_deadline_s,
            "schedule.group_deadline_s", schedule.group_deadline_s,
            "the group would be dropped before a lost rollout is noticed",
        ),
        (
            "generator.request_deadline_s", config.generator.request_deadline_s,
            "schedule.rollout_deadline_s", schedule.rollout_deadline_s,
            "the rollout would be aborted before its request ends",
        ),
        (
            "environment.scoring_deadline_s", config.environment.scoring_deadline_s,
            "schedule.rollout_deadline_s", schedule.rollout_deadline_s,
            "a hung scorer would be taken for a lost rollout",
        ),
    )  # fmt: skip
    for inner, inner_s, outer, outer_s, why in ordered:
        if inner_s > outer_s:
            yield (
                f"{inner} is {inner_s:g} s and {outer} is {outer_s:g} s: {why}. Nearest valid values: {inner} at most "
                f"{outer_s:g}, or {outer} at least {inner_s:g}."
            )
    if run.stall_report_s >= run.stall_limit_s:
        yield (
            f"run.stall_report_s is {run.stall_report_s:g} s and run.stall_limit_s is {run.stall_limit_s:g} s: the run "
            "would end before it reports why. Nearest valid values: run.stall_report_s below "
            f"{run.stall_limit_s:g}, or run.stall_limit_s above {run.stall_report_s:g}."
        )
    if run.on_generator_loss == "wait" and run.replica_deadline_s >= run.stall_limit_s:
        yield (
            f'run.on_generator_loss is "wait" with run.replica_deadline_s {run.replica_deadline_s:g} s, and '
            f"run.stall_limit_s is {run.stall_limit_s:g} s: the run would end as stalled before the wait does. Nearest "
            f"valid values: run.replica_deadline_s below {run.stall_limit_s:g}, or run.stall_limit_s above "
            f"{run.replica_deadline_s:g}."
        )
    patience_s = config.trainer.batch_deadline_s
    if run.on_generator_loss == "wait" and run.replica_deadline_s >= patience_s:
        yield (
            f'run.on_generator_loss is "wait" with run.replica_deadline_s {run.replica_deadline_s:g} s, and '
            f"trainer.batch_deadline_s is {patience_s:g} s: the trainer would give up before the wait does. Nearest "
            f"valid values: run.replica_deadline_s below {patience_s:g}, or trainer.batch_deadline_s above "
            f"{run.replica_deadline_s:g}."
        )


def _algorithm(config: RollmillConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.loss == "dapo" and algorithm.clip_high <= algorithm.clip_low:
        yield (
            f'algorithm.loss is "dapo" with clip_high {algorithm.clip_high:g} and clip_low {algorithm.clip_low:g}: '
            "clip-higher needs clip_high above clip_low, otherwise it is PPO. Nearest valid values: "
            f'algorithm.clip_high 0.28 with clip_low 0.2 (the paper\'s), or algorithm.loss "ppo".'
        )
    if algorithm.clip_low >= 1 and algorithm.loss != "cispo":
        yield (
            f"algorithm.clip_low is {algorithm.clip_low:g}: the lower edge 1 - clip_low would be "
            f"{1 - algorithm.clip_low:g}, and a ratio is never below 0. Nearest valid value: below 1, for example 0.2."
        )
    if algorithm.loss == "gspo" and algorithm.correction == "masked_is":
        yield (
            'algorithm.loss is "gspo" and algorithm.correction is "masked_is": GSPO weighs whole sequences, the mask '
            "would remove single tokens from them and change the sequence that is weighed. Nearest valid values: "
            'algorithm.correction "clipped_is" (which looks at whole sequences there), "truncated_is" or "none".'
        )
    if algorithm.correction != "none" and algorithm.correction_cap <= 1:
        yield (
            f"algorithm.correction_cap is {algorithm.correction_cap:g}: weights of fresh samples are 1 and would be "
            "cut as well. Nearest valid value: above 1, for example 2.0."
        )
    for number, beta in enumerate(config.trainer.betas):
        if not 0 <= beta < 1:
            yield (
                f"trainer.betas[{number}] is {beta:g}: AdamW needs 0 <= beta < 1. Nearest valid value: "
                f"{0.0 if beta < 0 else 0.99:g}."
            )


def _data(config: RollmillConfig) -> Iterator[str]:
    environment = config.environment
    if environment.kind != "reasoning_gym":
        return
    expected = environment.pool_size * environment.heldout_fraction
    if expected < environment.heldout_size:
        needed = -(-environment.heldout_size // environment.heldout_fraction)
        yield (
            f"environment.pool_size {environment.pool_size} x heldout_fraction {environment.heldout_fraction:g} gives "
            f"about {expected:.0f} held-out problems, heldout_size asks for {environment.heldout_size}. Nearest valid "
            f"values: environment.pool_size {needed:.0f}, or environment.heldout_size {int(expected)}."
        )


def _deterministic(config: RollmillConfig) -> Iterator[str]:
    if not config.run.deterministic:
        return
    schedule = config.schedule
    needed = (
        ("schedule.max_staleness", schedule.max_staleness, 0, "which step a sample is trained at would follow speed"),
        ("schedule.group_oversampling", schedule.group_oversampling, 1.0, "the groups that finish first would count"),
        ("schedule.member_oversampling", schedule.member_oversampling, 0, "the siblings that finish first would count"),
        ("generator.replicas", config.generator.replicas, 1, "which replica serves a group would follow load"),
    )
    for key, value, valid, why in needed:
        if value != valid:
            yield (
                f"run.deterministic is true and {key} is {value:g}: {why}. Nearest valid values: {key} {valid:g}, or "
                "run.deterministic false."
            )
    if config.generator.kernels == "auto":
        yield (
            'run.deterministic is true and generator.kernels is "auto": which arithmetic is used would depend on '
            'whether a compiler is found and is quick enough. Nearest valid values: generator.kernels "native" (fast, '
            'where the CPU has AVX2) or "torch", or run.deterministic false.'
        )
    if config.run.on_generator_loss == "degrade":
        yield (
            'run.deterministic is true and run.on_generator_loss is "degrade": the last batch would hold what happened '
            'to be ready. Nearest valid values: run.on_generator_loss "restart", or run.deterministic false.'
        )


def _engine(config: RollmillConfig) -> Iterator[str]:
    generator = config.generator
    yield from _disobeyed(generator)
    if generator.engine == "sglang":
        yield from _sglang(generator)
    yield from _passes_and_loads(generator)
    yield from _host_kv(config)
    yield from _rounding(config)
    yield from _kernels(generator)
    yield from _draft(generator)
    yield from _waves(config)


def _disobeyed(generator: GeneratorSettings) -> Iterator[str]:
    engine = generator.engine
    for key, engines in disobeyed(generator):
        value = functools.reduce(getattr, key.split("."), generator)
        others = " or ".join(f'generator.engine "{other}"' for other in engines)
        yield (
            f'generator.{key} is {value!r} and generator.engine is "{engine}", which does not have this setting. '
            + (f"Engines that have it: {', '.join(engines)}. " if engines else "No engine has it yet. ")
            + f"Nearest valid values: leave generator.{key} out"
            + (f", or {others}." if engines else ".")
        )


def _sglang(generator: GeneratorSettings) -> Iterator[str]:
    if generator.sglang.python is None:
        yield (
            'generator.engine is "sglang" and generator.sglang.python is not set: SGLang lives in an environment of '
            "its own. Nearest valid values: the path of its interpreter, or another generator.engine."
        )
    if generator.sglang.overlap_schedule and generator.kv_on_update == "keep":
        yield (
            'generator.sglang.overlap_schedule is true and generator.kv_on_update is "keep": SGLang then labels the '
            "last token before an update with the version after it. Nearest valid values: generator.kv_on_update "
            '"recompute", or generator.sglang.overlap_schedule false.'
        )


def _passes_and_loads(generator: GeneratorSettings) -> Iterator[str]:
    if generator.kv_on_update == "drain" and generator.drain_on_update_s > generator.load_deadline_s / 2:
        yield (
            f"generator.drain_on_update_s is {generator.drain_on_update_s:g} and generator.load_deadline_s is "
            f"{generator.load_deadline_s:g}: a load must have time left when requests in flight have finished. Nearest "
            f"valid values: generator.drain_on_update_s {generator.load_deadline_s / 2:g}, or "
            f"generator.load_deadline_s {2 * generator.drain_on_update_s:g}."
        )
    if generator.max_num_batched_tokens is not None and generator.max_num_batched_tokens < generator.max_num_seqs:
        yield (
            f"generator.max_num_batched_tokens is {generator.max_num_batched_tokens} and generator.max_num_seqs is "
            f"{generator.max_num_seqs}: a pass could not give every sequence a token. Nearest valid values: "
            f"generator.max_num_batched_tokens {generator.max_num_seqs}, or generator.max_num_seqs "
            f"{generator.max_num_batched_tokens}."
        )


def _kernels(generator: GeneratorSettings) -> Iterator[str]:
    if generator.quantization == "int8" and generator.kernels == "torch":
        yield (
            'generator.quantization is "int8" and generator.kernels is "torch": only the compiled kernels multiply '
            'weights of eight bits. Nearest valid values: generator.kernels "auto", or generator.quantization "none".'
        )


def _draft(generator: GeneratorSettings) -> Iterator[str]:
    if generator.speculation == "draft" and generator.draft_model is None:
        yield (
            'generator.speculation is "draft" and generator.draft_model is not set: somebody must guess. Nearest valid '
            'values: a small model with the same tokens in generator.draft_model, or generator.speculation "ngram".'
        )
    if generator.draft_model is not None and generator.speculation != "draft" and generator.engine == "embedded":
        yield (
            f"generator.draft_model is {generator.draft_model!r} and generator.speculation is "
            f'"{generator.speculation}": the draft would guess nothing. Nearest valid values: generator.speculation '
            '"draft", or leave generator.draft_model out.'
        )


def _waves(config: RollmillConfig) -> Iterator[str]:
    engine = config.generator.engine
    if config.run.deterministic and engine not in WITH_WAVES:
        yield (
            f'run.deterministic is true and generator.engine is "{engine}": what it samples depends on which requests '
            f"share a pass. Engines that can: {', '.join(WITH_WAVES)}. Nearest valid values: generator.engine "
            '"embedded", or run.deterministic false.'
        )


def _rounding(config: RollmillConfig) -> Iterator[str]:
    engine, wanted = config.generator.engine, config.generator.quantization
    if wanted == "none" or engine not in ROUNDINGS or wanted in ROUNDINGS[engine]:
        return
    have = ", ".join(f'generator.quantization "{other}"' for other in ROUNDINGS[engine])
    other = next(name for name, roundings in ROUNDINGS.items() if wanted in roundings)
    yield (
        f'generator.quantization is "{wanted}" and generator.engine is "{engine}", which cannot round to it. Nearest '
        f'valid values: {have}, or generator.engine "{other}", or generator.quantization "none".'
    )


def _host_kv(config: RollmillConfig) -> Iterator[str]:
    generator = config.generator
    nbytes, folder = generator.host_kv_bytes, generator.host_kv_directory
    if (nbytes is None) != (folder is None):
        yield (
            f"generator.host_kv_bytes is {nbytes} and generator.host_kv_directory is {folder!r}: the tier is a file "
            "and needs a size and a place. Nearest valid values: for example generator.host_kv_bytes 2000000000 with a "
            "folder on a disk, or leave both out."
        )
    if nbytes is not None and not generator.enable_prefix_caching:
        yield (
            f"generator.host_kv_bytes is {nbytes} and generator.enable_prefix_caching is false: no KV outlives its "
            "request, so the tier would hold none. Nearest valid values: generator.enable_prefix_caching true, or "
            "leave generator.host_kv_bytes out."
        )


def _fleet(config: RollmillConfig) -> Iterator[str]:
    fleet = config.generator.fleet
    if not fleet.address:
        unchanged = FleetSettings()
        for key in [key for key in FleetSettings.model_fields if getattr(fleet, key) != getattr(unchanged, key)]:
            yield (
                f"generator.fleet.{key} is set and generator.fleet.address is not: the run starts its own replicas. "
                'Nearest valid values: generator.fleet.address "HOST:PORT", or leave the section out.'
            )
        return
    host = fleet.address.rpartition(":")[0]
    if not host:
        yield (
            f'generator.fleet.address is "{fleet.address}", which has no port. Nearest valid values: '
            f'"{fleet.address}:50051".'
        )
    elif not is_loopback(host) and config.weights.transport != "file":
        yield (
            f'generator.fleet.address is "{fleet.address}", on another machine, and weights.transport is '
            f'"{config.weights.transport}": shared memory ends at this one. Nearest valid values: weights.transport '
            '"file", with run.directory on a file system that the fleet sees under the same path.'
        )
    if fleet.adapter and not config.trainer.lora_rank:
        yield (
            f'generator.fleet.adapter is "{fleet.adapter}" and trainer.lora_rank is 0: whole weights are trained, and '
            "there is no adapter. Nearest valid values: trainer.lora_rank 16, or leave generator.fleet.adapter out."
        )
    if config.run.deterministic:
        yield (
            "run.deterministic is true and generator.fleet.address is set: which replica samples, beside whose "
            "requests, would follow load. Nearest valid values: leave generator.fleet.address out, or "
            "run.deterministic false."
        )


RULES: tuple[Rule, ...] = (
    _sampling, _lengths, _groups, _deadlines, _algorithm, _data, _deterministic, _engine, _fleet
)  # fmt: skip


def _slots(config: RollmillConfig) -> Iterator[str]:
    generator, schedule = config.generator, config.schedule
    slots = slots_of(config)
    members = schedule.group_size + schedule.member_oversampling
    if generator.own_replicas and generator.max_num_seqs < members:
        yield (
            f"generator.max_num_seqs is {generator.max_num_seqs} and a group has {members} siblings: one group never "
            f"runs at once on a replica. Raise generator.max_num_seqs to {members} or more."
        )
    ceiling = int((schedule.max_staleness + 1) * schedule.batch_groups * schedule.group_oversampling) * members
    if slots > ceiling:
        lower = "generator.max_num_seqs" if generator.own_replicas else "generator.fleet.slots"
        yield (
            f"{slots} slots, but at most {ceiling} rollouts may be promised: "
            f"{slots - ceiling} slots stay empty. Lower {lower} or raise schedule.max_staleness."
        )
    if schedule.member_oversampling > schedule.group_size:
        yield (
            f"schedule.member_oversampling is {schedule.member_oversampling} for groups of {schedule.group_size}: more "
            "than half of all rollouts would be surplus. Consider 1 or 2."
        )


def _no_effect(config: RollmillConfig) -> Iterator[str]:
    algorithm, schedule = config.algorithm, config.schedule
    default = AlgorithmSettings()
    if algorithm.correction == "none" and algorithm.correction_cap != default.correction_cap:
        yield 'algorithm.correction_cap has no effect while algorithm.correction is "none".'
    for key in ("clip_low", "clip_high"):
        if algorithm.correction != "none" and getattr(algorithm, key) != getattr(default, key):
            yield (
                f'algorithm.{key} has no effect while algorithm.correction is "{algorithm.correction}": a batch gets '
                'one update, and before it the ratio that is clipped is 1. With "none" the clip acts on old samples.'
            )
    if algorithm.advantage != "grpo" and algorithm.advantage_eps != default.advantage_eps:
        yield f'algorithm.advantage_eps has no effect with algorithm.advantage "{algorithm.advantage}".'
    if schedule.overlong != "soft_penalty":
        for key in ("overlong_buffer_tokens", "overlong_penalty"):
            if getattr(schedule, key) != ScheduleSettings.model_fields[key].default:
                yield f'schedule.{key} has no effect while schedule.overlong is "{schedule.overlong}".'
        if algorithm.signal != default.signal:
            yield f'algorithm.signal has no effect while schedule.overlong is "{schedule.overlong}": nothing is shaped.'
    if algorithm.correction == "none" and schedule.max_staleness > 0:
        yield (
            f'algorithm.correction is "none" and schedule.max_staleness is {schedule.max_staleness}: the clip alone '
            'bounds the effect of old samples. "clipped_is" corrects them.'
        )
    if config.run.deterministic and config.generator.speculation != "off":
        yield (
            f'generator.speculation "{config.generator.speculation}" has no effect in deterministic mode: whether '
            "guessing pays depends on the clock, and what a wave computes must not."
        )
    if config.generator.max_loras is not None:
        yield (
            "generator.max_loras has no effect in a run: its replicas serve its own policy. `rollmill serve --adapter` "
            "serves adapters beside a base."
        )
    if config.generator.fleet.address and config.generator.replicas > 1:
        yield (
            f"generator.replicas is {config.generator.replicas} and has no effect with generator.fleet.address: the "
            "run starts none. How many replicas there are is set where the fleet is started."
        )
    if algorithm.reward_shuffle:
        yield "algorithm.reward_shuffle is true: a control run; accuracy is not expected to rise."


def _horizon(config: RollmillConfig) -> Iterator[str]:
    steps = config.run.steps
    for key, every in (
        ("trainer.checkpoint_every_steps", config.trainer.checkpoint_every_steps),
        ("evaluation.every_steps", config.evaluation.every_steps),
    ):
        if every > steps:
            yield f"{key} is {every} and run.steps is {steps}: none is made before the end."
    if config.trainer.warmup_steps >= steps:
        yield (
            f"trainer.warmup_steps is {config.trainer.warmup_steps} and run.steps is {steps}: the learning rate never "
            "reaches trainer.learning_rate."
        )
    if config.run.stall_limit_s < config.schedule.rollout_deadline_s:
        yield (
            f"run.stall_limit_s is {config.run.stall_limit_s:g} s and schedule.rollout_deadline_s is "
            f"{config.schedule.rollout_deadline_s:g} s: a lost rollout may end the run before it is dispatched again."
        )
    if config.schedule.infra_failures_in_a_row < config.schedule.infra_attempts:
        yield (
            f"schedule.infra_failures_in_a_row is {config.schedule.infra_failures_in_a_row} and "
            f"schedule.infra_attempts is {config.schedule.infra_attempts}: the run ends before one rollout has used "
            "its attempts."
        )


def _evaluation(config: RollmillConfig) -> Iterator[str]:
    evaluation = config.evaluation
    if evaluation.temperature > 0:
        yield (
            f"evaluation.temperature is {evaluation.temperature:g}: held-out accuracy has sampling noise besides the "
            "interval shown. 0 is greedy."
        )
    if evaluation.replica == "own" and not has_evaluator(config):
        yield (
            'evaluation.replica is "own", but nothing is evaluated while the run trains (evaluation.at_start is false, '
            f"evaluation.every_steps is {evaluation.every_steps}, run.steps is {config.run.steps}): it has no effect."
        )
    if not evaluation.at_start and evaluation.at_end:
        yield "evaluation.at_start is false: the summary cannot say what training changed."


def _threads(config: RollmillConfig, *, cores: int) -> Iterator[str]:
    wanted = config.trainer.threads + config.generator.own_replicas * config.generator.threads
    if wanted > cores:
        yield (
            f"{wanted} torch threads (trainer {config.trainer.threads}, generators {config.generator.own_replicas} x "
            f"{config.generator.threads}) on {cores} cores: they will wait for one another. Use {cores} or fewer."
        )


WARNINGS: tuple[Rule, ...] = (_slots, _no_effect, _horizon, _evaluation)
