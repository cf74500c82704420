"""Messages of the service in both encodings, against the public SDK's own; envelopes; forms."""

from __future__ import annotations

import doctest
import math
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollmill.sandboxes.leases.law
import rollmill.sandboxes.service.accounts
import rollmill.sandboxes.service.connect
import rollmill.sandboxes.service.control_shapes
import rollmill.sandboxes.service.law
import rollmill.sandboxes.service.multipart
import rollmill.sandboxes.service.protobuf
import rollmill.sandboxes.service.serving
from rollmill.errors import ConfigError
from rollmill.sandboxes import DirectoryImage, HostImage, NamedImage
from rollmill.sandboxes.service import law, wire
from rollmill.sandboxes.service.connect import Codec, Envelopes, RpcProblem, codec_of, end_of_stream, envelope
from rollmill.sandboxes.service.law import Filter, HttpProblem, Listed, Standing
from rollmill.sandboxes.service.multipart import Part, boundary_of, parts_of
from rollmill.sandboxes.service.protobuf import BadProtobuf, decode, encode
from rollmill.sandboxes.service.serving import Listen
from rollmill.sandboxes.service.templates import Template, load_templates

PURE = [
    rollmill.sandboxes.leases.law,
    rollmill.sandboxes.service.accounts,
    rollmill.sandboxes.service.connect,
    rollmill.sandboxes.service.control_shapes,
    rollmill.sandboxes.service.law,
    rollmill.sandboxes.service.multipart,
    rollmill.sandboxes.service.protobuf,
    rollmill.sandboxes.service.serving,
]


@pytest.mark.parametrize("module", PURE, ids=lambda module: module.__name__)
def test_examples_in_docstrings_work(module):
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0


# -- both encodings ---------------------------------------------------------------------------------------------------

U32, I64, I32 = st.integers(0, 2**32 - 1), st.integers(-(2**63), 2**63 - 1), st.integers(-(2**31), 2**31 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=10)
NAMES = st.dictionaries(TEXT, TEXT, max_size=3)
CONFIG = st.builds(wire.ProcessConfig, cmd=TEXT, args=st.lists(TEXT).map(tuple), envs=NAMES, cwd=st.none() | TEXT)
SELECTOR = st.builds(wire.Selector, pid=U32) | st.builds(wire.Selector, tag=TEXT)
MOMENT = st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
ENTRY = st.builds(
    wire.EntryInfo,
    name=TEXT,
    type=st.sampled_from(wire.FileType),
    size=I64,
    mode=U32,
    modified_time=st.none() | MOMENT,
    symlink_target=st.none() | TEXT,
    metadata=NAMES,
    is_symlink=st.booleans(),
)
EVENT = st.one_of(
    st.builds(wire.ProcessEvent, start=st.builds(wire.StartEvent, pid=U32)),
    st.builds(wire.ProcessEvent, data=st.builds(wire.DataEvent, stdout=st.binary())),
    st.builds(wire.ProcessEvent, data=st.builds(wire.DataEvent, pty=st.binary())),
    st.builds(
        wire.ProcessEvent,
        end=st.builds(wire.EndEvent, exit_code=I32, exited=st.booleans(), status=TEXT, error=st.none() | TEXT),
    ),
    st.just(wire.ProcessEvent(keepalive=wire.Empty())),
)
MESSAGES: list[tuple[str, str, Any]] = [
    ("process", "StartRequest", st.builds(wire.StartRequest, process=CONFIG, tag=TEXT, stdin=st.booleans())),
    ("process", "StartResponse", st.builds(wire.ProcessReply, event=EVENT)),
    ("process", "ConnectRequest", st.builds(wire.SelectRequest, process=SELECTOR)),
    (
        "process",
        "SendInputRequest",
        st.builds(wire.InputRequest, process=SELECTOR, input=st.builds(wire.ProcessInput, stdin=st.binary())),
    ),
    (
        "process",
        "UpdateRequest",
        st.builds(
            wire.UpdateRequest,
            process=SELECTOR,
            pty=st.builds(wire.Pty, size=st.builds(wire.PtySize, cols=U32, rows=U32)),
        ),
    ),
    (
        "process",
        "StreamInputRequest",
        st.builds(wire.StreamedInput, start=st.builds(wire.SelectRequest, process=SELECTOR))
        | st.builds(
            wire.StreamedInput,
            data=st.builds(wire.InputData, input=st.builds(wire.ProcessInput, pty=st.binary())),
        ),
    ),
    (
        "process",
        "SendSignalRequest",
        st.builds(wire.SignalRequest, process=SELECTOR, signal=st.sampled_from(wire.Signal)),
    ),
    ("filesystem", "ListDirResponse", st.builds(wire.ListDirResponse, entries=st.lists(ENTRY, max_size=3).map(tuple))),
    ("filesystem", "MoveRequest", st.builds(wire.MoveRequest, source=TEXT, destination=TEXT)),
    (
        "filesystem",
        "GetWatcherEventsResponse",
        st.builds(
            wire.WatcherEvents,
            events=st.lists(st.builds(wire.FileEvent, name=TEXT, type=st.sampled_from(wire.EventType)), max_size=3).map(
                tuple
            ),
        ),
    ),
]


