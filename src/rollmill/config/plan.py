"""What a run would need, before anything starts: counts, processes, threads, bytes; what cannot work is refused.

Pure: the machine's cores and bytes come in as numbers. Estimates are rounded up and listed part by part, so that a
reader can see what to change. Decides whether a run is refused; it never changes a setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollmill.config.checks import check, warnings_of
from rollmill.config.derive import Derived, Memory, ModelFacts, check_divisible, derive, has_evaluator, kept_versions
from rollmill.config.precision import resolve_dtype
from rollmill.config.schema import RollmillConfig
from rollmill.errors import ConfigError

WARN_SHARE = 0.8
"""Warn when the estimate takes more than this share of the memory."""


class PlannedProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the run."""

    name: str
    count: int
    threads: int
    dtype: str
    memory_bytes: int | None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What `--dry-run` prints.

    Attributes:
        model: name of the model's source.
        derived: counts and bytes.
        processes: what would be started.
        memory_bytes: estimated sum over processes and shared memory; `None` without model facts.
        machine_memory_bytes: available on this machine; `None` if unknown.
        shared_bytes: published weights kept at once.
        machine_shared_bytes: room in shared memory; `None` if unknown.
        transport: how weights would travel: `shm` or `file`.
        cores: of this machine.
        warnings: what works but wastes something.
    """

    model: str
    run: str
    steps: int
    max_staleness: int
    batch_groups: int
    group_size: int
    max_new_tokens: int
    derived: Derived
    processes: tuple[PlannedProcess, ...]
    memory_bytes: int | None
    machine_memory_bytes: int | None
    shared_bytes: int | None
    machine_shared_bytes: int | None
    transport: str
    cores: int
    warnings: tuple[str, ...]


def plan(
    config: RollmillConfig,
    *,
    facts: Any = None,
    draft_facts: Any = None,
    cores: int,
    memory_bytes: int | None = None,
    shm_bytes: int | None = None,
) -> Plan:
    """Return the plan, or refuse what cannot work.

    Args:
        config: the settings.
        facts: `ModelFacts`, or a mapping or object with its fields; `None` leaves bytes out.
        draft_facts: the same of the model that guesses, if one does.
        cores: processor cores of the machine.
        memory_bytes: memory that is available; `None` if unknown.
        shm_bytes: room in shared memory; `None` if unknown.

    Raises:
        ConfigError: if the settings clash, the context is longer than the model's, or memory does not suffice.
    """
    check(config)
    # One trainer process and one update per batch: the whole batch is the mini-batch of a single rank.
    check_divisible(
        prompts=config.schedule.batch_groups,
        group_size=config.schedule.group_size,
        mini_batch_prompts=config.schedule.batch_groups,
        ranks=1,
    )
    model = None if facts is None else ModelFacts.of(facts)
    if model is not None and draft_facts is not None:
        model = msgspec.structs.replace(model, draft=ModelFacts.of(draft_facts))
    derived = derive(config, facts=model)
    if model is not None:
        _refuse_long_context(config, model=model)
    transport, notes = _transport(config, derived=derived, shm_bytes=shm_bytes)
    total = _total_bytes(derived, transport=transport)
    if total is not None and memory_bytes is not None:
        _refuse_memory(derived, total=total, memory_bytes=memory_bytes, transport=transport)
        if total > WARN_SHARE * memory_bytes:
            notes.append(
                f"the estimate of {_gb(total)} is more than {WARN_SHARE:.0%} of the {_gb(memory_bytes)} available."
            )
    return Plan(
        model=config.model.source,
        run=f"{config.run.directory}/{config.run.name}",
        steps=config.run.steps,
        max_staleness=config.schedule.max_staleness,
        batch_groups=config.schedule.batch_groups,
        group_size=config.schedule.group_size,
        max_new_tokens=config.sampling.max_new_tokens,
        derived=derived,
        processes=_processes(config, derived=derived),
        memory_bytes=total,
        machine_memory_bytes=memory_bytes,
        shared_bytes=derived.shared_bytes,
        machine_shared_bytes=shm_bytes,
        transport=transport,
        cores=cores,
        warnings=(*warnings_of(config, cores=cores), *notes),
    )


def render(plan: Plan) -> str:
    """Return the plan as text for a terminal."""
    derived = plan.derived
    lines = [
        f"run        {plan.run}: {plan.steps} optimizer steps of {plan.model}",
        f"step       {plan.batch_groups} prompts x {plan.group_size} siblings = {derived.rollouts_per_step} rollouts, "
        f"at most {derived.tokens_per_step_at_most} output tokens",
        f"whole run  {derived.rollouts_of_run} rollouts trained, besides those without signal",
        f"stock      at most {derived.stock_ceiling_rollouts} rollouts ahead of the trainer "
        f"(max_staleness {plan.max_staleness})",
        f"slots      {derived.slots} sequences decoded at once",
        "",
        f"{'process':<14}{'count':>6}{'threads':>9}  {'precision':<10}{'memory each':>12}",
    ]
    for process in plan.processes:
        size = "" if process.memory_bytes is None else _gb(process.memory_bytes)
        lines.append(f"{process.name:<14}{process.count:>6}{process.threads:>9}  {process.dtype:<10}{size:>12}")
    lines += ["", *_memory_lines(plan)]
    lines += [f"warning: {sentence}" for sentence in plan.warnings]
    return "\n".join(lines) + "\n"


def _processes(config: RollmillConfig, *, derived: Derived) -> tuple[PlannedProcess, ...]:
    sizes = {memory.process: memory.total_bytes for memory in derived.memory}
    scorers = config.environment.scoring_workers
    return (
        PlannedProcess(name="controller", count=1, threads=1, dtype="", memory_bytes=sizes.get("controller")),
        PlannedProcess(
            name="generator",
            count=config.generator.own_replicas,
            threads=config.generator.threads,
            dtype=resolve_dtype(config.generator.dtype),
            memory_bytes=sizes.get("generator-0"),
        ),
        *_evaluators(config, sizes=sizes),
        PlannedProcess(
            name="trainer",
            count=1,
            threads=config.trainer.threads,
            dtype=resolve_dtype(config.trainer.dtype),
            memory_bytes=sizes.get("trainer"),
        ),
        PlannedProcess(
            name="scorer",
            count=scorers,
            threads=1,
            dtype="",
            memory_bytes=sizes["scorers"] // scorers if "scorers" in sizes else None,
        ),
    )


def _evaluators(config: RollmillConfig, *, sizes: Mapping[str, int]) -> tuple[PlannedProcess, ...]:
    if not has_evaluator(config):
        return ()
    evaluator = PlannedProcess(
        name="evaluator",
        count=1,
        threads=config.generator.threads,
        dtype=resolve_dtype(config.generator.dtype),
        memory_bytes=sizes.get("evaluator"),
    )
    return (evaluator,)


def _refuse_long_context(config: RollmillConfig, *, model: ModelFacts) -> None:
    longest = config.generator.max_model_len
    if longest > model.max_positions:
        raise ConfigError(
            f"generator.max_model_len is {longest} and the model {config.model.source!r} was made for "
            f"{model.max_positions} positions. Nearest valid value: {model.max_positions}."
        )


def _transport(config: RollmillConfig, *, derived: Derived, shm_bytes: int | None) -> tuple[str, list[str]]:
    wanted, need = config.weights.transport, derived.shared_bytes
    fits = need is None or shm_bytes is None or need <= shm_bytes
    if fits or need is None or shm_bytes is None:
        return ("file" if wanted == "file" else "shm"), []
    kept = kept_versions(config)
    for_evaluation = ', and two for evaluation.replica "own"' if has_evaluator(config) else ""
    fewest = kept - config.weights.keep_versions + 2
    sentence = (
        f"{kept} published sets of weights (keep_versions {config.weights.keep_versions} and the one being written"
        f"{for_evaluation}) need {_gb(need)} of shared memory, {_gb(shm_bytes)} are free"
    )
    if wanted == "shm":
        raise ConfigError(
            f'weights.transport is "shm": {sentence}. Use weights.transport "file" or "auto", lower '
            f"weights.keep_versions (2 needs {_gb(need // kept * fewest)}), or give the container more shared memory."
        )
    return "file", ([f"{sentence}: weights travel through files in the run directory."] if wanted == "auto" else [])


def _total_bytes(derived: Derived, *, transport: str) -> int | None:
    if not derived.memory:
        return None
    shared = derived.shared_bytes or 0
    return sum(memory.total_bytes for memory in derived.memory) + (shared if transport == "shm" else 0)


def _refuse_memory(derived: Derived, *, total: int, memory_bytes: int, transport: str) -> None:
    if total <= memory_bytes:
        return
    parts = [(f"{memory.process} {name}", size) for memory in derived.memory for name, size in memory.parts.items()]
    if transport == "shm" and derived.shared_bytes:
        parts.append(("published weights in shared memory", derived.shared_bytes))
    largest = sorted(parts, key=lambda part: -part[1])[:3]
    listed = ", ".join(f"{name} {_gb(size)}" for name, size in largest)
    raise ConfigError(
        f"the run needs about {_gb(total)} and {_gb(memory_bytes)} are available: {_gb(total - memory_bytes)} too "
        f"much. Largest parts: {listed}. {_remedies([name for name, _ in largest])}"
    )


def _remedies(names: list[str]) -> str:
    moves = {
        "kv": "lower generator.max_num_seqs or generator.max_model_len",
        "logits": "lower trainer.micro_batch_tokens or generator.max_num_seqs",
        "activations": "lower trainer.micro_batch_tokens",
        "memory": 'set weights.transport to "file" or lower weights.keep_versions',
        "reference": "set algorithm.kl_coefficient to 0",
        "spare_weights": "set generator.stage_weights to false",
        "draft_weights": "take a smaller generator.draft_model, or none",
    }
    found = [move for part, move in moves.items() if any(name.split()[-1] == part for name in names)]
    return f"Next: {'; or '.join([*found, 'take a smaller model'])}."


def _memory_lines(plan: Plan) -> list[str]:
    if plan.memory_bytes is None:
        return ["memory     unknown: the model is not prepared yet (`rollmill model prepare`)"]
    lines = [_memory_line(memory) for memory in plan.derived.memory if len(memory.parts) > 1]
    shared = plan.shared_bytes or 0
    room = "" if plan.machine_shared_bytes is None else f" of {_gb(plan.machine_shared_bytes)}"
    place = f"shared memory{room}" if plan.transport == "shm" else "files in the run directory"
    lines.append(f"weights    {_gb(shared)} in {place}")
    available = "" if plan.machine_memory_bytes is None else f" of {_gb(plan.machine_memory_bytes)} available"
    lines.append(f"memory     about {_gb(plan.memory_bytes)}{available}, {plan.cores} cores")
    return lines


def _memory_line(memory: Memory) -> str:
    parts = ", ".join(f"{name} {_gb(size)}" for name, size in memory.parts.items())
    return f"{memory.process:<12} {_gb(memory.total_bytes)} = {parts}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
