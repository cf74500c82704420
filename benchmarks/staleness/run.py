"""How old may samples be? Held-out accuracy against staleness, with and without importance correction.

    python benchmarks/staleness/run.py            # all of it: about 25 minutes of one core
    python benchmarks/staleness/run.py --seeds 0 --steps 10 --out /tmp/staleness.json

Generator and trainer are Rollmill's own classes in one process, so that staleness is exact and not a matter of speed:
the samples of step t come from the weights of step t - staleness (from the first weights while t is smaller), and every
step checks that. Every run samples the same number of rollouts. Writes `result.json` and `staleness.svg` beside this
file after each seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import base_model
import msgspec
import numpy as np
import torch
from base_model import Problem
from tables import ARMS, SEEDS, STALENESS, ratios, summary
from transformers import PreTrainedModel

from rollmill.algorithms.grouping import close_group
from rollmill.clock import SystemClock
from rollmill.config.schema import (
    AlgorithmSettings,
    RollmillConfig,
    SamplingSettings,
    ScheduleSettings,
    TrainerSettings,
)
from rollmill.environments.rendering import Renderer
from rollmill.generator.engines.embedded.engine import EmbeddedEngine
from rollmill.telemetry.interval import proportion
from rollmill.trainer.logprobs import PackedInput, packed_logprobs
from rollmill.trainer.model import load_policy
from rollmill.trainer.packing import plan_step
from rollmill.trainer.step import Trainer
from rollmill.types import (
    FilterVerdict,
    GenerateRequest,
    Group,
    Message,
    Outcome,
    Rollout,
    SamplingParams,
    Scored,
    Task,
    Turn,
    derive_seed,
    raw_reward_of,
)

HERE = Path(__file__).parent
MODEL_SEED = 7
LEARNING_RATES = (3e-4, 1e-3)
STEPS = 64
EVALUATE_EVERY = 16
GROUPS, GROUP_SIZE = 16, 8
SAMPLES = 2
MAX_NEW_TOKENS = 5
DEADLINE_S = 600.0


def config_of(*, learning_rate: float, arm: str) -> RollmillConfig:
    """Return the configuration of one run; what is not named keeps its default."""
    return RollmillConfig(
        sampling=SamplingSettings(max_new_tokens=MAX_NEW_TOKENS),
        trainer=TrainerSettings(dtype="float32", learning_rate=learning_rate),
        algorithm=AlgorithmSettings(correction="truncated_is" if arm == "truncated" else "none"),
        schedule=ScheduleSettings(batch_groups=GROUPS, group_size=GROUP_SIZE, max_staleness=max(STALENESS)),
    )


def as_if_fresh(groups: list[Group], *, model: PreTrainedModel, config: RollmillConfig) -> list[Group]:
    """Return the groups with the log-probs of the model that is trained in place of those recorded at sampling."""
    plan = plan_step(groups, budget_tokens=config.trainer.micro_batch_tokens, keep_zero_advantage=False)
    logprobs: dict[str, np.ndarray] = {}
    for batch in plan.micro_batches:
        with torch.no_grad():
            scored = packed_logprobs(model, PackedInput(batch)).numpy()
        for index, rollout_id in enumerate(batch.rollout_ids):
            logprobs[rollout_id] = scored[batch.sequence_index == index]

    def fresh(rollout: Rollout) -> Rollout:
        if rollout.rollout_id not in logprobs:  # its advantage is 0: it is in no gradient
            return rollout
        (turn,) = rollout.turns
        turn = msgspec.structs.replace(turn, behavior_logprobs=logprobs[rollout.rollout_id])
        return msgspec.structs.replace(rollout, turns=(turn,))

    return [msgspec.structs.replace(group, rollouts=tuple(map(fresh, group.rollouts))) for group in groups]


class Run:
    """One run: an engine that serves old weights on purpose, and a trainer.

    Args:
        model: folder of the taught model.
        staleness: age of the weights that sample, in optimizer steps.
        arm: what is done about it, a key of `ARMS`.
    """

    def __init__(self, model: Path, *, staleness: int, learning_rate: float, arm: str, seed: int) -> None:
        self._staleness, self._arm, self._seed = staleness, arm, seed
        self._config = config_of(learning_rate=learning_rate, arm=arm)
        self._renderer = Renderer(model)
        self._trainer = Trainer(load_policy(model), config=self._config)
        self._training, self._held_out = base_model.problems(MODEL_SEED)
        self._order = torch.randperm(len(self._training), generator=torch.Generator().manual_seed(seed)).tolist()
        self._history = [self._copy()]  # weights by optimizer step, the newest `staleness + 1` of them
        self._steps_by_version = {0: 0}
        self._engine = EmbeddedEngine(
            model,
            dtype="float32",
            tensors=self._history[0],
            policy_version=0,
            digest="",
            max_slots=GROUPS * GROUP_SIZE,
            max_model_len=16,
            clock=SystemClock(),
        )

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self._trainer.named_tensors().items()}

    async def train(self, *, steps: int) -> list[dict[str, Any]]:
        """Return evaluations of the trained weights over the run."""
        curve = [await self._evaluate()]
        for step in range(steps):
            await self._load(self._history[0], step=max(0, self._trainer.optimizer_step - self._staleness))
            groups = await self._sample(step)
            trainable = [group for group in groups if group.verdict is FilterVerdict.TRAINABLE]
            if trainable:  # else there is nothing to learn from, and the weights stay
                self._learn(trainable)
            if (step + 1) % EVALUATE_EVERY == 0 or step + 1 == steps:
                rewards = [raw_reward_of(rollout.outcome) or 0.0 for group in groups for rollout in group.rollouts]
                curve.append({"reward": statistics.mean(rewards), **await self._evaluate()})
        await self._engine.close()
        return curve

    def _learn(self, groups: list[Group]) -> None:
        """Make one optimizer step, and check that its samples had exactly the age they should have."""
        wanted = min(self._staleness, self._trainer.optimizer_step)
        if self._arm == "ignored":
            groups = as_if_fresh(groups, model=self._trainer.model, config=self._config)
        metrics = self._trainer.train_step(groups, optimizer_step_of=self._steps_by_version.__getitem__)
        if (metrics.staleness_mean, metrics.staleness_max) != (wanted, wanted):
            raise RuntimeError(
                f"step {metrics.optimizer_step} trained on samples of staleness {metrics.staleness_mean:g} (at most "
                f"{metrics.staleness_max:g}), wanted {wanted}"
            )
        self._history = [*self._history, self._copy()][-(self._staleness + 1) :]

    async def _load(self, tensors: dict[str, torch.Tensor], *, step: int) -> None:
        version = max(self._steps_by_version) + 1
        self._steps_by_version[version] = step
        await self._engine.pause("drain")
        await self._engine.update(tensors, policy_version=version, digest="", kv="recompute")

    async def _sample(self, step: int) -> list[Group]:
        chosen = [self._training[self._order[(step * GROUPS + at) % len(self._order)]] for at in range(GROUPS)]
        wanted = [(group, sibling) for group in range(GROUPS) for sibling in range(GROUP_SIZE)]
        sampling = [
            SamplingParams(
                temperature=1.0,
                max_new_tokens=MAX_NEW_TOKENS,
                seed=derive_seed("staleness", self._seed, step, group, sibling),
                stop_token_ids=self._renderer.stop_token_ids,
            )
            for group, sibling in wanted
        ]
        turns = await self._answers(
            [chosen[group] for group, _ in wanted],
            sampling=sampling,
            label=f"step{step}",
            group_keys=[f"{step}.{group}" for group, _ in wanted],
        )
        rollouts = [
            self._rollout(chosen[group], turn, group_id=f"{step}.{group}", sibling=sibling, sampling=one)
            for (group, sibling), turn, one in zip(wanted, turns, sampling, strict=True)
        ]
        return [
            close_group(
                f"{step}.{group}",
                step * GROUPS + group,
                rollouts[group * GROUP_SIZE : (group + 1) * GROUP_SIZE],
                settings=self._config.algorithm,
                optimizer_step_of=self._steps_by_version.__getitem__,
            )
            for group in range(GROUPS)
        ]

    async def _answers(
        self, asked: list[Problem], *, sampling: list[SamplingParams], label: str, group_keys: list[str]
    ) -> list[Turn]:
        """Return an answer to each; all are queued before the first token, so that batches are equal in every run."""
        await self._engine.pause("drain")
        tasks = [
            asyncio.ensure_future(
                self._engine.generate(
                    GenerateRequest(
                        request_id=f"{label}/{index}",
                        prompt_ids=self._renderer.render([Message("user", base_model.question(problem))]),
                        sampling=one,
                        group_key=key,
                        deadline_s=DEADLINE_S,
                    )
                )
            )
            for index, (problem, one, key) in enumerate(zip(asked, sampling, group_keys, strict=True))
        ]
        await asyncio.sleep(0)  # every task runs up to its wait
        await self._engine.resume()
        return list(await asyncio.gather(*tasks))

    def _rollout(
        self, problem: Problem, turn: Turn, *, group_id: str, sibling: int, sampling: SamplingParams
    ) -> Rollout:
        return Rollout(
            rollout_id=f"{group_id}/{sibling}.0",
            group_id=group_id,
            sibling=sibling,
            attempt=0,
            task=Task(task_id=base_model.question(problem), environment="addition", messages=()),
            turns=(turn,),
            outcome=self._verdict(problem, turn),
            sampling=sampling,
            started_at_s=0.0,
            finished_at_s=0.0,
        )

    def _verdict(self, problem: Problem, turn: Turn) -> Outcome:
        right = float(self._renderer.decode(turn.output_ids) == base_model.answer(problem))
        return Scored(raw_reward=right, shaped_reward=right)

    async def _evaluate(self) -> dict[str, Any]:
        """Return the accuracy of the trained weights on the held-out problems: sampled, and greedy beside it.

        Sampled at temperature 1 is what the rewards of training measure.
        """
        await self._load(self._copy(), step=self._trainer.optimizer_step)
        sampled = await self._share_right(temperature=1.0, times=SAMPLES)
        greedy = await self._share_right(temperature=0.0, times=1)
        return {"step": self._trainer.optimizer_step, **sampled, "greedy": greedy["accuracy"]}

    async def _share_right(self, *, temperature: float, times: int) -> dict[str, Any]:
        asked = [problem for problem in self._held_out for _ in range(times)]
        turns = await self._answers(
            asked,
            sampling=[
                SamplingParams(
                    temperature=temperature,
                    max_new_tokens=MAX_NEW_TOKENS,
                    seed=derive_seed("evaluation", index),
                    stop_token_ids=self._renderer.stop_token_ids,
                )
                for index in range(len(asked))
            ],
            label=f"evaluation {max(self._steps_by_version)} at {temperature:g}",
            group_keys=[f"{temperature:g}.{index // times}" for index in range(len(asked))],
        )
        right = sum(
            self._renderer.decode(turn.output_ids) == base_model.answer(problem)
            for problem, turn in zip(asked, turns, strict=True)
        )
        return proportion(right, len(turns)).as_dict()


async def one_run(model: Path, *, steps: int, **settings: Any) -> dict[str, Any]:
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    curve = await Run(model, **settings).train(steps=steps)
    return {
        **settings,
        "accuracy": curve[-1]["accuracy"],
        "curve": curve,
        "wall_s": time.perf_counter() - started_s,
        "cpu_s": time.process_time() - started_cpu_s,
    }


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cpu": next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def draw(rows: list[dict[str, Any]], path: Path, *, taught: float) -> None:
    """Write the plot: one panel for each learning rate, one line for each arm."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "staleness"  # the same figures give the same file
    from matplotlib import pyplot

    rates = sorted({row["learning_rate"] for row in rows})
    figure, panels = pyplot.subplots(1, len(rates), figsize=(4.2 * len(rates), 3.4), sharey=True, squeeze=False)
    for panel, rate in zip(panels[0], rates, strict=True):
        for arm in ARMS:
            line = [row for row in rows if row["learning_rate"] == rate and row["arm"] == arm]
            at = [STALENESS.index(row["staleness"]) for row in line]
            panel.errorbar(
                at,
                [row["accuracy"] for row in line],
                yerr=[row["standard_error"] for row in line],
                marker="o",
                capsize=3,
                label=arm,
            )
        panel.axhline(taught, color="grey", linestyle=":", linewidth=1)
        panel.set_title(f"learning rate {rate:g}")
        panel.set_xticks(range(len(STALENESS)), [str(staleness) for staleness in STALENESS])
        panel.set_xlabel("staleness, optimizer steps")
    panels[0][0].set_ylabel("held-out accuracy")
    panels[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def write(runs: list[dict[str, Any]], *, out: Path, taught: float, steps: int, started_on: dict[str, Any]) -> None:
    rows = summary(runs)
    settings = {
        "model": f"Llama, {base_model.LAYERS} layers, hidden {base_model.HIDDEN}, characters as tokens",
        "taught_accuracy": taught,
        "held_out": base_model.HELD_OUT,
        "rollouts": steps * GROUPS * GROUP_SIZE,
        "steps": steps,
        "groups": GROUPS,
        "group_size": GROUP_SIZE,
        "staleness": STALENESS,
        "learning_rates": LEARNING_RATES,
        "arms": ARMS,
    }
    result = {
        "machine": started_on,
        "settings": settings,
        "runs": runs,
        "summary": rows,
        "ratios": ratios(runs, learning_rate=max(LEARNING_RATES)),
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    draw(rows, out.with_name("staleness.svg"), taught=taught)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started_on = machine()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        taught = base_model.make(model, seed=MODEL_SEED)
        print(f"taught: {taught:.3f}", flush=True)
        for seed in args.seeds:
            for learning_rate in LEARNING_RATES:
                for staleness in STALENESS:
                    for arm in ARMS:
                        settings = {"staleness": staleness, "learning_rate": learning_rate, "arm": arm, "seed": seed}
                        runs.append(asyncio.run(one_run(model, steps=args.steps, **settings)))
                        print(f"{settings}: {runs[-1]['accuracy']:.3f}, {runs[-1]['cpu_s']:.1f} s CPU", flush=True)
            write(runs, out=args.out, taught=taught, steps=args.steps, started_on=started_on)


if __name__ == "__main__":
    main()
