"""The root of a sandbox: a capped memory file system, overlays of what is below, and the few devices.

Runs in the sandbox's own mount namespace, before its first process gives up its privileges. Everything that the sandbox
may write lies on one tmpfs with a bound on bytes and on inodes, and vanishes with the namespace.
"""

from __future__ import annotations

import functools
import os
import stat
from typing import Any

from rollmill.sandboxes.guest import jobs, kernel
from rollmill.sandboxes.guest.kernel import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_REC

READ_ONLY = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV

# Any directory that every user can reach; what it held is hidden in this namespace only.
_BASE = "/tmp"
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2",
                 "ptmx": "pts/ptmx"}  # fmt: skip
# What every user may read there and no sandbox needs. The rest of /proc belongs to the host's root: nobody inside.
_MASKED_PROC = ("keys", "kallsyms", "cmdline", "config.gz")
_DIRECTORIES = {"tmp": 0o1777, "var": 0o755, "var/tmp": 0o1777, "root": 0o755, "home": 0o755, "run": 0o755,
                "workspace": 0o1777, "proc": 0o555, "dev": 0o755, "sys": 0o555, "etc": 0o755}  # fmt: skip

_BOUNDS = {f"{kind}_namespaces": 0 for kind in ("user", "mnt", "net", "ipc", "uts", "pid", "cgroup", "time")}
_BOUNDS.update(inotify_instances=8, inotify_watches=8192, fanotify_groups=0, fanotify_marks=0)

USER_ID = 1000
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:{user}:{user}:user:/home/user:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nuser:x:{user}:\ntty:x:5:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost {name}\n::1 localhost\n",
    "etc/hostname": "{name}\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "etc/resolv.conf": "",
}

# Configuration that programs of the host's own directories cannot do without, and that holds no secret: bound where it
# is large, copied where it is small, since a mount costs more than a file.
_BOUND_CONFIGURATION = ("alternatives", "ld.so.cache", "ssl/certs", "ssl/openssl.cnf", "mime.types", "java-")
_COPIED_CONFIGURATION = ("ld.so.conf", "localtime", "protocols", "services")
_MOST_COPIED_BYTES = 32 * 1024
HOST_DIRECTORIES = ("usr", "bin", "sbin", "lib", "lib64", "lib32", "libx32")


