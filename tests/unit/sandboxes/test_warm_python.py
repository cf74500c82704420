"""What the agent believes of its fork-server, which belongs to the sandbox."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from rollmill.sandboxes.guest.warm import WarmPython


class Job:
    """One job of a fork-server."""

    def __init__(self) -> None:
        self.number, self.pid, self.killed_by = 7, 0, ""
        self.end: tuple[int, float, int] | None = None

    def ended(self, status: int, *, cpu_s: float, memory_bytes: int) -> None:
        self.end = (status, cpu_s, memory_bytes)


@pytest.fixture
def server() -> Iterator[tuple[WarmPython, Job, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    warm, job = WarmPython(2**22, ours), Job()
    warm._jobs[job.number] = job  # type: ignore[assignment]
    with ours, theirs:
        yield warm, job, theirs


def test_the_truth_is_taken(server):
    warm, job, says = server
    says.send(json.dumps({"n": 7, "pid": 12}).encode())
    assert warm.take() == ([], True)
    assert job.pid == 12
    says.send(json.dumps({"n": 7, "status": 256, "cpu_s": 0.5, "memory_bytes": 10}).encode())
    assert warm.take() == ([job], True)
    assert job.end == (256, 0.5, 10)


END: dict[str, Any] = {"status": 0, "cpu_s": 0.5, "memory_bytes": 10}


@pytest.mark.parametrize(
    "said",
    [
        b"[" * 4000,
        b"\xff",
        b"1",
        {"pid": 10**30},
        {"pid": 1},
        {"pid": -1},
        {"pid": "12"},
        {**END, "status": -1},
        {**END, "status": 2**16},
        {**END, "cpu_s": float("nan")},
        {**END, "cpu_s": -1.0},
        {**END, "memory_bytes": 2**70},
        {"status": 0},
        {},
    ],
)
def test_a_lie_ends_the_server_and_not_the_agent(server, said):
    warm, job, says = server
    says.send(said if isinstance(said, bytes) else json.dumps({"n": 7, **said}).encode())
    assert warm.take() == ([], False)
    assert job.end is None
    assert job.pid == 0
