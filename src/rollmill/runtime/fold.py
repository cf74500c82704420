"""The state of the core as the fold of the journal: for resume, and for a summary after any end."""

from __future__ import annotations

import msgspec

from rollmill.buffer.protocol import SampleStore
from rollmill.errors import RunDirectoryError
from rollmill.scheduling.core import Scheduler
from rollmill.scheduling.events import AnyEvent
from rollmill.scheduling.instructions import CloseGroup, DropGroup
from rollmill.scheduling.settings import SchedulerSettings


class Books:
    """A scheduler brought to the state that the journal tells.

    Attributes:
        stored_groups: groups whose samples the store holds.
        last_step_row: row of the newest step record; later ones are news.
    """

    def __init__(self, scheduler: Scheduler, *, stored_groups: set[str], last_step_row: int) -> None:
        self.scheduler = scheduler
        self.stored_groups = stored_groups
        self.last_step_row = last_step_row


def fold(store: SampleStore, settings: SchedulerSettings) -> Books:
    """Return the books after every journaled event.

    Raises:
        RunDirectoryError: if an entry cannot be read.
    """
    scheduler = Scheduler(settings)
    stored: set[str] = set()
    for offset, entry in store.journal():
        try:
            event = msgspec.json.decode(entry, type=AnyEvent)
        except msgspec.DecodeError as error:
            raise RunDirectoryError(
                f"journal entry {offset} cannot be read ({error}). It was written by another version of Rollmill, or the "
                "file is damaged; resume with the version that wrote it."
            ) from error
        for instruction in scheduler.handle(event):
            if isinstance(instruction, CloseGroup):
                stored.add(instruction.group_id)
            elif isinstance(instruction, DropGroup):
                stored.discard(instruction.group_id)
    rows = [row for row, _ in store.steps()]
    return Books(scheduler, stored_groups=stored, last_step_row=max(rows, default=0))
