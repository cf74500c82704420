"""Files of a sandbox as the file system service shows them, for one of its users.

As in the service that it stands in for, calls are carried out by root inside; what they make belongs to the user.
"""

from __future__ import annotations

import posixpath
from datetime import UTC, datetime

from rollmill.errors import SandboxFileError
from rollmill.sandboxes.protocol import Sandbox
from rollmill.sandboxes.records import FileInfo
from rollmill.sandboxes.service.accounts import Account, Names
from rollmill.sandboxes.service.connect import RpcProblem
from rollmill.sandboxes.service.law import permissions
from rollmill.sandboxes.service.wire import EntryInfo, FileType

# A link has the type of what it leads to, as in the version that is told to callers, and a target; one that leads
# nowhere has its own.
_TYPES = {"file": FileType.FILE, "directory": FileType.DIRECTORY, "link": FileType.SYMLINK}
_FORMATS = {"file": 0o100000, "directory": 0o040000, "link": 0o120000}
_MOST_ENTRIES = 10_000
_COPY_S = 60.0
_MOST_LINKS = 40
_MOST_WORDS = 500


METADATA_GROUP = "e2b"


def metadata_of_file(found: FileInfo) -> dict[str, str]:
    """Return what callers put on a file."""
    start = f"{METADATA_GROUP}."
    return {name.removeprefix(start): text for name, text in found.attributes.items() if name.startswith(start)}


class Inside:
    """Files of one sandbox.

    Args:
        sandbox: whose.
        names: its users and groups.
    """

    def __init__(self, sandbox: Sandbox, names: Names) -> None:
        self._sandbox, self._names = sandbox, names

    async def find(self, path: str) -> FileInfo | None:
        """Return what is at a path, links not followed; `None` if nothing is."""
        try:
            return await self._sandbox.stat(path)
        except SandboxFileError:
            return None

    async def follow(self, path: str) -> tuple[str, FileInfo | None]:
        """Return where the links of a path end, and what is there."""
        for _ in range(_MOST_LINKS):
            found = await self.find(path)
            if found is None or found.kind != "link":
                return path, found
            path = posixpath.normpath(posixpath.join(posixpath.dirname(path), found.target))
        raise RpcProblem("failed_precondition", f"{path!r} is a link of more than {_MOST_LINKS} links, or of itself")

    async def entry(self, path: str) -> EntryInfo:
        """Return what is at a path.

        Raises:
            RpcProblem: `not_found` if nothing is.
        """
        found = await self.find(path)
        if found is None:
            raise RpcProblem("not_found", f"{path!r} does not exist")
        return await self._shown(path, found)

    async def _shown(self, path: str, found: FileInfo) -> EntryInfo:
        kind, target = found.kind, None
        if kind == "link":
            kind, target = await self._end_of(path, found)
        return EntryInfo(
            name=posixpath.basename(path) or "/",
            type=_TYPES.get(kind, FileType.UNSPECIFIED),
            path=path,
            size=found.size_bytes,
            mode=found.mode,
            permissions=permissions(_FORMATS.get(found.kind, 0) | found.mode),
            owner=self._names.owner(found.uid),
            group=self._names.group(found.gid),
            modified_time=datetime.fromtimestamp(found.modified_s, UTC),
            symlink_target=target,
            metadata=metadata_of_file(found),
        )

    async def _end_of(self, path: str, link: FileInfo) -> tuple[str, str]:
        """Return what a link leads to, and where that is; of one that leads nowhere, what it says."""
        try:
            end, found = await self.follow(path)
        except RpcProblem:  # to itself
            return "link", link.target
        return ("link", link.target) if found is None else (found.kind, end)

    async def directory(self, path: str) -> str:
        """Return where a directory is, links followed.

        Raises:
            RpcProblem: `not_found`, or `invalid_argument` if it is none.
        """
        end, found = await self.follow(path)
        if found is None:
            raise RpcProblem("not_found", f"{path!r} does not exist")
        if found.kind != "directory":
            raise RpcProblem("invalid_argument", f"{path!r} is not a directory")
        return end

    async def list(self, path: str, *, depth: int) -> tuple[EntryInfo, ...]:
        """Return what is below a directory, so many levels deep, each directory before what is in it.

        Raises:
            RpcProblem: `not_found`, `invalid_argument`, or `resource_exhausted` if there is too much.
        """
        found: list[EntryInfo] = []
        await self._walk(await self.directory(path), depth, found)
        return tuple(found)

    async def _walk(self, path: str, depth: int, into: list[EntryInfo]) -> None:
        for entry in await self._sandbox.list_dir(path):
            if len(into) >= _MOST_ENTRIES:
                raise RpcProblem(
                    "resource_exhausted", f"more than {_MOST_ENTRIES} entries are there; list less at once"
                )
            below = posixpath.join(path, entry.name)
            into.append(await self._shown(below, entry))
            if entry.kind == "directory" and depth > 1:
                await self._walk(below, depth - 1, into)

    async def make_dir(self, path: str, account: Account) -> EntryInfo:
        """Make a directory and those above it.

        Raises:
            RpcProblem: `already_exists`, or `invalid_argument` if something else is there.
        """
        try:
            made = await self._sandbox.make_dir(path, user=account.name)
        except SandboxFileError as error:
            raise RpcProblem("invalid_argument", f"{path!r} is no place for a directory: {error}") from error
        if not made:
            raise RpcProblem("already_exists", f"the directory {path!r} exists")
        return await self.entry(path)

    async def move(self, source: str, destination: str, account: Account) -> EntryInfo:
        """Move a file or directory.

        Raises:
            RpcProblem: `not_found` if it is not there, `invalid_argument` if it cannot go there.
        """
        await self.entry(source)
        try:
            await self._sandbox.rename(source, destination, user=account.name)
        except SandboxFileError:  # a directory of the image cannot be renamed, only copied
            await self._copy_over(source, destination)
        return await self.entry(destination)

    async def _copy_over(self, source: str, destination: str) -> None:
        result = await self._sandbox.exec(["mv", "-T", "--", source, destination], cwd="/", timeout_s=_COPY_S)
        if result.exit_code:
            text = result.stderr.decode("utf-8", "replace").strip()[:_MOST_WORDS]
            raise RpcProblem("invalid_argument", f"{source!r} cannot be moved to {destination!r}: {text}")

    async def remove(self, path: str) -> None:
        """Remove a file, or a directory with all that is in it; what is not there is removed already."""
        if path == "/":
            raise RpcProblem("invalid_argument", "the root directory is not to be removed; kill the sandbox instead")
        try:
            await self._sandbox.remove(path, recursive=True)
        except SandboxFileError as error:
            if await self.find(path) is not None:
                raise RpcProblem("invalid_argument", str(error)) from error
