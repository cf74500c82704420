"""The adapter over real reasoning-gym families, generated in this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.config.schema import EnvironmentSettings, TaskMix
from rollmill.environments.gym_pool import Mix, generate_pool, make_dataset, plan_mixes, pool_seed
from rollmill.environments.reasoning_gym import ReasoningGymEnvironment
from rollmill.environments.scoring import ScorerSpec, build_scorer
from rollmill.environments.split import Problem, hash_fraction, make_problem
from rollmill.errors import ConfigError, DataError

SUMS: dict[str, Any] = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+"],
    "allow_parentheses": False,
}


@pytest.fixture(scope="module", autouse=True)
def package() -> None:
    """Import the package once, outside the tests' own time."""
    pytest.importorskip("reasoning_gym")


def settings_of(*tasks: TaskMix, **values: Any) -> EnvironmentSettings:
    given = {"pool_size": 400, "heldout_size": 5, "heldout_fraction": 0.2, **values}
    return EnvironmentSettings(tasks=tasks or (TaskMix(name="basic_arithmetic", options=SUMS),), **given)


def build(
    configured: EnvironmentSettings,
    *,
    run_seed: int = 0,
    system_prompt: str | None = None,
    problems: Sequence[Problem] | None = None,
) -> ReasoningGymEnvironment:
    mixes = plan_mixes(configured.tasks, pool_size=configured.pool_size)
    return ReasoningGymEnvironment(
        generate_pool(mixes) if problems is None else problems,
        mixes=mixes,
        settings=configured,
        run_seed=run_seed,
        system_prompt=system_prompt,
    )


def training_ids(environment: ReasoningGymEnvironment) -> list[str]:
    return [environment.task_at(index).task_id for index in range(environment.training_size())]


def heldout_ids(environment: ReasoningGymEnvironment) -> list[str]:
    return [task.task_id for task in environment.heldout()]


@given(run_seed=st.integers(0, 2**31), other_seed=st.integers(0, 2**31), pool_size=st.integers(200, 500))
@settings(max_examples=10, deadline=None)
def test_one_digit_sums_are_never_on_both_sides_whatever_the_seeds(
    run_seed: int, other_seed: int, pool_size: int
) -> None:
    # 11 x 11 sums of 0..10: a naive split by index would have nearly every held-out sum in training
    one = build(settings_of(pool_size=pool_size), run_seed=run_seed)
    two = build(settings_of(pool_size=pool_size), run_seed=other_seed)
    assert not set(training_ids(one)) & set(heldout_ids(two))
    assert heldout_ids(one) == heldout_ids(two)
    questions = {task.messages[-1].content for task in one.heldout()}
    assert questions.isdisjoint(one.task_at(i).messages[-1].content for i in range(one.training_size()))


def test_with_distinct_draws_each_task_comes_once_per_epoch() -> None:
    environment = build(settings_of(draws="distinct"))
    size = environment.training_size()
    first = training_ids(environment)
    second = [environment.task_at(size + index).task_id for index in range(size)]
    assert len(set(first)) == size
    assert sorted(first) == sorted(second)
    assert first != second


def test_a_task_comes_as_often_per_epoch_as_the_generator_drew_it() -> None:
    sums = [make_problem(family="sums", question=f"{n} + 1", answer=str(n + 1)) for n in range(12)]
    pool = [*sums, sums[0], sums[0], sums[1]]
    environment = build(settings_of(heldout_size=1), problems=pool)
    heldout = {task.task_id for task in environment.heldout()}
    drawn = Counter(training_ids(environment))
    expected = Counter(problem.task_id for problem in pool)
    assert len(drawn) == 12 - len([p for p in sums if hash_fraction(p.key) < 0.2])
    assert all(drawn[task_id] == expected[task_id] for task_id in drawn)
    assert not heldout & drawn.keys()


def test_the_run_seed_moves_the_order_and_nothing_else() -> None:
    one, two = build(settings_of(), run_seed=1), build(settings_of(), run_seed=2)
    assert training_ids(one) != training_ids(two)
    assert sorted(training_ids(one)) == sorted(training_ids(two))
    assert heldout_ids(one) == heldout_ids(two)
    assert one.identity() == two.identity()


def test_a_doubled_pool_is_the_same_data_set() -> None:
    configured = settings_of(draws="distinct")
    problems = generate_pool(plan_mixes(configured.tasks, pool_size=configured.pool_size))
    assert build(configured, problems=problems * 2).identity() == build(configured, problems=problems).identity()


def test_the_identity_changes_with_options_split_and_pool() -> None:
    base = build(settings_of()).identity()
    wider = settings_of(TaskMix(name="basic_arithmetic", options={**SUMS, "max_digits": 2}))
    assert build(wider).identity() != base
    assert build(settings_of(heldout_fraction=0.3)).identity() != base
    assert build(settings_of(pool_size=300)).identity() != base


