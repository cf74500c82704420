"""The contract of sandbox backends, run against gVisor for real."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_sandbox_contract import *  # noqa: F403
from test_sandbox_state_contract import *  # noqa: F403

from gvisor_builders import GvisorRig, gvisor_rig, need_gvisor

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# Of the namespace backend alone: it looks at what a process hands down to its own children.
del test_an_owner_that_holds_signals_back_hands_no_block_down  # noqa: F821


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GvisorRig]:
    need_gvisor(tmp_path_factory.mktemp("probe"))
    with gvisor_rig(tmp_path_factory.mktemp("records")) as rig:
        yield rig
