"""One run of Rollmill with evaluation off; published versions are kept as they appear and evaluated after the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluator import Evaluator
from measure import TreeSampler
from plan import EVALUATE_EVERY, STOP_AT, Item, point, time_to

from rollmill.config.schema import RollmillConfig
from rollmill.runtime.layout import ProcessLayout
from rollmill.types import WeightManifest
from rollmill.weights.repository import LocalModelRepository

LOOK_EVERY_S = 0.25
OWNER = "benchmark"


class Keeper:
    """Keeps every second version: holds it in the repository, and gives its file a second name, without a copy.

    The time of a version is when it could be seen here, up to `LOOK_EVERY_S` after it was complete.

    Args:
        repository: the run's.
        folder: where the second names go; on the file system of the tensors.
    """

    def __init__(self, repository: LocalModelRepository, folder: Path) -> None:
        self._repository = repository
        self._folder = folder
        self._seen = 0
        self.kept: list[tuple[WeightManifest, Path, float]] = []

    def look(self) -> None:
        """Keep what was published since the last look. A look comes long before a version can be retired."""
        now_s = time.monotonic()
        latest = self._repository.latest()
        newest = 0 if latest is None else latest.policy_version
        for version in range(self._seen + 1, newest + 1):
            manifest = self._repository.manifest(version)
            step = manifest.optimizer_step
            if step > 0 and step % EVALUATE_EVERY == 0:
                self._repository.hold(version, owner=OWNER)
                name = self._folder / f"step-{step:04d}.safetensors"
                os.link(manifest.location, name)
                self.kept.append((manifest, name, now_s))
        self._seen = newest


def differences(item: Item, *, folder: Path) -> list[str]:
    """Return what differs from the example's configuration."""
    return [
        "run.name=run",
        f"run.directory={folder}",
        f"run.seed={item.seed}",
        f"run.steps={item.steps}",
        f"trainer.learning_rate={item.setting.learning_rate}",
        f"schedule.batch_groups={item.setting.prompts_per_step}",
        f"schedule.group_size={item.setting.group_size}",
        f"schedule.zero_advantage={'shrink' if item.zero_advantage == 'shrink' else 'replace'}",
        f"algorithm.signal={'shaped_reward' if item.zero_advantage == 'shaped' else 'raw_reward'}",
        # evaluated afterwards; TRL writes no checkpoints either
        "evaluation.at_start=false",
        "evaluation.at_end=false",
        "trainer.checkpoint_every_steps=100000",
    ]


def run(
    item: Item, *, config_path: Path, overrides: Sequence[str], config: RollmillConfig, evaluator: Evaluator
) -> dict[str, Any]:
    """Return the record of one run of Rollmill.

    Args:
        overrides: of the configuration file, beside those of the item.
        config: what they make together.
    """
    with tempfile.TemporaryDirectory(prefix="vs-trl-") as name:
        folder = Path(name)
        layout = ProcessLayout(folder / "run")
        command = [sys.executable, "-m", "rollmill.cli", "train", str(config_path), "--json"]
        for setting in [*overrides, *differences(item, folder=folder)]:
            command += ["--set", setting]
        started_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="vs-trl-", dir=_beside_tensors(config, folder)) as kept:
            keeper: Keeper | None = None
            log = folder / "log.txt"
            with (
                log.open("w") as errors,
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
                TreeSampler(process.pid) as sampler,
            ):
                while process.poll() is None:
                    # made once the run has made it: a folder that is there is refused as another run's
                    if keeper is None and (layout.weights / "manifests").is_dir():
                        keeper = Keeper(LocalModelRepository(layout.weights), Path(kept))
                    if keeper is not None:
                        keeper.look()
                    time.sleep(LOOK_EVERY_S)
                output = process.stdout.read() if process.stdout else ""
            if process.returncode != 0 or keeper is None:
                return {"failed": log.read_text()[-2000:], "points": [], "steps_made": []}
            return _record(
                json.loads(output),
                layout=layout,
                keeper=keeper,
                sampler=sampler,
                evaluator=evaluator,
                started_s=started_s,
            )


def _beside_tensors(config: RollmillConfig, folder: Path) -> Path:
    in_memory = config.weights.transport != "file" and Path("/dev/shm").is_dir()
    return Path("/dev/shm") if in_memory else folder


def _record(
    summary: dict[str, Any],
    *,
    layout: ProcessLayout,
    keeper: Keeper,
    sampler: TreeSampler,
    evaluator: Evaluator,
    started_s: float,
) -> dict[str, Any]:
    rollouts = [json.loads(line) for line in (layout.run_directory / "rollouts.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (layout.run_directory / "metrics.jsonl").read_text().splitlines()]
    # training begins when the first rollout is dispatched; all before is start-up
    begin_s = min(rollout["started_at_s"] for rollout in rollouts)
    begin_cpu_s = sampler.cpu_at(begin_s)

    def spent(at_s: float) -> dict[str, float]:
        return {"wall_s": at_s - begin_s, "cpu_s": sampler.cpu_at(at_s) - begin_cpu_s}

    evaluating_s = time.monotonic()
    points: list[dict[str, Any]] = []
    for manifest, path, seen_at_s in keeper.kept:
        points.append(point(manifest.optimizer_step, spent=spent(seen_at_s), verdict=evaluator.accuracy(path)))
        path.unlink()
        if time_to(points, target=STOP_AT, key="step") is not None:
            break
    last_s = metrics[-1]["finished_at_s"]
    return {
        "points": points,
        "steps_made": [
            {
                "step": step["step"],
                **spent(step["finished_at_s"]),
                "reward_mean": step["reward_mean"],
                "reward_before_filter": step["reward_before_filter"],
                "groups": step["groups"],
                "groups_closed": step["groups_closed"],
                "groups_without_signal": step["groups_without_signal"],
            }
            for step in metrics
        ],
        "startup_s": begin_s - started_s,
        "startup_cpu_s": begin_cpu_s,
        "evaluation_s": time.monotonic() - evaluating_s,
        "trained": spent(last_s),
        "peak_pss_bytes": sampler.peak_pss_bytes,
        "rollouts": summary["rollouts"],
        "staleness": summary["staleness"],
        "seconds": summary["seconds"],
        "bound_by": summary["bound_by"],
    }
