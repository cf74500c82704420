"""What the watchdog does with a verdict, in virtual time: the steps of an end, their deadlines, what goes on beside."""

from __future__ import annotations

import asyncio
import doctest
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

import rollmill.sandboxes.watchdog.watchdog
from rollmill.errors import SandboxDead, SandboxError
from rollmill.sandboxes import Death, DeathReason, Lease, Limits, SandboxSpec
from rollmill.sandboxes.lifecycle import death
from rollmill.sandboxes.watchdog import (
    Evidence,
    KillReport,
    NoEvidence,
    Pressure,
    ProviderOverseen,
    Sample,
    Survey,
    Watchdog,
    WatchdogSettings,
    Watched,
)
from rollmill.testing import FakeSandboxProvider, run_virtual
from rollmill.testing.sandboxes import FakeCall, FakeSandbox

LIMITS = Limits(inodes=1000)
SETTINGS = WatchdogSettings(kill_s=5.0)
R = DeathReason


class Scripted:
    """Sandboxes that are functions of time, and steps that take as long, or fail as often, as a test says."""

    def __init__(self) -> None:
        self.inodes: dict[str, Callable[[float], int | None]] = {}
        self.calls: list[tuple[float, str, str]] = []
        self.takes_s: dict[str, float] = defaultdict(float)
        self.fails: dict[str, Exception] = {}
        self.ends: dict[str, tuple[DeathReason, str]] = {}

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def _step(self, name: str, sandbox_id: str) -> None:
        self.calls.append((self.now_s(), name, sandbox_id))
        await asyncio.sleep(self.takes_s[name])
        if name in self.fails:
            raise self.fails[name]

    async def survey(self, *, limit_s: float) -> Survey:
        await asyncio.sleep(self.takes_s["survey"])
        if "survey" in self.fails:
            raise self.fails["survey"]
        seen = {one: law(self.now_s()) for one, law in self.inodes.items()}
        found = {
            one: Watched(sample=Sample(at_s=self.now_s(), inodes=inodes), limits=LIMITS)
            for one, inodes in seen.items()
            if inodes is not None
        }
        return Survey(found=found, late=tuple(one for one, inodes in seen.items() if inodes is None))

    async def freeze(self, sandbox_id: str) -> None:
        await self._step("freeze", sandbox_id)

    async def describe(self, sandbox_id: str) -> Mapping[str, Any]:
        await self._step("describe", sandbox_id)
        return {"processes": 3}

    async def kill(self, sandbox_id: str, *, reason: DeathReason, detail: str) -> Death:
        self.ends[sandbox_id] = (reason, detail)
        await self._step("kill", sandbox_id)
        del self.inodes[sandbox_id]
        return death(reason, detail=detail)


class Kept:
    """Evidence in a list."""

    def __init__(self) -> None:
        self.found: list[Evidence] = []
        self.takes_s = 0.0
        self.fails: Exception | None = None

    async def keep(self, evidence: Evidence) -> str:
        await asyncio.sleep(self.takes_s)
        if self.fails is not None:
            raise self.fails
        self.found.append(evidence)
        return f"/evidence/{evidence.sandbox_id}"


def quiet(_: float) -> int:
    return 10


def bomb(began_s: float) -> Callable[[float], int]:
    """Fills itself at that moment."""
    return lambda now_s: 1000 if now_s >= began_s else 10


def watch(
    overseen: Any,
    seconds: float,
    *,
    kept: Any = None,
    settings: WatchdogSettings = SETTINGS,
    pressure: Pressure | None = None,
    beside: Callable[[Watchdog], Awaitable[None]] | None = None,
) -> Watchdog:
    """Watch for some seconds of virtual time."""

    async def whole() -> Watchdog:
        watchdog = Watchdog(
            overseen, evidence=NoEvidence() if kept is None else kept, settings=settings, pressure=lambda: pressure
        )
        async with watchdog:
            if beside is not None:
                await beside(watchdog)
            await asyncio.sleep(seconds)
        return watchdog

    return run_virtual(whole())


