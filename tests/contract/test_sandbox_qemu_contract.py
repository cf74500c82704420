"""The contract of sandbox backends, run against machines under QEMU for real, emulated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_sandbox_contract import *  # noqa: F403
from test_sandbox_state_contract import *  # noqa: F403

from microvm_builders import MachineRig, qemu_rig, why_no_qemu

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# Of the namespace backend alone: it looks at what a process hands down to its own children.
del test_an_owner_that_holds_signals_back_hands_no_block_down  # noqa: F821

# Here what runs is kept with the files, so nothing has to be still.
del test_nothing_is_snapshotted_while_something_runs_unless_it_may_be_stopped  # noqa: F821


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineRig]:
    if reason := why_no_qemu():
        pytest.skip(f"no machines under QEMU here: {reason}")
    with qemu_rig(tmp_path_factory.mktemp("records"), accelerator="tcg") as rig:
        yield rig
