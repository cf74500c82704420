"""Who belongs to the fleet, who needs which weights, and what an update tells of each replica."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from rollmill.clock import VirtualClock
from rollmill.errors import ConfigError, DataError, EngineError, ModelError, NotServing
from rollmill.generator.engines.fake import FakeFaults
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.router.calls import ask_of
from rollmill.generator.router.fleet import joined_report
from rollmill.generator.router.membership import DnsList, Entry, FileList, ListUnreadable, parse_list
from rollmill.generator.router.records import Seen
from rollmill.generator.router.rolling import Result
from rollmill.generator.router.service import RouterService
from rollmill.testing.virtual_loop import run_virtual
from router_builders import MemoryReplica, settings


class ListOfTheTest:
    """A list of replicas that the test changes."""

    def __init__(self, *entries: Entry) -> None:
        self.entries = entries
        self.broken = False

    async def read(self) -> tuple[Entry, ...]:
        if self.broken:
            raise ListUnreadable("told to be unreadable")
        return self.entries


class Watched:
    """A router's service over replicas in memory, with its loops running."""

    def __init__(self, *names: str, clock: VirtualClock, engine: dict[str, Any] | None = None, **changes: Any) -> None:
        self.clock = clock
        self.replicas = {name: MemoryReplica(name, clock=clock, **(engine or {})) for name in names}
        self.list = ListOfTheTest(*(Entry(name) for name in names))
        self.service = RouterService(
            settings(**changes), source=self.list, connect=self.replicas.__getitem__, clock=clock
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Watched]:
        async with asyncio.TaskGroup() as tasks:
            loops = tasks.create_task(self.service.run())
            await asyncio.sleep(0.5)
            try:
                yield self
            finally:
                loops.cancel()

    def seen(self) -> dict[str, str]:
        return {member.name: member.seen.value for member in self.service.law.table}

    def versions(self) -> dict[str, int]:
        return {name: replica.engine.info().policy_version for name, replica in self.replicas.items()}


def run(test: Callable[[VirtualClock], Coroutine[Any, Any, None]]) -> None:
    clock = VirtualClock()
    run_virtual(test(clock), clock=clock)


# -- lists


def test_a_list_names_replicas_and_the_jobs_they_serve():
    text = "# fleet\n\nnode-1:7001\nnode-2:7001 jobs=b,a  # two jobs\n[::1]:7001\n"
    assert parse_list(text, where="file") == (
        Entry("node-1:7001"),
        Entry("node-2:7001", ("a", "b")),
        Entry("[::1]:7001"),
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("node-1", "line 1: replica 'node-1' is no address"),
        ("node-1:0", "is no address"),
        ("node-1:70000", "is no address"),
        ("a:1\na:1", "line 2: a:1 is listed twice"),
        ("a:1 weight=3", "'weight=3' is unknown"),
    ],
)
def test_a_line_that_is_no_replica_is_named(text, why):
    with pytest.raises(ConfigError, match=why):
        parse_list(text, where="file")


async def test_a_file_is_read_again_when_it_was_replaced(tmp_path):
    path = tmp_path / "replicas"
    path.write_text("a:1\n")
    source = FileList(path)
    assert await source.read() == (Entry("a:1"),)
    other = tmp_path / "new"
    other.write_text("a:2\n")
    other.replace(path)
    assert await source.read() == (Entry("a:2"),)


async def test_a_file_that_is_gone_or_wrong_is_unreadable_and_is_read_again_once_it_is_right(tmp_path):
    path = tmp_path / "replicas"
    source = FileList(path)
    with pytest.raises(ListUnreadable, match="No such file"):
        await source.read()
    path.write_text("nonsense")
    with pytest.raises(ListUnreadable, match="line 1"):
        await source.read()
    path.write_text("a:1\nb:2\n")
    assert await source.read() == (Entry("a:1"), Entry("b:2"))


