"""Modules that are imported now and run at their first use; and one costly answer of transformers, kept on disk.

Two mechanisms for `rollmill.weights.lean_import`, which decides what they are used for. Both go through the import
system, and neither changes what a module is once it has run.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollmill.weights.catalog import cache_directory

_STRUCTURE_MODULE = "transformers.utils.import_utils"
_STRUCTURE_FUNCTION = "create_import_structure_from_path"


class _Late(types.ModuleType):
    """A module whose code runs at the first use of a name of it, or at the import of a submodule."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _run(self)
        return getattr(self, name)


class _LateLoader(importlib.abc.Loader):
    def __init__(self, real: importlib.abc.Loader) -> None:
        self.real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__class__ = _Late


class _SubmoduleFinder(importlib.abc.MetaPathFinder):
    """Runs a late package before a submodule of it is looked for; what the package itself imported then is taken."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if parent is None or type(parent) is not _Late:
            return None
        _run(parent)
        there = sys.modules.get(fullname)
        if there is None:
            return None
        # The import system takes the module's own spec, and with it would run the module a second time.
        there.__spec__ = importlib.machinery.ModuleSpec(fullname, _ThereLoader(there))
        return there.__spec__


class _ThereLoader(importlib.abc.Loader):
    """Loads a module that was imported while it was looked for: the import system asks for it once more."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec


_SUBMODULES = _SubmoduleFinder()


def _run(module: types.ModuleType) -> None:
    spec = module.__spec__
    if type(module) is not _Late or spec is None or not isinstance(spec.loader, _LateLoader):
        return
    module.__class__ = types.ModuleType  # type: ignore[assignment]
    spec.loader = module.__loader__ = spec.loader.real
    spec.loader.exec_module(module)


def run_late(names: Sequence[str]) -> None:
    """Run the code of those of these modules that were imported late and have not run yet."""
    for name in names:
        module = sys.modules.get(name)
        if module is not None:
            _run(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the path finder does, with the loader wrapped."""

    def __init__(self, wrap: Callable[[str, importlib.abc.Loader], importlib.abc.Loader], *, names: Sequence[str]):
        self._wrap = wrap
        self._names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname in self._names else None
        if spec is not None and spec.loader is not None:
            spec.loader = self._wrap(fullname, spec.loader)
        return spec


@contextlib.contextmanager
def _finding(finder: _Finder) -> Iterator[None]:
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextlib.contextmanager
def late(names: Sequence[str]) -> Iterator[None]:
    """Inside this block an import of these modules does not run their code; the first use of them does, at any time.

    Those that were imported before stay as they are.
    """
    if _SUBMODULES not in sys.meta_path:
        sys.meta_path.insert(0, _SUBMODULES)
    with _finding(_Finder(lambda _, real: _LateLoader(real), names=names)):
        yield


# the table of all classes of transformers


@contextlib.contextmanager
def kept_import_structure(cache: Path | None = None) -> Iterator[None]:
    """Import transformers inside this block: its table of classes comes from the cache, where there is one.

    transformers makes it at every import, by reading all 1,900 of its model files. It is kept under the version and
    the identity of the installed files; an installation in development mode is read every time.

    Args:
        cache: folder of the tables; `imports` beside the prepared models unless given.
    """
    folder = cache_directory().parent / "imports" if cache is None else cache
    with _finding(_Finder(lambda _, real: _StructureLoader(real, cache=folder), names=(_STRUCTURE_MODULE,))):
        yield


class _StructureLoader(importlib.abc.Loader):
    """Runs the module that reads the files, then puts the kept table before its function."""

    def __init__(self, real: importlib.abc.Loader, *, cache: Path) -> None:
        self._real = real
        self._cache = cache

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._real.exec_module(module)
        spec, make = module.__spec__, getattr(module, _STRUCTURE_FUNCTION, None)
        if make is None or spec is None or spec.origin is None:
            return
        models = Path(spec.origin).parent.parent / "models"
        key = installation_key("transformers", beside=models.parent)
        if key is not None:
            setattr(module, _STRUCTURE_FUNCTION, kept(make, of=models, file=self._cache / f"{key}.json"))


def kept(make: Callable[[Any], Any], *, of: Path, file: Path) -> Callable[[Any], Any]:
    """Return `make` with its answer for one folder kept in a file; a damaged file is made again."""

    def answer(path: Any) -> Any:
        asked = Path(path)
        if of not in (asked, asked.parent) or asked.name not in (of.name, "__init__.py"):
            return make(path)
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError, msgspec.MsgspecError):
            return _decoded(msgspec.json.decode(file.read_bytes()))
        made = make(path)
        # Without the file everything works, only slower: a full disk, or a type that this version does not know.
        with contextlib.suppress(OSError, TypeError):
            encoded = msgspec.json.encode(_encoded(made))
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_name(f"{file.name}.{os.getpid()}")
            partial.write_bytes(encoded)
            partial.replace(file)
        return made

    return answer


def installation_key(distribution: str, *, beside: Path) -> str | None:
    """Return what names the installed files of a distribution; `None` if they may change without a new version."""
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    record = Path(str(found.locate_file(""))) / f"{distribution}-{found.version}.dist-info" / "RECORD"
    if record.parent.parent != beside.parent or not record.is_file():
        return None
    stat = record.stat()
    parts = (found.version, str(beside), str(stat.st_mtime_ns), str(stat.st_size), os.fspath(sys.version))
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:32]


def _encoded(value: Any) -> Any:
    """Return nested dictionaries and sets of strings as lists, which JSON knows: the first item says what it was."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return ["d", *([_encoded(key), _encoded(item)] for key, item in value.items())]
    if isinstance(value, set | frozenset) and all(isinstance(item, str) for item in value):
        return ["s" if isinstance(value, set) else "f", *sorted(value)]
    raise TypeError(f"cannot keep a {type(value).__name__}")


def _decoded(value: Any) -> Any:
    if isinstance(value, str):
        return value
    kind, *items = value
    if kind == "d":
        return {_decoded(key): _decoded(item) for key, item in items}
    return frozenset(items) if kind == "f" else set(items)
