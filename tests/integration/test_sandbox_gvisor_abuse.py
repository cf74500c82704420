"""What a program may try from inside a gVisor sandbox: the attacks of the namespace backend, and what differs there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import msgspec
import pytest
from test_sandbox_abuse import *  # noqa: F403
from test_sandbox_abuse import TRY, needs_root, python, says

from gvisor_builders import GvisorRig, gvisor_rig, need_gvisor
from rollmill.errors import SandboxDead
from rollmill.sandboxes import Culprit, DeathReason, IsolationLevel, Provider, SandboxSpec
from rollmill.sandboxes.isolation import Protection
from sandbox_builders import LIMITS, MIB, start

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# What these ask for is answered by the host's kernel there, and by gVisor's here; below is what gVisor must answer.
del test_a_memory_bomb_is_killed_and_the_agent_is_not  # noqa: F821
del test_memory_that_no_process_has_mapped_is_bounded_too  # noqa: F821
del test_a_memory_bomb_of_many_processes_and_files_is_bounded_as_a_whole  # noqa: F821
del test_command_lines_of_the_machinery_tell_nothing_of_the_host  # noqa: F821
del test_watchers_and_terminals_end_at_their_bounds  # noqa: F821
del test_root_inside_has_seven_capabilities_no_new_privileges_and_a_filter  # noqa: F821
del test_files_of_the_host_are_not_there  # noqa: F821
del test_there_is_no_network_but_the_loopback  # noqa: F821
del test_a_machine_that_isolates_less_than_the_minimum_starts_nothing  # noqa: F821
del test_every_protection_of_this_backend_but_the_cgroups_holds_for_everybody  # noqa: F821


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GvisorRig]:
    need_gvisor(tmp_path_factory.mktemp("probe"))
    with gvisor_rig(tmp_path_factory.mktemp("records")) as rig:
        yield rig


@needs_root
def test_a_busy_loop_gets_its_share_of_a_processor_and_no_more(rig):  # by the host's count: gVisor's own is of ticks
    spec = SandboxSpec(limits=msgspec.structs.replace(LIMITS, cpus=0.2))

    async def body(provider: Provider) -> tuple[float, float]:
        sandbox = await start(provider, spec)
        before, began_s = await sandbox.usage(), time.monotonic()
        result = await sandbox.exec(["python3", "-c", "while True: pass"], timeout_s=1.5)
        assert result.timed_out
        after, wall_s = await sandbox.usage(), time.monotonic() - began_s
        await sandbox.kill()
        return after.cpu_s - before.cpu_s, wall_s

    cpu_s, wall_s = rig.run(body)
    assert 0 < cpu_s < 0.2 * wall_s + 0.25


def test_programs_run_on_a_kernel_that_is_not_the_hosts(rig, shared):
    found = says(python(rig, shared, "import os; print(os.uname().release, os.uname().nodename)"))
    assert found == "4.4.0 sandbox"
    assert os.uname().release != "4.4.0"


@needs_root
@pytest.mark.parametrize(
    "code",
    [
        "keep = [bytearray(8 << 20) for _ in range(100)]",
        "import os\nfor i in range(8):\n  if os.fork() == 0:\n    keep = b'x' * (60 << 20); os.read(0, 1)\nos.wait()",
    ],
    ids=["one process", "many processes"],
)
def test_a_memory_bomb_ends_its_sandbox_and_that_is_the_rollouts_fault(rig, code):
    spec = SandboxSpec(limits=msgspec.structs.replace(LIMITS, memory_bytes=64 * MIB))

    async def body(provider: Provider) -> None:
        sandbox = await start(provider, spec)
        other = await start(provider)
        with pytest.raises(SandboxDead) as raised:
            await sandbox.exec(["python3", "-c", code], timeout_s=60.0)
        assert (raised.value.reason, raised.value.fault) == ("out_of_memory", "rollout")
        assert sandbox.death is not None
        assert (sandbox.death.reason, sandbox.death.culprit) == (DeathReason.OUT_OF_MEMORY, Culprit.ROLLOUT)
        assert (await other.exec(["true"])).exit_code == 0
        await other.kill()

    rig.run(body)


@pytest.mark.skipif(os.geteuid() == 0, reason="as root a cgroup bounds the sandbox as a whole")
def test_without_cgroups_the_memory_of_the_whole_sandbox_ends_at_a_gibibyte(rig):
    code = TRY + (
        "block = bytes(64 << 20)\n"
        "def fill():\n"
        "    for i in range(40):\n"
        "        with open(f'/dev/x{i}', 'wb', buffering=0) as f: print(f.write(block[:20 << 20]), flush=True)\n"
        "print(attempt(lambda: [fill() for _ in range(1)] and [open(f'/dev/y{i}', 'wb', 0).write(block[:20 << 20])"
        " for i in range(20)]))"
    )
    lines = python(rig, rig.run(start), code, timeout_s=60.0).stdout.decode().split()
    assert lines[-1] in ("EFBIG", "ENOMEM")
    assert sum(map(int, lines[:-1])) < 1 << 30


def test_the_agent_cannot_be_killed_bounded_traced_or_read(rig):
    code = TRY + (
        "import fcntl, resource, socket\n"
        "a, b = socket.socketpair()\n"
        "found = [attempt(lambda: os.kill(1, number)) for number in range(1, 65)]\n"
        "found += [attempt(lambda: call(200, 1, 9)), attempt(lambda: call(234, 1, 1, 9)),\n"
        "          attempt(lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))),\n"
        "          attempt(lambda: fcntl.fcntl(a, fcntl.F_SETOWN, 1)), attempt(lambda: fcntl.fcntl(a, 10, 9)),\n"
        "          attempt(lambda: fcntl.ioctl(a, 0x8901, b'\\1\\0\\0\\0')),\n"
        "          attempt(lambda: open('/proc/1/mem', 'rb').read(1)), attempt(lambda: call(101, 16, 1, 0, 0))]\n"
        "print(*sorted(set(found)), flush=True)\n"
        "os.kill(-1, 9)"
    )
    alone = rig.run(start)
    result = rig.run(lambda _: alone.exec(["python3", "-c", code], timeout_s=30.0))
    assert set(result.stdout.decode().split()) <= {"EACCES", "EPERM"}, result
    assert rig.run(lambda _: alone.exec(["echo", "alive"])).stdout == b"alive\n"
    rig.run(lambda _: alone.kill())


def test_what_is_seen_of_the_machinery_tells_nothing_of_the_host(rig, shared):
    code = "print(open('/proc/1/cmdline').read(), open('/proc/1/environ').read(), open('/proc/mounts').read())"
    found = says(python(rig, shared, code))
    assert not [one for one in (os.getcwd(), os.path.expanduser("~/"), "/tmp/root", "/tmp/run") if one in found]


def test_files_of_the_host_are_not_there_and_the_agents_own_cannot_be_changed(rig, shared, tmp_path):
    (tmp_path / "secret").write_text("x", encoding="utf-8")
    hidden = [str(tmp_path / "secret"), __file__, "/etc/shadow", "/boot", "/proc/1/root/etc/shadow"]
    code = TRY + (
        f"print([p for p in {hidden!r} if os.path.exists(p)], os.listdir('/home'))\n"
        "packages = [os.path.join('/.rollmill', *p) for p in [('lib', 'python3.11', 'site-packages')]]\n"
        "print([os.listdir(p) for p in packages if os.path.isdir(p)])\n"
        "print(attempt(lambda: open('/.rollmill/src/guest/agent.py', 'w')),\n"
        "      attempt(lambda: open('/.rollmill/bin/python3', 'r+b')))"
    )
    first, packages, written = says(python(rig, shared, code)).splitlines()
    assert first == "[] ['user']"
    assert packages in ("[]", "[[]]")
    assert set(written.split()) <= {"EROFS", "EACCES", "EPERM"}


def test_root_inside_has_seven_capabilities_no_new_privileges_and_filters(rig, shared):
    text = says(python(rig, shared, "print(open('/proc/self/status').read())"))
    lines = dict(line.split(":\t") for line in text.splitlines())
    assert {lines[name] for name in ("CapPrm", "CapEff", "CapBnd")} == {"00000000000000fb"}
    assert (lines["CapInh"], lines["Seccomp"]) == ("0" * 16, "2")


def test_settings_of_the_kernel_inside_cannot_be_used_and_what_is_put_into_dev_stays_there(rig, shared):
    code = TRY + (
        "attempt(lambda: open('/proc/sys/kernel/hostname', 'w').write('x'))\n"
        "print(os.uname().nodename, attempt(lambda: open('/proc/sysrq-trigger', 'w').write('b')),\n"
        "      attempt(lambda: [os.mknod('/dev/sda', 0o60600, os.makedev(8, 0)), open('/dev/sda', 'rb')]),\n"
        "      attempt(lambda: open('/dev/shm/../new-of-a-sandbox', 'w')))\n"
        "def size(path):\n"
        "    try: return len(open(path).read())\n"
        "    except OSError: return 0\n"
        "print(sum(map(size, ('/proc/kallsyms', '/proc/timer_list', '/proc/keys', '/proc/kcore'))))"
    )
    first, masked = says(python(rig, shared, code)).splitlines()
    name, *refused, _ = first.split()
    assert name == "sandbox"
    assert set(refused) <= {"EROFS", "EACCES", "EPERM", "ENOENT", "ENXIO"}  # a node for which there is no device
    assert masked == "0"
    assert not os.path.exists("/dev/new-of-a-sandbox")


def test_there_is_no_network_but_the_loopback(rig, shared):
    code = TRY + (
        "import socket\n"
        "listener = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(listener.getsockname()); print('loopback')\n"
        "print(sorted(n for _, n in socket.if_nameindex()))\n"
        "s = socket.socket(); s.settimeout(2)\n"
        "print(attempt(lambda: s.connect(('192.0.2.1', 80))))\n"
        "u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "print(attempt(lambda: u.sendto(b'x', ('8.8.8.8', 53))))\n"
        "print(attempt(lambda: socket.socket(40, socket.SOCK_STREAM)),\n"
        "      attempt(lambda: socket.socket(17, socket.SOCK_RAW)),\n"
        "      attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)))"
    )
    lines = says(python(rig, shared, code)).splitlines()
    assert lines[:2] == ["loopback", "['lo']"]
    assert set(lines[2:4]) <= {"ENETUNREACH", "EHOSTUNREACH"}
    assert lines[4] == "EAFNOSUPPORT EAFNOSUPPORT EPERM"


def test_every_protection_of_this_backend_holds(rig, shared):
    cgroups = {"memory", "pids", "cpu", "freeze"}
    others = {one.value for one in Protection} - cgroups - {"landlock", "virtual_machine"}
    assert others <= set(shared.protections)
    assert shared.isolation is IsolationLevel.OWN_KERNEL
