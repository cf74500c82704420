"""The template: a process that does nothing but clone itself into sandboxes, so that they share nearly all its memory.

A page of memory that two processes share is copied by the first that writes to it, and the other is left with a copy of
its own. The zygote works between two sandboxes, and would leave each with 0.7 MB in that way. The template, forked from
it at its start, touches few pages from one sandbox to the next. Its clones are children of the zygote (`CLONE_PARENT`):
the zygote watches them, waits for them, and takes them with it when it ends, as it does the template.

    who waits for what
    the template    descriptors from the zygote: the sandbox's socket to its owner, its gate, perhaps its group
    the zygote      the process id of the clone, or why there is none
"""

from __future__ import annotations

import _socket
import errno
import os
import select
import signal
import socket
import struct
from collections.abc import Callable

from rollmill.sandboxes.guest import kernel

_ANSWER_S = 20.0
_ANSWER = struct.Struct("2i")
_MOST_DESCRIPTORS = 3
_ROOM = socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS)
_DESCRIPTORS = {4 * count: struct.Struct(f"{count}i") for count in range(1, _MOST_DESCRIPTORS + 1)}
_CLOSED = int(socket.MSG_CMSG_CLOEXEC)

Become = Callable[[int, int], None]


class Template:
    """The zygote's side of it.

    Args:
        flags: of the clones: their namespaces.
        become: what a clone does, with the descriptors of its agent's socket and of its gate; does not return.
    """

    def __init__(self, flags: int, become: Become) -> None:
        self._flags = flags
        self._become = become
        self._control: socket.socket | None = None
        self._pid = 0

    def start(self) -> None:
        """Fork it.

        Raises:
            OSError: if no process or descriptor is left.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = kernel.clone(0)
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            _serve(theirs.detach(), self._flags, self._become)
        theirs.close()
        self._control, self._pid = ours, pid

    def clone(self, agent: int, gate: int, *, group: int) -> int:
        """Return the process id of a new clone, a child of this process.

        Args:
            agent: descriptor of its agent's socket.
            gate: descriptor of its gate.
            group: directory of the group that it is born in, or -1.

        Raises:
            OSError: what the kernel said; or that the template ended or was silent. Then the next clone starts another.
        """
        descriptors = [agent, gate] if group < 0 else [agent, gate, group]
        if self._control is None:
            self.start()
        try:
            self._ask(descriptors)
        except (BrokenPipeError, ConnectionError):  # it was ended since the last one
            self.end()
            self.start()
            self._ask(descriptors)
        pid, number = self._answer()
        if number:
            raise OSError(number, f"clone: {os.strerror(number)}")
        return pid

    def _ask(self, descriptors: list[int]) -> None:
        assert self._control is not None
        socket.send_fds(self._control, [b"c"], descriptors)

    def _answer(self) -> tuple[int, int]:
        assert self._control is not None
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        try:
            answer = self._control.recv(_ANSWER.size) if poll.poll(_ANSWER_S * 1000) else None
        except ConnectionError:
            answer = b""
        if answer:
            return _ANSWER.unpack(answer)
        self.end()
        if answer is None:
            raise OSError(
                errno.ETIMEDOUT, f"the template of sandboxes did not answer in {_ANSWER_S:g} s, and was ended"
            )
        # Not asked again: a clone that it made before its end has these descriptors.
        raise OSError(errno.EPIPE, "the template of sandboxes ended while it made this one; create it anew")

    def end(self) -> None:
        """End it; its clones live on."""
        if self._control is None:
            return
        self._control.close()
        self._control = None
        os.kill(self._pid, signal.SIGKILL)  # a child of ours, and not waited for: the number is still its own
        os.waitpid(self._pid, 0)


def _serve(control: int, flags: int, become: Become) -> None:
    """Clone on demand, until the zygote ends; a clone does not return from here either.

    Whatever this loop writes to, each clone gets a copy of. So it keeps to few objects, and to the interpreter's own
    functions instead of those of its library.
    """
    try:
        kernel.die_with_parent()
        kernel.close_all_except((0, 1, 2, control))
        kernel.set_name("zygote-template")
        zygote = _socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, control)
        flags |= kernel.CLONE_PARENT
        while True:
            message, ancillary, _, _ = zygote.recvmsg(1, _ROOM, _CLOSED)
            if not message:
                os._exit(0)  # the zygote has ended
            _, _, data = ancillary[0]
            descriptors = _DESCRIPTORS[len(data)].unpack(data)
            number = pid = 0
            try:
                pid = kernel.clone(flags, group=-1 if len(descriptors) < _MOST_DESCRIPTORS else descriptors[2])
            except OSError as error:
                number = error.errno or errno.EIO
            if pid == 0 and number == 0:
                become(descriptors[0], descriptors[1])
                os._exit(1)
            for one in descriptors:
                os.close(one)
            zygote.send(_ANSWER.pack(pid, number))
    finally:
        os._exit(1)
