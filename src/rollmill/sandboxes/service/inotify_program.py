"""Runs inside a sandbox, in the image's own Python: says what happens below a directory, one JSON document a line.

Usage: DIRECTORY RECURSIVE, the second `1` or `0`. The standard library alone; its source is sent, not imported there.
"""

import ctypes
import json
import os
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


def main():
    """Watch until the directory is gone."""
    root, recursive = sys.argv[1], sys.argv[2] == "1"
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(0o2000000)
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

    def watch_all(place, tell):
        """Watch a directory and those below; what was made before it was watched is told if asked."""
        error = watch(place)
        if error or not recursive:
            return error
        try:
            entries = list(os.scandir(os.path.join(root, place)))
        except OSError:
            return 0
        for entry in entries:
            below = os.path.join(place, entry.name)
            if tell:
                say(type=CREATE, name=below)
            if entry.is_dir(follow_symlinks=False):
                watch_all(below, tell)
        return 0

    error = watch_all("", False)
    if error:
        say(error=os.strerror(error))
        return
    say(ready=True)
    while places:
        data = os.read(descriptor, 65536)
        at = 0
        while at < len(data):
            number, mask, _, length = HEAD.unpack_from(data, at)
            name = os.fsdecode(data[at + HEAD.size : at + HEAD.size + length].rstrip(b"\0"))
            at += HEAD.size + length
            if mask & OVERFLOW:
                say(overflow=True)
                continue
            if mask & IGNORED:
                places.pop(number, None)
                continue
            place = places.get(number)
            if place is None or not name:
                continue
            path = os.path.join(place, name)
            for bit, meaning in MEANINGS:
                if mask & bit:
                    say(type=meaning, name=path)
            if recursive and mask & IS_DIRECTORY and mask & 0x180:
                watch_all(path, True)


if __name__ == "__main__":
    main()
