"""One job in the background, with executors that run when told; one test uses the thread itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

import pytest
from executor_builders import ByHand, Inline, Later

from rollmill.errors import DeadlineExceeded, Fault, NumericalFault, StoreError, WeightError
from rollmill.trainer.background import BackgroundJob


def background(executor: Later | None, *, deadline_s: float = 0.01) -> BackgroundJob:
    return BackgroundJob("the copy", deadline_s=deadline_s, executor=executor)


def failing(error: BaseException) -> NoReturn:
    raise error


def test_a_job_runs_on_a_thread_named_after_it_and_settling_waits_for_it() -> None:
    job, seen, go = background(None, deadline_s=10.0), [], threading.Event()
    job.begin(lambda: (go.wait(10.0), seen.append(threading.current_thread().name)), late="")
    assert job.under_way
    job.check()  # does not wait
    assert seen == []
    go.set()
    job.settle()
    assert not job.under_way
    assert seen == ["rollmill-copy_0"]
    job.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        job.begin(lambda: None, late="")


def test_a_job_begins_after_the_one_before_has_ended() -> None:
    executor, order = Later(), []
    job = background(executor)
    job.begin(lambda: order.append(1), late="")
    job.begin(lambda: order.append(2), late="")
    assert order == [1]
    job.settle()
    assert order == [1, 2]


def test_a_job_does_not_begin_while_the_one_before_hangs() -> None:
    executor = ByHand()
    job = background(executor)
    job.begin(lambda: None, late="the copy of step 4 hangs")
    with pytest.raises(DeadlineExceeded, match="the copy of step 4 hangs"):
        job.begin(lambda: None, late="the copy of step 5 hangs")
    assert len(executor.submitted) == 1


def test_a_failure_is_raised_at_every_look_until_it_is_forgotten() -> None:
    executor = ByHand()
    job = background(executor)
    job.begin(lambda: failing(WeightError("the disk is full")), late="")
    job.check()  # not known yet
    executor.run()
    for look in (job.check, job.settle, lambda: job.begin(lambda: None, late="")):
        with pytest.raises(WeightError, match="the disk is full"):
            look()
    assert len(executor.submitted) == 1
    job.forget()
    job.settle()
    job.begin(lambda: None, late="")
    assert len(executor.submitted) == 2


def test_what_is_not_there_at_the_deadline_is_still_under_way() -> None:
    executor, done = ByHand(), []
    job = background(executor)
    job.begin(lambda: done.append(1), late="the copy hangs")
    with pytest.raises(DeadlineExceeded, match="the copy hangs"):
        job.settle()
    assert job.under_way
    executor.run()
    job.settle()
    assert done == [1]


def test_an_error_that_is_a_time_out_itself_is_a_failure_and_no_missed_deadline() -> None:
    job = background(Inline())
    job.begin(lambda: failing(TimeoutError(110, "no answer from the file server")), late="the copy hangs")
    with pytest.raises(TimeoutError, match="no answer from the file server"):
        job.settle()


def test_closing_waits_and_ends_the_executor() -> None:
    executor, done = Later(), []
    job = background(executor)
    job.begin(lambda: done.append(1), late="")
    job.close()
    assert done == [1]
    assert executor.closed


@pytest.mark.parametrize("failure", [WeightError("the disk is full"), SystemExit("the disk is full")])
def test_closing_raises_the_failure_only_if_there_is_no_cause_before_it(failure: BaseException) -> None:
    executor = Inline()
    job = background(executor)
    job.begin(lambda: failing(failure), late="")
    with pytest.raises(type(failure), match="the disk is full"):
        job.close()
    assert executor.closed

    job, cause = background(Inline()), NumericalFault("NaN", rollout_ids=("x",))
    job.begin(lambda: failing(failure), late="")
    job.close(cause=cause)
    assert cause.__notes__ == ["the copy under way failed too: the disk is full"]


def test_the_failure_that_ended_the_owner_is_not_its_own_consequence() -> None:
    job, failure = background(Inline()), StoreError("locked")
    job.begin(lambda: failing(failure), late="")
    job.close(cause=failure)
    assert not hasattr(failure, "__notes__")


def test_closing_waits_no_longer_than_the_deadline_and_says_why() -> None:
    executor = ByHand()
    job = background(executor)
    job.begin(lambda: None, late="the copy hangs")
    with pytest.raises(DeadlineExceeded, match="the copy hangs"):
        job.close()
    assert executor.closed


class Counting(ByHand):
    """Counts the seconds that somebody was ready to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s: list[float | None] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        exception = future.exception

        def counted(timeout: float | None = None) -> BaseException | None:
            self.waited_s.append(timeout)
            return exception(0.0)

        future.exception = counted  # type: ignore[method-assign]
        return future


def test_a_deadline_is_waited_for_once_per_job() -> None:
    executor = Counting()
    job, cause = background(executor, deadline_s=600.0), NumericalFault("NaN", rollout_ids=("x",))
    job.begin(lambda: None, late="the copy hangs")
    with pytest.raises(DeadlineExceeded):
        job.settle()
    job.close(cause=cause)
    assert executor.waited_s == [600.0, 0.0]
    assert cause.__notes__ == ["the copy under way failed too: the copy hangs"]


def test_a_deadline_belongs_to_its_job() -> None:
    executor = Counting()
    job = background(executor, deadline_s=600.0)
    job.begin(lambda: None, late="")
    with pytest.raises(DeadlineExceeded):
        job.settle()
    executor.run()
    job.begin(lambda: None, late="")
    executor.run()
    job.close()
    assert executor.waited_s == [600.0, 600.0, 600.0]


def test_a_wait_that_is_interrupted_leaves_the_job_under_way_and_it_still_counts() -> None:
    class Interrupted(ByHand):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            future = super().submit(fn, *args, **kwargs)
            exception = future.exception

            def interrupted(timeout: float | None = None) -> BaseException | None:
                future.exception = exception  # type: ignore[method-assign]
                raise KeyboardInterrupt

            future.exception = interrupted  # type: ignore[method-assign]
            return future

    executor = Interrupted()
    job = background(executor)
    job.begin(lambda: failing(WeightError("the disk is full")), late="")
    with pytest.raises(KeyboardInterrupt):
        job.settle()
    assert job.under_way
    executor.run()
    with pytest.raises(WeightError, match="the disk is full"):
        job.settle()


def test_a_job_that_was_cancelled_is_a_failure_in_words() -> None:
    executor = ByHand()
    job = background(executor)
    job.begin(lambda: None, late="")
    executor.submitted[-1].cancel()
    with pytest.raises(Fault, match="the copy was cancelled before it began"):
        job.check()
