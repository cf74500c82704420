"""Leases of rollouts on sandboxes, in a table that outlives its owner.

| module | what |
|---|---|
| `law` | who may, what is due, what a sweep does: pure |
| `table` | the rows, in SQLite |
| `keeper` | does it: row first, then the provider |
"""

from rollmill.sandboxes.leases.keeper import Held, Keeper, KeeperSettings, SweepReport
from rollmill.sandboxes.leases.law import Claim, Phase, Row
from rollmill.sandboxes.leases.table import LeaseTable

__all__ = ["Claim", "Held", "Keeper", "KeeperSettings", "LeaseTable", "Phase", "Row", "SweepReport"]
