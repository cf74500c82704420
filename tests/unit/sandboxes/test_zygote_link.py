"""Orders that cannot be handed over: one is refused, or the zygote is lost."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest

from rollmill.sandboxes.backends.namespaces.zygote_link import ZygoteLink


def told(
    orders: list[dict[str, Any]], *, failing: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> tuple[list, list, int]:
    """Hand orders over; the n-th fails with an errno. Return what the owner hears, and how many went through."""
    heard: list[dict[str, Any]] = []
    lost: list[str] = []
    sent: list[bytes] = []
    tries = iter(range(1000))

    def send_fds(_: socket.socket, data: list[bytes], descriptors: list[int]) -> int:
        if (number := failing.get(next(tries))) is not None:
            raise OSError(number, errno.errorcode[number])
        sent.extend(data)
        return len(data[0])

    async def body() -> None:
        link = ZygoteLink(python="python3", on_report=heard.append, on_lost=lost.append)
        ours, theirs = socket.socketpair()
        link._control = ours
        monkeypatch.setattr(socket, "send_fds", send_fds)
        with theirs:
            for order in orders:
                link.order(order)
            await asyncio.sleep(0)
            link._release()

    asyncio.run(body())
    return heard, lost, len(sent)


CREATE = {"op": "create", "id": "a"}


@pytest.mark.parametrize("number", [errno.ETOOMANYREFS, errno.EMSGSIZE, errno.ENOBUFS])
def test_an_order_that_the_kernel_refuses_is_refused_alone(number, monkeypatch):
    orders = [CREATE, {"op": "hold", "n": 4}, {"op": "create", "id": "b"}]
    heard, lost, sent = told(orders, failing={0: number, 1: number}, monkeypatch=monkeypatch)
    assert [(one["op"], one.get("id"), one.get("n"), one["errno"]) for one in heard] == [
        ("refused", "a", None, number),
        ("kept", None, 4, number),
    ]
    assert (lost, sent) == ([], 1)


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ECONNRESET])
def test_a_broken_connection_loses_the_zygote(number, monkeypatch):
    heard, lost, sent = told([CREATE, CREATE], failing={0: number}, monkeypatch=monkeypatch)
    assert (heard, len(lost), sent) == ([], 1, 0)


def test_a_kill_that_cannot_be_ordered_loses_the_zygote_since_nobody_would_hear_of_it(monkeypatch):
    heard, lost, _ = told([{"op": "kill", "id": "a"}], failing={0: errno.ENOBUFS}, monkeypatch=monkeypatch)
    assert (heard, len(lost)) == ([], 1)
