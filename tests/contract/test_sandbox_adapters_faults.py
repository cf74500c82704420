"""What failures of a vendor mean, the same for all: no room, a bad token, a lost answer, a lost sandbox."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from adapter_rigs import OPENERS, AdapterRig, adapter_rig
from loopback_http import Answer, Fault, answer_json
from rollmill.errors import CreateUnknown, ImageError, SandboxDead, SandboxError, SandboxRetryable, Unauthenticated
from rollmill.sandboxes import NamedImage, Provider, SandboxSpec
from rollmill.sandboxes.backends.http import Secret
from sandbox_builders import LIMITS, RealRig, new_id, real_rig, start, why_no_namespaces

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CREATES = {
    "daytona": "POST /api/sandbox",
    "docker": "POST /v1.41/containers/create",
    "e2b": "POST /v2/sandboxes",
    "kubernetes": "POST /apis/agents.x-k8s.io/v1beta1/namespaces/default/sandboxes",
    "kubernetes_pool": "POST /apis/extensions.agents.x-k8s.io/v1beta1/namespaces/default/sandboxclaims",
    "prime": "POST /api/v1/sandbox",
}
"""The request that makes a sandbox, of the vendors that are reached by HTTP."""

BAD_IMAGES = dict.fromkeys(("daytona", "e2b", "kubernetes", "kubernetes_pool", "modal", "prime"), "nothing")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"the fakes run programs in namespace sandboxes, and there are none here: {reason}")
    with real_rig(tmp_path_factory.mktemp("records")) as rig:
        yield rig


@pytest.fixture(scope="module")
def rigs(engine: RealRig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, AdapterRig]]:
    opened = {name: adapter_rig(name, engine, tmp_path_factory.mktemp(name)) for name in OPENERS}
    yield {name: one.__enter__() for name, one in opened.items()}
    for one in opened.values():
        one.__exit__(None, None, None)


def alive(rig: AdapterRig, engine: RealRig) -> int:
    return len([one for one in rig._runner.run(engine.provider.list()) if one.death is None])


@pytest.mark.parametrize("name", sorted(CREATES))
def test_no_room_is_to_be_tried_again_when_the_vendor_says_and_leaves_nothing(rigs, engine, name):
    rig = rigs[name]

    async def body(provider: Provider) -> None:
        busy = answer_json({"message": "slow down"}, 429, retry_after="11")
        rig.fake.server.faults.append(Fault(CREATES[name], answer=busy))
        with pytest.raises(SandboxRetryable, match="slow down") as raised:
            await start(provider)
        assert raised.value.after_s == 11.0

    rig.run(body)
    assert alive(rig, engine) == 0


@pytest.mark.parametrize("name", sorted(CREATES))
def test_a_creation_that_was_cut_off_is_unknown_and_killed_by_its_id_from_another_process(rigs, engine, name):
    rig = rigs[name]

    async def body(provider: Provider) -> None:
        sandbox_id = new_id()
        rig.fake.server.faults.append(Fault(CREATES[name], cut="after"))
        with pytest.raises(CreateUnknown) as raised:
            await start(provider, id=sandbox_id)
        assert raised.value.sandbox_id == sandbox_id
        other = rig.another()
        await other.kill([sandbox_id])
        await other.kill([sandbox_id, new_id()])  # ended, and never known: no error
        await other.close()

    rig.run(body)
    assert alive(rig, engine) == 0


@pytest.mark.parametrize("name", sorted(CREATES))
def test_a_creation_that_was_cut_off_can_be_attached_to(rigs, engine, name):
    rig = rigs[name]

    async def body(provider: Provider) -> None:
        sandbox_id = new_id()
        rig.fake.server.faults.append(Fault(CREATES[name], cut="after"))
        with pytest.raises(CreateUnknown):
            await start(provider, id=sandbox_id)
        sandbox = await provider.attach(sandbox_id)
        assert (await sandbox.exec(["echo", "found"])).stdout == b"found\n"
        assert sandbox.spec.limits == LIMITS
        await sandbox.kill()

    rig.run(body)
    assert alive(rig, engine) == 0


@pytest.mark.parametrize("name", sorted(CREATES))
def test_a_server_error_at_a_creation_is_unknown_too(rigs, name):
    rig = rigs[name]

    async def body(provider: Provider) -> None:
        rig.fake.server.faults.append(Fault(CREATES[name], answer=answer_json({"message": "oops"}, 502)))
        with pytest.raises(CreateUnknown, match="oops"):
            await start(provider)

    rig.run(body)


@pytest.mark.parametrize("content", [b"", b"no json", b"[]", b'{"id": null}'])
@pytest.mark.parametrize("name", sorted(CREATES))
def test_an_answer_to_a_creation_that_is_not_understood_is_unknown_too(rigs, name, content):
    rig = rigs[name]

    async def body(provider: Provider) -> None:
        rig.fake.server.faults.append(Fault(CREATES[name], answer=Answer(201, content)))
        with pytest.raises(CreateUnknown, match="not understood"):
            await start(provider)

    rig.run(body)


@pytest.mark.parametrize("name", ["daytona", "e2b", "kubernetes", "prime"])
def test_a_bad_token_is_the_users_to_mend_and_is_shown_nowhere(rigs, name):
    rig = rigs[name]

    async def body(provider: Provider) -> None:
        settings = msgspec.structs.replace(provider._settings, token=Secret("wrong-token"))
        async with type(provider)(settings) as other:
            with pytest.raises(Unauthenticated) as raised:
                await start(other)
            assert "wrong-token" not in str(raised.value) + repr(settings)

    rig.run(body)


@pytest.mark.parametrize("name", sorted(BAD_IMAGES))
def test_an_image_that_is_not_there_is_an_image_error_and_leaves_nothing(rigs, engine, name):
    rig = rigs[name]

    async def body(provider: Provider) -> None:
        with pytest.raises(ImageError):
            await start(provider, SandboxSpec(image=NamedImage(name=BAD_IMAGES[name]), limits=LIMITS))

    rig.run(body)
    assert alive(rig, engine) == 0


@pytest.mark.parametrize("name", sorted(OPENERS))
def test_a_sandbox_that_its_vendor_lost_is_infrastructures_fault_for_programs_and_files(rigs, engine, name):
    rig = rigs[name]

    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        process = await sandbox.start_process(["sleep", "600"])
        await engine.provider.kill([one.sandbox_id for one in await engine.provider.list() if one.death is None])
        with pytest.raises(SandboxDead) as raised:
            await process.wait()
        assert raised.value.fault == "infrastructure"
        with pytest.raises(SandboxDead) as raised:
            await sandbox.read("/tmp/x")
        assert raised.value.fault == "infrastructure"
        assert sandbox.death is not None
        await sandbox.kill()  # no error: it is gone

    rig.run(body)


@pytest.mark.parametrize("name", ["daytona", "swerex"])
def test_a_job_goes_on_when_looks_at_it_are_cut_off(rigs, name):
    rig = rigs[name]

    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        line = "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.1; done; exit 5"
        process = await sandbox.start_process(["sh", "-c", line])
        path = "POST /r/" if name == "swerex" else "POST /toolbox/"
        rig.fake.server.faults.append(Fault(path, cut="before", times=2))
        result = await process.wait()
        assert (result.exit_code, result.stdout) == (5, b"1\n2\n3\n4\n5\n6\n7\n8\n")
        assert rig.fake.server.faults == []
        await sandbox.kill()

    rig.run(body)


@pytest.mark.parametrize("name", ["daytona", "prime", "swerex"])
def test_a_job_whose_files_a_program_removed_is_an_error_that_says_so(rigs, name):
    rig = rigs[name]

    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        with pytest.raises(SandboxError, match=r"were removed inside|was killed inside"):
            await sandbox.exec(["sh", "-c", "rm -rf /var/tmp/.rollmill; sleep 5"])
        assert sandbox.death is None
        await sandbox.kill()

    rig.run(body)


@pytest.mark.parametrize("name", sorted(OPENERS))
def test_a_program_whose_daemon_keeps_its_output_open_ends_by_itself(rigs, name):
    rig = rigs[name]
    if name in ("e2b", "modal", "kubernetes"):
        pytest.skip("these wait for the output's end themselves; their fakes do not")

    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        result = await sandbox.exec(["sh", "-c", "sleep 50 & echo started"], timeout_s=20.0)
        assert (result.exit_code, result.stdout, result.timed_out) == (0, b"started\n", False)
        await sandbox.kill()

    rig.run(body)