def test_the_example_in_the_docstring_works():
    result = doctest.testmod(rollmill.sandboxes.watchdog.watchdog)
    assert result.failed == 0
    assert result.attempted > 0


def test_a_bomb_is_frozen_described_recorded_and_ended_in_this_order_and_the_others_live():
    overseen, kept = Scripted(), Kept()
    overseen.inodes = {"good": quiet, "bad": bomb(2.5)}
    overseen.takes_s |= {"freeze": 0.1, "describe": 0.2}
    watchdog = watch(overseen, 7.5, kept=kept)
    # Used up at the sweeps of 3, 4 and 5 s: for two seconds.
    assert overseen.calls == [
        (5.0, "freeze", "bad"),
        (pytest.approx(5.1), "describe", "bad"),
        (pytest.approx(5.3), "kill", "bad"),
    ]
    (report,) = watchdog.reports
    assert (report.sandbox_id, report.reason, report.evidence) == ("bad", R.POLICY_INODES, "/evidence/bad")
    assert report.death == death(
        R.POLICY_INODES, detail="1000 of 1000 inodes, 990 of them in 3.0 s. Evidence: /evidence/bad"
    )
    assert [(one.name, one.error) for one in report.steps] == [
        ("freeze", ""), ("describe", ""), ("record", ""), ("kill", "")
    ]  # fmt: skip
    assert list(overseen.inodes) == ["good"]
    statistics = watchdog.statistics()
    assert (statistics.ticks, statistics.watched, statistics.kills) == (8, 1, {R.POLICY_INODES: 1})
    assert (statistics.condemned, statistics.missed_ticks, statistics.failed_kills) == (0, 0, 0)


def test_evidence_holds_what_the_verdict_was_given_on():
    overseen, kept = Scripted(), Kept()
    overseen.inodes = {"bad": bomb(2.5)}
    watch(overseen, 7.0, kept=kept, pressure=Pressure(cpu_some=0.3))
    (evidence,) = kept.found
    assert [(one.at_s, one.inodes) for one in evidence.samples] == [
        (0, 10),
        (1, 10),
        (2, 10),
        (3, 1000),
        (4, 1000),
        (5, 1000),
    ]
    assert (evidence.limits, evidence.details, evidence.pressure) == (LIMITS, {"processes": 3}, Pressure(cpu_some=0.3))
    assert [one.name for one in evidence.steps] == ["freeze", "describe"]
    assert evidence.findings[0].reason is R.POLICY_INODES


@pytest.mark.parametrize("name", ["freeze", "describe"])
def test_a_step_that_fails_or_hangs_does_not_keep_the_next_from_following(name):
    for failure in (SandboxError("not here"), RuntimeError("a bug"), None):
        overseen, kept = Scripted(), Kept()
        overseen.inodes = {"bad": bomb(2.5)}
        if failure is None:
            overseen.takes_s[name] = 1e6
        else:
            overseen.fails[name] = failure
        watchdog = watch(overseen, 9.0, kept=kept)
        (report,) = watchdog.reports
        assert report.death is not None
        (step,) = [one for one in report.steps if one.error]
        assert step.name == name
        assert step.error == ("took more than 1 s" if failure is None else f"{type(failure).__name__}: {failure}")
        assert watchdog.statistics().failed_steps == {name: 1}
        assert len(kept.found) == 1


def test_evidence_that_cannot_be_written_in_time_is_told_in_the_deaths_detail():
    overseen, kept = Scripted(), Kept()
    overseen.inodes = {"bad": bomb(2.5)}
    kept.takes_s = 1e6
    (report,) = watch(overseen, 9.0, kept=kept).reports
    assert report.death is not None
    assert report.death.detail.endswith("Evidence: took more than 2 s")
    assert report.evidence == ""


