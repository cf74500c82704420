"""Folders outside run directories: one's own stay, those of dead processes go."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

from rollmill.generator.engines.remote.folders import own_folder

OWNER = ".owner.json"


def test_a_folder_is_its_owners_alone_and_another_one_leaves_it(tmp_path):
    first = own_folder("vLLM", parent=tmp_path)
    second = own_folder("vLLM", parent=tmp_path)
    assert first.name.startswith("rollmill-vllm-")
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    assert sorted(tmp_path.iterdir()) == sorted([first, second])


def test_what_a_process_that_was_killed_left_goes_with_the_next_one(tmp_path):
    code = (
        "import os, pathlib, sys; from rollmill.generator.engines.remote.folders import own_folder; "
        "(own_folder('vllm', parent=pathlib.Path(sys.argv[1])) / 'key').write_text('secret'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    (left,) = tmp_path.iterdir()
    assert (left / "key").exists()
    own = own_folder("vllm", parent=tmp_path)
    assert list(tmp_path.iterdir()) == [own]


def test_a_pid_that_was_given_again_is_another_process(tmp_path):
    left = own_folder("vllm", parent=tmp_path)
    (left / OWNER).write_text(json.dumps({"pid": os.getpid(), "started_at_s": 1.0}))
    own_folder("vllm", parent=tmp_path)
    assert not left.exists()


def test_folders_of_another_kind_or_without_a_word_of_their_owner_stay(tmp_path):
    other, silent, damaged = own_folder("weights", parent=tmp_path), tmp_path / "rollmill-vllm-x", None
    silent.mkdir()
    damaged = own_folder("vllm", parent=tmp_path)
    (damaged / OWNER).write_text("{")
    own_folder("vllm", parent=tmp_path)
    assert other.exists()
    assert silent.exists()
    assert damaged.exists()
