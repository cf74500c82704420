"""The queue of callers: resumes before starts, and first come, first served among equals. Pure.

A caller that has to come back, because what it was given was dead or its start failed, has its old place again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from rollmill.sandboxes.admission.records import Kind, Needs, Waiting
from rollmill.sandboxes.records import SandboxSpec


class Ask:
    """One caller that wants a sandbox.

    Attributes:
        number: rises with each caller; the order of the queue.
        kind: resumes go first.
        spec: what it wants.
        needs: what that takes.
        sandbox_id: the id it wants for a fresh one, empty for the pool's choice.
        poolable: it takes a ready one.
        thaws: the suspended sandbox that it wants to resume, or empty.
        arrived_s: when it came.
        expires_s: its deadline.
        tries: starts for it that failed.
        names: ids used for it.
        waiting: what it waits for.
    """

    __slots__ = (
        "arrived_s",
        "expires_s",
        "kind",
        "names",
        "needs",
        "number",
        "poolable",
        "sandbox_id",
        "spec",
        "thaws",
        "tries",
        "waiting",
    )

    def __init__(
        self,
        number: int,
        *,
        kind: Kind,
        spec: SandboxSpec,
        needs: Needs,
        sandbox_id: str,
        poolable: bool,
        thaws: str,
        arrived_s: float,
        expires_s: float,
    ) -> None:
        self.number, self.kind, self.spec, self.needs = number, kind, spec, needs
        self.sandbox_id, self.poolable, self.thaws = sandbox_id, poolable, thaws
        self.arrived_s, self.expires_s = arrived_s, expires_s
        self.tries = self.names = 0
        self.waiting = Waiting.TURN


class AskQueue:
    """Those who wait for their turn."""

    def __init__(self) -> None:
        self._lines: dict[Kind, dict[int, Ask]] = {kind: {} for kind in sorted(Kind)}
        self._last = dict.fromkeys(Kind, -1)

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Ask]:
        for line in self._lines.values():
            yield from line.values()

    def __contains__(self, ask: Ask) -> bool:
        return ask.number in self._lines[ask.kind]

    def put(self, ask: Ask) -> None:
        """Let somebody wait, in the place of its number."""
        line = self._lines[ask.kind]
        line[ask.number] = ask
        if ask.number < self._last[ask.kind]:
            self._lines[ask.kind] = dict(sorted(line.items()))
        self._last[ask.kind] = max(self._last[ask.kind], ask.number)

    def remove(self, ask: Ask) -> None:
        """Take somebody out, if it waits."""
        self._lines[ask.kind].pop(ask.number, None)

    def nth(self, index: int) -> Ask | None:
        """Return who is at a place, counted from 0."""
        return next(itertools.islice(self, index, None), None)

    def first_for(self, spec: SandboxSpec) -> Ask | None:
        """Return the first that takes a ready sandbox of this template."""
        return next((ask for ask in self if ask.poolable and ask.spec == spec), None)

    def position(self, ask: Ask) -> int:
        """Return how many are before it, and itself."""
        return next((place for place, one in enumerate(self, start=1) if one is ask), 0)
