"""Leases of rollouts on sandboxes, in a table that outlives its owner.

| module | what |
|---|---|
| `law` | who may, what is due, what a sweep does: pure |
| `table` | the rows, in SQLite |
| `keeper` | the calls of owners: row first, then the provider |
| `sweeper` | makes table and provider agree |
| `means` | what both share |
| `attendant` | renews what its process holds, and sweeps, again and again |
"""

from rollmill.sandboxes.leases.attendant import Attendant, AttendantSettings, AttendantStatistics
from rollmill.sandboxes.leases.keeper import Keeper
from rollmill.sandboxes.leases.keeping import Held, KeeperSettings, SweepReport
from rollmill.sandboxes.leases.law import Claim, OnExpiry, Phase, Row
from rollmill.sandboxes.leases.table import LeaseTable

__all__ = [
    "Attendant",
    "AttendantSettings",
    "AttendantStatistics",
    "Claim",
    "Held",
    "Keeper",
    "KeeperSettings",
    "LeaseTable",
    "OnExpiry",
    "Phase",
    "Row",
    "SweepReport",
]
