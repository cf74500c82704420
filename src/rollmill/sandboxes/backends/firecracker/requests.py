"""What Firecracker is asked, in which order, to boot a machine, keep it, and start one from what was kept. Pure.

Paths are relative to the directory of each machine, because a kept machine remembers them: what starts from it finds
its own files under the same names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

API, VSOCK = "api.sock", "agent.sock"
KERNEL, INITRD = "kernel", "initrd"
MEMORY, STATE = "memory", "state"
_GUEST = 3
_KERNEL_WORDS = "console=ttyS0 quiet reboot=k panic=1 pci=off"


class Request(NamedTuple):
    """One request."""

    method: str
    target: str
    body: dict[str, Any]


def disk(number: int) -> str:
    """Return the name of a disk."""
    return f"disk{number}"


def boot(*, memory_bytes: int, disks: int) -> tuple[Request, ...]:
    """Return how a machine is set up and started.

    Args:
        memory_bytes: of the machine, rounded down to MiB.
        disks: how many it has, the agent's first.
    """
    words = f"{_KERNEL_WORDS} rollmill.line=vsock rollmill.images={disks - 1}"
    drives = (
        Request("PUT", f"/drives/{disk(number)}", {"drive_id": disk(number), "path_on_host": disk(number),
                                                   "is_root_device": False, "is_read_only": True})
        for number in range(disks)
    )  # fmt: skip
    return (
        Request("PUT", "/machine-config", {"vcpu_count": 1, "mem_size_mib": memory_bytes // 1024**2}),
        Request("PUT", "/boot-source", {"kernel_image_path": KERNEL, "initrd_path": INITRD, "boot_args": words}),
        *drives,
        Request("PUT", "/vsock", {"guest_cid": _GUEST, "uds_path": VSOCK}),
        Request("PUT", "/actions", {"action_type": "InstanceStart"}),
    )


def pause() -> Request:
    """Return how processors are stopped."""
    return Request("PATCH", "/vm", {"state": "Paused"})


def resume() -> Request:
    """Return how they go on."""
    return Request("PATCH", "/vm", {"state": "Resumed"})


def keep() -> Request:
    """Return how a paused machine is written down."""
    body = {"snapshot_type": "Full", "snapshot_path": STATE, "mem_file_path": MEMORY}
    return Request("PUT", "/snapshot/create", body)


def load() -> Request:
    """Return how a machine takes on what was written down: its memory is mapped, and copied where it is written."""
    backend = {"backend_type": "File", "backend_path": MEMORY}
    return Request("PUT", "/snapshot/load", {"snapshot_path": STATE, "mem_backend": backend, "resume_vm": False})
