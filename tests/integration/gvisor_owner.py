"""An owner of gVisor sandboxes for tests that kill it: starts some, says so on stdout, and goes on until the end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from rollmill.sandboxes import Lease, Limits, SandboxSpec
from rollmill.sandboxes.backends.gvisor import GvisorProvider, GvisorSettings

SPEC = SandboxSpec(limits=Limits(memory_bytes=64 << 20, disk_bytes=16 << 20, inodes=1000, pids=20))


async def main(directory: Path, name: str, count: int) -> None:
    async with GvisorProvider(GvisorSettings(directory=directory)) as provider:
        full = (await provider.capabilities()).full_snapshot
        for i in range(count):
            lease = Lease(owner=name, ttl_s=600.0)
            sandbox = await provider.create(SPEC, id=f"{name}-{i}", labels={"owner": name}, lease=lease)
            await sandbox.start_process(["sh", "-c", "setsid sleep 987655 & exec sleep 987655"])
            if i % 2 == 0 and full:
                await sandbox.snapshot(id=f"{sandbox.id}-before", full=True)
            sys.stdout.write(f"{sandbox.id}\n")
            sys.stdout.flush()
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
