"""Claims on warm pools: a sandbox that the controller has ready, taken instead of made. Pure.

Follows `extensions.agents.x-k8s.io/v1beta1` of agent-sandbox 1.0. What a claimed sandbox is made of, and its memory,
disk and processors, stand in the pool's template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmill.errors import ImageError, SandboxError
from rollmill.sandboxes.records import SandboxState

GROUP = "extensions.agents.x-k8s.io/v1beta1"
_NO_TEMPLATE = frozenset({"WarmPoolNotFound", "TemplateNotFound"})
_ENDED = frozenset({"ClaimExpired", "SandboxExpired", "PodFailed", "PodSucceeded"})
_REFUSED = frozenset(
    {"InvalidMetadata", "InvalidConfiguration", "EnvVarsInjectionRejected", "VolumeClaimTemplatesError"}
)


def manifest(*, name: str, pool: str, labels: Mapping[str, str], annotations: Mapping[str, str]) -> dict[str, Any]:
    """Return the resource that takes a sandbox of a pool, without the time of its end."""
    return {
        "apiVersion": GROUP,
        "kind": "SandboxClaim",
        "metadata": {"name": name, "labels": dict(labels), "annotations": dict(annotations)},
        "spec": {"warmPoolRef": {"name": pool}, "additionalPodMetadata": {"labels": dict(labels)}},
    }


def lifecycle(ends: str) -> dict[str, str]:
    """Return what ends a claim, and its sandbox with it, at a time."""
    return {"shutdownTime": ends, "shutdownPolicy": "Delete"}


def sandbox_of(shown: Mapping[str, Any]) -> str:
    """Return the name of the sandbox that a claim was given, empty as long as there is none.

    Example:
        >>> sandbox_of({"status": {"sandbox": {"name": "pool-x7"}}}), sandbox_of({})
        ('pool-x7', '')
    """
    return str(((shown.get("status") or {}).get("sandbox") or {}).get("name") or "")


def state_of(shown: Mapping[str, Any], ready: Mapping[str, Any]) -> SandboxState:
    """Return where a claim's sandbox is, by the claim's condition `Ready`."""
    if ready.get("status") == "True" and sandbox_of(shown):
        return SandboxState.READY
    return SandboxState.DEAD if ready.get("reason") in _ENDED else SandboxState.STARTING


def problem(ready: Mapping[str, Any]) -> SandboxError | None:
    """Return why a claim will never be ready, `None` if it may."""
    reason, words = ready.get("reason"), f"{ready.get('reason')}: {ready.get('message') or ''}"
    if ready.get("status") == "True":
        return None
    if reason in _NO_TEMPLATE:
        return ImageError(
            f"the claim names no pool with a template ({words}); make the SandboxWarmPool, or name another"
        )
    return SandboxError(f"the claim was refused ({words})") if reason in _REFUSED else None
