"""Bodies of the control API: what callers send and what they get, field by field as the public SDK reads them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from rollmill.errors import RollmillError
from rollmill.sandboxes.service.law import Plan, Standing
from rollmill.sandboxes.service.node import Node
from rollmill.sandboxes.service.problems import http_problem_of
from rollmill.sandboxes.service.served import Sample, Served
from rollmill.sandboxes.service.shelf import Kept

ENVD_VERSION = "0.6.4"
"""What callers take for the version of the services inside: what they ask for depends on it."""
CLIENT_ID = "rollmill"
_MIB = 1024**2


class Asked(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of what callers send; fields that are not known are passed over."""


class AutoResume(Asked, frozen=True, kw_only=True):
    """Whether a call to a paused sandbox resumes it."""

    enabled: bool = False


class NetworkAsked(Asked, frozen=True, kw_only=True):
    """What of a network is asked for."""

    allow_out: tuple[str, ...] | None = None
    rules: Mapping[str, Any] | None = None
    egress_proxy: Any = None


class NewSandbox(Asked, frozen=True, kw_only=True):
    """A sandbox to be made."""

    template_id: str = msgspec.field(name="templateID")
    timeout: int | None = None
    auto_pause: bool = False
    auto_pause_memory: bool | None = None
    auto_resume: AutoResume | None = None
    allow_internet_access: bool | None = msgspec.field(name="allow_internet_access", default=None)
    metadata: Mapping[str, str] | None = None
    env_vars: Mapping[str, str] | None = None
    network: NetworkAsked | None = None
    mcp: Any = None
    iam: Any = None
    volume_mounts: tuple[Any, ...] | None = None

    def unsupported(self, *, without_internet: bool) -> str:
        """Return what of this cannot be had here, empty if all can.

        Args:
            without_internet: pass over that the internet is asked for.
        """
        network = self.network or NetworkAsked()
        wanted = {
            "allow_internet_access": self.allow_internet_access and not without_internet,
            "network.allowOut": network.allow_out,
            "network.rules": network.rules,
            "network.egressProxy": network.egress_proxy,
            "mcp": self.mcp,
            "iam": self.iam,
            "volumeMounts": self.volume_mounts,
        }
        return ", ".join(name for name, value in wanted.items() if value)

    def plan(self) -> Plan:
        """Return what happens at the timeout."""
        return Plan(
            pause=self.auto_pause,
            keep_memory=self.auto_pause_memory is not False,
            auto_resume=self.auto_resume is not None and self.auto_resume.enabled,
        )


class TimeoutAsked(Asked, frozen=True, kw_only=True):
    """Another timeout."""

    timeout: int


class ConnectAsked(Asked, frozen=True, kw_only=True):
    """Connect and resume; `memory` false asks for a start from the files alone."""

    timeout: int | None = None
    memory: bool | None = None


class PauseAsked(Asked, frozen=True, kw_only=True):
    """A pause; `memory` false asks to keep the files alone."""

    memory: bool | None = None


class SnapshotAsked(Asked, frozen=True, kw_only=True):
    """A snapshot; `memory` asks for programs too, and false for the files alone."""

    name: str | None = None
    memory: bool | None = None


class ForkAsked(Asked, frozen=True, kw_only=True):
    """Forks of a sandbox."""

    timeout: int | None = None
    count: int | None = None


class RefreshAsked(Asked, frozen=True, kw_only=True):
    """A renewal of older callers."""

    duration: int | None = None


def created(served: Served, *, domain: str | None) -> dict[str, Any]:
    """Return a sandbox as whoever made it or connected to it gets it."""
    return {
        "templateID": served.order.template,
        "sandboxID": served.id,
        "clientID": CLIENT_ID,
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": served.token,
        "domain": domain,
    }


def forked(result: Served | RollmillError, *, domain: str | None) -> dict[str, Any]:
    """Return a fork, or why there is none."""
    if isinstance(result, Served):
        return {"sandbox": created(result, domain=domain)}
    problem = http_problem_of(result)
    return {"error": {"code": problem.status, "message": str(problem)}}


def listed(served: Served, *, node: Node) -> dict[str, Any]:
    """Return a sandbox as lists show it."""
    limits = served.spec.limits
    return {
        "templateID": served.order.template,
        "sandboxID": served.id,
        "clientID": CLIENT_ID,
        "startedAt": stamp(served.started_wall_s),
        "endAt": stamp(node.end_wall_s(served)),
        "cpuCount": max(1, round(limits.cpus)),
        "memoryMB": limits.memory_bytes // _MIB,
        "diskSizeMB": limits.disk_bytes // _MIB,
        "state": served.standing.value,
        "envdVersion": ENVD_VERSION,
        "metadata": dict(served.order.metadata),
    }


def detailed(served: Served, *, node: Node, domain: str | None) -> dict[str, Any]:
    """Return all that is said of a sandbox."""
    plan = served.order.plan
    detail = {
        **listed(served, node=node),
        "envdAccessToken": served.token,
        "domain": domain,
        "allowInternetAccess": False,
        "lifecycle": {"autoResume": plan.auto_resume, "onTimeout": "pause" if plan.pause else "kill"},
    }
    if served.standing is not Standing.PAUSED:
        return detail
    return {**detail, "pauseMode": "full" if served.files is None else "filesystem"}


def snapshot_info(kept: Kept) -> dict[str, Any]:
    """Return a snapshot as lists show it."""
    return {"snapshotID": kept.id, "names": [kept.name] if kept.name else []}


def metric(sample: Sample, *, served: Served) -> dict[str, Any]:
    """Return what a sandbox used at a time; what is not counted on this machine is 0."""
    limits, usage = served.spec.limits, sample.usage
    return {
        "timestamp": stamp(sample.wall_s),
        "timestampUnix": int(sample.wall_s),
        "cpuCount": max(1, round(limits.cpus)),
        "cpuUsedPct": round(sample.cpu_pct, 2),
        "memUsed": usage.memory_bytes or 0,
        "memTotal": limits.memory_bytes,
        "memCache": 0,
        "diskUsed": usage.disk_bytes or 0,
        "diskTotal": limits.disk_bytes,
    }


def stamp(wall_s: float) -> str:
    """Return a time as callers read it.

    Example:
        >>> stamp(0.5)
        '1970-01-01T00:00:00.500000Z'
    """
    seconds, microseconds = divmod(round(wall_s * 1e6), 1_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{microseconds:06}Z"
