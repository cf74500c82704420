"""Samples per second of the store with its journal, beside plain inserts of the same bytes. Prints JSON.

Both write one transaction per `groups_per_transaction` groups of 8 rollouts with 24 tokens each, and the 9 journal
entries of each group, into SQLite with a write-ahead log and `synchronous=FULL`. The plain inserts get bytes and
digests that were made before; the store makes them, checks that the change is allowed, and seals every row.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollmill.algorithms.grouping import close_group
from rollmill.buffer.protocol import Transition
from rollmill.buffer.sqlite import SqliteStore
from rollmill.config.schema import AlgorithmSettings
from rollmill.scheduling.events import GroupClosed, RolloutFinished
from rollmill.types import Group, Rollout, SamplingParams, Scored, StopReason, Task, Turn, VersionSpan, encode

GROUP_SIZE, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 45, 24


def group_of(number: int) -> Group:
    return close_group(
        f"g{number:06d}",
        number,
        [_rollout(f"g{number:06d}", sibling, seed=number) for sibling in range(GROUP_SIZE)],
        settings=AlgorithmSettings(),
        optimizer_step_of=lambda _: 0,
    )


def _rollout(group_id: str, sibling: int, *, seed: int) -> Rollout:
    rng = np.random.default_rng([seed, sibling])
    turn = Turn(
        request_id=f"{group_id}/{sibling}.1/turn0",
        prompt_ids=np.arange(PROMPT_TOKENS, dtype=np.int32),
        output_ids=rng.integers(0, 49152, OUTPUT_TOKENS).astype(np.int32),
        behavior_logprobs=-rng.random(OUTPUT_TOKENS).astype(np.float32),
        version_spans=(VersionSpan(0, OUTPUT_TOKENS, 1),),
        stop_reason=StopReason.STOP,
    )
    return Rollout(
        rollout_id=f"{group_id}/{sibling}.1",
        group_id=group_id,
        sibling=sibling,
        attempt=1,
        task=Task(task_id=f"sum-{seed}", environment="scripted", messages=()),
        turns=(turn,),
        outcome=Scored(raw_reward=float(sibling % 2), shaped_reward=float(sibling % 2)),
        sampling=SamplingParams(seed=seed),
        started_at_s=0.0,
        finished_at_s=1.0,
    )


def entries_of(group: Group) -> list[bytes]:
    """Return the journal entries that a group makes until it is stored."""
    finished = [
        RolloutFinished(
            at_s=1.0, rollout_id=r.rollout_id, output_tokens=OUTPUT_TOKENS, oldest_optimizer_step=0, counts=True
        )
        for r in group.rollouts
    ]
    closed = GroupClosed(
        at_s=1.0,
        group_id=group.group_id,
        has_signal=True,
        oldest_optimizer_step=0,
        loss_tokens=GROUP_SIZE * OUTPUT_TOKENS,
    )
    return [msgspec.json.encode(event) for event in (*finished, closed)]


def through_store(path: Path, transitions: list[Transition]) -> dict[str, float]:
    store = SqliteStore(path)
    began_wall, began = time.perf_counter(), time.process_time()
    for transition in transitions:
        store.apply(transition)
    took = {"wall_s": time.perf_counter() - began_wall, "cpu_s": time.process_time() - began}
    store.close()
    return took


def plainly(path: Path, transitions: list[Transition]) -> dict[str, float]:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE journal (offset INTEGER PRIMARY KEY, sha256 BLOB, entry BLOB) STRICT")
    database.execute("CREATE TABLE samples (group_id TEXT PRIMARY KEY, sha256 BLOB, blob BLOB) STRICT")
    prepared = [
        (
            [(hashlib.sha256(entry).digest(), entry) for entry in transition.journal],
            [
                (group.group_id, hashlib.sha256(blob).digest(), blob)
                for group in transition.puts
                for blob in [encode(group)]
            ],
        )
        for transition in transitions
    ]
    began_wall, began = time.perf_counter(), time.process_time()
    for journal, samples in prepared:
        database.execute("BEGIN IMMEDIATE")
        database.executemany("INSERT INTO journal(sha256, entry) VALUES (?, ?)", journal)
        database.executemany("INSERT INTO samples VALUES (?, ?, ?)", samples)
        database.execute("COMMIT")
    took = {"wall_s": time.perf_counter() - began_wall, "cpu_s": time.process_time() - began}
    database.close()
    return took


def main() -> None:
    plan: dict[str, Any] = json.loads(sys.argv[1])
    found: list[dict[str, Any]] = []
    for per_transaction in plan["groups_per_transaction"]:
        groups = [group_of(number) for number in range(plan["transactions"] * per_transaction)]
        transitions = [
            Transition(
                journal=tuple(entry for group in part for entry in entries_of(group)),
                puts=tuple(part),
            )
            for at in range(0, len(groups), per_transaction)
            for part in [groups[at : at + per_transaction]]
        ]
        with tempfile.TemporaryDirectory(dir=plan["folder"]) as folder:
            pairs = [
                {
                    "plain": plainly(Path(folder) / f"plain-{number}.sqlite", transitions),
                    "store": through_store(Path(folder) / f"store-{number}.sqlite", transitions),
                }
                for number in range(plan["runs"])
            ]
        found.append(
            {
                "groups_per_transaction": per_transaction,
                "transactions": plan["transactions"],
                "samples": len(groups) * GROUP_SIZE,
                "bytes": sum(len(encode(group)) for group in groups)
                + sum(len(entry) for transition in transitions for entry in transition.journal),
                "pairs": pairs,
            }
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
