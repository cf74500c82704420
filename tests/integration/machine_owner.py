"""An owner of machines for tests that kill it: starts some, says so on stdout, and goes on until it is killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from sandbox_owner import ASLEEP_S, PROGRAM

from microvm_builders import fake_kit, fake_settings
from rollmill.sandboxes import Lease
from rollmill.sandboxes.backends.firecracker import FirecrackerProvider
from rollmill.sandboxes.backends.microvm import MicroVmProvider
from rollmill.sandboxes.backends.qemu import QemuProvider, QemuSettings
from sandbox_builders import SPEC


def provider_of(backend: str, directory: Path) -> MicroVmProvider:
    if backend == "firecracker":
        return FirecrackerProvider(fake_settings(directory), make_kit=fake_kit)
    return QemuProvider(QemuSettings(directory=directory / "records", accelerator="tcg"))


async def main(directory: Path, backend: str) -> None:
    async with provider_of(backend, directory) as provider:
        sys.stdout.write("open\n")
        sys.stdout.flush()
        for number in range(2):
            sandbox = await provider.create(SPEC, id=f"killed-{ASLEEP_S}-{number}", lease=Lease(owner="killed"))
            await sandbox.start_process(PROGRAM)
            sys.stdout.write(f"{sandbox.id}\n")
            sys.stdout.flush()
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
