"""Programs over a vendor's call that only runs a command to its end: jobs in files inside, followed by looking at them.

Such a call gives text, no input, no signals, and is cut off by some limit of the vendor. So a program is started beside
it, by a supervisor that writes output and exit code into a directory inside; each look returns what is new, in base64.
That carries bytes, input, signals and programs of any length; a look that was cut off is taken again, since looking
changes nothing. Output ends at the caller's bound by construction, not by a look that comes in time.

Needed inside: `sh`, `setsid`, `base64`, `head`, `tail`, `wc`, `env`; `stdbuf` where output shall come as it is written.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from rollmill.errors import SandboxError, SandboxExhausted, SandboxFileError, SandboxUnsupported
from rollmill.sandboxes.backends.hosted.driver import Command, Exit, Lost, Output, Ran
from rollmill.sandboxes.backends.hosted.settings import JobSettings
from rollmill.sandboxes.backends.hosted.shell import ShellFiles, signal_name
from rollmill.sandboxes.backends.http import CutOff
from rollmill.sandboxes.records import FileInfo, Record, Usage

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_GONE, _NO_TOOL, _NO_ROOM = 50, 49, 48
_INLINE_BYTES = 48 * 1024
_PIECE_BYTES = 4 * 1024 * 1024
_TURN_S = 0.02
_FIRST_WAIT_S = 0.3
"""What the call that starts a program waits for its end: most end by then, and its timeout is kept from here."""

_LOOKS_AGAIN = 4

PROBE = """
for t in setsid base64 head tail wc env; do command -v $t >/dev/null || { echo "$t"; exit 49; }; done
umask 077; mkdir -p "$1" || exit 48
cd && pwd
"""

_BECOME = 'echo "$$" >"$0/pid"; exec "$@"'

_LAUNCH = """
D=$1 d=$2 n=$3 t=$4; shift 4
ulimit -n "$n" 2>/dev/null
[ "$t" = 0 ] || ulimit -t "$t"
cd -- "$d" || exit 126
exec setsid "$@"
"""

# Waits for the program itself and for nothing else: what it leaves behind may hold its output open for ever. Its own
# errors go nowhere: a shell says of a program that it was killed, to where the program's errors go if it has sent them
# there itself, which is why a shell of its own does that.
_SUPERVISE = """
D=$1 i=$2 m=$3 L=$4; shift 4
h="head -c $m"; ! command -v stdbuf >/dev/null || h="stdbuf -o0 $h"
feed() {
  o=0
  while :; do
    s=$(wc -c <"$D/in")
    if [ "$s" -gt "$o" ]; then tail -c +$((o + 1)) "$D/in" | head -c $((s - o)); o=$s
    elif [ -e "$D/eof" ] || [ -e "$D/over" ]; then return
    else sleep 0.05; fi
  done
}
go() {
  if [ "$i" = + ]; then feed | { ( exec sh -c "$L" sh "$D" "$@" 2>&3 3>&- ); c=$?; : >"$D/over"; exit $c; }
  else ( exec sh -c "$L" sh "$D" "$@" <"$i" 2>&3 3>&- ); fi
  echo $? >"$D/code.new"; mv "$D/code.new" "$D/code"
}
{ go "$@" | { $h >"$D/out"; : >"$D/out.end"; } 3>&-; } 3>&1 >/dev/null |
  { $h >"$D/err"; : >"$D/err.end"; }
"""

_START = """
umask 077
d=$1 o=$2 e=$3 b=$4 w=$5 S=$6 i=$7 x=$8 m=$9; shift 9
mkdir -p "$d" || exit 48
if [ "$i" = = ]; then i=$d/in; printf %s "$x" | base64 -d >"$i" || exit 48; fi
[ "$i" != + ] || : >"$d/in" || exit 48
setsid sh -c "$S" sh "$d" "$i" "$m" "$@" </dev/null >/dev/null 2>&1 &
echo $! >"$d/sup"
n=0
while [ ! -s "$d/pid" ] && [ ! -e "$d/code" ] && [ $n -lt 150 ]; do n=$((n + 1)); sleep 0.02; done
"""

_LOOK = """
z() { [ -s "$1" ] && wc -c <"$1" || echo 0; }
[ -d "$d" ] || exit 50
n=0
while :; do
  a=1 q=; read -r q <"$d/sup" && kill -0 "$q" 2>/dev/null || a=0
  c=-; [ ! -e "$d/code" ] || read -r c <"$d/code"
  [ "$c" = - ] && [ $a = 1 ] && [ $n -lt "$w" ] || break
  s=$(z "$d/out") f=$(z "$d/err")
  [ "$s" -le "$o" ] && [ "$f" -le "$e" ] || break
  if [ $n -lt 10 ]; then n=$((n + 1)); sleep 0.02; else n=$((n + 5)); sleep 0.1; fi
