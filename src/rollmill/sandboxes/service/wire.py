"""Messages of the in-sandbox services (`process.Process`, `filesystem.Filesystem`), as both encodings carry them.

JSON is proto3's: camel case, bytes in base64, absent fields left out; msgspec does that. Numbers of fields, for the
binary encoding, stand beside their types. A oneof is a message of optional fields of which one is set.
"""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Annotated

import msgspec


class Field(msgspec.Struct, frozen=True):
    """A field's number; `zigzag` for sint32."""

    number: int
    zigzag: bool = False


class Message(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Base of all messages; fields that it does not know are passed over, as newer callers may send them."""


class Empty(Message, frozen=True, kw_only=True):
    """A message without fields."""


# -- process.Process --------------------------------------------------------------------------------------------------


class Signal(enum.Enum):
    """Signals that a caller may send."""

    UNSPECIFIED = "SIGNAL_UNSPECIFIED"
    SIGTERM = "SIGNAL_SIGTERM"
    SIGKILL = "SIGNAL_SIGKILL"


class PtySize(Message, frozen=True, kw_only=True):
    """Size of a terminal, in characters."""

    cols: Annotated[int, Field(1)] = 0
    rows: Annotated[int, Field(2)] = 0


class Pty(Message, frozen=True, kw_only=True):
    """A terminal."""

    size: Annotated[PtySize | None, Field(1)] = None


class ProcessConfig(Message, frozen=True, kw_only=True):
    """What runs."""

    cmd: Annotated[str, Field(1)] = ""
    args: Annotated[tuple[str, ...], Field(2)] = ()
    envs: Annotated[dict[str, str], Field(3)] = msgspec.field(default_factory=dict)
    cwd: Annotated[str | None, Field(4)] = None


class Selector(Message, frozen=True, kw_only=True):
    """Which program: by process id or by tag."""

    pid: Annotated[int | None, Field(1)] = None
    tag: Annotated[str | None, Field(2)] = None


class ProcessInfo(Message, frozen=True, kw_only=True):
    """One program that runs."""

    config: Annotated[ProcessConfig | None, Field(1)] = None
    pid: Annotated[int, Field(2)] = 0
    tag: Annotated[str | None, Field(3)] = None


class ListResponse(Message, frozen=True, kw_only=True):
    """Programs that run."""

    processes: Annotated[tuple[ProcessInfo, ...], Field(1)] = ()


class StartRequest(Message, frozen=True, kw_only=True):
    """Start a program; without `stdin` its input stays open, as older callers expect."""

    process: Annotated[ProcessConfig | None, Field(1)] = None
    pty: Annotated[Pty | None, Field(2)] = None
    tag: Annotated[str | None, Field(3)] = None
    stdin: Annotated[bool | None, Field(4)] = None


class StartEvent(Message, frozen=True, kw_only=True):
    """It runs."""

    pid: Annotated[int, Field(1)] = 0


class DataEvent(Message, frozen=True, kw_only=True):
    """It wrote something; one of these."""

    stdout: Annotated[bytes | None, Field(1)] = None
    stderr: Annotated[bytes | None, Field(2)] = None
    pty: Annotated[bytes | None, Field(3)] = None


class EndEvent(Message, frozen=True, kw_only=True):
    """It ended."""

    exit_code: Annotated[int, Field(1, zigzag=True)] = 0
    exited: Annotated[bool, Field(2)] = False
    status: Annotated[str, Field(3)] = ""
    error: Annotated[str | None, Field(4)] = None


class ProcessEvent(Message, frozen=True, kw_only=True):
    """One of these."""

    start: Annotated[StartEvent | None, Field(1)] = None
    data: Annotated[DataEvent | None, Field(2)] = None
    end: Annotated[EndEvent | None, Field(3)] = None
    keepalive: Annotated[Empty | None, Field(4)] = None


class ProcessReply(Message, frozen=True, kw_only=True):
    """What Start and Connect stream."""

    event: Annotated[ProcessEvent | None, Field(1)] = None


class SelectRequest(Message, frozen=True, kw_only=True):
    """Connect and CloseStdin."""

    process: Annotated[Selector | None, Field(1)] = None


class UpdateRequest(Message, frozen=True, kw_only=True):
    """Another size of its terminal."""

    process: Annotated[Selector | None, Field(1)] = None
    pty: Annotated[Pty | None, Field(2)] = None


class SignalRequest(Message, frozen=True, kw_only=True):
    """A signal; JSON may give its name or its number."""

    process: Annotated[Selector | None, Field(1)] = None
    signal: Annotated[Signal | int, Field(2)] = Signal.UNSPECIFIED


class ProcessInput(Message, frozen=True, kw_only=True):
    """Input; one of these."""

    stdin: Annotated[bytes | None, Field(1)] = None
    pty: Annotated[bytes | None, Field(2)] = None


class InputRequest(Message, frozen=True, kw_only=True):
    """Input for a program."""

    process: Annotated[Selector | None, Field(1)] = None
    input: Annotated[ProcessInput | None, Field(2)] = None


class InputData(Message, frozen=True, kw_only=True):
    """A piece of streamed input."""

    input: Annotated[ProcessInput | None, Field(2)] = None


class StreamedInput(Message, frozen=True, kw_only=True):
    """One of these; `start` comes first."""

    start: Annotated[SelectRequest | None, Field(1)] = None
    data: Annotated[InputData | None, Field(2)] = None
    keepalive: Annotated[Empty | None, Field(3)] = None


# -- filesystem.Filesystem --------------------------------------------------------------------------------------------


class FileType(enum.Enum):
    """What a path is."""

    UNSPECIFIED = "FILE_TYPE_UNSPECIFIED"
    FILE = "FILE_TYPE_FILE"
    DIRECTORY = "FILE_TYPE_DIRECTORY"
    SYMLINK = "FILE_TYPE_SYMLINK"


class EventType(enum.Enum):
    """What happened to a path."""

    UNSPECIFIED = "EVENT_TYPE_UNSPECIFIED"
    CREATE = "EVENT_TYPE_CREATE"
    WRITE = "EVENT_TYPE_WRITE"
    REMOVE = "EVENT_TYPE_REMOVE"
    RENAME = "EVENT_TYPE_RENAME"
    CHMOD = "EVENT_TYPE_CHMOD"


class EntryInfo(Message, frozen=True, kw_only=True):
    """One path."""

    name: Annotated[str, Field(1)] = ""
    type: Annotated[FileType, Field(2)] = FileType.UNSPECIFIED
    path: Annotated[str, Field(3)] = ""
    size: Annotated[int, Field(4)] = 0
    mode: Annotated[int, Field(5)] = 0
    permissions: Annotated[str, Field(6)] = ""
    owner: Annotated[str, Field(7)] = ""
    group: Annotated[str, Field(8)] = ""
    modified_time: Annotated[datetime | None, Field(9)] = None
    symlink_target: Annotated[str | None, Field(10)] = None
    metadata: Annotated[dict[str, str], Field(11)] = msgspec.field(default_factory=dict)
    is_symlink: Annotated[bool, Field(12)] = False


class PathRequest(Message, frozen=True, kw_only=True):
    """Stat, MakeDir and Remove."""

    path: Annotated[str, Field(1)] = ""


class MoveRequest(Message, frozen=True, kw_only=True):
    """Move."""

    source: Annotated[str, Field(1)] = ""
    destination: Annotated[str, Field(2)] = ""


class EntryResponse(Message, frozen=True, kw_only=True):
    """Stat, MakeDir and Move."""

    entry: Annotated[EntryInfo | None, Field(1)] = None


class ListDirRequest(Message, frozen=True, kw_only=True):
    """A directory, so many levels deep; 0 means 1."""

    path: Annotated[str, Field(1)] = ""
    depth: Annotated[int, Field(2)] = 0


class ListDirResponse(Message, frozen=True, kw_only=True):
    """Its entries."""

    entries: Annotated[tuple[EntryInfo, ...], Field(1)] = ()


class WatchRequest(Message, frozen=True, kw_only=True):
    """A directory to watch."""

    path: Annotated[str, Field(1)] = ""
    recursive: Annotated[bool, Field(2)] = False
    include_entry: Annotated[bool, Field(3)] = False
    allow_network_mounts: Annotated[bool, Field(4)] = False


class FileEvent(Message, frozen=True, kw_only=True):
    """Something happened to a path below a watched directory."""

    name: Annotated[str, Field(1)] = ""
    type: Annotated[EventType, Field(2)] = EventType.UNSPECIFIED
    entry: Annotated[EntryInfo | None, Field(3)] = None


class WatchReply(Message, frozen=True, kw_only=True):
    """What WatchDir streams; one of these."""

    start: Annotated[Empty | None, Field(1)] = None
    filesystem: Annotated[FileEvent | None, Field(2)] = None
    keepalive: Annotated[Empty | None, Field(3)] = None


class WatcherId(Message, frozen=True, kw_only=True):
    """A watcher, by its id."""

    watcher_id: Annotated[str, Field(1)] = ""


class WatcherEvents(Message, frozen=True, kw_only=True):
    """What happened since the last question."""

    events: Annotated[tuple[FileEvent, ...], Field(1)] = ()


NUMBERS: dict[type[enum.Enum], dict[int, enum.Enum]] = {
    Signal: {0: Signal.UNSPECIFIED, 9: Signal.SIGKILL, 15: Signal.SIGTERM},
    FileType: dict(enumerate(FileType)),
    EventType: dict(enumerate(EventType)),
}
"""Numbers of the enumerations' values in the binary encoding."""
