"""Landlock: the second line of defence, which needs no privilege.

Inside the sandbox everything below its own root is allowed but device nodes. A descriptor or mount of the host that
leaked in would lie outside that root and be refused. From ABI 6 on, signals and abstract sockets end at the border too.
"""

from __future__ import annotations

import ctypes
import os
import struct

from rollmill.sandboxes.guest import kernel

# Number of file rights that each ABI knows; the highest entry holds for later ones.
_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_SCOPE_ABI = 6
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1


def version() -> int:
    """Return the kernel's Landlock ABI, 0 without Landlock."""
    try:
        return kernel.syscall("landlock_create_ruleset", None, 0, _VERSION_FLAG)
    except OSError:
        return 0  # not built in, or switched off at boot


def handled_rights(abi: int) -> int:
    """Return the mask of file rights that this ABI can restrict."""
    return (1 << _RIGHTS_BY_ABI[min(abi, max(_RIGHTS_BY_ABI))]) - 1


def rules(root: str) -> int:
    """Return a descriptor of the rules that hold a process and its children below `root`; -1 without Landlock.

    Raises:
        OSError: if the kernel has Landlock and refuses the rules.
    """
    abi = version()
    if abi < 1:
        return -1
    handled = handled_rights(abi)
    attributes = struct.pack("QQ", handled, 0) if abi >= 4 else struct.pack("Q", handled)
    if abi >= _SCOPE_ABI:
        attributes = struct.pack("QQQ", handled, 0, _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS)
    made = kernel.syscall("landlock_create_ruleset", attributes, len(attributes), 0)
    directory = os.open(root, os.O_PATH | os.O_CLOEXEC)
    try:
        allowed = struct.pack("=Qi", handled & ~(_MAKE_CHAR | _MAKE_BLOCK), directory)
        buffer = ctypes.create_string_buffer(allowed, len(allowed))
        kernel.syscall("landlock_add_rule", made, _RULE_PATH_BENEATH, ctypes.addressof(buffer), 0)
    except OSError:
        os.close(made)
        raise
    finally:
        os.close(directory)
    return made


def restrict(made: int) -> None:
    """Restrict this process and its children by rules, and close them.

    Raises:
        OSError: if the kernel refuses them.
    """
    try:
        kernel.syscall("landlock_restrict_self", made, 0)
    finally:
        os.close(made)
