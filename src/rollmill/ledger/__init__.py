"""Books of rollouts and of seconds: pure, and checked so often that they cannot drift."""

from rollmill.ledger.samples import RolloutLedger, RolloutState
from rollmill.ledger.seconds import (
    REPLICA_CAUSES,
    TRAINER_CAUSES,
    ReplicaCause,
    SecondsLedger,
    SecondsReport,
    TrainerCause,
    merge_reports,
)

__all__ = [
    "REPLICA_CAUSES",
    "TRAINER_CAUSES",
    "ReplicaCause",
    "RolloutLedger",
    "RolloutState",
    "SecondsLedger",
    "SecondsReport",
    "TrainerCause",
    "merge_reports",
]
