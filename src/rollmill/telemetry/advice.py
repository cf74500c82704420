"""Which setting to move next, from the numbers of a finished run. Pure.

Each rule looks at one quantity, says which setting to move in which direction, and quotes the number that speaks for
it. The largest loss comes first; two at most are shown. It promises no gain: that is the doctor's work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

MAX_ADVICE = 2

NOTABLE = 0.15
"""A share of seconds or of rollouts below this is not worth a change."""

NOTABLE_DROPS = 0.05
"""Rollouts dropped for their age are pure loss, so a smaller share counts already."""

NOTABLE_WITHOUT_SIGNAL = 0.4
"""Some groups never have a signal; a task family of medium difficulty loses about a third."""


class _Advice(msgspec.Struct, frozen=True, kw_only=True):
    weight: float
    direction: str
    setting: str
    because: str


def advise(summary: Mapping[str, Any], *, settings: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return at most two moves: `direction` (`raise`, `lower`, `change`), `setting`, `because`.

    Args:
        summary: the document without its advice.
        settings: resolved values by key, quoted where known.
    """
    rules = (_waiting_generator, _publication, _flat_accuracy, _short_run)
    found = [one for rule in rules for one in rule(summary)]
    found += [one for rule in (_waiting_trainer, _stale, _no_signal) for one in rule(summary, settings)]
    found.sort(key=lambda one: -one.weight)
    return [_shown(one, settings=settings) for one in found[:MAX_ADVICE]]


def _waiting_trainer(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[_Advice]:
    waited = _waited_share(summary)
    if waited < NOTABLE:
        return
    idle = _replica_share(summary, "idle")
    because = f"after its first batch the trainer waited for data in {waited:.0%} of its time"
    if idle >= NOTABLE and settings.get("run.deterministic"):
        return  # they take turns, which is what the mode is for
    if idle >= NOTABLE and _held_back(summary) >= NOTABLE:
        yield _Advice(
            weight=waited,
            direction="raise",
            setting="schedule.max_staleness",
            because=f"{because} while the generator idled in {idle:.0%}: the budget holds generation back",
        )
    elif idle >= NOTABLE:
        yield _Advice(
            weight=waited,
            direction="raise",
            setting="environment.scoring_workers",
            because=f"{because} while the generator idled in {idle:.0%} and the staleness budget had room: rollouts "
            "wait for their scores or their environment",
        )
    else:
        yield _Advice(
            weight=waited,
            direction="raise",
            setting="generator.max_num_seqs",
            because=f"{because} and the generator was busy: larger decode batches give more tokens per second",
        )


def _waiting_generator(summary: Mapping[str, Any]) -> Iterator[_Advice]:
    idle = _replica_share(summary, "idle")
    waited = _waited_share(summary)
    if idle >= NOTABLE and waited < NOTABLE:
        yield _Advice(
            weight=idle,
            direction="raise",
            setting="trainer.threads",
            because=f"the generator idled in {idle:.0%} of its time and the trainer waited in {waited:.0%} only; "
            "with no core to spare, fewer rollouts per step (schedule.group_size) balance it as well",
        )


def _no_signal(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[_Advice]:
    rollouts = summary["rollouts"]
    lost, trained = rollouts["dropped"].get("zero_advantage", 0), rollouts["trained"]
    share = lost / (lost + trained) if lost + trained else 0.0
    if share < NOTABLE_WITHOUT_SIGNAL:
        return
    weight = share * max(_share(summary, "trainer", "wait_data"), 0.1)
    penalised = settings.get("schedule.overlong") == "soft_penalty"
    if penalised and settings.get("algorithm.signal") == "raw_reward":
        yield _Advice(
            weight=weight,
            direction="change",
            setting="algorithm.signal",
            because=f"{share:.0%} of the finished rollouts carried no signal (all siblings equal) though the length "
            'penalty tells many of them apart: "shaped_reward" trains on those, and lets a model that talks past the '
            "cap learn to be short first",
        )
    else:
        yield _Advice(
            weight=weight,
            direction="change",
            setting="environment.tasks",
            because=f"{share:.0%} of the finished rollouts carried no signal (all siblings equal): tasks that the "
            "model solves about half of the time teach most; a larger schedule.group_size helps as well",
        )


def _stale(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[_Advice]:
    rollouts = summary["rollouts"]
    stale, admitted = rollouts["dropped"].get("stale", 0), rollouts["admitted"]
    if settings.get("schedule.group_oversampling") == 1.0:
        return  # nothing is started in excess
    if admitted and stale / admitted >= NOTABLE_DROPS:
        yield _Advice(
            weight=2 * stale / admitted,
            direction="lower",
            setting="schedule.group_oversampling",
            because=f"{stale} of {admitted} rollouts grew older than the budget of {summary['staleness']['budget']} "
            "steps and were dropped",
        )


def _publication(summary: Mapping[str, Any]) -> Iterator[_Advice]:
    loading = _replica_share(summary, "weight_load") + _replica_share(summary, "paused")
    if loading >= NOTABLE:
        yield _Advice(
            weight=loading,
            direction="raise",
            setting="schedule.batch_groups",
            because=f"replicas spent {loading:.0%} of their time loading weights: larger steps publish less often",
        )


def _flat_accuracy(summary: Mapping[str, Any]) -> Iterator[_Advice]:
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    if before is None or after is None or after["low"] > before["accuracy"]:
        return
    yield _Advice(
        weight=0.5,
        direction="raise",
        setting="run.steps",
        because=f"accuracy after training ({after['accuracy']:.3f}, interval from {after['low']:.3f}) is not clearly "
        f"above the {before['accuracy']:.3f} before; more steps or a larger trainer.learning_rate move it further",
    )


def _short_run(summary: Mapping[str, Any]) -> Iterator[_Advice]:
    startup = _share(summary, "trainer", "startup")
    if startup >= 0.3:
        yield _Advice(
            weight=startup / 2,
            direction="raise",
            setting="run.steps",
            because=f"{startup:.0%} of the trainer's time was start-up: a longer run pays it once",
        )


def _shown(one: _Advice, *, settings: Mapping[str, Any]) -> dict[str, str]:
    now = f" (now {settings[one.setting]})" if isinstance(settings.get(one.setting), int | float | str) else ""
    return {"direction": one.direction, "setting": one.setting, "because": one.because + now}


def _share(summary: Mapping[str, Any], owner: str, cause: str) -> float:
    causes = summary["seconds"].get(owner)
    return causes.get(cause, 0.0) / causes["wall_s"] if causes and causes["wall_s"] > 0 else 0.0


def _held_back(summary: Mapping[str, Any]) -> float:
    """Return the share of the run in which the staleness budget or a load of weights bounded it."""
    seconds = summary.get("bound_seconds", {})
    total = sum(seconds.values())
    return (seconds.get("admission", 0.0) + seconds.get("weights", 0.0)) / total if total > 0 else 0.0


def _waited_share(summary: Mapping[str, Any]) -> float:
    """Return the trainer's share of waiting without that for its first batch, which no setting removes."""
    causes = summary["seconds"].get("trainer")
    if not causes or causes["wall_s"] <= 0:
        return 0.0
    first_s = summary.get("bound_seconds", {}).get("start", 0.0)
    return max(0.0, causes.get("wait_data", 0.0) - first_s) / causes["wall_s"]


def _replica_share(summary: Mapping[str, Any], cause: str) -> float:
    owners = [owner for owner in summary["seconds"] if owner.startswith("generator")]
    return sum(_share(summary, owner, cause) for owner in owners) / len(owners) if owners else 0.0
