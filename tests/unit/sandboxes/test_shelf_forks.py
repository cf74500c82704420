"""The shelf where no process can be made: what is in it stays."""

from __future__ import annotations

import errno
import json
import os
import socket

import pytest

from rollmill.sandboxes.guest.shelf import Shelf


@pytest.mark.parametrize(
    ("op", "answer"), [("drop", {}), ("merge", {"errno": errno.EAGAIN}), ("store", {"errno": errno.EAGAIN})]
)
def test_without_room_for_a_child_a_layer_is_dropped_here_and_the_rest_refused(op, answer, monkeypatch):
    def no_room() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", no_room)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        Shelf(theirs)._aside({"op": op, "n": 3, "layers": [], "layer": "x"}, [])
        said = json.loads(ours.recv(10_000))
    assert (said["op"], said["n"]) == ("kept", 3)
    assert {name: said[name] for name in said if name == "errno"} == answer
