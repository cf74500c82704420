"""Real runs that lose a process to SIGKILL at a random moment, and the books that must balance afterwards.

A *chain* is one run directory: it is started, loses a process, is resumed (or goes on by itself where the run restarts
what it lost), loses another one, and at last runs to its end. What was acknowledged is read from files that are
written after the store has answered (`rollouts.jsonl`, `metrics.jsonl`), so that the store has a witness.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
from tiny_runs import tiny_toml

from rollmill.buffer.sqlite import SqliteStore
from rollmill.config.load import load_config
from rollmill.config.schema import RunSettings
from rollmill.controller.translate import scheduler_settings
from rollmill.runtime.fold import fold
from rollmill.runtime.incarnation import Preflight, read_record
from rollmill.runtime.layout import ProcessLayout
from rollmill.weights.checkpoint import latest_checkpoint
from rollmill.weights.transport import shared_folder

GONE_WITHIN_S = 5.0
MOMENT_DEADLINE_S = 240.0
END_DEADLINE_S = 300.0
LOOK_EVERY_S = 0.002
VICTIMS = ("generator-0", "trainer", "controller", "supervisor")


class Moment(enum.StrEnum):
    """What the run does when it loses a process."""

    STARTUP = "startup"
    SAMPLING = "sampling"
    TRAINING = "training"
    PUBLISH = "publish"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    FINISH = "finish"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is run.

    Attributes:
        toml: returns the configuration for a folder, with these settings of its `run` section.
        steps: optimizer steps of a whole run.
        step_s: about how long a step takes; moments inside a step are spread over it.
    """

    name: str
    toml: Callable[[Path, dict[str, Any]], str]
    steps: int
    evaluate_every: int
    step_s: float


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """One killed process and what the run did.

    Attributes:
        settled_s: from the kill until no process was left, or until the process was there again.
        outcome: `stopped` (to be resumed) or `restarted`.
        cause: what the run directory says of it.
    """

    round: int
    victim: str
    moment: str
    settled_s: float
    outcome: str
    cause: str


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """A finished chain."""

    seed: int
    losses: tuple[Loss, ...]
    incarnations: int
    rollouts: dict[str, Any]


def tiny_job(*, engine: str = "fake") -> Job:
    """Return the job on the tiny Llama; with the fake engine only the trainer computes."""

    def toml(folder: Path, run: dict[str, Any]) -> str:
        return tiny_toml(
            folder,
            run={"steps": 18, "stall_report_s": 20.0, "stall_limit_s": 90.0, **run},
            environment={"pool_size": 200, "heldout_size": 8},
            sampling={"max_new_tokens": 8},
            generator={"engine": engine},
            trainer={"checkpoint_every_steps": 3},
            evaluation={"every_steps": 4},
            schedule={"group_size": 2},
        )

    return Job(name=f"tiny-{engine}", toml=toml, steps=18, evaluate_every=4, step_s=0.12)


def main_job(shipped: str) -> Job:
    """Return the shipped main job, shortened so that a chain takes minutes."""

    def toml(folder: Path, run: dict[str, Any]) -> str:
        settings = {"steps": 8, "directory": str(folder / "runs"), **run}
        lines_of_run = "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
        shortened = shipped.replace("steps = 36", lines_of_run).replace("heldout_size = 256", "heldout_size = 16")
        return shortened + "checkpoint_every_steps = 2\n\n[evaluation]\nevery_steps = 3\n"

    return Job(name="arithmetic", toml=toml, steps=8, evaluate_every=3, step_s=12.0)


def policy_settings(policy: str) -> dict[str, str]:
    """Return what the run is told to do about a lost process: `stop`, or `restart` where the run can."""
    return {name: policy for name in RunSettings.model_fields if name.startswith("on_") and name.endswith("_loss")}


