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

# The fake's guest is a tree of processes of this machine, and what it keeps of it holds no memory, in which a sandbox's
# files and programs are: a machine that is started from that has no sandbox inside. So whatever uses a restored one
# is left to QEMU, which has the same guest, templates and calls for snapshots.
for _needs_memory in (
    "test_a_snapshot_holds_the_files_of_its_moment_and_the_sandbox_goes_on",
    "test_a_snapshot_outlives_its_sandbox_and_is_not_changed_by_those_made_of_it",
    "test_snapshots_stack_and_each_keeps_its_own_moment",
    "test_what_a_snapshot_holds_counts_to_the_limits_of_what_is_made_of_it",
    "test_a_fork_makes_all_of_its_sandboxes_with_the_same_files",
    "test_a_fork_that_cannot_be_whole_leaves_nothing",
    "test_a_fork_that_is_cancelled_leaves_nothing",
    "test_snapshots_are_listed_until_they_are_deleted_and_each_id_names_one",
    "test_restoring_again_with_the_same_id_returns_the_same_sandbox",
):
    del globals()[_needs_memory]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineRig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"the fake runs its guest in namespaces, which do not work here: {reason}")
    with firecracker_rig(tmp_path_factory.mktemp("machines")) as rig:
        yield rig
