"""The scheduling core: admission, groups, staleness, batches, failures. Pure: events in, instructions out."""

from rollmill.scheduling import events, instructions
from rollmill.scheduling.core import Scheduler
from rollmill.scheduling.events import AnyEvent, FailureClass
from rollmill.scheduling.instructions import AnyInstruction, DropReason
from rollmill.scheduling.settings import SchedulerSettings
from rollmill.scheduling.view import Bound, SchedulerView, Wait

__all__ = [
    "AnyEvent",
    "AnyInstruction",
    "Bound",
    "DropReason",
    "FailureClass",
    "Scheduler",
    "SchedulerSettings",
    "SchedulerView",
    "Wait",
    "events",
    "instructions",
]
