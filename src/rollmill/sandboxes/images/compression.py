"""Layers as they are stored: plain, gzip or zstd, told apart by their first bytes, unpacked with a bound.

A stream here hashes what it passes on, so that the digest of the content is known when its end was reached, and stops
a bomb while it goes off: after 64 MiB it may not grow by more than so many bytes for each packed one.
"""

from __future__ import annotations

import hashlib
import importlib
import shutil
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from rollmill.errors import MissingExtraError
from rollmill.sandboxes.images.refusals import Refusal, refused
from rollmill.sandboxes.images.tar_format import ByteSource

_CHUNK = 256 * 1024
_FREE_BYTES = 64 * 1024**2
# What a zstd stream may ask for as its window: 128 MiB, the most that its own command line takes unasked.
_ZSTD_WINDOW_LOG = 27
# All that a piece unpacks to is in memory at once: 32 KiB of zeros may come of one byte.
_ZSTD_PIECE = 1024
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class HashedStream:
    """Passes bytes on, counts them, and knows their sha256.

    Args:
        source: where they come from.
        most: more than so many are refused; `None` for no bound.
        what: its name in messages.
    """

    def __init__(self, source: ByteSource, *, most: int | None = None, what: str = "the layer") -> None:
        self._source = source
        self._most = most
        self._what = what
        self._hash = hashlib.sha256()
        self.count = 0

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes, less only at the end."""
        data = self._source.read(size)
        self._hash.update(data)
        self.count += len(data)
        if self._most is not None and self.count > self._most:
            raise refused(Refusal.DIGEST, f"{self._what} is longer than the {self._most} bytes it is said to have")
        return data

    def drain(self, check: Callable[[], None]) -> None:
        """Read to the end, since what follows an archive's end belongs to its digest; `check` may end it."""
        while self.read(_CHUNK):
            check()

    @property
    def digest(self) -> str:
        """Return `sha256:` and the digest of what was read so far."""
        return f"sha256:{self._hash.hexdigest()}"


@contextmanager
def unpacked(packed: ByteSource, *, ratio: int) -> Iterator[ByteSource]:
    """Give the content of a stream that may be packed.

    Args:
        packed: the stream.
        ratio: bytes for each packed one, beyond the first 64 MiB, from which it is taken for a bomb.

    Raises:
        ImageError: while reading, if it is damaged, cut off, or a bomb.
        MissingExtraError: if it is zstd and nothing here can read that.
    """
    start = packed.read(4)
    counted = _Counted(start, packed)
    if start.startswith(_GZIP):
        yield _Bounded(_Gzip(counted), counted, ratio=ratio)
    elif start == _ZSTD:
        with _zstd(counted) as stream:
            yield _Bounded(stream, counted, ratio=ratio)
    else:
        yield counted


class _Counted:
    """A stream with its first bytes put back."""

    def __init__(self, start: bytes, source: ByteSource) -> None:
        self._start = start
        self._source = source
        self.count = 0

    def read(self, size: int, /) -> bytes:
        data = self._start[:size]
        self._start = self._start[len(data) :]
        if len(data) < size:
            data += self._source.read(size - len(data))
        self.count += len(data)
        return data


class _Bounded:
    """Ends a stream that grows beyond reason. Pieces are small, so that little is written before."""

    def __init__(self, source: ByteSource, packed: _Counted, *, ratio: int) -> None:
        self._source = source
        self._packed = packed
        self._ratio = ratio
        self._count = 0

    def read(self, size: int, /) -> bytes:
        pieces: list[bytes] = []
        left = size
        while left and (piece := self._source.read(min(left, _CHUNK))):
            pieces.append(piece)
            left -= len(piece)
            self._count += len(piece)
            if self._count > _FREE_BYTES + self._ratio * self._packed.count:
                what = f"a layer unpacks to more than {self._count} bytes from {self._packed.count} packed ones"
                raise refused(Refusal.BOMB, f"{what}, {self._ratio} for each is the most (limits.ratio)")
        return b"".join(pieces)


