from __future__ import annotations

import pytest

from rollmill.scheduling import DropReason
from rollmill.scheduling import events as ev
from rollmill.scheduling import instructions as ins
from simulation.scheduling_world import World, settings


def one_group(**changes: object) -> World:
    """One group of three rollouts per batch, budget 0."""
    world = World(settings(**{"batch_groups": 1, "group_size": 3, "max_staleness": 0, **changes}))
    world.begin()
    return world


def finish(world: World, sibling: int, *, counts: bool = True, reason: str = "", group: str = "g000000") -> None:
    world.counts = lambda start: counts
    rollout_id = f"{group}/{sibling}.1"
    if counts:
        world.finish(rollout_id)
        return
    world.flights.pop(rollout_id)
    world.finished_steps[rollout_id] = 0
    world.feed(
        ev.RolloutFinished(
            at_s=world.now_s,
            rollout_id=rollout_id,
            output_tokens=1,
            oldest_optimizer_step=0,
            counts=False,
            reason=reason,
        )
    )


def test_a_group_is_dispatched_whole_with_ids_that_only_rise() -> None:
    world = one_group(rollout_deadline_s=120.0, group_deadline_s=300.0)
    assert world.dispatches == [
        ins.StartRollout(
            rollout_id=f"g000000/{i}.1", group_id="g000000", task_index=0, sibling=i, attempt=1, deadline_s=120.0
        )
        for i in range(3)
    ]


def test_a_group_closes_when_all_siblings_have_finished_and_is_buffered_when_closed() -> None:
    world = one_group()
    for sibling in (2, 0, 1):
        assert world.closings == {}
        finish(world, sibling)
    # In sibling order, whatever the order of completion.
    assert world.closings["g000000"].rollout_ids == ("g000000/0.1", "g000000/1.1", "g000000/2.1")
    assert world.core.view().in_flight == 3
    out = world.close("g000000")
    assert out == [ins.AssignBatch(batch_id=0, group_ids=("g000000",), optimizer_step=0)]
    assert world.core.view().buffered == 3


def test_a_group_without_signal_is_dropped_and_replaced_by_the_next_task() -> None:
    world = one_group()
    world.has_signal = lambda task: False
    for sibling in range(3):
        finish(world, sibling)
    out = world.close("g000000")
    assert out[0] == ins.DropGroup(group_id="g000000", reason=DropReason.ZERO_ADVANTAGE)
    assert [instruction.task_index for instruction in out[1:]] == [1, 1, 1]  # type: ignore[union-attr]
    assert world.core.view().dropped == {"zero_advantage": 3}


def test_a_group_without_a_trainable_token_is_dropped_for_that() -> None:
    world = one_group()
    for sibling in range(3):
        finish(world, sibling)
    world.feed(
        ev.GroupClosed(
            at_s=0.0,
            group_id="g000000",
            has_signal=False,
            oldest_optimizer_step=0,
            loss_tokens=0,
            reason="no_trainable_tokens",
        )
    )
    assert world.core.view().dropped == {"no_trainable_tokens": 3}


def test_a_group_closes_with_what_counts_when_no_more_can_come() -> None:
    world = one_group()
    finish(world, 0)
    finish(world, 1, counts=False, reason="unscored: timeout")
    assert world.closings == {}
    finish(world, 2)
    # The unscored sibling goes along into the record, but is dropped in the books.
    assert world.closings["g000000"].rollout_ids == ("g000000/0.1", "g000000/1.1", "g000000/2.1")
    world.close("g000000")
    view = world.core.view()
    assert (view.buffered, view.dropped) == (2, {"unscored": 1})


@pytest.mark.parametrize(
    ("reasons", "dropped"),
    [
        (("unscored: timeout", "overlong", "overlong"), {"unscored": 1, "overlong": 2}),
        (("no_trainable_tokens", "unscored: died", "unscored: died"), {"no_trainable_tokens": 1, "unscored": 2}),
    ],
)
def test_a_group_that_cannot_have_a_baseline_is_dropped_for_the_reason_most_siblings_have(
    reasons: tuple[str, ...], dropped: dict[str, int]
) -> None:
    world = one_group()
    for sibling, reason in enumerate(reasons):
        finish(world, sibling, counts=False, reason=reason)
    assert world.drops == [("g000000", max((DropReason(r) for r in dropped), key=lambda r: dropped[r.value]))]
    assert world.core.view().dropped == dropped


