"""One run of TRL: its environment, its work file, its JSON lines, evaluation while its clock stands still."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from evaluator import Evaluator
from measure import TreeSampler
from plan import EVALUATE_EVERY, PILOT_LIMIT_S, STOP_AT, Item, TrlMode, point, time_to

from rollmill.config.schema import RollmillConfig
from rollmill.environments.load import load_environment
from rollmill.runtime.threads import process_environment
from rollmill.weights.catalog import cache_directory

REQUIREMENTS = ("trl==1.16.0", "transformers==5.24.0", "datasets==5.2.0", "accelerate==1.15.0")
TORCH = "torch==2.13.0"
HERE = Path(__file__).parent


def environment_python() -> Path:
    """Return the Python of TRL's environment in the cache folder; make it first if it is not there."""
    folder = cache_directory().parent / "benchmarks" / "trl-1.16.0"
    python, done = folder / "bin" / "python", folder / ".complete"
    if not done.exists():
        print(f"setting up {folder} (a few minutes, 1.6 GB)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        index = os.environ.get("TORCH_INDEX")
        subprocess.run([*install, TORCH, *(["--index-url", index] if index else [])], check=True)
        subprocess.run([*install, *REQUIREMENTS], check=True)
        done.touch()
    return python


def work_of(item: Item, *, config: RollmillConfig, evaluator: Evaluator, folder: Path) -> dict[str, Any]:
    """Return the work file: the same problems in the same order, and every setting that both sides share."""
    environment = load_environment(config.environment, run_seed=item.seed, system_prompt=config.model.system_prompt)
    tasks = [environment.task_at(index) for index in range(item.steps * item.setting.prompts_per_step)]
    mode = item.mode or TrlMode(threads=1)
    soft = config.schedule.overlong == "soft_penalty"
    return {
        "model": str(evaluator.model_path),
        "problems": [
            {
                "prompt": [{"role": message.role, "content": message.content} for message in task.messages],
                "answer": task.reference["answer"],
            }
            for task in tasks
        ],
        "stop_token_ids": list(evaluator.renderer.stop_token_ids),
        "seed": item.seed,
        "steps": item.steps,
        "save_every": 0 if item.phase == "pilot" else EVALUATE_EVERY,
        "prompts_per_step": item.setting.prompts_per_step,
        "group_size": item.setting.group_size,
        "learning_rate": item.setting.learning_rate,
        "warmup_steps": config.trainer.warmup_steps,
        "betas": config.trainer.betas,
        "eps": config.trainer.eps,
        "weight_decay": config.trainer.weight_decay,
        "max_grad_norm": config.trainer.max_grad_norm,
        "clip_low": config.algorithm.clip_low,
        "clip_high": config.algorithm.clip_high,
        "temperature": config.sampling.temperature,
        "max_new_tokens": config.sampling.max_new_tokens,
        "overlong_buffer_tokens": config.schedule.overlong_buffer_tokens if soft else 0,
        "overlong_penalty": config.schedule.overlong_penalty,
        "dtype": mode.dtype,
        "micro_batch": mode.micro_batch,
        "continuous_batching": mode.continuous_batching,
        "weights_folder": str(folder),
        "scratch_folder": str(folder / "trl"),
    }


def run(
    item: Item, *, config: RollmillConfig, evaluator: Evaluator, python: Path, limit_s: float | None = None
) -> dict[str, Any]:
    """Return the record of one run of TRL, which ends once it has trained for `limit_s`."""
    mode = item.mode or TrlMode(threads=1)
    with tempfile.TemporaryDirectory(prefix="vs-trl-", dir=scratch()) as name:
        folder = Path(name)
        work = folder / "work.json"
        work.write_text(json.dumps(work_of(item, config=config, evaluator=evaluator, folder=folder)))
        log = folder / "log.txt"
        started_s = time.monotonic()
        with (
            log.open("w") as errors,
            subprocess.Popen(
                [str(python), str(HERE / "trl_worker.py"), str(work)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**process_environment(threads=mode.threads), "TRL_EXPERIMENTAL_SILENCE": "1"},
            ) as process,
            TreeSampler(process.pid) as sampler,
        ):
            limit = threading.Timer(PILOT_LIMIT_S, process.kill)
            if item.phase == "pilot":
                limit.start()
            try:
                record = _follow(process, evaluator=evaluator, sampler=sampler, started_s=started_s, limit_s=limit_s)
            finally:
                too_slow = limit.finished.is_set()
                limit.cancel()
                if process.poll() is None:
                    process.kill()
        if process.returncode != 0:
            made = len(record["steps_made"])
            record["failed"] = f"ended after {PILOT_LIMIT_S:g} s, {made} steps made" if too_slow else _end_of(log)
    return {**record, "peak_pss_bytes": sampler.peak_pss_bytes, "threads": mode.threads}


def _end_of(log: Path) -> str:
    return log.read_text()[-2000:]


def _follow(
    process: subprocess.Popen[str],
    *,
    evaluator: Evaluator,
    sampler: TreeSampler,
    started_s: float,
    limit_s: float | None,
) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    steps: list[dict[str, Any]] = []
    points: list[dict[str, Any]] = []
    record: dict[str, Any] = {"points": points, "steps_made": steps, "evaluation_s": 0.0}
    for line in process.stdout:
        event = json.loads(line)
        match event.pop("event"):
            case "begin":
                now_s = time.monotonic()
                record |= {"startup_s": now_s - started_s, "startup_cpu_s": sampler.cpu_at(now_s), **event}
            case "step":
                steps.append(event)
            case "saved":
                began_s = time.monotonic()
                path = Path(event["path"])
                points.append(point(event["step"], spent=steps[-1], verdict=evaluator.accuracy(path)))
                path.unlink()
                record["evaluation_s"] += time.monotonic() - began_s
                reached = time_to(points, target=STOP_AT, key="step") is not None
                lost = limit_s is not None and points[-1]["wall_s"] > limit_s
                process.stdin.write("stop\n" if reached or lost else "go\n")
                process.stdin.flush()
            case "end":
                record["trained"] = event
            case other:
                raise ValueError(f"the worker said {other!r}, which means nothing here")
    process.wait()
    return record


def scratch() -> str | None:
    """Return a folder in memory for weights that live for one evaluation, where the machine has one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
