"""Reading and writing the configuration.

Turns a TOML file and `section.key=value` overrides into a checked `RollmillConfig`, and remembers where each value
came from. Strict: an unknown key and a value of the wrong type are errors that name the key, what was found, what is
valid and the nearest key. Decides nothing about the values themselves; that is `rollmill.config.checks`.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rollmill.config.checks import check
from rollmill.config.schema import RollmillConfig, TaskMix
from rollmill.config.section import Section
from rollmill.errors import ConfigError

DEFAULT_ORIGIN = "default"
COMMAND_LINE_ORIGIN = "command line"

MAX_PROBLEMS_SHOWN = 8

NAMES_ELSEWHERE: Mapping[str, str] = {
    "max_batch_size": "generator.max_num_seqs",
    "max_running_requests": "generator.max_num_seqs",
    "context_length": "generator.max_model_len",
    "chunked_prefill_size": "generator.max_num_batched_tokens",
    "mem_fraction_static": "generator.gpu_memory_utilization",
    "tp_size": "generator.tensor_parallel_size",
    "dp_size": "generator.data_parallel_size",
}
"""What other servers call a setting -> our key."""


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A checked configuration and where each value came from.

    Attributes:
        config: the whole tree.
        origins: key (`schedule.group_size`) -> `default`, the file's name, or `command line`; one entry for every key.
        path: the file, or `None` when only defaults and overrides were used.
    """

    config: RollmillConfig
    origins: dict[str, str] = field(default_factory=dict)
    path: Path | None = None


def sections() -> dict[str, type[Section]]:
    """Return section name -> its model, in the order of the tree."""
    found: dict[str, type[Section]] = {}
    for name, info in RollmillConfig.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found[name] = kind
    return found


def all_keys() -> tuple[str, ...]:
    """Return every key, `section.key` or `section.table.key`, in the order of the tree."""
    return tuple(key for section, model in sections().items() for key in keys_of(model, prefix=section))


def keys_of(model: type[Section], *, prefix: str) -> Iterator[str]:
    """Yield the keys of a tree of settings behind a prefix."""
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from keys_of(kind, prefix=f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}"


def field_of(key: str) -> tuple[type[Section], str] | None:
    """Return the table that a key lies in and its name there, or `None` if there is no such key or it is a table."""
    if key not in all_keys():
        return None
    *tables, leaf = key.split(".")
    model = sections()[tables[0]]
    for table in tables[1:]:
        kind = model.model_fields[table].annotation
        if not (isinstance(kind, type) and issubclass(kind, Section)):
            raise AssertionError(f"{key} is a known key, so {table} is a table")
        model = kind
    return model, leaf


def nearest_key(key: str) -> str | None:
    """Return the known key that looks most like this one, or `None` if nothing is near.

    Example:
        >>> nearest_key("schedule.grupsize")
        'schedule.group_size'
        >>> nearest_key("trainer.group_size")
        'schedule.group_size'
    """
    section, dot, leaf = key.partition(".")
    if not dot:
        close = difflib.get_close_matches(key, list(sections()), n=1, cutoff=0.6)
        if close:
            return close[0]
        leaf = key
    leaves = {known.partition(".")[2]: known for known in reversed(all_keys())}
    leaves |= {known.rpartition(".")[2]: known for known in reversed(all_keys()) if known.count(".") == 1}
    if leaf in leaves:
        return leaves[leaf]
    inner = leaf.rpartition(".")[0]
    if inner:
        table = [known for known in all_keys() if known.startswith(f"{section}.{inner}.")]
        close = difflib.get_close_matches(key, table, n=1, cutoff=0.6)
        if close:
            return close[0]
    if section in sections():
        close = difflib.get_close_matches(leaf, list(sections()[section].model_fields), n=1, cutoff=0.6)
        if close:
            return f"{section}.{close[0]}"
    close = difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.7)
    return leaves[close[0]] if close else None


def unknown_key_message(key: str, *, where: str) -> str:
    """Return the sentence that refuses an unknown key and names the nearest one."""
    near = nearest_key(key)
    section = key.partition(".")[0]
    theirs = key.rpartition(".")[2]
    if theirs in NAMES_ELSEWHERE:
        hint = f"What is called {theirs} elsewhere is {NAMES_ELSEWHERE[theirs]!r} here."
    elif near is not None:
        hint = f"Did you mean {near!r}?"
    elif section in sections():
        hint = f"Keys of [{section}]: {', '.join(sections()[section].model_fields)}."
    else:
        hint = f"Sections: {', '.join(sections())}."
    return f"{where}: unknown key {key!r}. {hint} `rollmill config explain` lists every key."


