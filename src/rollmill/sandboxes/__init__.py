"""Sandboxes: short-lived places where untrusted programs run, started in milliseconds, kept away from their host.

`NamespaceProvider` is the embedded backend. The protocol that every backend implements is in `protocol`, what is asked
for and what comes back in `records`, and how isolation is named in `isolation`.
"""

from rollmill.sandboxes.backends.namespaces import NamespaceProvider, NamespaceSettings
from rollmill.sandboxes.isolation import IsolationLevel, Protection
from rollmill.sandboxes.protocol import Process, Provider, Sandbox, Session
from rollmill.sandboxes.records import (
    Capabilities,
    Culprit,
    Death,
    DeathReason,
    DirectoryImage,
    ExecResult,
    FileInfo,
    HostImage,
    Lease,
    Limits,
    NamedImage,
    Network,
    SandboxSpec,
    SandboxState,
    SandboxStatus,
    SnapshotRef,
    Usage,
)
from rollmill.sandboxes.session_state import SessionState, resume_session, save_session

__all__ = [
    "Capabilities",
    "Culprit",
    "Death",
    "DeathReason",
    "DirectoryImage",
    "ExecResult",
    "FileInfo",
    "HostImage",
    "IsolationLevel",
    "Lease",
    "Limits",
    "NamedImage",
    "NamespaceProvider",
    "NamespaceSettings",
    "Network",
    "Process",
    "Protection",
    "Provider",
    "Sandbox",
    "SandboxSpec",
    "SandboxState",
    "SandboxStatus",
    "Session",
    "SessionState",
    "SnapshotRef",
    "Usage",
    "resume_session",
    "save_session",
]