@pytest.mark.parametrize(("package", "name", "messages"), MESSAGES, ids=lambda one: one if isinstance(one, str) else "")
def test_a_message_survives_both_encodings_as_the_public_sdk_reads_and_writes_them(package, name, messages):
    module = pytest.importorskip(f"e2b.envd.{package}.{package}_pb", reason="E2B's SDK is not installed")
    theirs_of = getattr(module, name)

    @given(messages)
    @settings(max_examples=20, deadline=None)
    def survives(message: wire.Message) -> None:
        kind = type(message)
        binary, text = encode(message), Codec("json", False).encode(message)
        assert decode(binary, kind) == message
        assert Codec("json", False).decode(text, kind) == message
        theirs = theirs_of.from_binary(binary)
        assert theirs == theirs_of.from_json(text.decode())
        assert decode(theirs.to_binary(), kind) == message
        assert Codec("json", False).decode(theirs.to_json().encode(), kind) == message

    survives()


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_message_or_an_error_of_ours(data):
    for kind in (wire.StartRequest, wire.ProcessReply, wire.ListDirResponse):
        try:
            decode(data, kind)
        except BadProtobuf:
            continue


def test_fields_that_are_not_known_are_passed_over():
    # field 99: a varint, field 98: 8 bytes, field 97: 4 bytes, field 96: a string; then cols (1) = 80.
    data = bytes.fromhex("98060191060102030405060708" + "8d0601020304" + "8206027878" + "0850")
    assert decode(data, wire.PtySize) == wire.PtySize(cols=80)
    assert Codec("json", False).decode(b'{"cols": 80, "later": [1]}', wire.PtySize) == wire.PtySize(cols=80)


# -- envelopes --------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=20), max_size=5), st.lists(st.integers(1, 7), min_size=1, max_size=5))
@settings(deadline=None)
def test_envelopes_come_out_whole_however_the_stream_was_cut(messages, cuts):
    stream = b"".join(map(envelope, messages)) + end_of_stream()
    envelopes, found, at = Envelopes(), [], 0
    while at < len(stream):
        size = cuts[at % len(cuts)]
        found += envelopes.feed(stream[at : at + size])
        at += size
    envelopes.check_empty()
    assert found == messages


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x01\x00\x00\x00\x01x", "unimplemented"),
        (b"\x00\xff\xff\xff\xff", "resource_exhausted"),
        (b"\x00\x00\x00\x00\x05ab", "invalid_argument"),
    ],
)
def test_a_stream_that_is_compressed_huge_or_cut_off_is_refused(data, code):
    def read() -> None:
        envelopes = Envelopes()
        list(envelopes.feed(data))
        envelopes.check_empty()

    with pytest.raises(RpcProblem) as caught:
        read()
    assert caught.value.rpc_code == code


def test_a_content_type_that_is_not_spoken_is_none():
    assert codec_of({"content-type": "application/connect+json"}, stream=False) is None
    assert codec_of({"content-type": "application/json"}, stream=True) is None
    assert codec_of({}, stream=False) is None
    assert codec_of({"content-type": "application/proto"}, stream=False) == Codec("proto", False)
    with pytest.raises(RpcProblem, match="gzip"):
        codec_of({"content-type": "application/json", "content-encoding": "gzip"}, stream=False)


@pytest.mark.parametrize("text", ["-1", "1.5", "x", "12345678901", "\u0663"])
def test_a_deadline_that_is_no_number_of_milliseconds_is_refused(text):
    with pytest.raises(RpcProblem, match="number of milliseconds"):
        rollmill.sandboxes.service.connect.timeout_of({"connect-timeout-ms": text})


