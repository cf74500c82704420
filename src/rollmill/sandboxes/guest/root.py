"""The root of a sandbox: a capped memory file system, overlays of what is below, and the few devices.

Runs in the sandbox's own mount namespace, before its first process gives up its privileges. Everything that the
sandbox may write lies on one tmpfs with a bound on bytes and on inodes, and vanishes with the namespace, unless
somebody holds a copy of its mount: then it is a layer, which other sandboxes put below what they write.

    of a layer     up/NAME      what was written to the overlay at NAME (`image`, or `root`, `usr` and so on)
                   work/, shm/  without meaning for others

An image or a layer may hold any link. So nothing inside is reached by a path of this process's own root.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from contextlib import suppress
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

    def show(self, path: str, inside: Inside, target: str) -> None:
        """Mount a directory or a file at `target`, to be read only."""
        tree = self._descriptors.get(path)
        directory = stat.S_ISDIR((os.stat(path) if tree is None else os.fstat(tree)).st_mode)
        place = inside.mount_point(target, directory=directory)
        if tree is not None:
            kernel.move_mount(tree, place)
        else:
            kernel.mount(path, place, flags=MS_BIND | MS_REC)
        kernel.restrict_mount(inside.at(target), attributes=READ_ONLY)


class Inside:
    """Reaches paths below a directory as a process would that has it as its root: no link leads out of it.

    Args:
        root: the directory. Descriptors stay open until the sandbox closes all that it does not need.
    """

    def __init__(self, root: str) -> None:
        self._root = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def _open(self, path: str) -> int:
        try:
            return kernel.open_in_root(self._root, path)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise FileNotFoundError(errno.ENOENT, f"{path} is a link that leads to itself") from error

    def at(self, path: str) -> str:
        """Return a name for what is now at a path, the uppermost mount there."""
        return f"/proc/self/fd/{self._open(path)}"

    def directory(self, path: str, mode: int) -> bool:
        """Make a directory; `False` if something has its name already, or no directory is above it."""
        above, name = os.path.split(path.strip("/"))
        try:
            parent = self._open(above or "/")
            os.mkdir(name, dir_fd=parent)
        except (FileExistsError, FileNotFoundError, NotADirectoryError):
            return False
        os.chmod(name, mode, dir_fd=parent)
        return True

    def file(self, path: str, data: bytes) -> bool:
        """Make a file; `False` as with directories."""
        above, name = os.path.split(path.strip("/"))
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            made = os.open(name, flags, 0o644, dir_fd=self._open(above or "/"))
        except (FileExistsError, FileNotFoundError, NotADirectoryError):
            return False
        try:
            os.write(made, data)
        finally:
            os.close(made)
        return True

    def mount_point(self, path: str, *, directory: bool) -> str:
        """Return a name for what is at a path; make it, and the directories above it, if nothing is."""
        names = path.strip("/").split("/")
        found = self._root
        for count in range(1, len(names) + 1):
            part = "/".join(names[:count])
            try:
                found = self._open(part)
            except FileNotFoundError:
                made = self.directory(part, 0o755) if directory or count < len(names) else self.file(part, b"")
                if not made:
                    raise  # a link that leads nowhere has this name
                found = self._open(part)
        return f"/proc/self/fd/{found}"


class Fresh:
    """The same for a directory that holds nothing but what was put there just now: by paths, at half the cost."""

    def __init__(self, root: str) -> None:
        self._root = root

    def at(self, path: str) -> str:
        """Return a name for what is at a path."""
        return f"{self._root}/{path}"

    def directory(self, path: str, mode: int) -> bool:
        """Make a directory; `False` if there is one."""
        path = f"{self._root}/{path}"
        if os.path.exists(path):
            return False
        os.mkdir(path)
        os.chmod(path, mode)
        return True

    def file(self, path: str, data: bytes) -> bool:
        """Make a file."""
        made = os.open(f"{self._root}/{path}", os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        try:
            os.write(made, data)
        finally:
            os.close(made)
        return True

    def mount_point(self, path: str, *, directory: bool) -> str:
        """Make what is not there yet, and return a name for it."""
        target = f"{self._root}/{path}"
        if not os.path.exists(target):
            os.makedirs(target if directory else os.path.dirname(target), exist_ok=True)
            if not directory:
                self.file(path, b"")
        return target


def build(plan: dict[str, Any], trees: Trees) -> int:
    """Mount the root of a sandbox and move into it; return a copy of the mount of all that it will write.

    Args:
        plan: `size_bytes`, `inodes`, `name`, `all_users`, `lowers` (real paths; none: the host's own directories),
            `layers` (names of trees or real paths, the uppermost first) and `expose` (pairs of the path inside and the
            real path).
        trees: where the directories of the host come from.
    """
    kernel.mount("none", "/", flags=MS_REC | MS_PRIVATE)
    root = _Root(plan, trees)
    os.chdir(root.mount())
    kernel.pivot_root_here()
    kernel.detach(".")
    os.chdir("/")
    return root.written


def build_for_runtime(plan: dict[str, Any], trees: Trees) -> tuple[str, int]:
    """Mount the root of a sandbox that gets devices, processes and shared memory from a kernel of its own.

    The caller stays outside. Returns where the root is, and a copy of the mount of all that the sandbox will write.
    """
    kernel.mount("none", "/", flags=MS_REC | MS_PRIVATE)
    root = _Root(plan, trees)
    return root.mount(devices=False), root.written


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
        paths = [*plan["lowers"], *plan["layers"], *(path for _, path in plan["expose"])]
        hidden = [path for path in paths if path.startswith(_BASE + "/") and not trees.has(path)]
        self._kept = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in hidden}
        self._layers: list[str] = []
        self.written = -1

    def _reach(self, path: str) -> str:
        return f"/proc/self/fd/{self._kept[path]}" if path in self._kept else path

    def mount(self, *, devices: bool = True) -> str:
        plan = self._plan
        options = f"size={plan['size_bytes']},nr_inodes={plan['inodes']},mode=755"
        kernel.mount("sandbox", _BASE, kind="tmpfs", flags=MS_NOSUID | MS_NODEV, data=options)
        self.written = kernel.open_tree(_BASE)  # a detached mount counts as a namespace, and soon none more may be made
        root = f"{_BASE}/root"
        os.mkdir(root)
        found = (self._trees.lower(self._reach(one), f"{_BASE}/low/s{i}") for i, one in enumerate(plan["layers"]))
        self._layers = list(found)
        inside = self._image_root(root) if plan["lowers"] else self._host_root(root)
        for name, mode in _DIRECTORIES.items():
            inside.directory(name, mode)
        self._write_files(inside)
        for target, path in plan["expose"]:
            self._trees.show(self._reach(path), Inside(root), target)
        if devices:
            self._devices(inside)
            _mount_proc(inside)
        return root

    def _image_root(self, root: str) -> Inside:
        self._overlay(self._plan["lowers"], at=root, name="image")
        return Inside(root)

    def _overlay(self, lowers: list[str], *, at: str, name: str) -> None:
        upper, work = f"{_BASE}/up/{name}", f"{_BASE}/work/{name}"
        os.makedirs(upper)
        os.makedirs(work)
        below = [f"{one}/up/{name}" for one in self._layers if os.path.isdir(f"{one}/up/{name}")]
        if below:
            found = os.stat(below[0])
            os.chown(upper, found.st_uid, found.st_gid)
        # The root of the upper layer is the root that the sandbox sees: it must look like the one below.
        below += [self._trees.lower(self._reach(path), f"{_BASE}/low/{name}{i}") for i, path in enumerate(lowers)]
        os.chmod(upper, os.stat(below[0]).st_mode & 0o7777)
        data = f"lowerdir={':'.join(below)},upperdir={upper},workdir={work},userxattr"
        kernel.mount("overlay", at, kind="overlay", flags=MS_NOSUID | MS_NODEV, data=data)

    def _host_root(self, root: str) -> Inside | Fresh:
        inside: Inside | Fresh
        if self._layers:
            self._overlay([], at=root, name="root")
            inside = Inside(root)
        else:
            os.makedirs(f"{_BASE}/up/root")
            kernel.mount(f"{_BASE}/up/root", root, flags=MS_BIND)
            inside = Fresh(root)
        for name, link in host_directories().items():
            if link is None:
                self._overlay([f"/{name}"], at=inside.mount_point(name, directory=True), name=name)
            elif not os.path.lexists(f"{root}/{name}"):
                os.symlink(link, f"{root}/{name}")
        if not os.path.exists("/usr/bin/python") and os.path.exists("/usr/bin/python3"):
            self._add_python(inside)
        self._configure(inside)
        return inside

    def _configure(self, inside: Inside | Fresh) -> None:
        """Show the host's configuration that programs need."""
        bound, copied = host_configuration()
        for name, path in bound.items():
            # Of a root that was used before something else may have this name; then that is what its owner wanted.
            with suppress(FileNotFoundError, NotADirectoryError, FileExistsError):
                place = inside.mount_point(f"etc/{name}", directory=os.path.isdir(path))
                kernel.mount(path, place, flags=MS_BIND)
                kernel.restrict_mount(inside.at(f"etc/{name}"), attributes=READ_ONLY, recursive=False)
        for name, data in copied.items():
            inside.file(f"etc/{name}", data)

    def _add_python(self, inside: Inside | Fresh) -> None:
        """Offer what people type, also where a distribution has only `python3`."""
        with suppress(FileNotFoundError, NotADirectoryError, FileExistsError):
            place = inside.mount_point(jobs.EXTRA_PATH.lstrip("/"), directory=True)
            os.symlink("/usr/bin/python3", f"{place}/python")

    def _write_files(self, inside: Inside | Fresh) -> None:
        """Write names and addresses; an image that has its own keeps them."""
        for name, text in _FILES.items():
            inside.file(name, text.format(user=USER_ID, name=self._plan["name"]).encode())
        if inside.directory("home/user", 0o755) and self._plan["all_users"]:
            os.chown(inside.at("home/user"), USER_ID, USER_ID)

    def _devices(self, inside: Inside | Fresh) -> None:
        place = inside.mount_point("dev", directory=True)
        kernel.mount("dev", place, kind="tmpfs", flags=MS_NOSUID | MS_NOEXEC, data="size=64k,nr_inodes=64,mode=755")
        directory = inside.at("dev")
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


def _mount_proc(inside: Inside | Fresh) -> None:
    kernel.mount(
        "proc", inside.mount_point("proc", directory=True), kind="proc", flags=MS_NOSUID | MS_NODEV | MS_NOEXEC
    )
    directory = inside.at("proc")
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
