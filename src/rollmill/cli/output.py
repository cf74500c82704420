"""How commands speak: text for people, one JSON document for programs, and exit statuses.

Exit status 0: done; 1: something failed; 2: something the user can fix; 130: stopped by Ctrl-C.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import click
import msgspec

from rollmill.errors import RollmillError, UserError

P = ParamSpec("P")
R = TypeVar("R")

FAULT_STATUS = 1
USER_ERROR_STATUS = 2
INTERRUPTED_STATUS = 130


def json_option(command: Callable[P, R]) -> Callable[P, R]:
    """Add `--json` to a command, and turn its errors into one line or one document."""

    @functools.wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        as_json = bool(kwargs.get("as_json"))
        try:
            return command(*args, **kwargs)
        except RollmillError as error:
            show_error(error.code, str(error), as_json=as_json)
            sys.exit(USER_ERROR_STATUS if isinstance(error, UserError) else FAULT_STATUS)
        except KeyboardInterrupt:
            show_error("interrupted", "stopped by Ctrl-C.", as_json=as_json)
            sys.exit(INTERRUPTED_STATUS)

    option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
    return option(guarded)


def show_error(code: str, message: str, *, as_json: bool, details: dict[str, Any] | None = None) -> None:
    """Print an error: on stderr for people, as the JSON document for programs."""
    if as_json:
        show_json({"error": {"code": code, "message": message, **(details or {})}})
    else:
        click.echo(f"error [{code}]: {message}", err=True)


def show_warnings(warnings: Iterable[str], *, as_json: bool) -> None:
    """Print warnings on stderr for people; a document has them in it."""
    for warning in () if as_json else warnings:
        click.echo(f"warning: {warning}", err=True)


def show_json(value: Any) -> None:
    """Print a JSON document."""
    click.echo(json.dumps(msgspec.to_builtins(value, str_keys=True), indent=2, allow_nan=False))


def show(value: Any, *, text: str, as_json: bool) -> None:
    """Print the document or the text."""
    if as_json:
        show_json(value)
    else:
        click.echo(text.rstrip("\n"))
