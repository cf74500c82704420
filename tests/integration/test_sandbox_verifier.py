"""A verifier after a rollout that tampers: the verdict is the true one, or there is a typed refusal, and never a lie.

    in place    a file that only root may write, run by root in the rollout's sandbox by `python3 -I`
    warm        the same by `run_python`
    restored    in place, in a sandbox of a snapshot: the files are the rollout's, no process of it runs
    fresh       the answer alone is read, and judged in a sandbox that the rollout never had

A rollout that was root inside can lie to all but the last; that is shown too, as the control of these attacks.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from rollmill.errors import SandboxError
from rollmill.sandboxes import ExecResult, Lease, Provider, Sandbox
from sandbox_attacks import VERIFIER_ATTACKS, Attack
from sandbox_builders import RealRig, new_id, real_rig, start, why_no_namespaces

pytestmark = [pytest.mark.integration, pytest.mark.slow]

AS_ROOT = os.geteuid() == 0
ROLLOUT = "user" if AS_ROOT else None
EXPECTED = f"expected-{uuid.uuid4().hex}"
VERIFIER = f"""
import sys
source = sys.stdin.buffer if sys.argv[1:] == ["-"] else open("/workspace/answer", "rb")
print("right" if source.read(1000).strip() == {EXPECTED.encode()!r} else "wrong")
"""
PLACE = "/root/verify.py"
LIMIT_S, HANGS_S = 20.0, 0.7
NO_TRUST = ("fresh",)
WAYS = ("in place", "warm", "restored", *NO_TRUST)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRig]:
    if reason := why_no_namespaces(tmp_path_factory.mktemp("probe")):
        pytest.skip(f"no namespace sandboxes here: {reason}")
    with real_rig(tmp_path_factory.mktemp("records")) as rig:
        yield rig


def told(result: ExecResult) -> str:
    if result.timed_out or result.killed_by:
        return f"refused: {result.killed_by}"
    if result.exit_code != 0:
        return f"refused: it ended with {result.exit_code}"
    return result.stdout.decode("utf-8", "replace").strip()


async def in_place(sandbox: Sandbox, limit_s: float) -> str:
    await sandbox.write(PLACE, VERIFIER.encode(), mode=0o600)
    return told(await sandbox.exec(["python3", "-I", PLACE], timeout_s=limit_s))


async def verdict(provider: Provider, sandbox: Sandbox, way: str, *, limit_s: float) -> str:
    """Return what the verifier says, or which typed refusal there was."""
    made: list[Sandbox] = []
    try:
        if way == "in place":
            return await in_place(sandbox, limit_s)
        if way == "warm":
            return told(await sandbox.run_python(VERIFIER, timeout_s=limit_s))
        if way == "restored":
            ref = await sandbox.snapshot(id=new_id(), stop_processes=True)
            made.append(await provider.restore(ref, id=new_id(), lease=Lease(owner="test")))
            await provider.delete_snapshots([ref.snapshot_id])
            return await in_place(made[0], limit_s)
        answer = await sandbox.read("/workspace/answer", max_bytes=1 << 20)
        made.append(await start(provider))
        await made[0].write(PLACE, VERIFIER.encode(), mode=0o600)
        return told(await made[0].exec(["python3", "-I", PLACE, "-"], stdin=answer, timeout_s=limit_s))
    except SandboxError as error:
        return f"refused: {type(error).__name__}"
    finally:
        for one in made:
            await one.kill()


def judge(
    rig: RealRig, code: str, *, user: str | None, ways: tuple[str, ...], limit_s: float = LIMIT_S
) -> dict[str, str]:
    """Return the verdict by each way, after a rollout that ran this code."""

    async def body(provider: Provider) -> dict[str, str]:
        sandbox = await start(provider)
        await sandbox.write("/workspace/answer", b"41\n", user=user)
        played = await sandbox.exec(["python3", "-c", code], user=user, cwd="/workspace", timeout_s=30.0)
        assert b"Traceback" not in played.stderr, played.stderr.decode()
        found = {way: await verdict(provider, sandbox, way, limit_s=limit_s) for way in ways}
        if sandbox.death is None:
            await sandbox.kill()
        return found

    return rig.run(body)


def is_no_lie(said: str) -> bool:
    return said == "wrong" or said.startswith("refused: ")


def test_an_honest_answer_is_found_right_by_every_way(rig):
    code = f"open('/workspace/answer', 'w').write({EXPECTED!r})"
    assert judge(rig, code, user=ROLLOUT, ways=WAYS) == dict.fromkeys(WAYS, "right")


@pytest.mark.parametrize("attack", VERIFIER_ATTACKS, ids=lambda one: one.name)
@pytest.mark.skipif(not AS_ROOT, reason="a plain user's sandboxes have one user, who is the rollout's")
def test_a_user_inside_cannot_make_the_verifier_lie(rig: RealRig, attack: Attack) -> None:
    hangs = "pipe" in attack.name
    found = judge(rig, attack.program({}), user=ROLLOUT, ways=WAYS, limit_s=HANGS_S if hangs else LIMIT_S)
    assert {way: said for way, said in found.items() if not is_no_lie(said)} == {}
    assert found["restored"] == "wrong" or hangs or "space" in attack.name, found


@pytest.mark.parametrize("attack", VERIFIER_ATTACKS, ids=lambda one: one.name)
def test_even_root_inside_cannot_make_a_verifier_elsewhere_lie(rig: RealRig, attack: Attack) -> None:
    found = judge(rig, attack.program({}), user=None, ways=NO_TRUST)
    assert {way: said for way, said in found.items() if not is_no_lie(said)} == {}


@pytest.mark.skipif(not AS_ROOT, reason="a plain user cannot change the programs of the host's own directories")
@pytest.mark.parametrize("word", ["replace python3", "plant Python modules", "leave a daemon"])
def test_as_root_inside_the_same_code_makes_a_verifier_beside_it_lie_or_fail(rig: RealRig, word: str) -> None:
    (attack,) = (one for one in VERIFIER_ATTACKS if one.name.startswith(word))
    found = judge(rig, attack.program({}), user=None, ways=("in place",))
    assert found["in place"] != "wrong"
