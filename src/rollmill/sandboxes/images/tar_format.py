"""The tar format, both ways: untrusted archives to entries, and entries to the one canonical archive.

Reads ustar, GNU's long names and PAX. Everything that readers of tar disagree about is refused rather than guessed:
content behind a link, sparse files, sizes below zero, a checksum that is wrong, an end that is missing. The standard
library's reader ends silently at a header that it cannot read, so it is not used here.

The canonical archive of a tree has its entries in a fixed order with nothing of the machine in them, so that its
sha256 names the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from rollmill.sandboxes.images.entries import MOST_PATH_BYTES, Entry, Kind
from rollmill.sandboxes.images.refusals import Refusal, refused, shown

BLOCK = 512
END = bytes(2 * BLOCK)
# An extended attribute may have 64 KiB; a header with a few of them is honest, one of many megabytes is not.
_MOST_HEADER_BYTES = 1024**2
_MOST_OCTAL = 0o77777777777
_MOST_SMALL = 0o7777777

_KINDS = {
    b"0": Kind.FILE,
    b"\0": Kind.FILE,
    b"7": Kind.FILE,
    b"1": Kind.HARD_LINK,
    b"2": Kind.SYMBOLIC_LINK,
    b"3": Kind.CHARACTER_DEVICE,
    b"4": Kind.BLOCK_DEVICE,
    b"5": Kind.DIRECTORY,
    b"6": Kind.FIFO,
}
_FLAGS = {kind: flag for flag, kind in reversed(_KINDS.items()) if flag not in (b"\0", b"7")}
_XATTR, _SPARSE = b"SCHILY.xattr.", b"GNU.sparse."
_GLOBAL = frozenset({b"uid", b"gid", b"mtime"})


class ByteSource(Protocol):
    """Something to read from: `read(n)` returns n bytes, less only at the end."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes, less only at the end."""
        ...


class _Extra(msgspec.Struct, kw_only=True):
    """What the headers before an entry say about it."""

    path: bytes | None = None
    link: bytes | None = None
    records: dict[bytes, bytes] = msgspec.field(default_factory=dict)


class Body:
    """The content of one entry, as far as it was not read yet."""

    def __init__(self, source: ByteSource, size: int, *, name: bytes) -> None:
        self._source = source
        self._name = name
        self.left = size

    def read(self, size: int = -1, /) -> bytes:
        """Return up to `size` bytes, all that is left for a negative one.

        Raises:
            ImageError: if the archive ends inside.
        """
        wanted = self.left if size < 0 else min(size, self.left)
        data = self._source.read(wanted)
        if len(data) < wanted:
            left = self.left - len(data)
            what = f"the archive ends inside {shown(self._name)}, {left} bytes before its end; was the copy cut off?"
            raise refused(Refusal.TRUNCATED, what)
        self.left -= len(data)
        return data


class TarReader:
    """Iterates over the entries of an archive; each body is read, or skipped, before the next entry.

    Args:
        source: where the uncompressed archive comes from.
        skip: passes over so many bytes without reading them, where the source can; `False` if it is too short.
    """

    def __init__(self, source: ByteSource, *, skip: _Skip | None = None) -> None:
        self._source = source
        self._skip_far = skip
        self._defaults: dict[bytes, bytes] = {}
        self.offset = 0

    def __iter__(self) -> Iterator[tuple[Entry, Body]]:
        """Yield entries with their content.

        Raises:
            ImageError: at whatever makes the archive none, or one that readers would read differently.
        """
        extra = _Extra()
        while (block := self._block()) is not None:
            flag = _checked(block, offset=self.offset - BLOCK)
            if flag in (b"x", b"g", b"L", b"K"):
                self._take_extra(block, flag, extra)
                continue
            entry = _entry(block, flag, extra, self._defaults)
            extra = _Extra()
            body = Body(self, entry.size, name=entry.path)
            yield entry, body
            self._skip(body.left, entry.path)
            self._skip(-entry.size % BLOCK, entry.path)
        if extra != _Extra():
            raise refused(Refusal.TRUNCATED, "the archive ends after a header that announces another entry")

    def read(self, size: int, /) -> bytes:
        """Read from the source, for bodies."""
        data = self._source.read(size)
        self.offset += len(data)
        return data

    def _block(self) -> bytes | None:
        block = self.read(BLOCK)
        if len(block) == BLOCK and block.count(0) == BLOCK:
            block = self.read(BLOCK)
            if block.count(0) == len(block):
                return None  # GNU tar writes two blocks of zeros; one that is alone at the end is taken as well
            raise refused(Refusal.MALFORMED, f"entries follow the archive's end, at byte {self.offset - BLOCK}")
        if len(block) < BLOCK:
            what = f"the archive stops at byte {self.offset} without its closing blocks; was the copy cut off?"
            raise refused(Refusal.TRUNCATED, what)
        return block

    def _take_extra(self, block: bytes, flag: bytes, extra: _Extra) -> None:
        size = _number(block[124:136], "size")
        if size > _MOST_HEADER_BYTES:
            what = f"a header of {size} bytes in the archive; most is {_MOST_HEADER_BYTES}"
            raise refused(Refusal.MALFORMED, what)
        data = Body(self, size, name=b"a header").read()
        self._skip(-size % BLOCK, b"a header")
        if flag in (b"L", b"K"):
            _take_long(data.split(b"\0", 1)[0], flag, extra)
            return
        records = _pax_records(data)
        if flag == b"x":
            if extra.records:
                raise refused(Refusal.MALFORMED, f"two headers announce one entry, at byte {self.offset}")
            extra.records.update(records)
            return
        strange = [key for key in records if key in (b"path", b"linkpath", b"size") or key.startswith(_SPARSE)]
        if strange:
            what = f"a global header gives all entries one {shown(strange[0])}, which readers take differently"
            raise refused(Refusal.MALFORMED, what)
        self._defaults.update({key: records[key] for key in _GLOBAL & records.keys()})

    def _skip(self, count: int, name: bytes) -> None:
        if count and self._skip_far is not None:
            if not self._skip_far(count):
                raise refused(Refusal.TRUNCATED, f"the archive ends inside {shown(name)}; was the copy cut off?")
            self.offset += count
            return
        body = Body(self, count, name=name)
        while body.left:
            body.read(1024**2)


