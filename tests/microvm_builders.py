"""Providers of sandboxes in machines for tests: QEMU for real, and Firecracker as a fake that runs a real guest."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollmill.sandboxes import Provider
from rollmill.sandboxes.backends.firecracker import FirecrackerProvider, FirecrackerSettings
from rollmill.sandboxes.backends.microvm import MicroVmProvider
from rollmill.sandboxes.backends.microvm import kit as kits
from rollmill.sandboxes.backends.microvm.kit import Kit
from rollmill.sandboxes.backends.qemu import QemuProvider, QemuSettings
from rollmill.sandboxes.backends.qemu.hypervisor import QemuHypervisor
from sandbox_builders import required

FAKE = Path(__file__).with_name("firecracker_fake.py")


class MachineRig:
    """A provider of machines, opened once; every body runs on the same loop."""

    python = False
    levels = frozenset({"own_kernel", "virtual_machine"})

    def __init__(self, name: str, open_provider: Callable[[], MicroVmProvider], *, limit_s: float) -> None:
        self.name = name
        self._limit_s = limit_s
        self.runner = asyncio.Runner()
        self.provider = self.runner.run(self._open(open_provider))

    async def _open(self, open_provider: Callable[[], MicroVmProvider]) -> MicroVmProvider:
        provider = open_provider()
        await provider.__aenter__()
        return provider

    def run(self, body: Callable[[Provider], Awaitable[Any]]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(self._limit_s):
                return await body(self.provider)

        return self.runner.run(bounded())

    def close(self) -> None:
        self.runner.run(self.provider.close())
        self.runner.close()


@contextmanager
def qemu_rig(directory: Path, **settings: Any) -> Iterator[MachineRig]:
    asked = QemuSettings(directory=directory, **settings)
    rig = MachineRig("qemu", lambda: QemuProvider(asked), limit_s=110.0)
    try:
        yield rig
    finally:
        rig.close()


def why_no_qemu() -> str:
    """Return what is missing here for machines under QEMU, empty if nothing is; where it is required nothing may be."""
    missing = "; ".join((*QemuHypervisor(QemuSettings(accelerator="tcg")).missing(), *kits.missing(None)))
    assert not (missing and required()), missing
    return missing


def fake_kit() -> Kit:
    """Return what a fake boots: files that say what they are."""

    def file(name: str) -> int:
        made = os.memfd_create(name)
        os.write(made, name.encode())
        return made

    return Kit(
        release="fake",
        kernel=file("kernel"),
        initrd=file("initrd"),
        agent_disk=file("agent"),
        standin_disk=file("standin"),
    )


def fake_settings(directory: Path, *, log: Path | None = None, refuses: bool = False) -> FirecrackerSettings:
    """Return settings under which the fake is started in place of Firecracker."""
    directory.mkdir(parents=True, exist_ok=True)
    program, kernel = directory / "firecracker", directory / "vmlinux"
    source = os.pathsep.join(one for one in sys.path if one)
    lines = ("#!/bin/sh", f"export PYTHONPATH='{source}' FAKE_FIRECRACKER_LOG='{log or os.devnull}'",
             f"exec '{sys.executable}' '{FAKE}' {'--refuse' if refuses else ''} \"$@\"")  # fmt: skip
    program.write_text("\n".join(lines) + "\n")
    program.chmod(0o755)
    kernel.write_bytes(b"\x7fELF")
    return FirecrackerSettings(
        directory=directory / "records", program=str(program), kernel=kernel, kvm_device="", separate_users=False
    )


@contextmanager
def firecracker_rig(directory: Path, *, log: Path | None = None) -> Iterator[MachineRig]:
    asked = fake_settings(directory, log=log)
    rig = MachineRig("firecracker", lambda: FirecrackerProvider(asked, make_kit=fake_kit), limit_s=90.0)
    try:
        yield rig
    finally:
        rig.close()
