"""The system calls that Python does not offer, by ctypes: mounts, clone, capabilities, prctl.

Decides nothing. Every function raises `OSError` that names the call. The C library is called with the interpreter's
lock held (`PyDLL`), since everything here runs in single-threaded processes and `clone` must not give the lock away.

What a sandbox's first process calls is found and packed once, by the zygote: each object that it makes or touches costs
it a page of memory that all sandboxes could share.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import struct
from collections.abc import Iterator

CLONE_FS, CLONE_FILES, CLONE_PARENT = 0x00000200, 0x00000400, 0x00008000
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_NEWTIME = 0x00000080
ALL_NAMESPACES = (
    CLONE_NEWNS
    | CLONE_NEWCGROUP
    | CLONE_NEWUTS
    | CLONE_NEWIPC
    | CLONE_NEWUSER
    | CLONE_NEWPID
    | CLONE_NEWNET
    | CLONE_NEWTIME
)
SIGCHLD = 17
_CLONE_INTO_CGROUP = 0x200000000

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_IDMAP = 1, 2, 4, 8, 0x00100000
MNT_DETACH = 2

_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_SYMLINKS = 4, 16
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_IN_ROOT = 2, 4, 16
_OPEN_TRIES = 8

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_READ, _PR_CAPBSET_DROP = 1, 4, 22, 23, 24
_PR_SET_NAME, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 15, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.unshare.argtypes = [ctypes.c_int]
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
_prctl_with_bytes = _libc["prctl"]
_prctl_with_bytes.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
_prctl_seccomp = _libc["prctl"]
_prctl_seccomp.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong]
_SECCOMP_MODE_FILTER = 2
_MACHINE = os.uname().machine

# Calls of 2019 and later have one number on every architecture; the older ones do not.
_OLD_CALLS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "capset": 126},
    "aarch64": {"clone": 220, "pivot_root": 41, "capset": 91},
}
_NEW_CALLS = {
    "open_tree": 428,
    "move_mount": 429,
    "clone3": 435,
    "close_range": 436,
    "openat2": 437,
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}


def machine() -> str:
    """Return the architecture's name, such as `x86_64`."""
    return _MACHINE


def syscall(name: str, *arguments: int | bytes | None) -> int:
    """Make a system call by name.

    Raises:
        OSError: if the kernel refuses it, or if this architecture's numbers are not known here.
    """
    number = _NEW_CALLS.get(name) or _OLD_CALLS.get(machine(), {}).get(name)
    if number is None:
        raise OSError(38, f"the number of {name} on {machine()} is not known; sandboxes run on x86_64 and aarch64")
    converted = [ctypes.c_long(one) if isinstance(one, int) else ctypes.c_char_p(one) for one in arguments]
    result = _libc.syscall(ctypes.c_long(number), *converted)
    if result < 0:
        raise _error(name)
    return result


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise _error(what)


def _prctl(option: int, first: int = 0, second: int = 0) -> None:
    if _libc.prctl(option, first, second, 0, 0) != 0:
        raise _error(f"prctl({option})")


def clone(flags: int, *, group: int = -1) -> int:
    """Fork into new namespaces: 0 in the child, its process id in the parent.

    `os.fork` takes no flags, and `unshare` leaves the caller itself outside a new process namespace. Python's own hooks
    around a fork are left out: they bring locks and other threads' states in order, of which a process with one thread
    has none, and they write to 0.7 MB of pages that the child would share otherwise.

    Args:
        flags: the namespaces, and what else is to be new or shared. With `CLONE_PARENT` the child is not the caller's
            but its parent's, which hears of its end.
        group: directory of a version 2 control group that the child is born in; a process that enters one later waits
            for a grace period of the kernel, ten milliseconds and more.
    """
    # One clone with all namespaces at once: the others then belong to the new user namespace.
    told = 0 if flags & CLONE_PARENT else SIGCHLD
    if group < 0:
        number = _OLD_CALLS.get(machine(), {}).get("clone", -1)
        pid = _libc.syscall(ctypes.c_long(number), ctypes.c_ulong(flags | told), None, None, None, None)
    else:
        words = struct.pack("11Q", flags | _CLONE_INTO_CGROUP, 0, 0, 0, told, 0, 0, 0, 0, 0, group)
        number = _NEW_CALLS["clone3"]
        pid = _libc.syscall(ctypes.c_long(number), ctypes.c_char_p(words), ctypes.c_long(len(words)))
    if pid < 0:
        raise _error("clone")
    return pid


