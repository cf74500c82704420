"""The law of bombs, by numbers: what is ended, what is only warned of, what is left alone."""

import doctest
from typing import Any

import pytest

import rollmill.sandboxes.watchdog.law
from rollmill.errors import ConfigError
from rollmill.sandboxes import DeathReason, Limits
from rollmill.sandboxes.lifecycle import culprit_of
from rollmill.sandboxes.records import Culprit
from rollmill.sandboxes.watchdog import GuardSettings, Pressure, Sample, Verdict, WatchdogSettings
from rollmill.sandboxes.watchdog.law import judge, trim
from rollmill.sandboxes.watchdog.records import Severity, newborn

MIB = 1024**2
LIMITS = Limits(memory_bytes=100 * MIB, disk_bytes=50 * MIB, inodes=1000, pids=100, cpus=1.0, output_bytes=10 * MIB)
SETTINGS = WatchdogSettings()
R = DeathReason


def seconds(**columns: list[Any]) -> list[Sample]:
    """One sample a second from 0 on; a column for each number."""
    rows = zip(*columns.values(), strict=True)
    return [Sample(at_s=float(at_s), **dict(zip(columns, row, strict=True))) for at_s, row in enumerate(rows)]


def verdict(samples: list[Sample], *, pressure: Pressure | None = None, **settings: Any) -> Verdict:
    chosen = WatchdogSettings(**settings)
    return judge(trim(samples, window_s=chosen.window_s), limits=LIMITS, settings=chosen, pressure=pressure)


def test_examples_in_the_docstrings_work():
    result = doctest.testmod(rollmill.sandboxes.watchdog.law)
    assert (result.failed, result.attempted) == (0, 2)


def test_nothing_seen_is_nothing_concluded():
    assert judge([], limits=LIMITS, settings=SETTINGS) == Verdict()
    assert judge([Sample(at_s=3.0)], limits=LIMITS, settings=SETTINGS).severity is Severity.OK


def test_everything_that_the_watchdog_kills_for_is_the_rollouts_doing():
    for reason in (R.POLICY_PIDS, R.POLICY_INODES, R.POLICY_BYTES, R.POLICY_MEMORY, R.POLICY_OUTPUT, R.POLICY_CPU_TIME):
        assert culprit_of(reason) is Culprit.ROLLOUT


# -- processes -------------------------------------------------------------------------------------------------------


def test_used_up_processes_with_refused_forks_for_two_seconds_are_a_fork_bomb():
    bomb = seconds(pids=[3, 100, 100, 100], refused_forks=[0, 500, 900, 1300])
    found = verdict(bomb)
    assert (found.severity, found.reason) == (Severity.KILL, R.POLICY_PIDS)
    assert found.text == "100 of 100 processes for 2.0 s, 1300 forks refused in 3.0 s"
    assert verdict(bomb[:3]).severity is Severity.WARN  # for one second only


def test_a_program_that_runs_all_the_processes_it_may_and_asks_for_no_more_is_warned_of():
    busy = seconds(pids=[100] * 11, refused_forks=[19 if at_s else 0 for at_s in range(11)])
    assert verdict(busy).severity is Severity.WARN
    assert verdict(busy).reason is None


def test_where_refused_forks_are_not_counted_used_up_processes_are_waited_for_longer():
    bomb = seconds(pids=[3, 96, 96, 96, 96, 96, 96])
    assert verdict(bomb[:6]).severity is Severity.WARN  # 4 s
    assert verdict(bomb).reason is R.POLICY_PIDS  # 5 s


