"""The nursery itself: `python -m rollmill.runtime.nursery_process SOCKET PADDING`. See `rollmill.runtime.nursery`.

It has one thread when it forks, or it refuses. The padding is room for the command lines of what it forks.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import traceback

import msgspec

from rollmill.runtime.nursery import Birth
from rollmill.runtime.parent import die_with_parent, show_as

_IMPORTS = (
    "rollmill.runtime.process",
    "rollmill.trainer.loop",
    "rollmill.trainer.model",
    "rollmill.trainer.memory",
    "rollmill.runtime.trainer_process",
    "rollmill.runtime.generator_process",
    "rollmill.generator.engines.embedded.engine",
    "rollmill.generator.main",
)


def run_nursery(channel: socket.socket) -> int:
    """Import, wait for the births, fork, and say so.

    Raises:
        RuntimeError: if another thread runs: what it holds would be held forever in the forked process.
    """
    _import()
    with channel.makefile("rb") as lines:
        asked = lines.readline()
    if not asked:
        return 0
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"{threads} threads run after the imports; a process with more than one cannot be forked")
    births = msgspec.json.decode(asked, type=list[Birth])
    go_read, go_write = os.pipe()
    pids = {birth.name: _fork(birth, channel=channel, go=(go_read, go_write)) for birth in births}
    channel.sendall(msgspec.json.encode(pids) + b"\n")
    # Only now: had this process died before, they would end themselves.
    os.write(go_write, b"." * len(births))
    return 0


def _import() -> None:
    from rollmill.weights.lean_import import import_transformers, without_collection

    with without_collection():
        import_transformers()
        for name in _IMPORTS:
            importlib.import_module(name)


def _fork(birth: Birth, *, channel: socket.socket, go: tuple[int, int]) -> int:
    """Fork twice, so that the process is an orphan, and return its number."""
    read, write = os.pipe()
    between = os.fork()
    if between == 0:
        pid = os.fork()
        if pid == 0:
            os.close(read)
            os.close(write)
            channel.close()
            _live(birth, go=go)
        os.write(write, str(pid).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(between, 0)
    with open(read, "rb") as reply:
        return int(reply.read())


def _live(birth: Birth, *, go: tuple[int, int]) -> None:
    """Be that process; never returns."""
    status = 1
    try:
        os.close(go[1])
        if os.read(go[0], 1):
            os.close(go[0])
            status = _become(birth)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without the clean-up of the process it was forked from; and as every process of the run ends.
        os._exit(status)


def _become(birth: Birth) -> int:
    import torch

    from rollmill.runtime.process import main as run_process

    os.setsid()
    log = os.open(birth.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.environ.update(birth.environment)
    # The variables of the number of threads were read when torch was loaded.
    torch.set_num_threads(birth.threads)
    show_as(birth.command)
    return run_process(birth.arguments)


def main(arguments: list[str]) -> int:
    """Run the nursery; return its exit status."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(arguments[0])) as channel:
        return run_nursery(channel)


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    # Torch takes up to a second to tear down, and nothing is left to do.
    os._exit(status)
