"""What a program may try from inside a namespace sandbox, and what becomes of it: bombs are contained, escapes fail.

Here are the attacks that take more than a few words of code inside; the others are the table of `sandbox_attacks`.

The programs run in real sandboxes, as root or as a plain user, whoever runs the suite. Each test leaves the sandbox as
it was, or ends it; at the end nothing of any of them is left on the machine.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest

from rollmill.errors import (
    IsolationError,
    SandboxError,
    SandboxExhausted,
    SandboxFileError,
    SandboxUnsupported,
)
from rollmill.sandboxes import ExecResult, IsolationLevel, Provider, Sandbox, SandboxSpec
from rollmill.sandboxes.isolation import Protection
from sandbox_builders import LIMITS, MIB, SPEC, RealRig, new_id, real_rig, start, why_no_namespaces

pytestmark = pytest.mark.integration

AS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not AS_ROOT, reason="limits of the whole sandbox need cgroups that root may write to")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")
    with real_rig(tmp_path_factory.mktemp("records")) as rig:
        yield rig


@pytest.fixture(scope="module")
def shared(rig: RealRig) -> Sandbox:
    """One sandbox for the attacks that must leave it as it was."""
    return rig.run(start)


def python(
    rig: RealRig, sandbox: Sandbox, code: str, *, user: str | None = None, timeout_s: float = 30.0
) -> ExecResult:
    async def body(_: Provider) -> ExecResult:
        return await sandbox.run_python(code, user=user, timeout_s=timeout_s)

    return rig.run(body)


def says(result: ExecResult) -> str:
    assert result.exit_code == 0, result.stderr.decode()
    return result.stdout.decode().strip()


TRY = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(action):
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
"""

# -- bombs -----------------------------------------------------------------------------------------------------------


def contained(rig: RealRig, code: str, *, spec: SandboxSpec = SPEC, timeout_s: float = 60.0) -> ExecResult:
    """Run a bomb in a sandbox of its own; the sandbox must outlive it and then end at once."""

    async def body(provider: Provider) -> ExecResult:
        sandbox = await start(provider, spec)
        result = await sandbox.run_python(code, timeout_s=timeout_s)
        assert (await sandbox.exec(["true"])).exit_code == 0
        await sandbox.kill()
        return result

    return rig.run(body)


def test_an_inode_bomb_ends_at_the_cap(rig):
    code = (
        TRY
        + "for i in range(10**6):\n    try: os.mknod(f'/tmp/{i}')\n"
        + "    except OSError as e: print(i, errno.errorcode[e.errno]); break"
    )
    count, error = says(contained(rig, code)).split()
    assert error == "ENOSPC"
    assert 1500 < int(count) < LIMITS.inodes


def test_a_disk_bomb_ends_at_the_cap_wherever_it_writes(rig):
    code = TRY + (
        "total = 0\n"
        "for path in ('/tmp/a', '/dev/shm/b', '/workspace/c', '/var/tmp/d'):\n"
        "    with open(path, 'wb', buffering=0) as f:\n"
        "        try:\n"
        "            while True: total += f.write(bytes(1 << 16))\n"
        "        except OSError as e: last = errno.errorcode[e.errno]\n"
        "print(total, last)"
    )
    total, error = says(contained(rig, code)).split()
    assert error == "ENOSPC"
    assert int(total) <= LIMITS.disk_bytes


def test_a_fork_bomb_ends_at_the_cap_and_all_of_it_goes_with_the_sandbox(rig):
    code = TRY + (
        "import signal\n"
        "n = 0\n"
        "try:\n"
        "    while n < 500:\n"
        "        if os.fork() == 0: os.setsid(); signal.pause()\n"
        "        n += 1\n"
        "except OSError as e: print(n, errno.errorcode[e.errno], flush=True)"
    )

    async def body(provider: Provider) -> tuple[ExecResult, float]:
        sandbox = await start(provider)
        result = await sandbox.run_python(code, timeout_s=60.0)
        began = time.monotonic()
        await sandbox.kill()
        return result, time.monotonic() - began

    result, seconds = rig.run(body)
    count, error = says(result).split()
    assert error == "EAGAIN"
    assert 20 < int(count) <= LIMITS.pids
    assert seconds < 10


