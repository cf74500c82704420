"""The state of the core as the fold of the journal: for resume, and for a summary after any end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from rollmill.buffer.protocol import SampleStore, StepRecord
from rollmill.errors import RunDirectoryError
from rollmill.scheduling.core import Scheduler
from rollmill.scheduling.events import AnyEvent, BatchTaken, BatchTrained, RunResumed
from rollmill.scheduling.instructions import CloseGroup, DropGroup
from rollmill.scheduling.settings import SchedulerSettings


class Books:
    """A scheduler brought to the state that the journal tells.

    Attributes:
        stored_groups: groups whose samples the store holds.
        last_step_row: row of the newest step record.
        heard_step_row: row of the newest step record that the journal knows of; later ones are news to a controller
            that goes on in the same history.
        events: how many were journaled.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        stored_groups: set[str],
        last_step_row: int,
        heard_step_row: int,
        events: int,
    ) -> None:
        self.heard_step_row = heard_step_row
        self.events = events
        self.scheduler = scheduler
        self.stored_groups = stored_groups
        self.last_step_row = last_step_row


def fold(store: SampleStore, settings: SchedulerSettings, *, include_unheard: bool = False) -> Books:
    """Return the books after every journaled event.

    Args:
        settings: until the journal says otherwise: the first event and every resume carry those in force.
        include_unheard: also tell of steps that the trainer recorded and no controller lived to hear of.

    Raises:
        RunDirectoryError: if an entry cannot be read.
    """
    scheduler = Scheduler(settings)
    stored: set[str] = set()
    heard = 0
    journaled = 0
    for event in _journaled(store):
        journaled += 1
        if isinstance(event, RunResumed | BatchTrained):
            heard = event.optimizer_step
        for instruction in scheduler.handle(event):
            if isinstance(instruction, CloseGroup):
                stored.add(instruction.group_id)
            elif isinstance(instruction, DropGroup):
                stored.discard(instruction.group_id)
    steps = store.steps()
    if include_unheard:
        for _, record in steps:
            if record.optimizer_step > heard:
                at_s = record.finished_at_s
                scheduler.handle(BatchTaken(at_s=at_s, batch_id=record.batch_id))
                scheduler.handle(
                    BatchTrained(at_s=at_s, batch_id=record.batch_id, optimizer_step=record.optimizer_step, step_s=0.0)
                )
    return Books(
        scheduler,
        stored_groups=stored,
        last_step_row=max((row for row, _ in steps), default=0),
        heard_step_row=max((row for row, record in steps if record.optimizer_step <= heard), default=0),
        events=journaled,
    )


def unheard_steps(store: SampleStore, books: Books) -> Sequence[tuple[int, StepRecord]]:
    """Return the steps of the surviving history that no controller lived to report: they are still to be reported.

    A trainer may make a step final with a checkpoint before the controller, that dies then, has heard of it.
    """
    return store.steps(after=books.heard_step_row)


def _journaled(store: SampleStore) -> Iterator[AnyEvent]:
    for offset, entry in store.journal():
        try:
            yield msgspec.json.decode(entry, type=AnyEvent)
        except msgspec.DecodeError as error:
            raise RunDirectoryError(
                f"journal entry {offset} cannot be read ({error}). It was written by another version of Rollmill, or "
                "the file is damaged; resume with the version that wrote it."
            ) from error
