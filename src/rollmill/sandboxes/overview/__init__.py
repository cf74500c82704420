"""Every backend at a glance: which work on this machine, what protects sandboxes there, and what is missing.

`judge` and `summed_up` are pure; what they judge is gathered in `probes`.
"""

from rollmill.sandboxes.overview.law import Facts, Need, Overview, Standing, Trial, Verdict, judge, summed_up

__all__ = ["Facts", "Need", "Overview", "Standing", "Trial", "Verdict", "judge", "summed_up"]
