"""What an address says of who reaches it. Pure."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an interface.

    Example:
        >>> [is_loopback(host) for host in ("localhost", "127.0.0.53", "::1", "0.0.0.0", "::", "node-1")]
        [True, True, True, False, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
