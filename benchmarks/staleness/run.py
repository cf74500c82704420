"""How old may samples be? Held-out accuracy against staleness, with and without importance correction.

    python benchmarks/staleness/run.py            # all of it: about 7 minutes of one core
    python benchmarks/staleness/run.py --seeds 0 --steps 10 --out /tmp/staleness.json

Groups, advantages, correction, loss and optimizer are Rollmill's own. A plain loop samples in the same process, so that
staleness is exact and not a matter of speed: the samples of step t come from the weights of step t - staleness (from
the first weights while t is smaller), and every step checks that. Every run samples the same number of rollouts. Writes
`result.json` and `staleness.svg` beside this file after each seed of a learning rate.
"""

from __future__ import annotations

import argparse
import itertools
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
from tables import ARMS, SEEDS, STALENESS, line_of, ratios, settings_of_a_seed, summary
from transformers import LlamaForCausalLM, PreTrainedModel

from rollmill.algorithms.grouping import close_group
from rollmill.config.schema import (
    AlgorithmSettings,
    RollmillConfig,
    SamplingSettings,
    ScheduleSettings,
    TrainerSettings,
)
from rollmill.environments.rendering import Renderer
from rollmill.trainer.logprobs import PackedInput, packed_logprobs
from rollmill.trainer.model import load_policy
from rollmill.trainer.packing import plan_step
from rollmill.trainer.step import Trainer
from rollmill.types import (
    FilterVerdict,
    Group,
    Message,
    Rollout,
    SamplingParams,
    Scored,
    StopReason,
    Task,
    Turn,
    VersionSpan,
    derive_seed,
    raw_reward_of,
)

HERE = Path(__file__).parent
MODEL_SEED = 7
LEARNING_RATES = (1e-3, 3e-4)
STEPS = 24
EVALUATE_EVERY = 12
GROUPS, GROUP_SIZE = 16, 8
CORRECTIONS = {"clipped": "clipped_is", "truncated": "truncated_is", "none": "none", "ignored": "none"}


