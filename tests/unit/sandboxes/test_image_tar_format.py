"""Archives: what is read as it is meant, and what is refused because readers would differ."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest

from image_builders import END, device, directory, file, hard_link, link, raw_file, raw_tar, tar
from rollmill.errors import ImageError
from rollmill.sandboxes.images.entries import Entry, Kind
from rollmill.sandboxes.images.refusals import Refusal
from rollmill.sandboxes.images.tar_format import TarReader, encode_header


def read(data: bytes) -> list[tuple[Entry, bytes]]:
    return [(entry, body.read()) for entry, body in TarReader(io.BytesIO(data))]


def refusal_of(data: bytes) -> Refusal:
    with pytest.raises(ImageError) as caught:
        read(data)
    return Refusal(caught.value.reason)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_form_of_the_standard_library_is_read(format):
    long_name = "a/" + "n" * 90
    data = tar(
        directory("a", mode=0o1777),
        file(long_name, b"content", mode=0o640, uid=7, gid=8, mtime=1_700_000_000),
        link("l", "a/x"),
        hard_link("h", long_name),
        device("d", major=5, minor=1),
        format=format,
    )
    found = read(data)
    assert [(entry.path.rstrip(b"/"), entry.kind, body) for entry, body in found] == [
        (b"a", Kind.DIRECTORY, b""),
        (long_name.encode(), Kind.FILE, b"content"),
        (b"l", Kind.SYMBOLIC_LINK, b""),
        (b"h", Kind.HARD_LINK, b""),
        (b"d", Kind.CHARACTER_DEVICE, b""),
    ]
    plain = found[1][0]
    assert (plain.mode, plain.uid, plain.gid, plain.mtime_ns) == (0o640, 7, 8, 1_700_000_000 * 10**9)
    assert (found[2][0].link, found[3][0].link, found[4][0].device) == (b"a/x", long_name.encode(), (5, 1))


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_large_owners_and_fractions_of_seconds_are_read(format):
    name = "d/" * 60 + "n" * 200
    ((entry, _), _) = read(tar(file(name, uid=3_000_000), link("l", "t" * 300), format=format))
    assert (entry.path, entry.uid) == (name.encode(), 3_000_000)
    (fraction,) = read(tar(file("f", mtime=1.25), format=tarfile.PAX_FORMAT))
    assert fraction[0].mtime_ns == 1_250_000_000


def test_names_that_are_no_utf_8_are_kept_byte_by_byte():
    path, target = b"n\xff\xfe/" + b"\x80" * 120, b"\xc3\x28" * 60
    entries = [raw_file(path, b"x"), (Entry(path=b"l\xff", kind=Kind.SYMBOLIC_LINK, link=target), b"")]
    assert read(raw_tar(entries)) == entries
    with tarfile.open(fileobj=io.BytesIO(raw_tar(entries))) as theirs:
        assert [one.name.encode("utf-8", "surrogateescape") for one in theirs] == [path, b"l\xff"]


def test_attributes_and_times_before_1970_survive_our_own_form():
    entry = Entry(
        path=b"f",
        kind=Kind.FILE,
        size=1,
        mode=0o7777,
        uid=2**31,
        gid=2**21,
        mtime_ns=-1_500_000_001,
        xattrs=((b"user.a", b"\0=\n\xff"), (b"user.b", b"")),
    )
    assert read(raw_tar([(entry, b"x")])) == [(entry, b"x")]


def test_a_size_above_8_gib_goes_through_the_header():
    entry = Entry(path=b"big", kind=Kind.FILE, size=9 * 1024**3)
    (found, _) = next(iter(TarReader(io.BytesIO(encode_header(entry)))))
    assert found.size == 9 * 1024**3


def cut(data: bytes, at: int) -> bytes:
    return data[:at]


def changed(data: bytes, at: int, new: bytes, *, sum_again: bool = True) -> bytes:
    """Overwrite some bytes of the first header, with a checksum that fits."""
    block = bytearray(data[:512])
    block[at : at + len(new)] = new
    if sum_again:
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + data[512:]


ONE = tar(file("name", b"x" * 1000), format=tarfile.USTAR_FORMAT)


@pytest.mark.parametrize("at", [0, 1, 300, 512, 700, 1535, 1536, 1700])
def test_an_archive_that_stops_anywhere_before_its_end_is_truncated(at):
    # 512 header + 1,000 content + 24 padding = 1,536, then the closing zeros.
    assert refusal_of(cut(ONE, at)) is Refusal.TRUNCATED


def test_one_closing_block_at_the_end_is_enough():
    assert len(read(cut(ONE, 1536 + 512))) == 1


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (changed(ONE, 0, b"m", sum_again=False), Refusal.MALFORMED),
        (changed(ONE, 124, b"zzzz"), Refusal.MALFORMED),
        (changed(ONE, 124, b"\xff" * 12), Refusal.MALFORMED),
        (changed(ONE, 124, b"\x80" + b"\xff" * 11), Refusal.MALFORMED),
        (changed(ONE, 156, b"S"), Refusal.SPARSE),
        (changed(ONE, 156, b"V"), Refusal.MALFORMED),
        (changed(ONE, 156, b"2"), Refusal.MALFORMED),
        (changed(ONE, 156, b"1"), Refusal.MALFORMED),
        (changed(ONE, 156, b"5"), Refusal.MALFORMED),
        (ONE[:1536] + bytes(512) + ONE, Refusal.MALFORMED),
    ],
    ids=["checksum", "octal", "negative", "huge", "sparse", "volume", "link", "hard-link", "directory", "after-end"],
)
def test_headers_that_readers_would_take_differently_are_refused(data, kind):
    assert refusal_of(data) is kind


def pax(records: bytes, *, flag: bytes = b"x") -> bytes:
    header = changed(tar(file("p", records), format=tarfile.USTAR_FORMAT), 156, flag)
    return header[: 512 + -(-len(records) // 512) * 512] + ONE


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (pax(b"9 path=ab"), Refusal.MALFORMED),
        (pax(b"99 path=a\n"), Refusal.MALFORMED),
        (pax(b"x path=a\n"), Refusal.MALFORMED),
        (pax(b"0 \n"), Refusal.MALFORMED),
        (pax(b"11 size=-1\n"), Refusal.MALFORMED),
        (pax(b"12 mtime=1e\n"), Refusal.MALFORMED),
        (pax(b"22 GNU.sparse.major=1\n"), Refusal.SPARSE),
        (pax(b"10 path=a\n", flag=b"g"), Refusal.MALFORMED),
        (pax(b"22 GNU.sparse.major=1\n", flag=b"g"), Refusal.MALFORMED),
        (pax(b"10 path=a\n")[:1024] + pax(b"10 path=b\n"), Refusal.MALFORMED),
        (pax(b"a" * (1024**2 + 1)), Refusal.MALFORMED),
        (pax(b"10 path=a\n")[:1024] + END, Refusal.TRUNCATED),
    ],
)
def test_extended_headers_that_cannot_be_trusted_are_refused(data, kind):
    assert refusal_of(data) is kind


def test_a_global_comment_as_git_writes_it_does_no_harm():
    assert len(read(pax(b"14 comment=ab\n", flag=b"g"))) == 1


def test_a_global_header_gives_owners_and_times_until_an_entry_has_its_own():
    told = pax(b"9 uid=77\n9 gid=78\n11 mtime=5\n", flag=b"g")[:1024]
    plain = tar(file("a"), format=tarfile.USTAR_FORMAT)[:512]
    own = Entry(path=b"b", kind=Kind.FILE, uid=2**22)
    found = [entry for entry, _ in read(told + plain + raw_tar([(own, b"")]))]
    assert [(one.uid, one.gid, one.mtime_ns) for one in found] == [(77, 78, 5 * 10**9), (2**22, 78, 5 * 10**9)]


def long_name(size: int, *, flag: bytes = b"L") -> bytes:
    name = b"n" * size + b"\0"
    header = changed(tar(file("l", name), format=tarfile.USTAR_FORMAT), 156, flag)
    return header[: 512 + -(-len(name) // 512) * 512]


def test_long_names_are_bounded_and_come_once():
    assert refusal_of(long_name(5000) + ONE) is Refusal.NAME
    assert refusal_of(long_name(200) + long_name(200) + ONE) is Refusal.MALFORMED
    assert read(long_name(200) + ONE)[0][0].path == b"n" * 200


def test_an_entry_is_skipped_when_its_content_was_not_read():
    data = tar(file("a", b"1" * 5000), file("b", b"2"))
    names: list[Any] = []
    for entry, body in TarReader(io.BytesIO(data)):
        body.read(10)
        names.append(entry.path)
    assert names == [b"a", b"b"]
