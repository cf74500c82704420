"""E2B's API: what failures of the service mean, what is sent to it, and its own SDK against the same fake."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import msgspec
import pytest

from adapter_rigs import E2B_TOKEN, AdapterRig, adapter_rig
from loopback_http import Fault, answer_json
from rollmill.errors import (
    ConfigError,
    CreateUnknown,
    ImageError,
    IsolationError,
    SandboxBusy,
    SandboxDead,
    SandboxError,
    SandboxIdInUse,
    SandboxRetryable,
    SandboxUnsupported,
    Unauthenticated,
)
from rollmill.sandboxes import IsolationLevel, Lease, NamedImage, Provider, SandboxSpec, SandboxState
from rollmill.sandboxes.backends.e2b import E2BProvider, E2BSettings
from rollmill.sandboxes.backends.http import Secret
from sandbox_builders import LIMITS, SPEC, new_id, real_rig, start, until, why_no_namespaces

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterRig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"the fake runs programs in namespace sandboxes, and there are none here: {reason}")
    with (
        real_rig(tmp_path_factory.mktemp("records")) as engine,
        adapter_rig("e2b", engine, tmp_path_factory.mktemp("e2b")) as found,
    ):
        yield found


def reopened(provider: E2BProvider, **changes) -> E2BProvider:
    return E2BProvider(msgspec.structs.replace(provider._settings, **changes))


def alive(rig: AdapterRig) -> list[str]:
    return [one.ref for one in rig.fake.machines.values() if one.sandbox.death is None]


def test_a_creation_carries_our_id_its_lease_and_a_key_that_makes_it_safe_to_send_twice(rig):
    async def body(provider: Provider) -> None:
        name = new_id()
        lease = Lease(owner="run7", ttl_s=100.0, rollout_id="g0/1", generation=2, policy_version=9)
        sandbox = await provider.create(SPEC, id=name, labels={"step": "3"}, lease=lease)
        request = [one for one in rig.fake.server.seen if (one.method, one.path) == ("POST", "/v2/sandboxes")][-1]
        sent = request.json()
        assert request.headers["idempotency-key"] == name
        assert sent["timeout"] == 115  # the lease and 15 s, so that this owner comes first
        assert sent["allow_internet_access"] is False
        assert sent["metadata"]["rollmill-id"] == name
        assert sent["metadata"]["rollmill-owner"] == "run7"
        assert sent["metadata"]["step"] == "3"
        record = json.loads(sent["metadata"]["rollmill-record"])
        assert (record["rollout"], record["generation"], record["policy"]) == ("g0/1", 2, 9)
        await sandbox.kill()

    rig.run(body)


def test_a_renewal_moves_the_services_own_limit_but_never_past_the_wall(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        machine = rig.fake.machines[sandbox.found.ref]
        await sandbox.renew(Lease(owner="x", ttl_s=50.0))
        assert machine.ttl_s == 65
        await sandbox.renew(Lease(owner="x", ttl_s=5000.0))
        assert 300 < machine.ttl_s <= 315  # wall_s of the limits is 300
        rig.fake.server.faults.append(Fault("POST /sandboxes", answer=answer_json({"message": "no"}, 500)))
        left = sandbox.status().lease_left_s
        with pytest.raises(SandboxError):
            await sandbox.renew(Lease(owner="y", ttl_s=9000.0))
        assert sandbox.status().lease.owner == "x"  # what the service refused was not renewed
        assert sandbox.status().lease_left_s <= left
        await sandbox.kill()

    rig.run(body)


@pytest.mark.parametrize(("header", "after_s"), [({"retry_after": "7"}, 7.0), ({}, 5.0)])
def test_too_many_requests_is_to_be_tried_again_when_the_service_says(rig, header, after_s):
    async def body(provider: Provider) -> None:
        answer = answer_json({"code": 429, "message": "Rate limit exceeded"}, 429, **header)
        rig.fake.server.faults.append(Fault("POST /v2/sandboxes", answer=answer))
        with pytest.raises(SandboxRetryable, match="Rate limit exceeded") as raised:
            await start(provider)
        assert raised.value.after_s == after_s
        assert alive(rig) == []

    rig.run(body)


def test_a_quota_that_is_used_up_is_to_be_tried_again_and_a_bad_token_is_not(rig):
    async def body(provider: Provider) -> None:
        quota = answer_json({"message": "you have reached the maximum: concurrency quota exceeded"}, 403)
        rig.fake.server.faults.append(Fault("POST /v2/sandboxes", answer=quota))
        with pytest.raises(SandboxRetryable, match="quota"):
            await start(provider)
        other = reopened(provider, token=Secret("e2b_wrong-token"))
        with pytest.raises(Unauthenticated) as raised:
            await start(other)
        assert "e2b_wrong-token" not in str(raised.value)  # the service repeats it, we do not
        assert "***" in str(raised.value)
        assert "e2b_wrong-token" not in repr(other._settings)
        await other.close()

    rig.run(body)


@pytest.mark.parametrize("fault", [{"cut": "after"}, {"answer": answer_json({"message": "bad gateway"}, 502)}])
def test_a_creation_without_an_answer_is_unknown_and_what_it_left_can_be_killed_by_its_id(rig, fault):
    async def body(provider: Provider) -> None:
        name = new_id()
        rig.fake.server.faults.append(Fault("POST /v2/sandboxes", **fault))
        with pytest.raises(CreateUnknown) as raised:
            await start(provider, id=name)
        assert raised.value.sandbox_id == name
        await provider.kill([name])
        assert alive(rig) == []

    rig.run(body)


def test_a_creation_without_an_answer_can_be_attached_to_or_asked_for_again(rig):
    async def body(provider: Provider) -> None:
        name, again = new_id(), new_id()
        rig.fake.server.faults.append(Fault("POST /v2/sandboxes", cut="after", times=2))
        for one in (name, again):
            with pytest.raises(CreateUnknown):
                await start(provider, id=one)
        sandbox = await provider.attach(name)
        assert (await sandbox.exec(["echo", "found"])).stdout == b"found\n"
        assert (await provider.status([again]))[again].state is SandboxState.READY
        second = await start(provider, id=again)  # the same key, so the service returns the same one
        assert len(alive(rig)) == 2
        await provider.kill([sandbox.id, second.id])

    rig.run(body)


def test_a_creation_that_takes_too_long_is_unknown(rig):
    async def body(provider: Provider) -> None:
        slow = reopened(provider, start_s=0.2)
        began = len(rig.fake.machines)
        rig.fake.server.faults.append(Fault("POST /v2/sandboxes", delay_s=0.4))
        name = new_id()
        with pytest.raises(CreateUnknown, match=r"limit 0\.2 s"):
            await start(slow, id=name)
        await slow.close()
        await until(lambda: len(rig.fake.machines) > began)  # carried out after all
        await provider.kill([name])
        assert alive(rig) == []

    rig.run(body)


def test_a_cancelled_creation_leaves_nothing(rig):
    async def body(provider: Provider) -> None:
        other = reopened(provider)
        began = len(rig.fake.machines)
        rig.fake.server.faults.append(Fault("GET /health", delay_s=5.0))
        call = asyncio.ensure_future(start(other))
        await until(lambda: len(rig.fake.machines) > began)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await other.close()
        assert alive(rig) == []

    rig.run(body)


def test_an_unknown_template_is_an_image_error(rig):
    async def body(provider: Provider) -> None:
        image = NamedImage(name="nothing")
        with pytest.raises(ImageError, match="no template 'nothing'"):
            await start(provider, SandboxSpec(image=image, limits=LIMITS))
        with pytest.raises(ImageError, match="no template 'nothing'"):
            await provider.prepare(image)
        await provider.prepare(NamedImage(name="python"))

    rig.run(body)


def test_files_of_this_machine_and_our_own_names_as_labels_are_refused(rig):
    async def body(provider: Provider) -> None:
        with pytest.raises(ConfigError, match="cannot show"):
            await start(provider, SandboxSpec(limits=LIMITS, expose=("/usr",)))
        with pytest.raises(ConfigError, match="rollmill-id"):
            await provider.create(SPEC, id=new_id(), labels={"rollmill-id": "x"}, lease=Lease(owner="x"))

    rig.run(body)


def test_a_service_that_claims_too_little_isolation_is_refused_before_anything_is_made(rig):
    async def body(provider: Provider) -> None:
        other = reopened(provider, isolation=IsolationLevel.NAMESPACES)
        requests = len(rig.fake.server.seen)
        with pytest.raises(IsolationError, match="user_namespace"):
            await start(other)
        assert len(rig.fake.server.seen) == requests
        await other.close()

    rig.run(body)


def test_a_sandbox_that_the_service_ended_was_lost_and_a_running_program_hears_of_it(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        process = await sandbox.start_process(["sleep", "600"])
        await rig.fake.machines[sandbox.found.ref].sandbox.kill()
        with pytest.raises(SandboxDead) as raised:
            await process.wait()
        assert (raised.value.reason, raised.value.fault) == ("provider_lost", "infrastructure")
        await until(lambda: sandbox.state is SandboxState.LOST)
        with pytest.raises(SandboxDead, match="provider_lost"):
            await sandbox.exec(["true"])
        with pytest.raises(SandboxIdInUse):
            await start(provider, id=sandbox.id)

    rig.run(body)


def test_a_connection_that_breaks_under_a_program_is_an_error_and_the_program_is_not_started_again(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        before = [one.path for one in rig.fake.server.seen].count("/process.Process/Start")
        rig.fake.server.faults.append(Fault("POST /process.Process/Start", cut="after"))
        with pytest.raises(SandboxError, match="cut off") as raised:
            await sandbox.exec(["sh", "-c", "echo x >>/tmp/once"])
        assert not isinstance(raised.value, SandboxDead | SandboxRetryable)
        assert [one.path for one in rig.fake.server.seen].count("/process.Process/Start") == before + 1
        assert sandbox.death is None
        await sandbox.kill()

    rig.run(body)


def test_an_unknown_user_is_unsupported(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        with pytest.raises(SandboxUnsupported, match="nosuch"):
            await sandbox.exec(["true"], user="nosuch")
        await sandbox.kill()

    rig.run(body)


def test_what_runs_is_stopped_for_a_snapshot_only_when_that_is_asked_for(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.write("/tmp/a", b"kept")
        process = await sandbox.start_process(["sleep", "600"])
        with pytest.raises(SandboxBusy, match="1 process run"):
            await sandbox.snapshot(id=new_id())
        assert process.ended.done() is False
        ref = await sandbox.snapshot(id=new_id(), stop_processes=True)
        result = await process.wait()
        assert (result.exit_code, result.killed_by) == (-9, "owner")
        other = reopened(provider)
        copy = await other.restore(ref, id=new_id(), lease=Lease(owner="x"))  # found by its name
        assert await copy.read("/tmp/a") == b"kept"
        await other.close()
        await sandbox.kill()
        await provider.delete_snapshots([ref.snapshot_id])
        assert rig.fake.snapshots == {}

    rig.run(body)


def test_lists_go_through_all_pages(rig):
    async def body(provider: Provider) -> None:
        rig.fake._page = 2
        other = reopened(provider)
        run = new_id()
        names = [new_id() for _ in range(5)]
        for name in names:
            await other.create(SPEC, id=name, labels={"run": run}, lease=Lease(owner="x"))
        try:
            assert sorted(one.sandbox_id for one in await provider.list(labels={"run": run})) == sorted(names)
        finally:
            rig.fake._page = 100
            await other.close()
        assert alive(rig) == []

    rig.run(body)


def test_killing_many_goes_on_after_one_that_fails_and_then_says_so(rig):
    async def body(provider: Provider) -> None:
        other = reopened(provider, end_s=0.5)
        names = [new_id() for _ in range(4)]
        for name in names:
            await other.create(SPEC, id=name, lease=Lease(owner="x"))
        for fault in range(2):
            busy = answer_json({"message": "busy"}, 500)
            rig.fake.server.faults.append(Fault("DELETE /sandboxes", answer=busy, times=1 + fault))
        await other.kill(names)
        assert alive(rig) == []
        await other.close()

    rig.run(body)


def test_the_token_is_needed_and_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="E2B_API_KEY"):
        E2BProvider(E2BSettings())
    monkeypatch.setenv("E2B_API_KEY", "two words")
    with pytest.raises(ConfigError, match="no header can carry"):
        E2BProvider(E2BSettings())


def test_the_public_sdk_reads_the_same_service_as_we_do(rig):
    e2b = pytest.importorskip("e2b", reason="the public SDK of E2B is not installed")

    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        url = rig.fake.server.url
        options = {"api_key": E2B_TOKEN, "api_url": url, "sandbox_url": url}
        pages = e2b.AsyncSandbox.list(query=e2b.SandboxQuery(metadata={"rollmill-id": sandbox.id}), **options)
        (listed,) = await pages.next_items()
        assert listed.sandbox_id == sandbox.found.ref
        theirs = await e2b.AsyncSandbox.create(metadata={"made": "by the SDK"}, timeout=60, **options)
        machine = rig.fake.machines[theirs.sandbox_id]
        assert (machine.marks, machine.ttl_s) == ({"made": "by the SDK"}, 60)
        found = await provider.driver.find({"made": "by the SDK"})
        assert [one.ref for one in found] == [theirs.sandbox_id]
        assert await provider.list(labels={"made": "by the SDK"}) == ()  # not one of ours
        await theirs.kill()
        await sandbox.kill()

    rig.run(body)
