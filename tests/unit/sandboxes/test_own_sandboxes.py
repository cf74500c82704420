"""The calls that a provider answers from its own books."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import pytest

from rollmill.errors import DeadlineExceeded
from rollmill.sandboxes.backends.namespaces.own import OwnSandboxes


class Sandbox:
    """One that ends after a while, or does not."""

    def __init__(self, *, ends: bool) -> None:
        self.ends, self.killed = ends, False

    def order_end(self, reason: object) -> None:
        """Note the order."""

    async def kill(self, reason: object) -> None:
        if not self.ends:
            raise DeadlineExceeded("it is in the kernel still")
        await asyncio.sleep(0.01)
        self.killed = True


class Own(OwnSandboxes[Any]):
    """A provider's books."""

    def __init__(self, **alive: Any) -> None:
        self._alive, self._ends = alive, OrderedDict()


def test_one_that_does_not_end_is_told_as_such_once_the_others_have_ended():
    own = Own(a=Sandbox(ends=True), b=Sandbox(ends=False), c=Sandbox(ends=True))
    with pytest.raises(DeadlineExceeded, match="in the kernel still"):
        asyncio.run(own.kill(["a", "b", "c", "unknown"]))
    assert own._alive["a"].killed
    assert own._alive["c"].killed
