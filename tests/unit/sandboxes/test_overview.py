"""Which backends work here: the law over what was found, and the probes that find it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.cli.sandbox_doctor import overview_words
from rollmill.errors import SandboxError
from rollmill.sandboxes.doctor import Diagnosis, Finding
from rollmill.sandboxes.isolation import IsolationLevel
from rollmill.sandboxes.overview import Facts, Need, Standing, Trial, judge, summed_up
from rollmill.sandboxes.overview.probes import answered, docker, hosted, tried

HERE = Need(what="the program", here=True)
AWAY = Need(what="the program", here=False, remedy="install the program")


def finding(name: str, *, holds: bool = True) -> Finding:
    return Finding(name=name, holds=holds, meaning=f"means {name}", remedy=f"get {name}")


def works(name: str, level: str, **more: object) -> Facts:
    return Facts(name=name, needs=(HERE,), trial=Trial(works=True, isolation=level, **more))  # pyright: ignore


def test_what_is_missing_is_said_with_its_remedy_and_goes_before_any_trial():
    found = judge(Facts(name="x", needs=(HERE, AWAY), trial=Trial(problem="boom")))
    assert (found.standing, found.why, found.todo) == (
        Standing.MISSING,
        "missing: the program",
        ("install the program",),
    )


def test_a_backend_that_was_not_tried_is_ready_and_never_said_to_work():
    found = judge(Facts(name="x", needs=(HERE,), untried="a call costs money"))
    assert (found.standing, found.why) == (Standing.READY, "a call costs money")
    assert summed_up([found]).strongest == ""


def test_a_trial_that_failed_is_told_in_its_own_words():
    found = judge(Facts(name="x", trial=Trial(problem="the kernel refuses it")))
    assert (found.standing, found.why) == (Standing.FAILS, "the kernel refuses it")


def test_a_trial_without_an_end_is_neither_yes_nor_no():
    found = judge(Facts(name="x", trial=Trial(unknown="60 s were over")))
    assert (found.standing, found.why) == (Standing.UNKNOWN, "60 s were over")


def test_a_working_backend_names_the_protections_that_it_lacks_and_how_to_get_them():
    findings = (finding("seccomp"), finding("memory", holds=False))
    found = judge(works("x", "hardened", findings=findings))
    assert found.standing is Standing.WORKS
    assert found.why == "a sandbox ran a program; 1 of 2 protections hold, without: memory"
    assert found.todo == ("for memory: get memory",)


def test_the_strongest_is_the_working_one_that_isolates_most():
    rows = [works("a", "capped"), works("b", "own_kernel"), works("c", "own_kernel"), Facts(name="d", needs=(AWAY,))]
    overview = summed_up([judge(one) for one in rows])
    assert overview.strongest == "b"
    assert overview.summary == "working here: a, b, c; the strongest is b, at isolation level own_kernel"


needs = st.builds(Need, what=st.just("w"), here=st.booleans(), remedy=st.just("r"))
trials = st.builds(
    Trial,
    works=st.booleans(),
    problem=st.just("p"),
    unknown=st.sampled_from(["", "u"]),
    isolation=st.sampled_from([one.name.lower() for one in IsolationLevel]),
)


@given(st.lists(needs, max_size=3).map(tuple), st.none() | trials)
def test_only_a_sandbox_that_ran_with_everything_in_place_counts_as_working(needed, trial):
    found = judge(Facts(name="x", needs=needed, trial=trial))
    ran = trial is not None and trial.works and not trial.unknown and all(one.here for one in needed)
    assert (found.standing is Standing.WORKS) == ran
    assert bool(found.todo) == (found.standing is Standing.MISSING)
    assert found.why


def test_the_text_has_a_column_for_each_working_backend():
    both = [works("a", "capped", findings=(finding("seccomp"),)), works("b", "none", findings=(finding("pids"),))]
    text = overview_words(summed_up([judge(one) for one in both]))
    assert "seccomp               yes  -    means seccomp" in text
    assert "pids                  -    yes  means pids" in text


# -- probes ------------------------------------------------------------------------------------------------------------


def test_a_trial_is_given_up_at_its_deadline():
    async def never() -> Diagnosis:
        await asyncio.Event().wait()
        raise AssertionError

    found = asyncio.run(tried(never, name="qemu", deadline_s=0.01))
    assert found.unknown.startswith("no sandbox had started, run a program and ended within 0.01 s")


def test_an_error_of_a_trial_is_its_problem():
    async def fails() -> Diagnosis:
        raise SandboxError("no room")

    assert asyncio.run(tried(fails, name="gvisor", deadline_s=1.0)) == Trial(problem="no room")


def test_what_another_users_process_says_is_read_or_explained():
    said = Diagnosis(backend="namespaces", works=True, problem="", isolation="hardened", findings=(), notes=())
    assert answered(msgspec.json.encode(said), b"") == Trial(works=True, isolation="hardened")
    assert "No module named rollmill" in answered(b"", b"python: No module named rollmill\n").unknown


def standings(environ: dict[str, str], home: Path) -> dict[str, bool]:
    return {one.name: all(need.here for need in one.needs[1:]) for one in hosted(environ, home=home)}


def test_hosted_backends_need_their_credentials_and_no_value_of_them_is_repeated(tmp_path):
    names = ("e2b", "daytona", "prime", "modal")
    assert not any(standings({}, tmp_path)[name] for name in names)
    environ = {"E2B_API_KEY": "hush", "DAYTONA_API_KEY": "hush", "PRIME_API_KEY": "hush", "MODAL_TOKEN_ID": "hush"}
    found = standings(environ, tmp_path)
    assert [found[name] for name in names] == [True, True, True, False]
    assert b"hush" not in msgspec.json.encode(hosted(environ, home=tmp_path))
    (tmp_path / ".modal.toml").write_text("")
    assert standings({}, tmp_path)["modal"]


def asked(tmp_path: Path, body: bytes) -> Facts:
    """Ask a daemon that answers every call with this."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    async def ask() -> Facts:
        path = str(tmp_path / "d.sock")
        async with await asyncio.start_unix_server(answer, path):
            return await docker(path)

    return asyncio.run(ask())


def test_a_daemon_that_answers_is_ready_for_its_version_says_so(tmp_path):
    found = asked(tmp_path, json.dumps({"Version": "27.1", "ApiVersion": "1.46"}).encode())
    assert judge(found).standing is Standing.READY
    assert "27.1" in judge(found).why


def test_a_daemon_that_is_too_old_has_to_be_updated(tmp_path):
    found = judge(asked(tmp_path, json.dumps({"Version": "19.3", "ApiVersion": "1.40"}).encode()))
    assert (found.standing, found.todo) == (Standing.MISSING, ("update it",))


@pytest.mark.parametrize("path", ["d.sock", "none.sock"])
def test_a_daemon_that_answers_nonsense_or_not_at_all_does_not_work(tmp_path, path):
    found = asked(tmp_path, b"?") if path == "d.sock" else asyncio.run(docker(str(tmp_path / path)))
    assert judge(found).standing is Standing.FAILS
    assert "Is the daemon running" in judge(found).why
