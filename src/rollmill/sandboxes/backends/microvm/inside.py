"""The first process of a machine: brings the guest up, starts the zygote, and carries frames between owner and agent.

Standard library and the guest's own modules only. It runs once for each template; a clone wakes up in the middle of the
loop below. So whatever must differ between clones comes with the first word to each: the time, and entropy.

    the owner's line     words for the machine (`vm`), everything else goes to the agent; until the end of the machine
    the agent            frames for the owner, held back while a snapshot is taken, so that none is cut in two
    the zygote           the start, or the end, of the one sandbox
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from rollmill.sandboxes.guest import kernel
from rollmill.sandboxes.guest.frames import CHUNK_BYTES, MOST_HEAD_BYTES, MOST_PAYLOAD_BYTES, BadFrame, encode
from rollmill.sandboxes.guest.zygote import Zygote

VM_WORD = b'{"vm":'
IMAGES = "/image"
GROUP = "/sys/fs/cgroup/rollmill/sandbox"
SANDBOX = "sandbox"
VSOCK_PORT = 5252
# No process inside has these; what root of the sandbox owns belongs to them.
ID_BASE = 1_900_000_000
_LENGTHS = struct.Struct("<II")
_LOOK_S = 0.01
_LOOKS = 500
_RNDADDENTROPY, _RNDRESEEDCRNG = 0x40085203, 0x5207


class Cutter:
    """Cuts a stream into whole frames, without looking into them.

    Example:
        >>> cutter = Cutter()
        >>> frame = encode({"op": "x"}, b"abc")
        >>> cutter.feed(frame[:5]), cutter.feed(frame[5:]) == [frame]
        ([], True)
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes in; return the frames that are complete.

        Raises:
            BadFrame: if a length is beyond its bound.
        """
        self._buffer += data
        found: list[bytes] = []
        while len(self._buffer) >= _LENGTHS.size:
            head_bytes, payload_bytes = _LENGTHS.unpack_from(self._buffer)
            if head_bytes > MOST_HEAD_BYTES or payload_bytes > MOST_PAYLOAD_BYTES:
                raise BadFrame(f"a frame announces {head_bytes} + {payload_bytes} bytes")
            end = _LENGTHS.size + head_bytes + payload_bytes
            if len(self._buffer) < end:
                break
            found.append(bytes(self._buffer[:end]))
            del self._buffer[:end]
        return found

    @property
    def pending(self) -> bool:
        """Return whether a frame has begun and not ended."""
        return bool(self._buffer)


def word_of(frame: bytes) -> dict[str, Any] | None:
    """Return what a frame says to the machine, `None` if it is the agent's."""
    if frame[_LENGTHS.size : _LENGTHS.size + len(VM_WORD)] != VM_WORD:
        return None
    head_bytes, _ = _LENGTHS.unpack_from(frame)
    return json.loads(frame[_LENGTHS.size : _LENGTHS.size + head_bytes])


class Line:
    """The way to the owner: a port of a virtual serial device, or a listening socket that the owner connects to.

    Args:
        port: descriptor of the port, -1 for none.
        listener: the socket, `None` with a port.
    """

    def __init__(self, port: int = -1, listener: socket.socket | None = None) -> None:
        self._port = port
        self._listener = listener
        self._connection: socket.socket | None = None

    @property
    def descriptors(self) -> list[int]:
        """Return what to wait for."""
        if self._listener is None:
            return [self._port]
        return [self._listener.fileno(), *([] if self._connection is None else [self._connection.fileno()])]

    def take(self, descriptor: int) -> bytes | None:
        """Return what came, `None` when the owner has connected anew."""
        if self._listener is not None and descriptor == self._listener.fileno():
            if self._connection is not None:
                self._connection.close()
            self._connection, _ = self._listener.accept()
            return None
        try:
            data = os.read(descriptor, CHUNK_BYTES)
        except ConnectionError:
            data = b""
        if not data and self._connection is not None:
            self._connection.close()
            self._connection = None
        elif not data:
            time.sleep(_LOOK_S)  # nobody holds the other end just now, and the port says so without end
        return data

    def send(self, data: bytes) -> None:
        """Send all; without an owner it is lost, as everything in here is then."""
        target = self._port if self._connection is None else self._connection.fileno()
        view = memoryview(data)
        while view and target >= 0:
            try:
                view = view[os.write(target, view) :]
            except ConnectionError:
                return


