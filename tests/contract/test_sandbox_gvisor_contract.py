"""The contract of sandbox backends, run against gVisor for real."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from test_sandbox_contract import *  # noqa: F403
from test_sandbox_state_contract import *  # noqa: F403

from gvisor_builders import GvisorRig, gvisor_rig, need_gvisor
from rollmill.sandboxes import Culprit, DeathReason, Provider, SandboxSpec
from sandbox_builders import LIMITS, start, until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# Of the namespace backend alone: it looks at what a process hands down to its own children.
del test_an_owner_that_holds_signals_back_hands_no_block_down  # noqa: F821
# Below with more time: a start here may take as long as the life that it gives.
del test_a_sandbox_ends_at_its_wall_limit_and_that_is_the_rollouts_fault  # noqa: F821


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GvisorRig]:
    need_gvisor(tmp_path_factory.mktemp("probe"))
    with gvisor_rig(tmp_path_factory.mktemp("records")) as rig:
        yield rig


def test_a_sandbox_ends_at_its_wall_limit_and_that_is_the_rollouts_fault_here_too(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider, SandboxSpec(limits=msgspec.structs.replace(LIMITS, wall_s=8.0)))
        await until(lambda: sandbox.death is not None)
        assert sandbox.death is not None
        assert (sandbox.death.reason, sandbox.death.culprit) == (DeathReason.POLICY_WALL, Culprit.ROLLOUT)

    rig.run(body)
