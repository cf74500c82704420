"""Hosted backends against fakes of their vendors, which run programs in real namespace sandboxes, all on one loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fake_daytona import TOKEN as DAYTONA_TOKEN
from fake_daytona import FakeDaytona
from fake_docker import FakeDocker
from fake_e2b import TOKEN as E2B_TOKEN
from fake_e2b import FakeE2B
from fake_kubernetes import TOKEN as KUBERNETES_TOKEN
from fake_kubernetes import FakeKubernetes
from fake_modal import FakeModal
from fake_prime import TOKEN as PRIME_TOKEN
from fake_prime import FakePrime
from fake_swerex import FakeSweRex
from rollmill.sandboxes import IsolationLevel, Provider
from rollmill.sandboxes.backends.daytona import DaytonaProvider, DaytonaSettings
from rollmill.sandboxes.backends.docker import DockerProvider, DockerSettings
from rollmill.sandboxes.backends.e2b import E2BProvider, E2BSettings
from rollmill.sandboxes.backends.hosted import HostedProvider
from rollmill.sandboxes.backends.http import Secret
from rollmill.sandboxes.backends.kubernetes import KubernetesProvider, KubernetesSettings
from rollmill.sandboxes.backends.modal import ModalProvider, ModalSettings
from rollmill.sandboxes.backends.prime import PrimeProvider, PrimeSettings
from rollmill.sandboxes.backends.swerex import SweRexProvider, SweRexSettings
from sandbox_builders import RealRig

Opened = tuple[HostedProvider[Any], Any]
"""An adapter, and the fake that it talks to."""


async def open_e2b(engine: Provider, directory: Path, **settings: Any) -> Opened:
    fake = FakeE2B(engine)
    await fake.server.start()
    url = fake.server.url
    token = Secret(E2B_TOKEN)
    return E2BProvider(E2BSettings(api_url=url, sandbox_url=url, token=token, **settings)), fake


async def open_docker(engine: Provider, directory: Path, **settings: Any) -> Opened:
    fake = FakeDocker(engine)
    socket = str(directory / "d.sock")
    await fake.server.start(socket)
    return DockerProvider(DockerSettings(socket=socket, **settings)), fake


async def open_docker_read_only(engine: Provider, directory: Path) -> Opened:
    return await open_docker(engine, directory, read_only_root=True)


async def open_swerex(engine: Provider, directory: Path, **settings: Any) -> Opened:
    fake = FakeSweRex(engine)
    await fake.server.start()
    return SweRexProvider(fake, SweRexSettings(isolation=IsolationLevel.HARDENED, **settings)), fake


async def open_daytona(engine: Provider, directory: Path, **settings: Any) -> Opened:
    fake = FakeDaytona(engine)
    await fake.server.start()
    token = Secret(DAYTONA_TOKEN)
    return DaytonaProvider(DaytonaSettings(api_url=f"{fake.server.url}/api", token=token, **settings)), fake


async def open_kubernetes(engine: Provider, directory: Path, **settings: Any) -> Opened:
    fake = FakeKubernetes(engine)
    await fake.server.start()
    token = Secret(KUBERNETES_TOKEN)
    isolation = IsolationLevel.CAPPED
    return KubernetesProvider(
        KubernetesSettings(server=fake.server.url, token=token, isolation=isolation, **settings)
    ), fake


async def open_kubernetes_pool(engine: Provider, directory: Path) -> Opened:
    return await open_kubernetes(engine, directory, warm_pool="python-pool")


async def open_modal(engine: Provider, directory: Path, **settings: Any) -> Opened:
    fake = FakeModal(engine)
    return ModalProvider(ModalSettings(**settings), fake), fake


async def open_prime(engine: Provider, directory: Path, **settings: Any) -> Opened:
    fake = FakePrime(engine)
    await fake.server.start()
    return PrimeProvider(
        PrimeSettings(api_url=f"{fake.server.url}/api/v1", token=Secret(PRIME_TOKEN), **settings)
    ), fake


OPENERS: dict[str, Callable[..., Awaitable[Opened]]] = {
    "daytona": open_daytona,
    "docker": open_docker,
    "docker_read_only": open_docker_read_only,
    "e2b": open_e2b,
    "kubernetes": open_kubernetes,
    "kubernetes_pool": open_kubernetes_pool,
    "modal": open_modal,
    "prime": open_prime,
    "swerex": open_swerex,
}
_CAPPED = frozenset({"capped"})
LEVELS = {
    "daytona": frozenset({"hardened"}),
    "docker": _CAPPED,
    "docker_read_only": _CAPPED,
    "e2b": frozenset({"virtual_machine"}),
    "kubernetes": _CAPPED,
    "kubernetes_pool": _CAPPED,
    "modal": frozenset({"own_kernel"}),
    "prime": frozenset({"virtual_machine"}),
    "swerex": frozenset({"hardened"}),
}


class AdapterRig:
    """One adapter, opened once; every body runs on the loop of the engine behind its fake."""

    python = False

    def __init__(self, name: str, engine: RealRig, directory: Path, **settings: Any) -> None:
        self.name = name
        self.levels = LEVELS[name]
        self._runner = engine.runner
        self.provider, self.fake = self._runner.run(OPENERS[name](engine.provider, directory, **settings))

    def run(self, body: Callable[[Provider], Awaitable[Any]]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(60):
                return await body(self.provider)

        return self._runner.run(bounded())

    def another(self) -> HostedProvider[Any]:
        """Another provider of the same vendor, as another process would have it."""
        with_sdk = (self.provider.driver._sdk,) if self.name == "modal" else ()
        return type(self.provider)(self.provider._settings, *with_sdk)  # pyright: ignore[reportCallIssue]

    def close(self) -> None:
        self._runner.run(self._close())

    async def _close(self) -> None:
        await self.provider.close()
        await self.fake.server.stop()


@contextmanager
def adapter_rig(name: str, engine: RealRig, directory: Path, **settings: Any) -> Iterator[AdapterRig]:
    rig = AdapterRig(name, engine, directory, **settings)
    try:
        yield rig
    finally:
        rig.close()