def test_while_processes_are_used_up_calls_say_so_and_files_still_answer(rig):
    code = (
        "import os, signal\n"
        "try:\n"
        "    while True:\n"
        "        if os.fork() == 0: signal.pause()\n"
        "except OSError: open('/tmp/full', 'w'); signal.pause()"
    )

    async def body(provider: Provider) -> None:
        sandbox = await start(provider)
        await sandbox.start_process(["python3", "-c", code])
        async with asyncio.timeout(30):
            while "full" not in {one.name for one in await sandbox.list_dir("/tmp")}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        with pytest.raises(SandboxExhausted):
            await sandbox.exec(["true"])
        await sandbox.write("/tmp/x", b"still here")
        assert await sandbox.read("/tmp/x") == b"still here"
        assert ((await sandbox.usage()).processes or 0) >= 20
        await sandbox.kill()

    rig.run(body)


@needs_root
def test_a_memory_bomb_is_killed_and_the_agent_is_not(rig):
    result = contained(rig, "keep = [bytearray(8 << 20) for _ in range(100)]")
    assert result.exit_code == -9
    assert result.killed_by == ""


@needs_root
def test_a_memory_bomb_of_many_processes_and_files_is_bounded_as_a_whole(rig):
    spec = SandboxSpec(limits=msgspec.structs.replace(LIMITS, memory_bytes=64 * MIB, disk_bytes=256 * MIB))
    code = (
        "import os\nfor i in range(8):\n    if os.fork() == 0:\n        keep = bytearray(30 << 20)\n"
        "        open(f'/tmp/{i}', 'wb').write(keep); os._exit(0)\nwhile True: os.wait()"
    )

    async def body(provider: Provider) -> tuple[int, int]:
        sandbox = await start(provider, spec)
        await sandbox.exec(["python3", "-c", code], timeout_s=60.0)
        usage = await sandbox.usage() if sandbox.death is None else None
        await sandbox.kill()
        return (usage.peak_memory_bytes or 0, usage.oom_kills or 0) if usage else (0, 1)

    peak, kills = rig.run(body)
    assert kills >= 1
    assert peak <= 64 * MIB


@needs_root
def test_memory_that_no_process_has_mapped_is_bounded_too(rig):
    code = "import os\nfor i in range(100): os.write(os.memfd_create('x'), bytes(8 << 20))"
    result = contained(rig, code)
    assert (result.exit_code, result.killed_by) == (-9, "")


@pytest.mark.skipif(AS_ROOT, reason="as root the whole sandbox has a memory cap instead")
def test_without_cgroups_the_memory_of_each_process_is_bounded(rig):
    result = contained(rig, "keep = [bytearray(8 << 20) for _ in range(100)]")
    assert b"MemoryError" in result.stderr


@needs_root
def test_a_busy_loop_gets_its_share_of_a_processor_and_no_more(rig):
    spec = SandboxSpec(limits=msgspec.structs.replace(LIMITS, cpus=0.2))
    result = contained(rig, "while True: pass", spec=spec, timeout_s=1.5)
    assert result.timed_out
    assert result.cpu_s < 0.2 * result.wall_s + 0.25


def test_a_process_that_uses_up_its_processor_seconds_is_killed(rig):
    spec = SandboxSpec(limits=msgspec.structs.replace(LIMITS, cpu_s=1))

    async def body(provider: Provider) -> ExecResult:
        sandbox = await start(provider, spec)
        result = await sandbox.exec(["python3", "-c", "while True: pass"], timeout_s=60.0)
        await sandbox.kill()
        return result

    result = rig.run(body)
    assert (result.exit_code, result.killed_by) == (-9, "")


def test_a_daemon_that_keeps_the_pipes_open_does_not_keep_the_call_waiting(rig):
    async def body(provider: Provider) -> ExecResult:
        sandbox = await start(provider)
        result = await sandbox.exec(["sh", "-c", "setsid sleep 600 & echo started"], timeout_s=30.0)
        await sandbox.kill()
        return result

    result = rig.run(body)
    assert (result.stdout, result.exit_code, result.killed_by) == (b"started\n", 0, "")


