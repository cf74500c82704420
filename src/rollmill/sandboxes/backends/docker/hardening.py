"""What a container is made of, and what can be told of its isolation from what the daemon says. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from rollmill.sandboxes.backends.docker.settings import DockerSettings
from rollmill.sandboxes.backends.hosted.marks import RECORD
from rollmill.sandboxes.disk_records import ProcessMark
from rollmill.sandboxes.isolation import Protection
from rollmill.sandboxes.records import SandboxSpec

PROCESS = "rollmill-process"
"""Label: which process owns the container."""

NAMES = "rollmill-names"
"""Label: the names of those that its creator asked for. Others come from the image, as one of a snapshot has some."""

_OWN_PROCESSES = 4
"""The init, its sleep, and what kills and looks inside."""

_WALL_GRACE_S = 30.0
_ORPHAN_GRACE_S = 60.0
_HARMLESS = frozenset(
    {"CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP", "NET_BIND_SERVICE"}
)
_KERNELS = {"runsc": Protection.OWN_KERNEL, "gvisor": Protection.OWN_KERNEL, "kata": Protection.VIRTUAL_MACHINE}
_ADOPTED = re.compile(r"\.\.(\d+)\.(\d+)$")
_WAIT = 'exec sleep "$1"'


def container(
    spec: SandboxSpec, *, image: str, marks: Mapping[str, str], owner: ProcessMark, settings: DockerSettings
) -> dict[str, Any]:
    """Return the body of a request that makes a container."""
    limits = spec.limits
    host: dict[str, Any] = {
        "NetworkMode": "none",
        "CapDrop": ["ALL"],
        "CapAdd": list(settings.cap_add),
        "SecurityOpt": ["no-new-privileges:true"],
        "Privileged": False,
        "Memory": limits.memory_bytes,
        "MemorySwap": limits.memory_bytes,
        "NanoCpus": int(limits.cpus * 1e9),
        "PidsLimit": limits.pids + _OWN_PROCESSES,
        "Ulimits": [{"Name": "nofile", "Soft": limits.open_files, "Hard": limits.open_files}],
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "LogConfig": {"Type": "none", "Config": {}},
        "RestartPolicy": {"Name": "no"},
        "Init": settings.init,
        "ReadonlyRootfs": settings.read_only_root,
    }
    if settings.read_only_root:
        options = f"rw,exec,nosuid,nodev,mode=1777,size={limits.disk_bytes},nr_inodes={limits.inodes}"
        host["Tmpfs"] = dict.fromkeys(settings.writable, options)
    if settings.storage_size:
        host["StorageOpt"] = {"size": str(limits.disk_bytes)}
    if settings.runtime:
        host["Runtime"] = settings.runtime
    return {
        "Image": image,
        # It ends by itself after its wall limit, also if nobody is left who would end it.
        "Entrypoint": ["/bin/sh", "-c", _WAIT, "sh"],
        "Cmd": [str(math.ceil(limits.wall_s + _WALL_GRACE_S))],
        "Labels": {**marks, PROCESS: msgspec.json.encode(owner).decode(), NAMES: json.dumps(sorted(marks))},
        "User": "0",
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Tty": False,
        "OpenStdin": False,
        "NetworkDisabled": True,
        "HostConfig": host,
    }


def protections_of(shown: Mapping[str, Any], info: Mapping[str, Any]) -> frozenset[Protection]:
    """Return what keeps a container from its host: what the daemon shows that it has, not what was asked for.

    Args:
        shown: the container, as the daemon describes it.
        info: the daemon, as it describes itself.
    """
    host = shown.get("HostConfig") or {}
    if host.get("Privileged"):
        return frozenset()
    options = [str(one) for one in info.get("SecurityOptions") or []]
    security = [str(one).lower() for one in host.get("SecurityOpt") or []]
    found = set()
    if all(host.get(name) in (None, "", "private", "shareable", "none") for name in ("PidMode", "IpcMode", "UTSMode")):
        found.add(Protection.NAMESPACES)
    if host.get("NetworkMode") == "none":
        found.add(Protection.NO_NETWORK)
    if any(one.startswith("no-new-privileges") and not one.endswith("false") for one in security):
        found.add(Protection.NO_NEW_PRIVILEGES)
    dropped = {str(one).upper().removeprefix("CAP_") for one in host.get("CapDrop") or []}
    added = {str(one).upper().removeprefix("CAP_") for one in host.get("CapAdd") or []}
    if added <= _HARMLESS and ("ALL" in dropped or _podman_dropped_all(shown)):
        found.add(Protection.CAPABILITIES_DROPPED)
    if any(one.startswith("name=seccomp") for one in options) and "seccomp=unconfined" not in security:
        # The daemons' own profiles refuse new namespaces to whoever lacks CAP_SYS_ADMIN.
        found |= {Protection.SECCOMP, Protection.NO_NESTED_NAMESPACES}
    mapped = any(one.startswith(("name=userns", "name=rootless")) for one in options)
    if mapped and host.get("UsernsMode") != "host":
        found.add(Protection.USER_NAMESPACE)
    caps = {
        Protection.MEMORY_CAP: (host.get("Memory"), info.get("MemoryLimit", True)),
        Protection.PIDS_CAP: (host.get("PidsLimit"), info.get("PidsLimit", True)),
        Protection.CPU_CAP: (host.get("NanoCpus") or host.get("CpuQuota"), info.get("CpuCfsQuota", True)),
    }
    found |= {one for one, (value, held) in caps.items() if held and (value or 0) > 0}
    runtime = str(host.get("Runtime") or "").lower()
    found |= {kernel for name, kernel in _KERNELS.items() if name in runtime}
    return frozenset(found | {Protection.FREEZE})


def _podman_dropped_all(shown: Mapping[str, Any]) -> bool:
    """Return whether nothing is left: Podman lists what was dropped one by one, and what is left beside it."""
    return "EffectiveCaps" in shown and not shown["EffectiveCaps"]


def marks_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that were asked for when a container was made, and its owner's.

    Example:
        >>> marks_of({NAMES: '["a"]', "a": "1", "of": "the image"})
        {'a': '1'}
    """
    try:
        names = {*json.loads(labels.get(NAMES, "[]")), PROCESS}
    except (ValueError, TypeError):
        names = {PROCESS}
    return {name: value for name, value in labels.items() if name in names}


