"""Recipes: an image as a base and steps, in TOML. Pure but for reading the recipe and the files that it names.

    base = "debian-12"                      # an image of the store; may be missing if no step runs anything

    [build]                                 # what a step may take; all optional
    memory_mib = 2048
    disk_mib = 2048
    timeout_s = 1800.0

    [[step]]                                # a file or directory that lies beside the recipe, or a text
    file = "/opt/app/main.py"
    source = "main.py"                      # or: text = "..."
    mode = "0644"

    [[step]]                                # packages, from wheels that lie beside the recipe
    pip = ["numpy==2.1.0"]
    wheels = "wheels"

    [[step]]                                # a command, in a sandbox of what is done so far
    run = ["sh", "-c", "make -C /opt/app"]
    env = { LANG = "C.UTF-8" }
    timeout_s = 600.0

A step is named by a digest of all that goes into it: the layers below, its own words, the content of its files. One
that was built is taken as it is.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollmill.sandboxes.images import tree_files
from rollmill.sandboxes.images.canonical import CanonicalDigest, FileContent, Item, walk
from rollmill.sandboxes.images.entries import Entry, Kind, split_path
from rollmill.sandboxes.images.refusals import Refusal, refused

_MOST_RECIPE_BYTES = 1024**2
_MOST_STEPS = 100
_CHUNK = 1024**2
_KEY_FORMAT = 1


class Build(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one step may take.

    Attributes:
        memory_mib: memory of the sandbox, files in it included.
        disk_mib: what it may write; held in memory.
        inodes: files that it may make.
        pids: processes at once.
        timeout_s: of each command that names none.
    """

    memory_mib: int = 2048
    disk_mib: int = 1536
    inodes: int = 200_000
    pids: int = 512
    timeout_s: float = 1800.0


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One step; exactly one of `file`, `pip` and `run` says what it is.

    Attributes:
        file: absolute path in the image.
        source: file or directory beside the recipe.
        text: content of the file instead.
        mode: of a file, in octal; that of the source unless given.
        pip: packages, as pip takes them.
        wheels: directory beside the recipe that holds them and what they need.
        run: command and arguments; there is no shell.
        env: environment of the command.
        cwd: directory to start in.
        timeout_s: of the command.
        network: whether it needs one; no backend gives builds a network today.
    """

    file: str | None = None
    source: str | None = None
    text: str | None = None
    mode: str | None = None
    pip: tuple[str, ...] | None = None
    wheels: str | None = None
    run: tuple[str, ...] | None = None
    env: dict[str, str] = {}
    cwd: str | None = None
    timeout_s: float | None = None
    network: bool = False

    def what(self) -> str:
        """Return the step in a few words."""
        if self.file is not None:
            return f"file {self.file}"
        return f"pip {' '.join(self.pip)}" if self.pip is not None else f"run {' '.join(self.run or ())}"[:80]


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A recipe whose parts fit together.

    Attributes:
        base: an image of the store.
        step: what is done above it, in order.
        build: what one step may take.
    """

    base: str | None = None
    step: tuple[Step, ...] = ()
    build: Build = Build()


def parse(text: str) -> Recipe:
    """Return a recipe.

    Raises:
        ImageError: if it is none, with the step that is wrong.
    """
    try:
        recipe = msgspec.convert(tomllib.loads(text), type=Recipe)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise refused(Refusal.RECIPE, f"the recipe cannot be read: {error}") from error
    if not recipe.step and recipe.base is None:
        raise refused(Refusal.RECIPE, "the recipe has no base and no step; it makes nothing")
    if len(recipe.step) > _MOST_STEPS:
        raise refused(Refusal.RECIPE, f"the recipe has {len(recipe.step)} steps, most is {_MOST_STEPS}")
    for number, step in enumerate(recipe.step, start=1):
        if problem := _problem_of(step, recipe):
            raise refused(Refusal.RECIPE, f"step {number} of the recipe: {problem}")
    return recipe


def _problem_of(step: Step, recipe: Recipe) -> str:
    """Return what is wrong with a step, empty if nothing is."""
    kinds = [name for name in ("file", "pip", "run") if getattr(step, name) is not None]
    if len(kinds) != 1:
        return f"it has {' and '.join(kinds) or 'none'} of file, pip and run; each step has exactly one"
    allowed = {"file": ("source", "text", "mode"), "pip": ("wheels", "timeout_s", "network")}
    words = ("source", "text", "mode", "wheels", "env", "cwd", "timeout_s", "network")
    given = [word for word in words if getattr(step, word) not in (None, {}, False)]
    foreign = [word for word in given if word not in allowed.get(kinds[0], ("env", "cwd", "timeout_s", "network"))]
    if foreign:
        return f"{', '.join(foreign)} means nothing for {kinds[0]}"
    if kinds[0] != "file" and recipe.base is None:
        return f"{kinds[0]} needs a base to run in"
    if step.network:
        return "it asks for a network, and no backend gives builds one; put what it needs beside the recipe"
    if step.timeout_s is not None and not step.timeout_s > 0:
        return f"timeout_s is {step.timeout_s}; it must be above 0"
    return {"file": _problem_of_file, "pip": _problem_of_pip, "run": _problem_of_run}[kinds[0]](step)


