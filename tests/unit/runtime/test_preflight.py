"""What is looked at before a run starts, and what a second start need not look at again."""

import pytest

from rollmill.config.schema import RollmillConfig
from rollmill.environments.cache import TaskCache
from rollmill.errors import DataError, ModelError
from rollmill.runtime.preflight import longest_prompt, prepare_model
from rollmill.testing import ScriptedEnvironment, ToyTokenizer
from rollmill.weights import prepare

SETTINGS = RollmillConfig()


class CountingTokenizer(ToyTokenizer):
    """Counts the prompts that it renders."""

    name = "toy"
    rendered = 0

    def render(self, messages):
        self.rendered += 1
        return super().render(messages)

    def identity(self):
        return self.name


@pytest.fixture
def cache(tmp_path):
    return TaskCache(tmp_path)


def settings(*, max_model_len=256):
    return SETTINGS.model_copy(
        update={"generator": SETTINGS.generator.model_copy(update={"max_model_len": max_model_len})}
    )


def test_prompts_are_measured_once(cache):
    environment, tokenizer = ScriptedEnvironment(size=5), CountingTokenizer()
    first = longest_prompt(settings(), environment=environment, renderer=tokenizer, cache=cache)
    rendered = tokenizer.rendered
    assert rendered > 0
    assert longest_prompt(settings(), environment=environment, renderer=tokenizer, cache=cache) == first
    assert tokenizer.rendered == rendered


def test_another_tokenizer_measures_again(cache):
    environment, tokenizer = ScriptedEnvironment(size=5), CountingTokenizer()
    longest_prompt(settings(), environment=environment, renderer=tokenizer, cache=cache)
    tokenizer.name, rendered = "other", tokenizer.rendered
    longest_prompt(settings(), environment=environment, renderer=tokenizer, cache=cache)
    assert tokenizer.rendered == 2 * rendered


def test_other_prompts_are_measured_again(cache):
    tokenizer = CountingTokenizer()
    longest_prompt(settings(), environment=ScriptedEnvironment(size=5), renderer=tokenizer, cache=cache)
    rendered = tokenizer.rendered
    longest_prompt(settings(), environment=ScriptedEnvironment(size=6), renderer=tokenizer, cache=cache)
    assert tokenizer.rendered > rendered


def test_a_known_length_that_does_not_fit_any_more_names_the_task(cache):
    environment, tokenizer = ScriptedEnvironment(size=5), CountingTokenizer()
    longest = longest_prompt(settings(), environment=environment, renderer=tokenizer, cache=cache)
    short = longest + SETTINGS.sampling.max_new_tokens - 1
    with pytest.raises(DataError, match=r"the prompt of task .* has"):
        longest_prompt(settings(max_model_len=short), environment=environment, renderer=tokenizer, cache=cache)


def test_a_model_that_is_ready_needs_no_process(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLMILL_CACHE", str(tmp_path))
    monkeypatch.setattr("rollmill.runtime.preflight.subprocess", None)  # any use of it would fail
    path = prepare("tiny-llama").path
    assert prepare_model("tiny-llama") == str(path)
    assert prepare_model(str(path)) == str(path)


def test_a_directory_that_lacks_its_tokenizer_is_refused_before_anything_starts(tmp_path, monkeypatch):
    path = prepare("tiny-llama", cache_dir=tmp_path / "cache").path
    own = tmp_path / "own"
    own.mkdir()
    for name in ("config.json", "model.safetensors"):
        (own / name).write_bytes((path / name).read_bytes())
    monkeypatch.setattr("rollmill.runtime.preflight.subprocess", None)
    with pytest.raises(ModelError, match="has no tokenizer"):
        prepare_model(str(own))
