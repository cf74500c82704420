"""What README and docs tell people to type exists: commands, options, make targets, files, settings, links."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rollmill.cli.app import cli
from rollmill.config import load_config
from rollmill.config.disaggregation import load_split
from rollmill.config.load import all_keys
from rollmill.config.router import load_router_settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
SECTIONS = "|".join(sorted({key.partition(".")[0] for key in all_keys()}))
SETTING = re.compile(rf"`(?:--set )?((?:{SECTIONS})(?:\.[a-z_]+)+)\b")


def blocks(*languages: str) -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
            if language in languages:
                yield page, text


def typed_lines() -> list[tuple[str, str]]:
    """Return (page, command) for every line that a reader types: after a `$` in a session, any line in a script."""
    found: list[tuple[str, str]] = []
    for page, block in blocks("console", "bash"):
        text = re.sub(r"\\\n\s*(?:> ?)?", "", block)  # a line that ends with a backslash goes on
        prompts = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
        scripts = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        found += [(page.name, line) for line in prompts or scripts]
    return found


def commands_of(program: str) -> list[tuple[str, str]]:
    """Return (page, command line) for each command of a program, without repetitions."""
    pairs = [(page, line) for page, line in typed_lines() if shlex.split(line)[:1] == [program]]
    return list({line: (page, line) for page, line in pairs}.values())


def parse(arguments: list[str]) -> click.Context:
    """Parse a command line as the program would, without running it."""
    command: click.Command = cli
    context, name, rest = click.Context(cli, info_name="rollmill"), "rollmill", list(arguments)
    while isinstance(command, click.Group):
        name, child, rest = command.resolve_command(context, rest)
        assert child is not None
        command, context = child, click.Context(child, info_name=name, parent=context)
    return command.make_context(name, rest, parent=context.parent)


def test_the_pages_have_commands_to_check():
    assert len(commands_of("rollmill")) >= 10
    assert len(commands_of("make")) >= 4


@pytest.mark.parametrize(("page", "line"), commands_of("rollmill"), ids=lambda value: value)
def test_every_rollmill_command_of_the_pages_is_understood(page, line):
    arguments = shlex.split(line)[1:]
    if arguments == ["--version"]:
        return
    context = parse(arguments)
    overrides = context.params.get("overrides", ())
    if context.command.name == "train":
        load_config(None, overrides=overrides)
    key = context.params.get("key")
    assert key is None or key in all_keys()


@pytest.mark.parametrize("arguments", [["trian", "x.toml"], ["train", "--sett", "a=1"], ["model", "lst"]])
def test_the_check_refuses_a_command_that_does_not_exist(arguments):
    with pytest.raises(click.UsageError):
        parse(arguments)


def test_the_program_answers_with_its_commands():
    result = subprocess.run(
        [sys.executable, "-m", "rollmill.cli", "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    for name in ("train", "eval", "model", "config"):
        assert re.search(rf"^\s+{name}\b", result.stdout, re.MULTILINE)


def test_every_make_target_of_the_pages_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = {word for _, line in commands_of("make") for word in shlex.split(line)[1:] if "=" not in word}
    assert asked
    assert asked - targets == set()


def test_every_example_file_of_the_pages_exists():
    named = {word for _, line in typed_lines() for word in shlex.split(line) if word.startswith("examples/")}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_every_setting_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []
    tables = {key.rpartition(".")[0] for key in all_keys()}
    assert [key for key in SETTING.findall(text) if key not in all_keys() and key not in tables] == []


@pytest.mark.parametrize(
    ("page", "text"), list(blocks("toml")), ids=[f"{page.stem}-{n}" for n, (page, _) in enumerate(blocks("toml"))]
)
def test_every_configuration_of_the_pages_is_accepted(page, text, tmp_path):
    path = tmp_path / f"{page.stem}.toml"
    path.write_text(text, encoding="utf-8")
    if text.startswith("[router"):  # a router outlives runs and has settings of its own
        assert load_router_settings(path).jobs
    elif text.startswith("# split.toml"):  # of a fleet that is no run's
        assert load_split(path).model
    else:
        load_config(path)


def test_the_readme_shows_the_main_job_as_it_is(tmp_path):
    (text,) = [text for page, text in blocks("toml") if page.name == "README.md"]
    path = tmp_path / "train.toml"
    path.write_text(text, encoding="utf-8")
    assert load_config(path).config == load_config(ROOT / "examples" / "arithmetic" / "train.toml").config


@pytest.mark.parametrize(
    ("page", "text"), list(blocks("python")), ids=[f"{page.stem}-{n}" for n, (page, _) in enumerate(blocks("python"))]
)
def test_every_python_block_of_the_pages_runs(page, text):
    exec(compile(text, str(page), "exec"), {})
