"""T30: batch-size fields are misunderstood.

verl 559, 833, 1136 and 1524: prompts, rollouts and mini-batches were mixed up; a batch that did not divide by the ranks
gave a silent half gradient or NaN. Here the derived table is printed and the uneven split refused before any start.
"""

import pytest

from rollmill.config import check_divisible, load_config
from rollmill.config.plan import plan, render
from rollmill.errors import ConfigError


def test_64_prompts_of_8_in_mini_batches_of_32_are_refused_on_3_ranks():
    with pytest.raises(ConfigError) as caught:
        check_divisible(prompts=64, group_size=8, mini_batch_prompts=32, ranks=3)
    message = str(caught.value)
    assert "64 prompts x 8 rollouts = 512 rollouts per batch" in message
    assert "32 prompts x 8 = 256 rollouts" in message
    assert "32 prompts (256 rollouts) do not split evenly over 3 ranks" in message
    assert "ranks 2 or 4" in message
    # For 3 ranks: mini-batches of 30 or 33 prompts, two of each.
    assert "60 prompts with a mini-batch of 30" in message
    assert "66 prompts with a mini-batch of 33" in message


@pytest.mark.parametrize(
    ("prompts", "mini_batch_prompts", "ranks"), [(64, 32, 2), (64, 32, 4), (60, 30, 3), (66, 33, 3)]
)
def test_every_nearest_valid_value_is_valid(prompts, mini_batch_prompts, ranks):
    check_divisible(prompts=prompts, group_size=8, mini_batch_prompts=mini_batch_prompts, ranks=ranks)


def test_the_plan_of_a_run_prints_prompts_and_rollouts_apart():
    config = load_config(
        None,
        overrides=["schedule.batch_groups=64", "schedule.group_size=8", "schedule.window_groups=64"],
    ).config
    assert "64 prompts x 8 siblings = 512 rollouts" in render(plan(config, cores=2))