class _Skip(Protocol):
    def __call__(self, count: int, /) -> bool: ...


def _take_long(value: bytes, flag: bytes, extra: _Extra) -> None:
    if len(value) > MOST_PATH_BYTES:
        raise refused(Refusal.NAME, f"a long name of {len(value)} bytes in the archive; most is {MOST_PATH_BYTES}")
    if (extra.path if flag == b"L" else extra.link) is not None:
        raise refused(Refusal.MALFORMED, "two long names for one entry of the archive")
    if flag == b"L":
        extra.path = value
    else:
        extra.link = value


def _checked(block: bytes, *, offset: int) -> bytes:
    """Return the type flag of a header whose checksum is right."""
    told = _number(block[148:156], "checksum")
    blank = block[:148] + b" " * 8 + block[156:]
    # Some old writers summed signed bytes.
    if told not in (sum(blank), sum(byte - 256 if byte > 127 else byte for byte in blank)):
        what = f"the header at byte {offset} has the checksum {told} and not {sum(blank)}; it is no tar, or damaged"
        raise refused(Refusal.MALFORMED, what)
    return block[156:157]


def _number(field: bytes, what: str) -> int:
    if field[0] & 0x80:  # GNU's form for what does not fit
        positive = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        value = int.from_bytes(field, "big", signed=True) if field[0] == 0xFF else positive
    else:
        digits = field.split(b"\0", 1)[0].strip(b" ")
        if digits.strip(b"01234567"):
            raise refused(Refusal.MALFORMED, f"the {what} of an entry is no octal number: {shown(field)}")
        value = int(digits, 8) if digits else 0
    if (value < 0 and what != "time") or value >= 2**63:
        raise refused(Refusal.MALFORMED, f"the {what} of an entry is {value}")
    return value


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    position = 0
    while position < len(data):
        digits, space, _ = data[position : position + 12].partition(b" ")
        length = int(digits) if digits.isdigit() and space else 0
        record = data[position : position + length]
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if length <= len(digits) + 1 or len(record) < length or record[-1:] != b"\n" or not equals or not key:
            raise refused(Refusal.MALFORMED, f"a PAX record of the archive cannot be read: {shown(record or data)}")
        found[key] = value
        position += length
    return found


def _entry(block: bytes, flag: bytes, extra: _Extra, defaults: dict[bytes, bytes]) -> Entry:
    records = defaults | extra.records
    path, link = _names(block, extra, records)
    if flag == b"S" or any(key.startswith(_SPARSE) for key in records):
        what = f"{shown(path)} is stored as a sparse file, which readers expand differently; pack it without --sparse"
        raise refused(Refusal.SPARSE, what)
    kind = _KINDS.get(flag)
    if kind is None:
        raise refused(Refusal.MALFORMED, f"{shown(path)} is of the type {shown(flag)}, which no image has")
    if kind is Kind.FILE and path.endswith(b"/"):
        kind = Kind.DIRECTORY  # from before directories had a type
    size = _decimal(records[b"size"], path) if records.get(b"size") else _number(block[124:136], "size")
    if kind is not Kind.FILE and size:
        what = f"{shown(path)} is a {kind.value} with {size} bytes of content: some readers skip it, some do not"
        raise refused(Refusal.MALFORMED, what)
    times = records.get(b"mtime")
    return Entry(
        path=path,
        kind=kind,
        mode=_number(block[100:108], "mode") & 0o7777,
        uid=_decimal(records[b"uid"], path) if records.get(b"uid") else _number(block[108:116], "owner"),
        gid=_decimal(records[b"gid"], path) if records.get(b"gid") else _number(block[116:124], "group"),
        mtime_ns=_nanoseconds(times, path) if times else _number(block[136:148], "time") * 10**9,
        size=size,
        link=link if kind in (Kind.SYMBOLIC_LINK, Kind.HARD_LINK) else b"",
        xattrs=tuple(sorted((k.removeprefix(_XATTR), v) for k, v in records.items() if k.startswith(_XATTR))),
        device=_device(block) if flag in (b"3", b"4") else (0, 0),
    )