def test_a_dip_below_the_cap_begins_the_wait_again():
    assert verdict(seconds(pids=[96, 96, 96, 50, 96, 96, 96])).severity is Severity.WARN


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "cap", "reason"),
    [("inodes", 1000, R.POLICY_INODES), ("disk_bytes", 50 * MIB, R.POLICY_BYTES)],
)
class TestWhatIsFilled:
    def test_half_of_the_cap_in_the_window_and_used_up_for_two_seconds_is_a_bomb(self, column, cap, reason):
        bomb = seconds(**{column: [0, cap, cap, cap]})
        assert verdict(bomb).reason is reason
        assert verdict(bomb[:3]).severity is Severity.WARN
        assert "in 3.0 s" in verdict(bomb).text

    def test_a_slow_program_that_reaches_the_cap_gets_its_error_and_is_not_ended(self, column, cap, reason):
        slow = [cap * second / 25 for second in range(26)]  # in a window of ten seconds 0.4 of the cap
        for end in range(1, 27):
            assert verdict(seconds(**{column: slow[:end]})).severity is not Severity.KILL
        assert verdict(seconds(**{column: slow})).severity is Severity.WARN

    def test_a_program_that_cleans_up_in_time_is_not_ended(self, column, cap, reason):
        assert verdict(seconds(**{column: [0, cap, cap, cap / 10]})).severity is Severity.OK

    def test_what_was_there_before_the_watch_began_is_nobodys_bomb(self, column, cap, reason):
        assert verdict(seconds(**{column: [cap] * 11})).severity is Severity.WARN

    def test_what_a_newborn_filled_before_its_first_sample_counts(self, column, cap, reason):
        samples = [newborn(0.0), *(Sample(at_s=at_s, **{column: cap}) for at_s in (0.9, 1.9, 2.9))]
        assert verdict(samples).reason is reason

    def test_on_a_node_that_is_short_nobody_waits(self, column, cap, reason):
        bomb = seconds(**{column: [0, cap]})
        assert verdict(bomb, pressure=Pressure(io_some=0.6)).reason is reason
        assert verdict(bomb, pressure=Pressure(io_some=0.59)).severity is Severity.WARN
        assert verdict(bomb, pressure=Pressure(cpu_some=1.0)).severity is Severity.WARN

    def test_a_number_that_is_not_counted_says_nothing(self, column, cap, reason):
        assert verdict(seconds(**{column: [0, cap, cap, None]})).severity is Severity.OK


# -- memory ----------------------------------------------------------------------------------------------------------


def test_a_program_that_is_started_again_after_each_end_at_the_memory_cap_is_a_bomb():
    assert (
        verdict(seconds(oom_kills=[2, 3, 4, 5])).text
        == f"3 processes ended in 3.0 s at the memory cap of {100 * MIB} bytes"
    )
    assert verdict(seconds(oom_kills=[2, 3, 4, 4])).severity is Severity.OK
    long_ago = seconds(oom_kills=[0, 3] + [3] * 11)
    assert verdict(long_ago).severity is Severity.OK


def test_memory_full_of_what_can_be_dropped_is_no_bomb():
    assert verdict(seconds(memory_bytes=[100 * MIB] * 11, memory_stall_s=[0.0] * 11)).severity is Severity.OK


def test_a_sandbox_that_does_nothing_but_wait_for_memory_is_ended():
    stalled = seconds(memory_bytes=[99 * MIB] * 4, memory_stall_s=[0.0, 0.5, 1.0, 1.5])
    assert verdict(stalled).reason is R.POLICY_MEMORY
    assert "1.5 of 3.0 s spent waiting" in verdict(stalled).text
    assert verdict(seconds(memory_bytes=[99 * MIB] * 4, memory_stall_s=[0.0, 0.4, 0.9, 1.4])).severity is Severity.OK


def test_memory_beyond_a_cap_that_no_group_holds_is_ended_after_two_seconds():
    over = seconds(memory_bytes=[50 * MIB, 101 * MIB, 101 * MIB, 101 * MIB])
    assert verdict(over[:3]).severity is Severity.WARN
    assert verdict(over).reason is R.POLICY_MEMORY


# -- output and processor --------------------------------------------------------------------------------------------


