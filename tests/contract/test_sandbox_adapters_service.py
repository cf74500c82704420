"""The contract of sandbox backends over `rollmill sandbox serve`: both ends of E2B's API are ours, a process apart."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_sandbox_adapters_contract import only_what_the_backend_has  # noqa: F401
from test_sandbox_contract import *  # noqa: F403
from test_sandbox_state_contract import *  # noqa: F403

from rollmill.errors import SandboxUnsupported
from rollmill.sandboxes import Provider
from rollmill.sandboxes.backends.e2b import E2BProvider, E2BSettings
from rollmill.sandboxes.backends.http import Secret
from sandbox_builders import real_rig, start, why_no_namespaces

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# Of the namespace backend alone: it looks at what a process hands down to its own children.
del test_an_owner_that_holds_signals_back_hands_no_block_down  # noqa: F821

TOKEN = "open-sesame-for-tests"
TEMPLATES = "[templates.base]\ndisk_mib = 64\npids = 64\n"


class ServiceRig:
    """A service in a process of its own, and our client of E2B's API."""

    name = "e2b"
    python = False
    levels = frozenset({"virtual_machine"})

    def __init__(self, directory: Path, *, pauses: bool) -> None:
        templates = directory / "templates.toml"
        templates.write_text(TEMPLATES)
        command = [sys.executable, "-m", "rollmill.cli", "sandbox", "serve", "--listen", "127.0.0.1:0", "--json"]
        options = ["--token-env", "TOKEN_OF_TEST", "--directory", str(directory / "r"), "--templates", str(templates)]
        self.process = subprocess.Popen(
            [*command, *options], env={**os.environ, "TOKEN_OF_TEST": TOKEN}, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line)
            if line.rstrip() == "}":
                break
        url = json.loads("".join(lines))["url"]
        self.runner = asyncio.Runner()
        self.provider = self.runner.run(self._open(url, pauses))

    async def _open(self, url: str, pauses: bool) -> E2BProvider:
        return E2BProvider(E2BSettings(api_url=url, sandbox_url=url, token=Secret(TOKEN), pauses=pauses))

    def run(self, body: Callable[[Provider], Awaitable[Any]]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(60):
                return await body(self.provider)

        return self.runner.run(bounded())

    def close(self) -> None:
        self.runner.run(self.provider.close())
        self.runner.close()
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceRig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")
    with real_rig(tmp_path_factory.mktemp("capabilities")) as node:
        pauses = node.run(lambda provider: provider.capabilities()).pause
    found = ServiceRig(tmp_path_factory.mktemp("service"), pauses=pauses)
    try:
        yield found
    finally:
        found.close()
    assert found.process.returncode == 0


def test_a_service_that_cannot_pause_says_so_and_its_sandbox_goes_on(rig):
    if (rig.runner.run(rig.provider.capabilities())).pause:
        pytest.skip("this one can")

    async def body(provider: E2BProvider) -> None:
        sandbox = await start(provider)
        driver = provider.driver
        with pytest.raises(SandboxUnsupported, match="cannot pause") as raised:
            await driver.pause(sandbox.found)  # type: ignore[attr-defined]
        assert raised.value.capability == "pause"
        assert (await sandbox.exec(["true"])).exit_code == 0
        await sandbox.kill()

    rig.run(body)