async def test_a_name_is_resolved_to_one_replica_for_each_record():
    records = [["10.0.0.2:70", "10.0.0.1:70", "10.0.0.1:70"], OSError("no such name")]

    def resolve(name: str, port: int) -> list[str]:
        assert (name, port) == ("fleet.local", 70)
        found = records.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    source = DnsList("fleet.local", 70, jobs=("x",), resolve=resolve)
    assert await source.read() == (Entry("10.0.0.1:70", ("x",)), Entry("10.0.0.2:70", ("x",)))
    with pytest.raises(ListUnreadable, match=r"fleet\.local does not resolve: no such name"):
        await source.read()


# -- joins, leaves, silence


def test_replicas_join_when_they_answer_and_leave_with_the_list():
    async def test(clock):
        fleet = Watched("a", "b", clock=clock, list_s=1.0)
        fleet.list.entries = (Entry("a"),)
        async with fleet.running():
            assert fleet.seen() == {"a": "serving"}
            fleet.list.entries = (Entry("a"), Entry("b"))
            await asyncio.sleep(2.0)
            assert fleet.seen() == {"a": "serving", "b": "serving"}
            fleet.list.entries = (Entry("b"),)
            await asyncio.sleep(2.0)
            assert fleet.seen() == {"b": "serving"}
            assert list(fleet.service.fleet.upstreams) == ["b"]
            assert fleet.replicas["a"].dead

    run(test)


def test_a_replica_that_comes_back_on_the_list_joins_anew():
    async def test(clock):
        fleet = Watched("a", "b", clock=clock, list_s=1.0)
        async with fleet.running():
            fleet.list.entries = (Entry("b"),)
            await asyncio.sleep(3.0)
            fleet.replicas["a"] = MemoryReplica("a", clock=clock)
            fleet.list.entries = (Entry("a"), Entry("b"))
            await asyncio.sleep(3.0)
            assert fleet.seen() == {"a": "serving", "b": "serving"}

    run(test)


def test_a_list_that_cannot_be_read_changes_nothing():
    async def test(clock):
        fleet = Watched("a", clock=clock, list_s=1.0)
        async with fleet.running():
            fleet.list.broken = True
            await asyncio.sleep(5.0)
            assert fleet.seen() == {"a": "serving"}
            assert fleet.service.fleet.list_error == "told to be unreadable"
            fleet.list.broken = False
            await asyncio.sleep(2.0)
            assert fleet.service.fleet.list_error is None

    run(test)


def test_a_silent_replica_is_out_until_it_answers():
    async def test(clock):
        fleet = Watched("a", "b", clock=clock, poll_s=1.0)
        async with fleet.running():
            fleet.replicas["a"].dead = True
            await asyncio.sleep(2.0)
            assert fleet.seen() == {"a": "unknown", "b": "serving"}
            assert "a is not reachable" in fleet.service.law.table["a"].reason
            fleet.replicas["a"].dead = False
            await asyncio.sleep(2.0)
            assert fleet.seen() == {"a": "serving", "b": "serving"}

    run(test)


def test_a_replica_that_broke_a_request_is_looked_at_before_its_turn():
    async def test(clock):
        fleet = Watched("a", clock=clock, poll_s=1000.0)
        async with fleet.running():
            fleet.replicas["a"].state = "dirty"
            fleet.service.fleet.look("a")
            await asyncio.sleep(1.0)
            assert fleet.seen() == {"a": "dirty"}

    run(test)


# -- weights


def test_an_update_loads_at_most_so_many_at_once_and_tells_of_each():
    async def test(clock):
        fleet = Watched(*"abcd", clock=clock, max_unavailable=2)
        async with fleet.running():
            loading: set[int] = set()

            async def watch() -> None:
                while True:
                    loading.add(sum(member.loading is not None for member in fleet.service.law.table))
                    await asyncio.sleep(0.1)

            watching = asyncio.ensure_future(watch())
            loads = await fleet.service.load_weights(2)
            watching.cancel()
            assert [(one.replica, one.result) for one in loads] == [(name, Result.LOADED) for name in "abcd"]
            assert max(loading) == 2
            assert set(fleet.versions().values()) == {2}
            report = joined_report(loads, policy_version=2)
            assert (report.digest, report.nbytes, report.changed) == ("v2", 40, True)

    run(test)