def config_of(*, learning_rate: float, arm: str) -> RollmillConfig:
    """Return the configuration of one run; what is not named keeps its default."""
    return RollmillConfig(
        sampling=SamplingSettings(max_new_tokens=base_model.ANSWER_TOKENS),
        trainer=TrainerSettings(dtype="float32", learning_rate=learning_rate),
        algorithm=AlgorithmSettings(correction=CORRECTIONS[arm]),
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
    """One run: samples from old weights on purpose, and a trainer.

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
        self._judge = LlamaForCausalLM.from_pretrained(model)  # evaluates and, with old weights, samples

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self._trainer.named_tensors().items()}

    def train(self, *, steps: int) -> list[dict[str, Any]]:
        """Return evaluations of the trained weights over the run."""
        curve = [self._evaluate()]
        for step in range(steps):
            groups = self._sample(step)
            trainable = [group for group in groups if group.verdict is FilterVerdict.TRAINABLE]
            if trainable:  # else there is nothing to learn from, and the weights stay
                self._learn(trainable)
            if (step + 1) % EVALUATE_EVERY == 0 or step + 1 == steps:
                rewards = [raw_reward_of(rollout.outcome) or 0.0 for group in groups for rollout in group.rollouts]
                curve.append({"reward": statistics.mean(rewards), **self._evaluate()})
        return curve

    def _learn(self, groups: list[Group]) -> None:
        """Make one optimizer step, and check that its samples had exactly the age they should have."""
        wanted = min(self._staleness, self._trainer.optimizer_step)
        if self._arm == "ignored":
            groups = as_if_fresh(groups, model=self._trainer.model, config=self._config)
        metrics = self._trainer.train_step(groups, optimizer_step_of=int)  # versions are optimizer steps
        if (metrics.staleness_mean, metrics.staleness_max) != (wanted, wanted):
            raise RuntimeError(
                f"step {metrics.optimizer_step} trained on samples of staleness {metrics.staleness_mean:g} (at most "
                f"{metrics.staleness_max:g}), wanted {wanted}"
            )
        self._history = [*self._history, self._copy()][-(self._staleness + 1) :]

    def _sample(self, step: int) -> list[Group]:
        """Return the groups of a step, sampled by the oldest weights that are kept."""
        version = max(0, self._trainer.optimizer_step - self._staleness)
        self._judge.load_state_dict(self._history[0], strict=False)  # the head is the embedding
        chosen = [self._training[self._order[(step * GROUPS + at) % len(self._order)]] for at in range(GROUPS)]
        seed = derive_seed("staleness", self._seed, step)
        sampled = base_model.sample(
            self._judge,
            [problem for problem in chosen for _ in range(GROUP_SIZE)],
            generator=torch.Generator().manual_seed(seed),
        )
        prompts = [self._renderer.render([Message("user", base_model.question(problem))]) for problem in chosen]
        rollouts = [
            self._rollout(
                chosen[index // GROUP_SIZE],
                one,
                prompt_ids=prompts[index // GROUP_SIZE],
                group_id=f"{step}.{index // GROUP_SIZE}",
                sibling=index % GROUP_SIZE,
                version=version,
                seed=seed,
            )
            for index, one in enumerate(sampled)
        ]
        return [
            close_group(
                f"{step}.{group}",
                step * GROUPS + group,
                rollouts[group * GROUP_SIZE : (group + 1) * GROUP_SIZE],
                settings=self._config.algorithm,
                optimizer_step_of=int,
            )
            for group in range(GROUPS)
        ]

    def _rollout(
        self,
        problem: Problem,
        sampled: base_model.Sampled,
        *,
        prompt_ids: np.ndarray,
        group_id: str,
        sibling: int,
        version: int,
        seed: int,
    ) -> Rollout:
        ids, logprobs = sampled
        turn = Turn(
            request_id=f"{group_id}/{sibling}",
            prompt_ids=prompt_ids,
            output_ids=ids,
            behavior_logprobs=logprobs,
            version_spans=(VersionSpan(0, len(ids), version),),
            stop_reason=StopReason.STOP if ids[-1] == base_model.END else StopReason.LENGTH,
        )
        right = float(self._renderer.decode(ids) == base_model.answer(problem))
        return Rollout(
            rollout_id=f"{group_id}/{sibling}.0",
            group_id=group_id,
            sibling=sibling,
            attempt=0,
            task=Task(task_id=base_model.question(problem), environment="addition", messages=()),
            turns=(turn,),
            outcome=Scored(raw_reward=right, shaped_reward=right),
            sampling=SamplingParams(
                temperature=1.0,
                max_new_tokens=base_model.ANSWER_TOKENS,
                seed=seed,
                stop_token_ids=self._renderer.stop_token_ids,
            ),
            started_at_s=0.0,
            finished_at_s=0.0,
        )

    def _evaluate(self) -> dict[str, Any]:
        """Return the accuracy of the trained weights on the held-out problems."""
        self._judge.load_state_dict(self._trainer.model.state_dict())
        return {"step": self._trainer.optimizer_step, **base_model.accuracy(self._judge, self._held_out)}


def one_run(model: Path, *, steps: int, **settings: Any) -> dict[str, Any]:
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    curve = Run(model, **settings).train(steps=steps)
    return {
        **settings,
        "accuracy": curve[-1]["accuracy"],
        "curve": curve,
        "wall_s": time.perf_counter() - started_s,
        "cpu_s": time.process_time() - started_cpu_s,
    }


def taught_model(folder: Path) -> tuple[Path, dict[str, float]]:
    """Return a folder with the taught model, and its accuracy on the held-out problems."""
    if not (folder / "model.safetensors").exists():
        base_model.make(folder, seed=MODEL_SEED)
    _, held_out = base_model.problems(MODEL_SEED)
    return folder, base_model.accuracy(LlamaForCausalLM.from_pretrained(folder), held_out)


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
    mpl.rcParams["svg.fonttype"] = "none"  # letters stay text: smaller
    from matplotlib import pyplot

    rates = sorted({row["learning_rate"] for row in rows})
    figure, panels = pyplot.subplots(1, len(rates), figsize=(4.2 * len(rates), 3.4), sharey=True, squeeze=False)
    for panel, rate in zip(panels[0], rates, strict=True):
        for arm in ARMS:
            line = line_of(rows, learning_rate=rate, arm=arm)
            panel.errorbar(
                [STALENESS.index(row["staleness"]) for row in line],
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


def write(
    runs: list[dict[str, Any]], *, out: Path, taught: dict[str, float], steps: int, started_on: dict[str, Any]
) -> None:
    rows = summary(runs)
    settings = {
        "model": f"Llama, {base_model.LAYERS} layers, hidden {base_model.HIDDEN}, characters as tokens",
        "taught": taught,
        "held_out": base_model.HELD_OUT,
        "accuracy": "mean probability of the right answer when sampling at temperature 1",
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
        "ratios": ratios(runs),
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    draw(rows, out.with_name("staleness.svg"), taught=taught["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    parser.add_argument("--model", type=Path, help="folder of the taught model; made where it holds none")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started_on = machine()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model, taught = taught_model(args.model or Path(folder))
        print(f"taught: {taught}", flush=True)
        for learning_rate, seed in itertools.product(LEARNING_RATES, args.seeds):
            for staleness, arm in settings_of_a_seed():
                settings = {"staleness": staleness, "learning_rate": learning_rate, "arm": arm, "seed": seed}
                runs.append(one_run(model, steps=args.steps, **settings))
                print(f"{settings}: {runs[-1]['accuracy']:.3f}, {runs[-1]['cpu_s']:.1f} s CPU", flush=True)
            write(runs, out=args.out, taught=taught, steps=args.steps, started_on=started_on)


if __name__ == "__main__":
    main()
