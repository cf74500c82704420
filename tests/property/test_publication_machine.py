"""The model repository against a model of a few sets, under any order of operations and crashes at any file operation.

A crash is a process that stops before one of its file operations and does nothing after it: no clean-up runs, and what
was half written is cut at any length. Several views of one repository stand for several processes. What must hold:
versions only rise; a visible manifest verifies, or its tensors are said to be gone; nothing that is held is deleted;
what a reader has loaded never changes, also when its file's memory is used again; leftovers are removed; a corrupted
tensor is detected.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollmill.errors import WeightError, WeightMismatch
from rollmill.weights import LocalModelRepository, Publication

KEEP = 2
OWNERS = st.sampled_from(["generator-0", "evaluator"])
NO_PROCESS = 1 << 22
"""One above the largest pid that Linux gives."""
FOLDER_PREFIX = "publication-"
FILE_OPERATIONS = frozenset({"open", "os.rename", "os.remove", "os.link", "os.mkdir", "fcntl.flock"})


class Crash(BaseException):
    """The process is gone."""


class CrashPoint:
    """Lets a chosen number of file operations happen, and none after them.

    Python tells an audit hook of every file operation before it happens. A hook cannot be removed, so there is one for
    all tests, which does nothing while it is not armed.
    """

    def __init__(self) -> None:
        self._left: int | None = None
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: Any) -> None:
        if self._left is None or event not in FILE_OPERATIONS:
            return
        if event != "fcntl.flock" and not any(FOLDER_PREFIX in str(argument) for argument in arguments):
            # Somebody else's file: an import, a finaliser of another test.
            return
        if self._left == 0:
            raise Crash
        self._left -= 1

    def crashes(self, work: Callable[[], Any], *, after: int) -> bool:
        """Return whether work was cut off."""
        # A process that is gone runs no finaliser either, so none of other tests' garbage may run here.
        gc.disable()
        self._left = after
        try:
            work()
        except Crash:
            return True
        finally:
            self._left = None
            gc.enable()
        return False


CRASH_POINT = CrashPoint()


def tensors_of(value: int, size: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((size,), float(value)), "b": torch.arange(5) + value}


class PublicationMachine(RuleBasedStateMachine):
    """Publishes, crashes, adopts, holds, releases, loads, retires, republishes, reserves, corrupts, reboots."""

    transport: Any

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        (self.root / "shared").mkdir()
        self.published: dict[int, tuple[int, int, int]] = {}  # version -> (value, size, optimizer step)
        self.same_file: dict[int, int] = {}  # version -> the version whose file it shares
        self.alive: set[int] = set()  # tensors are there
        self.corrupted: set[int] = set()  # by file
        self.holds: set[tuple[int, str]] = set()
        self.readers: list[tuple[int, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
        self.pending: tuple[Publication, int, int] | None = None
        self.next_value = 1

    @initialize()
    def open(self) -> None:
        self.trainer, self.other = self.view(), self.view()

    def view(self) -> LocalModelRepository:
        return LocalModelRepository(
            self.root / "weights", transport=self.transport, keep_versions=KEEP, shared_memory=self.root / "shared"
        )

    def teardown(self) -> None:
        self.readers.clear()
        if self.pending is not None:
            self.pending[0].abandon()
        shutil.rmtree(self.root)

    # what the model says

    def newest(self) -> int:
        return max(self.published, default=0)

    def kept(self) -> set[int]:
        return {*sorted(self.published)[-KEEP:], *(version for version, _ in self.holds)}

    def file_of(self, version: int) -> int:
        return self.same_file.get(version, version)

    def appeared(self, value: int, size: int, *, step: int) -> None:
        version = self.newest() + 1
        self.published[version] = (value, size, step)
        self.alive.add(version)

    # publishing

    def prepare(self, view: LocalModelRepository, value: int, size: int) -> Publication:
        return view.prepare(
            tensors_of(value, size),
            optimizer_step=value,
            parent=self.newest() or None,
            history_id="h",
            training_dtype="float32",
            at_s=0.0,
        )

    @precondition(lambda self: self.pending is None)
    @rule(size=st.sampled_from([3, 3, 3, 5000]), finish=st.booleans())
    def publish(self, size: int, finish: bool) -> None:
        self.pending = (self.prepare(self.trainer, self.next_value, size), self.next_value, size)
        self.next_value += 1
        if finish:
            self.commit()

    @precondition(lambda self: self.pending is None)
    @rule(count=st.integers(1, 4), read=st.booleans(), reserve=st.booleans())
    def a_few_steps(self, count: int, read: bool, reserve: bool) -> None:
        """What a trainer does all day, perhaps with a reader of the newest version before; the trainer reads, too."""
        if read and self.newest() in self.alive and self.file_of(self.newest()) not in self.corrupted:
            value, size, _ = self.published[self.newest()]
            self.readers.append((self.newest(), self.other.load(self.newest()), tensors_of(value, size)))
        for _ in range(count):
            publication = self.prepare(self.trainer, self.next_value, 3)
            self.every_version_loads_or_says_why_not()  # the copy went into memory that nobody needs any more
            copied, expected = publication.tensors(), tensors_of(self.next_value, 3)
            publication.commit(canary=None)
            self.appeared(self.next_value, 3, step=self.next_value)
            self.next_value += 1
            self.readers.append((self.newest(), copied, expected))
            self.retire(by_other=False)
            if reserve:
                self.trainer.reserve()
        self.what_was_loaded_never_changes()
        del self.readers[:-3]

    @precondition(lambda self: self.pending is not None)
    @rule()
    def commit(self) -> None:
        assert self.pending is not None
        publication, value, size = self.pending
        assert publication.policy_version == self.newest() + 1
        copied = publication.tensors()
        assert torch.equal(copied["a"], tensors_of(value, size)["a"])
        assert publication.commit(canary=None).policy_version == self.newest() + 1
        self.appeared(value, size, step=value)
        self.pending = None
        # the publisher's own map is a reader like any other
        self.readers.append((self.newest(), copied, tensors_of(value, size)))

    @precondition(lambda self: self.pending is not None)
    @rule()
    def abandon(self) -> None:
        assert self.pending is not None
        self.pending[0].abandon()
        self.pending = None

    @precondition(lambda self: self.pending is not None)
    @rule()
    def a_second_publisher_is_refused(self) -> None:
        with pytest.raises(WeightError, match="is publishing"):
            self.prepare(self.other, 0, 3)

    @precondition(lambda self: self.pending is None and self.published)
    @rule(data=st.data())
    def republish(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.published)))
        if version not in self.alive:
            with pytest.raises(WeightError, match="has no tensors any more"):
                self.trainer.republish(version, history_id="h", at_s=0.0)
            return
        manifest = self.trainer.republish(version, history_id="h", at_s=0.0)
        assert (manifest.policy_version, manifest.parent) == (self.newest() + 1, version)
        assert manifest.optimizer_step == self.published[version][2]
        self.took_over(version)

    def took_over(self, version: int) -> None:
        value, size, step = self.published[version]
        self.appeared(value, size, step=step)
        self.same_file[self.newest()] = self.file_of(version)

    # reading

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.alive)))
        if self.file_of(version) not in self.corrupted:
            value, size, _ = self.published[version]
            self.readers.append((version, self.other.load(version), tensors_of(value, size)))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def a_reader_ends(self, data: st.DataObject) -> None:
        del self.readers[data.draw(st.integers(0, len(self.readers) - 1))]

    @precondition(lambda self: self.published)
    @rule(data=st.data(), owner=OWNERS)
    def hold(self, data: st.DataObject, owner: str) -> None:
        version = data.draw(st.sampled_from(sorted(self.published)))
        if version in self.alive:
            self.other.hold(version, owner=owner)
            self.holds.add((version, owner))
        else:
            with pytest.raises(WeightError, match="has no tensors any more"):
                self.other.hold(version, owner=owner)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        version, owner = data.draw(st.sampled_from(sorted(self.holds)))
        self.other.release(version, owner=owner)
        self.holds.discard((version, owner))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def a_holder_dies(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted({owner for _, owner in self.holds})))
        for path in (self.root / "weights" / "holds").glob("*.json"):
            hold = json.loads(path.read_text())
            if hold["owner"] == owner:
                path.write_text(json.dumps(hold | {"pid": NO_PROCESS}))
        self.holds = {(version, other) for version, other in self.holds if other != owner}

    # keeping house

    @rule(by_other=st.booleans())
    def retire(self, by_other: bool) -> None:
        retired = (self.other if by_other else self.trainer).retire()
        assert set(retired) == self.alive - self.kept()
        self.alive &= self.kept()

    @rule()
    def reserve(self) -> None:
        assert self.trainer.reserve() == (self.transport == "shm" and self.newest() in self.alive)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def a_byte_flips(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.alive)))
        if self.file_of(version) in self.corrupted:  # the same bit once more would heal it
            return
        path = Path(self.trainer.manifest(version).location)
        with path.open("r+b") as file:
            file.seek(-data.draw(st.integers(1, 40 if self.published[version][1] == 3 else 20_000)), 2)
            (byte,) = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 4]))
        # those who map this file see the change as well: that is the damage, not the repository's doing
        mapped = self.file_of(version)
        self.readers = [reader for reader in self.readers if self.file_of(reader[0]) != mapped]
        self.corrupted.add(mapped)

    @precondition(lambda self: self.pending is None)
    @rule()
    def the_machine_restarts(self) -> None:
        """Shared memory is lost, and every process with it; files stay."""
        self.readers.clear()
        if self.transport == "shm":
            shutil.rmtree(self.root / "shared")
            (self.root / "shared").mkdir()
            self.alive.clear()
        self.adopt()

    @precondition(lambda self: self.pending is None)
    @rule()
    def adopt(self) -> None:
        self.trainer, self.other = self.view(), self.view()
        adoption = self.trainer.adopt()
        assert set(adoption.available) == self.alive
        assert set(adoption.manifest_only) == set(self.published) - self.alive

    # crashes

    @precondition(lambda self: self.pending is None)
    @rule(after=st.integers(0, 25), size=st.sampled_from([3, 5000]))
    def crash_while_publishing(self, after: int, size: int) -> None:
        value, self.next_value = self.next_value, self.next_value + 1
        self.crash(
            lambda: self.prepare(self.trainer, value, size).commit(canary=None),
            after=after,
            visible=lambda: self.appeared(value, size, step=value),
        )

    @precondition(lambda self: self.pending is not None)
    @rule(after=st.integers(0, 8))
    def crash_while_committing(self, after: int) -> None:
        assert self.pending is not None
        publication, value, size = self.pending
        self.pending = None
        self.crash(
            lambda: publication.commit(canary=None),
            after=after,
            visible=lambda: self.appeared(value, size, step=value),
        )

    @precondition(lambda self: self.pending is None and self.alive)
    @rule(data=st.data(), after=st.integers(0, 12))
    def crash_while_republishing(self, data: st.DataObject, after: int) -> None:
        version = data.draw(st.sampled_from(sorted(self.alive)))
        self.crash(
            lambda: self.trainer.republish(version, history_id="h", at_s=0.0),
            after=after,
            visible=lambda: self.took_over(version),
        )

    @precondition(lambda self: self.pending is None)
    @rule(after=st.integers(0, 12), what=st.sampled_from(["retire", "reserve", "adopt"]))
    def crash_while_keeping_house(self, after: int, what: str) -> None:
        self.crash(
            lambda: getattr(self.trainer, what)(), after=after, visible=lambda: pytest.fail("a version appeared")
        )

    def crash(self, work: Callable[[], Any], *, after: int, visible: Callable[[], None]) -> None:
        """Crash the trainer within some work; find out what became of it; take over as a resumed run does."""
        CRASH_POINT.crashes(work, after=after)
        for number, partial in enumerate(sorted(self.root.glob("**/*.partial"))):
            with partial.open("r+b") as file:  # what was being written is there in part
                file.truncate(partial.stat().st_size * (number % 3) // 2)
        self.trainer, self.other = self.view(), self.view()
        versions = [manifest.policy_version for manifest in self.trainer.manifests()]
        if versions != sorted(self.published):
            assert versions == [*sorted(self.published), self.newest() + 1]
            visible()
        found = set(self.trainer.available())
        assert found <= self.alive
        assert found >= self.alive & self.kept()  # only what was due to go may be gone
        self.alive = found
        self.adopt()
        names = {path.name for path in self.root.glob("**/*") if path.is_file()}
        assert not [name for name in names if name.endswith(".partial")]
        tensors = {int(name[1:7]) for name in names if name.startswith("v") and name.endswith(".safetensors")}
        assert tensors == self.alive

    # what must hold after every step

    @invariant()
    def versions_are_as_published(self) -> None:
        found = [(m.policy_version, m.optimizer_step) for m in self.view().manifests()]
        assert found == [(version, step) for version, (_, _, step) in sorted(self.published.items())]

    @invariant()
    def every_version_loads_or_says_why_not(self) -> None:
        view = self.view()
        gone = sorted(set(self.published) - self.alive)[-2:]
        for version in sorted(self.alive | set(gone)):
            value, size, _ = self.published[version]
            if version not in self.alive:
                with pytest.raises(WeightError, match=f"version {version} has no tensors any more"):
                    view.load(version)
            elif self.file_of(version) in self.corrupted:
                with pytest.raises(WeightMismatch, match="sha256"):
                    view.load(version)
            else:
                assert torch.equal(view.load(version)["a"], tensors_of(value, size)["a"])

    @invariant()
    def what_was_loaded_never_changes(self) -> None:
        for version, tensors, expected in self.readers:
            for name, tensor in expected.items():
                assert torch.equal(tensors[name], tensor), f"{name} of version {version} changed under its reader"


class SharedMemoryMachine(PublicationMachine):
    transport = "shm"


class FileMachine(PublicationMachine):
    transport = "file"


TestSharedMemory = SharedMemoryMachine.TestCase
TestFiles = FileMachine.TestCase
TestSharedMemory.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestFiles.settings = settings(
    max_examples=10, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
