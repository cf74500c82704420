"""What is written on a hosted sandbox when it is made, so that whoever comes later can find it. Pure.

A mark is a pair of short strings: metadata, labels or tags, as the vendor calls them. The id is chosen here and written
in the same call that makes the sandbox; so one whose creation was cut off is found by it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping

import msgspec

from rollmill.errors import ConfigError
from rollmill.sandboxes.records import Lease, Limits, Record, SandboxSpec

ID = "rollmill-id"
OWNER = "rollmill-owner"
SPEC = "rollmill-spec"
RECORD = "rollmill-record"
PREFIX = "rollmill-"
_DIGEST_LETTERS = 16


class Stamp(Record, frozen=True, kw_only=True):
    """What the marks of a sandbox say.

    Attributes:
        sandbox_id: its id.
        labels: of whoever asked for it.
        lease: as it was at the creation.
        limits: of its spec.
        digest: of its spec.
        ends_wall_s: when its wall limit is over, infinite if the marks do not say.
    """

    sandbox_id: str
    labels: Mapping[str, str]
    lease: Lease
    limits: Limits
    digest: str
    ends_wall_s: float


def digest_of(spec: SandboxSpec, *, source: str = "") -> str:
    """Return a short digest of a spec, and of the snapshot that a sandbox was made of: equal ones have equal ones."""
    whole = msgspec.json.encode(spec, order="deterministic") + source.encode()
    return hashlib.sha256(whole).hexdigest()[:_DIGEST_LETTERS]


def encode(
    spec: SandboxSpec, *, id: str, labels: Mapping[str, str], lease: Lease, now_wall_s: float, source: str = ""
) -> dict[str, str]:
    """Return the marks of a sandbox.

    Raises:
        ConfigError: if a label has one of the names used here.
    """
    taken = sorted(name for name in labels if name.startswith(PREFIX))
    if taken:
        raise ConfigError(f"labels {taken} begin with {PREFIX!r}, which marks what this library wrote; rename them")
    changed = {name: value for name, value in msgspec.to_builtins(spec.limits).items() if value != _DEFAULTS[name]}
    record = {
        "rollout": lease.rollout_id,
        "generation": lease.generation,
        "policy": lease.policy_version,
        "ttl": lease.ttl_s,
        "ends": round(now_wall_s + spec.limits.wall_s, 3),
        "limits": changed,
    }
    return {
        **labels,
        ID: id,
        OWNER: lease.owner,
        SPEC: digest_of(spec, source=source),
        RECORD: json.dumps(record, separators=(",", ":")),
    }


def decode(marks: Mapping[str, str]) -> Stamp | None:
    """Return what marks say, `None` if they are not this library's or are damaged."""
    if not marks.get(ID):
        return None
    try:
        record = json.loads(marks.get(RECORD, "{}"))
        lease = Lease(
            owner=marks.get(OWNER, ""),
            ttl_s=float(record.get("ttl", Lease(owner="").ttl_s)),
            rollout_id=str(record.get("rollout", "")),
            generation=int(record.get("generation", 0)),
            policy_version=int(record.get("policy", 0)),
        )
        limits = msgspec.convert(record.get("limits", {}), Limits)
        ends = float(record.get("ends", math.inf))
    except (ValueError, TypeError, AttributeError, ConfigError, msgspec.ValidationError):
        return None
    labels = {name: value for name, value in marks.items() if not name.startswith(PREFIX)}
    return Stamp(
        sandbox_id=marks[ID], labels=labels, lease=lease, limits=limits, digest=marks.get(SPEC, ""), ends_wall_s=ends
    )


def carries(marks: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Return whether all that is wanted is among the marks.

    Example:
        >>> carries({"a": "1", "b": "2"}, {"a": "1"}), carries({"a": "1"}, {"a": "2"})
        (True, False)
    """
    return all(marks.get(name) == value for name, value in wanted.items())


_DEFAULTS = msgspec.to_builtins(Limits())
