"""The whole main job with low-rank differences: small publications, whole checkpoints, a resume from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import check_books, finish, kill_supervisor, rollmill, wait_for_steps, write_config

from rollmill.weights import LocalModelRepository, read_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

LORA = ["--set", "trainer.lora_rank=4", "--set", "trainer.learning_rate=0.01", "--set", "weights.transport=file"]


def test_a_run_publishes_adapters_alone_and_its_checkpoints_are_whole_models(tmp_path: Path) -> None:
    status, out, err = finish(rollmill("train", str(write_config(tmp_path, steps=5)), "--json", *LORA))
    assert status == 0, err
    run, summary = tmp_path / "runs" / "tiny", json.loads(out)
    check_books(summary)
    assert summary["steps"] == 5

    repository = LocalModelRepository(run / "weights", transport="file")
    manifests = repository.manifests()
    whole = sum(
        tensor.nbytes for tensor in read_checkpoint(run / "checkpoints" / "step-000005").model_tensors().values()
    )
    published = {sum(entry.nbytes for entry in manifest.tensors.values()) for manifest in manifests}
    assert [manifest.optimizer_step for manifest in manifests] == list(range(6))
    assert len({manifest.adapter.base_digest for manifest in manifests}) == 1
    assert max(published) < whole / 4
    # What the newest version serves is what the last checkpoint holds.
    served, kept = repository.load(6), read_checkpoint(run / "checkpoints" / "step-000005").model_tensors()
    assert served.keys() == kept.keys()
    assert all((served[name] == tensor).all() for name, tensor in kept.items())

    status, out, err = finish(rollmill("eval", str(run / "checkpoints" / "step-000005"), "--json"))
    assert status == 0, err
    assert json.loads(out)["accuracy"] == summary["eval"]["after"]["accuracy"]


def test_a_killed_run_goes_on_from_its_adapters(tmp_path: Path) -> None:
    process = rollmill("train", str(write_config(tmp_path, steps=9)), *LORA)
    run = tmp_path / "runs" / "tiny"
    wait_for_steps(run, 5, process)  # the checkpoint of step 4 is there
    kill_supervisor(process, run)
    status, out, err = finish(rollmill("train", "--resume", str(run), "--json"))
    assert status == 0, err
    summary = json.loads(out)
    check_books(summary)
    assert summary["steps"] == 9
    manifests = LocalModelRepository(run / "weights", transport="file").manifests()
    assert len({manifest.history_id for manifest in manifests}) == 2
    assert len({manifest.adapter.base_digest for manifest in manifests}) == 1
