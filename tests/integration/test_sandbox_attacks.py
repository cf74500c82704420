"""Named attacks, run in namespace sandboxes, as root inside and as a user inside; none succeeds, nothing is left.

As a plain user of the host, who has one user inside, `test_sandbox_command.py` runs this file again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmill.sandboxes import Provider, Sandbox
from sandbox_attack_rig import Host, Neighbour, Node, host, run_attack
from sandbox_attacks import ATTACKS, AWAY, BARE, LIMITS, NETWORK, PROCESSES, USER, Attack
from sandbox_builders import RealRig, new_id, real_rig, start, why_no_namespaces

pytestmark = pytest.mark.integration

AS_ROOT = os.geteuid() == 0
USERS = (None, "user") if AS_ROOT else (None,)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attacks")


@pytest.fixture(scope="module")
def node(place: Path) -> Iterator[Node]:
    """The machine: once all attacks have run and the provider is closed, nothing of them may be left."""
    (place / "records").mkdir()
    node = Node()
    yield node
    assert node.words
    assert node.left(place / "records") == []


@pytest.fixture(scope="module")
def rig(node: Node, place: Path) -> Iterator[RealRig]:
    if reason := why_no_namespaces(place / "probe"):
        pytest.skip(f"no namespace sandboxes here: {reason}")
    with real_rig(place / "records") as rig:
        yield rig


@pytest.fixture(scope="module")
def target(rig: RealRig, node: Node, place: Path) -> Iterator[Host]:
    """The host that the attacks are aimed at; once all have run it must be as it was, and run another sandbox."""
    (place / "host").mkdir()
    with host(place / "host") as target:
        node.words += [target.sleep, target.neighbour]
        yield target
        rig.run(ends_all_and_starts_another)
        assert target.harm() == []


async def ends_all_and_starts_another(provider: Provider) -> None:
    await provider.kill([one.sandbox_id for one in await provider.list() if one.death is None])
    fresh = await start(provider)
    assert (await fresh.exec(["echo", "healthy"])).stdout == b"healthy\n"
    await fresh.kill()


@pytest.fixture(scope="module")
def shared(rig: RealRig, target: Host) -> Sandbox:
    """One sandbox for the attacks that leave others in peace, beside a neighbour."""
    Neighbour.begin(rig, rig.run(start), target)
    return rig.run(start)


def cases(*places: str) -> list[object]:
    """Return each attack with each user inside, but where it would ask nothing."""
    found = []
    for attack in ATTACKS:
        for user in USERS:
            where = (*places, *([] if user is None else [USER]))
            if not any(one in attack.left_out for one in where):
                marks = () if user is None else (pytest.mark.slow,)
                name = f"{attack.name} ({user or 'root'} inside)"
                found.append(pytest.param(attack, user, where, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("attack", "user", "where"), cases())
def test_the_attack_fails(
    rig: RealRig, shared: Sandbox, target: Host, attack: Attack, user: str | None, where: tuple[str, ...]
) -> None:
    attack_fails(rig, shared, target, attack, user=user, where=where)


def attack_fails(
    rig: RealRig, shared: Sandbox, target: Host, attack: Attack, *, user: str | None, where: tuple[str, ...]
) -> None:
    sandbox = rig.run(lambda provider: start(provider, id=new_id())) if attack.alone else shared
    words = run_attack(rig, sandbox, attack, target, user=user)
    assert attack.escaped(words, *where) == []
    assert target.harm() == []
    if attack.alone:
        rig.run(lambda _: sandbox.kill())


# -- a check must be able to fail -------------------------------------------------------------------------------------

UNCONTAINED = """
import fcntl, socket, struct, threading
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for name, address in ((b'lo', '127.0.0.1'), (b'lo:1', '169.254.169.254')):
    fcntl.ioctl(probe, 0x8916, struct.pack('16sH2s4s8x', name, socket.AF_INET, b'', socket.inet_aton(address)))
fcntl.ioctl(probe, 0x8914, struct.pack('16sH14x', b'lo', 0x49))
door = socket.create_server(('169.254.169.254', 80))
del name, address, probe
"""


CAP_SYS_RESOURCE = 24


def effective(capability: int) -> bool:
    """Return whether this process has a capability."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    return bool(mask >> capability & 1)


@pytest.mark.slow
@pytest.mark.skipif(not AS_ROOT, reason="only root has what is to be shown to work")
@pytest.mark.parametrize("attack", [one for one in ATTACKS if one.control == AWAY], ids=lambda one: one.name)
def test_the_same_code_succeeds_where_nothing_contains_it(target: Host, attack: Attack) -> None:
    """In namespaces to throw away, as root of the host with all its privileges: what it does there does no harm."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("there is no unshare to make namespaces with")
    program = attack.program({**target.facts, "may_harm": False})
    flags = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
    done = subprocess.run(
        [unshare, *flags, sys.executable, "-c", UNCONTAINED + program],
        capture_output=True, cwd="/", timeout=30, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    words = done.stdout.decode().split()
    assert words, done.stderr.decode()
    if set(words) <= {"ENOENT", "ENOSYS"}:
        pytest.skip("this kernel has not what is attacked")
    if not attack.escaped(words) and attack.kind == LIMITS and not effective(CAP_SYS_RESOURCE):
        pytest.skip("root of this machine has no CAP_SYS_RESOURCE itself")
    assert attack.escaped(words) != [], words
    assert target.harm() == []


@pytest.mark.slow
@pytest.mark.parametrize("attack", [one for one in ATTACKS if one.control == BARE], ids=lambda one: one.name)
def test_the_same_code_reaches_what_it_is_aimed_at_from_outside_a_sandbox_and_that_is_seen(
    tmp_path: Path, attack: Attack
) -> None:
    with host(tmp_path) as own:
        done = subprocess.run(
            [sys.executable, "-c", attack.program(own.facts)],
            capture_output=True, cwd="/", timeout=30, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert attack.escaped(done.stdout.decode().split()) != [], done
        if attack.kind in (PROCESSES, NETWORK) or "abstract" in attack.name:
            assert own.harm() != []