def _names(block: bytes, extra: _Extra, records: dict[bytes, bytes]) -> tuple[bytes, bytes]:
    path = block[:100].split(b"\0", 1)[0]
    link = block[157:257].split(b"\0", 1)[0]
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    if prefix:
        path = prefix + b"/" + path
    if extra.path is not None:
        path = extra.path
    if extra.link is not None:
        link = extra.link
    return records.get(b"path") or path, records.get(b"linkpath") or link


def _device(block: bytes) -> tuple[int, int]:
    return _number(block[329:337], "device"), _number(block[337:345], "device")


def _decimal(text: bytes, path: bytes) -> int:
    if not text.isdigit() or len(text) > 18:
        raise refused(Refusal.MALFORMED, f"{shown(path)} has the number {shown(text)} in its PAX header")
    return int(text)


def _nanoseconds(text: bytes, path: bytes) -> int:
    whole, _, fraction = text.removeprefix(b"-").partition(b".")
    if not whole.isdigit() or len(whole) > 12 or (fraction and not fraction.isdigit()):
        raise refused(Refusal.MALFORMED, f"{shown(path)} has the time {shown(text)} in its PAX header")
    value = int(whole) * 10**9 + int((fraction[:9] or b"0").ljust(9, b"0"))
    return -value if text.startswith(b"-") else value


# -- writing ----------------------------------------------------------------------------------------------------------


def encode_header(entry: Entry) -> bytes:
    """Return the header blocks of an entry in the canonical form; its content follows, padded to 512 bytes."""
    path = entry.path + (b"/" if entry.kind is Kind.DIRECTORY and not entry.path.endswith(b"/") else b"")
    records = _needed_records(entry, path)
    header = b""
    if records:
        data = b"".join(_pax_record(key, value) for key, value in sorted(records.items()))
        header = _ustar(b"pax", b"x", size=len(data)) + data + bytes(-len(data) % BLOCK)
    return header + _ustar(
        path[:100],
        _FLAGS[entry.kind],
        mode=entry.mode,
        uid=_fitting(entry.uid, _MOST_SMALL),
        gid=_fitting(entry.gid, _MOST_SMALL),
        size=_fitting(entry.size, _MOST_OCTAL),
        mtime=_fitting(entry.mtime_ns // 10**9, _MOST_OCTAL),
        link=entry.link[:100],
        device=entry.device,
    )


def _fitting(value: int, most: int) -> int:
    return value if 0 <= value <= most else 0


def _needed_records(entry: Entry, path: bytes) -> dict[bytes, bytes]:
    """Return what does not fit into a plain header, by PAX keyword."""
    needed = {_XATTR + name: value for name, value in entry.xattrs}
    if len(path) > 100:
        needed[b"path"] = path
    if len(entry.link) > 100:
        needed[b"linkpath"] = entry.link
    if entry.size > _MOST_OCTAL:
        needed[b"size"] = str(entry.size).encode()
    for key, value in ((b"uid", entry.uid), (b"gid", entry.gid)):
        if value > _MOST_SMALL:
            needed[key] = str(value).encode()
    seconds, rest = divmod(abs(entry.mtime_ns), 10**9)
    if rest or not 0 <= entry.mtime_ns // 10**9 <= _MOST_OCTAL:
        sign = "-" if entry.mtime_ns < 0 else ""
        needed[b"mtime"] = f"{sign}{seconds}.{rest:09d}".encode()
    return needed


def _pax_record(key: bytes, value: bytes) -> bytes:
    body = b" " + key + b"=" + value + b"\n"
    length = len(body)
    while len(str(length)) + len(body) != length:
        length = len(str(length)) + len(body)
    return str(length).encode() + body


def _ustar(
    path: bytes,
    flag: bytes,
    *,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    size: int = 0,
    mtime: int = 0,
    link: bytes = b"",
    device: tuple[int, int] = (0, 0),
) -> bytes:
    numbers = b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, uid, gid, size, mtime)
    tail = flag + link.ljust(100, b"\0") + b"ustar\x0000" + bytes(64) + b"%07o\0%07o\0" % device
    block = path.ljust(100, b"\0") + numbers + b" " * 8 + tail
    block = block.ljust(BLOCK, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]
