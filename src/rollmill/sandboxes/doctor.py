"""What protects sandboxes on this machine: found by making one and asking what it really put in place.

Nothing is guessed from versions or files. What failed is told in the words of the step that failed.
"""

from __future__ import annotations

import os
import platform
import tempfile
import uuid
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from rollmill.errors import RollmillError
from rollmill.sandboxes.backends.gvisor.presence import presence
from rollmill.sandboxes.backends.gvisor.settings import GvisorSettings
from rollmill.sandboxes.backends.microvm import MicroVmProvider
from rollmill.sandboxes.backends.namespaces import NamespaceProvider, NamespaceSettings
from rollmill.sandboxes.backends.namespaces.settings import IDS_PER_SANDBOX
from rollmill.sandboxes.guest.setup import OWNERS_NOT_MAPPED
from rollmill.sandboxes.images import erofs
from rollmill.sandboxes.isolation import WORDS, IsolationLevel, Protection, known, level_of
from rollmill.sandboxes.records import Lease, Record, SandboxSpec

_NOT_OF_THIS_BACKEND = (Protection.OWN_KERNEL, Protection.VIRTUAL_MACHINE)


class Finding(Record, frozen=True, kw_only=True):
    """One protection.

    Attributes:
        name: as the agent reports it.
        holds: whether the sandbox that was made has it.
        meaning: what it does.
        remedy: how to get it where it is missing.
    """

    name: str
    holds: bool
    meaning: str
    remedy: str


class Diagnosis(Record, frozen=True, kw_only=True):
    """What works on this machine.

    Attributes:
        backend: which one was asked.
        works: whether a sandbox started and ran a program.
        problem: what went wrong, if it did not.
        isolation: name of the level reached.
        findings: every protection that this backend knows.
        notes: what else to know about this machine.
    """

    backend: str
    works: bool
    problem: str
    isolation: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


async def diagnose(settings: NamespaceSettings) -> Diagnosis:
    """Make a sandbox and look at it."""
    asked = msgspec.structs.replace(settings, minimum_isolation=IsolationLevel.NONE)
    found, words = await examine(lambda: NamespaceProvider(asked), backend="namespaces", without=_NOT_OF_THIS_BACKEND)
    return msgspec.structs.replace(found, notes=_notes(settings, words))


async def examine(
    opens: Callable[[], NamespaceProvider | MicroVmProvider], *, backend: str, without: Collection[Protection]
) -> tuple[Diagnosis, tuple[str, ...]]:
    """Make a sandbox with a provider, and look at it; return what was found, and all that its agent reported.

    Args:
        opens: makes the provider.
        backend: its name.
        without: protections that it does not know.
    """
    protections: frozenset[Protection] = frozenset()
    problem, words = "", ()
    try:
        async with opens() as provider:
            lease = Lease(owner="doctor", ttl_s=60.0)
            sandbox = await provider.create(SandboxSpec(), id=f"doctor-{backend}-{uuid.uuid4().hex[:8]}", lease=lease)
            words = sandbox.protections
            protections = known(words)
            result = await sandbox.exec(["true"], timeout_s=30.0)
            if result.exit_code != 0:
                problem = f"`true` ended with {result.exit_code}: {result.stderr.decode('utf-8', 'replace').strip()}"
    except RollmillError as error:
        problem = str(error)
    found = Diagnosis(
        backend=backend,
        works=not problem,
        problem=problem,
        isolation=level_of(protections).name.lower(),
        findings=tuple(
            Finding(name=one.value, holds=one in protections, meaning=WORDS[one][0], remedy=WORDS[one][1])
            for one in Protection
            if one not in without
        ),
        notes=(),
    )
    return found, words


def _notes(settings: NamespaceSettings, words: tuple[str, ...]) -> tuple[str, ...]:
    notes = [
        f"Linux {platform.release()} on {platform.machine()}.",
        "Namespaces share the host's kernel: they do not hold against a fault in it.",
    ]
    if os.geteuid() != 0:
        notes.append(
            "As a plain user: one user inside (root); files of the host's system directories cannot be changed."
        )
        notes.append("As a plain user: your supplementary groups stay with the programs inside.")
    else:
        last = settings.id_base + settings.id_ranges * IDS_PER_SANDBOX - 1
        notes.append(
            f"As root: users inside are {settings.id_base} to {last} on the host; these must own nothing there."
        )
    if OWNERS_NOT_MAPPED in words:
        notes.append(
            "The file system of the host's directories cannot map owners: inside, their files cannot be changed."
        )
    notes.append(_form_of_images())
    gvisor = GvisorSettings(directory=settings.directory)
    notes.append(f"A stronger backend, gVisor (doctor --backend gvisor): its runtime {presence(gvisor)}.")
    return tuple(notes)


def _form_of_images() -> str:
    with tempfile.TemporaryDirectory() as scratch:
        why_not = erofs.missing(Path(scratch))
    if why_not:
        return f"Images are kept as unpacked trees; one erofs file for each layer does not work here: {why_not}."
    return "Images are kept as one erofs file for each layer, mounted while it is used."