def load_config(
    path: str | Path | None, *, overrides: Sequence[str] = (), rules: Callable[[RollmillConfig], None] = check
) -> LoadedConfig:
    """Read, merge and check a configuration.

    Args:
        path: a TOML file, or `None` for defaults.
        overrides: `section.key=value`, for example `schedule.group_size=16`; the value is written as in TOML, and a
            bare word is a string. They win over the file.
        rules: refuses combinations that cannot work; `checks.check_serving` for a process that trains nothing.

    Raises:
        ConfigError: if the file is missing or is not TOML, a key is unknown, a value has the wrong type or is out of
            range, or the values are impossible together.
    """
    source = None if path is None else Path(path)
    data = {} if source is None else read_toml(source)
    file_name = source.name if source is not None else DEFAULT_ORIGIN
    origins = dict.fromkeys(all_keys(), DEFAULT_ORIGIN)
    origins.update(dict.fromkeys(_keys_in(data, where=file_name), file_name))
    for text in overrides:
        key, value = _parse_override(text)
        *tables, leaf = key.split(".")
        table = data
        for name in tables:
            table = table.setdefault(name, {})
        table[leaf] = value
        origins[key] = COMMAND_LINE_ORIGIN
    config = parse_config(data, origins=origins)
    rules(config)
    return LoadedConfig(config=config, origins=origins, path=source)


def parse_config(data: Mapping[str, Any], *, origins: Mapping[str, str] | None = None) -> RollmillConfig:
    """Return the tree for nested plain data, types and ranges checked (cross-field rules are not).

    Raises:
        ConfigError: naming each wrong key with what was found and what is valid.
    """
    _refuse_non_finite(data)
    try:
        text = json.dumps(_with_default_tasks(data))
    except TypeError as error:
        raise ConfigError(
            f"a value is not text, number, boolean, list or table: {error}. Write it in quotes."
        ) from None
    try:
        return RollmillConfig.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise ConfigError(_describe(error, origins=origins or {})) from None


def config_data(config: RollmillConfig) -> dict[str, Any]:
    """Return the tree as nested plain data; settings that are `None` are left out."""
    return config.model_dump(mode="json", exclude_none=True)


def dump_config(config: RollmillConfig) -> str:
    """Return the resolved configuration as TOML; reading it again gives the same tree."""
    return tomli_w.dumps(config_data(config))


def differing_keys(old: RollmillConfig, new: RollmillConfig) -> dict[str, tuple[Any, Any]]:
    """Return key -> (old value, new value) for every key whose value differs."""
    pairs = ((key, value_at(old, key), value_at(new, key)) for key in all_keys())
    return {key: (before, after) for key, before, after in pairs if before != after}


def value_at(config: RollmillConfig, key: str) -> Any:
    """Return the value of `section.key`.

    Raises:
        ConfigError: if there is no such key; names the nearest.
    """
    if key not in all_keys():
        raise ConfigError(unknown_key_message(key, where="configuration"))
    return functools.reduce(getattr, key.split("."), config)


def _with_default_tasks(data: Mapping[str, Any]) -> dict[str, Any]:
    # The default task belongs to the whole tree: a table [environment] without `tasks` must not lose it.
    environment = data.get("environment")
    if not isinstance(environment, Mapping) or "tasks" in environment:
        return dict(data)
    tasks = [task.model_dump(mode="json") for task in RollmillConfig().environment.tasks]
    return {**data, "environment": {**environment, "tasks": tasks}}


