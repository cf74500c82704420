"""The scoring process: builds one scorer, then scores one reply at a time until its socket closes.

Decides nothing; the deadline is the controller's, which kills this process. Scorers run on the main thread, so one
that sets an alarm signal works here. A second thread reads the socket and ends the whole process group when the
controller is gone; on Linux the kernel does the same, also for a scorer that never lets that thread run.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import traceback
import warnings
from typing import BinaryIO

import msgspec

from rollmill.environments.frames import HEADER_BYTES, Job, Reply, body_bytes, frame
from rollmill.environments.scoring import Scorer, ScorerSpec, build_scorer

_PR_SET_PDEATHSIG = 1
_LONGEST_TEXT = 2000


def main() -> None:
    """Serve the socket whose descriptor is the first argument; the second is the controller's process id."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    warnings.simplefilter("ignore")
    os.set_inheritable(descriptor, False)  # a scorer's own children must not keep the socket open
    link = socket.socket(fileno=descriptor)
    stream = link.makefile("rb")
    try:
        scorer = build_scorer(msgspec.msgpack.decode(_read(stream), type=ScorerSpec))
    except Exception as error:
        link.sendall(frame(Reply(number=0, kind="refused", text=_describe(error))))
        return
    link.sendall(frame(Reply(number=0, kind="ready")))
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(stream, jobs), daemon=True).start()
    while True:
        link.sendall(frame(score(scorer, jobs.get())))


def score(scorer: Scorer, job: Job) -> Reply:
    """Return what the scorer made of the job: a number, no number, or what it raised."""
    try:
        value = scorer(job.text, job.reference)
        return Reply(number=job.number, kind="score", value=_number(value))
    except Exception as error:
        return Reply(number=job.number, kind="raised", text=_describe(error))


def _number(value: object) -> float | None:
    """Return a float for anything that is a number (also NumPy's), `None` for text, `None` and the rest."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    return float(value)  # type: ignore[arg-type]


def _describe(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1:]
    at = f" ({os.path.basename(where[0].filename)}:{where[0].lineno})" if where else ""
    return f"{type(error).__name__}: {error}"[:_LONGEST_TEXT] + at


def _read(stream: BinaryIO) -> bytes:
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise EOFError("the controller closed the socket")
    return stream.read(body_bytes(header))


def _receive(stream: BinaryIO, jobs: queue.SimpleQueue[Job]) -> None:
    try:
        while True:
            jobs.put(msgspec.msgpack.decode(_read(stream), type=Job))
    except (EOFError, OSError, msgspec.DecodeError):
        # The group holds what the scorer started; nothing of it may outlive the run.
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _die_with(parent: int) -> None:
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


if __name__ == "__main__":
    main()
