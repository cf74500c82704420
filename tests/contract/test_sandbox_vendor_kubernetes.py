"""The public client of agent-sandbox against the cluster that our adapter is tested against.

It claims sandboxes of warm pools and reaches the runtime inside them by a router; our adapter makes or claims them, and
runs programs by the API server's `exec`. What both use is held against both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from test_sandbox_adapters_contract import engine  # noqa: F401

from adapter_rigs import KUBERNETES_TOKEN, AdapterRig, adapter_rig
from rollmill.errors import SandboxDead
from rollmill.sandboxes import Lease, Provider
from sandbox_builders import SPEC, RealRig, new_id
from vendor_sdks import need

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    # Its own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

POOL = "python-pool"


@pytest.fixture(scope="module")
def rig(engine: RealRig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterRig]:  # noqa: F811
    with adapter_rig("kubernetes_pool", engine, tmp_path_factory.mktemp("kubernetes")) as opened:
        yield opened


def client(rig: AdapterRig) -> Any:
    kubernetes, sdk, models = need("kubernetes.client"), need("k8s_agent_sandbox"), need("k8s_agent_sandbox.models")
    configuration = kubernetes.Configuration(host=rig.fake.server.url)
    configuration.api_key = {"authorization": f"Bearer {KUBERNETES_TOKEN}"}
    way = models.SandboxDirectConnectionConfig(
        api_url=f"{rig.fake.server.url}/router", extra_headers={"Authorization": f"Bearer {KUBERNETES_TOKEN}"}
    )
    return sdk.SandboxClient(way, api_client=kubernetes.ApiClient(configuration))


def test_the_public_client_claims_uses_finds_and_ends_a_sandbox(rig):
    errors = need("k8s_agent_sandbox.exceptions")

    def theirs() -> None:
        api = client(rig)
        made = api.create_sandbox(POOL, claim_name="theirs", labels={"step": "3"}, shutdown_after_seconds=600)
        ran = made.commands.run("echo out; echo err >&2; exit 3")
        assert (ran.stdout, ran.stderr, ran.exit_code) == ("out\n", "err\n", 3)
        made.files.write("f", b"\x00\xff")
        assert made.files.read("f") == b"\x00\xff"
        assert client(rig).get_sandbox("theirs").sandbox_id == made.sandbox_id
        assert rig.fake.claims["theirs"]["spec"]["lifecycle"]["shutdownPolicy"] == "Delete"
        api.delete_sandbox("theirs")
        assert "theirs" not in rig.fake.claims
        with pytest.raises(errors.SandboxWarmPoolNotFoundError):
            api.create_sandbox("no-pool", sandbox_ready_timeout=5)

    async def body(_: Provider) -> None:
        await asyncio.to_thread(theirs)

    rig.run(body)


def test_both_write_claims_of_the_same_shape_and_see_each_others_files(rig):
    async def body(provider: Provider) -> None:
        name = new_id()
        sandbox = await provider.create(SPEC, id=name, labels={"step": "4"}, lease=Lease(owner="test", ttl_s=300.0))
        api = client(rig)
        attached = await asyncio.to_thread(api.get_sandbox, sandbox.found.ref)
        await sandbox.write("/workspace/f", b"ours")
        assert await asyncio.to_thread(attached.files.read, "f") == b"ours"
        await asyncio.to_thread(attached.files.write, "g", b"theirs")
        assert await sandbox.read("/workspace/g") == b"theirs"
        await asyncio.to_thread(api.create_sandbox, POOL, claim_name="shape", shutdown_after_seconds=600)
        ours, their = rig.fake.claims[sandbox.found.ref], rig.fake.claims["shape"]
        assert (ours["apiVersion"], ours["kind"]) == (their["apiVersion"], their["kind"])
        assert set(their["spec"]) <= set(ours["spec"])
        assert set(ours["spec"]["lifecycle"]) == set(their["spec"]["lifecycle"])
        await asyncio.to_thread(api.delete_sandbox, "shape")
        await asyncio.to_thread(api.delete_sandbox, sandbox.found.ref)
        with pytest.raises(SandboxDead):
            await sandbox.exec(["true"])

    rig.run(body)


def test_a_lease_that_is_renewed_moves_the_end_of_the_claim(rig):
    async def body(provider: Provider) -> None:
        sandbox = await provider.create(SPEC, id=new_id(), lease=Lease(owner="test", ttl_s=60.0))
        before = rig.fake.claims[sandbox.found.ref]["spec"]["lifecycle"]["shutdownTime"]
        await sandbox.renew(Lease(owner="test", ttl_s=280.0))
        assert rig.fake.claims[sandbox.found.ref]["spec"]["lifecycle"]["shutdownTime"] > before
        await sandbox.kill()
        assert sandbox.found.ref not in rig.fake.claims

    rig.run(body)
