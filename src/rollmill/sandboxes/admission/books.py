"""Who holds how much of which budget. Pure.

A sandbox keeps its place until it is gone, not until its end was ordered: a provider's own count lags in the same way.
One that is being killed has left the starting cap, because it no longer slows other starts.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollmill.errors import InvariantViolation
from rollmill.sandboxes.admission.records import Needs, Place, Waiting
from rollmill.sandboxes.admission.settings import AdmissionSettings
from rollmill.sandboxes.records import SandboxSpec

_WHOLE_LIFE = {"memory_bytes": Waiting.MEMORY, "disk_bytes": Waiting.DISK, "inodes": Waiting.INODES}


class Claim:
    """One sandbox's share of the budgets.

    Attributes:
        sandbox_id: its id.
        spec: its template.
        needs: what it may take.
        place: where it counts.
        since_s: in this place.
        ask: number of the caller it is made for or was given to, `None` for an idle one.
        stopping: its end is ordered.
        probes_provider: its start is the probe of the provider's breaker.
        probes_image: the same of its image's.
        crowded: as many as the cap were starting with it.
        poolable: it may be given to whoever wants its template.
        used: it was handed out at least once.
        born_s: when its start began.
    """

    __slots__ = (
        "ask",
        "born_s",
        "crowded",
        "needs",
        "place",
        "poolable",
        "probes_image",
        "probes_provider",
        "sandbox_id",
        "since_s",
        "spec",
        "stopping",
        "used",
    )

    def __init__(self, sandbox_id: str, *, spec: SandboxSpec, needs: Needs, ask: int | None, now_s: float) -> None:
        self.sandbox_id, self.spec, self.needs, self.ask = sandbox_id, spec, needs, ask
        self.place = Place.STARTING
        self.since_s = self.born_s = now_s
        self.stopping = self.probes_provider = self.probes_image = self.crowded = self.used = False
        self.poolable = ask is None


class Books:
    """All claims and their sums."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self.claims: dict[str, Claim] = {}
        self.count = dict.fromkeys(Place, 0)
        self.stopping = 0
        self.starting = 0
        self.pausing = 0
        self.memory_bytes = self.disk_bytes = self.inodes = 0
        self.millicpus = 0  # whole numbers, so that a sum of many goes back to 0

    def add(self, claim: Claim) -> None:
        """Open a claim, which is starting."""
        if claim.sandbox_id in self.claims:
            raise InvariantViolation(f"sandbox {claim.sandbox_id} is in the books twice")
        self.claims[claim.sandbox_id] = claim
        self._weigh(claim, 1)

    def move(self, claim: Claim, place: Place, *, now_s: float) -> None:
        """Move a claim to another budget."""
        self._weigh(claim, -1)
        claim.place, claim.since_s = place, now_s
        self._weigh(claim, 1)

    def stop(self, claim: Claim) -> None:
        """Note that its end is ordered."""
        self._weigh(claim, -1)
        claim.stopping = True
        self._weigh(claim, 1)

    def remove(self, claim: Claim) -> None:
        """Close a claim: nothing of it is left."""
        self._weigh(claim, -1)
        del self.claims[claim.sandbox_id]

    def running(self) -> int:
        """Return how many count as running: all that are not suspended."""
        return sum(count for place, count in self.count.items() if place is not Place.SUSPENDED)

    def short_of(self, needs: Needs, *, freed: Sequence[Claim] = (), thaw: bool = False) -> Waiting | None:
        """Return the first budget without room for one more, `None` if there is room.

        Args:
            needs: of the one more.
            freed: as if these were gone.
            thaw: it is suspended now, so its memory, space and inodes count already.
        """
        limits = self._settings
        awake = [one for one in freed if one.place is not Place.SUSPENDED]
        if self.running() - len(awake) >= limits.max_running:
            return Waiting.RUNNING
        if limits.cpus:
            held = self.millicpus - sum(_millis(one.needs) for one in awake)
            if held + _millis(needs) > round(1000 * limits.cpus):
                return Waiting.CPUS
        if thaw:
            return None
        for name, waiting in _WHOLE_LIFE.items():
            bound = getattr(limits, name)
            if (
                bound
                and self.held(name) - sum(getattr(one.needs, name) for one in freed) + getattr(needs, name) > bound
            ):
                return waiting
        return None

    def held(self, name: str) -> float:
        """Return how much of a budget is held, by the name of its setting."""
        return self.millicpus / 1000 if name == "cpus" else getattr(self, name)

    def never_fits(self, needs: Needs) -> str:
        """Return which budget is too small even for this one alone, with its numbers, or nothing."""
        for name in ("memory_bytes", "cpus", "disk_bytes", "inodes"):
            bound, need = getattr(self._settings, name), getattr(needs, name)
            if bound and need > bound:
                return f"limits.{name} is {need:g} and the whole budget {bound:g}"
        return ""

    def _weigh(self, claim: Claim, sign: int) -> None:
        self.count[claim.place] += sign
        self.stopping += sign * claim.stopping
        self.starting += sign * (claim.place is Place.STARTING and not claim.stopping)
        self.memory_bytes += sign * claim.needs.memory_bytes
        self.disk_bytes += sign * claim.needs.disk_bytes
        self.inodes += sign * claim.needs.inodes
        if claim.place is not Place.SUSPENDED:
            self.millicpus += sign * _millis(claim.needs)


def _millis(needs: Needs) -> int:
    return round(1000 * needs.cpus)
