"""Records of sandboxes: what is asked for, what is there, and how it ended.

Nothing here knows a backend. Every duration is in seconds and every size in bytes; both stand in the names.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

import msgspec

from rollmill.errors import ConfigError, SandboxFileError


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records here."""


class HostImage(Record, tag="host", frozen=True, kw_only=True):
    """The host's own system directories (`/usr` and what belongs to it), changed only in the sandbox's copy.

    Home directories, `/etc`, `/var`, `/run`, `/tmp` and everything else of the host are not there.
    """


class DirectoryImage(Record, tag="directory", frozen=True, kw_only=True):
    """A root file system in directories of the host.

    Attributes:
        layers: absolute paths, the uppermost first; never written to.
    """

    layers: tuple[str, ...]


class NamedImage(Record, tag="named", frozen=True, kw_only=True):
    """An image that the backend knows by name: a registry's reference, or a template of a hosted service.

    Attributes:
        name: as the backend spells it.
    """

    name: str


Image = HostImage | DirectoryImage | NamedImage


_MIB = 1024**2
# Below these an empty sandbox does not start, or its agent has no room to say what is wrong.
_LEAST = {
    "memory_bytes": 16 * _MIB,
    "disk_bytes": _MIB,
    "inodes": 256,
    "pids": 2,
    "cpu_s": 0,
    "output_bytes": 0,
    "open_files": 16,
}