done
s=$(z "$d/out") f=$(z "$d/err")
if [ "$c" != - ]; then
  n=0
  while { [ ! -e "$d/out.end" ] || [ ! -e "$d/err.end" ]; } && [ $n -lt 15 ]; do n=$((n + 1)); sleep 0.02; done
  s=$(z "$d/out") f=$(z "$d/err")
fi
p=; [ ! -e "$d/pid" ] || read -r p <"$d/pid"
echo "$c $a ${p:--} $s $f"
[ "$s" -le "$o" ] || tail -c +$((o + 1)) "$d/out" | head -c "$b" | base64
echo .
[ "$f" -le "$e" ] || tail -c +$((e + 1)) "$d/err" | head -c "$b" | base64
echo .
"""

_LOOK_ALONE = "d=$1 o=$2 e=$3 b=$4 w=$5\n" + _LOOK

_SIGNAL = """
n=0
while [ ! -s "$1/pid" ] && [ ! -e "$1/code" ] && [ $n -lt 50 ]; do n=$((n + 1)); sleep 0.02; done
p=$(cat "$1/pid" 2>/dev/null) && kill -s "$2" -- "-$p" 2>/dev/null
exit 0
"""

_APPEND = 'umask 077; mkdir -p "${1%/*}" && printf %s "$2" | base64 -d >>"$1" || exit 48'

_ENCODED = """
i=$1 s=$2; shift 2
exec 3>&1
c=$({ { sh -c "$s" sh "$@" <"$i"; echo $? >&4; } | base64 >&3; } 4>&1)
exec 3>&-
[ "$i" = /dev/null ] || rm -f "$i"
exit "$c"
"""


_MERGED = """
s=$1 f=/var/tmp/.rollmill.$$; shift
mkdir -p /var/tmp
sh -c "$s" sh "$@" 2>"$f"
c=$?
echo; echo --rollmill--
head -c 500 "$f"; rm -f "$f"
exit $c
"""

_BETWEEN = b"\n--rollmill--\n"


def apart(script: str, arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return a script that runs another one for a call that mixes its two outputs: they come one after the other."""
    return _MERGED, [script, *arguments]


def parted(code: int, text: bytes) -> Ran:
    """Return what the script of `apart` said.

    Example:
        >>> parted(1, b"out\\n\\n--rollmill--\\nbad").err
        b'bad'
    """
    out, between, err = text.rpartition(_BETWEEN)
    return Ran(code=code, out=out, err=err) if between else Ran(code=code or 1, err=text)


class Shell(Protocol):
    """A vendor's call: runs a script inside to its end. What it returns is text, as far as it is printable."""

    async def run(self, script: str, arguments: Sequence[str], *, deadline_s: float) -> Ran:
        """Return how it ended.

        Raises:
            CutOff: if that is unknown.
            Gone: if the sandbox is gone.
        """
        ...

    async def upload(self, path: str, data: bytes) -> bool:
        """Write a file by a call of its own; returns whether there is one."""
        ...


class Look(Record, frozen=True, kw_only=True):
    """What a look at a job showed.

    Attributes:
        code: exit code, `None` while it runs.
        supervised: whether its supervisor lives.
        pid: of the program, 0 if it has not begun.
        sizes: of all that it wrote, to stdout and stderr.
        pieces: what is new of each.
    """

    code: int | None
    supervised: bool
    pid: int
    sizes: tuple[int, int]
    pieces: tuple[bytes, bytes]


def _bytes(text: bytes) -> bytes:
    """Return what was encoded, lines or not; what is no base64 is an error and not left out."""
    return base64.b64decode(b"".join(text.split()), validate=True)


def parse_look(text: bytes) -> Look:
    """Return what the output of a look says.

    Example:
        >>> look = parse_look(b"- 1 42 3 0\\nYWJj\\n.\\n.\\n")
        >>> look.code, look.pid, look.pieces
        (None, 42, (b'abc', b''))
    """
    head, _, rest = text.partition(b"\n")
    words = head.split()
    parts = rest.split(b".")
    try:
        code, alive, pid, out, err = words
        first, second = (_bytes(one) for one in parts[:2])
        return Look(
            code=None if code == b"-" else int(code),
            supervised=alive == b"1",
            pid=0 if pid == b"-" else int(pid),
            sizes=(int(out), int(err)),
            pieces=(first, second),
        )
    except (ValueError, binascii.Error) as error:
        raise SandboxError(f"a look at a job returned what no look returns: {text[:200]!r}") from error


