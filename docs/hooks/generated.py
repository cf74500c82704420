"""Fills marked places of the reference pages from the code: configuration, errors, command line."""

import inspect
from collections.abc import Callable, Iterator

import click

from rollmill import errors
from rollmill.cli.app import cli
from rollmill.config.explain import explain_defaults, render_reference


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace each marker that the page has; called by mkdocs for every page."""
    for marker, make in GENERATED.items():
        if marker in markdown:
            markdown = markdown.replace(marker, make())
    return markdown


def configuration() -> str:
    """Return every setting with its default, unit and effect."""
    return render_reference(explain_defaults())


def error_table() -> str:
    """Return the tree of errors as a table of codes."""
    rows = [
        "| Code | Error | What it means | Who acts |",
        "|---|---|---|---|",
    ]
    for kind, depth in _tree(errors.RollmillError):
        who = "you" if issubclass(kind, errors.UserError) else "see the message"
        meaning = (inspect.getdoc(kind) or "").splitlines()[0]
        rows.append(f"| `{kind.code}` | {'&nbsp;' * 4 * depth}`{kind.__name__}` | {meaning} | {who} |")
    return "\n".join(rows)


def command_line() -> str:
    """Return the help of every command."""
    return "\n".join(_commands(cli, path="rollmill"))


def _tree(kind: type[errors.RollmillError], depth: int = 0) -> Iterator[tuple[type[errors.RollmillError], int]]:
    yield kind, depth
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _tree(child, depth + 1)


def _commands(command: click.Command, *, path: str) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    yield f"## `{path}`\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None:
                yield from _commands(child, path=f"{path} {name}")


GENERATED: dict[str, Callable[[], str]] = {
    "<!-- generated: configuration -->": configuration,
    "<!-- generated: errors -->": error_table,
    "<!-- generated: command line -->": command_line,
}
