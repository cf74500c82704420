"""What every model repository does, whatever carries the tensors."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from rollmill.errors import WeightError, WeightMismatch
from rollmill.types import Adapter, Canary
from rollmill.weights import LocalModelRepository


def some_tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "embed.weight": torch.arange(12, dtype=torch.float32).reshape(4, 3) * value,
        "norm.weight": torch.full((3,), value, dtype=torch.bfloat16),
        "steps": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
    }


def publish(
    repository, value: float = 1.0, *, step: int = 0, parent=None, history: str = "h1", canary=None, tensors=None
):
    return repository.publish(
        some_tensors(value) if tensors is None else tensors,
        optimizer_step=step,
        parent=parent,
        history_id=history,
        training_dtype="float32",
        canary=canary,
        at_s=12.5,
    )


@pytest.fixture(params=["shm", "file"])
def repository(request, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    return LocalModelRepository(tmp_path / "weights", transport=request.param, keep_versions=2, shared_memory=shared)


def reopened(repository, tmp_path) -> LocalModelRepository:
    """The repository as another process sees it."""
    return LocalModelRepository(
        tmp_path / "weights", transport=repository._requested, keep_versions=2, shared_memory=tmp_path / "shared"
    )


def tensor_file(manifest) -> Path:
    return Path(manifest.location)


def test_a_loaded_version_equals_the_published_one_bit_for_bit(repository):
    manifest = publish(repository)
    loaded = repository.load(manifest.policy_version)
    wanted = some_tensors()
    assert loaded.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_the_manifest_says_what_was_published(repository):
    canary = Canary(token_ids=np.array([1, 2], np.int32), logprobs=np.array([-0.1], np.float32), tolerance=1e-3)
    manifest = publish(repository, step=3, canary=canary)
    assert (manifest.policy_version, manifest.optimizer_step, manifest.parent) == (1, 3, None)
    assert (manifest.history_id, manifest.training_dtype, manifest.serving_dtype) == ("h1", "float32", "float32")
    assert manifest.published_at_s == 12.5
    entry = manifest.tensors["norm.weight"]
    assert (entry.dtype, entry.shape, entry.nbytes) == ("bfloat16", (3,), 6)
    # bfloat16 1.0 is 0x3f80, little endian, three times.
    assert entry.sha256 == hashlib.sha256(b"\x80\x3f" * 3).hexdigest()


def test_the_whole_digest_is_the_sha256_over_sorted_names_and_digests(repository):
    manifest = publish(repository)
    lines = "".join(f"{name}\x00{manifest.tensors[name].sha256}\n" for name in sorted(manifest.tensors))
    assert manifest.digest == hashlib.sha256(lines.encode()).hexdigest()


def test_another_process_reads_the_same_manifest_with_its_canary(repository, tmp_path):
    canary = Canary(
        token_ids=np.array([1, 2, 3], np.int32), logprobs=np.array([-0.1, -1 / 3], np.float32), tolerance=1e-3
    )
    manifest = publish(repository, canary=canary)
    other = reopened(repository, tmp_path).manifest(1)
    assert other.tensors == manifest.tensors
    assert other.digest == manifest.digest
    assert other.canary.token_ids.dtype == np.int32
    assert other.canary.logprobs.dtype == np.float32
    assert np.array_equal(other.canary.logprobs, canary.logprobs)


def test_versions_only_rise_and_the_latest_is_the_highest(repository, tmp_path):
    assert repository.latest() is None
    assert [publish(repository, step=step).policy_version for step in range(3)] == [1, 2, 3]
    other = reopened(repository, tmp_path)
    assert publish(other, step=1, history="h2", parent=2).policy_version == 4
    assert repository.latest().policy_version == 4
    assert [m.policy_version for m in repository.manifests()] == [1, 2, 3, 4]
    assert [repository.optimizer_step_of(v) for v in (1, 2, 3, 4)] == [0, 1, 2, 1]
    assert repository.manifest(4).history_id == "h2"


def test_an_unknown_version_is_an_error_that_lists_what_exists(repository):
    publish(repository)
    for call in (repository.load, repository.manifest, lambda version: repository.hold(version, owner="r0")):
        with pytest.raises(WeightError, match=r"version 9 was never published.*published are 1"):
            call(9)


def test_a_flipped_byte_is_found_with_both_digests(repository):
    manifest = publish(repository)
    path = tensor_file(manifest)
    data = bytearray(path.read_bytes())
    at = data.index(np.arange(12, dtype=np.float32).tobytes()) + 5
    data[at] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(WeightMismatch, match=r"embed\.weight") as caught:
        repository.load(1)
    changed = bytearray(np.arange(12, dtype=np.float32).tobytes())
    changed[5] ^= 1
    assert caught.value.published == manifest.tensors["embed.weight"].sha256
    assert caught.value.served == hashlib.sha256(changed).hexdigest()


def test_a_changed_header_is_found(repository):
    manifest = publish(repository)
    path = tensor_file(manifest)
    path.write_bytes(path.read_bytes().replace(b'"F32","shape":[4,3]', b'"I32","shape":[4,3]'))
    with pytest.raises(WeightMismatch, match="int32"):
        repository.load(1)


def test_a_file_with_other_tensors_in_its_place_is_found(repository):
    first = publish(repository)
    second = publish(repository, tensors={"other": torch.ones(2)})
    tensor_file(first).write_bytes(tensor_file(second).read_bytes())
    with pytest.raises(WeightMismatch, match="has 1 tensors, published were 4"):
        repository.load(1)


def test_a_truncated_tensor_file_is_an_error(repository):
    path = tensor_file(publish(repository))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(WeightError, match="cut short"):
        repository.load(1)


def test_a_truncated_manifest_is_an_error_that_names_the_file(repository, tmp_path):
    publish(repository)
    path = tmp_path / "weights" / "manifests" / "v000001.json"
    path.write_bytes(path.read_bytes()[:-40])
    again = reopened(repository, tmp_path)
    with pytest.raises(WeightError, match=r"v000001\.json is damaged"):
        again.manifest(1)


def test_a_damaged_manifest_is_no_latest_version_and_costs_itself_alone(repository, tmp_path):
    publish(repository)
    publish(repository)
    path = tmp_path / "weights" / "manifests" / "v000002.json"
    path.write_bytes(path.read_bytes()[:-40])
    again = reopened(repository, tmp_path)
    assert again.latest().policy_version == 1
    assert [one.policy_version for one in again.manifests()] == [1]
    # Its number stays taken.
    assert publish(again).policy_version == 3


def test_an_edited_manifest_is_an_error(repository, tmp_path):
    publish(repository, step=3)
    path = tmp_path / "weights" / "manifests" / "v000001.json"
    path.write_text(path.read_text().replace('"optimizer_step": 3', '"optimizer_step": 4'))
    with pytest.raises(WeightError, match="edited"):
        reopened(repository, tmp_path).manifest(1)


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({}, "no tensors were given"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "complex64"),
    ],
)
def test_what_cannot_be_written_is_refused_and_no_version_appears(repository, tensors, word):
    with pytest.raises(WeightError, match=word):
        publish(repository, tensors=tensors)
    assert repository.latest() is None


def test_tied_tensors_are_refused_by_name(repository):
    embedding = torch.ones(4, 3)
    with pytest.raises(WeightError, match=r"'embed' and 'lm_head'|'lm_head' and 'embed'"):
        publish(repository, tensors={"embed": embedding, "lm_head": embedding.view(4, 3)})
    assert repository.latest() is None


def test_separate_views_of_one_buffer_are_no_aliases(repository):
    buffer = torch.arange(8, dtype=torch.float32)
    publish(repository, tensors={"a": buffer[:4], "b": buffer[4:]})
    assert repository.load(1)["b"].tolist() == [4, 5, 6, 7]


def test_a_transposed_tensor_is_written_in_its_own_order(repository):
    publish(repository, tensors={"t": torch.arange(6.0).reshape(2, 3).T})
    assert repository.load(1)["t"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_canary_that_is_not_finite_publishes_nothing(repository):
    canary = Canary(token_ids=np.array([1, 2], np.int32), logprobs=np.array([np.nan], np.float32), tolerance=1e-3)
    with pytest.raises(WeightError, match="not finite"):
        publish(repository, canary=canary)
    assert repository.latest() is None
    assert publish(repository).policy_version == 1


def test_a_full_disk_publishes_nothing_and_leaves_no_part(repository, tmp_path, monkeypatch):
    import rollmill.weights.files as files

    free = files.shutil._ntuple_diskusage(total=1000, used=990, free=10)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: free)
    with pytest.raises(WeightError, match=r"needs \d+ bytes in .* which has 10 bytes free"):
        publish(repository)
    assert repository.latest() is None
    assert not list(tmp_path.glob("**/*.safetensors*"))


def test_retire_keeps_the_newest_and_the_held(repository):
    for step in range(5):
        publish(repository, float(step + 1), step=step)
    repository.hold(2, owner="generator-0")
    assert repository.retire() == [1, 3]
    assert repository.available() == (2, 4, 5)
    assert [m.policy_version for m in repository.manifests()] == [1, 2, 3, 4, 5]
    with pytest.raises(WeightError, match=r"version 3 has no tensors any more.*Loadable are 2, 4, 5"):
        repository.load(3)
    with pytest.raises(WeightError, match="version 3 has no tensors"):
        repository.hold(3, owner="generator-0")
    repository.release(2, owner="generator-0")
    assert repository.retire() == [2]
    assert repository.retire() == []


def test_a_version_stays_held_until_its_last_owner_releases_it(repository):
    for step in range(4):
        publish(repository, step=step)
    repository.hold(1, owner="a")
    repository.hold(1, owner="b")
    repository.release(1, owner="a")
    repository.release(1, owner="a")
    assert repository.holders() == {1: ("b",)}
    assert repository.retire() == [2]


def test_loaded_tensors_outlive_their_retirement(repository):
    for step in range(3):
        publish(repository, float(step + 1), step=step)
    loaded = repository.load(1)
    assert repository.retire() == [1]
    assert torch.equal(loaded["embed.weight"], some_tensors(1.0)["embed.weight"])


def test_a_crashed_publication_leaves_nothing_visible_and_is_cleared_by_the_next(repository, tmp_path):
    first = publish(repository)
    folder = tensor_file(first).parent
    (folder / "v000002.safetensors.partial").write_bytes(b"half")
    (folder / "v000002.safetensors").write_bytes(b"whole, but its manifest never came")
    (tmp_path / "weights" / "manifests" / "v000002.json.partial").write_bytes(b"{")
    assert repository.latest().policy_version == 1
    second = publish(reopened(repository, tmp_path), 2.0)
    assert second.policy_version == 2
    assert torch.equal(repository.load(2)["embed.weight"], some_tensors(2.0)["embed.weight"])
    assert sorted(path.name for path in folder.glob("v*")) == ["v000001.safetensors", "v000002.safetensors"]


def test_a_second_publisher_is_told_at_once_who_publishes(repository, tmp_path):
    with repository._publishing(), pytest.raises(WeightError, match=f"process {os.getpid()} is publishing"):
        publish(reopened(repository, tmp_path))
    assert publish(repository).policy_version == 1


def test_adopt_says_what_can_be_loaded_and_removes_leftovers(repository, tmp_path):
    manifests = [publish(repository, step=step) for step in range(3)]
    tensor_file(manifests[0]).unlink()
    (tensor_file(manifests[1]).parent / "v000004.safetensors.partial").write_bytes(b"half")
    adoption = reopened(repository, tmp_path).adopt()
    assert adoption.available == (2, 3)
    assert adoption.manifest_only == (1,)
    assert adoption.removed == ("v000004.safetensors.partial",)
    assert publish(repository).policy_version == 4


BASE = {"q.weight": torch.ones(4, 3), "norm.weight": torch.ones(3)}
# Rank 2: the product is 2 everywhere.
PAIR = {"q.lora_A.weight": torch.ones(2, 3), "q.lora_B.weight": torch.ones(4, 2)}


def publish_adapter(repository, pair=PAIR, *, step: int = 0, base=BASE, **changes):
    digest = repository.put_base(base)
    return repository.publish(
        pair,
        optimizer_step=step,
        parent=None,
        history_id="h1",
        training_dtype="float32",
        canary=None,
        at_s=0.0,
        adapter=Adapter(**{"base_digest": digest, "rank": 2, "alpha": 4.0, **changes}),
    )


def base_files(repository) -> list[Path]:
    folders = [repository._folder("shm"), repository._folder("file")]
    return [path for folder in folders for path in folder.glob("base-*")]


def test_an_adapter_is_loaded_as_the_whole_weights_that_it_makes_of_its_base(repository):
    manifest = publish_adapter(repository)
    loaded = repository.load(manifest.policy_version)
    assert loaded.keys() == {"q.weight", "norm.weight"}
    # 1 + alpha / rank * 2
    assert torch.equal(loaded["q.weight"], torch.full((4, 3), 5.0))
    assert torch.equal(loaded["norm.weight"], torch.ones(3))


def test_an_adapter_takes_the_room_of_its_own_tensors_alone(repository, tmp_path):
    manifest = publish_adapter(repository)
    assert {name: entry.nbytes for name, entry in manifest.tensors.items()} == {
        "q.lora_A.weight": 2 * 3 * 4,
        "q.lora_B.weight": 4 * 2 * 4,
    }
    assert reopened(repository, tmp_path).manifest(manifest.policy_version).adapter == manifest.adapter


def test_a_base_is_stored_once_and_is_no_version(repository):
    assert repository.put_base(BASE) == repository.put_base(BASE)
    assert len(base_files(repository)) == 1
    assert repository.latest() is None


def test_the_base_of_a_kept_or_held_adapter_stays_and_others_go(repository, tmp_path):
    publish_adapter(repository, base={name: tensor + 1 for name, tensor in BASE.items()})
    other = reopened(repository, tmp_path)
    other.hold(1, owner="replica")
    for step in range(1, 3):  # versions 2 and 3; two are kept
        publish_adapter(repository, {name: tensor + step for name, tensor in PAIR.items()}, step=step)
    repository.retire()
    assert torch.equal(other.load(1)["q.weight"], torch.full((4, 3), 6.0))
    other.release(1, owner="replica")
    assert repository.retire() == [1]
    assert len(base_files(repository)) == 1
    assert repository.load(3)["q.weight"].shape == (4, 3)


def test_a_roll_back_to_an_adapter_serves_what_it_served(repository):
    publish_adapter(repository)
    publish_adapter(repository, {name: tensor + 1 for name, tensor in PAIR.items()}, step=1)
    again = repository.republish(1, history_id="h1", at_s=1.0)
    assert torch.equal(repository.load(again.policy_version)["q.weight"], torch.full((4, 3), 5.0))


def test_a_damaged_base_is_found_when_an_adapter_is_loaded(repository, tmp_path):
    manifest = publish_adapter(repository)
    (file,) = base_files(repository)
    with file.open("r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        handle.write(b"\x01")
    with pytest.raises(WeightMismatch, match="under an adapter"):
        reopened(repository, tmp_path).load(manifest.policy_version)


def test_an_adapter_whose_base_is_gone_says_so(repository, tmp_path):
    manifest = publish_adapter(repository)
    base_files(repository)[0].unlink()
    with pytest.raises(WeightError, match=r"not in .* any more"):
        reopened(repository, tmp_path).load(manifest.policy_version)


def test_an_adapter_without_its_base_is_not_published(repository):
    with pytest.raises(WeightError, match="are not in the repository"):
        publish_adapter(repository, base_digest="other")
    assert repository.latest() is None


@pytest.mark.parametrize(
    ("pair", "why"),
    [
        ({"q.lora_A.weight": torch.ones(2, 3)}, r"q\.lora_A\.weight without q\.lora_B\.weight"),
        ({"q.weight": torch.ones(4, 3)}, r"holds q\.weight, which is none of a pair"),
        ({"q.lora_A.weight": torch.ones(1, 3), "q.lora_B.weight": torch.ones(4, 1)}, "of rank 2 they are"),
        ({"q.lora_A.weight": torch.ones(2, 5), "q.lora_B.weight": torch.ones(4, 2)}, r"of shape \(4, 3\)"),
        ({"k.lora_A.weight": torch.ones(2, 3), "k.lora_B.weight": torch.ones(4, 2)}, "has no such weight"),
    ],
)
def test_an_adapter_that_does_not_fit_its_base_is_refused_when_it_is_loaded(repository, pair, why):
    manifest = publish_adapter(repository, pair)
    with pytest.raises(WeightError, match=why):
        repository.load(manifest.policy_version)
