"""Records that cannot work are refused where they are made."""

import math

import pytest

from rollmill.errors import ConfigError
from rollmill.sandboxes import ExecResult, Lease, Limits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_bytes", 16 * 1024**2 - 1),
        ("disk_bytes", 1000),
        ("inodes", 255),
        ("pids", 1),
        ("cpu_s", -1),
        ("output_bytes", -1),
        ("open_files", 3),
        ("cpus", 0),
        ("wall_s", 0),
        ("wall_s", math.inf),
        ("exec_s", -1),
        ("exec_s", math.nan),
    ],
)
def test_limits_with_which_no_sandbox_starts_or_ends_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"limits\.{name} is"):
        Limits(**{name: value})


@pytest.mark.parametrize("ttl_s", [0, -1, math.inf, math.nan])
def test_every_lease_ends(ttl_s):
    with pytest.raises(ConfigError, match="every lease ends"):
        Lease(owner="me", ttl_s=ttl_s)


def test_a_result_tells_a_cut_output_and_a_timeout():
    assert ExecResult(exit_code=0, stdout=b"ab", stdout_bytes=3).truncated
    assert ExecResult(exit_code=0, stderr=b"ab", stderr_bytes=3).truncated
    assert not ExecResult(exit_code=0, stdout=b"ab", stdout_bytes=2).truncated
    assert ExecResult(exit_code=-9, killed_by="timeout").timed_out
    assert not ExecResult(exit_code=-9, killed_by="output").timed_out
