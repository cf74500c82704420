"""What gVisor's runtime is asked for: the OCI configuration of a sandbox, and its command lines. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rollmill.sandboxes.guest.kernel import KEPT_CAPABILITIES

TOOLS = "/.rollmill"
NAME = "sandbox"
KEEP_TMP = "tmp/.rollmill"
"""Made before the runtime starts and removed by the agent: over an empty /tmp the runtime mounts one of its own, which
nothing bounds and no snapshot has."""
_GIB = 1024**3
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
_KEPT = [f"CAP_{_CAPABILITIES[number]}" for number in KEPT_CAPABILITIES]
# Packages made by hand, as in the zygote: what is shown inside is the guest package alone.
_BOOT = f"""
import sys, types
for name, path in (("rollmill", "{TOOLS}/none"), ("rollmill.sandboxes", "{TOOLS}/src")):
    package = types.ModuleType(name)
    package.__path__ = [path]
    sys.modules[name] = package
from rollmill.sandboxes.guest.runsc_agent import main
main(sys.argv[1])
"""


def agent_argv(loader: str, plan: dict[str, Any]) -> list[str]:
    """Return how the agent is started: under its own interpreter, whatever the image holds.

    Args:
        loader: name of the dynamic loader among the tools; empty if the interpreter needs none.
        plan: what the agent is told.
    """
    start = [f"{TOOLS}/lib/{loader}", "--library-path", f"{TOOLS}/lib"] if loader else []
    return [*start, f"{TOOLS}/bin/python3", "-I", "-S", "-B", "-c", _BOOT, json.dumps(plan)]


def configuration(
    *, root: str, shared_memory: str, argv: Sequence[str], limits: dict[str, int], all_users: bool
) -> dict[str, Any]:
    """Return the configuration of a sandbox.

    Args:
        root: directory that becomes its root.
        shared_memory: directory that becomes `/dev/shm`, on the file system that counts what it writes.
        argv: its first process.
        limits: `pids`, `open_files`, `disk_bytes`.
        all_users: whether it has users beside root.
    """
    bounds = {
        "RLIMIT_NPROC": limits["pids"],
        "RLIMIT_NOFILE": limits["open_files"],
        "RLIMIT_FSIZE": limits["disk_bytes"],
        "RLIMIT_CORE": 0,
    }
    terminals = ["newinstance", "ptmxmode=0666", "mode=0620", *(["gid=5"] if all_users else [])]
    return {
        "ociVersion": "1.0.2",
        "hostname": NAME,
        "root": {"path": root, "readonly": False},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": list(argv),
            "cwd": "/",
            "env": ["PATH=/usr/bin:/bin", "LANG=C.UTF-8"],
            "noNewPrivileges": True,
            "capabilities": {kind: _KEPT for kind in ("bounding", "effective", "permitted")},
            "rlimits": [{"type": kind, "hard": value, "soft": value} for kind, value in bounds.items()],
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "nodev", "noexec", "ro"]},
            {
                "destination": "/dev",
                "type": "tmpfs",
                "source": "tmpfs",
                "options": ["nosuid", "mode=755"],
            },
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": terminals},
            {"destination": "/dev/shm", "type": "bind", "source": shared_memory, "options": ["nosuid", "nodev"]},
        ],
        "linux": {"namespaces": []},
    }


def memory_file_bytes(memory_bytes: int) -> int:
    """Return the bound on the file in which the runtime keeps the memory of a sandbox: whole GiB, as it grows.

    Where no group counts memory, this is what bounds the sandbox as a whole.
    """
    return -(-memory_bytes // _GIB) * _GIB


def global_flags(*, state: str, platform: str, log: str) -> list[str]:
    """Return the flags that every command of the runtime is given.

    Files are written where the host counts and bounds them (no overlay of gVisor's own); limits are those of the groups
    that the runtime is in already.
    """
    flags = [f"--root={state}", "--network=none", "--ignore-cgroups", "--overlay2=none", f"--log={log}"]
    return [*flags, f"--platform={platform}"] if platform else flags


def start_command(*, bundle: str, image: str, one_user: bool) -> list[str]:
    """Return what starts a sandbox: anew, or, with the directory of an image of its memory, where that left off."""
    if image:
        return ["restore", f"--image-path={image}", f"--bundle={bundle}", NAME]
    return [*(["--rootless"] if one_user else []), "run", f"--bundle={bundle}", NAME]


def verb_command(verb: str, *, image: str) -> list[str]:
    """Return what pauses, resumes or checkpoints a sandbox that runs.

    Raises:
        ValueError: for another word.
    """
    if verb in ("pause", "resume"):
        return [verb, NAME]
    if verb == "checkpoint":
        return ["checkpoint", f"--image-path={image}", NAME]
    raise ValueError(f"the runtime is not asked to {verb}")
