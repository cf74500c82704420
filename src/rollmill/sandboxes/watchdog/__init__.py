"""The watchdog ends sandboxes that are bombs, and keeps the evidence; the node guard stops admission and evicts.

`Watchdog` over an `Overseen` (`ProviderOverseen` for any provider, `NamespaceOverseen` in the namespace backend) and
`NodeGuard` over a `Gate`. Both decide by pure laws, in `law` and `guard_law`.
"""

from rollmill.sandboxes.watchdog.evidence import DiskEvidence
from rollmill.sandboxes.watchdog.guard import Gate, NodeGuard
from rollmill.sandboxes.watchdog.guard_law import Evictable
from rollmill.sandboxes.watchdog.node import NodeReader
from rollmill.sandboxes.watchdog.overseen import EvidenceKeeper, NoEvidence, Overseen, ProviderOverseen
from rollmill.sandboxes.watchdog.records import (
    Evidence,
    GuardStatistics,
    KillReport,
    NodeReading,
    Pressure,
    Sample,
    Survey,
    Verdict,
    WatchdogStatistics,
    Watched,
)
from rollmill.sandboxes.watchdog.settings import GuardSettings, WatchdogSettings
from rollmill.sandboxes.watchdog.watchdog import Watchdog

__all__ = [
    "DiskEvidence",
    "Evictable",
    "Evidence",
    "EvidenceKeeper",
    "Gate",
    "GuardSettings",
    "GuardStatistics",
    "KillReport",
    "NoEvidence",
    "NodeGuard",
    "NodeReader",
    "NodeReading",
    "Overseen",
    "Pressure",
    "ProviderOverseen",
    "Sample",
    "Survey",
    "Verdict",
    "Watchdog",
    "WatchdogSettings",
    "WatchdogStatistics",
    "Watched",
]
