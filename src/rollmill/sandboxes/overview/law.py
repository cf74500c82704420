"""From what was found of a backend to whether it works here, why, and what to do. Pure.

A backend works only if a sandbox of it started and ran a program. One that has everything it needs and was not tried,
because that would pull images or cost money, is ready and not more.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from rollmill.sandboxes.doctor import Finding
from rollmill.sandboxes.isolation import IsolationLevel
from rollmill.sandboxes.records import Record


class Standing(enum.Enum):
    """How a backend stands on this machine."""

    WORKS = "works"
    """A sandbox of it ran a program just now."""
    READY = "ready, not tried"
    """All that it needs is here."""
    MISSING = "something is missing"
    """It cannot work before that is there."""
    FAILS = "does not work"
    """It was tried, and failed."""
    UNKNOWN = "not known"
    """It could not be tried to the end."""


class Need(Record, frozen=True, kw_only=True):
    """One thing that a backend needs.

    Attributes:
        what: in words, as it is found here or not.
        here: whether it is.
        remedy: how to get it.
    """

    what: str
    here: bool
    remedy: str = ""


class Trial(Record, frozen=True, kw_only=True):
    """How it went to make a sandbox and run a program in it.

    Attributes:
        works: whether the program ran.
        problem: what went wrong, if it did not.
        unknown: why it could not be tried to the end; empty if it was.
        isolation: name of the level reached.
        findings: every protection that the backend knows.
    """

    works: bool = False
    problem: str = ""
    unknown: str = ""
    isolation: str = ""
    findings: tuple[Finding, ...] = ()


class Facts(Record, frozen=True, kw_only=True):
    """What was found of a backend.

    Attributes:
        name: of the backend, with its kind where it has several.
        needs: all that it takes.
        trial: how making a sandbox went; `None` if that was not tried.
        untried: why it was not.
    """

    name: str
    needs: tuple[Need, ...] = ()
    trial: Trial | None = None
    untried: str = ""


class Verdict(Record, frozen=True, kw_only=True):
    """How a backend stands.

    Attributes:
        name: of the backend.
        standing: in a word.
        why: in a sentence.
        todo: what to install, set or do, in this order; empty if nothing.
        isolation: name of the level that was reached; empty if no sandbox ran.
        findings: its protections, if a sandbox ran.
    """

    name: str
    standing: Standing
    why: str
    todo: tuple[str, ...] = ()
    isolation: str = ""
    findings: tuple[Finding, ...] = ()


class Overview(Record, frozen=True, kw_only=True):
    """All backends.

    Attributes:
        backends: one after the other, as they were given.
        strongest: the working one that isolates most, the earlier of equal ones; empty if none works.
        summary: the same in a sentence.
    """

    backends: tuple[Verdict, ...]
    strongest: str
    summary: str


def judge(facts: Facts) -> Verdict:
    """Return how a backend stands.

    Example:
        >>> judge(Facts(name="x", needs=(Need(what="the program x", here=False, remedy="install x"),))).todo
        ('install x',)
    """
    lacking = [need for need in facts.needs if not need.here]
    if lacking:
        return Verdict(
            name=facts.name,
            standing=Standing.MISSING,
            why="missing: " + "; ".join(need.what for need in lacking),
            todo=tuple(need.remedy for need in lacking if need.remedy),
        )
    trial = facts.trial
    if trial is None:
        return Verdict(name=facts.name, standing=Standing.READY, why=facts.untried or "it was not tried")
    if trial.unknown:
        return Verdict(name=facts.name, standing=Standing.UNKNOWN, why=trial.unknown)
    if not trial.works:
        return Verdict(name=facts.name, standing=Standing.FAILS, why=trial.problem)
    absent = [one for one in trial.findings if not one.holds]
    return Verdict(
        name=facts.name,
        standing=Standing.WORKS,
        why=_protected(trial.findings, absent),
        todo=tuple(f"for {one.name}: {one.remedy}" for one in absent),
        isolation=trial.isolation,
        findings=trial.findings,
    )


def _protected(findings: Sequence[Finding], absent: Sequence[Finding]) -> str:
    held = f"a sandbox ran a program; {len(findings) - len(absent)} of {len(findings)} protections hold"
    return held + (f", without: {', '.join(one.name for one in absent)}" if absent else "")


def summed_up(verdicts: Sequence[Verdict]) -> Overview:
    """Return all of them, and which working one isolates most."""
    working = [one for one in verdicts if one.standing is Standing.WORKS]
    best = max(working, key=lambda one: IsolationLevel[one.isolation.upper()], default=None)
    if best is None:
        words = "no backend that was tried works on this machine; each says above what it lacks"
    else:
        names = ", ".join(one.name for one in working)
        words = f"working here: {names}; the strongest is {best.name}, at isolation level {best.isolation}"
    ready = [one.name for one in verdicts if one.standing is Standing.READY]
    if ready:
        words += f"; ready but not tried: {', '.join(ready)}"
    return Overview(backends=tuple(verdicts), strongest="" if best is None else best.name, summary=words)
