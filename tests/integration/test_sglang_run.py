"""A whole run with SGLang as its engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import check_books, finish, lines, processes_of, rollmill, write_config

from integration.sglang_rig import make as rig
from sglang_server import why_not

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]


def table() -> str:
    """What a configuration needs where the test rig's environment serves."""
    variables = ", ".join(f"{name} = {json.dumps(value)}" for name, value in rig.VARIABLES.items())
    return "\n".join(
        [
            "[generator.sglang]",
            f"python = {json.dumps(str(rig.python()))}",
            f"arguments = {json.dumps(rig.ARGUMENTS)}",
            f"variables = {{ {variables} }}",
        ]
    )


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_run_trains_with_sglang(tmp_path: Path, kv: str) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    config = write_config(tmp_path, steps=7)
    config.write_text(f"{config.read_text()}\n{table()}\n")
    status, out, err = finish(
        rollmill(
            "train",
            str(config),
            "--json",
            *("--set", "generator.engine=sglang"),
            *("--set", f"generator.kv_on_update={kv}"),
            *("--set", "run.stall_limit_s=240.0"),
        )
    )
    run = tmp_path / "runs" / "tiny"
    assert status == 0, err
    summary = json.loads(out)
    check_books(summary)
    assert (summary["steps"], summary["rollouts"]["trained"], summary["rollouts"]["in_flight"]) == (7, 56, 0)
    assert 0 <= summary["staleness"]["max"] <= 2
    spans = [span for rollout in lines(run / "rollouts.jsonl") for span in rollout["version_spans"]]
    # Weights that were trained came back into the engine, and it said so itself. With a staleness of two at most, a
    # seventh step needs a third version, however far ahead the generator was.
    assert len({span[-1] if isinstance(span, list) else span["policy_version"] for span in spans}) > 2
    # Its processes are counted, and none is left.
    assert summary["peak_memory_bytes"] > 1_500_000_000
    assert processes_of(run) == []
    assert "Weight version changed" in (run / "logs" / "generator-0.sglang.log").read_text()
