"""run.deterministic: what it refuses, what it fixes in child processes, what it makes of time."""

from __future__ import annotations

import numpy as np
import pytest

from rollmill.config import RollmillConfig, load_config
from rollmill.controller.translate import event_of_rollout, scheduler_settings
from rollmill.errors import ConfigError, RunDirectoryError
from rollmill.generator.wire import prompt_from_message, request_from_message, request_to_message
from rollmill.runtime.threads import process_environment
from rollmill.scheduling.events import FailureClass, RolloutFailed, RolloutFinished
from rollmill.telemetry.run_directory import RunDirectory
from rollmill.types import (
    GenerateRequest,
    Message,
    Rollout,
    SamplingParams,
    StopReason,
    Task,
    Turn,
    Unscored,
    VersionSpan,
    Wave,
    rollout_seed,
)

VALID = ("run.deterministic=true", "schedule.max_staleness=0", "generator.kernels=torch")


def config_of(*overrides: str) -> RollmillConfig:
    return load_config(None, overrides=overrides).config


def test_with_budget_zero_and_one_replica_it_is_accepted_and_told_to_the_core():
    assert scheduler_settings(config_of(*VALID), training_size=10).deterministic
    assert not scheduler_settings(config_of(), training_size=10).deterministic


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("schedule.max_staleness=2", ["schedule.max_staleness is 2", "schedule.max_staleness 0"]),
        ("schedule.group_oversampling=1.5", ["schedule.group_oversampling is 1.5", "schedule.group_oversampling 1"]),
        ("schedule.member_oversampling=1", ["schedule.member_oversampling is 1", "schedule.member_oversampling 0"]),
        ("generator.replicas=2", ["generator.replicas is 2", "generator.replicas 1"]),
        ("generator.kernels=auto", ['generator.kernels is "auto"', 'generator.kernels "native"', '"torch"']),
        ("run.on_generator_loss=degrade", ['run.on_generator_loss is "degrade"', 'run.on_generator_loss "restart"']),
    ],
)
def test_what_lets_timing_decide_is_refused_and_both_settings_are_named(override: str, parts: list[str]):
    with pytest.raises(ConfigError) as caught:
        config_of(*VALID, override)
    for part in ["run.deterministic is true", "run.deterministic false", *parts]:
        assert part in str(caught.value)


def test_a_child_process_may_not_choose_its_order_of_additions_or_its_threads():
    environment = process_environment(threads=2, deterministic=True, base={})
    expected = {"MKL_CBWR": "AUTO", "MKL_DYNAMIC": "FALSE", "OMP_DYNAMIC": "FALSE", "PYTHONHASHSEED": "0"}
    assert expected.items() <= environment.items()
    assert environment["OMP_NUM_THREADS"] == "2"
    assert not expected.keys() & process_environment(threads=2, base={}).keys()


def test_a_stricter_choice_of_the_user_stays():
    environment = process_environment(threads=1, deterministic=True, base={"MKL_CBWR": "COMPATIBLE"})
    assert environment["MKL_CBWR"] == "COMPATIBLE"


@pytest.mark.parametrize("key", ["generator.max_num_seqs", "generator.threads", "trainer.threads"])
def test_a_resume_may_not_change_what_rounds_otherwise(tmp_path, key: str):
    started = config_of(*VALID)
    RunDirectory.create(tmp_path / "one", config=started, started_at_s=0.0).close()
    with pytest.raises(RunDirectoryError, match=key):
        RunDirectory.resume(tmp_path / "one", started_at_s=1.0, config=config_of(*VALID, f"{key}=3"))


def test_a_resume_may_not_turn_it_on_or_off(tmp_path):
    RunDirectory.create(tmp_path / "one", config=config_of("schedule.max_staleness=0"), started_at_s=0.0).close()
    with pytest.raises(RunDirectoryError, match=r"run\.deterministic"):
        RunDirectory.resume(tmp_path / "one", started_at_s=1.0, config=config_of(*VALID))


def test_the_seed_of_a_rollout_follows_its_place_in_the_data():
    seeds = {rollout_seed(7, task_index=task, sibling=sibling) for task in range(50) for sibling in range(8)}
    assert len(seeds) == 400
    assert rollout_seed(7, task_index=3, sibling=1) == rollout_seed(7, task_index=3, sibling=1)
    assert rollout_seed(7, task_index=3, sibling=1) != rollout_seed(8, task_index=3, sibling=1)


@pytest.mark.parametrize("wave", [None, Wave(wave_id="w000012", size=32, index=0), Wave(wave_id="w1", size=2, index=1)])
def test_the_place_in_a_wave_crosses_the_wire(wave: Wave | None):
    asked = GenerateRequest(request_id="r", prompt_ids=np.array([1, 2]), sampling=SamplingParams(), wave=wave)
    message = request_to_message(asked)
    assert request_from_message(message, prompt_ids=prompt_from_message(message)).wave == wave


def unscored(reason: str) -> Rollout:
    turn = Turn(
        request_id="g0/0.1/turn0",
        prompt_ids=np.array([1], np.int32),
        output_ids=np.array([2], np.int32),
        behavior_logprobs=np.zeros(1, np.float32),
        version_spans=(VersionSpan(0, 1, 7),),
        stop_reason=StopReason.STOP,
    )
    return Rollout(
        rollout_id="g0/0.1",
        group_id="g0",
        sibling=0,
        attempt=1,
        task=Task(task_id="t", environment="toy", messages=(Message("user", "?"),)),
        turns=(turn,),
        outcome=Unscored(reason=reason),
        sampling=SamplingParams(),
        started_at_s=0.0,
        finished_at_s=1.0,
    )


@pytest.mark.parametrize("reason", ["reward_failed(timeout)", "reward_failed(died)"])
def test_a_scorer_that_was_too_slow_is_a_failure_and_no_sibling_less(reason: str):
    kept = {"optimizer_step_of": lambda _: 0, "at_s": 5.0}
    event = event_of_rollout(unscored(reason), deterministic=True, **kept)
    assert isinstance(event, RolloutFailed)
    assert event.failure is FailureClass.INFRA
    assert reason in event.reason
    # Otherwise it stays out of the baseline, as ever.
    assert isinstance(event_of_rollout(unscored(reason), **kept), RolloutFinished)


def test_a_reply_that_the_scorer_refuses_is_refused_in_every_run_and_stays_out_of_the_baseline():
    event = event_of_rollout(
        unscored("reward_failed(raised: not a number)"), optimizer_step_of=lambda _: 0, at_s=5.0, deterministic=True
    )
    assert isinstance(event, RolloutFinished)
    assert not event.counts
