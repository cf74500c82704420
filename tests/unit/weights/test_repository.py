"""What is particular to the repository of one machine: shared memory, holds of processes, transports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollmill.errors import InvariantViolation, RunDirectoryError, WeightError
from rollmill.weights import LocalModelRepository, resolve_transport, sweep_shared_memory
from rollmill.weights.files import locked
from rollmill.weights.tensorfile import TensorsInFile, load_tensors
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


def in_memory(tmp_path, *, keep_versions: int = 1) -> LocalModelRepository:
    (tmp_path / "shared").mkdir(exist_ok=True)
    return LocalModelRepository(
        tmp_path / "w", transport="shm", keep_versions=keep_versions, shared_memory=tmp_path / "shared"
    )


def inode(manifest) -> int:
    return Path(manifest.location).stat().st_ino


def test_a_publication_is_written_into_the_memory_of_a_retired_version(tmp_path):
    repository = in_memory(tmp_path)
    first = inode(publish(repository))
    second = publish(repository, step=1)
    assert repository.retire() == [1]
    third = publish(repository, step=2)
    assert inode(third) == first != inode(second)
    assert repository.load(3)["w"].tolist() == [2, 2, 2, 2]


def test_memory_that_somebody_still_reads_is_not_written_again(tmp_path):
    repository = in_memory(tmp_path)
    first = inode(publish(repository))
    reader = repository.load(1)
    publish(repository, step=1)
    repository.retire()
    third = publish(repository, step=2)
    assert inode(third) != first
    assert reader["w"].tolist() == [0, 0, 0, 0]
    # the spare is not kept for later either: its memory belongs to the reader alone now
    assert sorted(path.name for path in Path(third.location).parent.glob("*.safetensors")) == [
        "v000002.safetensors",
        "v000003.safetensors",
    ]


def test_a_version_that_shares_its_file_with_another_leaves_no_spare(tmp_path):
    repository = in_memory(tmp_path)
    publish(repository)
    again = repository.republish(1, history_id="h", at_s=1.0)
    assert repository.retire() == [1]
    publish(repository, step=1)
    assert repository.load(again.policy_version)["w"].tolist() == [0, 0, 0, 0]


def test_room_for_the_next_publication_is_made_ahead_and_used(tmp_path):
    repository = in_memory(tmp_path, keep_versions=3)
    assert not repository.reserve()  # of what size?
    manifest = publish(repository)
    assert repository.reserve()
    assert repository.reserve()
    spare = Path(manifest.location).with_name("spare.safetensors")
    made = spare.stat()
    assert made.st_size == Path(manifest.location).stat().st_size
    assert inode(publish(repository, step=1)) == made.st_ino
    assert not spare.exists()


def test_what_is_copied_stays_what_it_is_and_is_invisible_until_the_commit(tmp_path):
    repository = in_memory(tmp_path)
    weights = {"w": torch.zeros(4)}
    publication = repository.prepare(
        weights, optimizer_step=0, parent=None, history_id="h", training_dtype="float32", at_s=0.0
    )
    weights["w"] += 1.0
    assert repository.latest() is None
    with pytest.raises(WeightError, match="is publishing"):
        publish(in_memory(tmp_path))
    assert publication.tensors()["w"].tolist() == [0, 0, 0, 0]
    manifest = publication.commit(canary=None)
    assert (manifest.policy_version, publication.policy_version) == (1, 1)
    assert repository.load(1)["w"].tolist() == [0, 0, 0, 0]
    publication.abandon()  # it has ended: nothing happens
    assert repository.available() == (1,)


def test_an_abandoned_publication_leaves_nothing_and_lets_the_next_in(tmp_path):
    repository = in_memory(tmp_path)
    publication = repository.prepare(
        {"w": torch.zeros(4)}, optimizer_step=0, parent=None, history_id="h", training_dtype="float32", at_s=0.0
    )
    publication.abandon()
    assert not list(tmp_path.glob("**/*.safetensors*"))
    with pytest.raises(InvariantViolation, match="has ended"):
        publication.commit(canary=None)
    assert publish(repository).policy_version == 1


@pytest.mark.parametrize("transport", ["shm", "file"])
def test_a_roll_back_is_an_old_version_under_a_new_number_and_copies_nothing(tmp_path, shared, transport):
    repository = LocalModelRepository(tmp_path / "w", transport=transport, shared_memory=shared)
    first = publish(repository, step=3)
    publish(repository, step=4)
    back = repository.republish(1, history_id="h2", at_s=9.0)
    assert (back.policy_version, back.parent, back.optimizer_step) == (3, 1, 3)
    assert (back.history_id, back.published_at_s, back.digest) == ("h2", 9.0, first.digest)
    assert inode(back) == inode(first)
    assert repository.latest() == back
    assert repository.load(3)["w"].tolist() == [3, 3, 3, 3]


def test_a_version_that_is_gone_cannot_be_rolled_back_to(tmp_path):
    repository = in_memory(tmp_path)
    for step in range(2):
        publish(repository, step=step)
    repository.retire()
    with pytest.raises(WeightError, match="version 1 has no tensors any more"):
        repository.republish(1, history_id="h", at_s=0.0)
    assert repository.latest().policy_version == 2


def test_loaded_tensors_say_in_which_file_another_process_finds_them(tmp_path):
    repository = LocalModelRepository(tmp_path, transport="file")
    manifest = repository.publish(
        {"a": torch.arange(6.0)},
        optimizer_step=0,
        parent=None,
        history_id="h",
        training_dtype="float32",
        canary=None,
        at_s=0.0,
    )
    loaded = repository.load(manifest.policy_version)
    assert isinstance(loaded, TensorsInFile)
    assert load_tensors(loaded.path)["a"].tolist() == loaded["a"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_hold_that_a_power_cut_left_empty_counts_as_a_dead_ones(tmp_path):
    repository = LocalModelRepository(tmp_path / "w", transport="file", keep_versions=1)
    for step in range(3):
        publish(repository, step=step)
    repository.hold(1, owner="a")
    (hold,) = (tmp_path / "w" / "holds").glob("v*.json")
    hold.write_bytes(b"")
    assert repository.retire() == [1, 2]
    assert not hold.exists()


def test_a_damaged_manifest_costs_its_version_alone_and_its_number_stays_taken(tmp_path):
    repository = LocalModelRepository(tmp_path / "w", transport="file", keep_versions=1)
    for step in range(4):
        publish(repository, step=step)
    for version in (2, 4):
        (tmp_path / "w" / "manifests" / f"v{version:06d}.json").write_text("{")
    fresh = LocalModelRepository(tmp_path / "w", transport="file", keep_versions=1)
    assert [one.policy_version for one in fresh.manifests()] == [1, 3]
    assert [one.policy_version for one in fresh.manifests(after=1)] == [3]
    latest = fresh.latest()
    assert latest is not None
    assert latest.policy_version == 3
    with pytest.raises(WeightError, match="is damaged"):
        fresh.manifest(4)
    assert publish(fresh, step=9).policy_version == 5
    assert fresh.retire() == [1, 2, 3, 4]
    assert fresh.available() == (5,)


def test_what_is_remembered_of_many_versions_is_their_steps(tmp_path):
    repository = LocalModelRepository(tmp_path / "w", transport="file", keep_versions=1)
    for step in range(40):
        publish(repository, step=step)
    assert [repository.optimizer_step_of(version) for version in range(1, 41)] == list(range(40))
    assert len(repository._manifests._known) <= 32
    assert len(repository.manifests()) == 40


def test_a_lock_that_is_not_let_go_names_its_holder(tmp_path):
    path = tmp_path / "lock"
    holder = (
        "import sys\nfrom pathlib import Path\nfrom rollmill.weights.files import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(WeightError, match=f"process {process.pid} has held .* for 0.05 s"), locked(path, limit_s=0.05):
        pass
    process.communicate()
    with locked(path, limit_s=0.05):
        pass
