"""How the process of a machine is launched: who it is on the host, and that it begins when its record is on disk."""

from __future__ import annotations

import os

import msgspec

from rollmill.sandboxes.backends.namespaces.settings import DEFAULT_ID_BASE

_WAIT = 'read -r go || exit 1; exec "$@" </dev/null'
_MACHINE_IDS = 65_536


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who a machine runs as on the host, where its owner may choose: ids that own nothing."""

    uid: int
    groups: tuple[int, ...] = ()


def launcher(identity: Identity | None) -> list[str]:
    """Return what stands before a program: it waits for a line on its input, and dies with the thread that started it.

    The line comes when the record of the process is on disk. Without it, because its owner has ended, nothing starts.
    """
    words = ["sh", "-c", _WAIT, "sh", "setpriv"]
    if identity is not None:
        groups = ["--groups", ",".join(map(str, identity.groups))] if identity.groups else ["--clear-groups"]
        words += ["--reuid", str(identity.uid), "--regid", str(identity.uid), *groups]
        words += ["--bounding-set=-all", "--inh-caps=-all"]
    return [*words, "--no-new-privs", "--pdeathsig", "KILL", "--"]


def identity_of(number: int, *, device: str = "") -> Identity | None:
    """Return ids for a machine, `None` where this process may not choose.

    Args:
        number: of the machine; two that run at the same time have different ids.
        device: what its group must be able to open, if anything.
    """
    if os.geteuid() != 0:
        return None
    uid = DEFAULT_ID_BASE - 1 - (os.getpid() + number) % _MACHINE_IDS
    return Identity(uid=uid, groups=(os.stat(device).st_gid,) if device else ())
