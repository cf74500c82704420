"""How far a sandbox is kept from its host: a law from protections that hold to a level with a name.

Pure. A backend reports which protections it really put in place; nothing is assumed. What falls below the configured
minimum is refused, in words that say what is missing and what to do.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from rollmill.errors import ConfigError, IsolationError


class Protection(enum.Enum):
    """One thing that keeps a sandbox from its host; the value is what an agent reports."""

    NAMESPACES = "namespaces"
    USER_NAMESPACE = "user_namespace"
    NO_NETWORK = "no_network"
    NO_NESTED_NAMESPACES = "no_nested_namespaces"
    CAPABILITIES_DROPPED = "capabilities_dropped"
    NO_NEW_PRIVILEGES = "no_new_privileges"
    SECCOMP = "seccomp"
    LANDLOCK = "landlock"
    MEMORY_CAP = "memory"
    PIDS_CAP = "pids"
    CPU_CAP = "cpu"
    FREEZE = "freeze"
    OWN_KERNEL = "own_kernel"
    VIRTUAL_MACHINE = "virtual_machine"


class IsolationLevel(enum.IntEnum):
    """Levels, each with everything of the one before it."""

    NONE = 0
    NAMESPACES = 1
    HARDENED = 2
    CAPPED = 3
    OWN_KERNEL = 4
    VIRTUAL_MACHINE = 5


P = Protection
_NEEDED: dict[IsolationLevel, frozenset[Protection]] = {
    IsolationLevel.NAMESPACES: frozenset({P.NAMESPACES, P.NO_NEW_PRIVILEGES, P.NO_NETWORK}),
    IsolationLevel.HARDENED: frozenset({P.USER_NAMESPACE, P.NO_NESTED_NAMESPACES, P.CAPABILITIES_DROPPED, P.SECCOMP}),
    IsolationLevel.CAPPED: frozenset({P.MEMORY_CAP, P.PIDS_CAP}),
}
_KERNELS = {IsolationLevel.OWN_KERNEL: P.OWN_KERNEL, IsolationLevel.VIRTUAL_MACHINE: P.VIRTUAL_MACHINE}

WORDS: dict[Protection, tuple[str, str]] = {
    P.NAMESPACES: ("own files, processes, network, message queues and host name",
                   "allow user namespaces: sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces > 0"),
    P.USER_NAMESPACE: ("its root is nobody on the host", "allow user namespaces, as above"),
    P.NO_NETWORK: ("reaches nothing but its own loopback", "allow network namespaces: user.max_net_namespaces > 0"),
    P.NO_NESTED_NAMESPACES: ("cannot make namespaces of its own", "Linux 4.9 or later"),
    P.CAPABILITIES_DROPPED: ("root inside may only own, hand out and signal what is inside", "Linux 4.3 or later"),
    P.NO_NEW_PRIVILEGES: ("setuid programs give nothing", "Linux 3.5 or later"),
    P.SECCOMP: ("the kernel's risky calls are refused", "Linux with CONFIG_SECCOMP_FILTER on x86_64 or aarch64"),
    P.LANDLOCK: ("a leaked host descriptor opens nothing", "Linux 5.13 or later with landlock in the lsm= list"),
    P.MEMORY_CAP: ("memory of the whole sandbox is capped, its files included",
                   "run as root, or under a delegated cgroup v2: systemd-run --user --scope -p Delegate=yes"),
    P.PIDS_CAP: ("processes of the whole sandbox are capped by a cgroup; each user's are capped anyway", "as memory"),
    P.CPU_CAP: ("processor time per second is capped", "as memory, with the cpu controller"),
    P.FREEZE: ("the whole sandbox can be stopped at once", "a cgroup v2 hierarchy that this user may write to"),
    P.OWN_KERNEL: ("system calls end in a kernel of its own", "the gVisor backend, or the QEMU backend"),
    P.VIRTUAL_MACHINE: ("runs in a virtual machine", "the QEMU backend with KVM, or Firecracker"),
}  # fmt: skip


def known(names: Collection[str]) -> frozenset[Protection]:
    """Return the protections among the names; a name that is not one protects nothing."""
    return frozenset(one for one in Protection if one.value in names)


def level_of(protections: Collection[Protection]) -> IsolationLevel:
    """Return the highest level whose demands, and those of the levels below it, are met.

    Example:
        >>> level_of({Protection.NAMESPACES, Protection.NO_NEW_PRIVILEGES, Protection.NO_NETWORK}).name
        'NAMESPACES'
    """
    for level, kernel in sorted(_KERNELS.items(), reverse=True):
        if kernel in protections:
            return level  # what happens inside such a kernel is its own affair
    reached = IsolationLevel.NONE
    for level in sorted(_NEEDED):
        if not _NEEDED[level] <= set(protections):
            break
        reached = level
    return reached


def missing_for(level: IsolationLevel, protections: Collection[Protection]) -> tuple[Protection, ...]:
    """Return what is missing for a level, in the order of `Protection`."""
    if level in _KERNELS:
        return () if level_of(protections) >= level else (_KERNELS[level],)
    if level_of(protections) >= level:
        return ()
    needed = frozenset().union(*(needs for one, needs in _NEEDED.items() if one <= level))
    return tuple(one for one in Protection if one in needed and one not in protections)


def parse_level(name: str) -> IsolationLevel:
    """Return a level by its name in any case.

    Raises:
        ConfigError: if there is no such level.
    """
    try:
        return IsolationLevel[name.upper()]
    except KeyError:
        names = ", ".join(one.name.lower() for one in IsolationLevel)
        raise ConfigError(f"there is no isolation level {name!r}; the levels are {names}") from None


def require(minimum: IsolationLevel, protections: Collection[Protection]) -> IsolationLevel:
    """Return the level reached.

    Raises:
        IsolationError: if it is below the minimum; the message names what is missing and how to get it.
    """
    reached = level_of(protections)
    if reached >= minimum:
        return reached
    advice = "; ".join(f"{one.value} ({WORDS[one][1]})" for one in missing_for(minimum, protections))
    raise IsolationError(
        f"this machine isolates a sandbox at level {reached.name.lower()}, and at least {minimum.name.lower()} is "
        f"asked for. Missing: {advice}. Change the machine, or accept less by lowering the minimum isolation."
    )
