"""An owner of sandboxes for tests that kill it: starts some, says so on stdout, and goes on until it is killed."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from pathlib import Path

from rollmill.sandboxes import Lease, Limits, NamespaceProvider, NamespaceSettings, SandboxSpec
from rollmill.sandboxes.leases import Keeper, KeeperSettings, LeaseTable

SPEC = SandboxSpec(limits=Limits(memory_bytes=64 << 20, disk_bytes=16 << 20, inodes=1000, pids=20))


async def main(directory: Path, name: str, count: int) -> None:
    async with NamespaceProvider(NamespaceSettings(directory=directory)) as provider:
        for i in range(count):
            lease = Lease(owner=name, ttl_s=600.0)
            sandbox = await provider.create(SPEC, id=f"{name}-{i}", labels={"owner": name}, lease=lease)
            if i % 2 == 0:
                await sandbox.snapshot(id=f"{sandbox.id}-before")  # it goes on above a layer
            await sandbox.start_process(["sh", "-c", "setsid sleep 987654 & exec sleep 987654"])
            sys.stdout.write(f"{sandbox.id}\n")
            sys.stdout.flush()
        await asyncio.sleep(600)


async def with_leases(directory: Path, seed: int) -> None:
    """Start, store, resume and end rollouts by a table of leases, until killed."""
    draw = random.Random(seed)
    settings = NamespaceSettings(directory=directory, snapshot_directory=directory.parent / "snapshots")
    async with NamespaceProvider(settings) as provider:
        table = LeaseTable(directory.parent / "leases.sqlite")
        keeper = Keeper(table, provider, settings=KeeperSettings(name="rounds", provider="here"), owner="first")
        for number in itertools.count():
            rollout = f"rollout-{number}"
            held = await keeper.start(rollout, SPEC, policy_version=number)
            await held.sandbox.write("/root/notes", rollout.encode())
            await keeper.suspend(held.claim, keep_memory=False)
            if draw.random() < 0.5:
                held = await keeper.resume(rollout)
                await keeper.release(held.claim)


if __name__ == "__main__":
    records, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    asyncio.run(with_leases(records, count) if name == "leases" else main(records, name, count))
