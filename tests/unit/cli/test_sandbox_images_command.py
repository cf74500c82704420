"""`rollmill sandbox prepare` and `images` without a sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from image_builders import Layout, file, tar
from rollmill.cli.app import cli


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "root/f").write_bytes(b"x" * 5000)
    return tmp_path / "root"


def call(tmp_path: Path, *arguments: str) -> Any:
    store = ["--store", str(tmp_path / "store")]
    return CliRunner().invoke(cli, ["sandbox", *arguments, *store], catch_exceptions=False)


def test_prepare_tells_phases_on_stderr_and_the_image_on_stdout(tmp_path, root):
    done = call(tmp_path, "prepare", str(root), "--form", "tree")
    assert done.exit_code == 0
    assert done.stdout.startswith("root is ready: 1 layers")
    assert f"unpack {root}" in done.stderr


def test_prepare_and_images_answer_with_one_document(tmp_path, root):
    made = json.loads(call(tmp_path, "prepare", str(root), "--name", "a", "--json").stdout)
    listed = json.loads(call(tmp_path, "images", "--verify", "--json").stdout)
    assert listed["damaged"] == {}
    assert [one["digest"] for one in listed["images"]] == [made["digest"]]
    assert listed["images"][0]["names"] == ["a"]
    again = json.loads(call(tmp_path, "prepare", "a", "--json").stdout)
    assert again["digest"] == made["digest"]


def test_names_come_from_paths_without_the_endings_of_archives(tmp_path):
    source = tmp_path / "alpine-3.tar.gz"
    source.write_bytes(Layout(tar(file("f"))).archive())
    made = json.loads(call(tmp_path, "prepare", str(source), "--json").stdout)
    assert made["names"] == ["alpine-3"]


def test_what_is_not_there_is_an_error_with_its_code(tmp_path):
    done = call(tmp_path, "prepare", "nowhere", "--json")
    assert done.exit_code == 1
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "sandbox_image"
    assert "no file or directory here" in error["message"]
    assert call(tmp_path, "images", "--remove", "nowhere").exit_code == 1


def test_a_budget_removes_and_says_what(tmp_path, root):
    call(tmp_path, "prepare", str(root), "--name", "a")
    done = call(tmp_path, "images", "--budget-gib", "0")
    assert "no images\nremoved 1 images and 1 layers" in done.stdout


def test_damage_is_listed_and_fails(tmp_path, root):
    call(tmp_path, "prepare", str(root), "--name", "a", "--form", "tree")
    (found,) = (tmp_path / "store/layers").glob("*/root/f")
    found.write_bytes(b"y")
    done = call(tmp_path, "images", "--verify")
    assert done.exit_code == 1
    assert "1 of 1 images are damaged: a" in done.stderr
