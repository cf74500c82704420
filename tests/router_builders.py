"""Builders for tests of the router: a law with replicas, requests, and replicas in memory behind a real forwarder."""

from __future__ import annotations

from typing import Any

from rollmill.config.router import RouterSettings
from rollmill.generator.router.law import RouterLaw
from rollmill.generator.router.records import Ask, Ended, Instruction, Refuse, Report, Send


def settings(**changes: Any) -> RouterSettings:
    return RouterSettings.model_validate({"overcommit": 1.0, **changes})


def report(version: int = 1, **changes: Any) -> Report:
    return Report(
        **{"state": "serving", "policy_version": version, "slots": 4, "digest": f"digest-{version}", **changes}
    )


def law_of(*names: str, now_s: float = 0.0, slots: int = 4, version: int = 1, **changes: Any) -> RouterLaw:
    """A law whose replicas all serve."""
    law = RouterLaw(settings(**changes))
    for name in names:
        law.table.join(name)
        law.report(name, report(version, slots=slots), now_s=now_s)
    return law


def ask(request_id: str, **changes: Any) -> Ask:
    return Ask(request_id=request_id, **changes)


def sent(instructions: list[Instruction]) -> list[tuple[str, str]]:
    """What was sent where; fails on a refusal."""
    found = []
    for one in instructions:
        assert isinstance(one, Send), one
        found.append((one.request_id, one.replica))
    return found


def place(law: RouterLaw, request_id: str, *, now_s: float = 0.0, **changes: Any) -> str | None:
    """Submit a request; return where it was sent, `None` if it waits."""
    found = sent(law.submit(ask(request_id, **changes), now_s=now_s))
    assert len(found) <= 1
    return found[0][1] if found else None


def refused(instructions: list[Instruction]) -> Exception:
    (one,) = instructions
    assert isinstance(one, Refuse), one
    return one.error


def answer(law: RouterLaw, request_id: str, replica: str, *, now_s: float = 0.0) -> list[tuple[str, str]]:
    """A replica answers; return what is sent because of it."""
    return sent(law.ended(request_id, replica, Ended.ANSWERED, now_s=now_s)) + sent(law.close(request_id, now_s=now_s))