class Limits(Record, frozen=True, kw_only=True):
    """Hard caps of one sandbox. Raising one lets a rollout do more, and lets it take more of the node.

    Attributes:
        memory_bytes: memory of the whole sandbox, files in it included; without cgroups, address space of each process.
        disk_bytes: what it may write in all; held in memory, and so counted there too.
        inodes: files and directories it may make in all; 50,000 take 0.6 s to release, a million 20 s.
        pids: processes and threads at a time.
        cpus: processor shares per wall second; needs cgroups.
        cpu_s: processor seconds of one process, 0 for no bound.
        wall_s: life of the sandbox from its creation.
        exec_s: longest that one command may take, for those that name no timeout of their own.
        output_bytes: what one command may write to stdout and stderr together before it is killed.
        open_files: descriptors of one process.
    """

    memory_bytes: int = 512 * 1024**2
    disk_bytes: int = 256 * 1024**2
    inodes: int = 20_000
    pids: int = 128
    cpus: float = 1.0
    cpu_s: int = 0
    wall_s: float = 3600.0
    exec_s: float = 300.0
    output_bytes: int = 64 * 1024**2
    open_files: int = 1024

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not value >= least:
                raise ConfigError(f"limits.{name} is {value}; a sandbox that starts at all needs at least {least}")
        for name in ("cpus", "wall_s", "exec_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"limits.{name} is {getattr(self, name)}; it must be above 0 and finite")


class Network(enum.Enum):
    """What a sandbox reaches."""

    NONE = "none"
    """Its own loopback and nothing else."""


class SandboxSpec(Record, frozen=True, kw_only=True):
    """What a sandbox is made of.

    Attributes:
        image: the root file system.
        limits: hard caps.
        expose: files and directories of the host, absolute paths, shown at the same place to be read only.
        network: what it reaches.
    """

    image: Image = HostImage()
    limits: Limits = Limits()
    expose: tuple[str, ...] = ()
    network: Network = Network.NONE


class Lease(Record, frozen=True, kw_only=True):
    """A time-limited claim on a sandbox: when it is not renewed in time, the sandbox ends.

    Attributes:
        owner: who holds it, such as a run's id.
        ttl_s: seconds from now, at creation and at each renewal.
        rollout_id: what it is for.
        generation: rises when the rollout moves to another sandbox; commands of an older one are refused.
        policy_version: weights at the rollout's start.
    """

    owner: str
    ttl_s: float = 600.0
    rollout_id: str = ""
    generation: int = 0
    policy_version: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.ttl_s < math.inf:
            raise ConfigError(f"ttl_s of a lease is {self.ttl_s}; it must be above 0 and finite: every lease ends")


class SandboxState(enum.Enum):
    """Where a sandbox is in its life."""

    QUEUED = "queued"
    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"
    PAUSING = "pausing"
    PAUSED = "paused"
    SNAPSHOTTING = "snapshotting"
    FORKING = "forking"
    STOPPING = "stopping"
    DEAD = "dead"
    LOST = "lost"


class DeathReason(enum.Enum):
    """Why a sandbox ended."""

    POLICY_INODES = "killed_by_policy_inodes"
    POLICY_BYTES = "killed_by_policy_bytes"
    POLICY_MEMORY = "killed_by_policy_memory"
    POLICY_PIDS = "killed_by_policy_pids"
    POLICY_CPU_TIME = "killed_by_policy_cpu_time"
    POLICY_WALL = "killed_by_policy_wall"
    POLICY_OUTPUT = "killed_by_policy_output"
    OUT_OF_MEMORY = "out_of_memory"
    RELEASED = "released"
    LEASE_EXPIRED = "lease_expired"
    KILLED_BY_OPERATOR = "killed_by_operator"
    START_FAILED = "start_failed"
    PROVIDER_LOST = "provider_lost"
    EXITED = "exited"


class Culprit(enum.Enum):
    """Whose doing an end is. What a rollout did is scored; what the infrastructure did is masked and tried again."""

    ROLLOUT = "rollout"
    INFRASTRUCTURE = "infrastructure"
    NOBODY = "nobody"


class Death(Record, frozen=True, kw_only=True):
    """How a sandbox ended.

    Attributes:
        reason: why.
        culprit: whose doing it is.
        detail: what was seen, in words.
    """

    reason: DeathReason
    culprit: Culprit
    detail: str = ""


class ExecResult(Record, frozen=True, kw_only=True):
    """How a command ended.

    Attributes:
        exit_code: as the process gave it, negative for the signal that ended it; 127 not found, 126 not executable.
        stdout: what it wrote, up to the cap.
        stderr: the same.
        killed_by: `timeout`, `output`, `owner`, or empty if it ended by itself.
        stdout_bytes: what it wrote in all; more than `len(stdout)` where output was cut.
        stderr_bytes: the same.
        wall_s: from start to end.
        cpu_s: processor seconds of the process and of the children it waited for.
        memory_bytes: largest resident size of one of them.
    """

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    killed_by: str = ""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    memory_bytes: int = 0

    @property
    def timed_out(self) -> bool:
        """Return whether the timeout ended it."""
        return self.killed_by == "timeout"

    @property
    def truncated(self) -> bool:
        """Return whether output was cut."""
        return self.stdout_bytes > len(self.stdout) or self.stderr_bytes > len(self.stderr)


class Address(Record, frozen=True, kw_only=True):
    """Where a port inside a sandbox is reached from outside.

    Attributes:
        host: name or number of the host.
        port: on that host.
        tls: whether it is reached by TLS alone.
    """

    host: str
    port: int
    tls: bool = False


class Usage(Record, frozen=True, kw_only=True):
    """What a sandbox uses now; `None` where this machine does not count it."""

    disk_bytes: int | None = None
    inodes: int | None = None
    processes: int | None = None
    memory_bytes: int | None = None
    peak_memory_bytes: int | None = None
    cpu_s: float | None = None
    oom_kills: int | None = None


class FileInfo(Record, frozen=True, kw_only=True):
    """One entry of a directory.

    Attributes:
        kind: `file`, `directory`, `link` or `other`.
        target: where a link points.
        attributes: what `set_attributes` put on a file, and whatever else stands in its `user.` attributes as text.
    """

    name: str
    kind: str
    size_bytes: int
    mode: int
    modified_s: float
    uid: int = 0
    gid: int = 0
    target: str = ""
    attributes: Mapping[str, str] = {}


def check_words(group: str, words: Mapping[str, str]) -> None:
    """Refuse words that no file could carry.

    Raises:
        SandboxFileError: naming the word.
    """
    if not group or "." in group or "\0" in group or group == "overlay":
        raise SandboxFileError(
            f"no words are in a group {group!r}: it is a name without a dot, and not the kernel's own"
        )
    for name, text in words.items():
        if not name or "\0" in name + text:
            raise SandboxFileError(f"a file cannot carry the word {name!r}: it is empty, or holds a NUL")


class SnapshotRef(Record, frozen=True, kw_only=True):
    """The files of a sandbox at one moment, and where `full` says so its processes.

    They stay until the snapshot is deleted, whatever becomes of the sandbox.

    Attributes:
        snapshot_id: as chosen by whoever asked for it.
        backend: which backend holds it.
        spec: what the sandbox was made of; what is restored from this is the same.
        disk_bytes: what the sandbox had written.
        inodes: files and directories among that.
        depth: layers that it consists of.
        durable: whether it outlives the process that holds it; else it ends with its provider.
        created_wall_s: when, in seconds since the epoch.
        full: whether the processes are in it too, and go on in whatever is restored.
    """

    snapshot_id: str
    backend: str
    spec: SandboxSpec
    disk_bytes: int = 0
    inodes: int = 0
    depth: int = 1
    durable: bool = False
    created_wall_s: float = 0.0
    full: bool = False


class Capabilities(Record, frozen=True, kw_only=True):
    """What a backend can do; `limits` names the fields of `Limits` that it holds to.

    `files_snapshot` keeps files, `full_snapshot` processes too; `fork` makes sandboxes with the files of one that lives
    on, `live_fork` with its processes. `pause` keeps memory, `pause_files` lets it go and keeps the files. `expose`
    gives a port inside an address outside.
    """

    files_snapshot: bool = False
    fork: bool = False
    full_snapshot: bool = False
    live_fork: bool = False
    pause: bool = False
    pause_files: bool = False
    expose: bool = False
    extend_ttl: bool = False
    labels: bool = False
    idempotent_create: bool = False
    batch_status: bool = False
    sessions: bool = False
    terminals: bool = False
    egress_policy: bool = False
    fast_python: bool = False
    users: bool = False
    attributes: bool = False
    needs_root: bool = False
    max_lifetime_s: float | None = None
    limits: tuple[str, ...] = Limits.__struct_fields__


class SandboxStatus(Record, frozen=True, kw_only=True):
    """One sandbox as its provider sees it.

    Attributes:
        sandbox_id: as chosen by whoever asked for it.
        state: where it is in its life.
        labels: as given at creation.
        lease: as last renewed.
        lease_left_s: until it expires.
        protections: what keeps it away from the host.
        isolation: name of the level that these make.
        death: how it ended, if it did.
        age_s: since its creation.
    """

    sandbox_id: str
    state: SandboxState
    labels: Mapping[str, str]
    lease: Lease
    lease_left_s: float
    protections: tuple[str, ...] = ()
    isolation: str = ""
    death: Death | None = None
    age_s: float = 0.0
