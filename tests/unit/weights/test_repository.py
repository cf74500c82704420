"""What is particular to the repository of one machine: shared memory, holds of processes, transports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollmill.errors import RunDirectoryError, WeightError
from rollmill.weights import LocalModelRepository, resolve_transport, sweep_shared_memory
from rollmill.weights.transport import shared_folder


def publish(repository: LocalModelRepository, *, step: int = 0):
    return repository.publish(
        {"w": torch.full((4,), float(step))},
        optimizer_step=step,
        parent=None,
        history_id="h",
        training_dtype="float32",
        canary=None,
        at_s=0.0,
    )


@pytest.fixture
def shared(tmp_path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def test_auto_takes_shared_memory_where_all_kept_versions_fit(shared):
    free = shutil.disk_usage(shared).free
    slack = 64 << 20
    assert resolve_transport("auto", bytes_needed=1000, versions=3, shared_memory=shared) == "shm"
    # Half of what is free, less slack, three times over does not fit.
    assert resolve_transport("auto", bytes_needed=(free - slack) // 2, versions=3, shared_memory=shared) == "file"


def test_auto_takes_files_where_there_is_no_shared_memory(tmp_path):
    assert resolve_transport("auto", bytes_needed=1, shared_memory=tmp_path / "absent") == "file"


def test_shared_memory_that_was_asked_for_and_is_absent_is_an_error(tmp_path):
    with pytest.raises(WeightError, match="not a writable folder"):
        resolve_transport("shm", bytes_needed=1, shared_memory=tmp_path / "absent")


def test_shared_memory_is_private_and_given_back_by_clean(tmp_path, shared):
    repository = LocalModelRepository(tmp_path / "w", transport="shm", shared_memory=shared)
    manifest = publish(repository)
    folder = Path(manifest.location).parent
    assert folder.parent == shared
    assert folder.stat().st_mode & 0o777 == 0o700
    repository.clean()
    assert list(shared.iterdir()) == []
    assert repository.latest().policy_version == 1
    with pytest.raises(WeightError, match="lost in a restart"):
        repository.load(1)
    assert publish(repository, step=1).policy_version == 2
    repository.clean()
    repository.clean()


def test_two_repositories_never_share_a_folder_in_shared_memory(tmp_path, shared):
    assert shared_folder(tmp_path / "a", shared_memory=shared) != shared_folder(tmp_path / "b", shared_memory=shared)


def test_sweep_removes_only_what_belongs_to_vanished_repositories(tmp_path, shared):
    for name in ("kept", "gone"):
        publish(LocalModelRepository(tmp_path / name, transport="shm", shared_memory=shared))
    shutil.rmtree(tmp_path / "gone")
    assert sweep_shared_memory(shared_memory=shared) == (shared_folder(tmp_path / "gone", shared_memory=shared),)
    assert list(shared.iterdir()) == [shared_folder(tmp_path / "kept", shared_memory=shared)]


def test_a_moved_run_directory_keeps_its_files(tmp_path):
    publish(LocalModelRepository(tmp_path / "old", transport="file"))
    (tmp_path / "old").rename(tmp_path / "new")
    assert LocalModelRepository(tmp_path / "new", transport="file").load(1)["w"].tolist() == [0, 0, 0, 0]


def test_a_hold_of_a_dead_process_does_not_count(tmp_path):
    repository = LocalModelRepository(tmp_path / "w", transport="file", keep_versions=1)
    for step in range(3):
        publish(repository, step=step)
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    repository.hold(1, owner="generator-0")
    repository.hold(2, owner="generator-1")
    path = next((tmp_path / "w" / "holds").glob("v000001.*.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": int(ended.stdout)}))
    assert repository.holders() == {2: ("generator-1",)}
    assert repository.retire() == [1]


def test_a_hold_of_an_earlier_process_with_the_same_pid_does_not_count(tmp_path):
    repository = LocalModelRepository(tmp_path / "w", transport="file", keep_versions=1)
    publish(repository)
    repository.hold(1, owner="generator-0")
    path = next((tmp_path / "w" / "holds").glob("*.json"))
    hold = json.loads(path.read_text())
    path.write_text(json.dumps(hold | {"started_at_s": hold["started_at_s"] - 100.0}))
    assert repository.holders() == {}


def test_keeping_no_version_is_refused(tmp_path):
    with pytest.raises(WeightError, match="keep_versions is 0"):
        LocalModelRepository(tmp_path, keep_versions=0)


def test_a_root_that_cannot_be_made_is_a_run_directory_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot be made"):
        LocalModelRepository(tmp_path / "file" / "w")


def test_a_write_that_fails_half_way_leaves_no_part(tmp_path, monkeypatch):
    repository = LocalModelRepository(tmp_path / "w", transport="file")
    monkeypatch.setattr("rollmill.weights.publication.os.fsync", _no_space)
    with pytest.raises(WeightError, match=r"No space left on device.*files were removed"):
        publish(repository)
    assert list((tmp_path / "w" / "tensors").iterdir()) == []


def _no_space(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.integration
def test_listing_and_holding_need_no_torch(tmp_path):
    publish(LocalModelRepository(tmp_path / "w", transport="file"))
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from rollmill.weights import LocalModelRepository\n"
        f"r = LocalModelRepository({str(tmp_path / 'w')!r}, transport='file')\n"
        "r.hold(1, owner='x'); r.release(1, owner='x'); r.retire()\n"
        "print(r.latest().policy_version, r.optimizer_step_of(1))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1 0\n", "")
