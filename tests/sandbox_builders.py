"""Providers of sandboxes for tests: the real one on a loop of its own, and the fake one on virtual time."""

from __future__ import annotations

import asyncio
import itertools
import os
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rollmill.errors import RollmillError
from rollmill.sandboxes import Lease, Limits, NamespaceProvider, NamespaceSettings, Provider, Sandbox, SandboxSpec
from rollmill.testing import FakeSandboxProvider, run_virtual

MIB = 1024**2
LIMITS = Limits(memory_bytes=128 * MIB, disk_bytes=32 * MIB, inodes=2000, pids=40, output_bytes=4 * MIB, wall_s=300.0)
SPEC = SandboxSpec(limits=LIMITS)


class Rig(Protocol):
    """Runs test bodies against one provider."""

    name: str
    python: bool
    levels: frozenset[str]

    def run(self, body: Callable[[Provider], Awaitable[Any]]) -> Any: ...


LEVELS = frozenset({"hardened", "capped"})

_numbers = itertools.count()


def new_id() -> str:
    return f"t{next(_numbers)}-{uuid.uuid4().hex[:8]}"


async def start(
    provider: Provider, spec: SandboxSpec = SPEC, *, id: str | None = None, ttl_s: float = 300.0
) -> Sandbox:
    return await provider.create(spec, id=new_id() if id is None else id, lease=Lease(owner="test", ttl_s=ttl_s))


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that announces itself to nobody; the rig bounds the wait."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


class RealRig:
    """The namespace provider, opened once; every body runs on the same loop."""

    name = "namespaces"
    python = True
    levels = LEVELS

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.runner = asyncio.Runner()
        self.directory = directory
        self.provider = self.runner.run(self._open(NamespaceSettings(directory=directory, **settings)))

    async def _open(self, settings: NamespaceSettings) -> NamespaceProvider:
        provider = NamespaceProvider(settings)
        await provider.__aenter__()
        return provider

    def run(self, body: Callable[[Provider], Awaitable[Any]]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(90):
                return await body(self.provider)

        return self.runner.run(bounded())

    def close(self) -> None:
        self.runner.run(self.provider.close())
        self.runner.close()


class FakeRig:
    """The fake provider: a new one, on a loop with virtual time, for each body."""

    name = "fake"
    python = False
    levels = LEVELS

    def __init__(self, **options: Any) -> None:
        self._options = options

    def run(self, body: Callable[[Provider], Awaitable[Any]]) -> Any:
        async def whole() -> Any:
            provider = FakeSandboxProvider(**self._options)
            try:
                return await body(provider)
            finally:
                await provider.close()

        return run_virtual(whole())


@contextmanager
def real_rig(directory: Path, **settings: Any) -> Iterator[RealRig]:
    rig = RealRig(directory, **settings)
    try:
        yield rig
    finally:
        rig.close()


REQUIRED = "REQUIRE_SANDBOXES"


def required() -> bool:
    """Return whether what these tests need must be here: with REQUIRE_SANDBOXES in the environment a lack fails."""
    return bool(os.environ.get(REQUIRED))


def why_no_namespaces(directory: Path) -> str:
    """Return why this machine cannot run namespace sandboxes, empty if it can; where they are required it must."""

    async def probe(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.kill()

    try:
        with real_rig(directory) as rig:
            rig.run(probe)
    except RollmillError as error:
        if required():
            raise
        return str(error)
    return ""
