"""Runs that start no replicas: real ones behind a real router, one of which is killed; and two runs on one fleet."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import check_books, finish, lines, rollmill, tiny_toml, wait_for_steps, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(500)]

WAIT_S = 200


class Fleet:
    """A router and its replicas, each a command of its own.

    Args:
        folder: of the list of replicas and of what they say.
        follow: options of `rollmill serve` that say whose weights are served.
    """

    def __init__(self, folder: Path, config: Path, *, follow: list[str]) -> None:
        self._folder, self._config, self._follow = folder, config, follow
        self._list = folder / "replicas.txt"
        self._list.write_text("")
        self.replicas: dict[str, subprocess.Popen[str]] = {}
        self._entries: dict[str, str] = {}
        file = folder / "router.json"
        settings = [word for one in ("list_s=0.1", "poll_s=0.1") for word in ("--set", one)]
        self.router = rollmill("router", "--replicas-file", str(self._list), "--json", *settings)
        assert self.router.stdout is not None
        document = ""
        for line in self.router.stdout:
            document += line
            if line == "}\n":
                break
        file.write_text(document)
        self.address: str = json.loads(document)["grpc"]

    def start(self, name: str, *, jobs: str = "", port: int = 0) -> subprocess.Popen[str]:
        """Start a replica; `listed` puts it on the router's list once it serves."""
        (self._folder / f"{name}.json").unlink(missing_ok=True)
        self._entries[name] = jobs
        process = rollmill(
            *("serve", "--config", str(self._config), "--no-http", "--wait-s", str(WAIT_S)),
            *("--grpc-port", str(port), "--address-file", str(self._folder / f"{name}.json"), *self._follow),
        )
        self.replicas[name] = process
        return process

    def address_of(self, name: str) -> str:
        """Return where a replica serves, or an empty string while it does not."""
        file = self._folder / f"{name}.json"
        return json.loads(file.read_text())["address"] if file.exists() and file.read_text() else ""

    def list_all(self, run: subprocess.Popen[str]) -> None:
        """Wait for all replicas to serve and put them on the list."""
        wait_until(lambda: all(self.address_of(name) for name in self.replicas), run)
        rows = [
            self.address_of(name) + (f" jobs={jobs}" if (jobs := self._entries[name]) else "") for name in self.replicas
        ]
        self._list.write_text("\n".join(rows) + "\n")

    def status(self) -> dict[str, Any]:
        """Return each replica as the router sees it."""
        status, out, err = finish(rollmill("fleet", "status", self.address, "--json"))
        assert status == 0, err
        return {one["replica"]: one for one in json.loads(out)["members"]}


def config_of(
    folder: Path, *, address: str = "", fleet: dict[str, Any] | None = None, **changed: dict[str, Any]
) -> Path:
    """Write the configuration of the run `folder`/runs/tiny, which is served by the fleet at an address."""
    folder.mkdir(exist_ok=True)
    path = folder / "train.toml"
    changed["run"] = {"stall_report_s": 20.0, "stall_limit_s": 120.0, **changed.get("run", {})}
    text = tiny_toml(folder, **changed)
    if address:
        settings = {"address": address, **(fleet or {})}
        text += "\n".join(["\n[generator.fleet]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())])
    path.write_text(text)
    return path


def summary_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    status, out, err = finish(process)
    assert status == 0, err
    summary = json.loads(out)
    check_books(summary)
    return summary


def test_a_replica_is_killed_under_load_and_serves_again_with_the_current_weights(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    serving = config_of(folder)
    run = folder / "runs" / "tiny"
    fleet = Fleet(tmp_path, serving, follow=["--repository", str(run)])
    for name in ("one", "two", "three"):
        fleet.start(name)
    config = config_of(folder, address=fleet.address, run={"steps": 120})
    train = rollmill("train", str(config), "--json")
    fleet.list_all(train)
    wait_for_steps(run, 6, train)
    victim = fleet.address_of("two")
    fleet.replicas["two"].send_signal(signal.SIGKILL)
    fleet.replicas["two"].communicate()
    wait_for_steps(run, 10, train)
    newest_before = max(one["policy_version"] for one in fleet.status().values() if one["state"] == "serving")
    assert newest_before > 6
    # Again at its address: it serves with what it finds in the repository, or with what the fleet serves by then.
    again = fleet.start("two", port=int(victim.rpartition(":")[2]))
    wait_until(lambda: fleet.status()[victim]["state"] == "serving", train)
    assert fleet.status()[victim]["policy_version"] >= newest_before
    summary = summary_of(train)
    assert (summary["reason"], summary["steps"]) == ("steps_done", 120)
    assert summary["rollouts"]["trained"] == 120 * 2 * 4
    assert summary["rollouts"]["in_flight"] == 0
    # The run started no replica, and lost none: what was in flight went on elsewhere.
    events = lines(run / "events.jsonl")
    assert [one["replica_id"] for one in events if one["event"] == "replica_joined"] == ["fleet"]
    resized = [one["slots"] for one in events if one["event"] == "fleet_resized"]
    # Two, then three replicas of 16 seats; the router gives each 1.25 times as many samples.
    assert resized == [40, 60]
    assert not (run / "losses.jsonl").exists()
    assert again.poll() is None


def test_a_run_waits_for_its_fleet_and_says_for_what(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    serving = config_of(folder)
    run = folder / "runs" / "tiny"
    fleet = Fleet(tmp_path, serving, follow=["--repository", str(run)])
    config = config_of(folder, address=fleet.address, run={"steps": 2})
    train = rollmill("train", str(config), "--json")
    events = run / "events.jsonl"
    wait_until(lambda: events.exists() and "fleet_awaited" in events.read_text(), train)
    (awaited,) = [one for one in lines(events) if one["event"] == "fleet_awaited"]
    assert "no replica" in awaited["reason"]
    fleet.start("one")
    fleet.list_all(train)
    wait_for_steps(run, 1, train)
    assert summary_of(train)["steps"] == 2


def test_a_fleet_that_never_serves_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, config_of(tmp_path / "job"), follow=[])
    config = config_of(tmp_path / "job", address=fleet.address, run={"steps": 2}, fleet={"lost_deadline_s": 3.0})
    status, out, _ = finish(rollmill("train", str(config), "--json"))
    assert status == 1
    failure = json.loads(out)
    assert "generator.fleet.lost_deadline_s" in json.dumps(failure)
    assert fleet.address in json.dumps(failure)


def test_two_runs_share_a_fleet_with_their_adapters(tmp_path: Path) -> None:
    runs = {name: tmp_path / name / "runs" / "tiny" for name in ("maths", "tools")}
    low_rank = {"lora_rank": 4, "checkpoint_every_steps": 4}
    serving = config_of(tmp_path / "serving")
    follow = [word for name, run in runs.items() for word in ("--adapter", f"{name}={run}")]
    fleet = Fleet(tmp_path, serving, follow=follow)
    fleet.start("one")
    trains = {}
    for seed, name in enumerate(runs):
        config = config_of(
            tmp_path / name,
            address=fleet.address,
            run={"steps": 5, "seed": seed},
            trainer=low_rank,
            fleet={"job": name, "adapter": name, "slots": 8},
        )
        trains[name] = rollmill("train", str(config), "--json")
    fleet.list_all(trains["maths"])
    for name, train in trains.items():
        summary = summary_of(train)
        assert (name, summary["steps"], summary["rollouts"]["trained"]) == (name, 5, 5 * 2 * 4)
    assert fleet.replicas["one"].poll() is None
