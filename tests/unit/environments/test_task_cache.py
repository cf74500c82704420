"""What a second start need not compute again, and when it must."""

import os

import pytest

from rollmill.config.schema import EnvironmentSettings, TaskMix
from rollmill.environments import cache as cache_module
from rollmill.environments.cache import FILES_KEPT, TaskCache, cached_pool
from rollmill.environments.gym_pool import Mix
from rollmill.environments.reasoning_gym import load_reasoning_gym
from rollmill.environments.split import make_problem
from rollmill.errors import DataError

PROBLEMS = [make_problem(family="sums", question=f"{i} + 1?", answer=str(i + 1), draw=i) for i in range(3)]
MIX = Mix(name="basic_arithmetic", options={"min_terms": 2}, draws=3)


@pytest.fixture
def cache(tmp_path):
    return TaskCache(tmp_path / "tasks")


@pytest.fixture
def made(monkeypatch):
    """Count how often the pool is generated; the generator itself is a process and is tested elsewhere."""
    pytest.importorskip("reasoning_gym")
    calls = []

    def generate(mixes):
        calls.append(tuple(mixes))
        return PROBLEMS

    monkeypatch.setattr(cache_module, "generate_in_child", generate)
    return calls


def files(cache):
    return sorted(cache._root.glob("*"))


def test_what_was_put_comes_back(cache):
    cache.put("a", b"one")
    cache.put("b", b"two")
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (b"one", b"two", None)


def test_a_damaged_file_is_as_good_as_none(cache):
    cache.put("a", b"one")
    (file,) = files(cache)
    file.write_bytes(file.read_bytes()[:-1] + b"X")
    assert cache.get("a") is None


def test_a_file_that_was_cut_short_is_as_good_as_none(cache):
    cache.put("a", b"one")
    (file,) = files(cache)
    file.write_bytes(file.read_bytes()[:7])
    assert cache.get("a") is None


def test_what_was_used_longest_ago_makes_room(cache):
    for number in range(FILES_KEPT):
        cache.put(str(number), b"x")
        os.utime(cache._path(str(number)), (number, number))
    assert cache.get("0") == b"x"  # used just now
    cache.put("new", b"x")
    assert len(files(cache)) == FILES_KEPT
    assert (cache.get("0"), cache.get("1"), cache.get("2")) == (b"x", None, b"x")


def test_a_folder_that_cannot_be_written_is_no_cache_and_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    cache = TaskCache(tmp_path / "file" / "tasks")
    cache.put("a", b"one")
    assert cache.get("a") is None


def test_a_pool_is_generated_once(cache, made):
    assert cached_pool([MIX], cache=cache) == PROBLEMS
    assert cached_pool([MIX], cache=cache) == PROBLEMS
    assert made == [(MIX,)]


@pytest.mark.parametrize(
    "other",
    [
        Mix(name="chain_sum", options=MIX.options, draws=3),
        Mix(name=MIX.name, options={"min_terms": 3}, draws=3),
        Mix(name=MIX.name, options=MIX.options, draws=4),
    ],
)
def test_another_family_option_or_size_is_another_pool(cache, made, other):
    cached_pool([MIX], cache=cache)
    cached_pool([other], cache=cache)
    assert made == [(MIX,), (other,)]


def test_another_version_of_the_generator_makes_another_pool(cache, made, monkeypatch):
    cached_pool([MIX], cache=cache)
    real = cache_module.importlib.metadata.distribution("reasoning-gym")

    class Newer:
        version = real.version + ".1"

        def read_text(self, name):
            return None

    monkeypatch.setattr(cache_module.importlib.metadata, "distribution", lambda name: Newer())
    cached_pool([MIX], cache=cache)
    assert len(made) == 2


def test_an_editable_generator_is_asked_every_time(cache, made, monkeypatch):
    class Editable:
        version = "1"

        def read_text(self, name):
            return '{"url": "file:///src", "dir_info": {"editable": true}}'

    monkeypatch.setattr(cache_module.importlib.metadata, "distribution", lambda name: Editable())
    cached_pool([MIX], cache=cache)
    cached_pool([MIX], cache=cache)
    assert len(made) == 2
    assert files(cache) == [] if cache._root.exists() else True


def test_a_failure_is_not_kept(cache, made, monkeypatch):
    def fail(mixes):
        raise DataError("a family hangs")

    monkeypatch.setattr(cache_module, "generate_in_child", fail)
    with pytest.raises(DataError, match="hangs"):
        cached_pool([MIX], cache=cache)
    assert not cache._root.exists()


def test_the_environment_is_the_same_from_the_cache(cache, made):
    settings = EnvironmentSettings(
        tasks=(TaskMix(name="basic_arithmetic"),), pool_size=3, heldout_size=1, heldout_fraction=0.5
    )
    first = load_reasoning_gym(settings, run_seed=1, cache=cache)
    again = load_reasoning_gym(settings, run_seed=1, cache=cache)
    assert len(made) == 1
    assert first.identity() == again.identity()
    assert first.heldout() == again.heldout()
    assert [first.task_at(i) for i in range(4)] == [again.task_at(i) for i in range(4)]