def _problem_of_file(step: Step) -> str:
    if (step.source is None) == (step.text is None):
        return "a file has either a source or a text"
    if not (step.file or "").startswith("/") or (step.file or "").strip("/") == "":
        return f"the path {step.file!r} is not absolute"
    if step.mode is not None and (not step.mode or step.mode.strip("01234567") or int(step.mode, 8) > 0o777):
        return f"the mode {step.mode!r} is no octal number up to 0777"
    return ""


def _problem_of_pip(step: Step) -> str:
    if not step.pip or any(not one.strip() or one.startswith("-") or "\n" in one for one in step.pip):
        return f"{list(step.pip or ())} are not packages"
    if step.wheels is None:
        command = f"pip download --only-binary :all: -d wheels {' '.join(step.pip)}"
        return f"pip needs wheels: fetch them with `{command}`, and name that directory"
    return ""


def _problem_of_run(step: Step) -> str:
    if not step.run or any("\0" in one for one in step.run):
        return f"{list(step.run or ())} is no command"
    return ""


def read(path: Path) -> Recipe:
    """Return the recipe of a file.

    Raises:
        ImageError: if there is none, or if it is wrong.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(_MOST_RECIPE_BYTES + 1)
        if len(data) > _MOST_RECIPE_BYTES:
            raise refused(Refusal.RECIPE, f"the recipe {path} has more than {_MOST_RECIPE_BYTES} bytes")
        return parse(data.decode("utf-8"))
    except OSError as error:
        raise refused(Refusal.RECIPE, f"the recipe {path} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise refused(Refusal.RECIPE, f"the recipe {path} is no UTF-8: {error}") from error


# -- what lies beside a recipe ----------------------------------------------------------------------------------------


class Beside:
    """Files beside a recipe. None is reached through a link or from above: a recipe of somebody else must not take in
    what only its reader can see.

    Args:
        directory: of the recipe.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def directory(self, name: str) -> Path:
        """Return a directory.

        Raises:
            ImageError: if it is none, or lies elsewhere.
        """
        os.close(self._open(name))
        return self._directory / name

    def _open(self, name: str) -> int:
        parts = split_path(os.fsencode(name), what="path of the recipe")
        root = tree_files.open_root(self._directory)
        try:
            return tree_files.open_beneath(root, parts)
        except OSError as error:
            what = f"the recipe names {name!r}, which is no directory beside it: {error.strerror}"
            raise refused(Refusal.RECIPE, f"{what}. Links are not followed.") from error
        finally:
            os.close(root)

    def entries(self, step: Step) -> Iterator[Item]:
        """Yield the entries of a step that adds files."""
        target = split_path(os.fsencode((step.file or "").strip("/")), what="path of the recipe")
        path = b"/".join(target)
        if step.text is not None:
            data = step.text.encode()
            mode = int(step.mode or "0644", 8)
            yield Entry(path=path, kind=Kind.FILE, mode=mode, size=len(data)), _Text(data)
            return
        name = step.source or ""
        if (self._directory / name).is_dir():
            yield from self._tree(name, path)
            return
        yield from self._file(name, path, step)

    def _file(self, name: str, path: bytes, step: Step) -> Iterator[Item]:
        above, last = os.path.split(name.rstrip("/"))
        parent = self._open(above) if above else tree_files.open_root(self._directory)
        try:
            descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
        except OSError as error:
            what = f"the recipe names {name!r}, which is no file beside it: {error.strerror}"
            raise refused(Refusal.RECIPE, f"{what}. Links are not followed.") from error
        finally:
            os.close(parent)
        try:
            told = os.fstat(descriptor)
            mode = told.st_mode & 0o777 if step.mode is None else int(step.mode, 8)
            entry = Entry(path=path, kind=Kind.FILE, mode=mode, size=told.st_size)
            yield entry, FileContent(descriptor, told.st_size, path=path)
        finally:
            os.close(descriptor)

    def _tree(self, name: str, path: bytes) -> Iterator[Item]:
        """Yield a directory at another place, with no owners and times of this machine."""
        for entry, content in walk(self.directory(name)):
            inner = path if entry.path == b"./" else path + b"/" + entry.path
            link = path + b"/" + entry.link if entry.kind is Kind.HARD_LINK else entry.link
            yield msgspec.structs.replace(entry, path=inner, link=link, uid=0, gid=0, mtime_ns=0), content


class _Text:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, size: int, /) -> bytes:
        data, self._data = self._data[:size], self._data[size:]
        return data


def digest_of(entries: Iterator[Item]) -> str:
    """Return the sha256 of the canonical archive of some entries."""
    digest = CanonicalDigest()
    for entry, content in entries:
        digest.begin(entry)
        while data := content.read(_CHUNK):
            digest.content(data)
        digest.end(entry)
    return digest.digest()


def key_of(step: Step, *, below: Sequence[str], inputs: str) -> str:
    """Return the name of what a step makes: a digest of all that goes into it.

    Args:
        step: its words.
        below: ids of the layers under it, the lowest first.
        inputs: digest of the files that it takes.
    """
    words: dict[str, Any] = msgspec.to_builtins(step)
    text = msgspec.json.encode([_KEY_FORMAT, words, list(below), inputs], order="sorted")
    return f"sha256:{hashlib.sha256(text).hexdigest()}"
