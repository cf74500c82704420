"""Prime's API: what is sent to it. Its own SDK runs against the same fake in `test_sandbox_vendor_prime`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from adapter_rigs import AdapterRig, adapter_rig
from rollmill.errors import SandboxDead
from rollmill.sandboxes import Lease, Provider
from sandbox_builders import SPEC, new_id, real_rig, start, why_no_namespaces

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterRig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"the fake runs programs in namespace sandboxes, and there are none here: {reason}")
    with (
        real_rig(tmp_path_factory.mktemp("records")) as engine,
        adapter_rig("prime", engine, tmp_path_factory.mktemp("prime")) as found,
    ):
        yield found


def test_a_creation_asks_for_a_virtual_machine_without_network_that_ends_at_its_wall_limit(rig):
    async def body(provider: Provider) -> None:
        name = new_id()
        sandbox = await provider.create(SPEC, id=name, labels={"step": "3"}, lease=Lease(owner="run7", ttl_s=60.0))
        sent = [one for one in rig.fake.server.seen if (one.method, one.path) == ("POST", "/api/v1/sandbox")][-1].json()
        assert (sent["vm"], sent["network_denylist"], sent["idempotency_key"]) == (True, ["0.0.0.0/0"], name)
        assert sent["timeout_minutes"] == 6  # 300 s and 15 s more, in whole minutes
        assert sent["memory_gb"] == 0.125
        assert {f"rollmill-id={name}", "rollmill-owner=run7", "step=3"} <= set(sent["labels"])
        await sandbox.kill()

    rig.run(body)


def test_a_token_of_a_gateway_that_ran_out_is_asked_for_again(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        rig.fake.sandboxes[sandbox.found.ref]["_token"] = "another"
        tokens = rig.fake.tokens
        assert (await sandbox.exec(["echo", "again"])).stdout == b"again\n"
        assert rig.fake.tokens == tokens + 1
        await sandbox.kill()

    rig.run(body)


def test_memory_that_ran_out_is_the_rollouts_doing(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        shown = rig.fake.sandboxes[sandbox.found.ref]
        shown["errorType"] = "OOM_KILLED"
        await shown["_sandbox"].kill()
        with pytest.raises(SandboxDead) as raised:
            await sandbox.exec(["true"])
        assert (raised.value.reason, raised.value.fault) == ("out_of_memory", "rollout")

    rig.run(body)
