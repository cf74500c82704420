"""The Python that runs the agent inside a machine: this one's, with the few modules and libraries that it needs.

Which these are is found by running it: an interpreter imports the agent and tells what it has loaded. What it finds is
a tree of about 12 MB. The image of a sandbox has nothing to do with it, and does not see it.
"""

from __future__ import annotations

import os
import py_compile
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import msgspec

import rollmill
from rollmill.errors import SandboxError

HOME = "opt/rollmill/python"
LIBRARY = "opt/rollmill/lib"
BOOT = "opt/rollmill/boot.py"
_PACKAGES = ("rollmill", "rollmill.sandboxes", "rollmill.sandboxes.backends", "rollmill.sandboxes.backends.microvm")
_LONGEST_S = 60.0
# Imported late, by these modules or by the interpreter itself; of the last one the agent reads the source.
_LATE = ("array", "warnings", "traceback", "linecache", "encodings.utf_8", "encodings.ascii", "encodings.latin_1",
         "encodings.idna", "rollmill.sandboxes.guest.forkserver")  # fmt: skip
_STUBS = """
import sys, types
for name in {packages!r}:
    package = types.ModuleType(name)
    package.__path__ = [{root!r} + name[len("rollmill"):].replace(".", "/")]
    sys.modules[name] = package
"""
_START = _STUBS + "from rollmill.sandboxes.backends.microvm.inside import main\nmain()\n"
_ASK = (
    _STUBS
    + """
import importlib, json, os
import rollmill.sandboxes.backends.microvm.inside
for name in {late!r}:
    importlib.import_module(name)
found = [[one.__spec__.name, one.__spec__.origin, bool(one.__spec__.submodule_search_locations)]
         for one in sys.modules.values() if getattr(one, "__spec__", None) and one.__spec__.has_location]
found.append(["os", os.__file__, False])  # part of the program, and yet what it knows its library by
with open("/proc/self/maps") as stream:
    mapped = sorted({{line.split(None, 5)[5].strip() for line in stream if " /" in line}})
json.dump({{"version": "%d.%d" % sys.version_info[:2], "program": sys._base_executable, "modules": found,
            "mapped": mapped}}, sys.stdout)
"""
)


class _Told(msgspec.Struct, frozen=True):
    version: str
    program: str
    modules: tuple[tuple[str, str, bool], ...]
    mapped: tuple[str, ...]


def install(python: str, root: Path) -> None:
    """Put the interpreter, its modules and libraries, and the agent below a directory. Blocks: call it in a thread.

    Raises:
        SandboxError: if the interpreter does not run.
    """
    told = _ask(python)
    base = root / HOME / "lib" / f"python{told.version}"
    (base / "lib-dynload").mkdir(parents=True)
    source = Path(rollmill.__file__).parent
    for name, origin, is_package in told.modules:
        if name.startswith("rollmill."):
            _install_ours(Path(origin), root / LIBRARY / "rollmill" / Path(origin).relative_to(source))
        else:
            _install_module(name, Path(origin), is_package=is_package, base=base)
    program = root / HOME / "bin" / "python3"
    program.parent.mkdir(parents=True)
    shutil.copy(os.path.realpath(told.program), program)
    program.chmod(0o755)
    _merge_usr(root)
    for path in told.mapped:
        if ".so" in os.path.basename(path) and "lib-dynload" not in path:
            _install_library(Path(path), root)
    _install_loader(program, root)
    boot = root / BOOT
    boot.write_text(_START.format(packages=_PACKAGES, root=f"/{LIBRARY}/rollmill"), encoding="ascii")


def _ask(python: str) -> _Told:
    code = _ASK.format(packages=_PACKAGES, root=os.fspath(Path(rollmill.__file__).parent), late=_LATE)
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", code], capture_output=True, timeout=_LONGEST_S, check=True,
            stdin=subprocess.DEVNULL, env={"LANG": "C.UTF-8"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        said: Any = getattr(error, "stderr", b"") or b""
        raise SandboxError(
            f"{python} cannot be put into a machine: {error} {said[-400:].decode('utf-8', 'replace')}. Name a Python "
            "3.11 or later (settings: python)."
        ) from error
    return msgspec.json.decode(done.stdout, type=_Told)


def _install_ours(origin: Path, target: Path) -> None:
    """Copy a module of ours with its source, which the fork-server is started from, and compiled."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(origin, target)
    py_compile.compile(os.fspath(target), dfile=target.name, doraise=True,
                       invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)  # fmt: skip


def _install_module(name: str, origin: Path, *, is_package: bool, base: Path) -> None:
    if ".so" in origin.name:
        shutil.copy(origin, base / "lib-dynload" / origin.name)
        return
    target = base.joinpath(*name.split("."), *(["__init__"] if is_package else [])).with_suffix(".pyc")
    target.parent.mkdir(parents=True, exist_ok=True)
    py_compile.compile(os.fspath(origin), cfile=os.fspath(target), dfile=name, doraise=True,
                       invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)  # fmt: skip


def _install_library(path: Path, root: Path) -> None:
    """Copy a library to its place, with every name that leads to it there: programs ask for one of those."""
    target = root / os.fspath(path).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy(path, target)
    for entry in os.scandir(path.parent):
        if entry.is_symlink() and entry.name.startswith("lib") and os.path.realpath(entry.path) == os.fspath(path):
            link = target.parent / entry.name
            if not os.path.lexists(link):
                link.symlink_to(path.name)


def _merge_usr(root: Path) -> None:
    """Make `/lib` and the like lead to `/usr/lib` where they do on this machine."""
    for name in ("lib", "lib64", "bin"):
        if os.path.islink(f"/{name}"):
            (root / name).symlink_to(os.readlink(f"/{name}").lstrip("/"))
            (root / name).resolve().mkdir(parents=True, exist_ok=True)


def _install_loader(program: Path, root: Path) -> None:
    """Copy what the kernel starts a dynamic program with to where the program names it."""
    if loader := loader_of(program.read_bytes()):
        target = root / loader.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(target):
            shutil.copy(os.path.realpath(loader), target)


def loader_of(program: bytes) -> str:
    """Return the loader that an ELF file of 64 bits names, empty for one that is static.

    Raises:
        SandboxError: if it is no such file.
    """
    if program[:5] != b"\x7fELF\x02":
        raise SandboxError("the interpreter is no 64-bit ELF program; name the Python binary itself, not a script")
    (table,) = struct.unpack_from("<Q", program, 32)
    size, count = struct.unpack_from("<HH", program, 54)
    for number in range(count):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", program, table + number * size)
        if kind == 3:  # PT_INTERP
            return program[offset : offset + length].rstrip(b"\0").decode("ascii")
    return ""