def is_orphan(
    labels: Mapping[str, str],
    *,
    owner: ProcessMark | None,
    now_wall_s: float,
    boot_id: str,
    alive: Mapping[ProcessMark, bool],
) -> bool:
    """Return whether nobody owns a container any more: its owner ended on this machine, or its wall limit is over.

    Args:
        labels: of the container.
        owner: who made it, or has it now.
        now_wall_s: now.
        boot_id: of this machine; owners on others cannot be looked at.
        alive: which owners live.
    """
    try:
        ends = float(json.loads(labels[RECORD])["ends"])
    except (KeyError, ValueError, TypeError):
        ends = math.inf
    if now_wall_s > ends + _ORPHAN_GRACE_S:
        return True
    return owner is not None and owner.boot_id == boot_id and not alive.get(owner, True)


def adopted_name(name: str, mark: ProcessMark) -> str:
    """Return the name of a container that another process took over: labels cannot be changed, a name can.

    Example:
        >>> mark = ProcessMark(pid=7, started_ticks=9, boot_id="b")
        >>> adopted_name("rollmill-a", mark), adopted_name("rollmill-a..1.2", mark)
        ('rollmill-a..7.9', 'rollmill-a..7.9')
    """
    return f"{_ADOPTED.sub('', name)}..{mark.pid}.{mark.started_ticks}"


def owner_now(name: str, labels: Mapping[str, str]) -> ProcessMark | None:
    """Return who has a container: the process in its name, else the one that made it.

    Example:
        >>> maker = ProcessMark(pid=1, started_ticks=2, boot_id="b")
        >>> owner_now("rollmill-a..7.9", {PROCESS: msgspec.json.encode(maker).decode()})
        ProcessMark(pid=7, started_ticks=9, boot_id='b')
    """
    maker = owner_of(labels)
    found = _ADOPTED.search(name)
    if maker is None or found is None:
        return maker
    return ProcessMark(pid=int(found[1]), started_ticks=int(found[2]), boot_id=maker.boot_id)


def owner_of(labels: Mapping[str, str]) -> ProcessMark | None:
    """Return the process that made a container, `None` if its label does not say."""
    try:
        return msgspec.json.decode(labels.get(PROCESS, ""), type=ProcessMark)
    except msgspec.MsgspecError:
        return None
