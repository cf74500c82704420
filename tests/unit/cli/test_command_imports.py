"""What a command imports before it does anything: everybody waits for that."""

import json
import subprocess
import sys

import click
import pytest

from rollmill.cli.app import cli


def imported(statement: str) -> set[str]:
    script = f"import sys; before = set(sys.modules); {statement}; new = set(sys.modules) - before\nimport json\n"
    script += "print(json.dumps(sorted(new)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_the_command_to_train_starts_importing_elsewhere_before_it_imports_much_itself():
    modules = imported("import rollmill.cli.app, rollmill.cli.train, rollmill.runtime.nursery")
    # 130 when it was set; 469 with everything that the command needs in the end.
    assert len(modules) < 170
    assert modules.isdisjoint({"numpy", "pydantic", "rich", "psutil", "torch", "rollmill.cli.training"})


@pytest.mark.parametrize("name", ["train", "eval", "model", "config", "summary", "autoscale", "bench"])
def test_every_command_has_the_name_under_which_it_is_found(name):
    context = click.Context(cli)
    assert name in cli.list_commands(context)
    command = cli.get_command(context, name)
    assert command is not None
    assert command.name == name


def test_a_command_that_does_not_exist_is_not_found():
    assert cli.get_command(click.Context(cli), "tran") is None
