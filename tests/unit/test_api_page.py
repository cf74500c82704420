"""The API page is made from the code, whole: every method, message, field, status and path."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.proto import rl_inference_pb2 as rl_pb
from rollmill.generator.statuses import STATUSES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page() -> str:
    markdown = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    return hook().on_page_markdown(markdown)


def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generated_pages", ROOT / "docs" / "hooks" / "generated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_marker_is_replaced(page):
    assert "<!-- generated" not in page


@pytest.mark.parametrize("file", [pb.DESCRIPTOR, rl_pb.DESCRIPTOR], ids=lambda file: file.package)
def test_every_method_message_and_field_stands_there(page, file):
    for service in file.services_by_name.values():
        assert f"### Service `{service.full_name}`" in page
        for method in service.methods:
            assert f"| `{method.name}` | `{method.input_type.name}` |" in page
    for message in file.message_types_by_name.values():
        assert f"#### `{message.name}`" in page
        for field in message.fields:
            assert f"| `{field.name}` | {field.number} |" in page


def test_comments_of_the_proto_reach_the_page(page):
    assert "Aborts exactly the named request, with all its siblings." in page
    assert "| `seconds` | 13 | map of `string` to `double` |" in page
    assert "| `temperature` | 1 | optional `float` | Divides the logits; 0 takes the most probable token." in page


def test_every_method_of_ours_is_explained():
    text = hook().api_of(hook().OURS)
    unexplained = [
        line for line in text.splitlines() if line.startswith("| `") and line.count("|") == 5 and "|  |" in line
    ]
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["PolicyInference"].methods}
    assert [line for line in unexplained if line.split("`")[1] in methods] == []


def test_every_status_stands_there_with_both_its_numbers(page):
    for status in STATUSES:
        assert f"| `{status.grpc}` | {status.http} | `{status.kind.code}` |" in page


def test_the_paths_of_http_stand_there_with_their_bodies(page):
    assert "| `POST /v1/chat/completions` | `ChatRequest` | `ChatReply` or `ChatChunk` |" in page
    assert "#### `TokenRequest` (HTTP)" in page
