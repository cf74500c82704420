"""Owners of sandboxes that tests kill, and what must not be left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import psutil
from sandbox_owner import ASLEEP_S, IMAGE, images_of

from image_builders import add, add_tars, directory, file, new_store, small_root, tar
from rollmill.sandboxes import NamespaceProvider, NamespaceSettings
from rollmill.sandboxes.disk_records import DiskRecords, ProcessMark, is_alive
from rollmill.sandboxes.guest import kernel
from rollmill.sandboxes.guest.cgroups import PARENT_NAME, discover
from rollmill.sandboxes.images import erofs
from rollmill.sandboxes.tally import SandboxTally

OWNER = Path(__file__).with_name("sandbox_owner.py")


class Killable(Protocol):
    """A process with sandboxes."""

    pid: int
    directory: Path


class Stores:
    """A store with the image `tools` for each form of layers that works here.

    Attributes:
        paths: by form; `host` has none.
        missing: why a form does not work here.
        layers: how many the image has.
    """

    layers = 3

    def __init__(self, base: Path) -> None:
        root = small_root(base / "root", programs=("sh", "sleep", "setsid", "true"))
        self.paths: dict[str, Path | None] = {"host": None}
        why_not = erofs.missing(base)
        self.missing = {"erofs": why_not} if why_not else {}
        for form in ("tree", "erofs"):
            if form not in self.missing:
                self.paths[form] = base / form
                self._fill(base / form, form, root)

    def unmount(self) -> None:
        """After a test that failed: what stays mounted cannot be deleted."""
        for kind, place, _ in mounts():
            if kind == "erofs" and any(place.startswith(f"{path}/") for path in self.paths.values()):
                kernel.detach(place)

    def _fill(self, place: Path, form: str, root: Path) -> None:
        store = new_store(place, form=form)
        add(store, root, name="below")
        above = [tar(directory(f"d{i}"), file(f"d{i}/f", b"x" * 5000)) for i in range(self.layers - 1)]
        add_tars(store, *above, name=IMAGE, base="below")


class Owner:
    """A process with sandboxes, to be killed; `leases` as its name: with rows in a table and stored rollouts.

    Args:
        store: has the image of the sandboxes; `None`: the host's directories.
    """

    def __init__(self, directory: Path, name: str, *, count: int, store: Path | None = None) -> None:
        command = [
            sys.executable,
            str(OWNER),
            str(directory),
            name,
            str(count),
            *([] if store is None else [str(store)]),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        self.directory = directory
        self.pid = self.process.pid

    def started(self, count: int) -> list[str]:
        assert self.process.stdout is not None
        return [self.process.stdout.readline().decode().strip() for _ in range(count)]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


def groups_of(pid: int) -> list[Path]:
    return [path for one in discover() for path in Path(one.group, PARENT_NAME).glob(f"{pid}-*")]


def eventually(holds: Callable[[], bool], *, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.01)


def sleepers() -> list[dict[str, Any]]:
    """What the programs of the sandboxes are seen as from outside: also whether one dies, or is left."""
    asked = ["pid", "ppid", "status", "create_time", "cmdline"]
    return [one.info for one in psutil.process_iter(asked) if ASLEEP_S in (one.info["cmdline"] or [])]


def nothing_left(owner: Killable, marks: Iterable[ProcessMark]) -> None:
    assert [mark for mark in marks if is_alive(mark)] == []
    assert groups_of(owner.pid) == []
    assert list(owner.directory.iterdir()) == []
    found = sleepers()
    assert found == [], f"left: {found}"  # said here: pytest does not take this module's assertions apart


def marks_of(owner: Killable) -> list[ProcessMark]:
    if not owner.directory.exists():
        return []
    records = DiskRecords(owner.directory).read_all()
    return [mark for one in records for mark in (one.helper, one.first_process) if mark is not None]


def mounts(process: str = "self", *, below: Path | None = None) -> Counter[tuple[str, str, str]]:
    """Return the mounts that a process sees: kind, place and source of each.

    Args:
        below: where places are looked for; elsewhere other programs mount what is theirs. `None`: everywhere.
    """
    found: Counter[tuple[str, str, str]] = Counter()
    for line in Path(f"/proc/{process}/mountinfo").read_text(encoding="utf-8").splitlines():
        left, _, right = line.partition(" - ")
        kind, source, *_ = right.split()
        place = left.split()[4]
        if below is None or Path(place).is_relative_to(below):
            found[kind, place, source] += 1
    return found


def in_play(marks: Iterable[ProcessMark]) -> bool:
    """Return whether a sandbox lives whose root is laid over the layers of an image."""
    for mark in marks:
        try:
            seen = mounts(str(mark.pid))
        except OSError:
            continue  # it has ended
        if is_alive(mark) and any((kind, place) == ("overlay", "/") for kind, place, _ in seen):
            return True
    return False


async def next_start(records: Path, store: Path | None) -> None:
    """Do what the start of any provider does first: sweep, once."""
    tally = SandboxTally()
    async with NamespaceProvider(NamespaceSettings(directory=records, images=images_of(store)), observer=tally):
        assert (tally.statistics().unswept, os.listdir(records)) == (0, [])
