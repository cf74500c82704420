"""What is optimised: advantages (NumPy) and losses, corrections and KL (torch), each from its paper.

Only the NumPy part is named here, so that the controller needs no torch; import `losses`, `corrections` and `kl` from
their modules.
"""

from rollmill.algorithms.advantages import (
    GroupAdvantages,
    group_advantages,
    overlong_penalty,
    reward_permutation,
)
from rollmill.algorithms.grouping import close_group

__all__ = ["GroupAdvantages", "close_group", "group_advantages", "overlong_penalty", "reward_permutation"]
