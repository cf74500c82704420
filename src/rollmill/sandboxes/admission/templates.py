"""What is wanted and what is there of each template, and which templates are short. Pure.

A template is a spec: sandboxes of equal specs are interchangeable.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from rollmill.sandboxes.admission.books import Claim
from rollmill.sandboxes.admission.settings import PoolSettings
from rollmill.sandboxes.admission.targets import Idle, TakeRate, idle_target
from rollmill.sandboxes.records import SandboxSpec

_MAX_BACKOFF_S = 300.0


class Template:
    """One template.

    Attributes:
        demand: as given last.
        idle: ready ones, the oldest first.
        filling: how many start to become ready.
        asking: callers that want one and have none yet.
        held: handed out and not suspended.
        target: how many should be ready.
        prepared: its image is ready, so that filling may begin; `None` while that is tried.
    """

    __slots__ = (
        "asking",
        "demand",
        "failures",
        "filling",
        "held",
        "idle",
        "not_before_s",
        "prepared",
        "rate",
        "spec",
        "target",
    )

    def __init__(self, spec: SandboxSpec, *, window_s: float) -> None:
        self.spec = spec
        self.demand = self.filling = self.asking = self.held = self.target = self.failures = 0
        self.idle: OrderedDict[str, Claim] = OrderedDict()
        self.rate = TakeRate(window_s=window_s)
        self.not_before_s = 0.0
        self.prepared: bool | None = False

    @property
    def busy(self) -> int:
        """Return how many are handed out, starting for a caller, or waited for."""
        return self.held + self.asking

    @property
    def missing(self) -> int:
        """Return how many must start to reach the target."""
        return max(0, self.target - len(self.idle) - self.filling)

    @property
    def share(self) -> float:
        """Return which share of the target is there or starting."""
        return (len(self.idle) + self.filling) / max(1, self.target)

    @property
    def inert(self) -> bool:
        """Return whether there is nothing to remember."""
        return not (self.demand or self.busy or self.filling or self.idle)

    def backs_off(self, *, hold_s: float, now_s: float) -> None:
        """Note that filling failed: a pool that cannot be filled is tried less and less often."""
        self.failures += 1
        self.not_before_s = now_s + min(hold_s * 2.0 ** min(self.failures - 1, 30), _MAX_BACKOFF_S)


class Templates:
    """All templates in demand or in use."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._all: dict[SandboxSpec, Template] = {}
        self.short: dict[SandboxSpec, Template] = {}

    def __iter__(self) -> Iterator[Template]:
        return iter(self._all.values())

    def of(self, spec: SandboxSpec) -> Template:
        """Return a template, made new if it was not known."""
        if (found := self._all.get(spec)) is None:
            found = self._all[spec] = Template(spec, window_s=self._settings.rate_window_s)
        return found

    def known(self, spec: SandboxSpec) -> Template | None:
        """Return a template if it is known."""
        return self._all.get(spec)

    def refresh(self, template: Template, *, warm_up_s: float, closed: bool, now_s: float) -> None:
        """Set a template's target by what is wanted now; nothing is wanted of one while all idle ones are to go."""
        wanted = idle_target(
            demand=template.demand,
            busy=template.busy,
            rate_per_s=template.rate.per_s(now_s=now_s),
            warm_up_s=warm_up_s,
            settings=self._settings,
        )
        template.target = 0 if closed else wanted
        if template.missing:
            self.short[template.spec] = template
        else:
            self.short.pop(template.spec, None)
        if template.inert:
            self._all.pop(template.spec, None)

    def by_shortage(self, *, now_s: float) -> list[tuple[float, int, Template]]:
        """Return a heap of the templates that may be filled, the one with the smallest share of its target first."""
        ready = [one for one in self.short.values() if one.prepared and now_s >= one.not_before_s]
        heap = [(one.share, -place, one) for place, one in enumerate(ready, start=1)]
        heapq.heapify(heap)
        return heap

    def evictable(self) -> list[Idle]:
        """Return all idle ones, as the law of eviction sees them."""
        return [
            Idle(
                sandbox_id=sandbox_id,
                since_s=claim.since_s,
                over_target=place < len(template.idle) - template.target,
                demand=template.demand,
            )
            for template in self
            for place, (sandbox_id, claim) in enumerate(template.idle.items())
        ]
