"""What the loop decides, asked directly."""

from __future__ import annotations

import pytest
from trainer_builders import closed, random_groups, rollout, turn

from rollmill.errors import InvariantViolation, StalenessViolation
from rollmill.testing import fake_manifest
from rollmill.trainer.decisions import (
    EndReason,
    GiveUp,
    WaitMore,
    check_staleness,
    checkpoint_due,
    decide_wait,
    loss_steps,
    publication_due,
)
from rollmill.types import Unscored, VersionSpan


def wait(
    *, phase: str = "running", stop: bool = False, waited_s: float = 0.0, report_due_s: float = 60.0
) -> EndReason | WaitMore | GiveUp:
    return decide_wait(
        phase=phase, stop=stop, waited_s=waited_s, deadline_s=100.0, report_due_s=report_due_s, recheck_s=1.0
    )


def test_it_waits_in_short_sleeps_because_a_ring_may_be_lost() -> None:
    assert wait() == WaitMore(seconds=1.0, report=False)


def test_the_last_sleep_ends_at_the_deadline() -> None:
    assert wait(waited_s=99.75, report_due_s=120.0) == WaitMore(seconds=0.25, report=False)


def test_a_long_wait_is_reported() -> None:
    assert wait(waited_s=60.0) == WaitMore(seconds=1.0, report=True)


def test_it_gives_up_at_the_deadline() -> None:
    assert wait(waited_s=100.0) == GiveUp(waited_s=100.0)


@pytest.mark.parametrize(("phase", "reason"), [("finishing", EndReason.FINISHED), ("stopping", EndReason.STOPPED)])
def test_it_ends_when_the_controller_says_that_nothing_more_comes(phase: str, reason: EndReason) -> None:
    assert wait(phase=phase) is reason
    assert wait(phase=phase, waited_s=500.0) is reason


def test_a_stop_ends_the_wait_at_once() -> None:
    assert wait(stop=True) is EndReason.STOPPED


STEPS = {1: 4, 2: 5, 3: 6}


def spanning(*spans: tuple[int, int, int], oldest: int) -> object:
    versions = tuple(VersionSpan(*span) for span in spans)
    members = [rollout("g", i, turn([1], list(range(spans[-1][1])), spans=versions)) for i in range(2)]
    return closed("g", members, optimizer_step=oldest)


def test_staleness_counts_from_the_oldest_token_in_the_loss() -> None:
    group = spanning((0, 2, 1), (2, 3, 3), oldest=4)
    assert loss_steps(group, optimizer_step_of=STEPS.__getitem__) == (4, 6)  # type: ignore[arg-type]
    check_staleness([group], optimizer_step=6, budget=2, optimizer_step_of=STEPS.__getitem__)  # type: ignore[list-item]
    with pytest.raises(StalenessViolation, match=r"staleness 2 at optimizer step 6, the budget .* is 1"):
        check_staleness([group], optimizer_step=6, budget=1, optimizer_step_of=STEPS.__getitem__)  # type: ignore[list-item]


def test_tokens_outside_the_loss_do_not_age_a_group() -> None:
    old = turn([1], [2, 3], spans=(VersionSpan(0, 2, 1),))
    new = turn([1], [2, 3], spans=(VersionSpan(0, 2, 3),))
    group = closed(
        "g",
        [rollout("g", 0, new), rollout("g", 1, new), rollout("g", 2, old, outcome=Unscored(reason="x"))],
        optimizer_step=6,
    )
    check_staleness([group], optimizer_step=6, budget=0, optimizer_step_of=STEPS.__getitem__)


def test_a_token_of_weights_newer_than_the_trainer_is_of_an_abandoned_history() -> None:
    group = spanning((0, 2, 1), (2, 3, 3), oldest=4)
    with pytest.raises(StalenessViolation, match="abandoned history"):
        check_staleness([group], optimizer_step=5, budget=9, optimizer_step_of=STEPS.__getitem__)  # type: ignore[list-item]


def test_a_group_that_lies_about_its_age_is_caught_by_its_spans() -> None:
    group = spanning((0, 3, 1), oldest=6)
    with pytest.raises(InvariantViolation, match="version spans"):
        check_staleness([group], optimizer_step=6, budget=9, optimizer_step_of=STEPS.__getitem__)  # type: ignore[list-item]


def test_every_group_of_a_batch_is_checked() -> None:
    groups = random_groups(groups=3, optimizer_step=4)
    with pytest.raises(StalenessViolation, match="group g0"):
        check_staleness(groups, optimizer_step=6, budget=1, optimizer_step_of=lambda _: 4)


@pytest.mark.parametrize(
    ("step", "written_at", "due"), [(10, None, True), (10, 5, True), (10, 10, False), (9, 5, False), (11, None, False)]
)
def test_a_checkpoint_is_due_every_so_many_steps_and_never_twice(step: int, written_at: int | None, due: bool) -> None:
    assert checkpoint_due(optimizer_step=step, every_steps=5, written_at=written_at) is due


def test_weights_are_published_at_the_start_unless_this_incarnation_did_it_already() -> None:
    manifest = fake_manifest(3, optimizer_step=8)
    assert publication_due(None, history_id="h001", optimizer_step=0)
    assert not publication_due(manifest, history_id="h001", optimizer_step=8)
    assert publication_due(manifest, history_id="h002", optimizer_step=8)
    assert publication_due(manifest, history_id="h001", optimizer_step=6)