def test_an_end_that_hangs_holds_up_neither_sweeps_nor_other_ends_and_is_tried_again():
    overseen = Scripted()
    overseen.inodes = {"hard": bomb(2.5)}
    overseen.takes_s["kill"] = 1e6

    async def another(watchdog: Watchdog) -> None:
        await asyncio.sleep(6.5)
        overseen.takes_s["kill"] = 0.0
        overseen.inodes["late"] = bomb(0.0)
        await asyncio.sleep(3.0)
        assert watchdog.statistics().kills == {R.POLICY_INODES: 1}
        assert watchdog.statistics().condemned == 1

    watchdog = watch(overseen, 20.0, beside=another)
    ends = [(at_s, name) for at_s, step, name in overseen.calls if step == "kill"]
    assert ends == [(5.0, "hard"), (9.0, "late"), (10.0, "hard")]
    assert watchdog.statistics().kills == {R.POLICY_INODES: 2}
    assert watchdog.statistics().missed_ticks == 0


def test_a_sandbox_that_cannot_be_ended_is_counted_and_let_go_of_when_it_is_gone():
    overseen = Scripted()
    overseen.inodes = {"hard": bomb(2.5)}
    overseen.fails["kill"] = SandboxError("no")

    async def gone_and_back(watchdog: Watchdog) -> None:
        await asyncio.sleep(30.0)
        assert watchdog.statistics().failed_kills == 1
        assert [name for _, name, _ in overseen.calls].count("kill") == 3
        assert [name for _, name, _ in overseen.calls].count("freeze") == 1
        del overseen.inodes["hard"]
        await asyncio.sleep(5.0)
        overseen.fails.clear()
        overseen.inodes["hard"] = bomb(0.0)

    watchdog = watch(overseen, 10.0, beside=gone_and_back)
    assert watchdog.statistics().kills == {R.POLICY_INODES: 1}
    assert watchdog.reports[0].death is None


def test_a_watch_that_is_cancelled_in_the_middle_of_an_end_still_gives_the_order():
    overseen = Scripted()
    overseen.inodes = {"bad": bomb(2.5)}
    overseen.takes_s["freeze"] = 0.9
    watch(overseen, 5.5)
    assert [name for _, name, _ in overseen.calls] == ["freeze", "kill"]
    assert overseen.ends["bad"][0] is R.POLICY_INODES


def test_a_sandbox_that_cannot_be_looked_at_is_counted_and_the_others_are_judged():
    overseen = Scripted()
    overseen.inodes = {"dark": lambda _: None, "bad": bomb(2.5)}
    watchdog = watch(overseen, 7.5)
    assert watchdog.statistics().kills == {R.POLICY_INODES: 1}
    assert watchdog.statistics().late_samples == 8


def test_a_survey_that_hangs_or_fails_costs_that_sweep_and_what_time_ran_over():
    overseen = Scripted()
    overseen.takes_s["survey"] = 1e6
    # Each sweep takes 2.6 s and so runs over those after one and two seconds: at 0, 3, 6 and 9 s.
    statistics = watch(overseen, 10.0, settings=WatchdogSettings(survey_s=2.5)).statistics()
    assert (statistics.ticks, statistics.failed_surveys, statistics.missed_ticks) == (4, 3, 6)
    assert statistics.worst_sweep_s == pytest.approx(2.6)
    overseen.takes_s["survey"] = 0.0
    overseen.fails["survey"] = OSError("gone")
    statistics = watch(overseen, 2.5).statistics()
    assert (statistics.ticks, statistics.failed_surveys, statistics.missed_ticks) == (3, 3, 0)


def test_a_loop_that_is_held_up_shows_as_lateness_and_missed_ticks():
    overseen = Scripted()
    overseen.takes_s["survey"] = 0.0

    async def whole() -> Watchdog:
        watchdog = Watchdog(overseen, evidence=NoEvidence())
        clock = asyncio.get_running_loop()._clock  # type: ignore[attr-defined]
        async with watchdog:
            await asyncio.sleep(0.5)
            clock.advance(3.0)  # somebody computes for three seconds without giving the loop back
            await asyncio.sleep(1.0)
        return watchdog

    statistics = run_virtual(whole()).statistics()
    # Due at 1 s and run at 3.5 s; those of 2 and 3 s are left out, that of 4 s is in time.
    assert (statistics.ticks, statistics.missed_ticks) == (3, 2)
    assert statistics.worst_late_s == pytest.approx(2.5)
    assert statistics.late_s == pytest.approx(0.0)


