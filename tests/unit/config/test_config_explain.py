"""`config explain` says value, unit, origin, meaning, and what moving a setting does."""

import json

import pytest
from click.testing import CliRunner

from rollmill.cli.app import cli
from rollmill.config import load_config, render_explained
from rollmill.config.disaggregation import RoleSettings
from rollmill.config.explain import explain, explain_defaults, render_reference
from rollmill.config.explain_others import explain_other, explain_others, render_others
from rollmill.config.load import NAMES_ELSEWHERE, all_keys, field_of
from rollmill.config.router import JobSettings, RouterSettings
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


def test_the_settings_of_the_router_and_of_a_split_are_explained_alike():
    rows = explain_others()
    assert [row.key for row in rows if not row.meaning] == []
    assert [row.key for row in rows if row.unit and not (row.raising and row.lowering)] == []
    keys = {row.key for row in rows}
    assert {f"router.{name}" for name in RouterSettings.model_fields} - keys == {"router.default_job"}
    assert {f"router.default_job.{name}" for name in JobSettings.model_fields} <= keys
    assert {f"split.decode.{name}" for name in RoleSettings.model_fields} <= keys
    page = render_others()
    assert [key for key in keys if f"### `{key.partition('.')[2]}`\n" not in page] == []
    assert page.count("\n### ") == len(rows)
    assert "* raising: fewer refusals\n* lowering: shorter waits, less memory\n" in page


def test_the_files_of_router_and_split_give_their_values_and_origins(tmp_path):
    router, split = tmp_path / "router.toml", tmp_path / "split.toml"
    router.write_text("[router]\nmax_queue = 7\n[router.default_job]\nweight = 2.0\n")
    split.write_text('model = "/m"\n[decode]\nservers = 3\n')
    found = {row.key: row for row in explain_other("router", path=router, overrides=["poll_s=2"])}
    assert [(found[f"router.{key}"].value, found[f"router.{key}"].origin) for key in ("max_queue", "poll_s")] == [
        (7, "router.toml"),
        (2.0, "command line"),
    ]
    assert (found["router.default_job.weight"].value, found["router.default_job.weight"].default) == (2.0, 1.0)
    assert found["router.list_s"].origin == "default"
    (servers,) = explain_other("split.decode.servers", path=split)
    assert (servers.value, servers.origin, servers.default) == (3, "split.toml", 1)
    (prefill,) = explain_other("split.prefill.servers", path=split)
    assert prefill.origin == "default"
    with pytest.raises(ConfigError, match=r"Did you mean 'router\.max_queue'"):
        explain_other("router.max_quue")
    with pytest.raises(ConfigError, match="a split has no --set"):
        explain_other("split", overrides=["model=x"])


def test_the_command_explains_them_too():
    done = CliRunner().invoke(cli, ["config", "explain", "router.hedge_budget", "--json"])
    assert [row["key"] for row in json.loads(done.output)] == ["router.hedge_budget"]
    everything = CliRunner().invoke(cli, ["config", "explain"]).output
    assert "\nsplit.kv_lease_s = 30 s   (default; default 30)\n" in everything


@pytest.mark.parametrize(("theirs", "ours"), [("max_batch_size", "max_num_seqs"), ("tp_size", "tensor_parallel_size")])
def test_a_name_of_other_servers_is_refused_with_ours(theirs, ours):
    with pytest.raises(ConfigError, match=rf"called {theirs} elsewhere is 'generator\.{ours}' here"):
        load_config(None, overrides=[f"generator.{theirs}=4"])
    assert {key for key in NAMES_ELSEWHERE.values() if field_of(key) is None} == set()


def test_the_reference_page_names_every_setting_once():
    page = render_reference(explain_defaults())
    assert [key for key in all_keys() if f"### `{key.partition('.')[2]}`" not in page] == []
    assert page.count("\n### ") + page.startswith("### ") == len(all_keys())
