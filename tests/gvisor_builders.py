"""The gVisor provider for tests, and the reason where it cannot run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmill.errors import RollmillError
from rollmill.sandboxes import Provider
from rollmill.sandboxes.backends.gvisor import GvisorProvider, GvisorSettings
from sandbox_builders import RealRig, start


class GvisorRig(RealRig):
    """The gVisor provider, opened once; every body runs on the same loop."""

    name = "gvisor"
    levels = frozenset({"own_kernel"})

    async def _open(self, settings: Any) -> GvisorProvider:
        provider = GvisorProvider(GvisorSettings(directory=settings.directory, **self.options))
        await provider.__aenter__()
        return provider

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.options = settings
        super().__init__(directory)


@contextmanager
def gvisor_rig(directory: Path, **settings: Any) -> Iterator[GvisorRig]:
    rig = GvisorRig(directory, **settings)
    try:
        yield rig
    finally:
        rig.close()


def need_gvisor(directory: Path) -> None:
    """Skip where this machine cannot run gVisor sandboxes; with REQUIRE_GVISOR in the environment that is a failure."""

    async def probe(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.kill()

    try:
        with gvisor_rig(directory) as rig:
            rig.run(probe)
    except RollmillError as error:
        if os.environ.get("REQUIRE_GVISOR"):
            raise
        pytest.skip(f"no gVisor sandboxes here: {error}")
