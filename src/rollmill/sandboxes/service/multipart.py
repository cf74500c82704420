"""Uploads as forms: the parts of a `multipart/form-data` body. Pure; the body is whole and bounded by its reader."""

from __future__ import annotations

import re
from urllib.parse import unquote

from rollmill.sandboxes.records import Record
from rollmill.sandboxes.service.law import HttpProblem

_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;,]{1,70}))', re.IGNORECASE)
_PARAMETER = re.compile(r'(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)
_MOST_PARTS = 1000
_MOST_HEAD_BYTES = 16 * 1024


class Part(Record, frozen=True, kw_only=True):
    """One field of a form.

    Attributes:
        name: of the field.
        filename: as the client gave it, empty if it is no file.
        data: its content.
    """

    name: str
    filename: str
    data: bytes


def boundary_of(content_type: str) -> bytes | None:
    """Return the boundary of a form, `None` if the body is none.

    Example:
        >>> boundary_of('multipart/form-data; boundary="a b"'), boundary_of("text/plain")
        (b'a b', None)
    """
    if not content_type.lower().startswith("multipart/form-data"):
        return None
    found = _BOUNDARY.search(content_type)
    return None if found is None else (found.group(1) or found.group(2)).encode("latin-1", "replace")


def parts_of(body: bytes, *, boundary: bytes) -> tuple[Part, ...]:
    """Return the parts of a form.

    Raises:
        HttpProblem: 400 if it is no form of this boundary, or has no end.

    Example:
        >>> head = b'Content-Disposition: form-data; name="file"; filename="/a"'
        >>> parts_of(b"--x\\r\\n" + head + b"\\r\\n\\r\\nhello\\r\\n--x--\\r\\n", boundary=b"x")
        (Part(name='file', filename='/a', data=b'hello'),)
    """
    line = b"\r\n--" + boundary
    at = (b"\r\n" + body[: len(line)]).find(line)
    if at != 0:
        raise HttpProblem(400, "the body does not begin with the boundary that its content type names")
    at, found = len(line) - 2, []
    while body[at : at + 2] != b"--":
        if len(found) >= _MOST_PARTS:
            raise HttpProblem(400, f"the form has more than {_MOST_PARTS} parts; send fewer files at once")
        start = body.find(b"\r\n\r\n", at, at + _MOST_HEAD_BYTES)
        end = body.find(line, start + 2) if start >= 0 else -1
        if end < 0:
            raise HttpProblem(400, f"part {len(found) + 1} of the form has no head, or no end")
        found.append(_part(body[at:start], body[start + 4 : end]))
        at = end + len(line)
    return tuple(found)


def _part(head: bytes, data: bytes) -> Part:
    parameters = {"name": "", "filename": ""}
    for line in head.decode("utf-8", "replace").split("\r\n"):
        if line.lower().startswith("content-disposition:"):
            parameters.update((key.lower(), _plain(value)) for key, value in _PARAMETER.findall(line))
    return Part(name=parameters["name"], filename=parameters["filename"], data=data)


def _plain(value: str) -> str:
    """Return a parameter as it was meant: clients of the web escape quotes and line ends by percent signs."""
    return re.sub(r"%(22|0A|0D)", lambda found: unquote(found.group(0)), re.sub(r"\\(.)", r"\1", value), flags=re.I)
