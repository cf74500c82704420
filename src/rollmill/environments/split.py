"""Problems, their identity by content, and the split into training and held-out side.

Pure. A problem is what the policy reads: its family and its question (without whitespace, which some families vary at
random). The side is a function of that content alone, never of an index or a seed, so one problem cannot be on both
sides, whatever is drawn how often. It does not generate problems and does not score them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import msgspec

from rollmill.errors import DataError


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One generated problem.

    Attributes:
        key: sha256 of family and question; decides the side and is unique in a pool.
        task_id: readable identity over family, question and answer.
        mix: which entry of `environment.tasks` drew it.
        draw: number of the draw within that entry.
        answer: the generator's own answer, or `None` where the family has none.
    """

    key: str
    task_id: str
    family: str
    question: str
    answer: str | None
    mix: int
    draw: int


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Both sides; `spare` problems hash to the held-out side but are not needed and stay unused."""

    training: tuple[Problem, ...]
    heldout: tuple[Problem, ...]
    spare: int


def make_problem(
    *, family: str, question: str, answer: str | None, mix: int = 0, draw: int = 0, essence: str | None = None
) -> Problem:
    """Return the problem with its identity.

    Args:
        essence: what is asked, without the wording around it, where the family says so: two phrasings of one
            expression are one problem.

    Example:
        >>> a = make_problem(family="sums", question="1 +2?", answer="3")
        >>> b = make_problem(family="sums", question="1 + 2?", answer="3", draw=7)
        >>> a.key == b.key
        True
    """
    content = "".join((question if essence is None else essence).split())
    key = hashlib.sha256(f"{family}\x1f{content}".encode()).hexdigest()
    identity = hashlib.sha256(f"{key}\x1f{answer}".encode()).hexdigest()
    return Problem(
        key=key,
        task_id=f"{family}-{identity[:24]}",
        family=family,
        question=question,
        answer=answer,
        mix=mix,
        draw=draw,
    )


def hash_fraction(key: str) -> float:
    """Return the key as a number in [0, 1), uniform over contents."""
    return (int(key[:16], 16) >> 11) / 2**53


def distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Return the first problem of each content, in order of content hash."""
    first: dict[str, Problem] = {}
    for problem in problems:
        first.setdefault(problem.key, problem)
    return [first[key] for key in sorted(first)]


def split_problems(problems: Iterable[Problem], *, heldout_size: int, heldout_fraction: float) -> Split:
    """Partition problems by content.

    The held-out side is every problem whose hash fraction is below `heldout_fraction`; the held-out list is the
    `heldout_size` smallest hashes, so it depends on the pool alone.

    Raises:
        DataError: if there are too few held-out problems or no training problem is left.
    """
    pool = distinct(problems)
    side = [problem for problem in pool if hash_fraction(problem.key) < heldout_fraction]
    if len(side) < heldout_size:
        raise DataError(_too_few(pool, side=len(side), heldout_size=heldout_size, heldout_fraction=heldout_fraction))
    training = tuple(pool[len(side) :])
    if not training:
        raise DataError(
            f"all {len(pool)} distinct problems are on the held-out side (heldout_fraction {heldout_fraction:g}), none "
            "is left for training. Lower environment.heldout_fraction or raise environment.pool_size."
        )
    heldout = tuple(side[:heldout_size])
    check_disjoint(training, heldout)
    return Split(training=training, heldout=heldout, spare=len(side) - heldout_size)


def generated_draws(problems: Iterable[Problem], *, training: Sequence[Problem]) -> tuple[Problem, ...]:
    """Return every draw of the training side, duplicates included, in the generator's order.

    Args:
        problems: all draws of the pool.
        training: the distinct training problems; each stands for all draws of its content.
    """
    by_key = {problem.key: problem for problem in training}
    return tuple(by_key[problem.key] for problem in problems if problem.key in by_key)


def check_disjoint(training: Sequence[Problem], heldout: Sequence[Problem]) -> None:
    """Check that no content is on both sides and that the held-out problems are distinct.

    Raises:
        DataError: naming one problem that is.
    """
    seen = {problem.key for problem in training}
    for problem in heldout:
        if problem.key in seen:
            raise DataError(
                f"problem {problem.task_id} ({problem.question[:80]!r}) is in the held-out list and was seen before, "
                "in training or twice in the list; evaluation would measure memory. Split by content "
                "(rollmill.environments.split)."
            )
        seen.add(problem.key)


def _too_few(pool: Sequence[Problem], *, side: int, heldout_size: int, heldout_fraction: float) -> str:
    head = (
        f"{side} distinct held-out problems, {heldout_size} wanted: the pool has {len(pool)} distinct problems and "
        f"heldout_fraction is {heldout_fraction:g}."
    )
    if len(pool) <= heldout_size:
        return (
            f"{head} No fraction is enough: lower environment.heldout_size below {len(pool)}, raise "
            "environment.pool_size, or use options that allow more problems."
        )
    # The fraction just above the last wanted hash is the smallest that works, rounded up to what a person types.
    fraction = math.ceil(hash_fraction(pool[heldout_size - 1].key) * 1000 + 1e-9) / 1000
    remedies = [f"environment.heldout_size to {side} or less"] if side else []
    if fraction < hash_fraction(pool[-1].key):
        remedies.insert(0, f"environment.heldout_fraction to {fraction:g} or more")
    if side:
        remedies.append(
            f"environment.pool_size to about {math.ceil(heldout_size / side * 10) / 10:g} times its value (more, where "
            "the family repeats itself)"
        )
    return f"{head} Set {', or '.join(remedies) or 'a larger environment.pool_size'}."
