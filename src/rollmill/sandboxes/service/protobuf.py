"""The binary encoding of messages, from the numbers beside their fields. Pure.

Only what these messages need: varints, strings, bytes, messages, repeated and map fields, timestamps. Groups and fixed
widths are passed over when a newer caller sends them.
"""

from __future__ import annotations

import enum
import functools
import types
import typing
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar

from rollmill.sandboxes.service.wire import NUMBERS, Field, Message

M = TypeVar("M", bound=Message)

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}
_MOST_VARINT_BYTES = 10
_DEEPEST = 16


class BadProtobuf(ValueError):
    """Bytes that are no message of the asked type."""


class _Plan(typing.NamedTuple):
    """How one field is carried."""

    name: str
    number: int
    zigzag: bool
    kind: Any
    repeated: bool
    is_map: bool
    optional: bool


@functools.cache
def _plans(kind: type[Message]) -> tuple[_Plan, ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple(_plan(name, hints[name]) for name in kind.__struct_fields__)


def _plan(name: str, hint: Any) -> _Plan:
    inner, field = typing.get_args(hint)
    assert isinstance(field, Field)
    optional = repeated = is_map = False
    if isinstance(inner, types.UnionType):
        options = [one for one in typing.get_args(inner) if one is not type(None)]
        optional = len(options) < len(typing.get_args(inner))
        inner = options[0]
    origin = typing.get_origin(inner)
    if origin is tuple:
        repeated, inner = True, typing.get_args(inner)[0]
    elif origin is dict:
        is_map = True
    return _Plan(name, field.number, field.zigzag, inner, repeated, is_map, optional)


# -- out --------------------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """Return a message's bytes.

    Example:
        >>> from rollmill.sandboxes.service.wire import PtySize
        >>> encode(PtySize(cols=80, rows=300)).hex()
        '085010ac02'
    """
    out = bytearray()
    for plan in _plans(type(message)):
        value = getattr(message, plan.name)
        if plan.is_map:
            for key, text in value.items():
                _put(out, plan.number, _pair(key, text))
        elif plan.repeated:
            for one in value:
                _put(out, plan.number, _value(one, plan))
        elif value is not None and (plan.optional or not _is_default(value)):
            _put(out, plan.number, _value(value, plan))
    return bytes(out)


def _is_default(value: Any) -> bool:
    return value in (0, "", b"", False) or (isinstance(value, enum.Enum) and _number_of(value) == 0)


def _pair(key: str, text: str) -> bytes:
    out = bytearray()
    _put(out, 1, key.encode())
    _put(out, 2, text.encode())
    return bytes(out)


def _value(value: Any, plan: _Plan) -> int | bytes:
    if isinstance(value, Message):
        return encode(value)
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    if isinstance(value, datetime):
        return _stamp(value)
    if isinstance(value, enum.Enum):
        return _number_of(value)
    number = int(value)
    return (number << 1) ^ (number >> 63) if plan.zigzag else number


def _number_of(value: enum.Enum) -> int:
    return next(number for number, one in NUMBERS[type(value)].items() if one is value)


def _stamp(moment: datetime) -> bytes:
    out = bytearray()
    microseconds = round(moment.timestamp() * 1e6)
    for number, part in ((1, microseconds // 1_000_000), (2, microseconds % 1_000_000 * 1000)):
        if part:
            _put(out, number, part)
    return bytes(out)


def _put(out: bytearray, number: int, value: int | bytes) -> None:
    if isinstance(value, int):
        _varint(out, number << 3 | _VARINT)
        _varint(out, value & 0xFFFF_FFFF_FFFF_FFFF)
    else:
        _varint(out, number << 3 | _LENGTH)
        _varint(out, len(value))
        out += value


def _varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


# -- in ---------------------------------------------------------------------------------------------------------------


def decode(data: bytes, kind: type[M]) -> M:
    """Return the message in some bytes.

    Raises:
        BadProtobuf: if they are cut off, or a field has another type.

    Example:
        >>> from rollmill.sandboxes.service.wire import PtySize
        >>> decode(bytes.fromhex("085010ac02"), PtySize)
        PtySize(cols=80, rows=300)
    """
    return _decode(data, kind, _DEEPEST)


def _decode(data: bytes, kind: type[M], levels: int) -> M:
    if not levels:
        raise BadProtobuf("messages within messages, deeper than any that is known")
    plans = {plan.number: plan for plan in _plans(kind)}
    found: dict[str, Any] = {}
    for number, value in _fields(data):
        if (plan := plans.get(number)) is None:
            continue
        if plan.is_map:
            found.setdefault(plan.name, {}).update([_read_pair(value)])
        elif plan.repeated:
            found.setdefault(plan.name, []).append(_read(value, plan, levels))
        else:
            found[plan.name] = _read(value, plan, levels)
    made = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return kind(**made)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value); what has a fixed width is passed over."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _read_varint(data, at)
            yield key >> 3, value
        elif wire == _LENGTH:
            length, at = _read_varint(data, at)
            if at + length > len(data):
                raise BadProtobuf(f"a field of {length} bytes is cut off after {len(data) - at}")
            yield key >> 3, data[at : at + length]
            at += length
        elif wire in _WIDTHS:
            at += _WIDTHS[wire]
        else:
            raise BadProtobuf(f"wire type {wire} at byte {at}")


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for count in range(_MOST_VARINT_BYTES):
        if at + count >= len(data):
            raise BadProtobuf("a number is cut off")
        byte = data[at + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at + count + 1
    raise BadProtobuf(f"a number at byte {at} is longer than {_MOST_VARINT_BYTES} bytes")


def _read_pair(value: int | bytes) -> tuple[str, str]:
    parts = {1: b"", 2: b""}
    for number, part in _fields(_bytes(value)):
        parts[number] = _bytes(part)
    return _text(parts[1]), _text(parts[2])


def _read(value: int | bytes, plan: _Plan, levels: int) -> Any:
    kind = plan.kind
    if issubclass(kind, Message):
        return _decode(_bytes(value), kind, levels - 1)
    if issubclass(kind, enum.Enum):
        number = _int(value)
        return NUMBERS[kind].get(number, NUMBERS[kind][0])
    reader = _READERS.get(kind)
    if reader is None:
        raise BadProtobuf(f"the field {plan.name} cannot be read")
    read = reader(value)
    return (read >> 1) ^ -(read & 1) if plan.zigzag else read


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise BadProtobuf("a number stands where bytes belong")
    return value


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise BadProtobuf("bytes stand where a number belongs")
    return value - (1 << 64) if value >> 63 else value


def _text(value: int | bytes) -> str:
    try:
        return _bytes(value).decode()
    except UnicodeDecodeError as error:
        raise BadProtobuf(f"a string is not UTF-8: {error}") from error


def _moment(value: int | bytes) -> datetime:
    parts = {1: 0, 2: 0}
    for number, part in _fields(_bytes(value)):
        parts[number] = _int(part)
    return datetime.fromtimestamp(parts[1] + parts[2] / 1e9, UTC)


_READERS: dict[type, Callable[[int | bytes], Any]] = {
    str: _text,
    bytes: _bytes,
    int: _int,
    bool: lambda value: bool(_int(value)),
    datetime: _moment,
}
