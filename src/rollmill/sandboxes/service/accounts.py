"""Users of a sandbox: who they are, where their home is, and what a path of theirs means."""

from __future__ import annotations

import asyncio
import posixpath

from rollmill.errors import SandboxFileError
from rollmill.sandboxes.protocol import Sandbox
from rollmill.sandboxes.records import Record
from rollmill.sandboxes.service.connect import RpcProblem

_FRESH_S = 5.0
_MOST_BYTES = 1024 * 1024


class Account(Record, frozen=True, kw_only=True):
    """One user inside."""

    name: str
    uid: int
    gid: int
    home: str


class Names(Record, frozen=True, kw_only=True):
    """Users and groups of a sandbox."""

    accounts: dict[str, Account]
    owners: dict[int, str]
    groups: dict[int, str]

    def owner(self, uid: int) -> str:
        """Return a user's name, the number if there is none."""
        return self.owners.get(uid, str(uid))

    def group(self, gid: int) -> str:
        """Return a group's name, the number if there is none."""
        return self.groups.get(gid, str(gid))


ROOT = Account(name="root", uid=0, gid=0, home="/root")


def names_of(passwd: bytes, group: bytes) -> Names:
    """Return what the two files say; lines that say nothing are passed over.

    Example:
        >>> names_of(b"u:x:1000:1000:::/bin/sh", b"g:x:7:").accounts["u"]
        Account(name='u', uid=1000, gid=1000, home='/')
    """
    accounts, owners, groups = {"root": ROOT}, {0: "root"}, {0: "root"}
    for row in _rows(passwd):
        if len(row) >= 6 and row[2].isdecimal() and row[3].isdecimal():
            account = Account(name=row[0], uid=int(row[2]), gid=int(row[3]), home=row[5] or "/")
            accounts[account.name] = account
            owners.setdefault(account.uid, account.name)
    for row in _rows(group):
        if len(row) >= 3 and row[2].isdecimal():
            groups.setdefault(int(row[2]), row[0])
    return Names(accounts=accounts, owners=owners, groups=groups)


def _rows(data: bytes) -> list[list[str]]:
    return [line.split(":") for line in data.decode("utf-8", "replace").splitlines()]


def absolute(path: str, account: Account) -> str:
    """Return what a path means for a user: `~` and relative paths begin in the home.

    Example:
        >>> user = Account(name="u", uid=1, gid=1, home="/home/u")
        >>> [absolute(path, user) for path in ("a/../b", "~/x", "/etc/./passwd", "")]
        ['/home/u/b', '/home/u/x', '/etc/passwd', '/home/u']
    """
    if path == "~" or path.startswith("~/"):
        path = path[2:]
    elif path.startswith("~"):
        raise RpcProblem("invalid_argument", f"{path!r}: only ~/ is understood, not the home of another user")
    if "\0" in path:
        raise RpcProblem("invalid_argument", f"{path!r} holds a NUL")
    # Two slashes at the start would stay two.
    return "/" + posixpath.normpath(posixpath.join(account.home, path)).lstrip("/")


class Accounts:
    """Looks users up, and remembers for a moment what was found.

    Args:
        sandbox: whose users.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._names: Names | None = None
        self._read_s = 0.0

    async def names(self, *, fresh: bool = False) -> Names:
        """Return users and groups; what was read within the last seconds is taken unless `fresh`."""
        now_s = asyncio.get_running_loop().time()
        if self._names is None or fresh or now_s - self._read_s > _FRESH_S:
            self._names = names_of(await self._file("/etc/passwd"), await self._file("/etc/group"))
            self._read_s = now_s
        return self._names

    async def _file(self, path: str) -> bytes:
        try:
            return await self._sandbox.read(path, max_bytes=_MOST_BYTES)
        except SandboxFileError:
            return b""  # an image without one has root alone

    async def find(self, name: str) -> Account:
        """Return a user.

        Raises:
            RpcProblem: `unauthenticated` if the sandbox has none of this name.
        """
        for fresh in (False, True):
            account = (await self.names(fresh=fresh)).accounts.get(name)
            if account is not None:
                return account
        raise RpcProblem("unauthenticated", f"the sandbox has no user {name!r}")
