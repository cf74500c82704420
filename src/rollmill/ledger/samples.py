"""The book of rollouts: admitted = in flight + suspended + buffered + trained + dropped(reason).

It records moves and refuses illegal ones; it decides none. An entry is a *member*: one sibling of one group,
named `<group>/<sibling>`. A member that is dispatched again keeps its entry; the further attempts are counted
apart. `in_flight` covers a member that runs and one that waits for its siblings.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

from rollmill.errors import InvariantViolation


class RolloutState(enum.Enum):
    """Where an admitted rollout is."""

    IN_FLIGHT = "in_flight"
    SUSPENDED = "suspended"
    BUFFERED = "buffered"
    TRAINED = "trained"
    DROPPED = "dropped"


class RolloutLedger:
    """Counts every admitted rollout in exactly one state.

    Every move costs O(1) and keeps the counts, so that `validate` is O(1) too; `recount` rebuilds them from the
    entries and is for tests.

    Example:
        >>> book = RolloutLedger()
        >>> book.admit("g000000/0")
        >>> book.buffer("g000000/0")
        >>> book.train("g000000/0")
        >>> book.counts()["trained"], book.admitted
        (1, 1)
    """

    def __init__(self) -> None:
        self._entries: dict[str, RolloutState] = {}
        self._reason_of: dict[str, str] = {}
        self._counts: dict[RolloutState, int] = dict.fromkeys(RolloutState, 0)
        self._dropped: dict[str, int] = {}
        self._admitted = 0
        self._redispatched: dict[str, int] = {}
        self._late_results = 0

    @property
    def admitted(self) -> int:
        """Rollouts ever admitted."""
        return self._admitted

    @property
    def late_results(self) -> int:
        """Results that came for an attempt nobody waited for any more."""
        return self._late_results

    @property
    def dropped_by_reason(self) -> Mapping[str, int]:
        """Dropped rollouts by reason."""
        return MappingProxyType(self._dropped)

    @property
    def redispatched_by_reason(self) -> Mapping[str, int]:
        """Further attempts of members by what ended the attempt before."""
        return MappingProxyType(self._redispatched)

    def count(self, state: RolloutState) -> int:
        """Return how many rollouts are in this state."""
        return self._counts[state]

    def counts(self) -> dict[str, int]:
        """Return state name -> rollouts."""
        return {state.value: n for state, n in self._counts.items()}

    def state_of(self, member_id: str) -> RolloutState | None:
        """Return the state of a member, or `None` if it was never admitted."""
        return self._entries.get(member_id)

    def reason_of(self, member_id: str) -> str | None:
        """Return why a member was dropped, or `None` if it was not."""
        return self._reason_of.get(member_id)

    def admit(self, member_id: str) -> None:
        """Open an entry, in flight.

        Raises:
            InvariantViolation: if the member was admitted before.
        """
        if member_id in self._entries:
            raise InvariantViolation(
                f"rollout {member_id} was admitted twice (it is {self._entries[member_id].value}); "
                "ids must not repeat. This is a bug of the scheduling core."
            )
        self._entries[member_id] = RolloutState.IN_FLIGHT
        self._counts[RolloutState.IN_FLIGHT] += 1
        self._admitted += 1

    def suspend(self, member_id: str) -> None:
        """In flight -> suspended."""
        self._move(member_id, RolloutState.SUSPENDED, allowed=(RolloutState.IN_FLIGHT,))

    def resume(self, member_id: str) -> None:
        """Suspended -> in flight."""
        self._move(member_id, RolloutState.IN_FLIGHT, allowed=(RolloutState.SUSPENDED,))

    def buffer(self, member_id: str) -> None:
        """In flight -> buffered: its group closed and is durable."""
        self._move(member_id, RolloutState.BUFFERED, allowed=(RolloutState.IN_FLIGHT,))

    def train(self, member_id: str) -> None:
        """Buffered -> trained: the optimizer update with it is committed."""
        self._move(member_id, RolloutState.TRAINED, allowed=(RolloutState.BUFFERED,))

    def restore(self, member_id: str) -> None:
        """Trained -> buffered: legal on resume only, when the surviving history never trained it."""
        self._move(member_id, RolloutState.BUFFERED, allowed=(RolloutState.TRAINED,))

    def drop(self, member_id: str, *, reason: str) -> None:
        """In flight, suspended or buffered -> dropped(reason)."""
        live = (RolloutState.IN_FLIGHT, RolloutState.SUSPENDED, RolloutState.BUFFERED)
        self._move(member_id, RolloutState.DROPPED, allowed=live)
        self._reason_of[member_id] = reason
        self._dropped[reason] = self._dropped.get(reason, 0) + 1

    def redispatched(self, *, reason: str) -> None:
        """Count a further attempt of a member; the entry stays."""
        self._redispatched[reason] = self._redispatched.get(reason, 0) + 1

    def late_result(self) -> None:
        """Count a result that nobody waited for any more."""
        self._late_results += 1

    def validate(self) -> None:
        """Check that the books balance, in O(1).

        Raises:
            InvariantViolation: if they do not, with both sums.
        """
        total = sum(self._counts.values())
        if total != self._admitted:
            raise InvariantViolation(
                f"rollouts admitted {self._admitted}, accounted for {total} ({self.counts()}). "
                "A move changed one count and not the other; this is a bug of the ledger."
            )
        dropped = sum(self._dropped.values())
        if dropped != self._counts[RolloutState.DROPPED]:
            raise InvariantViolation(
                f"rollouts dropped {self._counts[RolloutState.DROPPED]}, by reason {dropped} ({self._dropped}). "
                "A drop went without a reason; this is a bug of the ledger."
            )
        if min(self._counts.values()) < 0:
            raise InvariantViolation(f"a count of rollouts is negative: {self.counts()}; this is a bug of the ledger.")

    def recount(self) -> None:
        """Count all entries anew and compare; O(entries), for tests.

        Raises:
            InvariantViolation: if a kept count differs from the counted one.
        """
        counted = dict.fromkeys(RolloutState, 0)
        for state in self._entries.values():
            counted[state] += 1
        reasons: dict[str, int] = {}
        for reason in self._reason_of.values():
            reasons[reason] = reasons.get(reason, 0) + 1
        if counted != self._counts or reasons != self._dropped or len(self._entries) != self._admitted:
            raise InvariantViolation(
                f"kept counts {self.counts()} and reasons {self._dropped} differ from the entries: "
                f"{ {state.value: n for state, n in counted.items()} } and {reasons}; this is a bug of the ledger."
            )

    def _move(self, member_id: str, to: RolloutState, *, allowed: tuple[RolloutState, ...]) -> None:
        at = self._entries.get(member_id)
        if at is None or at not in allowed:
            where = "was never admitted" if at is None else f"is {at.value}"
            raise InvariantViolation(
                f"rollout {member_id} cannot become {to.value}: it {where}, and only "
                f"{' or '.join(state.value for state in allowed)} may. This is a bug of the scheduling core."
            )
        self._entries[member_id] = to
        self._counts[at] -= 1
        self._counts[to] += 1