def test_a_timeout_reaches_descendants_that_left_the_group(rig):
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid(); open('/tmp/pid', 'w').write(str(os.getpid()))\n"
        "time.sleep(600)"
    )

    async def body(provider: Provider) -> str:
        sandbox = await start(provider)
        result = await sandbox.exec(["python3", "-c", code], timeout_s=1.5)
        assert result.timed_out
        pid = (await sandbox.read("/tmp/pid")).decode()
        seen = (await sandbox.exec(["sh", "-c", f"sleep 0.1; test -d /proc/{pid} && echo there || echo gone"])).stdout
        await sandbox.kill()
        return seen.decode().strip()

    assert rig.run(body) == "gone"


def test_orphans_are_reaped(rig, shared):
    code = (
        "import os\nfor _ in range(20):\n    if os.fork() == 0:\n        if os.fork() == 0: os._exit(0)\n"
        "        os._exit(0)\nfor _ in range(20): os.wait()"
    )
    assert python(rig, shared, code).exit_code == 0
    zombies = (
        "import os, time; time.sleep(0.2)\n"
        "print(sum(' Z ' in open(f'/proc/{p}/stat').read() for p in os.listdir('/proc') if p.isdigit()))"
    )
    assert says(python(rig, shared, zombies)) == "0"


# -- the agent and the supervisor ------------------------------------------------------------------------------------


def test_the_agent_cannot_be_bounded_or_starved(rig):
    """Root inside is its user, and a sandbox whose agent breaks would end as if the machine were to blame."""
    code = TRY + (
        "import resource\n"
        "pair = (1, 1)\n"
        "found = [attempt(lambda: resource.prlimit(1, kind, pair)) for kind in range(16)]\n"
        "found += [attempt(lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))),\n"
        "          attempt(lambda: os.sched_setaffinity(1, {0}))]\n"
        "found += [attempt(lambda: os.setpriority(*one, 19)) for one in\n"
        "          ((os.PRIO_PROCESS, 1), (os.PRIO_PGRP, 1), (os.PRIO_USER, 0))]\n"
        "print(*sorted(set(found)))\n"
        "os.setpriority(os.PRIO_PROCESS, 0, 5); resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"
    )

    async def body(provider: Provider) -> tuple[bytes, bytes]:
        alone = await start(provider)
        found = await alone.exec(["python3", "-c", code], timeout_s=30.0)
        alive = await alone.exec(["echo", "alive"])
        await alone.kill()
        return found.stdout, alive.stdout

    assert rig.run(body) == (b"EPERM\n", b"alive\n")


@pytest.mark.skipif(not AS_ROOT, reason="a plain user cannot put a program in the place of python3 inside")
def test_what_pretends_to_be_the_fork_server_ends_nothing_but_its_own_jobs(rig):
    liar = (
        "#!/usr/bin/python3.11 -I\n"
        "import json, socket, sys, time\n"
        "talk = socket.socket(fileno=3)\n"
        "while True:\n"
        "    asked = json.loads(talk.recv(100000))\n"
        "    for said in SAID:\n"
        "        talk.send(said if isinstance(said, bytes) else json.dumps(dict(said, n=asked['n'])).encode())\n"
    )
    lies = (
        "[b'[' * 4000]",
        "[dict(pid=10**30)]",
        "[dict(pid=-1)]",
        "[dict(status='x', cpu_s=float('nan'), memory_bytes=1)]",
    )

    async def body(provider: Provider) -> None:
        for said in lies:
            alone = await start(provider)
            python3 = (
                (await alone.exec(["sh", "-c", "command -v python3.11 || command -v python3"])).stdout.decode().strip()
            )
            program = liar.replace("/usr/bin/python3.11", python3).replace("SAID", said)
            await alone.write("/usr/local/sbin/python3", program.encode(), mode=0o755)
            with suppress(SandboxError, SandboxUnsupported):
                await alone.run_python("print(1)", timeout_s=1.0)
            assert (await alone.exec(["echo", "alive"])).stdout == b"alive\n", said
            assert alone.death is None
            await alone.kill()

    rig.run(body)


def test_command_lines_of_the_machinery_tell_nothing_of_the_host(rig, shared):
    assert says(python(rig, shared, "print(open('/proc/1/cmdline').read().rstrip(chr(0)))")) == "sandbox-agent"


