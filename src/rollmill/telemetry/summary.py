"""How a run ended: `summary.json`, a documented and stable interface, and its text for a person.

Pure. Builds the document from numbers that others measured, checks that both books balance (rollouts, seconds), and
says in plain words what to try next. Keys may be added; the ones documented in the reference do not change within one
`schema_version`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmill.errors import InvariantViolation
from rollmill.telemetry.advice import advise
from rollmill.telemetry.bound import bound_line
from rollmill.telemetry.shares import shares

SCHEMA_VERSION = 1

STATES = ("in_flight", "suspended", "buffered", "trained")

SECONDS_TOLERANCE_S = 0.05
"""Clock reads of two processes and rounding; a cause that was forgotten is larger than this."""

SECONDS_TOLERANCE_SHARE = 0.001

REASONS = {
    "steps_done": "all steps are done",
    "end_of_data": "the data is used up",
    "stopped": "it was stopped",
    "failed": "it failed",
    "degraded": "the last replica of the generator was lost and what was buffered is trained",
}


def build_summary(
    *,
    run: str,
    reason: str,
    steps: int,
    wall_s: float,
    cpu_s: float,
    eval_before: Mapping[str, Any] | None,
    eval_after: Mapping[str, Any] | None,
    rollouts: Mapping[str, Any],
    seconds: Mapping[str, Mapping[str, float]],
    seconds_wall_s: Mapping[str, float],
    staleness_mean: float | None,
    staleness_max: int | None,
    staleness_budget: int,
    useful_tokens: int,
    peak_memory_bytes: int,
    bound_by: str,
    bound_seconds: Mapping[str, float] | None = None,
    resume: str | None = None,
    settings: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the document; `books` lists what does not balance and is empty in a sound run.

    Args:
        run: path of the run directory.
        reason: `steps_done`, `end_of_data`, `stopped` or `failed`.
        steps: optimizer steps committed.
        wall_s: from start to end, over all incarnations.
        cpu_s: CPU seconds of all processes.
        eval_before, eval_after: `accuracy`, `low`, `high`, `n` (see `rollmill.telemetry.interval`), and
            `policy_version` or `policy_versions`, of which the newest is taken; further keys are kept. `None` where
            no evaluation was made.
        rollouts: `admitted`, `in_flight`, `suspended`, `buffered`, `trained` and `dropped` ({reason: count}).
        seconds: owner (`trainer`, `generator-0`) -> cause -> seconds.
        seconds_wall_s: owner -> wall seconds that its causes must sum to.
        staleness_mean, staleness_max: over trained groups, in optimizer steps; `None` if nothing was trained.
        staleness_budget: `schedule.max_staleness`.
        useful_tokens: output tokens in the loss of all trained samples.
        peak_memory_bytes: largest sum of PSS over all processes.
        bound_by: what bounded the run for most of its time.
        bound_seconds: bound -> seconds.
        resume: command that goes on with the run; `None` where there is nothing to go on with.
        settings: resolved values by key that the advice may quote, for example `{"generator.max_num_seqs": 48}`.
        extra: further keys for the document; they may not repeat one.

    Raises:
        InvariantViolation: if `extra` repeats a key.
    """
    summary: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "run": run,
        "reason": reason,
        "resume": resume,
        "eval": {"before": _evaluation(eval_before), "after": _evaluation(eval_after)},
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "steps": steps,
        "rollouts": _rollouts(rollouts),
        "seconds": {
            owner: {**causes, "sum_s": sum(causes.values()), "wall_s": seconds_wall_s.get(owner, 0.0)}
            for owner, causes in seconds.items()
        },
        "staleness": {"mean": staleness_mean, "max": staleness_max, "budget": staleness_budget},
        "useful_tokens": useful_tokens,
        "useful_tokens_per_s": useful_tokens / wall_s if wall_s > 0 else 0.0,
        "peak_memory_bytes": peak_memory_bytes,
        "bound_by": bound_by,
        "bound_seconds": dict(bound_seconds or {}),
    }
    repeated = sorted(set(summary) & set(extra or {}))
    if repeated:
        raise InvariantViolation(f"the summary has these keys already: {', '.join(repeated)}")
    summary.update(extra or {})
    summary["books"] = unbalanced(summary)
    summary["advice"] = advise(summary, settings=settings or {})
    return summary


def unbalanced(summary: Mapping[str, Any]) -> list[str]:
    """Return a sentence with both numbers for each book that does not balance; none in a sound run."""
    problems: list[str] = []
    rollouts = summary["rollouts"]
    states = {name: rollouts[name] for name in STATES}
    dropped = sum(rollouts["dropped"].values())
    accounted = sum(states.values()) + dropped
    if accounted != rollouts["admitted"]:
        listed = " + ".join(f"{name} {count}" for name, count in states.items())
        problems.append(f"rollouts: admitted {rollouts['admitted']}, but {listed} + dropped {dropped} = {accounted}")
    for owner, causes in summary["seconds"].items():
        total, wall = causes["sum_s"], causes["wall_s"]
        if abs(total - wall) > SECONDS_TOLERANCE_S + SECONDS_TOLERANCE_SHARE * wall:
            problems.append(f"seconds of {owner}: causes sum to {total:.3f} s, wall time is {wall:.3f} s")
    staleness = summary["staleness"]
    if staleness["max"] is not None and staleness["max"] > staleness["budget"]:
        problems.append(f"staleness: max {staleness['max']} is above the budget {staleness['budget']}")
    return problems


