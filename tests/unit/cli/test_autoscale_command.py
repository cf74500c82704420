"""`rollmill autoscale`: its options are the settings of the law, and bad ones are refused before anything starts."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from rollmill.cli.app import cli
from rollmill.cli.autoscale import autoscale_command
from rollmill.scheduling.scaling import ScalingSettings


def test_every_setting_of_the_law_is_an_option_with_the_same_default():
    options = {option.name: option.default for option in autoscale_command.params}
    law = {name: getattr(ScalingSettings(), name) for name in ScalingSettings.__struct_fields__}
    assert {name: options[name] for name in law} == law


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--min-replicas", "3", "--max-replicas", "2"], "max_replicas 2 is below min_replicas 3"),
        (["--low-usage", "0.95"], "low_usage 0.95"),
        (["--replica-tls-key", "k.pem"], "a TLS key was given without its certificate"),
        (["--", "--tls-cert", "s.pem", "--tls-key", "s.key"], "nothing says how to call them"),
    ],
)
def test_settings_that_cannot_be_kept_end_the_command_before_it_starts_anything(tmp_path, arguments, complaint):
    file = tmp_path / "replicas.txt"
    done = CliRunner().invoke(cli, ["autoscale", "--replicas-file", str(file), "--json", *arguments])
    assert done.exit_code == 2
    assert complaint in json.loads(done.output)["error"]["message"]
    assert not file.exists()


def test_a_misspelt_option_is_not_taken_for_one_of_a_replica(tmp_path):
    file = tmp_path / "replicas.txt"
    done = CliRunner().invoke(cli, ["autoscale", "--replicas-file", str(file), "--modle", "x"])
    assert done.exit_code == 2
    assert "--modle" in done.output