class Job:
    """A program that a supervisor inside follows.

    Args:
        guest: whose it is.
        directory: its files.
        command: what runs.
        first: what the look at its start showed.
    """

    fed = True

    def __init__(self, guest: JobGuest, directory: str, command: Command, first: Look) -> None:
        self._guest = guest
        self._directory = directory
        self._command = command
        self._first: Look | None = first
        self._seen = [0, 0]
        self.pid = first.pid
        self._over = False

    async def events(self) -> AsyncIterator[Output | Exit]:
        """Yield output, in pieces as large as it grew between two looks, and the exit."""
        idle = 0
        while True:
            look = self._first if self._first is not None else await self._guest.look(self._directory, self._seen)
            self._first = None
            self.pid = self.pid or look.pid
            moved = False
            for stream, number in (("stdout", 0), ("stderr", 1)):
                for event in self._take(stream, number, look):
                    moved = True
                    yield event
            if moved:
                idle = 0
                continue
            if look.code is not None:
                self._over = True
                # The code of a program that was stopped by a closed pipe is a shell's; the flood is what counts.
                yield Exit(code=look.code, flooded=max(look.sizes) > self._command.most_bytes)
                return
            if not look.supervised:
                raise Lost("the supervisor of a program was killed inside, so its exit code is unknown")
            await asyncio.sleep(self._guest.pause_s(idle))
            idle += 1

    def _take(self, stream: str, number: int, look: Look) -> list[Output]:
        piece, size = look.pieces[number], look.sizes[number]
        self._seen[number] += len(piece)
        found = [Output(stream=stream, data=piece)] if piece else []
        skipped = size - self._seen[number]
        if skipped > 0 and self._seen[number] >= self._command.keep_bytes:
            # Nobody keeps it, so it is counted where it lies.
            self._seen[number] = size
            found.append(Output(stream=stream, data=b"", skipped=skipped))
        return found

    async def send(self, data: bytes) -> None:
        """Give it input."""
        await self._guest.append(f"{self._directory}/in", data)

    async def end_input(self) -> None:
        """End its input."""
        await self._guest.checked(': >"$1/eof"', self._directory)

    async def resize(self, rows: int, columns: int) -> None:
        """Never called: there are no terminals."""

    async def signal(self, number: int) -> None:
        """Signal its group."""
        await self._guest.checked(_SIGNAL, self._directory, signal_name(number))

    async def close(self) -> None:
        """Remove its files if it has ended."""
        if self._over:
            self._over = False
            await self._guest.forget(self._directory)


