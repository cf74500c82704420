"""`rollmill engine`: what is ready, and where it lies."""

from __future__ import annotations

import json
from importlib.metadata import distributions

from click.testing import CliRunner

from rollmill.cli.app import cli
from rollmill.generator.engines.vllm.environment import managed_folder


def test_an_environment_that_was_not_made_is_shown_with_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path))
    shown = CliRunner().invoke(cli, ["engine", "list"])
    assert shown.exit_code == 0
    assert "vllm      not installed: rollmill engine install vllm" in shown.output
    rows = {row["engine"]: row for row in json.loads(CliRunner().invoke(cli, ["engine", "list", "--json"]).output)}
    assert (rows["embedded"]["ready"], rows["vllm"]["ready"]) == (True, False)
    assert rows["vllm"]["environment"] == str(managed_folder())


def test_what_is_ready_is_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path))
    folder = managed_folder("cpu")
    folder.mkdir(parents=True)
    (folder / "ready").write_text("")
    done = CliRunner().invoke(cli, ["engine", "install", "vllm", "--device", "cpu", "--json"])
    assert json.loads(done.output) == {"engine": "vllm", "python": str(folder / "bin" / "python")}


def test_an_engine_that_has_no_environment_is_refused():
    refused = CliRunner().invoke(cli, ["engine", "install", "tgi"])
    assert refused.exit_code == 2
    assert "'tgi' is not 'vllm'" in refused.output


def test_the_transport_is_written_where_other_servers_find_it_and_never_over_an_older_one(tmp_path):
    folder = tmp_path / "plugin"
    done = CliRunner().invoke(cli, ["engine", "plugin", str(folder), "--json"])
    assert json.loads(done.output) == {"folder": str(folder)}
    (found,) = [one for one in distributions(path=[str(folder)])]
    (entry,) = found.entry_points
    assert (entry.group, entry.name, entry.value) == (
        "vllm.general_plugins",
        "rollmill_file",
        "rollmill_vllm_plugin:register",
    )
    assert (folder / "rollmill_vllm_plugin.py").exists()
    again = CliRunner().invoke(cli, ["engine", "plugin", str(folder)])
    assert again.exit_code != 0
    assert "name a new folder" in again.output
