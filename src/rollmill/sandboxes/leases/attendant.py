"""Renews the leases that its process holds, and sweeps their table, each at its own pace until it is closed.

| wait | ends after |
|---|---|
| for the renewals of one beat, together | `beat_s`; the next beat begins then, and tries again those not done |
| for a sweep | `sweep_limit_s`; the next one begins anew |

What failed, and why, is logged and counted; what was lost is told to whoever holds it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType

import msgspec

from rollmill.errors import ConfigError, RollmillError, SandboxDead, SandboxLeaseLost
from rollmill.sandboxes.leases.keeper import Keeper
from rollmill.sandboxes.leases.keeping import OUTCOMES, SweepReport
from rollmill.sandboxes.leases.law import Claim
from rollmill.sandboxes.records import Record

_log = logging.getLogger(__name__)


class AttendantSettings(Record, frozen=True, kw_only=True):
    """How leases are attended to.

    Attributes:
        beat_s: leases are renewed this often; at most a third of their time, so that the next beat makes good for one
            that fails, however late it does.
        sweep_s: the table is swept this often; below the keeper's `slack_s`, after which a provider ends by itself what
            nobody renewed, and what could have been suspended is lost.
        sweep_limit_s: longest that one sweep may take.
    """

    beat_s: float = 60.0
    sweep_s: float = 30.0
    sweep_limit_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("beat_s", "sweep_s", "sweep_limit_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} of the attendant of leases is {getattr(self, name)}; it must be above 0")


class AttendantStatistics(Record, frozen=True, kw_only=True):
    """What was done so far.

    Attributes:
        renewed: renewals that were done.
        failed_renewals: that were not, and are tried again.
        lost: claims that hold no more.
        sweeps: that came to their end.
        failed_sweeps: that did not.
        suspended: sandboxes that a sweep suspended when their lease ended.
        ended: that sweeps ended, orphans among them.
        left: what a sweep could not do; the next one tries again.
        last_failure: in words; empty if nothing failed.
    """

    renewed: int = 0
    failed_renewals: int = 0
    lost: int = 0
    sweeps: int = 0
    failed_sweeps: int = 0
    suspended: int = 0
    ended: int = 0
    left: int = 0
    last_failure: str = ""


class Attendant:
    """Attends to the leases of one keeper. Use it as an asynchronous context manager.

    Args:
        keeper: whose.
        settings: how often.
        on_lost: told of a claim that holds no more, and why; its holder must stop using the sandbox.
    """

    def __init__(
        self,
        keeper: Keeper,
        *,
        settings: AttendantSettings | None = None,
        on_lost: Callable[[Claim, RollmillError], None] | None = None,
    ) -> None:
        self._keeper, self._on_lost = keeper, on_lost
        self._settings = AttendantSettings() if settings is None else settings
        kept = keeper.settings
        if self._settings.beat_s > kept.ttl_s / 3:
            raise ConfigError(
                f"beat_s is {self._settings.beat_s:g} and leases are of {kept.ttl_s:g} s (ttl_s): two late beats would "
                "lose them; lower beat_s to a third of ttl_s"
            )
        if self._settings.sweep_s >= kept.slack_s:
            raise ConfigError(
                f"sweep_s is {self._settings.sweep_s:g} and slack_s {kept.slack_s:g}: providers would end what a sweep "
                "is to suspend; lower sweep_s or raise slack_s"
            )
        self._held: dict[str, Claim] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._statistics = AttendantStatistics()

    async def __aenter__(self) -> Attendant:
        """Sweep once, and begin."""
        await self.sweep()
        self._loops = [
            asyncio.ensure_future(_every(self._settings.beat_s, self.beat)),
            asyncio.ensure_future(_every(self._settings.sweep_s, self.sweep)),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop. The leases run on for the time that they have."""
        for one in self._loops:
            one.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)

    @property
    def statistics(self) -> AttendantStatistics:
        """Return what was done so far."""
        return self._statistics

    def hold(self, claim: Claim) -> None:
        """Renew this claim from now on, in place of an older one of its rollout."""
        self._held[claim.rollout_id] = claim

    def let_go(self, claim: Claim) -> None:
        """Renew it no more: it was released, suspended or lost."""
        if self._held.get(claim.rollout_id) == claim:
            del self._held[claim.rollout_id]

    async def beat(self) -> None:
        """Renew every claim that is held."""
        await asyncio.gather(*(self._renew(claim) for claim in list(self._held.values())))

    async def _renew(self, claim: Claim) -> None:
        try:
            async with asyncio.timeout(self._settings.beat_s):
                await self._keeper.renew(claim)
        except (SandboxLeaseLost, SandboxDead) as error:
            if self._held.get(claim.rollout_id) != claim:
                return  # let go of while it was renewed
            self._lost(claim, error)
        except TimeoutError:
            self._failed(
                f"the lease of rollout {claim.rollout_id!r} was not renewed within {self._settings.beat_s:g} s "
                "(beat_s); the next beat tries again",
                failed_renewals=1,
            )
        except Exception as error:  # of whatever kind: it must end neither the others' renewals nor the beats to come
            words = f"the lease of rollout {claim.rollout_id!r} was not renewed: {_told(error)}"
            self._failed(words, failed_renewals=1)
        else:
            self._count(renewed=1)

    def _lost(self, claim: Claim, error: RollmillError) -> None:
        self.let_go(claim)
        self._failed(f"the lease of rollout {claim.rollout_id!r} is lost: {error}", lost=1)
        if self._on_lost is None:
            return
        try:
            self._on_lost(claim, error)
        except Exception as raised:  # of whoever is told: the others are renewed nevertheless
            self._failed(f"on_lost of rollout {claim.rollout_id!r} failed: {_told(raised)}")

    async def sweep(self) -> None:
        """Make table and provider agree once."""
        try:
            async with asyncio.timeout(self._settings.sweep_limit_s):
                report = await self._keeper.sweep()
        except TimeoutError:
            limit_s = self._settings.sweep_limit_s
            self._failed(f"a sweep of leases did not end within {limit_s:g} s (sweep_limit_s)", failed_sweeps=1)
        except Exception as error:  # of whatever kind: the next sweep is due nevertheless
            self._failed(f"a sweep of leases failed: {_told(error)}", failed_sweeps=1)
        else:
            _tell(report)
            for step in report.failed:
                self._failed(f"sweep of leases: {step.act.value} {step.sandbox_id}: {step.why}", left=1)
            self._count(sweeps=1, suspended=len(report.suspended), ended=len(report.killed))

    def _failed(self, words: str, **more: int) -> None:
        _log.warning("%s", words)
        self._count(**more)
        self._statistics = msgspec.structs.replace(self._statistics, last_failure=words)

    def _count(self, **more: int) -> None:
        now = {name: getattr(self._statistics, name) + count for name, count in more.items()}
        self._statistics = msgspec.structs.replace(self._statistics, **now)


def _tell(report: SweepReport) -> None:
    for outcome in OUTCOMES:
        for step in getattr(report, outcome):
            _log.info("sweep of leases: %s %s: %s", outcome, step.sandbox_id, step.why)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, RollmillError) else repr(error)


async def _every(pause_s: float, work: Callable[[], Awaitable[None]]) -> None:
    """Begin work this often; one that took longer is followed by the next at once."""
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    while True:
        due_s = max(due_s + pause_s, loop.time())
        await asyncio.sleep(due_s - loop.time())
        await work()
