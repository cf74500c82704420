"""Reading a configuration: strict keys, strict types, origins, and messages that name the valid form."""

from pathlib import Path

import pytest

from rollmill.config import RollmillConfig, dump_config, load_config, parse_config
from rollmill.config.load import all_keys, differing_keys, nearest_key
from rollmill.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "examples" / "arithmetic" / "train.toml"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "train.toml"
    path.write_text(text)
    return path


def test_the_main_job_is_read_as_it_is_written():
    config = load_config(EXAMPLE).config
    assert config.model.source == "smollm2-135m-instruct"
    assert (config.run.steps, config.schedule.batch_groups, config.schedule.group_size) == (36, 4, 8)
    assert (config.sampling.max_new_tokens, config.trainer.learning_rate) == (24, 3e-5)
    assert config.environment.heldout_size == 256
    (task,) = config.environment.tasks
    assert task.name == "basic_arithmetic"
    assert task.options == {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 1,
        "max_digits": 2,
        "operators": ["+"],
        "allow_parentheses": False,
    }


def test_every_value_knows_where_it_came_from(tmp_path):
    path = write(tmp_path, "[run]\nsteps = 5\n[schedule]\ngroup_size = 4\n")
    loaded = load_config(path, overrides=["schedule.group_size=16"])
    assert loaded.config.schedule.group_size == 16
    assert loaded.origins["schedule.group_size"] == "command line"
    assert loaded.origins["run.steps"] == "train.toml"
    assert loaded.origins["run.seed"] == "default"
    assert set(loaded.origins) == set(all_keys())


def test_without_a_file_and_overrides_everything_is_a_default():
    loaded = load_config(None)
    assert loaded.config == RollmillConfig()
    assert set(loaded.origins.values()) == {"default"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run.name=nightly", "nightly"),
        ('run.name="two words"', "two words"),
        ("run.steps=7", 7),
        ("sampling.temperature=0.5", 0.5),
        ("evaluation.at_end=false", False),
        ('environment.tasks=[{name = "gcd", weight = 2.0}]', "gcd"),
    ],
)
def test_an_override_is_written_as_in_toml_and_a_bare_word_is_text(text, expected):
    key = text.partition("=")[0]
    section, leaf = key.split(".")
    value = getattr(getattr(load_config(None, overrides=[text]).config, section), leaf)
    assert (value[0].name if key == "environment.tasks" else value) == expected


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("[schedule]\ngroupsize = 4\n", "schedule.group_size"),
        ("[trainer]\ngroup_size = 4\n", "schedule.group_size"),
        ("[shedule]\ngroup_size = 4\n", "schedule"),
        ("[trainer]\nlearningrate = 1.0\n", "trainer.learning_rate"),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_one_is_named(tmp_path, text, near):
    with pytest.raises(ConfigError, match=f"Did you mean '{near}'"):
        load_config(write(tmp_path, text))


def test_an_unknown_key_that_resembles_nothing_lists_the_keys_of_its_section(tmp_path):
    with pytest.raises(ConfigError, match=r"Keys of \[model\]: source, system_prompt"):
        load_config(write(tmp_path, "[model]\nzzz = 1\n"))


def test_an_unknown_override_names_the_command_line():
    with pytest.raises(ConfigError, match=r"command line: unknown key 'run.stepps'. Did you mean 'run.steps'"):
        load_config(None, overrides=["run.stepps=3"])


def test_an_unknown_key_of_a_task_names_the_keys_of_a_task(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'weight'"):
        load_config(write(tmp_path, '[[environment.tasks]]\nname = "gcd"\nwieght = 2.0\n'))


@pytest.mark.parametrize(
    ("override", "got", "expected"),
    [
        ("run.steps=1.5", "1.5", "integer"),
        ('run.steps="8"', "'8'", "integer"),
        ("evaluation.at_end=1", "1", "boolean"),
        ("schedule.group_size=1", "1", "greater than or equal to 2"),
        ("generator.engine=tgi", "'tgi'", "'embedded', 'vllm', 'sglang' or 'fake'"),
        ("environment.tasks=[]", r"\[\]", "at least 1 items"),
    ],
)
def test_a_wrong_type_or_range_prints_key_got_and_expected(override, got, expected):
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{key} got {got} .*expected {expected}"):
        load_config(None, overrides=[override])


def test_a_wrong_value_shows_a_valid_form():
    with pytest.raises(ConfigError, match="Valid, for example: `group_size = 8`"):
        load_config(None, overrides=["schedule.group_size=many"])


def test_all_wrong_values_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides=["run.steps=0", "schedule.group_size=1"])
    assert "run.steps" in str(caught.value)
    assert "schedule.group_size" in str(caught.value)


