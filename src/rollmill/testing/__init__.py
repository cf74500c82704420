"""Fakes for testing what is built on Rollmill: no model, no process, no waiting.

`VirtualClock` and `run_virtual` replace time, `ToyTokenizer` the model's tokenizer, `ScriptedEnvironment` tasks and
rewards, and `FaultInjector` makes any of them fail at a chosen call. They implement the same protocols as the real
parts, so that they can be put in one by one.

Example: a rollout whose scorer takes an hour, in a millisecond.

    >>> from rollmill.config.schema import ScheduleSettings
    >>> from rollmill.environments import run_rollout
    >>> from rollmill.scheduling.instructions import StartRollout
    >>> from rollmill.testing import Delay, FaultInjector, ScriptedEnvironment, ToyTokenizer, VirtualClock
    >>> from rollmill.testing import reply_with, run_virtual
    >>> from rollmill.types import SamplingParams
    >>> clock, toy = VirtualClock(), ToyTokenizer()
    >>> environment = ScriptedEnvironment(size=1, faults=FaultInjector({("score", 1): Delay(3600.0)}))
    >>> start = StartRollout(
    ...     rollout_id="g0/0.0", group_id="g0", task_index=0, sibling=0, attempt=0, deadline_s=60.0
    ... )
    >>> rollout = run_virtual(
    ...     run_rollout(
    ...         start,
    ...         environment=environment,
    ...         renderer=toy,
    ...         generate=reply_with("1", tokenizer=toy),
    ...         sampling=SamplingParams(),
    ...         schedule=ScheduleSettings(),
    ...         clock=clock,
    ...     ),
    ...     clock=clock,
    ... )
    >>> rollout.outcome, rollout.seconds
    (Scored(raw_reward=1.0, shaped_reward=1.0), {'generate': 0.0, 'score': 3600.0})

`FakeEngine` stands for a replica's engine: it samples from a table instead of a model, swaps weights by digest, and
models latency on the loop's time; see its own documentation. `FakeTrainer` and `FakeRepository` stand for the rest of a
run: batches are leased, take their time, and are published and recorded, without a tensor. `FakeSandboxProvider` has
sandboxes without processes.
"""

from rollmill.clock import VirtualClock
from rollmill.generator.engines.fake import FakeEngine, FakeFaults, FakeLatency
from rollmill.testing.environment import ScriptedEnvironment, solved
from rollmill.testing.faults import Delay, FaultAction, FaultInjector, Hang, Raise
from rollmill.testing.generate import reply_with
from rollmill.testing.sandboxes import FakeCall, FakeSandbox, FakeSandboxProvider
from rollmill.testing.tokenizer import ToyTokenizer
from rollmill.testing.training import FakeRepository, FakeTrainer, fake_manifest, in_place, rollout_runner
from rollmill.testing.virtual_loop import run_virtual

__all__ = [
    "Delay",
    "FakeCall",
    "FakeEngine",
    "FakeFaults",
    "FakeLatency",
    "FakeRepository",
    "FakeSandbox",
    "FakeSandboxProvider",
    "FakeTrainer",
    "FaultAction",
    "FaultInjector",
    "Hang",
    "Raise",
    "ScriptedEnvironment",
    "ToyTokenizer",
    "VirtualClock",
    "fake_manifest",
    "in_place",
    "reply_with",
    "rollout_runner",
    "run_virtual",
    "solved",
]
