"""Executors that run what they are given at once, when told, when waited for, or never."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class Waited(Future[Any]):
    """Work that is done when somebody waits for it, or when a test says so."""

    def __init__(self, work: Callable[[], Any], *, when_waited: bool) -> None:
        super().__init__()
        self._work = work
        self._when_waited = when_waited

    def run(self) -> None:
        try:
            self.set_result(self._work())
        except BaseException as error:
            self.set_exception(error)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self._when_waited and not self.done():
            self.run()
        return super().exception(timeout)


class Later(Executor):
    """Does nothing until it is waited for, or until `run`."""

    when_waited = True

    def __init__(self) -> None:
        self.submitted: list[Waited] = []
        self.closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.submitted.append(Waited(lambda: fn(*args, **kwargs), when_waited=self.when_waited))
        return self.submitted[-1]

    def run(self) -> None:
        """Do what was submitted and is not done."""
        for work in self.submitted:
            if not work.done():
                work.run()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.closed = True


class ByHand(Later):
    """Does nothing until `run`, whoever waits."""

    when_waited = False


class Inline(Later):
    """Runs what is submitted at once, on the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        self.run()
        return future