def test_a_task_holds_the_question_after_the_system_prompt_and_hides_the_answer() -> None:
    plain = build(settings_of()).task_at(0)
    assert [message.role for message in plain.messages] == ["user"]
    assert plain.messages[0].content.startswith("Calculate ")
    prompted = build(settings_of(), system_prompt="Be brief.").task_at(0)
    assert [(m.role, m.content) for m in prompted.messages[:1]] == [("system", "Be brief.")]
    left, right = plain.messages[0].content.removeprefix("Calculate ").removesuffix(".").split(" + ")
    assert plain.reference["answer"] == str(int(left) + int(right))
    assert plain.environment == "reasoning_gym/basic_arithmetic"


def test_weights_decide_the_composition_of_the_pool() -> None:
    # 3 : 1 of 400 draws; neither family repeats itself at these options, so the shares survive
    wide = {**SUMS, "min_digits": 6, "max_digits": 6}
    environment = build(
        settings_of(
            TaskMix(name="basic_arithmetic", weight=3, options=wide),
            TaskMix(name="chain_sum", options={"min_digits": 6, "max_digits": 6}),
        )
    )
    sums, chains = environment.composition()
    assert (sums.draws, chains.draws) == (300, 100)
    drawn = [environment.task_at(i).environment for i in range(environment.training_size())]
    assert drawn.count("reasoning_gym/chain_sum") == chains.training
    assert chains.training / environment.training_size() == pytest.approx(0.25, abs=0.05)


def test_shares_are_rounded_by_largest_remainder_and_sum_to_the_pool() -> None:
    # 10 draws at 1 : 1 : 1 are 3.33 each: the first gets the remainder
    mixes = plan_mixes([TaskMix(name=name) for name in "abc"], pool_size=10)
    assert [mix.draws for mix in mixes] == [4, 3, 3]


def test_a_family_whose_weight_gives_it_no_draw_is_refused_with_a_pool_that_works() -> None:
    tasks = [TaskMix(name="a", weight=999), TaskMix(name="b", weight=1)]
    with pytest.raises(ConfigError, match=r"environment\.pool_size to 1001 or more"):
        plan_mixes(tasks, pool_size=100)
    assert min(mix.draws for mix in plan_mixes(tasks, pool_size=1001)) >= 1


def test_an_unknown_family_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"no task 'basic_arithmetics' \(nearest: basic_arithmetic"):
        make_dataset(Mix(name="basic_arithmetics", options={}, draws=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_term": 2}, r"no option 'max_term' \(nearest: max_terms"),
        ({"min_terms": 3, "max_terms": 2}, "refuses its options.*max_terms must be >= min_terms"),
        ({"min_terms": "two"}, "refuses its options"),
        ({"operators": ["%"]}, "unsupported operator: %"),
        ({"size": 5}, "environment.pool_size and the weights decide it"),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_generated(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_dataset(Mix(name="basic_arithmetic", options=options, draws=10))


def test_a_scorer_that_could_never_reward_is_refused() -> None:
    with pytest.raises(DataError, match=r"can never reward 20 of 20 problems .of letter_jumble.*'dataset'"):
        build(settings_of(TaskMix(name="letter_jumble"), pool_size=20))


def test_the_pool_seed_depends_on_family_and_options_alone() -> None:
    mix = Mix(name="a", options={"x": 1, "y": 2}, draws=10)
    assert pool_seed(mix) == pool_seed(Mix(name="a", options={"y": 2, "x": 1}, draws=99))
    assert pool_seed(mix) != pool_seed(Mix(name="a", options={"x": 1, "y": 3}, draws=10))


def test_two_wordings_of_one_sum_are_one_problem() -> None:
    options = {**SUMS, "format_style": "natural", "whitespace": "random"}
    environment = build(settings_of(TaskMix(name="basic_arithmetic", options=options), pool_size=2000))
    total = sum(share.training + share.heldout for share in environment.composition())
    assert total <= 121  # 11 x 11 sums, though each comes in four wordings


def test_generation_stops_at_its_limit_and_says_where_it_was() -> None:
    with pytest.raises(DataError, match="'basic_arithmetic' was at draw 1 of 50"):
        generate_pool([Mix(name="basic_arithmetic", options={}, draws=50)], limit_s=0.0)


def test_the_familys_own_scorer_draws_the_problem_again_and_scores_the_tagged_answer() -> None:
    mixes = plan_mixes([TaskMix(name="letter_jumble")], pool_size=5)
    problem = generate_pool(mixes)[3]
    score = build_scorer(ScorerSpec(name="dataset", mixes=mixes))
    reference = {"answer": problem.answer, "mix": problem.mix, "draw": problem.draw}
    assert score(f"I think <answer>{problem.answer}</answer>", reference) == 1.0
    assert score("<answer>something else</answer>", reference) == 0.0
