"""Deterministic mode: sampling in waves, so that what shares a forward pass does not depend on timing.

A wave is opened only when nothing is in flight, the trainer holds no batch, and every replica serves the newest
weights. It holds exactly the groups that the batch of the next step lacks: all of them at first, then replacements for
those without signal. Nothing here looks at rates or at time. What is lost of a wave costs the whole wave: it is started
again with the same tasks and the same seeds, or, past a limit, ends the run; it is never replaced by another. After a
resume sampling goes on where the step of the checkpoint began in the data.
"""

from __future__ import annotations

from rollmill.scheduling.groups import GroupRecord, GroupState
from rollmill.scheduling.instructions import DropReason, Fail
from rollmill.scheduling.lifecycle import drop_group, open_group
from rollmill.scheduling.state import State


def open_wave(state: State) -> None:
    """Open the groups that the next batch lacks, if nothing of an earlier wave or of other weights is left."""
    missing = _missing_groups(state)
    if missing <= 0 or not _quiet(state):
        return
    waves, settings = state.waves, state.settings
    waves.losses = waves.losses if waves.again else 0
    waves.again = False
    waves.opened += 1
    waves.first_task = state.next_task
    waves.first_task_of_step.setdefault(state.next_step, state.next_task)
    floor_step = state.next_step
    for index in range(missing):
        task_index, state.next_task = state.next_task, state.next_task + 1
        open_group(
            state,
            task_index=task_index,
            floor_step=floor_step,
            wave=waves.opened,
            wave_start=index * settings.group_size,
            wave_size=missing * settings.group_size,
        )


def _missing_groups(state: State) -> int:
    settings = state.settings
    missing = settings.batch_groups - len(state.book.unassigned)
    if settings.data_limit is not None:
        missing = min(missing, settings.data_limit - state.next_task)
    return missing if state.next_step < settings.total_steps else 0


def _quiet(state: State) -> bool:
    """Return whether nothing runs that a wave could mix with, and one version serves: the newest."""
    if state.underway or state.book.unfinished_count or not state.replicas:
        return False
    newest = state.newest_version
    serve = all(r.policy_version == newest and r.loading is None for r in state.replicas.values())
    return serve and state.step_of_version[newest] == state.next_step


def lose_wave(state: State, *, why: str, limit: int | None) -> None:
    """Give up the newest wave if something of it runs; it is started again whole.

    Args:
        why: what was lost, for the stories and the message.
        limit: starts of one wave after which the run ends; `None` does not count this loss.
    """
    waves = state.waves
    lost = [group for group in state.book.unassigned.values() if group.wave == waves.opened]
    if state.halted or not state.book.unfinished_count:
        return
    _drop(state, lost, why=f"wave w{waves.opened:06d} is started again whole: {why}")
    state.next_task = waves.first_task
    waves.again = True
    if limit is None:
        return
    waves.losses += 1
    if waves.losses >= limit:
        state.halted = True
        state.out.append(Fail(code="wave_lost", message=_given_up(state, why=why)))


def _given_up(state: State, *, why: str) -> str:
    return (
        f"the wave of tasks from {state.waves.first_task} for step {state.next_step} was started {state.waves.losses} "
        f"times and lost each time; the last loss: {why}. In deterministic mode (run.deterministic) a rollout that "
        "fails or takes too long is never replaced by another, because the result would depend on it. Repair the "
        "cause or raise the deadline it names, then resume the run."
    )


def rewind_step(state: State) -> None:
    """Forget everything that was sampled for the present step and later ones; all of it is ready or blank (resume)."""
    waves = state.waves
    groups = list(state.book.unassigned.values())
    _drop(state, groups, why="its step is sampled again from its beginning after a restart")
    later = [step for step in waves.first_task_of_step if step > state.next_step]
    for step in later:
        del waves.first_task_of_step[step]
    state.next_task = waves.first_task_of_step.get(state.next_step, state.next_task)
    state.requeued.clear()
    waves.again, waves.losses = False, 0


def _drop(state: State, groups: list[GroupRecord], *, why: str) -> None:
    for group in groups:
        state.tell(group.group_id, why)
        if group.state is GroupState.BLANK:
            state.book.take(group, GroupState.DROPPED)
        else:
            drop_group(state, group, DropReason.WAVE_RESTARTED)
