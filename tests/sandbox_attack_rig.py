"""What attacks are aimed at, a host with things to steal and to break, and how it is seen that nothing was touched."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import platform
import socket
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollmill.sandboxes import ExecResult, Provider, Sandbox
from rollmill.sandboxes.guest.cgroups import PARENT_NAME, discover
from sandbox_attacks import Attack
from sandbox_builders import Rig

_LIBC = ctypes.CDLL(None, use_errno=True)
_IPC_CREAT, _IPC_RMID = 0o1000, 0
_RACE_S, _RACE_STARTS = 0.4, 12
_CLOCK_S = 2.0
_KEPT_SETTINGS = ("core_pattern", "modprobe", "poweroff_cmd", "hostname", "domainname", "sysrq", "randomize_va_space")


class Host:
    """Things of the host's that a sandbox must not reach, and how they were before.

    Attributes:
        facts: what the attacks may know of them; more than an attacker would.
    """

    def __init__(self, directory: Path) -> None:
        directory.chmod(0o755)
        name = uuid.uuid4().hex[:12]
        self.token = f"secret-{uuid.uuid4().hex}"
        self.secret = directory / "secret"
        self.secret.write_text(self.token, encoding="ascii")
        self.secret.chmod(0o644)
        self.victim = subprocess.Popen(["sleep", "4000"], start_new_session=True)
        self._doors = [socket.create_server(("127.0.0.1", 0))]
        self._abstract = f"rollmill-{name}"
        for address in (f"\0{self._abstract}", str(directory / "socket")):
            door = socket.socket(socket.AF_UNIX)
            door.bind(address)
            door.listen()
            self._doors.append(door)
        os.chmod(directory / "socket", 0o666)
        for door in self._doors:
            door.setblocking(False)
        self._key = int(name[:6], 16)
        self._segment = _LIBC.shmget(self._key, 4096, _IPC_CREAT | 0o666)
        self._shared = Path("/dev/shm", f"rollmill-{name}")
        self._shared.write_text(self.token, encoding="ascii")
        self._shared.chmod(0o644)
        self._queue = f"/rollmill-{name}"
        self._descriptor = _LIBC.mq_open(self._queue.encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
        self.mark = f"mark-{name}"
        self.neighbour = f"neighbour-{name}"
        self.sleep = str(4_000_000 + self._key)
        self.facts: dict[str, Any] = {
            "pid": self.victim.pid,
            "secret": str(self.secret),
            "token": self.token,
            "handle": handle_of(self.secret).hex(),
            "port": self._doors[0].getsockname()[1],
            "abstract": [self._abstract, self.neighbour],
            "socket": str(directory / "socket"),
            "keys": [self._key, self._key + 1],
            "shm": [self._shared.name, self.neighbour],
            "queue": self._queue,
            "mark": self.mark,
            "neighbour": self.neighbour,
            "sleep": self.sleep,
            "race_s": 0.0,
            "may_harm": True,
        }
        self._before, self._booted_s = self._state(), booted_s()

    def _state(self) -> dict[str, Any]:
        """Return what must stay as it is."""
        null = os.stat("/dev/null")
        kernel = Path("/proc/sys/kernel")
        return {
            **{one: (kernel / one).read_text() for one in _KEPT_SETTINGS if os.access(kernel / one, os.R_OK)},
            "/dev/null": (null.st_mode, null.st_uid, null.st_gid, null.st_rdev),
            "usr": [os.path.lexists(f"/usr/{one}/{self.mark}") for one in ("local", "bin")],
            "secret": self.secret.read_text(encoding="ascii"),
            "shared memory": self._shared.read_text(encoding="ascii"),
            "python": [os.stat(one).st_mtime_ns for one in ("/usr/bin/env", os.path.realpath("/proc/self/exe"))],
        }

    def harm(self) -> list[str]:
        """Return in words what was touched."""
        after = self._state()
        found = [
            f"{one}: {self._before[one]!r} became {after[one]!r}" for one in after if after[one] != self._before[one]
        ]
        if abs(booted_s() - self._booted_s) > _CLOCK_S:
            found.append(f"the clock went from {self._booted_s} s at boot to {booted_s()} s")
        if self.victim.poll() is not None:
            found.append(f"the process of the host ended with {self.victim.returncode}")
        for door in self._doors:
            with suppress(BlockingIOError):
                door.accept()[0].close()
                found.append(f"somebody connected to {door.getsockname()}")
        return found

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for door in self._doors:
            door.close()
        if self._segment >= 0:
            _LIBC.shmctl(self._segment, _IPC_RMID, None)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            _LIBC.mq_unlink(self._queue.encode())
        self._shared.unlink()


def booted_s() -> float:
    """Return when the machine was started, by the clock of today: it moves when the clock is set."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


