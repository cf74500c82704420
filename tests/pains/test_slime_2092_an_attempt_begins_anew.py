"""slime 2092: an aborted group went back to the queue with its partial tokens although partial rollout was off, so one
sample held tokens of versions 2, 4 and 6.

Expected: an attempt that was given up leaves nothing in the next one; every path obeys that.
"""

from __future__ import annotations

import numpy as np

from rollmill.testing import FakeFaults, run_virtual
from simulation.controller_world import World, config_of


def test_a_rollout_that_is_dispatched_again_has_only_its_own_tokens() -> None:
    # Request 3 never answers. Its attempt is given up after 30 s, while the weights move on.
    world = World(config_of(steps=6, max_staleness=2), faults=(FakeFaults(hang_requests=frozenset({3})),))
    assert run_virtual(world.run(), clock=world.clock) == "steps_done"
    assert world.controller.scheduler.view().redispatched == {"infra_failure": 1}
    rollouts = [rollout for group in world.reports.groups for rollout in group.rollouts]
    again = [rollout for rollout in rollouts if rollout.attempt > 1]
    for rollout in rollouts:
        (turn,) = rollout.turns
        question = world.tokenizer.render(rollout.task.messages)
        assert np.array_equal(turn.prompt_ids, question), "tokens of another attempt stand in the prompt"
        assert sum(span.end_token - span.start_token for span in turn.version_spans) == len(turn.output_ids)
    assert len(again) == 1
    assert min(again[0].policy_versions) > 1, "it was sampled by the weights that served when it began anew"