class JobGuest:
    """A sandbox's inside over a call that runs scripts.

    Args:
        shell: the call.
        product: the vendor's name.
        settings: where jobs are, and how long calls may take.
    """

    def __init__(self, shell: Shell, *, product: str, settings: JobSettings) -> None:
        self._shell = shell
        self._product = product
        self._scratch = settings.scratch
        self._wait_s = settings.wait_s
        self._idle_s = settings.idle_s
        self._call_s = settings.call_s
        self._home = "/"
        self._files = ShellFiles(self.run_script)

    async def probe(self) -> None:
        """Look whether the tools are there that jobs need.

        Raises:
            SandboxUnsupported: if one is missing.
        """
        ran = await self._shell.run(PROBE, [self._scratch], deadline_s=self._call_s)
        if ran.code:
            raise SandboxUnsupported(
                f"the image lacks {ran.out.decode(errors='replace').strip() or 'a shell'}, which running programs "
                f"through {self._product} needs (exit code {ran.code}: {ran.err[:200]!r}); use an image that has it",
                capability="exec",
            )
        self._home = ran.out.decode(errors="replace").strip().splitlines()[-1]

    def pause_s(self, idle: int) -> float:
        """Return how long to wait before the next look: the longer, the longer nothing came."""
        return min(_TURN_S * 2 ** min(idle, 16), self._idle_s)

    # -- programs ----------------------------------------------------------------------------------------------------

    async def start(self, command: Command) -> Job:
        """Start a program, and wait until it has begun."""
        if command.user not in ("", "root", "0"):
            raise SandboxUnsupported(
                f"{self._product} runs every program as one user, not as {command.user!r}", capability="users"
            )
        directory = f"{self._scratch}/{uuid.uuid4().hex}"
        source, text = await self._input(command.stdin, directory)
        environment = {"PATH": PATH, "HOME": self._home, **command.env}
        assigned = [f"{name}={value}" for name, value in environment.items()]
        wait_s = min(self._wait_s, _FIRST_WAIT_S, command.timeout_s or _FIRST_WAIT_S)
        waits = str(int(wait_s / _TURN_S)) if command.stdin is not None else "0"
        arguments = [
            *(directory, "0", "0", str(_PIECE_BYTES), waits),
            *(_SUPERVISE, source, text, str(command.most_bytes + 1)),
            *(_LAUNCH, command.cwd or self._home, str(command.open_files), str(command.cpu_s)),
            *("env", "-i", *assigned, "/bin/sh", "-c", _BECOME, directory, *command.argv),
        ]
        ran = await self._shell.run(_START + _LOOK, arguments, deadline_s=self._call_s)
        if ran.code == _GONE:
            raise self._removed()
        if ran.code:
            words = ran.err[:300].decode(errors="replace").strip()
            kind = SandboxExhausted if ran.code == _NO_ROOM or "fork" in words else SandboxError
            raise kind(f"{command.argv[0]} could not be started (exit code {ran.code}): {words}")
        return Job(self, directory, command, parse_look(ran.out))

    async def _input(self, data: bytes | None, directory: str) -> tuple[str, str]:
        """Return where a program's input comes from, and the input itself if it is short."""
        if data is None:
            return "+", ""
        if not data:
            return "/dev/null", ""
        if len(data) <= _INLINE_BYTES:
            return "=", base64.b64encode(data).decode()
        return await self._stage(data, f"{directory}.in"), ""

    async def _stage(self, data: bytes, path: str) -> str:
        if not await self._shell.upload(path, data):
            await self.append(path, data)
        return path

    async def append(self, path: str, data: bytes) -> None:
        """Write to the end of a file, in pieces that an argument can carry."""
        for start in range(0, len(data), _INLINE_BYTES):
            piece = base64.b64encode(data[start : start + _INLINE_BYTES]).decode()
            await self.checked(_APPEND, path, piece)

    async def look(self, directory: str, seen: Sequence[int]) -> Look:
        """Look at a job; one look that was cut off is taken again."""
        arguments = [
            *(directory, str(seen[0]), str(seen[1]), str(_PIECE_BYTES)),
            str(int(self._wait_s / _TURN_S)),
        ]
        ran = await self._look(arguments)
        if ran.code == _GONE:
            raise self._removed()
        if ran.code:
            raise SandboxError(f"a look at a program failed (exit code {ran.code}): {ran.err[:300]!r}")
        return parse_look(ran.out)

    async def _look(self, arguments: Sequence[str]) -> Ran:
        turn = 0
        while True:
            try:
                return await self._shell.run(_LOOK_ALONE, arguments, deadline_s=self._call_s)
            except CutOff:
                turn += 1
                if turn == _LOOKS_AGAIN:
                    raise
            await asyncio.sleep(self.pause_s(turn + 1))

    def _removed(self) -> Lost:
        return Lost(f"the files of a program in {self._scratch} were removed inside, so its end is unknown")

    async def checked(self, script: str, *arguments: str) -> None:
        """Run a script that must succeed."""
        ran = await self._shell.run(script, list(arguments), deadline_s=self._call_s)
        if ran.code:
            words = ran.err[:300].decode(errors="replace").strip()
            kind = SandboxExhausted if ran.code == _NO_ROOM else SandboxError
            raise kind(f"a call into the sandbox failed (exit code {ran.code}): {words}")

    async def forget(self, directory: str) -> None:
        """Remove the files of a job that has ended."""
        await self.checked('rm -rf "$1" "$1.in"', directory)

    # -- files -------------------------------------------------------------------------------------------------------

    async def run_script(self, script: str, *arguments: str, stdin: bytes = b"") -> Ran:
        """Run a script as root to its end, with any bytes in and out."""
        source = "/dev/null"
        if stdin:
            source = await self._stage(stdin, f"{self._scratch}/{uuid.uuid4().hex}.in")
        ran = await self._shell.run(_ENCODED, [source, script, *arguments], deadline_s=self._call_s)
        try:
            return Ran(code=ran.code, out=_bytes(ran.out), err=ran.err)
        except binascii.Error as error:
            raise SandboxError(f"{self._product} returned no base64: {ran.out[:200]!r}") from error

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Return a file's content."""
        return await self._files.read(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes, *, mode: int, user: str) -> None:
        """Write a file."""
        if user not in ("", "root", "0"):
            raise SandboxFileError(f"{self._product} knows one user, so {path} cannot be given to {user!r}")
        await self._files.write(path, data, mode=mode, user="")

    async def list_dir(self, path: str) -> tuple[FileInfo, ...]:
        """Return a directory's entries."""
        return await self._files.list_dir(path)

    async def usage(self) -> Usage:
        """Return what it uses."""
        return await self._files.usage()