def test_watchers_and_terminals_end_at_their_bounds(rig, shared):
    code = TRY + (
        "import pty\n"
        "def count(action):\n"
        "    kept = []\n"
        "    try:\n"
        "        while True: kept.append(action())\n"
        "    except OSError: return len(kept)\n"
        "def watcher():\n"
        "    fd = libc.inotify_init()\n"
        "    if fd < 0: raise OSError(ctypes.get_errno(), 'refused')\n"
        "    return fd\n"
        "print(count(watcher), count(pty.openpty))"
    )
    assert says(python(rig, shared, code)) == "8 64"


def test_a_fork_server_that_is_killed_is_replaced(rig, shared):
    others = "[int(p) for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]"
    kill_all = f"import os\nfor p in {others}: os.kill(p, 9)"

    async def body(_: Provider) -> list[bytes]:
        found = []
        await shared.run_python("pass")
        await shared.exec(["python3", "-c", kill_all])
        while len(found) < 2:
            try:
                found.append((await shared.run_python("print('again')")).stdout)
            except SandboxUnsupported:
                found.append(b"")  # the one that ran into the dead server
        return found

    assert rig.run(body)[-1] == b"again\n"


# -- privileges ------------------------------------------------------------------------------------------------------


def test_root_inside_has_seven_capabilities_no_new_privileges_and_a_filter(rig, shared):
    lines = dict(
        line.split(":\t") for line in says(python(rig, shared, "print(open('/proc/self/status').read())")).splitlines()
    )
    assert {lines[name] for name in ("CapPrm", "CapEff", "CapBnd")} == {"00000000000000fb"}
    assert (lines["CapAmb"], lines["NoNewPrivs"], lines["Seccomp"]) == ("0" * 16, "1", "2")


ASK = "ASK = ['-I', '-c', 'import os; print(os.geteuid())']"


def test_setuid_programs_give_nothing(rig, shared):
    code = TRY + (
        "import shutil, subprocess\n" + ASK + "\n"
        "shutil.copy(sys.executable, '/tmp/suid'); os.chmod('/tmp/suid', 0o6755)\n"
        "print(subprocess.run(['/tmp/suid', *ASK], capture_output=True, text=True).stdout)"
    )
    assert says(python(rig, shared, code)) == "0"
    if AS_ROOT:
        attack = f"import subprocess; {ASK}; print(subprocess.run(['/tmp/suid', *ASK], capture_output=True).stdout)"
        assert says(python(rig, shared, attack, user="user")) == "b'1000\\n'"


# -- the host's files, devices and network ---------------------------------------------------------------------------


def test_files_of_the_host_are_not_there(rig, shared, tmp_path):
    (tmp_path / "secret").write_text("x", encoding="utf-8")
    hidden = [str(tmp_path / "secret"), __file__, "/etc/shadow", "/sys/kernel", "/boot", "/proc/1/root/etc/shadow"]
    code = f"import os; print([p for p in {hidden!r} if os.path.exists(p)], os.listdir('/home'), os.listdir('/sys'))"
    assert says(python(rig, shared, code)) == "[] ['user'] []"


def test_links_lead_nowhere_but_into_the_sandbox(rig, shared, tmp_path):
    (tmp_path / "secret").write_text("x", encoding="utf-8")

    async def body(_: Provider) -> list[str]:
        found = []
        await shared.exec(["ln", "-s", str(tmp_path / "secret"), "/tmp/link"])
        await shared.exec(["ln", "-s", "/../../../../..", "/tmp/up"])
        for path in ("/tmp/link", f"/tmp/up{tmp_path}/secret", f"/../../..{tmp_path}/secret"):
            try:
                await shared.read(path)
                found.append("read")
            except Exception as error:
                found.append(type(error).__name__)
        await shared.write("/tmp/up/etc/from-inside", b"x")
        return found

    assert rig.run(body) == ["SandboxFileError"] * 3
    assert not os.path.exists("/etc/from-inside")