def test_a_version_that_spoils_replicas_spoils_as_many_as_may_be_out_and_no_more():
    async def test(clock):
        faults = FakeFaults(spoil_updates=frozenset({2}))
        fleet = Watched(*"abc", clock=clock, engine={"faults": faults}, max_unavailable=1)
        async with fleet.running():
            loads = await fleet.service.load_weights(2)
            assert [one.result for one in loads] == [Result.BROKEN, Result.SKIPPED, Result.SKIPPED]
            assert fleet.seen() == {"a": "dirty", "b": "serving", "c": "serving"}
            with pytest.raises(EngineError, match="told to spoil"):
                joined_report(loads, policy_version=2)

    run(test)


def test_a_version_that_is_refused_leaves_all_serving():
    async def test(clock):
        faults = FakeFaults(refuse_updates=frozenset({2}))
        fleet = Watched(*"ab", clock=clock, engine={"faults": faults})
        async with fleet.running():
            loads = await fleet.service.load_weights(2)
            assert [one.result for one in loads] == [Result.KEPT, Result.KEPT]
            assert set(fleet.seen().values()) == {"serving"}

    run(test)


def test_a_late_joiner_loads_the_fleets_version_before_it_serves():
    async def test(clock):
        fleet = Watched(*"ab", clock=clock, list_s=1.0, poll_s=1.0)
        fleet.list.entries = (Entry("a"),)
        async with fleet.running():
            await fleet.service.load_weights(3)
            fleet.list.entries = (Entry("a"), Entry("b"))
            await asyncio.sleep(1.1)
            assert fleet.seen() == {"a": "serving", "b": "joining"}
            await asyncio.sleep(3.0)
            assert fleet.seen() == {"a": "serving", "b": "serving"}
            assert fleet.replicas["b"].loads == [3]

    run(test)


def test_a_late_joiner_that_cannot_load_stays_out_and_tries_again_ever_more_rarely():
    async def test(clock):
        fleet = Watched(*"ab", clock=clock, poll_s=1.0)
        fleet.replicas["b"] = MemoryReplica("b", clock=clock, faults=FakeFaults(refuse_updates=frozenset({3})))
        fleet.list.entries = (Entry("a"),)
        async with fleet.running():
            await fleet.service.load_weights(3)
            fleet.list.entries = (Entry("a"), Entry("b"))
            await asyncio.sleep(60.0)
            assert fleet.seen() == {"a": "serving", "b": "joining"}
            # At once, then 5, 10 and 20 s after each failure, which takes 1 s: at about 2, 8, 19 and 40 s.
            assert fleet.replicas["b"].loads == [3, 3, 3, 3]
            assert "could not load policy version 3" in fleet.service.law.table["b"].reason

    run(test)


def test_a_version_that_nobody_could_load_is_not_asked_of_late_joiners():
    async def test(clock):
        fleet = Watched(*"ab", clock=clock, engine={"faults": FakeFaults(refuse_updates=frozenset({7}))})
        fleet.list.entries = (Entry("a"),)
        async with fleet.running():
            await fleet.service.load_weights(7)
            fleet.list.entries = (Entry("a"), Entry("b"))
            await asyncio.sleep(5.0)
            assert fleet.seen() == {"a": "serving", "b": "serving"}

    run(test)


def test_a_replica_that_joins_during_an_update_loads_the_new_version_too():
    async def test(clock):
        fleet = Watched(*"abc", clock=clock, list_s=0.5)
        fleet.list.entries = (Entry("a"), Entry("b"))
        async with fleet.running():
            update = asyncio.ensure_future(fleet.service.load_weights(2))
            # `a` has loaded, `b` loads; a load takes 1 s.
            await asyncio.sleep(1.2)
            fleet.list.entries = (Entry("a"), Entry("b"), Entry("c"))
            await asyncio.sleep(5.0)
            await update
            assert set(fleet.versions().values()) == {2}
            assert set(fleet.seen().values()) == {"serving"}

    run(test)


