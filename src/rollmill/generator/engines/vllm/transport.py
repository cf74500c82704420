"""How weights get into a vLLM server: what the server is told, and what is done on this side while it listens.

Decides what of that two transports have in common. `FileTransport` names a file; `rollmill.generator.engines.vllm.nccl`
sends over NCCL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from rollmill.generator.engines.settings import TRANSPORT


class WeightTransport(Protocol):
    """One way for weights into one server."""

    @property
    def backend(self) -> str:
        """Name by which the server knows it."""
        ...

    @property
    def meets(self) -> bool:
        """Whether this side takes part: `join` while the server connects, `send` while it receives. Both block."""
        ...

    def init_info(self) -> dict[str, Any]:
        """Return what the server is told when it connects."""
        ...

    def join(self) -> None:
        """Meet the server while it connects."""
        ...

    def update_info(self, file: Path) -> dict[str, Any]:
        """Return what the server is told of a file of weights."""
        ...

    def send(self, file: Path) -> None:
        """Meet the server while it receives a file of weights."""
        ...


class FileTransport:
    """The server reads the file where it lies, on this machine: this side has nothing to do."""

    backend = TRANSPORT
    meets = False

    def init_info(self) -> dict[str, Any]:
        """Return nothing: the file's name comes with each update."""
        return {}

    def join(self) -> None:
        """Do nothing."""

    def update_info(self, file: Path) -> dict[str, Any]:
        """Return the file's name."""
        return {"path": str(file)}

    def send(self, file: Path) -> None:
        """Do nothing."""


def in_thread(act: Callable[[], None]) -> Future[None]:
    """Run something on a thread that no exit waits for: what waits for a dead peer never returns."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # it has begun: whoever waits for it may stop waiting, and that is all

    def run() -> None:
        try:
            act()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="rollmill-vllm-transport", daemon=True).start()
    return future