@contextmanager
def host(directory: Path) -> Iterator[Host]:
    made = Host(directory)
    try:
        yield made
    finally:
        made.close()


def handle_of(path: Path) -> bytes:
    """Return a file's handle, as `open_by_handle_at` takes it."""
    handle = ctypes.create_string_buffer(8 + 128)
    ctypes.c_uint.from_buffer(handle).value = 128
    mount = ctypes.c_int()
    if _LIBC.name_to_handle_at(-100, os.fsencode(path), handle, ctypes.byref(mount), 0) < 0:
        if ctypes.get_errno() != errno.EOPNOTSUPP:
            raise OSError(ctypes.get_errno(), "name_to_handle_at")
        return bytes(8 + 8)  # a file system without handles
    return handle.raw[: 8 + ctypes.c_uint.from_buffer(handle).value]


NEIGHBOUR = """
name = HOST['neighbour']
import threading
one = socket.socket(socket.AF_UNIX)
one.bind(chr(0) + name)
one.listen()
call('shmget', HOST['keys'][1], 4096, 0o1000 | 0o666)
for path in ('/dev/shm/' + name, '/workspace/' + name):
    with open(path, 'w') as stream:
        stream.write(HOST['token'])
tell('there')
time.sleep(3000)
"""


class Neighbour:
    """Another sandbox, with things to steal and a process that shows its name."""

    def __init__(self, rig: Rig, sandbox: Sandbox) -> None:
        self._rig = rig
        self.sandbox = sandbox

    @classmethod
    def begin(cls, rig: Rig, sandbox: Sandbox, host: Host) -> Neighbour:
        attack = Attack(name="", kind="", source="", holds="", code=NEIGHBOUR)

        async def body(_: Provider) -> None:
            process = await sandbox.start_process(["python3", "-c", attack.program(host.facts), host.neighbour])
            async for _, data in process.output():
                assert data.split() == [b"there"]
                return

        rig.run(body)
        return cls(rig, sandbox)


def run_attack(rig: Rig, sandbox: Sandbox, attack: Attack, host: Host, *, user: str | None) -> list[str]:
    """Run an attack; return what it said. The sandbox must answer afterwards."""
    if attack.x86_64 and platform.machine() != "x86_64":
        pytest.skip("made for x86_64 alone")
    races = "race_s" in attack.code
    program = attack.program({**host.facts, "race_s": _RACE_S if races else 0.0})

    async def body(_: Provider) -> ExecResult:
        running = asyncio.ensure_future(sandbox.exec(["python3", "-c", program], user=user, cwd="/tmp", timeout_s=60.0))
        for _ in range(_RACE_STARTS if races else 0):
            await sandbox.exec(["true"], user=user)  # forks of the supervisor, to be caught before they are programs
        result = await running
        assert sandbox.death is None
        assert (await sandbox.exec(["true"])).exit_code == 0
        return result

    result = rig.run(body)
    assert b"Traceback" not in result.stderr, result.stderr.decode()
    assert host.token.encode() not in result.stdout
    return result.stdout.decode().split()


class Node:
    """What is on this machine that sandboxes could leave behind."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self._before = self._look()

    def _look(self) -> dict[str, Counter[Any]]:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        objects = [
            line.split()[0]
            for kind in ("shm", "msg", "sem")
            for line in Path("/proc/sysvipc", kind).read_text(encoding="ascii").splitlines()
        ]
        return {
            "mounts": Counter(line.split(" - ")[0].split()[4] for line in mounts),
            "objects of IPC": Counter(objects),
            "descriptors": Counter({"open": len(os.listdir("/proc/self/fd"))}),
        }

    def left(self, directory: Path) -> list[str]:
        """Return what is left: processes by words of their command lines, groups, records, mounts and the like."""
        found: list[str] = []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or [])
            if any(one in line for one in self.words) and process.pid != os.getpid():
                found.append(f"process {process.pid} {line[:100]}")
        found += [str(one) for place in discover() for one in Path(place.group, PARENT_NAME).glob(f"{os.getpid()}-*")]
        found += [str(one) for one in directory.iterdir()]
        for kind, after in self._look().items():
            found += [f"{kind}: {one}" for one in after - self._before[kind]]
        return found