def test_a_replica_whose_jobs_change_in_the_list_joins_anew_with_them():
    async def test(clock):
        fleet = Watched("a", clock=clock, list_s=1.0)
        async with fleet.running():
            # A connection of its own is made for the new entry.
            old, fleet.replicas["a"] = fleet.replicas["a"], MemoryReplica("a", clock=clock)
            fleet.list.entries = (Entry("a", ("x",)),)
            await asyncio.sleep(5.0)
            assert old.dead
            assert fleet.service.law.table["a"].jobs == ("x",)
            assert fleet.seen() == {"a": "serving"}

    run(test)


def test_a_replica_that_leaves_while_it_is_asked_disturbs_nobody():
    async def test(clock):
        fleet = Watched("a", "b", clock=clock, poll_s=1.0)
        async with fleet.running():

            async def late_failure(*, timeout_s: float) -> Any:
                await asyncio.sleep(3.0)
                raise fleet.replicas["a"]._gone()

            fleet.replicas["a"].status = late_failure
            fleet.service.fleet.look("a")
            await asyncio.sleep(0.5)
            fleet.list.entries = (Entry("b"),)
            await asyncio.sleep(10.0)
            assert fleet.seen() == {"b": "serving"}

    run(test)


def test_weights_go_to_the_replicas_of_the_job_alone():
    async def test(clock):
        fleet = Watched(*"abc", clock=clock)
        fleet.list.entries = (Entry("a", ("x",)), Entry("b", ("y",)), Entry("c", ("y",)))
        async with fleet.running():
            loads = await fleet.service.load_weights(5, job="y")
            assert [one.replica for one in loads] == ["b", "c"]
            assert fleet.versions() == {"a": 1, "b": 5, "c": 5}
            with pytest.raises(DataError, match=r"different jobs \(x, y\)"):
                await fleet.service.load_weights(6)
            with pytest.raises(NotServing, match="of job z"):
                await fleet.service.load_weights(6, job="z")

    run(test)


def test_the_status_of_a_router_is_the_sum_of_its_replicas_and_each_of_them():
    async def test(clock):
        fleet = Watched(*"ab", clock=clock)
        async with fleet.running():
            await fleet.replicas["b"].load_weights(4, timeout_s=1.0)
            await asyncio.sleep(2.0)
            status = fleet.service.status_message()
            assert (status.state, status.policy_version, status.max_num_seqs) == ("serving", 1, 16)
            assert [(one.replica, one.state, one.policy_version) for one in status.replicas] == [
                ("a", "serving", 1),
                ("b", "serving", 4),
            ]
            assert fleet.service.law.table["b"].seen is Seen.SERVING

    run(test)


def test_an_adapters_version_goes_to_those_that_know_it_and_changes_nothing_else():
    async def test(clock: VirtualClock) -> None:
        watched = Watched("a", "b", "c", clock=clock)
        watched.replicas["a"].adapters.update(maths=3, tools=1)
        watched.replicas["b"].adapters.update(maths=5)
        async with watched.running() as fleet:
            shown = {one.name: one.policy_version for one in fleet.service.status().adapters}
            assert shown == {"maths": 3, "tools": 1}
            loads = await fleet.service.load_weights(4, adapter="maths")
            assert {one.replica: one.result for one in loads} == {"a": Result.LOADED, "b": Result.KEPT}
            assert "maths 4 is old" in str(next(one.error for one in loads if one.replica == "b"))
            assert fleet.replicas["a"].adapters == {"maths": 4, "tools": 1}
            assert [replica.loads for replica in fleet.replicas.values()] == [[], [], []]
            assert set(fleet.seen().values()) == {"serving"}
            with pytest.raises(ModelError, match="no replica that serves knows adapter 'x'"):
                await fleet.service.load_weights(1, adapter="x")

    run(test)


def test_an_adapter_may_be_named_as_the_model_and_the_version_that_is_wanted_is_its_own():
    message = pb.GenerateRequest(request_id="r", prompt_ids=[1], min_policy_version=9, model="maths")
    asked = [ask_of(message, adapters=names) for names in ({"maths"}, {"tools"})]
    assert [(one.adapter, one.min_policy_version) for one in asked] == [("maths", 9), ("", 9)]
    message.adapter = "tools"
    assert ask_of(message, adapters={"maths"}).adapter == "tools"
