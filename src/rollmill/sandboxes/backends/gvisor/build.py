"""Builds gVisor's runtime from Debian's packages, where no current one is at hand: for tests and for trying it out.

Debian ships the sources as a library of December 2022. Two things are missing in it: a main program that is built, and
the vDSO, a small shared object that every program inside maps; its C++ sources are there, its link script is not.
For production bring a current runsc.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from rollmill.errors import SandboxError
from rollmill.sandboxes.records import Record

SOURCES = Path("/usr/share/gocode/src")
PACKAGES = ("golang-go", "golang-gvisor-gvisor-dev", "g++")
_GVISOR = "gvisor.dev/gvisor"
_BLOB = "pkg/sentry/loader/vdsodata/vdso.so"
_VERSION = "built-from-debian-sources"
_LIMIT_S = 1800.0
_MOST_COMPLAINT = 2000
# Where the kernel's loader maps it, with the page of clock parameters just below. One segment, nothing to write to.
VDSO_ADDRESS = 0xFFFFFFFFFF700000
LINK_SCRIPT = f"""
VERSION {{
  LINUX_2.6 {{
    global:
      clock_gettime; __vdso_clock_gettime; gettimeofday; __vdso_gettimeofday;
      getcpu; __vdso_getcpu; time; __vdso_time; __kernel_rt_sigreturn;
    local: *;
  }};
}}
PHDRS {{
  text PT_LOAD FLAGS(5) FILEHDR PHDRS;
  dynamic PT_DYNAMIC FLAGS(4);
  note PT_NOTE FLAGS(4);
  eh_frame_hdr PT_GNU_EH_FRAME;
}}
SECTIONS {{
  _params = {VDSO_ADDRESS:#x} - 0x1000;
  . = {VDSO_ADDRESS:#x} + SIZEOF_HEADERS;
  .hash : {{ *(.hash) }} :text
  .gnu.hash : {{ *(.gnu.hash) }}
  .dynsym : {{ *(.dynsym) }}
  .dynstr : {{ *(.dynstr) }}
  .gnu.version : {{ *(.gnu.version) }}
  .gnu.version_d : {{ *(.gnu.version_d) }}
  .gnu.version_r : {{ *(.gnu.version_r) }}
  .note : {{ *(.note.*) }} :text :note
  .eh_frame_hdr : {{ *(.eh_frame_hdr) }} :text :eh_frame_hdr
  .eh_frame : {{ KEEP(*(.eh_frame)) }} :text
  .dynamic : {{ *(.dynamic) }} :text :dynamic
  .rodata : {{ *(.rodata*) }} :text
  . = ALIGN(0x100);
  .text : {{ *(.text*) }} :text =0x90909090
}}
"""


class Step(Record, frozen=True, kw_only=True):
    """One command of a build.

    Attributes:
        what: in words.
        argv: the command.
        env: added to the environment.
        directory: where it runs, below the work directory.
    """

    what: str
    argv: tuple[str, ...]
    env: dict[str, str]
    directory: str


def missing(*, sources: Path = SOURCES, machine: str = "") -> tuple[str, ...]:
    """Return what a build needs and this machine has not, in words; nothing if it is possible."""
    machine = machine or platform.machine()
    found: list[str] = []
    if machine != "x86_64":
        found.append(f"the link script of the vDSO is known for x86_64 only, and this is {machine}")
    if not (sources / _GVISOR / "runsc").is_dir():
        found.append(f"gVisor's sources in {sources} (Debian's package golang-gvisor-gvisor-dev)")
    for program, package in (("go", "golang-go"), ("g++", "g++"), ("ld.bfd", "binutils")):
        if shutil.which(program) is None:
            found.append(f"the program {program} (Debian's package {package})")
    return tuple(found)


def steps(work: Path, target: Path) -> tuple[Step, ...]:
    """Return the commands of a build.

    Args:
        work: a directory with the sources in `src` and the link script in `vdso.lds`.
        target: the file to make.
    """
    root = f"src/{_GVISOR}"
    link = (
        "-nostdlib", "-shared", "-fuse-ld=bfd", "-Wl,-soname=linux-vdso.so.1", "-Wl,--hash-style=sysv",
        "-Wl,--no-undefined", "-Wl,-Bsymbolic", "-Wl,-z,max-page-size=4096", "-Wl,-z,common-page-size=4096",
        f"-Wl,-T{work}/vdso.lds",
    )  # fmt: skip
    compile_as = (
        "-I.",
        "-O2",
        "-std=c++11",
        "-fPIC",
        "-fno-sanitize=all",
        "-fno-stack-protector",
        "-fcf-protection=none",
    )
    environment = {
        "GO111MODULE": "off",
        "GOPATH": os.fspath(work),
        "GOCACHE": f"{work}/cache",
        "GOFLAGS": "",
        "CGO_ENABLED": "0",
    }
    return (
        Step(
            what="link the vDSO",
            argv=("g++", *compile_as, *link, "-o", _BLOB, "vdso/vdso.cc", "vdso/vdso_time.cc"),
            env={},
            directory=root,
        ),
        Step(
            what="build runsc (about 80 processor seconds)",
            argv=(
                "go", "build", "-trimpath", "-ldflags", f"-X main.version={_VERSION}", "-o", os.fspath(target),
                f"{_GVISOR}/runsc",
            ),
            env=environment,
            directory=root,
        ),
    )  # fmt: skip


def build(
    target: Path,
    *,
    progress: Callable[[str], None],
    sources: Path = SOURCES,
    run: Callable[[Step, Path], None] | None = None,
) -> Path:
    """Build the runtime, and put it in place when it runs. Blocks: minutes.

    Args:
        target: where it goes; an old one is replaced whole.
        progress: told of each step.
        sources: the Go packages.
        run: runs a step; processes unless given.

    Raises:
        SandboxError: if something is missing or a step fails; the old one stays.
    """
    if absent := missing(sources=sources):
        raise SandboxError(
            f"runsc cannot be built here; missing: {'; '.join(absent)}. On Debian 12: apt-get install "
            f"{' '.join(PACKAGES)}"
        )
    run = run_step if run is None else run
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rollmill-runsc-") as scratch:
        work = Path(scratch)
        progress(f"copy the sources from {sources}")
        shutil.copytree(sources, work / "src", symlinks=True)
        (work / "vdso.lds").write_text(LINK_SCRIPT)
        made = work / "runsc"
        for step in steps(work, made):
            progress(step.what)
            run(step, work)
        run(Step(what="ask it for its version", argv=(os.fspath(made), "--version"), env={}, directory="."), work)
        new = target.with_name(f"{target.name}.new{os.getpid()}")
        shutil.copy2(made, new)
        new.chmod(0o755)
        new.replace(target)
    return target


def run_step(step: Step, work: Path) -> None:
    """Run a step.

    Raises:
        SandboxError: if it fails; with what it said last.
    """
    try:
        done = subprocess.run(
            step.argv,
            cwd=work / step.directory,
            env={**os.environ, **step.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"building runsc failed, at the step {step.what!r}: {error}") from error
    if done.returncode:
        said = done.stdout.decode("utf-8", "replace").strip()[-_MOST_COMPLAINT:]
        raise SandboxError(f"building runsc failed, at the step {step.what!r} ({done.returncode}): {said}")
