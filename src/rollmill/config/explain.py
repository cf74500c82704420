"""What every setting is, where its value came from, and what moving it does.

The text comes from `rollmill.config.schema` alone, so that the schema, `rollmill config explain` and the reference
page of the documentation cannot disagree. Decides nothing.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import msgspec
import tomli_w

from rollmill.config.load import (
    DEFAULT_ORIGIN,
    LoadedConfig,
    all_keys,
    field_of,
    sections,
    unknown_key_message,
    value_at,
)
from rollmill.config.schema import RollmillConfig
from rollmill.config.section import Section
from rollmill.errors import ConfigError


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """One resolved setting.

    Attributes:
        key: `section.key`.
        value: resolved value, as plain data.
        unit: of the value; empty where it has none.
        origin: `default`, the file's name, or `command line`.
        meaning: what it is, and what `None` or 0 means.
        raising, lowering: effect of moving it; empty where it has no direction.
        default: value when nothing is said.
        valid: choices or range, in words; empty where anything of the type goes.
    """

    key: str
    value: Any
    unit: str
    origin: str
    meaning: str
    raising: str
    lowering: str
    default: Any
    valid: str = ""


def explain(loaded: LoadedConfig, key: str | None = None) -> list[Explained]:
    """Return what there is to know of one setting, of one section, or of all.

    Args:
        loaded: the configuration with its origins.
        key: `section.key`, a `section`, or `None` for everything.

    Raises:
        ConfigError: if there is no such key; names the nearest.
    """
    return [_explained(loaded, name) for name in _selected(key)]


def explain_defaults() -> list[Explained]:
    """Return every setting at its default, for the reference page."""
    return explain(LoadedConfig(config=RollmillConfig(), origins=dict.fromkeys(all_keys(), DEFAULT_ORIGIN)))


def render_explained(rows: list[Explained]) -> str:
    """Return the settings as text, one paragraph each."""
    return "\n\n".join(_paragraph(row) for row in rows) + "\n"


def render_reference(rows: list[Explained]) -> str:
    """Return the settings as a Markdown reference, one section per table of the configuration."""
    parts: list[str] = []
    for head, of_section in itertools.groupby(rows, key=lambda row: row.key.partition(".")[0]):
        parts.append(f"## [{head}]\n\n{RollmillConfig.model_fields[head].description or ''}\n")
        parts.append(render_settings(list(of_section)))
    return "\n".join(parts)


def render_settings(rows: list[Explained]) -> str:
    """Return the settings of one section as Markdown, each under its name in it."""
    parts: list[str] = []
    for row in rows:
        leaf = row.key.partition(".")[2]
        facts = [f"default `{_toml(row.default)}`"]
        facts += [f"unit {row.unit}"] if row.unit else []
        facts += [f"valid: {row.valid}"] if row.valid else []
        parts.append(f"### `{leaf}`\n\n{row.meaning}\n\n*{'; '.join(facts)}*\n")
        moves = [f"raising: {row.raising}"] if row.raising else []
        moves += [f"lowering: {row.lowering}"] if row.lowering else []
        if moves:
            parts.append("\n".join(f"* {move}" for move in moves) + "\n")
    return "\n".join(parts)


def _selected(key: str | None) -> tuple[str, ...]:
    names = all_keys()
    if key is None:
        return names
    if key in names:
        return (key,)
    if key in sections() or any(name.startswith(f"{key}.") for name in names):
        return tuple(name for name in names if name.startswith(f"{key}."))
    raise ConfigError(unknown_key_message(key, where="config explain"))


def _explained(loaded: LoadedConfig, key: str) -> Explained:
    field = field_of(key)
    if field is None:
        raise ConfigError(unknown_key_message(key, where="config explain"))
    model, leaf = field
    info = model.model_fields[leaf]
    default = value_at(RollmillConfig(), key) if info.is_required() or key.startswith("environment.") else info.default
    origin = loaded.origins.get(key, DEFAULT_ORIGIN)
    return explained_field(model, leaf, key=key, value=value_at(loaded.config, key), origin=origin, default=default)


def explained_field(model: type[Section], leaf: str, *, key: str, value: Any, origin: str, default: Any) -> Explained:
    """Return what there is to know of a field of a table.

    Args:
        model: the table.
        leaf: the field's name in it.
        key: its whole name.
        value: as it is resolved.
        origin: where that came from.
        default: value when nothing is said.
    """
    info = model.model_fields[leaf]
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    return Explained(
        key=key,
        value=_plain(value),
        unit=str(extra.get("unit", "")),
        origin=origin,
        meaning=" ".join((info.description or "").split()),
        raising=str(extra.get("raising", "")),
        lowering=str(extra.get("lowering", "")),
        default=_plain(default),
        valid=_valid(model, leaf),
    )


@functools.cache
def _properties(model: type[Section]) -> dict[str, Any]:
    return model.model_json_schema()["properties"]


def _valid(model: type[Section], leaf: str) -> str:
    schema = _properties(model)[leaf]
    if "enum" in schema:
        return " | ".join(str(choice) for choice in schema["enum"])
    words = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[name]:g}" for name, sign in words.items() if name in schema]
    if schema.get("type") == "boolean":
        return "true | false"
    return ", ".join(bounds)


def _paragraph(row: Explained) -> str:
    unit = f" {row.unit}" if row.unit else ""
    lines = [f"{row.key} = {_toml(row.value)}{unit}   ({row.origin}; default {_toml(row.default)})", f"  {row.meaning}"]
    lines += [f"  valid: {row.valid}"] if row.valid else []
    lines += [f"  raising: {row.raising}"] if row.raising else []
    lines += [f"  lowering: {row.lowering}"] if row.lowering else []
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _toml(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return tomli_w.dumps({"v": value}).strip().removeprefix("v = ")
