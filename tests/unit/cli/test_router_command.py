"""`rollmill router` refuses what cannot be routed before it binds anything, in words."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from rollmill.cli.app import cli
from rollmill.cli.output import USER_ERROR_STATUS
from rollmill.config.router import load_router_settings
from rollmill.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say where the replicas are in one way"),
        (("--replica", "a:1", "--replicas-file", "f"), "say where the replicas are in one way"),
        (("--replica", "nowhere"), "write HOST:PORT"),
        (("--replica", "a:1", "--replica", "a:1"), "a:1 was given twice"),
        (("--replicas-dns", "fleet"), "write HOST:PORT"),
        (("--replica", "a:1", "--host", "0.0.0.0"), "can be reached from other machines"),
        (("--replica", "a:1", "--replica-tls-cert", "c.pem"), "a TLS certificate was given without its key"),
        (("--replica", "a:1", "--set", "max_quue=1"), "max_quue"),
        (("--replica", "a:1", "--set", "jobs.a.weight=0"), "jobs.a.weight"),
        (("--replica", "a:1", "--set", "max_queue"), "write --set KEY=VALUE"),
        (("--replica", "a:1", "--config", "missing.toml"), "missing.toml cannot be read"),
    ],
)
def test_what_cannot_be_routed_is_refused_with_the_next_action(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["router", *arguments, "--json"])
    assert result.exit_code == USER_ERROR_STATUS, result.output
    assert message in json.loads(result.output)["error"]["message"]


def test_settings_of_a_file_and_of_the_command_line_are_joined(tmp_path):
    path = tmp_path / "router.toml"
    path.write_text('[router]\nmax_queue = 7\n[router.jobs.a]\npriority = "high"\n')
    settings = load_router_settings(path, overrides=["jobs.a.max_in_flight=3", "router.poll_s=2"])
    assert (settings.max_queue, settings.poll_s) == (7, 2.0)
    assert (settings.job("a").priority, settings.job("a").max_in_flight) == ("high", 3)
    assert settings.job("unlisted") == settings.default_job


def test_a_file_with_other_tables_is_refused(tmp_path):
    path = tmp_path / "router.toml"
    path.write_text("[run]\nsteps = 1\n")
    with pytest.raises(ConfigError, match=r"has run; all settings of a router stand in its table \[router\]"):
        load_router_settings(path)
