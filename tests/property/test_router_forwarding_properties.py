"""Requests through a router whose replicas are killed, drained and spoiled at any moment: each has one answer.

An answer is the very tokens that an undisturbed replica samples, or what there was when the caller or the deadline
ended it, or a typed error; and when all are answered nothing is left behind.
"""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.clock import VirtualClock
from rollmill.errors import RollmillError
from rollmill.generator.proto import policy_inference_pb2 as pb
from rollmill.generator.router.records import Ended
from rollmill.generator.router.upstream import UpstreamError
from rollmill.testing.virtual_loop import run_virtual
from router_builders import Fixture, joined, message, report

NAMES = ("a", "b", "c")
REQUESTS = st.fixed_dictionaries(
    {
        "at_s": st.sampled_from([0.0, 0.5, 3.0]),
        "tokens": st.sampled_from([1, 4, 9]),
        "siblings": st.sampled_from([1, 1, 3]),
        "session": st.sampled_from(["", "s"]),
        "streams": st.booleans(),
        "leaves_at_s": st.sampled_from([None, None, None, 2.2, 6.2]),
        "aborted_at_s": st.sampled_from([None, None, None, 1.7, 5.7]),
        "deadline_s": st.sampled_from([60.0, 60.0, 5.5]),
    }
)
FAULTS = st.tuples(
    st.sampled_from([0.2, 2.5, 4.5, 7.5]), st.sampled_from(NAMES), st.sampled_from(["kill", "drain", "fail", "back"])
)


class Caller:
    """One request and what became of it."""

    def __init__(self, number: int, plan: dict[str, Any]) -> None:
        self.name, self.plan = f"r{number}", plan
        self.answers: list[Any] = []
        self.left = False

    def asked(self) -> pb.GenerateRequest:
        plan = self.plan
        return message(
            self.name,
            tokens=plan["tokens"],
            siblings=plan["siblings"],
            session_id=plan["session"],
            deadline_s=plan["deadline_s"],
        )

    async def call(self, fleet: Fixture) -> None:
        await asyncio.sleep(self.plan["at_s"])
        try:
            self.answers.append(await (fleet.stream if self.plan["streams"] else fleet.generate)(self.asked()))
        except RollmillError as error:
            self.answers.append(error)

    async def live(self, fleet: Fixture) -> None:
        task = asyncio.ensure_future(self.call(fleet))
        if self.plan["leaves_at_s"] is not None:
            await asyncio.wait({task}, timeout=self.plan["leaves_at_s"])
            self.left = not task.done()
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def abort(self, fleet: Fixture) -> None:
        if self.plan["aborted_at_s"] is not None:
            await asyncio.sleep(self.plan["aborted_at_s"])
            await fleet.forwarder.abort(self.name)


async def cause(fleet: Fixture, at_s: float, name: str, what: str) -> None:
    await asyncio.sleep(at_s)
    replica = fleet.replicas[name]
    if what == "kill":
        replica.kill()
    elif what == "drain" and not replica.dead:
        replica.state = "draining"
        await replica.engine.pause("abort")
    elif what == "fail":
        replica.fail_with = UpstreamError(RollmillError("told to fail"), Ended.FAILED)
    elif not replica.dead and replica.state == "serving":
        replica.fail_with = None
        said = fleet.law.report(name, report(slots=8, digest="same"), now_s=fleet.clock.now_s())
        fleet.forwarder.obey(said)


def check(caller: Caller, calm: pb.GenerateReply, *, may_be_cut: bool) -> None:
    if caller.left:
        assert caller.answers == []
        return
    (answer,) = caller.answers
    if isinstance(answer, RollmillError):
        assert str(answer)
        return
    for index, expected in enumerate(calm.samples):
        if isinstance(answer, list):
            ids, logprobs = joined(answer, index=index)
            ends = [one.finished for one in answer if one.index == index and one.HasField("finished")]
            assert [end.output_tokens for end in ends] == [len(ids)]
            reason = ends[0].stop_reason
        else:
            sample = answer.samples[index]
            ids, logprobs, reason = list(sample.output_ids), list(sample.behavior_logprobs), sample.stop_reason
        assert ids == expected.output_ids[: len(ids)]
        assert logprobs == expected.behavior_logprobs[: len(ids)]
        assert reason == "length" if len(ids) == caller.plan["tokens"] else reason == "abort"
        if reason == "abort":
            early = caller.plan["aborted_at_s"] is not None or caller.plan["deadline_s"] < 60
            # Or its replica drained, and there was nobody left to take it on.
            assert early or may_be_cut


@settings(max_examples=40, deadline=None)
@given(
    plans=st.lists(REQUESTS, min_size=1, max_size=5),
    faults=st.lists(FAULTS, max_size=4),
    keep_tokens=st.booleans(),
    on_loss=st.sampled_from(["continue", "continue", "fail"]),
    hedge_budget=st.sampled_from([0.0, 0.0, 0.5]),
)
def test_each_request_has_one_answer_and_it_is_right(plans, faults, keep_tokens, on_loss, hedge_budget):
    clock = VirtualClock()
    callers = [Caller(number, plan) for number, plan in enumerate(plans)]
    drained = any(what == "drain" for _, _, what in faults)
    may_be_cut = drained and (on_loss == "fail" or len(faults) > 2)

    async def main() -> None:
        fleet = Fixture(
            *NAMES, clock=clock, keep_tokens=keep_tokens, on_loss=on_loss, hedge_budget=hedge_budget, queue_wait_s=20.0
        )
        for _ in range(20):
            fleet.law.hedges.first_token(1.5)
        async with asyncio.TaskGroup() as tasks:
            for caller in callers:
                tasks.create_task(caller.live(fleet))
                tasks.create_task(caller.abort(fleet))
            for fault in faults:
                tasks.create_task(cause(fleet, *fault))
        fleet.check_all_is_given_back()
        for replica in fleet.replicas.values():
            assert replica.engine._live == {}
        for caller in callers:
            check(caller, await Fixture("calm", clock=clock).generate(undisturbed(caller)), may_be_cut=may_be_cut)

    def undisturbed(caller: Caller) -> pb.GenerateRequest:
        asked = caller.asked()
        asked.deadline_s = 60.0
        return asked

    run_virtual(main(), clock=clock)
