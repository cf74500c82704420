"""Faults at chosen calls: raise, delay or hang.

A plan says what happens at call number n of an operation; it is scripted, or drawn from a seed so that the decision
depends on (seed, operation, n) alone and not on the order in which tasks happen to run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from rollmill.types import derive_seed


class Raise(msgspec.Struct, frozen=True):
    """The call raises what `make` returns."""

    make: Callable[[], Exception]


class Delay(msgspec.Struct, frozen=True):
    """The call goes on after `seconds` of the loop's time."""

    seconds: float


class Hang(msgspec.Struct, frozen=True):
    """The call never goes on; only cancellation ends it."""


FaultAction = Raise | Delay | Hang
Plan = Callable[[str, int], FaultAction | None]


class FaultInjector:
    """Counts calls per operation and acts out a plan.

    Args:
        plan: (operation, call) -> action, calls counted from 1; or a table of the same.

    Example:
        >>> from rollmill.errors import EngineDead
        >>> faults = FaultInjector({("generate", 2): Raise(lambda: EngineDead("gone"))})
        >>> faults.strike("generate")
        >>> faults.strike("generate")
        Traceback (most recent call last):
        ...
        rollmill.errors.EngineDead: gone
        >>> faults.calls("generate"), faults.fired
        (2, (('generate', 2),))
    """

    def __init__(self, plan: Plan | Mapping[tuple[str, int], FaultAction]) -> None:
        if isinstance(plan, Mapping):
            table = dict(plan)
            self._plan: Plan = lambda operation, call: table.get((operation, call))
        else:
            self._plan = plan
        self._calls: dict[str, int] = {}
        self._fired: list[tuple[str, int]] = []

    @classmethod
    def seeded(cls, seed: int, *, rates: Mapping[str, float], action: FaultAction) -> FaultInjector:
        """Return an injector that strikes each call of an operation with the operation's rate.

        Args:
            seed: of the whole plan.
            rates: operation -> probability per call; others never fail.
            action: what happens.
        """

        def plan(operation: str, call: int) -> FaultAction | None:
            draw = derive_seed("fault", seed, operation, call) / 2**63
            return action if draw < rates.get(operation, 0.0) else None

        return cls(plan)

    @property
    def fired(self) -> tuple[tuple[str, int], ...]:
        """Operations and calls that were struck, in order."""
        return tuple(self._fired)

    def calls(self, operation: str) -> int:
        """Return how often the operation was called."""
        return self._calls.get(operation, 0)

    async def reach(self, operation: str) -> None:
        """Count a call and act.

        Raises:
            Exception: what the plan says.

        Cancellation:
            ends a delay or a hang; the call stays counted.
        """
        match self._next(operation):
            case Raise(make=make):
                raise make()
            case Delay(seconds=seconds):
                await asyncio.sleep(seconds)
            case Hang():
                await asyncio.get_running_loop().create_future()
            case None:
                pass

    def strike(self, operation: str) -> None:
        """Count a call that does not wait, and act.

        Raises:
            ValueError: if the plan says to delay or hang: a plain function cannot.
            Exception: what the plan says.
        """
        action = self._next(operation)
        if isinstance(action, Raise):
            raise action.make()
        if action is not None:
            raise ValueError(f"{operation!r} is a plain function and cannot {type(action).__name__.lower()}")

    def _next(self, operation: str) -> FaultAction | None:
        call = self._calls[operation] = self.calls(operation) + 1
        action = self._plan(operation, call)
        if action is not None:
            self._fired.append((operation, call))
        return action
