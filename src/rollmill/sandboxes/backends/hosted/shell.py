"""Scripts for what a vendor has no call for, in the language that every image has: a POSIX shell and small tools.

Used inside: `sh`, `mkdir`, `cat`, `head`, `stat`, `find`, `chmod`, and `setsid` where programs are put into a group of
their own. GNU and BusyBox have them all. Answers are exit codes and bytes; nothing here waits.
"""

from __future__ import annotations

import re
import signal
import stat as modes
from collections.abc import Awaitable
from typing import Protocol

from rollmill.errors import SandboxError, SandboxExhausted, SandboxFileError
from rollmill.sandboxes.backends.hosted.driver import Command, Ran
from rollmill.sandboxes.records import FileInfo, Usage

MOST_ENTRIES = 10_000
EXISTS = 40
"""Exit code: what was to be made is there."""

_MISSING, _DIRECTORY, _NO_FILE, _NO_DIRECTORY, _FAILED = 44, 45, 46, 47, 48
_NO_ROOM = re.compile(rb"no space left|quota exceeded|cannot allocate|too many open files|resource temporarily", re.I)

LAUNCH = """
d=$1 n=$2 t=$3 a=$4; shift 4
[ "$a" = 0 ] || echo "$$"
ulimit -n "$n" 2>/dev/null
[ "$t" = 0 ] || ulimit -t "$t"
cd -- "${d:-${HOME:-/}}" || exit 126
read -r _ _ _ _ g _ </proc/$$/stat
[ "$g" = "$$" ] || ! command -v setsid >/dev/null || exec setsid "$@"
exec "$@"
"""
"""Directory, limits and group of a program, then the program in the same process."""

READ = """
[ -e "$1" ] || exit 44
[ ! -d "$1" ] || exit 45
[ -f "$1" ] || exit 46
head -c "$2" "$1" || exit 48
"""

WRITE = """
umask 022
p=$1
mkdir -p "${p%/*}/" || exit 48
[ ! -d "$p" ] || exit 45
[ ! -e "$p" ] || [ -f "$p" ] || exit 46
cat >"$p" || exit 48
chmod "$2" "$p" || exit 48
[ -z "$3" ] || chown "$3" "$p" || exit 48
"""

READ_PIECE = """
[ -e "$1" ] || exit 44
[ ! -d "$1" ] || exit 45
[ -f "$1" ] || exit 46
tail -c "+$2" "$1" | head -c "$3"
"""

APPEND = """
[ -f "$1" ] || exit 44
cat >>"$1" || exit 48
"""

LIST = """
[ -d "$1" ] || exit 47
cd "$1" || exit 48
find . ! -name . -prune -exec stat -c '%n/%f %s %Y %u %g' {} + | head -c "$2"
echo //
find . ! -name . -prune -type l -exec sh -c 'for f; do printf "%s//" "$f"; readlink -n "$f"; echo //; done' sh {} +
"""

STAT = """
[ -e "$1" ] || [ -L "$1" ] || exit 44
stat -c '%f %s %Y %u %g' "$1" || exit 48
[ ! -L "$1" ] || readlink -n "$1"
"""

MAKE_DIR = """
umask 022
[ ! -d "$1" ] || exit 40
[ ! -e "$1" ] && [ ! -L "$1" ] || exit 46
mkdir -p "${1%/*}/" || exit 48
mkdir -m "$2" "$1" || exit 48
[ -z "$3" ] || chown "$3" "$1" || exit 48
"""

RENAME = """
umask 022
[ -e "$1" ] || [ -L "$1" ] || exit 44
mkdir -p "${2%/*}/" || exit 48
mv -f -T "$1" "$2" || exit 48
"""

REMOVE = """
[ -e "$1" ] || [ -L "$1" ] || exit 44
if [ ! -d "$1" ] || [ -L "$1" ]; then rm -f "$1" || exit 48
elif [ "$2" = 1 ]; then rm -rf "$1" || exit 48
else rmdir "$1" || exit 48; fi
"""

USAGE = """
stat -f -c '%S %b %f %c %d' /
p=0; for f in /proc/[0-9]*; do p=$((p + 1)); done; echo "$p"
cat /sys/fs/cgroup/memory.current 2>/dev/null || echo -
"""

SIGNAL = """
kill -s "$1" -- "-$2" 2>/dev/null || kill -s "$1" "$2" 2>/dev/null
exit 0
"""


class Run(Protocol):
    """Runs a script inside, as root, to its end."""

    def __call__(self, script: str, *arguments: str, stdin: bytes = b"") -> Awaitable[Ran]:
        """Return how it ended."""
        ...


def argv_of(script: str, *arguments: str) -> tuple[str, ...]:
    """Return the program that runs a script."""
    return ("/bin/sh", "-c", script, "sh", *arguments)


def launched(command: Command, *, announce: bool) -> tuple[str, ...]:
    """Return the program that sets a command up and becomes it.

    Args:
        command: what to run.
        announce: whether its process id comes as the first line of its output.
    """
    bounds = (str(command.open_files), str(command.cpu_s), "1" if announce else "0")
    return argv_of(LAUNCH, command.cwd, *bounds, *command.argv)


