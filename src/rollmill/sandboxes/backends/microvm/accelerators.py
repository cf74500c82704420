"""Whether machines can use the processor's own virtualization here (KVM), or have to be emulated (TCG)."""

from __future__ import annotations

import fcntl
import os

from rollmill.errors import ConfigError

KVM, TCG, AUTO = "kvm", "tcg", "auto"
_DEVICE = "/dev/kvm"
_GET_API_VERSION, _CREATE_VM = 0xAE00, 0xAE01
_API_VERSION = 12
_VENDORS = ("kvm_intel", "kvm_amd")


def why_no_kvm(*, device: str = _DEVICE, modules: str = "/sys/module") -> str:
    """Return why no machine can use KVM here, empty if one can be made; whether it then boots is seen when it does."""
    try:
        opened = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return f"{device}: {error.strerror}"
    try:
        version = fcntl.ioctl(opened, _GET_API_VERSION, 0)
        if version != _API_VERSION:
            return f"{device} speaks version {version}, and {_API_VERSION} is needed"
        os.close(fcntl.ioctl(opened, _CREATE_VM, 0))
    except OSError as error:
        return f"{device} makes no machine: {error.strerror}"
    finally:
        os.close(opened)
    # Variants for guests that know of them (PVM) make machines too, in which no kernel as distributed ever starts.
    if not any(os.path.isdir(f"{modules}/{one}") for one in _VENDORS):
        return "neither kvm_intel nor kvm_amd is loaded; other kinds of KVM start no kernel as distributed"
    return ""


def choose(asked: str) -> str:
    """Return which to begin with.

    Raises:
        ConfigError: if KVM is asked for and is not here.
    """
    reason = "" if asked == TCG else why_no_kvm()
    if asked == KVM and reason:
        raise ConfigError(f"machines are to use KVM, which does not work here: {reason}. Use accelerator tcg or auto.")
    return TCG if asked == TCG or reason else KVM
