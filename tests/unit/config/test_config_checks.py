"""Rules between settings: both numbers, why, and the nearest valid values."""

import pytest

from rollmill.config import RollmillConfig, check, load_config, warnings_of
from rollmill.errors import ConfigError


def with_settings(*overrides: str) -> RollmillConfig:
    return load_config(None, overrides=overrides).config


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides=overrides)
    return str(caught.value)


def test_the_defaults_pass():
    check(RollmillConfig())
    assert warnings_of(RollmillConfig(), cores=2) == ()


def test_temperature_zero_is_refused_in_training_and_allowed_in_evaluation():
    assert "sampling.temperature is 0" in refusal("sampling.temperature=0")
    check(with_settings("evaluation.temperature=0"))


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["sampling.top_p=0.9"], ["sampling.top_p is 0.9", "Nearest valid value: 1.0"]),
        (["sampling.top_k=40"], ["sampling.top_k is 40", "Nearest valid value: 0"]),
        (
            ["sampling.max_new_tokens=256", "generator.max_model_len=256"],
            ["is 256 and generator.max_model_len is 256", "at most 255", "at least 257"],
        ),
        (["evaluation.max_new_tokens=300"], ["evaluation.max_new_tokens is 300", "at most 255", "at least 301"]),
        (["trainer.micro_batch_tokens=100"], ["is 100 and generator.max_model_len is 256", "at least 256"]),
        (
            ["schedule.overlong=soft_penalty", "schedule.overlong_buffer_tokens=30"],
            ["overlong_buffer_tokens is 30", "max_new_tokens is 24", "Nearest valid value: 24"],
        ),
        (
            ["schedule.window_groups=3"],
            ["window_groups is 3", "batch_groups is 4", "window_groups 4", "batch_groups 3"],
        ),
        (
            ["generator.max_num_batched_tokens=40", "generator.max_num_seqs=48"],
            ["max_num_batched_tokens is 40", "max_num_seqs is 48", "max_num_batched_tokens 48", "max_num_seqs 40"],
        ),
        (
            ["generator.kv_on_update=drain", "generator.drain_on_update_s=40"],
            ["drain_on_update_s is 40", "load_deadline_s is 60", "drain_on_update_s 30", "load_deadline_s 80"],
        ),
        (["generator.quantization=int8", "generator.kernels=torch"], ['is "int8"', 'kernels "auto"', '"none"']),
        (["generator.speculation=draft"], ["draft_model is not set", 'speculation "ngram"']),
        (["generator.draft_model=small"], ["draft_model is 'small'", 'speculation is "off"', "leave generator.draft"]),
        (
            ["generator.engine=vllm", "generator.speculation=draft", "generator.draft_model=small"],
            ["generator.speculation is 'draft'", "generator.draft_model is 'small'", "Engines that have it: embedded"],
        ),
        (["schedule.reopen_groups=true"], ["member_oversampling is 0", "member_oversampling 1"]),
        (["schedule.data_epochs=0"], ["data_epochs is 0", "Nearest valid value: 1"]),
        (["schedule.rollout_deadline_s=400"], ["is 400 s", "group_deadline_s is 300 s", "at most 300", "at least 400"]),
        (["generator.request_deadline_s=121"], ["is 121 s", "rollout_deadline_s is 120 s", "at most 120"]),
        (["environment.scoring_deadline_s=500"], ["is 500 s", "rollout_deadline_s is 120 s"]),
        (["run.stall_report_s=600"], ["stall_report_s is 600 s", "stall_limit_s is 600 s", "below 600", "above 600"]),
        (["algorithm.loss=dapo"], ["clip_high 0.2", "clip_low 0.2", "clip_high 0.28"]),
        (["algorithm.clip_low=1.5"], ["clip_low is 1.5", "-0.5"]),
        (["algorithm.loss=gspo", "algorithm.correction=masked_is"], ["clipped_is", "truncated_is", "none"]),
        (["algorithm.correction_cap=1.0"], ["correction_cap is 1", "above 1"]),
        (["trainer.betas=[0.9, 1.0]"], ["trainer.betas[1] is 1", "0.99"]),
        # 1000 problems x 0.1 = about 100 held out; 256 need 2560.
        (
            ["environment.pool_size=1000"],
            [
                "pool_size 1000 x heldout_fraction 0.1",
                "about 100",
                "asks for 256",
                "pool_size 2560",
                "heldout_size 100",
            ],
        ),
    ],
)
def test_an_impossible_combination_prints_both_numbers_and_the_nearest_valid_values(overrides, parts):
    message = refusal(*overrides)
    assert [part for part in parts if part not in message] == []


