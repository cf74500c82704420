"""The contract of sandbox backends, run against the Firecracker adapter with a fake in place of Firecracker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_sandbox_contract import *  # noqa: F403
from test_sandbox_state_contract import *  # noqa: F403

from microvm_builders import MachineRig, firecracker_rig
from sandbox_builders import why_no_namespaces

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# Of the namespace backend alone: it looks at what a process hands down to its own children.
del test_an_owner_that_holds_signals_back_hands_no_block_down  # noqa: F821
# The fake shows the host's programs, a Python among them; the image that stands in for them has none.
del test_python_runs_in_a_fresh_interpreter_each_time  # noqa: F821
# Here what runs is kept with the files, so nothing has to be still.
del test_nothing_is_snapshotted_while_something_runs_unless_it_may_be_stopped  # noqa: F821

# The fake keeps a machine's files, and no memory: what ran in it does not go on there.
del test_a_full_snapshot_goes_on_where_it_was_taken_or_is_refused_with_who_has_it  # noqa: F821


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineRig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"the fake runs its guest in namespaces, which do not work here: {reason}")
    with firecracker_rig(tmp_path_factory.mktemp("machines")) as rig:
        yield rig
