"""What the agent inside needs of the host: its interpreter, the libraries of that, and the guest package.

An image may have no Python, or an old one, or another C library. So the agent brings its own, read only, under
`/.rollmill`, and uses nothing of the image until it runs a program of it.
"""

from __future__ import annotations

import os
import subprocess

import msgspec

import rollmill
from rollmill.errors import SandboxError
from rollmill.sandboxes.guest.oci import TOOLS
from rollmill.sandboxes.records import Record

_LIMIT_S = 30.0
# Everything that the agent imports is imported, and then the linker is asked what it has loaded for that.
_PROBE = """
import array, atexit, ctypes, errno, fcntl, json, os, platform, pwd, resource, select, signal, socket, stat, struct
import sys, sysconfig, termios, time, traceback
class Loaded(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]
names = []
kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Loaded), ctypes.c_size_t, ctypes.c_void_p)
note = kind(lambda one, size, data: names.append(os.fsdecode(one.contents.name or b"")) or 0)
ctypes.CDLL(None).dl_iterate_phdr(note, None)
print(json.dumps({
    "interpreter": os.path.realpath("/proc/self/exe"),
    "standard": sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix, "base": sys.base_prefix}),
    "version": "python%d.%d" % sys.version_info[:2],
    "directory": sys.platlibdir,
    "loaded": [one for one in names if one.startswith("/")],
}))
"""


class Found(Record, frozen=True, kw_only=True):
    """What an interpreter says of itself."""

    interpreter: str
    standard: str
    version: str
    directory: str
    loaded: tuple[str, ...]


class Toolbox(Record, frozen=True, kw_only=True):
    """What is shown inside.

    Attributes:
        shown: pairs of a path inside and a path of the host.
        hidden: directories among these whose content is nobody's business.
        loader: name of the dynamic loader; empty for an interpreter that needs none.
    """

    shown: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...]
    loader: str


def probe(python: str) -> Toolbox:
    """Ask an interpreter what it consists of. Blocks: call it in a thread.

    Raises:
        SandboxError: if it does not start, or has no standard library.
    """
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", _PROBE],
            capture_output=True,
            timeout=_LIMIT_S,
            check=True,
            env={"LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
        )
        found = msgspec.json.decode(done.stdout, type=Found)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        said = getattr(error, "stderr", b"") or b""
        raise SandboxError(
            f"{python} cannot be the agent's interpreter: {error} {said.decode('utf-8', 'replace').strip()}. Name a "
            "Python 3.11 or later (settings: python)."
        ) from error
    return toolbox(found, package=os.path.join(os.path.dirname(rollmill.__file__), "sandboxes", "guest"))


def toolbox(found: Found, *, package: str) -> Toolbox:
    """Return what is shown inside for an interpreter.

    Args:
        found: what it says.
        package: directory of the guest package.
    """
    inside = f"{TOOLS}/{found.directory}/{found.version}"
    libraries = [one for one in found.loaded if not one.startswith(found.standard + "/") and one != found.interpreter]
    loaders = [
        one for one in map(os.path.basename, libraries) if one.startswith(("ld-linux", "ld-musl", "ld64", "ld-"))
    ]
    shown = [
        (f"{TOOLS}/bin/python3", found.interpreter),
        (inside, found.standard),
        (f"{TOOLS}/src/guest", package),
        *((f"{TOOLS}/lib/{os.path.basename(one)}", one) for one in libraries),
    ]
    hidden = tuple(f"{inside}/{name}" for name in ("site-packages", "dist-packages"))
    return Toolbox(shown=tuple(shown), hidden=hidden, loader=loaders[0] if loaders else "")