class _Gzip:
    """Members of gzip, one after the other, each with its checksum proven by zlib."""

    def __init__(self, packed: _Counted) -> None:
        self._packed = packed
        self._member = zlib.decompressobj(wbits=31)
        self._input = b""

    def read(self, size: int, /) -> bytes:
        while True:
            if self._member.eof and not self._next_member():
                return b""
            self._input = self._input or self._packed.read(_CHUNK)
            at_end = not self._input
            try:
                data = self._member.decompress(self._input, size)
            except zlib.error as error:
                what = f"a gzip layer is damaged after {self._packed.count} packed bytes: {error}"
                raise refused(Refusal.MALFORMED, what) from error
            self._input = self._member.unconsumed_tail
            if data:
                return data
            if at_end and not self._member.eof:
                what = f"a gzip layer stops after {self._packed.count} packed bytes, before its end; was it cut off?"
                raise refused(Refusal.TRUNCATED, what)

    def _next_member(self) -> bool:
        rest = self._member.unused_data.lstrip(b"\0")  # zeros are padding
        while not rest:
            if not (piece := self._packed.read(_CHUNK)):
                return False
            rest = piece.lstrip(b"\0")
        self._member = zlib.decompressobj(wbits=31)
        self._input = rest
        return True


@contextmanager
def _zstd(packed: _Counted) -> Iterator[ByteSource]:
    """Read zstd with the Python package if it is there, else with the `zstd` program."""
    try:
        package = importlib.import_module("zstandard")
    except ImportError:
        program = shutil.which("zstd")
        if program is None:
            raise MissingExtraError(package="zstandard", purpose="a layer packed with zstd", extra="images") from None
        with _zstd_program(packed, program) as stream:
            yield stream
        return
    yield _ZstdPackage(package, packed)


class _ZstdPackage:
    """Frames of zstd, one after the other. The package's own stream takes one that was cut off for a whole one."""

    def __init__(self, package: Any, packed: _Counted) -> None:
        self._error = package.ZstdError
        self._decompressor = package.ZstdDecompressor(max_window_size=1 << _ZSTD_WINDOW_LOG)
        self._packed = packed
        self._frame = self._decompressor.decompressobj()
        self._input = b""
        self._output = memoryview(b"")

    def read(self, size: int, /) -> bytes:
        while not self._output:
            piece = self._input or self._packed.read(_ZSTD_PIECE)
            if not piece:
                return b""
            self._output = memoryview(self._next(piece))
        data, self._output = self._output[:size], self._output[size:]
        return bytes(data)

    def _next(self, piece: bytes) -> bytes:
        if self._frame.eof:
            self._frame = self._decompressor.decompressobj()
        try:
            data = self._frame.decompress(piece)
        except self._error as error:
            what = f"a zstd layer is damaged after {self._packed.count} packed bytes: {error}"
            raise refused(Refusal.MALFORMED, what) from error
        self._input = self._frame.unused_data if self._frame.eof else self._packed.read(_ZSTD_PIECE)
        if not self._input and not self._frame.eof:
            what = f"a zstd layer stops after {self._packed.count} packed bytes, before its end; was it cut off?"
            raise refused(Refusal.TRUNCATED, what)
        return data


@contextmanager
def _zstd_program(packed: _Counted, program: str) -> Iterator[ByteSource]:
    """Feed the program from a thread; it ends with the reader, whatever happened."""
    arguments = [program, "-dcq", f"--long={_ZSTD_WINDOW_LOG}", "--no-progress"]
    child = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    failures: list[Exception] = []
    assert child.stdin is not None
    assert child.stdout is not None
    feeder = threading.Thread(target=_feed, args=(packed, child.stdin, failures), daemon=True)
    feeder.start()
    try:
        yield _ZstdProgram(child, feeder, failures)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        feeder.join()
        if child.stderr is not None:
            child.stderr.close()


def _feed(packed: _Counted, stdin: IO[bytes], failures: list[Exception]) -> None:
    try:
        with stdin:
            while data := packed.read(_CHUNK):
                stdin.write(data)
    except BrokenPipeError:
        return  # the program ended early; its exit status says why
    except Exception as error:  # handed to the reader, who raises it
        failures.append(error)


class _ZstdProgram:
    def __init__(self, child: subprocess.Popen[bytes], feeder: Any, failures: list[Exception]) -> None:
        self._child = child
        self._feeder = feeder
        self._failures = failures

    def read(self, size: int, /) -> bytes:
        assert self._child.stdout is not None
        data = self._child.stdout.read(size)
        if len(data) == size:
            return data
        self._feeder.join()
        if self._failures:
            raise self._failures[0]
        if self._child.wait() != 0:
            assert self._child.stderr is not None
            told = self._child.stderr.read(500).decode("utf-8", "replace").strip()
            raise refused(Refusal.MALFORMED, f"a zstd layer is damaged or cut off: {told}")
        return data
