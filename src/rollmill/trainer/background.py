"""One job at a time on a thread of its own, and the look at what became of it.

    who waits                      for                   gives up after
    the next job, whoever asks     the job under way     deadline_s
    the end                        the job under way     deadline_s; at once if that has passed before

The frame that publications and checkpoints share. A failure stays and is raised at every look until it is forgotten:
what it means for the next job is for the owner to say. Knows nothing of what the jobs do.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable

from rollmill.errors import DeadlineExceeded, Fault


class BackgroundJob:
    """Runs jobs in the background, never two at a time.

    Args:
        name: what a job is, in words: "the checkpoint". Its last word names the thread.
        deadline_s: longest wait for a job under way.
        executor: runs the jobs; a thread of its own if `None`.
    """

    def __init__(self, name: str, *, deadline_s: float, executor: concurrent.futures.Executor | None = None) -> None:
        self._name = name
        self._deadline_s = deadline_s
        self._executor = executor or concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix=f"rollmill-{name.split()[-1]}"
        )
        self._future: concurrent.futures.Future[object] | None = None
        self._failure: BaseException | None = None
        self._late = ""
        self._overdue = False

    @property
    def under_way(self) -> bool:
        """Whether a job has begun and not ended."""
        return self._future is not None and not self._future.done()

    def begin(self, job: Callable[[], object], *, late: str) -> None:
        """Hand a job over, after the one before has ended.

        Args:
            late: what to say if it takes too long: the numbers, a likely cause, what to do.

        Raises:
            BaseException: as `settle`, of the job before; then this one has not begun.
        """
        self.settle()
        self._late, self._overdue = late, False
        self._future = self._executor.submit(job)

    def check(self) -> None:
        """Raise the failure of the job, if it has failed; never wait."""
        if not self.under_way:
            self.settle()

    def settle(self) -> None:
        """Wait until nothing is under way.

        Raises:
            BaseException: what made the job fail; again at every call, until it is forgotten.
            DeadlineExceeded: if it took too long; it is still under way then.
        """
        self._wait(self._deadline_s)
        if self._failure is not None:
            raise self._failure

    def forget(self) -> None:
        """Let the failure that was raised not be raised again."""
        self._failure = None

    def close(self, *, cause: BaseException | None = None) -> None:
        """Finish what is under way and end the thread.

        Args:
            cause: why the owner ends; it stays the first cause, whatever became of the job.

        Raises:
            BaseException: as `settle`, if there is no cause before it.
        """
        try:
            self._wait(0.0 if self._overdue else self._deadline_s)
            failure = self._failure
        except DeadlineExceeded as late:
            failure = late
        finally:
            self._executor.shutdown(wait=False)
        if failure is None or failure is cause:
            return
        if cause is None:
            raise failure
        cause.add_note(f"{self._name} under way failed too: {failure}")

    def _wait(self, seconds: float) -> None:
        if self._future is None:
            return
        # An interrupt of this wait leaves the job as it is; the next look finds it. exception() and not result(): a
        # job may fail with a TimeoutError of its own, that of a network's file system for example.
        try:
            self._failure = self._future.exception(timeout=seconds)
        except concurrent.futures.TimeoutError:
            self._overdue = True
            raise DeadlineExceeded(self._late) from None
        except concurrent.futures.CancelledError:
            self._failure = Fault(
                f"{self._name} was cancelled before it began: the executor that was given for it has been shut down. "
                "End an executor after whoever uses it."
            )
        self._future = None
