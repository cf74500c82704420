"""The order in which training tasks are drawn.

Pure: a function of the run's seed and the draw's index, so that a resumed run goes on where it stopped without any
saved state. Each epoch is a fresh permutation; weights do not enter here, they decide the composition of the pool.
"""

from __future__ import annotations

import numpy as np

from rollmill.types import derive_seed

_EPOCHS_KEPT = 4  # draws run ahead of training by less than an epoch; neighbours alternate at an epoch's edge


class EpochOrder:
    """Maps a draw's index to a position in `[0, size)`; every position comes once before any comes twice.

    Example:
        >>> order = EpochOrder(size=3, run_seed=7)
        >>> sorted(order.position(index) for index in range(3))
        [0, 1, 2]
    """

    def __init__(self, *, size: int, run_seed: int) -> None:
        if size < 1:
            raise ValueError(f"an order over {size} tasks has no first one")
        self._size = size
        self._run_seed = run_seed
        self._permutations: dict[int, np.ndarray] = {}

    def position(self, index: int) -> int:
        """Return the position of draw number `index`, from 0; O(1) but for the first draw of an epoch.

        Raises:
            ValueError: if the index is negative.
        """
        if index < 0:
            raise ValueError(f"draws are counted from 0, got {index}")
        epoch, offset = divmod(index, self._size)
        return int(self._permutation(epoch)[offset])

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            while len(self._permutations) >= _EPOCHS_KEPT:
                del self._permutations[next(iter(self._permutations))]
            seed = derive_seed("task_order", self._run_seed, epoch)
            self._permutations[epoch] = np.random.Generator(np.random.Philox(seed)).permutation(self._size)
        return self._permutations[epoch]
