"""An owner of sandboxes for tests that kill it: starts some, says so on stdout, and goes on until it is killed.

Arguments: directory of the records, a name (`leases`: with rows in a table and stored rollouts), a number, and if the
sandboxes are to have a named image, the store that has it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
from pathlib import Path

from rollmill.sandboxes import HostImage, Lease, Limits, NamedImage, NamespaceProvider, NamespaceSettings, SandboxSpec
from rollmill.sandboxes.images import ImageStoreSettings
from rollmill.sandboxes.leases import Keeper, KeeperSettings, LeaseTable

IMAGE = "tools"
LIMITS = Limits(memory_bytes=64 << 20, disk_bytes=16 << 20, inodes=1000, pids=20)
ASLEEP_S = os.environ.setdefault("ROLLMILL_TEST_ASLEEP_S", str(900_000_000 + os.getpid()))
"""How long programs sleep is how they are found from outside; other runs of tests on this machine have their own."""
PROGRAM = ["sh", "-c", f"setsid sleep {ASLEEP_S} & exec sleep {ASLEEP_S}"]


def spec_of(store: Path | None) -> SandboxSpec:
    return SandboxSpec(image=HostImage() if store is None else NamedImage(name=IMAGE), limits=LIMITS)


def images_of(store: Path | None) -> ImageStoreSettings:
    return ImageStoreSettings(directory=store, durable=False)


async def main(directory: Path, name: str, count: int, store: Path | None) -> None:
    async with NamespaceProvider(NamespaceSettings(directory=directory, images=images_of(store))) as provider:
        for i in range(count):
            lease = Lease(owner=name, ttl_s=600.0)
            sandbox = await provider.create(spec_of(store), id=f"{name}-{i}", labels={"owner": name}, lease=lease)
            if i % 2 == 0:
                await sandbox.snapshot(id=f"{sandbox.id}-before")  # it goes on above a layer
            await sandbox.start_process(PROGRAM)
            sys.stdout.write(f"{sandbox.id}\n")
            sys.stdout.flush()
        await asyncio.sleep(600)


async def with_leases(directory: Path, seed: int, store: Path | None) -> None:
    """Start, store, resume and end rollouts by a table of leases, until killed."""
    draw = random.Random(seed)
    settings = NamespaceSettings(
        directory=directory, snapshot_directory=directory.parent / "snapshots", images=images_of(store)
    )
    async with NamespaceProvider(settings) as provider:
        table = LeaseTable(directory.parent / "leases.sqlite")
        keeper = Keeper(table, provider, settings=KeeperSettings(name="rounds", provider="here"), owner="first")
        for number in itertools.count():
            rollout = f"rollout-{number}"
            held = await keeper.start(rollout, spec_of(store), policy_version=number)
            await held.sandbox.start_process(PROGRAM)
            await held.sandbox.write("/root/notes", rollout.encode())
            await keeper.suspend(held.claim, keep_memory=False)
            if draw.random() < 0.5:
                held = await keeper.resume(rollout)
                await keeper.release(held.claim)


if __name__ == "__main__":
    records, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    store = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    asyncio.run(with_leases(records, count, store) if name == "leases" else main(records, name, count, store))
