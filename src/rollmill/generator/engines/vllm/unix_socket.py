"""The Unix socket of a vLLM server: whether anybody listens, and a client for one thread. Decides nothing."""

from __future__ import annotations

import contextlib
import socket as sockets
from pathlib import Path

import httpx2 as httpx


def listens(socket: Path) -> bool:
    """Return whether anybody listens on a socket; an HTTP client would leave each refused connection open."""
    with contextlib.closing(sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)) as probe:
        try:
            probe.connect(str(socket))
        except OSError:  # not made yet, or closed
            return False
        return True


def client_of(socket: Path, *, timeout_s: float) -> httpx.Client:
    """Return a blocking client, for one thread.

    No certificates are loaded: nothing is encrypted on a socket of this user's own. No connection is used twice: the
    server closes one after an error, and a call that is sent at that moment would be lost.
    """
    limits = httpx.Limits(max_keepalive_connections=0)
    transport = httpx.HTTPTransport(uds=str(socket), verify=False, limits=limits)
    return httpx.Client(transport=transport, base_url="http://vllm", timeout=timeout_s)
