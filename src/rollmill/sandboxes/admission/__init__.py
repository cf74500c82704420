"""Admission and pools: how many sandboxes start, live and wait, and which are kept ready.

`SandboxPool` hands out sandboxes of any provider. Its decisions are pure laws: `law` with `books`, `gates`, `queueing`,
`templates`, `targets`, `breaker`, `pressure` and `starting_cap`.
"""

from rollmill.sandboxes.admission.node_pressure import NodePressure
from rollmill.sandboxes.admission.pool import SandboxPool
from rollmill.sandboxes.admission.pressure import PressureSample
from rollmill.sandboxes.admission.records import Acquired, PoolStatistics, TemplateStatistics, Waiting
from rollmill.sandboxes.admission.settings import AdmissionSettings, PoolSettings, PressureSettings, Ramp

__all__ = [
    "Acquired",
    "AdmissionSettings",
    "NodePressure",
    "PoolSettings",
    "PoolStatistics",
    "PressureSample",
    "PressureSettings",
    "Ramp",
    "SandboxPool",
    "TemplateStatistics",
    "Waiting",
]