class Bridge:
    """Carries frames, and obeys the words for the machine.

    Args:
        line: to the owner.
        zygote: sequenced-packet socket to the zygote.
        wake: called with each word that comes to a machine which has just woken up.
    """

    def __init__(self, line: Line, zygote: socket.socket, *, wake: Callable[[dict[str, Any]], None]) -> None:
        self._wake = wake
        self._line = line
        self._zygote = zygote
        self._agent: socket.socket | None = None
        self._from_owner = Cutter()
        self._from_agent = Cutter()
        self._hushed = False

    def serve(self) -> None:
        """Serve until the end of the machine."""
        self._say({"op": "booted"})
        while True:
            for descriptor in self._wait():
                if descriptor == self._zygote.fileno():
                    self._on_zygote()
                elif self._agent is not None and descriptor == self._agent.fileno():
                    self._on_agent()
                elif descriptor in self._line.descriptors:
                    self._on_line(descriptor)

    def _wait(self) -> list[int]:
        poll = select.poll()
        listening = self._agent is not None and not self._hushed
        agent = [self._agent.fileno()] if listening and self._agent is not None else []
        for one in (*self._line.descriptors, self._zygote.fileno(), *agent):
            poll.register(one, select.POLLIN)
        return [descriptor for descriptor, _ in poll.poll()]

    def _say(self, head: dict[str, Any]) -> None:
        self._line.send(encode(head))

    def _on_line(self, descriptor: int) -> None:
        data = self._line.take(descriptor)
        if data is None:
            self._from_owner = Cutter()
            self._say({"op": "booted"})
            return
        for frame in self._from_owner.feed(data):
            word = word_of(frame)
            if word is not None:
                self._obey(word)
            elif self._agent is not None:
                try:
                    self._agent.sendall(frame)
                except OSError:
                    continue  # its sandbox has ended, and the zygote says so

    def _obey(self, word: dict[str, Any]) -> None:
        if word["vm"] == "make":
            self._wake(word)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            socket.send_fds(self._zygote, [json.dumps(word["order"]).encode()], [theirs.fileno()])
            theirs.close()
            self._agent = ours
        elif word["vm"] == "hush":
            self._hushed = True
            self._drain_agent()
            self._say({"op": "hushed"})
        elif word["vm"] == "go":
            self._wake(word)
            self._hushed = False
            self._say({"op": "awake"})

    def _drain_agent(self) -> None:
        """Pass on what the agent has begun to say, to the end of its frame."""
        while self._agent is not None and self._from_agent.pending:
            self._on_agent()

    def _on_agent(self) -> None:
        assert self._agent is not None
        try:
            data = self._agent.recv(CHUNK_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            self._agent.close()
            self._agent = None
            return
        for frame in self._from_agent.feed(data):
            self._line.send(frame)

    def _on_zygote(self) -> None:
        message = self._zygote.recv(CHUNK_BYTES)
        report = json.loads(message) if message else {"op": "gone", "exit": -1, "usage": {}}
        if report["op"] == "refused":
            self._say({"op": "failed", "step": "clone", "errno": report["errno"], "message": report["message"]})
        elif report["op"] == "gone":
            while self._agent is not None:
                self._on_agent()  # its last words go first
            usage = report["usage"]
            self._say({"op": "gone", "code": report["exit"], "size": usage.get("oom_kills", 0)})
        if not message:
            time.sleep(_LOOK_S)


def become_another(word: dict[str, Any]) -> None:
    """Take on the time of now and randomness of one's own: every clone woke up with the same."""
    time.clock_settime(time.CLOCK_REALTIME, word["now_s"])
    seed = bytes.fromhex(word["seed"])
    with open("/dev/urandom", "wb", buffering=0) as stream:
        fcntl.ioctl(stream, _RNDADDENTROPY, struct.pack("ii", len(seed) * 8, len(seed)) + seed)
        fcntl.ioctl(stream, _RNDRESEEDCRNG)


def options_of(command_line: str) -> dict[str, str]:
    """Return what the kernel's command line holds for this program.

    Example:
        >>> options_of("console=ttyS0 rollmill.images=2 quiet")
        {'images': '2'}
    """
    words = (word.removeprefix("rollmill.") for word in command_line.split() if word.startswith("rollmill."))
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def _mount_all(images: int) -> None:
    kernel.mount("sysfs", "/sys", kind="sysfs")
    kernel.mount("dev", "/dev", kind="devtmpfs")
    kernel.mount("cgroup2", "/sys/fs/cgroup", kind="cgroup2")
    kernel.mount("run", "/run", kind="tmpfs", data="size=1m,mode=755")
    kernel.mount("image", IMAGES, kind="tmpfs", data="size=64k,mode=755")
    for number in range(images):
        os.mkdir(f"{IMAGES}/{number}")
        kernel.mount(f"/dev/vd{chr(ord('b') + number)}", f"{IMAGES}/{number}", kind="ext4", flags=1)
    with open("/proc/sys/kernel/printk", "w") as stream:
        stream.write("1 4 1 7")  # from here on only a panic is worth a line that somebody must keep


def _open_line(kind: str) -> Line:
    if kind == "vsock":
        listener = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
        listener.bind((socket.VMADDR_CID_ANY, VSOCK_PORT))
        listener.listen(4)
        return Line(listener=listener)
    for _ in range(_LOOKS):
        found = [name for name in os.listdir("/dev") if name.startswith("vport")]
        if found:
            return Line(port=os.open(f"/dev/{found[0]}", os.O_RDWR | os.O_CLOEXEC))
        time.sleep(_LOOK_S)
    raise OSError("the machine has no virtual serial port to its owner")


def start_zygote() -> socket.socket:
    """Start the zygote, which ends with this process; return the socket to it."""
    owner = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    kernel.set_name("sandbox-zygote")
    os.setsid()
    Zygote(theirs, os.pidfd_open(owner)).serve()
    os._exit(0)


def main() -> None:
    """Run as the first process of a machine."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    kernel.mount("proc", "/proc", kind="proc")
    with open("/proc/cmdline") as stream:
        options = options_of(stream.read())
    _mount_all(int(options["images"]))
    zygote = start_zygote()
    Bridge(_open_line(options["line"]), zygote, wake=become_another).serve()