# -- forms ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(TEXT, st.binary(max_size=40)), min_size=1, max_size=4))
@settings(deadline=None)
def test_a_form_comes_apart_into_what_was_put_in(files):
    boundary = b"0123456789abcdef"
    parts = [Part(name="file", filename=name, data=data) for name, data in files]
    body = b"".join(
        b'--%b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\nContent-Type: x/y\r\n\r\n%b\r\n'
        % (boundary, _escaped(one.filename), one.data)
        for one in parts
    )
    assert parts_of(body + b"--" + boundary + b"--\r\n", boundary=boundary) == tuple(parts)


def _escaped(name: str) -> bytes:
    marks = {'"': "%22", "\r": "%0D", "\n": "%0A", "\\": "\\\\"}
    return "".join(marks.get(letter, letter) for letter in name).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--other\r\n\r\nx\r\n--other--",
        b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nno end',
        b"--b\r\nno head",
        b"--b",
    ],
)
def test_a_form_that_is_damaged_is_refused(body):
    with pytest.raises(HttpProblem) as caught:
        parts_of(body, boundary=b"b")
    assert caught.value.status == 400


def test_a_boundary_is_found_with_and_without_quotes():
    assert boundary_of("multipart/form-data; boundary=abc; charset=x") == b"abc"
    assert boundary_of("Multipart/Form-Data; charset=x; Boundary=abc") == b"abc"
    assert boundary_of("multipart/form-data") is None


# -- pages ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from(Standing)), max_size=12), st.integers(1, 5), st.booleans())
@settings(deadline=None)
def test_pages_show_everything_that_is_wanted_once_and_in_order(items, limit, newest_first):
    listed = [
        Listed(sandbox_id=f"s{number}", started_s=started_s, standing=standing, template="base", metadata={})
        for number, (started_s, standing) in enumerate(items)
    ]
    wanted = Filter(standings=(Standing.RUNNING, Standing.PAUSED), newest_first=newest_first)
    found, cursor = [], ""
    for _ in range(len(items) + 1):
        ids, cursor = law.page(listed, wanted=wanted, limit=limit, cursor=cursor)
        assert len(ids) <= limit
        found += ids
        if not cursor:
            break
    expected = sorted(
        (one for one in listed if one.standing is not Standing.ENDED),
        key=lambda one: (one.started_s, one.sandbox_id),
        reverse=newest_first,
    )
    assert found == [one.sandbox_id for one in expected]


def test_a_cursor_that_is_not_ours_is_refused():
    with pytest.raises(ValueError, match=r".*"):
        law.page([], wanted=Filter(), limit=1, cursor="!!")


# -- where and what ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "short", "with a space in it", "ünicode-ünicode-ü"])
def test_a_token_that_is_short_or_does_not_fit_a_header_is_refused(token):
    with pytest.raises(ConfigError, match="token"):
        Listen(token=token)


def test_an_address_that_others_reach_comes_with_a_warning():
    assert Listen(token="t" * 16).warnings() == ()
    assert Listen(token="t" * 16, host="::1").warnings() == ()
    assert "without TLS" in Listen(token="t" * 16, host="0.0.0.0").warnings()[0]


def test_templates_are_read_with_their_images_and_limits(tmp_path):
    path = tmp_path / "templates.toml"
    path.write_text('[templates.a]\nmemory_mib = 64\n[templates.b]\nlayers = ["/x"]\n[templates.c]\nimage = "py:3"\n')
    found = load_templates(path)
    specs = {name: template.spec(wall_s=9.0) for name, template in found.items()}
    assert [type(specs[name].image) for name in "abc"] == [HostImage, DirectoryImage, NamedImage]
    assert (specs["a"].limits.memory_bytes, specs["a"].limits.wall_s) == (64 * 1024**2, 9.0)
    assert load_templates(None) == {"base": Template()}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[templates]\n",
        "no toml [",
        "[templates.a]\nmemory = 1\n",
        "[templates.a]\nmemory_mib = 1\n",
        '[templates.a]\nlayers = ["/x"]\nimage = "y"\n',
    ],
)
def test_templates_that_say_nothing_or_what_cannot_be_are_refused(tmp_path, text):
    path = tmp_path / "templates.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_templates(path)


def test_settings_that_cannot_be_are_refused():
    from rollmill.sandboxes.service.settings import ServiceSettings

    for wrong in ({"body_s": 0.0}, {"max_sandboxes": -1}, {"paused_ttl_s": math.inf}, {"max_timeout_s": 1.0}):
        with pytest.raises(ConfigError):
            ServiceSettings(**wrong)
