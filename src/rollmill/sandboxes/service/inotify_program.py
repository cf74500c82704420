"""Runs inside a sandbox, in the image's own Python: says what happens below a directory, one JSON document a line.

Usage: DIRECTORY RECURSIVE, the second `1` or `0`. Each line of input is answered when all that happened before it was
said. The standard library alone; its source is sent, not imported there.
"""

import ctypes
import json
import os
import select
import struct
import sys

CREATE, WRITE, REMOVE, RENAME, CHMOD = "CREATE", "WRITE", "REMOVE", "RENAME", "CHMOD"
MEANINGS = ((0x100, CREATE), (0x80, CREATE), (0x2, WRITE), (0x200, REMOVE), (0x40, RENAME), (0x4, CHMOD))
IS_DIRECTORY, OVERFLOW, IGNORED, SELF_GONE = 0x40000000, 0x4000, 0x8000, 0x400
MASK = SELF_GONE
for bit, _ in MEANINGS:
    MASK |= bit
HEAD = struct.Struct("iIII")


def say(**document):
    """Print one line."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def has_content(entry):
    """Return whether a file was written to."""
    try:
        return entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_size > 0
    except OSError:
        return False


def main():
    """Watch until the directory is gone."""
    root, recursive = sys.argv[1], sys.argv[2] == "1"
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if descriptor < 0:
        say(error=os.strerror(ctypes.get_errno()))
        return
    places = {}

    def watch(place):
        number = libc.inotify_add_watch(descriptor, os.fsencode(os.path.join(root, place)), MASK)
        if number < 0:
            return ctypes.get_errno()
        places[number] = place
        return 0

    def watch_all(place, found):
        """Watch a directory and those below; note what was made there before it was watched."""
        error = watch(place)
        if error or not recursive:
            return error
        try:
            entries = list(os.scandir(os.path.join(root, place)))
        except OSError:
            return 0
        for entry in entries:
            below = os.path.join(place, entry.name)
            found.append((CREATE, below))
            if entry.is_dir(follow_symlinks=False):
                watch_all(below, found)
            elif has_content(entry):
                found.append((WRITE, below))
        return 0

    error = watch_all("", [])
    if error:
        say(error=os.strerror(error))
        return

    def take():
        """Say all that has happened until now."""
        while True:
            try:
                data = os.read(descriptor, 65536)
            except BlockingIOError:
                return
            take_some(data)

    def take_some(data):
        at = 0
        while at < len(data):
            number, mask, _, length = HEAD.unpack_from(data, at)
            name = os.fsdecode(data[at + HEAD.size : at + HEAD.size + length].rstrip(b"\0"))
            at += HEAD.size + length
            if mask & OVERFLOW:
                say(overflow=True)
            elif mask & IGNORED:
                places.pop(number, None)
            elif number in places and name:
                path, found = os.path.join(places[number], name), []
                if recursive and mask & IS_DIRECTORY and mask & 0x180:
                    # Before it is told: who hears of it may write there at once.
                    watch_all(path, found)
                for bit, meaning in MEANINGS:
                    if mask & bit:
                        say(type=meaning, name=path)
                for meaning, below in found:
                    say(type=meaning, name=below)

    say(ready=True)
    while places:
        ready, _, _ = select.select([descriptor, 0], [], [])
        asked = os.read(0, 4096) if 0 in ready else b""
        if 0 in ready and not asked:
            return
        take()
        for _ in range(asked.count(b"\n")):
            say(answered=True)


if __name__ == "__main__":
    main()
