"""The journal and the samples it speaks of, killed before, inside and after any transaction, its log torn anywhere.

Each transition's first entry names the groups that it puts, so that a half transition would show.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from buffer_builders import a_group
from property.crash_world import Killed, Killer, MortalStore, scratch_folder
from rollmill.buffer import SqliteStore, Transition

MOMENTS = st.sampled_from(["before a transaction", "inside a transaction", "after a transaction"])


def names_in(entries: list[bytes]) -> list[str]:
    return [name for entry in entries for name in entry.decode().split()]


class JournalMachine(RuleBasedStateMachine):
    """One writer that is killed now and then, and readers that come at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = scratch_folder()
        self.path = self.folder / "store.sqlite"
        MortalStore.killer = self.killer = Killer()
        self.store: SqliteStore = MortalStore(self.path)
        self.written: list[tuple[bytes, ...]] = []  # acknowledged transitions
        self.named = 0

    def transition(self, groups: int, entries: int) -> Transition:
        names = [f"g{self.named + n}" for n in range(groups)]
        self.named += groups
        journal = (" ".join(names).encode(), *(b"" for _ in range(entries)))
        return Transition(journal=journal, puts=tuple(map(a_group, names)))

    @rule(groups=st.integers(0, 3), entries=st.integers(0, 3))
    def append(self, groups, entries):
        transition = self.transition(groups, entries)
        offset = self.store.apply(transition)
        self.written.append(transition.journal)
        assert offset == sum(map(len, self.written))

    @rule(groups=st.integers(0, 3), entries=st.integers(0, 3), moment=MOMENTS)
    def killed_while_it_appends(self, groups, entries, moment):
        transition = self.transition(groups, entries)
        self.killer.arm_at(moment)
        try:
            self.store.apply(transition)
        except Killed:
            self.killer.disarm()
        else:
            raise AssertionError("the kill did not come")
        self.store.close()
        self.store = MortalStore(self.path)
        if moment == "after a transaction":  # done, and nobody was told
            self.written.append(transition.journal)

    @precondition(lambda self: self.written)
    @rule(share=st.floats(0, 1))
    def a_copy_with_a_torn_log_holds_whole_transitions(self, share):
        """What a power cut leaves: a prefix, never a part of a transition."""
        copy = self.folder / "copy"
        copy.mkdir()
        for file in self.folder.glob("store.sqlite*"):
            if not file.name.endswith("-shm"):
                shutil.copyfile(file, copy / file.name)
        log = copy / "store.sqlite-wal"
        if log.exists():
            log.write_bytes(log.read_bytes()[: int(log.stat().st_size * share)])
        self.check_prefix(copy / "store.sqlite")
        shutil.rmtree(copy)

    def check_prefix(self, path: Path) -> None:
        store = SqliteStore(path)
        try:
            entries = [entry for _, entry in store.journal()]
            assert list(store.waiting_groups()) == sorted(names_in(entries))
        finally:
            store.close()
        lengths = [sum(map(len, self.written[:n])) for n in range(len(self.written) + 1)]
        assert len(entries) in lengths
        assert entries == [entry for journal in self.written for entry in journal][: len(entries)]

    @rule(after=st.integers(0, 5))
    def a_reader_starts_anywhere(self, after):
        everything = [entry for journal in self.written for entry in journal]
        assert [entry for _, entry in self.store.journal(after=after)] == everything[after:]

    @invariant()
    def what_was_acknowledged_is_there_and_nothing_else(self):
        entries = [entry for _, entry in self.store.journal()]
        assert entries == [entry for journal in self.written for entry in journal]
        assert list(self.store.waiting_groups()) == sorted(names_in(entries))

    def teardown(self):
        self.store.verify()
        self.store.close()
        shutil.rmtree(self.folder)


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(
    max_examples=15, stateful_step_count=12, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
