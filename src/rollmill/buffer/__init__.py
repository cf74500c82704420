"""The sample buffer: a keyed, durable store of groups, batches, journal and step records, and its doorbells."""

from rollmill.buffer.doorbell import Doorbell, ring
from rollmill.buffer.memory import MemoryStore
from rollmill.buffer.protocol import (
    Assignment,
    CommitPoint,
    LeasedBatch,
    Reconciliation,
    SampleStore,
    StepRecord,
    StoreStatistics,
    Transition,
)
from rollmill.buffer.sqlite import SqliteStore

__all__ = [
    "Assignment",
    "CommitPoint",
    "Doorbell",
    "LeasedBatch",
    "MemoryStore",
    "Reconciliation",
    "SampleStore",
    "SqliteStore",
    "StepRecord",
    "StoreStatistics",
    "Transition",
    "ring",
]