def test_one_counting_sibling_is_no_baseline() -> None:
    world = one_group()
    finish(world, 0)
    finish(world, 1, counts=False, reason="overlong")
    finish(world, 2, counts=False, reason="overlong")
    assert world.drops == [("g000000", DropReason.OVERLONG)]
    assert world.core.view().dropped == {"overlong": 3}


def test_surplus_siblings_are_aborted_when_enough_have_finished() -> None:
    world = one_group(member_oversampling=2)
    assert len(world.flights) == 5
    for sibling in (4, 1, 3):
        finish(world, sibling)
    assert [abort.rollout_id for abort in world.aborts] == ["g000000/0.1", "g000000/2.1"]
    assert world.closings["g000000"].rollout_ids == ("g000000/1.1", "g000000/3.1", "g000000/4.1")
    assert world.core.view().dropped == {"surplus": 2}


def test_a_surplus_sibling_makes_good_for_one_that_does_not_count() -> None:
    world = one_group(member_oversampling=1)
    finish(world, 0, counts=False, reason="unscored: timeout")
    for sibling in (1, 2):
        finish(world, sibling)
    assert world.closings == {}
    finish(world, 3)
    world.close("g000000")
    assert world.core.view().buffered == 3


def reopened() -> World:
    """Two groups to a batch; group 0 is ready with three of four siblings, group 1 runs."""
    world = World(settings(batch_groups=2, group_size=3, max_staleness=0, member_oversampling=1, reopen_groups=True))
    world.begin()
    for sibling in range(3):
        finish(world, sibling)
    world.close("g000000")
    return world


def test_a_late_sibling_joins_its_group_while_that_is_unassigned() -> None:
    world = reopened()
    assert (world.core.view().buffered, world.aborts) == (3, [])
    finish(world, 3)
    assert world.closings["g000000"].rollout_ids == tuple(f"g000000/{i}.1" for i in range(4))
    world.close("g000000")
    assert world.core.view().buffered == 4


def test_a_sibling_that_comes_while_its_group_closes_makes_it_close_again() -> None:
    world = reopened()
    for sibling in range(3):
        finish(world, sibling, group="g000001")
    finish(world, 3, group="g000001")
    out = world.close("g000001")
    assert out == [ins.CloseGroup(group_id="g000001", rollout_ids=tuple(f"g000001/{i}.1" for i in range(4)))]


def test_a_sibling_still_running_when_its_group_is_assigned_is_aborted() -> None:
    world = reopened()
    for sibling in range(3):
        finish(world, sibling, group="g000001")
    world.close("g000001")
    assert [batch.group_ids for batch in world.assigned] == [("g000000", "g000001")]
    assert [abort.rollout_id for abort in world.aborts] == ["g000000/3.1", "g000001/3.1"]
    assert world.core.view().dropped == {"surplus": 2}


def test_a_result_for_a_closed_attempt_is_late_and_changes_nothing() -> None:
    world = one_group()
    finish(world, 0)
    before = world.core.view()
    again = ev.RolloutFinished(
        at_s=0.0, rollout_id="g000000/0.1", output_tokens=1, oldest_optimizer_step=0, counts=True
    )
    assert world.feed(again) == []
    after = world.core.view()
    assert after.late_results == 1
    assert after.in_flight == before.in_flight
    assert "late result of g000000/0.1 ignored" in world.core.story("g000000")[-1]


def test_a_group_dropped_while_the_shell_computes_is_dropped_from_the_store_again() -> None:
    world = one_group(group_deadline_s=10.0, rollout_deadline_s=10.0)
    for sibling in range(3):
        finish(world, sibling)
    world.tick(10.0)
    assert world.drops == [("g000000", DropReason.GROUP_DEADLINE)]
    out = world.close("g000000")
    assert out == [ins.DropGroup(group_id="g000000", reason=DropReason.LATE)]
    assert world.core.view().late_results == 1


def test_the_story_of_a_group_tells_what_happened_in_order() -> None:
    world = one_group(total_steps=1)
    world.run()
    story = [line.split(" ", 1)[1] for line in world.core.story("g000000")]
    assert [line.split(":")[0].split(" with")[0] for line in story] == [
        "dispatched",
        "closing",
        "ready",
        "assigned to batch 0 of step 0",
        "trained",
    ]
    assert world.core.story("g999999") == ()