def read_toml(path: Path, *, example: str = "examples/arithmetic/train.toml") -> dict[str, Any]:
    """Return the tables of a TOML file.

    Args:
        example: a file to copy, named where there is none.

    Raises:
        ConfigError: if it is missing, cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"there is no configuration file {str(path)!r}. Check the path; {example} is one to copy."
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} is not valid TOML: {error}. Valid forms: `key = 1`, `key = 1.5`, `key = true`, "
            '`key = "text"`, `key = ["a", "b"]`, and `[section]` on a line of its own.'
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Give the path of a readable UTF-8 TOML file.") from None


def _keys_in(data: Mapping[str, Any], *, where: str) -> Iterator[str]:
    known = sections()
    for section, table in data.items():
        if section not in known:
            raise ConfigError(unknown_key_message(section, where=where))
        if not isinstance(table, Mapping):
            raise ConfigError(
                f"{where}: {section!r} is a section, got {_shown(table)}. Write `[{section}]` and its keys below it."
            )
        yield from _keys_in_table(table, prefix=section, where=where)


def _keys_in_table(table: Mapping[str, Any], *, prefix: str, where: str) -> Iterator[str]:
    known = all_keys()
    for name, value in table.items():
        key = f"{prefix}.{name}"
        if key in known:
            yield key
        elif not any(other.startswith(f"{key}.") for other in known):
            raise ConfigError(unknown_key_message(key, where=where))
        elif not isinstance(value, Mapping):
            raise ConfigError(
                f"{where}: {key!r} is a table, got {_shown(value)}. Write `[{key}]` and its keys below it."
            )
        else:
            yield from _keys_in_table(value, prefix=key, where=where)


def _parse_override(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not sign or not value:
        raise ConfigError(
            f"the override {text!r} has no value. Write `section.key=value`, for example `schedule.group_size=16`."
        )
    if key not in all_keys():
        raise ConfigError(unknown_key_message(key, where="command line"))
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _refuse_non_finite(data: Any, *, key: str = "") -> None:
    if isinstance(data, Mapping):
        for name, value in data.items():
            _refuse_non_finite(value, key=f"{key}.{name}" if key else str(name))
    elif isinstance(data, list):
        for value in data:
            _refuse_non_finite(value, key=key)
    elif isinstance(data, float) and not math.isfinite(data):
        raise ConfigError(
            f"{key} is {data}; every number must be finite. Nothing here may wait or grow without a bound: "
            "give the largest value that you would accept."
        )


def _describe(error: ValidationError, *, origins: Mapping[str, str]) -> str:
    found = error.errors(include_url=False)
    # A wrong item also makes its list invalid; the item alone is worth reading.
    problems = [one for one in found if not any(_is_inside(other["loc"], one["loc"]) for other in found)]
    shown = [_describe_one(problem, origins=origins) for problem in problems[:MAX_PROBLEMS_SHOWN]]
    if len(problems) > MAX_PROBLEMS_SHOWN:
        shown.append(f"and {len(problems) - MAX_PROBLEMS_SHOWN} more.")
    return "\n".join(shown)


def _is_inside(inner: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _describe_one(problem: ErrorDetails, *, origins: Mapping[str, str]) -> str:
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    origin = next((origins[at] for n in (3, 2) if (at := ".".join(location[:n])) in origins), "configuration")
    if problem["type"] == "extra_forbidden":
        return _describe_nested_unknown(location, where=origin)
    if problem["type"] == "missing":
        return f"{origin}: {key} is missing. {_valid_forms(location)}"
    return f"{origin}: {key} got {_shown(problem['input'])}, expected {_expected(problem)}. {_valid_forms(location)}"


def _describe_nested_unknown(location: Sequence[str], *, where: str) -> str:
    key = ".".join(location)
    if tuple(location[:2]) != ("environment", "tasks"):
        return unknown_key_message(key, where=where)
    known = list(_task_mix_fields())
    close = difflib.get_close_matches(location[-1], known, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else "Options of the family itself go into `options`."
    return f"{where}: unknown key {key!r}. {hint} A task of the mixture has: {', '.join(known)}."


def _task_mix_fields() -> tuple[str, ...]:
    return tuple(TaskMix.model_fields)


def _expected(problem: ErrorDetails) -> str:
    if problem["type"] in ("too_short", "too_long"):
        bounds = problem.get("ctx", {})
        return (
            f"at least {bounds['min_length']} items"
            if "min_length" in bounds
            else f"at most {bounds['max_length']} items"
        )
    return problem["msg"].removeprefix("Input should be ").removeprefix("a valid ").removeprefix("Input should have ")


def _valid_forms(location: Sequence[str]) -> str:
    key, field = next(((at, field_of(at)) for n in (3, 2) if field_of(at := ".".join(location[:n]))), ("", None))
    info = None if field is None else field[0].model_fields[field[1]]
    if field is None or info is None or info.is_required():
        return "See `rollmill config explain`."
    default = info.default
    if default is None:
        return f"Leave {key} out for none; `rollmill config explain {key}` says more."
    example = tomli_w.dumps({field[1]: _plain(default)}).strip() if _plain(default) not in ({}, []) else ""
    return f"Valid, for example: `{example}`." if example else f"See `rollmill config explain {key}`."


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _shown(value: Any) -> str:
    kinds = {str: "text", bool: "boolean", int: "integer", float: "number", list: "list", dict: "table"}
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({kinds.get(type(value), type(value).__name__)})"
