"""Fills marked places of the reference pages from the code: configuration, errors, command line, API."""

import inspect
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from google.protobuf import descriptor_pb2

from rollmill import errors
from rollmill.cli.app import cli
from rollmill.config.explain import explain_defaults, render_reference
from rollmill.config.explain_others import render_others

SOURCES = Path(errors.__file__).parents[1]
OURS = "rollmill/generator/proto/policy_inference.proto"
MINIMAL = "rollmill/generator/proto/rl_inference.proto"


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace each marker that the page has; called by mkdocs for every page."""
    for marker, make in GENERATED.items():
        if marker in markdown:
            markdown = markdown.replace(marker, make())
    return markdown


def configuration() -> str:
    """Return every setting with its default, unit and effect."""
    return f"{render_reference(explain_defaults())}\n{render_others()}"


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


def api_statuses() -> str:
    """Return which status an error has, over gRPC and over HTTP."""
    from rollmill.generator.statuses import STATUSES

    rows = ["| gRPC | HTTP | `rollmill-code` | When |", "|---|---|---|---|"]
    rows += [f"| `{row.grpc}` | {row.http} | `{row.kind.code}` | {row.when} |" for row in STATUSES]
    return "\n".join(rows)


def api_of(source: str) -> str:
    """Return the services and messages of a .proto with its comments."""
    file = _described(source)
    comments = {tuple(location.path): _line(location.leading_comments) for location in file.source_code_info.location}
    parts: list[str] = []
    for index, service in enumerate(file.service):
        # Numbers of the path: 6 service, 2 method, 4 message, 2 field, as descriptor.proto counts them.
        parts += [f"### Service `{file.package}.{service.name}`", comments.get((6, index), "")]
        rows = ["| Method | Request | Reply | What it does |", "|---|---|---|---|"]
        for at, method in enumerate(service.method):
            reply = f"{'stream of ' if method.server_streaming else ''}`{_short(method.output_type)}`"
            what = comments.get((6, index, 2, at), "")
            rows.append(f"| `{method.name}` | `{_short(method.input_type)}` | {reply} | {what} |")
        parts.append("\n".join(rows))
    for index, message in enumerate(file.message_type):
        if not message.options.map_entry:
            parts += [f"#### `{message.name}`", comments.get((4, index), "")]
            parts.append(_fields(message, index=index, comments=comments))
    return "\n\n".join(part for part in parts if part)


def _fields(message: descriptor_pb2.DescriptorProto, *, index: int, comments: dict[tuple[int, ...], str]) -> str:
    if not message.field:
        return "No fields."
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    rows = ["| Field | Number | Type | Meaning |", "|---|---|---|---|"]
    for at, field in enumerate(message.field):
        what = comments.get((4, index, 2, at), "")
        rows.append(f"| `{field.name}` | {field.number} | {_type(field, maps=maps)} | {what} |")
    return "\n".join(rows)


def _type(field: descriptor_pb2.FieldDescriptorProto, *, maps: dict[str, descriptor_pb2.DescriptorProto]) -> str:
    name = _short(field.type_name)
    if name in maps:
        key, value = (_type(inner, maps={}) for inner in maps[name].field)
        return f"map of {key} to {value}"
    kinds = descriptor_pb2.FieldDescriptorProto.Type
    kind = f"`{name or kinds.Name(field.type).removeprefix('TYPE_').lower()}`"
    if field.label == field.LABEL_REPEATED:
        return f"repeated {kind}"
    return f"optional {kind}" if field.proto3_optional else kind


def _described(source: str) -> descriptor_pb2.FileDescriptorProto:
    """Return what protoc makes of a file, comments included, which generated code leaves out."""
    from grpc_tools import protoc

    with tempfile.NamedTemporaryFile() as out:
        arguments = ["protoc", f"-I{SOURCES}", "--include_source_info", f"--descriptor_set_out={out.name}", source]
        if protoc.main(arguments) != 0:
            raise RuntimeError(f"protoc could not read {source}; run `make proto` to see why")
        return descriptor_pb2.FileDescriptorSet.FromString(out.read()).file[0]


def _line(comment: str) -> str:
    return " ".join(comment.split()).replace("|", "\\|")


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def api_http() -> str:
    """Return the paths of the HTTP face, and the fields of what is sent to them and of what comes back."""
    from rollmill.generator.http import openapi

    document = openapi()
    rows = ["| Request | Body | Reply | What it does |", "|---|---|---|---|"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            body = _schema_name(operation.get("requestBody", {}).get("content", {}))
            reply = _schema_name(operation["responses"]["200"]["content"])
            rows.append(f"| `{method.upper()} {path}` | {body} | {reply} | {operation['summary']} |")
    parts = ["\n".join(rows)]
    for name, schema in document["components"]["schemas"].items():
        parts += [f"#### `{name}` (HTTP)", _line(schema.get("description", "")), _properties(schema)]
    return "\n\n".join(part for part in parts if part)


def _schema_name(content: dict[str, Any]) -> str:
    names = [_short_ref(entry["schema"]["$ref"]) for entry in content.values() if "$ref" in entry.get("schema", {})]
    return " or ".join(f"`{name}`" for name in dict.fromkeys(names))


def _properties(schema: dict[str, Any]) -> str:
    rows = ["| Field | Type | Meaning |", "|---|---|---|"]
    required = schema.get("required", ())
    for name, value in schema.get("properties", {}).items():
        kind = _json_type(value) + (", required" if name in required else "")
        rows.append(f"| `{name}` | {kind} | {_line(value.get('description', ''))} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def _json_type(value: dict[str, Any]) -> str:
    if "$ref" in value:
        return f"`{_short_ref(value['$ref'])}`"
    if "anyOf" in value:
        return _alternatives([_json_type(one) for one in value["anyOf"]])
    if "enum" in value:
        return _alternatives([f"`{json.dumps(one)}`" for one in value["enum"]])
    kind = value.get("type", "anything")
    if kind == "array":
        items = value.get("items") or {}
        return f"list of {_json_type(items)}" if isinstance(items, dict) and items else "list"
    return _alternatives(list(kind)) if isinstance(kind, Sequence) and not isinstance(kind, str) else str(kind)


def _alternatives(kinds: list[str]) -> str:
    return " or ".join(dict.fromkeys(kinds))


def _short_ref(reference: str) -> str:
    return reference.rpartition("/")[2]


def metrics_table() -> str:
    """Return what a replica exports to Prometheus, and under which other names."""
    from rollmill.generator.metrics import ALIASES, METRICS

    other = {name: alias for alias, name in ALIASES.items()}
    rows = ["| Metric | Kind | Meaning | vLLM's name |", "|---|---|---|---|"]
    for name, (kind, meaning) in METRICS.items():
        rows.append(f"| `{name}` | {kind} | {meaning} | {f'`{other[name]}`' if name in other else ''} |")
    return "\n".join(rows)


def router_metrics_table() -> str:
    """Return what a router exports to Prometheus."""
    from rollmill.generator.router.metrics import METRICS

    rows = ["| Metric | Kind | Meaning |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {kind} | {meaning} |" for name, (kind, meaning) in METRICS.items())])


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
    "<!-- generated: api statuses -->": api_statuses,
    "<!-- generated: api of rollmill.generator.v1 -->": lambda: api_of(OURS),
    "<!-- generated: api of rl_inference -->": lambda: api_of(MINIMAL),
    "<!-- generated: api over HTTP -->": api_http,
    "<!-- generated: metrics -->": metrics_table,
    "<!-- generated: router metrics -->": router_metrics_table,
}
