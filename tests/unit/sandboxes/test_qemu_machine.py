"""What a machine under QEMU lets go of when it has ended."""

from __future__ import annotations

import socket

import pytest

from rollmill.sandboxes.backends.microvm.hypervisor import Shape
from rollmill.sandboxes.backends.qemu.command import Memory
from rollmill.sandboxes.backends.qemu.hypervisor import QemuMachine
from rollmill.sandboxes.backends.qemu.qmp import Qmp


@pytest.mark.parametrize("connected", [False, True])
async def test_the_connection_to_an_agent_is_closed_with_its_machine_unless_somebody_has_it(connected):
    control, theirs = socket.socketpair()
    agent, inside = socket.socketpair()
    with control, theirs, agent, inside:
        shape = Shape(memory_bytes=1, disks=())
        machine = QemuMachine(
            shape,
            qmp=Qmp(control, answer_s=1.0),
            agent=agent,
            console=-1,
            memory=Memory(size_bytes=1, descriptor=-1),
        )
        if connected:
            assert await machine.connect() is agent
        machine.release()
        assert (agent.fileno() >= 0) is connected
