"""Publishing in two parts: the copy, which the trainer waits for, and the commit, on a thread of its own.

    who waits                                      for                      gives up after
    the next publication, a checkpoint, the end    the commit under way     weights.publish_deadline_s

What follows a publication (the record of its step, the ring) runs on that thread too, after the manifest is visible:
the books never speak of a version that is not there. One publication is under way at a time. A failure is raised where
the trainer next looks: at a heartbeat, in a wait, or before the next publication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from rollmill.trainer.background import BackgroundJob
from rollmill.types import Adapter, Canary
from rollmill.weights.protocol import ModelRepository, Publication

if TYPE_CHECKING:
    import torch


class Publisher:
    """Publishes a trainer's weights.

    Args:
        score: returns the canary of given tensors; runs on the publisher's thread.
        deadline_s: longest wait for a commit.
        executor: runs the commits, one at a time; a thread of its own if `None`.
    """

    def __init__(
        self,
        repository: ModelRepository,
        *,
        history_id: str,
        training_dtype: str,
        score: Callable[[Mapping[str, torch.Tensor]], Canary],
        deadline_s: float,
        executor: Executor | None = None,
    ) -> None:
        self._repository = repository
        self._history_id = history_id
        self._training_dtype = training_dtype
        self._score = score
        self._deadline_s = deadline_s
        self._job = BackgroundJob("the publication", deadline_s=deadline_s, executor=executor)

    def begin(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        optimizer_step: int,
        parent: int | None,
        at_s: float,
        adapter: Adapter | None = None,
    ) -> Publication:
        """Copy the weights, after the publication before has ended; they may change again when this returns.

        Raises:
            Fault: that of the publication before; or `WeightError` if these weights cannot be copied.
        """
        self.settle()
        return self._repository.prepare(
            tensors,
            optimizer_step=optimizer_step,
            parent=parent,
            history_id=self._history_id,
            training_dtype=self._training_dtype,
            at_s=at_s,
            adapter=adapter,
        )

    def finish(self, publication: Publication, *, then: Callable[[], None]) -> None:
        """Commit in the background, then call `then` there."""
        self._job.begin(
            lambda: self._commit(publication, then),
            late=f"the publication of weights is not committed after {self._deadline_s:g} s "
            "(weights.publish_deadline_s): its digests, its manifest or the step's record hang. Look for a slow disk "
            "or for another process that keeps the sample store locked, or raise the deadline.",
        )

    def _commit(self, publication: Publication, then: Callable[[], None]) -> None:
        try:
            canary = self._score(publication.tensors())
        except BaseException:
            publication.abandon()
            raise
        publication.commit(canary=canary)
        then()
        self._repository.retire()
        self._repository.reserve()

    def check(self) -> None:
        """Raise the failure of the commit under way, if it has failed; never wait."""
        self._job.check()

    def settle(self) -> None:
        """Wait until nothing is under way.

        Raises:
            Exception: what made the commit, or what follows it, fail; again at every look, since the books lack a step.
            DeadlineExceeded: if it took too long.
        """
        self._job.settle()

    def close(self, *, cause: BaseException | None = None) -> None:
        """Wait until nothing is under way, then end the thread.

        Args:
            cause: why the loop ended; it stays the first cause, whatever the publication says.

        Raises:
            Exception: as `settle`, if there is no cause before it.
        """
        self._job.close(cause=cause)