def mount(source: str, target: str, *, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    """Mount a file system, or bind one directory to another place."""
    encoded = [None if one is None else os.fsencode(one) for one in (source, target, kind)]
    _check(
        _libc.mount(*encoded, ctypes.c_ulong(flags), None if data is None else os.fsencode(data)),
        f"mount {kind or 'bind'} {source} at {target}",
    )


def detach(target: str) -> None:
    """Unmount lazily."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_root_here() -> None:
    """Make the current directory the root, and stack the old root on it."""
    syscall("pivot_root", b".", b".")


def unshare(flags: int) -> None:
    """Leave some namespaces for new ones."""
    if _libc.unshare(flags) != 0:
        raise _error(f"unshare({flags:#x})")


def open_tree(path: str, *, recursive: bool = False) -> int:
    """Return a descriptor of a detached copy of the mount that holds `path`, rooted there."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    try:
        return syscall("open_tree", _AT_FDCWD, os.fsencode(path), flags)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {path}") from error


def open_in_root(root: int, path: str, *, flags: int = os.O_PATH) -> int:
    """Open a path as a process would whose root is the directory `root`: no link leads out of it."""
    packed = struct.pack("QQQ", flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    for _ in range(_OPEN_TRIES):
        try:
            return syscall("openat2", root, os.fsencode(path), packed, len(packed))
        except BlockingIOError:
            continue  # something was renamed on the machine while ".." was followed
    raise OSError(11, f"openat2: {path} could not be opened in {_OPEN_TRIES} tries")


def open_without_links(path: str, flags: int, mode: int = 0, *, within: int = _AT_FDCWD) -> int:
    """Open a path on which no part is a link.

    Raises:
        OSError: ELOOP where one is.
    """
    packed = struct.pack("QQQ", flags | os.O_CLOEXEC, mode if flags & os.O_CREAT else 0, _RESOLVE_NO_SYMLINKS)
    try:
        return syscall("openat2", within, os.fsencode(path), packed, len(packed))
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
    return _walk_without_links(path, flags, mode, within=within)


def _walk_without_links(path: str, flags: int, mode: int, *, within: int) -> int:
    """Do the same part by part, for a kernel without that call, as gVisor's."""
    walked = os.O_RDONLY | os.O_DIRECTORY
    *above, last = [part for part in path.split("/") if part] or ["."]
    here = os.open("/" if path.startswith("/") else ".", walked, dir_fd=None if within == _AT_FDCWD else within)
    try:
        for part in above:
            upper, here = here, _open_no_link(part, walked, 0, within=here)
            os.close(upper)
        return _open_no_link(last, flags, mode, within=here)
    finally:
        os.close(here)


def _open_no_link(name: str, flags: int, mode: int, *, within: int) -> int:
    opened = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=within)
    # gVisor opens a link to a directory in spite of the flag.
    if not os.path.samestat(os.stat(name, dir_fd=within, follow_symlinks=False), os.fstat(opened)):
        os.close(opened)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
    return opened


@contextlib.contextmanager
def acting_as(uid: int, gid: int) -> Iterator[None]:
    """Reach files with the rights of another user, and no others, for a moment."""
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)
    # These two tell no failure. A kernel that lacks them, as gVisor's, has the effective ids.
    lacks_them = _libc.setfsuid(-1) != uid
    try:
        if lacks_them:
            os.setegid(gid)
            os.seteuid(uid)
        yield
    finally:
        if lacks_them:
            os.seteuid(0)
            os.setegid(0)
        _libc.setfsuid(0)
        _libc.setfsgid(0)
        # The kernel takes such a change for one of credentials.
        set_dumpable(False)
        die_with_parent()


