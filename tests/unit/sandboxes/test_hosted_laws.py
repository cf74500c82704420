"""Laws of hosted backends: marks, streams in pieces, headers, exit codes, and examples in docstrings."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import itertools
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmill.errors import ConfigError, ImageError, SandboxError, SandboxExhausted, SandboxFileError, SandboxRetryable
from rollmill.sandboxes import HostImage, IsolationLevel, Lease, Limits, NamedImage, SandboxSpec, SandboxState
from rollmill.sandboxes.backends.daytona.driver import DaytonaSettings
from rollmill.sandboxes.backends.docker.hijack import Frames
from rollmill.sandboxes.backends.e2b import envd
from rollmill.sandboxes.backends.e2b.connect import ConnectError, Envelopes, envelope
from rollmill.sandboxes.backends.hosted import CLAIMS, jobs, marks, shell
from rollmill.sandboxes.backends.hosted.driver import Gone, Ran, gone_if_unknown, ref_of
from rollmill.sandboxes.backends.hosted.streams import begun
from rollmill.sandboxes.backends.http import CutOff, Refused, Secret, as_retryable, retry_after_s, words_of
from rollmill.sandboxes.backends.kubernetes import claims, websocket
from rollmill.sandboxes.backends.kubernetes.driver import key_of, manifest
from rollmill.sandboxes.backends.kubernetes.settings import KubernetesSettings
from rollmill.sandboxes.backends.prime import wire
from rollmill.sandboxes.backends.prime.driver import PrimeSettings
from rollmill.sandboxes.backends.swerex import Endpoint, FixedEndpoints, SweRexSettings
from rollmill.sandboxes.backends.swerex.driver import explain
from rollmill.sandboxes.isolation import level_of

MODULES = (
    "http",
    "hosted.driver",
    "hosted.marks",
    "hosted.process",
    "hosted.shell",
    "hosted.jobs",
    "e2b.connect",
    "e2b.envd",
    "docker.hijack",
    "docker.guest",
    "docker.hardening",
    "prime.wire",
    "modal.driver",
    "kubernetes.claims",
    "kubernetes.websocket",
    "kubernetes.guest",
    "kubernetes.driver",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_work(name):
    result = doctest.testmod(importlib.import_module(f"rollmill.sandboxes.backends.{name}"))
    assert result.failed == 0
    assert result.attempted > 0


@pytest.mark.parametrize("level", list(IsolationLevel))
def test_a_claim_reaches_exactly_its_level(level):
    assert level_of(CLAIMS[level]) is level


@pytest.mark.parametrize("value", [None, 7, "", "../x", "a/b", "a?b", "-a", "x" * 129])
def test_what_could_lead_an_address_astray_is_no_name_of_a_sandbox(value):
    with pytest.raises(SandboxError, match="cannot be a vendor's name"):
        ref_of(value)


# -- marks -----------------------------------------------------------------------------------------------------------

NAMES = st.text("abcdefghij-_.", min_size=1, max_size=12).filter(lambda name: not name.startswith("rollmill-"))


@given(
    labels=st.dictionaries(NAMES, st.text(max_size=20), max_size=4),
    owner=st.text(max_size=20),
    rollout=st.text(max_size=20),
    generation=st.integers(0, 10**6),
    ttl_s=st.floats(0.001, 1e6),
    pids=st.integers(2, 10**6),
    wall_s=st.floats(0.1, 1e6),
)
def test_what_is_marked_on_a_sandbox_is_read_back(labels, owner, rollout, generation, ttl_s, pids, wall_s):
    spec = SandboxSpec(limits=Limits(pids=pids, wall_s=wall_s), image=NamedImage(name="x"))
    lease = Lease(owner=owner, ttl_s=ttl_s, rollout_id=rollout, generation=generation, policy_version=3)
    stamp = marks.decode(marks.encode(spec, id="a", labels=labels, lease=lease, now_wall_s=1000.0))
    assert stamp is not None
    assert (stamp.sandbox_id, stamp.labels, stamp.lease, stamp.limits) == ("a", labels, lease, spec.limits)
    assert stamp.digest == marks.digest_of(spec)
    assert stamp.ends_wall_s == pytest.approx(1000.0 + wall_s, abs=0.001)


@given(st.dictionaries(st.sampled_from([marks.ID, marks.OWNER, marks.RECORD, marks.SPEC, "x"]), st.text(max_size=30)))
def test_marks_of_somebody_else_or_damaged_ones_are_none_and_never_an_error(found):
    stamp = marks.decode(found)
    assert stamp is None or stamp.sandbox_id == found[marks.ID] != ""


def test_limits_that_differ_make_another_digest():
    one, other = SandboxSpec(), SandboxSpec(limits=Limits(pids=41))
    assert marks.digest_of(one) == marks.digest_of(SandboxSpec())
    assert marks.digest_of(one) != marks.digest_of(other)


def test_an_adopted_sandbox_has_the_limits_of_its_marks_or_the_usual_ones():
    stamp = marks.decode({marks.ID: "a", marks.OWNER: "me"})
    assert stamp is not None
    assert (stamp.limits, stamp.ends_wall_s) == (Limits(), float("inf"))


# -- HTTP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("0", 0.0), ("-3", 0.0), ("1.5", 1.5), ("9999", 600.0), ("inf", None), ("nan", None), ("", None), (None, None)],
)
def test_retry_after_is_bounded_and_nonsense_is_nothing(value, seconds):
    assert retry_after_s(value, now_wall_s=0.0) == seconds


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ""),
        (b"plain", "plain"),
        (b'{"detail": "x"}', "x"),
        (b'{"error": {"message": "deep"}}', "deep"),
        (b'{"message": 7}', '{"message": 7}'),
        (b"[1]", "[1]"),
        (b"\xff" * 10_000, "\N{REPLACEMENT CHARACTER}" * 500),
    ],
)
def test_the_message_of_a_refusal_is_found_and_cut(content, words):
    assert words_of(content) == words


@pytest.mark.parametrize(
    ("status", "words", "retryable"),
    [
        (429, "", True),
        (503, "", True),
        (403, "Total CPU limit exceeded", True),
        (402, "quota exceeded", True),
        (400, "disk quota reached", True),
        (400, "bad field", False),
        (404, "quota", False),
        (500, "", False),
    ],
)
def test_no_room_is_retryable_and_a_bad_request_is_not(status, words, retryable):
    error = as_retryable(Refused("x", status=status, words=words), product="P", what="a sandbox")
    assert isinstance(error, SandboxRetryable) is retryable


# -- streams in pieces -----------------------------------------------------------------------------------------------


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in itertools.pairwise(edges)]


PLACES = st.lists(st.integers(0, 10**6), max_size=8)


@given(messages=st.lists(st.dictionaries(st.text(max_size=3), st.integers()), max_size=5), places=PLACES)
def test_messages_of_a_stream_come_whole_however_it_is_cut(messages, places):
    data = b"".join(envelope(one) for one in messages) + b"\x02\0\0\0\x02{}"
    whole = Envelopes()
    assert [one for piece in cut(data, places) for one in whole.feed(piece)] == messages
    assert whole.ended


def test_an_error_at_the_end_of_a_stream_is_raised_with_its_kind():
    words = b'{"error":{"code":"not_found","message":"no such user"}}'
    with pytest.raises(ConnectError, match="no such user") as raised:
        Envelopes().feed(b"\x02" + struct.pack(">I", len(words)) + words)
    assert raised.value.kind == "not_found"


@pytest.mark.parametrize("data", [b"\x01\0\0\0\x01x", b"\0\xff\xff\xff\xffx", b"\0\0\0\0\x01x"])
def test_a_stream_that_is_compressed_endless_or_no_json_is_refused(data):
    with pytest.raises(SandboxError):
        Envelopes().feed(data)


@given(pieces=st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=20)), max_size=6), places=PLACES)
def test_frames_of_a_container_come_whole_however_they_are_cut(pieces, places):
    data = b"".join(struct.pack(">BxxxI", number, len(piece)) + piece for number, piece in pieces)
    frames = Frames()
    found = [one for piece in cut(data, places) for one in frames.feed(piece)]
    assert found == [("stdout" if number == 1 else "stderr", piece) for number, piece in pieces]


def test_what_is_no_frame_of_a_container_is_no_output():
    with pytest.raises(CutOff):
        Frames().feed(b"HTTP/1.1 200 OK")


@given(code=st.integers(-(2**31), 2**31 - 1), out=st.binary(max_size=300), places=PLACES)
def test_events_of_a_command_session_come_whole_however_they_are_cut(code, out, places):
    zigzag = (code << 1) ^ (code >> 63)
    end = wire.field(1, wire.field(3, b"\x08" + wire.varint(zigzag & (2**64 - 1))))
    data = wire.field(1, wire.field(2, wire.field(1, out)))
    stream = b"".join(struct.pack(">BI", 0, len(one)) + one for one in (data, end)) + b"\x02\0\0\0\x02{}"
    events = wire.Events()
    for piece in cut(stream, places):
        events.feed(piece)
    assert (events.stdout, events.exit_code, events.last) == (out, code, b"{}")


@given(st.binary(max_size=40))
def test_bytes_that_are_no_message_are_an_error_and_never_a_crash(data):
    with contextlib.suppress(SandboxError):
        list(wire.fields(data))


@given(data=st.binary(max_size=70_000), mask=st.binary(min_size=4, max_size=4))
def test_a_masked_frame_unmasks_to_what_was_sent(data, mask):
    sent = websocket.frame(2, data, mask=mask)
    head = 6 if len(data) < 126 else 8 if len(data) < 65_536 else 14
    assert bytes(byte ^ mask[i % 4] for i, byte in enumerate(sent[head:])) == data


# -- programs and files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ({"exitCode": 7, "status": "exit status 7"}, 7),
        ({"exitCode": -1, "status": "signal: segmentation fault (core dumped)"}, -11),
        ({"exitCode": -1, "status": "signal: terminated"}, -15),
        ({"exitCode": -9}, -9),
        ({"exitCode": -1, "status": "signal: unheard of"}, -1),
    ],
)
def test_envds_words_for_a_signal_are_its_number(end, code):
    assert envd.exit_code_of(end) == code


@pytest.mark.parametrize(
    ("ran", "kind", "words"),
    [
        (Ran(code=44), SandboxFileError, "/f is missing"),
        (Ran(code=45), SandboxFileError, "/f is a directory"),
        (Ran(code=48, err=b"cat: write error: No space left on device"), SandboxExhausted, "no room for /f"),
        (Ran(code=48, err=b"Permission denied"), SandboxFileError, "refused.*Permission denied"),
    ],
)
def test_exit_codes_of_file_scripts_are_typed_errors(ran, kind, words):
    with pytest.raises(kind, match=words):
        raise shell.file_error("/f", ran)


def test_a_list_that_was_cut_off_keeps_the_entries_that_are_whole():
    found = shell.parse_list(b"./a/81a4 5 7 0 0\n./b/81a4 5")
    assert [one.name for one in found] == ["a"]


@pytest.mark.parametrize("text", [b"", b"x", b"0 1 2 3\n.\n.\n", b"0 1 2 3 4\n!\n.\n.\n"])
def test_a_look_that_is_none_is_an_error_with_what_was_seen(text):
    with pytest.raises(SandboxError, match="no look returns"):
        jobs.parse_look(text)


def test_an_exception_of_a_runtime_is_told_by_its_name_and_never_made():
    content = msgspec.json.encode({"swerexception": {"message": "boo", "class_path": "os.system", "extra_info": {}}})
    error = explain(Refused("x", status=511, words="", content=content))
    assert type(error) is SandboxError
    assert "system" in str(error)
    late = msgspec.json.encode({"swerexception": {"class_path": "swerex.exceptions.CommandTimeoutError"}})
    assert isinstance(explain(Refused("x", status=511, words="", content=late)), CutOff)


async def test_a_runtime_is_handed_out_once_unless_it_may_be_used_again():
    one = Endpoint(url="http://a", token=Secret("t"))
    for reuse in (False, True):
        pool = FixedEndpoints([one], reuse=reuse)
        assert await pool.start(id="x", image=HostImage()) is one
        with pytest.raises(SandboxRetryable):
            await pool.start(id="y", image=HostImage())
        await pool.stop(one)
        if reuse:
            assert await pool.start(id="y", image=HostImage()) is one
        else:
            with pytest.raises(SandboxRetryable):
                await pool.start(id="y", image=HostImage())
    with pytest.raises(ImageError):
        await pool.start(id="z", image=NamedImage(name="n"))
    with pytest.raises(ConfigError):
        FixedEndpoints([one, one])


def test_a_pod_has_no_privileges_no_token_and_every_limit_that_kubernetes_knows():
    limits = Limits(memory_bytes=64 * 1024**2, disk_bytes=32 * 1024**2, cpus=0.25)
    settings = KubernetesSettings(server="http://k", runtime_class="gvisor")
    made = manifest(SandboxSpec(limits=limits), id="Run_1.x", marks={"a": "1"}, ends_wall_s=1000.2, settings=settings)
    pod = made["spec"]["podTemplate"]["spec"]
    (only,) = pod["containers"]
    amounts = {"memory": "67108864", "cpu": "250m", "ephemeral-storage": "33554432"}
    assert only["resources"] == {"limits": amounts, "requests": amounts}
    assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert only["securityContext"]["allowPrivilegeEscalation"] is False
    assert (pod["automountServiceAccountToken"], pod["hostUsers"], pod["runtimeClassName"]) == (False, False, "gvisor")
    assert made["spec"]["shutdownTime"] == "1970-01-01T00:16:41Z"
    assert made["metadata"]["name"] == f"rollmill-{key_of('Run_1.x')}"
    assert made["metadata"]["annotations"]["rollmill.io/marks"] == '{"a":"1"}'


def test_a_pod_is_one_that_kubernetes_takes():
    validate = pytest.importorskip("kubernetes_validate")
    settings = KubernetesSettings(server="http://k")
    made = manifest(SandboxSpec(), id="a", marks={}, ends_wall_s=0.0, settings=settings)
    template = made["spec"]["podTemplate"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x", **template["metadata"]},
        "spec": template["spec"],
    }
    validate.validate(pod, "1.33", strict=True)


@pytest.mark.parametrize(
    ("ready", "state", "kind"),
    [
        ({"status": "True"}, SandboxState.READY, None),
        ({}, SandboxState.STARTING, None),
        ({"status": "False", "reason": "AdoptionPending"}, SandboxState.STARTING, None),
        ({"status": "False", "reason": "WarmPoolNotFound"}, SandboxState.STARTING, ImageError),
        ({"status": "False", "reason": "TemplateNotFound"}, SandboxState.STARTING, ImageError),
        ({"status": "False", "reason": "InvalidMetadata"}, SandboxState.STARTING, SandboxError),
        ({"status": "False", "reason": "PodFailed"}, SandboxState.DEAD, None),
        ({"status": "False", "reason": "ClaimExpired"}, SandboxState.DEAD, None),
    ],
)
def test_a_claims_condition_says_where_its_sandbox_is_and_what_will_never_be(ready, state, kind):
    shown = {"status": {"sandbox": {"name": "pool-x7"}}}
    assert claims.state_of(shown, ready) is state
    found = claims.problem(ready)
    assert (None if found is None else type(found)) is kind
    assert claims.state_of({}, {"status": "True"}) is SandboxState.STARTING  # ready, and nobody says which


def test_a_cluster_that_nobody_names_is_refused_with_a_way_out(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="kubectl proxy"):
        KubernetesSettings().address()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    assert KubernetesSettings().address() == "https://[fd00::1]:443"


def refused(status: int) -> Refused:
    return Refused("no", status=status, words="no such thing")


def test_a_service_that_does_not_know_a_sandbox_has_lost_it_and_any_other_refusal_is_one():
    with pytest.raises(Gone, match="not know sandbox i-1 any more: no such"), gone_if_unknown("i-1", product="E2B"):
        raise refused(404)
    with pytest.raises(Refused, match="no"), gone_if_unknown("i-1", product="E2B"):
        raise refused(409)


def test_a_program_announces_its_process_id_before_all_that_it_writes():
    assert shell.announced(b"42\n") == (42, b"")
    assert shell.announced(b"42\n7\n") == (42, b"7\n")
    with pytest.raises(SandboxError, match="began with b'sh: not found'"):
        shell.announced(b"sh: not found\n")


@pytest.mark.parametrize("kind", [DaytonaSettings, PrimeSettings, SweRexSettings])
@pytest.mark.parametrize(("name", "value"), [("scratch", "tmp"), ("wait_s", 11.0), ("idle_s", 0.0), ("call_s", 0.0)])
def test_settings_of_jobs_that_cannot_work_are_refused_with_every_service(kind, name, value):
    with pytest.raises(ConfigError, match=name):
        kind(**{name: value})


class Beginning:
    """A program that begins, or does not."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.closed = error, False

    async def began(self) -> None:
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        self.closed = True


async def test_of_a_program_that_does_not_begin_no_connection_is_left():
    well = Beginning()
    assert await begun(well) is well
    assert not well.closed
    badly = Beginning(SandboxError("no shell"))
    with pytest.raises(SandboxError, match="no shell"):
        await begun(badly)
    assert badly.closed
