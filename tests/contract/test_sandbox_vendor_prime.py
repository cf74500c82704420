"""Prime's own SDK against the fake that our adapter is tested against."""

from __future__ import annotations

import asyncio

import pytest
from test_sandbox_adapters_prime import rig  # noqa: F401

from adapter_rigs import PRIME_TOKEN
from rollmill.errors import SandboxDead
from rollmill.sandboxes import Provider
from sandbox_builders import start
from vendor_sdks import need

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    # Its own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def test_the_public_sdk_sees_what_we_made_and_makes_uses_and_ends_sandboxes(rig, monkeypatch, tmp_path):  # noqa: F811
    prime = need("prime_sandboxes")
    monkeypatch.setenv("HOME", str(tmp_path))  # where it keeps tokens
    monkeypatch.setenv("PRIME_API_BASE_URL", rig.fake.server.url)
    monkeypatch.setenv("PRIME_API_KEY", PRIME_TOKEN)

    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.write("/tmp/from-us", b"ours")

        def theirs() -> None:
            api = prime.APIClient()
            client = prime.SandboxClient(api)
            (listed,) = client.list(labels=[f"rollmill-id={sandbox.id}"]).sandboxes
            assert (listed.id, listed.status, listed.vm) == (sandbox.found.ref, "RUNNING", True)
            ran = client.execute_command(listed.id, "echo out; echo err >&2; exit 300")
            assert (ran.stdout, ran.stderr, ran.exit_code) == ("out\n", "err\n", 44)
            client.upload_bytes(listed.id, "/tmp/from-the-sdk", b"\x00\xff", "name")
            client.download_file(listed.id, "/tmp/from-us", str(tmp_path / "loaded"))
            assert (tmp_path / "loaded").read_bytes() == b"ours"
            made = client.create(prime.CreateSandboxRequest(name="theirs", docker_image="a/b:c"))
            client.wait_for_creation(made.id)
            assert client.execute_command(made.id, "echo hello").stdout == "hello\n"
            client.delete(made.id)
            with pytest.raises(prime.APIError):
                client.get(made.id)
            client.delete(listed.id)
            api.client.close()

        await asyncio.to_thread(theirs)
        with pytest.raises(SandboxDead):
            await sandbox.exec(["true"])

    rig.run(body)