def move_mount(descriptor: int, target: str) -> None:
    """Attach a detached mount; the target may be a name below `/proc/self/fd`."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_SYMLINKS
    syscall("move_mount", descriptor, b"", _AT_FDCWD, os.fsencode(target), flags)


def restrict_mount(target: str, *, attributes: int, recursive: bool = True) -> None:
    """Add attributes such as read-only to a mount; none is ever taken away."""
    packed = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    syscall("mount_setattr", _AT_FDCWD, os.fsencode(target), flags, packed, len(packed))


def map_owners(descriptor: int, *, user_namespace: int) -> None:
    """Show the files of a detached mount as owned by the ids of a user namespace (idmapped mount)."""
    packed = struct.pack("QQQQ", MOUNT_ATTR_IDMAP, 0, 0, user_namespace)
    syscall("mount_setattr", descriptor, b"", _AT_EMPTY_PATH, packed, len(packed))


def sync_file_system(descriptor: int) -> None:
    """Wait until all that was written to the file system of a descriptor is on its disk."""
    _check(_libc.syncfs(ctypes.c_int(descriptor)), "syncfs")


def close_all_except(kept: tuple[int, ...]) -> None:
    """Close every descriptor but these."""
    first = 0
    for descriptor in sorted(set(kept)):
        if descriptor > first:
            syscall("close_range", first, descriptor - 1, 0)
        first = descriptor + 1
    syscall("close_range", first, 0x7FFFFFFF, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; any change of credentials clears this."""
    _prctl(_PR_SET_PDEATHSIG, 9)


def set_name(name: str) -> None:
    """Set the name that `ps` shows."""
    _check(_prctl_with_bytes(_PR_SET_NAME, name.encode()[:15], 0, 0, 0), "prctl(name)")


def hide_command_line(name: str) -> None:
    """Overwrite this process's command line, which every sandbox would show: it names paths of the host."""
    first, last = _command_line()
    text = name.encode()[: max(0, last - first - 1)]
    ctypes.memset(first, 0, last - first)
    ctypes.memmove(first, text, len(text))


@functools.cache
def _command_line() -> tuple[int, int]:
    """Return where it begins and ends; a clone has it at the same place."""
    with open("/proc/self/stat", "rb") as stream:
        fields = stream.read().rpartition(b")")[2].split()
    return int(fields[45]), int(fields[46])  # arg_start and arg_end


def set_dumpable(dumpable: bool) -> None:
    """Allow or refuse that others with the same user id read this process's memory and descriptors."""
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


def set_no_new_privileges() -> None:
    """Give up for good what a setuid program would gain."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


@functools.cache
def prepared_filter(program: bytes) -> bytes:
    """Return a seccomp filter, an array of `struct sock_filter`, as the kernel takes it; it stays in memory."""
    buffer = ctypes.create_string_buffer(program, len(program))
    _FILTERS.append(buffer)
    return struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))


_FILTERS: list[object] = []


def install_filter(program: bytes) -> None:
    """Install a seccomp filter."""
    _check(_prctl_seccomp(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, prepared_filter(program), 0, 0), "prctl(seccomp)")


# What is left to root inside a sandbox: to own, read, hand out and signal what is the sandbox's.
CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL, CAP_SETGID, CAP_SETUID = 0, 1, 3, 4, 5, 6, 7
KEPT_CAPABILITIES = (CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL, CAP_SETGID, CAP_SETUID)
_MOST_CAPABILITIES = 64
_CAPABILITY_VERSION_3 = 0x20080522


@functools.cache
def _dropped(kept: tuple[int, ...]) -> tuple[tuple[int, ...], bytes, bytes]:
    """Return the capabilities of this kernel that are not kept, and what `capset` takes."""
    known: list[int] = []
    while len(known) < _MOST_CAPABILITIES and _libc.prctl(_PR_CAPBSET_READ, len(known), 0, 0, 0) >= 0:
        known.append(len(known))
    mask = sum(1 << number for number in kept)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    return tuple(one for one in known if one not in kept), header, struct.pack("IIIIII", mask, mask, 0, 0, 0, 0)


def keep_capabilities(kept: tuple[int, ...] = KEPT_CAPABILITIES) -> None:
    """Drop every capability but these, from the process and from what an exec may give back."""
    dropped, header, words = _dropped(kept)
    for number in dropped:
        _prctl(_PR_CAPBSET_DROP, number)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    syscall("capset", header, words)


def prepare(program: bytes | None) -> None:
    """Find out and pack, in the zygote, what its clones need to give their privileges up."""
    _dropped(KEPT_CAPABILITIES)
    _command_line()
    if program is not None:
        prepared_filter(program)