def check_books(summary: Mapping[str, Any]) -> None:
    """Refuse a summary whose books do not balance.

    Raises:
        InvariantViolation: with both numbers of each book.
    """
    problems = unbalanced(summary)
    if problems:
        raise InvariantViolation(
            f"the books do not balance: {'; '.join(problems)}. This is a bug of Rollmill; the run directory holds the "
            "journal that shows where."
        )


def render_summary(summary: Mapping[str, Any]) -> str:
    """Return the summary as text for a person to act on."""
    lines = [_headline(summary), "", _accuracy_line(summary["eval"]), _rollouts_line(summary["rollouts"])]
    staleness = summary["staleness"]
    if staleness["max"] is not None:
        lines.append(
            f"staleness   mean {staleness['mean']:.2f}, max {staleness['max']}, budget {staleness['budget']} steps"
        )
    lines.append(
        f"speed       {summary['useful_tokens_per_s']:.1f} useful tokens/s; peak memory "
        f"{summary['peak_memory_bytes'] / 1e9:.2f} GB"
    )
    lines += ["", "where the seconds went"]
    lines += [_seconds_line(owner, causes) for owner, causes in summary["seconds"].items()]
    lines += _restart_lines(summary)
    lines += ["", bound_line(summary["bound_by"], summary.get("bound_seconds", {}))]
    lines += [f"repaired: {repair}" for repair in summary.get("repairs", ())]
    lines += [f"problem: {problem}" for problem in summary["books"]]
    if summary["advice"]:
        lines.append("Try next:")
        lines += [f"  {one['direction']} {one['setting']}: {one['because']}" for one in summary["advice"]]
    if summary["resume"]:
        lines += ["", f"Go on with: {summary['resume']}"]
    return "\n".join(lines) + "\n"


def duration(seconds: float) -> str:
    """Return a duration for reading.

    Example:
        >>> duration(42.4), duration(252), duration(7260)
        ('42 s', '4 min 12 s', '2 h 01 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _headline(summary: Mapping[str, Any]) -> str:
    reason = REASONS.get(summary["reason"], summary["reason"])
    return (
        f"{summary['run']}: {summary['steps']} steps in {duration(summary['wall_s'])} "
        f"({duration(summary['cpu_s'])} of CPU time); it ended because {reason}."
    )


def _accuracy_line(evaluations: Mapping[str, Any]) -> str:
    before, after = evaluations["before"], evaluations["after"]
    known = after or before
    if known is None:
        return "accuracy    not evaluated"
    shown = " -> ".join("not evaluated" if one is None else _interval(one) for one in (before, after))
    return f"accuracy    {shown} on {known['n']} held-out problems (95 % interval)"


def _interval(entry: Mapping[str, Any]) -> str:
    return f"{entry['accuracy']:.3f} [{entry['low']:.3f}, {entry['high']:.3f}]"


def _rollouts_line(rollouts: Mapping[str, Any]) -> str:
    dropped = {reason: count for reason, count in rollouts["dropped"].items() if count}
    listed = ", ".join(f"{reason} {count}" for reason, count in sorted(dropped.items(), key=lambda item: -item[1]))
    states = " + ".join(f"{rollouts[name]} {name.replace('_', ' ')}" for name in reversed(STATES))
    tail = f" ({listed})" if listed else ""
    return f"rollouts    {rollouts['admitted']} admitted = {states} + {sum(dropped.values())} dropped{tail}"


def _seconds_line(owner: str, causes: Mapping[str, float]) -> str:
    wall = causes["wall_s"]
    seconds = {name: value for name, value in causes.items() if name not in ("sum_s", "wall_s")}
    return f"  {owner:<12} {wall:8.1f} s: {shares(seconds, total_s=wall) if wall > 0 else 'nothing'}"


def _restart_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return a line per process that was lost, and one for steps trained without a replica."""
    lines = [
        f"restarts    {process} was lost {entry['losses']} times and restarted {entry['restarts']} times: "
        f"{entry['down_s'] + entry['startup_s']:.1f} s until it was back, {entry['lost_s']:.1f} s of work in no book; "
        f"last: {entry['causes'][-1]}"
        for process, entry in summary.get("restarts", {}).items()
    ]
    if summary.get("degraded_steps"):
        lines.append(f"degraded    {summary['degraded_steps']} steps were trained while a replica was missing")
    return ["", *lines] if lines else []


def _rollouts(rollouts: Mapping[str, Any]) -> dict[str, Any]:
    counts = {name: int(rollouts[name]) for name in ("admitted", *STATES)}
    return {**counts, "dropped": {str(reason): int(count) for reason, count in rollouts["dropped"].items()}}


def _evaluation(entry: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    versions = entry.get("policy_versions", ())
    newest = {"policy_version": max(versions)} if versions else {}
    return {**newest, **entry}