def test_files_that_were_there_when_the_watch_began_are_nobodys_bomb_but_those_of_a_newborn_are():
    overseen = Scripted()
    overseen.inodes = {"old": lambda _: 1000}

    async def born(_: Watchdog) -> None:
        await asyncio.sleep(3.5)
        overseen.inodes["new"] = lambda _: 1000

    watchdog = watch(overseen, 10.0, beside=born)
    assert [one.sandbox_id for one in watchdog.reports] == ["new"]
    assert list(overseen.inodes) == ["old"]


def test_an_old_sandbox_that_was_first_seen_late_is_not_taken_for_a_newborn():
    overseen = Scripted()
    overseen.inodes = {"old": lambda now_s: None if now_s < 2.5 else 1000}
    assert list(watch(overseen, 10.0).reports) == []


def test_whoever_asked_is_told_how_each_end_went():
    overseen, told = Scripted(), list[KillReport]()
    overseen.inodes = {"bad": bomb(0.5)}

    async def whole() -> None:
        async with Watchdog(overseen, evidence=NoEvidence(), on_kill=told.append):
            await asyncio.sleep(5.0)

    run_virtual(whole())
    assert [(one.sandbox_id, one.detail) for one in told] == [
        ("bad", "1000 of 1000 inodes, 990 of them in 3.0 s. Evidence: none is kept")
    ]


def test_a_watch_that_fails_by_a_mistake_of_ours_is_told_at_once():
    told: list[str] = []

    def broken(_: KillReport) -> None:
        raise RuntimeError("a bug")

    overseen = Scripted()
    overseen.inodes = {"bad": bomb(0.5)}

    async def whole() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        async with Watchdog(overseen, evidence=NoEvidence(), on_kill=broken):
            await asyncio.sleep(5.0)
            assert told == ["the watchdog over sandboxes has failed and does nothing any more"]

    run_virtual(whole())


# -- over any provider -----------------------------------------------------------------------------------------------


async def _litter(call: FakeCall) -> int:
    await asyncio.sleep(float(call.argv[1]))
    for number in range(2000):
        call.files[f"/tmp/{number}"] = b""
    await asyncio.sleep(1e6)
    return 0


SPEC = SandboxSpec(limits=Limits(inodes=2000, wall_s=1e5, exec_s=1e5))


class SlowProvider(FakeSandboxProvider):
    """A provider that takes for ever to find one sandbox."""

    async def attach(self, id: str) -> FakeSandbox:
        if id == "dark":
            await asyncio.sleep(1e6)
        return await super().attach(id)


def test_over_any_provider_a_bomb_ends_as_the_rollouts_doing_and_its_neighbours_go_on():
    async def whole() -> None:
        provider = SlowProvider(programs={"litter": _litter})
        lease = Lease(owner="test", ttl_s=1e5)
        sandboxes = {one: await provider.create(SPEC, id=one, lease=lease) for one in ("good", "bad", "dark")}
        watchdog = Watchdog(ProviderOverseen(provider), evidence=NoEvidence())
        async with watchdog, asyncio.TaskGroup() as group:
            working = group.create_task(sandboxes["good"].exec(["sleep", "30"]))
            with pytest.raises(SandboxDead) as raised:
                await sandboxes["bad"].exec(["litter", "5"])
            assert (raised.value.reason, raised.value.fault) == ("killed_by_policy_inodes", "rollout")
            assert asyncio.get_running_loop().time() < 10.0
            assert (await working).exit_code == 0
        statistics = watchdog.statistics()
        assert statistics.kills == {R.POLICY_INODES: 1}
        # The one that nobody could look at, each time but the last, which was cut off.
        assert statistics.late_samples == statistics.ticks - 1
        assert statistics.missed_ticks == 0
        assert sandboxes["dark"].death is None
        await provider.close()

    run_virtual(whole())
