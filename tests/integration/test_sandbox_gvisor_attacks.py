"""The named attacks, run in gVisor sandboxes; what gVisor answers differently, or has not, stands in the table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_sandbox_attacks import attack_fails, cases, node, place, shared, target  # noqa: F401 - fixtures

from gvisor_builders import GvisorRig, gvisor_rig, need_gvisor
from rollmill.sandboxes import Sandbox
from sandbox_attack_rig import Host, Node
from sandbox_attacks import GVISOR, Attack

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def rig(node: Node, place: Path) -> Iterator[GvisorRig]:  # noqa: F811
    need_gvisor(place / "probe")
    with gvisor_rig(place / "records") as rig:
        yield rig


@pytest.mark.parametrize(("attack", "user", "where"), cases(GVISOR))
def test_the_attack_fails(
    rig: GvisorRig,
    shared: Sandbox,  # noqa: F811
    target: Host,  # noqa: F811
    attack: Attack,
    user: str | None,
    where: tuple[str, ...],
) -> None:
    attack_fails(rig, shared, target, attack, user=user, where=where)
