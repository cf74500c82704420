"""Settings that have files of their own, explained as those of a run are: the router's, and a prefill/decode split's.

The text comes from the models alone. Decides nothing.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollmill.config.disaggregation import SplitSettings, load_split
from rollmill.config.explain import Explained, explained_field, render_settings
from rollmill.config.load import COMMAND_LINE_ORIGIN, DEFAULT_ORIGIN, keys_of
from rollmill.config.router import RouterSettings, load_router_settings
from rollmill.config.schema import Section
from rollmill.errors import ConfigError


class Other(msgspec.Struct, frozen=True, kw_only=True):
    """A tree of settings beside the run's.

    Attributes:
        title: heading of the reference page.
        text: where these settings are written.
        read: returns the settings of a file with overrides.
    """

    model: type[Section]
    title: str
    text: str
    read: Callable[[Path | None, Sequence[str]], Section]


def _read_router(path: Path | None, overrides: Sequence[str]) -> Section:
    return load_router_settings(path, overrides=overrides)


def _read_split(path: Path | None, overrides: Sequence[str]) -> Section:
    if overrides:
        raise ConfigError("a split has no --set: its settings stand in its file alone; edit that")
    return SplitSettings() if path is None else load_split(path)


OTHERS: Mapping[str, Other] = {
    "router": Other(
        model=RouterSettings,
        title="[router]",
        text="Of `rollmill router`: the table `[router]` of its own file (`--config`), or `--set KEY=VALUE`. A job's "
        "own limits stand in `[router.jobs.NAME]`, with the keys of `[router.default_job]`.",
        read=_read_router,
    ),
    "split": Other(
        model=SplitSettings,
        title="A split of prefill and decode",
        text="Of the file that `rollmill disaggregate` reads: keys at its top, and the tables `[prefill]`, `[decode]` "
        "and `[ports]`. `rollmill config explain` calls them `split.KEY`.",
        read=_read_split,
    ),
}
"""What their keys begin with -> the tree."""


def is_other(key: str | None) -> bool:
    """Return whether a key belongs to settings with a file of their own.

    Example:
        >>> is_other("router.max_queue"), is_other("generator.max_num_seqs"), is_other(None)
        (True, False, False)
    """
    return key is not None and key.partition(".")[0] in OTHERS


def explain_other(key: str, *, path: Path | None = None, overrides: Sequence[str] = ()) -> list[Explained]:
    """Return what there is to know of one such setting, of a table, or of a whole tree.

    Args:
        key: `router`, `router.max_queue`, `split.prefill`, ...
        path: their file; defaults without it.
        overrides: as of the command that they belong to.

    Raises:
        ConfigError: if there is no such key, naming the nearest; or the file is refused.
    """
    head = key.partition(".")[0]
    other = OTHERS[head]
    settings = other.read(path, overrides)
    names = tuple(keys_of(other.model, prefix=head))
    chosen = [name for name in names if name == key or name.startswith(f"{key}.")]
    if not chosen:
        near = difflib.get_close_matches(key, names, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Keys: {', '.join(names)}."
        raise ConfigError(f"config explain: unknown key {key!r}. {hint}")
    said = {f"{head}.{text.partition('=')[0].strip().removeprefix(f'{head}.')}" for text in overrides}
    return [_explained(name, settings, path=path, overridden=name in said) for name in chosen]


def explain_others() -> list[Explained]:
    """Return every such setting at its default."""
    return [row for head in OTHERS for row in explain_other(head)]


def render_others() -> str:
    """Return them as a Markdown reference, one section for each tree."""
    return "\n".join(
        f"## {other.title}\n\n{other.text}\n\n{render_settings(explain_other(head))}" for head, other in OTHERS.items()
    )


def _explained(key: str, settings: Section, *, path: Path | None, overridden: bool) -> Explained:
    _, *tables, leaf = key.split(".")
    table: Any = functools.reduce(getattr, tables, settings)
    in_file = path is not None and _is_set(settings, [*tables, leaf])
    origin = COMMAND_LINE_ORIGIN if overridden else path.name if path is not None and in_file else DEFAULT_ORIGIN
    model = type(table)
    return explained_field(
        model, leaf, key=key, value=getattr(table, leaf), origin=origin, default=model.model_fields[leaf].default
    )


def _is_set(settings: Section, names: Sequence[str]) -> bool:
    """Return whether a setting was written, and not left at its default."""
    table: Any = settings
    for name in names:
        if name not in table.model_fields_set:
            return False
        table = getattr(table, name)
    return True