def test_three_floods_of_output_in_a_window_are_a_bomb():
    assert verdict(seconds(output_bytes=[0, 10 * MIB, 20 * MIB, 30 * MIB])).reason is R.POLICY_OUTPUT
    assert verdict(seconds(output_bytes=[0, 10 * MIB, 20 * MIB])).severity is Severity.WARN
    assert verdict(seconds(output_bytes=[5 * MIB] * 3)).severity is Severity.OK


def test_a_sandbox_that_may_write_nothing_is_not_ended_for_a_word():
    samples = seconds(output_bytes=[0, 3 * MIB - 1])
    limits = Limits(output_bytes=0)
    assert judge(samples, limits=limits, settings=SETTINGS).severity is Severity.WARN
    assert judge(seconds(output_bytes=[0, 3 * MIB]), limits=limits, settings=SETTINGS).reason is R.POLICY_OUTPUT


def test_more_processors_than_allowed_over_a_whole_window_end_a_sandbox_only_while_the_node_is_short():
    spin = seconds(cpu_s=[1.6 * second for second in range(11)])
    assert verdict(spin).severity is Severity.WARN
    assert verdict(spin, pressure=Pressure(cpu_some=0.5)).reason is R.POLICY_CPU_TIME
    assert verdict(spin, cpu_kill_pressure=0.0).text == "1.60 processors for 10.0 s, 1 allowed and no group to hold it"
    assert verdict(spin[:10], cpu_kill_pressure=0.0).severity is Severity.OK  # not a whole window yet
    within = seconds(cpu_s=[1.5 * second for second in range(11)])
    assert verdict(within, cpu_kill_pressure=0.0).severity is Severity.OK


def test_a_total_of_processor_seconds_is_a_bound_only_if_it_is_given():
    used = seconds(cpu_s=[99.0, 100.0])
    assert verdict(used).severity is Severity.OK
    assert verdict(used, cpu_total_s=100.0).reason is R.POLICY_CPU_TIME
    assert verdict(used, cpu_total_s=101.0).severity is Severity.OK


# -- all together ----------------------------------------------------------------------------------------------------


def test_the_worst_comes_first_and_the_text_tells_what_it_is_ended_for():
    both = seconds(pids=[90] * 4, inodes=[0, 1000, 1000, 1000], disk_bytes=[0, 50 * MIB, 50 * MIB, 50 * MIB])
    found = verdict(both)
    assert [(one.reason, one.severity) for one in found.findings] == [
        (R.POLICY_INODES, Severity.KILL),
        (R.POLICY_BYTES, Severity.KILL),
        (R.POLICY_PIDS, Severity.WARN),
    ]
    assert found.reason is R.POLICY_INODES
    assert found.text == (
        "1000 of 1000 inodes, 1000 of them in 3.0 s; 52428800 of 52428800 bytes of files, 52428800 of them in 3.0 s"
    )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"interval_s": 0.0}, "interval_s is 0.0"),
        ({"warn_share": 0.97}, "warn_share is 0.97 and full_share 0.95"),
        ({"fill_share": 0.0}, "fill_share is 0.0"),
        ({"cpu_excess": 0.9}, "cpu_excess is 0.9; below 1"),
        ({"oom_kills": 0}, "oom_kills is 0"),
        ({"window_s": 6.0}, "Set window_s to 7 or more"),
        ({"evidence_bytes": 100}, "evidence_bytes is 100"),
        ({"full_s": -1.0}, "full_s is -1.0"),
    ],
)
def test_settings_that_would_end_innocent_sandboxes_or_none_are_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        WatchdogSettings(**wrong)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"interval_s": 0.0}, "interval_s is 0.0"),
        ({"relief": 0.0}, "relief is 0.0"),
        ({"memory_free": 1.0}, "memory_free is 1.0"),
        ({"evict_memory_full": 0.05}, "others may still start"),
    ],
)
def test_a_guard_that_would_contradict_itself_is_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        GuardSettings(**wrong)