def test_a_pipe_in_place_of_a_file_does_not_hang_the_agent(rig, shared):
    async def body(_: Provider) -> list[str]:
        await shared.exec(["mkfifo", "/tmp/pipe"])
        found = []
        for call in (
            lambda: shared.read("/tmp/pipe"),
            lambda: shared.write("/tmp/pipe", b"x"),
            lambda: shared.read("/dev/zero"),
        ):
            try:
                await call()
            except Exception as error:
                found.append(type(error).__name__)
        return found

    assert rig.run(body) == ["SandboxFileError"] * 3


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
    assert lines[0] == "loopback"
    assert lines[1].startswith("['lo'")
    assert lines[2:] == ["ENETUNREACH", "ENETUNREACH", "EAFNOSUPPORT EAFNOSUPPORT EPERM"]


# -- isolation that is not enough ------------------------------------------------------------------------------------


def test_a_machine_that_isolates_less_than_the_minimum_starts_nothing(tmp_path):
    settings = {"minimum_isolation": IsolationLevel.OWN_KERNEL}

    async def body(provider: Provider) -> None:
        name = new_id()
        with pytest.raises(IsolationError, match=r"at least own_kernel.*the gVisor backend"):
            await start(provider, id=name)
        ends = await provider.list()
        assert [one.sandbox_id for one in ends if one.death is None] == []

    if reason := why_no_namespaces(tmp_path / "probe"):
        pytest.skip(reason)
    with real_rig(tmp_path / "records", **settings) as rig:
        rig.run(body)
    assert list((tmp_path / "records").iterdir()) == []


def test_every_protection_of_this_backend_but_the_cgroups_holds_for_everybody(rig, shared):
    held = set(shared.protections)
    cgroups = {"memory", "pids", "cpu", "freeze"}
    others = {one.value for one in Protection} - cgroups - {"own_kernel", "virtual_machine"}
    assert others - {"landlock"} <= held
    assert shared.isolation >= IsolationLevel.HARDENED


@needs_root
def test_what_is_written_for_a_user_follows_none_of_their_links_to_what_only_root_may_write(rig):
    plant = (
        "set -e; cd /home/user; ln -s /etc/passwd out; ln -s /etc dir; ln -s /workspace own; ln -s /root/new dangling\n"
        "ln /usr/local/hard hard 2>/dev/null || true; mkdir real; ln -s real also"
    )

    async def body(provider: Provider) -> None:
        alone = await start(provider)
        await alone.write("/usr/local/hard", b"root's\n", mode=0o644)
        assert (await alone.exec(["sh", "-c", plant], user="user")).exit_code == 0
        before = (
            await alone.exec(["sh", "-c", "find /etc/passwd /etc -maxdepth 0 -printf '%u %m ' && cat /etc/passwd"])
        ).stdout
        for path in ("/home/user/out", "/home/user/dir/passwd", "/home/user/dir/new", "/home/user/dangling"):
            with pytest.raises(SandboxFileError):
                await alone.write(path, b"mine\n", user="user")
        for path in ("/home/user/dir/made/here", "/home/user/dir/made"):
            with pytest.raises(SandboxFileError):
                await alone.make_dir(path, user="user")
        with suppress(SandboxFileError):
            await alone.write("/home/user/hard", b"mine\n", user="user")
        assert await alone.read("/usr/local/hard") == b"root's\n"
        after = (
            await alone.exec(["sh", "-c", "find /etc/passwd /etc -maxdepth 0 -printf '%u %m ' && cat /etc/passwd"])
        ).stdout
        assert after == before
        assert (await alone.exec(["sh", "-c", "ls -A /root"])).stdout == b""
        # Their own links to where they may write are followed, and a plain path is written wherever it is.
        await alone.write("/home/user/own/a", b"1", user="user")
        await alone.write("/home/user/also/b/c", b"2", user="user")
        await alone.write("/srv/of/user/file", b"3", user="user")
        assert await alone.make_dir("/srv/of/other/deep", user="user")
        made = (
            "/workspace/a",
            "/home/user/real/b",
            "/home/user/real/b/c",
            "/srv/of",
            "/srv/of/user/file",
            "/srv/of/other/deep",
        )
        assert (await alone.exec(["find", *made, "-maxdepth", "0", "-printf", "%u "])).stdout.split() == [b"user"] * 6
        # The agent is as closed as before.
        found = await alone.run_python(TRY + "print(attempt(lambda: open('/proc/1/mem', 'rb')))")
        assert found.stdout.strip() in (b"EACCES", b"EPERM")
        await alone.kill()

    rig.run(body)