class Run:
    """One run directory and the command that drives it now."""

    def __init__(self, folder: Path, *, job: Job, seed: int, policy: str, log: Path | None = None) -> None:
        self.job = job
        self.config = folder / "train.toml"
        self.config.write_text(job.toml(folder, {"seed": seed % 1000, **policy_settings(policy)}))
        self.directory = folder / "runs" / load_config(self.config).config.run.name
        self.layout = ProcessLayout(self.directory)
        self.log = folder / "output.log" if log is None else log
        self._output = self.log.open("ab")
        self.command: subprocess.Popen[bytes] | None = None

    def start(self, *, largest_file_bytes: int | None = None) -> None:
        """Begin the run, or go on with it.

        Args:
            largest_file_bytes: a write beyond it is refused, in all processes of the run, as a full disk refuses it.
        """
        begun = (self.directory / "config.json").exists()
        arguments = ["--resume", str(self.directory)] if begun else [str(self.config)]
        if not begun and self.directory.exists():
            # Killed while the run directory was being made: nothing was acknowledged, the user begins anew.
            for path in sorted(self.directory.rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
        command = [sys.executable, "-m", "rollmill.cli", "train", *arguments, "--json"]
        if largest_file_bytes is not None:
            limited = (
                "import os, resource, sys; "
                f"resource.setrlimit(resource.RLIMIT_FSIZE, ({largest_file_bytes}, {largest_file_bytes})); "
                "os.execv(sys.argv[1], sys.argv[1:])"
            )
            command = [sys.executable, "-c", limited, *command]
        self.command = subprocess.Popen(
            command,
            stdout=self._output,
            stderr=self._output,
        )

    def ended(self, *, within_s: float = 0.0) -> bool:
        """Wait up to `within_s` for the command's end; return whether it ended."""
        assert self.command is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.command.wait(timeout=within_s)
        return self.command.poll() is not None

    def status(self) -> int:
        assert self.command is not None
        return self.command.wait(timeout=END_DEADLINE_S)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def processes(self) -> dict[str, psutil.Process]:
        """Return the living processes of the run by name, the command as `supervisor`."""
        found: dict[str, psutil.Process] = {}
        directory = str(self.directory)
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if directory in words and "rollmill.runtime.process" in words and process.info["status"] != "zombie":
                found[words[words.index(directory) - 1]] = process
        if self.command is not None and self.command.poll() is None:
            found["supervisor"] = psutil.Process(self.command.pid)
        return found

    def close(self) -> None:
        """End what the chain left behind; for a test that failed half way."""
        for process in self.processes().values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.command is not None:
            self.command.wait(timeout=END_DEADLINE_S)
        self._output.close()


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a JSON lines file; a line torn by a kill is passed over."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


# moments


def wait_for_moment(run: Run, moment: Moment, *, rng: random.Random) -> bool:
    """Wait for the moment; return False if the run ended before it came."""
    began = {name: count_lines(run.directory / name) for name in ("rollouts.jsonl", "metrics.jsonl", "events.jsonl")}
    newest = _newest_version(run)
    ahead = rng.randrange(0, 4)

    def grown(name: str, by: int) -> bool:
        return count_lines(run.directory / name) >= began[name] + by

    def finished() -> bool:
        return any(
            line["event"] == "finished" for line in lines(run.directory / "events.jsonl")[began["events.jsonl"] :]
        )

    def evaluating() -> bool:
        steps = [line["step"] for line in lines(run.directory / "metrics.jsonl")[began["metrics.jsonl"] :]]
        joined = any(
            line["event"] == "replica_joined" for line in lines(run.directory / "events.jsonl")[began["events.jsonl"] :]
        )
        return any(step % run.job.evaluate_every == 0 for step in steps) or (ahead == 0 and joined)

    arrived: dict[Moment, tuple[Callable[[], bool], float]] = {
        Moment.STARTUP: (lambda: run.directory.exists(), rng.uniform(0.0, 20.0)),
        Moment.SAMPLING: (lambda: grown("rollouts.jsonl", 1 + 4 * ahead), run.job.step_s),
        Moment.TRAINING: (lambda: grown("metrics.jsonl", ahead), run.job.step_s),
        Moment.PUBLISH: (lambda: _publishing(run, above=newest + ahead), 0.03),
        Moment.CHECKPOINT: (lambda: any(run.layout.checkpoints.glob("*.partial")), 0.03),
        Moment.EVALUATION: (evaluating, run.job.step_s / 2),
        Moment.FINISH: (finished, 0.4),
    }
    predicate, spread_s = arrived[moment]
    if not _wait(run, predicate, deadline_s=MOMENT_DEADLINE_S):
        return False
    return not run.ended(within_s=rng.uniform(0.0, spread_s))


def _publishing(run: Run, *, above: int) -> bool:
    folders = (shared_folder(run.layout.weights), run.layout.weights / "tensors", run.layout.weights / "manifests")
    return _newest_version(run) > above or any(path for folder in folders for path in folder.glob(f"v{above + 1:06d}*"))


def _newest_version(run: Run) -> int:
    names = [path.stem for path in (run.layout.weights / "manifests").glob("v*.json")]
    return max((int(name[1:]) for name in names), default=0)


def _wait(run: Run, predicate: Callable[[], bool], *, deadline_s: float) -> bool:
    until_s = time.monotonic() + deadline_s
    while not predicate():
        if run.ended(within_s=LOOK_EVERY_S):
            return False
        assert time.monotonic() < until_s, (
            f"what the harness waits for did not come in {deadline_s:.0f} s: {run.tail()}"
        )
    return True


# a kill


def kill_one(run: Run, victim: str, *, moment: Moment, number: int) -> Loss | None:
    """Kill a process of the run and see it settle; return None if it had ended by itself.

    Raises:
        AssertionError: if something still runs GONE_WITHIN_S after the kill, or nothing says why it ended.
    """
    before = run.processes()
    if victim not in before or (victim == "supervisor" and len(before) < 2):
        return None
    with contextlib.suppress(psutil.NoSuchProcess):
        before[victim].send_signal(signal.SIGKILL)
    killed_s = time.monotonic()
    outcome = ""
    while not outcome:
        now = run.processes()
        if not [name for name in now if name != "supervisor"]:
            outcome = "stopped"
        elif victim in now and now[victim].pid != before[victim].pid:
            outcome = "restarted"
        else:
            waited_s = time.monotonic() - killed_s
            assert waited_s < GONE_WITHIN_S, (
                f"{waited_s:.1f} s after {victim} was killed ({moment}) there are still {sorted(now)}: {run.tail()}"
            )
            run.ended(within_s=0.02)
    settled_s = time.monotonic() - killed_s
    if outcome == "stopped":
        run.status()
    pid = before[victim].pid
    return Loss(
        round=number,
        victim=victim,
        moment=moment.value,
        settled_s=round(settled_s, 3),
        outcome=outcome,
        cause=_cause(run, victim, outcome, pid=pid),
    )


def _cause(run: Run, victim: str, outcome: str, *, pid: int) -> str:
    """Return what the run directory says of the loss."""
    if victim == "supervisor":
        # A killed parent can write nothing: what it measured last still says that the run was going, and the next start
        # says what that means (`check_told`).
        segments = sorted(run.layout.processes.glob("segment.*.json"), key=lambda path: path.stat().st_mtime)
        if not segments:
            return "no segment yet"
        ended = json.loads(segments[-1].read_text())["ended"]
        assert ended in ("running", "ending"), ended
        return f"segment {ended}"
    if outcome == "restarted":
        records = lines(run.directory / "losses.jsonl")
        told = [record["message"] for record in records if (record["process"], record["pid"]) == (victim, pid)]
        assert told, f"{victim} (pid {pid}) was restarted and losses.jsonl does not say why it had to be: {records}"
        return str(told[-1])
    if not run.layout.failure.exists():
        # It was killed after its last word: the run ended well all the same.
        assert run.status() == 0, f"{victim} was killed and failure.json does not say so: {run.tail()}"
        return "ended well"
    failure = json.loads(run.layout.failure.read_text())
    assert failure["process"] == victim, failure
    assert "SIGKILL" in failure["message"], failure
    return str(failure["message"])


# the books


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """The store's tables, read past our own code."""

    states: dict[str, tuple[str, str | None]]
    steps: list[tuple[int, int]]


def read_rows(run: Run) -> Rows:
    """Return the tables of the store after checking that the file is sound."""
    with contextlib.closing(sqlite3.connect(run.layout.store)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return Rows(
            states={
                group: (state, why) for group, state, why in db.execute("SELECT group_id, state, reason FROM groups")
            },
            steps=db.execute(
                "SELECT optimizer_step, policy_version FROM steps WHERE abandoned = 0 ORDER BY row"
            ).fetchall(),
        )


def check_acknowledged(run: Run) -> None:
    """Check that the store has whatever was reported after it had answered.

    Raises:
        AssertionError: naming what has vanished.
    """
    reported = {line["group_id"] for line in lines(run.directory / "rollouts.jsonl")}
    if not run.layout.store.exists():
        assert not reported
        return
    rows = read_rows(run)
    assert reported <= rows.states.keys(), f"vanished: {sorted(reported - rows.states.keys())}"
    silent = [group for group, (state, why) in rows.states.items() if state == "dropped" and not why]
    assert silent == [], f"dropped without a reason: {silent}"


def check_end(run: Run) -> dict[str, Any]:
    """Check the books of a run that came to its end; return its summary.

    Raises:
        AssertionError: naming what does not balance.
    """
    check_acknowledged(run)
    summary = json.loads((run.directory / "summary.json").read_text())
    rollouts = summary["rollouts"]
    parts = sum(rollouts[state] for state in ("in_flight", "suspended", "buffered", "trained"))
    assert rollouts["admitted"] == parts + sum(rollouts["dropped"].values())
    assert summary["steps"] == run.job.steps
    for process, book in summary["seconds"].items():
        causes = sum(seconds for cause, seconds in book.items() if cause not in ("sum_s", "wall_s"))
        assert abs(causes - book["wall_s"]) < 0.05, (process, book)
        assert min(book.values()) > -0.05, (process, book)
    _check_surviving_history(run)
    assert not shared_folder(run.layout.weights).exists(), "the end of the run left tensors in shared memory"
    assert run.processes() == {}
    return summary


def _check_surviving_history(run: Run) -> None:
    rows, group_size = read_rows(run), load_config(run.directory / "config.toml").config.schedule.group_size
    store = SqliteStore(run.layout.store, create=False)
    try:
        records = [record for _, record in store.steps()]
        books = fold(store, _settings(run), include_unheard=True)
    finally:
        store.close()
    assert [record.optimizer_step for record in records] == list(range(1, run.job.steps + 1))
    trained = [group for record in records for group in record.group_ids]
    twice = [group for group, times in Counter(trained).items() if times > 1]
    assert twice == [], f"trained twice in the surviving history: {twice}"
    by_state: dict[str, set[str]] = {}
    for group, (state, _) in rows.states.items():
        by_state.setdefault(state, set()).add(group)
    assert by_state.get("trained", set()) == set(trained)
    waiting = by_state.get("buffered", set()) | by_state.get("assigned", set())
    assert books.stored_groups == waiting | set(trained), (
        "the fold of the journal and the store disagree on the samples"
    )
    view = books.scheduler.view()
    assert view.optimizer_step == len(records)
    told = {line["step"] for line in lines(run.directory / "metrics.jsonl")}
    assert told == set(range(1, len(records) + 1)), "metrics.jsonl has not heard of every step"
    assert view.trained == len(trained) * group_size, "they disagree on what is trained"
    assert view.buffered == len(waiting) * group_size, "they disagree on what waits"
    checkpoint = latest_checkpoint(run.layout.checkpoints)
    assert checkpoint.skipped == ()
    assert checkpoint.optimizer_step == run.job.steps


def _settings(run: Run) -> Any:
    preflight = read_record(run.layout.preflight, Preflight)
    return scheduler_settings(load_config(run.directory / "config.toml").config, training_size=preflight.training_size)


# chains


def chain(folder: Path, *, job: Job, seed: int, kills: int, policy: str = "stop", first_round: int = 1) -> Chain:
    """Kill `kills` processes of one run at moments drawn from `seed`, let it end, check its books.

    Raises:
        AssertionError: with the seed, the kills so far and the end of the output.
    """
    rng = random.Random(seed)
    run = Run(folder, job=job, seed=seed, policy=policy)
    losses: list[Loss] = []
    try:
        run.start()
        for victim, moment in draw(rng, kills):
            if run.ended():
                if run.status() == 0:
                    break
                run.start()
            if (
                not wait_for_moment(run, moment, rng=rng)
                or (loss := kill_one(run, victim, moment=moment, number=first_round + len(losses))) is None
            ):
                continue
            losses.append(loss)
            check_acknowledged(run)
        incarnations = _to_the_end(run)
        summary = check_end(run)
        check_told(losses, summary)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, job {job.name}, losses {msgspec.to_builtins(losses)}: {error}") from error
    finally:
        run.close()
    return Chain(seed=seed, losses=tuple(losses), incarnations=incarnations, rollouts=summary["rollouts"])


def check_told(losses: list[Loss], summary: dict[str, Any]) -> None:
    """Check that the cause of a killed supervisor's end stands in the summary of the run that went on without it."""
    killed = [loss for loss in losses if loss.cause == "segment running"]
    told = [words for words in summary["repairs"] if "was killed, or the machine went down" in words]
    assert not killed or told, f"a supervisor was killed {len(killed)} times, and no start after it says so"


def draw(rng: random.Random, kills: int) -> Iterator[tuple[str, Moment]]:
    """Yield victims and moments; the end of a run comes once, so it is drawn for the last kill only, and often."""
    before = [moment for moment in Moment if moment is not Moment.FINISH]
    for number in range(kills):
        last = number == kills - 1
        yield rng.choice(VICTIMS), Moment.FINISH if last and rng.random() < 0.6 else rng.choice(before)


def _to_the_end(run: Run) -> int:
    """Resume until the run ends well."""
    for _ in range(3):
        if run.ended(within_s=END_DEADLINE_S) and run.status() == 0:
            return int(json.loads(run.layout.incarnation.read_text())["number"])
        assert run.ended(), f"the run did not end in {END_DEADLINE_S:.0f} s: {run.tail()}"
        run.start()
    raise AssertionError(f"the run did not end well although nobody killed it: {run.tail()}")


def tally(chains: Sequence[Chain]) -> dict[str, Any]:
    """Return counts by process and moment, for the committed result."""
    losses = [loss for one in chains for loss in one.losses]
    return {
        "rounds": len(losses),
        "chains": len(chains),
        "by_process": dict(sorted(Counter(loss.victim for loss in losses).items())),
        "by_moment": dict(sorted(Counter(loss.moment for loss in losses).items())),
        "by_outcome": dict(sorted(Counter(loss.outcome for loss in losses).items())),
        "settled_s_max": max((loss.settled_s for loss in losses), default=0.0),
        "rollouts_trained": sum(one.rollouts["trained"] for one in chains),
        "rollouts_dropped": dict(sorted(sum((Counter(one.rollouts["dropped"]) for one in chains), Counter()).items())),
    }


def pid_is_alive(pid: int) -> bool:
    """Return whether a process lives."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