class Trees:
    """Directories of the host that are mounted inside: descriptors that the zygote opened, or else plain paths.

    With the host's privileges the zygote opens them, and maps the owners of those that the sandbox may write through an
    overlay. A plain user cannot, and need not: its sandboxes reach the same paths as itself.
    """

    def __init__(self, descriptors: dict[str, int]) -> None:
        self._descriptors = descriptors
        self._opened: list[int] = []

    def has(self, path: str) -> bool:
        """Return whether the zygote opened this path."""
        return path in self._descriptors

    def lower(self, path: str, scratch: str) -> str:
        """Return a path of this directory that holds no `:` and stays reachable when others are mounted over."""
        if (tree := self._descriptors.get(path)) is not None:
            os.makedirs(scratch)
            kernel.move_mount(tree, scratch)
            return scratch
        self._opened.append(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        return f"/proc/self/fd/{self._opened[-1]}"

    def show(self, path: str, target: str) -> None:
        """Mount a directory or a file at `target`, to be read only."""
        tree = self._descriptors.get(path)
        make_mount_point(target, directory=stat.S_ISDIR((os.stat(path) if tree is None else os.fstat(tree)).st_mode))
        if tree is not None:
            kernel.move_mount(tree, target)
        else:
            kernel.mount(path, target, flags=MS_BIND | MS_REC)
        kernel.restrict_mount(target, attributes=READ_ONLY)


def make_mount_point(target: str, *, directory: bool) -> None:
    """Make an empty directory or file to mount on, with the directories above it, unless something is there."""
    if os.path.exists(target):
        return
    if directory:
        os.makedirs(target, exist_ok=True)
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def build(plan: dict[str, Any], trees: Trees) -> None:
    """Mount the root of a sandbox and move into it.

    Args:
        plan: `size_bytes`, `inodes`, `name`, `all_users`, `lowers` (real paths; none: the host's own directories) and
            `expose` (pairs of the path inside and the real path).
        trees: where the directories of the host come from.
    """
    kernel.mount("none", "/", flags=MS_REC | MS_PRIVATE)
    os.chdir(_Root(plan, trees).mount())
    kernel.pivot_root_here()
    kernel.detach(".")
    os.chdir("/")


@functools.cache
def host_directories() -> dict[str, str | None]:
    """Return the host's own system directories: name to link target, `None` for a real directory."""
    found: dict[str, str | None] = {}
    for name in HOST_DIRECTORIES:
        if os.path.islink(f"/{name}"):
            found[name] = os.readlink(f"/{name}")
        elif os.path.isdir(f"/{name}"):
            found[name] = None
    return found


@functools.cache
def host_configuration() -> tuple[dict[str, str], dict[str, bytes]]:
    """Return what of the host's /etc is bound (name to real path) and what is copied (name to content).

    Read once, by the zygote: what changes later is seen by the next one.
    """
    names = [name for name in _BOUND_CONFIGURATION if not name.endswith("-")]
    prefixes = tuple(name for name in _BOUND_CONFIGURATION if name.endswith("-"))
    names += [name for name in sorted(os.listdir("/etc")) if name.startswith(prefixes)]
    bound = {name: os.path.realpath(f"/etc/{name}") for name in names if os.path.exists(f"/etc/{name}")}
    copied: dict[str, bytes] = {}
    for name in _COPIED_CONFIGURATION:
        try:
            with open(f"/etc/{name}", "rb") as stream:
                copied[name] = stream.read(_MOST_COPIED_BYTES)
        except OSError:
            continue  # this distribution has none, or keeps it to itself
    return bound, copied


class _Root:
    """The mounts of one root, in their order."""

    def __init__(self, plan: dict[str, Any], trees: Trees) -> None:
        self._plan = plan
        self._trees = trees
        # Opened now: the scratch file system is about to hide whatever lies below its mount point.
        paths = [*plan["lowers"], *(path for _, path in plan["expose"])]
        hidden = [path for path in paths if path.startswith(_BASE + "/") and not trees.has(path)]
        self._kept = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in hidden}

    def _reach(self, path: str) -> str:
        return f"/proc/self/fd/{self._kept[path]}" if path in self._kept else path

    def mount(self) -> str:
        plan = self._plan
        options = f"size={plan['size_bytes']},nr_inodes={plan['inodes']},mode=755"
        kernel.mount("sandbox", _BASE, kind="tmpfs", flags=MS_NOSUID | MS_NODEV, data=options)
        root = f"{_BASE}/root"
        os.mkdir(root)
        if plan["lowers"]:
            self._overlay(plan["lowers"], at=root, name="image")
        else:
            self._host_root(root)
        for name, mode in _DIRECTORIES.items():
            _directory(f"{root}/{name}", mode)
        self._write_files(root)
        for inside, path in plan["expose"]:
            self._trees.show(self._reach(path), f"{root}{inside}")
        self._devices(f"{root}/dev")
        _mount_proc(f"{root}/proc")
        return root

    def _overlay(self, lowers: list[str], *, at: str, name: str) -> None:
        upper, work = f"{_BASE}/up/{name}", f"{_BASE}/work/{name}"
        os.makedirs(upper)
        os.makedirs(work)
        # The root of the upper layer is the root that the sandbox sees: it must look like the one below.
        below = [self._trees.lower(self._reach(path), f"{_BASE}/low/{name}{i}") for i, path in enumerate(lowers)]
        os.chmod(upper, os.stat(below[0]).st_mode & 0o7777)
        data = f"lowerdir={':'.join(below)},upperdir={upper},workdir={work},userxattr"
        kernel.mount("overlay", at, kind="overlay", flags=MS_NOSUID | MS_NODEV, data=data)

    def _host_root(self, root: str) -> None:
        kernel.mount(root, root, flags=MS_BIND)
        for name, link in host_directories().items():
            if link is not None:
                os.symlink(link, f"{root}/{name}")
                continue
            os.mkdir(f"{root}/{name}")
            self._overlay([f"/{name}"], at=f"{root}/{name}", name=name)
        if not os.path.exists("/usr/bin/python") and os.path.exists("/usr/bin/python3"):
            os.makedirs(f"{root}{jobs.EXTRA_PATH}")  # what people type, also where a distribution has only `python3`
            os.symlink("/usr/bin/python3", f"{root}{jobs.EXTRA_PATH}/python")
        bound, copied = host_configuration()
        for name, path in bound.items():
            make_mount_point(f"{root}/etc/{name}", directory=os.path.isdir(path))
            kernel.mount(path, f"{root}/etc/{name}", flags=MS_BIND)
            kernel.restrict_mount(f"{root}/etc/{name}", attributes=READ_ONLY, recursive=False)
        for name, data in copied.items():
            with open(f"{root}/etc/{name}", "wb") as stream:
                stream.write(data)

    def _write_files(self, root: str) -> None:
        """Write names and addresses; an image that has its own keeps them."""
        for name, text in _FILES.items():
            path = f"{root}/{name}"
            if os.path.lexists(path):
                continue
            with open(path, "w") as stream:
                stream.write(text.format(user=USER_ID, name=self._plan["name"]))
        home = f"{root}/home/user"
        if not os.path.lexists(home):
            os.mkdir(home, 0o755)
            if self._plan["all_users"]:
                os.chown(home, USER_ID, USER_ID)

    def _devices(self, directory: str) -> None:
        kernel.mount("dev", directory, kind="tmpfs", flags=MS_NOSUID | MS_NOEXEC, data="size=64k,nr_inodes=64,mode=755")
        for name in _DEVICES:
            os.mknod(f"{directory}/{name}", 0o644)
            kernel.mount(f"/dev/{name}", f"{directory}/{name}", flags=MS_BIND)
        for name, target in _DEVICE_LINKS.items():
            os.symlink(target, f"{directory}/{name}")
        os.mkdir(f"{directory}/pts")
        terminals = "newinstance,ptmxmode=0666,mode=0620,max=64" + (",gid=5" if self._plan["all_users"] else "")
        kernel.mount("devpts", f"{directory}/pts", kind="devpts", flags=MS_NOSUID | MS_NOEXEC, data=terminals)
        # Shared memory counts as files of the sandbox, under the same caps.
        os.mkdir(f"{_BASE}/shm")
        os.chmod(f"{_BASE}/shm", 0o1777)
        os.mkdir(f"{directory}/shm")
        kernel.mount(f"{_BASE}/shm", f"{directory}/shm", flags=MS_BIND)
        kernel.restrict_mount(f"{directory}/shm", attributes=kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV)
        kernel.restrict_mount(directory, attributes=kernel.MOUNT_ATTR_RDONLY, recursive=False)


def _directory(path: str, mode: int) -> None:
    if not os.path.lexists(path):
        os.mkdir(path)
        os.chmod(path, mode)


def _mount_proc(directory: str) -> None:
    kernel.mount("proc", directory, kind="proc", flags=MS_NOSUID | MS_NODEV | MS_NOEXEC)
    bound_kernel_objects(directory)
    kernel.mount(f"{directory}/sys", f"{directory}/sys", flags=MS_BIND | MS_REC)
    kernel.restrict_mount(f"{directory}/sys", attributes=READ_ONLY | kernel.MOUNT_ATTR_NOEXEC)
    for name in _MASKED_PROC:
        if os.path.exists(f"{directory}/{name}"):
            kernel.mount("/dev/null", f"{directory}/{name}", flags=MS_BIND)


def bound_kernel_objects(proc: str) -> None:
    """Set the user namespace's own bounds: no further namespaces (seccomp refuses the calls as well), few watchers.

    What counts here counts for the owner of the sandbox too, who has few watchers for all of them together.
    """
    for name, most in _BOUNDS.items():
        path = f"{proc}/sys/user/max_{name}"
        if os.path.exists(path):
            with open(path, "w") as stream:
                stream.write(str(most))
