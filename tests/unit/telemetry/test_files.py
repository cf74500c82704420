"""Files that others read while they are written."""

import json
import math

import numpy as np
import pytest

from rollmill.errors import RunDirectoryError
from rollmill.telemetry.files import append_jsonl, read_jsonl, to_json, write_json_atomic, write_text_atomic


def test_a_document_is_replaced_whole_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "live.json"
    write_json_atomic(path, {"step": 1})
    write_json_atomic(path, {"step": 2})
    assert json.loads(path.read_text()) == {"step": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["live.json"]


def test_a_value_that_cannot_be_written_leaves_the_old_document(tmp_path):
    path = tmp_path / "live.json"
    write_json_atomic(path, {"step": 1})
    with pytest.raises(NotImplementedError, match="a object has no JSON form"):
        write_json_atomic(path, {"step": object()})
    assert json.loads(path.read_text()) == {"step": 1}


def test_nan_becomes_null_because_json_has_no_word_for_it(tmp_path):
    write_json_atomic(tmp_path / "a.json", {"loss": math.nan})
    assert json.loads((tmp_path / "a.json").read_text()) == {"loss": None}
    assert to_json({"loss": math.inf}) == '{"loss":null}'


def test_numpy_values_are_written_as_numbers():
    assert to_json({"a": np.float32(0.5), "b": np.arange(3)}) == '{"a":0.5,"b":[0,1,2]}'


def test_a_line_is_readable_as_soon_as_it_was_appended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with append_jsonl(path) as lines:
        lines.append({"step": 1})
        assert path.read_bytes() == b'{"step":1}\n'
        lines.append({"step": 2})
    assert [line["step"] for line in read_jsonl(path)] == [1, 2]


def test_appending_again_keeps_what_was_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        with append_jsonl(path) as lines:
            lines.append({"step": step})
    assert [line["step"] for line in read_jsonl(path)] == [1, 2]


def test_a_line_torn_by_a_crash_is_passed_over_and_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n{"st')
    with append_jsonl(path) as lines:
        lines.append({"step": 2})
    assert [line["step"] for line in read_jsonl(path)] == [1, 2]


def test_a_file_in_a_missing_folder_is_refused_with_the_next_action(tmp_path):
    with pytest.raises(RunDirectoryError, match="Check free space and permissions"):
        write_text_atomic(tmp_path / "none" / "a.txt", "x")
    with pytest.raises(RunDirectoryError, match="Check the permissions"):
        append_jsonl(tmp_path / "none" / "a.jsonl")
