"""The seccomp filter of a sandbox, as a program for the kernel's packet-filter machine.

Pure: names in, bytes out. A list of what is refused, in front of a bound on what is known: a system call that is newer
than this list does not exist inside (ENOSYS), so that a kernel update opens nothing. Namespace flags are refused in
`clone`; `clone3`, whose flags a filter cannot see, does not exist, and C libraries then use `clone`.
"""

from __future__ import annotations

import functools
import struct

from rollmill.sandboxes.guest.kernel import ALL_NAMESPACES

EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97

_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16

_AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LAST_KNOWN_CALL = 466

# One line per reason: mounts and roots; namespaces; other processes; kernel and modules; clocks and names; keys and
# events that are not namespaced; interfaces with a long record of kernel faults.
_X86_64 = {
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "swapon": 167, "swapoff": 168, "quotactl": 179,
    "unshare": 272, "setns": 308,
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "move_pages": 279,
    "reboot": 169, "init_module": 175, "delete_module": 176, "finit_module": 313, "create_module": 174,
    "query_module": 178, "get_kernel_syms": 177, "kexec_load": 246, "kexec_file_load": 320, "acct": 163, "iopl": 172,
    "ioperm": 173, "syslog": 103, "uselib": 134, "vhangup": 153, "modify_ldt": 154, "sysctl": 156, "nfsservctl": 180,
    "settimeofday": 164, "adjtimex": 159, "clock_settime": 227, "clock_adjtime": 305, "sethostname": 170,
    "setdomainname": 171,
    "add_key": 248, "request_key": 249, "keyctl": 250, "fanotify_init": 300, "open_by_handle_at": 304,
    "lookup_dcookie": 212,
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
}  # fmt: skip
_AARCH64 = {
    "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "swapon": 224, "swapoff": 225, "quotactl": 60,
    "unshare": 97, "setns": 268,
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "move_pages": 239,
    "reboot": 142, "init_module": 105, "delete_module": 106, "finit_module": 273, "kexec_load": 104,
    "kexec_file_load": 294, "acct": 89, "syslog": 116, "vhangup": 58, "nfsservctl": 42,
    "settimeofday": 170, "adjtimex": 171, "clock_settime": 112, "clock_adjtime": 266, "sethostname": 161,
    "setdomainname": 162,
    "add_key": 217, "request_key": 218, "keyctl": 219, "fanotify_init": 262, "open_by_handle_at": 265,
    "lookup_dcookie": 18,
    "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
}  # fmt: skip
_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "pidfd_getfd": 438, "mount_setattr": 442, "quotactl_fd": 443,
}  # fmt: skip
REFUSED = {"x86_64": {**_X86_64, **_EVERYWHERE}, "aarch64": {**_AARCH64, **_EVERYWHERE}}

# Contexts of asynchronous I/O are counted over the whole machine, and one call could take them all. Without the call C
# libraries and databases use threads.
ABSENT = {"x86_64": {"io_setup": 206}, "aarch64": {"io_setup": 0}}

_CHECKED = {
    "x86_64": {"clone": 56, "clone3": 435, "socket": 41, "ioctl": 16},
    "aarch64": {"clone": 220, "clone3": 435, "socket": 198, "ioctl": 29},
}

# AF_VSOCK above all is not bound to a network namespace: it reaches the host of a virtual machine.
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
SOCKET_FAMILIES = (_UNIX, _INET, _INET6, _NETLINK)

# Typing into another process's terminal.
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C


