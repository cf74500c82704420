"""`config explain` says value, unit, origin, meaning, and what moving a setting does."""

import pytest

from rollmill.config import load_config, render_explained
from rollmill.config.explain import explain, explain_defaults, render_reference
from rollmill.config.load import all_keys
from rollmill.errors import ConfigError


def test_one_setting_is_explained_in_full():
    loaded = load_config(None, overrides=["schedule.group_size=16"])
    (row,) = explain(loaded, "schedule.group_size")
    assert (row.value, row.unit, row.origin, row.default) == (16, "rollouts", "command line", 8)
    assert row.meaning == "Rollouts that share a baseline."
    assert row.valid == ">= 2"
    assert row.raising
    assert row.lowering


def test_a_section_gives_its_settings_and_nothing_gives_all():
    loaded = load_config(None)
    assert [row.key for row in explain(loaded, "model")] == ["model.source", "model.system_prompt"]
    assert [row.key for row in explain(loaded)] == list(all_keys())


def test_every_setting_has_a_meaning():
    assert [row.key for row in explain_defaults() if not row.meaning] == []


def test_every_number_with_a_unit_says_what_moving_it_does():
    unclear = [row.key for row in explain_defaults() if row.unit and not (row.raising and row.lowering)]
    # The cap in evaluation follows sampling.max_new_tokens unless set; its two directions are that setting's.
    assert unclear in ([], ["evaluation.max_new_tokens"])


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match=r"Did you mean 'schedule.group_size'"):
        explain(load_config(None), "schedule.groupsize")


def test_the_text_shows_value_origin_and_both_directions():
    text = render_explained(explain(load_config(None, overrides=["run.steps=7"]), "run.steps"))
    assert text.startswith("run.steps = 7 optimizer steps   (command line; default 40)\n")
    assert "  raising: longer run, more learning\n  lowering: shorter run\n" in text


def test_the_reference_page_names_every_setting_once():
    page = render_reference(explain_defaults())
    assert [key for key in all_keys() if f"### `{key.partition('.')[2]}`" not in page] == []
    assert page.count("\n### ") + page.startswith("### ") == len(all_keys())
