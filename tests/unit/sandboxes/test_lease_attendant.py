"""An attendant whose keeper, or whoever it tells, breaks what was promised: it goes on, and says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollmill.clock import VirtualClock
from rollmill.errors import SandboxLeaseLost
from rollmill.sandboxes.leases import Attendant, AttendantSettings, Claim, KeeperSettings, SweepReport
from rollmill.sandboxes.leases.law import Act, Step
from rollmill.testing import run_virtual

SETTINGS = KeeperSettings(name="test", provider="fake", ttl_s=90.0, slack_s=50.0)
BEATS = AttendantSettings(beat_s=30.0, sweep_s=10.0)


def claim(name: str) -> Claim:
    return Claim(rollout_id=name, generation=1, sandbox_id=f"s-{name}", owner="me")


class ScriptedKeeper:
    """Renews and sweeps by script.

    Args:
        renewals: what each renewal does, in order; nothing once they are used up.
        sweeps: the same of sweeps; the first one is the attendant's at its beginning.
    """

    settings = SETTINGS

    def __init__(self, *, renewals: list[Any] | None = None, sweeps: list[Any] | None = None) -> None:
        self.renewals, self.sweeps = renewals or [], sweeps or []
        self.renewed_s: list[tuple[str, float]] = []

    async def renew(self, claim: Claim) -> None:
        await act_out(self.renewals)
        self.renewed_s.append((claim.rollout_id, asyncio.get_running_loop().time()))

    async def sweep(self) -> SweepReport:
        return await act_out(self.sweeps) or SweepReport()


async def act_out(script: list[Any]) -> Any:
    what = script.pop(0) if script else None
    if isinstance(what, Exception):
        raise what
    if isinstance(what, float):
        await asyncio.sleep(what)
        return None
    return what


def attended(
    keeper: ScriptedKeeper,
    scenario: Callable[[Attendant], Awaitable[None]],
    *,
    on_lost: Callable[..., None] | None = None,
) -> None:
    async def main() -> None:
        kept: Any = keeper
        async with Attendant(kept, settings=BEATS, on_lost=on_lost) as attendant:
            await scenario(attendant)

    run_virtual(main(), clock=VirtualClock())


def test_a_renewal_that_hung_until_the_next_beat_is_made_good_by_that_beat():
    """Leases of 90 s: the one of time 0 ends at 90, and a beat that began when the first one ended would come then."""
    keeper = ScriptedKeeper(renewals=[1000.0])

    async def scenario(attendant: Attendant) -> None:
        attendant.hold(claim("a"))
        await asyncio.sleep(95.0)
        assert keeper.renewed_s == [("a", 60.0), ("a", 90.0)]
        assert attendant.statistics.failed_renewals == 1
        assert "not renewed within 30 s (beat_s)" in attendant.statistics.last_failure

    attended(keeper, scenario)


def test_whoever_is_told_of_a_loss_and_fails_keeps_nobody_from_being_renewed():
    keeper = ScriptedKeeper(renewals=[SandboxLeaseLost("another owner came", generation=2)])

    def fails(*_: object) -> None:
        raise KeyError("whoever was told")

    async def scenario(attendant: Attendant) -> None:
        attendant.hold(claim("lost"))
        attendant.hold(claim("kept"))
        await asyncio.sleep(65.0)
        assert keeper.renewed_s == [("kept", 30.0), ("kept", 60.0)]
        assert attendant.statistics.lost == 1
        assert "whoever was told" in attendant.statistics.last_failure

    attended(keeper, scenario, on_lost=fails)


@pytest.mark.parametrize("what", ["renewals", "sweeps"])
def test_an_error_that_no_provider_may_raise_ends_neither_renewals_nor_sweeps(what):
    keeper = ScriptedKeeper(**{what: [None, ValueError("a bug")]})

    async def scenario(attendant: Attendant) -> None:
        attendant.hold(claim("a"))
        await asyncio.sleep(95.0)
        found = attendant.statistics
        assert (found.renewed, found.failed_renewals) == ((2, 1) if what == "renewals" else (3, 0))
        assert (found.sweeps, found.failed_sweeps) == ((10, 0) if what == "renewals" else (9, 1))
        assert "a bug" in found.last_failure

    attended(keeper, scenario)


def test_what_a_sweep_could_not_do_is_counted_and_logged_as_a_warning_with_its_reason(caplog):
    step = Step(act=Act.KILL, sandbox_id="s", why="it is to end; not done: no room now")
    keeper = ScriptedKeeper(sweeps=[SweepReport(failed=(step,))])

    async def scenario(attendant: Attendant) -> None:
        assert (attendant.statistics.sweeps, attendant.statistics.left) == (1, 1)
        assert "s: it is to end; not done: no room now" in attendant.statistics.last_failure

    with caplog.at_level(logging.WARNING):
        attended(keeper, scenario)
    assert "no room now" in caplog.text