def _one(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("HBBI", code, then, otherwise, value)


def _refuse(number: int) -> bytes:
    return _one(_RETURN, _ERRNO | number)


def _argument(index: int) -> bytes:
    return _one(_LOAD, _ARGUMENTS_AT + 8 * index)


def _rule(call: int, body: list[bytes]) -> list[bytes]:
    """Run the body, which must return on every path, for one call only."""
    return [_one(_EQUAL, call, otherwise=len(body)), *body]


def _clone_rule() -> list[bytes]:
    return [_argument(0), _one(_ANY_BIT, ALL_NAMESPACES, otherwise=1), _refuse(EPERM), _one(_RETURN, _ALLOW)]


def _socket_rule() -> list[bytes]:
    body = [_argument(0)]
    for family in SOCKET_FAMILIES[:-1]:
        body += [_one(_EQUAL, family, otherwise=1), _one(_RETURN, _ALLOW)]
    # Of netlink only routes, which name resolvers ask for; the other protocols reach deep into the kernel.
    body += [_one(_EQUAL, _NETLINK, then=1), _refuse(EAFNOSUPPORT)]
    return [*body, _argument(2), _one(_EQUAL, 0, otherwise=1), _one(_RETURN, _ALLOW), _refuse(EAFNOSUPPORT)]


def _ioctl_rule() -> list[bytes]:
    body = [_argument(1)]
    for request in (_TIOCSTI, _TIOCLINUX):
        body += [_one(_EQUAL, request, otherwise=1), _refuse(EPERM)]
    return [*body, _one(_RETURN, _ALLOW)]


# For a kernel that lets root signal, or bound, the first process of its namespace, as gVisor's does.
_AIMED = {
    "x86_64": {"kill": 62, "tkill": 200, "rt_sigqueueinfo": 129, "prlimit64": 302, "pidfd_open": 434},
    "aarch64": {"kill": 129, "tkill": 130, "rt_sigqueueinfo": 138, "prlimit64": 261, "pidfd_open": 434},
}
_AIMED_TWICE = {
    "x86_64": {"tgkill": 234, "rt_tgsigqueueinfo": 297},
    "aarch64": {"tgkill": 131, "rt_tgsigqueueinfo": 240},
}
_FCNTL = {"x86_64": 72, "aarch64": 25}
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902
_FIRST = 1


# Root inside is the user of the agent, so the kernel would let it bound the agent's descriptors, memory and time, or
# starve it. The first argument of these is a process; that of the others says what the second one is.
_BOUNDS = {
    "x86_64": {"prlimit64": 302, "sched_setscheduler": 144, "sched_setparam": 142, "sched_setattr": 314,
               "sched_setaffinity": 203},
    "aarch64": {"prlimit64": 261, "sched_setscheduler": 119, "sched_setparam": 118, "sched_setattr": 274,
                "sched_setaffinity": 122},
}  # fmt: skip
_PRIORITIES = {"x86_64": {"setpriority": 141, "ioprio_set": 251}, "aarch64": {"setpriority": 140, "ioprio_set": 30}}
_EVERYBODY_OF_A_USER = {"setpriority": 2, "ioprio_set": 3}


def _bounds_rules(machine: str) -> list[bytes]:
    lines: list[bytes] = []
    passes = _one(_RETURN, _ALLOW)
    for call in sorted(_BOUNDS[machine].values()):
        lines += _rule(call, [*_refuse_values(0, (_FIRST,)), passes])
    for name, call in sorted(_PRIORITIES[machine].items()):
        body = [*_refuse_values(0, (_EVERYBODY_OF_A_USER[name],)), *_refuse_values(1, (_FIRST,)), passes]
        lines += _rule(call, body)
    return lines


def _header(machine: str) -> list[bytes]:
    return [
        _one(_LOAD, _ARCHITECTURE_AT),
        _one(_EQUAL, _AUDIT_ARCHITECTURE[machine], then=1),
        _one(_RETURN, _KILL_PROCESS),
        _one(_LOAD, _NUMBER_AT),
    ]


def _refuse_values(index: int, values: tuple[int, ...]) -> list[bytes]:
    body = [_argument(index)]
    for value in values:
        body += [_one(_EQUAL, value, otherwise=1), _refuse(EPERM)]
    return body


@functools.cache
def guard(machine: str) -> bytes:
    """Return a filter, to be installed beside the other one, that leaves the first process alone.

    A signal can also be ordered for later, as the news of a descriptor; whose it is stands in memory that a filter does
    not see, so that way is closed for all.
    """
    lines = _header(machine)
    passes = _one(_RETURN, _ALLOW)
    for call in sorted(_AIMED[machine].values()):
        lines += _rule(call, [*_refuse_values(0, (_FIRST,)), passes])
    for call in sorted(_AIMED_TWICE[machine].values()):
        lines += _rule(call, [*_refuse_values(0, (_FIRST,)), *_refuse_values(1, (_FIRST,)), passes])
    lines += _rule(_FCNTL[machine], [*_refuse_values(1, (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX)), passes])
    lines += _rule(_CHECKED[machine]["ioctl"], [*_refuse_values(1, (_FIOSETOWN, _SIOCSPGRP)), passes])
    return b"".join([*lines, passes])


@functools.cache
def program(machine: str) -> bytes | None:
    """Return the filter for an architecture, or `None` where its numbers are not known.

    Built once, by the zygote: each sandbox has it, and the memory that it takes to build it is no sandbox's.
    """
    if machine not in REFUSED:
        return None
    checked = _CHECKED[machine]
    lines = [
        *_header(machine),
        # Also refuses the x32 calls, whose numbers begin at 2**30.
        _one(_GREATER, LAST_KNOWN_CALL, otherwise=1),
        _refuse(ENOSYS),
    ]
    for call in sorted(REFUSED[machine].values()):
        lines += _rule(call, [_refuse(EPERM)])
    for call in sorted(ABSENT[machine].values()):
        lines += _rule(call, [_refuse(ENOSYS)])
    lines += _bounds_rules(machine)
    lines += _rule(checked["clone3"], [_refuse(ENOSYS)])
    lines += _rule(checked["clone"], _clone_rule())
    lines += _rule(checked["socket"], _socket_rule())
    lines += _rule(checked["ioctl"], _ioctl_rule())
    return b"".join([*lines, _one(_RETURN, _ALLOW)])