def announced(written: bytes) -> tuple[int, bytes]:
    r"""Return the process id that a launched program announced, and what it wrote after that.

    Example:
        >>> announced(b"17\nhello")
        (17, b'hello')

    Raises:
        SandboxError: if its first line is none.
    """
    first, _, rest = written.partition(b"\n")
    if not first.isdigit():
        raise SandboxError(f"a program began with {first[:100]!r} where its process id was to be")
    return int(first), rest


def signal_name(number: int) -> str:
    """Return a signal as `kill -s` takes it everywhere.

    Example:
        >>> signal_name(9), signal_name(15), signal_name(40)
        ('KILL', 'TERM', '40')
    """
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:
        return str(number)


def file_error(path: str, ran: Ran) -> SandboxError:
    """Return what went wrong with a file."""
    words = ran.err[:300].decode(errors="replace").strip()
    if _NO_ROOM.search(ran.err):
        return SandboxExhausted(f"no room for {path} in the sandbox: {words}")
    known = {
        _MISSING: f"{path} is missing",
        _DIRECTORY: f"{path} is a directory",
        _NO_FILE: f"{path} is no regular file",
        _NO_DIRECTORY: f"{path} is missing or no directory",
    }
    return SandboxFileError(known.get(ran.code, f"{path} was refused (exit code {ran.code}): {words}"))


class ShellFiles:
    """Files of a sandbox, by scripts.

    Args:
        run: runs one inside.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return a file's content, and one byte more than `max_bytes` if there is more."""
        ran = await self._run(READ, path, str(max_bytes + 1))
        if ran.code:
            raise file_error(path, ran)
        return ran.out

    async def write(self, path: str, data: bytes, *, mode: int, user: str) -> None:
        """Write a file and the directories above it."""
        ran = await self._run(WRITE, path, f"{mode:o}", user, stdin=data)
        if ran.code:
            raise file_error(path, ran)

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        """Return a directory's entries by name."""
        ran = await self._run(LIST, path, str(8 * 1024 * 1024))
        if ran.code:
            raise file_error(path, ran)
        return parse_list(ran.out)

    async def usage(self) -> Usage:
        """Return what the root file system and the processes take."""
        ran = await self._run(USAGE)
        if ran.code:
            raise SandboxError(f"usage cannot be read inside (exit code {ran.code}): {ran.err[:300]!r}")
        return parse_usage(ran.out)


def parse_list(listing: bytes) -> tuple[FileInfo, ...]:
    r"""Return the entries in the output of `LIST`.

    Names may hold newlines and spaces, but no slash; so a slash ends each, and `./` begins the next.

    Example:
        >>> found = parse_list(b"./b\nc/81a4 5 7 0 0\n./a/a1ff 1 7 0 0\n//\n./a//x//\n")
        >>> [(one.name, one.kind, one.size_bytes, one.mode, one.target) for one in found]
        [('a', 'link', 1, 511, 'x'), ('b\nc', 'file', 5, 420, '')]
    """
    entries, _, rest = (b"\n" + listing).partition(b"\n//\n")
    targets = {}
    for piece in (b"\n" + rest).split(b"\n./")[1:]:
        name, _, target = piece.partition(b"//")
        targets[name] = target.removesuffix(b"\n").removesuffix(b"//")
    found = []
    for piece in entries.split(b"\n./")[1 : MOST_ENTRIES + 2]:
        name, _, numbers = piece.rpartition(b"/")
        if len(numbers.split()) == 5:  # else cut off at the bound
            found.append(_info(name, numbers.split(), targets.get(name, b"")))
    return tuple(sorted(found, key=lambda one: one.name))


def parse_stat(path: str, words: bytes) -> FileInfo:
    """Return what the output of `STAT` says.

    Example:
        >>> parse_stat("/tmp/f", b"81a0 5 7 0 0\\n").mode
        416
    """
    numbers, _, target = words.partition(b"\n")
    return _info(path.rstrip("/").rpartition("/")[2].encode(errors="surrogateescape"), numbers.split(), target)


def _info(name: bytes, numbers: list[bytes], target: bytes) -> FileInfo:
    raw = int(numbers[0], 16)
    return FileInfo(
        name=name.decode(errors="surrogateescape"),
        kind=kind_of(raw),
        size_bytes=int(numbers[1]),
        mode=modes.S_IMODE(raw),
        modified_s=float(numbers[2]),
        uid=int(numbers[3]),
        gid=int(numbers[4]),
        target=target.decode(errors="surrogateescape"),
    )


def kind_of(mode: int) -> str:
    """Return the kind of an entry by its raw mode."""
    kinds = {modes.S_IFREG: "file", modes.S_IFDIR: "directory", modes.S_IFLNK: "link"}
    return kinds.get(modes.S_IFMT(mode), "other")


def parse_usage(words: bytes) -> Usage:
    """Return what the output of `USAGE` says.

    Example:
        >>> usage = parse_usage(b"4096 100 75 50 20\\n7\\n-\\n")
        >>> usage.disk_bytes, usage.inodes, usage.processes, usage.memory_bytes
        (102400, 30, 7, None)
    """
    lines = words.split(b"\n")
    block, blocks, free, inodes, free_inodes = (int(one) for one in lines[0].split())
    memory = lines[2].strip() if len(lines) > 2 else b"-"
    return Usage(
        disk_bytes=block * (blocks - free),
        inodes=inodes - free_inodes if inodes else None,
        processes=int(lines[1]),
        memory_bytes=int(memory) if memory.isdigit() else None,
    )