def test_all_broken_rules_are_reported_at_once():
    assert len(refusal("sampling.top_p=0.9", "schedule.window_groups=3").splitlines()) == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.loss=dapo", "algorithm.clip_high=0.28"],
        ["generator.request_deadline_s=120", "schedule.rollout_deadline_s=120"],
        ["schedule.reopen_groups=true", "schedule.member_oversampling=1"],
        ["schedule.overlong=soft_penalty", "schedule.overlong_buffer_tokens=24"],
        ["environment.kind=package.module:Factory", "environment.pool_size=10"],
    ],
)
def test_the_nearest_valid_values_pass(overrides):
    check(with_settings(*overrides))


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["generator.max_num_seqs=4"], "a group has 8 siblings"),
        # (1 + 1) x 4 x 8 = 64 rollouts may be promised; 80 slots leave 16 empty.
        (["generator.max_num_seqs=80", "schedule.max_staleness=1"], "16 slots stay empty"),
        (["algorithm.correction=none", "algorithm.correction_cap=3"], "correction_cap has no effect"),
        (["algorithm.clip_high=0.28"], 'clip_high has no effect while algorithm.correction is "clipped_is"'),
        (["algorithm.advantage=rloo", "algorithm.advantage_eps=0.1"], "advantage_eps has no effect"),
        (["schedule.overlong_penalty=2"], "overlong_penalty has no effect"),
        (["algorithm.signal=shaped_reward"], "algorithm.signal has no effect"),
        (["algorithm.correction=none"], "max_staleness is 2"),
        (["trainer.checkpoint_every_steps=100"], "checkpoint_every_steps is 100 and run.steps is 40"),
        (["run.steps=2"], "warmup_steps is 2 and run.steps is 2"),
        (["run.stall_limit_s=90"], "stall_limit_s is 90 s"),
        (["schedule.infra_failures_in_a_row=2"], "infra_failures_in_a_row is 2"),
        (["evaluation.temperature=0.7"], "evaluation.temperature is 0.7"),
        (["evaluation.at_start=false"], "cannot say what training changed"),
        (["algorithm.reward_shuffle=true"], "control run"),
        (
            [
                "run.deterministic=true",
                "generator.kernels=torch",
                "schedule.max_staleness=0",
                "generator.speculation=ngram",
            ],
            "no effect in deterministic mode",
        ),
        (["schedule.member_oversampling=9"], "surplus"),
    ],
)
def test_a_setting_without_effect_or_with_waste_is_a_warning(overrides, part):
    assert any(part in sentence for sentence in warnings_of(with_settings(*overrides)))


def test_more_threads_than_cores_is_a_warning_with_both_numbers():
    config = with_settings("trainer.threads=2", "generator.replicas=2")
    assert any("4 torch threads" in sentence and "on 2 cores" in sentence for sentence in warnings_of(config, cores=2))
    assert not any("torch threads" in sentence for sentence in warnings_of(config, cores=4))


def test_a_wait_for_a_replica_must_end_before_the_run_counts_as_stalled():
    long = ("run.replica_deadline_s=700", "run.stall_limit_s=600")
    told = refusal("run.on_generator_loss=wait", *long)
    assert "run.replica_deadline_s 700 s" in told
    assert "run.stall_limit_s is 600 s" in told
    check(with_settings("run.on_generator_loss=restart", *long))


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["generator.fleet.job=main"], ["fleet.job is set", "fleet.address is not", "leave the section out"]),
        (["generator.fleet.address=router"], ['"router", which has no port', '"router:50051"']),
        (
            ["generator.fleet.address=node-7:50051"],
            ["on another machine", 'weights.transport is "auto"', 'weights.transport "file"'],
        ),
        (
            ["generator.fleet.address=127.0.0.1:1", "generator.fleet.adapter=maths"],
            ["trainer.lora_rank is 0", "leave generator.fleet.adapter out"],
        ),
    ],
)
def test_a_fleet_that_cannot_serve_the_run_is_refused(overrides: list[str], parts: list[str]) -> None:
    message = refusal(*overrides)
    assert [part for part in parts if part not in message] == []


def test_a_fleet_is_no_process_and_no_thread_of_the_run() -> None:
    config = with_settings("generator.fleet.address=127.0.0.1:1", "generator.replicas=3", "generator.threads=8")
    assert config.generator.own_replicas == 0
    (warning,) = warnings_of(config, cores=2)  # none of threads
    assert "generator.replicas is 3 and has no effect" in warning
    alone = with_settings("generator.fleet.address=127.0.0.1:1", "generator.threads=8")
    assert warnings_of(alone, cores=2) == ()
    check(with_settings("generator.fleet.address=node-7:1", "weights.transport=file"))
