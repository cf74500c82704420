"""Who belongs to the fleet: a fixed list, a file that others write, or a DNS name.

    127.0.0.1:7001              one replica
    127.0.0.1:7002 jobs=a,b     one that serves these jobs only
    # a comment

A list that cannot be read just now changes nothing: the replicas that are known go on serving.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from rollmill.errors import ConfigError

_RESOLVE_S = 5.0
"""Deadline of one DNS question."""


class Entry(msgspec.Struct, frozen=True, order=True):
    """A replica on the list.

    Attributes:
        address: `host:port`; also its name.
        jobs: it serves these alone; all if empty.
    """

    address: str
    jobs: tuple[str, ...] = ()


class ListUnreadable(Exception):
    """The list of replicas cannot be read just now; what it said before goes on."""


class Source(Protocol):
    """A list of replicas that may change."""

    async def read(self) -> tuple[Entry, ...]:
        """Return the list as it is now.

        Raises:
            ListUnreadable: if it cannot be had just now.
        """
        ...


def parse_entry(text: str) -> Entry:
    """Return a replica of one line.

    Raises:
        ConfigError: if that is no address.

    Example:
        >>> parse_entry("node-1:7001 jobs=math,code")
        Entry(address='node-1:7001', jobs=('code', 'math'))
    """
    address, *options = text.split()
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"replica {text!r} is no address; write HOST:PORT, for example 127.0.0.1:7001")
    jobs: tuple[str, ...] = ()
    for option in options:
        key, _, value = option.partition("=")
        if key != "jobs" or not value:
            raise ConfigError(f"replica {text!r}: {option!r} is unknown; only jobs=NAME,NAME may follow the address")
        jobs = tuple(sorted({job for job in value.split(",") if job}))
    return Entry(address, jobs)


def parse_list(text: str, *, where: str) -> tuple[Entry, ...]:
    """Return the replicas of a list, one a line.

    Raises:
        ConfigError: naming the line that is no replica, or a replica that comes twice.
    """
    found: dict[str, Entry] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        try:
            entry = parse_entry(content)
        except ConfigError as error:
            raise ConfigError(f"{where}, line {number}: {error}") from error
        if entry.address in found:
            raise ConfigError(f"{where}, line {number}: {entry.address} is listed twice; remove one line")
        found[entry.address] = entry
    return tuple(found.values())


class FixedList:
    """Replicas that were named once.

    Args:
        entries: the replicas.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = tuple(entries)

    async def read(self) -> tuple[Entry, ...]:
        """Return the list."""
        return self._entries


class FileList:
    """Replicas of a file; read again when its time, size or inode changed.

    Args:
        path: of the file; it should be replaced in one step, not written in place.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._entries: tuple[Entry, ...] = ()

    async def read(self) -> tuple[Entry, ...]:
        """Return the list as it is now.

        Raises:
            ListUnreadable: if the file is missing or has a line that is no replica.
        """
        try:
            status = os.stat(self._path)
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp != self._stamp:
                text = await asyncio.to_thread(self._path.read_text, encoding="utf-8")
                self._entries, self._stamp = parse_list(text, where=str(self._path)), stamp
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise ListUnreadable(f"the list of replicas {self._path} cannot be read: {error}") from error
        return self._entries


Resolve = Callable[[str, int], list[str]]


class DnsList:
    """Replicas of a DNS name: one for each of its A and AAAA records, all on one port.

    Args:
        name: for example a headless service of Kubernetes.
        port: of each replica.
        jobs: that they serve; all if empty.
        resolve: returns the addresses of a name; the system's resolver if `None`.
    """

    def __init__(self, name: str, port: int, *, jobs: tuple[str, ...] = (), resolve: Resolve | None = None) -> None:
        self._name, self._port, self._jobs = name, port, jobs
        self._resolve = resolve or resolve_name

    async def read(self) -> tuple[Entry, ...]:
        """Return the list as it is now.

        Raises:
            ListUnreadable: if the name does not resolve. A name without records looks like a failed resolver, so the
                last replicas are kept; they leave by their own silence.
        """
        try:
            async with asyncio.timeout(_RESOLVE_S):
                found = await asyncio.to_thread(self._resolve, self._name, self._port)
        except (OSError, TimeoutError) as error:
            raise ListUnreadable(f"{self._name} does not resolve: {error or type(error).__name__}") from error
        return tuple(Entry(address, self._jobs) for address in sorted(set(found)))


def resolve_name(name: str, port: int) -> list[str]:
    """Return `address:port` for each record of a name."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [
        f"[{sockaddr[0]}]:{port}" if family == socket.AF_INET6 else f"{sockaddr[0]}:{port}"
        for family, _, _, _, sockaddr in found
    ]