def test_an_endless_number_is_refused():
    with pytest.raises(ConfigError, match=r"run.stall_limit_s is inf; every number must be finite"):
        load_config(None, overrides=["run.stall_limit_s=inf"])


def test_a_date_is_refused_with_advice(tmp_path):
    with pytest.raises(ConfigError, match="Write it in quotes"):
        load_config(write(tmp_path, "[run]\nname = 2026-01-01\n"))


def test_an_override_without_a_value_shows_the_form():
    with pytest.raises(ConfigError, match=r"Write `section.key=value`"):
        load_config(None, overrides=["run.steps"])


def test_a_missing_file_says_what_to_copy(tmp_path):
    with pytest.raises(ConfigError, match=r"no configuration file .*examples/arithmetic/train.toml"):
        load_config(tmp_path / "none.toml")


def test_broken_toml_names_the_line_and_the_valid_forms(tmp_path):
    with pytest.raises(ConfigError, match=r"not valid TOML: .*line 2.*Valid forms"):
        load_config(write(tmp_path, "[run]\nsteps = = 3\n"))


def test_a_section_that_is_a_value_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'run' is a section, got 3 \(integer\)"):
        load_config(write(tmp_path, "run = 3\n"))


def test_a_dumped_configuration_reads_back_equal(tmp_path):
    config = load_config(EXAMPLE, overrides=["schedule.data_epochs=2", "trainer.betas=[0.8, 0.95]"]).config
    assert load_config(write(tmp_path, dump_config(config))).config == config


def test_a_setting_that_is_none_is_left_out_of_the_dump():
    assert "system_prompt" not in dump_config(RollmillConfig())
    assert parse_config({}) == RollmillConfig()


def test_differing_keys_give_both_values():
    new = load_config(None, overrides=["run.steps=7"]).config
    assert differing_keys(RollmillConfig(), new) == {"run.steps": (40, 7)}


def test_a_known_leaf_in_the_wrong_section_is_found():
    assert nearest_key("generator.learning_rate") == "trainer.learning_rate"
    assert nearest_key("qqqqq.zzzzz") is None


def test_a_table_inside_a_section_is_read_overridden_and_traced_key_by_key(tmp_path):
    path = write(tmp_path, "[generator]\nengine = 'vllm'\nmax_num_seqs = 8\n[generator.vllm]\nload_poll_s = 2.5\n")
    loaded = load_config(path, overrides=["generator.vllm.control_deadline_s=9.0"])
    vllm = loaded.config.generator.vllm
    assert (vllm.load_poll_s, vllm.control_deadline_s, loaded.config.generator.max_num_seqs) == (2.5, 9.0, 8)
    origins = {key: origin for key, origin in loaded.origins.items() if origin != "default"}
    assert origins == {
        "generator.engine": "train.toml",
        "generator.max_num_seqs": "train.toml",
        "generator.vllm.load_poll_s": "train.toml",
        "generator.vllm.control_deadline_s": "command line",
    }
    assert parse_config(load_config(path).config.model_dump(mode="json", exclude_none=True)) == load_config(path).config
    assert set(differing_keys(RollmillConfig(), load_config(path).config)) == {
        "generator.engine",
        "generator.max_num_seqs",
        "generator.vllm.load_poll_s",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[generator.vllm]\nload_pol_s = 1.0\n",
            "unknown key 'generator.vllm.load_pol_s'.*'generator.vllm.load_poll_s'",
        ),
        ("[generator]\nvllm = 3\n", "'generator.vllm' is a table, got 3"),
        (
            "[generator.vllm]\nload_poll_s = 'often'\n",
            "train.toml: generator.vllm.load_poll_s got 'often'.*load_poll_s = 1.0",
        ),
    ],
)
def test_a_wrong_key_of_a_table_inside_a_section_is_named_whole(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text))
