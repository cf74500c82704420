"""SIGKILL for any process of a real run, at any moment, again and again; then the books.

    pytest -m "" tests/integration/test_kill_rounds.py -k fake --kill-rounds 100 --kill-result kill_rounds.json

Moments are spread over start-up, sampling, training, publication, checkpoint, evaluation and the end. A failure prints
the seed, the losses so far and the end of the run's output.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from kill_world import Chain, Job, chain, main_job, tally, tiny_job

from rollmill.weights.prepare import find_prepared

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(7200)]

KILLS_PER_RUN = 5
MAIN_JOB = Path(__file__).parents[2] / "examples" / "arithmetic" / "train.toml"


def run_rounds(request: pytest.FixtureRequest, tmp_path: Path, *, job: Job, policy: str) -> list[Chain]:
    """Kill at least as many processes as asked for, a few per run; return the runs."""
    rounds, seed = request.config.getoption("--kill-rounds"), request.config.getoption("--kill-seed")
    chains: list[Chain] = []
    while (done := sum(len(one.losses) for one in chains)) < rounds:
        folder = tmp_path / f"chain-{seed}"
        folder.mkdir()
        kills = min(KILLS_PER_RUN, rounds - done)
        chains.append(chain(folder, job=job, seed=seed, kills=kills, policy=policy, first_round=done + 1))
        seed += 1
    result = request.config.getoption("--kill-result")
    if result:
        document = {"job": job.name, "policy": policy, **tally(chains), "runs": msgspec.to_builtins(chains)}
        Path(result).write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    return chains


@pytest.mark.parametrize("policy", ["stop", "restart"])
def test_kill_rounds_fake(request: pytest.FixtureRequest, tmp_path: Path, policy: str) -> None:
    """Everything is real but the engine."""
    chains = run_rounds(request, tmp_path, job=tiny_job(engine="fake"), policy=policy)
    assert sum(len(one.losses) for one in chains) >= request.config.getoption("--kill-rounds")


def test_kill_rounds_real(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The shipped job with its model of 135 million parameters, shortened; needs the model and some minutes a round."""
    if find_prepared("smollm2-135m-instruct") is None:
        pytest.skip("the model is not prepared: `rollmill model prepare smollm2-135m-instruct`")
    chains = run_rounds(request, tmp_path, job=main_job(MAIN_JOB.read_text()), policy="restart")
    assert sum(len(one.losses) for one in chains) >= request.config.getoption("--kill-rounds")
