"""Containers by the Engine API: hard defaults, isolation as the daemon shows it, images, ends, and orphans."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest

from adapter_rigs import AdapterRig, adapter_rig
from loopback_http import Fault, answer_json
from rollmill.errors import (
    ConfigError,
    CreateUnknown,
    ImageError,
    IsolationError,
    SandboxDead,
    SandboxIdInUse,
    SandboxRetryable,
    SandboxUnsupported,
)
from rollmill.sandboxes import DeathReason, IsolationLevel, NamedImage, Protection, Provider, SandboxSpec
from rollmill.sandboxes.backends.docker import DockerProvider, DockerSettings
from rollmill.sandboxes.backends.docker.hardening import PROCESS, container, is_orphan, owner_of, protections_of
from rollmill.sandboxes.disk_records import ProcessMark, boot_id, mark_of
from rollmill.sandboxes.isolation import level_of
from sandbox_builders import LIMITS, SPEC, new_id, real_rig, start, until, why_no_namespaces

MARK = ProcessMark(pid=7, started_ticks=1, boot_id="this-boot")
INFO = {"SecurityOptions": ["name=seccomp,profile=builtin", "name=userns"], "MemoryLimit": True, "PidsLimit": True}


def body_of(spec: SandboxSpec = SPEC, **settings) -> dict:
    return container(spec, image="i", marks={"rollmill-id": "a"}, owner=MARK, settings=DockerSettings(**settings))


def test_a_container_has_no_network_no_capabilities_no_new_privileges_and_every_cap():
    host = body_of()["HostConfig"]
    assert (host["NetworkMode"], host["CapDrop"], host["CapAdd"]) == ("none", ["ALL"], [])
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert (host["Memory"], host["MemorySwap"]) == (LIMITS.memory_bytes, LIMITS.memory_bytes)
    assert host["NanoCpus"] == 1_000_000_000
    assert host["PidsLimit"] == LIMITS.pids + 4
    assert host["Ulimits"] == [{"Name": "nofile", "Soft": 1024, "Hard": 1024}]
    assert host["Privileged"] is False
    assert host["RestartPolicy"] == {"Name": "no"}


def test_a_read_only_root_leaves_capped_directories_in_memory():
    host = body_of(read_only_root=True, writable=("/tmp", "/work"))["HostConfig"]
    assert host["ReadonlyRootfs"] is True
    options = f"rw,exec,nosuid,nodev,mode=1777,size={LIMITS.disk_bytes},nr_inodes={LIMITS.inodes}"
    assert host["Tmpfs"] == {"/tmp": options, "/work": options}


def test_a_container_ends_by_itself_half_a_minute_after_its_wall_limit():
    assert body_of()["Cmd"] == ["330"]


def shown(**changes) -> dict:
    return {"HostConfig": {**body_of()["HostConfig"], **changes}}


@pytest.mark.parametrize(
    ("container", "info", "level"),
    [
        (shown(), INFO, IsolationLevel.CAPPED),
        (shown(), {**INFO, "MemoryLimit": False}, IsolationLevel.HARDENED),
        (shown(Memory=0), INFO, IsolationLevel.HARDENED),
        (shown(), {"SecurityOptions": ["name=seccomp"]}, IsolationLevel.NAMESPACES),
        (shown(UsernsMode="host"), INFO, IsolationLevel.NAMESPACES),
        (shown(), {"SecurityOptions": ["name=rootless"]}, IsolationLevel.NAMESPACES),
        (shown(SecurityOpt=["no-new-privileges:true", "seccomp=unconfined"]), INFO, IsolationLevel.NAMESPACES),
        (shown(CapAdd=["SYS_ADMIN"]), INFO, IsolationLevel.NAMESPACES),
        (shown(CapAdd=["CAP_CHOWN", "SETUID"]), INFO, IsolationLevel.CAPPED),
        (shown(CapDrop=[]), INFO, IsolationLevel.NAMESPACES),
        (shown(SecurityOpt=[]), INFO, IsolationLevel.NONE),
        (shown(NetworkMode="bridge"), INFO, IsolationLevel.NONE),
        (shown(PidMode="host"), INFO, IsolationLevel.NONE),
        (shown(Privileged=True), INFO, IsolationLevel.NONE),
        (shown(Runtime="runsc"), INFO, IsolationLevel.OWN_KERNEL),
        (shown(Runtime="kata-qemu"), INFO, IsolationLevel.VIRTUAL_MACHINE),
        (shown(Runtime="runsc", Privileged=True), INFO, IsolationLevel.NONE),
    ],
)
def test_isolation_is_what_the_daemon_shows_and_not_what_was_asked_for(container, info, level):
    assert level_of(protections_of(container, info)) is level


def test_what_podman_lists_as_left_counts_as_dropped_when_it_is_nothing():
    listed = {**shown(CapDrop=["CAP_CHOWN", "CAP_KILL"]), "EffectiveCaps": []}
    assert Protection.CAPABILITIES_DROPPED in protections_of(listed, INFO)
    assert Protection.CAPABILITIES_DROPPED not in protections_of({**listed, "EffectiveCaps": ["CAP_KILL"]}, INFO)


def labels(*, ends: float, owner: ProcessMark | None = MARK) -> dict[str, str]:
    found = {"rollmill-record": json.dumps({"ends": ends})}
    return found if owner is None else {**found, PROCESS: msgspec.json.encode(owner).decode()}


@pytest.mark.parametrize(
    ("labels", "alive", "orphan"),
    [
        (labels(ends=1000.0), True, False),
        (labels(ends=1000.0), False, True),
        (labels(ends=-61.0), True, True),
        (labels(ends=-59.0), True, False),
        (labels(ends=1000.0, owner=msgspec.structs.replace(MARK, boot_id="another-machine")), False, False),
        (labels(ends=1000.0, owner=None), False, False),
        ({PROCESS: "no json", "rollmill-record": "no json"}, False, False),
    ],
)
def test_a_container_is_an_orphan_when_its_owner_ended_here_or_a_minute_after_its_wall_limit(labels, alive, orphan):
    found = is_orphan(labels, owner=owner_of(labels), now_wall_s=0.0, boot_id="this-boot", alive={MARK: alive})
    assert found is orphan


@pytest.mark.parametrize(
    "wrong", [{"pull": "often"}, {"writable": ("tmp",)}, {"writable": ("/",)}, {"cap_add": ("ALL",)}, {"start_s": 0.0}]
)
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError):
        DockerSettings(**wrong)


def test_a_daemon_behind_tcp_is_refused_with_a_way_out(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.1:2375")
    with pytest.raises(ConfigError, match="ssh -L"):
        DockerSettings()
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/podman/podman.sock")
    assert DockerSettings().socket_path() == "/run/podman/podman.sock"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterRig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"the fake runs programs in namespace sandboxes, and there are none here: {reason}")
    with (
        real_rig(tmp_path_factory.mktemp("records")) as engine,
        adapter_rig("docker", engine, tmp_path_factory.mktemp("docker")) as found,
    ):
        yield found


def reopened(provider: DockerProvider, **changes) -> DockerProvider:
    return DockerProvider(msgspec.structs.replace(provider._settings, **changes))


@pytest.mark.integration
def test_a_plain_daemon_without_user_namespaces_is_refused_and_nothing_is_left(rig):
    async def body(provider: Provider) -> None:
        rig.fake.security = ["name=seccomp,profile=builtin"]
        other = reopened(provider)
        try:
            with pytest.raises(IsolationError, match="user_namespace"):
                await start(other)
            assert rig.fake.containers == {}
            lower = reopened(provider, minimum_isolation=IsolationLevel.NAMESPACES)
            sandbox = await start(lower)
            assert sandbox.isolation is IsolationLevel.NAMESPACES
            await lower.close()
        finally:
            rig.fake.security = ["name=seccomp,profile=builtin", "name=userns"]
            await other.close()

    rig.run(body)


@pytest.mark.integration
def test_an_image_is_pulled_when_it_is_missing_and_an_unknown_one_is_an_image_error(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider, SandboxSpec(image=NamedImage(name="python:3.12"), limits=LIMITS))
        assert "python:3.12" in rig.fake.images
        await sandbox.kill()
        with pytest.raises(ImageError, match="manifest for nothing:latest not found"):
            await provider.prepare(NamedImage(name="nothing"))
        never = reopened(provider, pull="never")
        with pytest.raises(ImageError, match="pull is 'never'"):
            await start(never, SandboxSpec(image=NamedImage(name="other"), limits=LIMITS))
        await never.close()
        for wrong in ("", "../x", "a b", "a?b"):
            with pytest.raises(ImageError, match="cannot be the reference"):
                await provider.prepare(NamedImage(name=wrong))

    rig.run(body)


@pytest.mark.integration
def test_input_that_a_program_leaves_unread_costs_nothing_of_its_output_and_its_end(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        for code in range(10):
            # The daemon closes a socket with input in it, which resets the connection.
            done = await sandbox.exec(["sh", "-c", f"echo out; exit {code}"], stdin=b"x" * 1_000_000)
            assert (done.exit_code, done.stdout) == (code, b"out\n")
        await sandbox.kill()

    rig.run(body)


def test_a_user_that_the_image_lacks_is_unsupported(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        with pytest.raises(SandboxUnsupported, match="no user 'nosuch'"):
            await sandbox.exec(["true"], user="nosuch")
        await sandbox.kill()

    rig.run(body)


@pytest.mark.integration
def test_a_container_that_somebody_removed_was_lost_and_one_that_reached_its_memory_cap_was_not(rig):
    async def body(provider: Provider) -> None:
        removed, capped, stopped = [await start(provider) for _ in range(3)]
        (one,) = [one for one in rig.fake.containers.values() if one.name == f"rollmill-{removed.id}"]
        del rig.fake.containers[one.id]
        await one.sandbox.kill()
        with pytest.raises(SandboxDead) as raised:
            await removed.exec(["true"])
        assert (raised.value.reason, raised.value.fault) == ("provider_lost", "infrastructure")
        (two,) = [one for one in rig.fake.containers.values() if one.name == f"rollmill-{capped.id}"]
        await two.sandbox.kill(DeathReason.OUT_OF_MEMORY)
        with pytest.raises(SandboxDead) as raised:
            await capped.exec(["true"])
        assert (raised.value.reason, raised.value.fault) == ("out_of_memory", "rollout")
        (three,) = [one for one in rig.fake.containers.values() if one.name == f"rollmill-{stopped.id}"]
        await three.sandbox.kill()
        with pytest.raises(SandboxDead) as raised:
            await stopped.read("/tmp/x")
        assert raised.value.reason == "exited"
        await until(lambda: rig.fake.containers == {})  # what had stopped was removed

    rig.run(body)


@pytest.mark.integration
def test_a_creation_that_was_cut_off_is_found_by_its_id_and_can_be_used(rig):
    async def body(provider: Provider) -> None:
        name = new_id()
        rig.fake.server.faults.append(Fault("POST /v1.41/containers/create", cut="after"))
        with pytest.raises(CreateUnknown) as raised:
            await start(provider, id=name)
        assert raised.value.sandbox_id == name
        sandbox = await provider.attach(name)
        assert (await sandbox.exec(["echo", "here"])).stdout == b"here\n"
        await provider.kill([name])
        assert rig.fake.containers == {}

    rig.run(body)


@pytest.mark.integration
def test_a_container_of_the_same_id_from_elsewhere_is_in_use(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        other = reopened(provider)
        with pytest.raises(SandboxIdInUse, match="another process's"):
            await start(other, id=sandbox.id)
        await other.close()
        await sandbox.kill()

    rig.run(body)


@pytest.mark.integration
def test_a_daemon_without_room_is_tried_again_when_it_says(rig):
    async def body(provider: Provider) -> None:
        busy = answer_json({"message": "too many"}, 503, retry_after="7")
        rig.fake.server.faults.append(Fault("POST /v1.41/containers/create", answer=busy))
        with pytest.raises(SandboxRetryable, match="too many") as raised:
            await start(provider)
        assert raised.value.after_s == 7.0

    rig.run(body)


@pytest.mark.integration
def test_nobody_listening_is_an_error_that_says_so(tmp_path):
    async def body() -> None:
        async with DockerProvider(DockerSettings(socket=str(tmp_path / "none"))) as provider:
            with pytest.raises(SandboxRetryable, match="cannot be reached"):
                await start(provider)

    asyncio.run(body())


@pytest.mark.integration
def test_the_first_creation_sweeps_what_an_owner_that_ended_left_and_nothing_of_one_that_lives(rig):
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mark = mark_of(ended.pid)
    assert mark is not None
    assert mark.boot_id == boot_id()
    ended.communicate(b"\n")

    async def body(provider: Provider) -> None:
        mine = await start(provider)
        orphan = await start(provider)
        (one,) = [one for one in rig.fake.containers.values() if one.name == f"rollmill-{orphan.id}"]
        one.body["Labels"][PROCESS] = msgspec.json.encode(mark).decode()
        other = reopened(provider)
        last = await start(other)
        names = {one.name for one in rig.fake.containers.values()}
        assert names == {f"rollmill-{mine.id}", f"rollmill-{last.id}"}
        assert await other.sweep() == ()
        await other.close()
        await provider.kill([mine.id, orphan.id])

    rig.run(body)


@pytest.mark.integration
def test_a_container_that_another_process_took_over_is_no_orphan_of_its_maker(rig):
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mark = mark_of(ended.pid)
    ended.communicate(b"\n")

    async def body(provider: Provider) -> None:
        made = await start(provider)
        (one,) = rig.fake.containers.values()
        one.body["Labels"][PROCESS] = msgspec.json.encode(mark).decode()
        taker, sweeper = reopened(provider), reopened(provider)
        taken = await taker.attach(made.id)
        assert await sweeper.sweep() == ()
        assert (await taken.exec(["echo", "mine"])).stdout == b"mine\n"
        with pytest.raises(SandboxIdInUse):
            await start(sweeper, id=made.id)
        await taker.close()
        await sweeper.close()
        assert rig.fake.containers == {}
        await made.kill()

    rig.run(body)


@pytest.mark.integration
def test_the_public_client_of_docker_sees_what_we_made_and_runs_programs_in_it(rig):
    client = shutil.which("docker")
    if client is None:
        pytest.skip("the client of Docker is not installed")

    async def body(provider: Provider) -> None:
        sandbox = await start(provider)

        async def docker(*arguments: str, data: bytes = b"") -> tuple[int | None, bytes, bytes]:
            process = await asyncio.create_subprocess_exec(
                *(client, "-H", f"unix://{provider._settings.socket}", *arguments),
                env={"DOCKER_API_VERSION": "1.41", "PATH": "/usr/bin:/bin", "HOME": "/nowhere"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            out, err = await process.communicate(data)
            return process.returncode, out, err

        name = f"rollmill-{sandbox.id}"
        listed = await docker("ps", "--filter", f"label=rollmill-id={sandbox.id}", "--format", "{{.Names}} {{.State}}")
        assert listed[:2] == (0, f"{name} running\n".encode()), listed
        ran = await docker("exec", "-i", name, "sh", "-c", "cat; echo bad >&2; exit 4", data=b"through")
        assert ran == (4, b"through", b"bad\n")
        await docker("rm", "-f", name)
        with pytest.raises(SandboxDead, match="provider_lost"):
            await sandbox.exec(["true"])

    rig.run(body)


@pytest.mark.integration
def test_an_end_that_fails_is_tried_again_until_it_succeeds(rig):
    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        rig.fake.server.faults.append(
            Fault("DELETE /v1.41/containers", answer=answer_json({"message": "busy"}, 500), times=2)
        )
        began = time.monotonic()
        await sandbox.kill()
        assert time.monotonic() - began >= 0.6  # pauses of 0.2 and 0.4 s
        assert rig.fake.containers == {}

    rig.run(body)
