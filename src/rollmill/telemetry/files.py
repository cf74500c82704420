"""Files that other programs may read while they are written.

JSON documents are replaced in one rename; JSON lines are appended whole, one write per line. Decides nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec

from rollmill.errors import RunDirectoryError


def to_json(value: Any) -> str:
    """Return one line of JSON; NaN and infinity become `null`, because JSON has no word for them."""
    return msgspec.json.encode(value, enc_hook=_plain).decode()


def write_json_atomic(path: Path, value: Any) -> None:
    """Replace a JSON document so that a reader sees the old or the new one, never a part.

    Raises:
        RunDirectoryError: if the file cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(value, enc_hook=_plain), indent=2).decode()
    write_text_atomic(path, text + "\n")


def write_text_atomic(path: Path, text: str) -> None:
    """Replace a text file in one rename.

    Raises:
        RunDirectoryError: if the file cannot be written.
    """
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise RunDirectoryError(
            f"{path} cannot be written: {error}. Check free space and permissions of {path.parent}."
        ) from error


class JsonLines:
    """A file of JSON lines that is safe to tail: each line goes out whole, in one write."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise RunDirectoryError(
                f"{path} cannot be opened for writing: {error}. Check the permissions of {path.parent}."
            ) from error
        self.path = path
        end_torn_line(path, self._file)

    def append(self, value: Any) -> None:
        """Append one line.

        Raises:
            RunDirectoryError: if the disk is full or the file is gone.
        """
        line = to_json(value).encode() + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise RunDirectoryError(f"{self.path} cannot be written: {error}. Check free space.") from error
        if written != len(line):
            raise RunDirectoryError(
                f"{self.path}: {written} of {len(line)} bytes of a line were written. The disk is probably full."
            )

    def close(self) -> None:
        """Close the file; every line is already out."""
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def end_torn_line(path: Path, file: IO[bytes]) -> None:
    """End the half line that a crash may have left, so that lines after it can be read."""
    if path.stat().st_size == 0:
        return
    with path.open("rb") as reader:
        reader.seek(-1, os.SEEK_END)
        if reader.read(1) != b"\n":
            file.write(b"\n")


def append_jsonl(path: Path) -> JsonLines:
    """Open a file of JSON lines for appending.

    Raises:
        RunDirectoryError: if it cannot be opened.
    """
    return JsonLines(path)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that are whole; a torn line (a crash, or one being written now) is passed over."""
    with path.open("rb") as file:
        yield from whole_lines(file)


def whole_lines(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the lines that are JSON; others were torn, and are passed over."""
    for line in lines:
        if not line.strip():
            continue
        try:
            yield msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        return value.tolist()
    raise NotImplementedError(f"a {type(value).__name__} has no JSON form")
